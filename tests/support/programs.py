"""Programmes of decisions about a profile's units, for tests that have no plan."""

from collections.abc import Sequence

from protrain_runtime.contract.program.compiling import bind
from protrain_runtime.contract.program.effects import BoundProgram, Implications
from protrain_runtime.contract.records.plan import StepSettings, UnitPlan, Updates
from protrain_runtime.contract.records.profile import Profile


def compile_units(
    units: Sequence[UnitPlan],
    profile: Profile,
    *,
    piece_bytes: int,
    updates: Updates = "in backward",
    micro_batches: int = 1,
    updating: bool = True,
    overlap_steps: bool = False,
    clipped: bool = False,
) -> BoundProgram:
    """The programme of `units` for the model and machine of `profile`."""
    settings = StepSettings(
        piece_bytes=piece_bytes,
        updates=updates,
        micro_batches=micro_batches,
        overlap_steps=overlap_steps,
    )
    implied = Implications(profile, settings)
    return bind(units, implied, updating=updating, clipped=clipped)
