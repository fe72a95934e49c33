"""The peers' table on a CPU machine: one work under limits that the operating system enforces.

    python -m benchmarks.cpu --minutes 20 --out DIR [--limits 900MiB 1300MiB 1900MiB]

RLIMIT_DATA refuses a process more private memory than the limit, interpreter and libraries
included. A run that is cut off keeps what it has; the same command goes on with what is left. DIR
gets cpu.json, cpu.md, profiles and plans. `--smoke` runs a tiny model without a limit.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.comparing import once, peer_cells, planned_cells
from benchmarks.peers.tables import write_tables
from benchmarks.peers.work import Work
from benchmarks.runner import Cell, Results, run_all
from protrain_runtime.contract.units import parse_bytes

WORK = Work(
    model="smollm2-135m",
    batch_size=1,
    seq_len=256,
    dtype="float32",
    precision="pure",
    device="cpu",
    num_warmup=1,
    num_steps=3,
)
SMOKE = replace(WORK, model="tiny-llama", seq_len=32, num_steps=1)


def cells(work: Work, limits: list[int]) -> list[Cell]:
    """A profile; for one limit after the other a plan, its run, and all peers.

    So a run that is cut off has compared everybody under some of the limits.
    """
    found: list[Cell] = []
    for limit in limits:
        works = [replace(work, cap_bytes=limit)]
        found += planned_cells("peers", works)
        found += peer_cells("peers", works, batches=(work.batch_size,))
    return once(found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.cpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limits", nargs="+", default=["1100MiB", "1500MiB", "2000MiB"])
    parser.add_argument("--smoke", action="store_true", help="a tiny model, no limit")
    options = parser.parse_args()
    # Without a limit first: what there is to compare with.
    limits = [0] if options.smoke else [0, *(parse_bytes(text) for text in options.limits)]
    results = Results.at(options.out / "cpu.json")
    command = f"python -m benchmarks.cpu --minutes {options.minutes:g}"
    command += " --smoke" if options.smoke else f" --limits {' '.join(options.limits)}"
    stop_at = time.monotonic() + 60 * options.minutes
    todo = cells(SMOKE if options.smoke else WORK, limits)
    left = run_all(todo, results, command=command, stop_at=stop_at, isolated=not options.smoke)
    write_tables(results.path)
    print(f"{left} cells are left for the next run" if left else "every cell has an outcome")
    return 0


if __name__ == "__main__":
    sys.exit(main())
