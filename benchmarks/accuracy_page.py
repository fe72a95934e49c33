"""The accuracy benchmark's results for people: one page of Markdown, and a summary in lines."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.accuracy_cases import SPECIMENS
from benchmarks.accuracy_notes import NOTES
from benchmarks.accuracy_runs import MemoryResult, TimeResult
from protrain_runtime.contract.units import format_bytes

MIB = 2**20
OVER_SHARE, OVER_BYTES = 0.02, MIB
"""What a peak may be over-predicted by: the larger of the two."""
SYSTEM_SHARE = 0.05
"""What the system's peak may differ from the ledger's by."""
TIME_MEDIAN, TIME_MOST, TIME_SHARE = 0.05, 0.15, 0.9
"""Measured over predicted seconds: the median's distance from 1, and that of a share of all."""

Found = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """What the project asks for, and what came."""

    name: str
    asked: str
    held: bool
    found: str


def page(document: Found, others: Sequence[Bar] = ()) -> str:
    """The whole page, with bars of `others`, which say themselves when they were found."""
    parts = [
        "# Accuracy of profiles",
        "",
        f"`{document['command']}`, {document['date']}, commit {document['commit']}",
        "",
        *_machine(document),
        *([document["remark"]] if "remark" in document else []),
        "",
        "Predicted figures come from profiles and plans, measured ones from steps that ran.",
        "*Estimated* are profiles of fake tensors, which run nothing.",
        "",
        "## Bars",
        "",
        *_table(
            ("bar", "asked", "result", "found"),
            [
                (bar.name, bar.asked, "held" if bar.held else "**missed**", bar.found)
                for bar in (*bars(document), *others)
            ],
        ),
        "",
        "## Architectures",
        "",
        *_architectures(document),
        "",
        "## Bytes of planned steps",
        "",
        *_bytes(document),
        "",
        "## Seconds of planned steps",
        "",
        *_seconds(document),
        "",
        "## What differs, and why",
        "",
        *(f"- {note}" for note in NOTES),
        *(
            f"- {name}: not estimated. {case['profile']['refused']}."
            for name, case in _profiled(document)
            if case["profile"]["refused"]
        ),
        *(f"- {name}: {found['error']}" for name, found in _failed(document)),
    ]
    return "\n".join(parts) + "\n"


def summary_lines(document: Found) -> list[str]:
    """The bars, a line each."""
    return [
        f"{bar.name}: {bar.asked}: {'held' if bar.held else 'MISSED'}, {bar.found}"
        for bar in bars(document)
    ]


# --- bars -----------------------------------------------------------------------------------------


def bars(document: Found) -> list[Bar]:
    """Those that there are results for."""
    found: list[Bar] = []
    memory = list(memory_results(document))
    if memory:
        found += _memory_bars(memory)
    profiles = [
        (name, case["profile"])
        for name, case in _profiled(document)
        if not case["profile"]["refused"]
    ]
    if profiles:
        forms = sum(profile["num_forms"] for _, profile in profiles)
        unequal = [
            (name, difference)
            for name, profile in profiles
            for difference in profile["differences"]
            if difference["kept"]
        ]
        found.append(
            Bar(
                "estimated saved bytes",
                "equal to measured ones per unit and form",
                not unequal,
                f"{forms - len(unequal)} of {forms} equal"
                + (f"; not: {_names(name for name, _ in unequal)}" if unequal else ""),
            )
        )
    ratios = [ratio for _, _, ratio in relative_ratios(document)]
    if ratios:
        found += _time_bars(ratios, [result.noise for *_, result in time_results(document)])
    return found


def _memory_bars(memory: Sequence[tuple[str, str, MemoryResult]]) -> list[Bar]:
    under = [(n, k, m) for n, k, m in memory if m.slot_under > 0]
    over = [(n, k, m) for n, k, m in memory if _excess(m.predicted, m.measured) > 0]
    system = [abs(m.system_peak / m.ledger - 1) for _, _, m in memory]
    estimates = [(n, k, m) for n, k, m in memory if m.estimated is not None]
    short = [(n, k, m) for n, k, m in estimates if m.estimated_slot_under]
    long = [(n, k, m) for n, k, m in estimates if _excess(m.estimated or 0, m.measured) > 0]
    context = [(n, k, m) for n, k, m in memory if m.context_measured > m.context_predicted]
    return [
        Bar(
            "peak, never under-predicted",
            "in no slot of any step",
            not under,
            f"{len(memory) - len(under)} of {len(memory)}"
            + (f"; at most {max(m.slot_under for *_, m in under)} bytes more" if under else ""),
        ),
        Bar(
            "peak, over-predicted",
            "by at most 2 % or 1 MiB",
            not over,
            f"{len(memory) - len(over)} of {len(memory)}; "
            f"median {statistics.median(m.predicted - m.measured for *_, m in memory):.0f} bytes"
            + (f"; not: {_names(f'{n} {k}' for n, k, _ in over)}" if over else ""),
        ),
        Bar(
            "estimated peak, never under",
            "in no slot of any step",
            not short,
            f"{len(estimates) - len(short)} of {len(estimates)}"
            + (f"; not: {_names(f'{n} {k}' for n, k, _ in short)}" if short else ""),
        ),
        Bar(
            "estimated peak, over",
            "by at most 2 % or 1 MiB",
            not long,
            f"{len(estimates) - len(long)} of {len(estimates)}"
            + (f"; not: {_names(f'{n} {k}' for n, k, _ in long)}" if long else ""),
        ),
        Bar(
            "the system's peak",
            "within 5 % of the ledger",
            max(system) <= SYSTEM_SHARE,
            f"median {statistics.median(system):.2%}, worst {max(system):.2%}",
        ),
        Bar(
            "besides tensors",
            "never more than the profile says",
            not context,
            f"{len(memory) - len(context)} of {len(memory)}"
            + (
                "; at most "
                + format_bytes(max(m.context_measured - m.context_predicted for *_, m in context))
                + " more"
                if context
                else ""
            ),
        ),
    ]


def _time_bars(ratios: Sequence[float], noise: Sequence[float]) -> list[Bar]:
    """With what plain steps in the place of planned ones make of the same figures."""
    middle = statistics.median(ratios)
    ordered = sorted(noise)
    within = sum(abs(ratio - 1) <= TIME_MOST for ratio in ratios) / len(ratios)
    return [
        Bar(
            "step time, median",
            "measured within 5 % of predicted",
            abs(middle - 1) <= TIME_MEDIAN,
            f"{middle:.3f} of predicted, {len(ratios)} cases; plain by plain steps differ by"
            f" {statistics.median(ordered):.1%}",
        ),
        Bar(
            "step time, 90 % of cases",
            "within 15 %",
            within >= TIME_SHARE,
            f"{within:.0%} of cases within 15 %; 90 % of plain by plain steps within"
            f" {quantile(ordered, TIME_SHARE):.1%}",
        ),
    ]


def _excess(predicted: int, measured: int) -> float:
    """By how much a prediction stands above what the bar allows."""
    return predicted - measured - max(OVER_BYTES, OVER_SHARE * measured)


def memory_results(document: Found) -> Iterator[tuple[str, str, MemoryResult]]:
    """Specimen, kind of plan, bytes."""
    for name, case in document["cases"].items():
        for kind, found in case.get("memory", {}).items():
            if "error" not in found:
                yield name, kind, MemoryResult(**found)


def time_results(document: Found) -> Iterator[tuple[str, str, TimeResult]]:
    """Specimen, kind of plan, seconds."""
    for name, case in document["cases"].items():
        for kind, found in case.get("time", {}).items():
            if kind != "error":
                yield name, kind, TimeResult(**found)


def relative_ratios(document: Found) -> Iterator[tuple[str, str, float]]:
    """Measured over predicted slowdown: planned steps by plain ones of the same run."""
    for name, kind, result in time_results(document):
        if kind != "keep":
            yield name, kind, result.slowdown / (result.predicted / result.predicted_plain)


def absolute_ratios(document: Found) -> Iterator[tuple[str, str, float]]:
    """Measured over predicted seconds."""
    for name, kind, result in time_results(document):
        yield name, kind, result.measured / result.predicted


def estimate_ratios(document: Found) -> Iterator[tuple[str, str, float]]:
    """Measured over estimated seconds."""
    for name, kind, result in time_results(document):
        if result.estimated is not None:
            yield name, kind, result.measured / result.estimated


def _profiled(document: Found) -> Iterator[tuple[str, Any]]:
    for name, case in document["cases"].items():
        if "error" not in case.get("profile", {"error": ""}):
            yield name, case


def _failed(document: Found) -> Iterator[tuple[str, Found]]:
    for name, case in document["cases"].items():
        for place in (case.get("profile", {}), *case.get("memory", {}).values()):
            if "error" in place:
                yield name, place
        if "error" in case.get("time", {}):
            yield name, case["time"]


# --- tables ---------------------------------------------------------------------------------------


def _machine(document: Found) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    yield f"{document['system']}; {versions}."
    if (machine := document.get("hardware")) is not None:
        device, rates = machine["device"], machine["rates"]
        yield (
            f"{device['name']}, {device['num_threads']} threads,"
            f" {rates['float32_flops_per_s'] / 1e9:.0f} GFLOP/s in float32,"
            f" {rates['memory_bytes_per_s'] / 1e9:.1f} GB/s: as probed before the runs."
        )
    else:
        yield "The machine was not probed: the catalogue's `cpu` stands for it."
    loads = [result.load for _, _, result in time_results(document)]
    if loads:
        yield (
            f"Load of the machine while seconds were measured: {min(loads):.1f} to"
            f" {max(loads):.1f}, median {statistics.median(loads):.1f}."
        )


def _architectures(document: Found) -> Iterator[str]:
    rows = []
    for name, case in _profiled(document):
        if case["profile"]["refused"]:
            continue
        specimen, profile = SPECIMENS[name], case["profile"]
        precision = "" if specimen.precision == "pure" else f", {specimen.precision}"
        differences = profile["differences"]
        kept = [d["kept"] for d in differences if d["kept"]]
        peaks = [d[side] for d in differences for side in ("forward_peak", "backward_peak")]
        rows.append(
            (
                name,
                f"{specimen.dtype}{precision}",
                f"{specimen.batch_size} x {specimen.seq_len}",
                f"{profile['num_parameters'] / 1e6:.2f} M",
                str(profile["num_units"]),
                f"{profile['num_forms'] - len(kept)} / {profile['num_forms']}",
                _range(kept),
                _range([peak for peak in peaks if peak]),
                f"{profile['base_difference']:+d}" if profile["base_difference"] else "0",
                f"{profile['profile_seconds']:.0f} s",
                f"{profile['estimate_seconds']:.0f} s",
            )
        )
    yield (
        "Estimated less measured bytes, unit by unit and form by form: of what is saved (kept),"
        " and of the peaks in the slots."
    )
    yield ""
    yield from _table(
        (
            *("architecture", "dtype", "batch", "trained", "units", "forms with equal kept bytes"),
            *("kept differs by", "peaks differ by", "base by", "to measure", "to estimate"),
        ),
        rows,
    )


def _range(values: Sequence[int]) -> str:
    if not values:
        return "0"
    low, high = min(values), max(values)
    return f"{low:+,d}" if low == high else f"{low:+,d} to {high:+,d}"


def _bytes(document: Found) -> Iterator[str]:
    yield (
        "Device peaks count tensors. *Slots*: the most that any slot took more (-) or less (+) than"
        " predicted. The system's peak is the process's resident memory in one step; the ledger"
        " adds the measured peak of tensors to what was resident besides before it. *Besides* is"
        " what a process holds besides tensors, of the kind that RLIMIT_DATA counts."
    )
    yield ""
    rows = []
    for name, kind, found in memory_results(document):
        estimated = "-" if found.estimated is None else f"{found.estimated:,d}"
        rows.append(
            (
                name,
                kind,
                f"{found.predicted:,d}",
                f"{found.measured:,d}",
                f"{found.predicted - found.measured:+,d}",
                f"{-found.slot_under:,d} / {found.slot_over:+,d}",
                estimated,
                "-" if found.estimated is None else f"{found.estimated - found.measured:+,d}",
                format_bytes(found.ledger),
                format_bytes(found.system_peak),
                f"{found.system_peak / found.ledger - 1:+.2%}",
                format_bytes(found.context_predicted),
                format_bytes(found.context_measured),
            )
        )
    yield from _table(
        (
            *("architecture", "plan", "predicted peak", "measured peak", "over by", "slots"),
            *("estimated peak", "over by", "ledger", "system's peak", "by"),
            *("besides, predicted", "besides, measured"),
        ),
        rows,
    )


def _seconds(document: Found) -> Iterator[str]:
    results = list(time_results(document))
    if not results:
        yield "Not measured yet."
        return
    yield (
        "Planned steps took turns with plain ones, in one process. Predicted seconds are from a"
        " machine probed and a profile measured in that process before. *Slowdown* is planned by"
        " plain: what the machine does besides is noise to both. *Noise* is how far from 1 a"
        " slowdown of plain steps by plain ones is, in the same turns with half the samples: what"
        " no prediction can know."
    )
    for title, ratios in (
        ("Measured over predicted slowdown (all but keep)", relative_ratios(document)),
        ("Measured over predicted seconds", absolute_ratios(document)),
        ("Measured over estimated seconds (the catalogue's cpu)", estimate_ratios(document)),
    ):
        yield ""
        yield from _distribution(title, [ratio for _, _, ratio in ratios])
    yield ""
    rows = [
        (
            name,
            kind,
            f"{1e3 * found.predicted:.1f}",
            f"{1e3 * found.measured:.1f}",
            f"{found.measured / found.predicted:.2f}",
            f"{1e3 * found.measured_plain:.1f}",
            f"{found.predicted / found.predicted_plain:.2f}",
            f"{found.slowdown:.2f}",
            f"{found.noise:.1%}",
            "-" if found.estimated is None else f"{1e3 * found.estimated:.1f}",
        )
        for name, kind, found in results
    ]
    yield from _table(
        (
            *("architecture", "plan", "predicted ms", "measured ms", "measured / predicted"),
            *("plain ms, measured", "slowdown, predicted", "slowdown, measured", "noise"),
            "estimated ms",
        ),
        rows,
    )


_EDGES = (0.0, 0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3, 1.5, 2.0, 3.0, 5.0, float("inf"))


def _distribution(title: str, ratios: Sequence[float]) -> Iterator[str]:
    if not ratios:
        return
    ordered = sorted(ratios)
    low, high = quantile(ordered, 0.1), quantile(ordered, 0.9)
    middle = statistics.median(ordered)
    yield f"{title}: median {middle:.3f}, 10th and 90th percentile {low:.2f} and {high:.2f}."
    yield ""
    yield "```"
    for first, past in pairwise(_EDGES):
        count = sum(first <= ratio < past for ratio in ordered)
        if count:
            bar = "#" * max(1, round(40 * count / len(ordered)))
            yield f"{first:4.2f} to {past:4.2f}  {count:3d}  {bar}"
    yield "```"


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of the ordered values lies."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    numbers = {n for n in range(len(header)) if all(_is_number(row[n]) for row in rows)}
    yield "| " + " | ".join(header) + " |"
    yield "|" + "|".join("---:" if n in numbers else "---" for n in range(len(header))) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _is_number(text: str) -> bool:
    return text[:1] in "0123456789+-"


def _names(names: Iterator[str]) -> str:
    distinct = list(dict.fromkeys(names))
    shown = ", ".join(distinct[:6])
    return shown if len(distinct) <= 6 else f"{shown} and {len(distinct) - 6} more"
