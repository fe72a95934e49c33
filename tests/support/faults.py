"""Faults of the machine that a test makes."""

import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


def spill_descriptor(folder: Path) -> int:
    (found,) = [int(fd) for fd, path in descriptors().items() if path.startswith(str(folder))]
    return found


@contextmanager
def _limit(kind: int, num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def file_limit(num_bytes: int) -> AbstractContextManager[None]:
    """No file of this process grows beyond `num_bytes`: to it, a full disk."""
    return _limit(resource.RLIMIT_FSIZE, num_bytes)


def data_limit(num_bytes: int) -> AbstractContextManager[None]:
    """This process may hold so many private bytes inside."""
    return _limit(resource.RLIMIT_DATA, num_bytes)


def descriptors() -> dict[str, str]:
    """Descriptors that the process has open, but the one that looks."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            found[link.name] = str(link.readlink())
        except OSError:
            continue
    return found
