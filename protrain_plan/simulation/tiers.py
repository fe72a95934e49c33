"""What stands below the device, and the staging through which states pass to the optimizer."""

from collections.abc import Sequence
from typing import NamedTuple

from protrain_plan.program import (
    ARRIVING_GRADIENTS,
    PAGE_BYTES,
    PASSAGE_BYTES,
    PASSAGES,
    PIECE_ALIGNMENT,
    STAGING_PIECES,
    Settings,
    gradient_home,
    num_pieces,
    pinned_bytes,
    shard_of,
)
from protrain_plan.records.hardware import TierName, is_accelerator
from protrain_plan.records.plan import (
    Activations,
    Buffer,
    Offload,
    Persistent,
    Placement,
    UnitPlan,
)
from protrain_plan.records.profile import Profile, Unit
from protrain_plan.simulation.sizes import activation_bytes, chunk_size


class Staging(NamedTuple):
    """What one chunk's update asks of the memory in which the optimizer runs, in bytes.

    read_piece   of its largest piece that is read from disk
    width        that a piece may be larger per PIECE_ALIGNMENT elements, per element
    workspace    of the optimizer's step on its largest piece
    arriving     of gradients that arrive there to be added to those of earlier micro-batches
    """

    read_piece: int = 0
    width: int = 0
    workspace: float = 0.0
    arriving: int = 0


def num_updates(states: Offload | Buffer, unit: Unit, settings: Settings) -> int:
    """In how many pieces the host's optimizer works on a chunk."""
    chunk = shard_of(chunk_size(unit), settings)
    return num_pieces(chunk, settings.piece_bytes) if states.tier == "disk" else 1


def chunk_staging(states: Placement, unit: Unit, settings: Settings) -> Staging:
    """The staging of one chunk; nothing for what the device updates."""
    if isinstance(states, Persistent) or not unit.num_parameters:
        return Staging()
    if states.tier == "device":
        return Staging()
    chunk = shard_of(chunk_size(unit), settings)
    pieces = num_updates(states, unit, settings)
    largest = -(-chunk.num_parameters // pieces)
    gradient_width = -(-chunk.gradient_bytes // chunk.num_parameters)
    workspace = largest * gradient_width * 1.0
    home = gradient_home(states, settings)
    adds = settings.micro_batches > 1 and settings.num_devices == 1
    arriving = unit.gradient_bytes if home == "host" and adds else 0
    if states.tier != "disk":
        return Staging(workspace=workspace, arriving=arriving)
    width = -(-chunk.state_bytes // chunk.num_parameters)
    # Parameters come with the states, and gradients where they were on disk too.
    width += {"in place": 0, "device": 1, "host": 1, "disk": 2}[home] * gradient_width
    return Staging(largest * width, width, workspace, arriving)


def staging_bytes(plans: Sequence[UnitPlan], profile: Profile, settings: Settings) -> int:
    """Bytes of the buffers that optimizer states pass through, with the step's workspace."""
    chunks = [
        chunk_staging(plan.states, unit, settings)
        for plan, unit in zip(plans, profile.units, strict=True)
    ]
    return total_staging(chunks, profile)


def total_staging(chunks: Sequence[Staging], profile: Profile) -> int:
    """The same of chunks' own needs.

    The largest piece and the widest states count; a piece may be cut up to PIECE_ALIGNMENT
    elements later than its even share.
    """
    workspace = max(chunk.workspace for chunk in chunks) * profile.optimizer.workspace_fraction
    pieces = max(chunk.read_piece for chunk in chunks) + PIECE_ALIGNMENT * max(
        chunk.width for chunk in chunks
    )
    arriving = ARRIVING_GRADIENTS * max(chunk.arriving for chunk in chunks)
    return round(workspace) + STAGING_PIECES * pieces + arriving


STATE_REGIONS = 3
"""Optimizer states that a chunk keeps apart, at most: float32 parameters and AdamW's two."""


def tier_bytes(
    tier: TierName, plans: Sequence[UnitPlan], profile: Profile, settings: Settings
) -> int:
    """The most that a tier below the device holds: states, and swapped activations."""
    total = sum(
        activation_tier_bytes(tier, plan.activations, unit)
        + chunk_tier_bytes(tier, plan.states, unit, settings)
        for plan, unit in zip(plans, profile.units, strict=True)
    )
    if tier == "host" and is_accelerator(settings.device):
        total += host_staging_bytes(plans, profile, settings)
    return total


def host_staging_bytes(plans: Sequence[UnitPlan], profile: Profile, settings: Settings) -> int:
    """What passes through host memory beside an accelerator: to the optimizer, and to files."""
    on_disk = tier_bytes("disk", plans, profile, settings) > 0
    passing = passage_bytes(on_disk=on_disk, settings=settings)
    return staging_bytes(plans, profile, settings) + passing


def passage_bytes(*, on_disk: bool, settings: Settings) -> int:
    """Host memory through which an accelerator's bytes pass to files and back."""
    return PASSAGES * PASSAGE_BYTES if on_disk and is_accelerator(settings.device) else 0


def activation_tier_bytes(tier: TierName, activations: Activations, unit: Unit) -> int:
    """What a unit's swapped activations take of `tier`."""
    _, swapped, swap_tier = activation_bytes(activations, unit)
    return swapped if swap_tier == tier else 0


def chunk_tier_bytes(tier: TierName, states: Placement, unit: Unit, settings: Settings) -> int:
    """What an offloaded chunk takes of `tier`: its states, and gradients on their way."""
    if isinstance(states, Persistent) or not unit.used_by:
        return 0
    chunk = shard_of(chunk_size(unit), settings)
    regions: list[int] = []
    if states.tier == tier:
        regions += [chunk.parameter_bytes, chunk.state_bytes]
    if gradient_home(states, settings) == tier:
        regions.append(chunk.gradient_bytes)
    if tier == "host" and is_accelerator(settings.device):
        # Each region is pinned by itself, each of up to STATE_REGIONS optimizer states too.
        parts = STATE_REGIONS if states.tier == tier else 0
        return sum(pinned_bytes(size) for size in regions) + parts * PAGE_BYTES
    return sum(regions)
