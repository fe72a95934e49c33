"""Profiles against what happens: predicted bytes and seconds beside measured ones.

    python -m benchmarks.accuracy [--only NAME...] [--stages memory time] [--resume] [--quick]

Small models of many architectures, each under plans of five kinds. Bytes come first, then seconds,
one process at a time: run that part on a quiet machine. Everything is written as it comes.
"""

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import accuracy_runs as runs
from benchmarks import adapters
from benchmarks.accuracy_cases import PLAN_KINDS, QUICK, SPECIMENS, PlanKind
from benchmarks.accuracy_page import page, summary_lines
from benchmarks.processes import Found, Processes, described

QUICK_PLANS: tuple[PlanKind, ...] = ("keep", "recompute")
STAGES = ("memory", "time")


def main() -> None:
    arguments = _arguments()
    if arguments.page:
        _write_page(arguments.out, json.loads(arguments.out.read_text()))
        return
    benchmark = _Benchmark(arguments)
    if "memory" in arguments.stages:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(benchmark.count_bytes, benchmark.names))
    if "time" in arguments.stages:
        for name in benchmark.names:
            benchmark.time_steps(name)
    for line in summary_lines(benchmark.document):
        print(line)


class _Benchmark:
    """The document with the results, and the processes that add to it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._out: Path = arguments.out
        self._quick: bool = arguments.quick
        self._num_steps: int = arguments.steps
        self._lock = threading.Lock()
        self._work: Path = arguments.work.resolve()
        self._work.mkdir(parents=True, exist_ok=True)
        self._kinds = QUICK_PLANS if self._quick else PLAN_KINDS
        self.names: Sequence[str] = arguments.only or (QUICK if self._quick else tuple(SPECIMENS))
        before: Found = {}
        if arguments.resume and self._out.exists():
            before = json.loads(self._out.read_text())
        self.document: Found = {
            **described("benchmarks.accuracy"),
            "cases": before.get("cases", {}),
        }
        self._processes = Processes("benchmarks.accuracy_runs")
        self._machine = self._probed(before)

    def _probed(self, before: Found) -> Path | None:
        """A record of this machine; None: the catalogue's will do, of which bytes do not depend."""
        if self._quick:
            return None
        path = self._work / runs.MACHINE
        if not path.exists() or "hardware" not in before:
            self.document["hardware"] = self._processes.run(runs.machine, self._work)
        else:
            self.document["hardware"] = before["hardware"]
        return path

    def count_bytes(self, name: str) -> None:
        """Profiles, plans, and a step of each plan; what is there already is left."""
        specimen, folder = SPECIMENS[name], self._work / name
        folder.mkdir(exist_ok=True)
        case = self._case(name)
        if "profile" not in case or not (folder / runs.MEASURED).exists():
            case.clear()
            found = self._processes.run(runs.profile, specimen, folder, self._machine)
            self._add(case, "profile", found)
            if "error" in found:
                return
        if "plans" not in case:
            self._add(case, "plans", self._processes.run(runs.plans, self._kinds, folder))
        memory = case.setdefault("memory", {})
        for kind in self._kinds:
            if kind not in memory:
                found = self._processes.run(runs.memory, specimen, kind, folder)
                self._add(memory, kind, found)
                print(f"{name}, {kind}: {found.get('error') or 'counted'}", file=sys.stderr)

    def time_steps(self, name: str) -> None:
        """Steps of all plans, in turn with plain ones."""
        case = self._case(name)
        if "time" in case or "error" in case.get("profile", {"error": ""}):
            return
        folder = self._work / name
        found = self._processes.run(
            runs.seconds, SPECIMENS[name], self._kinds, folder, self._num_steps
        )
        self._add(case, "time", found)
        print(f"{name}: {found.get('error') or 'timed'}", file=sys.stderr)

    def _case(self, name: str) -> Found:
        with self._lock:
            case: Found = self.document["cases"].setdefault(name, {})
            return case

    def _add(self, place: Found, key: str, value: Found) -> None:
        with self._lock:
            place[key] = value
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(self.document, indent=1) + "\n")
            _write_page(self._out, self.document)


def _write_page(out: Path, document: Found) -> None:
    others = adapters.bars(json.loads(adapters.RESULTS.read_text()))
    out.with_suffix(".md").write_text(page(document, others))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.accuracy", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=tuple(SPECIMENS))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--jobs", type=int, default=2, help="specimens at once, for bytes")
    parser.add_argument("--steps", type=int, default=13, help="timed per plan at least")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/accuracy.json"))
    parser.add_argument("--work", type=Path, default=Path("out/accuracy"), help="for profiles")
    parser.add_argument("--resume", action="store_true", help="leave what --out has already")
    parser.add_argument("--page", action="store_true", help="write the page of --out anew alone")
    parser.add_argument("--quick", action="store_true", help="2 specimens under 2 plans")
    return parser.parse_args()


if __name__ == "__main__":
    main()
