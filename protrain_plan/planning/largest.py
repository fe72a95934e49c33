"""The largest batch, or the longest sequence, that can be trained within the budgets.

A value fits if the leanest decisions for its profile do. The least peak is a mixed-integer
programme, a given choice's peak a sum; so that few values need the programme, a choice once found
is carried as far as it fits, and the programme is asked only about what lies beyond.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protrain_plan.planning.candidates import plain_choices
from protrain_plan.planning.growth import Grower, Growth, Quantity
from protrain_plan.planning.leanest import leanest
from protrain_plan.planning.pins import Pin
from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.records.plan import Activations, Budgets, Placement, Updates
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.memory import base_bytes
from protrain_plan.simulation.ranks import ALONE, Group

STEPS: dict[Quantity, int] = {"batch-size": 1, "seq-len": 64}
"""Values are multiples of these: sequences, and tokens."""

MOST: dict[Quantity, int] = {"batch-size": 2**20, "seq-len": 2**24}
"""Where the search ends, whatever fits."""

_Decisions = tuple[tuple[Activations, Placement], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest value that fits, and the profile for it; no plan fits one step more.

    A `value` of `MOST` may not be the largest one.
    """

    value: int
    growth: Growth
    profile: Profile


def largest(
    grower: Grower,
    budgets: Budgets,
    *,
    piece_bytes: int | None = None,
    updates: Updates = "in backward",
    micro_batches: int = 1,
    pins: Sequence[Pin] = (),
    group: Group = ALONE,
) -> Largest | None:
    """The largest multiple of the quantity's step that fits the budgets; None where none does.

    The batch is that of one micro-batch. ProtrainError where a pin cannot be met.
    """
    step = STEPS[grower.quantity]
    most = MOST[grower.quantity] // step
    found: list[_Decisions] = []

    def problem_at(number: int) -> Problem:
        return Problem.of(
            grower.at(number * step),
            budgets,
            piece_bytes=piece_bytes,
            updates=updates,
            micro_batches=micro_batches,
            pins=pins,
            group=group,
        )

    def fits_plainly(number: int) -> bool:
        problem = problem_at(number)
        if _least_bytes(problem) > problem.device:
            return False
        return any(_fits(problem, choice) for choice in plain_choices(problem))

    def fits_as_found(number: int) -> bool:
        problem = problem_at(number)
        choices = (_choice(problem, decisions) for decisions in found[-1:])
        return any(choice is not None and _fits(problem, choice) for choice in choices)

    # `fitting` fits, `beyond` does not; ever larger strides in between, until one is too large.
    fitting, beyond, stride = _last(fits_plainly, 0, most + 1), most + 1, 1
    while beyond - fitting > 1:
        number = min(fitting + stride, beyond - 1)
        problem = problem_at(number)
        lean = None if _least_bytes(problem) > problem.device else leanest(problem)
        if lean is None or lean.bytes > problem.device:
            beyond, stride = number, 1
        else:
            fitting, stride = number, 2 * stride
        if lean is not None:
            found.append(_decisions(problem, lean.choice))
            fitting = _last(fits_as_found, fitting, beyond)
    if fitting == 0:
        return None
    value = fitting * step
    return Largest(value=value, growth=grower.kind, profile=grower.at(value))


def _last(fits: Callable[[int], bool], fitting: int, beyond: int) -> int:
    """The last number from `fitting` on, and before `beyond`, that fits: strides, then halves."""
    stride = 1
    while beyond - fitting > 1:
        number = min(fitting + stride, (fitting + beyond) // 2)
        if fits(number):
            fitting, stride = number, 2 * stride
        else:
            beyond = number
    return fitting


def _fits(problem: Problem, choice: Choice) -> bool:
    return max(problem.static_bytes(choice)) <= problem.device and problem.within_tiers(choice)


def _least_bytes(problem: Problem) -> int:
    """No choice's peak is lower: each slot with the least that each unit may hold in it."""
    end = 2 * problem.count
    least = [base_bytes(problem.profile, problem.settings)] * (end + 1)
    for unit in problem.options:
        activations = [option.stays for option in unit.activations]
        states = [option.stays for option in unit.states]
        for options in (activations, states):
            held = [[0] * (end + 1) for _ in options]
            for row, stays in zip(held, options, strict=True):
                for stay in stays:
                    for slot in range(stay.first, stay.last + 1):
                        row[slot] += stay.bytes
            for slot, column in enumerate(zip(*held, strict=True)):
                least[slot] += min(column)
    return max(least)


def _decisions(problem: Problem, choice: Choice) -> _Decisions:
    activations, states = problem.chosen(choice)
    return tuple(
        (activation.decision, state.decision)
        for activation, state in zip(activations, states, strict=True)
    )


def _choice(problem: Problem, decisions: _Decisions) -> Choice | None:
    """The choice of the same decisions in another problem; None where a unit cannot take its own.

    Another size can close an option: what is too small is not swapped.
    """
    choice: list[tuple[int, int]] = []
    for unit, (activations, states) in zip(problem.options, decisions, strict=True):
        open_activations = [option.decision for option in unit.activations]
        open_states = [option.decision for option in unit.states]
        if activations not in open_activations or states not in open_states:
            return None
        choice.append((open_activations.index(activations), open_states.index(states)))
    return tuple(choice)
