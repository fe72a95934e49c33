"""The one runner: cells, each in a process of its own, into a JSON file, and a page made of it.

A file is written anew after every cell, so a run that is cut off keeps what it has; the same
command goes on with what is left. What seconds of this machine mean depends on what else it does:
a benchmark that measures them refuses to begin on a busy one.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import worker
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.files import replace_text
from protrain_runtime.contract.records.hardware import DeviceKind

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
PACKAGES = ("torch", "transformers", "protrain-plan", "triton", "torchao", "deepspeed")
QUIET_LOAD = 1.2
MIN_SECONDS = 5.0
"""Less than this is not enough to start a cell."""
TAIL = 2000  # characters of what a failed cell printed

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A task of the worker. Files in `arguments` are relative to the folder of the run.

    `needs` are keys of cells that must have run, or this one is skipped; `skipped` says why it
    cannot run here.
    """

    key: str
    part: str = ""
    task: str
    arguments: Document
    needs: tuple[str, ...] = ()
    skipped: str = ""
    limit_s: float = 540.0


@dataclass(slots=True, kw_only=True)
class Results:
    """The document of a benchmark: where it ran, and its cells' outcomes by key."""

    path: Path
    runs: list[Document] = field(default_factory=list)
    cells: dict[str, Document] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path) -> "Results":
        """The results in the file; empty where there is none."""
        if not path.exists():
            return cls(path=path)
        document = json.loads(path.read_text(encoding="utf-8"))
        return cls(path=path, runs=document["runs"], cells=document["cells"])

    @property
    def document(self) -> Document:
        return {"runs": self.runs, "cells": self.cells}

    def write(self) -> None:
        """The file, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.path, json.dumps(self.document, indent=1) + "\n")

    def ran(self, key: str) -> bool:
        return self.cells.get(key, {}).get("status") == "ran"


def found(document: Document, task: str = "") -> dict[str, Any]:
    """By key, the results of the cells that ran: all, or those of a task."""
    return {
        key: cell["result"]
        for key, cell in document["cells"].items()
        if cell["status"] == "ran" and task in ("", cell["task"])
    }


def main(
    name: str,
    cells: Sequence[Cell],
    page: Callable[[Document], str],
    *,
    says: str | None,
    quiet: bool = False,
) -> int:
    """The command line of a benchmark: run its cells, and write NAME.json and NAME.md.

    `quiet`: it measures seconds of this machine, which has to do nothing else.
    """
    parser = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=says)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cells whose keys have a WORD")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / name, help="for cells' files")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after these")
    parser.add_argument("--page", action="store_true", help="write the page of --out anew alone")
    parser.add_argument("--before", type=Path, help="other results, to compare steps with")
    parser.add_argument("--busy", action="store_true", help="run on a busy machine all the same")
    options = parser.parse_args()
    results, left = Results.at(options.out), 0
    if not options.page:
        if quiet and not options.busy and os.getloadavg()[0] > QUIET_LOAD:
            print(f"error: the load is {os.getloadavg()[0]:.1f}\n  fix: wait, or --busy")
            return 2
        options.work.mkdir(parents=True, exist_ok=True)
        words = options.only or [""]
        left = run_all(
            [cell for cell in cells if any(word in cell.key for word in words)],
            results,
            command=" ".join((f"python -m benchmarks.{name}", *_without_paths(sys.argv[1:]))),
            stop_at=time.monotonic() + 60 * options.minutes,
            jobs=options.jobs,
            folder=options.work,
        )
        order = {cell.key: number for number, cell in enumerate(cells)}
        results.cells = dict(sorted(results.cells.items(), key=lambda one: order.get(one[0], -1)))
        results.write()
    replace_text(options.out.with_suffix(".md"), page(results.document))
    print(f"{left} cells are left for the next run" if left else "every cell has an outcome")
    if options.before:
        print(_against(results, Results.at(options.before)))
    return 0


def _without_paths(arguments: Sequence[str]) -> list[str]:
    """The arguments but for where files lie."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [word for before, word in pairs if not {before, word} & {"--out", "--work", "--before"}]


def _against(now: Results, before: Results) -> str:
    """How many times as long steps take as before, in cells that both have."""
    ratios = [
        one["step_seconds"] / other["step_seconds"]
        for key, one in found(now.document).items()
        if (other := found(before.document).get(key)) and {*one} & {*other} >= {"step_seconds"}
    ]
    if not ratios:
        return "no step can be compared"
    middle = f"{statistics.median(ratios):.4f} in the median, {statistics.fmean(ratios):.4f}"
    return f"steps take {middle} in the mean, {min(ratios):.4f} to {max(ratios):.4f} of before"


def run_all(
    cells: Sequence[Cell],
    results: Results,
    *,
    command: str,
    stop_at: float,
    jobs: int = 1,
    isolated: bool = True,
    accelerator: Document | None = None,
    folder: Path | None = None,
) -> int:
    """Run what has no outcome yet, in order, until `stop_at` (of `time.monotonic`); what is left.

    `accelerator` describes the one that cells run on; this process itself leaves it alone.
    An outcome is kept for good, also a failure: remove the file, or its entry, to try again.
    Not `isolated`, all cells run in this process, without their limits of time: a smoke test's
    models are tiny, and starting PyTorch anew would take most of its time.
    """
    where = {} if accelerator is None else {"accelerator": accelerator}
    results.runs.append({"command": command, **environment(), **where})
    results.write()
    at, left = folder or results.path.parent, 0

    def outcome(cell: Cell, room: float) -> Document:
        if isolated:
            return run(cell, at, timeout_s=min(cell.limit_s, room))
        with contextlib.chdir(at):
            return worker.outcome(cell.task, cell.arguments)

    def keep(cell: Cell, ended: Document) -> None:
        kept = {"part": cell.part, "task": cell.task, "arguments": cell.arguments, **ended}
        results.cells[cell.key] = kept
        results.write()
        said = ended.get("reason", "").splitlines() or [""]
        told = f"[{len(results.cells)}/{len(cells)}] {cell.key}"
        print(f"{told}: {ended['status']} {said[-1]}", flush=True)

    waiting = [cell for cell in cells if cell.key not in results.cells]
    running: dict[Future[Document], tuple[Cell, float, float]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            begun = {cell.key for cell, _, _ in running.values()}
            ready = [cell for cell in waiting if begun.isdisjoint(cell.needs)]
            if ready and len(running) < jobs:
                waiting.remove(cell := ready[0])
                missing = [key for key in cell.needs if not results.ran(key)]
                room = stop_at - time.monotonic()
                if any(key not in results.cells for key in missing):
                    left += 1  # what it needs is left for the next run, too
                elif missing:
                    keep(cell, _without(missing[0], results.cells[missing[0]]))
                elif cell.skipped:
                    keep(cell, {"status": "skipped", "reason": cell.skipped})
                elif room < MIN_SECONDS:
                    left += 1
                else:
                    asked = pool.submit(outcome, cell, room)
                    running[asked] = cell, time.monotonic(), room
                continue
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                cell, started, room = running.pop(done)
                ended = done.result()
                if ended["status"] == "timed out" and room < cell.limit_s:
                    left += 1  # the run's time ended, not the cell's
                    continue
                keep(cell, ended | {"seconds": round(time.monotonic() - started, 2)})
    return left


def _without(key: str, needed: Document) -> Document:
    """The outcome of a cell that needs one which did not run.

    Who has no plan is refused, too; a ladder is skipped for the reason of its first rung.
    """
    reason = needed.get("reason", "")
    if needed["status"] in ("refused", "skipped"):
        return {"status": needed["status"], "reason": reason}
    return {"status": "skipped", "reason": f"needs {key}: {reason}".rstrip(": ")}


def run(cell: Cell, folder: Path, *, timeout_s: float) -> Document:
    """One cell in a process of its own; a process that is killed or crashes is an outcome."""
    with tempfile.TemporaryDirectory() as temporary:
        answer = Path(temporary) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.worker", str(answer)]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | _SETTINGS | {"PYTHONPATH": os.pathsep.join(map(str, _path()))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # compilers and ranks that it starts end with it
        )
        given = json.dumps({"task": cell.task, "arguments": cell.arguments})
        try:
            printed, _ = process.communicate(given, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return {"status": "timed out", "reason": f"after {timeout_s:.0f} s"}
        if answer.exists():
            ended: Document = json.loads(answer.read_text(encoding="utf-8"))
            return ended
    if process.returncode == -signal.SIGKILL:
        return {"status": "did not fit", "reason": "killed, as when the host's memory ends"}
    if _says_out_of_memory(printed):
        return {"status": "did not fit", "reason": "out of memory"}
    tail = printed.strip()[-TAIL:] or f"exit status {process.returncode}"
    return {"status": "failed", "reason": tail}


def _path() -> list[Path]:
    """Where a cell's Python looks: what is relative here is elsewhere in its folder."""
    return [ROOT, *(Path(entry).absolute() for entry in sys.path if entry)]


def described(device: DeviceKind) -> Document:
    """The accelerator of this type, as a process of its own finds it; ProtrainError without one."""
    ask = Cell(key="", task="describe", arguments={"device": device})
    ended = run(ask, Path.cwd(), timeout_s=ask.limit_s)
    if ended["status"] != "ran":
        raise ProtrainError(ended["reason"])
    described: Document = ended["result"]
    return described


_SETTINGS = {
    # What PyTorch recommends against fragmentation; the same for everybody.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic kernels
    "OMP_WAIT_POLICY": "passive",  # a contended core makes spinning threads 15 times slower
    "OPENBLAS_NUM_THREADS": "1",  # a stack of 8 MiB for each would count as a cell's memory
    "TOKENIZERS_PARALLELISM": "false",
}


def _says_out_of_memory(printed: str) -> bool:
    """Under a limit of the operating system, C++ and the loader have words of their own."""
    words = (
        "OutOfMemoryError",
        "std::bad_alloc",
        "MemoryError",
        "Cannot allocate memory",
        "can't allocate memory",
        "failed to map segment",
        "can't start new thread",
    )
    return any(word in printed for word in words)


def environment() -> Document:
    """Day, machine, versions and commit; nothing of where files lie."""
    commit = _git("describe", "--always", "--abbrev=12")
    if _git("status", "--porcelain", "--", ".", ":!benchmarks/results"):
        commit += "-dirty"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": os.getloadavg()[0],  # of a shared machine: what seconds are worth
        "python": platform.python_version(),
        "commit": commit or None,
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _git(*arguments: str) -> str:
    """Text that git prints of this tree; none where there is no git."""
    git = ["git", "-C", str(ROOT), *arguments]
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
