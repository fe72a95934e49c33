"""Training curves of activation options that are by leave, beside exact training.

    python -m benchmarks.curves [--steps N] [--seeds N] [--out FILE] [--picture FILE]

A small Llama learns real text (`protrain_plan.models.batches.byte_tokens`) with AdamW, once exactly
and once with each leave of `protrain_runtime.contract.records.forms.FORMS`: all blocks and the last
part in the first form that it gives leave for. Weights and batches are the same. The picture and
the table have means over the seeds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.tables import markdown_table
from benchmarks.processes import described
from benchmarks.provenance import ROOT, commit
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.models.sources import load_source
from protrain_plan.profiling.structure.discovery import discover
from protrain_runtime.activations.forms import around, wrap_forward
from protrain_runtime.contract.records.forms import FORMS, leaves_of
from protrain_runtime.contract.records.profile import Form

MODULE = "benchmarks.curves"
MODEL, BATCH, SEQUENCE = "tiny-llama", 4, 128
MEAN_OF = 10
"""Steps that a point of the picture is the mean of."""

COLOURS = ("#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Okabe and Ito's, which people of all kinds of colour vision tell apart."""

Document = Mapping[str, Any]


def main() -> None:
    arguments = _arguments()
    options = ["exact", *leaves_of(FORMS)]
    document: dict[str, Any] = {
        **described(MODULE),
        "command": f"python -m {MODULE} --steps {arguments.steps} --seeds {arguments.seeds}",
        "commit": commit(),
        "model": MODEL,
        "batch_size": BATCH,
        "seq_len": SEQUENCE,
        "steps": arguments.steps,
        "losses": {option: [] for option in options},  # by seed, of every step
        "processor_seconds": {option: [] for option in options},
    }
    for seed in range(arguments.seeds):
        for option in options:
            started = time.process_time()
            losses = trained(option, seed=seed, num_steps=arguments.steps)
            document["losses"][option].append([round(loss, 4) for loss in losses])
            seconds = time.process_time() - started
            document["processor_seconds"][option].append(round(seconds, 1))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document) + "\n")
    arguments.out.with_suffix(".md").write_text(page(document))
    arguments.picture.write_text(picture(document))
    print(page(document), end="")


def forms_of(leave: str) -> dict[str, Form]:
    """The first form that a leave is for, of blocks and of the last part; `keep` without one."""
    found = dict.fromkeys(("blocks", "last part"), "keep")
    for name, form in reversed(FORMS.items()):
        if form.leave == leave:
            found[form.of] = name
    return found


def trained(option: str, *, seed: int, num_steps: int) -> list[float]:
    """The loss of every step, exactly or with a leave."""
    forms = forms_of(option)
    source = load_source(MODEL)
    model = source.build(dtype="float32", device=torch.device("cpu"), seed=seed)
    batches = source.batches(
        batch_size=BATCH,
        seq_len=SEQUENCE,
        dtype="float32",
        device=torch.device("cpu"),
        text=None,
        seed=seed,
    )
    first, *others = islice(batches, num_steps)
    for unit in discover(model, first):
        if unit.kind == "block" and unit.module is not None:
            wrap_forward(unit.module, forms["blocks"])
    optimizer = optimizer_factory("adamw")(model.parameters())
    torch.manual_seed(seed)
    losses = []
    for batch in (first, *others):
        # The forward of the whole: blocks have no product that a loss is made of.
        with around(forms["last part"]):
            loss = loss_of(call_model(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --- the page and the picture ---------------------------------------------------------------------


def page(document: Document) -> str:
    """The results for people."""
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    last = max(1, document["steps"] // 10)
    exact = [_mean_of_last(losses, last) for losses in document["losses"]["exact"]]
    rows = [["activations", f"loss, mean of the last {last} steps", "more than exact, by seed"]]
    for option, runs in document["losses"].items():
        found = [_mean_of_last(losses, last) for losses in runs]
        more = ", ".join(f"{ours - theirs:+.3f}" for ours, theirs in zip(found, exact, strict=True))
        mean = f"{statistics.mean(found):.3f}"
        rows.append([option, mean, "" if option == "exact" else more])
    lines = [
        "# Training curves of options by leave",
        "",
        f"`{document['command']}`, {document['date']}, {document['commit']}",
        "",
        f"{document['system']}; {versions}.",
        "",
        f"{document['model']} in float32, {document['batch_size']} sequences of"
        f" {document['seq_len']} bytes of text, AdamW as profiles have it; from the same weights"
        " over the same batches.",
        "",
        *markdown_table(rows),
    ]
    return "\n".join(lines) + "\n"


def _mean_of_last(losses: Sequence[float], count: int) -> float:
    return statistics.mean(losses[-count:])


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 56, 16, 16, 44


def picture(document: Document) -> str:
    """Loss over steps as SVG, a line for each option."""
    curves = {option: _curve(runs) for option, runs in document["losses"].items()}
    values = [value for curve in curves.values() for _, value in curve]
    low, high, steps = min(values), max(values), document["steps"]

    def at(step: float, loss: float) -> tuple[float, float]:
        across = LEFT + step / steps * (WIDTH - LEFT - RIGHT)
        down = TOP + (high - loss) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(down, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        "<title>Loss over steps, exact and with each leave</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    bottom = HEIGHT - BOTTOM
    for number in range(5):
        loss, step = low + (high - low) * number / 4, steps * number / 4
        _, down = at(0, loss)
        across, _ = at(step, low)
        lines += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down}" y2="{down}" stroke="#dddddd"/>',
            f'<text x="{LEFT - 6}" y="{down + 4}" text-anchor="end">{loss:.2f}</text>',
            f'<text x="{across}" y="{bottom + 18}" text-anchor="middle">{step:.0f}</text>',
        ]
    lines.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    for number, (option, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join("{},{}".format(*at(*point)) for point in curve)
        dashes = ' stroke-dasharray="6 3"' if option == "exact" else ""
        down = TOP + 16 + 18 * number
        lines += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>',
            f'<line x1="{WIDTH - 190}" x2="{WIDTH - 160}" y1="{down}" y2="{down}"'
            f' stroke="{colour}" stroke-width="2"{dashes}/>',
            f'<text x="{WIDTH - 154}" y="{down + 4}">{escape(option)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _curve(runs: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Means over runs and over a few steps, each at the middle of those."""
    means = [statistics.mean(losses) for losses in zip(*runs, strict=True)]
    starts = range(0, len(means), MEAN_OF)
    parts = [(start, means[start : start + MEAN_OF]) for start in starts]
    return [(start + len(part) / 2, statistics.mean(part)) for start, part in parts]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/curves.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/training-curves.svg")
    return parser.parse_args()


if __name__ == "__main__":
    main()
