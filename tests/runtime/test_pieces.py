"""Transfer pieces: groups of whole tensors, and shares that hold each of them once."""

from hypothesis import given
from hypothesis import strategies as st

from protrain_plan.planning.search.scheduling import ScheduleRule
from protrain_runtime.contract.program.program import (
    MAX_PIECES,
    PAGE_BYTES,
    ChunkSize,
    grouped,
    pieces_in,
    pinned_bytes,
    shares,
    written_share,
)
from tests.support.planning_cases import decoder, gpu
from tests.support.random_problems import schedule

SIZES = st.lists(st.integers(0, 10**10), min_size=1, max_size=40)


@given(sizes=SIZES)
def test_groups_are_consecutive_few_and_hold_every_tensor(sizes: list[int]) -> None:
    groups = grouped(sizes)
    assert len(groups) <= MAX_PIECES
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    assert all(groups)


@given(sizes=SIZES, fraction=st.floats(0, 1))
def test_shares_hold_every_piece_once(sizes: list[int], fraction: float) -> None:
    early, late = pieces_in(sizes, (0.0, fraction)), pieces_in(sizes, (fraction, 1.0))
    assert [*early, *late] == list(range(len(sizes)))
    assert sum(sizes[early.start : early.stop]) <= fraction * sum(sizes) * (1 + 1e-9)


def test_a_lead_is_whole_slots_and_a_share() -> None:
    assert shares(2) == (2, 0)
    assert shares(1.25) == (1, 0.25)


def test_written_shares_follow_the_parameters_that_are_complete() -> None:
    chunk = ChunkSize(
        parameter_bytes=400,
        gradient_bytes=400,
        state_bytes=800,
        num_parameters=100,
        used_by=(0,),
        parameter_pieces=(100, 100, 200),
        gradient_pieces=(100, 100, 200),
    )
    # 25, 25 and 50 parameters, written in three ranges that end within and at pieces.
    cuts = [written_share(chunk, start, stop) for start, stop in ((0, 30), (30, 50), (50, 100))]
    assert cuts == [(0.0, 0.25), (0.25, 0.5), (0.5, 1.0)]


def test_pinned_memory_comes_in_pages() -> None:
    assert [pinned_bytes(size) for size in (0, 1, PAGE_BYTES, PAGE_BYTES + 1)] == [
        0,
        PAGE_BYTES,
        PAGE_BYTES,
        2 * PAGE_BYTES,
    ]


def test_pieces_take_the_room_that_a_whole_chunk_would_not_fit_in() -> None:
    from protrain_plan.planning.model.problem import Problem
    from protrain_plan.planning.search.choices import min_memory
    from protrain_runtime.contract.records.plan import Budgets

    leads = []
    for pieces in (1, 7):
        profile = decoder(gpu(), blocks=4, pieces=pieces)
        plenty = Budgets(device=10**13, host=10**13, disk=0)
        problem = Problem.of(profile, plenty)
        lean = min_memory(problem)
        assert lean
        room = lean.bytes + profile.units[1].parameter_bytes // 2
        plans = schedule(problem, lean.choice, limit=room, rule=ScheduleRule(1, 0))
        assert plans
        leads.append(plans[3].schedule.backward_lead)
    assert leads[0] == 0
    assert 0 < leads[1] < 1
