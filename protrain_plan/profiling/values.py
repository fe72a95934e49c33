"""Values of small tensors that do not depend on parameters, known while everything is fake.

A model's code may ask for values: the depths at which layers drop out, from `linspace`; how many of
the tokens stand for an image. What it asks of token ids, of masks made of them, or of tensors made
from numbers does not depend on what the model has learnt. So real tensors are computed beside those
fake ones, from the batch on; activations and parameters have none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from protrain_runtime.measure import PARTS, strided_parts
from protrain_runtime.trees import tensors_in

aten = torch.ops.aten

_MOST_BYTES = 2**22
"""Of a tensor whose values are known: a batch of 500,000 tokens. What is larger was no token id."""

_ATTRIBUTE = "_protrain_value"


class KnownValues(TorchDispatchMode):
    """Computes values beside fake tensors where all that they come of is known.

    Enter it inside the `FakeTensorMode`. Views are of the same memory, as fake ones are; where a
    tensor is written with something unknown, nobody who shares its memory is known any longer.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._overwritten: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        values = [self._value(tensor) for tensor in given]
        known = all(value is not None for value in values)
        if torch.Tag.data_dependent_output in func.tags and known:
            return self._real(func, args, kwargs)
        if torch.Tag.dynamic_output_shape in func.tags:
            counted = self._counted(func, args, kwargs, known=known)
            if counted is not None:
                return counted
        result = func(*args, **kwargs)
        made = tensors_in(result)
        for tensor in made:
            if tensor.layout != torch.strided:
                setattr(tensor, PARTS, _parts(func, args))
        if known and _repeatable(func) and all(map(_is_small, made)):
            real = tensors_in(self._real(func, args, kwargs))
            for tensor, found in zip(made, real, strict=True):
                setattr(tensor, _ATTRIBUTE, found)
        elif func._schema.is_mutable:
            for value in values:
                if value is not None:
                    storage = value.untyped_storage()
                    self._overwritten[storage._cdata] = storage
        return result

    def _value(self, tensor: Tensor) -> Tensor | None:
        if tensor.requires_grad:
            return None
        value = getattr(tensor, _ATTRIBUTE, None) if isinstance(tensor, FakeTensor) else tensor
        if value is not None and value.untyped_storage()._cdata in self._overwritten:
            return None
        return value

    def _real(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """What the operator gives of the values."""
        real_args, real_kwargs = tree_map_only(Tensor, self._value, (args, dict(kwargs)))
        with unset_fake_temporarily():
            result: object = func(*real_args, **real_kwargs)
        return result

    def _counted(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, known: bool
    ) -> object | None:
        """A result whose shape depends on values: all of them, or a mask's alone."""
        if known:
            found: object = tree_map_only(Tensor, _faked, self._real(func, args, kwargs))
            return found
        if func is aten.masked_select.default:
            given: Tensor = args[0]
            mask = self._value(args[1])
            if mask is None:
                return None
            shape = torch.broadcast_shapes(given.shape, mask.shape)
            return given.new_empty(_count(mask) * (shape.numel() // max(1, mask.numel())))
        if func is aten.index.Tensor:
            return self._masked(args[0], args[1])
        return None

    def _masked(self, given: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
        """`given[:, mask]`: elements of all dimensions that the mask spans become one."""
        places = [place for place, index in enumerate(indices) if index is not None]
        first = indices[places[0]]
        if len(places) > 1 or first is None or first.dtype != torch.bool:
            return None
        mask = self._value(first)
        if mask is None:
            return None
        before, after = given.shape[: places[0]], given.shape[places[0] + mask.dim() :]
        return given.new_empty(*before, _count(mask), *after)


class SparseError(Exception):
    """A sparse tensor of which it is not known what it is made of."""


def _parts(func: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Indices and values of a new sparse tensor, as the gradient of an embedding is made."""
    if func is aten._sparse_coo_tensor_with_dims_and_tensors.default:
        return args[3], args[4]
    if func in (aten.detach.default, aten.clone.default):  # a gradient is not copied, but kept
        return tuple(strided_parts(args))
    raise SparseError(str(func))


def know(fake: Tensor, value: Tensor) -> Tensor:
    """The fake tensor, with values where they are integers or truths."""
    if not value.is_floating_point() and _is_small(value):
        setattr(fake, _ATTRIBUTE, value)
    return fake


def _faked(value: Tensor) -> Tensor:
    return know(torch.empty(value.shape, dtype=value.dtype), value)


def _count(mask: Tensor) -> int:
    with unset_fake_temporarily():
        return int(mask.sum())


_UNDEFINED = ("empty", "new_empty", "resize", "set_")


def _repeatable(func: Any) -> bool:
    """Whether the operator gives the same again, from its arguments alone."""
    name = func._schema.name.partition("::")[2]
    return torch.Tag.nondeterministic_seeded not in func.tags and not name.startswith(_UNDEFINED)


def _is_small(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.untyped_storage().nbytes() <= _MOST_BYTES
    )
