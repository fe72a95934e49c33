"""What operators hold in memory only while they run, measured: each is called once, for real.

Kernels choose their scratch memory by the processor, its instructions and the number of threads.
Where these are the machine's own, nothing need be known of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from protrain_runtime.measure import MemoryMeter
from protrain_runtime.trees import tensors_in

MOST_BYTES = 2**26
"""Of an operator's operands and results together. Calls of larger ones would take seconds, and
memory that an estimate does without; their scratch memory is bounded."""

_BY_VALUES = (torch.ops.aten._grouped_mm.default,)
"""Take as much as their operands' values say. Others of that kind give results of other shapes for
operands of zeros, and are told by that."""


class _Geometry(NamedTuple):
    """What a tensor is, apart from its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "_Geometry":
        return _Geometry(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def num_elements(self) -> int:
        """From the first that the tensor has to the last: expanded ones have few."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def zeros(self) -> Tensor:
        """A tensor that is like it; zeros are indices of whatever there is."""
        flat = torch.zeros(self.num_elements, dtype=self.dtype, device="cpu")
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Call:
    """An operator with all that its scratch memory may depend on: equal calls take the same."""

    func: Any
    arguments: tuple[tuple[type, object], ...]  # 1, 1.0 and True are equal, and not the same
    tree: TreeSpec
    results: tuple[tuple[int, ...], ...]  # shapes
    num_threads: int

    @staticmethod
    def of(func: Any, args: object, kwargs: object, results: Sequence[Tensor]) -> "Call | None":
        """The call; None where it cannot be repeated (see `MOST_BYTES`, `_BY_VALUES`)."""
        leaves, tree = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        everything = [*given, *results]
        if func in _BY_VALUES or not given or any(not _is_plain(each) for each in everything):
            return None
        if sum(_Geometry.of(tensor).num_bytes for tensor in everything) > MOST_BYTES:
            return None
        known = [_Geometry.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        arguments = tuple((type(leaf), leaf) for leaf in known)
        shapes = tuple(tuple(tensor.shape) for tensor in results)
        return Call(func, arguments, tree, shapes, torch.get_num_threads())

    def repeated(self) -> Callable[[], object]:
        """The call of real tensors; what it gives, or None where it fails."""
        leaves = [
            leaf.zeros() if isinstance(leaf, _Geometry) else leaf for _, leaf in self.arguments
        ]
        args, kwargs = tree_unflatten(leaves, self.tree)

        def repeat() -> object:
            try:
                result: object = self.func(*args, **kwargs)
            except Exception:  # noqa: BLE001 (any operator, and operands that it may refuse)
                return None
            return result

        return repeat


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


_MEASURED: dict[Call, int | None] = {}


def measured_bytes(calls: Iterable[Call]) -> Mapping[Call, int | None]:
    """What each takes beyond its operands and results at its highest point.

    None where it cannot be called with zeros, or gives results of other shapes then. Each is called
    twice in the process's life: what is made in the first one stays.
    """
    new = [call for call in dict.fromkeys(calls) if call not in _MEASURED]
    if new:
        _MEASURED.update(_measure(new))
    return _MEASURED


def _measure(calls: Sequence[Call]) -> dict[Call, int | None]:
    """In one run of the profiler, which takes 20 ms to start."""
    shapes: list[tuple[tuple[int, ...], ...]] = []
    with _disable_current_modes(), torch.no_grad(), _random_state_kept(), MemoryMeter() as meter:
        for call in calls:
            repeat = call.repeated()
            repeat()
            meter.mark("call")
            result = repeat()
            meter.mark("rest")
            shapes.append(tuple(tuple(tensor.shape) for tensor in tensors_in(result)))
            del repeat, result
    taken = [each for each in meter.segments if each.label == "call"]
    return {
        call: each.peak_bytes - each.end_bytes if found == call.results else None
        for call, each, found in zip(calls, taken, shapes, strict=True)
    }


@contextmanager
def _random_state_kept() -> Iterator[None]:
    generator = torch.default_generator
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
