"""The process of one cell: `python -m benchmarks.peers.worker RESULT`, the cell as JSON on stdin.

Files that the cell names are relative to the working directory.

Whatever happens, RESULT says so: {"status": ..., "reason": ..., "result": ...}.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.planning import estimate, plan, profile
from benchmarks.peers.timeline import timeline
from benchmarks.peers.training import DidNotFit, Skipped, train
from benchmarks.peers.work import Work
from protrain_plan.errors import ProtrainError

ROOT = Path(__file__).parents[2]
NO_TESTS = 5  # pytest's exit status where nothing was selected


def done(task: str, given: dict[str, Any]) -> dict[str, Any]:
    """The result of a task; Skipped and DidNotFit are outcomes, too."""
    match task:
        case "profile":
            return profile(Work(**given["work"]), Path(given["out"]))
        case "estimate":
            work, machine = Work(**given["work"]), Path(given["hardware_of"])
            return estimate(work, machine, Path(given["out"]))
        case "plan":
            return plan(
                Path(given["profile"]),
                given["cap_bytes"],
                Path(given["out"]),
                maximize_batch=given.get("maximize_batch", False),
                disk=given.get("disk", True),
            )
        case "train":
            return train(Work(**given["work"]), given["adapter"])
        case "timeline":
            return timeline(Work(**given["work"]), Path(given["profile"]), Path(given["out"]))
        case "tests":
            return _tests(given["arguments"])
        case _:
            raise AssertionError(f"no such task: {task}")


def _tests(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = ended.stdout.strip().splitlines() or [ended.stderr.strip()]
    if ended.returncode == NO_TESTS:
        raise Skipped(f"no tests selected: {lines[-1]}")
    return {"exit_code": ended.returncode, "summary": lines[-1], "output": lines[-40:]}


def main() -> None:
    cell = json.load(sys.stdin)
    if "out" in cell["arguments"]:
        Path(cell["arguments"]["out"]).parent.mkdir(parents=True, exist_ok=True)
    answer: dict[str, Any]
    try:
        answer = {"status": "ran", "result": done(cell["task"], cell["arguments"])}
    except Skipped as skipped:
        answer = {"status": "skipped", "reason": str(skipped)}
    except DidNotFit as reason:
        answer = {"status": "did not fit", "reason": str(reason)}
    except ProtrainError as error:
        answer = {"status": "failed", "reason": str(error)}
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
