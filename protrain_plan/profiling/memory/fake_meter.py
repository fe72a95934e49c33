"""`FakeMeter`: live bytes of fake tensors, as `MemoryMeter` counts real ones.

Operators' scratch memory is measured if the processor is present: each is called once, for real
(`measured_bytes`). Kernels choose scratch memory by the processor, its instructions and the number
of threads: on the same machine nothing need be known of these. Otherwise the table of
`hardware.operators` bounds it.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from protrain_plan.hardware.operator_log import OperatorLog
from protrain_plan.hardware.operators import INDEX_PUTS, Allocator
from protrain_plan.profiling.memory.lasting import identities
from protrain_plan.profiling.structure.dispatching import NothingCompiled
from protrain_plan.profiling.structure.faking import asked
from protrain_runtime.activations.trees import tensors_in
from protrain_runtime.contract.program.program import in_blocks
from protrain_runtime.devices.fake import FakeMode
from protrain_runtime.devices.memory_meter import MemoryMeter, Segment, strided_parts

MOST_BYTES = 2**26
"""Bytes of an operator's operands and results at most. Calls of larger ones would take seconds, and
memory that an estimate does without; their scratch memory is bounded."""

aten = torch.ops.aten

_BY_VALUES = (aten._grouped_mm.default,)
_BY_MASKS = (*INDEX_PUTS, aten.masked_scatter_backward.default)
"""Their scratch memory depends on their operands' values, or on masks. Others of that kind give
other result shapes for zero operands, and are recognized by that."""


class _Geometry(NamedTuple):
    """A tensor's properties, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "_Geometry":
        return _Geometry(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def num_elements(self) -> int:
        """The span from its first to its last element: expanded tensors have few."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)

    def zeros(self) -> Tensor:
        """A tensor like it; zeros are valid indices."""
        flat = torch.zeros(self.num_elements, dtype=self.dtype, device="cpu")
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """An operator with everything that its scratch memory depends on: equal calls take the same."""

    func: Any
    arguments: tuple[tuple[type, object], ...]  # 1, 1.0 and True are equal, but differ
    tree: TreeSpec
    results: tuple[tuple[int, ...], ...]  # shapes
    num_threads: int

    @staticmethod
    def of(
        func: Any, args: object, kwargs: object, results: Sequence[Tensor]
    ) -> "MeasuredCall | None":
        """The call; None if not repeatable (see `MOST_BYTES`, `_BY_VALUES`)."""
        leaves, tree = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        everything = [*given, *results]
        plain = all(t.device.type == "cpu" and t.layout == torch.strided for t in everything)
        masked = func in _BY_MASKS and any(t.dtype == torch.bool for t in given)
        if func in _BY_VALUES or masked or not given or not plain:
            return None
        if sum(_Geometry.of(t).num_elements * t.itemsize for t in everything) > MOST_BYTES:
            return None
        known = [_Geometry.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        arguments = tuple((type(leaf), leaf) for leaf in known)
        shapes = tuple(tuple(tensor.shape) for tensor in results)
        return MeasuredCall(func, arguments, tree, shapes, torch.get_num_threads())


_MEASURED: dict[MeasuredCall, int | None] = {}


def measured_bytes(calls: Iterable[MeasuredCall]) -> Mapping[MeasuredCall, int | None]:
    """The most bytes that each takes beyond its operands and results.

    None where it cannot be called with zeros, or gives results of other shapes then. Each is called
    twice in the process's life: what is made in the first one stays.
    """
    new = [call for call in dict.fromkeys(calls) if call not in _MEASURED]
    if not new:
        return _MEASURED
    # One run of the profiler for all: it takes 20 ms to start.
    shapes: list[tuple[tuple[int, ...], ...]] = []
    generator = torch.default_generator  # itself: `faking` replaces its query functions
    with _disable_current_modes(), torch.no_grad(), ExitStack() as stack, MemoryMeter() as meter:
        stack.callback(generator.set_state, generator.get_state())
        for call in new:
            given = (
                one.zeros() if isinstance(one, _Geometry) else one for _, one in call.arguments
            )
            args, kwargs = tree_unflatten(given, call.tree)
            result: object = None
            with suppress(Exception):  # any operator may refuse its operands
                call.func(*args, **kwargs)  # first-call allocations stay
            meter.mark("call")
            with suppress(Exception):
                result = call.func(*args, **kwargs)
            meter.mark("rest")
            shapes.append(tuple(tuple(tensor.shape) for tensor in tensors_in(result)))
            del args, kwargs, result
    taken = [each for each in meter.segments if each.label == "call"]
    for call, each, found in zip(new, taken, shapes, strict=True):
        _MEASURED[call] = each.peak_bytes - each.end_bytes if found == call.results else None
    return _MEASURED


_WRITES = (
    aten.index_add.default,
    aten.index_put.default,
    aten.masked_scatter.default,
    aten.put.default,
    aten.scatter.src,
    aten.scatter_add.default,
)
_OF_PARTS = frozenset(
    f"{name}Backward"
    for name in (
        *("Index", "IndexSelect", "Gather", "MaskedSelect", "Take"),
        *("Max", "Min", "Kthvalue", "Median", "Mode", "Sort", "Topk", "Cummax", "Cummin"),
    )
)
"""Nodes of autograd whose gradient is zero but for a part, and the operators that write that."""

_SAVE_NUMBERS = (aten.mul.Tensor, aten.div.Tensor)
NUMBER_BYTES = 8
"""Bytes of a Python number as a tensor: int64 or float64."""


class FakeMeter(NothingCompiled, TorchDispatchMode):
    """Live bytes of fake tensors at marks, and the peak between two marks.

    Enter it inside the `FakeMode`. Every operator's new storages count until released, as a
    finalizer on the storage sees; earlier storages count as nothing. Scratch memory of operators is
    measured when the meter ends, if the allocator's device is here, otherwise bounded. `log`, if
    given, receives the operators between marks: the step runs once for both. See [Note: written in
    place] for differences of autograd on fake tensors.
    """

    def __init__(self, allocator: Allocator, log: OperatorLog | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocator = allocator
        self._log = log
        self._sizes: dict[int, int] = {}  # storage -> bytes
        self._numbers: dict[int, int] = {}  # node of autograd, by sequence number -> bytes
        self._node = -1  # its backward runs
        self._product: tuple[int, weakref.ref[torch.Tensor]] | None = None  # the last, with number
        self._live = self._start = self._peak = 0
        self._label: str | None = None
        # Operators since the mark that remain to be measured: the most live bytes during each, and
        # its own bound.
        self._calls: dict[MeasuredCall, tuple[int, int]] = {}
        self._ended_segments: list[tuple[Segment, Mapping[MeasuredCall, tuple[int, int]]]] = []
        self._segments: tuple[Segment, ...] | None = None

    def __enter__(self) -> Self:
        _sole_owner()  # found before anything is counted
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._close()
        taken = measured_bytes(call for _, calls in self._ended_segments for call in calls)
        segments: list[Segment] = []
        for segment, calls in self._ended_segments:
            peak = segment.peak_bytes
            for call, (live, bound) in calls.items():
                scratch = taken[call]
                peak = max(peak, live + (bound if scratch is None else scratch))
            segments.append(replace(segment, peak_bytes=peak))
        self._segments = tuple(segments)

    def mark(self, label: str) -> None:
        """End the segment that runs, if any, and start the one called `label`."""
        self._close()
        self._label = label
        self._start = self._peak = self._live
        if self._log is not None:
            self._log.mark()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, in order of marks; RuntimeError inside the with block."""
        if self._segments is None:
            raise RuntimeError("FakeMeter: segments are known after the with block has ended")
        return self._segments

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        numbered = self._keep_number(func, args) if self._allocator.python_scalars else None
        if func.namespace == "prim":
            return asked(func, args, kwargs)
        # [Note: written in place] If a tensor is used twice, autograd adds the second gradient into
        # the first one's memory if nothing else holds that; if a part of a tensor was used, it
        # writes the part's gradient into new zeros. Under a dispatch mode it does neither: it makes
        # a new tensor. Here the result takes over the first operand's memory.
        in_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        in_place = in_backward and _is_written_in_place(func, args)
        result = func(*args, **kwargs)
        if numbered is not None:
            self._product = numbered, weakref.ref(result)
        if self._log is not None:
            self._log.note(func, args, kwargs, result)
        if func.is_view:
            return result
        before = self._live
        self._count(args, kwargs, result)
        if in_place:
            (taken,) = identities(args[:1])
            self._live -= self._sizes[taken]
            self._sizes[taken] = 0
        # Bytes of resolved lazily conjugated or negated operands.
        extra = 0
        for tensor in tensors_in((args, kwargs)):
            lazy = (("Conjugate", tensor.is_conj()), ("Negative", tensor.is_neg()))
            if any(there and _resolves(func, key) for key, there in lazy):
                extra += tensor.numel() * tensor.itemsize
        self._live += extra
        self._peak = max(self._peak, before, self._live)
        most = self._allocator.workspace(func, args, kwargs, result)
        results = tensors_in(result)
        call = MeasuredCall.of(func, args, kwargs, results) if self._allocator.is_here else None
        if call is None:
            self._peak = max(self._peak, self._live + most)
        else:
            highest, _ = self._calls.get(call, (0, 0))
            self._calls[call] = max(highest, self._live), most
        self._live -= extra
        return result

    def _keep_number(self, func: Any, args: tuple[Any, ...]) -> int | None:
        """A product with a Python number: autograd keeps the number, as a tensor of 8 bytes.

        It lives as long as the product's node (returned if made in forward), and goes with a
        dropped graph. Numbers made in backward are a recomputed forward's, and go with the
        requesting node.
        """
        # Free the last product's number with its node, which exists when the product is back at its
        # caller and the next operator is called.
        owner, found = self._product or (0, lambda: None)
        product = found()
        if product is not None and product.grad_fn is not None:
            self._product, token = None, _Token()
            metadata: Any = product.grad_fn.metadata  # mistyped as a method
            metadata[_Token] = token
            weakref.finalize(token, self._drop, self._numbers, owner).atexit = False
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            node: Any = torch._C._current_autograd_node()
            running = -1 if node is None else int(node._sequence_nr())
            if running != self._node:
                self._drop(self._numbers, self._node)
                self._node = running
        if not (
            func in _SAVE_NUMBERS
            and isinstance(args[1], int | float)
            and args[0].requires_grad
            and torch.is_grad_enabled()
        ):
            return None
        made = int(torch._C._autograd._get_sequence_nr()) - 1
        owner = self._node if in_backward else made
        self._numbers[owner] = self._numbers.get(owner, 0) + NUMBER_BYTES
        self._live += NUMBER_BYTES
        return None if in_backward else made

    def _drop(self, sizes: dict[int, int], key: int) -> None:
        self._live -= sizes.pop(key, 0)

    def _count(self, args: object, kwargs: object, result: object) -> None:
        outputs = tensors_in(result)
        if not outputs:
            return
        given = identities(tensors_in((args, kwargs)))
        for tensor in strided_parts(outputs):
            storage = tensor.untyped_storage()
            identity = storage._cdata
            if identity not in given and identity not in self._sizes:
                size = in_blocks(storage.nbytes(), self._allocator.block_bytes)
                self._sizes[identity] = size
                self._live += size
                weakref.finalize(storage, self._drop, self._sizes, identity).atexit = False

    def _close(self) -> None:
        if self._label is not None:
            segment = Segment(
                label=self._label,
                start_bytes=self._start,
                peak_bytes=self._peak,
                end_bytes=self._live,
            )
            self._ended_segments.append((segment, self._calls))
            self._label, self._calls = None, {}


class _Token:
    """Lives as long as its holder."""


@cache
def _resolves(func: Any, key: str) -> bool:
    """Whether an operator's operands are resolved first: if it has no kernel of its own."""
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _owners(tensor: torch.Tensor) -> tuple[int, int]:
    """The holders of the tensor and its storage, inside a dispatch mode."""
    counted: Any = tensor  # typed without counts
    storage = tensor.untyped_storage()
    return counted._use_count(), torch._C._storage_Use_Count(storage._cdata)


def _is_written_in_place(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a backward's operator writes into its first operand, with real tensors."""
    if func in _WRITES:
        node: Any = torch._C._current_autograd_node()
        return node is not None and node.name().rstrip("0123456789") in _OF_PARTS
    return (
        func is aten.add.Tensor
        and isinstance(args[1], Tensor)
        and aten.is_non_overlapping_and_dense.default(args[0])
        and _owners(args[0]) == _sole_owner()
    )


@cache
def _sole_owner() -> tuple[int, int]:
    """`_owners` of a gradient that only autograd's buffer holds, by trial."""
    seen: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> object:
            if func is aten.add.Tensor:
                seen.append(_owners(args[0]))
            return func(*args, **(kwargs or {}))

    with FakeMode(), torch.enable_grad():
        used_twice = torch.ones(2, requires_grad=True).clone()
        product = used_twice.exp() * used_twice.sin()
        with Look():  # type: ignore[no-untyped-call]
            product.sum().backward()
    (owners,) = seen
    return owners
