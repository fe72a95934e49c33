"""What a step took beside what its plan promises, slot by slot where the profile is at hand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protrain_plan.program.compiling import program_of
from protrain_plan.program.program import slot_words
from protrain_plan.records.plan import Plan, TierBytes
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.memory import device_bytes
from protrain_plan.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """More than was promised, and where: `the device's tensors in the backward of layers.3`."""

    where: str
    predicted_bytes: int
    measured_bytes: int

    def __str__(self) -> str:
        predicted, measured = format_bytes(self.predicted_bytes), format_bytes(self.measured_bytes)
        more = format_bytes(self.measured_bytes - self.predicted_bytes)
        return f"{self.where}: {predicted} predicted, {measured} measured, {more} more"


def slot_name(plan: Plan, slot: int) -> str:
    """A slot in words: `backward of layers.3`, or `the update on the device`."""
    the = "the " if slot == 2 * len(plan.units) else ""
    return the + slot_words(plan.units, slot)


def promised_bytes(plan: Plan, profile: Profile) -> tuple[int, ...]:
    """The most that the device's tensors take in every slot, and in the update after them."""
    return tuple(slot.total for slot in device_bytes(program_of(plan, profile)))


def exceeded(
    plan: Plan, measured: TierBytes, slots: Sequence[int], profile: Profile | None = None
) -> tuple[Excess, ...]:
    """Where a step took more than its plan promises, the largest excess first.

    `slots` are the measured bytes of the device's tensors in every slot and in the update, none or
    one where slots were not told apart. Without the profile their highest is compared, with the
    step's. What an allocator or a library took besides is compared where it was `measured`.
    """
    found = [*_of_slots(plan, measured, slots, profile), *_of_tiers(plan, measured)]
    return tuple(sorted(found, key=lambda one: one.predicted_bytes - one.measured_bytes))


def _of_slots(
    plan: Plan, measured: TierBytes, slots: Sequence[int], profile: Profile | None
) -> Iterator[Excess]:
    told_apart = len(slots) == 2 * len(plan.units) + 1
    if profile is not None and told_apart:
        promised = promised_bytes(plan, profile)
        for slot, (size, most) in enumerate(zip(slots, promised, strict=True)):
            if size > most:
                yield Excess(where=slot_name(plan, slot), predicted_bytes=most, measured_bytes=size)
    elif measured.device > plan.prediction.peak_bytes.device:
        where = f", {slot_name(plan, slots.index(max(slots)))}" if told_apart else ""
        yield Excess(
            where=f"the step's peak of tensors{where}",
            predicted_bytes=plan.prediction.peak_bytes.device,
            measured_bytes=measured.device,
        )


def _of_tiers(plan: Plan, measured: TierBytes) -> Iterator[Excess]:
    promised = plan.prediction.peak_bytes
    for where, most, size in (
        ("the process besides tensors", promised.context, measured.context),
        ("host memory", promised.host, measured.host),
        ("disk", promised.disk, measured.disk),
    ):
        if size > most:
            yield Excess(where=where, predicted_bytes=most, measured_bytes=size)
