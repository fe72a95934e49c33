"""Ratios of two ways to train, from steps that took turns in several processes."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of steps that followed each other in one process, and what is simulated for them."""

    ours: tuple[float, ...]
    other: tuple[float, ...]
    same_losses: bool  # bit by bit, in every step
    simulated_ours: float | None = None
    simulated_other: float | None = None
    load: float = 0.0

    @property
    def ratio(self) -> float:
        """Ours by the other, in the median of pairs."""
        pairs = zip(self.ours, self.other, strict=True)
        return statistics.median(ours / other for ours, other in pairs)


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of one comparison.

    Where a process's memory lies makes one of two equal models some per cent faster for as long as
    it lives, so that what counts is the mean over processes, with twice its standard error.
    """

    rounds: tuple[Round, ...]

    @property
    def ratio(self) -> float:
        return statistics.fmean(one.ratio for one in self.rounds)

    @property
    def error(self) -> float:
        """Twice the standard error of the ratio; infinite for one round."""
        ratios = [one.ratio for one in self.rounds]
        return 2 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else inf

    @property
    def text(self) -> str:
        """The ratio with its error, where there is one."""
        return f"{self.ratio:.3f}" + (f" ± {self.error:.3f}" if self.error < inf else "")

    @property
    def same_losses(self) -> bool:
        return all(one.same_losses for one in self.rounds)

    @property
    def seconds(self) -> tuple[float, float]:
        """A step of ours and of the other, in the median of all."""
        ours = [seconds for one in self.rounds for seconds in one.ours]
        other = [seconds for one in self.rounds for seconds in one.other]
        return statistics.median(ours), statistics.median(other)

    @property
    def simulated_ratio(self) -> float | None:
        first = self.rounds[0]
        if first.simulated_ours is None or first.simulated_other is None:
            return None
        return first.simulated_ours / first.simulated_other


def read_rounds(found: Mapping[str, Any]) -> Rounds:
    """What `compare` returned, round by round, from JSON."""
    return Rounds(
        tuple(
            Round(**{**one, **{key: tuple(one[key]) for key in ("ours", "other")}})
            for one in found["rounds"]
        )
    )
