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
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from protrain_runtime.activations.late_values import (
    LateValues,
    Place,
    goes_nowhere,
    is_cast,
    is_told,
    is_view,
    itself,
)
from protrain_runtime.activations.loss_calls import (
    REDUCTIONS,
    LossCall,
    computed_in,
    without_autocast,
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
            return _cross_entropy(LossCall(*args, **kwargs))
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

    @property
    def waits(self) -> bool:
        """Whether the float32 values are not there."""
        return self.wide is None

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


class Widened(LateValues):
    """`tensor.float()`, computed when somebody asks for its values.

    A view or a slice of one is one as well, since the cast of a slice is the slice of the cast:
    `near` is the slice of the 16-bit values.
    """

    WHAT = "values that the plan casts when they are asked for"
    source: _Cast

    @staticmethod
    def __new__(cls, cast: _Cast, uncast: Tensor, place: Place) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, uncast.shape, uncast.stride(), dtype=torch.float32, device=uncast.device
        )
        made.source, made.near, made.place = cast, uncast, place
        return made

    def late(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Widened | None":
        """Casts to float32, and views as long as the values wait."""
        if is_cast(func, args, kwargs) or goes_nowhere(func, args, kwargs):
            return self
        if not self.source.waits or not is_view(func, args, kwargs):
            return None
        before, others = self.place, args[1:]

        def place(whole: Tensor) -> Tensor:
            found: Tensor = func(before(whole), *others, **kwargs)
            return found

        return Widened(self.source, func(self.near, *others, **kwargs), place)


# --- the loss -------------------------------------------------------------------------------------


def _cross_entropy(call: LossCall) -> Tensor:
    """`F.cross_entropy`, in place where it is a mean or a sum over rows."""
    waiting: _Cast | None = None
    logits = call.input
    if isinstance(logits, Widened):
        cast = logits.source
        if cast.wide is None:
            waiting, logits = cast, logits.near
        else:
            logits = logits.place(cast.wide)
            call = call._replace(input=logits)
    if (
        logits.requires_grad
        and logits.layout == torch.strided
        and call.is_over_rows(logits)
        and logits.is_contiguous()
        and (dtype := computed_in(call.input)) is not None
    ):
        if waiting is not None:
            waiting.take()
        rule = dtype, REDUCTIONS[call.reduction], call.ignore_index
        loss: Tensor = _CrossEntropy.apply(logits, call.target, *rule)  # type: ignore[no-untyped-call]
        return loss
    return call.plainly()


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
