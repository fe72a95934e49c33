"""Measured bytes against bytes worked out by hand."""

import gc
import multiprocessing
import sys
import threading

import pytest
import torch

from protrain_runtime.devices.memory_meter import (
    MemoryMeter,
    Segment,
    borrowing,
    process_memory,
    reachable,
    reset_peak_rss,
    return_freed_memory,
    storage_bytes,
)

KIB = 1024
MIB = 1024 * KIB


def test_a_chain_of_products_matches_the_sizes_worked_out_by_hand() -> None:
    a = torch.ones(64, 128)
    with MemoryMeter() as meter:
        meter.mark("first")
        b = a @ torch.ones(128, 256)  # the right operand, 128 KiB, dies after the product
        meter.mark("second")
        c = b @ torch.ones(256, 32)  # 32 KiB die
        meter.mark("free")
        del b
        meter.mark("nothing")
    assert meter.segments == (
        Segment(label="first", start_bytes=0, peak_bytes=192 * KIB, end_bytes=64 * KIB),
        Segment(label="second", start_bytes=64 * KIB, peak_bytes=104 * KIB, end_bytes=72 * KIB),
        Segment(label="free", start_bytes=72 * KIB, peak_bytes=72 * KIB, end_bytes=8 * KIB),
        Segment(label="nothing", start_bytes=8 * KIB, peak_bytes=8 * KIB, end_bytes=8 * KIB),
    )
    assert c.nbytes == 8 * KIB


def test_temporaries_inside_one_operator_are_seen() -> None:
    x = torch.ones(256, 256).t()
    with MemoryMeter() as meter:
        meter.mark("logsumexp")
        y = torch.logsumexp(x, dim=0)
        meter.mark("after")
    segment = meter.segments[0]
    assert segment.end_bytes == y.nbytes == KIB
    assert segment.peak_bytes >= x.nbytes + y.nbytes  # exp(x - max) lives inside the operator


def test_backward_is_counted_in_the_thread_that_calls_it() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    x = torch.ones(32, 64)
    with MemoryMeter() as meter:
        meter.mark("forward")
        loss = (x @ weight).sum()
        meter.mark("backward")
        loss.backward()
        meter.mark("after")
    forward, backward, _ = meter.segments
    assert forward.peak_bytes == 32 * 64 * 4 + 4  # the product dies: sum saves no values
    assert forward.end_bytes == 4
    # The loss, its gradient (4 bytes, dead at the end) and the weight's gradient.
    assert backward.end_bytes == 4 + 64 * 64 * 4
    assert backward.peak_bytes >= 8 + 64 * 64 * 4


def test_blocks_from_before_count_as_the_start_says() -> None:
    before = [torch.ones(KIB), torch.ones(2 * KIB)]
    tensors = [*before, before[0][:4]]
    with MemoryMeter(start_bytes=storage_bytes(tensors)) as meter:
        meter.mark("all")
        new = torch.ones(KIB)
        before.clear()
        tensors.clear()
        meter.mark("end")
    assert meter.segments[0] == Segment(
        label="all", start_bytes=12 * KIB, peak_bytes=16 * KIB, end_bytes=16 * KIB
    )
    del new


@pytest.mark.parametrize("when", ["before the meter", "in another thread"])
def test_what_stood_is_counted_until_it_is_freed_elsewhere(when: str) -> None:
    """As pieces of an update that lanes still have in hand when a step is measured."""
    stood = [torch.empty(1000, dtype=torch.uint8) for _ in range(2)]
    standing = [one.untyped_storage() for one in stood]
    meter = MemoryMeter(start_bytes=2000, standing=standing)
    del standing
    if when == "before the meter":
        stood.pop()
    with meter:
        meter.mark("start")
        if when == "in another thread":
            thread = threading.Thread(target=stood.pop)
            thread.start()
            thread.join()
        meter.mark("end")
    assert [segment.end_bytes for segment in meter.segments][-1] == 1000


def test_a_view_of_memory_that_it_does_not_keep_counts_for_nothing() -> None:
    """Gloo's thread may hold one after its memory is gone, and nothing tells when it lets go."""
    gc.collect()
    before = storage_bytes(reachable(torch.device("cpu")))
    memory = bytearray(4 * KIB)
    view = borrowing(torch.frombuffer(memory, dtype=torch.float32))
    own = torch.ones(KIB)
    assert storage_bytes(reachable(torch.device("cpu"))) == before + 4 * KIB
    del view, own


def test_a_tensor_of_a_transform_counts_as_what_is_inside() -> None:
    """Compilers keep some: of an associative scan, say."""
    gc.collect()
    before = storage_bytes(reachable(torch.device("cpu")))
    kept: list[torch.Tensor] = []
    own = torch.ones(4, KIB)

    def seen(row: torch.Tensor) -> torch.Tensor:
        kept.append(row)
        return row.sum()

    torch.func.vmap(torch.func.grad(seen))(own)
    assert torch._C._functorch.is_functorch_wrapped_tensor(kept[0])
    assert storage_bytes(reachable(torch.device("cpu"))) == before + 4 * 4 * KIB


def test_a_second_meter_does_not_count_releases_of_the_first_ones_blocks() -> None:
    with MemoryMeter() as first:
        first.mark("all")
        kept = torch.ones(MIB)
    with MemoryMeter() as second:
        second.mark("all")
        del kept
        again = torch.ones(KIB)
    assert first.segments[0].end_bytes == 4 * MIB
    assert second.segments[0].end_bytes == again.nbytes


def test_bytes_before_the_first_mark_are_in_the_level_but_in_no_segment() -> None:
    with MemoryMeter() as meter:
        kept = torch.ones(KIB)
        meter.mark("only")
    assert meter.segments == (
        Segment(label="only", start_bytes=4 * KIB, peak_bytes=4 * KIB, end_bytes=4 * KIB),
    )
    del kept


def test_segments_are_refused_before_the_end() -> None:
    meter = MemoryMeter()
    with pytest.raises(RuntimeError, match=r"^MemoryMeter: segments are known after the with"):
        _ = meter.segments


def test_an_exception_inside_comes_out_and_the_next_meter_works() -> None:
    with pytest.raises(ZeroDivisionError), MemoryMeter():
        raise ZeroDivisionError
    with MemoryMeter() as meter:
        meter.mark("all")
        kept = torch.ones(KIB)
    assert meter.segments[0].end_bytes == kept.nbytes


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_resident_memory_follows_a_tensor_once_freed_memory_is_returned() -> None:
    # In a process of its own: the setting cannot be taken back, and it slows what comes after.
    process = multiprocessing.get_context("spawn").Process(target=_follow_one_tensor)
    process.start()
    process.join()
    assert process.exitcode == 0


def _follow_one_tensor() -> None:
    if not return_freed_memory():
        return  # the C library is not glibc
    gc.collect()
    reset_peak_rss()
    before = process_memory()
    block = torch.ones(64 * MIB)
    held = process_memory()
    del block
    after = process_memory()
    assert held.resident_bytes - before.resident_bytes == pytest.approx(256 * MIB, rel=0.02)
    assert held.data_bytes - before.data_bytes == pytest.approx(256 * MIB, rel=0.1)
    assert after.resident_bytes - before.resident_bytes < 8 * MIB
    assert after.peak_resident_bytes - before.resident_bytes == pytest.approx(256 * MIB, rel=0.02)
    reset_peak_rss()
    assert process_memory().peak_resident_bytes - before.resident_bytes < 8 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_what_the_allocator_hands_out() -> None:
    with MemoryMeter("cuda") as meter:
        meter.mark("grow")
        kept = torch.ones(MIB, device="cuda")
        temporary = torch.ones(MIB, device="cuda")
        meter.mark("shrink")
        del temporary
    assert meter.segments == (
        Segment(label="grow", start_bytes=0, peak_bytes=8 * MIB, end_bytes=8 * MIB),
        Segment(label="shrink", start_bytes=8 * MIB, peak_bytes=8 * MIB, end_bytes=4 * MIB),
    )
    del kept
