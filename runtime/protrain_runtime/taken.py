"""What stands in `.grad` once a gradient has gone to its optimizer.

A plan whose updates are in backward has updated offloaded parameters when `backward()` ends, and
their gradients are gone. Code that looks at them there, such as gradient clipping or a gradient
scaler, would silently miss them; it gets an error instead. After the step something stands there
until gradients are zeroed: plain PyTorch would add the next ones to the last.
"""

from functools import cache
from typing import Any

import torch


@cache
def single(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The one element that stands, expanded, for all that is elsewhere.  # dtype []

    One for all of them: an accelerator's allocator gives every tensor 512 bytes. It is no number
    where there is such a value, for ways to read it that nothing can refuse (`torch.tensor(p)`).
    """
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    with torch.inference_mode(mode=False):  # it outlives an evaluation that asks first
        return torch.full((), value, dtype=dtype, device=device)


class TakenGradient(torch.Tensor):
    """A gradient that was used already: it has a shape, and no operation accepts it."""

    @classmethod
    def standing_for(cls, gradient: torch.Tensor) -> "TakenGradient":
        """One of the gradient's shape, dtype and device that holds a single element."""
        stands = single(gradient.dtype, gradient.device).expand(gradient.shape)
        taken: TakenGradient = torch.Tensor._make_subclass(cls, stands)
        return taken

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """RuntimeError, whatever `func` is."""
        raise RuntimeError(cls.reason)

    reason = (
        "the gradient of an offloaded parameter was used after backward(): this plan updates"
        " such parameters during backward. To clip or unscale gradients, plan with --clip:"
        " updates then come after backward"
    )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # as torch's
        return f"{type(self).__name__}()"


class UsedGradient(TakenGradient):
    """A gradient that `optimizer.step()` has used, until `zero_grad()`."""

    reason = (
        "the gradient of an offloaded parameter is gone after optimizer.step(): look at gradients"
        " before it, under a plan with --clip, and zero them with set_to_none=True, the default of"
        " zero_grad()"
    )
