"""From layouts that a model proposes to a plan: steps downhill, by the walk and the simulator.

A neighbour is looked at by the walk (`pacing`), which takes a millisecond. What the walk finds
faster is simulated, and taken if it is. Cheap steps come first, with room made for them where they
lack it.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from math import ceil, inf, isinf
from typing import NamedTuple

from protrain_plan.planning.model.counting import Layout, Prices, Row
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.search.evaluation import Evaluation, Evaluator
from protrain_plan.planning.search.improving import changed
from protrain_plan.planning.search.layouts import (
    Exchange,
    Move,
    choice_of,
    decided,
    exchanges,
    reordered,
    steps,
)
from protrain_plan.planning.search.pacing import PLAIN, Pace
from protrain_runtime.contract.program.implications import (
    ActivationOption,
    StateOption,
    standing_bytes,
)
from protrain_runtime.contract.records.hardware import TierName

LESS = 1e-4
"""A step must be faster by this fraction."""

REPAIRS = 12
"""Steps that a layout may be away from one within the budgets."""

PRICED = 0.5
"""Options are tried that cost the relaxation at most this part of the plan's gap."""

CHANGED, IN_VAIN = 3, 12
"""Changes at once with which a search goes on, and its tries in vain."""

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


class Descent:
    """A search of one problem; `evaluator` keeps what is simulated, and counts it."""

    def __init__(self, problem: Problem, evaluator: Evaluator, prices: Prices, seed: int) -> None:
        self.problem, self.evaluator, self.prices = problem, evaluator, prices
        self.order = random.Random(seed)
        self.num_walks = 0.0
        self.pace: Pace = PLAIN
        self._differences: dict[object, float] = {}  # of options, in bytes at a place
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
                    if freed <= 0 or (kept and one.undoes(kept)):
                        continue
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
        more = self._differences.get(known)
        if more is None:
            more = self._differences[known] = self._difference(one, row, need)
        return more

    def _difference(self, one: Exchange, row: Row | None, need: "_Need") -> float:
        units = self.problem.classes[one.group]

        def options(place: int) -> Sequence[ActivationOption | StateOption]:
            of_unit = self.problem.options[units[place]]
            return of_unit.states if one.kind else of_unit.activations

        if row is None:
            assert need.tier, "the device's bytes depend on places"
            before, after = (options(0)[n].tier_bytes for n in (one.option, one.into))
            return after.get(need.tier, 0) - before.get(need.tier, 0)
        has = [place for place, option in enumerate(decided(row)) if option == one.option]
        more = 0
        for place in (has[0], has[len(has) // 2], has[-1]):
            more += standing_bytes(options(place)[one.into], need.slot)
            more -= standing_bytes(options(place)[one.option], need.slot)
        return more / 3

    # Steps downhill

    def descended(
        self, layout: Layout, best: Evaluation | None, *, most: int, enough_s: float
    ) -> tuple[Layout, Evaluation | None]:
        """The layout after steps downhill, in up to `most` walks, with its plan.

        `best` is the layout's own plan, if it is known.
        """
        last = self.num_walks + most
        value = self.walked(choice_of(self.problem, layout))
        best = best or self._faster(choice_of(self.problem, layout), self.pace, inf)
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
            choice = choice_of(self.problem, other)
            if self.walked(choice, value) >= value * (1 - LESS):
                return None
            return self._faster(choice, self.pace, best.seconds if best else inf)

        while not spent():
            gap = max(best.seconds - self.prices.bound, 0.0) if best else inf
            open_to = self.prices.open_to(gap * PRICED)
            near = [*steps(layout, open_to), *reordered(layout)]
            self.order.shuffle(near)
            # What the relaxation finds cheap first.
            prices = {move.layout: self.prices.of(move.layout) for move in near}
            near = [move for move in near if prices[move.layout] <= gap * PRICED]
            near.sort(key=lambda move: prices[move.layout])
            for other in self._neighbours(near):
                if spent():
                    break
                if found := faster(other):
                    layout, best = other, found
                    value = self.walked(choice_of(self.problem, layout))
                    break
            else:
                break
        return layout, best

    def refined(self, best: Evaluation, *, most: float, enough_s: float) -> Evaluation:
        """`best` after changes of single units and pairs of them, in up to `most` walks."""
        self.pace = best.pace
        last = self.num_walks + most

        def faster(choice: Choice, than: Evaluation) -> Evaluation | None:
            value = self.walked(than.choice)
            if self.walked(choice, value) >= value * (1 - LESS):
                return None
            return self._faster(choice, self.pace, than.seconds)

        return self._changed(best, faster, lambda: self.num_walks >= last, enough_s)

    def searched(self, best: Evaluation, *, most: int, enough_s: float) -> Evaluation:
        """Change single units under the pace of `best` by up to `most` simulations, without walks.

        Where no change makes it faster, from some changes further on.
        """
        evaluator = self.evaluator
        last = evaluator.num_simulations + most

        def spent() -> bool:
            return evaluator.num_simulations >= last

        def faster(choice: Choice, than: Evaluation) -> Evaluation | None:
            return self._faster(choice, best.pace, than.seconds)

        best = self._changed(best, faster, spent, enough_s)
        in_vain = 0
        while in_vain < IN_VAIN and not spent() and best.seconds > enough_s:
            if evaluator.stopped():
                break
            reached = best
            for _ in range(CHANGED):
                near = list(changed(self.problem, reached.choice, self.prices.open_to(inf)))
                if not near:  # pins may leave one option of each unit
                    return best
                found = evaluator.evaluate(self.order.choice(near), paces=(best.pace,))
                reached = found or reached
            reached = self._changed(reached, faster, spent, enough_s)
            in_vain = 0 if reached.seconds < best.seconds * (1 - LESS) else in_vain + 1
            best = min(best, reached, key=lambda one: one.seconds)
        return best

    def _faster(self, choice: Choice, pace: Pace, than_s: float) -> Evaluation | None:
        limit = than_s * (1 - LESS)
        found = self.evaluator.evaluate(choice, paces=(pace,), faster_than_s=limit)
        return found if found and found.seconds < limit else None

    def _changed(
        self,
        best: Evaluation,
        faster: Callable[[Choice, Evaluation], Evaluation | None],
        spent: Callable[[], bool],
        enough_s: float,
    ) -> Evaluation:
        """`best`, or what the first faster neighbour makes of it, again and again."""
        found: Evaluation | None = best
        while found:
            best, found = found, None
            open_to = self.prices.open_to(max(best.seconds - self.prices.bound, 0.0) * PRICED)
            near = list(changed(self.problem, best.choice, open_to))
            self.order.shuffle(near)  # so that limited effort reaches all parts of the model
            for choice in near:
                if spent() or self.evaluator.stopped() or best.seconds <= enough_s:
                    return best
                if found := faster(choice, best):
                    break
        return best

    def _neighbours(self, near: Sequence[Move]) -> Iterator[Layout]:
        """Layouts one step away, with room made for it where it lacks."""
        for move in near:
            if self.problem.fits(choice_of(self.problem, move.layout)):
                yield move.layout
            elif move.exchange:
                self.num_walks += REPAIR
                if repaired := self.repaired(move.layout, move.exchange):
                    yield repaired
