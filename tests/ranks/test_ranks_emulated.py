"""Ranks on accelerators of their own: collectives in streams, beside compute and transfers.

What is asked of CPUs elsewhere is asked of the emulated device here, whose streams are late at
random. No rank's device is the one that is current in its threads.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import prepare
from protrain_runtime.contract.records.plan import PERSISTENT, Activations, Placement
from protrain_runtime.devices.lanes import StreamTicket
from tests.support.cards import host_waits
from tests.support.ranks_cases import ranks_on_emulated, run_ranks
from tests.support.ranks_loops import (
    FACTORS,
    PLACES,
    Loop,
    assert_as_ddp,
    assert_rows,
    in_turn,
    numbered,
    several,
)
from tests.support.runtime_cases import ADAMW, FRACTIONAL, batch, build, decided, described

pytestmark = pytest.mark.emulated


@pytest.fixture(autouse=True)
def cards(request: pytest.FixtureRequest) -> Iterator[None]:
    with ranks_on_emulated(request.node.nodeid):
        yield


NAME = "functional"


def test_two_ranks_match_ddp_bitwise(tmp_path: Path) -> None:
    """Every placement, and transfers cut in two."""
    cut = decided(described(NAME), Activations(tier="host"), Placement(tier="host"), FRACTIONAL[0])
    units = (in_turn(NAME, *PLACES), in_turn(NAME, *PLACES[2:], *PLACES[:2]), cut)
    assert_as_ddp(2, Loop(NAME), [several(Loop(NAME), each, 2) for each in units], tmp_path)


def waits(rank: int, count: int) -> list[Counter[str]]:
    """Where the host waits for its device in a third step: under DistributedDataParallel, plans."""
    found: list[Counter[str]] = []
    for place in (None, PERSISTENT, Placement(tier="device"), Placement(tier="host")):
        model = build(NAME)
        optimizer: torch.optim.Optimizer
        if place is None:
            model = DistributedDataParallel(model)
            optimizer = ADAMW(list(model.parameters()))
        else:
            plan = several(Loop(NAME), in_turn(NAME, place), count)
            model, optimizer = prepare(model, plan, optimizer=ADAMW)
        inputs = [batch(NAME, rank + number) for number in range(3)]
        for number in range(3):
            with host_waits() as waited, waits_for_lanes(waited):
                loss_of(call_model(model, inputs[number])).backward()
                if place != Placement(tier="host"):
                    optimizer.step()
            if place == Placement(tier="host"):
                optimizer.step()  # waits for the host's own updates
            optimizer.zero_grad()
        found.append(waited)
    return found


@contextmanager
def waits_for_lanes(found: Counter[str]) -> Iterator[None]:
    """Counts where threads that are not lanes wait for one."""
    synchronize = StreamTicket.synchronize

    def counted(ticket: StreamTicket) -> None:
        if not threading.current_thread().name.startswith("protrain "):
            found["a lane"] += 1
        synchronize(ticket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamTicket, "synchronize", counted)
        yield


@pytest.mark.slow
def test_steps_wait_for_the_device_no_more_often_than_ddps(tmp_path: Path) -> None:
    for plain, *planned in run_ranks(waits, 2, tmp_path):
        for each in planned:
            assert each <= plain


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("ranks", FACTORS["ranks"])
def test_rows_of_the_matrix(ranks: str, part: int, tmp_path: Path) -> None:
    assert_rows(numbered(ranks, part, 8), int(ranks), tmp_path)
