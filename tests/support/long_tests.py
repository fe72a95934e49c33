"""Which tests run every night alone, by the seconds that each takes: `tests/nightly.txt`.

    make test PYTEST_ADDOPTS="--durations=0 --durations-min=0.3" | tee LOG
    python -m tests.support.long_tests LOG --share 0.5    (what stays in every run, of its time)

The longest tests of a log go to the list until what is left takes the share that is asked for. Of
those of each file a third stays, the shorter ones. Tests that the log does not have stay where they
are, and a test that kills a mutation (`tests.support.mutations`) is never on the list. Times differ
from machine to machine, and so the list is made by hand and committed: what runs does not depend on
where, on a case's place in its table, or on its name. A new case runs always until the list has it.
"""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support import mutations

FILE = Path(__file__).parents[1] / "nightly.txt"
HEADER = "# Tests that run every night alone, and their cases; see tests/support/long_tests.py.\n"
LINE = re.compile(r"^(?P<seconds>[\d.]+)s (?P<phase>setup|call|teardown) +(?P<name>tests/.*)$")
INDENT = "    "


def read() -> frozenset[str]:
    """The names in the file: a test, or the cases of it that stand below it."""
    names, test = set[str](), ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith(INDENT):
            names.discard(test)
            names.add(f"{test}[{line.removeprefix(INDENT)}]")
        elif line and not line.startswith("#"):
            test = line
            names.add(test)
    return frozenset(names)


def write(names: Iterable[str]) -> None:
    """Make the file of these names, but for tests that a mutation needs in every run."""
    cases: dict[str, list[str]] = defaultdict(list)
    for name in sorted(set(names) - {one.test for one in mutations.ALL}):
        test, _, case = name.partition("[")
        cases[test] += [case.removesuffix("]")] if case else []
    lines = (line for test in sorted(cases) for line in (test, *map(INDENT.__add__, cases[test])))
    FILE.write_text(HEADER + "".join(f"{line}\n" for line in lines), encoding="utf-8")


def timed(log: str) -> dict[str, float]:
    """Seconds of each test's call in what pytest printed; what is set up serves others, too."""
    seconds: dict[str, float] = defaultdict(float)
    for line in log.splitlines():
        if (match := LINE.match(line)) and match["phase"] == "call":
            seconds[match["name"].strip()] += float(match["seconds"])
    return dict(seconds)


def at_night(seconds: Mapping[str, float], share: float) -> list[str]:
    """The names of the tests whose time is more than the `share` that may stay."""
    in_file = Counter(_file(name) for name in seconds)
    left, total = Counter(in_file), sum(seconds.values())
    goal, chosen = share * total, list[str]()
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        if total <= goal:
            break
        if 3 * left[_file(name)] > 3 + in_file[_file(name)]:
            left[_file(name)] -= 1
            total -= seconds[name]
            chosen.append(name)
    return chosen


def _file(name: str) -> str:
    return name.partition("::")[0]


def main() -> None:
    """Add to the list what takes long by a log."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("log", type=Path)
    parser.add_argument("--share", type=float, required=True, metavar="0..1")
    arguments = parser.parse_args()
    seconds = timed(arguments.log.read_text(encoding="utf-8"))
    chosen = at_night(seconds, arguments.share)
    write(read() | set(chosen))
    moved, total = sum(seconds[name] for name in chosen), sum(seconds.values())
    print(f"{len(chosen)} of {len(seconds)} tests, {moved:.0f} of {total:.0f} s, run at night now")


if __name__ == "__main__":
    main()
