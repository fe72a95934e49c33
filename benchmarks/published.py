"""Runs that others have published: what is predicted of each beside what they measured.

    python -m benchmarks.published [--only NAME...] [--jobs N]

`published.yaml` has the runs, with links and versions. Each is predicted from fake tensors on the
machine of the catalogue, under the plan that plain PyTorch follows; nothing runs on a card. Runs of
one workload share an estimate, and each estimate has a process of its own. Results are written as
they come.
"""

import hashlib
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.pages import Bar, bars_table, quantile, runs_list
from benchmarks.published_runs import Run, read_published
from benchmarks.runner import Cell, Document, found, main
from protrain_plan.planning.questions.allocator_slack import MEDIAN as MEDIAN_RESERVED
from protrain_plan.planning.questions.allocator_slack import MOST as MOST_RESERVED
from protrain_runtime.contract.units import format_bytes


def cells() -> list[Cell]:
    """A cell for each workload; the runs of one share an estimate."""
    workloads: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, run in read_published().runs.items():
        if not run.not_asked:
            workloads[run.workload].append(name)
    return [
        Cell(key=" ".join(names), task="published", arguments={"names": names}, limit_s=3600)
        for names in workloads.values()
    ]


def answers(document: Document) -> dict[str, Document]:
    """Predictions by run."""
    return {name: one for shared in found(document).values() for name, one in shared.items()}


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


def comparisons(document: Document) -> list[Comparison]:
    """All figures that can be compared; of speeds, the seconds that they stand for."""
    compared, predicted = [], answers(document)
    for name, run in read_published().runs.items():
        answer = predicted.get(name)
        if answer is None:
            continue
        if run.memory_bytes is not None:
            most, why = answer["memory_bytes"], run.not_held.get("memory", "")
            if run.memory_is == "reserved":
                most *= 1 + MEDIAN_RESERVED
            compared.append(Comparison(run, MEMORY, run.memory_bytes, most, why))
        if run.tokens_per_s is not None:
            tokens, why = run.batch * run.seq, run.not_held.get("tokens_per_s", "")
            theirs, ours = tokens / run.tokens_per_s, tokens / answer["tokens_per_s"]
            compared.append(Comparison(run, TIME, theirs, ours, why))
    return compared


def bars(held: Sequence[Comparison]) -> Iterator[Bar]:
    """The bars, over what counts for them."""
    for kind in (MEMORY, TIME):
        sizes = [abs(one.off) for one in held if one.kind == kind]
        if not sizes:
            continue
        median, most = statistics.median(sizes), quantile(sizes, 0.9)
        asked = f"half are off by at most {MEDIAN[kind]:.0%}"
        yield Bar(kind, asked, median <= MEDIAN[kind], f"{median:.1%} of {len(sizes)}")
        within = sum(size <= MOST[kind] for size in sizes) / len(sizes)
        asked = f"nine in ten by at most {MOST[kind]:.0%}"
        told = f"{within:.0%} are; 90 % by at most {most:.1%}"
        yield Bar(kind, asked, most <= MOST[kind], told)
    reserved = [one for one in held if one.run.memory_is == "reserved" and one.kind == MEMORY]
    if reserved:
        shares = [(1 + MEDIAN_RESERVED) / (1 + one.off) for one in reserved]  # of our peak
        inside = sum(1 <= share <= 1 + MOST_RESERVED for share in shares)
        asked = f"at least the peak, at most {MOST_RESERVED:.0%} more"
        all_are = inside == len(shares)
        yield Bar("memory, reserved", asked, all_are, f"{inside} of {len(shares)} are")
    lora = [one.off for one in held if one.kind == MEMORY and one.run.lora]
    if lora:
        low = sum(off < -LORA_LOW for off in lora)
        told = f"{low} of {len(lora)} are; lowest {min(lora):+.1%}"
        yield Bar("memory, LoRA", f"never more than {LORA_LOW:.0%} low", not low, told)
    for name, ones in _grouped(held, lambda one: one.run.architecture).items():
        offs = [one.off for one in ones if one.kind == TIME]
        if offs:
            bias = statistics.median(offs)
            asked, told = f"no bias above {BIAS:.0%}", f"{bias:+.1%} of {len(offs)}"
            yield Bar(f"time on {name}", asked, abs(bias) <= BIAS, told)


def _grouped(
    ones: Iterable[Comparison], key: Callable[[Comparison], str]
) -> dict[str, list[Comparison]]:
    found: dict[str, list[Comparison]] = defaultdict(list)
    for one in ones:
        found[key(one)].append(one)
    return dict(sorted(found.items()))


# --- the page -------------------------------------------------------------------------------------


def page(document: Document) -> str:
    """The results for people."""
    published, told = read_published(), answers(document)
    compared = comparisons(document)
    held = [one for one in compared if not one.why_not]
    asked = [run for run in published.runs.values() if not run.not_asked]
    lines = [
        "# Published runs",
        "",
        *runs_list(document["runs"]),
        "",
        f"`benchmarks/published.yaml` has {len(published.runs)} runs that others measured, with"
        f" links, versions and what had to be assumed. {len(asked)} of them can be asked of us."
        " *Predicted* is what an estimate on the catalogue's machine says of the plan that plain"
        " PyTorch follows: memory is the most bytes of tensors on a device, time the seconds of a"
        " step's micro-batch. Where the published figure is what the allocator reserved, it is the"
        f" peak and the median of what was seen reserved beyond tensors ({MEDIAN_RESERVED:.0%};"
        " `protrain_plan/planning/questions/allocator_slack.py`). *Off* is predicted over"
        " published, less one: below zero, memory is under-predicted, and time is too optimistic."
        " Figures in brackets count for no bar.",
        "",
        *bars_table(bars(held)),
        "",
        "## On A100, by what is trained",
        "",
        "Held back are runs that no rate may be chosen with: those whose name's SHA-256 begins with"
        " an odd byte.",
        "",
        "| | | figures | least off | median | most | within 25% |",
        "|---|---|---:|---:|---:|---:|---:|",
        *_on_a100(held),
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
            f" {told[one.run.name]['peak']} |"
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
            f" {told[one.run.name]['tokens_per_s']:,.0f} | {_off(one)} |"
            f" {told[one.run.name]['compute_share']:.0%} |"
            for one in compared
            if one.kind == TIME
        ),
    ]
    why_not = {f"{one.run.name}, {one.kind}": one.why_not for one in compared if one.why_not}
    errors = {k: one["reason"] for k, one in document["cells"].items() if one["status"] != "ran"}
    later = {run.name: _card(run) for run in asked if run.name not in told}
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
                most = quantile(map(abs, offs), 0.9)
                yield (
                    f"| {name} | {len(offs)} | {min(offs):+.1%} | {statistics.median(offs):+.1%} |"
                    f" {max(offs):+.1%} | {most:.1%} |"
                )


_KEYS: dict[str, Callable[[Comparison], str]] = {
    "": lambda one: one.run.architecture,
    "card ": lambda one: one.run.gpu,
    "checkpointing ": lambda one: one.run.checkpointing,
}


def held_back(name: str) -> bool:
    """Whether no rate may be chosen with the run: a rule of its name, which nobody picks."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 1


def _trained(run: Run) -> str:
    return "QLoRA" if run.quantize else "LoRA" if run.lora else "full"


def _on_a100(held: Sequence[Comparison]) -> Iterator[str]:
    """Rows for each kind of training on an A100, held-back runs apart."""
    for kind in (TIME, MEMORY):
        ones = [one for one in held if one.kind == kind and one.run.gpu.startswith("a100")]
        for trained in ("full", "LoRA", "QLoRA"):
            for back in (True, False):
                offs = [
                    one.off
                    for one in ones
                    if _trained(one.run) == trained and held_back(one.run.name) == back
                ]
                if offs:
                    within = sum(abs(off) <= 0.25 for off in offs) / len(offs)
                    yield (
                        f"| {kind}, {trained} | {'held back' if back else 'others'} |"
                        f" {len(offs)} | {min(offs):+.1%} | {statistics.median(offs):+.1%} |"
                        f" {max(offs):+.1%} | {within:.0%} |"
                    )


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


if __name__ == "__main__":
    sys.exit(main("published", cells(), page, says=__doc__))
