"""Spill files past the page cache: any range comes back, whatever the disk and the system do."""

import ctypes
import errno
import gc
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from protrain_plan.profiling.rehearsal import unseen_staging_bytes
from protrain_runtime.contract.program.program import (
    EDGE_BYTES,
    FILE_BYTES,
    NUM_REQUESTS,
    REQUEST_BYTES,
    file_bytes,
)
from protrain_runtime.devices import spill_file
from protrain_runtime.devices.lanes import Backend
from protrain_runtime.devices.spill_file import SpillFile
from protrain_runtime.devices.stores import DiskStore, memory_of
from tests.support.cards import every_device
from tests.support.runtime_cases import device

SIZE = 3 * NUM_REQUESTS * REQUEST_BYTES
BLOCK = 4096


def taking_direct_io(folder: Path) -> SpillFile:
    """A file that passes the page cache by; the test has nothing to say where there is none."""
    file = SpillFile(folder)
    if not file.direct:
        file.close()
        pytest.skip(file.reason)
    return file


def some_bytes(rng: random.Random, count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(rng.randbytes(count)), dtype=torch.uint8)


def read_back(file: SpillFile, start: int, count: int) -> torch.Tensor:
    target = torch.empty(count, dtype=torch.uint8)
    file.read(start, memory_of(target))
    return target


def some_range(rng: random.Random) -> tuple[int, int]:
    """A few bytes, some blocks or many requests; half of them as a chunk cuts them."""
    count = rng.choice([1, 64, BLOCK, rng.randrange(2 * BLOCK), rng.randrange(SIZE // 2)])
    begin = rng.randrange(SIZE - count)
    return (begin // 64 * 64 if rng.random() < 0.5 else begin), count


@contextmanager
def raising_once(name: str, number: int, error: OSError) -> Iterator[None]:
    """The system's call of that name fails once, at its `number`-th time."""
    usual, calls = getattr(os, name), 0
    lock = threading.Lock()

    def call(*args: object) -> object:
        nonlocal calls
        with lock:
            calls += 1
            fails = calls == number
        if fails:
            raise error
        return usual(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, call)
        yield


def assert_agrees_with_memory(
    write: Callable[[int, torch.Tensor], None],
    read: Callable[[int, int], torch.Tensor],
    rng: random.Random,
    rounds: int,
) -> None:
    """Ranges of SIZE bytes give what was written last, and zeros before that."""
    memory = torch.zeros(SIZE, dtype=torch.uint8)
    for _ in range(rounds):
        begin, count = some_range(rng)
        if rng.random() < 0.5:
            memory[begin : begin + count] = source = some_bytes(rng, count)
            write(begin, source)
        else:
            assert torch.equal(read(begin, count), memory[begin : begin + count])


@pytest.mark.parametrize("cached", [False, True])
def test_any_reads_and_writes_agree_with_memory(cached: bool, tmp_path: Path) -> None:
    with closing(SpillFile(tmp_path, cached=cached)) as file:
        first, start = file.reserve(5000), file.reserve(SIZE)
        assert_agrees_with_memory(
            lambda begin, source: file.write(start + begin, memory_of(source)),
            lambda begin, count: read_back(file, start + begin, count),
            random.Random(0),
            rounds=120,
        )
        assert not read_back(file, first, 5000).any()


def test_more_blocks_than_are_kept_are_changed_in_part(tmp_path: Path) -> None:
    """Twice as many, in two rounds."""
    with closing(taking_direct_io(tmp_path)) as file:
        block = file.alignment.block
        start = file.reserve(2 * EDGE_BYTES)
        for number in [*range(2 * EDGE_BYTES // block)] * 2:
            mark = torch.full((3,), number % 251 + 1, dtype=torch.uint8)
            file.write(start + number * block + 100, memory_of(mark))
        found = read_back(file, start, 2 * EDGE_BYTES).view(-1, block)
        expected = torch.arange(len(found)) % 251 + 1
        assert torch.equal(found[:, 100:103], expected.to(torch.uint8).repeat(3, 1).T)
        assert not found[:, :100].any()
        assert not found[:, 103:].any()


def test_threads_use_ranges_that_share_blocks(tmp_path: Path) -> None:
    """More threads than requests at a time, each in ranges of its own that end inside blocks."""
    size, wrong = NUM_REQUESTS * REQUEST_BYTES + 1000, list[object]()
    with closing(SpillFile(tmp_path)) as file:
        start = file.reserve(6 * size)

        def use(number: int) -> None:
            rng = random.Random(number)
            mine = torch.zeros(size, dtype=torch.uint8)
            try:
                for _ in range(8):
                    begin = rng.randrange(size)
                    count = rng.choice([200, size]) if begin + 200 <= size else 1
                    count = min(count, size - begin)
                    mine[begin : begin + count] = source = some_bytes(rng, count)
                    file.write(start + number * size + begin, memory_of(source))
                    assert torch.equal(read_back(file, start + number * size, size), mine)
            except BaseException as error:  # noqa: BLE001 - told where the threads are joined
                wrong.append(error)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.nightly("64", "512")
@pytest.mark.parametrize("shift", [0, 64, 512, 1000])
def test_whole_blocks_move_from_and_to_the_callers_memory_where_it_suits(
    shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte passes through staging but the first and the last block."""
    with closing(taking_direct_io(tmp_path)) as file:
        count = 2 * REQUEST_BYTES
        start = file.reserve(count + BLOCK) + shift
        pages = torch.frombuffer(mmap.mmap(-1, count + 2 * BLOCK), dtype=torch.uint8)
        fits = pages[start % BLOCK :][:count]
        copied = list[int]()
        usual = spill_file._copy

        def copy(target: memoryview, source: memoryview) -> None:
            copied.append(len(source))
            usual(target, source)

        monkeypatch.setattr(spill_file, "_copy", copy)
        file.write(start, memory_of(fits))
        file.read(start, memory_of(fits))
        assert all(size < BLOCK for size in copied)
        assert len(copied) <= 2
        off = pages[start % BLOCK + 1 :][:count]
        if file.alignment.memory > 1:
            file.write(start, memory_of(off))
            assert sum(copied) >= count - 2 * BLOCK


FAULTS = [(errno.ENOSPC, "No space left on device"), (errno.EIO, "Input/output error")]


@pytest.mark.nightly(but=("28-No space left on device-1", "5-Input/output error-1"))
@pytest.mark.parametrize("number", [1, 3, 6])
@pytest.mark.parametrize(("code", "words"), FAULTS)
def test_a_request_that_fails_is_one_error_and_the_file_goes_on(
    code: int, words: str, number: int, tmp_path: Path
) -> None:
    """In the caller's thread or in a helper's: all have ended when the error is raised."""
    with closing(taking_direct_io(tmp_path)) as file:
        start = file.reserve(SIZE)
        source, error = some_bytes(random.Random(1), SIZE), OSError(code, words)
        with raising_once("pwrite", number, error), pytest.raises(OSError, match=words):
            file.write(start, memory_of(source))
        file.write(start, memory_of(source))
        with raising_once("preadv", number, error), pytest.raises(OSError, match=words):
            read_back(file, start, SIZE)
        assert torch.equal(read_back(file, start, SIZE), source)


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_an_edge_that_fails_is_told_and_is_not_taken_for_the_files(
    name: str, tmp_path: Path
) -> None:
    """Reads see what the disk has, and the next change of the block begins with that."""
    with closing(taking_direct_io(tmp_path)) as file:
        start = file.reserve(3 * BLOCK)
        marks = [torch.full((5,), value, dtype=torch.uint8) for value in (7, 8, 9)]
        full = OSError(errno.ENOSPC, "No space left on device")
        with raising_once(name, 1, full), pytest.raises(OSError, match="No space left"):
            file.write(start + 10, memory_of(marks[0]))
        file.write(start + 20, memory_of(marks[1]))
        with raising_once("pwrite", 1, full), pytest.raises(OSError, match="No space left"):
            file.write(start + 30, memory_of(marks[2]))
        file.write(start + 40, memory_of(marks[2]))
        expected = torch.zeros(50, dtype=torch.uint8)
        expected[20:25], expected[40:45] = 8, 9
        assert torch.equal(read_back(file, start, 50), expected)


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_requests_that_are_cut_short_go_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a signal, or at a quota: inside a block, and at the end of one."""
    with closing(taking_direct_io(tmp_path)) as file:
        start = file.reserve(SIZE)
        source = some_bytes(random.Random(2), SIZE)
        usual, cuts = getattr(os, name), iter([5 * BLOCK + 17, 3 * BLOCK] * 3)

        def call(descriptor: int, data: memoryview | list[memoryview], offset: int) -> int:
            view = data[0] if isinstance(data, list) else data
            cut = next(cuts, len(view)) if len(view) > 6 * BLOCK else len(view)
            whole = view[: cut // BLOCK * BLOCK] if cut < len(view) else view
            done = usual(descriptor, [whole] if isinstance(data, list) else whole, offset)
            return min(cut, len(view)) if done == len(whole) else done

        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            file.write(start, memory_of(source))
            target = read_back(file, start, SIZE)
        assert torch.equal(source, target)


REFUSALS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "this system has no direct I/O": lambda patch: patch.delattr(os, "O_DIRECT"),
    "its file system takes no direct I/O (Invalid argument)": lambda patch: patch.setattr(
        spill_file, "_alignment", refused
    ),
}


def refused(descriptor: int) -> spill_file.Alignment:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.parametrize("reason", REFUSALS)
def test_where_direct_io_is_refused_bytes_go_through_the_cache_and_it_says_why(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    REFUSALS[reason](monkeypatch)
    with closing(DiskStore(tmp_path)) as store:
        assert store.buffered == reason
        start = store.reserve(10_000)
        source = some_bytes(random.Random(3), 10_000)
        store.write(start, source)
        target = torch.empty(10_000, dtype=torch.uint8)
        store.read(start, target)
        assert torch.equal(source, target)


def test_a_file_in_memory_takes_what_is_written(tmp_path: Path) -> None:
    """Whichever way: newer systems take direct I/O there, older ones refuse it."""
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no file system in memory")
    with closing(SpillFile(folder)) as file:
        start = file.reserve(SIZE)
        source = some_bytes(random.Random(4), SIZE)
        file.write(start, memory_of(source))
        assert torch.equal(read_back(file, start, SIZE), source)


def test_what_is_written_takes_no_page_cache(tmp_path: Path) -> None:
    """The file's own pages, as the kernel counts them (mincore)."""
    with closing(taking_direct_io(tmp_path)) as file:
        start = file.reserve(SIZE)
        file.write(start, memory_of(torch.ones(SIZE, dtype=torch.uint8)))
        file.read(start, memory_of(torch.empty(SIZE, dtype=torch.uint8)))
        assert cached_pages(file.fileno(), SIZE) == 0
    with closing(SpillFile(tmp_path, cached=True)) as file:
        start = file.reserve(SIZE)
        file.write(start, memory_of(torch.ones(SIZE, dtype=torch.uint8)))
        assert cached_pages(file.fileno(), SIZE) > SIZE // mmap.PAGESIZE // 2


def cached_pages(descriptor: int, num_bytes: int) -> int:
    """How many of a file's pages are in memory."""
    pages = mmap.mmap(descriptor, num_bytes)
    view = memoryview(pages)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    found = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
    size = ctypes.c_size_t(num_bytes)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), size, found) == 0
    return sum(page & 1 for page in found)


def test_helpers_end_with_the_file(tmp_path: Path) -> None:
    """When it is closed, and when it is dropped."""
    others = set(threading.enumerate())  # files of other tests have theirs

    def helpers() -> list[threading.Thread]:
        new = set(threading.enumerate()) - others
        return [thread for thread in new if thread.name.startswith("protrain file")]

    data = torch.ones(SIZE, dtype=torch.uint8)
    file = taking_direct_io(tmp_path)
    file.write(file.reserve(SIZE), memory_of(data))
    assert len(helpers()) == NUM_REQUESTS - 1
    file.close()
    assert helpers() == []
    file = SpillFile(tmp_path)
    file.write(file.reserve(SIZE), memory_of(data))
    mine = helpers()
    del file
    gc.collect()
    for thread in mine:
        thread.join(10)
    assert helpers() == []


@pytest.mark.nightly("emulated")
@every_device
def test_a_devices_bytes_pass_through_from_and_to_any_place(tmp_path: Path) -> None:
    backend = Backend(device())
    with closing(DiskStore(tmp_path, backend)) as store:
        start = store.reserve(SIZE)

        def read(begin: int, count: int) -> torch.Tensor:
            target = torch.empty(count, dtype=torch.uint8, device=backend.device)
            store.read(start + begin, target)
            return target.cpu()

        assert_agrees_with_memory(
            lambda begin, source: store.write(start + begin, source.to(backend.device)),
            read,
            random.Random(5),
            rounds=40,
        )


def test_a_file_takes_what_is_predicted_of_its_regions(tmp_path: Path) -> None:
    """Each has blocks of its own, so that their order does not matter."""
    rng = random.Random(11)
    sizes = [rng.choice((1, 64, 4096, 5000, 2**20 - 64, 2**20, 3 * 2**20 + 12)) for _ in range(40)]
    with closing(taking_direct_io(tmp_path)) as file:
        block = file.alignment.block
        places = [(file.reserve(size), size) for size in sizes]
        assert file.num_bytes == sum(file_bytes(size, block) for size in sizes)
        assert os.fstat(file.fileno()).st_size == file.num_bytes
        for (start, size), (then, _) in pairwise([*places, (file.num_bytes, 0)]):
            assert (start + size - 1) // block < then // block
    with closing(SpillFile(tmp_path, cached=True)) as file:
        for size in sizes:
            file.reserve(size)
        assert file.num_bytes == sum(sizes) <= sum(map(file_bytes, sizes))


def test_a_rehearsal_counts_the_staging_that_its_file_system_has_no_need_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking_direct_io(tmp_path).close()
    assert unseen_staging_bytes(tmp_path) == 0
    monkeypatch.setattr(spill_file, "_alignment", refused)
    assert unseen_staging_bytes(tmp_path) == FILE_BYTES
