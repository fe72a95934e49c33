"""Calls and processor time of the host that a planned step takes beyond plain PyTorch.

    python -m benchmarks.launching [--busy]

The emulated device drops its work, so that the threads that launch are all that takes time. A block
has nine matrices of 16 KiB.
"""

import sys
import threading
import time

import torch

from benchmarks.outcomes import Skipped
from benchmarks.pages import markdown_table, runs_list
from benchmarks.runner import Cell, Document, found, main
from tests.emulated import building
from tests.emulated.device import dropping
from tests.support import launching

PLANS = {
    "E": "recompute",
    "S": "swap activations",
    "O": "offload states, update in host memory",
    "OE": "the same, and recompute",
    "D": "offload states, update on the device",
    "F": "offload states, and swap activations",
}
ROUNDS = 3
"""Measurements of each plan: the fastest is told, and how far the slowest is from it."""


def cells() -> list[Cell]:
    """One for each plan."""
    return [Cell(key=plan, task="launching", arguments={"plan": plan}) for plan in PLANS]


def measured(plan: str) -> Document:
    """Calls per block and step by kind, and seconds of the launching thread and of updates."""
    if building.compiler() is None:
        raise Skipped("there is no C++ compiler for the emulated device")
    torch.set_num_threads(1)  # of the emulated device's kernels
    rounds = [seconds(plan) for _ in range(ROUNDS)]  # before anything is counted
    return {"calls": launching.calls(plan), "rounds": rounds}


def seconds(plan: str, *, steps: int = 40) -> dict[str, float]:
    """Processor seconds per block beyond a plain step's: of the launching threads and of updates.

    Updates in host memory wait until backward has ended: they share no interpreter with it.
    """
    gate = threading.Event()
    gate.set()
    planned, plain = (
        launching.Training.of(plan, lane_delay=lambda: float(not gate.wait())),
        launching.Training.of(),
    )
    for training in (planned, plain):
        training.warm()
    with dropping():
        base = [_timed(plain, steps, gate, updates=planned.steps_itself) for _ in range(2)]
        own = _timed(planned, steps, gate)
        planned.end()
    launched = own["launching"] - min(each["launching"] for each in base)
    return {"launching": launched / launching.BLOCKS, "updates": own["updates"] / launching.BLOCKS}


def _timed(
    training: launching.Training, steps: int, gate: threading.Event, *, updates: bool = True
) -> dict[str, float]:
    own = {threading.get_ident()}
    found: dict[str, list[float]] = {"launching": [], "updates": []}

    def now() -> dict[str, float]:
        lanes = {
            thread.ident
            for thread in threading.enumerate()
            if thread.name.startswith("protrain update") and thread.ident
        }
        return {"launching": _processor_seconds(own), "updates": _processor_seconds(lanes)}

    for _ in range(steps):
        gate.clear()
        before = now()
        training.step(lambda _: own.add(threading.get_ident()), gate=gate, updates=updates)
        after = now()
        torch.accelerator.synchronize()
        for what, taken in found.items():
            taken.append(after[what] - before[what])
    return {what: sorted(taken)[steps // 4] for what, taken in found.items()}


def _processor_seconds(threads: set[int]) -> float:
    return sum(time.clock_gettime(time.pthread_getcpuclockid(each)) for each in threads)


HEADER = (
    *("plan of all blocks", "Python", "torch", "built in", "of the update's thread"),
    *("launching (us)", "slowest", "updating (us)", "slowest"),
)


def page(document: Document) -> str:
    """The results for people."""
    lines = ["# What a planned step asks of the host", "", *runs_list(document["runs"]), ""]
    lines.append(
        "Per block and step, beyond the same step of plain PyTorch: functions that are called, and"
        " processor time. The device is emulated and drops its work; the fastest of"
        f" {ROUNDS} rounds of 40 steps, the first quartile of each. On an accelerator these are"
        " the host's part of a step: where the device is busy for longer, they cost nothing."
    )
    rows = []
    for plan, told in found(document).items():
        calls = told["calls"]
        beside = sum(count for kind, count in calls.items() if kind.startswith("lanes: "))
        counts = (calls["python"], calls["torch"], calls["builtin"], beside)
        times = [
            1e6 * pick(one[what] for one in told["rounds"])
            for what in ("launching", "updates")
            for pick in (min, max)
        ]
        rows.append((PLANS[plan], *map(str, counts), *(f"{value:.0f}" for value in times)))
    lines += ["", *markdown_table([HEADER, *rows], numbers_from=1)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main("launching", cells(), page, says=__doc__, quiet=True))
