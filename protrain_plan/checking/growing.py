"""What changed between two profiles of a model, unit by unit, in bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from protrain_plan.records.folding import fold, runs
from protrain_plan.records.profile import Profile, Unit
from protrain_plan.units import format_bytes

_MAX_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitGrowth:
    """How many bytes more (or, below zero, fewer) each unit of a run takes.

    states_bytes      parameters, gradients and optimizer states
    activation_bytes  what autograd keeps of it from forward to backward, when all of it is kept
    """

    units: str  # "model.layers.0", or a run: "model.layers.0-11"
    num_units: int
    states_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.num_units * (self.states_bytes + self.activation_bytes)

    def __str__(self) -> str:
        parts = [
            f"{format_bytes(abs(size))} {'more' if size > 0 else 'less'} {what}"
            for size, what in (
                (self.states_bytes, "states"),
                (self.activation_bytes, "activations"),
            )
            if size
        ]
        each = " each" if self.num_units > 1 else ""
        return f"{self.units}: {', '.join(parts)}{each}"


def growth(before: Profile, after: Profile) -> tuple[UnitGrowth, ...]:
    """The units whose bytes differ, in the order of `after`; those that went come last.

    A unit that is in one profile alone counts with all its bytes.
    """
    old = {unit.name: unit for unit in before.units}
    new = {unit.name: unit for unit in after.units}
    names = [*new, *(name for name in old if name not in new)]
    changes = [
        tuple(b - a for a, b in zip(_bytes(old.get(name)), _bytes(new.get(name)), strict=True))
        for name in names
    ]
    grown: list[UnitGrowth] = []
    for run in runs(names, changes):
        states, kept = changes[run[0]]
        if states or kept:
            first, last = names[run[0]], names[run[-1]]
            grown.append(
                UnitGrowth(
                    units=first if len(run) == 1 else fold(first, last),
                    num_units=len(run),
                    states_bytes=states,
                    activation_bytes=kept,
                )
            )
    return tuple(grown)


def in_words(grown: Sequence[UnitGrowth]) -> str:
    """The units that changed most, as an enumeration."""
    most = sorted(grown, key=lambda unit: -abs(unit.total_bytes))[:_MAX_SHOWN]
    more = f"; and {len(grown) - len(most)} more" if len(grown) > len(most) else ""
    return "; ".join(map(str, most)) + more


def _bytes(unit: Unit | None) -> tuple[int, int]:
    if unit is None:
        return 0, 0
    states = unit.parameter_bytes + unit.gradient_bytes + unit.state_bytes
    return states, unit.cost("keep").kept_bytes
