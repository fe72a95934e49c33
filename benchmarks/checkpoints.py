"""What checksums cost: saving and loading a model, now and at another commit.

    python -m benchmarks.checkpoints [--before WORKTREE] [--parameters N] [--directory DIR]

A model and AdamW's states are saved and loaded, in processes that take turns: one imports this
tree, the next one `--before`, a git worktree of a commit without checksums. Files stay in the
system's page cache, so that loading reads memory: on a disk that is read it takes longer, and the
sums are less of it. The page has seconds and, of pairs that ran one after the other, ratios.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.tables import markdown_table
from benchmarks.processes import described
from benchmarks.provenance import ROOT, commit

MODULE = "benchmarks.checkpoints"
WAYS = ("save", "load")
CLOCKS = ("by the clock", "processor time")

Found = dict[str, Any]


def main() -> None:
    arguments = _arguments()
    if arguments.measure:
        print(json.dumps(_measured(arguments.parameters, arguments.rounds, arguments.directory)))
        return
    trees = {"after": ROOT} | ({"before": arguments.before} if arguments.before else {})
    document: Found = {
        **described(MODULE),
        "command": _command(arguments),
        "processors": os.cpu_count(),
        "load": [round(os.getloadavg()[0], 1)],
        "parameters": arguments.parameters,
        "commits": {name: commit(tree) for name, tree in trees.items()},
        "processes": {name: [] for name in trees},
    }
    for _ in range(arguments.processes):
        for name, tree in trees.items():
            document["processes"][name].append(_in_tree(tree, arguments))
    document["load"].append(round(os.getloadavg()[0], 1))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(page(document))
    print(page(document), end="")


def _in_tree(tree: Path, arguments: argparse.Namespace) -> Found:
    """What this file measures in a process that imports the tree's planner and runtime."""
    command = [sys.executable, "-P", str(Path(__file__)), "--measure"]
    command += ["--parameters", str(arguments.parameters), "--rounds", str(arguments.rounds)]
    command += ["--directory", str(arguments.directory)]
    paths = (str(tree), str(tree / "runtime"))
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: Found = json.loads(done.stdout)
    return found


def _measured(num_parameters: int, rounds: int, directory: Path) -> Found:
    """Seconds by the clock and of processor time, of every save and load."""
    import torch
    from torch import nn

    from protrain_runtime import load, save

    width = 1024
    count = max(1, num_parameters // width**2)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    found: Found = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=directory, prefix="protrain-checkpoints-") as folder:
        for _ in range(rounds):
            for way, use in (("save", save), ("load", load)):
                clock, processor = time.perf_counter(), time.process_time()
                use(model, optimizer, folder)
                seconds = [time.perf_counter() - clock, time.process_time() - processor]
                found[way].append(seconds)
        files = Path(folder).rglob("*")
        found["bytes"] = sum(file.stat().st_size for file in files if file.is_file())
    return found


# --- the page -------------------------------------------------------------------------------------


def page(document: Mapping[str, Any]) -> str:
    """The results for people."""
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    commits = document["commits"]
    columns = " and ".join(f"{name} {commits[name]}" for name in sorted(commits, reverse=True))
    low, high = sorted(document["load"])
    num_bytes = document["processes"]["after"][0]["bytes"]
    lines = [
        "# Checksums of checkpoints",
        "",
        f"`{document['command']}`, {document['date']}; {columns}",
        "",
        f"{document['system']}; {versions}. Load of the machine: {low} to {high}, on"
        f" {document['processors']} processors.",
        "",
        f"A model of {document['parameters']:,} parameters and AdamW's states,"
        f" {num_bytes / 1e6:.0f} MB in all, saved and loaded in turns; what is loaded is in the"
        " page cache. Seconds are the median. Ratios are of rounds of two processes that ran one"
        " after the other: the median, and from the first to the third quartile.",
        *_warning(document),
        "",
        *markdown_table(_rows(document["processes"])),
    ]
    return "\n".join(lines) + "\n"


def _warning(document: Mapping[str, Any]) -> Iterator[str]:
    """Where others computed on the same processors."""
    if max(document["load"]) > document["processors"]:
        yield ""
        yield (
            f"**Measured on {document['processors']} processors that others used at the same"
            " time**: what the clock says is theirs as well, and threads beside each other gain"
            " nothing."
        )


def _rows(processes: Mapping[str, list[Found]]) -> list[list[str]]:
    rows = [["what", "clock", *(f"s, {name}" for name in processes), "after / before"]]
    for way in WAYS:
        for clock, what in enumerate(CLOCKS):
            seconds = {
                name: [one[clock] for process in found for one in process[way]]
                for name, found in processes.items()
            }
            row = [way, what, *(f"{statistics.median(each):.2f}" for each in seconds.values())]
            ratios = (
                after / before
                for after, before in zip(
                    seconds["after"], seconds.get("before", ()), strict="before" in seconds
                )
            )
            rows.append([*row, _spread(ratios)])
    return rows


def _spread(ratios: Iterable[float]) -> str:
    values = sorted(ratios)
    if len(values) < 2:
        return ""
    first, middle, third = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({first:.2f} to {third:.2f})"


def _command(arguments: argparse.Namespace) -> str:
    """What was typed, but for where folders lie."""
    words = " ".join(sys.argv[1:]).replace(str(arguments.before), "WORKTREE")
    return f"python -m {MODULE} {words}".strip().replace(str(arguments.directory), "DIR")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("--before", type=Path, help="a git worktree of another commit")
    parser.add_argument("--parameters", type=int, default=42_000_000)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=5, help="saves and loads in a process")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/checkpoints.json"))
    parser.add_argument("--quick", action="store_true", help="one process, few parameters")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.parameters, arguments.rounds, arguments.processes = 2**20, 2, 1
    return arguments


if __name__ == "__main__":
    main()
