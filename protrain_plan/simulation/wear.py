"""Wear: what a plan writes to a node's disks, of which a solid-state one bears so much."""

from dataclasses import dataclass

from protrain_plan.simulation.group import profile_for
from protrain_runtime.contract.program.compiling import bind
from protrain_runtime.contract.program.effects import Implications
from protrain_runtime.contract.program.program import Channel, Program
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.units import format_bytes

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """Bytes that the devices of a node write to its disks, in a step and in a day of such steps.

    As much as is handed to the file system: its own blocks, and what the disk writes besides, are
    not known. Through the page cache not all of it may reach the disk. `life_days` are the days in
    which it is all that the drives bear, where that is known.
    """

    step_bytes: int
    day_bytes: int
    life_days: float | None = None

    def __str__(self) -> str:
        """`3.20 GiB a step, 41.5 TB a day at the predicted speed`: disks are sold by the TB."""
        day = f"{self.day_bytes / 1e12:.3g} TB"
        words = f"{format_bytes(self.step_bytes)} a step, {day} a day at the predicted speed"
        if self.life_days is None:
            return words
        return f"{words}; the drives last for {self.life_days:,.3g} days"


def wear(plan: Plan, profile: Profile) -> Wear | None:
    """The plan's writes; None where it writes nothing, such as frozen weights that are read.

    Those of pipelines are not counted.

    Of steps of which a part is clipped, the mean.
    """
    if not plan.prediction.peak_bytes.disk or plan.pipeline is not None:
        return None
    implied = Implications(profile_for(profile, plan), plan.settings)
    last = bind(plan.units, implied)
    written = float(_to_disk(last))
    if last.speculative:
        clipped = _to_disk(bind(plan.units, implied, clipped=True))
        written += plan.settings.clip_share * (clipped - written)
    if plan.settings.micro_batches > 1:
        before = _to_disk(bind(plan.units, implied, updating=False))
        written += (plan.settings.micro_batches - 1) * before
    step_bytes = round(written) * (plan.group.num_devices // plan.group.num_nodes)
    if not step_bytes:
        return None
    day_bytes = round(step_bytes * DAY_S / plan.prediction.step_seconds)
    endurance = profile.hardware.tier("disk").endurance_bytes
    return Wear(
        step_bytes=step_bytes,
        day_bytes=day_bytes,
        life_days=endurance / day_bytes if endurance else None,
    )


def wear_lines(plan: Plan, profile: Profile) -> list[str]:
    """Say it in a line, where the plan writes to a disk."""
    found = wear(plan, profile)
    return [] if found is None else [f"it writes to disk {found}"]


def _to_disk(program: Program) -> int:
    """Bytes that moves take to the disk."""
    return sum(move.bytes for move in program.moves if move.lane.channel == Channel("disk"))
