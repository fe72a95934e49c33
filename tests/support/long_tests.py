"""Which tests run every night alone, by the processor time that each takes: `tests/nightly.txt`.

    python -m tests.support.long_tests    (about half an hour, in one process)

Of the cases of one test the shortest is in every run, and others that take `LONG_CASE_S` or more
run at night. Of a file's tests that still take `LONG_TEST_S` or more, the longer half does. Times
differ from machine to machine, and so the list is made by hand and committed: what runs does not
depend on where.
"""

import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "nightly.txt"
LONG_CASE_S = 1.0
LONG_TEST_S = 3.0


def at_night(seconds: Mapping[str, float]) -> list[str]:
    """The names of the tests that run at night, of all that are in every run, by their seconds."""
    chosen: set[str] = set()
    for own in _grouped(seconds, lambda name: name.partition("[")[0]):
        chosen.update(name for name in own[1:] if seconds[name] >= LONG_CASE_S)
    left = {name: s for name, s in seconds.items() if name not in chosen and s >= LONG_TEST_S}
    for own in _grouped(left, lambda name: name.partition("::")[0]):
        chosen.update(own[(len(own) + 1) // 2 :])
    return sorted(chosen)


def read() -> frozenset[str]:
    """The names in the file."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    return frozenset(line for line in lines if line and not line.startswith("#"))


def _grouped(seconds: Mapping[str, float], key: Callable[[str], str]) -> Iterable[list[str]]:
    """The names of each group, from the shortest to the longest."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(seconds, key=lambda name: (seconds[name], name)):
        groups[key(name)].append(name)
    return groups.values()


class _Clock:
    """Processor seconds of each test, with those of the processes that it started."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = self._now()
        result = yield
        self.seconds[item.nodeid] = self._now() - before
        return result

    def _now(self) -> float:
        used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    """Time all tests that would be in every run without the list, and write it."""
    FILE.unlink(missing_ok=True)
    clock = _Clock()
    marks = "not slow and not gpu and not emulated"
    code = pytest.main(["-q", "-m", marks, str(FILE.parent)], plugins=[clock])
    names = at_night(clock.seconds)
    header = "# Tests that run every night alone; see tests/support/long_tests.py.\n"
    FILE.write_text(header + "".join(f"{name}\n" for name in names), encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
