"""The words of an explanation: decisions, lanes and amounts as parts of sentences."""

from collections.abc import Sequence
from typing import assert_never

from protrain_plan.records.folding import fold, runs
from protrain_plan.records.plan import (
    Activations,
    Buffer,
    Keep,
    Offload,
    Persistent,
    Placement,
    Recompute,
    Swap,
    SwapInput,
)
from protrain_plan.units import format_seconds

MAX_RUNS = 4
"""Runs of units that a text enumerates."""


def units_text(names: Sequence[str]) -> str:
    """Names in runs, such as `layers.0-3, layers.7`; the longest where there are many."""
    found = list(runs(names, [None] * len(names)))
    shown = sorted(sorted(found, key=len, reverse=True)[:MAX_RUNS], key=lambda run: run.start)
    texts = [
        fold(names[run.start], names[run.stop - 1]) if len(run) > 1 else names[run.start]
        for run in shown
    ]
    if rest := len(names) - sum(map(len, shown)):
        return f"{', '.join(texts)} and {rest} more"
    return listed_words(texts, "and")


def activations_does(decision: Activations, *, many: bool) -> str:
    """What units do, to follow their names."""
    s, their = ("", "their") if many else ("s", "its")
    match decision:
        case Keep():
            return f"keep{s} {their} activations"
        case Recompute(form="full"):
            return f"recompute{s} {their} activations"
        case Recompute(form=form):
            return f"recompute{s} {their} activations ({form})"
        case Swap(tier=tier):
            return f"swap{s} {their} activations to {tier}"
        case SwapInput(tier=tier, form="full"):
            return f"swap{s} {their} input{'s' if many else ''} to {tier} and recompute{s} the rest"
        case SwapInput(tier=tier, form=form):
            return f"swap{s} what {form} keeps to {tier} and recompute{s} the rest"
        case _:
            assert_never(decision)


def activations_doing(decision: Activations, *, many: bool) -> str:
    """The decision as a gerund: "recomputing them"."""
    match decision:
        case Keep():
            return "keeping them"
        case Recompute(form="full"):
            return "recomputing them"
        case Recompute(form=form):
            return f"recomputing them ({form})"
        case Swap(tier=tier):
            return f"swapping them to {tier}"
        case SwapInput(tier=tier, form="full"):
            return f"swapping the input{'s' if many else ''} to {tier} and recomputing the rest"
        case SwapInput(tier=tier, form=form):
            return f"swapping what {form} keeps to {tier} and recomputing the rest"
        case _:
            assert_never(decision)


def states_does(decision: Placement, *, many: bool) -> str:
    """What units do, to follow "they"."""
    s, their = ("", "their") if many else ("s", "its")
    match decision:
        case Persistent():
            return f"keep{s} {their} states on the device"
        case Offload(tier="device"):
            return f"shard{s} {their} states over the devices"
        case Buffer(tier="device"):
            return f"buffer{s} {their} states from shards on the devices"
        case Offload(tier=tier):
            return f"offload{s} {their} states to {tier}"
        case Buffer(tier=tier):
            return f"buffer{s} {their} states from {tier}"
        case _:
            assert_never(decision)


def states_doing(decision: Placement) -> str:
    """The placement as a gerund: "offloading them to host"."""
    match decision:
        case Persistent():
            return "keeping them on the device"
        case Offload(tier="device"):
            return "sharding them over the devices"
        case Buffer(tier="device"):
            return "buffering them from shards on the devices"
        case Offload(tier=tier):
            return f"offloading them to {tier}"
        case Buffer(tier=tier):
            return f"buffering them from {tier}"
        case _:
            assert_never(decision)


def lane_words(lane: str) -> str:
    """What a lane does: "transfers from host"."""
    if lane == "update":
        return "updates on the host"
    if lane == "collect":
        return "collectives"
    word, _, tier = lane.partition(" ")
    return f"transfers {'from' if word == 'fetch' else 'to'} {tier}" if tier else word


def amount_of(budget: int) -> int:
    """A round number of bytes that is little beside the budget."""
    for amount in (2**30, 100 * 2**20, 10 * 2**20):
        if 10 * amount <= budget:
            return amount
    return 2**20


def at_most(seconds: float) -> str:
    """A bound on what is saved: "at most about 13.4 ms"."""
    return f"at most about {format_seconds(seconds)}" if seconds else "nothing"


def listed_words(texts: Sequence[str], word: str) -> str:
    """`a, b and c`."""
    return f" {word} ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
