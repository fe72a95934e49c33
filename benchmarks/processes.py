"""What benchmarks of this machine share: work in processes of its own, and where a run was made."""

import multiprocessing
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 600

Found = dict[str, Any]


class Processes:
    """Runs functions of `module`, each in a process forked from one that has imported it.

    One that takes longer than `timeout_s` is ended.
    """

    def __init__(self, module: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # for the processes that compute
        # No thread of NumPy's in the process that others are forked from: its stack of 8 MiB would
        # be theirs, and whether a thread of theirs takes it depends on which comes first.
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([module])

    def run(self, work: Callable[..., Found], *arguments: object) -> Found:
        """What `work` returns in a process of its own, or {"error": its last line}."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_report, args=(theirs, work, arguments))
        process.start()
        theirs.close()
        found: Found = {"error": f"not done in {self._timeout_s:.0f} s"}
        if ours.poll(self._timeout_s):
            try:
                found = ours.recv()
            except EOFError:
                found = {"error": "the process ended without an answer"}
        else:
            process.kill()
        process.join()
        return found


def _report(answer: Connection, work: Callable[..., Found], arguments: Sequence[object]) -> None:
    """In the process: the result, or what went wrong."""
    try:
        answer.send(work(*arguments))
    except Exception as error:  # noqa: BLE001 (of any case: the others go on)
        traceback.print_exc()
        answer.send({"error": f"{type(error).__name__}: {error}"})


def described(module: str) -> Found:
    """The command, the commit, the day, the machine and the versions of a run of `module`."""
    return {
        "command": " ".join((f"python -m {module}", *sys.argv[1:])),
        "commit": _commit(),
        "date": datetime.now(tz=UTC).date().isoformat(),
        "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} processors",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "protrain-plan")},
        },
    }


def _commit() -> str:
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or "unknown"
