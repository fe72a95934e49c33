"""Calls of a device: streams, events, memory, random numbers.

All use PyTorch's common names for accelerators (`torch.accelerator`, `torch.Stream`, `torch.Event`,
`torch.get_device_module`), always with the device's index: a thread's current device may be
another. Calls of a single type are entries of `TYPES`; other types do without.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import torch

from protrain_runtime.contract.errors import OutOfMemoryError, ProtrainError
from protrain_runtime.contract.program.program import BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCalls:
    """Calls that PyTorch has no common name for. All of them may be absent.

    pin           makes host pages the current device's to copy from and to by itself, given their
                  address and bytes; returns what undoes it. Without it pinned memory is PyTorch's
                  own, which may round sizes up to powers of two
    memory_limit  the most bytes that the allocator may reserve, where a cap is set
    """

    pin: Callable[[int, int], Callable[[], None]] | None = None
    memory_limit: Callable[[torch.device], int | None] | None = None


def _pin_cuda(address: int, num_bytes: int) -> Callable[[], None]:
    """Register host pages as pinned, without PyTorch's rounding; returns the undo."""
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
    return partial(runtime.cudaHostUnregister, address)


def _memory_limit_cuda(device: torch.device) -> int | None:
    """The cap of `set_per_process_memory_fraction` on bytes reserved by the allocator."""
    total: int = torch.cuda.get_device_properties(device).total_memory
    return int(torch.cuda.get_per_process_memory_fraction(device) * total)


TYPES: dict[str, DeviceCalls] = {
    "cuda": DeviceCalls(pin=_pin_cuda, memory_limit=_memory_limit_cuda)
}
"""By type name: a new type is one entry. ROCm's devices are called cuda, too."""

HOST = torch.device("cpu")

HOST_ALIGNMENT_BYTES = 64
"""The alignment of PyTorch's CPU allocator (c10/core/alignment.h, gAlignment)."""


def of_type(device: torch.device) -> DeviceCalls:
    """The calls of the device's type."""
    return TYPES.get(device.type, DeviceCalls())


def on_host(device: torch.device) -> bool:
    """Whether the device's memory is the host's, and work is done when a call returns."""
    return device.type == "cpu"


def alignment(device: torch.device) -> int:
    """The alignment in bytes of a new tensor's memory: kernels may depend on it."""
    # An accelerator's is its allocator's rounding (c10/cuda/CUDACachingAllocator.cpp,
    # kMinBlockSize).
    return HOST_ALIGNMENT_BYTES if on_host(device) else BLOCK_BYTES


def found(name: str) -> torch.device:
    """The device called `name`, with its index; ProtrainError if it cannot train."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ProtrainError(
            f"PyTorch has no device called '{name}'",
            fix="cpu, cuda, xpu, or another type that this build of PyTorch names",
        ) from error
    if on_host(device):
        return torch.device("cpu")
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != device.type:
        others = "" if here is None else f", and has one of type '{here.type}'"
        raise ProtrainError(
            f"this machine has no device of type '{device.type}' that torch can use{others}",
            fix=f"a build of PyTorch for {device.type} on a machine that has one, or cpu",
        )
    index = torch.accelerator.current_device_index() if device.index is None else device.index  # type: ignore[redundant-expr] # typed as an int
    if index >= torch.accelerator.device_count():
        raise ProtrainError(
            f"there is no '{device}': this machine has"
            f" {torch.accelerator.device_count()} of type '{device.type}'"
        )
    device = torch.device(device.type, index)
    require(device)
    return device


def require(device: torch.device) -> None:
    """ProtrainError if an accelerator lacks features that plans need."""
    if on_host(device):
        return
    for what, ask in _NEEDED.items():
        try:
            ask(device)
        except (RuntimeError, AttributeError, NotImplementedError, ValueError) as error:
            raise ProtrainError(
                f"devices of type '{device.type}' have no {what} that PyTorch knows of, which"
                f" transfers beside compute need: {str(error).splitlines()[0]}",
                fix="train on another device, or without a plan",
            ) from error


def name(device: torch.device) -> str:
    """An accelerator's name, or its type."""
    asked = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if asked is None else str(asked(device))


def current_stream(device: torch.device) -> torch.Stream:
    """This thread's current stream on the device."""
    found: torch.Stream = torch._C._accelerator_getStream(device.index)
    return found


def record_event(device: torch.device, *, timing: bool = False) -> torch.Event:
    """An event after all work submitted to the device's current stream."""
    events = [torch.Event(device=device, enable_timing=True)] if timing else []
    event: torch.Event = torch._C._accelerator_getStream(device.index).record_event(*events)
    return event


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make an accelerator the thread's current device, where CUDA creates its context."""
    if on_host(device) or torch._C._accelerator_getDeviceIndex() == device.index:
        return _AS_IT_IS
    return torch.accelerator.device_index(device.index)


_AS_IT_IS = nullcontext()


def pin(device: torch.device, address: int, num_bytes: int) -> Callable[[], None]:
    """Pin host pages for a device; returns the undo; RuntimeError if refused."""
    register = of_type(device).pin
    assert register is not None
    with current(device):
        try:
            unregister = register(address, num_bytes)
        except RuntimeError:
            # CUDA would report the refusal again at the next kernel launch.
            with suppress(RuntimeError):
                torch.zeros(1, device=device)
            raise

    def unpin() -> None:
        with current(device):
            unregister()

    return unpin


def synchronize(device: torch.device) -> None:
    """Block until the device has done all submitted work."""
    if not on_host(device):
        torch.accelerator.synchronize(device)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes of the device's memory."""
    free, total = torch.accelerator.get_memory_info(device)
    return int(free), int(total)


def context_bytes(device: torch.device) -> int:
    """Bytes of the device's memory outside this process's allocator."""
    free, total = free_and_total_bytes(device)
    return total - free - torch.accelerator.memory_reserved(device)


def room_bytes(device: torch.device) -> int:
    """Bytes available to this process's allocator: free or reserved, within its cap."""
    room = free_and_total_bytes(device)[0] + torch.accelerator.memory_reserved(device)
    limit = of_type(device).memory_limit
    cap = None if limit is None else limit(device)
    return room if cap is None else min(room, cap)


def collectives(device: torch.device) -> str:
    """The collectives library for the device's type; ProtrainError if there is none."""
    try:
        return torch.distributed.get_default_backend_for_device(device.type)
    except ValueError as error:
        raise ProtrainError(
            f"PyTorch has no collectives between devices of type '{device.type}'",
            fix="import the package that has them, or plan for one device",
        ) from error


def free_cached(device: torch.device) -> None:
    """Release the allocator's unused reserved memory."""
    if not on_host(device):
        torch.accelerator.empty_cache()


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the device's own generator."""
    if on_host(device):
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of the device's own generator."""
    if on_host(device):
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def all_random_states() -> tuple[str, list[torch.Tensor]]:
    """The type of this machine's accelerators, and the states of those in use; else nothing."""
    here = torch.accelerator.current_accelerator(check_available=True)
    # Asking an unused type for a state would initialise it.
    if here is None or not torch.get_device_module(here).is_initialized():
        return "", []
    devices = [torch.device(here.type, n) for n in range(torch.accelerator.device_count())]
    return here.type, [random_state(device) for device in devices]


def set_all_random_states(kind: str, states: list[torch.Tensor]) -> None:
    """Restore `all_random_states`' result, given as many devices of that type."""
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != kind or torch.accelerator.device_count() != len(states):
        return
    for index, state in enumerate(states):
        set_random_state(torch.device(kind, index), state)


def _can_time_and_wait(device: torch.device) -> None:
    start, end = (record_event(device, timing=True) for _ in range(2))
    current_stream(device).wait_event(start)
    end.synchronize()
    start.elapsed_time(end)


_NEEDED: dict[str, Callable[[torch.device], object]] = {
    "streams": lambda device: torch.Stream(device=device),
    "events": _can_time_and_wait,
    "memory statistics": lambda device: (
        room_bytes(device),
        torch.accelerator.max_memory_reserved(device),
    ),
    "pinned memory": lambda device: (
        of_type(device).pin or torch.empty(1, dtype=torch.uint8, pin_memory=True)
    ),
    "random states": random_state,
    # Without it, recomputed dropout silently draws other numbers.
    "flag by which torch.utils.checkpoint knows that random states are in use": lambda device: (
        torch.get_device_module(device)._initialized
    ),
}


def autocast_as_now(kind: str, *, caches: bool = True) -> Callable[[], torch.autocast]:
    """A maker of contexts with the present autocast; weight casts are cached only if `caches`."""
    return partial(
        torch.autocast,
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=caches and torch.is_autocast_cache_enabled(),
    )


@contextmanager
def explained_exhaustion(*, fix: str, what: str = "out of memory") -> Iterator[None]:
    """OutOfMemoryError with `fix` if an allocation inside fails."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not out_of_memory(error):
            raise
        raise OutOfMemoryError(f"{what}: {refusal(error)}", fix=fix) from error


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation by PyTorch or Python failed, here or on a lane."""
    if error is None:
        return False
    seen = str(error)
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or (isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN))
        or "out of memory" in seen  # also CUDA's message for host memory that it cannot pin
        or "not enough memory" in seen
        or "can't allocate memory" in seen
        or "can't start new thread" in seen  # no memory for its stack
        or out_of_memory(error.__cause__)
    )


def refusal(error: BaseException) -> str:
    """The allocator's message, in one line."""
    lines = str(error).splitlines() or [type(error).__name__]
    line = next((line for line in lines if "memory" in line), lines[0])
    return line.rpartition("] ")[2].strip()
