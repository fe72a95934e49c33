"""Recomputation: a block's forward runs a second time, in backward, and computes the same.

PyTorch's own random states and autocast are restored by `torch.utils.checkpoint`. What it does not
know of is done here:

- A block's forward may draw from Python's `random`, from NumPy's global generator, and from
  generator objects that its modules hold (`Draws`): the second run draws the same numbers, and the
  generators stand afterwards as if it had not run.
- A norm over batches writes its running mean and variance in forward, and computes nothing from
  them while it trains. So its second run may write, and what it wrote is taken back (`unchanged`).
  Of other buffers that a forward writes nothing is known: blocks with such are not recomputed
  (`written_buffers`).
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from protrain_runtime.activations.forms import Code
from protrain_runtime.activations.trees import taken_apart

State = Any
Source = tuple[Callable[[], State], Callable[[State], None]]
"""A generator's state, as something that `==` compares, and what sets it."""

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_CONTAINERS = (list, tuple, set, frozenset, Mapping)


def full(forward: Code, module: nn.Module) -> Code:
    """The executor of the form `full`: the inputs are kept, the forward runs again as a whole."""
    return recomputed(forward, module, partial(checkpoint, use_reentrant=False))


def recomputed(forward: Code, module: nn.Module, run_twice: Code) -> Code:
    """`forward`, the code of `module`, run by `run_twice`, once now and once more in backward.

    Random states and autocast are those of the first run (torch.utils.checkpoint and `Draws`), and
    so are the arguments: what the first run wrote into containers or objects among them is not seen
    by the second. All tensors in arguments are handed over by themselves, so that every input is
    seen by the saved-tensor hooks around it. Running statistics are written in the first run alone.
    """
    statistics = with_running_statistics(module)

    def run(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tensors, rebuild = taken_apart((args, kwargs))
        first = [(args, kwargs)]
        draws = Draws(module)

        def call(*inputs: torch.Tensor) -> object:
            if first:
                own_args, own_kwargs = first.pop()
                with draws.first():
                    return forward(*own_args, **own_kwargs)
            own_args, own_kwargs = rebuild(inputs)
            with ExitStack() as stack:
                stack.enter_context(draws.again())
                if statistics:
                    stack.enter_context(unchanged(statistics))
                return forward(*own_args, **own_kwargs)

        counting = [tensor for tensor in tensors if not tensor.is_inference()]
        versions = [tensor._version for tensor in counting]
        outputs = run_twice(call, *tensors)
        if versions != [tensor._version for tensor in counting]:
            raise RuntimeError(
                "a block that the plan recomputes writes to its inputs in place: from these it"
                " cannot run again. Profile the model as it runs now"
            )
        return outputs

    return run


class Draws:
    """Random numbers that one forward draws: `first` goes around it, `again` around the next."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._drawn: list[tuple[Source, State]] = []  # with the states before the first run

    @contextmanager
    def first(self) -> Iterator[None]:
        """Note the states of generators that move inside; of those that stay nothing is kept."""
        numpy = sys.modules.get("numpy")
        sources: list[Source] = [(random.getstate, random.setstate)]
        if numpy is not None:
            sources.append(_of_numpy(numpy.random.mtrand._rand, numpy))
        for held in generators(self._module):
            if isinstance(held, random.Random):
                sources.append((held.getstate, held.setstate))
            elif isinstance(held, torch.Generator):
                sources.append(_of_torch(held))
            else:
                sources.append(_of_numpy(held, numpy))
        before = [(source, source[0]()) for source in sources]
        yield
        self._drawn = [(source, state) for source, state in before if source[0]() != state]

    @property
    def any(self) -> bool:
        """Whether the first run drew something."""
        return bool(self._drawn)

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


def with_running_statistics(module: nn.Module) -> tuple[nn.Module, ...]:
    """The norms in a module, itself included, that keep statistics of the batches they saw."""
    return tuple(
        norm
        for norm in module.modules()
        if isinstance(norm, _NormBase) and norm.track_running_stats
    )


@contextmanager
def unchanged(norms: Sequence[nn.Module]) -> Iterator[None]:
    """The norms' buffers have the same values afterwards, and the same versions for autograd."""
    buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
    with torch.no_grad():
        values = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                with _unsafe_preserve_version_counter(buffer):
                    buffer.copy_(value)


Written = dict[str, tuple[Tensor, int]]


def other_buffers(module: nn.Module) -> Written:
    """The buffers in a module by name, each with its version, but for running statistics."""
    known = {buffer for norm in with_running_statistics(module) for buffer in norm.buffers()}
    return {
        name: (buffer, buffer._version)
        for name, buffer in module.named_buffers()
        if buffer not in known
    }


def written_buffers(before: Written, after: Written) -> tuple[str, ...]:
    """The names of those that were written to, replaced, made or dropped in between."""
    return tuple(
        name
        for name in {**before, **after}
        if name not in before
        or name not in after
        or before[name][0] is not after[name][0]
        or before[name][1] != after[name][1]
    )
