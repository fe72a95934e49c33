"""Forwards that run twice: now, and again when backward first asks for saved tensors.

As in `torch.utils.checkpoint`, autograd's saved tensors become places; the second run fills them
and ends with the last one. It has the first run's random states, autocast and default device. A
model's own checkpoints inside are PyTorch's. PyTorch's version costs the interpreter four times as
much (docs/decisions/seconds.md): it supports graphs with several or partial backwards, or a
backward within the forward, which a plan refuses.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from protrain_runtime.devices import device as devices

Context = AbstractContextManager[object]


def run_twice(
    call: Callable[..., object],
    *inputs: torch.Tensor,
    contexts: tuple[Context, Context] | None = None,
) -> Any:
    """`call(*inputs)`, now in the first of the contexts, and again in backward in the second."""
    first, again = contexts or (nullcontext(), nullcontext())
    run = _Run(call, inputs, again)
    with saved_tensors_hooks(run.pack, _unpack), first:
        return call(*inputs)


def as_now(*inputs: torch.Tensor) -> Callable[[], Context]:
    """Make contexts for second runs on such inputs, with the present random states and autocast."""
    return _Run(lambda *_: None, inputs, nullcontext())._as_then


class Saved(torch.autograd.Function):
    """Saves tensors through the active hooks. `anchor` makes autograd record a graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Slot:
    """The place of one saved tensor, which autograd owns."""

    run: "_Run"
    value: torch.Tensor | None = None


def _unpack(slot: Any) -> torch.Tensor:
    value: torch.Tensor | None = slot.value
    while value is None:  # another model's backward, in another thread, may end runs meanwhile
        slot.run.again()
        value = slot.value
    slot.value = None  # autograd mostly asks once
    slot.run.unasked -= 1
    return value


def end_runs() -> None:
    """Free unread results of second runs: a unit's backward is over."""
    while RAN:
        run = RAN.pop()()
        if run is not None and run.unasked:
            for reference, _ in run.slots:
                if (slot := reference()) is not None:
                    slot.value = None


class _Full(BaseException):  # not an Exception: a block may catch those
    """All places are filled."""


_Kind = tuple[torch.Size, torch.dtype, torch.device]


class _Run:
    """One forward, with the inputs of its second run."""

    def __init__(
        self, call: Callable[..., object], inputs: tuple[torch.Tensor, ...], context: Context
    ) -> None:
        self._call, self._context = call, context
        self.unasked = 0  # filled places
        self.slots: list[tuple[ref[_Slot], _Kind]] = []
        # Inference tensors cannot be saved, and are never written to.
        self._inputs = [each if each.is_inference() else None for each in inputs]
        anchor = torch.empty(0, requires_grad=True)
        kept = [each for each in inputs if not each.is_inference()]
        self._saved: Any = Saved.apply(anchor, *kept)  # type: ignore[no-untyped-call]
        self._random = torch.get_rng_state()
        there = {each.device for each in inputs if not devices.on_host(each.device)}
        self._states = [(where, devices.random_state(where)) for where in there]
        self._casts = _casts({"cpu", *(each.device.type for each in inputs)} - {"meta"})
        modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
        self._devices = [mode for mode in modes if isinstance(mode, DeviceContext)][-1:]

    def pack(self, tensor: torch.Tensor) -> _Slot:
        """Keep a place for a tensor."""
        slot = _Slot(self)
        self.slots.append((ref(slot), (tensor.shape, tensor.dtype, tensor.device)))
        return slot

    def again(self) -> None:
        """Fill the places that autograd still holds."""
        RAN.append(ref(self))
        saved = iter(self._saved.grad_fn.saved_tensors)
        # Copies, with their own hooks and gradients.
        inputs = [next(saved) if each is None else each for each in self._inputs]
        inputs = [each.detach().requires_grad_(each.requires_grad) for each in inputs]
        places = iter(self.slots)
        left, alike = len(self.slots), True

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal left, alike
            reference, kind = next(places)
            alike &= kind == (tensor.shape, tensor.dtype, tensor.device)
            tensor = tensor.detach() if tensor.requires_grad else tensor
            if (slot := reference()) is not None:
                slot.value = tensor
                self.unasked += 1
            left -= 1
            if not left:
                raise _Full
            return tensor

        try:
            hooks = saved_tensors_hooks(fill, lambda tensor: tensor)
            with hooks, torch.enable_grad(), ExitStack() as stack:
                stack.enter_context(self._as_then())
                stack.enter_context(self._context)
                self._call(*inputs)
        except _Full:
            pass
        if left or not alike:
            raise RuntimeError(
                "a block that the plan recomputes saved other tensors in backward than in forward:"
                " it has to compute the same every time. Profile the model as it runs now"
            )

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """Restore the first run's random states, autocast and default device inside."""
        now = torch.get_rng_state()
        states = [(where, devices.random_state(where)) for where, _ in self._states]
        with ExitStack() as stack:
            if self._casts != _casts(kind for kind, *_ in self._casts):
                for kind, enabled, dtype, caches in self._casts:
                    cast = torch.amp.autocast(kind, dtype, enabled, caches)
                    stack.enter_context(cast)
            for mode in self._devices:
                stack.enter_context(mode)
            try:
                torch.set_rng_state(self._random)
                for where, state in self._states:
                    devices.set_random_state(where, state)
                yield
            finally:
                torch.set_rng_state(now)
                for where, state in states:
                    devices.set_random_state(where, state)


RAN: list[ref[_Run]] = []
"""Runs that this unit's backward has rerun."""


def _casts(kinds: Any) -> list[tuple[str, bool, torch.dtype, bool]]:
    """Autocast states by device type, in order."""
    caches = torch.is_autocast_cache_enabled()
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), caches)
        for kind in sorted(kinds)
        if torch.amp.is_autocast_available(kind)
    ]
