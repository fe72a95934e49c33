"""Recomputation: a block's forward runs a second time, in backward, and computes the same.

PyTorch's own random states and autocast are restored by `run_twice`. What else a forward draws from
and writes to is seen to here:

- A block's forward may draw from Python's `random`, from NumPy's global generator, and from
  generator objects that its modules hold (`Draws`): the second run draws the same numbers, and the
  generators stand afterwards as if it had not run.
- A norm over batches writes its running mean and variance in forward, and computes nothing from
  them while it trains. So its second run may write, and what it wrote is taken back (`unchanged`).
  Of other buffers that a forward writes nothing is known: blocks with such are not recomputed
  (`written_buffers`).
"""

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from protrain_runtime.activations.compiled import CompiledBlock
from protrain_runtime.activations.forms import Code
from protrain_runtime.activations.trees import taken_apart
from protrain_runtime.activations.twice import run_twice

State = Any
Source = tuple[Callable[[], State], Callable[[State], None]]
"""A generator's state, comparable by `==`, and its setter."""

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_CONTAINERS = (list, tuple, set, frozenset)


def full(forward: Code, module: nn.Module) -> Code:
    """The executor of the form `full`: keeps the inputs and reruns the whole forward."""
    return recomputed(forward, module, run_twice)


def fused(forward: Code, module: nn.Module) -> Code:
    """The executor of the form `fused` of a compiled block: its recomputation is compiled with it.

    In `full` a compiled block's code runs twice, unchanged: training has the compiled model's bits.
    Here `torch.utils.checkpoint` surrounds the block's plain code, and both are compiled: the
    backward graph recomputes only what it needs (not the last product of an MLP) and fuses it with
    the rest. Its kernels, and perhaps their rounding, differ from the compiled block's.

    Falls back to `full` for blocks compiled by the user, uncompiled blocks, and norms with batch
    statistics, which a second run must not write.
    """
    if not isinstance(forward, CompiledBlock) or with_running_statistics(module):
        return full(forward, module)
    twice = CompiledBlock(_checkpointed, forward.name, backend=forward.backend)

    def run(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return twice(module, *args, **kwargs)

    return run


def _checkpointed(block: nn.Module, *args: object, **kwargs: object) -> object:
    return checkpoint(partial(block._call_impl, **kwargs), *args, use_reentrant=False)


def recomputed(forward: Code, module: nn.Module, twice: Code) -> Code:
    """`forward`, the code of `module`, run by `twice`: now and again in backward.

    The second run has the first run's random states, autocast and modes (`run_twice`, `Draws`) and
    arguments: it does not see writes to containers or objects among them. All tensors in arguments
    are passed separately, so that the saved-tensor hooks around it see every input. Running
    statistics are written in the first run only.
    """
    statistics, modules = with_running_statistics(module), [*module.modules()]

    def run(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tensors, rebuild = taken_apart((args, kwargs))
        first = [(args, kwargs)]
        draws, modes = Draws(modules), [each.training for each in modules]

        def call(*inputs: torch.Tensor) -> object:
            if first:
                own_args, own_kwargs = first.pop()
                with draws.first():
                    return forward(*own_args, **own_kwargs)
            own_args, own_kwargs = rebuild(inputs)
            with ExitStack() as stack:
                stack.enter_context(draws.again())
                if modes != (now := [each.training for each in modules]):
                    _set_modes(modules, modes)
                    stack.callback(_set_modes, modules, now)
                if statistics:
                    stack.enter_context(unchanged(statistics))
                return forward(*own_args, **own_kwargs)

        counting = [tensor for tensor in tensors if not tensor.is_inference()]
        versions = [tensor._version for tensor in counting]
        outputs = twice(call, *tensors)
        if versions != [tensor._version for tensor in counting]:
            raise RuntimeError(
                "a block that the plan recomputes writes to its inputs in place: from these it"
                " cannot run again. Profile the model as it runs now"
            )
        return outputs

    return run


@dataclass(eq=False)
class Draws:
    """Random numbers that one forward draws: `first` goes around it, `again` around the next."""

    modules: Sequence[nn.Module]  # of a block, itself included
    # Sources with their states before the first run.
    _drawn: list[tuple[Source, State]] = field(
        default_factory=list[tuple[Source, State]], init=False
    )

    @contextmanager
    def first(self) -> Iterator[None]:
        """Record the states of generators that advance inside."""
        numpy = sys.modules.get("numpy")
        sources: list[Source] = [(random.getstate, random.setstate)]
        if numpy is not None:
            sources.append(_of_numpy(numpy.random.mtrand._rand, numpy))
        for held in generators(self.modules):
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
        """Whether the first run drew random numbers."""
        return bool(self._drawn)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the states before the first run inside, and the present ones afterwards."""
        present = [(source, source[0]()) for source, _ in self._drawn]
        for (_, set_state), state in self._drawn:
            set_state(state)
        try:
            yield
        finally:
            for (_, set_state), state in present:
                set_state(state)


def _set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    for module, training in zip(modules, modes, strict=True):
        module.training = training


def _of_numpy(generator: Any, numpy: Any) -> Source:
    """Its state as bytes: `==` does not compare the arrays in it as a whole."""
    legacy = isinstance(generator, numpy.random.RandomState)

    def state() -> State:
        found = generator.get_state(legacy=False) if legacy else generator.bit_generator.state
        return pickle.dumps(found)

    def set_state(state: State) -> None:
        if legacy:
            generator.set_state(pickle.loads(state))  # noqa: S301 (its own)
        else:
            generator.bit_generator.state = pickle.loads(state)  # noqa: S301

    return state, set_state


def _of_torch(generator: torch.Generator) -> Source:
    """Its state as Python bytes, without tensors."""

    def state() -> State:
        with _disable_current_modes():
            return generator.get_state().numpy().tobytes()

    def set_state(state: State) -> None:
        with _disable_current_modes():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return state, set_state


def generators(modules: Iterable[nn.Module]) -> Iterator[object]:
    """The generator objects in attributes of modules, each once."""
    seen: set[int] = set()
    stack: list[Any] = []
    for inner in modules:
        held = inner.__dict__
        if len(held) > len(_OF_EVERY_MODULE):
            stack += [held[name] for name in held.keys() - _OF_EVERY_MODULE]
    while stack:
        one = stack.pop()
        what = _kind(type(one))  # type: ignore[arg-type] # a class has a hash
        if what and id(one) not in seen:
            seen.add(id(one))
            if what == "generator":
                yield one
            else:
                stack.extend(one.values() if what == "mapping" else one)


@cache
def _kind(of: type) -> str:
    """Whether objects of a class are generators, or may hold some; empty: neither."""
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    if (numpy := sys.modules.get("numpy")) is not None:  # no class derives from its types before
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    if issubclass(of, kinds):
        return "generator"
    return "mapping" * issubclass(of, Mapping) or "container" * issubclass(of, _CONTAINERS)


def with_running_statistics(module: nn.Module) -> tuple[nn.Module, ...]:
    """Norms in a module, itself included, that keep batch statistics."""
    return tuple(
        norm
        for norm in module.modules()
        if isinstance(norm, _NormBase) and norm.track_running_stats
    )


@contextmanager
def unchanged(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the norms' buffers afterwards, values and autograd versions."""
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


_SET: Callable[[Tensor, Tensor], None] = parametrize._maybe_set


def let_parametrize_rerun() -> None:
    """Stop `torch.nn.utils.parametrize` from setting a parameter to itself, from now on.

    It does so if a parametrization has no right inverse, and PyTorch counts that as a write. Peft's
    adapters on parameters of experts register one in each forward.
    """
    parametrize._maybe_set = _set_to_another


def _set_to_another(dest: Tensor, src: Tensor) -> None:
    if dest is not src:
        _SET(dest, src)


Written = dict[str, tuple[Tensor, int]]


def other_buffers(module: nn.Module) -> Written:
    """A module's buffers by name, with versions, except running statistics."""
    known = {buffer for norm in with_running_statistics(module) for buffer in norm.buffers()}
    return {
        name: (buffer, buffer._version)
        for name, buffer in module.named_buffers()
        if buffer not in known
    }


def written_buffers(before: Written, after: Written) -> tuple[str, ...]:
    """Names of buffers that were written, replaced, made or dropped in between."""
    return tuple(
        name
        for name in {**before, **after}
        if name not in before
        or name not in after
        or before[name][0] is not after[name][0]
        or before[name][1] != after[name][1]
    )
