"""Calls and processor time of the host that a planned step takes beyond plain PyTorch.

    python -m benchmarks.launching [--busy]

The emulated device drops its work, so that the threads that launch are all that takes time. A block
has nine matrices of 16 KiB.
"""

import operator
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field

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
ROUNDS, STEPS = 60, 10
"""A plan and a plain step take turns: a machine that others use is slow for seconds."""


def cells() -> list[Cell]:
    """One for each plan."""
    return [Cell(key=plan, task="launching", arguments={"plan": plan}) for plan in PLANS]


def measured(plan: str) -> Document:
    """Calls per block and step by kind, and seconds of the launching thread and of updates."""
    if building.compiler() is None:
        raise Skipped("there is no C++ compiler for the emulated device")
    torch.set_num_threads(1)  # of the emulated device's kernels
    taken = seconds(plan)  # before anything is counted
    return {"calls": launching.calls(plan), "seconds": taken}


def seconds(plan: str) -> dict[str, list[float]]:
    """Processor seconds per block beyond a plain step's: of the launching threads and of updates.

    At the first decile of all steps, and at their median. Updates in host memory wait until
    backward has ended: they share no interpreter with it.
    """
    gate = threading.Event()
    gate.set()
    planned, plain = (
        launching.Training.of(plan, lane_delay=lambda: float(not gate.wait())),
        launching.Training.of(),
    )
    for training in (planned, plain):
        training.warm()
    own, base = _Taken(), _Taken()
    with dropping():
        for _ in range(ROUNDS):
            base.time(plain, gate, updates=planned.steps_itself)
            own.time(planned, gate)
        planned.end()
    plain_s = _first_decile_and_median(base.launched)
    beyond = map(operator.sub, _first_decile_and_median(own.launched), plain_s)
    return {
        "launching": [taken / launching.BLOCKS for taken in beyond],
        "updates": [taken / launching.BLOCKS for taken in _first_decile_and_median(own.updates)],
    }


def _first_decile_and_median(taken: list[float]) -> tuple[float, float]:
    deciles = statistics.quantiles(taken, n=10)
    return deciles[0], deciles[4]


@dataclass(frozen=True, slots=True)
class _Taken:
    """Processor seconds of each step, of the launching threads and of updates' threads."""

    launched: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    threads: set[int] = field(default_factory=lambda: {threading.get_ident()})
    """This thread and autograd's, which launch."""

    def time(
        self, training: launching.Training, gate: threading.Event, *, updates: bool = True
    ) -> None:
        """Take steps, and note their seconds."""
        for _ in range(STEPS):
            gate.clear()
            lanes = _update_threads()
            before = _processor_seconds(self.threads), _processor_seconds(lanes)
            training.step(self._note_thread, gate=gate, updates=updates)
            after = _processor_seconds(self.threads), _processor_seconds(lanes)
            torch.accelerator.synchronize()
            self.launched.append(after[0] - before[0])
            self.updates.append(after[1] - before[1])

    def _note_thread(self, _: torch.Tensor) -> None:
        self.threads.add(threading.get_ident())


def _update_threads() -> set[int]:
    return {
        thread.ident
        for thread in threading.enumerate()
        if thread.name.startswith("protrain update") and thread.ident
    }


def _processor_seconds(threads: set[int]) -> float:
    return sum(time.clock_gettime(time.pthread_getcpuclockid(each)) for each in threads)


HEADER = (
    *("plan of all blocks", "Python", "torch", "built in", "of the update's thread"),
    *("launching (us)", "median", "updating (us)", "median"),
)


def page(document: Document) -> str:
    """The results for people."""
    lines = ["# What a planned step asks of the host", "", *runs_list(document["runs"]), ""]
    lines.append(
        "Per block and step, beyond the same step of plain PyTorch: functions that are called, and"
        " processor time. The device is emulated and drops its work. Of"
        f" {ROUNDS * STEPS} steps and as many plain ones, by turns, the first decile of each, and"
        " the median. On an accelerator these are the host's part of a step: where the device is"
        " busy for longer, they cost nothing."
    )
    rows = []
    for plan, told in found(document).items():
        calls = told["calls"]
        beside = sum(count for kind, count in calls.items() if kind.startswith("lanes: "))
        counts = (calls["python"], calls["torch"], calls["builtin"], beside)
        times = [
            1e6 * value for what in ("launching", "updates") for value in told["seconds"][what]
        ]
        rows.append((PLANS[plan], *map(str, counts), *(f"{value:.0f}" for value in times)))
    lines += ["", *markdown_table([HEADER, *rows], numbers_from=1)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main("launching", cells(), page, says=__doc__, quiet=True))
