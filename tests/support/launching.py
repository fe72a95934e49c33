"""The host's work of a planned step beyond plain PyTorch's, in calls.

Blocks of nine matrices run on the emulated device, whose streams drop their work, so that the
thread that launches and the threads of lanes are all that takes time. What plain PyTorch does in
the same step is taken off.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from protrain_runtime import prepare, restore
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
    Schedule,
    UnitPlan,
)
from tests.emulated.device import TYPE, dropping, extension
from tests.support.runtime_cases import plan_for

BLOCKS, MATRICES, WIDTH = 8, 9, 64
PIECE_BYTES = 2**20
_WARM_STEPS = 6

_HOST, _DEVICE = Placement(tier="host"), Placement(tier="host", update_on_device=True)

PLANS: Mapping[str, tuple[Activations, Placement]] = {
    "E": (RECOMPUTE, PERSISTENT),
    "S": (Activations(tier="host"), PERSISTENT),
    "O": (KEEP, _HOST),
    "OE": (RECOMPUTE, _HOST),
    "D": (KEEP, _DEVICE),
    "F": (Activations(tier="host"), _HOST),
}
"""Activations and states of every block: recompute, swap, offload, with an update on the device."""


class Layers(nn.Module):
    """Blocks that do little besides being launched."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES)))
            for _ in range(BLOCKS)
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of what the last block makes.  # scalar"""
        for layer in self.layers:
            values = layer(values)
        return values.sum()


def _units(plan: str) -> list[UnitPlan]:
    activations, states = PLANS[plan]
    schedule = Schedule(forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=1, update_drain=1)
    ends = [
        UnitPlan(name=name, kind="part", activations=KEEP, states=PERSISTENT)
        for name in ("(input)", "(output)")
    ]
    blocks = [
        UnitPlan(name=f"layers.{n}", activations=activations, states=states, schedule=schedule)
        for n in range(BLOCKS)
    ]
    return [ends[0], *blocks, ends[1]]


@dataclass(frozen=True)
class Training:
    """A model's steps on the emulated device, by a plan or, where `plan` is empty, without one."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    values: torch.Tensor
    plan: str

    @staticmethod
    def of(plan: str = "", *, lane_delay: Callable[[], float] | None = None) -> "Training":
        """A model at its first step."""
        extension()
        device = torch.device(TYPE, 0)
        torch.manual_seed(0)
        model = Layers().to(device)
        factory = partial(torch.optim.AdamW, lr=1e-3, fused=True)
        values = torch.ones(WIDTH, WIDTH, device=device)
        if not plan:
            return Training(model, factory(model.parameters()), values, plan)
        decided = plan_for(model, _units(plan), piece_bytes=PIECE_BYTES)
        prepared, optimizer = prepare(
            model, decided, optimizer=factory, watch=False, lane_delay=lane_delay
        )
        return Training(prepared, optimizer, values, plan)

    def step(
        self,
        watch: Callable[..., object],
        *,
        gate: threading.Event | None = None,
        updates: bool = True,
    ) -> None:
        """One step; `watch` is called in autograd's thread first, `gate` opened after backward."""
        loss = self.model(self.values)
        loss.register_hook(watch)
        loss.backward()
        if gate is not None:
            gate.set()
        if updates:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def warm(self) -> None:
        """Take the first steps, whose work is done: what is kept from then on goes by values."""
        for _ in range(_WARM_STEPS):
            self.step(lambda _: None, updates=bool(self.plan))
        torch.accelerator.synchronize()

    def end(self) -> None:
        """Take the plan off again."""
        if self.plan:
            restore(self.model)

    @property
    def steps_itself(self) -> bool:
        """Whether the plain step that is taken off has an update by the loop's own optimizer."""
        return bool(self.plan) and PLANS[self.plan][1].is_persistent


class _Counting:
    """Calls of functions by kind: of Python, of torch's, and of those in lanes' threads."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.on = False

    def event(self, _: Any, event: str, function: Any) -> None:
        if not self.on or event not in ("call", "c_call"):
            return
        kind = "python"
        if event == "c_call":
            owner = getattr(function, "__self__", None)
            module = getattr(function, "__module__", None) or type(owner).__module__
            held = isinstance(owner, torch.Tensor | torch.UntypedStorage)
            kind = "torch" if held or str(module).startswith("torch") else "builtin"
        lane = threading.current_thread().name.startswith("protrain ")
        self.found[f"lanes: {kind}" if lane else kind] += 1

    def here(self, *_: object) -> None:
        sys.setprofile(self.event)


def calls(plan: str) -> dict[str, int]:
    """Calls per block of a step beyond a plain one, by kind; no clock, and no other process."""
    counting = _Counting()
    threading.setprofile(counting.event)  # of lanes' threads, which start with the plan
    try:
        planned, plain = Training.of(plan), Training.of()
        for training in (planned, plain):
            training.warm()
        with dropping():
            found = _counted(planned, counting)
            base = _counted(plain, counting, updates=planned.steps_itself)
            planned.end()
    finally:
        threading.setprofile(None)
    return {kind: round((found[kind] - base[kind]) / BLOCKS) for kind in sorted(found)}


def _counted(training: Training, counting: _Counting, *, updates: bool = True) -> Counter[str]:
    for counts in (False, True):  # functions are seen by threads that have run once
        counting.on = counts
        sys.setprofile(counting.event)
        try:
            training.step(counting.here, updates=updates)
        finally:
            sys.setprofile(None)
        torch.accelerator.synchronize()
        counting.on = False
    found, counting.found = counting.found, Counter()
    return found
