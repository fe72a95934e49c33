"""Bytes over the simulated time, tier by tier and kind by kind; each tier's sum is its peak's.

The device's are the upper bounds of `simulation.memory`, slot by slot. A slot begins when what had
to leave before it has left: from then on, what it fetches takes room.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from protrain_plan.program import gradient_home, pinned_bytes
from protrain_plan.records.hardware import TierName, is_accelerator
from protrain_plan.records.plan import Persistent, UnitPlan
from protrain_plan.records.profile import Unit
from protrain_plan.reporting.step import Step
from protrain_plan.simulation.sizes import moved_bytes
from protrain_plan.simulation.tiers import (
    activation_tier_bytes,
    chunk_tier_bytes,
    host_staging_bytes,
)

KINDS = (
    "context",
    "base",
    "staging",
    "states",
    "gradients",
    "activations",
    "buffers",
    "fetched ahead",
    "leaving",
    "reserved",
)
"""What bytes are counted as, from the bottom of a stack to its top. "context" is what the process
holds of the device besides tensors, with what its allocator does; "reserved" is room for
activations that are elsewhere now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMemory:
    """Bytes on one tier: those at `index` from `times_s[index]` on, until the next ones.

    `by_kind` has the kinds that are there at some time, in the order of KINDS.
    """

    name: str  # "device", "host", "disk"
    budget_bytes: int
    times_s: tuple[float, ...]
    by_kind: dict[str, tuple[int, ...]]

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.by_kind.values(), strict=True)))


def slot_begins_s(step: Step) -> tuple[float, ...]:
    """When each slot begins, that of the device's update too."""
    ends = [0.0, *(end for _, end in step.timeline.compute[:-1])]
    drains = [0.0] * len(ends)
    for stall in step.timeline.stalls:
        if stall.reason == "drain":
            drains[stall.slot] += stall.seconds
    return tuple(end + drain for end, drain in zip(ends, drains, strict=True))


def memory(step: Step) -> tuple[TierMemory, ...]:
    """The device, and the machine's tiers below it that hold anything."""
    below = (_tier(step, tier.name) for tier in step.profile.hardware.tiers)
    return (_device(step), *(tier for tier in below if tier.by_kind))


def _device(step: Step) -> TierMemory:
    besides = step.profile.hardware.device.besides_bytes
    slots = [
        {"context": besides} | {str(kind): size for kind, size in slot.device.by_kind.items()}
        for slot in step.report.slots
    ]
    return TierMemory(
        name="device",
        budget_bytes=step.plan.budgets.device,
        times_s=slot_begins_s(step),
        by_kind=_in_order({kind: tuple(s.get(kind, 0) for s in slots) for kind in KINDS}),
    )


def _tier(step: Step, tier: TierName) -> TierMemory:
    """A tier below: its room is reserved for the whole step, and swaps come and go in it."""
    plan, profile, settings = step.plan, step.profile, step.program.settings
    states = gradients = room = 0
    for decided, unit in zip(plan.units, profile.units, strict=True):
        chunk = chunk_tier_bytes(tier, decided.states, unit, settings)
        own = _gradient_bytes(step, tier, decided, unit)
        states, gradients = states + chunk - own, gradients + own
        room += activation_tier_bytes(tier, decided.activations, unit)
    staged = tier == "host" and is_accelerator(settings.device)
    staging = host_staging_bytes(plan.units, profile, settings) if staged else 0
    changes = sorted(_swaps(step, tier))
    times = tuple(dict.fromkeys([0.0, *(time for time, _ in changes)]))
    after = dict(zip((t for t, _ in changes), accumulate(size for _, size in changes), strict=True))
    swapped = tuple(after.get(time, 0) for time in times)
    return TierMemory(
        name=tier,
        budget_bytes=plan.budgets.host if tier == "host" else plan.budgets.disk,
        times_s=times,
        by_kind=_in_order(
            {
                "staging": (staging,) * len(times),
                "states": (states,) * len(times),
                "gradients": (gradients,) * len(times),
                "activations": swapped,
                "reserved": tuple(room - size for size in swapped),
            }
        ),
    )


def _gradient_bytes(step: Step, tier: TierName, decided: UnitPlan, unit: Unit) -> int:
    """The part of a chunk's bytes on a tier that is for its gradients."""
    settings, states = step.program.settings, decided.states
    if isinstance(states, Persistent) or not unit.used_by:
        return 0
    if gradient_home(states, settings) != tier:
        return 0
    pinned = tier == "host" and is_accelerator(settings.device)
    return pinned_bytes(unit.gradient_bytes) if pinned else unit.gradient_bytes


def _swaps(step: Step, tier: TierName) -> Iterator[tuple[float, int]]:
    """When swapped bytes begin to come to a tier, and when the device has them back."""
    spans = {span.name: span for span in step.timeline.spans}
    for number, move in enumerate(step.program.moves):
        if move.lane.tier != tier or move.kind not in ("swap out", "swap in"):
            continue
        span = spans[step.program.move_name(number)]
        size = moved_bytes(move, step.plan.units, step.profile)
        yield (span.start_s, size) if move.kind == "swap out" else (span.end_s, -size)


def _in_order(by_kind: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {kind: by_kind[kind] for kind in KINDS if any(by_kind.get(kind, ()))}
