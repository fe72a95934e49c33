"""From layouts that a model proposes to a plan: steps downhill, by the walk and the simulator.

A neighbour is looked at by the walk (`pacing`), which takes a millisecond. What the walk finds
faster is simulated, and taken if it is. Where no single step helps, two steps are tried together:
one that frees memory, and one that spends it.
"""

import random
from collections.abc import Iterator, Sequence
from math import ceil, inf, isinf
from typing import NamedTuple

from protrain_plan.planning.model.counting import Prices
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.search.evaluation import Evaluation, Evaluator
from protrain_plan.planning.search.improving import changed
from protrain_plan.planning.search.layouts import Layout, Move, choice_of, decided, reordered, steps
from protrain_plan.planning.search.pacing import PLAIN, Pace
from protrain_plan.program.implications import ActivationOption, StateOption
from protrain_plan.records.hardware import TierName

LESS = 1e-4
"""A step must be faster by this fraction."""

PARTNERS = 12
"""Second steps that are tried with a first one."""

REPAIRS = 12
"""Steps that a layout may be away from one within the budgets."""

PRICED = 0.5
"""Options are tried that cost the relaxation at most this part of the plan's gap."""

FREE = 1e-9
"""Seconds that a step costs at least, so that the fewest steps are taken."""

GLANCE = 0.25
"""Of a walk, what it takes to see that a choice has no room."""

SIMULATED = 0.1
"""Simulations per walk, at most."""


class _Excess(NamedTuple):
    """Bytes beyond a tier's budget, or the device's in a slot."""

    tier: TierName | None
    slot: int
    bytes: int


def _standing(option: ActivationOption | StateOption, slot: int) -> int:
    return sum(held.bytes for held in option.holdings if held.first <= slot <= held.last)


class Descent:
    """A search of one problem; `evaluator` keeps what is simulated, and counts it."""

    def __init__(self, problem: Problem, evaluator: Evaluator, prices: Prices, seed: int) -> None:
        self.problem, self.evaluator, self.prices = problem, evaluator, prices
        self.order = random.Random(seed)
        self.num_walks = 0.0
        self.pace: Pace = PLAIN
        # Seconds, or infinity and the seconds that it takes at least.
        self._seen: dict[tuple[Choice, Pace], tuple[float, float]] = {}

    def walked(self, choice: Choice, within_s: float = inf) -> float:
        """About the seconds of a choice; infinity where it has no room, or takes no less."""
        problem, place = self.problem, (choice, self.pace)
        if problem.least_seconds(choice) >= within_s:
            return inf
        known, asked = self._seen.get(place, (inf, 0.0))
        if isinf(known) and asked < within_s:
            asked = inf  # without room nothing is faster
            self.num_walks += GLANCE
            if problem.within_tiers(choice) and max(problem.static_bytes(choice)) <= problem.device:
                self.num_walks += 1 - GLANCE
                paced = self.evaluator.pacer.walk(choice, self.pace, within_s)
                known, asked = (paced.seconds, inf) if paced else (inf, within_s)
            self._seen[place] = known, asked
        return known

    # Repair

    def repaired(self, layout: Layout) -> Layout | None:
        """The layout with as few units in cheaper options as it takes to meet the budgets."""
        open_to = self.prices.open_to(inf)
        for _ in range(REPAIRS):
            excess = self._excess(layout)
            if excess is None:
                return layout
            least, found = inf, None
            for move in steps(layout, open_to, single=True):
                if (freed := self._freed(move, layout, excess)) <= 0:
                    continue
                count = min(move.number, ceil(excess.bytes / freed))
                cost = max(self.prices.reduced_costs[move.group][move.kind][move.into], 0.0)
                # What is not enough by itself is dearer.
                price = (cost + FREE) * count * (excess.bytes / min(excess.bytes, freed * count))
                if price < least:
                    least, found = price, move.times(layout, count)
            if found is None:
                return None
            layout = found
        return None

    def _excess(self, layout: Layout) -> "_Excess | None":
        """The first budget that is exceeded: a tier's, or the device's in its tightest slot."""
        problem, choice = self.problem, choice_of(self.problem, layout)
        for tier, limit in problem.tiers.items():
            if (use := problem.tier_use(tier, choice)) > limit:
                return _Excess(tier, -1, use - limit)
        static = problem.static_bytes(choice)
        slot = max(range(len(static)), key=lambda t: static[t])
        excess = static[slot] - problem.device
        return _Excess(None, slot, excess) if excess > 0 else None

    def _freed(self, move: Move, layout: Layout, excess: "_Excess") -> float:
        """The bytes that one unit frees, in the mean of those that have the option."""
        units = self.problem.classes[move.group]
        kinds = [
            (
                self.problem.options[unit].states
                if move.kind
                else self.problem.options[unit].activations
            )
            for unit in units
        ]
        if excess.tier is not None:
            options = kinds[0]
            before, after = (options[n].tier_bytes for n in (move.option, move.into))
            return before.get(excess.tier, 0) - after.get(excess.tier, 0)
        has = [
            n for n, one in enumerate(decided(layout[move.group][move.kind])) if one == move.option
        ]
        freed = 0
        for place in (has[0], has[len(has) // 2], has[-1]):
            options = kinds[place]
            freed += _standing(options[move.option], excess.slot)
            freed -= _standing(options[move.into], excess.slot)
        return freed / 3

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
            for other in self._neighbours(near, open_to):
                if spent():
                    break
                if found := faster(other):
                    layout, best = other, found
                    value = self.walked(choice_of(self.problem, layout))
                    break
            else:
                break
        return layout, best

    def refined(self, best: Evaluation, *, most: int, enough_s: float) -> Evaluation:
        """`best` after changes of single units and pairs of them, in up to `most` walks."""
        if isinstance(best.rule, Pace):
            self.pace = best.rule
        last = self.num_walks + most
        value = self.walked(best.choice)
        before = None
        while before is not best:
            before = best
            open_to = self.prices.open_to(max(best.seconds - self.prices.bound, 0.0) * PRICED)
            near = list(changed(self.problem, best.choice, open_to))
            self.order.shuffle(near)  # so that limited effort reaches all parts of the model
            for choice in near:
                if self.num_walks >= last or self.evaluator.stopped() or best.seconds <= enough_s:
                    return best
                found = self.walked(choice, value)
                if found >= value * (1 - LESS):
                    continue
                limit = best.seconds * (1 - LESS)
                plan = self.evaluator.evaluate(choice, rules=(self.pace,), faster_than_s=limit)
                if plan and plan.seconds < limit:
                    best, value = plan, found
                    break
        return best

    def _neighbours(
        self,
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
