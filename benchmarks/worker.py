"""The process of a cell: `python -m benchmarks.worker RESULT`, the cell as JSON on stdin."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.outcomes import DidNotFit, Refused, Skipped
from benchmarks.peers.work import Work
from protrain_runtime.contract.errors import ProtrainError

TASKS = {
    "describe": "benchmarks.peers.accelerators:described",
    "profile": "benchmarks.peers.planning:profile",
    "estimate": "benchmarks.peers.planning:estimate",
    "plan": "benchmarks.peers.planning:plan",
    "train": "benchmarks.peers.training:train",
    "timeline": "benchmarks.peers.timeline:timeline",
    "tests": "benchmarks.peers.testing:tests",
    "sanitized": "benchmarks.peers.testing:sanitized",
    "updates": "benchmarks.peers.update_bits:updates",
    "kernels": "benchmarks.gpu.kernels:kernels",
    "planner case": "benchmarks.planner:solved",
    "launching": "benchmarks.launching:measured",
    "front": "benchmarks.front:answered",
    "published": "benchmarks.published_runs:predicted",
    "pipeline": "benchmarks.pipeline:compared",
    "stages": "benchmarks.stages:predicted",
    "profiles": "benchmarks.accuracy_runs:profiles",
    "bytes": "benchmarks.accuracy_runs:counted",
    "seconds": "benchmarks.accuracy_runs:timed",
}
"""Tasks of cells, and the function that does each, with the cell's arguments."""


def _as_it_is(value: Any) -> Any:
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    "work": lambda found: Work(**found),
    **dict.fromkeys(("out", "profile", "hardware_of"), Path),
}
"""Arguments that are no plain JSON."""


def outcome(task: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """{"status", "result"} or {"status", "reason"}. Files are relative to the working directory.

    A crash is not caught: the process ends, and its last words are kept.
    """
    module, _, name = TASKS[task].partition(":")
    function: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), name)
    given = {key: _READERS.get(key, _as_it_is)(value) for key, value in arguments.items()}
    if "out" in given:
        given["out"].parent.mkdir(parents=True, exist_ok=True)
    try:
        return {"status": "ran", "result": function(**given)}
    except Skipped as skipped:
        return {"status": "skipped", "reason": str(skipped)}
    except Refused as reason:
        return {"status": "refused", "reason": str(reason)}
    except DidNotFit as reason:
        return {"status": "did not fit", "reason": str(reason)}
    except ProtrainError as error:
        return {"status": "failed", "reason": str(error)}


def main() -> None:
    cell = json.load(sys.stdin)
    answer = outcome(cell["task"], cell["arguments"])
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
