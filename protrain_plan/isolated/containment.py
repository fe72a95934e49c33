"""A process that ends with the one that it works for, and code that leaves no process behind."""

import ctypes
import os
import platform
import signal
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal, NoReturn

INTERRUPTED = 130
"""The exit code of a process that was interrupted."""
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
"""Options of prctl(2)."""


def end_with(parent: int) -> None:
    """Let the system end this process where its parent is killed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(INTERRUPTED)


def adopt_orphans() -> None:
    """Processes below this one become its children when their parents end (on Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, *values: int) -> bool:
    """Whether the system has the option and took it."""
    if not sys.platform.startswith("linux"):
        return False
    arguments = [*values, *(4 - len(values)) * [0]]
    return bool(ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, arguments)) == 0)


# --- what it starts -------------------------------------------------------------------------------

Containment = Literal["namespaces", "no processes", "nothing"]
"""The hold on processes that code starts: they end with it, there are none, or nothing does."""

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000  # clone(2)


def contained() -> Containment:
    """Go on in a process whose code leaves none behind: this one, or one below it.

    Where the system lets us, in namespaces of its own: of processes, so that all end with the
    first one however they fork, and of users, so that no process outside may be looked into or
    signalled. The caller then stays to wait for it, and ends as it ends; it passes SIGABRT on.
    Elsewhere the system is to refuse every new process. For a process with one thread.
    """
    if not _in_namespaces():
        return "no processes" if _forbid_processes() else "nothing"
    reads, writes = os.pipe()
    if first := os.fork():
        os.close(writes)
        _wait(first)
        _end_as(int(os.read(reads, 16) or signal.SIGKILL))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # what is killed above takes all along
    # Its own /proc, for libraries that look themselves up; a container may not allow that.
    ctypes.CDLL(None).mount(b"proc", b"/proc", b"proc", 0, None)
    # The first process of a namespace ignores signals: the model's is the second.
    if model := os.fork():
        os.write(writes, str(_wait(model)).encode())
        os._exit(0)
    os.close(reads)
    os.close(writes)
    return "namespaces"


def _in_namespaces() -> bool:
    """Whether what this process forks from now on is in namespaces of its own."""
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    if unshare is None:
        return False
    # Who is who is told from outside, by a process that waits until there is something to tell of.
    asked, ask = os.pipe()
    outside = os.getpid()
    if (mapper := os.fork()) == 0:
        os.close(ask)
        with suppress(OSError):
            if os.read(asked, 1):
                _map_users(outside)
                os._exit(0)
        os._exit(1)
    if unshare(_CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNS) == 0:
        os.write(ask, b"!")
    os.close(asked)
    os.close(ask)
    return os.waitpid(mapper, 0)[1] == 0


def _map_users(pid: int) -> None:
    """Every user and group is in the process's namespace who it is here, or the own ones alone."""
    for name, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        ranges = [line.split() for line in Path(f"/proc/self/{name}_map").read_text().splitlines()]
        every = "\n".join(f"{first} {first} {count}" for first, _, count in ranges)
        file = Path(f"/proc/{pid}/{name}_map")
        try:
            file.write_text(every)
        except OSError:  # for root alone
            if name == "gid":
                Path(f"/proc/{pid}/setgroups").write_text("deny")
            file.write_text(f"{own} {own} 1")


def _wait(child: int) -> int:
    """The status with which a child ends; others that end are forgotten."""
    signal.signal(signal.SIGABRT, lambda *_: os.kill(child, signal.SIGABRT))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's handler would let the child end this
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _end_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(code, 1 if code < 0 else 0))


_NO_CALL = 0x3FFFFFFF
_NEW_PROCESSES = {
    # The architecture as the kernel's audit.h numbers it; its calls clone, fork and vfork, if any.
    "x86_64": (0xC000003E, 56, 57, 58),
    "aarch64": (0xC00000B7, 220, _NO_CALL, _NO_CALL),
}
_CLONE3, _OTHER_ABI, _CLONE_THREAD, _ENOSYS, _EPERM = 435, 0x40000000, 0x10000, 38, 1


def _forbid_processes() -> bool:
    """Let the system refuse new processes, not threads, to this one; whether it does. seccomp(2)"""
    if platform.machine() not in _NEW_PROCESSES:
        return False
    architecture, clone, fork, vfork = _NEW_PROCESSES[platform.machine()]
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 10, 11, 12  # lines below
    lines = [
        # What is done, where to go if it is so and if not, with what.
        (load, 1, 1, 4),  # the architecture, by its place in struct seccomp_data
        (equal, 2, refuse, architecture),
        (load, 3, 3, 0),  # the call's number
        (at_least, refuse, 4, _OTHER_ABI),
        (equal, unknown, 5, _CLONE3),  # its flags cannot be seen: C libraries then take clone
        (equal, refuse, 6, fork),
        (equal, refuse, 7, vfork),
        (equal, 8, allow, clone),
        (load, 9, 9, 16),  # its flags
        (any_bit, allow, refuse, _CLONE_THREAD),
        (end, 11, 11, 0x7FFF0000),
        (end, 12, 12, 0x50000 | _EPERM),
        (end, 13, 13, 0x50000 | _ENOSYS),
    ]
    jumps = (equal, at_least, any_bit)
    program = b"".join(
        struct.pack("HBBI", do, *((yes - at - 1, no - at - 1) if do in jumps else (0, 0)), value)
        for at, (do, yes, no, value) in enumerate(lines)
    )
    code = ctypes.create_string_buffer(program)
    told = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
    of_a_filter = 2
    return _prctl(_PR_SET_NO_NEW_PRIVS, 1) and _prctl(
        _PR_SET_SECCOMP, of_a_filter, ctypes.addressof(told)
    )
