"""A command in a control group of its own, which has so much memory, the page cache's included.

[Note: leftovers] A group is called NAME-PID after the process that makes it. One that is killed
leaves its group, and perhaps the command in it; who makes the next group of that name ends both.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(name: str, limit_bytes: int, *, root: Path = ROOT) -> Iterator[Path]:
    """A new group under the root, gone afterwards: its processes have ended by then.

    Groups of this name whose makers are dead are gone, too: see [Note: leftovers]. OSError where
    this machine or this user may make none.
    """
    first = (root / "memory").is_dir()  # version 1 has a hierarchy for memory alone
    groups = root / "memory" if first else root
    for left in leftovers(groups, name):
        _end(left)
    group = groups / f"{name}-{os.getpid()}"
    group.mkdir()
    try:
        limit = "memory.limit_in_bytes" if first else "memory.max"
        (group / limit).write_text(str(limit_bytes), encoding="ascii")
        yield group
    finally:
        _remove(group)


def leftovers(groups: Path, name: str) -> list[Path]:
    """The groups of this name whose makers are dead."""
    found = re.compile(rf"{re.escape(name)}-([0-9]+)")
    return [
        group
        for group in sorted(groups.iterdir())
        if (match := found.fullmatch(group.name)) and not _is_alive(match[1])
    ]


def _is_alive(number: str) -> bool:
    """Whether a process runs; one that has ended may be there until its parent has looked."""
    try:
        state = Path("/proc", number, "stat").read_text(encoding="utf-8").rpartition(") ")[2]
    except OSError:
        return False
    return not state.startswith("Z")


def _end(group: Path) -> None:
    """End what runs in a group, and remove it."""
    with suppress(OSError):
        for number in (group / "cgroup.procs").read_text(encoding="ascii").split():
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
    _remove(group)


def _remove(group: Path) -> None:
    for _ in range(100):  # the kernel may still be taking leave of the last process
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


def run_inside(
    group: Path, command: Sequence[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command in the group, and return when it has ended."""

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    return subprocess.run(
        command,
        env=environment,
        preexec_fn=enter,
        capture_output=True,
        text=True,
        check=False,
    )
