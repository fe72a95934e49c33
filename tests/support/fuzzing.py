"""Random modules, judged in order: python -m tests.support.fuzzing --seconds 300 --seed 0.

Prints each that goes wrong with its seed and its source, and what became of all of them. Ends with
1 where one went wrong.
"""

import argparse
import os
import sys
import time
from collections import Counter

# Before torch is imported, as for the tests (tests/conftest.py).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from tests.support.fuzzed_modules import fuzzed, source
from tests.support.judging import PLANS, Verdict, judged


def wrong(verdicts: list[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.kind == "wrong"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first module")
    parser.add_argument("--quiet", action="store_true", help="print no sources")
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    seed, end = asked.seed, time.monotonic() + asked.seconds
    while time.monotonic() < end:
        verdicts = judged(fuzzed, seed, plans=PLANS, seed=seed)
        for verdict in verdicts:
            said = f": {verdict.text.splitlines()[0]}" if verdict.kind == "refused" else ""
            counts[f"{verdict.kind}{said}"] += 1
        if bad := wrong(verdicts):
            print(f"--- seed {seed}")
            print(*(f"{each.under}: {each.text}" for each in bad), sep="\n")
            if not asked.quiet:
                print(source(seed))
            sys.stdout.flush()
        seed += 1
    print(f"--- {seed - asked.seed} modules")
    for kind, count in counts.most_common():
        print(f"{count:5} {kind}")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
