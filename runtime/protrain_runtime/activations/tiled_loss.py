"""The forms `N tiles` of the last part: a head and its loss, without logits of all tokens.

Of n tokens, h features and v classes the logits are n v elements, and plain PyTorch holds several
such tensors (`loss_in_place` holds one). Here nothing has more than n v / N elements:

- forward: logits of n / N tokens at a time give their losses, and the logarithm of the sum of their
  exponentials, which stays for backward: one float32 per token;
- backward, where the head is trained: logits of v / N classes at a time, of all tokens. The
  gradient of a class's weights is one sum over all tokens, as in plain PyTorch, and none is added
  to: in tiles of tokens it would be rounded N times, or need float32 of the whole head. Gradients
  of the head's inputs are added up in float32, [n, h], and rounded once;
- backward, where the head is frozen: in tiles of tokens, none of which needs another.

Logits are computed once more in backward: 2 n h v operations on top of 6 n h v. Results are equal
to plain PyTorch's up to the order and rounding of sums. Logits may be scaled and capped before the
loss (`logit_maps`). What is told to `cross_entropy` is what
`loss_in_place` takes, and everything else gets the logits themselves. They are computed within the
forward alone: afterwards the head's weights may have left, or have been updated.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear
from torch.overrides import TorchFunctionMode

from protrain_runtime.activations.late_values import (
    VIEWS,
    LateValues,
    Place,
    goes_nowhere,
    is_cast,
    is_told,
    is_view,
    itself,
)
from protrain_runtime.activations.logit_maps import (
    WIDEN,
    Map,
    map_back_in_place,
    map_in_place,
    map_of,
)
from protrain_runtime.activations.loss_calls import LossCall, computed_in, without_autocast
from protrain_runtime.activations.trees import PLAIN

TILE_ROWS = 16
"""Tiles are whole multiples of so many rows, which kernels of products are made for."""


def in_8_tiles() -> AbstractContextManager[object]:
    """The executor of the form `8 tiles`: stands around the forward of the last part."""
    return _Watching(8)


def in_64_tiles() -> AbstractContextManager[object]:
    """The executor of the form `64 tiles`."""
    return _Watching(64)


class _Watching(TorchFunctionMode):
    """Sees the products and the cross entropies of the part, and lets them wait for each other."""

    def __init__(self, num_tiles: int) -> None:
        super().__init__()
        self._num_tiles = num_tiles
        self._products: list[_Product] = []

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for product in self._products:
            product.close()
        self._products.clear()

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is linear and (product := _Product.of(*args, **kwargs)) is not None:
            self._products.append(product)
            shape = (*product.hidden.shape[:-1], len(product.weight))
            return Logits(product, product.hidden, shape, product.dtype, itself, ())
        if func is cross_entropy:
            return _cross_entropy(self._num_tiles, LossCall(*args, **kwargs))
        return func(*args, **kwargs)


# --- the product ----------------------------------------------------------------------------------


class _Product:
    """A linear layer's inputs [..., h], weights [v, h] and biases [v], and its outputs if wanted.

    `dtype` is that of its outputs.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        kind = hidden.device.type
        cast = torch.is_autocast_enabled(kind)
        self.dtype = torch.get_autocast_dtype(kind) if cast else hidden.dtype
        self._versions = self._version()
        self._whole: Tensor | None = None
        self._open = True

    @staticmethod
    def of(input: Any, weight: Any, bias: Any = None) -> "_Product | None":  # noqa: A002
        """What may wait; None where a plain product is wanted, or none that we know."""
        tensors = [input, weight] if bias is None else [input, weight, bias]
        if (
            not torch.is_grad_enabled()
            or any(type(one) not in PLAIN for one in tensors)
            or not all(one.is_floating_point() and one.layout == torch.strided for one in tensors)
            or not any(one.requires_grad for one in tensors)
            or torch.float64 in {one.dtype for one in tensors}
            or weight.dim() != 2
            or input.dim() < 2
            or input.shape[-1] != weight.shape[1]
        ):
            return None
        product = _Product(input, weight, bias)
        same = {one.dtype for one in tensors} == {product.dtype}
        return product if same or torch.is_autocast_enabled(input.device.type) else None

    def used(self, use: Callable[[Tensor], Any]) -> Any:
        """What `use` makes of the outputs, which stay where something in the graph is made of them.

        RuntimeError after the forward.
        """
        if self._whole is not None:
            return use(self._whole)
        self.check()
        with torch.enable_grad():
            whole = linear(self.hidden, self.weight, self.bias)
        result = use(whole)
        if not is_told(result) or whole._version:
            self._whole = whole
        return result

    @property
    def waits(self) -> bool:
        """Whether the outputs are not there."""
        return self._whole is None

    def check(self) -> None:
        """RuntimeError where the forward is over, or has written to what outputs are made of."""
        if not self._open:
            raise RuntimeError(
                "the logits were asked for after the forward, and the plan computes the loss from"
                " tiles of them, which are gone: ask for them in an evaluation (torch.no_grad()),"
                " or plan without --allow rounding"
            )
        if self._version() != self._versions:
            raise RuntimeError(
                "a head's input or weights were written in place after the head had run, and the"
                " plan computes logits when the loss asks for them: profile the model as it runs"
                " now"
            )

    def close(self) -> None:
        self._open = False
        if self._whole is None:  # else the graph has what it needs
            self.weight = self.bias = None  # type: ignore[assignment]

    def _version(self) -> tuple[int, ...]:
        tensors = (self.hidden, self.weight, self.bias)
        return tuple(one._version for one in tensors if one is not None)


class Logits(LateValues):
    """Outputs of a head, or what is viewed or mapped of them, computed if they are asked for.

    `near` are the inputs [..., h] of the same rows; `maps` is what was done to the outputs.
    """

    WHAT = "logits that the plan computes in tiles"
    source: _Product
    maps: tuple[Map, ...]

    @staticmethod
    def __new__(
        cls,
        product: _Product,
        rows: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        place: Place,
        maps: tuple[Map, ...],
    ) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=rows.device
        )
        made.source, made.near, made.place, made.maps = product, rows, place, maps
        return made

    def late(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Logits | None":
        """Views of whole rows, casts to float32 and maps, as long as the values wait."""
        if not self.source.waits:
            return None
        if goes_nowhere(func, args, kwargs):
            return self
        if is_cast(func, args, kwargs):
            return self if self.dtype == torch.float32 else self._mapped(func, args, kwargs, WIDEN)
        if (own := map_of(func, args, kwargs)) is not None:
            return self._mapped(func, args, kwargs, own)
        return self._viewed(func, args[1:], kwargs) if is_view(func, args, kwargs) else None

    def _mapped(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Map
    ) -> "Logits":
        before, change = self.place, partial(_applied, func, args[1:], kwargs)
        dtype = torch.float32 if own == WIDEN else self.dtype
        maps = (*self.maps, own)
        return Logits(
            self.source, self.near, self.shape, dtype, lambda whole: change(before(whole)), maps
        )

    def _viewed(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "Logits | None":
        """A view of whole rows; None where it takes rows apart."""
        before, change = self.place, partial(_applied, func, args, kwargs)
        rows, num_classes = self.near, self.shape[-1]
        # One element in place of all has the shapes of what is made of them.
        shape = self.shape
        if func is not Tensor.contiguous:
            shape = change(torch.empty((), device="meta").expand(shape)).shape
        if not shape or shape[-1] != num_classes:
            return None
        wanted = (*shape[:-1], rows.shape[-1])
        # Views leave the order of elements as it is.
        picked = rows.reshape(wanted) if func in VIEWS else change(rows)
        if picked.shape != wanted:
            return None
        return Logits(
            self.source, picked, shape, self.dtype, lambda whole: change(before(whole)), self.maps
        )


def _applied(
    func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], whole: Tensor
) -> Tensor:
    return func(whole, *args, **kwargs)


# --- the loss -------------------------------------------------------------------------------------


def _cross_entropy(num_tiles: int, call: LossCall) -> Tensor:
    """`F.cross_entropy`, in tiles where it is a mean or a sum over rows of waiting logits."""
    logits = call.input
    if (
        isinstance(logits, Logits)
        and logits.source.waits
        and call.is_over_rows(logits)
        and (dtype := computed_in(logits)) is not None
    ):
        product = logits.source
        product.check()
        rule = _Rule(
            product.dtype,
            dtype,
            logits.maps,
            mean=call.reduction == "mean",
            ignored=call.ignore_index,
            num_tiles=num_tiles,
        )
        found = _TiledLoss.apply(  # type: ignore[no-untyped-call]
            logits.near, product.weight, product.bias, call.target, rule
        )
        loss: Tensor = found
        return loss
    return call.plainly()


class _Rule:
    """How a loss is computed: logits in `dtype`, then mapped, the loss given in `wide`."""

    def __init__(
        self,
        dtype: torch.dtype,
        wide: torch.dtype,
        maps: tuple[Map, ...],
        *,
        mean: bool,
        ignored: int,
        num_tiles: int,
    ) -> None:
        self.dtype, self.wide, self.maps, self.mean = dtype, wide, maps, mean
        self.ignored, self.num_tiles = ignored, num_tiles

    def tiles(self, count: int) -> Iterator[slice]:
        """`count` rows in tiles, of which the last may have fewer."""
        size = math.ceil(count / self.num_tiles / TILE_ROWS) * TILE_ROWS
        return (slice(first, min(first + size, count)) for first in range(0, count, size))


class _TiledLoss(torch.autograd.Function):
    """The cross entropy of hidden [n, h] with a head of weights [v, h] and biases [v], targets [n].

    Sums are in float32, and so are exponentials and logarithms.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rule: _Rule
    ) -> Tensor:
        valid = target != rule.ignored
        place = torch.where(valid, target, 0)[:, None]
        num_rows = len(hidden)
        sums = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
        losses = torch.empty_like(sums)
        with without_autocast(hidden):
            head = weight.to(rule.dtype), None if bias is None else bias.to(rule.dtype)
            for rows in rule.tiles(num_rows):
                product = linear(hidden[rows].to(rule.dtype), *head)
                logits = map_in_place(product, rule.maps)[0].float()
                del product
                most = logits.amax(1, keepdim=True)
                picked = logits.gather(1, place[rows])
                # In place, so that one tile stands at a time.
                torch.sum(logits.sub_(most).exp_(), 1, out=sums[rows])
                sums[rows].log_().add_(most[:, 0])
                torch.sub(sums[rows], picked[:, 0], out=losses[rows])
                del logits, most, picked
            total = losses.mul_(valid).sum()
            count = valid.sum()
        ctx.save_for_backward(hidden, weight, bias, place, valid, sums, count)
        ctx.rule = rule
        loss = total / count if rule.mean else total
        return loss.to(rule.wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, place, valid, sums, count = ctx.saved_tensors
        rule: _Rule = ctx.rule
        scale = upstream.float() / count if rule.mean else upstream.float()
        scales = (valid * scale)[:, None]  # [n, 1]
        given, sums = hidden.to(rule.dtype), sums[:, None]

        def gradient(inputs: Tensor, classes: slice, rows: slice, head: Any) -> Tensor:
            """Of the logits of some rows and classes; in `rule.dtype`."""
            part, capped = map_in_place(linear(inputs, *head), rule.maps)
            part = part.float()
            part.sub_(sums[rows]).exp_()
            start, end = classes.start, classes.stop
            own = (place[rows] - start).clamp_(0, end - start - 1)
            inside = (place[rows] >= start) & (place[rows] < end)
            part.scatter_(1, own, part.gather(1, own) - inside.float())
            map_back_in_place(part.mul_(scales[rows]), rule.maps, capped)
            return part.to(rule.dtype)

        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        everything = slice(0, len(hidden)), slice(0, len(weight))
        found_weight = torch.empty_like(weight) if of_weight else None
        found_bias = torch.empty_like(bias) if of_bias else None
        found_hidden: Tensor | None = None
        with without_autocast(hidden):
            if found_weight is None and found_bias is None:
                found_hidden = torch.empty_like(hidden)
                head = weight.to(rule.dtype), None if bias is None else bias.to(rule.dtype)
                for rows in rule.tiles(len(hidden)):
                    part = gradient(given[rows], everything[1], rows, head)
                    _product_into(found_hidden[rows], part, head[0])
                    del part
                return found_hidden, None, None, None, None
            if of_hidden:
                found_hidden = torch.zeros_like(hidden, dtype=torch.float32)
            for classes in rule.tiles(len(weight)):
                own = weight[classes].to(rule.dtype)
                own_bias = None if bias is None else bias[classes].to(rule.dtype)
                part = gradient(given, classes, everything[0], (own, own_bias))
                if found_weight is not None:
                    _product_into(found_weight[classes], part.t(), given)
                if found_bias is not None:
                    found_bias[classes] = part.sum(0)
                if found_hidden is not None:
                    found_hidden += part @ own
                del part
        if found_hidden is not None:
            found_hidden = found_hidden.to(hidden.dtype)
        return found_hidden, found_weight, found_bias, None, None


def _product_into(found: Tensor, left: Tensor, right: Tensor) -> None:
    """`found` = left @ right, with no tensor beside it where all are of one dtype."""
    if found.dtype == left.dtype:
        torch.mm(left, right, out=found)
    else:
        found.copy_(left @ right)
