"""Everything that a CUDA device can show, in one command that needs nothing from the net.

    python -m benchmarks.gpu --minutes 9 --out DIR [--parts truth peers size parity timeline]

What is missing is skipped, and the table says why. A run that is cut off keeps what it has; the
same command with the same DIR goes on with what is left. DIR gets gpu.json, gpu.md, profiles, plans
and recordings. `--smoke` runs the same cells on a CPU, with a tiny model.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.parts import PARTS, cells
from benchmarks.peers.cells import Results, run_all
from benchmarks.peers.tables import write_tables


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--smoke", action="store_true", help="on a CPU, a tiny model")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        print("error: torch finds no CUDA device here\n  fix: --smoke runs on a CPU")
        return 2
    results = Results.at(options.out / "gpu.json")
    command = f"python -m benchmarks.gpu --minutes {options.minutes:g}"
    command += f" --parts {' '.join(options.parts)}{' --smoke' if options.smoke else ''}"
    stop_at = time.monotonic() + 60 * options.minutes
    todo = cells(options.parts, smoke=options.smoke)
    left = run_all(todo, results, command=command, stop_at=stop_at, isolated=not options.smoke)
    write_tables(results.path)
    print(f"{left} cells are left for the next run" if left else "every cell has an outcome")
    return 0


if __name__ == "__main__":
    sys.exit(main())
