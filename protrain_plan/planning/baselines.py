"""Plans that a person would write down, each with its best schedule by the planner's simulator."""

from collections.abc import Sequence
from typing import Literal, assert_never, get_args

from protrain_plan.planning.four_parameter import four_parameter, homes
from protrain_plan.planning.judging import Judge, Judged
from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.records.plan import (
    Activations,
    Keep,
    Offload,
    Persistent,
    Placement,
    Recompute,
    Swap,
    SwapInput,
)

Baseline = Literal["four-parameter", "recompute-all", "offload-all"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)


def baseline(name: Baseline, problem: Problem, judge: Judge) -> Judged | None:
    """The best variant of a baseline; None where no variant meets the budgets.

    recompute-all   every block recomputed; states all persistent, or all offloaded
    offload-all     states offloaded, activations (or the blocks' inputs) swapped
    four-parameter  see `four_parameter.py`

    States are offloaded to the first tier with room for them; activations swap to the nearest. On
    several devices, shards stay on these where there is room.
    """
    tiers = [tier.name for tier in problem.profile.hardware.tiers]
    offloads: list[Placement] = [Offload(tier=tier) for tier in homes(problem)]
    match name:
        case "recompute-all":
            persistent = _fastest(problem, judge, [[Recompute()]], [Persistent()])
            offloaded = _fastest(problem, judge, [[Recompute()]], offloads)
            found = [one for one in (persistent, offloaded) if one]
            return min(found, key=lambda one: one.seconds, default=None)
        case "offload-all":
            if not tiers:
                return None
            nearest = tiers[0]
            policies: list[list[Activations]] = [
                [Swap(tier=nearest), Keep()],
                [SwapInput(tier=nearest), Keep()],
            ]
            return _fastest(problem, judge, policies, offloads)
        case "four-parameter":
            return four_parameter(problem, judge)
        case _:
            assert_never(name)


def kept_seconds(problem: Problem) -> float | None:
    """The step that keeps everything on the device; None where it does not fit, or is not open."""
    choice = uniform(problem, [Keep()], Persistent())
    activations, states = problem.chosen(choice)
    kept = all(isinstance(option.decision, Keep) for option in activations)
    if not kept or not all(isinstance(option.decision, Persistent) for option in states):
        return None
    judged = Judge(problem).judge(choice)
    return judged.seconds if judged else None


def leanest_variant(name: Baseline, problem: Problem) -> Choice:
    """The variant of a baseline with the lowest peak on the device."""
    tiers = [tier.name for tier in problem.profile.hardware.tiers]
    policies: list[list[Activations]] = [[Recompute()]]
    if name == "offload-all":
        policies = [[Swap(tier=tiers[0]), Keep()], [SwapInput(tier=tiers[0]), Keep()]]
    placements: list[Placement] = [Offload(tier=tier) for tier in homes(problem)]
    placements = placements or [Persistent()]
    variants = [
        uniform(problem, policy, placement) for policy in policies for placement in placements
    ]
    return min(variants, key=lambda choice: max(problem.static_bytes(choice)))


def _fastest(
    problem: Problem,
    judge: Judge,
    policies: Sequence[Sequence[Activations]],
    placements: Sequence[Placement],
) -> Judged | None:
    """The fastest policy under the first placement that any of them fits with."""
    for placement in placements:
        found = [judge.judge_well(uniform(problem, policy, placement)) for policy in policies]
        fitting = [one for one in found if one]
        if fitting:
            return min(fitting, key=lambda one: one.seconds)
    return None


def uniform(problem: Problem, policies: Sequence[Activations], placement: Placement) -> Choice:
    """The same for all: a unit takes the first policy open to it, or keeps and persists."""
    choice = []
    for options in problem.options:
        activations = [option.decision for option in options.activations]
        states = [option.decision for option in options.states]
        activation = next((activations.index(p) for p in policies if p in activations), 0)
        choice.append((activation, states.index(placement) if placement in states else 0))
    return tuple(choice)
