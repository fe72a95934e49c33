"""The runtime's own costs on this machine: of moves in the thread that launches, and in lanes."""

import statistics
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER, optimizer_factory
from protrain_runtime import prepare, record, restore
from protrain_runtime.contract.records.hardware import LaunchKind, MoveLaunch, TierName
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    Activations,
    Budgets,
    Placement,
    Plan,
    Prediction,
    Schedule,
    StepSettings,
    TierBytes,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import Workload
from protrain_runtime.contract.units import four_digits
from protrain_runtime.devices.device import HOST, on_host
from protrain_runtime.diagnostics.matching import model_fingerprint

_LAYERS = 6
_MATRICES = 9  # of a layer: a decoder block has as many parameters
_LAYER_WIDTH = 64  # 16 KiB of weights, and of saved tensors: the least that is swapped
_STEPS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Medians over steps, of a move each.

    move_s      of the processor, in the thread that computes or launches compute: submitting a move
                and ending it, with the share of a slot's hooks
    transfer_s  in a lane, of a transfer of few bytes
    piece_s     in the update lane, of a piece of few parameters
    """

    move_s: float
    transfer_s: float
    piece_s: float


class _Layers(nn.Module):
    """Layers of several products each, by kernels without a library workspace.

    With a bias, cuBLASLt keeps 1 MiB, unknown to a profile of the same process. `scale` lies
    outside the layers, which may be frozen.
    """

    def __init__(self, matrices: int = _MATRICES, *, trained: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(_LAYER_WIDTH, _LAYER_WIDTH, bias=False) for _ in range(matrices))
            )
            for _ in range(_LAYERS)
        )
        self.layers.requires_grad_(trained)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens * self.scale
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens.sum()


def measure_overheads(
    spill_directory: Path,
    *,
    device: torch.device = HOST,
    optimizer: str = DEFAULT_OPTIMIZER,
    cached: bool = False,
) -> Overheads:
    """Overheads of this machine's processor, with everything that a plan can move on the next tier.

    To a disk past the page cache, or through it if `cached`. Processor seconds, not the clock's, if
    it computes: the timeline models waits. About 1 s; the random state is restored.
    """
    tier: TierName = "disk" if on_host(device) else "host"
    case = _Case(Activations(tier=tier), Placement(tier=tier))
    plain, planned = case.layers(_MATRICES, device), case.layers(_MATRICES, device)
    factory = optimizer_factory(optimizer)
    clock = _LaunchingClock(torch.ones(_LAYER_WIDTH, _LAYER_WIDTH, device=device))
    plain_stepper = factory(plain.parameters())
    plan = case.plan(planned, device)
    model, stepper = prepare(
        planned,
        replace(plan, settings=replace(plan.settings, page_cache_bytes=2**30 * cached)),
        optimizer=factory,
        spill_directory=spill_directory,
    )
    try:
        plain_cpu, planned_cpu = map(sum, clock.medians((plain, plain_stepper), (model, stepper)))
        transfers: list[float] = []
        updates: list[float] = []
        with record(model) as recorder:
            for _ in range(_STEPS):
                clock.step(model, stepper)
                moves = [e for e in recorder.recording().events if e.lane != "compute"]
                for found, wanted in ((transfers, False), (updates, True)):
                    seconds = [
                        move.end_s - move.start_s
                        for move in moves
                        if move.name.startswith("update") is wanted
                    ]
                    found.append(statistics.mean(seconds))
    finally:
        restore(model)
    return Overheads(
        move_s=max(0.0, planned_cpu - plain_cpu) / len(moves),
        transfer_s=statistics.median(transfers),
        piece_s=statistics.median(updates),
    )


class _Case(NamedTuple):
    """A short plan: its decisions for every layer, and whether layers are trained."""

    activations: Activations
    states: Placement
    trained: bool = True

    def layers(self, matrices: int, device: torch.device) -> _Layers:
        """Layers for it; the random state is restored."""
        with torch.random.fork_rng(devices=[]):
            return _Layers(matrices, trained=self.trained).to(device)

    def plan(self, model: nn.Module, device: torch.device) -> Plan:
        """The plan of these layers."""
        schedule = Schedule(
            forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=1, update_drain=1
        )
        first, last = (
            UnitPlan(name=name, kind="part", activations=KEEP, states=PERSISTENT)
            for name in ("(input)", "(output)")
        )
        layers = tuple(
            UnitPlan(
                name=f"layers.{number}",
                activations=self.activations,
                states=self.states,
                schedule=schedule,
            )
            for number in range(_LAYERS)
        )
        workload = Workload(
            model="the probe's layers",
            model_config="",
            batch_size=_LAYER_WIDTH,
            seq_len=1,
            dtype="float32",
            device=device.type,
            seed=0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return plan_to_measure(model, (first, *layers, last), workload)


_STREAMED = Placement(tier="host", update_on_device=True)
_CASES: Mapping[str, _Case] = {
    "frozen": _Case(KEEP, Placement(tier="host"), trained=False),
    "swapped": _Case(Activations(tier="host"), PERSISTENT),
    "offloaded": _Case(KEEP, Placement(tier="host")),
    "streamed": _Case(KEEP, _STREAMED),
}


def measure_launches(device: torch.device) -> tuple[MoveLaunch, ...]:
    """Seconds by kind of move of the thread that launches an accelerator's work.

    By layers of one parameter and of nine, in short plans that do little else; about 5 s.
    """
    one, nine = (_launch_seconds(matrices, device) for matrices in (1, _MATRICES))
    each = {kind: max(0.0, (nine[kind] - one[kind]) / (_MATRICES - 1)) for kind in one}
    return tuple(
        MoveLaunch(
            kind=kind,
            seconds=four_digits(max(0.0, one[kind] - tensor_s)),
            tensor_s=four_digits(tensor_s),
        )
        for kind, tensor_s in each.items()
    )


def _launch_seconds(matrices: int, device: torch.device) -> dict[LaunchKind, float]:
    """Seconds of a move, by kind, of layers with so many parameters."""
    factory = optimizer_factory(DEFAULT_OPTIMIZER)
    clock = _LaunchingClock(torch.ones(_LAYER_WIDTH, _LAYER_WIDTH, device=device))
    passes: dict[str, float] = {}  # of a layer, beyond plain PyTorch's forward and backward
    updates: dict[str, float] = {}
    for name, case in _CASES.items():
        plain, planned = case.layers(matrices, device), case.layers(matrices, device)
        plain_stepper = factory(p for p in plain.parameters() if p.requires_grad)
        model, stepper = prepare(
            planned, case.plan(planned, device), optimizer=factory, watch=False
        )
        try:
            (plain_s, _), (passes_s, update_s) = clock.medians(
                (plain, plain_stepper), (model, stepper)
            )
        finally:
            restore(model)
        passes[name], updates[name] = (passes_s - plain_s) / _LAYERS, update_s / _LAYERS
    # Every layer is fetched for its forward and for its backward.
    streamed = passes["streamed"] - passes["frozen"] + updates["streamed"]
    return {
        "fetch": passes["frozen"] / 2,
        "swap": passes["swapped"] / 2,
        "spill gradients": passes["offloaded"] - passes["frozen"],
        "update": updates["offloaded"],
        "streamed update": streamed / 3,  # a piece is read, updated and written
    }


@dataclass(eq=False)
class _LaunchingClock:
    """Processor seconds of a model's threads: this one, and autograd's on a device."""

    tokens: torch.Tensor
    _threads: set[int] = field(default_factory=lambda: {threading.get_ident()}, init=False)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        """Seconds of a step's forward and backward, and of the optimizer's part."""
        start = self._seconds()
        loss = model(self.tokens)
        # Autograd calls the hook in the thread that runs backward on the device.
        loss.register_hook(lambda _: self._threads.add(threading.get_ident()))
        loss.backward()
        passed = self._seconds()
        optimizer.step()
        optimizer.zero_grad()
        return passed - start, self._seconds() - passed

    def medians(
        self, *trained: tuple[nn.Module, torch.optim.Optimizer]
    ) -> list[tuple[float, float]]:
        """The median of each part of `step`, after warm-up steps, by models that take turns."""
        steps = [[self.step(*each) for each in trained] for _ in range(3 + _STEPS)][3:]
        parts = (zip(*each, strict=True) for each in zip(*steps, strict=True))
        return [(statistics.median(passes), statistics.median(rest)) for passes, rest in parts]

    def _seconds(self) -> float:
        clocks = (time.pthread_getcpuclockid(thread) for thread in self._threads)
        return sum(map(time.clock_gettime, clocks))


def plan_to_measure(
    model: nn.Module, units: Iterable[UnitPlan], workload: Workload, *, optimizer: str = ""
) -> Plan:
    """A plan of these units made without a planner, for measuring."""
    nothing = TierBytes(device=0, context=0, host=0, disk=0)
    return Plan(
        workload=workload,
        hardware="",
        optimizer=optimizer,
        profile_fingerprint="",
        model_fingerprint=model_fingerprint(model),
        exact=True,
        budgets=Budgets(device=0, host=0, disk=0),
        prediction=Prediction(step_seconds=1, lower_bound_seconds=1, peak_bytes=nothing),
        settings=StepSettings(piece_bytes=2**20),
        units=tuple(units),
    )
