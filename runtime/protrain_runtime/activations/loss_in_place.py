"""The form `in place` of the last part: the loss takes a few rows of logits at a time.

Between a head's logits and their gradient plain PyTorch makes, for a cross entropy: the logits in
float32, their log-softmax, which stays for backward, its gradient and that of the float32 logits.
Each is as large as the logits, or twice as large. Here the matrix products stay whole (the bits of
a product depend on its shape), and everything between them goes by rows, as PyTorch's own kernels
do: the same operators run on tiles of rows and give the same bits. The logits are kept, the
log-softmax is computed again in backward, and a tile's gradient is written over its logits.

Two functions are seen while the part's forward runs (`loss_in_place`):

- a cast of 16-bit values to float32 gives a `Widened`, which holds no values;
- `cross_entropy` on that, or on a plain tensor, runs in tiles (`_CrossEntropy`).

Everything else that is asked of a `Widened` gets the float32 values, and computes what it always
did: a loss with class weights, say. What in-place writing must not break is this:

- [Note: who holds the logits] Gradients are written over the logits if nobody else holds their
  memory: neither the training loop, through the model's output, nor another operator that saved
  them. Else the gradient gets memory of its own. So whoever has the logits reads logits, before and
  after backward, and no other operator of the graph loses what it saved.
- [Note: one use] Where float32 values have two uses in the graph, plain PyTorch adds the two
  gradients in float32 and rounds once. A use besides the loss is refused (`UsedTwiceError`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, log_softmax, nll_loss
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from protrain_runtime.activations.late_values import (
    GEOMETRY,
    Place,
    goes_nowhere,
    is_cast,
    is_told,
    is_view,
    itself,
)
from protrain_runtime.devices.lanes import num_holders

TILE_ELEMENTS = 2**24
"""Of a tile at most: 64 MiB of float32, which keeps any device busy."""
TILES = 8
"""At least, where there are rows enough: what a tile takes is then small beside the logits."""
TILE_ROWS = 16
"""Tiles are whole multiples of so many rows: every row then lies in its tile as it would in the
whole, counted from a multiple of 16 bytes, by which CUDA's kernels order a row's sum."""

_NARROW = (torch.bfloat16, torch.float16)
REDUCTIONS = {"mean": 1, "sum": 2}  # as `at::Reduction` counts
_IGNORED = -100  # in place of whatever number the model ignores


class UsedTwiceError(RuntimeError):
    """Logits have a second use in the graph, which would round their gradient otherwise."""


def loss_in_place() -> AbstractContextManager[object]:
    """The executor: stands around the forward of the last part."""
    return _Watching()


def tile_rows(num_rows: int, num_classes: int) -> int:
    """Rows of a tile, of so many in all: the last tile may have fewer."""
    most = min(TILE_ELEMENTS // num_classes, -(-num_rows // TILES))
    return max(TILE_ROWS, most // TILE_ROWS * TILE_ROWS)


class _Watching(TorchFunctionMode):
    """Sees the casts and the cross entropies of the part, and lets them run in place."""

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)  # compiled code has the bits that the compiler gives it
        if func is cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if is_cast(func, args, kwargs) and _can_wait(args[0]):
            return Widened(_Cast(args[0]), args[0], itself)
        return func(*args, **kwargs)


# --- the cast -------------------------------------------------------------------------------------


def _can_wait(tensor: Tensor) -> bool:
    """Whether a tensor's float32 values may be computed later, or never."""
    return (
        not isinstance(tensor, Widened)
        and tensor.dtype in _NARROW
        and torch.is_grad_enabled()
        and tensor.requires_grad
        and not tensor.is_leaf
        and tensor.layout == torch.strided
        and tensor.dim() > 1
        and tensor.is_contiguous()
    )


class _Cast:
    """A cast of a 16-bit tensor to float32, before and after its values are asked for."""

    def __init__(self, given: Tensor) -> None:
        self._given: Tensor | None = given
        self._version = given._version
        self.wide: Tensor | None = None  # the float32 values, in the graph
        self._taken = False  # by a loss in place, which needs none

    def used(self, use: Callable[[Tensor], Any]) -> Any:
        """What `use` makes of the float32 values.

        What only looks at them, as a count of right answers does, has some for itself. Those of
        which something in the graph is made, or that are written to, stay: they are one tensor.
        """
        if self.wide is not None:
            return use(self.wide)
        with torch.enable_grad():
            wide = self.unwritten().to(torch.float32)
        result = use(wide)
        if is_told(result) and not wide._version:
            return result
        if self._taken:
            raise UsedTwiceError(
                "the forward uses the logits once more besides the loss, which the plan computes in"
                " place: profile the model as it runs now"
            )
        self.wide, self._given = wide, None
        return result

    def take(self) -> None:
        """Let a loss in place have the 16-bit values."""
        self.unwritten()
        if self._taken:
            self.used(torch.clone)  # refuses
        self._taken = True

    def unwritten(self) -> Tensor:
        """The 16-bit values; RuntimeError where they are not those that were cast."""
        assert self._given is not None
        if self._given._version != self._version:
            raise RuntimeError(
                "a tensor was written in place after it was cast to float32, and the plan casts it"
                " when it is asked for values: profile the model as it runs now"
            )
        return self._given


class Widened(torch.Tensor):
    """`tensor.float()`, computed when somebody asks for its values.

    A view or a slice of one is one as well, since the cast of a slice is the slice of the cast:
    `uncast` is the slice of the 16-bit values, and `place` makes it of the float32 values of all.
    """

    cast: _Cast
    uncast: Tensor
    place: Place

    @staticmethod
    def __new__(cls, cast: _Cast, uncast: Tensor, place: Place) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, uncast.shape, uncast.stride(), dtype=torch.float32, device=uncast.device
        )
        made.cast, made.uncast, made.place = cast, uncast, place
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in GEOMETRY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, Widened) and first.cast.wide is None and func in _ANSWERS:
            return _ANSWERS[func](first.uncast)
        if isinstance(first, Widened) and torch.is_grad_enabled():
            if is_cast(func, args, kwargs) or goes_nowhere(func, args, kwargs):
                return first
            if first.cast.wide is None and is_view(func, args, kwargs):
                return first._viewed(func, args[1:], kwargs)
        return _with_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise RuntimeError(
            f"{func} was called on values that the plan casts when they are asked for, by code that"
            " asks PyTorch for none: profile the model as it runs now"
        )

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Widened":
        before = self.place

        def place(whole: Tensor) -> Tensor:
            found: Tensor = func(before(whole), *args, **kwargs)
            return found

        return Widened(self.cast, func(self.uncast, *args, **kwargs), place)


def _with_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A function's result, with the float32 values in place of every `Widened` among its arguments.

    One after the other, since each has to see what is made of its values.
    """
    leaves, tree = tree_flatten((args, kwargs))
    cast = next((leaf.cast for leaf in leaves if isinstance(leaf, Widened)), None)
    if cast is None:
        return func(*args, **kwargs)

    def use(whole: Tensor) -> Any:
        same = [
            other.place(whole) if isinstance(other, Widened) and other.cast is cast else other
            for other in leaves
        ]
        own_args, own_kwargs = tree_unflatten(same, tree)
        return _with_values(func, own_args, own_kwargs)

    return cast.used(use)


_ANSWERS: Mapping[object, Callable[[Tensor], object]] = {
    Tensor.requires_grad.__get__: lambda _: True,  # type: ignore[attr-defined]
    Tensor.is_leaf.__get__: lambda _: False,  # type: ignore[attr-defined]
    Tensor._is_view: lambda _: False,
    Tensor.grad_fn.__get__: lambda uncast: uncast.grad_fn,  # type: ignore[union-attr]
    Tensor.untyped_storage: lambda uncast: uncast.untyped_storage(),
}
"""What is told of values that are not there: their place in the graph, and the memory they hold."""
# --- the loss -------------------------------------------------------------------------------------


def _cross_entropy(
    input: Tensor,  # noqa: A002 (the names of `F.cross_entropy`)
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy`, in place where it is a mean or a sum over rows."""
    loss: Tensor
    waiting: _Cast | None = None
    logits = input
    if isinstance(input, Widened):
        if input.cast.wide is None:
            waiting, logits = input.cast, input.uncast
        else:
            input = logits = input.place(input.cast.wide)  # noqa: A001
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if (
        plain
        and reduction in REDUCTIONS
        and torch.is_grad_enabled()
        and logits.requires_grad
        and logits.layout == torch.strided
        and logits.dim() == 2
        and logits.numel()
        and logits.is_contiguous()
        and target.dtype == torch.int64
        and target.shape == logits.shape[:1]
        and target.device == logits.device
        and (dtype := computed_in(input)) is not None
    ):
        if waiting is not None:
            waiting.take()
        rule = dtype, REDUCTIONS[reduction], ignore_index
        loss = _CrossEntropy.apply(logits, target, *rule)  # type: ignore[no-untyped-call]
        return loss
    loss = _with_values(
        cross_entropy,
        (input, target),
        {
            "weight": weight,
            "size_average": size_average,
            "ignore_index": ignore_index,
            "reduce": reduce,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
        },
    )
    return loss


def computed_in(logits: Tensor) -> torch.dtype | None:
    """The dtype that plain PyTorch computes the loss in; None where it takes two of them.

    Autocast says it of an operator when that is called.
    """
    kind = logits.device.type
    if not torch.is_autocast_enabled(kind):
        return logits.dtype
    tried = log_softmax(torch.zeros((1, 1), dtype=logits.dtype, device=logits.device), 1)
    target = torch.zeros(1, dtype=torch.int64, device=logits.device)
    return tried.dtype if nll_loss(tried, target).dtype == tried.dtype else None


class _CrossEntropy(torch.autograd.Function):
    """The cross entropy of logits [rows, classes] and targets [rows], in tiles of rows.

    The logarithms that the targets pick are added up as a whole, by the operator that plain PyTorch
    adds them up with: the order of a sum is part of its bits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, dtype: torch.dtype, reduction: int, ignored: int
    ) -> Tensor:
        valid = target != ignored
        place = torch.where(valid, target, 0)[:, None]
        picked = torch.empty((len(logits), 1), dtype=dtype, device=logits.device)
        with without_autocast(logits):
            for rows in _tiles(logits):
                torch.gather(_log_softmax(logits[rows], dtype), 1, place[rows], out=picked[rows])
            first = torch.where(valid, 0, _IGNORED)
            loss, total = torch.ops.aten.nll_loss_forward(picked, first, None, reduction, _IGNORED)
        ctx.save_for_backward(target, total)
        ctx.rule = dtype, reduction, ignored
        # No saved tensor: hooks around the part might hold it otherwise than by this one name.
        ctx.logits, ctx.version = logits.detach(), logits._version
        found: Tensor = loss
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, ctx.logits = ctx.logits, None
        if logits is None:
            raise RuntimeError(
                "backward ran once more through a loss that the plan computes in place: its"
                " gradient is where the logits were"
            )
        if logits._version != ctx.version:
            raise RuntimeError(
                "the logits were written in place between the loss and its backward, and the plan"
                " computes from them there: profile the model as it runs now"
            )
        target, total = ctx.saved_tensors
        dtype, reduction, ignored = ctx.rule
        # See [Note: who holds the logits].
        alone = num_holders(logits.untyped_storage()) == 1
        gradient = logits if alone else torch.empty_like(logits)
        with without_autocast(logits):
            for rows in _tiles(logits):
                logarithms = _log_softmax(logits[rows], dtype)
                part = torch.ops.aten.nll_loss_backward(
                    upstream, logarithms, target[rows], None, reduction, ignored, total
                )
                part = torch.ops.aten._log_softmax_backward_data(part, logarithms, 1, dtype)
                gradient[rows].copy_(part)
        return gradient, None, None, None, None


def _tiles(logits: Tensor) -> Iterator[slice]:
    size = tile_rows(*logits.shape)
    return (slice(first, first + size) for first in range(0, len(logits), size))


def _log_softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    found: Tensor = torch.ops.aten._log_softmax(logits.to(dtype), 1, False)
    return found


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Where operators on such a tensor run in the dtypes that they are given."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
