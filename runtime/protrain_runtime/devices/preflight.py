"""Checks before allocation: whether this machine and process have the plan's memory.

A plan's predicted peaks are upper bounds: a plan that passes does not exceed the room at the start.
Unknown room refuses nothing.
"""

import os
import sys
import time
import warnings
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.escaping import one_line
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.units import format_bytes, format_seconds
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import process_memory
from protrain_runtime.devices.spill_file import SpillFile

PROBE_BYTES = 16 * 2**20
"""Written to the spill directory and read back, as the plan will: some 20 ms."""

SLOW_FROM = 3.0
"""Predicted steps that spilling alone takes: beyond a short probe's noise, another file system."""


class NoRoomError(ProtrainError):
    """Memory lacks `missing_bytes` for the plan."""

    exit_code: ClassVar[int] = 4

    def __init__(self, message: str, *, missing_bytes: int, fix: str) -> None:
        super().__init__(message, fix=fix)
        self.missing_bytes = missing_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The room before a run; None where the system does not say.

    memory_bytes    RAM that can be had without swapping, within the process's control group
    swap_bytes      free swap space: not for pinned memory
    resident_bytes  of this process in RAM already
    data_limit      its limit of private memory (RLIMIT_DATA)
    device_bytes    what this process's allocator may have of an accelerator, context apart
    disk_bytes      free in the spill directory
    file_limit      the longest file that the process may write (RLIMIT_FSIZE)
    disk_is_memory  the spill directory is a tmpfs
    """

    memory_bytes: int | None = None
    swap_bytes: int = 0
    resident_bytes: int = 0
    data_limit: int | None = None
    device_bytes: int | None = None
    disk_bytes: int | None = None
    file_limit: int | None = None
    disk_is_memory: bool = False


def ranks_here() -> int:
    """The ranks that a launcher started on this machine; 1 without one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def for_each(room: Room, num_ranks: int) -> Room:
    """Each rank's part of a machine; process and device limits stay."""
    return replace(
        room,
        memory_bytes=room.memory_bytes and room.memory_bytes // num_ranks,
        swap_bytes=room.swap_bytes // num_ranks,
        disk_bytes=room.disk_bytes and room.disk_bytes // num_ranks,
    )


def check_room(plan: Plan, room: Room, directory: Path) -> None:
    """NoRoomError or ProtrainError if `plan` takes more than there is."""
    takes = plan.prediction.peak_bytes
    in_memory = takes.disk if room.disk_is_memory or plan.settings.page_cache_bytes else 0
    # A plan for less memory would use more of that disk.
    on_disk = (
        "name a spill directory on a disk" if room.disk_is_memory else "plan without --page-cache"
    )
    if plan.workload.device == "cpu":
        process = takes.device + takes.context + takes.host
        _memory("this process", process, room.data_limit, "its limit is {} (RLIMIT_DATA)")
        available = room.memory_bytes
        if available is not None:
            available += room.resident_bytes + room.swap_bytes
        what = "the machine has {} left for it"
        _memory("this process", process, available, what)
        _memory("this process", process + in_memory, available, what, fix=on_disk)
    else:
        # Free memory already excludes this process's context.
        _memory("the device", takes.reserved, room.device_bytes, "it has room for {}", "device")
        what = "the machine has {} left for pinned memory"
        _memory("host memory", takes.host, room.memory_bytes, what, "host")
        _memory("host memory", takes.host + in_memory, room.memory_bytes, what, fix=on_disk)
    if room.disk_bytes is not None and takes.disk > room.disk_bytes:
        raise ProtrainError(
            f"the plan keeps up to {format_bytes(takes.disk)} on disk, and"
            f" {format_bytes(room.disk_bytes)} are free",
            source=str(directory),
            fix="free some space there, or name another spill directory",
        )
    if room.file_limit is not None and takes.disk > room.file_limit:
        raise ProtrainError(
            f"the plan keeps up to {format_bytes(takes.disk)} in one file on disk, and this process"
            f" may write {format_bytes(room.file_limit)} (RLIMIT_FSIZE)",
            source=str(directory),
            fix="raise the limit (ulimit -f)",
        )


def check_free(num_bytes: int, device: torch.device) -> None:
    """NoRoomError if the device has no room for `num_bytes` of parameters now."""
    room = room_here(device, Path.cwd())
    on_host = devices.on_host(device)
    left = _free_on_host(room, room.swap_bytes) if on_host else room.device_bytes
    if left is not None and num_bytes > left:
        raise NoRoomError(
            f"the parameters take {format_bytes(num_bytes)}, and {format_bytes(max(left, 0))} are"
            " free",
            missing_bytes=num_bytes - left,
            fix="take them unit by unit: units=[...]",
        )


def _memory(
    whose: str,
    takes: int,
    there: int | None,
    what: str,
    option: str = "device",
    fix: str | None = None,
) -> None:
    if there is not None and takes > there:
        raise NoRoomError(
            f"the plan takes up to {format_bytes(takes)} of {whose}, and "
            + what.format(format_bytes(there)),
            missing_bytes=takes - there,
            fix=fix or f"plan with a smaller --{option}-memory, and run that plan",
        )


def room_here(device: torch.device, directory: Path) -> Room:
    """The present room of this machine and process."""
    free = None if devices.on_host(device) else devices.room_bytes(device)
    if not sys.platform.startswith("linux"):
        return Room(device_bytes=free)
    import resource

    limits = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE))
    data_limit, file_limit = (None if most < 0 else most for most in limits)  # RLIM_INFINITY is -1
    memory, swap = _memory_and_swap()
    try:
        disk = os.statvfs(directory) if directory.is_dir() else None
    except OSError:  # the store reports the error
        disk = None
    mounts: dict[str, str] = {}  # file system types; the last mount at a place is visible
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines():
        fields, _, kind = line.partition(" - ")
        mounts[fields.split()[4]] = kind.split()[0]
    path = directory.resolve()
    around = [mounts[str(place)] for place in (path, *path.parents) if str(place) in mounts]
    return Room(
        memory_bytes=memory,
        swap_bytes=swap,
        resident_bytes=process_memory().resident_bytes,
        data_limit=data_limit,
        device_bytes=free,
        disk_bytes=disk.f_bavail * disk.f_frsize if disk else None,
        file_limit=file_limit,
        disk_is_memory=around[:1] == ["tmpfs"],
    )


def free_host_bytes() -> int:
    """Host memory that this process can still take; a large number if unknown."""
    free = _free_on_host(room_here(devices.HOST, Path()), swap_bytes=0)
    return sys.maxsize if free is None else max(free, 0)


def _free_on_host(room: Room, swap_bytes: int) -> int | None:
    """The room left in the machine's memory and the process's limit; None if both are unknown."""
    left: list[int] = []
    if room.memory_bytes is not None:
        left.append(room.memory_bytes + swap_bytes)
    if room.data_limit is not None:
        left.append(room.data_limit - process_memory().data_bytes)
    return min(left, default=None)


def _memory_and_swap() -> tuple[int, int]:
    """MemAvailable and SwapFree, both within the control group's limit."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines()
    )
    memory, swap = (int(fields[k].split()[0]) * 1024 for k in ("MemAvailable", "SwapFree"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        current = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        left = limit - current + int(stat["inactive_file"])  # the page cache yields
    except (OSError, ValueError, KeyError):  # no group, no limit ("max"), or an older kernel
        return memory, swap
    return min(memory, left), 0 if left < memory else swap


def warn_of_slow_disk(plan: Plan, directory: Path) -> None:
    """Warn if a step's spilling takes far longer here than the predicted step."""
    if plan.prediction.peak_bytes.disk < PROBE_BYTES:
        return
    view = memoryview(bytearray(PROBE_BYTES))
    try:
        with closing(SpillFile(directory, cached=plan.settings.page_cache_bytes > 0)) as file:
            place = file.reserve(PROBE_BYTES)
            start = time.perf_counter()
            file.write(place, view)
            file.read(place, view)
    except OSError:  # no room for the probe: the plan's is already reserved
        return
    message = slow_disk(plan, time.perf_counter() - start)
    if message:
        warnings.warn(f"{one_line(str(directory))}: {message}", stacklevel=3)


def warn_of_threads(plan: Plan, num_threads: int) -> None:
    """Warn if this process updates with another number of threads than planned."""
    seconds, planned = plan.prediction.host_update_seconds, plan.prediction.host_update_threads
    if planned not in (0, num_threads):
        here = format_seconds(seconds * planned / num_threads)
        warnings.warn(
            f"host updates take {format_seconds(seconds)} a step with the {planned} threads that"
            f" the plan counts on, and about {here} with the {num_threads} of this process: set"
            " OMP_NUM_THREADS to one more than the plan's, or profile with as many as here",
            stacklevel=3,
        )


def slow_disk(plan: Plan, probe_s: float) -> str | None:
    """The warning if a step's disk transfers are slow, at PROBE_BYTES in `probe_s`."""
    spilled = plan.prediction.peak_bytes.disk
    seconds = spilled / PROBE_BYTES * probe_s
    if seconds < SLOW_FROM * plan.prediction.step_seconds:
        return None
    return (
        f"writing and reading the plan's {format_bytes(spilled)} takes about"
        f" {format_seconds(seconds)} a step here, and the whole step was predicted to take"
        f" {format_seconds(plan.prediction.step_seconds)}: name a faster spill directory, or"
        " profile with this one"
    )
