"""What the benchmark of launching measures in a process of its own, of whatever tree is imported.

    python -P benchmarks/launching_runs.py DEVICE ROUNDS BLOCKS... > FILE.json

It asks the records and the runtime for names alone that be0a291 has, too: a worktree of that commit
in PYTHONPATH is measured by this very file.
"""

import gc
import json
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.profiling.memory.passes import saved_bytes
from protrain_plan.profiling.structure.discovery import discover
from protrain_runtime import prepare
from protrain_runtime.contract.records.plan import (
    Budgets,
    Keep,
    Offload,
    Plan,
    Prediction,
    Schedule,
    StepSettings,
    Swap,
    TierBytes,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import Workload
from protrain_runtime.diagnostics.matching import model_fingerprint
from protrain_runtime.model.prepared import engine_of

WIDTH = 16
NUM_WARM_STEPS = 5
SCHEDULE = Schedule(forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=1, update_drain=1)


class Block(nn.Module):
    """Almost nothing to compute: what is left is what it costs to launch."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, WIDTH]
        update: Tensor = self.narrow(torch.nn.functional.gelu(self.wide(hidden)))
        return hidden + update


class Stack(nn.Module):
    """Blocks in a row, and a loss."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


class Clocks:
    """Processor seconds: of the threads that compute, and of all that the process has.

    Those that compute are this one and, on an accelerator, autograd's.
    """

    def __init__(self) -> None:
        self._threads = {threading.get_ident()}

    def note_thread(self, gradient: Tensor) -> Tensor:
        """Count with the thread in which autograd calls this hook."""
        self._threads.add(threading.get_ident())
        return gradient

    def seconds(self) -> tuple[float, float]:
        """So far, of either."""
        clocks = [time.pthread_getcpuclockid(thread) for thread in self._threads]
        return sum(time.clock_gettime(clock) for clock in clocks), time.process_time()


def main() -> None:
    device, rounds, *counts = sys.argv[1:]
    if device == "emulated":
        from tests.emulated.device import extension

        extension()
    torch.set_num_threads(1)
    where = torch.device(device)
    measured(where, max(map(int, counts)), 0)  # the interpreter makes what runs often faster
    found = {number: measured(where, int(number), int(rounds)) for number in counts}
    json.dump(found, sys.stdout)


def measured(device: torch.device, num_blocks: int, num_rounds: int) -> dict[str, Any]:
    """Seconds of plain and planned steps in turns (`Clocks`), and the moves of a planned one.

    A plain one is forward and backward: under the plan, lanes update.
    """
    torch.manual_seed(0)
    plain, model = (Stack(num_blocks).to(device) for _ in range(2))
    batch = torch.ones(4, WIDTH, device=device)
    _, optimizer = prepare(model, plan(model, batch), optimizer=optimizer_factory("adamw"))
    engine = engine_of(model)
    assert engine is not None
    clocks = Clocks()
    hook = next(plain.parameters()).register_hook(clocks.note_thread)
    plain(batch).backward()
    hook.remove()
    seconds: dict[str, list[tuple[float, float]]] = {"plain": [], "planned": []}
    for number in range(NUM_WARM_STEPS + num_rounds):
        gc.collect()
        gc.disable()  # when it would come, and into which of the two, is chance
        start = clocks.seconds()
        plain(batch).backward()
        plain.zero_grad()
        between = clocks.seconds()
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        end = clocks.seconds()
        gc.enable()
        if number >= NUM_WARM_STEPS:
            seconds["plain"].append((between[0] - start[0], between[1] - start[1]))
            seconds["planned"].append((end[0] - between[0], end[1] - between[1]))
    kinds = [str(move.kind) for move in engine.program.moves]
    moves = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    return {"moves": moves, "slots": len(engine.program.slots), **seconds}


def plan(model: nn.Module, batch: Tensor) -> Plan:
    """All states in host memory, and what all blocks save swapped to it."""
    found = discover(model, (batch,))
    own = saved_bytes(model, [unit.module for unit in found], (batch,), "keep")
    units = tuple(
        UnitPlan(
            name=unit.name,
            kind=unit.kind,
            activations=Swap(tier="host") if unit.kind == "block" else Keep(),
            states=Offload(tier="host"),
            parameters=tuple(
                name
                for name in unit.parameters
                if unit.kind == "part" or not name.startswith(f"{unit.name}.")
            ),
            also_used_by=(),
            own_inputs=inputs.own_inputs if unit.kind == "block" else (0,),
            schedule=SCHEDULE,
        )
        for unit, inputs in zip(found, own, strict=True)
    )
    nothing = TierBytes(device=0, context=0, host=0, disk=0)
    return Plan(
        workload=Workload(
            model="",
            model_config="",
            batch_size=len(batch),
            seq_len=1,
            dtype="float32",
            device="cpu",
            seed=0,
        ),
        hardware="",
        optimizer="adamw",
        profile_fingerprint="",
        model_fingerprint=model_fingerprint(model),
        exact=True,
        budgets=Budgets(device=0, host=0, disk=0),
        prediction=Prediction(step_seconds=1, lower_bound_seconds=1, peak_bytes=nothing),
        units=units,
        settings=StepSettings(piece_bytes=2**20),
    )


if __name__ == "__main__":
    main()
