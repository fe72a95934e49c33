"""A process that ends with the one that it works for, and libraries that are quiet in it."""

import ctypes
import logging
import signal
import sys

INTERRUPTED = 130
"""The exit code of a process that was interrupted."""
_PR_SET_PDEATHSIG = 1
"""The option of prctl(2)."""


def end_with_parent() -> None:
    """Make the system kill this process, of `multiprocessing`, when its parent ends (on Linux)."""
    from multiprocessing import parent_process  # help does without

    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = parent_process()
    if parent is not None and not parent.is_alive():  # it ended before that
        raise SystemExit(INTERRUPTED)


def quiet_libraries() -> None:
    """Silence libraries that say in this process what is of no use to the reader."""
    # torchao, which peft imports where it is installed, says what of its kernels a machine lacks.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    # bitsandbytes that it has a kernel for this processor in a package that is not there.
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
