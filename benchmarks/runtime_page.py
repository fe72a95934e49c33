"""The runtime benchmark's results for people: one page of Markdown, and a summary in lines."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from benchmarks.rounds import Rounds, read_rounds
from benchmarks.runtime_runs import Comparison

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
    "checked": ("states and activations on disk, checked", "the same, not checked"),
    "overlap": (
        "a plan with all blocks' states on disk, updated after backward, whose steps overlap",
        "the same, whose steps do not",
    ),
    "ahead": (
        "a plan with all blocks' states on disk, updated ahead of the norm",
        "the same, updated after it",
    ),
    "compiled": ("compiled blocks", "plain PyTorch"),
    "compiled keep": ("a plan that keeps everything, of compiled blocks", "compiled blocks"),
    "compiled recompute": (
        "a plan that recomputes every compiled block",
        "`torch.utils.checkpoint` around each",
    ),
    "compiled fused": (
        "a plan that recomputes every compiled block in the form `fused`",
        "`torch.utils.checkpoint` compiled with each block",
    ),
    "compiled bits": (
        "a plan that recomputes every compiled block with its bits",
        "`torch.utils.checkpoint` compiled with each block",
    ),
}
MOST: dict[Comparison, float] = {
    "keep": 1.01,
    "recompute": 1.02,
    "recording": 1.01,
    "compiled keep": 1.01,
    "compiled recompute": 1.02,
    "compiled fused": 1.02,
}
"""What the ratio may be."""
OTHER_BITS: tuple[Comparison, ...] = ("compiled", "compiled bits")
"""What compares two graphs: each has bits of its own."""
SIMULATED_SHARE = 0.10
"""What the ratio may differ from the simulated one by."""

NOTES = (
    "A ratio is a planned step by the other's step that ran next to it, in the median of a"
    " process's pairs; both train the same model on the same batches from the same random state."
    " Where a process's memory lies makes one of two equal models some per cent faster for as long"
    " as it lives: the ratio is the mean over several processes, in every other of which the other"
    " way is built first, and ± is twice its standard error.",
    "A bar that is exceeded by less than that is *not told apart* from what is asked.",
    "On a CPU machine host memory is where the model is: `save_on_cpu` copies nothing there unless"
    " pinning is asked for, and then copies out only. Swapping copies out and back, on lanes that"
    " compute shares its two processors with; on a GPU copy engines do that.",
    "Where a ratio is simulated, freed memory goes back to the system at once, as it does in"
    " profiles and under `protrain run` on a CPU; steps take longer then, and vary more.",
    "The loop that loads, computes and saves is benchmarks/runtime_loop.py. Its simulated step is"
    " the sum of what the plan computes and moves.",
)
OF_COMPILED = (
    "transformers checkpoints a layer's forward, so that a compiler sees it: its backward graph"
    " leaves out what gradients do not need, and its kernels round in other places. A plan that"
    " does so takes leave (`--allow rounding`)."
)


@dataclass(frozen=True, slots=True)
class Bar:
    """What the project asks for, and what came."""

    model: str
    asked: str
    result: Literal["held", "not told apart", "missed"]
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
                (
                    bar.model,
                    bar.asked,
                    f"**{bar.result}**" if bar.result == "missed" else bar.result,
                    bar.found,
                )
                for bar in bars(document)
            ],
        ),
    ]
    for name, model in document["models"].items():
        parts += ["", f"## {name}", "", *_model(name, model)]
    parts += ["", "## How to read this", "", *(f"- {note}" for note in NOTES)]
    if any("compiled" in comparison for _, comparison, _ in _results(document)):
        parts += [f"- {OF_COMPILED}"]
    return "\n".join(parts) + "\n"


def summary_lines(document: Found) -> list[str]:
    """The bars, a line each."""
    return [f"{bar.model}: {bar.asked}: {bar.result}, {bar.found}" for bar in bars(document)]


def bars(document: Found) -> list[Bar]:
    """Those that there are results for."""
    found: list[Bar] = []
    for name, comparison, rounds in _results(document):
        ours, other = AGAINST[comparison]
        if comparison in MOST:
            most = MOST[comparison]
            asked = f"{ours}: at most {most:.2f} of {other}"
            result = _result(rounds.ratio - most, rounds.error)
            found.append(Bar(name, asked, result, rounds.text))
        if rounds.simulated_ratio is not None:
            says = rounds.simulated_ratio
            off = rounds.ratio / says - 1
            found.append(
                Bar(
                    name,
                    f"{ours}, against {other}: as simulated, within 10 %",
                    _result(abs(off) - SIMULATED_SHARE, rounds.error / says),
                    f"{rounds.text}, simulated {says:.3f}: {off:+.1%}",
                )
            )
        if not rounds.same_losses and comparison not in OTHER_BITS:
            found.append(Bar(name, f"{ours}: the bits of {other}", "missed", "losses differ"))
    return found


def _result(exceeds_by: float, error: float) -> Literal["held", "not told apart", "missed"]:
    if exceeds_by <= 0:
        return "held"
    return "not told apart" if exceeds_by <= error < inf else "missed"


def _results(document: Found) -> Iterator[tuple[str, Comparison, Rounds]]:
    for name, model in document["models"].items():
        for comparison, found in model.get("comparisons", {}).items():
            if "error" not in found:
                yield name, comparison, read_rounds(found)


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
            rows.append((ours, other, found["error"], *[""] * 5))
            continue
        rounds = read_rounds(found)
        says = rounds.simulated_ratio
        rows.append(
            (
                ours,
                other,
                rounds.text,
                *(f"{1e3 * seconds:.1f}" for seconds in rounds.seconds),
                "equal" if rounds.same_losses else "**differ**",
                "" if says is None else f"{says:.3f}",
            )
        )
    seconds = ("ours, ms", "other, ms", "losses", "simulated")
    yield from _table(("ours", "other", "ratio", *seconds), rows)


def _machine(document: Found) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    loads = [one.load for _, _, rounds in _results(document) for one in rounds.rounds]
    load = f" Load of the machine: {min(loads):.1f} to {max(loads):.1f}." if loads else ""
    return f"{document['system']}; {versions}.{load}"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    if not rows:
        yield "None yet."
        return
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
