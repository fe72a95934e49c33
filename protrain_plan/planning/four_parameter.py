"""ProTrain's own plan space as a baseline: four numbers for the whole model.

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

from collections.abc import Iterator
from typing import NamedTuple

from protrain_plan.planning.judging import Judge, Judged, least_seconds
from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.records.hardware import TierName
from protrain_plan.records.plan import (
    Activations,
    Buffer,
    Offload,
    Persistent,
    Placement,
    Recompute,
    StateTier,
    Swap,
)

GRID = 8
"""Intervals of the coarse grid in n_persist and in n_swap."""

STARTS = 2
"""Points of the coarse grid that are refined."""

MAX_TRIED = 8_000
"""Plans that the search may judge, times units: about a second for models of all sizes."""


class Numbers(NamedTuple):
    """The four parameters."""

    persist: int
    buffer: int
    swap: int
    checkpoint: int


def four_parameter(problem: Problem, judge: Judge) -> Judged | None:
    """The best plan of the paper's space with its best schedule; None where none fits.

    States live on one tier, the first with room for them; swapped activations on the nearest. On
    several devices, the first is the devices themselves, with a shard on each.
    """
    tiers = [tier.name for tier in problem.profile.hardware.tiers]
    for home in homes(problem) if tiers else ():
        if best := _Search(problem, judge, home, tiers[0]).best():
            return judge.judge_well(best.choice, rule=best.rule)
    return None


def homes(problem: Problem) -> list[StateTier]:
    """Where states that are not persistent can live, the nearest first."""
    shards: list[StateTier] = ["device"] if problem.settings.num_devices > 1 else []
    return [*shards, *(tier.name for tier in problem.profile.hardware.tiers)]


class _Search:
    """The search with states on one tier."""

    def __init__(
        self, problem: Problem, judge: Judge, tier: StateTier, swap_tier: TierName
    ) -> None:
        self.problem, self.judge = problem, judge
        self.offload, self.buffer = Offload(tier=tier), Buffer(tier=tier)
        self.swap = Swap(tier=swap_tier)
        units = problem.profile.units
        self.chunks = [index for index, unit in enumerate(units) if unit.used_by]
        self.blocks = [index for index, unit in enumerate(units) if len(unit.forms) > 1]
        self.options = [
            (
                {option.decision: k for k, option in enumerate(options.activations)},
                {option.decision: k for k, option in enumerate(options.states)},
            )
            for options in problem.options
        ]
        self.choices: dict[Numbers, Choice] = {}
        self.seconds: dict[Numbers, float] = {}
        self.tried = 0
        self.limit = MAX_TRIED // problem.count
        self.fastest: Judged | None = None

    def best(self) -> Judged | None:
        """The fastest plan found."""
        coarse = sorted(self._coarse(), key=lambda n: least_seconds(self.problem, self.choice(n)))
        for numbers in coarse:
            if self.tried > self.limit // 2:
                break
            self._try(numbers)
        for start in sorted(self.seconds, key=lambda n: self.seconds[n])[:STARTS]:
            self._refine(start)
        return self.fastest

    def choice(self, numbers: Numbers) -> Choice:
        """The decisions that the four numbers stand for."""
        if numbers not in self.choices:
            self.choices[numbers] = self._choice(numbers)
        return self.choices[numbers]

    def _choice(self, numbers: Numbers) -> Choice:
        placements: dict[int, Placement] = {}
        for position, index in enumerate(self.chunks):
            if position < numbers.persist:
                placements[index] = Persistent()
            elif position >= len(self.chunks) - numbers.buffer:
                placements[index] = self.buffer
            else:
                placements[index] = self.offload
        policies: dict[int, Activations] = {}
        changed = numbers.swap + numbers.checkpoint
        for position, index in enumerate(self.blocks[:changed]):
            # Swaps spread evenly, the first block among them.
            before = -(-position * numbers.swap // changed)
            until = -(-(position + 1) * numbers.swap // changed)
            policies[index] = self.swap if until > before else Recompute()
        choice = []
        for index, (activations, states) in enumerate(self.options):
            policy, placement = policies.get(index), placements.get(index)
            state = states.get(placement, 0) if placement else 0
            if placement == self.buffer and self.buffer not in states:
                # The last chunk stays between its slots in any case.
                state = states.get(self.offload, 0)
            choice.append((activations.get(policy, 0) if policy else 0, state))
        return tuple(choice)

    def _fits(self, numbers: Numbers) -> bool:
        choice = self.choice(numbers)
        within = max(self.problem.static_bytes(choice)) <= self.problem.device
        return within and self.problem.within_tiers(choice)

    def _coarse(self) -> Iterator[Numbers]:
        """For shares of chunks and blocks: fewest recomputed blocks, then most buffered chunks."""
        for persist in _shares(len(self.chunks)):
            for swap in _shares(len(self.blocks)):
                checkpoints = len(self.blocks) - swap
                if not self._fits(Numbers(persist, 0, swap, checkpoints)):
                    continue
                low, high = 0, checkpoints  # more recomputation holds less: bisect
                while low < high:
                    middle = (low + high) // 2
                    if self._fits(Numbers(persist, 0, swap, middle)):
                        high = middle
                    else:
                        low = middle + 1
                # Between the fewest and all: memory for activations against memory for states.
                for checkpoint in {high, (high + checkpoints + 1) // 2, checkpoints}:
                    yield Numbers(
                        persist, self._most_buffers(persist, swap, checkpoint), swap, checkpoint
                    )

    def _most_buffers(self, persist: int, swap: int, checkpoint: int) -> int:
        low, high = 0, len(self.chunks) - persist
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(Numbers(persist, middle, swap, checkpoint)):
                low = middle
            else:
                high = middle - 1
        return low

    def _refine(self, numbers: Numbers) -> None:
        """Steps of halving size in one number, or from one number to another."""
        step = max(1, len(self.blocks) // GRID // 2)
        while step and self.tried <= self.limit:
            faster = min(self._steps(numbers, step), key=lambda n: self._try(n), default=numbers)
            if self._try(faster) < self._try(numbers):
                numbers = faster
            else:
                step //= 2

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
        if numbers not in self.seconds:
            limit = self.fastest.seconds if self.fastest else float("inf")
            judged = self.judge.judge(self.choice(numbers), faster_than_s=limit)
            self.seconds[numbers] = judged.seconds if judged else float("inf")
            self.tried += judged is not None
            if judged and judged.seconds < limit:
                self.fastest = judged
        return self.seconds[numbers]


def _shares(count: int) -> list[int]:
    return sorted({round(count * n / GRID) for n in range(GRID + 1)})
