"""Parameters that are away: offloaded, and not on the device now.

Such a parameter keeps its shape, dtype, device, gradient and hooks; its values are in a store. Its
class says so until it is back: whatever would look at values raises one error that names the way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from protrain_runtime.taken import single

_KEY, _LISTED = "_protrain_away", "_protrain_listed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Where a parameter is.

    stride  of the parameter when it is back, in elements
    bring   called when code of the model reads it: returns with the parameter back, or raises
    values  a copy of its values on its device, from the store  # dtype [shape]
    """

    name: str
    stride: tuple[int, ...]
    bring: Callable[[str], None]
    values: Callable[[], torch.Tensor]
    kind: type[nn.Parameter]  # what it is when it is back


class AwayParameter(nn.Parameter):
    """A parameter whose values are in a store.

    Questions about its shape and kind, its gradient and its hooks are answered, and tensors can be
    made like it. A copy or a pickle of it is one of a parameter with its values.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """RuntimeError for what needs the values, but in a forward that may bring them."""
        kwargs = kwargs or {}
        listed = func is torch.Tensor.detach and args[0].__dict__.pop(_LISTED, False)
        if listed or func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        for parameter in _away_in((args, kwargs)):
            place_of(parameter).bring(place_of(parameter).name)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = _with_values(self)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _with_values(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # as torch's
        return f"AwayParameter({tuple(self.shape)}, {self.dtype}, {place_of(self).name!r})"


def place_of(parameter: nn.Parameter) -> Elsewhere:
    """Where a parameter that is away is."""
    place: Elsewhere = parameter.__dict__[_KEY]
    return place


def send_away(parameter: nn.Parameter, place: Callable[[type[nn.Parameter]], Elsewhere]) -> None:
    """Leave a parameter of the right shape that holds nothing, and refuses to be read.

    An expanded single element keeps shape, dtype and device, which autograd checks gradients
    against, at no memory.
    """
    kind = come_back(parameter)
    hollow = single(parameter.dtype, parameter.device)
    with torch.inference_mode(mode=False):
        parameter.data = hollow.expand(parameter.shape)
    parameter.__dict__[_KEY] = place(kind)
    parameter.__class__ = _away(kind)


def come_back(parameter: nn.Parameter) -> type[nn.Parameter]:
    """Let the parameter be what it was; whoever calls this gives it values. Returns its class."""
    parameter.__dict__.pop(_LISTED, None)
    place: Elsewhere | None = parameter.__dict__.pop(_KEY, None)
    if place is not None:
        parameter.__class__ = place.kind
    return type(parameter)


def let_list(parameter: nn.Parameter) -> None:
    """Let the next `detach` give the stand-in: a state dict lists it, and gets values later."""
    if isinstance(parameter, AwayParameter):
        parameter.__dict__[_LISTED] = True


@cache
def _away(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of parameters of this class while they are away."""
    return AwayParameter if kind is nn.Parameter else type(kind.__name__, (AwayParameter, kind), {})


def _with_values(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of its own, with the values that are in the store."""
    place = place_of(parameter)
    plain = nn.Parameter(place.values(), parameter.requires_grad)
    plain.__class__ = place.kind
    own = {k: v for k, v in parameter.__dict__.items() if k not in (_KEY, _LISTED)}
    plain.__dict__.update(own)
    return plain


def _away_in(tree: object) -> Iterator[AwayParameter]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, AwayParameter))


def _stride(parameter: AwayParameter, dim: int | None = None) -> Any:
    stride = place_of(parameter).stride
    return stride if dim is None else stride[dim]


def _like(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`make`, given one that is laid out as the parameter will be."""

    def answer(parameter: AwayParameter, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.setdefault("device", parameter.device)
        stride = place_of(parameter).stride
        shaped = torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype, device="meta")
        return make(shaped, *args, **kwargs)

    return answer


_PROPERTIES = (
    "shape dtype device layout requires_grad grad is_leaf grad_fn ndim itemsize nbytes names name"
    " is_cpu is_cuda is_xpu is_mps is_mtia is_meta is_sparse is_sparse_csr is_quantized is_nested"
    " is_mkldnn output_nr retains_grad _version _backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = (
    "size dim numel nelement ndimension element_size __len__ is_floating_point is_complex is_signed"
    " get_device requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad"
    " is_inference is_same_size"
)
_FUNCTIONS = (torch.is_floating_point, torch.is_complex, torch.is_signed, torch.numel)


def _looks() -> Iterator[Any]:
    for name in _PROPERTIES.split():
        found = getattr(torch.Tensor, name, None)
        for access in ("__get__", "__set__", "__delete__"):
            if hasattr(found, access):
                yield getattr(found, access)
    yield from (getattr(torch.Tensor, name) for name in _METHODS.split())
    yield from _FUNCTIONS


_LOOKS = frozenset(_looks())
"""What tells nothing of a parameter's values."""

_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.stride: _stride,
    torch.Tensor.is_contiguous: lambda parameter, **kwargs: torch.empty_strided(
        parameter.shape, place_of(parameter).stride, device="meta"
    ).is_contiguous(**kwargs),
    torch.Tensor.__repr__: AwayParameter.__repr__,
    torch.Tensor.__format__: lambda parameter, _: repr(parameter),
    **{
        make: _like(make)
        for make in (
            torch.empty_like,
            torch.zeros_like,
            torch.ones_like,
            torch.full_like,
            torch.rand_like,
            torch.randn_like,
            torch.Tensor.new_empty,
            torch.Tensor.new_zeros,
            torch.Tensor.new_ones,
            torch.Tensor.new_full,
        )
    },
}
"""What is answered in another way than by the stand-in's single element."""
