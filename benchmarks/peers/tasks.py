"""What a cell can ask for, by name, and what comes of it."""

from pathlib import Path
from typing import Any

from benchmarks.peers.accelerators import described
from benchmarks.peers.outcomes import DidNotFit, Refused, Skipped
from benchmarks.peers.planning import estimate, plan, profile
from benchmarks.peers.testing import sanitized, tests
from benchmarks.peers.timeline import timeline
from benchmarks.peers.training import train
from benchmarks.peers.update_bits import updates
from benchmarks.peers.work import Work
from protrain_runtime.contract.errors import ProtrainError


def outcome(task: str, given: dict[str, Any]) -> dict[str, Any]:
    """{"status", "result"} or {"status", "reason"}. Files are relative to the working directory.

    A crash of a peer, or of ours, is not caught: the process ends, and its last words are kept.
    """
    if "out" in given:
        Path(given["out"]).parent.mkdir(parents=True, exist_ok=True)
    try:
        return {"status": "ran", "result": _done(task, given)}
    except Skipped as skipped:
        return {"status": "skipped", "reason": str(skipped)}
    except Refused as reason:
        return {"status": "refused", "reason": str(reason)}
    except DidNotFit as reason:
        return {"status": "did not fit", "reason": str(reason)}
    except ProtrainError as error:
        return {"status": "failed", "reason": str(error)}


def _done(task: str, given: dict[str, Any]) -> dict[str, Any]:
    match task:
        case "describe":
            return described(given["device"])
        case "profile":
            return profile(Work(**given["work"]), Path(given["out"]))
        case "estimate":
            work, machine = Work(**given["work"]), Path(given["hardware_of"])
            return estimate(work, machine, Path(given["out"]))
        case "plan":
            files = {name: Path(given[name]) for name in ("profile", "out")}
            return plan(**{**given, **files})
        case "train":
            return train(Work(**given["work"]), given["adapter"])
        case "timeline":
            return timeline(Work(**given["work"]), Path(given["profile"]), Path(given["out"]))
        case "tests":
            return tests(given["arguments"], given["limit_s"], Path(given["out"]))
        case "updates":
            return updates(given["device"])
        case "sanitized":
            return sanitized(given["arguments"], given["limit_s"])
        case _:
            raise AssertionError(f"no such task: {task}")
