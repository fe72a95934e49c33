"""Memory that the ranks of a node share.

It never has a name, so none is left behind. A rank that ends takes nothing from the others, which
keep it while they map it.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.ranks.group import Ranks


def common_memory(ranks: Ranks, num_bytes: int) -> int:
    """One in-memory file per node; returns this rank's descriptor of it.

    Collective. ProtrainError if ranks of a planned node are on several machines, or the system
    lacks such files.
    """
    machines = ranks.all_objects(_machine())
    place, count = ranks.in_node
    for first in range(0, ranks.count, count):
        for rank in range(first, first + count):
            if machines[rank] != machines[first]:
                raise ProtrainError(
                    f"ranks {first} and {rank} share a common copy, as devices of one node, and run"
                    f" on two machines ({machines[first][0]} and {machines[rank][0]})",
                    key="settings.group.num_nodes",
                    fix=f"start {count} ranks on each machine, the ranks of one after those of"
                    " another; or plan for other nodes (--nodes)",
                )
    made = _made(num_bytes) if place == 0 else -1
    shared = ranks.all_objects((os.getpid(), made, os.fstat(made).st_ino if made >= 0 else 0))
    process, descriptor, number = shared[ranks.rank - place]
    if place:
        try:
            made = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            if os.fstat(made).st_ino != number:
                raise OSError("it is another one")
        except OSError as error:
            raise ProtrainError(
                f"rank {ranks.rank} cannot open the common copy that rank {ranks.rank - place} has"
                f" made: {error.strerror or error}",
                fix="make a node's ranks see each other's processes (one container, one user),"
                " or plan without a common copy",
            ) from error
    ranks.all_objects(None)  # its maker keeps it until all have it
    return made


def _made(num_bytes: int) -> int:
    try:
        made = os.memfd_create("protrain common copy")
        os.ftruncate(made, num_bytes)
    except (AttributeError, OSError) as error:
        raise ProtrainError(
            f"a common copy cannot be made here: {error}",
            fix="train on Linux, or plan without a common copy",
        ) from error
    return made


def _machine() -> tuple[str, str]:
    """The machine's name, and a boot id that separates machines of one name."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname(), boot
