"""The decisions open to each unit, and what each one costs: coefficients for model and schedule.

Every number comes from the functions that the simulator uses; nothing is modelled twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, assert_never

from protrain_plan.program import Settings, gradient_home, padded, residencies, shard_of
from protrain_plan.records.hardware import Hardware, TierName
from protrain_plan.records.plan import (
    Activations,
    Buffer,
    Keep,
    Offload,
    Persistent,
    Placement,
    Recompute,
    StateTier,
    Swap,
    SwapInput,
)
from protrain_plan.records.profile import Profile, Unit
from protrain_plan.simulation.memory import (
    activation_holdings,
    chunk_holdings,
    device_workspace,
    in_place_bytes,
)
from protrain_plan.simulation.sizes import activation_bytes, chunk_size
from protrain_plan.simulation.tiers import (
    Staging,
    activation_tier_bytes,
    chunk_staging,
    chunk_tier_bytes,
    num_updates,
)
from protrain_plan.simulation.timeline import update_seconds

NO_STAGING = Staging()


class Stay(NamedTuple):
    """Bytes that stand on the device from the start of slot `first` to the end of slot `last`."""

    first: int
    last: int
    bytes: int


class Fetch(NamedTuple):
    """Bytes that a slot needs from a tier; they cannot be fetched before slot `earliest`.

    `pieces` are the same bytes in parts that may come one slot apart.
    """

    tier: TierName
    slot: int
    earliest: int
    bytes: int
    pieces: tuple[int, ...]


class Gathered(NamedTuple):
    """Bytes that a slot needs of all ranks' shards; like a `Fetch`, over the network."""

    slot: int
    earliest: int
    bytes: int
    pieces: tuple[int, ...]


class Leaving(NamedTuple):
    """Bytes that a slot leaves to be moved to a tier.

    Its parts may leave one slot apart: `pieces` are the sizes by which a plan's fractions name
    them, and `held_pieces` the bytes of each that stand on the device until then.
    """

    tier: TierName
    slot: int
    bytes: int
    pieces: tuple[int, ...]
    held_pieces: tuple[int, ...]

    @property
    def held(self) -> int:
        return sum(self.held_pieces)

    @property
    def kept(self) -> int:
        """What stands in the device's update where the last slot leaves it: no slot waits."""
        return self.held


class Scattered(NamedTuple):
    """Gradients that are summed over the ranks after a slot; each rank keeps its shard.

    `held_pieces` are what stands on the device for each piece until it has left: all of it, and
    the shard of it where that waits for its own way. The device's update waits for sums: of what
    the last slot leaves, `kept` stands beside it, which are such shards.
    """

    slot: int
    bytes: int
    pieces: tuple[int, ...]
    held_pieces: tuple[int, ...]
    kept: int

    @property
    def held(self) -> int:
        return sum(self.held_pieces)


@dataclass(frozen=True, slots=True)
class ActivationOption:
    """One activation decision of one unit. `swap_in` and `swap_out` are there or absent together.

    Seconds are compute; the fetch serves the unit's backward, the way out starts after forward.
    """

    decision: Activations
    forward_s: float
    backward_s: float
    stays: tuple[Stay, ...]
    swap_in: Fetch | None
    swap_out: Leaving | None
    tier_bytes: dict[TierName, int]


@dataclass(frozen=True, slots=True)
class StateOption:
    """One placement of one chunk.

    fetches        parameters, one per stay on the device; of several devices: this rank's shard
    gathers        the same of all ranks' shards
    summed_bytes   gradients that are summed for all ranks, after the unit's backward slot
    scattered      gradients that are summed for the rank that has them
    gradients      what leaves after the chunk's last backward slot and is gone when it is moved
    in_place       what leaves only when the whole chain read -> update -> write is through
    read_bytes     optimizer states that come from disk for the update (after `update_slot`)
    write_bytes    what the update writes back to disk
    update_s       seconds of the optimizer on the host
    device_s       seconds of the optimizer on the device, after the last slot
    staging        what the host's step asks of the memory that it runs in
    device_workspace   bytes of the workspace of the device's step, and of norms
    tier_bytes     what it takes of the tiers below the device, staging apart
    """

    decision: Placement
    stays: tuple[Stay, ...]
    fetches: tuple[Fetch, ...] = ()
    gathers: tuple[Gathered, ...] = ()
    summed_bytes: int = 0
    scattered: Scattered | None = None
    gradients: Leaving | None = None
    in_place: Leaving | None = None
    update_slot: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    update_s: float = 0.0
    device_s: float = 0.0
    staging: Staging = NO_STAGING
    device_workspace: float = 0.0
    tier_bytes: dict[TierName, int] = field(default_factory=dict[TierName, int])

    @property
    def arriving(self) -> tuple[Fetch, ...] | tuple[Gathered, ...]:
        """What takes room on the device before its slot, if it comes ahead."""
        return self.gathers or self.fetches

    @property
    def leaving(self) -> Scattered | Leaving | None:
        """What stands on the device after its slot until it has left."""
        return self.scattered or self.gradients or self.in_place


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """Everything that a unit may do; without pins, keep and persistent come first."""

    unit: Unit
    activations: tuple[ActivationOption, ...]
    states: tuple[StateOption, ...]


def unit_options(profile: Profile, settings: Settings) -> tuple[UnitOptions, ...]:
    """The options of every unit, in execution order."""
    count = len(profile.units)
    return tuple(
        UnitOptions(
            unit=unit,
            activations=tuple(
                _activation_option(index, decision, unit, count)
                for decision in _activations(unit, profile.hardware)
            ),
            states=tuple(
                _state_option(index, decision, profile, settings)
                for decision in _placements(unit, profile.hardware, count, settings)
            ),
        )
        for index, unit in enumerate(profile.units)
    )


def _activations(unit: Unit, hardware: Hardware) -> Iterator[Activations]:
    for cost in unit.forms:
        if cost.form == "keep":
            yield Keep()
        else:
            yield Recompute(form=cost.form)
        for tier in hardware.tiers:
            if cost.swappable_bytes <= 0:
                continue
            if cost.form == "keep":
                yield Swap(tier=tier.name)
            else:
                yield SwapInput(tier=tier.name, form=cost.form)


def _placements(
    unit: Unit, hardware: Hardware, count: int, settings: Settings
) -> Iterator[Placement]:
    yield Persistent()
    if not unit.used_by or unit.stays:
        return
    names = [tier.name for tier in hardware.tiers]
    homes: list[StateTier] = ["device"] if settings.num_devices > 1 else []
    for name in (*homes, *names):
        offload, buffer = Offload(tier=name), Buffer(tier=name)
        if gradient_home(offload, settings) == "host" and "host" not in names:
            continue  # the optimizer of this chunk would run in host memory
        yield offload
        if residencies(offload, unit.used_by, count) != residencies(buffer, unit.used_by, count):
            yield buffer


def _activation_option(
    index: int, decision: Activations, unit: Unit, count: int
) -> ActivationOption:
    cost, swapped, tier = activation_bytes(decision, unit)
    pieces = cost.swap_pieces or (swapped,)
    served = 2 * count - 1 - index
    return ActivationOption(
        decision=decision,
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        stays=tuple(
            Stay(held.first, held.last, held.bytes)
            for held in activation_holdings(index, decision, unit, count)
        ),
        swap_in=Fetch(tier, served, index + 1, swapped, pieces) if tier else None,
        swap_out=Leaving(tier, index, swapped, pieces, pieces) if tier else None,
        tier_bytes={tier: activation_tier_bytes(tier, decision, unit)} if tier else {},
    )


def _state_option(
    index: int, decision: Placement, profile: Profile, settings: Settings
) -> StateOption:
    unit, count = profile.units[index], len(profile.units)
    optimizer = profile.optimizer
    stays = tuple(
        Stay(held.first, held.last, held.bytes)
        for held in chunk_holdings(index, decision, profile, settings)
        if held.first <= held.last
    )
    match decision:
        case Persistent():
            return StateOption(
                decision=decision,
                stays=stays,
                device_s=unit.num_parameters / optimizer.device_parameters_per_s,
                device_workspace=device_workspace(decision, unit, profile, settings),
                summed_bytes=unit.gradient_bytes if settings.num_devices > 1 else 0,
            )
        case Offload() | Buffer():
            pass
        case _:
            assert_never(decision)
    if settings.num_devices > 1:
        return _shard_option(index, decision, stays, profile, settings)
    assert decision.tier != "device", "a placement of several devices"
    fetches: list[Fetch] = []
    earliest = 0
    pieces = unit.parameter_pieces or (unit.parameter_bytes,)
    for stay in residencies(decision, unit.used_by, count):
        size = unit.parameter_bytes
        fetches.append(Fetch(decision.tier, stay.first, earliest, size, pieces))
        earliest = stay.last + 1
    tier_bytes: dict[TierName, int] = {}
    for tier in profile.hardware.tiers:
        if size := chunk_tier_bytes(tier.name, decision, unit, settings):
            tier_bytes[tier.name] = size
    plain = StateOption(
        decision=decision, stays=stays, fetches=tuple(fetches), tier_bytes=tier_bytes
    )
    if not unit.num_parameters:
        return plain
    slot, last_slot = 2 * count - 1 - index, 2 * count - 1
    home = gradient_home(decision, settings)
    gradients = in_place = None
    if home in ("host", "disk"):
        sizes = unit.gradient_pieces or (unit.gradient_bytes,)
        gradients = Leaving(home, slot, unit.gradient_bytes, sizes, sizes)
    read = write = 0
    if decision.tier == "disk":
        write = unit.state_bytes + unit.gradient_bytes
        read = unit.state_bytes + {"in place": 0, "disk": 2}.get(home, 1) * unit.gradient_bytes
    if home == "in place":
        parts = len(pieces)
        cuts = [sum(pieces[:n]) / unit.parameter_bytes for n in range(parts)] + [1.0]
        held = tuple(in_place_bytes(unit, share, settings) for share in pairwise(cuts))
        in_place = Leaving(decision.tier, slot, write, pieces, held)
    return replace(
        plain,
        gradients=gradients,
        in_place=in_place,
        update_slot=slot if settings.updates == "in backward" else last_slot,
        read_bytes=read,
        write_bytes=write,
        update_s=update_seconds(
            optimizer, unit.num_parameters, num_pieces=num_updates(decision, unit, settings)
        ),
        staging=chunk_staging(decision, unit, settings),
        device_workspace=device_workspace(decision, unit, profile, settings),
    )


def _shard_option(
    index: int,
    decision: Offload | Buffer,
    stays: tuple[Stay, ...],
    profile: Profile,
    settings: Settings,
) -> StateOption:
    """The placement of one rank's shard of a chunk, and what it takes to have the others'."""
    unit, count, optimizer = profile.units[index], len(profile.units), profile.optimizer
    chunk, tier = chunk_size(unit), decision.tier
    whole, own = padded(chunk, settings), shard_of(chunk, settings)
    pieces = whole.parameter_pieces or (whole.parameter_bytes,)
    own_pieces = own.parameter_pieces or (own.parameter_bytes,)
    fetches: list[Fetch] = []
    gathers: list[Gathered] = []
    earliest = 0
    for stay in residencies(decision, unit.used_by, count):
        if tier != "device":
            fetches.append(Fetch(tier, stay.first, earliest, own.parameter_bytes, own_pieces))
        gathers.append(Gathered(stay.first, earliest, whole.parameter_bytes, pieces))
        earliest = stay.last + 1
    below = profile.hardware.tiers
    sizes = {t.name: chunk_tier_bytes(t.name, decision, unit, settings) for t in below}
    plain = StateOption(
        decision=decision,
        stays=stays,
        fetches=tuple(fetches),
        gathers=tuple(gathers),
        tier_bytes={name: size for name, size in sizes.items() if size},
    )
    if not unit.num_parameters:
        return plain
    slot, last_slot = 2 * count - 1 - index, 2 * count - 1
    in_backward = settings.updates == "in backward"
    parts = whole.gradient_pieces or (whole.gradient_bytes,)
    own_parts = own.gradient_pieces or (own.gradient_bytes,)
    held, spilled, in_place = parts, None, None
    home = gradient_home(decision, settings)
    write = own.state_bytes + own.gradient_bytes if tier == "disk" else 0
    if home == "host":
        spilled = Leaving("host", slot, own.gradient_bytes, own_parts, own_parts)
        held = tuple(part + shard for part, shard in zip(parts, own_parts, strict=True))
    elif tier == "disk" and in_backward:
        # The shard of the gradients has left with the last piece that is updated.
        in_place = Leaving(tier, slot, write, (write,), (own.gradient_bytes,))
        held = (*parts[:-1], parts[-1] + own.gradient_bytes)
    shard = replace(
        plain,
        scattered=Scattered(slot, whole.gradient_bytes, parts, held, sum(held) - sum(parts)),
        gradients=spilled,
        in_place=in_place,
        device_workspace=device_workspace(decision, unit, profile, settings),
    )
    if tier == "device":
        seconds = own.num_parameters / optimizer.device_parameters_per_s
        return replace(shard, device_s=seconds)
    return replace(
        shard,
        update_slot=slot if in_backward else last_slot,
        read_bytes=write,  # states and parameters; gradients are there, or in host memory
        write_bytes=write,
        update_s=update_seconds(
            optimizer, own.num_parameters, num_pieces=num_updates(decision, unit, settings)
        ),
        staging=chunk_staging(decision, unit, settings),
    )
