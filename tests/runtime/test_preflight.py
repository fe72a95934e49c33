"""The needs of a plan against what there is: the numbers of both are in the message."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import KEEP, Placement, Plan, TierBytes
from protrain_runtime.devices.memory_meter import process_memory
from protrain_runtime.devices.preflight import NoRoomError, Room, check_room, room_here, slow_disk
from tests.support.faults import file_limit
from tests.support.messages import Speaker
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import attached, build, decided, described, plan_for
from tests.support.scenario import Scenario, refusal

NAME = "functional"
MIB = 2**20
FOLDER = Path("/spill")


def plan(*, device: str = "cpu") -> Plan:
    """Takes 100 MiB of tensors and 50 besides, 30 in host memory and 400 on disk."""
    units = decided(described(NAME), KEEP, Placement(tier="disk"))
    peaks = TierBytes(device=100 * MIB, context=50 * MIB, host=30 * MIB, disk=400 * MIB)
    return plan_for(build(NAME), units, device=device, peak_bytes=peaks)


def smaller(**less: int) -> Plan:
    made = plan()
    peaks = replace(made.prediction.peak_bytes, disk=500 * MIB, **less)
    return with_settings(made, peak_bytes=peaks)


def cached() -> Plan:
    return with_settings(plan(), page_cache_bytes=2**40)


def on_card(made: Plan) -> Plan:
    return with_settings(made, device="cuda")


Use = tuple[Plan, Room]
LITTLE_MEMORY = Room(memory_bytes=500 * MIB, disk_is_memory=True)
LESS = smaller(device=10 * MIB)
LITTLE: dict[str, tuple[Use, Use]] = {
    "a limit": ((plan(), Room(data_limit=180 * MIB - 1)), (LESS, Room(data_limit=180 * MIB - 1))),
    "a machine": (
        (plan(), Room(memory_bytes=100 * MIB, resident_bytes=50 * MIB, swap_bytes=20 * MIB)),
        (LESS, Room(memory_bytes=100 * MIB, resident_bytes=50 * MIB, swap_bytes=20 * MIB)),
    ),
    "a spill directory in memory": (
        (plan(), LITTLE_MEMORY),
        (plan(), replace(LITTLE_MEMORY, disk_is_memory=False)),
    ),
    "a page cache": (
        (cached(), Room(memory_bytes=500 * MIB)),
        (plan(), Room(memory_bytes=500 * MIB)),
    ),
    "a card": (
        (on_card(plan()), Room(device_bytes=99 * MIB)),
        (on_card(LESS), Room(device_bytes=99 * MIB)),
    ),
    "pinned memory": (
        (on_card(plan()), Room(memory_bytes=29 * MIB, swap_bytes=500 * MIB)),
        (on_card(smaller(host=0)), Room(memory_bytes=29 * MIB, swap_bytes=500 * MIB)),
    ),
    "a spill directory in a card's host memory": (
        (on_card(plan()), replace(LITTLE_MEMORY, memory_bytes=400 * MIB)),
        (on_card(plan()), Room(memory_bytes=400 * MIB)),
    ),
    "a disk": ((plan(), Room(disk_bytes=399 * MIB)), (plan(), Room(disk_bytes=400 * MIB))),
    "files": ((plan(), Room(file_limit=1 * MIB)), (plan(), Room(file_limit=400 * MIB))),
}


@pytest.mark.parametrize("name", LITTLE)
def test_there_is_room_when_the_message_is_followed(name: str, assert_says: Speaker) -> None:
    refused, followed = LITTLE[name]
    assert_says(refusal(partial(check_room, *refused, FOLDER), ProtrainError))
    check_room(*followed, FOLDER)


ENOUGH: list[tuple[str, Room]] = [
    ("cpu", Room()),
    ("cpu", Room(memory_bytes=150 * MIB, resident_bytes=30 * MIB, data_limit=180 * MIB)),
    # The context is there before anybody asks, so that what is free is free beside it.
    ("cuda", Room(memory_bytes=30 * MIB, device_bytes=100 * MIB, data_limit=1)),
    ("cpu", Room(disk_bytes=400 * MIB, file_limit=400 * MIB)),
]


def test_as_much_room_as_the_plan_takes_is_enough() -> None:
    for device, room in ENOUGH:
        check_room(plan(device=device), room, FOLDER)


def test_the_page_cache_of_a_plan_is_memory_that_has_to_be_there() -> None:
    """The room on disk, and not all that the cache might have taken."""
    with pytest.raises(ProtrainError) as caught:
        check_room(cached(), Room(memory_bytes=580 * MIB - 1), FOLDER)
    assert "takes up to 580.00 MiB of this process" in str(caught.value)
    check_room(cached(), Room(memory_bytes=580 * MIB), FOLDER)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux")
def test_the_room_is_what_the_system_says(tmp_path: Path) -> None:
    with file_limit(12345):
        room = room_here(torch.device("cpu"), tmp_path)
    assert room.file_limit == 12345
    assert room.device_bytes is None
    assert room.memory_bytes is not None and room.memory_bytes > 0
    assert 0 < room.resident_bytes <= process_memory().peak_resident_bytes
    assert room.disk_bytes is not None and room.disk_bytes > 0
    assert room_here(torch.device("cpu"), tmp_path / "missing").disk_bytes is None
    if Path("/dev/shm").is_mount():
        assert room_here(torch.device("cpu"), Path("/dev/shm")).disk_is_memory
    assert not room_here(torch.device("cpu"), Path("/proc")).disk_is_memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux")
def test_prepare_allocates_nothing_where_there_is_no_room(tmp_path: Path) -> None:
    model = build(NAME)
    before = attached(model)
    much = TierBytes(device=2**60, context=0, host=0, disk=0)
    made = with_settings(plan(), peak_bytes=much)
    error = refusal(partial(Scenario(plan=lambda _: made).prepared, model, tmp_path), NoRoomError)
    assert error.message.startswith("the plan takes up to 1024.00 PiB of this process, and ")
    assert error.exit_code == 4
    assert attached(model) == before
    assert list(tmp_path.iterdir()) == []


def test_a_slow_spill_directory_is_told_before_the_first_step() -> None:
    """400 MiB a step at 16 MiB in half a second: 12.5 s, of a step of 1 s."""
    assert slow_disk(plan(), 0.5) == (
        "writing and reading the plan's 400.00 MiB takes about 12.5 s a step here, and the whole"
        " step was predicted to take 1.00 s: name a faster spill directory, or profile with this"
        " one"
    )
    assert slow_disk(plan(), 0.1) is None
