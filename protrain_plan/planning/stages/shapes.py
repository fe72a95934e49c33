"""Arrangements of devices for a pipeline, and how fast their links are.

devices    = stages * shards * replicas
sequences  = shards * replicas * batch * micro-batches      of a step, each stage works on all
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import (
    ALONE,
    DeviceGroup,
    PipelineLayout,
    PipelineSchedule,
    Plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An arrangement of devices.

    `group` are the devices of one stage, of which each has `batch` sequences of a micro-batch. A
    device has `chunks` runs of units: one in 1F1B, more in its interleaved form. An `eager` 1F1B
    begins with more forwards, and holds more: hops then pass while other micro-batches compute.
    """

    stages: int
    group: DeviceGroup
    batch: int  # [sequences]
    micro_batches: int
    chunks: int = 1
    eager: bool = False
    layout: PipelineLayout = "stages across nodes"

    @property
    def schedule(self) -> PipelineSchedule:
        if self.chunks > 1:
            return "interleaved 1F1B"
        return "eager 1F1B" if self.eager else "1F1B"

    def warm(self, stage: int) -> int:
        """Forwards of chunks that a device of a stage does before its first backward.

        Those of micro-batches on their way to the last stage: one a stage, or two where hops are to
        be hidden, as the interleaved schedules of PyTorch and Megatron have it. Of interleaved
        chunks, also a round of every chunk but the last.
        """
        ahead = self.stages - 1 - stage
        each = 2 if self.eager or self.chunks > 1 else 1
        forwards = (self.chunks - 1) * self.in_round + each * ahead + 1
        return min(self.micro_batches * self.chunks, forwards)

    @property
    def in_round(self) -> int:
        """Micro-batches of one chunk that are computed one after the other."""
        return self.micro_batches // max(1, self.micro_batches // self.stages)

    def held(self, stage: int) -> int:
        """Micro-batches whose activations a stage has at a time, at most, in whole stages'."""
        return -(-self.warm(stage) // self.chunks)

    def __str__(self) -> str:
        """`4 stages of 2 devices, 32 micro-batches of 1, 1F1B`."""
        count, each = self.stages, self.group.num_devices
        first = f"{count} stages of {each}" if count > 1 else f"1 stage of {each}"
        words = f"{first} device{'s' * (each > 1)}"
        if self.group.num_replicas > 1:
            words += f" ({self.group.num_replicas} replicas)"
        words += f", {self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"
        words += f" of {self.batch}"
        return words if count == 1 else f"{words}, {self.schedule}"


def shape_of(plan: Plan) -> Shape:
    """The arrangement of a plan with a pipeline."""
    assert plan.pipeline is not None
    return Shape(
        stages=plan.num_stages,
        group=plan.group,
        batch=plan.workload.batch_size,
        micro_batches=plan.settings.micro_batches,
        chunks=plan.pipeline.chunks,
        eager=plan.pipeline.schedule == "eager 1F1B",
        layout=plan.pipeline.layout,
    )


def shapes(
    whole: DeviceGroup,
    global_batch: int,
    batches: Sequence[int],
    stages: Sequence[int],
    *,
    chunks: Sequence[int] = (1,),
) -> Iterator[Shape]:
    """Every arrangement of `whole` into one of these numbers of stages, with one of the batches."""
    for p in stages:
        if whole.num_devices % p:
            continue
        each = whole.num_devices // p
        schedules = [(1, False)]  # chunks, and whether forwards are eager
        if p > 1:
            schedules += [(1, True), *((v, False) for v in chunks if v > 1)]
        for layout, nodes in _places(whole, p):
            alone = ALONE if each == 1 else DeviceGroup(num_devices=each, num_nodes=nodes)
            # No replicas, one a node, or one a device: what is between was never best.
            counts = sorted({1, alone.num_nodes, alone.num_devices})
            for count, b, (v, eager) in product(counts, batches, schedules):
                micro_batches, rest = divmod(global_batch, each * b)
                shape = Shape(
                    stages=p,
                    group=replace(alone, num_replicas=count),
                    batch=b,
                    micro_batches=micro_batches,
                    chunks=v,
                    eager=eager,
                    layout=layout,
                )
                # A round of interleaved chunks has as many micro-batches as all others.
                is_even = v == 1 or (micro_batches >= p and micro_batches % shape.in_round == 0)
                if not rest and is_even:
                    yield shape


def _places(whole: DeviceGroup, p: int) -> Iterator[tuple[PipelineLayout, int]]:
    """The layouts of p equal groups, each with the nodes that such a group is in."""
    each, node = whole.num_devices // p, whole.in_node
    if each % node == 0 or node % each == 0:
        yield "stages across nodes", max(1, each // node)
    if whole.num_nodes > 1 and p > 1 and node % p == 0:
        yield "stages within nodes", whole.num_nodes


def hop_seconds(
    hardware: Hardware, whole: DeviceGroup, shape: Shape, num_bytes: int
) -> tuple[float, ...]:
    """Seconds from each stage to the next one, and from the last to the first (of chunks).

    latency + bytes / bandwidth. The devices that send from a node to another share what joins them.
    """
    joined = hardware.interconnect
    if shape.stages == 1 or joined is None:
        return (0.0,) * shape.stages
    each, node = shape.group.num_devices, whole.in_node
    near, far = joined.intra_node, joined.inter_node
    apart = shape.layout == "stages across nodes"
    hops: list[float] = []
    for stage in range(shape.stages):
        following = (stage + 1) % shape.stages
        if apart and stage * each // node != following * each // node:
            assert far, "asked when the group was made"
            taken = num_bytes * min(node, each) / far.gather_bytes_per_s
            hops.append(far.latency_s + taken)
        else:
            hops.append(near.latency_s + num_bytes / near.gather_bytes_per_s)
    return tuple(hops)


def joined_for(hardware: Hardware, shape: Shape) -> Hardware:
    """The machine as one stage has it: what joins nodes is shared by the stages in a node."""
    joined = hardware.interconnect
    if joined is None or joined.inter_node is None or shape.layout == "stages across nodes":
        return hardware
    far = joined.inter_node
    part = replace(
        far,
        gather_bytes_per_s=far.gather_bytes_per_s / shape.stages,
        reduce_bytes_per_s=far.reduce_bytes_per_s / shape.stages,
    )
    return replace(hardware, interconnect=replace(joined, inter_node=part))
