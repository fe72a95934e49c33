"""Timelines, stalls and reports against ones computed by hand, and laws of random steps."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protrain_plan.simulation.critical_path import critical_path, waits_of
from protrain_plan.simulation.report import in_words, report
from protrain_plan.simulation.timeline import (
    first_step_seconds,
    launch_seconds,
    simulate,
    simulated_seconds,
)
from protrain_runtime.contract.program.compiling import bind
from protrain_runtime.contract.program.effects import BoundProgram, Implications
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.hardware import (
    Contention,
    Hardware,
    LaunchKind,
    Link,
    MoveLaunch,
    Tier,
)
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
    Schedule,
    StepSettings,
    TierBytes,
    UnitPlan,
    Updates,
)
from protrain_runtime.contract.records.profile import Profile
from tests.support.messages import Speaker
from tests.support.planning_cases import MB, cpu, decoder, gpu, random_profile, unit
from tests.support.programs import compile_units
from tests.support.random_problems import random_units

GB = 1000 * MB
Decision = tuple[Activations, Placement, Schedule]
PLAIN: Decision = (KEEP, PERSISTENT, Schedule())
OFFLOADED: Decision = (KEEP, Placement(tier="host"), Schedule())


def swapped(**schedule: Any) -> Decision:
    return (Activations(tier="host"), PERSISTENT, Schedule(**schedule))


def machine(*, duplex: float = 1.0, compute: float = 1.0, lane: float = 1.0) -> Hardware:
    """1 GB/s each way, no latency."""
    link = Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9, latency_s=0.0, duplex=duplex)
    contention = Contention(compute=compute, lane=lane)
    return replace(
        gpu(),
        tiers=(Tier(name="host", capacity_bytes=1000 * GB, link=link),),
        read_contention=contention,
        write_contention=contention,
        update_contention=Contention(compute=1.0, lane=1.0),
    )


def two_units(hardware: Hardware | None = None, *, count: int = 2) -> Profile:
    """Forward 1 s each, backward 2 s each (3 s with recomputation); 1 GB of parameters each.

    Updates: 0.5 s per chunk on the host, 0.1 s on the device. 1.5 GB to swap.
    """
    sizes = {"parameters": 500 * MB, "kept": 1600 * MB, "inputs": 100 * MB}
    units = (unit(f"layers.{n}", **sizes, seconds=1.0, used_by=(n,)) for n in range(count))
    profile = decoder(hardware or machine(), blocks=1, host_speed=1e9, device_speed=5e9)
    return replace(profile, units=tuple(units))


def decided(*decisions: Decision) -> list[UnitPlan]:
    return [
        UnitPlan(name=f"layers.{n}", activations=activations, states=states, schedule=schedule)
        for n, (activations, states, schedule) in enumerate(decisions)
    ]


def program_of(
    *decisions: Decision, profile: Profile | None = None, piece_bytes: int = 32 << 20
) -> BoundProgram:
    return compile_units(decided(*decisions), profile or two_units(), piece_bytes=piece_bytes)


def times(program: BoundProgram) -> dict[str, list[float]]:
    assert device_bytes(program)
    spans = simulate(program).spans
    return {span.name: [round(span.start_s, 6), round(span.end_s, 6)] for span in spans}


def stalls(*decisions: Decision) -> list[tuple[object, ...]]:
    found = simulate(program_of(*decisions)).stalls
    return [(s.slot, round(s.seconds, 6), s.waited_for, s.lane, s.reason) for s in found]


# --- by hand --------------------------------------------------------------------------------------


def test_kept_and_persistent_is_compute_and_the_devices_update() -> None:
    program = program_of(PLAIN, PLAIN)
    assert times(program) == {
        "forward 0": [0, 1],
        "forward 1": [1, 2],
        "backward 1": [2, 4],
        "backward 0": [4, 6],
        "update on the device": [6, 6.2],
    }
    assert simulate(program).stalls == ()


def test_offloaded_without_lead_stalls_for_every_gather() -> None:
    # The stay of unit 1 covers forward and backward: one gather. Unit 0 is gathered twice.
    assert times(program_of(OFFLOADED, OFFLOADED)) == {
        "fetch 0 @0": [0, 1],
        "forward 0": [1, 2],
        "fetch 1 @1": [2, 3],
        "forward 1": [3, 4],
        "backward 1": [4, 6],
        "fetch 0 @3": [6, 7],
        "spill gradients 1 @2": [6, 7],
        "backward 0": [7, 9],
        "update 1 @2 [0:500000000]": [7, 7.5],
        "spill gradients 0 @3": [9, 10],
        "update 0 @3 [0:500000000]": [10, 10.5],
    }
    assert stalls(OFFLOADED, OFFLOADED) == [
        (0, 1.0, "fetch 0 @0", "fetch host", "fetch"),
        (1, 1.0, "fetch 1 @1", "fetch host", "fetch"),
        (3, 1.0, "fetch 0 @3", "fetch host", "fetch"),
        (5, 1.5, "update 0 @3 [0:500000000]", "update host", "end"),
    ]


EARLY: Decision = (KEEP, Placement(tier="host"), Schedule(forward_lead=1, backward_lead=1))


@pytest.mark.parametrize(
    ("hardware", "decisions", "expected"),
    [
        pytest.param(
            machine(),
            [(RECOMPUTE, PERSISTENT, Schedule()), PLAIN],
            {"backward 0": [4, 7], "update on the device": [7, 7.2]},
            id="recomputation takes its backward seconds",
        ),
        pytest.param(
            machine(),
            [EARLY, EARLY],  # unit 0's own gather has the lane until 1 s
            {"fetch 1 @1": [1, 2], "fetch 0 @3": [3, 4], "backward 0": [5, 7]},
            id="leads hide gathers behind compute",
        ),
        pytest.param(
            machine(duplex=0.5),
            # Gather of unit 0 and spill of unit 1 run together from 6 s, each at half its speed.
            [OFFLOADED, OFFLOADED],
            {"fetch 0 @3": [6, 8], "spill gradients 1 @2": [6, 8]},
            id="both directions share a half-duplex link",
        ),
        # The swap out of unit 0 (1.5 GB) runs beside forward 1: compute at 0.8, the lane at 0.5.
        # It takes 1.5 / 0.5 = 3 s beside compute: all of forward 1 (1 / 0.8 = 1.25 s) and 1.75 s
        # of backward 1, which has done 1.4 of its 2 s then.
        pytest.param(
            machine(compute=0.8, lane=0.5),
            [swapped(), PLAIN],
            {
                "forward 1": [1, 2.25],
                "swap out 0 @0": [1, 4],
                "backward 1": [2.25, 4.6],
                "swap in 0 @3": [4.6, 6.1],
            },
            id="compute and lanes slow each other down",
        ),
        pytest.param(
            machine(),
            [swapped(swap_drain=0), PLAIN],
            {"swap out 0 @0": [1, 2.5], "forward 1": [2.5, 3.5]},
            id="drains hold compute until the bytes have left",
        ),
    ],
)
def test_times_are_those_computed_by_hand(
    hardware: Hardware, decisions: Sequence[Decision], expected: dict[str, list[float]]
) -> None:
    found = times(program_of(*decisions, profile=two_units(hardware)))
    assert {name: found[name] for name in expected} == expected


def test_states_on_disk_are_read_updated_and_written_in_turn() -> None:
    hardware = cpu(read=1e9, write=1e9, duplex=1.0, contention=1.0)
    (tier,) = hardware.tiers
    hardware = replace(
        hardware,
        tiers=(replace(tier, link=replace(tier.link, latency_s=0.0)),),
        update_contention=Contention(compute=1.0, lane=1.0),
    )
    on_disk: Decision = (KEEP, Placement(tier="disk"), Schedule())
    found = times(program_of(on_disk, PLAIN, profile=two_units(hardware), piece_bytes=1 << 40))
    # 1 GB of parameters before forward, again before backward, then 6 GB of states, 0.5 s of
    # update, 7 GB of states and parameters.
    assert found["backward 0"] == [6, 8]
    assert found["read states 0 @3 [0:500000000]"] == [8, 14]
    assert found["update 0 @3 [0:500000000]"] == [14, 14.5]
    assert found["write states 0 @3 [0:500000000]"] == [14.5, 21.5]


def test_what_the_runtime_itself_costs_is_time_of_compute_and_of_the_update_lane() -> None:
    """A second per move that is submitted around a slot, a quarter of one per piece."""
    processor = replace(machine().device, kind="cpu")
    profile = two_units(replace(machine(), move_s=1.0, device=processor))
    profile = replace(profile, optimizer=replace(profile.optimizer, host_piece_s=0.25))
    found = times(program_of(OFFLOADED, PLAIN, profile=profile))
    assert found["forward 0"] == [1, 3]  # after its gather, with a second for having submitted it
    assert found["forward 1"] == [3, 4]
    assert found["backward 1"] == [4, 6]
    # The next gather, 2 s of backward, and a second each for the gather, the gradients and update.
    assert found["backward 0"] == [7, 12]
    assert found["spill gradients 0 @3"] == [12, 13]
    assert found["update 0 @3 [0:500000000]"] == [13, 13.75]


def test_an_accelerator_waits_where_its_launches_fall_behind() -> None:
    """Half a second of launches in forward and 2.5 in backward, and a second for each move."""
    profile = two_units(replace(machine(), move_s=1.0))
    units = []
    for one in profile.units:
        each = (replace(cost, forward_launch_s=0.5, backward_launch_s=2.5) for cost in one.forms)
        units.append(replace(one, forms=tuple(each)))
    found = times(program_of(OFFLOADED, PLAIN, profile=replace(profile, units=tuple(units))))
    # By the thread: a fetch and the launches of forward 0 until 1.5, of forward 1 until 2, of
    # backward 1 until 4.5, and of backward 0, with a fetch, gradients and an update, until 10.
    assert found["forward 0"] == [1, 2]  # after its fetch
    assert found["forward 1"] == [2, 3]  # as long as it computes: the thread is ahead
    assert found["backward 1"] == [3, 5]
    assert found["backward 0"] == [6, 10]


def test_moves_are_launched_in_seconds_of_their_kind() -> None:
    """By the parameters that they move, where a machine says so; one second for all others."""
    costs: list[tuple[LaunchKind, float, float]] = [
        ("fetch", 1.0, 0.5),
        ("spill gradients", 3.0, 0.25),
        ("update", 0.0, 4.0),
        ("streamed update", 5.0, 1.0),
    ]
    launches = tuple(MoveLaunch(kind=kind, seconds=a, tensor_s=b) for kind, a, b in costs)
    tensors = (
        "embedding.weight 8x8 float32 trainable",
        "layers.0-1.a.weight 8x8 float32 trainable",
        "layers.0.b.weight 8x8 float32 frozen",
        "layers.1.b.scale 8x8 float32 buffer",
    )
    profile = two_units(replace(machine(), move_s=7.0, launches=launches))
    both: Decision = (Activations(tier="host"), *OFFLOADED[1:])
    streamed: Decision = (KEEP, Placement(tier="host", update_on_device=True), Schedule())
    program = program_of(
        both, streamed, profile=replace(profile, tensors=tensors), piece_bytes=2000 * MB
    )
    found = defaultdict[tuple[str, int], list[float]](list)
    for move, seconds in zip(program.moves, launch_seconds(program), strict=True):
        found[move.kind, move.unit].append(round(seconds, 6))
    third = 5.333333  # of a parameter, in a piece
    assert found == {
        ("fetch", 0): [2.0, 2.0],  # two parameters, forward and backward
        ("swap out", 0): [7.0],
        ("swap in", 0): [7.0],
        ("spill gradients", 0): [3.5],
        ("update", 0): [8.0],
        ("fetch", 1): [1.5],
        ("read states", 1): [third] * 3,
        ("update", 1): [third] * 3,
        ("write states", 1): [third] * 3,
    }


@pytest.mark.parametrize(("lead", "period"), [(1, 9.2), (0, 10.2)])
def test_an_update_runs_on_beside_the_next_forward(lead: int, period: float) -> None:
    """Three forwards and backwards take 9 s, and the device's update of two chunks 0.2 s.

    The update in host memory takes 0.5 s. The next step has 2 s of compute before the fetch of what
    is updated ends, if that starts a slot early; else compute waits for the fetch, 1 s.
    """
    gathered = Placement(tier="host", keep_gathered=True)
    plans = decided(PLAIN, PLAIN, (KEEP, gathered, Schedule(forward_lead=lead)))
    step = StepSettings(piece_bytes=32 << 20, updates="after backward")
    apart, overlapping = (
        bind(plans, Implications(two_units(count=3), replace(step, overlap_steps=overlap)))
        for overlap in (False, True)
    )
    wait = 1.0 - lead
    assert simulate(apart).step_seconds == pytest.approx(9.5 + wait)
    assert first_step_seconds(overlapping) == pytest.approx(9.5 + wait)
    found = simulate(overlapping)
    assert found.step_seconds == pytest.approx(period)
    assert simulated_seconds(overlapping)[0] == pytest.approx(period)
    (update,) = (span for span in found.spans if span.name.startswith("update 2"))
    assert (update.start_s, update.end_s) == pytest.approx((period - 0.2, period + 0.3))


def on_link(profile: Profile, rate: float) -> Profile:
    (tier,) = profile.hardware.tiers
    link = replace(tier.link, read_bytes_per_s=rate, write_bytes_per_s=rate)
    return replace(profile, hardware=replace(profile.hardware, tiers=(replace(tier, link=link),)))


def test_lanes_at_half_their_speed_are_those_of_a_machine_with_half_of_it() -> None:
    profile = two_units()
    optimizer = profile.optimizer
    slow = replace(
        optimizer,
        host_parameters_per_s=optimizer.host_parameters_per_s / 2,
        host_piece_s=optimizer.host_piece_s * 2,
    )
    at_half = program_of(OFFLOADED, OFFLOADED, profile=profile)
    halved = replace(on_link(profile, 0.5e9), optimizer=slow)
    expected = simulated_seconds(program_of(OFFLOADED, OFFLOADED, profile=halved))
    assert simulated_seconds(at_half)[0] < expected[0]
    assert simulated_seconds(at_half, lanes_at=0.5) == pytest.approx(expected)


def two_units_that_stream() -> Profile:
    """Two units whose states take a sixth of a second per GB, and 1 s of the device's optimizer."""
    profile = on_link(two_units(), 6e9)
    return replace(profile, optimizer=replace(profile.optimizer, device_parameters_per_s=5e8))


def test_an_update_of_streamed_states_takes_turns_with_compute() -> None:
    """A sixth of a second per GB: states come in 1 s, and leave with the parameters in 7/6 s.

    Backward has 1 s of 2 left when the update begins, which takes 1 s alone: both end 2 s later.
    """
    profile = two_units_that_stream()
    streamed: Decision = (KEEP, Placement(tier="host", update_on_device=True), Schedule())
    program = program_of(PLAIN, streamed, profile=profile, piece_bytes=1 << 40)
    found = times(program)
    assert found["backward 0"] == [4.166667, 7.166667]
    assert found["read states 1 @2 [0:500000000]"] == [4.166667, 5.166667]
    assert found["update 1 @2 [0:500000000]"] == [5.166667, 7.166667]
    assert found["write states 1 @2 [0:500000000]"] == [7.166667, 8.333333]
    # Four pieces of staging; the chunk stands in place until its only piece is written.
    slots, one = device_bytes(program), profile.units[1]
    assert slots[0].by_kind["staging"] >= 4 * one.state_bytes
    assert slots[3].by_kind["leaving"] == one.parameter_bytes + one.gradient_bytes
    assert program.tier_bytes("host") < one.parameter_bytes + one.state_bytes + 2**20


def test_a_clipped_step_does_speculative_updates_again() -> None:
    """As above, but gradients leave first, for 1/6 s, and come back with states and parameters.

    A step that is clipped reads all again when backward has ended. Its second update takes turns
    with the rest of the device's own.
    """
    profile = two_units_that_stream()

    def program(*, clipped: bool = False, speculate: bool = True) -> BoundProgram:
        ahead = Placement(tier="host", update_on_device=True, speculate=speculate)
        return compile_units(
            decided(PLAIN, (KEEP, ahead, Schedule())),
            profile,
            piece_bytes=1 << 40,
            updates="after backward",
            clipped=clipped,
        )

    first, second, waiting = program(), program(clipped=True), program(speculate=False)
    assert second.moves[: len(first.moves)] == first.moves
    assert second.again == set(range(len(first.moves), len(second.moves))) and not first.again
    found, clipped = times(first), times(second)
    assert found["spill gradients 1 @2"] == [4.166667, 4.333333]
    assert found["read states 1 @2 [0:500000000]"] == [4.333333, 5.666667]
    assert found["update 1 @2 [0:500000000]"] == [5.666667, 7.666667]
    assert found["backward 0"] == [4.166667, 6.666667]
    assert found["update on the device"] == [6.666667, 8.166667]
    assert found["write states 1 @2 [0:500000000]"] == [7.666667, 8.833333]
    assert clipped["write states 1 @2 [0:500000000]"] == [7.666667, 8.833333]
    assert clipped["read states 1 @4 [0:500000000]"] == [6.666667, 8.0]
    assert clipped["update 1 @4 [0:500000000]"] == [8.0, 9.166667]
    assert clipped["write states 1 @4 [0:500000000]"] == [9.166667, 10.333333]
    assert simulate(first).step_seconds < simulate(waiting).step_seconds
    # The same stands on the device; below it, parameters and states do twice.
    assert device_bytes(first) == device_bytes(second) == device_bytes(waiting)
    one = profile.units[1]
    more = first.tier_bytes("host") - waiting.tier_bytes("host")
    assert 0 <= more - one.parameter_bytes - one.state_bytes < 2**20


def test_a_stall_is_named_after_the_last_of_the_moves_awaited() -> None:
    assert stalls(swapped(swap_drain=0), PLAIN) == [
        (1, 1.5, "swap out 0 @0", "spill host", "drain"),
        (3, 1.5, "swap in 0 @3", "fetch host", "fetch"),
    ]
    # Slot 3 waits for 1 GB of parameters, then 1.5 GB of activations on the same lane.
    both: Decision = (Activations(tier="host"), Placement(tier="host"), Schedule())
    assert stalls(both, PLAIN)[1] == (3, 2.5, "swap in 0 @3", "fetch host", "fetch")
    led: Decision = (Activations(tier="host"), Placement(tier="host"), Schedule(swap_lead=1))
    # Forward 1 ends at 3 s, the swap out at 3.5 s, before which backward 1 may not start: the
    # swap in runs until 5 s and the gather after backward 1, from 5.5 s.
    assert stalls(led, PLAIN)[1:3] == [
        (2, 0.5, "swap out 0 @0", "spill host", "drain"),
        (3, 1.0, "fetch 0 @3", "fetch host", "fetch"),
    ]


def test_the_critical_path_of_a_fetch_without_lead() -> None:
    """Both chunks are fetched for forward and for backward; the last update is on the host."""
    program = program_of(OFFLOADED, PLAIN)
    assert [part[:3] for part in critical_path(program, simulate(program))] == [
        ("fetch host", "fetch 0 @0", "fetch 0 @0"),
        ("compute", "forward 0", "backward 1"),
        ("fetch host", "fetch 0 @3", "fetch 0 @3"),
        ("compute", "backward 0", "backward 0"),
        ("spill host", "spill gradients 0 @3", "spill gradients 0 @3"),
        ("update host", "update 0 @3 [0:500000000]", "update 0 @3 [0:500000000]"),
    ]


@pytest.mark.parametrize(
    "decisions",
    [
        # Slot 1 waits for the swap out (1.5 s), then for unit 1's gather (1 s), and slot 3 for the
        # swap in (1.5 s). Unit 1's spill and update end beside backward 0.
        pytest.param([swapped(swap_drain=0), OFFLOADED], id="stalls"),
        # The first two gathers, the third, then the spill of unit 0 and its update.
        pytest.param([OFFLOADED, OFFLOADED], id="the end of the step"),
        pytest.param([PLAIN, PLAIN], id="nothing moves"),
    ],
)
def test_words_for_a_step(decisions: Sequence[Decision], assert_says: Speaker) -> None:
    found = report(program_of(*decisions))
    assert_says(in_words(found))
    assert_says([f"{lane}: {seconds:.3f} s" for lane, seconds in found.stall_by_lane.items()])


# --- laws of random steps -------------------------------------------------------------------------


def random_program(seed: int) -> BoundProgram:
    rng = random.Random(seed)
    profile = random_profile(rng)
    updates: list[Updates] = ["in backward", "after backward"]
    step = StepSettings(
        piece_bytes=rng.choice([16 << 20, 1 << 40]),
        updates=rng.choice(updates),
        micro_batches=rng.choice([1, 2]),
    )
    units = random_units(profile, rng, step)
    return bind(units, Implications(profile, step), updating=rng.random() < 0.8)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_stalls_are_the_gaps_in_compute(seed: int) -> None:
    program = random_program(seed)
    found = simulate(program)
    assert simulated_seconds(program) == (found.step_seconds, found.stall_s)
    assert sum(stall.seconds for stall in found.stalls) == pytest.approx(found.stall_s)
    ends = {span.name: span.end_s for span in found.spans}
    starts = [start for start, _ in found.compute]
    before = dict(enumerate([0.0, *(end for _, end in found.compute)]))
    after = dict(enumerate([*starts, found.step_seconds]))
    waits = dict.fromkeys(before, 0.0)
    for stall in found.stalls:
        assert stall.seconds > 0
        waits[stall.slot] += stall.seconds
        assert before[stall.slot] < ends[stall.waited_for] <= after[stall.slot]
    assert waits == pytest.approx({slot: after[slot] - before[slot] for slot in before})


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_moves_run_once_in_order_on_their_lane_after_what_they_wait_for(seed: int) -> None:
    program = random_program(seed)
    timeline = simulate(program)
    moved = [span.name for span in timeline.spans if span.lane != "compute"]
    assert sorted(moved) == sorted(map(program.move_name, range(len(program.moves))))
    found = {span.name: span for span in timeline.spans}
    spans = [found[program.move_name(number)] for number in range(len(program.moves))]
    for move, span in zip(program.moves, spans, strict=True):
        assert span.lane == str(move.lane)
        assert 0 <= span.start_s <= span.end_s <= timeline.step_seconds
        assert all(spans[other].end_s <= span.start_s for other in move.after)
    for lane in {span.lane for span in spans}:
        on_lane = [span for span in spans if span.lane == lane]
        assert all(one.end_s <= other.start_s for one, other in pairwise(on_lane))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_report_sums_up_the_timeline_and_the_peak_function(seed: int) -> None:
    program = random_program(seed)
    found, timeline = report(program), simulate(program)
    assert (found.step_seconds, found.stall_seconds) == (timeline.step_seconds, timeline.stall_s)
    for by in (found.stall_by_lane, found.stall_by_cause):
        assert sum(by.values()) == pytest.approx(found.stall_seconds)
        assert list(by.values()) == sorted(by.values(), reverse=True)
    lanes = sorted({str(move.lane) for move in program.moves})
    assert [lane.name for lane in found.lanes] == ["compute", *lanes]
    assert all(0 <= lane.utilisation <= 1 for lane in found.lanes)
    assert sum(lane.num_moves for lane in found.lanes) == len(timeline.spans)
    busy = sum(span.end_s - span.start_s for span in timeline.spans)
    assert sum(lane.busy_s for lane in found.lanes) == pytest.approx(busy)
    assert found.lanes[0].busy_s == pytest.approx(found.step_seconds - found.stall_seconds)
    assert sum(lane.bytes for lane in found.lanes) == sum(move.bytes for move in program.moves)
    device = device_bytes(program)
    assert tuple(slot.device for slot in found.slots) == device
    assert tuple((slot.start_s, slot.end_s) for slot in found.slots) == timeline.compute
    totals = [slot.total for slot in device]
    assert found.peak_slot == totals.index(max(totals))
    hardware = program.profile.hardware
    below = {tier.name: program.tier_bytes(tier.name) for tier in hardware.tiers}
    assert found.tier_peaks == TierBytes(
        device=max(totals),
        context=hardware.device.context_bytes,
        host=below.get("host", 0),
        disk=below.get("disk", 0),
    )
    assert 2 <= len(in_words(found)) <= 5


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_critical_path_covers_the_step_without_a_gap(seed: int) -> None:
    program = random_program(seed)
    timeline = simulate(program)
    path = critical_path(program, timeline)
    assert path[0].start_s == 0
    assert path[-1].end_s == pytest.approx(timeline.step_seconds)
    assert [one.end_s for one in path[:-1]] == pytest.approx([one.start_s for one in path[1:]])
    assert all(one.lane != other.lane for one, other in pairwise(path))


@pytest.mark.nightly
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_moves_wait_only_for_moves_submitted_before(seed: int) -> None:
    program = random_program(seed)
    submitted: list[int] = []
    for slot in program.slots:
        assert all(number in submitted for number in slot.drained)
        submitted += slot.submit
        assert all(number in submitted for number in slot.ready)
        submitted += slot.finish
    submitted += program.last
    assert submitted == list(range(len(program.moves)))
    assert all(earlier < n for n, move in enumerate(program.moves) for earlier in move.after)
    graph = nx.DiGraph(waits_of(program)).reverse()
    assert nx.is_directed_acyclic_graph(graph)
    assert nx.has_path(graph, ("slot", 0), ("slot", len(program.slots)))
    assert set(graph) >= {("move", number) for number in range(len(program.moves))}
    # Every fetch is ready in the slot that it serves.
    for number, move in enumerate(program.moves):
        waits = [index for index, slot in enumerate(program.slots) if number in slot.ready]
        assert waits == ([move.slot] if move.kind in ("fetch", "swap in") else [])
