"""Tensors with late values: which calls need values, and which only geometry.

A form of the last part may return a tensor with its shape and place in the graph, but without
values (`LateValues`). Casts, views and questions of geometry keep it late; other code needs values,
which its source computes.

Logits may be scaled and capped before the loss: Granite divides them by a number, Cohere multiplies
them by one, and Gemma 2 computes c tanh(x / c). Such element-wise maps, and their gradients, run
tile by tile.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, assert_never

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from protrain_runtime.activations.trees import is_value, leaves_in

Place = Callable[[Tensor], Tensor]
"""Makes a view, a cast or a map of the whole tensor."""


class Map(NamedTuple):
    """x times a number, x over a number, tanh(x), or x in float32."""

    kind: Literal["times", "over", "tanh", "widen"]
    number: float = 1.0


WIDEN = Map("widen")


class UsedTwiceError(RuntimeError):
    """Logits have a second use in the graph, with which their gradient would round differently."""


class Source:
    """Late values of a tensor and of its views, casts and maps."""

    WRITTEN: str  # the message on written inputs
    ELEMENTWISE: bool  # whether `near` has the elements: views are its views, and maps do not wait

    def __init__(self, *inputs: Tensor | None) -> None:
        self.inputs = inputs
        self.whole: Tensor | None = None  # the values, in the graph
        self.taken = False  # by a loss without another use
        self._versions = self._seen()

    def compute(self) -> Tensor:
        """The values of the whole tensor."""
        raise NotImplementedError

    def used(self, use: Callable[[Tensor], Any]) -> Any:
        """Result of `use` on the values.

        A use that only reads, such as counting right answers, gets values of its own. If it writes
        to them or makes a graph of them, they stay: they are one tensor.
        """
        if self.whole is not None:
            return use(self.whole)
        self.check()
        with torch.enable_grad():
            whole = self.compute()
        result = use(whole)
        # A result outside a graph is plain numbers: no hook, for example, and nothing by name.
        leaves = [] if result is None else leaves_in(result)
        told = bool(leaves) and all(
            not leaf.requires_grad if isinstance(leaf, Tensor) else is_value(leaf)
            for leaf in leaves
        )
        if told and not whole._version:
            return result
        if self.taken:
            raise UsedTwiceError(
                "the forward uses the logits once more besides the loss, which the plan computes in"
                " place: profile the model as it runs now"
            )
        self.whole, self.inputs = whole, ()
        return result

    def check(self) -> None:
        """RuntimeError if inputs have changed."""
        if self._seen() != self._versions:
            raise RuntimeError(f"{self.WRITTEN}: profile the model as it runs now")

    def _seen(self) -> list[int]:
        return [one._version for one in self.inputs if one is not None]


class LateValues(torch.Tensor):
    """A tensor that waits for its values, or a view, a cast or a map of one.

    `near` is a real tensor with its place in the graph, and the memory that it holds; `place`
    derives this tensor from all values of `source`, `maps` are the maps in it.
    """

    source: Source
    near: Tensor
    place: Place
    maps: tuple[Map, ...]

    @staticmethod
    def __new__(
        cls,
        source: Source,
        near: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        place: Place = lambda whole: whole,
        maps: tuple[Map, ...] = (),
    ) -> Self:
        strides = near.stride() if source.ELEMENTWISE else None
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), strides, dtype=dtype, device=near.device
        )
        made.source, made.near, made.place, made.maps = source, near, place, maps
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    def late(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "LateValues | None":
        """A function's late result on this tensor; None if the function needs values."""
        if self.source.whole is not None:
            return None
        widens = is_cast(func, args, kwargs)
        if widens and self.dtype == torch.float32:
            return self
        moves = func is Tensor.to and not kwargs and len(args) == 2  # `.to(labels.device)`
        if moves and isinstance(args[1], torch.device) and args[1] == self.device:
            return self
        before = self.place

        def change(tensor: Tensor) -> Tensor:
            found: Tensor = func(tensor, *args[1:], **kwargs)
            return found

        near, shape, dtype, maps = self.near, self.shape, self.dtype, self.maps
        own = WIDEN if widens else map_of(func, args, kwargs)
        if own is not None:
            if self.source.ELEMENTWISE:
                return None
            maps, dtype = (*maps, own), torch.float32 if widens else dtype
        elif not is_view(func, args, kwargs):
            return None
        elif self.source.ELEMENTWISE:
            near = change(near)
            shape = near.shape
        else:
            # A one-element tensor, expanded, gives the result's shape.
            if func is not Tensor.contiguous:
                shape = change(torch.empty((), device="meta").expand(shape)).shape
            if not shape or shape[-1] != self.shape[-1]:
                return None  # rows would be split
            wanted = (*shape[:-1], near.shape[-1])
            # Views keep the order of elements.
            near = near.reshape(wanted) if func in VIEWS else change(near)
            if near.shape != wanted:
                return None
        return LateValues(
            self.source, near, shape, dtype, lambda whole: change(before(whole)), maps
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _GEOMETRY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, LateValues):
            if first.source.whole is None and func in _ANSWERS:
                return _ANSWERS[func](first.near)
            if torch.is_grad_enabled():
                made = first.late(func, args, kwargs)
                if made is not None:
                    return made
        return with_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise RuntimeError(
            f"{func} was called on logits that the plan computes late, by code that asks PyTorch"
            " for none: profile the model as it runs now"
        )


def with_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A function's result with values for every `LateValues` argument, source by source."""
    leaves, tree = tree_flatten((args, kwargs))
    source = next((leaf.source for leaf in leaves if isinstance(leaf, LateValues)), None)
    if source is None:
        return func(*args, **kwargs)

    def use(whole: Tensor) -> Any:
        same = [
            one.place(whole) if isinstance(one, LateValues) and one.source is source else one
            for one in leaves
        ]
        own_args, own_kwargs = tree_unflatten(same, tree)
        return with_values(func, own_args, own_kwargs)

    return source.used(use)


def is_cast(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is only a cast to float32."""
    if func is Tensor.float:
        return len(args) == 1 and not kwargs
    if func is not Tensor.to and func is not Tensor.type:
        return False
    given = [*args[1:], kwargs.get("dtype")] if kwargs else args[1:]
    return len(given) == len(kwargs) + len(args) - 1 == 1 and given[0] is torch.float32


_ATTRIBUTES = ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_sparse")
_METHODS = ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point")
_GEOMETRY = frozenset(
    [getattr(Tensor, name).__get__ for name in _ATTRIBUTES]
    + [getattr(Tensor, name) for name in _METHODS]
)
_ANSWERS: Mapping[object, Callable[[Tensor], object]] = {
    Tensor.requires_grad.__get__: lambda _: True,  # type: ignore[attr-defined]
    Tensor.is_leaf.__get__: lambda _: False,  # type: ignore[attr-defined]
    Tensor._is_view: lambda _: False,
    Tensor.grad_fn.__get__: lambda near: near.grad_fn,  # type: ignore[union-attr]
    Tensor.untyped_storage: lambda near: near.untyped_storage(),
}
"""Answers without values: the place in the graph, the memory held."""
_VIEWS = ("view", "reshape", "flatten", "contiguous", "squeeze", "unsqueeze")
VIEWS = frozenset([*(getattr(Tensor, name) for name in _VIEWS), torch.reshape, torch.flatten])


def is_view(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function selects elements, each at most once, without computing."""
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(one is None or one is ... or type(one) in (int, slice) for one in index)
    return func in VIEWS and not any(
        isinstance(given, torch.dtype) for given in (*args, *kwargs.values())
    )


# --- maps of logits -------------------------------------------------------------------------------


def map_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Map | None:
    """The map that a function applies to its first argument; None for other functions."""
    if kwargs:
        return None
    if func in (torch.tanh, Tensor.tanh):
        return Map("tanh") if len(args) == 1 else None
    if len(args) != 2 or type(args[1]) not in (int, float):
        return None
    if func in (torch.mul, Tensor.mul):
        return Map("times", args[1])
    return Map("over", args[1]) if func in (torch.div, Tensor.div) else None


def map_in_place(values: Tensor, maps: Sequence[Map]) -> tuple[Tensor, list[Tensor]]:
    """The mapped values, written over the given ones, and each tanh's result, in order."""
    capped = []
    for one in maps:
        match one.kind:
            case "times":
                values.mul_(one.number)
            case "over":
                values.div_(one.number)
            case "tanh":
                capped.append(values.tanh_())
                values = values.clone()
            case "widen":
                values = values.float()
            case _:
                assert_never(one.kind)
    return values, capped


def map_back_in_place(gradient: Tensor, maps: Sequence[Map], capped: list[Tensor]) -> None:
    """Turn the gradient of mapped values into the values' own, consuming `capped` tanhs."""
    for one in reversed(maps):
        match one.kind:
            case "times":
                gradient.mul_(one.number)
            case "over":
                gradient.div_(one.number)
            case "tanh":
                gradient.mul_(capped.pop().float().square_().neg_().add_(1))
            case "widen":
                pass
            case _:
                assert_never(one.kind)
