"""Tensors whose values are computed late: what code asks of one, told apart.

A form of the last part may hand out a tensor that has its shape and its place in the graph, and no
values yet (`LateValues`). Code that casts it, views it or asks for its geometry gets the same
again; everything else needs values, which its source computes.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from protrain_runtime.activations.trees import is_value, leaves_in

Place = Callable[[Tensor], Tensor]
"""What makes a view or a cast of the whole tensor."""


class Source(Protocol):
    """What computes values, of one tensor and of all that are views or casts of it."""

    @property
    def waits(self) -> bool:
        """Whether the values are not there."""

    def used(self, use: Callable[[Tensor], Any]) -> Any:
        """What `use` makes of the values."""


class LateValues(torch.Tensor):
    """A tensor that waits for its values, or a view or a cast of one.

    `near` is a tensor that is there and has the same place in the graph, and the memory that this
    one holds; `place` makes this tensor of all values of `source`.
    """

    WHAT: ClassVar[str]  # what its values are, for messages
    source: Source
    near: Tensor
    place: Place

    def __init__(self, *_: object) -> None:
        super().__init__()

    def late(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "LateValues | None":
        """What a function makes of this tensor without values; None where it needs them."""
        raise NotImplementedError

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
            if first.source.waits and func in _ANSWERS:
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
            f"{func} was called on {cls.WHAT}, by code that asks PyTorch for none: profile the"
            " model as it runs now"
        )


def with_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A function's result, with values in place of every `LateValues` among its arguments.

    Source by source, since each has to see what is made of its values.
    """
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


def itself(whole: Tensor) -> Tensor:
    """The place of a whole tensor in itself."""
    return whole


def is_cast(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is a cast to float32, and nothing besides."""
    if func is Tensor.float:
        return len(args) == 1 and not kwargs
    if func is not Tensor.to and func is not Tensor.type:
        return False
    given = [*args[1:], kwargs.get("dtype")] if kwargs else args[1:]
    return len(given) == len(kwargs) + len(args) - 1 == 1 and given[0] is torch.float32


def is_told(result: object) -> bool:
    """Whether a result is of values alone, in no graph: no hook, say, and nothing by a name."""
    leaves = [] if result is None else leaves_in(result)
    return bool(leaves) and all(
        not leaf.requires_grad if isinstance(leaf, Tensor) else is_value(leaf) for leaf in leaves
    )


_GEOMETRY = frozenset(
    [
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_sparse")
        ),
        *(
            getattr(Tensor, name)
            for name in ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point")
        ),
    ]
)
_ANSWERS: Mapping[object, Callable[[Tensor], object]] = {
    Tensor.requires_grad.__get__: lambda _: True,  # type: ignore[attr-defined]
    Tensor.is_leaf.__get__: lambda _: False,  # type: ignore[attr-defined]
    Tensor._is_view: lambda _: False,
    Tensor.grad_fn.__get__: lambda near: near.grad_fn,  # type: ignore[union-attr]
    Tensor.untyped_storage: lambda near: near.untyped_storage(),
}
"""What is told of values that are not there: their place in the graph, and the memory they hold."""
VIEWS = frozenset(
    [
        Tensor.view,
        Tensor.reshape,
        torch.reshape,
        Tensor.flatten,
        torch.flatten,
        Tensor.contiguous,
        Tensor.squeeze,
        Tensor.unsqueeze,
    ]
)


def goes_nowhere(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function sends a tensor to where it is: `.to(labels.device)`."""
    if func is not Tensor.to or kwargs or len(args) != 2:
        return False
    return isinstance(args[1], torch.device) and args[1] == args[0].device


def is_view(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function picks elements, each at most once, and computes nothing."""
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(one is None or one is ... or type(one) in (int, slice) for one in index)
    return func in VIEWS and not any(
        isinstance(given, torch.dtype) for given in (*args, *kwargs.values())
    )
