"""What the runtime costs by itself: a planned step of a model that has next to nothing to do.

Bytes and parameters do not explain these seconds: hooks, the hand-over to a lane and back, an
optimizer made for a piece. In a step of a second they are lost; in one of 20 ms they are half.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER, optimizer_factory
from protrain_plan.records.plan import (
    Budgets,
    Keep,
    Offload,
    Persistent,
    Plan,
    Prediction,
    Schedule,
    Swap,
    TierBytes,
    UnitPlan,
)
from protrain_plan.records.profile import Workload
from protrain_runtime import prepare, record, restore
from protrain_runtime.fingerprint import model_fingerprint

_LAYERS, _WIDTH = 6, 64  # 16 KiB of weights, and of what a layer saves: the least that is swapped
_STEPS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Medians over steps, of a move each.

    move_s      of the processor, in the thread that computes: submitting a move and ending it,
                with the share of a slot's hooks
    transfer_s  in a lane, of a transfer of few bytes
    piece_s     in the update lane, of a piece of few parameters
    """

    move_s: float
    transfer_s: float
    piece_s: float


class _Layers(nn.Module):
    """Linear layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens.sum()


def measure_overheads(spill_directory: Path, *, optimizer: str = DEFAULT_OPTIMIZER) -> Overheads:
    """Of this machine's processor, with everything that a plan can move going to disk.

    Seconds of the processor and not of the clock where it computes: what a step waits for, the
    timeline knows. About 1 s; the random state is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        plain, planned = _Layers(), _Layers()
    factory = optimizer_factory(optimizer)
    tokens = torch.ones(_WIDTH, _WIDTH)
    plain_cpu = _cpu_seconds(_training(plain, factory(plain.parameters()), tokens))
    model, stepper = prepare(
        planned, _plan(planned), optimizer=factory, spill_directory=spill_directory
    )
    try:
        step = _training(model, stepper, tokens)
        planned_cpu = _cpu_seconds(step)
        transfers: list[float] = []
        updates: list[float] = []
        with record(model) as recorder:
            for _ in range(_STEPS):
                step()
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


def _training(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> Callable[[], None]:
    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _cpu_seconds(step: Callable[[], None]) -> float:
    """Of the calling thread in one step, the median after some that warm up."""
    seconds: list[float] = []
    for _ in range(3 + _STEPS):
        start = time.thread_time()
        step()
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds[3:])


def _plan(model: nn.Module) -> Plan:
    """Every layer's states are offloaded to disk, and what it saves is swapped there."""
    schedule = Schedule(forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=1, update_drain=1)
    nothing = TierBytes(device=0, context=0, host=0, disk=0)
    first, last = (
        UnitPlan(name=name, kind="part", activations=Keep(), states=Persistent())
        for name in ("(input)", "(output)")
    )
    layers = tuple(
        UnitPlan(
            name=f"layers.{number}",
            activations=Swap(tier="disk"),
            states=Offload(tier="disk"),
            schedule=schedule,
        )
        for number in range(_LAYERS)
    )
    return Plan(
        workload=Workload(
            model="the probe's layers",
            model_config="",
            batch_size=_WIDTH,
            seq_len=1,
            dtype="float32",
            device="cpu",
            seed=0,
        ),
        hardware="",
        optimizer="",
        profile_fingerprint="",
        model_fingerprint=model_fingerprint(model),
        exact=True,
        budgets=Budgets(device=0, host=0, disk=0),
        prediction=Prediction(step_seconds=1, lower_bound_seconds=1, peak_bytes=nothing),
        piece_bytes=2**20,
        units=(first, *layers, last),
    )
