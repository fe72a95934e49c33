"""Gradients that wait below the device for an update after backward, and what stands in `.grad`.

Between `backward()` and `step()` such a gradient is in host memory or on disk. Its stand-in in
`.grad` answers what clipping by a norm and unscaling ask of a gradient, so that
`torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler` run as they are: a norm is computed
while the gradient is on the device (or of the whole gradient, back there by itself), and a factor
is noted and multiplied in, range by range, when the optimizer works on the gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from protrain_runtime.stores import HostStore, Store
from protrain_runtime.taken import TakenGradient, single


@dataclass(slots=True, kw_only=True)
class Waiting:
    """One parameter's gradient in a store.

    `norm` is that of order 2 of the whole, where it was computed before the gradient left. The
    store's bytes are multiplied by `factors`, in order, when they are read. `shared`: it is this
    rank's part of a gradient, `norm` that of all parts, and `count` says how many ranks had one,
    where this one had none.
    """

    store: Store
    offset: int  # bytes from the start of the store
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device  # that of the parameter
    norm: torch.Tensor | None = None
    shared: bool = False
    count: torch.Tensor | None = None
    factors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def whole(self) -> torch.Tensor:
        """The gradient on the parameter's device.  # dtype [shape]"""
        if self.shared:
            raise RuntimeError(
                "under a plan for several devices, a gradient is clipped by its norm of order 2"
            )
        flat = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        self.store.read(self.offset, flat)
        return scaled(flat.view(self.dtype), self.factors).as_strided(self.shape, self.stride)

    def is_none(self) -> bool:
        """Whether no rank had a gradient."""
        return self.count is not None and not self.count.item()

    def in_host(self, low: int, high: int) -> torch.Tensor:
        """A range of the elements where they lie in host memory.  # dtype [high - low]"""
        assert isinstance(self.store, HostStore)
        size = self.dtype.itemsize
        return self.store.view(self.offset + low * size, (high - low) * size).view(self.dtype)

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the gradient by a scalar, later."""
        self.factors.append(factor)
        if self.norm is not None:
            self.norm = self.norm * factor.abs().to(self.norm) if self.shared else None


def scaled(elements: torch.Tensor, factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiply elements by scalars, one after the other, in place."""
    for factor in factors:
        elements.mul_(factor.to(elements.device))
    return elements


class WaitingGradient(TakenGradient):
    """What stands for a `Waiting` gradient: it can be asked for its norm, and scaled."""

    waiting: Waiting

    @classmethod
    def of(cls, waiting: Waiting, shape: torch.Size | None = None) -> "WaitingGradient":
        """A stand-in of the gradient's shape, dtype and device that holds a single element.

        `shape` is that of the whole gradient, where this rank has a part of it.
        """
        expanded = single(waiting.dtype, waiting.device).expand(
            waiting.shape if shape is None else shape
        )
        found: WaitingGradient = torch.Tensor._make_subclass(cls, expanded)
        found.waiting = waiting
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """RuntimeError for whatever clipping by a norm and unscaling do not use."""
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        answer = _ANSWERS.get(func)
        if answer is None:
            raise RuntimeError(
                "the gradient of an offloaded parameter waits below the device for its update: it"
                " can be clipped by its norm (torch.nn.utils.clip_grad_norm_) and unscaled"
                " (torch.amp.GradScaler), and nothing else"
            )
        return answer(*args, **(kwargs or {}))


def _vector_norm(gradient: torch.Tensor, ord: float = 2.0) -> torch.Tensor:  # noqa: A002 (torch's)
    assert isinstance(gradient, WaitingGradient)
    waiting = gradient.waiting
    if ord == 2.0 and waiting.norm is not None:
        return waiting.norm
    norm: torch.Tensor = torch.linalg.vector_norm(waiting.whole(), ord)
    return norm


def _norms(
    gradients: Sequence[torch.Tensor],
    ord: float = 2.0,  # noqa: A002 (torch's)
) -> list[torch.Tensor]:
    return [
        _vector_norm(gradient, ord)
        if isinstance(gradient, WaitingGradient)
        else torch._foreach_norm([gradient], ord)[0]
        for gradient in gradients
    ]


def _mul_(gradient: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    assert isinstance(gradient, WaitingGradient)
    scalar = factor if isinstance(factor, torch.Tensor) else torch.tensor(factor)
    if scalar.dim():
        raise RuntimeError("a gradient that waits below the device is scaled by single numbers")
    gradient.waiting.scale(scalar)
    return gradient


def _foreach_mul_(gradients: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
    for gradient in gradients:
        gradient.mul_(factor)


def _unscale_(
    gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    unscale: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_
    for gradient in gradients:
        if not isinstance(gradient, WaitingGradient):
            unscale([gradient], found_inf, inverse_scale)
            continue
        norm = gradient.waiting.norm
        if gradient.waiting.shared and norm is not None:
            found_inf.masked_fill_(~norm.isfinite(), 1.0)  # on every rank alike
        elif norm is None or not norm.isfinite():
            # A norm may overflow where no element does. A factor of one only checks.
            unscale([gradient.waiting.whole()], found_inf, torch.ones_like(inverse_scale))
        gradient.waiting.scale(inverse_scale)


_LOOKS = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.numel,
    torch.Tensor.size,
    torch.Tensor.dim,
}
"""What tells nothing of a gradient's values."""

_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch._foreach_norm: _norms,
    torch.Tensor.mul_: _mul_,
    torch._foreach_mul_: _foreach_mul_,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale_,
}
