"""The runtime benchmark's results for people: one page of Markdown, and a summary in lines."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.runtime_runs import Comparison, Pairs, read_pairs

Found = Mapping[str, Any]

AGAINST: dict[Comparison, tuple[str, str]] = {
    "noise": ("plain PyTorch", "plain PyTorch"),
    "keep": ("a plan that keeps everything", "plain PyTorch"),
    "recompute": ("a plan that recomputes every block", "`torch.utils.checkpoint` around each"),
    "swap": ("a plan that swaps every block to host memory", "`save_on_cpu` that copies"),
    "swap to disk": ("a plan that swaps every block to disk", "`save_on_cpu` that copies"),
    "offload": (
        "a plan with all blocks' states on disk, recomputed",
        "a loop that loads, computes, saves",
    ),
    "recording": ("that plan, recorded", "the same, not recorded"),
}
MOST: dict[Comparison, float] = {"keep": 1.01, "recompute": 1.02, "recording": 1.01}
"""What the ratio may be, in the median of pairs."""
SIMULATED_SHARE = 0.10
"""What the ratio may differ from the simulated one by."""

NOTES = (
    "A ratio is a planned step by the other's step that ran next to it; both train the same model"
    " on the same batches from the same random state. The ratio is the median of all pairs,"
    " quartiles are of the same, *fastest* is the fastest step of each.",
    "*plain PyTorch against itself* is two models in one process: no other row can be told apart"
    " from 1 by less than its quartiles.",
    "On a CPU machine host memory is where the model is: `save_on_cpu` copies nothing there unless"
    " pinning is asked for, and then copies out only. Swapping copies out and back, on lanes that"
    " compute shares its two processors with; on a GPU copy engines do that.",
    "Where a ratio is simulated, freed memory goes back to the system at once, as it does in"
    " profiles and under `protrain run` on a CPU; steps take longer then, and vary more.",
    "The loop that loads, computes and saves is benchmarks/runtime_loop.py. Its simulated step is"
    " the sum of what the plan computes and moves.",
)


@dataclass(frozen=True, slots=True)
class Bar:
    """What the project asks for, and what came."""

    model: str
    asked: str
    held: bool
    found: str


def page(document: Found) -> str:
    """The whole page."""
    parts = [
        "# Speed of the runtime",
        "",
        f"`{document['command']}`, {document['date']}, commit {document['commit']}",
        "",
        _machine(document),
        "",
        "## Bars",
        "",
        *_table(
            ("model", "asked", "result", "found"),
            [
                (bar.model, bar.asked, "held" if bar.held else "**missed**", bar.found)
                for bar in bars(document)
            ],
        ),
    ]
    for name, model in document["models"].items():
        parts += ["", f"## {name}", "", *_model(name, model)]
    parts += ["", "## How to read this", "", *(f"- {note}" for note in NOTES)]
    return "\n".join(parts) + "\n"


def summary_lines(document: Found) -> list[str]:
    """The bars, a line each."""
    return [
        f"{bar.model}: {bar.asked}: {'held' if bar.held else 'MISSED'}, {bar.found}"
        for bar in bars(document)
    ]


def bars(document: Found) -> list[Bar]:
    """Those that there are results for."""
    found: list[Bar] = []
    for name, comparison, pairs in _results(document):
        ours, other = AGAINST[comparison]
        if comparison in MOST:
            most = MOST[comparison]
            asked = f"{ours}: at most {most:.2f} of {other}"
            found.append(Bar(name, asked, pairs.ratio <= most, _ratio(pairs)))
        if pairs.simulated_ratio is not None:
            says = pairs.simulated_ratio
            off = pairs.ratio / says - 1
            found.append(
                Bar(
                    name,
                    f"{ours}, against {other}: as simulated, within 10 %",
                    abs(off) <= SIMULATED_SHARE,
                    f"{pairs.ratio:.3f}, simulated {says:.3f}: {off:+.1%}",
                )
            )
        if not pairs.same_losses:
            found.append(Bar(name, f"{ours}: the bits of {other}", False, "losses differ"))
    return found


def _results(document: Found) -> Iterator[tuple[str, Comparison, Pairs]]:
    for name, model in document["models"].items():
        for comparison, found in model.get("comparisons", {}).items():
            if "error" not in found:
                yield name, comparison, read_pairs(found)


def _model(name: str, model: Found) -> Iterator[str]:
    if "error" in model:
        yield f"Not profiled: {model['error']}"
        return
    batch, tokens = model["batch"]
    millions = model["num_parameters"] / 1e6
    yield f"{millions:.1f} M parameters in float32, batches of {batch} x {tokens} tokens."
    yield ""
    rows = []
    for comparison, found in model["comparisons"].items():
        ours, other = AGAINST[comparison]
        if "error" in found:
            rows.append((ours, other, found["error"], *[""] * 6))
            continue
        pairs = read_pairs(found)
        low, high = pairs.quartiles
        says = pairs.simulated_ratio
        rows.append(
            (
                ours,
                other,
                f"{pairs.ratio:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{pairs.fastest:.3f}",
                f"{1e3 * sorted(pairs.ours)[len(pairs.ours) // 2]:.1f}",
                f"{1e3 * sorted(pairs.other)[len(pairs.other) // 2]:.1f}",
                "equal" if pairs.same_losses else "**differ**",
                "" if says is None else f"{says:.3f}",
            )
        )
    seconds = ("ours, ms", "other, ms", "losses", "simulated")
    yield from _table(("ours", "other", "ratio", "quartiles", "fastest", *seconds), rows)


def _ratio(pairs: Pairs) -> str:
    low, high = pairs.quartiles
    return f"{pairs.ratio:.3f} ({low:.3f} to {high:.3f})"


def _machine(document: Found) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    loads = [pairs.load for _, _, pairs in _results(document)]
    load = f" Load of the machine: {min(loads):.1f} to {max(loads):.1f}." if loads else ""
    return f"{document['system']}; {versions}.{load}"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    if not rows:
        yield "None yet."
        return
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
