"""Stand-ins for parameters and gradients whose values are elsewhere.

- `AwayParameter`: an offloaded parameter. It keeps its shape, dtype, device, gradient and hooks;
  reads of its values raise an error that names the way to them.
- `ConsumedGradient`: a gradient that an update in backward has used. It raises, because clipping or
  a gradient scaler would silently miss it after `backward()`. After the step a `UsedGradient` takes
  its place until gradients are zeroed, since plain PyTorch would add the next ones to the last.
- `OffloadedGradient`: a gradient that waits below the device for an update after backward. It
  supports `torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler`: its norm is computed on the
  device, and a factor is applied at the update. Other functions get the gradient itself, fetched to
  the device and written back if changed.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from threading import local
from typing import Any

import torch
from torch import nn
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_leaves, tree_map

from protrain_runtime.devices.lanes import num_holders
from protrain_runtime.devices.stores import Store
from protrain_runtime.states.quantized import carry_scales

plainly = torch._C.DisableTorchFunctionSubclass
"""Treat stand-ins as plain tensors inside: much quicker than to ask their class."""
_called_plainly: Callable[..., Any] = torch._C._disabled_torch_function_impl  # one call inside it


@cache
def single(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The expanded element of all stand-ins: NaN, if the dtype has it."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    with torch.inference_mode(mode=False):  # outlives an evaluation that asks first
        return torch.full((), value, dtype=dtype, device=device)


@cache
def hollow(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> torch.Tensor:
    """A tensor of a single shared element.  # dtype [shape]"""
    with torch.inference_mode(mode=False):
        return single(dtype, device).expand(shape)


class ConsumedGradient(torch.Tensor):
    """A gradient already used: it has a shape, and refuses all operations."""

    @classmethod
    @cache
    def of_kind(
        cls, dtype: torch.dtype, device: torch.device, shape: torch.Size
    ) -> "ConsumedGradient":
        """A stand-in of a single element, shared by gradients of this kind."""
        taken: ConsumedGradient = torch.Tensor._make_subclass(cls, hollow(dtype, device, shape))
        return taken

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """RuntimeError, for any `func`."""
        raise RuntimeError(cls.reason)

    reason = (
        "the gradient of a parameter was used after backward(): this plan updates it during"
        " backward, by the optimizer of prepare() alone. To clip or unscale gradients, plan with"
        " --clip: updates then come after backward"
    )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # as torch's
        return f"{type(self).__name__}()"


class UsedGradient(ConsumedGradient):
    """A gradient that `optimizer.step()` has used, until `zero_grad()`."""

    reason = (
        "a gradient that this plan has used is gone after optimizer.step(): look at gradients"
        " before it, under a plan with --clip, and zero them with set_to_none=True, the default of"
        " zero_grad()"
    )


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class GradientInStore:
    """One parameter's gradient in a store.

    `norm` is the whole's 2-norm, by `torch._foreach_norm`, if computed before the gradient left.
    Reads multiply the store's bytes by `factors`, in order. `shared`: this is this rank's part,
    `norm` is of all parts, and `count` is the number of ranks with a gradient, if this one had
    none. `arrived`: no move is writing it. `lent` is the gradient on the device while code works on
    it, `seen` whether a view was handed out, `pinned` whether by address, without a reference
    count, and `changed` whether the store's bytes differ from backward's.
    """

    store: Store
    offset: int  # bytes from the start of the store
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device  # the parameter's
    norm: torch.Tensor | None = None
    shared: bool = False
    count: torch.Tensor | None = None
    factors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    arrived: bool = False
    lent: torch.Tensor | None = None
    seen: bool = False
    pinned: bool = False
    changed: bool = False

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def whole(self) -> torch.Tensor:
        """The gradient on the parameter's device.  # dtype [shape]"""
        if self.shared:
            raise RuntimeError(
                "under a plan for several devices each device has a part of this gradient: it can"
                " be clipped by its norm of order 2 and by value, and unscaled, and nothing else"
            )
        return self._read()

    def _read(self) -> torch.Tensor:
        flat = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        self.store.read(self.offset, flat)
        return scaled(flat.view(self.dtype), self.factors).as_strided(self.shape, self.stride)

    def lend(self) -> torch.Tensor:
        """The gradient, or this rank's part, on the device until `take_back`."""
        if self.lent is None:
            if not self.arrived:
                raise RuntimeError(
                    "a gradient was used while it was on its way below the device: use it after"
                    " backward(), or in a hook of its own parameter"
                )
            self.lent = self._read()
        return self.lent

    def take_back(self) -> None:
        """Write the loan back if it may have changed, and free device memory."""
        lent, self.lent, self.pinned = self.lent, None, False
        if lent is None or not (self.seen or lent._version != 0):
            return
        source = torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=self.device
        ).copy_(lent)
        flat = source.as_strided((source.numel(),), (1,))
        self.store.write(self.offset, flat.view(torch.uint8))
        self.factors, self.norm, self.seen, self.changed = [], None, False, True

    @property
    def held(self) -> bool:
        """Whether a view of the loan is alive."""
        lent = self.lent
        if self.pinned:
            return True
        return lent is not None and num_holders(lent.untyped_storage()) > 1 + lent._is_view()

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the gradient by a scalar, later."""
        self.factors.append(factor)
        if self.norm is not None:
            self.norm = self.norm * factor.abs().to(self.norm) if self.shared else None


def scaled(elements: torch.Tensor, factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiply elements by scalars in turn, in place."""
    for factor in factors:
        elements.mul_(factor.to(elements.device))
    return elements


class OffloadedGradient(ConsumedGradient):
    """A stand-in for a `GradientInStore` that has a norm and can be scaled."""

    stored: GradientInStore

    @classmethod
    def of(cls, stored: GradientInStore, shape: torch.Size | None = None) -> "OffloadedGradient":
        """A one-element stand-in of the gradient's (or the whole one's) shape."""
        shape = stored.shape if shape is None else shape
        stands = hollow(stored.dtype, stored.device, shape)
        found: OffloadedGradient = torch.Tensor._make_subclass(cls, stands)
        found.stored = stored
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle clipping by norm and unscaling; run other functions on the device."""
        kwargs = kwargs or {}
        if func in _GRADIENT_LOOKS:
            return _called_plainly(func, types, args, kwargs)
        asked = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        _end_loans(asked)
        answer = _GRADIENT_ANSWERS.get(func)
        if answer is not None and not any(each.stored.lent is not None for each in asked):
            return answer(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_"):
            return _each_alone(func, args, kwargs)
        for each in asked:
            if each.stored.shared and func not in _BY_VALUE:
                each.stored.whole()  # raises, with the possible operations
        return _on_device(func, args, kwargs, writes=name in _ADDRESSES)


def _end_loans(gradients: Sequence[OffloadedGradient]) -> None:
    """End this thread's loans from the same stores that are no longer referenced."""
    stores = {id(each.stored.store) for each in gradients}
    loans = _loans()
    for stored in [one for ref in loans if (one := ref()) is not None]:
        if id(stored.store) in stores and not stored.held:
            stored.take_back()
    loans[:] = [ref for ref in loans if (one := ref()) is not None and one.lent is not None]


def _loans() -> list[weakref.ref[GradientInStore]]:
    found: list[weakref.ref[GradientInStore]] = _of_thread.__dict__.setdefault("loans", [])
    return found


_of_thread = local()


def _on_device(func: Any, args: Any, kwargs: Any, *, writes: bool) -> Any:
    """Call a function on the gradients, lent for it."""
    stands: dict[int, OffloadedGradient] = {}

    def lent(leaf: Any) -> Any:
        if not isinstance(leaf, OffloadedGradient):
            return leaf
        if leaf.stored.lent is None:
            _loans().append(weakref.ref(leaf.stored))
        found = leaf.stored.lend()
        if writes:  # by address: no version counts writes
            leaf.stored.seen = leaf.stored.pinned = True
        stands[id(found)] = leaf
        return found

    result = func(*tree_map(lent, args), **tree_map(lent, kwargs))
    memories = {stand.stored.lend().untyped_storage()._cdata: stand for stand in stands.values()}
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and id(leaf) not in stands:
            stand = memories.get(leaf.untyped_storage()._cdata)
            if stand is not None:
                stand.stored.seen = True  # a view may be written
    return tree_map(lambda leaf: stands.get(id(leaf), leaf), result)


def _each_alone(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """A `_foreach` function on one gradient at a time: only one is on the device."""
    count, results = len(args[0]), list[Any]()

    def of(value: Any, number: int) -> Any:
        per_tensor = isinstance(value, list | tuple) and len(value) == count
        return [value[number]] if per_tensor else value

    for number in range(count):
        given = [of(value, number) for value in args]
        named = {key: of(value, number) for key, value in kwargs.items()}
        own = given[0][0]
        if isinstance(own, OffloadedGradient) and own.stored.shared and func not in _BY_VALUE:
            own.stored.whole()
        results += _on_device(func, given, named, writes=False) or []
        if isinstance(own, OffloadedGradient):
            _end_loans([own])
    return results or None


def _vector_norm(gradient: torch.Tensor, ord: float = 2.0) -> torch.Tensor:  # noqa: A002 (torch's)
    assert isinstance(gradient, OffloadedGradient)
    stored = gradient.stored
    if stored.shared or stored.device.type == "cpu":  # both norms have the same bits
        return _norms([gradient], ord)[0]
    norm: torch.Tensor = torch.linalg.vector_norm(stored.whole(), ord)
    return norm


def _norms(
    gradients: Sequence[torch.Tensor],
    ord: float = 2.0,  # noqa: A002 (torch's)
    **options: Any,
) -> list[torch.Tensor]:
    """The norms of `torch._foreach_norm`, independent of the rest of the list."""
    norms: list[torch.Tensor] = []
    for gradient in gradients:
        if isinstance(gradient, OffloadedGradient):
            stored = gradient.stored
            if ord == 2.0 and stored.norm is not None and not options:
                norms.append(stored.norm)
                continue
            gradient = stored.whole()
        norms += torch._foreach_norm([gradient], ord, **options)
    return norms


def _mul_(gradient: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    assert isinstance(gradient, OffloadedGradient)
    scalar = factor if isinstance(factor, torch.Tensor) else torch.tensor(factor)
    if scalar.dim():
        if gradient.stored.shared:
            gradient.stored.whole()  # raises, with the possible operations
        changed: torch.Tensor = _on_device(torch.Tensor.mul_, (gradient, scalar), {}, writes=False)
        return changed
    gradient.stored.scale(_as_read(scalar, gradient.stored.dtype))
    return gradient


def _as_read(factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A scalar as kernels read it beside elements of `dtype`: only CPU kernels do not round it."""
    return factor if factor.device.type == "cpu" else factor.to(dtype)


def _foreach_mul_(gradients: Sequence[torch.Tensor], factor: Any) -> None:
    if isinstance(factor, list | tuple):
        _each_alone(torch._foreach_mul_, (gradients, factor), {})
        return
    if isinstance(factor, torch.Tensor):
        factor = _as_read(factor, gradients[0].dtype)  # one for all
    for gradient in gradients:
        gradient.mul_(factor)


def _unscale_(
    gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    """Unscale for `GradScaler`; the host waits for the device once, for all norms."""
    unscale: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_
    here = [each for each in gradients if not isinstance(each, OffloadedGradient)]
    if here:
        unscale(here, found_inf, inverse_scale)
    waiting = [each.stored for each in gradients if isinstance(each, OffloadedGradient)]
    known = [(stored, stored.norm) for stored in waiting if stored.norm is not None]
    finite = torch.stack([norm for _, norm in known]).isfinite().tolist() if known else []
    sound = {id(stored) for (stored, _), there in zip(known, finite, strict=True) if there}
    for stored in waiting:
        if id(stored) not in sound:
            if stored.shared and stored.norm is not None:
                found_inf.fill_(1.0)  # on every rank alike
            else:
                # A norm may overflow though no element does. A factor of one only checks.
                unscale([stored.whole()], found_inf, torch.ones_like(inverse_scale))
        stored.scale(inverse_scale)


_GRADIENT_LOOKS = {
    *(torch.Tensor.numel, torch.Tensor.size, torch.Tensor.dim),
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "is_sparse", "requires_grad")
    ),
}
"""Functions that do not read a gradient's values."""

_GRADIENT_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch._foreach_norm: _norms,
    torch.Tensor.mul_: _mul_,
    torch._foreach_mul_: _foreach_mul_,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale_,
}

_ADDRESSES = {
    *("__set__", "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "_typed_storage"),
    *("__dlpack__", "share_memory_"),
}
"""Functions whose results bypass autograd to a gradient's memory."""

_BY_VALUE = {
    *(torch.Tensor.clamp_, torch.Tensor.clamp_min_, torch.Tensor.clamp_max_, torch.clamp_),
    *(torch._foreach_clamp_min_, torch._foreach_clamp_max_),
    *(torch.Tensor.nan_to_num_, torch.Tensor.zero_, torch._foreach_zero_),
}
"""Functions of single elements: they work on a rank's part, too."""

_foreach_supported_types.append(OffloadedGradient)
"""As `DTensor` does, so that PyTorch takes norms of other gradients beside it the same way."""


_KEY, _LISTED = "_protrain_away", "_protrain_listed"


@dataclass(slots=True, kw_only=True)
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
    kind: type[nn.Parameter] = nn.Parameter  # its class on the device, from `send_away`
    away: type[nn.Parameter] | None = None  # its class until then


class AwayParameter(nn.Parameter):
    """A parameter whose values are in a store; copies and pickles include them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """RuntimeError for reads of values, except in a forward that may fetch them."""
        kwargs = kwargs or {}
        if func in _PARAMETER_LOOKS or (
            func is torch.Tensor.detach and args[0].__dict__.pop(_LISTED, False)
        ):
            return _called_plainly(func, types, args, kwargs)
        answer = _PARAMETER_ANSWERS.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, AwayParameter):
                place_of(leaf).bring(place_of(leaf).name)
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
    """The place of an offloaded parameter."""
    place: Elsewhere = parameter.__dict__[_KEY]
    return place


def send_away(*places: tuple[nn.Parameter, Elsewhere], stay: bool = False) -> None:
    """Leave expanded single elements of the right shapes, which refuse to be read.

    One call for all parameters, since every step sends all offloaded ones away. Those that `stay`
    remain views of memory that comes and goes.
    """
    for parameter, place in places:
        if _KEY in parameter.__dict__:
            come_back(parameter)
        kind = parameter.__class__
        if not stay:
            parameter.data = hollow(parameter.dtype, parameter.device, parameter.shape)
        if kind is not place.kind or place.away is None:
            place.kind, place.away = kind, _away(kind)
        parameter.__dict__[_KEY] = place
        parameter.__class__ = place.away


def come_back(*parameters: nn.Parameter) -> None:
    """Restore the parameters' classes; the caller gives them values."""
    for parameter in parameters:
        held = parameter.__dict__
        if _KEY in held:
            held.pop(_LISTED, None)
            parameter.__class__ = held.pop(_KEY).kind


def let_list(parameter: nn.Parameter) -> None:
    """Make the next `detach` return the stand-in: a state dict lists it and gets values later."""
    if isinstance(parameter, AwayParameter):
        parameter.__dict__[_LISTED] = True


@cache
def _away(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of such parameters while away."""
    return AwayParameter if kind is nn.Parameter else type(kind.__name__, (AwayParameter, kind), {})


def _with_values(parameter: nn.Parameter) -> nn.Parameter:
    """An independent parameter with the values in the store."""
    place = place_of(parameter)
    plain = nn.Parameter(place.values(), parameter.requires_grad)
    plain.__class__ = place.kind
    own = {k: v for k, v in parameter.__dict__.items() if k not in (_KEY, _LISTED)}
    plain.__dict__.update(own)
    carry_scales(plain, plain, torch.clone)  # its own: a copy is moved in place
    return plain


def _like(
    make: Callable[..., torch.Tensor], parameter: AwayParameter, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """`make`, on a tensor with the parameter's later layout."""
    kwargs.setdefault("device", parameter.device)
    stride = place_of(parameter).stride
    shaped = torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype, device="meta")
    return make(shaped, *args, **kwargs)


_PROPERTIES = (
    "shape dtype device layout requires_grad grad is_leaf grad_fn ndim itemsize nbytes names name"
    " is_cpu is_cuda is_xpu is_mps is_mtia is_meta is_sparse is_sparse_csr is_quantized is_nested"
    " is_mkldnn output_nr retains_grad grad_dtype _version"
    " _backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = (
    "size dim numel nelement ndimension element_size __len__ is_floating_point is_complex is_signed"
    " get_device requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad"
    " is_inference is_same_size __dir__"
)
_PARAMETER_LOOKS = {
    *(torch.is_floating_point, torch.is_complex, torch.is_signed, torch.numel),
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    *(
        getattr(found, access)
        for found in (getattr(torch.Tensor, name, None) for name in _PROPERTIES.split())
        for access in ("__get__", "__set__", "__delete__")
        if hasattr(found, access)
    ),
}
"""Functions that do not read a parameter's values."""


def _by_kind(
    change: Callable[..., torch.Tensor], tensor: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """Answer functions that need only another tensor's shape or dtype."""
    if isinstance(tensor, AwayParameter):
        place_of(tensor).bring(place_of(tensor).name)
    return change(tensor, other)


_PARAMETER_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.stride: lambda parameter, dim=None: (
        place_of(parameter).stride if dim is None else place_of(parameter).stride[dim]
    ),
    torch.Tensor.is_contiguous: lambda parameter, **kwargs: torch.empty_strided(
        parameter.shape, place_of(parameter).stride, device="meta"
    ).is_contiguous(**kwargs),
    **{
        asked: partial(_by_kind, change)
        for asked, change in (
            (torch.Tensor.view_as, lambda tensor, other: tensor.view(other.shape)),
            (torch.Tensor.reshape_as, lambda tensor, other: tensor.reshape(other.shape)),
            (torch.Tensor.expand_as, lambda tensor, other: tensor.expand(other.shape)),
            (torch.Tensor.type_as, lambda tensor, other: tensor.to(other.device, other.dtype)),
        )
    },
    torch.Tensor.__repr__: AwayParameter.__repr__,
    torch.Tensor.__format__: lambda parameter, _: repr(parameter),
    **{
        make: partial(_like, make)
        for make in (
            *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
            *(torch.rand_like, torch.randn_like, torch.Tensor.new_empty, torch.Tensor.new_zeros),
            *(torch.Tensor.new_ones, torch.Tensor.new_full),
        )
    },
}
"""Functions that the stand-in's single element would answer wrongly."""
