"""Everything that an accelerator can show, in one command that needs nothing from the net.

    python -m benchmarks.gpu --minutes 9 --out DIR [--parts tests truth parity]

After 5 minutes it has run the accelerator's tests and a model of 135 M parameters, after 15 a 1B
beside its peers, after 45 an 8B. What is missing is skipped, and the table says why. A run that is
cut off keeps what it has; the same command with the same DIR goes on with what is left. `--short`
has what shows whether steps wait for the host, with a plan's own number of threads, 3, 8 and 16.
DIR gets gpu.json, gpu.md, what pytest printed, profiles, plans and recordings. `--models
llama-3.2-1b` leaves other models out. `--dry-run` goes through every kind of cell on the emulated
device of the tests, with a tiny model, in some minutes on two processors: it shows that cells run,
and no speed.
"""

import argparse
import sys
import time
from pathlib import Path

from benchmarks.gpu.parts import PARTS, cells
from benchmarks.gpu.suites import CARD, DRY, SHORT
from benchmarks.peers.tables import is_dry, write_tables
from benchmarks.runner import Cell, Results, described, run_all
from protrain_runtime.contract.errors import ProtrainError
from tests.emulated import building


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, help="9, 8 of a short run, or 30 of a dry one")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", help="these alone, where a cell has a model")
    parser.add_argument("--dry-run", action="store_true", help="on the emulated device, tiny")
    parser.add_argument("--short", action="store_true", help="steps that may wait for the host")
    options = parser.parse_args()
    suite = DRY if options.dry_run else SHORT if options.short else CARD
    if options.short:
        options.parts = [part for part in options.parts if part in SHORT_PARTS]
    minutes = 30.0 if options.dry_run else 8.0 if options.short else 9.0
    minutes = minutes if options.minutes is None else options.minutes
    if options.dry_run and building.compiler() is None:
        return _error("there is no C++ compiler for the emulated device", "install g++")
    results = Results.at(options.out / "gpu.json")
    if results.runs and is_dry(results.runs) != options.dry_run:
        have = "a run on a card" if options.dry_run else "a dry run"
        return _error(f"{results.path} is of {have}", "name another folder")
    try:
        accelerator = described(suite.base.device)
    except ProtrainError as error:
        return _error(str(error).splitlines()[0], "--dry-run runs without one")
    command = f"python -m benchmarks.gpu --minutes {minutes:g}"
    command += f" --parts {' '.join(options.parts)}"
    command += " --dry-run" * options.dry_run + " --short" * options.short
    stop_at = started + 60 * minutes
    if options.models:
        command += f" --models {' '.join(options.models)}"
    todo = [cell for cell in cells(options.parts, suite) if _asked(cell, options.models)]
    left = run_all(
        todo,
        results,
        command=command,
        stop_at=stop_at,
        accelerator=accelerator,
    )
    write_tables(results.path)
    print(f"{left} cells are left for the next run" if left else "every cell has an outcome")
    return 0


def _asked(cell: Cell, models: list[str] | None) -> bool:
    """Whether a cell is of one of the models, of none, or any model is asked for."""
    names = cell.key.split("/")[1].split() if cell.task in MODELED else []
    return not models or not names or names[0] in models


SHORT_PARTS = ("tests", "truth", "timeline", "peers")
MODELED = ("profile", "estimate", "plan", "train", "timeline")
"""Tasks of cells whose keys name a model."""


def _error(problem: str, fix: str) -> int:
    print(f"error: {problem}\n  fix: {fix}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
