"""Runs that others have published: what is predicted of each beside what they measured.

    python -m benchmarks.published [--only NAME...] [--resume] [--jobs N]

`published.yaml` has the runs, with links and versions. Each is predicted from fake tensors on the
machine of the catalogue, under the plan that plain PyTorch follows; nothing runs on a card. Runs of
one workload share an estimate, and each estimate has a process of its own. Results are written as
they come.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import published_runs
from benchmarks.processes import Found, Processes, described
from benchmarks.published_runs import Run, read_published
from protrain_plan.planning.questions.allowance import MEDIAN as MEDIAN_RESERVED
from protrain_plan.planning.questions.allowance import MOST as MOST_RESERVED
from protrain_runtime.contract.units import format_bytes

MODULE = "benchmarks.published"
RESULTS = Path(__file__).parent / "results/published.json"
TIMEOUT_S = 3600
"""Of an estimate, which takes half a minute where nothing else runs."""


def main() -> None:
    arguments = _arguments()
    published = read_published()
    before: Found = {}
    if arguments.resume and arguments.out.exists():
        before = json.loads(arguments.out.read_text())["runs"]
    found = {name: known for name, known in before.items() if "error" not in known}
    document: Found = {**described(MODULE), "runs": found}
    workloads: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name in arguments.only or published.runs:
        run = published.runs[name]
        if not run.not_asked and name not in found:
            workloads[run.workload].append(name)
    processes = Processes("benchmarks.published_runs", timeout_s=TIMEOUT_S)

    def answers(names: Sequence[str]) -> tuple[Sequence[str], Found]:
        return names, processes.run(published_runs.predicted, names)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        asked = [pool.submit(answers, names) for names in workloads.values()]
        for done in as_completed(asked):
            names, answer = done.result()
            for name in names:
                found[name] = answer if "error" in answer else answer[name]
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    document["runs"] = {name: found[name] for name in published.runs if name in found}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(page(document))
    print(page(document), end="")


# --- comparing ------------------------------------------------------------------------------------

MEMORY, TIME = "memory", "time"
MEDIAN = {MEMORY: 0.05, TIME: 0.12}
"""The most that half of all predictions may be off by."""
MOST = {MEMORY: 0.15, TIME: 0.30}
"""The most that nine in ten may be off by."""
LORA_LOW = 0.03
"""The most that a prediction of adapters' memory may be low."""
BIAS = 0.10
"""The most that the predictions of one architecture may be off by in their median."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure that was published and ours; `off` is ours over theirs, less one.

    Of memory that the allocator reserved, ours is the peak with the median of what was reserved
    beyond tensors, as `fit` knows it. `why_not` says why it counts for no bar.
    """

    run: Run
    kind: str  # MEMORY or TIME: seconds of a step
    published: float
    predicted: float
    why_not: str

    @property
    def off(self) -> float:
        return self.predicted / self.published - 1


def comparisons(document: Mapping[str, Any]) -> list[Comparison]:
    """All figures that can be compared; of speeds, the seconds that they stand for."""
    found = []
    for name, run in read_published().runs.items():
        answer = document["runs"].get(name, {"error": ""})
        if "error" in answer:
            continue
        if run.memory_bytes is not None:
            most, why = answer["memory_bytes"], run.not_held.get("memory", "")
            if run.memory_is == "reserved":
                most *= 1 + MEDIAN_RESERVED
            found.append(Comparison(run, MEMORY, run.memory_bytes, most, why))
        if run.tokens_per_s is not None:
            tokens, why = run.batch * run.seq, run.not_held.get("tokens_per_s", "")
            theirs, ours = tokens / run.tokens_per_s, tokens / answer["tokens_per_s"]
            found.append(Comparison(run, TIME, theirs, ours, why))
    return found


def percentile(values: Iterable[float], share: float) -> float:
    """The least of the values that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]


@dataclass(frozen=True, slots=True)
class Bar:
    """What is asked for, and whether it is so."""

    asked: str
    found: str
    held: bool


def bars(held: Sequence[Comparison]) -> Iterator[Bar]:
    """The bars, over what counts for them."""
    for kind in (MEMORY, TIME):
        sizes = [abs(one.off) for one in held if one.kind == kind]
        if not sizes:
            continue
        median, most = statistics.median(sizes), percentile(sizes, 0.9)
        asked = f"{kind}: half are off by at most {MEDIAN[kind]:.0%}"
        yield Bar(asked, f"{median:.1%} of {len(sizes)}", median <= MEDIAN[kind])
        within = sum(size <= MOST[kind] for size in sizes) / len(sizes)
        asked = f"{kind}: nine in ten by at most {MOST[kind]:.0%}"
        yield Bar(asked, f"{within:.0%} are; 90 % by at most {most:.1%}", most <= MOST[kind])
    reserved = [one for one in held if one.run.memory_is == "reserved" and one.kind == MEMORY]
    if reserved:
        shares = [(1 + MEDIAN_RESERVED) / (1 + one.off) for one in reserved]  # of our peak
        inside = sum(1 <= share <= 1 + MOST_RESERVED for share in shares)
        asked = f"memory, reserved: at least the peak, at most {MOST_RESERVED:.0%} more"
        yield Bar(asked, f"{inside} of {len(shares)} are", inside == len(shares))
    lora = [one.off for one in held if one.kind == MEMORY and one.run.lora]
    if lora:
        low = sum(off < -LORA_LOW for off in lora)
        asked = f"memory with LoRA is never more than {LORA_LOW:.0%} low"
        yield Bar(asked, f"{low} of {len(lora)} are; lowest {min(lora):+.1%}", not low)
    for name, ones in _grouped(held, lambda one: one.run.architecture).items():
        offs = [one.off for one in ones if one.kind == TIME]
        if offs:
            bias = statistics.median(offs)
            asked = f"time: no bias above {BIAS:.0%} on {name}"
            yield Bar(asked, f"{bias:+.1%} of {len(offs)}", abs(bias) <= BIAS)


def _grouped(
    ones: Iterable[Comparison], key: Callable[[Comparison], str]
) -> dict[str, list[Comparison]]:
    found: dict[str, list[Comparison]] = defaultdict(list)
    for one in ones:
        found[key(one)].append(one)
    return dict(sorted(found.items()))


# --- the page -------------------------------------------------------------------------------------


def page(document: Mapping[str, Any]) -> str:
    """The results for people."""
    published = read_published()
    compared = comparisons(document)
    held = [one for one in compared if not one.why_not]
    asked = [run for run in published.runs.values() if not run.not_asked]
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    lines = [
        "# Published runs",
        "",
        f"`{document['command']}`, {document['date']}, commit {document['commit']}",
        "",
        f"{document['system']}; {versions}.",
        "",
        f"`benchmarks/published.yaml` has {len(published.runs)} runs that others measured, with"
        f" links, versions and what had to be assumed. {len(asked)} of them can be asked of us."
        " *Predicted* is what an estimate on the catalogue's machine says of the plan that plain"
        " PyTorch follows: memory is the most bytes of tensors on a device, time the seconds of a"
        " step's micro-batch. Where the published figure is what the allocator reserved, it is the"
        f" peak and the median of what was seen reserved beyond tensors ({MEDIAN_RESERVED:.0%};"
        " `protrain_plan/planning/questions/allowance.py`). *Off* is predicted over published, less"
        " one: below zero, memory is under-predicted, and time is too optimistic. Figures in"
        " brackets count for no bar.",
        "",
        "| asked | found | |",
        "|---|---|---|",
        *(
            f"| {bar.asked} | {bar.found} | {'held' if bar.held else '**missed**'} |"
            for bar in bars(held)
        ),
        "",
        "## By card and kind",
        "",
        "| | figures | least off | median | most | off either way, 90 % |",
        "|---|---:|---:|---:|---:|---:|",
        *_summaries(held),
        "",
        "## Memory",
        "",
        "| run | card | plan | adapters | published | predicted | off | peak in |",
        "|---|---|---|---|---:|---:|---:|---|",
        *(
            f"| [{one.run.name}]({one.run.source.link}) | {_card(one.run)} | {_plan(one.run)} |"
            f" {_adapters(one.run)} |"
            f" {format_bytes(int(one.published))} {one.run.memory_is} |"
            f" {format_bytes(int(one.predicted))} | {_off(one)} |"
            f" {document['runs'][one.run.name]['peak']} |"
            for one in compared
            if one.kind == MEMORY
        ),
        "",
        "## Time",
        "",
        "| run | card | plan | batch | published tokens/s | predicted | off | compute busy |",
        "|---|---|---|---|---:|---:|---:|---:|",
        *(
            f"| [{one.run.name}]({one.run.source.link}) | {_card(one.run)} | {_plan(one.run)} |"
            f" {one.run.batch} x {one.run.seq} | {one.run.tokens_per_s:,.0f} |"
            f" {document['runs'][one.run.name]['tokens_per_s']:,.0f} | {_off(one)} |"
            f" {document['runs'][one.run.name]['compute_share']:.0%} |"
            for one in compared
            if one.kind == TIME
        ),
    ]
    why_not = {f"{one.run.name}, {one.kind}": one.why_not for one in compared if one.why_not}
    errors = {
        name: answer["error"] for name, answer in document["runs"].items() if "error" in answer
    }
    later = {run.name: _card(run) for run in asked if run.name not in document["runs"]}
    left_out = {run.name: run.not_asked for run in published.runs.values() if run.not_asked}
    for title, reasons in (
        ("Counts for no bar", why_not),
        ("Not predicted: the estimate ended with an error", errors),
        ("Not predicted yet", later),
        ("Not asked", left_out),
    ):
        if reasons:
            lines += ["", f"## {title}", ""]
            lines += [f"- {name}: {reason}" for name, reason in reasons.items()]
    return "\n".join(lines) + "\n"


def _summaries(held: Sequence[Comparison]) -> Iterator[str]:
    for kind in (MEMORY, TIME):
        ones = [one for one in held if one.kind == kind]
        groups = {f"{kind}, all": ones}
        if kind == MEMORY:
            groups |= {
                "memory, LoRA": [one for one in ones if one.run.lora],
                "memory, without adapters": [one for one in ones if not one.run.lora],
            }
            by_kind = _grouped(ones, lambda one: one.run.memory_is)
            groups |= {f"memory, {name}": some for name, some in by_kind.items()}
        for words, key in _KEYS.items():
            grouped = _grouped(ones, key)
            groups |= {f"{kind}, {words}{name}": found for name, found in grouped.items()}
        for name, some in groups.items():
            if some:
                offs = [one.off for one in some]
                most = percentile(map(abs, offs), 0.9)
                yield (
                    f"| {name} | {len(offs)} | {min(offs):+.1%} | {statistics.median(offs):+.1%} |"
                    f" {max(offs):+.1%} | {most:.1%} |"
                )


_KEYS: dict[str, Callable[[Comparison], str]] = {
    "": lambda one: one.run.architecture,
    "card ": lambda one: one.run.gpu,
    "checkpointing ": lambda one: one.run.checkpointing,
}


def _off(one: Comparison) -> str:
    return f"({one.off:+.1%})" if one.why_not else f"{one.off:+.1%}"


def _card(run: Run) -> str:
    return run.gpu if run.devices == 1 else f"{run.devices} x {run.gpu}"


def _plan(run: Run) -> str:
    words = {"none": "keep", "full": "recompute", "selective": "selective"}[run.checkpointing]
    return words if run.sharding == "none" else f"{words}, {run.sharding}"


def _adapters(run: Run) -> str:
    words = run.lora.partition(",")[0]
    return f"{words} {run.quantize}".strip() or "-"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=tuple(read_published().runs))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true", help="leave what --out has already")
    parser.add_argument("--jobs", type=int, default=1, help="estimates at a time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
