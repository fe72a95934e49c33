"""What README and documentation quote of the benchmarks: `python -m benchmarks.quotes` writes it.

A page marks the place, and everything between the marks is made from benchmarks/results/*.json:

    <!-- quoted: planner -->
    <!-- end of quote -->

A test makes all blocks again and compares, so that no number is copied by hand.
"""

import itertools
import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy_page import absolute_ratios, bars, memory_results, quantile
from benchmarks.front import MACHINES, UPDATES, ratios
from benchmarks.peers.tables import compared, markdown_table
from benchmarks.reporting import BINDS, CaseResult
from benchmarks.rounds import read_rounds
from protrain_plan.planning.search.baselines import BASELINES
from protrain_runtime.contract.records.files import replace_text
from protrain_runtime.contract.units import format_bytes, format_seconds

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
BLOCK = re.compile(r"^<!-- quoted: (.+?) -->\n(.*?)^<!-- end of quote -->$", re.DOTALL | re.M)

WIDTH = 100

Document = dict[str, Any]
Lines = Iterator[str]


def main() -> None:
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = with_quotes(before)
        if after != before:
            replace_text(page, after)
            print(f"wrote {page.relative_to(ROOT)}")


def with_quotes(text: str, *, results: Path = RESULTS) -> str:
    """The page with its blocks made from the files in `results`; KeyError for unknown blocks."""

    def block(match: re.Match[str]) -> str:
        lines = "".join(f"{line}\n" for line in quoted(match[1], results))
        return f"<!-- quoted: {match[1]} -->\n{lines}<!-- end of quote -->"

    return BLOCK.sub(block, text)


def quoted(name: str, results: Path) -> list[str]:
    """The lines of a block; one that says so where there are no results."""
    stem, write = BLOCKS[name]
    path = results / f"{stem}.json"
    if not path.exists():
        return [f"Not measured yet: there is no `benchmarks/results/{path.name}`."]
    document = json.loads(path.read_text(encoding="utf-8"))
    return list(_set(write(document)))


def _set(lines: Lines) -> Lines:
    """Tables as they are; sentences that follow each other as a paragraph."""
    for is_prose, group in itertools.groupby(lines, key=lambda line: line[:1] not in ("", "|")):
        found = list(group)
        if is_prose:
            found = textwrap.wrap(" ".join(found), WIDTH, break_on_hyphens=False)
        yield from found


# --- the planner ----------------------------------------------------------------------------------


def _planner(document: Document) -> Lines:
    """A row per machine."""
    cases = [CaseResult(**case) for case in document["cases"]]
    rows = [
        ["machine", "cases solved", "gap at most 1 %", "largest gap", "planning, median", "worst"]
    ]
    for machine in dict.fromkeys(case.machine for case in cases):
        here = [case for case in cases if case.machine == machine]
        gaps = [case.gap for case in here if case.gap is not None]
        seconds = [case.solve_seconds for case in here if case.solve_seconds is not None]
        rows.append(
            [
                machine,
                f"{len(gaps)} of {len(here)}",
                f"{sum(gap <= 0.01 for gap in gaps) / max(1, len(gaps)):.0%}",
                f"{max(gaps):.1%}" if gaps else "-",
                format_seconds(statistics.median(seconds)) if seconds else "-",
                format_seconds(max(seconds)) if seconds else "-",
            ]
        )
    yield from markdown_table(rows, numbers_from=1)
    yield ""
    yield from _planner_in_short(document)


def _planner_in_short(document: Document) -> Lines:
    found = document["summary"]
    seconds, ratios = found["solve_seconds"], found["baseline_over_ours_where_memory_binds"]
    yield (
        f"{found['num_solved']} of {found['num_cases']} cases solved; the gap is at most 1 % in"
        f" {found['share_gap_within_1_percent']:.0%} and {found['worst_gap']:.1%} at worst."
        f" Planning took {format_seconds(seconds['median'])} in the median and"
        f" {format_seconds(seconds['worst'])} at worst. A baseline is faster in"
        f" {len(found['baseline_faster']) + len(found['baseline_faster_within_gap_target'])} cases."
    )
    if ratio := ratios.get("four-parameter"):
        yield (
            f"Where memory binds (it costs more than {BINDS - 1:.0%}; {ratio['cases']} cases), the"
            " paper's four-parameter search, judged by the same simulator, takes"
            f" {ratio['mean']:.2f} times as long in the mean and {ratio['median']:.2f} in the"
            " median."
        )
    yield f"({_source('planner', document)})"


# --- accuracy -------------------------------------------------------------------------------------


def _accuracy(document: Document) -> Lines:
    """What was asked, and what came."""
    rows = [["", "asked", "result", "found"]]
    rows += [
        [bar.name, bar.asked, "held" if bar.held else "**missed**", bar.found]
        for bar in bars(document)
    ]
    yield from markdown_table(rows)
    yield ""
    yield from _seconds(document)
    yield f"({_source('accuracy', document)})"


def _accuracy_in_short(document: Document) -> Lines:
    memory = [found for _, _, found in memory_results(document)]
    profiles = [case.get("profile", {}) for case in document["cases"].values()]
    counted = [found for found in profiles if found.get("num_forms") and not found["refused"]]
    forms = sum(found["num_forms"] for found in counted)
    unequal = sum(bool(d["kept"]) for found in counted for d in found["differences"])
    if counted:
        yield (
            f"On a CPU, estimated bytes of what is saved equal measured ones in"
            f" {forms - unequal} of {forms} unit forms of {len(counted)} models."
        )
    if memory:
        held = sum(found.slot_under == 0 for found in memory)
        over = statistics.median(found.predicted - found.measured for found in memory)
        yield (
            f"In {held} of {len(memory)} planned steps no slot took more memory than predicted; the"
            f" predicted peak was {over:,.0f} bytes above the measured one in the median."
        )
        beside = [found.context_measured - found.context_predicted for found in memory]
        if max(beside) > 0:
            yield (
                f"What the process holds besides tensors was more than profiled in"
                f" {sum(more > 0 for more in beside)} of them, by {format_bytes(max(beside))} at"
                " most."
            )
    yield from _seconds(document)
    yield f"({_source('accuracy', document)})"


def _seconds(document: Document) -> Lines:
    ratios = sorted(ratio for _, _, ratio in absolute_ratios(document))
    if not ratios:
        yield "Seconds were not measured yet."
        return
    low, high = quantile(ratios, 0.1), quantile(ratios, 0.9)
    yield (
        f"Measured steps took {statistics.median(ratios):.2f} times the predicted seconds in the"
        f" median, {low:.2f} to {high:.2f} from the 10th to the 90th percentile, {ratios[-1]:.2f}"
        f" at most, in {len(ratios)} cases."
    )


# --- the runtime ----------------------------------------------------------------------------------

AGAINST = {
    "noise": "plain PyTorch / itself",
    "keep": "everything kept / plain PyTorch",
    "recompute": "every block recomputed / `torch.utils.checkpoint`",
    "swap": "every block swapped to host memory / `save_on_cpu` that copies",
    "swap to disk": "every block swapped to disk / `save_on_cpu` that copies",
    "offload": "all blocks' states on disk, recomputed / a loop that loads, computes, saves",
    "recording": "that plan, recorded / not recorded",
}
"""What the runtime benchmark compares, by its name there."""


def _runtime(document: Document) -> Lines:
    """A row per model and comparison: the mean over processes of their median ratio of steps."""
    rows = [["model", "planned step / other step", "ratio", "simulated", "losses"]]
    for model, found in document["models"].items():
        if "error" in found:
            rows.append([model, "", found["error"], *[""] * 2])
        for name, one in found.get("comparisons", {}).items():
            if "error" in one:
                rows.append([model, AGAINST.get(name, name), one["error"], *[""] * 2])
                continue
            rounds = read_rounds(one)
            says = rounds.simulated_ratio
            rows.append(
                [
                    model,
                    AGAINST.get(name, name),
                    rounds.text,
                    f"{says:.3f}" if says else "",
                    "equal bits" if rounds.same_losses else "**differ**",
                ]
            )
    yield from markdown_table(rows)
    yield ""
    yield f"({_source('runtime', document)})"


# --- peers ----------------------------------------------------------------------------------------


def _cpu(document: Document) -> Lines:
    yield from markdown_table(compared(document["cells"]))
    yield ""
    yield f"({_source('cpu', document)})"


def _paper(document: Document) -> Lines:
    """Predictions: seconds of a step, and what the baselines take of them."""
    rows = [["model", "machine", "step", "tokens/s", *(f"{name} / ours" for name in BASELINES)]]
    for row in document["predictions"]:
        if "step_seconds" not in row:
            continue  # no plan
        ratios = [row["baseline_over_ours"].get(name) for name in BASELINES]
        rows.append(
            [
                row["model"],
                row["machine"],
                format_seconds(row["step_seconds"]),
                f"{row['tokens_per_s']:,.0f}",
                *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    yield from markdown_table(rows, numbers_from=2)
    yield ""
    yield f"({_source('paper', document)})"


def _front(document: Document) -> Lines:
    """Steps of an 8B in full: before, with what came since, and both under clipping."""
    before, *_, now = (run["label"] for run in document["runs"])
    rows = [["machine", "device", "before", "now", "clipping: before", "waiting", "now"]]
    cases: Document = document["cases"]
    for machine in MACHINES:
        alike = [cases[f"llama-3.1-8b-{machine}, {updates}"] for updates in UPDATES]
        for n, device in enumerate(alike[0]["budgets"]):
            labels = [(one, label) for one in alike for label in (before, "waiting", now)]
            found = [list(one[label].values())[n] for one, label in labels if label in one]
            seconds = [format_seconds(each["seconds"]) for each in found]
            rows.append([machine, f"{device / 2**30:.1f} GiB", *seconds])
    yield from markdown_table(rows, numbers_from=1)
    yield ""
    told = [
        f"{name} {statistics.median(each):.2f} times ({min(each):.2f} to {max(each):.2f})"
        for name, each in ratios(document, now).items()
    ]
    count = sum(len(one.get(now, {})) for one in cases.values())
    yield f"What others take of this planner's seconds, in the median of {count} budgets of 8B and"
    yield f"70B models, in full and with adapters: {', '.join(told)}."
    yield f"({_source('front', document)})"


# --- blocks ---------------------------------------------------------------------------------------

BLOCKS: dict[str, tuple[str, Callable[[Document], Lines]]] = {
    "planner": ("planner", _planner),
    "planner in short": ("planner", _planner_in_short),
    "front": ("front", _front),
    "accuracy": ("accuracy", _accuracy),
    "accuracy in short": ("accuracy", _accuracy_in_short),
    "runtime": ("runtime", _runtime),
    "peers on a CPU": ("cpu", _cpu),
    "the paper's models": ("paper", _paper),
}
"""What a page may quote: the file of results, and what makes lines of it."""


def _source(stem: str, document: Document) -> str:
    """The file, and what it says of its run: the day and the commit, where it has them."""
    runs: Sequence[Document] = document.get("runs", (document.get("run", document),))
    date, commit = runs[-1].get("date"), runs[-1].get("commit")
    words = [f"`benchmarks/results/{stem}.md`", *([date] if date else [])]
    return ", ".join(words + ([f"commit {commit}"] if commit else []))


if __name__ == "__main__":
    main()
