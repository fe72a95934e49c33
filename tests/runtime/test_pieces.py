"""Transfer pieces, and the buffers that they lie in.

Pieces are groups of whole tensors, and shares hold each of them once. Buffers are handed on for
equal sizes, and never what somebody still looks into.
"""

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.search.choices import min_memory
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
from protrain_runtime.contract.records.plan import KEEP, Budgets, Placement, Schedule
from protrain_runtime.devices.lanes import Backend, Buffers
from tests.support.hostile_models import WIDTH, Stack, batch_of, does, stack
from tests.support.planning_cases import decoder, gpu
from tests.support.random_problems import schedule
from tests.support.runtime_cases import Subject, decided, decision_name
from tests.support.scenario import Loop, Scenario
from tests.support.schedule_rules import ScheduleRule

SIZES = st.lists(st.integers(0, 10**10), min_size=1, max_size=40)


@given(sizes=SIZES)
def test_groups_are_consecutive_few_and_hold_every_tensor(sizes: list[int]) -> None:
    groups = grouped(sizes)
    assert len(groups) <= MAX_PIECES
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    assert all(groups)


@given(sizes=SIZES, fraction=st.floats(0, 1))
def test_shares_hold_every_piece_once(sizes: list[int], fraction: float) -> None:
    pieces = tuple(sizes)
    early, late = pieces_in(pieces, (0.0, fraction)), pieces_in(pieces, (fraction, 1.0))
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


# --- buffers --------------------------------------------------------------------------------------


def buffers() -> Buffers:
    return Buffers(Backend(torch.device("cpu")))


def test_what_leaves_serves_a_fetch_of_its_size() -> None:
    pool = buffers()
    small, large = pool.new(64), pool.new(128)
    places = small.data_ptr(), large.data_ptr()
    pool.give_up([small, large])
    del small, large
    assert pool.new(128).data_ptr() == places[1]
    assert pool.new(64).data_ptr() == places[0]


def test_what_a_view_looks_into_is_left_to_the_view() -> None:
    pool = buffers()
    buffer = pool.new(64)
    view = buffer[8:16].fill_(7)
    pool.give_up([buffer])
    del buffer
    other = pool.new(64).fill_(1)
    assert not other.eq(7).any()
    assert view.eq(7).all()


def test_what_no_fetch_of_the_boundary_takes_is_freed() -> None:
    pool = buffers()
    given = [pool.new(64), pool.new(64), pool.new(128)]
    alive = [weakref.ref(buffer) for buffer in given]
    pool.give_up(given)
    del given
    pool.keep_for([64, 256])
    assert [buffer() is not None for buffer in alive] == [True, False, False]


def hands_on(block: Any, hidden: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    """The next hidden state, and a row of this block's `scale`, a view of a parameter."""
    return torch.tanh(block.computed(hidden)) * carried * block.scale[0], block.scale[1]


def multiplied(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    carried = torch.ones(WIDTH)
    for block in stack.blocks:
        hidden, carried = block(hidden, carried)
    return hidden * carried


HANDING_ON = does(hands_on, scale=lambda: nn.Parameter(torch.randn(2, WIDTH)))


@pytest.mark.parametrize(
    "states",
    [Placement(tier="disk"), Placement(tier="disk", keep_gathered=True)],
    ids=decision_name,
)
def test_a_view_of_a_parameter_that_is_handed_on_stays_what_it_was(
    states: Placement, tmp_path: Path
) -> None:
    schedule = Schedule(forward_lead=1, backward_lead=1, update_drain=0)
    Scenario(
        model=Subject(stack(HANDING_ON, depth=5, run=multiplied), batch_of),
        units=partial(decided, activations=KEEP, states=states, schedule=schedule),
        script=Loop(num_steps=3),
    ).assert_like_plain(tmp_path)
