"""The front of memory against time: predicted steps, what they wait for, and what baselines take.

    python -m benchmarks.front [--only MACHINE...] [--before FILE]

Llama-3.1 8B and 70B, whole and with adapters, with updates in backward and with clipping, on
machines of the catalogue; and the models of the ProTrain paper (arXiv 2406.08334) on its cards,
with so much host memory that the card is what binds. Nothing runs on a card: seconds are simulated
on estimated profiles.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.grid import UPDATES, estimate
from benchmarks.pages import markdown_table, runs_list
from benchmarks.runner import Cell, Document, found, main
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Infeasible
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.planning.search.baselines import BASELINES, baseline
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.improving import Effort
from protrain_plan.simulation.report import report
from protrain_runtime.contract.records.plan import Budgets, Updates
from protrain_runtime.contract.units import format_bytes, format_seconds

MODELS = ("llama-3.1-8b", "llama-3.1-70b")
TOKENS = {"rtx-4090": 2048, "a100-80gb": 4096, "h100-sxm": 8192, "gh200": 8192}
ADAPTERS = ("", "r=16")
SHARES = (0.3, 1.0)
"""Where budgets lie between the least that works and the card's memory, on a logarithmic scale."""

PAPER = {
    "gpt2-xl": 1024,
    "mistral-7b": 8192,
    "opt-13b": 2048,
    "opt-30b": 2048,
    "llama-2-13b": 4096,
    "llama-2-70b": 4096,
}
"""The longest sequence, in tokens, that each of the paper's models takes."""
PAPER_TOKENS = 8192
"""In a batch."""
CARDS = {
    "rtx-3090": "1.77-2.71 times DeepSpeed, Colossal-AI and FSDP; up to 34 B on one card",
    "a100-80gb": "1.85 times DeepSpeed, 1.43 Colossal-AI, 2.22 FSDP; up to 75 B on one card",
}
"""The paper's figures, of four cards; the largest model is of one."""
HOST_BYTES = 2 * 2**40
"""Assumed beside either of its cards, and more than any model here needs; and no disk."""


def cells() -> list[Cell]:
    """The front's questions, and the paper's."""
    asked = [
        _cell(model, machine, tokens, adapter=adapter, updates=updates, share=share)
        for model, (machine, tokens) in product(MODELS, TOKENS.items())
        for adapter, updates, share in product(ADAPTERS, UPDATES, SHARES)
    ]
    return asked + [
        _cell(model, card, tokens, batch_size=PAPER_TOKENS // tokens, host=HOST_BYTES)
        for (model, tokens), card in product(PAPER.items(), CARDS)
    ]


def _cell(
    model: str,
    machine: str,
    tokens: int,
    *,
    batch_size: int = 1,
    adapter: str = "",
    updates: Updates = "in backward",
    share: float = 1.0,
    host: int = 0,
) -> Cell:
    words = [model, *(["LoRA"] if adapter else []), *(["clipped"] if updates != UPDATES[0] else [])]
    batch = f"{batch_size} x {tokens}" if batch_size > 1 else tokens
    return Cell(
        key=f"{machine}: {' '.join(words)}, {batch} tokens, {'paper' if host else share}",
        part="paper" if host else "front",
        task="front",
        arguments={
            "model": model,
            "machine": machine,
            "tokens": tokens,
            "batch_size": batch_size,
            "adapter": adapter,
            "updates": updates,
            "share": share,
            "host": host,
        },
        limit_s=3600,
    )


def answered(
    model: str,
    machine: str,
    tokens: int,
    *,
    batch_size: int,
    adapter: str,
    updates: Updates,
    share: float,
    host: int,
) -> Document:
    """The plan for a question, and the baselines; `host` bytes in place of all tiers."""
    profile = estimate(model, machine, tokens, adapter, batch_size)
    tiers = {tier.name: tier.capacity_bytes for tier in profile.hardware.tiers}
    if host:
        kept = (replace(t, capacity_bytes=host) for t in profile.hardware.tiers if t.name == "host")
        profile = replace(profile, hardware=replace(profile.hardware, tiers=tuple(kept)))
        tiers = {"host": host}
    below = {"host": tiers.get("host", 0), "disk": tiers.get("disk", 0)}
    card = profile.hardware.device.memory_bytes
    settings = replace(OVERLAPPING, updates=updates)
    lean = min_memory(Problem.of(profile, Budgets(device=card, **below), settings=settings))
    least = card + 1 if lean is None else lean.bytes + profile.hardware.device.besides_bytes
    if least > card:
        return {"status": "infeasible", "device": least}
    within = Budgets(device=round(least * (card / least) ** share), **below)
    problem = Problem.of(profile, within, settings=settings)
    started = time.process_time()
    answer = solve_problem(problem, effort=Effort())
    taken = time.process_time() - started
    if isinstance(answer, Infeasible):
        return {"status": "infeasible", "device": within.device}
    plan, prediction = answer.plan, answer.plan.prediction
    told = report(problem.overlapping(plan.settings.overlap_steps).program(plan.units))
    alone = problem.overlapping(False)
    others = {name: baseline(name, alone, Evaluator(alone)) for name in BASELINES}
    return {
        "status": answer.status,
        "device": within.device,
        "step_seconds": prediction.step_seconds,
        "gap": answer.gap,
        "tokens_per_s": batch_size * tokens / prediction.step_seconds,
        "solve_seconds": taken,
        "waits": told.stall_by_cause,
        "lanes": {lane.name: lane.utilisation for lane in told.lanes},
        "baseline_seconds": {name: one.seconds if one else None for name, one in others.items()},
    }


# --- the page -------------------------------------------------------------------------------------


def page(document: Document) -> str:
    """Ratios, the front, and what binds."""
    solved = {key: one for key, one in found(document).items() if one["status"] != "infeasible"}
    lines = ["# The front of memory against time", "", *runs_list(document["runs"]), ""]
    lines += ["All seconds are simulated, on estimated profiles.", "", baselines_in_short(solved)]
    rows = [["case", "device", "step", "tokens/s", "gap", "planning", "waits for, of the step"]]
    rows[0] += [f"{name} / ours" for name in BASELINES]
    for key, one in found(document).items():
        if one["status"] == "infeasible":
            rows.append([key, f"needs {format_bytes(one['device'])}", *[""] * (len(rows[0]) - 2)])
            continue
        shares = {cause: seconds / one["step_seconds"] for cause, seconds in one["waits"].items()}
        waits = (f"{cause} {share:.0%}" for cause, share in shares.items() if share >= 0.01)
        rows.append(
            [
                *(key, format_bytes(one["device"]), format_seconds(one["step_seconds"])),
                *(f"{one['tokens_per_s']:,.0f}", f"{one['gap']:.1%}"),
                *(format_seconds(one["solve_seconds"]), ", ".join(waits) or "-"),
                *(f"{ratio:.2f}" if ratio else "-" for ratio in ratios_of(one).values()),
            ]
        )
    lines += ["", *markdown_table(rows, numbers_from=1)]
    lines += ["", "## Where the next second is", ""]
    lines += ["How busy each lane is, in the median of a machine's cases.", "", *_lanes(solved)]
    lines += ["", "## What the paper published", ""]
    lines += [f"- {card}: {words}" for card, words in CARDS.items()]
    return "\n".join(lines) + "\n"


def ratios_of(one: Mapping[str, Any]) -> dict[str, float | None]:
    """Each baseline's seconds over ours; None where it does not fit."""
    return {
        name: None if seconds is None else seconds / one["step_seconds"]
        for name, seconds in one["baseline_seconds"].items()
    }


def baselines_in_short(solved: Mapping[str, Document]) -> str:
    """The baselines' multiples of our seconds, as a sentence."""
    told = []
    for name in BASELINES:
        ratios = [ratio for one in solved.values() if (ratio := ratios_of(one)[name])]
        if ratios:
            spread = f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to"
            told.append(f"{name} {spread} {max(ratios):.2f})")
    return f"Baselines take, in the median of {len(solved)} cases: {', '.join(told)} our seconds."


def _lanes(solved: Mapping[str, Document]) -> Iterator[str]:
    lanes: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, one in solved.items():
        for lane, share in one["lanes"].items():
            lanes[key.partition(":")[0]][lane].append(share)
    for machine, shares in lanes.items():
        ordered = sorted(shares.items(), key=lambda item: -statistics.median(item[1]))
        told = ", ".join(f"{lane} {statistics.median(ones):.0%}" for lane, ones in ordered)
        yield f"- {machine}: {told}"


if __name__ == "__main__":
    sys.exit(main("front", cells(), page, says=__doc__))
