"""Plain choices that every problem is tried with: one policy for all units."""

from collections.abc import Iterator, Sequence
from typing import assert_never

from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.records.plan import (
    Activations,
    Keep,
    Placement,
    Recompute,
    Swap,
    SwapInput,
)


def plain_choices(problem: Problem) -> Iterator[Choice]:
    """Each activation policy with each placement policy; everything kept and persistent first.

    A unit that cannot take part in a policy keeps its activations, or swaps them where the policy
    swaps; a chunk that cannot is persistent.
    """
    activations: dict[Activations, None] = {}
    placements: dict[Placement, None] = {}
    for options in problem.options:
        activations.update((option.decision, None) for option in options.activations)
        placements.update((option.decision, None) for option in options.states)
    found: set[Choice] = set()
    for placement in placements:
        for policy in activations:
            choice = tuple(
                (
                    _activation(policy, [option.decision for option in options.activations]),
                    _index(placement, [option.decision for option in options.states]),
                )
                for options in problem.options
            )
            if choice not in found:
                found.add(choice)
                yield choice


def _activation(policy: Activations, open_to_unit: list[Activations]) -> int:
    match policy:
        case Keep() | Swap():
            return _index(policy, open_to_unit)
        case Recompute():
            return _index(policy, open_to_unit)
        case SwapInput(tier=tier):
            if policy in open_to_unit:
                return open_to_unit.index(policy)
            return _index(Swap(tier=tier), open_to_unit)
        case _:
            assert_never(policy)


def _index(decision: object, open_to_unit: Sequence[object]) -> int:
    return open_to_unit.index(decision) if decision in open_to_unit else 0
