"""Numbers of units per option: an integer program that learns from the fluid model.

A step depends on the number of a class's units with an option, and little on which ones. So the
fluid model's value is a function of these numbers alone. It is convex: each known value's slope
bounds it everywhere (Benders 1962, Partitioning procedures for solving mixed-variables programming
problems). The program has the numbers, the budgets as far as numbers determine bytes, each lane's
seconds, and the slopes so far:

    numbers  = those with the fastest promised step: a bound on every plan
    slope    = the fluid model's at these numbers; once more with it

until the numbers' own value is close to the bound. One number for thirty units replaces thirty
decisions in a hundred slots each: the integer program is small.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import inf, isfinite
from typing import NamedTuple

import pulp

from protrain_plan.planning.model.decision_model import (
    COUNTED,
    EQ,
    KINDS,
    LE,
    Decided,
    LinearModel,
    Terms,
    count_name,
)
from protrain_plan.planning.model.fluid import Fluid
from protrain_plan.planning.model.options import Option
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.model.solver import LinearProgram, Solution, Stopped
from protrain_plan.simulation.rates import crossing
from protrain_runtime.contract.program.effects import NO_STAGING, StateOption, standing_bytes
from protrain_runtime.contract.program.memory import base_bytes
from protrain_runtime.contract.program.program import Channel
from protrain_runtime.contract.records.hardware import is_accelerator

SLACK = 1e-7
"""Slack of a slope for the solver's tolerance, in the model's plain compute time: for each
decision of each unit, since slopes are as uncertain."""

MAX_NODES = 400
"""Most search nodes per round."""

EXCESS = 50.0
"""Price of doubling the memory, in plain compute times: more than it is worth."""

PROHIBITIVE = 1e5
"""The price if solutions must not exceed memory."""

Numbers = Mapping[str, int]
"""Units per option, by the name of the fluid model's counting variable."""


NO_SHARE = 1e-6
"""A fraction of a unit that counts as zero."""


class Row(NamedTuple):
    """One kind of decisions of a class: options with numbers of units, in this order or spread."""

    runs: tuple[tuple[int, int], ...]
    spread: bool = False

    def moved(self, option: int, into: int, count: int, *, before: bool) -> "Row":
        """The row with `count` units moved between options, adjacent if the option is new."""
        runs: list[tuple[int, int]] = []
        known = any(one == into for one, _ in self.runs)
        for one, number in self.runs:
            if one == option:
                rest = [(one, number - count)] if number > count else []
                new = [] if known else [(into, count)]
                runs += [*new, *rest] if before else [*rest, *new]
            else:
                runs.append((one, number + count * (one == into)))
        return self._replace(runs=tuple(runs))


Layout = tuple[tuple[Row, Row], ...]
"""The rows of each class: activations, then states."""


Amounts = list[dict[int, tuple[float, float]]]
"""Units per option and their mean place, by class; activations and states alternate."""


class Caution(NamedTuple):
    """Leanings of a relaxation, which does not see that moves are whole, and in order.

    free   a part of the device
    price  seconds that a second of a lane's work costs, though compute may hide it
    """

    free: float
    price: float


class Prices(NamedTuple):
    """The relaxation's value in seconds, and reduced costs: by class, kind and option."""

    bound: float
    reduced_costs: Sequence[Sequence[Sequence[float]]]

    def of(self, layout: Layout) -> float:
        """The least seconds by which a layout's numbers of units raise it."""
        return sum(
            number * costs[option]
            for pair, of_class in zip(layout, self.reduced_costs, strict=True)
            for row, costs in zip(pair, of_class, strict=True)
            for option, number in row.runs
        )

    def open_to(self, within_s: float) -> list[list[list[int]]]:
        """The options that cost at most `within_s`, by class and kind."""
        return [
            [[n for n, cost in enumerate(costs) if cost <= within_s] for costs in of_class]
            for of_class in self.reduced_costs
        ]


class Counted(NamedTuple):
    """An option and its candidate units; `name` is the fluid model's variable."""

    name: str
    units: tuple[int, ...]
    option: Option
    choice: int  # the option's index in the units' options
    number: pulp.LpVariable


class CountProgram(LinearModel):
    """The integer program of one problem's numbers."""

    def __init__(self, problem: Problem, fluid: Fluid, stopped: Stopped | None = None) -> None:
        super().__init__(problem, "numbers")
        self.second_unit = fluid.second_unit
        self.step = self.variable("step")
        self.counted = list(self._counted(fluid))
        self._add_memory()
        self._add_lanes()
        for used in self.uses:
            used.cat = pulp.LpInteger
        self.minimise([(self.step, 1.0)])
        self.program = LinearProgram(self.pulp, stopped=stopped)

    def each(self) -> Iterable[Decided]:
        return ((one.option, one.number, one.units) for one in self.counted)

    def _counted(self, fluid: Fluid) -> Iterable[Counted]:
        """Every option of every class; single units get binaries."""
        for number, members in enumerate(self.problem.classes):
            alike = len(members) >= COUNTED
            for units in [members] if alike else [(unit,) for unit in members]:
                kinds = self.problem.options[units[0]].kinds
                for kind, options, binaries in zip(
                    KINDS, kinds, fluid.binaries[units[0]], strict=True
                ):
                    found: list[Counted] = []
                    for choice, (option, x) in enumerate(zip(options, binaries, strict=True)):
                        name = count_name(number, x) if alike else x.name
                        count = self.pulp.add_variable(name, 0, len(units), pulp.LpInteger)
                        found.append(Counted(name, units, option, choice, count))
                    # Every unit takes exactly one option.
                    terms: Terms = [(one.number, 1.0) for one in found]
                    self.row(f"one_{kind}_{units[0]}", terms, EQ, len(units))
                    yield from found

    def _add_memory(self) -> None:
        """Each tier, and in some slots the least bytes of any units with an option."""
        problem, used = self.problem, list[tuple[StateOption, pulp.LpVariable]]()
        for one in self.counted:
            option, number, most = one.option, one.number, len(one.units)
            if isinstance(option, StateOption) and option.staging != NO_STAGING:
                if most > 1:
                    number = self.used(f"used_{one.name}", [(number, most)])
                used.append((option, number))
        below = self.staging(used, on_device=False)
        self.add_tiers(below)
        staging: Terms = [] if is_accelerator(problem.implied.device) else below
        if any(option.decision.update_on_device for option, _ in used):
            staging = [*staging, *self.staging(used, on_device=True)]
        base = base_bytes(problem.profile, problem.settings) / self.byte_unit
        # Of one unit, the first slot is the last one of forward.
        slots = (0, problem.count - 1, problem.count, self.end - 1, self.end)
        for slot in dict.fromkeys(slots):
            terms = list(staging)
            for one in self.counted:
                kind = int(isinstance(one.option, StateOption))
                kinds = (self.problem.options[unit].kinds[kind] for unit in one.units)
                least = min(standing_bytes(of_unit[one.choice], slot) for of_unit in kinds)
                terms.append((one.number, least / self.byte_unit))
            self.row(f"memory_{slot}", terms, LE, 1.0 - base)

    def _add_lanes(self) -> None:
        """A step is at least a lane's work, or that of a link's two directions."""
        busy, hardware = self.busy(self.second_unit), self.problem.profile.hardware
        step = (self.step, -1.0)
        for lane, terms in busy.items():
            self.row(f"busy_{lane}".replace(" ", "_"), [*terms, step], LE)
        shared = {lane: list(terms) for lane, terms in busy.items()}
        for option, number, _ in self.each():
            for channel, taken in self.problem.lane_seconds.streamed(option):
                shared[channel].append((number, taken / self.second_unit))
        for tier in hardware.tiers:
            channels = Channel(tier.name, True), Channel(tier.name)
            for first, second in (channels, channels[::-1]):
                k = crossing(hardware, first, second)
                crossed = [(variable, k * taken) for variable, taken in shared[second]]
                self.row(f"link_{first}".replace(" ", "_"), [*shared[first], *crossed, step], LE)

    def learn(self, value: float, slopes: Mapping[str, float], at: Mapping[str, float]) -> None:
        """Add the bound on all numbers from the fluid model's value and slopes at `at`."""
        slack = SLACK * 2 * self.problem.count
        right = value - slack - sum(slope * at[name] for name, slope in slopes.items())
        terms = [(one.number, -slopes[one.name]) for one in self.counted if slopes[one.name]]
        self.program.add_row([(self.step, 1.0), *terms], at_least=right)

    def best(self, gap: float) -> tuple[float, dict[str, int]] | None:
        """A bound on every step, and the numbers with the fastest promise; None if infeasible."""
        answer = self.program.solve(integer=True, max_nodes=MAX_NODES, gap=gap)
        if not answer.values:
            return None
        return answer.bound, {one.name: round(answer.values[one.name]) for one in self.counted}


class _Shares:
    """The relaxation in which all units of a class have equal shares of options."""

    def __init__(self, problem: Problem, window: int, stopped: Stopped | None) -> None:
        self.fluid = Fluid(problem, window=window, alike=True)
        self._lp = LinearProgram(self.fluid.pulp, interior=True, stopped=stopped)
        self._rows = self.fluid.memory_rows
        self._lp.add_excess(self._rows, PROHIBITIVE)
        self._lp.allow_excess(allowed=True)
        self._work = defaultdict[pulp.LpVariable, float](float)  # of lanes, in seconds
        for terms in self.fluid.busy(self.fluid.second_unit).values():
            for variable, seconds in terms:
                self._work[variable] += seconds

    def solve(self, caution: Caution) -> Mapping[str, float]:
        """The values at this caution; empty if the device becomes too small."""
        for row in self._rows:
            self._lp.limit(row, 1.0 - caution.free)
        for variable, seconds in self._work.items():
            self._lp.cost(variable, caution.price * seconds)  # lanes' work has no cost of its own
        values = self._lp.solve().values
        return values if values and self._lp.excess <= NO_SHARE else {}


class Counting:
    """The fluid model and its numbers, in plain compute times; `bound` holds for every plan."""

    def __init__(
        self, problem: Problem, *, window: int = 1, stopped: Stopped | None = None
    ) -> None:
        self.problem, self.fluid = problem, Fluid(problem, window=window)
        self.bound = 0.0
        self._lp = LinearProgram(self.fluid.pulp, interior=True, stopped=stopped)
        self._numbers = CountProgram(problem, self.fluid, stopped)
        named = self.fluid.pulp.variablesDict()
        self._lp.add_excess(self.fluid.memory_rows, EXCESS)
        self._counts = {one.name: named[one.name] for one in self._numbers.counted}
        self._fixed: Numbers | None = None
        self._window, self._stopped = window, stopped

    @cached_property
    def _shares(self) -> _Shares:
        return _Shares(self.problem, self._window, self._stopped)

    @property
    def bound_seconds(self) -> float:
        return self.fluid.lower_bound_seconds(self.bound)

    def _solve(self, numbers: Numbers | None) -> Solution:
        if numbers is not self._fixed:
            for one in self._numbers.counted:
                low, high = 0, len(one.units)
                if numbers is not None and one.name in numbers:
                    low = high = numbers[one.name]
                self._lp.bound(self._counts[one.name], low, high)
        self._fixed = numbers
        # Numbers may exceed memory, at a high cost.
        self._lp.allow_excess(allowed=numbers is not None)
        return self._lp.solve()

    def relax(self) -> Prices:
        """The relaxation's bound, and the reduced costs of options; zero if it has none."""
        answer, fluid = self._solve(None), self.fluid
        solved = answer.status == "optimal"
        if solved:
            self.bound = answer.bound
            self._numbers.learn(answer.bound, self._lp.reduced_costs(self._counts), answer.values)
        duals = self._lp.reduced_costs(fluid.pulp.variablesDict()) if solved else {}
        costs: list[list[list[float]]] = []
        for number, units in enumerate(self.problem.classes):
            costs.append([])
            for of_kind in zip(*(fluid.binaries[unit] for unit in units), strict=True):
                least = [0.0] * len(of_kind[0])
                for option, ones in enumerate(zip(*of_kind, strict=True) if solved else ()):
                    # One more unit with the option counts one more.
                    counted = duals.get(count_name(number, ones[0]), 0.0)
                    least[option] = min(duals[x.name] for x in ones) + counted
                costs[number].append([cost * fluid.second_unit for cost in least])
        return Prices(self.bound_seconds, costs)

    def branch(self, *, max_nodes: int, gap: float, time_limit_s: float) -> dict[str, int] | None:
        """Integer numbers by a search tree over the fluid model."""
        self._solve(None)
        answer = self._lp.solve(
            integer=True, max_nodes=max_nodes, gap=gap, time_limit_s=time_limit_s
        )
        # At the smallest budget, where one plan is left, solvers may find none: infinity then.
        if isfinite(answer.bound):
            self.bound = max(self.bound, answer.bound)
        if not answer.values:
            return None
        return {name: round(answer.values[name]) for name in self._counts}

    def amounts(self, of: Caution | Numbers) -> Amounts | None:
        """The relaxation's amounts of options with caution, or with numbers of units per option.

        None if caution leaves the device too little.
        """
        if isinstance(of, Caution):
            fluid, values = self._shares.fluid, self._shares.solve(of)
        else:
            fluid, values = self.fluid, self._solve(of).values
        if not values:
            return None
        fractions, found = fluid.choice_values(values), Amounts()
        for units in self.problem.classes:
            for of_kind in zip(*(fractions[unit] for unit in units), strict=True):
                found.append({})
                for option, shares in enumerate(zip(*of_kind, strict=True)):
                    if (total := sum(shares)) > NO_SHARE:
                        place = sum(n * one for n, one in enumerate(shares)) / total
                        found[-1][option] = total, place
        return found

    def promising(self, gap: float) -> dict[str, int] | None:
        """The numbers with the fastest promised step so far; updates the bound."""
        if (found := self._numbers.best(gap)) is None:
            return None
        self.bound = max(self.bound, found[0])
        return found[1]

    def learn(self, numbers: Numbers) -> float:
        """The value of these numbers, added to the program; infinity if unknown."""
        answer = self._solve(numbers)
        if answer.status != "optimal":
            return inf
        self._numbers.learn(answer.bound, self._lp.reduced_costs(self._counts), numbers)
        return answer.bound
