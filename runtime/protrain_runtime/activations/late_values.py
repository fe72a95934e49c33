"""Tensors whose values are computed late: what code asks of one, told apart.

A form of the last part may hand out a tensor that has its shape and its place in the graph, and no
values yet. Code that casts it, views it or asks for its geometry gets the same again; everything
else needs values.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from protrain_runtime.activations.trees import is_value, leaves_in

Place = Callable[[Tensor], Tensor]
"""What makes a view or a cast of the whole tensor."""


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


GEOMETRY = frozenset(
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
