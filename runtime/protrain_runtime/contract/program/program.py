"""A plan compiled: one training step's ordered moves, on named lanes, with their waits.

The simulator reads a `Program` with a profile's durations; the runtime executes the same one. Unit
u of U computes in slot u (forward) and in slot 2U - 1 - u (backward).

Both readers treat a slot in this order:

1. the `drained` moves have ended, and those in `drained_before` of the previous step: their bytes
   have left the device;
2. the `submit` moves (fetches) enter their lanes;
3. the `ready` moves have ended: the slot's inputs are on the device;
4. the slot computes;
5. the chunks in `release` leave the device, and the `finish` moves (the slot's outputs) enter their
   lanes.

After the last slot and the moves in `reduced`, the device updates the persistent chunks and its
shards of sharded ones. If offloaded chunks are updated after backward, all moves end first
(clipping needs the norm of all gradients), and the `last` moves enter their lanes when that update
begins. `speculative` updates do not wait: they run from backward on. A clipped step has another
program, which begins with the same moves; its `last` moves repeat those updates.

A step ends with its last move. If steps overlap, updates of offloaded chunks run on into the next
one (`running_on`). Its forward fetches the updated chunks; `updates` names each fetch's awaited
move. No update is left when backward begins.

A lane runs its moves one at a time, in order of submission; a move starts when the moves in `after`
have ended. Moves wait only for earlier moves, so deadlock is impossible. All waits are stated here
and none depends on a clock: the device's bytes in a slot do not depend on the lanes' speed.

On several devices every rank has the same program. All collectives are on the lane `collect`: every
rank meets them in the same order. A chunk's buffers are padded: each rank's shard of a group is a
range of `shard_bytes` (see `padded`, `shard_of`). A slot's input is then a fetch of the rank's own
range and an all-gather of the others'; frozen parameters with a common copy are fetched whole. A
unit's gradients are reduced after its backward slot: a persistent chunk's for every rank, others
for the rank that owns them.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import floor
from typing import Literal, NamedTuple

from protrain_runtime.contract.records.hardware import DeviceKind, TierName, is_accelerator
from protrain_runtime.contract.records.plan import Placement, StateTier, StepSettings, UnitPlan
from protrain_runtime.contract.records.profile import Unit
from protrain_runtime.contract.records.words import listed

MoveKind = Literal[
    # A chunk's parameters to the device; of several devices: the rank's shard of them, and all that
    # has a common copy.
    "fetch",
    "all-gather",  # the other ranks' shards to this device
    "all-reduce",  # a persistent chunk's gradients, summed over all ranks
    "reduce-scatter",  # a sharded chunk's gradients, summed; each rank keeps its shard of them
    "swap in",  # a unit's swapped activations back to the device
    "swap out",  # a unit's activations off the device
    "spill gradients",  # a chunk's gradients to where its optimizer runs
    "add gradients",  # to those of the micro-batches before
    "read states",  # a piece of optimizer states from its tier to where the optimizer runs
    "update",  # the optimizer's step on a piece
    "write states",  # the piece's new parameters and states to its tier
]

SAVING_BYTES = 2**20
"""Host buffer for bytes on their way to and from a checkpoint."""

STAGING_PIECES = 3
"""Pieces of optimizer states in memory at once: one being read, one updated, one written. As many
on the device, where it updates chunks in host memory."""

ARRIVING_GRADIENTS = 2
"""Chunks whose gradients are in memory at once to be added to those of micro-batches before: one
arriving, one added."""

BLOCK_BYTES = 512
"""The block to which allocators of accelerators round every tensor up, and at which it begins
(c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize; others' are built alike)."""

PIECE_ALIGNMENT = 64
"""Within a parameter, pieces are cut at multiples of this many elements. Fused CPU optimizers
finish a range that is no multiple of the vector width in scalar code, which may round otherwise;
64 elements cover the widest vectors, so that every element meets the code it would meet uncut."""

LONGEST_SPAN = 2**20
"""Elements that an optimizer beside compute steps on as one parameter: 4 MiB of float32, so that
what it needs besides (a float32 gradient, the temporaries of a plain loop) is no fresh memory,
whose pages the system clears first: twice as fast with master weights, three times as fast in a
loop of operators (`docs/decisions/seconds.md`). Runs of a quarter cost a fused step up to a
tenth."""

COMPUTE = "compute"
"""The lane of slots; moves have the others."""

LAUNCHES = "launch"
"""The thread that launches an accelerator's work, if its seconds are counted."""


class Channel(NamedTuple):
    """A resource of lanes: a direction of a link, the device, the host's optimizer, the network."""

    link: TierName | Literal["device", "update", "network"]
    inwards: bool = False

    @property
    def tier(self) -> TierName | None:
        """The tier of the link."""
        return self.link if self.link in ("host", "disk") else None

    def __str__(self) -> str:
        if self.tier:
            return f"{'fetch' if self.inwards else 'spill'} {self.link}"
        return {"device": "update on device", "network": "collect"}.get(self.link, self.link)


Direction = Literal["fetch", "read", "spill", "write", "update", "collect"]
INWARDS: tuple[Direction, ...] = ("fetch", "read")
OUTWARDS: tuple[Direction, ...] = ("spill", "write")


class Lane(NamedTuple):
    """A lane beside compute: transfers to or from a tier, or an optimizer on offloaded chunks.

    Fetches and spills, which compute waits for, have their own lanes; "read" and "write" carry
    optimizer states, too many bytes for anything to queue behind them. Updates of chunks on disk
    wait for their states, those of chunks in host memory do not: separate lanes, too. Both run in
    host memory; on the lane `UPDATE_ON_DEVICE` the optimizer shares the device with compute.
    `COLLECT` is the network between devices: no tier.
    """

    direction: Direction
    tier: StateTier | None

    @property
    def channel(self) -> Channel:
        """The resource shared with other lanes; states go inwards to an optimizer."""
        if self.direction == "update" and self.tier != "device":
            return UPDATES
        return Channel(self.tier or "network", self.direction in INWARDS)

    def __str__(self) -> str:
        return self.direction if self.tier is None else f"{self.direction} {self.tier}"


COLLECT = Lane("collect", None)
"""All collectives, in one order."""

UPDATE_ON_DEVICE = Lane("update", "device")
"""The device's optimizer on chunks in host memory."""

UPDATES, NETWORK = Channel("update"), COLLECT.channel
"""The optimizer's threads beside compute, and the network between devices."""

SHARD_ALIGNMENT = 256
"""Parameters of sharded chunks start, and are cut, at multiples of this many bytes: 64 float32
elements, so that a rank's optimizer meets the code that it would meet on the whole parameter (see
PIECE_ALIGNMENT; twice the widest vectors is what kernels that are unrolled ask for)."""


MAX_PIECES = 8
"""Pieces that a chunk's parameters, or a unit's swapped activations, move in at most. A decoder
block has about as many large tensors, and tensors are not cut."""


MAX_PARTS, MIN_PART_BYTES = 4, 16 * 2**20
"""Parts in which a chunk's shards are fetched and gathered at most, and the bytes of the chunk in
each at least: over PCIe at 25 GB/s some 80 us for each of eight ranks, several times a latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSize:
    """Bytes of the chunk of states first used in a unit, and the units that read it.

    Pieces are the same bytes in groups of whole parameters (see `grouped`); empty: one group.
    `uneven_state_bytes` are states that some parameters have beyond the most common bytes per
    element: one piece may have them all. `largest_gradient_bytes` are the largest parameter's, 0 if
    unknown.
    """

    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    num_parameters: int  # trainable
    used_by: tuple[int, ...]
    parameter_pieces: tuple[int, ...] = ()
    gradient_pieces: tuple[int, ...] = ()
    uneven_state_bytes: int = 0
    largest_gradient_bytes: int = 0

    @property
    def stepped_bytes(self) -> int:
        """Gradient bytes that the optimizer steps on at a time, at most all."""
        return min(self.largest_gradient_bytes or self.gradient_bytes, self.gradient_bytes)

    @property
    def each_parameters(self) -> tuple[int, ...]:
        """Bytes of each piece of the parameters."""
        return self.parameter_pieces or (self.parameter_bytes,)

    @property
    def each_gradients(self) -> tuple[int, ...]:
        """Bytes of each piece of the gradients."""
        return self.gradient_pieces or (self.gradient_bytes,)


def shard_bytes(num_bytes: int, num_shards: int) -> int:
    """A rank's range of a sharded buffer."""
    return -(-num_bytes // (num_shards * SHARD_ALIGNMENT)) * SHARD_ALIGNMENT


def common_pieces(chunk: ChunkSize) -> tuple[int, ...]:
    """Frozen bytes in each piece of the parameters, as in a common copy."""
    pairs = zip(chunk.each_parameters, chunk.each_gradients, strict=True)
    return tuple(in_blocks(size - gradient, SHARD_ALIGNMENT) for size, gradient in pairs)


def disk_pieces(chunk: ChunkSize, sixteenths: int) -> tuple[int, ...]:
    """Bytes on disk of each piece of the parameters: the first frozen ones, in pages."""
    left = (chunk.parameter_bytes - chunk.gradient_bytes) * sixteenths // 16
    left -= left % PAGE_BYTES
    found: list[int] = []
    for size, gradient in zip(chunk.each_parameters, chunk.each_gradients, strict=True):
        found.append(min(left, size - gradient))
        left -= found[-1]
    return tuple(found)


def shard_of(chunk: ChunkSize, settings: StepSettings, *, common_copy: bool = False) -> ChunkSize:
    """One rank's part of a sharded chunk; on one device, the chunk itself.

    In each group of whole parameters, trainable and frozen ones are sharded separately. Padding
    counts as trainable parameters. With a common copy, frozen ones are not sharded.
    """
    if settings.group.num_devices == 1:
        return chunk
    parameters, gradients = chunk.each_parameters, chunk.each_gradients
    count = settings.group.num_shards
    trainable = tuple(shard_bytes(size, count) for size in gradients)
    pieces = trainable
    if not common_copy:
        pieces = tuple(
            own + shard_bytes(size - gradient, count)
            for own, size, gradient in zip(trainable, parameters, gradients, strict=True)
        )
    num_parameters = state_bytes = 0
    if chunk.num_parameters:
        num_parameters = sum(trainable) * chunk.num_parameters // chunk.gradient_bytes
        state_bytes = -(-chunk.state_bytes * num_parameters // chunk.num_parameters)
    several = bool(chunk.parameter_pieces)
    return replace(
        chunk,
        parameter_bytes=sum(pieces),
        gradient_bytes=sum(trainable),
        state_bytes=state_bytes,
        num_parameters=num_parameters,
        parameter_pieces=pieces if several else (),
        gradient_pieces=trainable if several else (),
    )


def padded(chunk: ChunkSize, settings: StepSettings, *, common_copy: bool = False) -> ChunkSize:
    """All ranks' parts of a chunk, and its common copy: the size of its buffers."""
    if settings.group.num_devices == 1:
        return chunk
    own = shard_of(chunk, settings, common_copy=common_copy)
    count, pieces = settings.group.num_shards, own.each_parameters
    common = common_pieces(chunk) if common_copy else (0,) * len(pieces)
    whole = tuple(size * count + beside for size, beside in zip(pieces, common, strict=True))
    return replace(
        own,
        parameter_bytes=sum(whole),
        gradient_bytes=own.gradient_bytes * count,
        state_bytes=own.state_bytes * count,
        num_parameters=own.num_parameters * count,
        parameter_pieces=whole if own.parameter_pieces else (),
        gradient_pieces=tuple(size * count for size in own.gradient_pieces),
    )


class Move(NamedTuple):
    """One transfer or update. (Not a dataclass: searches make millions, and tuples are quick.)

    `bytes` are 0 for updates, and for swaps without a profile: the runtime learns their size when
    they are saved. For a collective, they are the buffers that it fills or sums on each rank, the
    rank's own shard included.

    `start:stop` are the trainable parameters of a piece of states. `share` is the part of a chunk's
    or unit's bytes that a fetch, a swap or a spill moves; see `pieces_in`. For "write states" after
    an update in place it is the part of the chunk's parameters and gradients that leaves the device
    with it.
    """

    kind: MoveKind
    unit: int
    slot: int  # the slot served (fetches), or the producing one
    lane: Lane
    bytes: int = 0
    start: int = 0
    stop: int = 0
    after: tuple[int, ...] = ()
    share: tuple[float, float] = (0.0, 1.0)


@dataclass(slots=True, kw_only=True)
class Slot:
    """One compute step and the moves around it, as indices into `Program.moves`."""

    unit: int
    forward: bool
    drained: list[int] = field(default_factory=list[int])
    drained_before: list[int] = field(default_factory=list[int])  # of the previous step
    submit: list[int] = field(default_factory=list[int])
    ready: list[int] = field(default_factory=list[int])
    stepped: list[int] = field(default_factory=list[int])  # units whose chunks compute updates
    release: list[int] = field(default_factory=list[int])  # units whose chunk buffers are released
    finish: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The moves of one forward and backward, and their slots.

    `updating` if an update follows: earlier micro-batches end with their last move instead. If
    steps overlap, `updates` has by unit the last move of its update, for which the next step's
    fetches of it wait; else it is empty. `speculative` are the moves of updates in backward if
    others wait for its end.
    """

    moves: tuple[Move, ...]
    slots: tuple[Slot, ...]
    last: tuple[int, ...]  # submitted when the device's update begins
    device: DeviceKind
    settings: StepSettings
    updating: bool
    reduced: tuple[int, ...] = ()  # ended before backward does: sums of gradients
    updates: Mapping[int, int] = field(default_factory=dict[int, int])
    speculative: frozenset[int] = frozenset()

    @property
    def running_on(self) -> frozenset[int]:
        """Moves that may still run in the next step."""
        if not self.updates:
            return frozenset()
        chain = ("read states", "update", "write states")
        return frozenset(n for n, move in enumerate(self.moves) if move.kind in chain)

    @property
    def again(self) -> frozenset[int]:
        """A clipped step's repeats of its speculative updates."""
        units = {self.moves[number].unit for number in self.speculative}
        return frozenset(n for n in self.last if self.moves[n].unit in units)

    def awaited(self, move: Move) -> int | None:
        """The previous step's move that a move waits for."""
        fetches = move.kind == "fetch" and move.slot < self.num_units
        return self.updates.get(move.unit) if fetches else None

    @property
    def num_units(self) -> int:
        return len(self.slots) // 2

    def slot_name(self, index: int) -> str:
        """A slot's timeline name; the slot after the last is the device's update."""
        if index == len(self.slots):
            return "update on the device"
        slot = self.slots[index]
        return f"{'forward' if slot.forward else 'backward'} {slot.unit}"

    def move_name(self, index: int) -> str:
        """A name that the simulated and the recorded timeline share."""
        move = self.moves[index]
        piece = f" [{move.start}:{move.stop}]" if move.stop else ""
        if move.share != (0.0, 1.0) and not move.stop:
            piece += f" ({move.share[0]:g}-{move.share[1]:g})"
        before = self.moves[index - 1] if index else None
        if before and before._replace(lane=move.lane, bytes=move.bytes) == move:
            piece += f" from {move.lane.tier}"  # the other part comes from another tier
        return f"{move.kind} {move.unit} @{move.slot}{piece}"


def slot_words(units: Sequence[Unit | UnitPlan], slot: int) -> str:
    """Name a slot: `backward of layers.3`, and last `update on the device`."""
    count = len(units)
    if slot == 2 * count:
        return "update on the device"
    unit = min(slot, 2 * count - 1 - slot)
    return f"{'forward' if slot < count else 'backward'} of {unit_words(units, unit)}"


def unit_words(units: Sequence[Unit | UnitPlan], index: int) -> str:
    """Name a unit, the last part with its contents: `model.norm, lm_head and the loss`."""
    unit = units[index]
    if unit.kind == "block" or index + 1 < len(units):
        return unit.name
    own, held = unit.name.split("."), dict[str, None]()
    for path in (name.split(".") for name in unit.parameters):
        if apart := [b for a, b in zip(own, path, strict=False) if a != b]:  # of another module
            held[apart[0]] = None
    for other in units[:index]:
        users = other.used_by if isinstance(other, Unit) else other.also_used_by
        if index in users or unit.name in users:
            held[f"the tied {other.name}"] = None
    return listed((unit.name, *held, "the loss"), "and")


def grouped(sizes: Sequence[int]) -> list[range]:
    """Index ranges of consecutive tensors: at most MAX_PIECES groups of about equal bytes."""
    total, groups = sum(sizes), list[range]()
    first = done = 0
    for index, size in enumerate(sizes):
        done += size
        # A group ends with the tensor that reaches its share of the rest, the last group with the
        # last tensor (which may be empty).
        left = MAX_PIECES - len(groups)
        full = left > 1 and done >= (total - sum(sizes[:first])) / left
        if full or index == len(sizes) - 1:
            groups.append(range(first, index + 1))
            first, done = index + 1, 0
    return groups


@lru_cache(maxsize=100_000)
def pieces_in(sizes: tuple[int, ...], share: tuple[float, float]) -> range:
    """The pieces in a share of the bytes; a cut one is in the later share. (Cached.)"""

    def before(fraction: float) -> int:
        if fraction <= 0 or fraction >= 1:
            return 0 if fraction <= 0 else len(sizes)
        return bisect_right([*accumulate(sizes)], fraction * sum(sizes) * (1 + 1e-9))

    return range(before(share[0]), before(share[1]))


def parts(sizes: Sequence[int]) -> list[float]:
    """The ends, as fractions, of parts whose fetch and gather overlap: `MAX_PARTS` at most."""
    total, ends, since = sum(sizes), list[float](), 0
    for done in accumulate(sizes):
        if done - since >= max(MIN_PART_BYTES, total / MAX_PARTS) or done == total:
            ends.append(done / total if total else 1.0)
            since = done
    return ends


def shares(slots: float) -> tuple[int, float]:
    """Whole slots of a lead or drain, and the fraction of bytes with one slot more."""
    whole = floor(slots)
    return whole, slots - whole


PASSAGE_BYTES = 2 * 2 * 2**20
"""Pinned memory that a thread's bytes pass through between a file and an accelerator: while the
file has one half, the device copies the other. A half takes the device some 100 us."""

PASSAGES = 3
"""Threads whose bytes pass so: the lanes that fetch from disk and spill there, and the one that
loads and saves."""

REQUEST_BYTES = 2**20
"""Most bytes of one request to a file, and of its staging."""

NUM_REQUESTS = 4
"""Concurrent requests to one file, of all threads through staging."""

EDGE_BYTES = 2**18
"""Bytes of cached blocks of a file at ends of ranges."""

FILE_BYTES = NUM_REQUESTS * REQUEST_BYTES + EDGE_BYTES
"""Host bytes of a spill file, besides passages to an accelerator."""

PASSING_BYTES = PASSAGES * PASSAGE_BYTES + FILE_BYTES
"""Host bytes of files and passages, as soon as anything is on disk."""

PAGE_BYTES = 4096


LARGE_BEGIN_BYTES = 64
"""Offset in a block of a spill file of a region of REQUEST_BYTES and more: a CPU's large
tensors begin as far into a page (glibc's header, and what PyTorch aligns to), so that whole blocks
of the file have addresses that direct I/O takes."""


def file_bytes(num_bytes: int, block: int = PAGE_BYTES) -> int:
    """Bytes of a region of a spill file, in its own blocks if the file has blocks."""
    return in_blocks(region_begin(num_bytes, block) + num_bytes, block)


def region_begin(num_bytes: int, block: int) -> int:
    """The offset of a region of a spill file in its first block."""
    return LARGE_BEGIN_BYTES if num_bytes >= REQUEST_BYTES and block > 1 else 0


def pinned_bytes(num_bytes: int) -> int:
    """Bytes of a pinned host buffer: whole pages of the operating system."""
    return in_blocks(num_bytes, PAGE_BYTES)


class Residency(NamedTuple):
    """One stay of a chunk's parameters on the device, from its fetch to its release."""

    first: int  # the slot that the fetch serves
    last: int  # the last slot before release


def residencies(states: Placement, used_by: Sequence[int], num_units: int) -> list[Residency]:
    """The stays of an offloaded chunk: one per run of slots, or a single one if kept gathered."""
    # Forward of its users, then their backward.
    slots = [*used_by, *(2 * num_units - 1 - unit for unit in reversed(used_by))]
    if states.keep_gathered:
        return [Residency(slots[0], slots[-1])]
    stays = [Residency(slots[0], slots[0])]
    for slot in slots[1:]:
        if slot == stays[-1].last + 1:
            stays[-1] = Residency(stays[-1].first, slot)
        else:
            stays.append(Residency(slot, slot))
    return stays


def block_bytes(device: DeviceKind) -> int:
    """The block to which devices of this type round a tensor's bytes."""
    return BLOCK_BYTES if is_accelerator(device) else 1


def in_blocks(size: int, block: int) -> int:
    """`size` rounded up to a multiple of `block`."""
    return -(-size // block) * block


GradientHome = Literal["in place", "device", "host", "disk"]


def gradient_home(states: Placement, settings: StepSettings, device: DeviceKind) -> GradientHome:
    """The place where gradients of an offloaded chunk wait for its update, after its backward.

    host       in host memory, where the optimizer runs (and where micro-batches add up)
    in place   on the device with the parameters: of a chunk whose optimizer runs in the device's
               memory, where states pass through. There it is one chain: read states, update,
               write. So it is with a CPU machine's chunk on disk, and with an update on the device.
    disk       on disk, if that update comes after backward
    device     on the device, if it comes after backward and micro-batches add up there

    Of several devices, each one's shard of the sum is in host memory (with its states) or on the
    device. For an update on the device after backward, or where micro-batches add up, gradients
    wait in host memory, and come back with the states. Those of a speculative update wait where
    they would for one after backward: a step that is clipped needs them again.
    """
    if states.update_on_device:
        if settings.updates == "after backward":
            return "host"
        if settings.group.num_devices > 1:
            return "device"
        return "in place" if settings.micro_batches == 1 else "host"
    stepped_there = states.tier == "disk" and not is_accelerator(device)
    if settings.group.num_devices > 1:
        return "device" if states.tier == "device" or stepped_there else "host"
    if not stepped_there:
        return "host"
    if settings.updates == "in backward":
        return "in place"
    return "disk" if settings.micro_batches == 1 else "device"


def reads_gradients(states: Placement, settings: StepSettings, device: DeviceKind) -> bool:
    """Whether an update that moves states brings gradients: same tier, or needed again."""
    return gradient_home(states, settings, device) == states.tier or states.speculate


def written_share(chunk: ChunkSize, start: int, stop: int) -> tuple[float, float]:
    """The part of a chunk's parameters without later pieces, once `start:stop` is written."""
    sizes = chunk.each_parameters
    ends = [done * chunk.num_parameters for done in accumulate(chunk.each_gradients)]
    total, fractions = sum(sizes), []
    for element in (start, stop):
        past = sum(end <= element * chunk.gradient_bytes for end in ends[:-1])
        fractions.append(sum(sizes[:past]) / total if total else 0.0)
    return (fractions[0] if start else 0.0, 1.0 if stop == chunk.num_parameters else fractions[1])


MAX_PIECES_OF_STATES = 60_000
"""Pieces of optimizer states in a step, each read, updated and written: more take minutes to look
at, and gain nothing. Pieces of 8 MiB are those of 500 GB."""
