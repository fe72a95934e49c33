"""Faults of the machine that a test makes."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def spill_descriptor(folder: Path) -> int:
    (found,) = [int(fd) for fd, path in descriptors().items() if path.startswith(str(folder))]
    return found


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond `num_bytes`: to it, a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def descriptors() -> dict[str, str]:
    """Descriptors that the process has open, but the one that looks."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            found[link.name] = str(link.readlink())
        except OSError:
            continue
    return found
