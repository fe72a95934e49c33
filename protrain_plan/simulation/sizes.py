"""What the decisions about a unit imply: its costs, its chunk, the bytes of its moves."""

from collections.abc import Sequence
from typing import NamedTuple, assert_never

from protrain_plan.compiling import compile_plan
from protrain_plan.program import (
    ChunkSize,
    Move,
    Program,
    Settings,
    pieces_in,
)
from protrain_plan.records.hardware import TierName
from protrain_plan.records.plan import (
    Activations,
    Keep,
    Recompute,
    Swap,
    SwapInput,
    UnitPlan,
    Updates,
)
from protrain_plan.records.profile import FormCost, Profile, Unit


class ActivationBytes(NamedTuple):
    """A unit's costs under its decision; `swapped` of `cost.kept_bytes` leave the device."""

    cost: FormCost
    swapped: int
    tier: TierName | None


def activation_bytes(activations: Activations, unit: Unit) -> ActivationBytes:
    """The form that a decision implies and the bytes that it moves."""
    match activations:
        case Keep():
            return ActivationBytes(unit.cost("keep"), 0, None)
        case Recompute(form=form):
            return ActivationBytes(unit.cost(form), 0, None)
        case Swap(tier=tier):
            cost = unit.cost("keep")
            return ActivationBytes(cost, cost.swappable_bytes, tier)
        case SwapInput(tier=tier, form=form):
            cost = unit.cost(form)
            return ActivationBytes(cost, cost.swappable_bytes, tier)
        case _:
            assert_never(activations)


def chunk_size(unit: Unit) -> ChunkSize:
    """The chunk of a profile's unit, as programmes are compiled from."""
    return ChunkSize(
        parameter_bytes=unit.parameter_bytes,
        gradient_bytes=unit.gradient_bytes,
        state_bytes=unit.state_bytes,
        num_parameters=unit.num_parameters,
        used_by=unit.used_by,
        parameter_pieces=unit.parameter_pieces,
        gradient_pieces=unit.gradient_pieces,
    )


def compile_units(
    units: Sequence[UnitPlan],
    profile: Profile,
    *,
    piece_bytes: int,
    updates: Updates = "in backward",
    micro_batches: int = 1,
    updating: bool = True,
    num_devices: int = 1,
    num_replicas: int = 1,
    num_nodes: int = 1,
) -> Program:
    """The programme of `units` for the model and machine of `profile`."""
    settings = Settings(
        device=profile.hardware.device.kind,
        piece_bytes=piece_bytes,
        updates=updates,
        micro_batches=micro_batches,
        num_devices=num_devices,
        num_replicas=num_replicas,
        num_nodes=num_nodes,
    )
    chunks = [chunk_size(unit) for unit in profile.units]
    return compile_plan(units, chunks, settings, updating=updating)


def moved_bytes(move: Move, plans: Sequence[UnitPlan], profile: Profile) -> int:
    """What a move moves: its share of a unit's swapped activations where it does not say."""
    if move.bytes is not None:
        return move.bytes
    cost, swapped, _ = activation_bytes(plans[move.unit].activations, profile.units[move.unit])
    return share_bytes(cost.swap_pieces or (swapped,), move.share)


def share_bytes(sizes: Sequence[int], share: tuple[float, float]) -> int:
    """The bytes of the pieces in a share."""
    held = pieces_in(sizes, share)
    return sum(sizes[held.start : held.stop])
