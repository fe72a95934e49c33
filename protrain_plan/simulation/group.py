"""Several devices: one rank's part of its machine, and seconds of collectives."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Literal

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import (
    Hardware,
    Interconnect,
    Link,
    Tier,
    is_accelerator,
)
from protrain_runtime.contract.records.plan import ALONE, DeviceGroup, Plan, StepSettings
from protrain_runtime.contract.records.profile import Profile

Collective = Literal["all-gather", "reduce-scatter", "all-reduce"]


def group_on(
    hardware: Hardware, num_devices: int, *, num_nodes: int | None = None, num_replicas: int = 1
) -> DeviceGroup:
    """`num_devices` of a machine's kind, by default in as few nodes as possible.

    ProtrainError if the machine has no network between devices, nodes or replicas would have
    unequal parts, or nodes lack, or are not joined for, that many devices.
    """
    if num_devices == 1 and num_nodes in (None, 1) and num_replicas == 1:
        return ALONE
    joined = interconnect_of(hardware)
    most = joined.devices_per_node
    if num_nodes is None:
        nodes = (n for n in range(1, num_devices + 1) if num_devices % n == 0)
        num_nodes = next(n for n in nodes if num_devices <= n * most)
    for what, parts in (("nodes", num_nodes), ("replicas", num_replicas)):
        if num_devices % parts:
            raise ProtrainError(
                f"{num_devices} devices cannot be divided into {parts} {what}", key=f"--{what}"
            )
    group = DeviceGroup(num_devices=num_devices, num_replicas=num_replicas, num_nodes=num_nodes)
    if group.in_node > most:
        raise ProtrainError(
            f"{hardware.name} has {most} devices in a node, not {group.in_node}",
            key="--nodes",
            fix=f"--nodes {-(-num_devices // most)}",
        )
    if num_nodes > 1 and joined.inter_node is None:
        raise ProtrainError(
            f"{hardware.name} does not describe the network between its nodes",
            key="--num-devices",
            fix="add inter_node: to its interconnect:, or measure it with protrain hardware probe",
        )
    return group


def not_joined(plan: Plan, hardware: Hardware) -> str | None:
    """The reason that a machine's devices cannot be the plan's; None if they can."""
    try:
        group_on(hardware, **asdict(plan.whole))
    except ProtrainError as error:
        return error.message
    return None


def interconnect_of(hardware: Hardware) -> Interconnect:
    """The interconnect of a machine; ProtrainError without one."""
    if hardware.interconnect is None:
        raise ProtrainError(
            f"{hardware.name} does not describe the links between its devices",
            key="--num-devices",
            fix="add interconnect: to its hardware (devices_per_node, and intra_node: of"
            " gather_bytes_per_s, reduce_bytes_per_s and latency_s), take another machine's"
            " (protrain profile --interconnect MACHINE), or measure it:"
            " torchrun --nproc-per-node N --no-python protrain hardware probe",
        )
    return hardware.interconnect


def through_cache(hardware: Hardware, page_cache_bytes: int) -> Hardware:
    """The plan's machine: its disk through the page cache, if that counts as memory.

    The disk then has the cache's size. ProtrainError if its speed was not measured.
    """
    disk = next((tier for tier in hardware.tiers if tier.name == "disk"), None)
    if not page_cache_bytes or disk is None:
        return hardware
    if (cached := disk.cached) is None:
        raise ProtrainError(
            f"{hardware.name} lacks the speed of its disk through the page cache",
            key="--page-cache",
            fix="measure the machine (protrain profile, or protrain hardware probe), or plan"
            " without it: what is on disk then bypasses the cache",
        )
    capacity = min(disk.capacity_bytes, page_cache_bytes)
    found = hardware.with_tier(replace(disk, capacity_bytes=capacity, link=cached.link))
    if is_accelerator(hardware.device.kind):
        return found
    read, write = cached.read_contention, cached.write_contention
    return replace(found, read_contention=read, write_contention=write)


def profile_for(profile: Profile, plan: Plan) -> Profile:
    """The profile of one of a plan's ranks, with the disk as the plan uses it."""
    found = profile_of_rank(profile, plan.group)
    return replace(found, hardware=through_cache(found.hardware, plan.settings.page_cache_bytes))


def profile_of_rank(profile: Profile, group: DeviceGroup) -> Profile:
    """The profile with one rank's part of its machine; unchanged for one device, and idempotent.

    A node's ranks share the capacities, threads, disk and optimizer speed given per node. They
    always share host memory: each updates at its part of that bandwidth, and no link to it exceeds
    that part in either direction. The collectives library counts with the context. ProtrainError if
    the machine has no network between devices.
    """
    if group.num_devices == 1:
        return profile
    hardware, optimizer = profile.hardware, profile.optimizer
    joined, device = interconnect_of(hardware), hardware.device
    shared = group.in_node if joined.below == "of the node" else 1
    context_bytes = device.context_bytes + joined.library_bytes
    num_threads = max(1, device.num_threads // shared)
    tiers: list[Tier] = []
    for tier in hardware.tiers:
        link = tier.link
        if tier.name == "host" and hardware.rates and hardware.rates.host_bandwidth_bytes_per_s:
            own = hardware.rates.host_bandwidth_bytes_per_s / group.in_node
            link = _slower(link, partial(min, own))
        if tier.name == "disk":  # each device has its own link to host memory
            link = _slower(link, lambda speed: speed / shared)
            if tier.cached is not None:
                cached = _slower(tier.cached.link, lambda speed: speed / shared)
                tier = replace(tier, cached=replace(tier.cached, link=cached))
        tiers.append(replace(tier, capacity_bytes=tier.capacity_bytes // shared, link=link))
    host, of_node = optimizer.host_parameters_per_s / shared, optimizer.node_parameters_per_s
    if of_node:
        host = min(host, of_node / group.in_node)
    units = profile.units
    if optimizer.block > 1:
        why = f"devices would cut the {optimizer.block} elements of an optimizer's block"
        units = tuple(
            replace(unit, stays=unit.stays or why) if unit.num_parameters else unit
            for unit in units
        )
    return replace(
        profile,
        units=units,
        hardware=replace(
            hardware,
            device=replace(device, context_bytes=context_bytes, num_threads=num_threads),
            tiers=tuple(tiers),
            interconnect=replace(joined, below="of each device", library_bytes=0),
        ),
        optimizer=replace(optimizer, host_parameters_per_s=host),
    )


def _slower(link: Link, of: Callable[[float], float]) -> Link:
    """The link with each speed mapped by `of`."""
    read, write = of(link.read_bytes_per_s), of(link.write_bytes_per_s)
    return replace(link, read_bytes_per_s=read, write_bytes_per_s=write)


def collective_seconds(
    kind: Collective, num_bytes: int, hardware: Hardware, settings: StepSettings
) -> float:
    """Seconds of a collective alone that fills or sums `num_bytes` on every rank.

    latency + bytes of others / bus bandwidth, of each ring that it takes (see `_rings`).
    """
    rings = _rings(kind, hardware, settings)
    return sum(hops_s + num_bytes * per_byte for hops_s, per_byte in rings)


def collective_seconds_per_byte(
    kind: Collective, hardware: Hardware, settings: StepSettings
) -> float:
    """Seconds of a collective per byte, for large ones."""
    return sum(per_byte for _, per_byte in _rings(kind, hardware, settings))


def _rings(
    kind: Collective, hardware: Hardware, settings: StepSettings
) -> list[tuple[float, float]]:
    """Latency, and seconds per byte of the buffer, of each part of a collective.

    Shards are gathered and scattered among neighbouring ranks that share them. With replicas, each
    rank's shard of a sum is also summed over the replicas: one ring per rank of a node, at once,
    over the shared network between nodes. A sum for all ranks is scattered and gathered.
    """
    joined = interconnect_of(hardware)
    shards, replicas = settings.group.num_shards, settings.group.num_replicas
    in_node = settings.group.num_devices // settings.group.num_nodes

    def ring(
        ranks: int, nodes: int, *, part: float = 1.0, at_once: int = 1
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Latency and seconds per byte of gathering, then of reducing."""
        speeds = joined.intra_node
        if nodes > 1:
            assert joined.inter_node, "asked when the group was made"
            speeds = joined.inter_node
        hops = ranks - nodes if nodes > 1 else ranks - 1
        hops_s = hops * joined.intra_node.latency_s + (
            nodes * speeds.latency_s if nodes > 1 else 0.0
        )
        others = part * (ranks - 1) / ranks * at_once  # of the buffer's bytes
        return (
            (hops_s, others / speeds.gather_bytes_per_s),
            (hops_s, others / speeds.reduce_bytes_per_s),
        )

    if kind == "all-reduce":
        gathered, reduced = ring(settings.group.num_devices, settings.group.num_nodes)
        return [reduced, gathered]
    gathered, reduced = ring(shards, -(-shards // in_node))
    if kind == "all-gather":
        return [gathered]
    rings = [reduced]
    if settings.adds_shards and (rates := hardware.rates):
        # The shard is added to earlier micro-batches': two are read, one is written.
        bytes_per_s = rates.memory_bytes_per_s * rates.memory_efficiency
        rings.append((0.0, 3 / shards / bytes_per_s))
    if replicas > 1:
        far = min(replicas, settings.group.num_nodes)
        at_once = min(shards, in_node) if far > 1 else 1
        gathered, reduced = ring(replicas, far, part=1 / shards, at_once=at_once)
        rings += [reduced, gathered]
    return rings
