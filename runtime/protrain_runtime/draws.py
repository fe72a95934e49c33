"""Random numbers that PyTorch does not own: a block that runs again draws the same ones.

A block's forward may draw from Python's `random`, from NumPy's global generator, and from generator
objects that its modules hold. What the first run drew is drawn again by the second, and afterwards
they stand as if it had not run. PyTorch's own generators are `torch.utils.checkpoint`'s affair.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

State = Any
Source = tuple[Callable[[], State], Callable[[State], None]]
"""What tells a generator's state, as something that `==` compares, and what sets it."""

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_CONTAINERS = (list, tuple, set, frozenset, Mapping)


class Draws:
    """What one forward of a module draws: `first` goes around it, `again` around the second run."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._drawn: list[tuple[Source, State]] = []  # with the states before the first run

    @contextmanager
    def first(self) -> Iterator[None]:
        """Note the states of generators that move inside; of those that stay nothing is kept."""
        before = [(source, source[0]()) for source in _sources(self._module)]
        yield
        self._drawn = [(source, state) for source, state in before if source[0]() != state]

    @contextmanager
    def again(self) -> Iterator[None]:
        """As before the first run inside, and afterwards as before this one."""
        present = [(source, source[0]()) for source, _ in self._drawn]
        _set(self._drawn)
        try:
            yield
        finally:
            _set(present)


def _set(states: Sequence[tuple[Source, State]]) -> None:
    for (_, set_state), state in states:
        set_state(state)


def _sources(module: nn.Module) -> list[Source]:
    """The generators that a module's forward may draw from, each once."""
    numpy = sys.modules.get("numpy")
    sources: list[Source] = [(random.getstate, random.setstate)]
    if numpy is not None:
        sources.append(_of_numpy(numpy.random.mtrand._rand, numpy))
    for held in generators(module):
        if isinstance(held, random.Random):
            sources.append((held.getstate, held.setstate))
        elif isinstance(held, torch.Generator):
            sources.append(_of_torch(held))
        else:
            sources.append(_of_numpy(held, numpy))
    return sources


def _of_numpy(generator: Any, numpy: Any) -> Source:
    def state() -> State:
        if isinstance(generator, numpy.random.RandomState):
            return _plain(generator.get_state(legacy=False), numpy)
        return _plain(generator.bit_generator.state, numpy)

    def set_state(state: State) -> None:
        if isinstance(generator, numpy.random.RandomState):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state

    return state, set_state


def _plain(tree: Any, numpy: Any) -> Any:
    """A state with tuples in place of arrays, which `==` does not compare as a whole."""
    if isinstance(tree, dict):
        return {key: _plain(value, numpy) for key, value in tree.items()}
    return tuple(tree.tolist()) if isinstance(tree, numpy.ndarray) else tree


def _of_torch(generator: torch.Generator) -> Source:
    """Its state as bytes in Python's memory, where no tensor stands for it."""

    def state() -> State:
        with _disable_current_modes():
            return generator.get_state().numpy().tobytes()

    def set_state(state: State) -> None:
        with _disable_current_modes():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return state, set_state


def generators(module: nn.Module) -> Iterator[object]:
    """The generator objects in attributes of a module and of those inside, each once."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    seen: set[int] = set()
    stack: list[object] = [
        value
        for inner in module.modules()
        for name, value in inner.__dict__.items()
        if name not in _OF_EVERY_MODULE
    ]
    while stack:
        held = stack.pop()
        if isinstance(held, kinds):
            if id(held) not in seen:
                seen.add(id(held))
                yield held
        elif isinstance(held, _CONTAINERS) and id(held) not in seen:
            seen.add(id(held))
            stack.extend(held.values() if isinstance(held, Mapping) else held)
