"""Simulated timelines against ones computed by hand."""

from dataclasses import replace

import pytest

from protrain_plan.simulation.timeline import (
    Timeline,
    first_step_seconds,
    simulate,
    simulated_seconds,
)
from protrain_runtime.contract.program.compiling import bind
from protrain_runtime.contract.program.implications import BoundProgram, Implications
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.hardware import Contention, Hardware, Link, Tier
from protrain_runtime.contract.records.plan import (
    Keep,
    Offload,
    Persistent,
    Placement,
    Recompute,
    Schedule,
    StepSettings,
    Swap,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import Profile, Unit
from tests.support.planning_cases import MB, cpu, decoder, gpu, unit
from tests.support.programs import compile_units

GB = 1000 * MB


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


def two_units(hardware: Hardware) -> Profile:
    """Forward 1 s each, backward 2 s each (3 s with recomputation); 1 GB of parameters each.

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
    profile = decoder(hardware, blocks=1, host_speed=1e9, device_speed=5e9)
    return replace(profile, units=units)


def timeline(
    profile: Profile, *decisions: tuple[Keep | Recompute | Swap, Placement, Schedule]
) -> Timeline:
    plans = [
        UnitPlan(name=f"layers.{n}", activations=activations, states=states, schedule=schedule)
        for n, (activations, states, schedule) in enumerate(decisions)
    ]
    program = compile_units(plans, profile, piece_bytes=32 << 20)
    assert device_bytes(program)
    return simulate(program)


def times(found: Timeline) -> dict[str, list[float]]:
    return {span.name: [round(span.start_s, 6), round(span.end_s, 6)] for span in found.spans}


PLAIN = (Keep(), Persistent(), Schedule())


def test_kept_and_persistent_is_compute_and_the_devices_update() -> None:
    found = timeline(two_units(machine()), PLAIN, PLAIN)
    assert times(found) == {
        "forward 0": [0, 1],
        "forward 1": [1, 2],
        "backward 1": [2, 4],
        "backward 0": [4, 6],
        "update on the device": [6, 6.2],
    }
    assert found.stall_s == 0


def test_recomputation_takes_its_backward_seconds() -> None:
    found = timeline(two_units(machine()), (Recompute(), Persistent(), Schedule()), PLAIN)
    assert found.step_seconds == pytest.approx(7.2)


def test_offloaded_without_lead_stalls_for_every_gather() -> None:
    # The stay of unit 1 covers forward and backward: one gather. Unit 0 is gathered twice.
    now = (Keep(), Offload(tier="host"), Schedule())
    found = timeline(two_units(machine()), now, now)
    assert times(found) == {
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
    assert found.stall_s == pytest.approx(3 + 1.5)


def test_leads_hide_gathers_behind_compute() -> None:
    early = (Keep(), Offload(tier="host"), Schedule(forward_lead=1, backward_lead=1))
    found = times(timeline(two_units(machine()), early, early))
    assert found["fetch 1 @1"] == [1, 2]  # unit 0's own gather has the lane until then
    assert found["fetch 0 @3"] == [3, 4]
    assert found["backward 0"] == [5, 7]


def test_both_directions_share_a_half_duplex_link() -> None:
    now = (Keep(), Offload(tier="host"), Schedule())
    found = times(timeline(two_units(machine(duplex=0.5)), now, now))
    # Gather of unit 0 and spill of unit 1 run together from 6 s, each at half its speed.
    assert found["fetch 0 @3"] == [6, 8]
    assert found["spill gradients 1 @2"] == [6, 8]


def test_compute_and_lanes_slow_each_other_down() -> None:
    # The swap out of unit 0 (1.5 GB) runs beside forward 1: compute at 0.8, the lane at 0.5. It
    # takes 1.5 / 0.5 = 3 s beside compute: all of forward 1 (1 / 0.8 = 1.25 s) and 1.75 s of
    # backward 1, which has done 1.4 of its 2 s then.
    swap = (Swap(tier="host"), Persistent(), Schedule())
    found = times(timeline(two_units(machine(compute=0.8, lane=0.5)), swap, PLAIN))
    assert found["forward 1"] == [1, 2.25]
    assert found["swap out 0 @0"] == [1, 4]
    assert found["backward 1"] == [2.25, 4.6]
    assert found["swap in 0 @3"] == [4.6, 6.1]


def test_drains_hold_compute_until_the_bytes_have_left() -> None:
    swap = (Swap(tier="host"), Persistent(), Schedule(swap_drain=0))
    found = times(timeline(two_units(machine()), swap, PLAIN))
    assert found["swap out 0 @0"] == [1, 2.5]
    assert found["forward 1"] == [2.5, 3.5]


def test_states_on_disk_are_read_updated_and_written_in_turn() -> None:
    hardware = cpu(read=1e9, write=1e9, duplex=1.0, contention=1.0)
    tier = hardware.tiers[0]
    hardware = replace(
        hardware,
        tiers=(replace(tier, link=replace(tier.link, latency_s=0.0)),),
        update_contention=Contention(compute=1.0, lane=1.0),
    )
    profile = two_units(hardware)
    plans = [
        UnitPlan(name="layers.0", activations=Keep(), states=Offload(tier="disk")),
        UnitPlan(name="layers.1", activations=Keep(), states=Persistent()),
    ]
    program = compile_units(plans, profile, piece_bytes=1 << 40)
    found = times(simulate(program))
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
    now = (Keep(), Offload(tier="host"), Schedule())
    found = times(timeline(profile, now, PLAIN))
    assert found["forward 0"] == [1, 3]  # after its gather, with a second for having submitted it
    assert found["forward 1"] == [3, 4]
    assert found["backward 1"] == [4, 6]
    # The next gather, 2 s of backward, and a second each for the gather, the gradients and update.
    assert found["backward 0"] == [7, 12]
    assert found["spill gradients 0 @3"] == [12, 13]
    assert found["update 0 @3 [0:500000000]"] == [13, 13.75]


def test_a_slot_of_an_accelerator_takes_the_longer_of_computing_and_launching() -> None:
    """Half a second of launches in forward and 2.5 in backward, and a second for each move."""
    profile = two_units(replace(machine(), move_s=1.0))
    launched: list[Unit] = []
    for one in profile.units:
        each = (replace(cost, forward_launch_s=0.5, backward_launch_s=2.5) for cost in one.forms)
        launched.append(replace(one, forms=tuple(each)))
    profile = replace(profile, units=tuple(launched))
    found = times(timeline(profile, (Keep(), Offload(tier="host"), Schedule()), PLAIN))
    assert found["forward 0"] == [1, 2.5]  # launches and a fetch, longer than the device's second
    assert found["forward 1"] == [2.5, 3.5]  # as long as it computes
    assert found["backward 1"] == [3.5, 6]
    assert found["backward 0"] == [7, 12.5]  # with a fetch, gradients and an update


@pytest.mark.parametrize(("lead", "period"), [(1, 9.2), (0, 10.2)])
def test_an_update_runs_on_beside_the_next_forward(lead: int, period: float) -> None:
    """Three forwards and backwards take 9 s, and the device's update of two chunks 0.2 s.

    The update in host memory takes 0.5 s. The next step has 2 s of compute before the fetch of what
    is updated ends, if that starts a slot early; else compute waits for the fetch, 1 s.
    """
    hardware = machine()
    profile = two_units(hardware)
    units = tuple(
        replace(profile.units[0], name=f"layers.{number}", used_by=(number,)) for number in range(3)
    )
    profile = replace(profile, units=units)
    plans = tuple(
        UnitPlan(
            name=one.name,
            activations=Keep(),
            states=Offload(tier="host", keep_gathered=True) if number == 2 else Persistent(),
            schedule=Schedule(forward_lead=lead),
        )
        for number, one in enumerate(units)
    )
    settings = StepSettings(piece_bytes=32 << 20, updates="after backward")
    apart, overlapping = (
        bind(plans, Implications(profile, replace(settings, overlap_steps=overlap)))
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


def test_lanes_at_half_their_speed_are_those_of_a_machine_with_half_of_it() -> None:
    profile, settings = two_units(machine()), StepSettings(piece_bytes=32 << 20)
    tier = profile.hardware.tier("host")
    link = replace(tier.link, read_bytes_per_s=0.5e9, write_bytes_per_s=0.5e9)
    slow = replace(
        profile,
        hardware=replace(profile.hardware, tiers=(replace(tier, link=link),)),
        optimizer=replace(
            profile.optimizer,
            host_parameters_per_s=profile.optimizer.host_parameters_per_s / 2,
            host_piece_s=profile.optimizer.host_piece_s * 2,
        ),
    )
    plans = [
        UnitPlan(name=one.name, activations=Keep(), states=Offload(tier="host"))
        for one in profile.units
    ]
    at_half, halved = bind(plans, Implications(profile, settings)), Implications(slow, settings)
    expected = simulated_seconds(bind(plans, halved))
    assert simulated_seconds(at_half)[0] < expected[0]
    assert simulated_seconds(at_half, lanes_at=0.5) == pytest.approx(expected)


def two_units_that_stream() -> Profile:
    """Two units whose states take a sixth of a second per GB, and 1 s of the device's optimizer."""
    profile = two_units(machine())
    (tier,) = profile.hardware.tiers
    link = replace(tier.link, read_bytes_per_s=6e9, write_bytes_per_s=6e9)
    hardware = replace(profile.hardware, tiers=(replace(tier, link=link),))
    optimizer = replace(profile.optimizer, device_parameters_per_s=5e8)
    return replace(profile, hardware=hardware, optimizer=optimizer)


def test_an_update_of_streamed_states_takes_turns_with_compute() -> None:
    """A sixth of a second per GB: states come in 1 s, and leave with the parameters in 7/6 s.

    Backward has 1 s of 2 left when the update begins, which takes 1 s alone: both end 2 s later.
    """
    profile = two_units_that_stream()
    placements = (Persistent(), Offload(tier="host", update_on_device=True))
    plans = [
        UnitPlan(name=f"layers.{number}", activations=Keep(), states=placements[number])
        for number in range(2)
    ]
    program = compile_units(plans, profile, piece_bytes=1 << 40)
    found = times(simulate(program))
    assert found["backward 0"] == [4.166667, 7.166667]
    assert found["read states 1 @2 [0:500000000]"] == [4.166667, 5.166667]
    assert found["update 1 @2 [0:500000000]"] == [5.166667, 7.166667]
    assert found["write states 1 @2 [0:500000000]"] == [7.166667, 8.333333]
    # Four pieces of staging; the chunk stands in place until its only piece is written.
    slots, unit = device_bytes(program), profile.units[1]
    assert slots[0].by_kind["staging"] >= 4 * unit.state_bytes
    assert slots[3].by_kind["leaving"] == unit.parameter_bytes + unit.gradient_bytes
    assert program.tier_bytes("host") < unit.parameter_bytes + unit.state_bytes + 2**20


def test_a_clipped_step_does_speculative_updates_again() -> None:
    """As above, but gradients leave first, for 1/6 s, and come back with states and parameters.

    A step that is clipped reads all again when backward has ended. Its second update takes turns
    with the rest of the device's own.
    """
    profile = two_units_that_stream()
    ahead = Offload(tier="host", update_on_device=True, speculate=True)
    placements: tuple[Placement, ...] = (Persistent(), ahead)
    plans = [
        UnitPlan(name=f"layers.{number}", activations=Keep(), states=states)
        for number, states in enumerate(placements)
    ]

    def program(*, clipped: bool = False, states: Offload = ahead) -> BoundProgram:
        units = [plans[0], replace(plans[1], states=states)]
        return compile_units(
            units, profile, piece_bytes=1 << 40, updates="after backward", clipped=clipped
        )

    first, second = program(), program(clipped=True)
    assert second.moves[: len(first.moves)] == first.moves
    assert second.again == set(range(len(first.moves), len(second.moves))) and not first.again
    found, clipped = times(simulate(first)), times(simulate(second))
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
    waiting = program(states=replace(ahead, speculate=False))
    assert simulate(first).step_seconds < simulate(waiting).step_seconds
    # The same stands on the device; below it, parameters and states do twice.
    assert device_bytes(first) == device_bytes(second) == device_bytes(waiting)
    unit = profile.units[1]
    more = first.tier_bytes("host") - waiting.tier_bytes("host")
    assert 0 <= more - unit.parameter_bytes - unit.state_bytes < 2**20
