"""Profiles against what happens: predicted bytes and seconds beside measured ones.

    python -m benchmarks.accuracy --only profiles bytes --jobs 2 --busy
    python -m benchmarks.accuracy

Small models of many architectures, each under plans of five kinds. Bytes do not depend on what else
the machine does; seconds, which come last, do.
"""

import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.accuracy_cases import PLAN_KINDS, SPECIMENS
from benchmarks.accuracy_runs import MemoryResult, TimeResult
from benchmarks.pages import Bar, bars_table, markdown_table, quantile, runs_list, spread
from benchmarks.runner import Cell, Document, found, main
from protrain_runtime.contract.units import format_bytes

MIB = 2**20
OVER_SHARE, OVER_BYTES = 0.02, MIB
"""The most that a peak may be over-predicted by: the larger of the two."""
SYSTEM_SHARE = 0.05
"""The most that the system's peak may differ from the ledger's by."""
TIME_MEDIAN, TIME_MOST, TIME_SHARE = 0.05, 0.15, 0.9
"""Measured over predicted seconds: the median's distance from 1, and that of a share of all."""

NOTES = (
    "Predictions stand up to 2 KiB above measured peaks: two scalars per parameter and 256 bytes"
    " are set aside for the optimizer's clones and for losses, of which a step uses a part.",
    "In partial forms an estimated forward peak has 8 bytes more: a Python number becomes a tensor"
    " twice under a dispatch mode, and not every peak is at such an operator.",
    "Parts between blocks take the larger of their costs over all forms of the blocks. In T5 that"
    " is up to 0.4 MiB in a slot: position biases end with the forward, or with a backward.",
    "What an expert gets depends on the tokens. An estimate takes routing as even; measured bytes"
    " are those of the profiled batch and of the step that ran.",
    "In bfloat16 products and in convolutions oneDNN chooses its scratch memory by the processor:"
    " estimates take upper bounds, fitted to a machine with AVX-512 and two threads.",
    "Of models with gradient checkpointing of their own, plain steps run without it too: a plan"
    " decides which blocks are recomputed, and its slowdown is over keeping everything.",
)
"""Why predicted and measured figures differ where they do: what was looked into."""


def cells() -> list[Cell]:
    """Profiles and bytes of every specimen, then its seconds."""
    counted: list[Cell] = []
    timed: list[Cell] = []
    for name in SPECIMENS:
        made = Cell(key=f"profiles/{name}", task="profiles", arguments={"name": name})
        counted.append(made)
        for kind in PLAN_KINDS:
            given = {"name": name, "kind": kind}
            key = f"bytes/{name}/{kind}"
            counted.append(Cell(key=key, task="bytes", arguments=given, needs=(made.key,)))
        key = f"seconds/{name}"
        timed.append(Cell(key=key, task="seconds", arguments={"name": name}, needs=(made.key,)))
    return counted + timed


# --- what was found -------------------------------------------------------------------------------


def memory_results(document: Document) -> list[tuple[str, MemoryResult]]:
    """Bytes, by specimen and kind of plan."""
    return [
        (key.removeprefix("bytes/").replace("/", " "), MemoryResult(**one))
        for key, one in found(document, "bytes").items()
    ]


def time_results(document: Document) -> list[tuple[str, TimeResult]]:
    """Seconds, by specimen and kind of plan."""
    return [
        (f"{key.removeprefix('seconds/')} {kind}", TimeResult(**one))
        for key, kinds in found(document, "seconds").items()
        for kind, one in kinds.items()
    ]


def profiled(document: Document) -> dict[str, Document]:
    """How an estimate differs from a measured profile, by specimen; none where it is refused."""
    ran = found(document, "profiles").items()
    return {key.removeprefix("profiles/"): one for key, one in ran if not one["refused"]}


def slowdown_ratios(document: Document) -> list[float]:
    """Measured over predicted slowdown: planned steps by plain ones of the same run."""
    return [
        one.slowdown / (one.predicted / one.predicted_plain)
        for name, one in time_results(document)
        if not name.endswith(" keep")
    ]


def absolute_ratios(document: Document) -> list[float]:
    """Measured over predicted seconds."""
    return [one.measured / one.predicted for _, one in time_results(document)]


def estimate_ratios(document: Document) -> list[float]:
    """Measured over estimated seconds."""
    return [one.measured / one.estimated for _, one in time_results(document) if one.estimated]


# --- bars -----------------------------------------------------------------------------------------


def bars(document: Document) -> list[Bar]:
    """The bars that there are results for."""
    bars: list[Bar] = []
    if memory := memory_results(document):
        bars += _memory_bars(memory)
    if profiles := profiled(document):
        forms = sum(one["num_forms"] for one in profiles.values())
        unequal = [
            name for name, one in profiles.items() for off in one["differences"] if off["kept"]
        ]
        held, asked = f"{forms - len(unequal)} of {forms} equal", "equal to measured ones per form"
        bars.append(Bar("estimated saved bytes", asked, not unequal, held + _not(unequal)))
    if ratios := slowdown_ratios(document):
        middle, noise = statistics.median(ratios), [one.noise for _, one in time_results(document)]
        within = sum(abs(ratio - 1) <= TIME_MOST for ratio in ratios) / len(ratios)
        bars += [
            Bar(
                "step time, median",
                f"measured within {TIME_MEDIAN:.0%} of predicted",
                abs(middle - 1) <= TIME_MEDIAN,
                f"{middle:.3f} of predicted, {len(ratios)} cases; plain by plain steps differ by"
                f" {statistics.median(noise):.1%}",
            ),
            Bar(
                f"step time, {TIME_SHARE:.0%} of cases",
                f"within {TIME_MOST:.0%}",
                within >= TIME_SHARE,
                f"{within:.0%} of cases; 90 % of plain by plain steps within"
                f" {quantile(noise, TIME_SHARE):.1%}",
            ),
        ]
    return bars


def _memory_bars(memory: Sequence[tuple[str, MemoryResult]]) -> Iterator[Bar]:
    estimated = [(name, one) for name, one in memory if one.estimated is not None]
    allowed = f"by at most {OVER_SHARE:.0%} or 1 MiB"
    for title, asked, of, missed in (
        (
            "peak, never under-predicted",
            "in no slot of any step",
            memory,
            [name for name, one in memory if one.slot_under > 0],
        ),
        (
            "peak, over-predicted",
            allowed,
            memory,
            [name for name, one in memory if _excess(one.predicted, one.measured) > 0],
        ),
        (
            "estimated peak, never under",
            "in no slot of any step",
            estimated,
            [name for name, one in estimated if one.estimated_slot_under],
        ),
        (
            "estimated peak, over",
            allowed,
            estimated,
            [name for name, one in estimated if _excess(one.estimated or 0, one.measured) > 0],
        ),
        (
            "besides tensors",
            "never more than the profile says",
            memory,
            [name for name, one in memory if one.context_measured > one.context_predicted],
        ),
    ):
        held = f"{len(of) - len(missed)} of {len(of)}{_not(missed)}"
        yield Bar(title, asked, not missed, held)
    off = [abs(one.system_peak / one.ledger - 1) for _, one in memory]
    told = f"median {statistics.median(off):.2%}, worst {max(off):.2%}"
    asked = f"within {SYSTEM_SHARE:.0%} of the ledger"
    yield Bar("the system's peak", asked, max(off) <= SYSTEM_SHARE, told)


def _excess(predicted: int, measured: int) -> float:
    """By how much a prediction stands above what the bar allows."""
    return predicted - measured - max(OVER_BYTES, OVER_SHARE * measured)


def _not(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - 6} more" if len(distinct) > 6 else ""
    return f"; not: {', '.join(distinct[:6])}{more}" if distinct else ""


# --- the page -------------------------------------------------------------------------------------


def page(document: Document) -> str:
    """The whole page."""
    refused = found(document, "profiles").items()
    parts = [
        *("# Accuracy of profiles", "", *runs_list(document["runs"]), ""),
        "Predicted figures come from profiles and plans, measured ones from steps that ran.",
        "*Estimated* are profiles of fake tensors, which run nothing.",
        *("", "## Bars", "", *bars_table(bars(document))),
        *("", "## Architectures", "", *_architectures(document)),
        *("", "## Bytes of planned steps", "", *_bytes(document)),
        *("", "## Seconds of planned steps", "", *_seconds(document)),
        *("", "## What differs, and why", ""),
        *(f"- {note}" for note in NOTES),
        *(f"- {key}: not estimated. {one['refused']}." for key, one in refused if one["refused"]),
        *(
            f"- {key}: {cell['reason'].strip().splitlines()[-1]}"
            for key, cell in document["cells"].items()
            if cell["status"] != "ran"
        ),
    ]
    return "\n".join(parts) + "\n"


def _architectures(document: Document) -> Iterator[str]:
    yield "Estimated less measured bytes, unit by unit and form by form: of what is saved (kept),"
    yield "and of the peaks in the slots."
    yield ""
    rows = [["architecture", "dtype", "batch", "trained", "units", "forms with equal kept bytes"]]
    rows[0] += ["kept differs by", "peaks differ by", "base by", "to measure", "to estimate"]
    for name, one in profiled(document).items():
        specimen, off = SPECIMENS[name], one["differences"]
        precision = "" if specimen.precision == "pure" else f", {specimen.precision}"
        kept = [each["kept"] for each in off if each["kept"]]
        peaks = [each[side] for each in off for side in ("forward_peak", "backward_peak")]
        rows.append(
            [
                *(name, f"{specimen.dtype}{precision}"),
                f"{specimen.batch_size} x {specimen.seq_len}",
                *(f"{one['num_parameters'] / 1e6:.2f} M", str(one["num_units"])),
                f"{one['num_forms'] - len(kept)} / {one['num_forms']}",
                *(_range(kept), _range([peak for peak in peaks if peak])),
                *(f"{one['base_difference']:+d}", f"{one['profile_seconds']:.0f} s"),
                f"{one['estimate_seconds']:.0f} s",
            ]
        )
    yield from markdown_table(rows, numbers_from=3)


def _range(values: Sequence[int]) -> str:
    if not values:
        return "0"
    low, high = min(values), max(values)
    return f"{low:+,d}" if low == high else f"{low:+,d} to {high:+,d}"


def _bytes(document: Document) -> Iterator[str]:
    yield "Device peaks count tensors. *Slots*: the most that any slot took more (-) or less (+)"
    yield "than predicted. The system's peak is the process's resident memory in one step; the"
    yield "ledger adds the measured peak of tensors to what was resident besides before it."
    yield "*Besides* is what a process holds besides tensors, of the kind that RLIMIT_DATA counts."
    yield ""
    rows = [["architecture and plan", "predicted peak", "measured peak", "slots", "estimated peak"]]
    rows[0] += ["ledger", "system's peak", "besides, predicted", "besides, measured"]
    for name, one in memory_results(document):
        rows.append(
            [
                *(name, f"{one.predicted:,d}", f"{one.measured:,d}"),
                f"{-one.slot_under:,d} / {one.slot_over:+,d}",
                "-" if one.estimated is None else f"{one.estimated:,d}",
                *(format_bytes(one.ledger), format_bytes(one.system_peak)),
                *(format_bytes(one.context_predicted), format_bytes(one.context_measured)),
            ]
        )
    yield from markdown_table(rows, numbers_from=1)


def _seconds(document: Document) -> Iterator[str]:
    results = time_results(document)
    if not results:
        yield "Not measured yet."
        return
    yield "Planned steps took turns with plain ones, in one process. Predicted seconds are from a"
    yield "machine probed and a profile measured in that process before. *Slowdown* is planned by"
    yield "plain: what the machine does besides is noise to both. *Noise* is how far from 1 a"
    yield "slowdown of plain steps by plain ones is, in the same turns with half the samples."
    yield ""
    for title, ratios in (
        ("Measured over predicted slowdown (all but keep)", slowdown_ratios(document)),
        ("Measured over predicted seconds", absolute_ratios(document)),
        ("Measured over estimated seconds (the catalogue's cpu)", estimate_ratios(document)),
    ):
        yield f"- {title}: {spread(ratios)}"
    yield ""
    rows = [["architecture and plan", "predicted ms", "measured ms", "measured / predicted"]]
    rows[0] += ["slowdown, predicted", "slowdown, measured", "noise", "estimated ms", "load"]
    for name, one in results:
        rows.append(
            [
                *(name, f"{1e3 * one.predicted:.1f}", f"{1e3 * one.measured:.1f}"),
                f"{one.measured / one.predicted:.2f}",
                *(f"{one.predicted / one.predicted_plain:.2f}", f"{one.slowdown:.2f}"),
                f"{one.noise:.1%}",
                *("-" if not one.estimated else f"{1e3 * one.estimated:.1f}", f"{one.load:.1f}"),
            ]
        )
    yield from markdown_table(rows, numbers_from=1)


def in_short(document: Document) -> Iterator[str]:
    """The sentences that a page quotes."""
    memory, profiles = memory_results(document), profiled(document)
    forms = sum(one["num_forms"] for one in profiles.values())
    unequal = sum(bool(off["kept"]) for one in profiles.values() for off in one["differences"])
    yield (
        f"On a CPU, estimated bytes of what is saved equal measured ones in {forms - unequal} of"
        f" {forms} unit forms of {len(profiles)} models."
    )
    held = sum(one.slot_under == 0 for _, one in memory)
    over = statistics.median(one.predicted - one.measured for _, one in memory)
    yield (
        f"In {held} of {len(memory)} planned steps no slot took more memory than predicted; the"
        f" predicted peak was {over:,.0f} bytes above the measured one in the median."
    )
    if ratios := absolute_ratios(document):
        yield f"Measured over predicted seconds: {spread(ratios)}, in {len(ratios)} cases."


if __name__ == "__main__":
    sys.exit(main("accuracy", cells(), page, says=__doc__, quiet=True))
