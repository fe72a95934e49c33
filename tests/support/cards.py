"""The accelerators that tests run on: a CUDA device where there is one, and the emulated one.

What the tests turn and ask for in ways of each type's own is here: caps on memory, waits of the
host, deterministic kernels, delays.
"""

import gc
import os
import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

from tests.emulated import building
from tests.support.runtime_cases import device, on_device

Test = TypeVar("Test", bound=Callable[..., Any])

CARDS = [
    pytest.param("cuda:0", marks=pytest.mark.gpu, id="cuda"),
    # Not the current device, which is the first.
    pytest.param("emulated:1", marks=pytest.mark.emulated, id="emulated"),
]


def every_device(test: Test) -> Test:
    """A test that is asked of the CPU and, in part for every change, of each of the cards."""
    for mark in (
        pytest.mark.every_device,
        pytest.mark.usefixtures("card"),
        pytest.mark.parametrize("card", ["cpu", *CARDS], indirect=True),
    ):
        test = mark(test)
    return test


DELAYS: tuple[dict[str, float], ...] = (
    {},
    {"compute_us": 15.0},
    {"lanes_us": 200.0},
    {"compute_us": 10.0, "lanes_us": 50.0},
)
"""How late the emulated device's streams are in the mean, while a test runs; nothing: prompt."""


@contextmanager
def card_called(name: str, test: str) -> Iterator[torch.device]:
    """Models and batches are on that device inside; `test` chooses the emulated one's delays.

    Other delays for the same test: EMULATED_SEED=1, 2, ...
    """
    if name == "cpu":
        yield device()
    elif name.startswith("cuda"):
        with _cuda(name) as found:
            yield found
    else:
        with _emulated(name, test) as found:
            yield found


@contextmanager
def _cuda(name: str) -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before cuBLAS is first used
    torch.use_deterministic_algorithms(mode=True)
    try:
        # Its kernels of AdamW round otherwise than the host's.
        with on_device(name, exact_optimizer=True):
            yield device()
    finally:
        torch.use_deterministic_algorithms(mode=False)
        gc.collect()


def need_compiler(untested: str) -> None:
    """Skip a test of the emulated device where nothing can build it, loudly; in CI that fails."""
    if building.compiler() is None:
        reason = f"NO C++ COMPILER: {untested}"
        if "CI" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)


@contextmanager
def _emulated(name: str, test: str) -> Iterator[torch.device]:
    need_compiler("nothing of what runs beside compute is tested on a device")
    from tests.emulated.device import delayed, extension

    extension()  # PyTorch knows the device from here on
    seed = zlib.crc32(f"{test} {os.environ.get('EMULATED_SEED', '')}".encode())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as its streams compute, and the host's optimizer with them
    try:
        with on_device(name), delayed(seed, **DELAYS[seed % len(DELAYS)]):
            yield device()
    finally:
        torch.set_num_threads(threads)
        gc.collect()


@contextmanager
def capped(num_bytes: int) -> Iterator[None]:
    """The device's allocator may reserve no more than this."""
    if device().type == "cuda":
        total = torch.cuda.get_device_properties(device()).total_memory
        torch.cuda.set_per_process_memory_fraction(num_bytes / total, device())
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device())
        return
    from tests.emulated import device as emulated

    with emulated.capped(device(), num_bytes):
        yield


@contextmanager
def host_waits() -> Iterator[Counter[str]]:
    """Counts where threads that are not lanes wait for the device; known when the block ends."""
    found: Counter[str] = Counter()
    if device().type == "cuda":
        with _warned_waits(found):
            yield found
        return
    from tests.emulated.device import extension

    gc.collect()  # a model that is dropped inside would wait for its lanes
    extension().forget_host_waits()
    lanes = _lane_threads()
    yield found
    lanes |= _lane_threads()
    for thread, reasons in extension().host_waits().items():
        if thread not in lanes:
            found.update(reasons)


def _lane_threads() -> set[int | None]:
    """The operating system's numbers of the threads that are lanes."""
    return {t.native_id for t in threading.enumerate() if t.name.startswith("protrain ")}


@contextmanager
def _warned_waits(found: Counter[str]) -> Iterator[None]:
    """PyTorch warns in the thread that waits. The mode holds for all of them, lanes too."""

    def seen(message: Warning | str, *_: object) -> None:
        text = str(message)
        if "prototype feature" in text:  # of the mode itself, once a process
            return
        if not threading.current_thread().name.startswith("protrain "):
            found[text] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = seen  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
