"""Programmes for several devices: shards, collectives and their order, and one rank's bytes."""

from dataclasses import replace
from typing import get_args

import pytest

from protrain_runtime.contract.program.compiling import compile_plan
from protrain_runtime.contract.program.program import (
    COLLECT,
    MAX_PARTS,
    MIN_PART_BYTES,
    ChunkSize,
    Program,
    gradient_home,
    padded,
    parts,
    shard_of,
)
from protrain_runtime.contract.records import dumps_plan, loads_plan
from protrain_runtime.contract.records.hardware import DeviceKind
from protrain_runtime.contract.records.plan import (
    ALONE,
    KEEP,
    PERSISTENT,
    DeviceGroup,
    Placement,
    Schedule,
    StateTier,
    StepSettings,
    UnitPlan,
    Updates,
)
from tests.support.record_samples import PLAN

CHUNK = ChunkSize(
    parameter_bytes=4000,
    gradient_bytes=3000,
    state_bytes=6000,
    num_parameters=750,
    used_by=(0,),
    parameter_pieces=(2500, 1500),
    gradient_pieces=(2500, 500),
)


def settings(num_devices: int, *, num_replicas: int = 1, updates: Updates) -> StepSettings:
    group = DeviceGroup(num_devices=num_devices, num_replicas=num_replicas)
    return StepSettings(piece_bytes=1000, updates=updates, group=group)


IN_BACKWARD = settings(2, updates="in backward")


def compiled(
    *states: Placement,
    of: StepSettings = IN_BACKWARD,
    schedule: Schedule = Schedule(),  # noqa: B008
) -> Program:
    units = [
        UnitPlan(name=f"layers.{n}", activations=KEEP, states=place, schedule=schedule)
        for n, place in enumerate(states)
    ]
    chunks = [replace(CHUNK, used_by=(number,)) for number in range(len(states))]
    return compile_plan(units, chunks, of, device="cpu")


def names(program: Program) -> list[str]:
    return [program.move_name(number) for number in range(len(program.moves))]


def test_a_shard_has_its_part_of_every_group_in_whole_blocks_of_256_bytes() -> None:
    own = shard_of(CHUNK, IN_BACKWARD)
    # 2500 trainable bytes: 1250 each, 5 blocks; 500 trainable and 1000 frozen ones: 1 and 2.
    assert own.parameter_pieces == (5 * 256, 256 + 2 * 256)
    assert own.gradient_pieces == (5 * 256, 256)
    assert own.num_parameters == 6 * 64  # of 4 bytes, padding included
    assert own.state_bytes == 8 * 6 * 64
    whole = padded(CHUNK, IN_BACKWARD)
    assert whole.parameter_pieces == (10 * 256, 6 * 256)
    assert (whole.num_parameters, whole.state_bytes) == (2 * 6 * 64, 2 * 8 * 6 * 64)
    assert padded(whole, IN_BACKWARD) == whole and shard_of(whole, IN_BACKWARD) == own


def test_replicas_share_nothing_with_each_other() -> None:
    of = settings(4, num_replicas=2, updates="in backward")
    assert of.group.num_shards == 2
    assert shard_of(CHUNK, of) == shard_of(CHUNK, IN_BACKWARD)


def test_on_one_device_a_chunk_is_its_own_shard() -> None:
    one = settings(1, updates="in backward")
    assert shard_of(CHUNK, one) is CHUNK and padded(CHUNK, one) is CHUNK


def test_collectives_stand_behind_what_they_need_on_one_lane() -> None:
    program = compiled(PERSISTENT, Placement(tier="device"), Placement(tier="disk"))
    assert names(program) == [
        "all-gather 1 @1",
        "fetch 2 @2",
        "all-gather 2 @2",
        "reduce-scatter 2 @3",
        *(
            f"{kind} 2 @3 [{start}:{start + 96}]"
            for start in (0, 96, 192, 288)
            for kind in ("read states", "update", "write states")
        ),
        "all-gather 1 @4",
        "reduce-scatter 1 @4",
        "all-reduce 0 @5",
    ]
    kinds = ("all-gather", "all-reduce", "reduce-scatter")
    assert {move.lane for move in program.moves if move.kind in kinds} == {COLLECT}
    by_name = dict(zip(names(program), program.moves, strict=True))
    all_gather = by_name["all-gather 2 @2"]
    assert program.move_name(all_gather.after[0]) == "fetch 2 @2"
    assert all_gather.bytes == 2 * (by_name["fetch 2 @2"].bytes or 0) == 16 * 256
    assert by_name["all-gather 1 @1"].after == ()
    # What is summed has been summed when backward ends.
    assert [program.move_name(number) for number in program.reduced] == [
        "reduce-scatter 2 @3",
        "reduce-scatter 1 @4",
        "all-reduce 0 @5",
    ]


def test_a_common_copy_is_fetched_whole_and_not_gathered() -> None:
    common = Placement(tier="host", common_copy=True)
    own = shard_of(CHUNK, IN_BACKWARD, common_copy=True)
    whole = padded(CHUNK, IN_BACKWARD, common_copy=True)
    # Of 2500 trainable bytes as ever; of 500 trainable and 1000 frozen ones: 1 and 4 blocks.
    assert own.parameter_pieces == own.gradient_pieces == (5 * 256, 256)
    assert whole.parameter_pieces == (10 * 256, 2 * 256 + 4 * 256)
    assert padded(whole, IN_BACKWARD, common_copy=True) == whole
    program = compiled(common)
    fetch, gather = program.moves[:2]
    assert (fetch.kind, fetch.bytes) == ("fetch", 6 * 256 + 4 * 256)
    assert (gather.kind, gather.bytes) == ("all-gather", 2 * 6 * 256)
    frozen = replace(
        CHUNK, gradient_bytes=0, num_parameters=0, state_bytes=0, gradient_pieces=(0, 0)
    )
    units = [UnitPlan(name="layers.0", activations=KEEP, states=common)]
    program = compile_plan(units, [frozen], IN_BACKWARD, device="cpu")
    assert names(program) == ["fetch 0 @0"]
    assert program.moves[0].bytes == 10 * 256 + 6 * 256


def test_gathered_parameters_leave_after_every_stay() -> None:
    program = compiled(
        Placement(tier="device"),
        Placement(tier="disk", keep_gathered=True),
        Placement(tier="device"),
    )
    assert [slot.release for slot in program.slots] == [[0], [], [], [2], [1], [0]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_the_shard_of_the_gradients_waits(device: DeviceKind) -> None:
    for updates in ("in backward", "after backward"):
        of = settings(2, updates=updates)
        on_disk = "device" if device == "cpu" else "host"
        assert gradient_home(Placement(tier="device"), of, device) == "device"
        assert gradient_home(Placement(tier="host"), of, device) == "host"
        assert gradient_home(Placement(tier="disk"), of, device) == on_disk


def test_a_drain_waits_for_the_sum_and_for_the_shard() -> None:
    schedule = Schedule(update_drain=0)
    program = compiled(
        PERSISTENT, Placement(tier="host"), Placement(tier="disk"), schedule=schedule
    )
    drained = [[program.move_name(number) for number in slot.drained] for slot in program.slots]
    assert drained[4:] == [
        ["reduce-scatter 2 @3", "write states 2 @3 [288:384]"],
        ["reduce-scatter 1 @4", "spill gradients 1 @4"],
    ]


def test_micro_batches_before_the_last_reduce_nothing() -> None:
    units = [UnitPlan(name="layers.0", activations=KEEP, states=Placement(tier="disk"))]
    program = compile_plan(units, [CHUNK], IN_BACKWARD, device="cpu", updating=False)
    assert names(program) == ["fetch 0 @0", "all-gather 0 @0"]
    every = replace(IN_BACKWARD, micro_batches=2, reductions="in every micro-batch")
    for tier in get_args(StateTier):
        shared = replace(units[0], states=Placement(tier=tier, keep_gathered=True))
        kept = UnitPlan(name="layers.1", activations=KEEP, states=PERSISTENT)
        chunks = [replace(CHUNK, used_by=(unit,)) for unit in (0, 1)]
        program = compile_plan([shared, kept], chunks, every, device="cuda", updating=False)
        assert names(program)[-1] == "reduce-scatter 0 @3"
        assert not any(move.kind in ("all-reduce", "spill gradients") for move in program.moves)
        alone = replace(every, micro_batches=1)
        last = compile_plan([shared, kept], chunks, every, device="cuda")
        assert last.moves == compile_plan([shared, kept], chunks, alone, device="cuda").moves


def test_plans_for_several_devices_read_back_and_others_do_not_mention_them() -> None:
    shard, held = Placement(tier="device"), Placement(tier="device", keep_gathered=True)
    units = (replace(PLAN.units[0], states=shard), replace(PLAN.units[1], states=held))
    several = replace(
        PLAN,
        units=units + PLAN.units[2:],
        settings=replace(PLAN.settings, group=replace(PLAN.group, num_devices=8, num_replicas=2)),
    )
    text = dumps_plan(several)
    assert loads_plan(text) == several
    assert "group: {num_devices: 8, num_replicas: 2}}\n" in text
    assert "states: shard" in text and "states: shard and keep gathered" in text
    assert "num_" not in dumps_plan(PLAN)


def test_large_chunks_are_fetched_and_gathered_in_parts() -> None:
    """While one part is gathered, the next is fetched; small pieces go together."""
    sizes = tuple(size << 20 for size in (24, 4, 4, 80, 20, 60))
    chunk = replace(
        CHUNK,
        parameter_bytes=sum(sizes),
        gradient_bytes=sum(sizes),
        num_parameters=sum(sizes) // 4,
        parameter_pieces=sizes,
        gradient_pieces=sizes,
    )
    units = [UnitPlan(name="layers.0", activations=KEEP, states=Placement(tier="host"))]
    program = compile_plan(units, [chunk], IN_BACKWARD, device="cpu", updating=False)
    moves = [(move.kind, move.bytes >> 20, move.after) for move in program.moves]
    # At most four parts, of at least a quarter of the chunk but for the last one.
    assert moves == [
        ("fetch", 56, ()),
        ("all-gather", 112, (0,)),
        ("fetch", 40, ()),
        ("all-gather", 80, (2,)),
    ]
    assert list(program.slots[0].ready) == [0, 1, 2, 3]
    assert parts([MIN_PART_BYTES] * MAX_PARTS) == [0.25, 0.5, 0.75, 1.0]
    alone = compile_plan(units, [chunk], replace(IN_BACKWARD, group=ALONE), device="cpu")
    assert [move.bytes >> 20 for move in alone.moves if move.kind == "fetch"] == [192]
