"""What a plan costs the computing thread: processor seconds per move, now and at another commit.

    python -m benchmarks.launching [--before WORKTREE] [--devices cpu emulated] [--blocks N...]

Plain and planned steps of almost nothing take turns: all states are in host memory, and what every
block saves is swapped to it. What counts is the processor time of the threads that compute, which
others' work disturbs less than the clock. `--before` is a git worktree of another commit, measured
by the same file in processes that take turns with ours; the emulated device is measured there too
where it exists.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.tables import markdown_table
from benchmarks.processes import described
from benchmarks.provenance import ROOT, commit

MODULE = "benchmarks.launching"
RUNS = ROOT / "benchmarks/launching_runs.py"

Found = dict[str, Any]


def main() -> None:
    arguments = _arguments()
    trees = {"after": ROOT} | ({"before": arguments.before} if arguments.before else {})
    document: Found = {
        **described(MODULE),
        "command": _command(arguments),
        "processors": os.cpu_count(),
        "load": [round(os.getloadavg()[0], 1)],
        "rounds": arguments.rounds,
        "commits": {name: commit(tree) for name, tree in trees.items()},
        "devices": {},
    }
    for device in arguments.devices:
        columns: dict[str, list[Found]] = {
            name: []
            for name, tree in trees.items()
            if device != "emulated" or (tree / "tests/emulated/device.py").exists()
        }
        for _ in range(arguments.processes):
            for name, processes in columns.items():
                processes.append(_measured(trees[name], device, arguments))
        document["devices"][device] = columns
    document["load"].append(round(os.getloadavg()[0], 1))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(page(document))
    print(page(document), end="")


def _measured(tree: Path, device: str, arguments: argparse.Namespace) -> Found:
    """A process that imports this tree's planner and runtime: by the number of blocks."""
    blocks = [str(number) for number in arguments.blocks]
    settings = {
        "PYTHONPATH": os.pathsep.join((str(tree), str(tree / "runtime"))),
        "OMP_WAIT_POLICY": "passive",
    }
    done = subprocess.run(
        [sys.executable, "-P", str(RUNS), device, str(arguments.rounds), *blocks],
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: Found = json.loads(done.stdout)
    return found


# --- the page -------------------------------------------------------------------------------------


def page(document: Mapping[str, Any]) -> str:
    """The results for people."""
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    low, high = sorted(document["load"])
    commits = document["commits"]
    columns = " and ".join(f"{name} {commits[name]}" for name in _names(document))
    lines = [
        "# Launching costs",
        "",
        f"`{document['command']}`, {document['date']}; {columns}",
        "",
        f"{document['system']}; {versions}. Load of the machine: {low} to {high}.",
        "",
        "Processor time in a model of blocks that compute almost"
        " nothing: what is left is what it costs to launch. All states are in host memory, and what"
        " blocks save is swapped to it. A planned step is forward, backward and the optimizer's"
        " step; a plain one is forward and backward. The cost of a move is the difference, divided"
        " by the number of moves: of all that a plan adds, so that units without moves count, too."
        " That of a slot is divided by the slots, two for a unit. Steps take turns in a process,"
        " and processes of the two commits with each other. What counts is the least that a step"
        " took: what others do on a processor only adds. Each is the median over processes of"
        f" {document['rounds']} steps, and the range.",
        *_warning(document),
    ]
    for device, found in document["devices"].items():
        lines += ["", f"## On {_device(device)}"]
        for clock, whose in enumerate(("The threads that compute", "All threads, with lanes'")):
            lines += ["", f"{whose}:", "", *markdown_table(_rows(found, clock))]
    return "\n".join(lines) + "\n"


def _names(document: Mapping[str, Any]) -> list[str]:
    return [name for name in ("before", "after") if name in document["commits"]]


def _device(device: str) -> str:
    if device == "emulated":
        return "the emulated device (every copy costs its emulation, too)"
    return "a CPU" if device == "cpu" else f"a device of type {device}"


def _rows(found: Mapping[str, list[Found]], clock: int) -> list[list[str]]:
    columns = [name for name in ("before", "after") if name in found]
    header = ["blocks", "moves", *(f"step, planned / plain: {name}" for name in columns)]
    sizes = list(next(iter(found.values()))[0])
    first = sizes[0]
    header += [f"us a move: {name}" for name in columns]
    header += [f"us a slot: {name}" for name in columns]
    header += [f"a move, beside one of {first} blocks: {name}" for name in columns]
    both = len(columns) == 2
    rows = [[*header, *(["a move, after / before"] if both else [])]]
    for size in sizes:
        each = {name: [process[size] for process in found[name]] for name in columns}
        row = [size, str(sum(each[columns[0]][0]["moves"].values()))]
        row += [
            _spread(_step(one, "planned", clock) / _step(one, "plain", clock) for one in each[name])
            for name in columns
        ]
        for count in (sum(each[columns[0]][0]["moves"].values()), each[columns[0]][0]["slots"]):
            row += [
                _spread((1e6 * _added(one, clock) / count for one in each[name]), digits=0)
                for name in columns
            ]
        row += [
            "1"
            if size == first
            else _spread(_move(one[size], clock) / _move(one[first], clock) for one in found[name])
            for name in columns
        ]
        if both:
            pairs = zip(each["after"], each["before"], strict=True)
            row.append(_spread(_move(a, clock) / _move(b, clock) for a, b in pairs))
        rows.append(row)
    return rows


def _step(one: Found, kind: str, clock: int) -> float:
    seconds: list[list[float]] = one[kind]
    return min(step[clock] for step in seconds)


def _added(one: Found, clock: int) -> float:
    """Seconds of processor time that the plan adds to a step."""
    return _step(one, "planned", clock) - _step(one, "plain", clock)


def _move(one: Found, clock: int) -> float:
    """Seconds of processor time that a move adds."""
    moves: dict[str, int] = one["moves"]
    return _added(one, clock) / sum(moves.values())


def _spread(values: Iterator[float], *, digits: int = 2) -> str:
    """Of processes: the median, and the range around it."""
    found = sorted(values)
    middle, low, high = (f"{n:.{digits}f}" for n in (statistics.median(found), found[0], found[-1]))
    return f"{middle} ({low} to {high})" if len(found) > 1 else middle


def _warning(document: Mapping[str, Any]) -> Iterator[str]:
    """Where others computed on the same processors."""
    if max(document["load"]) > document["processors"]:
        yield ""
        yield (
            f"**Measured on {document['processors']} processors that others used at the same"
            " time.** Threads that share a processor also share its caches: processor time is more"
            " than on a quiet machine, of both commits alike."
        )


def _command(arguments: argparse.Namespace) -> str:
    """What was typed, but for where the other tree lies."""
    words = " ".join(sys.argv[1:]).replace(str(arguments.before), "WORKTREE")
    return f"python -m {MODULE} {words}".strip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("--before", type=Path, help="a git worktree of another commit")
    parser.add_argument("--devices", nargs="+", default=["cpu", "emulated"])
    parser.add_argument("--blocks", nargs="+", type=int, default=[8, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind in a process")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/launching.json"))
    parser.add_argument("--quick", action="store_true", help="one process, few blocks, on a CPU")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.devices, arguments.blocks = ["cpu"], [2, 4]
        arguments.rounds, arguments.processes = 2, 1
    return arguments


if __name__ == "__main__":
    main()
