"""`Hardware`: what a machine offers to a training run: tiers of memory, links between, speeds."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from msgspec import Meta

from protrain_runtime.contract.records import limits

TierName = Literal["host", "disk"]
DeviceKind = Annotated[
    str,
    Meta(pattern="^[a-z][a-z0-9_]{0,99}$", description="a type of device such as cpu or cuda"),
]
"""A type of device as PyTorch names it: `cpu`, `cuda` (ROCm's too), `xpu`, ..., or as a backend
registers it. What a record says holds for every device of the type; none has an index."""
Shared = Literal["of the node", "of each device"]


def is_accelerator(kind: DeviceKind) -> bool:
    """Whether devices of this type have memory of their own, and work while the host does."""
    return kind != "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way between the device and a lower tier; reads go towards the device.

    `duplex` is the fraction of its own speed that each direction keeps while the other one
    runs too: 1 for two independent lanes, 0.5 for one lane that both share.
    """

    read_bytes_per_s: limits.Speed
    write_bytes_per_s: limits.Speed
    latency_s: limits.Seconds
    duplex: limits.Half


PCIE = {"pcie-3": 12e9, "pcie-4": 24e9, "pcie-5": 50e9}
"""Bytes per second of 16 lanes in each direction, as the catalogue has them: 76 % of the nominal
15.8 and 31.5 GB/s, and 79 % of 63 (8, 16 and 32 GT/s a lane, 128 bits in 130: PCI Express Base
Specification 5.0). The sources of the machines say that these shares are assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """For how long, and with how many bytes, a disk was written before its speeds were taken.

    Past the page cache. Many disks are fast for their first gigabytes and slower after them: what
    was seen in seconds says little of a run of hours. The two speeds are those of the first and of
    the last quarter of this writing.
    """

    seconds: limits.Seconds
    written_bytes: limits.Bytes
    first_bytes_per_s: limits.Speed
    last_bytes_per_s: limits.Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place below the device where bytes can live.

    A disk's `link` is its own speed, past the page cache, and `observed` says how it was seen;
    absent: it was not measured so. `cached` is that of what passes through the page cache, which
    holds while memory has room for all that is there; absent: it was not measured.
    `endurance_bytes` are those that a node's drives bear in their life, as data sheets say (TBW);
    0: it is not said.
    """

    name: TierName
    capacity_bytes: limits.Bytes
    link: Link
    observed: Observed | None = None
    cached: "Cached | None" = None
    endurance_bytes: limits.Bytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where the model computes.

    `context_bytes` is what a process holds of `memory_bytes` besides tensors: an accelerator's
    context and kernels, or on a CPU the interpreter, the libraries' data and their scratch memory.
    `allocator_bytes` is what an accelerator's allocator holds beyond what it has given out, at
    most: limits are on what it holds, peaks are of what it gives out. 0 where it was not measured.
    """

    kind: DeviceKind
    name: str
    memory_bytes: limits.Bytes
    context_bytes: limits.Bytes
    num_threads: limits.Count
    allocator_bytes: limits.Bytes = 0

    @property
    def besides_bytes(self) -> int:
        """Bytes of `memory_bytes` that tensors cannot have."""
        return self.context_bytes + self.allocator_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """Fractions of their own speed that compute and a lane keep while both run (1: independent).

    On a CPU machine every lane runs on the processors that also compute.
    """

    compute: limits.Share
    lane: limits.Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """A disk through the page cache: its link, and on a CPU what copies there leave compute."""

    link: Link
    read_contention: Contention = Contention(compute=1.0, lane=1.0)
    write_contention: Contention = Contention(compute=1.0, lane=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a machine computes, for estimates of seconds: an operator takes the larger of

        FLOPs / (flops_per_s of its dtype * the efficiency of its kind and shape)
        bytes / (memory_bytes_per_s * memory_efficiency)

    and operator_s besides. Products of matrices reach compute_efficiency, less by the tiles and
    waves of as many multiprocessors; 0 multiprocessors: the same for all shapes. Fused attention in
    16 bits reaches attention_efficiency or attention_backward_efficiency, less where rows are short
    or heads narrow; 0: compute_efficiency for all (`hardware/kernels.py` has both).

    AdamW's step in host memory takes what its threads do, host_parameters_per_s, and no more of
    host_bandwidth_bytes_per_s than there is, which the devices of a node share; 0: not known apart.
    `error_low` and `error_high` are the 10th and 90th percentiles of measured over estimated step
    seconds on this very machine; both are 0 where they were never compared.
    """

    float32_flops_per_s: limits.Speed  # dense matrix products, at the device's peak
    bfloat16_flops_per_s: limits.Speed  # also those of float16
    compute_efficiency: limits.Share  # the part of it that large matrix products reach
    memory_bytes_per_s: limits.Speed
    memory_efficiency: limits.Share
    operator_s: limits.Seconds
    host_parameters_per_s: limits.Speed  # AdamW's step in host memory
    error_low: limits.Factor = 0.0
    error_high: limits.Factor = 0.0
    host_piece_s: limits.Seconds = 0.0  # of AdamW's step on a piece, besides its parameters
    multiprocessors: limits.Number = 0  # that compute tiles of a product at the same time
    attention_efficiency: limits.ShareIfKnown = 0.0  # of long rows in heads 128 wide, forward
    attention_backward_efficiency: limits.ShareIfKnown = 0.0
    host_bandwidth_bytes_per_s: limits.SpeedIfKnown = 0.0  # of the memory of a node's host

    def flops_per_s(self, *, half: bool) -> float:
        """The peak rate of dense products, in 16 bits or in 32."""
        return self.bfloat16_flops_per_s if half else self.float32_flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """How fast W ranks gather and reduce together, in bytes that a rank gets from the others.

    Of S bytes that all hold together a rank gets S (W - 1) / W, so these are what nccl-tests calls
    bus bandwidths. `latency_s` is that of one of the W - 1 hops that a collective takes.
    """

    gather_bytes_per_s: limits.Speed  # all-gather
    reduce_bytes_per_s: limits.Speed  # reduce-scatter
    latency_s: limits.Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """The network between the devices that train one model.

    `contention` is that of compute and a collective. `link_share` is the fraction of its own speed
    that a collective, and a link to a lower tier, keep while both run: 1 for independent ways, 0.5
    for one that both share. `library_bytes` are what the library of collectives holds on each
    device besides tensors. `below`: whether the tiers' capacities, the disk's speed and the host
    optimizer's are the node's, shared by its ranks, or each device's.
    """

    devices_per_node: limits.Count
    intra_node: Collectives  # among the devices of a node
    inter_node: Collectives | None = None  # among those of several nodes; absent: there is one
    contention: Contention = Contention(compute=1.0, lane=1.0)
    link_share: limits.Half = 1.0
    library_bytes: limits.Bytes = 0
    below: Shared = "of the node"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedError:
    """How far estimates were from runs that others published.

    `low` and `high` are the 10th and 90th percentiles of measured over estimated seconds, of `runs`
    runs on devices of this architecture; `source` names them.
    """

    low: limits.Factor
    high: limits.Factor
    runs: limits.Count
    source: str


KEPT_PROBE = "reused from an earlier profile: protrain profile --probe measures the machine again"
"""One of the `sources` of a machine that was not probed anew."""


LaunchKind = Literal["fetch", "swap", "spill gradients", "update", "streamed update"]
"""Kinds of moves by what the launching thread does for them: a "streamed update" is a read, a step
or a write of states that the device updates from below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveLaunch:
    """Processor seconds of the launching thread for a move of a kind.

    `seconds`, and `tensor_s` for each of its unit's parameters, or its share of them.
    """

    kind: LaunchKind
    seconds: limits.Seconds
    tensor_s: limits.Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One machine: a device, the tiers below it in order of distance, and how lanes interfere.

    `rates` are there for estimates of a model's seconds, `interconnect` for several devices;
    `published_error` says how far these seconds were from published runs, where none were measured
    on the machine itself; `sources` say where the numbers are from. `move_s` is what a move takes
    of the thread that computes, or that launches compute on an accelerator, to be submitted and
    ended; `launches` have it by kind, where measured. `price_per_hour` is of one device with its
    part of a node, in any currency, `power_w` its board's maximum in watts; 0: unknown.
    """

    name: str
    device: Device
    tiers: tuple[Tier, ...]
    read_contention: Contention
    write_contention: Contention
    update_contention: Contention
    rates: Rates | None = None
    interconnect: Interconnect | None = None
    sources: tuple[limits.Lines, ...] = ()
    move_s: limits.Seconds = 0.0
    launches: tuple[MoveLaunch, ...] = ()
    price_per_hour: limits.Price = 0.0
    published_error: PublishedError | None = None
    power_w: limits.Factor = 0.0

    @property
    def is_compared(self) -> bool:
        """Whether estimated seconds were compared with measured ones of this very machine."""
        return self.rates is not None and self.rates.error_high > 0

    @property
    def error_band(self) -> tuple[float, float]:
        """Measured over estimated step seconds, 10th and 90th percentile; zeros where unknown."""
        if self.rates is not None and self.is_compared:
            return self.rates.error_low, self.rates.error_high
        published = self.published_error
        return (published.low, published.high) if published else (0.0, 0.0)

    def tier(self, name: TierName) -> Tier:
        """The tier called `name`; KeyError where this machine has none."""
        return {tier.name: tier for tier in self.tiers}[name]

    def with_tier(self, changed: Tier) -> "Hardware":
        """Return the machine with a tier in place of the one of this name."""
        tiers = tuple(changed if one.name == changed.name else one for one in self.tiers)
        return replace(self, tiers=tiers)

    def with_link(self, name: TierName, read: float, write: float) -> "Hardware":
        """Return the machine with a link of these speeds between its device and a tier."""
        tier = self.tier(name)
        link = replace(tier.link, read_bytes_per_s=read, write_bytes_per_s=write)
        return self.with_tier(replace(tier, link=link))
