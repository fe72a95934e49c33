"""Element-wise maps of logits before the loss: scales and caps.

Granite divides logits by a number, Cohere multiplies them by one, and Gemma 2 computes c tanh(x /
c). Element-wise maps and their gradients run tile by tile.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, assert_never

import torch
from torch import Tensor


class Map(NamedTuple):
    """x times a number, x over a number, tanh(x), or x in float32."""

    kind: Literal["times", "over", "tanh", "widen"]
    number: float = 1.0


WIDEN = Map("widen")


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
