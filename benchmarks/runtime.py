"""The runtime's speed: planned steps beside what PyTorch, or a plain loop, does for the same.

    python -m benchmarks.runtime [--models NAME...] [--comparisons NAME...] [--resume] [--quick]

Two ways to train one model take turns, step by step, in one process; what counts is the ratio of
steps that followed each other, in the mean over several processes. Run it on a quiet machine.
Everything is written as it comes.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks import runtime_runs as runs
from benchmarks.processes import Found, Processes, described
from benchmarks.runtime_page import page, summary_lines
from benchmarks.zoo import Specimen

MODULE = "benchmarks.runtime"


def main() -> None:
    arguments = _arguments()
    benchmark = _Benchmark(arguments)
    specimens = [runs.QUICK] if arguments.quick else [runs.SPECIMENS[n] for n in arguments.models]
    for specimen in specimens:
        if benchmark.profile(specimen):
            for comparison in arguments.comparisons:
                benchmark.compare(specimen, comparison)
    for line in summary_lines(benchmark.document):
        print(line)


class _Benchmark:
    """The document with the results, and the processes that add to it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._out: Path = arguments.out
        self._quick: bool = arguments.quick
        self._num_pairs: int = arguments.pairs
        self._num_rounds: int = arguments.rounds
        self._work: Path = arguments.work.resolve()
        self._processes = Processes("benchmarks.runtime_runs")
        before: Found = {}
        if arguments.resume and self._out.exists():
            before = json.loads(self._out.read_text())
        self.document: Found = {**described(MODULE), "models": before.get("models", {})}

    def profile(self, specimen: Specimen) -> bool:
        """Whether there is a profile, measured now or before."""
        folder = self._work / specimen.name
        folder.mkdir(parents=True, exist_ok=True)
        models = self.document["models"]
        if specimen.name not in models or not (folder / runs.PROFILE).exists():
            found = self._processes.run(runs.profile, specimen, folder, self._quick)
            models[specimen.name] = {**found, "batch": [specimen.batch_size, specimen.seq_len]}
            models[specimen.name]["comparisons"] = {}
            self._write()
        return "error" not in models[specimen.name]

    def compare(self, specimen: Specimen, comparison: runs.Comparison) -> None:
        """Compare, unless that was done before."""
        comparisons: Found = self.document["models"][specimen.name]["comparisons"]
        if comparison in comparisons:
            return
        folder = self._work / specimen.name
        rounds: list[Found] = []
        said = ""
        for number in range(self._num_rounds):
            found = self._processes.run(
                runs.compare, specimen, comparison, folder, self._num_pairs, number
            )
            if said := found.get("error", ""):
                comparisons[comparison] = found
                break
            rounds.append(found)
        else:
            comparisons[comparison] = {"rounds": rounds}
        self._write()
        print(f"{specimen.name}, {comparison}: {said or 'timed'}", file=sys.stderr)

    def _write(self) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self.document, indent=1) + "\n")
        self._out.with_suffix(".md").write_text(page(self.document))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    models, comparisons = tuple(runs.SPECIMENS), runs.COMPARISONS
    parser.add_argument("--models", nargs="+", metavar="NAME", choices=models, default=models)
    parser.add_argument(
        "--comparisons", nargs="+", metavar="NAME", choices=comparisons, default=comparisons
    )
    parser.add_argument("--rounds", type=int, default=8, help="processes per comparison")
    parser.add_argument("--pairs", type=int, default=6, help="of steps per process")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/runtime.json"))
    parser.add_argument("--work", type=Path, default=Path("out/runtime"), help="for profiles")
    parser.add_argument("--resume", action="store_true", help="leave what --out has already")
    parser.add_argument("--quick", action="store_true", help="a tiny model, on any machine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
