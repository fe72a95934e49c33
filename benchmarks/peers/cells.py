"""Cells of a table, each run in a process of its own, and the file that their results go to.

A file is written anew after every cell, so a run that is cut off keeps what it has; the next run
with the same folder goes on with what is left.
"""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.peers import tasks
from benchmarks.peers.registry import ADAPTERS
from benchmarks.peers.testing import unseen
from benchmarks.peers.work import Work
from benchmarks.provenance import commit, today
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.files import replace_text
from protrain_runtime.contract.records.hardware import DeviceKind

PACKAGES = ("torch", "transformers", "protrain-plan", "triton", "torchao", "deepspeed")
MIN_SECONDS = 5.0
"""Less than this is not enough to start a cell."""
TAIL = 2000  # characters of what a failed cell printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A task of the worker. Files in `arguments` are relative to the folder of the results.

    `needs` are keys of cells that must have run, or this one is skipped.
    """

    key: str
    part: str
    task: str
    arguments: dict[str, Any]
    needs: tuple[str, ...] = ()
    limit_s: float = 540.0


@dataclass(slots=True, kw_only=True)
class Results:
    """The document of a benchmark: where it ran, and its cells' outcomes by key."""

    path: Path
    runs: list[dict[str, Any]] = field(default_factory=list)
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path) -> "Results":
        """What is in the file; empty where there is none."""
        if not path.exists():
            return cls(path=path)
        document = json.loads(path.read_text(encoding="utf-8"))
        return cls(path=path, runs=document["runs"], cells=document["cells"])

    @property
    def document(self) -> dict[str, Any]:
        return {"runs": self.runs, "cells": self.cells}

    def write(self) -> None:
        """The file, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.path, json.dumps(self.document, indent=1) + "\n")

    def ran(self, key: str) -> bool:
        return self.cells.get(key, {}).get("status") == "ran"


def run_all(
    cells: Sequence[Cell],
    results: Results,
    *,
    command: str,
    stop_at: float,
    isolated: bool = True,
    accelerator: dict[str, Any] | None = None,
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
    left = 0
    for number, cell in enumerate(cells, 1):
        if cell.key in results.cells:
            continue
        missing = [key for key in cell.needs if not results.ran(key)]
        if any(key not in results.cells for key in missing):
            left += 1  # what it needs is left for the next run, too
            continue
        if missing:
            outcome = _without(missing[0], results.cells[missing[0]])
        elif reason := _not_here(cell):
            outcome = {"status": "skipped", "reason": reason}
        else:
            room = stop_at - time.monotonic()
            if room < MIN_SECONDS:
                left += 1
                continue
            started = time.monotonic()
            folder = results.path.parent
            if isolated:
                outcome = run(cell, folder, timeout_s=min(cell.limit_s, room))
            else:
                with contextlib.chdir(folder):
                    outcome = tasks.outcome(cell.task, cell.arguments)
            outcome["seconds"] = round(time.monotonic() - started, 2)
            if outcome["status"] == "timed out" and room < cell.limit_s:
                left += 1  # the run's time ended, not the cell's
                continue
        results.cells[cell.key] = {
            "part": cell.part,
            "task": cell.task,
            "arguments": cell.arguments,
            **outcome,
        }
        results.write()
        said = outcome.get("reason", "").splitlines() or [""]
        print(f"[{number}/{len(cells)}] {cell.key}: {outcome['status']} {said[-1]}", flush=True)
    return left


def _without(key: str, needed: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a cell that needs one which did not run.

    Who has no plan is refused, too; a ladder is skipped for the reason of its first rung.
    """
    reason = needed.get("reason", "")
    if needed["status"] in ("refused", "skipped"):
        return {"status": needed["status"], "reason": reason}
    return {"status": "skipped", "reason": f"needs {key}: {reason}".rstrip(": ")}


def _not_here(cell: Cell) -> str | None:
    """Why a cell cannot run on its device or without a package, told without starting a process."""
    if cell.task == "sanitized":
        return unseen(cell.arguments["device"])
    if cell.task == "train":
        return ADAPTERS[cell.arguments["adapter"]].missing(Work(**cell.arguments["work"]))
    return None


def run(cell: Cell, folder: Path, *, timeout_s: float) -> dict[str, Any]:
    """One cell in a process of its own; a process that is killed or crashes is an outcome."""
    with tempfile.TemporaryDirectory() as temporary:
        answer = Path(temporary) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.peers.worker", str(answer)]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | _SETTINGS | {"PYTHONPATH": os.pathsep.join(sys.path)},
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
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return found
    if process.returncode == -signal.SIGKILL:
        return {"status": "did not fit", "reason": "killed, as when the host's memory ends"}
    if _says_out_of_memory(printed):
        return {"status": "did not fit", "reason": "out of memory"}
    tail = printed.strip()[-TAIL:] or f"exit status {process.returncode}"
    return {"status": "failed", "reason": tail}


def described(device: DeviceKind) -> dict[str, Any]:
    """The accelerator of this type, as a process of its own finds it; ProtrainError without one."""
    ask = Cell(key="", part="", task="describe", arguments={"device": device})
    outcome = run(ask, Path.cwd(), timeout_s=ask.limit_s)
    if outcome["status"] != "ran":
        raise ProtrainError(outcome["reason"])
    found: dict[str, Any] = outcome["result"]
    return found


_SETTINGS = {
    # What PyTorch recommends against fragmentation; the same for everybody.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic kernels
    "OMP_WAIT_POLICY": "passive",  # a contended core makes spinning threads 15 times slower
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


def environment() -> dict[str, Any]:
    """Day, machine, versions and commit; nothing of where files lie."""
    found: dict[str, Any] = {
        "date": today(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": os.getloadavg()[0],  # of a shared machine: what seconds are worth
        "python": platform.python_version(),
        "commit": commit(),
        "versions": {name: _version(name) for name in PACKAGES},
    }
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
