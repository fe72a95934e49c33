"""PyTorch's view of the emulated device: the module `torch.emulated`, and what tests turn."""

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from protrain_runtime.devices import device as devices
from tests.emulated import building

TYPE = "emulated"


@cache
def extension() -> Any:
    """The compiled extension; from then on, PyTorch knows the device in this process."""
    loaded = building.load()
    rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, _module(loaded))
    generate_methods_for_privateuse1_backend(for_storage=False)
    devices.TYPES[TYPE] = devices.DeviceCalls(
        pin=partial(_pin, loaded), memory_limit=lambda device: loaded.cap(device.index)
    )
    dist.Backend.register_backend(
        TYPE, partial(_process_group, loaded), extended_api=True, devices=[TYPE]
    )
    atexit.register(_settle)
    return loaded


def _settle() -> None:
    """Let the streams come to their ends before what they work on is taken down."""
    extension().set_delays(0, 0, 0)
    for index in range(extension().device_count()):
        torch.accelerator.synchronize(index)


def _module(loaded: Any) -> ModuleType:
    """The module of the device: all that PyTorch and the runtime ask it for."""
    module = ModuleType(f"torch.{TYPE}")

    def generator(device: Any = None) -> torch.Generator:
        found: torch.Generator = loaded.default_generator(
            _index(TYPE if device is None else device)
        )
        return found

    def seed_all(seed: int) -> None:
        for index in range(loaded.device_count()):
            generator(index).manual_seed(seed)

    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "device_count": loaded.device_count,
        "current_device": loaded.current_device,
        "set_device": torch.accelerator.set_device_index,
        "device": _Device,
        "synchronize": torch.accelerator.synchronize,
        "current_stream": torch.accelerator.current_stream,
        "Stream": torch.Stream,
        "stream": lambda stream: nullcontext() if stream is None else stream,
        "Event": torch.Event,
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": seed_all,
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "default_generators": [generator(index) for index in range(loaded.device_count())],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


class _Device:
    """The current device of the thread inside, as `torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        if self._index >= 0:
            torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _index(device: Any) -> int:
    """A device's number; -1 for the current one."""
    if isinstance(device, int):
        return device
    index: int | None = torch.device(device).index  # type: ignore[assignment,unused-ignore]
    return -1 if index is None else index


_pins_left: list[int] = []


def _pin(loaded: Any, address: int, num_bytes: int) -> Callable[[], None]:
    if _pins_left:
        _pins_left[-1] -= 1
        if _pins_left[-1] < 0:
            loaded.refuse()
            raise RuntimeError("emulated device error: out of memory")  # as CUDA puts it
    loaded.pin(address, num_bytes)
    return partial(loaded.unpin, address)


@contextmanager
def few_pins(number: int) -> Iterator[None]:
    """The system lets the process pin that many buffers more."""
    _pins_left.append(number)
    try:
        yield
    finally:
        _pins_left.clear()


def _process_group(loaded: Any, options: Any, _: Any) -> Any:
    gloo = dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, options.timeout
    )
    return loaded.collectives(gloo)


_longer = 1.0


def lateness() -> float:
    """How many times as late as it says everything comes that a test holds back."""
    return _longer


@contextmanager
def longer(times: float) -> Iterator[None]:
    """Delays inside are so many times as long."""
    global _longer
    before, _longer = _longer, times
    try:
        yield
    finally:
        _longer = before


@contextmanager
def delayed(seed: int, *, compute_us: float = 0.0, lanes_us: float = 0.0) -> Iterator[None]:
    """Work in the default stream (compute), and in others (lanes), is late by so much in the mean.

    One item in four, by four times as much.
    """
    extension().set_delays(seed, _longer * compute_us, _longer * lanes_us)
    try:
        yield
    finally:
        extension().set_delays(0, 0.0, 0.0)


@contextmanager
def dropping() -> Iterator[None]:
    """Streams drop their work inside: only what the host's threads do takes time."""
    drop = extension().set_dropping
    torch.accelerator.synchronize()
    drop(True)
    try:
        yield
    finally:
        drop(False)


@contextmanager
def capped(device: torch.device, num_bytes: int) -> Iterator[None]:
    """The device's allocator may reserve no more than this."""
    before = extension().cap(device.index)
    extension().set_cap(device.index, num_bytes)
    try:
        yield
    finally:
        extension().set_cap(device.index, before)
