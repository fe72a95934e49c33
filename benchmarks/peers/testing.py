"""Tests as cells: as they are, and with CUDA's sanitizer looking on."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.outcomes import Skipped
from protrain_runtime.contract.records.hardware import DeviceKind

ROOT = Path(__file__).parents[2]
NO_TESTS = 5  # pytest's exit status where nothing was selected
ENDING_S = 15.0
TAIL = 40  # lines of what pytest printed, the last ones

DETECTED = "CSAN detected"
"""How the sanitizer's reports begin (torch/cuda/_sanitizer.py, UnsynchronizedAccessError)."""

_REPORT_LINES = 40
_MOST_REPORTS = 20


def tests(arguments: list[str], limit_s: float, out: Path) -> dict[str, Any]:
    """Run pytest; what it said in the end, and all of it in a file. Skipped if it selects nothing.

    Tests that take longer than `limit_s` are ended.
    """
    code, printed = _pytest(["-v", "-rfE", "--tb=short", *arguments], limit_s=limit_s)
    out.write_text(printed, encoding="utf-8")
    return _summary(code, printed)


def unseen(device: DeviceKind) -> str | None:
    """Why CUDA's sanitizer finds nothing on such a device; None where it looks."""
    if device == "cuda":
        return None
    return f"CUDA's sanitizer does not see streams of devices of type '{device}'"


def sanitized(arguments: list[str], limit_s: float) -> dict[str, Any]:
    """The same while CUDA's sanitizer looks for accesses that no event orders, and what it found.

    It sees operators of the threads that compute, and events of all: not what lanes' threads
    launch. Tests that take longer than `limit_s` are ended; what was found until then is kept.
    """
    code, printed = _pytest(
        # Uncaught, what it prints is there also where a test passes.
        ["-q", "-s", *arguments],
        settings={"TORCH_CUDA_SANITIZER": "1"},
        limit_s=limit_s,
    )
    return {**_summary(code, printed), "reports": reports(printed)}


def reports(printed: str) -> list[str]:
    """Each different report of the sanitizer, with those lines of its stacks that are of our code.

    They differ in more than the address of the tensor.
    """
    found: dict[tuple[str, ...], str] = {}
    for text in printed.split(DETECTED)[1:]:
        lines = _ours(f"{DETECTED}{text}")[:_REPORT_LINES]
        found.setdefault(tuple(lines[1:]), "\n".join(lines))
    return list(found.values())[:_MOST_REPORTS]


def _ours(report: str) -> list[str]:
    """Lines without frames of libraries, and without where files lie."""
    lines, ours = [], True
    for line in report.splitlines():
        if line.startswith("  File "):
            ours = f'"{ROOT}/' in line and "site-packages" not in line
        elif not line.startswith("    "):
            ours = True
        if ours and line.strip(" ="):
            lines.append(line.strip().replace(f"{ROOT}/", ""))
    return lines


def _summary(code: int | None, printed: str) -> dict[str, Any]:
    lines = printed.replace(f"{ROOT}/", "").strip().splitlines() or [""]
    if code == NO_TESTS:
        raise Skipped(f"no tests selected: {lines[-1]}")
    return {"exit_code": code, "summary": lines[-1], "output": lines[-TAIL:]}


def _pytest(
    arguments: list[str],
    *,
    settings: dict[str, str] | None = None,
    limit_s: float | None = None,
) -> tuple[int | None, str]:
    """Its exit status, None where it was ended, and all that was printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (settings or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it tells of the failures so far
        try:
            printed, _ = process.communicate(timeout=ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
        return None, f"{printed}\nended after {limit_s:.0f} s"
    return process.returncode, printed
