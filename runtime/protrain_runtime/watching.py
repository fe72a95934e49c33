"""What the first steps of a training loop take, beside what their plan promises.

On an accelerator the allocator counts by itself; its peak statistics start anew at every slot of
the steps that are watched. On a CPU the profiler counts, which costs a step several times its
seconds, and memory that stays (see `recording.measure_step`): it is asked for, and not done where
the process has a limit, or another profiler runs.
"""

import resource
import warnings
import weakref
from contextlib import suppress

import torch
from torch import nn

from protrain_plan.records.commands import profile_command
from protrain_plan.records.plan import Plan, TierBytes
from protrain_plan.simulation.promises import exceeded
from protrain_runtime import devices
from protrain_runtime.engine import Engine
from protrain_runtime.measure import MemoryMeter, device_of
from protrain_runtime.optimizer import PlannedOptimizer
from protrain_runtime.recording import live, slot_peaks

_FIRST, _LAST = 1, 2
"""Of the steps watched, from 0: all optimizer states are there from the second on."""


class Watch:
    """Compares the second step, on an accelerator the third too, and warns once of more.

    Whatever fails here ends the watch, and not the training.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, engine: Engine, optimizer: PlannedOptimizer
    ) -> None:
        self._plan, self._device = plan, device_of(model)
        self._last = _FIRST if devices.on_host(self._device) else _LAST
        # The engine holds this; a model that is dropped is freed at once.
        self._model, self._engine = weakref.ref(model), weakref.ref(engine)
        self._num_steps = 0
        self._evaluations = 0  # calls of the model in this step that were no forward of it
        self._meter: MemoryMeter | None = None
        engine.observer = self._observe
        self._hooks = (
            optimizer.register_step_pre_hook(lambda *_: self._observe("update")),
            optimizer.register_step_post_hook(lambda *_: self._end_step()),
        )

    def stop(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        engine = self._engine()
        if engine is not None and engine.observer == self._observe:
            engine.observer = None
        meter, self._meter = self._meter, None
        if meter is not None:
            with suppress(Exception):
                meter.__exit__(None, None, None)

    def _observe(self, what: str) -> None:
        try:
            if what == "slot 0" and self._meter is None and self._num_steps >= _FIRST:
                self._begin_step()
            elif what in ("begin", "slot 0"):
                self._evaluations += 1 if what == "begin" else -1
            if self._meter is not None:
                self._meter.mark(what)
        except Exception:  # noqa: BLE001 (training goes on)
            self.stop()

    def _begin_step(self) -> None:
        model = self._model()
        if model is None or not _may_count(self._device):
            self.stop()
            return
        standing, start = live(model, self._device)
        meter = MemoryMeter(self._device, start_bytes=start, standing=standing)
        meter.__enter__()
        self._meter, self._evaluations = meter, 0

    def _end_step(self) -> None:
        self._num_steps += 1
        meter, self._meter = self._meter, None
        said = None
        try:
            if meter is not None:
                meter.__exit__(None, None, None)
                if not self._evaluations:  # those are promised apart (`plan --explain`)
                    said = self._said(meter)
        except Exception:  # noqa: BLE001 (training goes on)
            self.stop()
        if said is not None or self._num_steps > self._last:
            self.stop()
        if said is not None:
            warnings.warn(said, RuntimeWarning, stacklevel=3)

    def _said(self, meter: MemoryMeter) -> str | None:
        plan = self._plan
        peak = TierBytes(
            device=max(segment.peak_bytes for segment in meter.segments), context=0, host=0, disk=0
        )
        found = exceeded(plan, peak, slot_peaks(meter.segments))
        if not found:
            return None
        command = profile_command(plan.workload, optimizer=plan.optimizer, output="profile.yaml")
        return (
            f"step {self._num_steps} took more memory than its plan promises, with all tensors of"
            f" this process on {self._device}: {found[0]}. If no other tensors of yours are there,"
            f" measure and plan again: {command}. prepare(..., watch=False) does not look"
        )


def _may_count(device: torch.device) -> bool:
    """Whether counting bytes is possible without harm to what else the process does."""
    if not devices.on_host(device):
        return True
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return limit == resource.RLIM_INFINITY and not torch._C._autograd._profiler_enabled()
