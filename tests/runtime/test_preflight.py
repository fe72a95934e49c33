"""What a plan takes against what there is: the numbers of both are in the message."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protrain_runtime import prepare
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import Keep, Offload, Plan, TierBytes
from protrain_runtime.devices.memory_meter import process_memory
from protrain_runtime.devices.preflight import NoRoomError, Room, check_room, room_here, slow_disk
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import ADAMW, attached, build, decided, described, plan_for

NAME = "functional"
MIB = 2**20
FOLDER = Path("/spill")


def plan(*, device: str = "cpu") -> Plan:
    """Takes 100 MiB of tensors and 50 besides, 30 in host memory and 400 on disk."""
    made = plan_for(build(NAME), decided(described(NAME), Keep(), Offload(tier="disk")))
    peaks = TierBytes(device=100 * MIB, context=50 * MIB, host=30 * MIB, disk=400 * MIB)
    assert device in ("cpu", "cuda")
    workload = replace(made.workload, device="cpu" if device == "cpu" else "cuda")
    return replace(made, workload=workload, prediction=replace(made.prediction, peak_bytes=peaks))


SMALLER = "\n  fix: plan with a smaller --device-memory, and run that plan"


@pytest.mark.parametrize(
    ("device", "room", "message"),
    [
        (
            "cpu",
            Room(data_limit=180 * MIB - 1),
            "the plan takes up to 180.00 MiB of this process, and the system lets it have"
            " 180.00 MiB (RLIMIT_DATA)" + SMALLER,
        ),
        (
            "cpu",
            Room(memory_bytes=100 * MIB, resident_bytes=50 * MIB, swap_bytes=20 * MIB),
            "the plan takes up to 180.00 MiB of this process, and the machine has 170.00 MiB left"
            " for it" + SMALLER,
        ),
        (
            "cpu",
            Room(memory_bytes=500 * MIB, disk_is_memory=True),
            "the plan takes up to 580.00 MiB of this process, and the machine has 500.00 MiB left"
            " for it" + SMALLER,
        ),
        (
            "cuda",
            Room(device_bytes=99 * MIB),
            "the plan takes up to 100.00 MiB of the device, and it has room for 99.00 MiB"
            + SMALLER,
        ),
        (
            "cuda",
            Room(memory_bytes=29 * MIB, swap_bytes=500 * MIB),
            "the plan takes up to 30.00 MiB of host memory, and the machine has 29.00 MiB left for"
            " pinned memory\n  fix: plan with a smaller --host-memory, and run that plan",
        ),
        (
            "cpu",
            Room(disk_bytes=399 * MIB),
            "/spill: the plan keeps up to 400.00 MiB on disk, and 399.00 MiB are free\n"
            "  fix: free some space there, or name another spill directory",
        ),
        (
            "cpu",
            Room(file_limit=1 * MIB),
            "/spill: the plan keeps up to 400.00 MiB in one file on disk, and this process may"
            " write 1.00 MiB (RLIMIT_FSIZE)\n  fix: raise the limit (ulimit -f)",
        ),
    ],
)
def test_too_little_room_is_one_message(device: str, room: Room, message: str) -> None:
    with pytest.raises(ProtrainError) as caught:
        check_room(plan(device=device), room, FOLDER)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("device", "room"),
    [
        ("cpu", Room()),
        ("cpu", Room(memory_bytes=150 * MIB, resident_bytes=30 * MIB, data_limit=180 * MIB)),
        # The context is there before anybody asks, so that what is free is free beside it.
        ("cuda", Room(memory_bytes=30 * MIB, device_bytes=100 * MIB, data_limit=1)),
        ("cpu", Room(disk_bytes=400 * MIB, file_limit=400 * MIB)),
    ],
)
def test_as_much_room_as_the_plan_takes_is_enough(device: str, room: Room) -> None:
    check_room(plan(device=device), room, FOLDER)


def test_the_page_cache_of_a_plan_is_memory_that_has_to_be_there() -> None:
    """What is on disk, and not all that the cache might have taken."""
    cached = with_settings(plan(device="cpu"), page_cache_bytes=2**40)
    with pytest.raises(ProtrainError) as caught:
        check_room(cached, Room(memory_bytes=580 * MIB - 1), FOLDER)
    assert "takes up to 580.00 MiB of this process" in str(caught.value)
    check_room(cached, Room(memory_bytes=580 * MIB), FOLDER)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux")
def test_the_room_is_what_the_system_says(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12345, hard))
    try:
        room = room_here(torch.device("cpu"), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
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
    made = replace(plan(), prediction=replace(plan().prediction, peak_bytes=much))
    with pytest.raises(NoRoomError) as caught:
        prepare(model, made, optimizer=ADAMW, spill_directory=tmp_path)
    assert caught.value.message.startswith("the plan takes up to 1024.00 PiB of this process, and ")
    assert caught.value.exit_code == 4
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
