"""A command in a control group of its own, which has so much memory, the page cache's included."""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(name: str, limit_bytes: int) -> Iterator[Path]:
    """A new group under the root, gone afterwards: its processes have ended by then.

    OSError where this machine or this user may make none.
    """
    first = (ROOT / "memory").is_dir()  # version 1 has a hierarchy for memory alone
    group = (ROOT / "memory" if first else ROOT) / name
    group.mkdir()
    try:
        limit = "memory.limit_in_bytes" if first else "memory.max"
        (group / limit).write_text(str(limit_bytes), encoding="ascii")
        yield group
    finally:
        for _ in range(100):  # the kernel may still be taking leave of the last process
            try:
                group.rmdir()
                break
            except OSError:
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
