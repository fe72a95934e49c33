"""Optimizer states that are tensors made of tensors: taken apart and put together.

Such a state is a traceable tensor subclass, as torchao's: codes, scales and a table. Stores, moves
and checkpoints take plain tensors: a state `exp_avg` of `codes` and `scale` becomes `exp_avg:codes`
and `exp_avg:scale`, and `exp_avg:` holds the rule that puts it together, for the whole parameter or
a range.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MARK = ":"
"""The suffix of a key whose state is the rule for putting others together."""


@dataclass(frozen=True, slots=True)
class Composition:
    """The class and context that make a tensor of its parts, by PyTorch's protocol.

    context  what `__tensor_flatten__` gives besides the parts' names
    shape    of the tensor, which the context may name, too
    """

    kind: type
    parts: tuple[str, ...]
    context: Any
    shape: torch.Size

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Composition":
        """Describe a composed tensor."""
        parts, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return cls(type(tensor), tuple(parts), context, tensor.shape)

    def reshaped(self, shape: torch.Size) -> "Composition":
        """Describe a tensor of another shape, with parts scaled accordingly."""
        return replace(self, context=_renamed(self.context, self.shape, shape), shape=shape)

    def described(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "class": _name(self.kind),
            "parts": list(self.parts),
            "context": self.context,
            "shape": list(self.shape),
        }

    @classmethod
    def read(cls, described: Any) -> "Composition":
        """Read the result of `described`; ValueError unless files may name its class."""
        match described:
            case {"class": str(name), "parts": list(parts), "context": context, "shape": list(own)}:
                pass
            case _:
                raise ValueError("it does not say what it is made of")
        listed = (each for each in torch.serialization.get_safe_globals() if isinstance(each, type))
        kinds = {_name(each): each for each in listed if hasattr(each, "__tensor_unflatten__")}
        if name not in kinds:
            raise ValueError(f"no package that is imported has the class {name[:100]}")
        if not all(isinstance(size, int) and size >= 0 for size in own):
            raise ValueError("it has no shape")
        return cls(kinds[name], tuple(map(str, parts)), context, torch.Size(own))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _renamed(context: Any, old: torch.Size, new: torch.Size) -> Any:
    """The context with `new` in place of the shape `old`."""
    if isinstance(context, tuple) and tuple(context) == tuple(old):
        return new
    if isinstance(context, tuple | list):
        return type(context)(_renamed(each, old, new) for each in context)
    if isinstance(context, dict):
        return {key: _renamed(each, old, new) for key, each in context.items()}
    return context


def is_composed(value: object) -> bool:
    """Whether the value is a tensor made of tensors."""
    return isinstance(value, torch.Tensor) and bool(is_traceable_wrapper_subclass(value))


def taken_apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's states, with composed ones as plain tensors."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        if is_composed(value):
            how = Composition.of(value)
            flat |= {f"{key}{MARK}{part}": getattr(value, part) for part in how.parts}
            flat[f"{key}{MARK}"] = how
        else:
            flat[key] = value
    return flat


def put_together(flat: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
    """Put `taken_apart` states together for this shape: of a parameter or a range."""
    state = dict(flat)
    for key, how in flat.items():
        if isinstance(how, Composition):
            del state[key]
            parts = {part: state.pop(f"{key}{part}") for part in how.parts}
            kind: Any = how.kind
            context, stride = (
                how.reshaped(shape).context,
                torch.empty(shape, device="meta").stride(),
            )
            made = kind.__tensor_unflatten__(parts, context, shape, stride)  # on the parts' memory
            state[key.removesuffix(MARK)] = made
    return state


def tensors_in(value: Any, *, modules: bool = True) -> list[torch.Tensor]:
    """The plain tensors in containers, objects (also `modules`) and composed tensors."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    inside: list[Any] = [value]
    for one in inside:
        if id(one) in seen:
            continue
        seen.add(id(one))
        if is_composed(one):
            inside += [getattr(one, part) for part in Composition.of(one).parts]
        elif isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, Mapping):
            inside += one.values()
        elif isinstance(one, list | tuple | set):
            inside += one
        elif not isinstance(one, type | ModuleType) and (modules or not isinstance(one, nn.Module)):
            inside += getattr(one, "__dict__", {}).values()
    return found
