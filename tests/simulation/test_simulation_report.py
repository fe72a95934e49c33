"""Stalls and their causes against ones computed by hand, and the report against its sources."""

import random
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protrain_plan.simulation.critical_path import critical_path, waits_of
from protrain_plan.simulation.report import StepReport, in_words, report
from protrain_plan.simulation.timeline import Stall, Timeline, simulate, simulated_seconds
from protrain_runtime.contract.program.implications import BoundProgram
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.hardware import Contention, Hardware, Link, Tier
from protrain_runtime.contract.records.plan import (
    Activations,
    Keep,
    Offload,
    Persistent,
    Placement,
    Recompute,
    Schedule,
    Swap,
    SwapInput,
    TierBytes,
    UnitPlan,
    Updates,
)
from tests.support.messages import Speaker
from tests.support.planning_cases import MB, decoder, gpu, random_profile, unit
from tests.support.programs import compile_units

Decision = tuple[Activations, Placement, Schedule]


def machine() -> Hardware:
    """1 GB/s each way at the same time, no latency, nothing slows anything down."""
    link = Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9, latency_s=0.0, duplex=1.0)
    free = Contention(compute=1.0, lane=1.0)
    return replace(
        gpu(),
        tiers=(Tier(name="host", capacity_bytes=10**12, link=link),),
        read_contention=free,
        write_contention=free,
        update_contention=free,
    )


def two_units(*decisions: Decision) -> BoundProgram:
    """Forward 1 s each, backward 2 s each; 1 GB of parameters each, 1.5 GB to swap.

    Updates: 0.5 s per chunk on the host, 0.1 s on the device.
    """
    units = tuple(
        unit(
            f"layers.{n}",
            parameters=500 * MB,
            kept=1600 * MB,
            inputs=100 * MB,
            seconds=1.0,
            used_by=(n,),
        )
        for n in range(2)
    )
    profile = decoder(machine(), blocks=1, host_speed=1e9, device_speed=5e9)
    profile = replace(profile, units=units)
    plans = [
        UnitPlan(name=f"layers.{n}", activations=activations, states=states, schedule=schedule)
        for n, (activations, states, schedule) in enumerate(decisions)
    ]
    return compile_units(plans, profile, piece_bytes=32 << 20)


def random_case(rng: random.Random) -> BoundProgram:
    """Any decisions with any leads and drains, whatever memory they take."""
    profile = random_profile(rng)
    tiers = [tier.name for tier in profile.hardware.tiers]
    plans = []
    for one in profile.units:
        tier = rng.choice(tiers)
        activations: list[Activations] = [Keep(), Swap(tier=tier)]
        if len(one.forms) > 1:
            activations += [Recompute(), SwapInput(tier=tier)]
        states: list[Placement] = [
            Persistent(),
            Offload(tier=tier),
            Offload(tier=tier, keep_gathered=True),
        ]
        plans.append(
            UnitPlan(
                name=one.name,
                activations=rng.choice(activations),
                states=rng.choice(states),
                schedule=Schedule(
                    forward_lead=rng.choice([0, 0.5, 1, 2]),
                    backward_lead=rng.choice([0, 0.5, 1, 2]),
                    swap_lead=rng.choice([0, 0.5, 1, 2]),
                    swap_drain=rng.choice([None, 0, 0.5, 1]),
                    update_drain=rng.choice([None, 0, 0.5, 1]),
                ),
            )
        )
    updates: list[Updates] = ["in backward", "after backward"]
    return compile_units(
        plans,
        profile,
        piece_bytes=rng.choice([16 << 20, 1 << 40]),
        updates=rng.choice(updates),
        micro_batches=rng.choice([1, 2]),
        updating=rng.random() < 0.8,
    )


def rounded(found: Timeline) -> list[Stall]:
    return [replace(stall, seconds=round(stall.seconds, 6)) for stall in found.stalls]


PLAIN: Decision = (Keep(), Persistent(), Schedule())
OFFLOADED: Decision = (Keep(), Offload(tier="host"), Schedule())


def test_nothing_waits_where_nothing_moves() -> None:
    assert simulate(two_units(PLAIN, PLAIN)).stalls == ()


def test_stalls_of_gathers_without_lead_and_of_the_last_update() -> None:
    # The times are those of test_offloaded_without_lead_stalls_for_every_gather.
    found = simulate(two_units(OFFLOADED, OFFLOADED))
    assert rounded(found) == [
        Stall(0, 1.0, "fetch 0 @0", "fetch host", "fetch"),
        Stall(1, 1.0, "fetch 1 @1", "fetch host", "fetch"),
        Stall(3, 1.0, "fetch 0 @3", "fetch host", "fetch"),
        Stall(5, 1.5, "update 0 @3 [0:500000000]", "update host", "end"),
    ]


def test_stalls_of_a_swap_that_must_leave_before_the_next_slot() -> None:
    swap: Decision = (Swap(tier="host"), Persistent(), Schedule(swap_drain=0))
    assert rounded(simulate(two_units(swap, PLAIN))) == [
        Stall(1, 1.5, "swap out 0 @0", "spill host", "drain"),
        Stall(3, 1.5, "swap in 0 @3", "fetch host", "fetch"),
    ]


def test_a_stall_is_named_after_the_last_of_the_moves_awaited() -> None:
    # Slot 3 waits for 1 GB of parameters, then 1.5 GB of activations on the same lane.
    both: Decision = (Swap(tier="host"), Offload(tier="host"), Schedule())
    assert rounded(simulate(two_units(both, PLAIN)))[1] == Stall(
        3, 2.5, "swap in 0 @3", "fetch host", "fetch"
    )
    led: Decision = (Swap(tier="host"), Offload(tier="host"), Schedule(swap_lead=1))
    # Forward 1 ends at 3 s, the swap out at 3.5 s, before which backward 1 may not start: the
    # swap in runs until 5 s and the gather after backward 1, from 5.5 s.
    assert rounded(simulate(two_units(led, PLAIN)))[1:3] == [
        Stall(2, 0.5, "swap out 0 @0", "spill host", "drain"),
        Stall(3, 1.0, "fetch 0 @3", "fetch host", "fetch"),
    ]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_stalls_are_the_gaps_in_compute(seed: int) -> None:
    program = random_case(random.Random(seed))
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
def test_moves_run_in_order_on_their_lane_after_what_they_wait_for(seed: int) -> None:
    program = random_case(random.Random(seed))
    found = {span.name: span for span in simulate(program).spans}
    spans = [found[program.move_name(number)] for number in range(len(program.moves))]
    for move, span in zip(program.moves, spans, strict=True):
        assert span.lane == str(move.lane)
        assert all(spans[other].end_s <= span.start_s for other in move.after)
    for lane in {span.lane for span in spans}:
        on_lane = [span for span in spans if span.lane == lane]
        assert all(one.end_s <= other.start_s for one, other in pairwise(on_lane))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_report_sums_up_the_timeline_and_the_peak_function(seed: int) -> None:
    program = random_case(random.Random(seed))
    found, timeline = report(program), simulate(program)
    assert (found.step_seconds, found.stall_seconds) == (timeline.step_seconds, timeline.stall_s)
    for by in (found.stall_by_lane, found.stall_by_cause):
        assert sum(by.values()) == pytest.approx(found.stall_seconds)
        assert list(by.values()) == sorted(by.values(), reverse=True)

    assert [lane.name for lane in found.lanes] == [
        "compute",
        *sorted({str(move.lane) for move in program.moves}),
    ]
    assert all(0 <= lane.utilisation <= 1 for lane in found.lanes)
    assert sum(lane.num_moves for lane in found.lanes) == len(timeline.spans)
    assert sum(lane.busy_s for lane in found.lanes) == pytest.approx(
        sum(span.end_s - span.start_s for span in timeline.spans)
    )
    assert found.lanes[0].busy_s == pytest.approx(found.step_seconds - found.stall_seconds)
    assert sum(lane.bytes for lane in found.lanes) == sum(move.bytes for move in program.moves)

    device = device_bytes(program)
    assert tuple(slot.device for slot in found.slots) == device
    assert tuple((slot.start_s, slot.end_s) for slot in found.slots) == timeline.compute
    totals = [slot.total for slot in device]
    assert found.peak_slot.index == totals.index(max(totals))
    assert found.peak_slot.name == found.slots[found.peak_slot.index].name
    below = {tier.name: program.tier_bytes(tier.name) for tier in program.profile.hardware.tiers}
    assert found.tier_peaks == TierBytes(
        device=max(totals),
        context=program.profile.hardware.device.context_bytes,
        host=below.get("host", 0),
        disk=below.get("disk", 0),
    )
    assert 2 <= len(in_words(found)) <= 5


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_critical_path_covers_the_step_without_a_gap(seed: int) -> None:
    program = random_case(random.Random(seed))
    timeline = simulate(program)
    path = critical_path(program, timeline)
    assert path[0].start_s == 0
    assert path[-1].end_s == pytest.approx(timeline.step_seconds)
    assert [one.end_s for one in path[:-1]] == pytest.approx([one.start_s for one in path[1:]])
    assert all(one.lane != other.lane for one, other in pairwise(path))
    assert nx.is_directed_acyclic_graph(waits_of(program))


def test_the_critical_path_of_a_fetch_without_lead() -> None:
    """Both chunks are fetched for forward and for backward; the last update is on the host."""
    program = two_units(OFFLOADED, PLAIN)
    assert [part[:3] for part in critical_path(program, simulate(program))] == [
        ("fetch host", "fetch 0 @0", "fetch 0 @0"),
        ("compute", "forward 0", "backward 1"),
        ("fetch host", "fetch 0 @3", "fetch 0 @3"),
        ("compute", "backward 0", "backward 0"),
        ("spill host", "spill gradients 0 @3", "spill gradients 0 @3"),
        ("update host", "update 0 @3 [0:500000000]", "update 0 @3 [0:500000000]"),
    ]


def two_units_report(*decisions: Decision) -> StepReport:
    return report(two_units(*decisions))


def test_slots_have_the_names_of_the_units() -> None:
    found = two_units_report(PLAIN, PLAIN)
    assert [slot.name for slot in found.slots] == [
        "forward of layers.0",
        "forward of layers.1",
        "backward of layers.1",
        "backward of layers.0",
        "update on the device",
    ]


def test_words_for_a_step_with_stalls(assert_says: Speaker) -> None:
    # Slot 1 waits for the swap out (1.5 s), then for unit 1's gather (1 s), and slot 3 for the swap
    # in (1.5 s). Unit 1's spill and update end beside backward 0.
    swap: Decision = (Swap(tier="host"), Persistent(), Schedule(swap_drain=0))
    found = two_units_report(swap, OFFLOADED)
    assert_says(in_words(found))
    assert found.stall_by_lane == pytest.approx({"fetch host": 2.5, "spill host": 1.5})


def test_words_for_the_end_of_the_step(assert_says: Speaker) -> None:
    # The first two gathers, the third, then the spill of unit 0 and its update.
    words = in_words(two_units_report(OFFLOADED, OFFLOADED))
    assert_says(words[0])


def test_words_for_a_step_in_which_nothing_moves(assert_says: Speaker) -> None:
    assert_says(in_words(two_units_report(PLAIN, PLAIN)))
