"""Implications of a decision: bytes on the device by slot, moves, and updates.

Their only source: the compiler makes moves of them, the memory count sums live ranges, the
planner's models take their coefficients. A placement's moves follow from the chunk's sizes alone
(`placed`), as in the runtime; seconds and live ranges need a profile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Any, Literal, NamedTuple, get_args

from protrain_runtime.contract.program.program import (
    ARRIVING_GRADIENTS,
    LARGE_BEGIN_BYTES,
    LONGEST_SPAN,
    PAGE_BYTES,
    PASSING_BYTES,
    STAGING_PIECES,
    UPDATE_ON_DEVICE,
    ChunkSize,
    GradientHome,
    Lane,
    Program,
    common_pieces,
    disk_pieces,
    file_bytes,
    gradient_home,
    padded,
    pinned_bytes,
    reads_gradients,
    residencies,
    shard_of,
)
from protrain_runtime.contract.records.folding import unfolded
from protrain_runtime.contract.records.hardware import DeviceKind, TierName, is_accelerator
from protrain_runtime.contract.records.plan import (
    Activations,
    Placement,
    StateTier,
    StepSettings,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import FormCost, OptimizerCost, Profile

PINNED: frozenset[StateTier] = frozenset({"host"})
"""Tiers that an accelerator copies from, in regions of whole pages."""

SCALARS_BYTES = 12
"""The most scalars of a parameter that an optimizer of PyTorch keeps: ASGD's step, eta and mu."""

STATE_REGIONS = 3
"""Most separate optimizer states of a chunk: float32 parameters and AdamW's two."""

LiveRangeKind = Literal[
    "base", "states", "activations", "gradients", "buffers", "fetched ahead", "leaving", "staging"
]


class LiveRange(NamedTuple):
    """Bytes on the device from the start of slot `first` to the end of slot `last`."""

    kind: LiveRangeKind
    unit: int
    first: int
    last: int
    bytes: int


class Fetch(NamedTuple):
    """Bytes that a slot needs, fetched no earlier than slot `earliest`.

    From a tier below the device, or on `device` from all ranks' shards there. `pieces` are parts of
    these bytes that may arrive one slot apart.
    """

    tier: StateTier
    slot: int
    earliest: int
    bytes: int
    pieces: tuple[int, ...]


class Eviction(NamedTuple):
    """Bytes that a slot leaves for a tier; None: gradients to be reduced.

    Parts may leave one slot apart: `pieces` are the sizes for a plan's fractions, and `held_pieces`
    the bytes of each on the device until then. Of a sum each rank keeps its shard, which also stays
    there while it waits for its own move.
    """

    tier: TierName | None
    slot: int
    bytes: int
    pieces: tuple[int, ...]
    held_pieces: tuple[int, ...]

    @property
    def held(self) -> int:
        return sum(self.held_pieces)

    @property
    def kept(self) -> int:
        """Bytes of the last slot's eviction in the device's update, which waits only for sums."""
        return self.held - (0 if self.tier else sum(self.pieces))


class Staging(NamedTuple):
    """Bytes that one chunk's update needs of the memory in which the optimizer runs.

    read_piece   of its largest piece that is read from disk
    width        per element by which a piece is larger than its even share
    workspace    gradients of the most elements that the optimizer steps on at a time
    arriving     of gradients that arrive there to be added to those of earlier micro-batches
    """

    read_piece: int = 0
    width: int = 0
    workspace: float = 0.0
    arriving: int = 0


NO_STAGING = Staging()


@dataclass(frozen=True, slots=True)
class ActivationOption:
    """One activation decision of one unit. `swap_in` and `swap_out` are both set or both None.

    Seconds are compute; the fetch serves the unit's backward, the eviction starts after forward.
    """

    decision: Activations
    cost: FormCost
    swapped: int  # of `cost.kept_bytes`: evicted
    live_ranges: tuple[LiveRange, ...]
    swap_in: Fetch | None = None
    swap_out: Eviction | None = None
    tier_bytes: dict[TierName, int] = field(default_factory=dict[TierName, int])


@dataclass(frozen=True, slots=True)
class StateOption:
    """One placement of one chunk.

    whole, own     the chunk as it stands on the device while it is used, and this rank's part
    home           where gradients wait for the update; None: with persistent states
    arriving       the parameters and the room that they take, one per stay on the device
    fetches        those that come from the tier; of several devices: this rank's shard of them
    from_disk      those of a chunk in host memory that come from the disk
    gathers        those that come from all ranks' shards
    common_bytes   of each fetch: frozen parameters, whole, from the copy that a node's ranks share
    summed_bytes   gradients that are summed for all ranks, after the unit's backward slot
    scattered      gradients that are summed for the rank that has them
    gradients      what leaves after the chunk's last backward slot and is gone when it is moved
    in_place       what leaves only when the whole chain read -> update -> write is through
    num_updates    pieces in which an optimizer beside compute works on it; 0: none does
    read_bytes     optimizer states that come from the tier for the update (after `update_slot`)
    write_bytes    what the update writes back to the tier
    staging        what that step asks of the memory that it runs in
    step_slot      the slot that ends with the device's step on it; 2U: the update after the last
    tier_bytes     what it takes of the tiers below the device, staging apart

    and, with a profile's costs:

    live_ranges    what stands on the device
    num_stepped    parameters that the device's optimizer steps
    device_s       seconds of that
    update_s       seconds of the optimizer beside compute, on the host or on the device
    added_s        seconds of the host for gradients that it adds to those of other micro-batches
    device_workspace   bytes of the workspace of the device's update, and of norms
    """

    decision: Placement
    whole: ChunkSize
    own: ChunkSize
    home: GradientHome | None = None
    arriving: tuple[Fetch, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    from_disk: tuple[Fetch, ...] = ()
    gathers: tuple[Fetch, ...] = ()
    common_bytes: int = 0
    summed_bytes: int = 0
    scattered: Eviction | None = None
    gradients: Eviction | None = None
    in_place: Eviction | None = None
    update_slot: int = 0
    num_updates: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    staging: Staging = NO_STAGING
    step_slot: int = 0
    tier_bytes: dict[TierName, int] = field(default_factory=dict[TierName, int])
    live_ranges: tuple[LiveRange, ...] = ()
    num_stepped: int = 0
    device_s: float = 0.0
    update_s: float = 0.0
    added_s: float = 0.0
    device_workspace: float = 0.0

    @property
    def tier(self) -> StateTier:
        """The tier of the states."""
        return self.decision.tier or "device"

    @property
    def parameters_read(self) -> int:
        """Gradient-sized buffers read for an update: parameters, and gradients from the tier."""
        gradients = self.home == "disk" or (self.home == "host" and self.decision.update_on_device)
        return (self.home not in (None, "in place")) + gradients

    @property
    def state_lanes(self) -> tuple[Lane, Lane, Lane] | None:
        """The lanes that read, update and write its states; None if they do not move."""
        if not self.write_bytes:
            return None
        tier = self.tier
        update = UPDATE_ON_DEVICE if self.decision.update_on_device else Lane("update", tier)
        return Lane("read", tier), update, Lane("write", tier)

    def fetched(self, stay: int) -> tuple[Fetch, ...]:
        """Bytes fetched for one stay: from its own tier, and from disk."""
        return self.fetches[stay : stay + 1] + self.from_disk[stay : stay + 1]

    @property
    def leaving(self) -> Eviction | None:
        """Bytes on the device after their slot until evicted."""
        return self.scattered or self.gradients or self.in_place


def standing_bytes(option: ActivationOption | StateOption, slot: int) -> int:
    """Bytes of an option on the device in a slot."""
    return sum(held.bytes for held in option.live_ranges if held.first <= slot <= held.last)


class Implications:
    """Options of a profile's units with their implications, each computed once.

    If the profile has only opted-in forms, `recorded` is the one with all forms: a plan's bytes are
    the same by either.
    """

    def __init__(
        self, profile: Profile, settings: StepSettings, *, recorded: Profile | None = None
    ) -> None:
        self.profile, self.settings, self.recorded = profile, settings, recorded or profile
        self.device = profile.hardware.device.kind
        names = [part.name for part in fields(ChunkSize)]  # fields that units share
        self.chunks = [
            ChunkSize(**{name: getattr(unit, name) for name in names}) for unit in profile.units
        ]
        # The simulator's results for moves and lanes like these.
        self.known_seconds: dict[object, float] = {}
        self.known_rates: dict[object, tuple[dict[int, Any], dict[int, Any]]] = {}
        self._activations: dict[tuple[int, Activations], ActivationOption] = {}
        self._states: dict[tuple[int, Placement], StateOption] = {}

    @cached_property
    def tensor_counts(self) -> list[int]:
        """The number of each unit's parameters, by the names in the profile's `tensors`."""
        units = self.profile.units
        owners = {unit.name: number for number, unit in enumerate(units)}
        owners |= {name: number for number, unit in enumerate(units) for name in unit.parameters}
        counts = [0] * len(units)
        for name, content in unfolded(self.profile.tensors).items():
            if content.endswith((" trainable", " frozen")):
                parents = accumulate(name.split("."), "{}.{}".format)
                found = [owners[parent] for parent in parents if parent in owners]
                for number in found[-1:]:  # the innermost
                    counts[number] += 1
        return counts

    def activations(self, index: int, decision: Activations) -> ActivationOption:
        """The option for unit `index`'s activations; KeyError without costs."""
        if known := self._activations.get((index, decision)):
            return known
        cost = self.profile.units[index].cost(decision.form)
        tier = decision.tier
        swapped = cost.swappable_bytes if tier else 0
        served = 2 * len(self.chunks) - 1 - index
        # The unit's own slots exceed the levels around them, and its level lies between; all its
        # kept bytes are live in its backward.
        level, backward = cost.kept_bytes - swapped, cost.backward_peak_bytes + swapped
        live_ranges = [
            LiveRange("activations", index, index, index, cost.forward_peak_bytes),
            LiveRange("activations", index, index + 1, served, level),
            LiveRange("activations", index, served, served, backward),
        ]
        if (held := self.settings.held) > 1:  # other micro-batches', in every slot
            others = (held - 1) * level
            live_ranges.append(LiveRange("activations", index, 0, 2 * len(self.chunks) - 1, others))
        option = ActivationOption(decision, cost, swapped, live_ranges=tuple(live_ranges))
        if tier:
            pieces = cost.swap_pieces or (swapped,)
            option = replace(
                option,
                swap_in=Fetch(tier, served, index + 1, swapped, pieces),
                swap_out=Eviction(tier, index, swapped, pieces, pieces),
                tier_bytes={tier: held * (file_bytes(swapped) if tier == "disk" else swapped)},
            )
        self._activations[index, decision] = option
        return option

    def states(self, index: int, decision: Placement) -> StateOption:
        """The option for a placement of the states first used in unit `index`."""
        if known := self._states.get((index, decision)):
            return known
        option = placed(
            index, decision, self.chunks[index], len(self.chunks), self.settings, self.device
        )
        own, optimizer = option.own, self.profile.optimizer
        on_device = not decision.below
        stepped = own.num_parameters if on_device else 0
        device_s = stepped / optimizer.device_parameters_per_s
        update_s = workspace = 0.0
        if option.num_updates:
            most = _most_at_a_time(option, optimizer, self.device)
            staging = option.staging
            option = replace(
                option, staging=staging._replace(workspace=min(staging.workspace, most))
            )
            update_s = update_seconds(
                optimizer,
                own.num_parameters,
                num_pieces=option.num_updates,
                on_device=option.decision.update_on_device,
            )
        adds = self.settings.micro_batches > 1 and self.settings.group.num_devices == 1
        added_s = (
            update_seconds(optimizer, own.num_parameters) if adds and option.gradients else 0.0
        )
        if decision.is_persistent:
            if decision.update_in_backward:
                if not is_accelerator(self.device):
                    device_s += optimizer.host_piece_s  # a step of its own, with its start-up cost
            else:
                workspace = _step_workspace(index, self.profile)
                if workspace and optimizer.workspace_bytes:
                    # One step updates all chunks, and may still hold another's workspace.
                    workspace = optimizer.workspace_bytes
        elif self.settings.group.num_devices > 1:
            if on_device:
                workspace = own.stepped_bytes * optimizer.workspace_fraction
        elif self.settings.updates == "after backward" and option.gradients:
            # Of a gradient that waits below the device, the norm may be asked for after it has
            # left: one at a time comes back.
            workspace = max(option.gradients.pieces)
        live_ranges = _chunk_live_ranges(option, index, self.recorded, self.settings)
        if option.num_updates > 1 and not is_accelerator(self.device):
            # The optimizer of each piece, kept from step to step, has scalars of its own.
            scalars = SCALARS_BYTES * (option.num_updates - 1)
            live_ranges.append(LiveRange("states", index, 0, 2 * len(self.chunks), scalars))
        if optimizer.at_once and decision.is_persistent:
            # Not that of the largest chunk, but that of all of them together.
            end = 2 * len(self.chunks)
            live_ranges.append(LiveRange("staging", index, end, end, round(workspace)))
            workspace = 0.0
        known = self._states[index, decision] = replace(
            option,
            live_ranges=tuple(held for held in live_ranges if held.first <= held.last),
            num_stepped=stepped,
            device_s=device_s,
            update_s=update_s,
            added_s=added_s,
            device_workspace=workspace,
        )
        return known


# States


def placed(
    index: int,
    decision: Placement,
    chunk: ChunkSize,
    count: int,
    settings: StepSettings,
    device: DeviceKind,
) -> StateOption:
    """Moves of a placement of the chunk of unit `index`, of `count`; without a profile's costs."""
    several = settings.group.num_devices > 1
    slot = 2 * count - 1 - index
    if decision.is_persistent:
        summed = chunk.gradient_bytes if several else 0
        step_slot = slot if decision.update_in_backward else 2 * count
        return StateOption(decision, chunk, chunk, summed_bytes=summed, step_slot=step_slot)
    tier, home = decision.below, gradient_home(decision, settings, device)
    with_copy = decision.common_copy
    whole = padded(chunk, settings, common_copy=with_copy)
    own = shard_of(chunk, settings, common_copy=with_copy)
    shards = own.each_parameters
    common = common_pieces(chunk) if with_copy else (0,) * len(shards)
    far = disk_pieces(chunk, decision.on_disk)
    fetched = tuple(map(sum, zip(shards, common, (-size for size in far), strict=True)))
    sizes = zip(whole.each_parameters, common, strict=True)
    gathered = tuple(size - beside for size, beside in sizes)
    arriving: list[Fetch] = []
    fetches: list[Fetch] = []
    from_disk: list[Fetch] = []
    gathers: list[Fetch] = []
    earliest = 0  # a chunk is not fetched again before its last stay has ended
    for stay in residencies(decision, chunk.used_by, count) if chunk.used_by else ():
        when = stay.first, earliest
        arriving.append(Fetch("device", *when, whole.parameter_bytes, whole.each_parameters))
        if tier:
            fetches.append(Fetch(tier, *when, sum(fetched), fetched))
        if any(far):
            from_disk.append(Fetch("disk", *when, sum(far), far))
        if several and (any(gathered) or not with_copy):
            gathers.append(Fetch("device", *when, sum(gathered), gathered))
        earliest = stay.last + 1
    # Each rank of a node counts its part of what they have together.
    copy_bytes = -(-pinned_bytes(sum(common)) // settings.group.in_node)
    option = StateOption(
        decision,
        whole,
        own,
        home,
        arriving=tuple(arriving),
        fetches=tuple(fetches),
        from_disk=tuple(from_disk),
        gathers=tuple(gathers),
        common_bytes=sum(common),
        step_slot=2 * count,
        tier_bytes=_tier_bytes(decision, home, own, device, copy_bytes),
    )
    if not chunk.used_by or not chunk.num_parameters:
        return option
    in_backward = settings.updates == "in backward" or decision.speculate
    read = write = 0
    if decision.staged:
        write = own.state_bytes + own.gradient_bytes
        read = own.state_bytes + option.parameters_read * own.gradient_bytes
    scattered = gradients = in_place = None
    parts = held = own.each_gradients
    if home in ("host", "disk"):
        gradients = Eviction(home, slot, own.gradient_bytes, parts, parts)
    elif home == "in place":
        held = own.each_parameters
        if settings.micro_batches == 1:  # else the gradients' room stays
            held = tuple(map(sum, zip(held, parts, strict=True)))
        assert tier
        in_place = Eviction(tier, slot, write, own.each_parameters, held)
    elif tier and in_backward:
        # The shard of the gradients has left with the last piece that is updated.
        in_place = Eviction(tier, slot, write, (write,), (own.gradient_bytes,))
    if several:
        parts = whole.each_gradients
        held = parts
        if gradients:
            held = tuple(map(sum, zip(parts, own.each_gradients, strict=True)))
        elif in_place:
            held = (*parts[:-1], parts[-1] + own.gradient_bytes)
        scattered = Eviction(None, slot, whole.gradient_bytes, parts, held)
    num_updates = 0
    if tier:
        # Only trained parameters move: as many bytes as their gradients.
        largest = max(own.state_bytes, own.gradient_bytes)
        num_updates = max(1, -(-largest // settings.piece_bytes)) if decision.staged else 1
    return replace(
        option,
        scattered=scattered,
        gradients=gradients,
        in_place=in_place,
        update_slot=slot if in_backward else 2 * count - 1,
        num_updates=num_updates,
        read_bytes=read,
        write_bytes=write,
        staging=_staging(option, num_updates, settings, device),
    )


def _tier_bytes(
    states: Placement, home: GradientHome, own: ChunkSize, device: DeviceKind, copy_bytes: int
) -> dict[TierName, int]:
    """An offloaded chunk's bytes on tiers: states, gradients in flight, and `copy_bytes`."""
    found: dict[TierName, int] = {}
    far = sum(disk_pieces(own, states.on_disk))
    tier, copies = states.tier, 1 + states.speculate
    for name in get_args(TierName):
        regions = [own.parameter_bytes - far, own.state_bytes] * copies if tier == name else []
        regions += [far] if name == "disk" else []
        regions += [own.gradient_bytes] if home == name else []
        size = sum(regions)
        if name in PINNED and is_accelerator(device):
            # Each region is pinned separately, as is each of up to STATE_REGIONS optimizer states.
            parts = copies * STATE_REGIONS if tier == name else 0
            size = sum(pinned_bytes(region) for region in regions) + parts * PAGE_BYTES
        elif name == "disk":
            # In a file, too, every kind of states has its own blocks.
            parts = copies * _kinds_of_states(own) if tier == name else 0
            size = sum(map(file_bytes, regions)) + parts * (PAGE_BYTES + LARGE_BEGIN_BYTES)
        size += copy_bytes if tier == name else 0
        if size and own.used_by:
            found[name] = size
    return found


_MOST_KINDS = 8
"""Most kinds of optimizer states: codes and scales of two states, in two sizes."""


def _kinds_of_states(own: ChunkSize) -> int:
    """Upper bound of a chunk's kinds of optimizer states, by their bytes.

    Half as wide as the gradients at least; narrower ones, and those of only some parameters, have 8
    bits or fewer, with scales.
    """
    even = own.state_bytes - own.uneven_state_bytes
    if own.uneven_state_bytes or even < own.gradient_bytes:
        return _MOST_KINDS if own.state_bytes else 0
    return min(_MOST_KINDS, 2 * -(-even // own.gradient_bytes)) if even else 0


def _staging(
    option: StateOption, num_updates: int, settings: StepSettings, device: DeviceKind
) -> Staging:
    """The staging of one chunk; none if the device updates it with persistent chunks."""
    own, states = option.own, option.decision
    if not num_updates or states.is_persistent:
        return NO_STAGING
    largest = -(-own.num_parameters // num_updates)
    gradient_width = -(-own.gradient_bytes // own.num_parameters)
    adds = settings.micro_batches > 1 and settings.group.num_devices == 1
    width = beside = 0
    states_of_piece = 0
    if states.staged:
        even = own.state_bytes - own.uneven_state_bytes
        states_of_piece = -(-largest * even // own.num_parameters) + own.uneven_state_bytes
        beside = (option.home != "in place") * gradient_width  # parameters
        beside += reads_gradients(states, settings, device) * gradient_width
        width = -(-even // own.num_parameters) + beside
    return Staging(
        read_piece=states_of_piece + largest * beside,
        width=width,
        workspace=largest * gradient_width * 1.0,
        arriving=own.gradient_bytes if option.home == "host" and adds else 0,
    )


def _most_at_a_time(option: StateOption, optimizer: OptimizerCost, device: DeviceKind) -> float:
    """Gradient bytes that an update beside compute steps on at a time, for any piece.

    The device steps on one parameter at a time; so does the thread beside a CPU's compute, on runs
    of LONGEST_SPAN. Beside an accelerator several threads step at once.
    """
    if optimizer.at_once or not option.own.num_parameters:
        return inf
    accelerator = is_accelerator(device)
    if accelerator and not option.decision.update_on_device:
        return inf
    width = -(-option.own.gradient_bytes // option.own.num_parameters)
    return min(option.own.stepped_bytes, inf if accelerator else LONGEST_SPAN * width)


def update_seconds(
    optimizer: OptimizerCost,
    num_parameters: int,
    *,
    num_pieces: int = 1,
    on_device: bool = False,
) -> float:
    """Seconds of the optimizer's steps on pieces, without interference.

    The compute thread launches an accelerator's kernels, in its own seconds (`move_s`); on the host
    each piece is a step with its own start-up cost.
    """
    if on_device:
        return num_parameters / optimizer.device_parameters_per_s
    return num_pieces * optimizer.host_piece_s + num_parameters / optimizer.host_parameters_per_s


def _chunk_live_ranges(
    option: StateOption, index: int, profile: Profile, settings: StepSettings
) -> list[LiveRange]:
    """A chunk's states or buffers, and the gradients that wait between slots.

    On one device, gradients that accumulate there are always live, those of persistent chunks until
    their update. On several, all accumulate there, whole, until reduced, or as this rank's shard of
    the sums. On one device a persistent chunk without gradients is only its parameters; an
    offloaded one has room for both.
    """
    unit, count, states = profile.units[index], len(profile.units), option.decision
    if not unit.used_by:
        return []
    end, several = 2 * count, settings.group.num_devices > 1
    # A tied parameter's gradient grows from its last use to its first.
    first_gradient, last_gradient = end - 1 - max(unit.used_by), end - 1 - min(unit.used_by)
    adds_shard = settings.adds_shards and not states.is_persistent
    add_up = settings.micro_batches > 1 and not adds_shard
    found: list[LiveRange] = []

    def hold(kind: LiveRangeKind, first: int, last: int, size: int) -> None:
        found.append(LiveRange(kind, index, first, last, size))

    if states.is_persistent:
        trained = unit.reached or several
        hold("states", 0, end, unit.parameter_bytes + (unit.state_bytes if trained else 0))
        if not trained:
            return found
    else:
        for stay in residencies(states, unit.used_by, count):
            hold("buffers", stay.first, stay.last, option.whole.parameter_bytes)
        if states.tier == "device":
            hold("states", 0, end, option.own.parameter_bytes + option.own.state_bytes)
    if add_up and (several or option.home in (None, "in place", "device")):
        hold("gradients", 0, end - 1 if several else end, unit.gradient_bytes)
    if adds_shard:
        hold("gradients", 0, end, option.own.gradient_bytes)
    stays = option.home is None and not add_up and not several and option.step_slot == end
    hold("gradients", first_gradient + 1, end if stays else last_gradient, unit.gradient_bytes)
    if states.update_in_backward:
        standing = unit.gradient_bytes + round(_step_workspace(index, profile))
        hold("staging", last_gradient, last_gradient, _beyond_peak(index, profile, standing))
    if not several:
        return found
    if states.is_persistent:
        hold("gradients", end if add_up else last_gradient + 1, end, unit.gradient_bytes)
    elif unit.num_parameters:
        # The largest gradient group is copied, beside the rank's shards.
        copies = max(option.whole.each_gradients)
        copies += 0 if adds_shard else option.own.gradient_bytes  # else counted in every slot
        standing = copies + (0 if add_up else unit.gradient_bytes)
        room = _beyond_peak(index, profile, standing)
        hold("gradients", last_gradient, last_gradient, room)
        # The shard that an update in backward consumes leaves with a move of the program.
        waits = settings.updates == "after backward" or states.tier == "device"
        if waits and option.home == "device" and not adds_shard:
            # Before the update it replaces the accumulated gradients, if any.
            own = option.own.gradient_bytes
            more = max(0, own - unit.gradient_bytes) if add_up else own
            hold("gradients", last_gradient + 1, end - 1, more)
            hold("gradients", end, end, own)
    return found


def _step_workspace(index: int, profile: Profile) -> float:
    """Workspace bytes of the device's step on a chunk, one parameter at a time."""
    unit, optimizer = profile.units[index], profile.optimizer
    stepped = unit.largest_gradient_bytes or unit.gradient_bytes
    found = stepped * optimizer.workspace_fraction * unit.reached
    return min(found, optimizer.workspace_bytes or found)


def _beyond_peak(index: int, profile: Profile, standing: int) -> int:
    """Bytes live after a unit's last slot that exceed the slot's own peak.

    Of the unit's activations only the next slot's inputs remain; gradients of earlier units that
    begin there are live, too.
    """
    following = profile.units[index - 1].forms if index else ()
    passed_on = min((form.backward_peak_bytes for form in following), default=0)
    before = profile.units[:index]
    passed_on += sum(one.gradient_bytes for one in before if index in one.used_by[-1:])
    unit = profile.units[index]
    peak = min(form.kept_bytes + form.backward_peak_bytes for form in unit.forms)
    return max(0, passed_on + standing - peak)


# All units together


def staging_parts(
    state: StateOption, optimizer: OptimizerCost, *, on_device: bool
) -> tuple[tuple[str, float, int], ...]:
    """Parts of a chunk's staging: name, bytes, and how many are live at once.

    Each part counts at its largest over all chunks updated on the device or, for the host,
    elsewhere. A piece may exceed its even share, because of its cuts. On the device one more piece
    is live than passes through: the optimizer makes missing states. Gradients of several
    micro-batches arrive on the host.
    """
    needs, pieces = state.staging, STAGING_PIECES + on_device
    if state.decision.update_on_device != on_device:
        needs = NO_STAGING if on_device else Staging(arriving=state.staging.arriving)
    parts = (
        ("piece", needs.read_piece, pieces),
        ("width", needs.width, pieces * optimizer.cut_elements),
        ("workspace", needs.workspace * optimizer.workspace_fraction, 1),
    )
    return parts if on_device else (*parts, ("arriving", needs.arriving, ARRIVING_GRADIENTS))


def staging_bytes(
    states: Sequence[StateOption], profile: Profile, *, on_device: bool = False
) -> int:
    """Bytes of staging buffers for optimizer states, with the step's workspace."""
    largest: dict[str, int] = {}
    for state in states:
        for name, size, times in staging_parts(state, profile.optimizer, on_device=on_device):
            largest[name] = max(largest.get(name, 0), times * round(size))
    return sum(largest.values())


def tier_staging_bytes(
    tier: StateTier,
    activations: Sequence[ActivationOption],
    states: Sequence[StateOption],
    implications: Implications,
) -> int:
    """Bytes of permanent staging on a tier: similar units share it.

    A CPU machine's memory is the device. Beside an accelerator, bytes pass through host memory to
    the optimizer, and to files.
    """
    profile, accelerator = implications.profile, is_accelerator(implications.device)
    if tier == "device":
        below = 0 if accelerator else staging_bytes(states, profile)
        return below + staging_bytes(states, profile, on_device=True)
    if not accelerator or tier not in PINNED:
        return 0
    sizes = [option.tier_bytes for options in (activations, states) for option in options]
    return staging_bytes(states, profile) + PASSING_BYTES * any("disk" in one for one in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundProgram(Program):
    """A program with its plan and the implications of its decisions for a profile."""

    units: tuple[UnitPlan, ...]
    implications: Implications = field(compare=False)
    activations: tuple[ActivationOption, ...]
    states: tuple[StateOption, ...]

    @property
    def profile(self) -> Profile:
        return self.implications.profile

    def tier_bytes(self, tier: TierName) -> int:
        """The peak of a tier below the device: states, swapped activations, staging."""
        total = sum(option.tier_bytes.get(tier, 0) for option in self.activations)
        total += sum(option.tier_bytes.get(tier, 0) for option in self.states)
        return total + self.staging_bytes(tier)

    def staging_bytes(self, tier: StateTier) -> int:
        """Bytes of staging on a tier."""
        return tier_staging_bytes(tier, self.activations, self.states, self.implications)
