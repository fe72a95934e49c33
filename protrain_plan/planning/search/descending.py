"""From layouts that a model proposes to a plan: steps downhill, by the walk and the simulator.

A neighbour is looked at by the walk (`pacing`), which takes a millisecond. What the walk finds
faster is simulated, and taken if it is. Where no single step helps, two steps are tried together:
one that frees memory, and one that spends it.
"""

import random
from collections.abc import Iterator, Sequence
from math import ceil, inf
from typing import NamedTuple

from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.search.evaluation import Evaluation, Evaluator
from protrain_plan.planning.search.layouts import Layout, Move, choice_of, reordered, steps
from protrain_plan.planning.search.pacing import PLAIN, Pace
from protrain_plan.records.hardware import TierName

LESS = 1e-4
"""A step must be faster by this fraction."""

PARTNERS = 12
"""Second steps that are tried with a first one."""

REPAIRS = 12
"""Steps that a layout may be away from one within the budgets."""

PRICED = 0.5
"""Options are tried that cost the relaxation at most this part of the plan's gap."""

SIMULATED = 0.25
"""Simulations per walk, at most."""


class Prices(NamedTuple):
    """What the relaxation says of options: `bound` is its value, in seconds.

    Of each class, activations and states: the seconds by which a unit that takes the option lifts
    it, at least.
    """

    bound: float
    reduced_costs: Sequence[tuple[Sequence[float], Sequence[float]]]

    def open_to(self, within_s: float) -> list[tuple[list[int], list[int]]]:
        """The options that cost no more."""
        found = [
            tuple([n for n, cost in enumerate(kind) if cost <= within_s] for kind in pair)
            for pair in self.reduced_costs
        ]
        return [(first, second) for first, second in found]


class Descent:
    """A search of one problem; `evaluator` keeps what is simulated, and counts it."""

    def __init__(self, problem: Problem, evaluator: Evaluator, prices: Prices, seed: int) -> None:
        self.problem, self.evaluator, self.prices = problem, evaluator, prices
        self.order = random.Random(seed)
        self.num_walks = 0
        self.pace: Pace = PLAIN
        self._seen: dict[tuple[Choice, Pace], float] = {}

    def walked(self, choice: Choice, faster_than_s: float = inf) -> float:
        """About the seconds of a choice; infinity where it has no room, or is no faster."""
        problem = self.problem
        if problem.least_seconds(choice) >= faster_than_s:
            return inf
        known = self._seen.get((choice, self.pace))
        if known is None:
            known = inf
            if problem.within_tiers(choice):
                self.num_walks += 1
                if paced := self.evaluator.pacer.walk(choice, self.pace):
                    known = paced.seconds
            self._seen[choice, self.pace] = known
        return known

    # Repair

    def repaired(self, layout: Layout) -> Layout | None:
        """The layout with as few units in cheaper options as it takes to meet the budgets."""
        open_to = self.prices.open_to(inf)
        for _ in range(REPAIRS):
            excess = self._excess(layout)
            if excess is None:
                return layout
            found = None
            least = inf
            for move in steps(layout, open_to, single=True):
                freed = self._freed(layout, move.layout, excess)
                if freed <= 0:
                    continue
                cost = self.prices.reduced_costs[move.group][move.kind][move.into]
                count = min(move.number, ceil(excess[1] / freed))
                price = (max(cost, 0.0) + 1e-9) * count * max(1.0, excess[1] / (freed * count)) ** 2
                if price < least:
                    least, found = price, (move, count)
            if found is None:
                return None
            move, count = found
            layout = move.times(layout, count)
        return None

    def _excess(self, layout: Layout) -> tuple[TierName | int, float] | None:
        """The first budget that is exceeded, a tier's or a slot's on the device, and by how much."""
        problem, choice = self.problem, choice_of(self.problem, layout)
        for tier, limit in problem.tiers.items():
            if (use := problem.tier_use(tier, choice)) > limit:
                return tier, use - limit
        static = problem.static_bytes(choice)
        slot = max(range(len(static)), key=lambda t: static[t])
        return (slot, static[slot] - problem.device) if static[slot] > problem.device else None

    def _freed(self, layout: Layout, other: Layout, excess: tuple[TierName | int, float]) -> float:
        where = excess[0]
        problem = self.problem
        before, after = choice_of(problem, layout), choice_of(problem, other)
        if isinstance(where, int):
            return max(problem.static_bytes(before)) - max(problem.static_bytes(after))
        for tier, limit in problem.tiers.items():
            if tier != where and problem.tier_use(tier, after) > max(
                limit, problem.tier_use(tier, before)
            ):
                return 0.0
        return problem.tier_use(where, before) - problem.tier_use(where, after)

    # Steps downhill

    def descended(
        self, layout: Layout, best: Evaluation | None, *, most: int, enough_s: float
    ) -> tuple[Layout, Evaluation | None]:
        """The layout after steps downhill, in up to `most` walks, with its plan.

        `best` is the layout's own plan, if it is known.
        """
        last = self.num_walks + most
        value = self.walked(choice_of(self.problem, layout))
        best = best or self._simulated(layout, inf)
        simulated = self.evaluator.num_simulations + max(8, round(most * SIMULATED))

        def spent() -> bool:
            return (
                self.num_walks >= last
                or self.evaluator.num_simulations >= simulated
                or self.evaluator.stopped()
                or (best is not None and best.seconds <= enough_s)
            )

        def faster(other: Layout) -> Evaluation | None:
            """The other layout's plan, if the walk and the simulator find it faster."""
            found = self.walked(choice_of(self.problem, other), value)
            if found >= value * (1 - LESS):
                return None
            limit = best.seconds * (1 - LESS) if best else inf
            return self._simulated(other, limit)

        while not spent():
            gap = max(best.seconds - self.prices.bound, 0.0) if best else inf
            open_to = self.prices.open_to(gap * PRICED)
            near = [*steps(layout, open_to), *reordered(layout)]
            self.order.shuffle(near)
            for other in self._neighbours(layout, near, open_to):
                if spent():
                    break
                if found := faster(other):
                    layout, best = other, found
                    value = self.walked(choice_of(self.problem, layout))
                    break
            else:
                break
        return layout, best

    def _neighbours(
        self,
        layout: Layout,
        near: Sequence[Move],
        open_to: Sequence[tuple[Sequence[int], Sequence[int]]],
    ) -> Iterator[Layout]:
        """One step away, then two."""
        yield from (move.layout for move in near)
        for move in near:
            if move.of_order:
                continue
            second = [
                other.layout
                for other in steps(move.layout, open_to)
                if (other.group, other.kind) != (move.group, move.kind)
            ]
            self.order.shuffle(second)
            yield from second[:PARTNERS]

    def _simulated(self, layout: Layout, faster_than_s: float) -> Evaluation | None:
        choice = choice_of(self.problem, layout)
        found = self.evaluator.evaluate(choice, rules=(self.pace,), faster_than_s=faster_than_s)
        return found if found and found.seconds < faster_than_s else None
