"""Memory that ran out, as one message."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from protrain_plan.errors import OutOfMemoryError


@contextmanager
def explained_exhaustion(*, fix: str, what: str = "out of memory") -> Iterator[None]:
    """OutOfMemoryError, with a way out, where an allocator inside found no memory."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not out_of_memory(error):
            raise
        raise OutOfMemoryError(f"{what}: {refusal(error)}", fix=fix) from error


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocator of PyTorch or Python found no memory, here or on a lane."""
    if error is None:
        return False
    seen = str(error)
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or (isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN))
        or "out of memory" in seen  # also what CUDA says of host memory that it cannot pin
        or "not enough memory" in seen
        or "can't allocate memory" in seen
        or out_of_memory(error.__cause__)
    )


def refusal(error: BaseException) -> str:
    """What the allocator said, in one line."""
    lines = str(error).splitlines() or [type(error).__name__]
    line = next((line for line in lines if "memory" in line), lines[0])
    return line.rpartition("] ")[2].strip()
