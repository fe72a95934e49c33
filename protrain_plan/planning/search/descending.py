"""From layouts that a model proposes to a plan: steps downhill, by the walk and the simulator.

A neighbour is looked at by the walk (`pacing`), which takes a millisecond. What the walk finds
faster is simulated, and taken if it is. Cheap steps come first, with room made for them where they
lack it.
"""

import random
from dataclasses import dataclass, field
from itertools import product
from math import ceil, inf
from typing import NamedTuple

from protrain_plan.planning.model.counting import Layout, Prices
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.search.evaluation import Evaluation, Evaluator
from protrain_plan.planning.search.layouts import (
    Exchange,
    choice_of,
    decided,
    exchanges,
    orders,
    steps,
)
from protrain_plan.planning.search.pacing import PLAIN, Pace
from protrain_runtime.contract.program.effects import standing_bytes
from protrain_runtime.contract.records.hardware import TierName

LESS = 1e-4
"""A step must be faster by this fraction."""

REPAIRS = 12
"""Steps that a layout may be away from one within the budgets."""

PRICED = 0.5
"""Options are tried that cost the relaxation at most this part of the plan's gap."""

FREE = 1e-9
"""Seconds that a step costs at least, so that the fewest steps are taken."""

GLANCE, REPAIR = 0.25, 1.0
"""Parts of a walk's time that it takes to see that a choice has no room, and to make some."""

SIMULATED = 0.1
"""Simulations per walk, at most."""


class _Need(NamedTuple):
    """Bytes beyond a tier's budget, or the device's in a slot; negative: what is left."""

    tier: TierName | None
    slot: int
    beyond: int


@dataclass(eq=False)
class Descent:
    """A search of one problem; `evaluator` keeps what is simulated, and counts it."""

    problem: Problem
    evaluator: Evaluator
    prices: Prices
    order: random.Random
    num_walks: float = 0.0
    pace: Pace = PLAIN
    # Of options, in bytes at a place.
    _differences: dict[object, float] = field(default_factory=dict[object, float], init=False)

    def walked(self, choice: Choice, within_s: float = inf) -> float:
        """About the seconds of a choice; infinity where it has no room, or takes no less."""
        if self.problem.least_seconds(choice) >= within_s:
            return inf
        if not self.problem.fits(choice):
            self.num_walks += GLANCE
            return inf
        self.num_walks += 1
        paced = self.evaluator.pacer.walk(choice, self.pace, within_s)
        return paced.seconds if paced else inf

    # Repair

    def repaired(self, layout: Layout, kept: Exchange | None = None) -> Layout | None:
        """The layout with as few units in cheaper options as it takes to meet the budgets.

        The device's first, then each tier's: what lacks room moves down, and never up again. An
        exchange that is `kept` is not undone.
        """
        open_to = self.prices.open_to(inf)
        for _ in range(REPAIRS):
            needs = self._needs(layout)
            if all(need.beyond <= 0 for need in needs):
                return layout
            for exceeded, need in enumerate(needs):
                least, found = inf, None
                for one in exchanges(layout, open_to) if need.beyond > 0 else ():
                    freed = -self._more(one, layout, need)
                    if freed <= 0:
                        continue
                    if kept and (one.group, one.kind, one.option) == (*kept[:2], kept.into):
                        continue  # units that it takes would leave their new option again
                    count = min(one.number, ceil(need.beyond / freed))
                    above = ((n.beyond, self._more(one, layout, n)) for n in needs[:exceeded])
                    if any(more > 0 and beyond + more * count > 0 for beyond, more in above):
                        continue  # a budget that is met would not be any more
                    cost = max(self.prices.reduced_costs[one.group][one.kind][one.into], 0.0)
                    # What is not enough by itself is dearer.
                    price = (cost + FREE) * count * (need.beyond / min(need.beyond, freed * count))
                    if price < least:
                        least, found = price, one.times(layout, count)
                if found:
                    layout = found
                    break
            else:
                return None
        return None

    def _needs(self, layout: Layout) -> list["_Need"]:
        """Bytes beyond the device in the layout's tightest slot, and beyond each tier."""
        problem, choice = self.problem, choice_of(self.problem, layout)
        static = problem.static_bytes(choice)
        slot = max(range(len(static)), key=lambda t: static[t])
        needs = [_Need(None, slot, static[slot] - problem.device)]
        for tier, limit in problem.tiers.items():
            needs.append(_Need(tier, -1, problem.tier_use(tier, choice) - limit))
        return needs

    def _more(self, one: Exchange, layout: Layout, need: "_Need") -> float:
        """The bytes that one unit more needs there, in the mean of those that have the option."""
        # On a tier it is the same for all units, on the device it depends on their places.
        row = None if need.tier else layout[one.group][one.kind]
        known = (one.group, one.kind, one.option, one.into, need.tier, need.slot, row)
        if known in self._differences:
            return self._differences[known]
        units = self.problem.classes[one.group]
        if row is None:
            assert need.tier, "the device's bytes depend on places"
            options = self.problem.options[units[0]].kinds[one.kind]
            more = float(options[one.into].tier_bytes.get(need.tier, 0))
            more -= options[one.option].tier_bytes.get(need.tier, 0)
        else:
            has = [unit for unit, n in zip(units, decided(row), strict=True) if n == one.option]
            total = 0
            for unit in (has[0], has[len(has) // 2], has[-1]):
                options = self.problem.options[unit].kinds[one.kind]
                total += standing_bytes(options[one.into], need.slot)
                total -= standing_bytes(options[one.option], need.slot)
            more = total / 3
        self._differences[known] = more
        return more

    # Orders

    def reordered(self, layout: Layout) -> Layout:
        """The layout with the runs of each row in the order that the walk finds fastest."""
        value = self.walked(choice_of(self.problem, layout))
        for group, kind in product(range(len(layout)), (1, 0)):  # states first
            for other in orders(layout, group, kind):
                seconds = self.walked(choice_of(self.problem, other), value)
                if seconds < value * (1 - LESS):
                    layout, value = other, seconds
        return layout

    # Steps downhill

    def descended(self, layout: Layout, *, most: int, enough_s: float) -> Evaluation | None:
        """The plan of a layout after steps downhill, in up to `most` walks."""
        last = self.num_walks + most
        value = self.walked(choice_of(self.problem, layout))
        best = self.evaluator.evaluate(choice_of(self.problem, layout), paces=(self.pace,))
        simulated = self.evaluator.num_simulations + max(8, round(most * SIMULATED))

        def spent() -> bool:
            return (
                self.num_walks >= last
                or self.evaluator.num_simulations >= simulated
                or self.evaluator.stopped()
                or (best is not None and best.seconds <= enough_s)
            )

        while not spent():
            gap = max(best.seconds - self.prices.bound, 0.0) if best else inf
            open_to = self.prices.open_to(gap * PRICED)
            near = [(self.prices.of(one[0]), *one) for one in steps(layout, open_to)]
            self.order.shuffle(near)
            near.sort(key=lambda one: one[0])  # what the relaxation finds cheap first
            for price, other, exchange in near:
                if price > gap * PRICED:
                    continue
                choice = choice_of(self.problem, other)
                if not self.problem.fits(choice):  # make room for it
                    self.num_walks += REPAIR
                    if (repaired := self.repaired(other, exchange)) is None:
                        continue
                    other, choice = repaired, choice_of(self.problem, repaired)
                if spent():
                    break
                limit = best.seconds * (1 - LESS) if best else inf
                if self.walked(choice, value) >= value * (1 - LESS):
                    continue
                found = self.evaluator.evaluate(choice, paces=(self.pace,), faster_than_s=limit)
                if found and found.seconds < limit:
                    layout, best = other, found
                    value = self.walked(choice_of(self.problem, layout))
                    break
            else:
                break
        return best
