"""Plans that a person would write down, each with its best schedule by the planner's simulator.

[Note: four parameters] is ProTrain's own plan space: four numbers for the whole model,
(n_persist, n_buffer, n_swap, n_checkpoint), chunks and blocks in execution order (ProTrain,
arXiv 2406.08334, sections 3 and 4):

- the first n_persist chunks are persistent, the last n_buffer of the others are buffered (used last
  in forward and first in backward), the rest is offloaded
- of the first n_swap + n_checkpoint blocks n_swap are swapped, spread evenly between the
  recomputed ones; later blocks keep everything

The paper enumerates with its closed cost model. Here plans are judged by the simulator, so the
enumeration is coarse to fine: a grid over n_persist and n_swap with the least n_checkpoint and the
largest n_buffer that fit, then steps of halving size in all four numbers from the best of these.
"""

from bisect import bisect_left
from collections.abc import Iterator
from math import inf
from typing import Literal, NamedTuple, get_args

from protrain_plan.planning.model.options import Decision, homes
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.search.choices import uniform
from protrain_plan.planning.search.evaluation import Evaluation, Evaluator
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
    StateTier,
)

Baseline = Literal["four-parameter", "recompute-all", "offload-all"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)

GRID = 8
"""Intervals of the coarse grid in n_persist and in n_swap."""

STARTS = 2
"""Points of the coarse grid that are refined."""

MAX_TRIED = 8_000
"""Plans that the search may judge, times units: about a second for models of all sizes."""


def baseline(name: Baseline, problem: Problem, evaluator: Evaluator) -> Evaluation | None:
    """The best variant of a baseline; None where no variant meets the budgets.

    recompute-all   every block recomputed; states all persistent, or all offloaded
    offload-all     states offloaded, activations (or the blocks' inputs) swapped
    four-parameter  see [Note: four parameters]

    States are offloaded to the first tier with room for them; activations swap to the nearest. On
    several devices, shards stay on these where there is room.
    """
    tiers = list(problem.tiers)
    if name == "four-parameter":
        for home in homes(problem.implied) if tiers else ():
            if best := _FourParameterSearch(problem, evaluator, home, tiers[0]).best():
                return evaluator.best_schedule(best.choice, pace=best.pace)
        return None
    if name == "offload-all" and not tiers:
        return None
    fastest: list[Evaluation] = []
    offloads: list[Placement] = [Placement(tier=home) for home in homes(problem.implied)]
    persistent: list[Placement] = [PERSISTENT] if name == "recompute-all" else []
    for placements in (persistent, offloads):
        for placement in placements:  # the first that any policy fits with
            choices = [uniform(problem, policy, placement) for policy in _policies(name, problem)]
            if not any(problem.fits(choice) for choice in choices):
                continue
            found = (evaluator.best_schedule(choice) for choice in choices)
            fastest += [one for one in found if one]
            break
    return min(fastest, key=lambda one: one.seconds, default=None)


def _policies(name: Baseline, problem: Problem) -> list[list[Activations]]:
    """Decisions about activations in each variant of a baseline."""
    tiers = list(problem.tiers)
    if name != "offload-all" or not tiers:
        return [[RECOMPUTE]]
    return [[Activations(tier=tiers[0]), KEEP], [Activations(form="full", tier=tiers[0]), KEEP]]


def keeping(problem: Problem, evaluator: Evaluator) -> Evaluation | None:
    """The plan that keeps everything on the device; None where it does not fit, or is not open."""
    choice = uniform(problem, [KEEP], PERSISTENT)
    activations, states = problem.chosen(choice)
    kept = all(option.decision == KEEP for option in activations)
    if not kept or not all(option.decision.is_persistent for option in states):
        return None
    return evaluator.evaluate(choice)


def staying(problem: Problem, evaluator: Evaluator) -> Evaluation | None:
    """The faster of two plans that move nothing; None where keeping everything does not fit.

    One keeps everything. In the other each unit's activations have the form that computes the
    least: of large activations that a processor has to write to memory, that may be recomputation.
    """
    kept = keeping(problem, evaluator)
    if kept is None:
        return None
    fastest: list[Decision] = []
    for options, (_, states) in zip(problem.options, kept.choice, strict=True):
        stay = [
            (one.cost.compute_s, n) for n, one in enumerate(options.activations) if not one.swapped
        ]
        fastest.append((min(stay)[1], states))
    other = evaluator.evaluate(tuple(fastest))
    return other if other and other.seconds < kept.seconds else kept


def leanest_variant(name: Baseline, problem: Problem) -> Choice:
    """The variant of a baseline with the lowest peak on the device."""
    placements: list[Placement] = [Placement(tier=home) for home in homes(problem.implied)]
    variants = [
        uniform(problem, policy, placement)
        for policy in _policies(name, problem)
        for placement in placements or [PERSISTENT]
    ]
    return min(variants, key=lambda choice: max(problem.static_bytes(choice)))


class Numbers(NamedTuple):
    """The four parameters."""

    persist: int
    buffer: int
    swap: int
    checkpoint: int


class _FourParameterSearch:
    """The search with states on one tier, and swapped activations on another."""

    def __init__(
        self, problem: Problem, evaluator: Evaluator, tier: StateTier, swap_tier: TierName
    ) -> None:
        self.problem, self.evaluator = problem, evaluator
        self.offload, self.buffer = Placement(tier=tier), Placement(tier=tier, keep_gathered=True)
        self.swap = Activations(tier=swap_tier)
        units = problem.profile.units
        self.chunks = [index for index, unit in enumerate(units) if unit.used_by]
        self.blocks = [index for index, unit in enumerate(units) if len(unit.forms) > 1]
        self.choices: dict[Numbers, Choice] = {}
        self.seconds: dict[Numbers, float] = {}
        self.tried = 0
        self.limit = MAX_TRIED // problem.count
        self.fastest: Evaluation | None = None

    def best(self) -> Evaluation | None:
        coarse = sorted(self._coarse(), key=lambda n: self.problem.least_seconds(self.choice(n)))
        for numbers in coarse:
            if self.tried > self.limit // 2 or self.evaluator.stopped():
                break
            self._try(numbers)
        for numbers in sorted(self.seconds, key=lambda n: self.seconds[n])[:STARTS]:
            # Steps of halving size in one number, or from one number to another.
            step = max(1, len(self.blocks) // GRID // 2)
            while step and self.tried <= self.limit and not self.evaluator.stopped():
                steps = self._steps(numbers, step)
                faster = min(steps, key=self._try, default=numbers)
                if self._try(faster) < self._try(numbers):
                    numbers = faster
                else:
                    step //= 2
        return self.fastest

    def choice(self, numbers: Numbers) -> Choice:
        """The decisions that the four numbers stand for."""
        if numbers in self.choices:
            return self.choices[numbers]
        placements = dict.fromkeys(self.chunks, self.offload)
        placements |= dict.fromkeys(self.chunks[len(self.chunks) - numbers.buffer :], self.buffer)
        placements |= dict.fromkeys(self.chunks[: numbers.persist], PERSISTENT)
        changed = numbers.swap + numbers.checkpoint
        policies = dict.fromkeys(self.blocks[:changed], RECOMPUTE)
        for number in range(numbers.swap):  # spread evenly, the first block among them
            policies[self.blocks[number * changed // numbers.swap]] = self.swap
        choice = []
        for index, options in enumerate(self.problem.options):
            activations, states = options.numbers
            placement = placements.get(index, PERSISTENT)
            if placement == self.buffer and self.buffer not in states:
                placement = self.offload  # the last chunk stays between its slots in any case
            policy = policies.get(index, KEEP)
            choice.append((activations.get(policy, 0), states.get(placement, 0)))
        self.choices[numbers] = tuple(choice)
        return self.choices[numbers]

    def _fits(self, numbers: Numbers) -> bool:
        return self.problem.fits(self.choice(numbers))

    def _coarse(self) -> Iterator[Numbers]:
        """For shares of chunks and blocks: fewest recomputed blocks, then most buffered chunks."""

        def shares(count: int) -> list[int]:
            return sorted({round(count * n / GRID) for n in range(GRID + 1)})

        for persist in shares(len(self.chunks)):
            for swap in shares(len(self.blocks)):
                checkpoints = len(self.blocks) - swap
                if not self._fits(Numbers(persist, 0, swap, checkpoints)):
                    continue
                # More recomputation holds less, and more buffers hold more.
                tried = [Numbers(persist, 0, swap, count) for count in range(checkpoints)]
                fewest = bisect_left(tried, 1, key=self._fits)
                # Between the fewest and all: memory for activations against memory for states.
                for checkpoint in {fewest, (fewest + checkpoints + 1) // 2, checkpoints}:
                    buffers = range(1, len(self.chunks) - persist + 1)
                    tried = [Numbers(persist, count, swap, checkpoint) for count in buffers]
                    most = bisect_left(tried, 1, key=lambda numbers: not self._fits(numbers))
                    yield Numbers(persist, most, swap, checkpoint)

    def _steps(self, numbers: Numbers, step: int) -> Iterator[Numbers]:
        for add in range(4):
            for take in range(4):
                for up, down in ((step, 0), (0, step), (step, step)):
                    values = list(numbers)
                    values[add] += up
                    values[take] -= down
                    new = Numbers(*values)
                    if new == numbers or min(new) < 0:
                        continue
                    if new.persist + new.buffer > len(self.chunks):
                        continue
                    if new.swap + new.checkpoint <= len(self.blocks):
                        yield new

    def _try(self, numbers: Numbers) -> float:
        """Seconds of the plan; infinite where it does not fit or cannot be the fastest."""
        if numbers in self.seconds:
            return self.seconds[numbers]
        if self.evaluator.stopped():
            return inf
        limit = self.fastest.seconds if self.fastest else inf
        found = self.evaluator.evaluate(self.choice(numbers), faster_than_s=limit)
        if found and found.seconds < limit:
            self.fastest = found
        self.tried += bool(found)
        self.seconds[numbers] = found.seconds if found else inf
        return self.seconds[numbers]
