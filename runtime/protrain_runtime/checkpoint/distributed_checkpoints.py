"""Saving on several ranks, through `torch.distributed.checkpoint`: each writes what it has.

    DIR/protrain-distributed.json            which folder is the checkpoint, and the sum of its sums
    DIR/protrain-ranks-3/checksums.json      of all other files there, part by part
    DIR/protrain-ranks-3/tensors.json        what lies where: see `part_files`
    DIR/protrain-ranks-3/.metadata ...       what torch.distributed.checkpoint writes

The names are `model.NAME` of parameters and buffers, `optimizer.state.NAME.KEY` of the optimizer's
states, `training` and `random.RANK`. Tensors are whole ones to whoever reads them: other numbers of
ranks, one device, or plain PyTorch with `torch.distributed.checkpoint.load`. A rank's part of a
parameter is a range of its elements in row-major order: a few boxes of it. A save has a folder of
its own, and the index is replaced when all of it is there: see [Note: one index] in `folders`.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed import all_gather_object
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_planned
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from protrain_plan.errors import ProtrainError, RecordError
from protrain_runtime.checkpoint.checksums import Range, Summed, new_file, write_sums
from protrain_runtime.checkpoint.folders import (
    POINTER,
    RANKS_FOLDER,
    is_distributed,
    is_of_one_device,
    new_folder,
    put_index,
)
from protrain_runtime.checkpoint.part_files import (
    METADATA,
    TENSORS,
    Box,
    boxes,
    checked,
    described,
    files_of,
    read_pointer,
)
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.values import Held, Local, Shared, Stored, Value

TRAINING = "training"


@dataclass(slots=True)
class _Part:
    """A rank's part of a tensor, as torch.distributed.checkpoint asks for it."""

    dtype: torch.dtype
    shape: torch.Size
    local: Local | None
    writes: bool = True
    held: dict[tuple[int, ...], torch.Tensor] = field(
        default_factory=dict[tuple[int, ...], torch.Tensor]
    )

    def boxes(self) -> list[Box]:
        if self.local is None:
            return []
        return list(boxes(self.shape, self.local.first, self.local.first + self.local.count))

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties=properties,
                    size=self.shape,
                ),
            )
            for box in (self.boxes() if self.writes else [])
        ]

    def read(self, offsets: Sequence[int]) -> torch.Tensor:
        """A box's elements, on the host."""
        if tuple(offsets) in self.held:
            return self.held[tuple(offsets)]
        box = next(box for box in self.boxes() if box.offsets == tuple(offsets))
        assert self.local is not None
        count = torch.Size(box.sizes).numel()
        flat = torch.empty(count * self.dtype.itemsize, dtype=torch.uint8)
        before = (box.first - self.local.first) * self.dtype.itemsize
        self.local.store.read(self.local.offset + before, flat)
        return flat.view(self.dtype).view(box.sizes)

    def stage(self) -> None:
        """Copy what this rank has, so that it may change in its store."""
        self.held = {box.offsets: self.read(box.offsets) for box in self.boxes()}


class _Saves(DefaultSavePlanner):
    """Tells what is written next."""

    def __init__(self, next_is: Callable[[str], None]) -> None:
        super().__init__(flatten_state_dict=False)
        self._next_is = next_is

    def resolve_data(self, write_item: WriteItem) -> Any:
        data, index = write_item.tensor_data, write_item.index
        assert data is not None
        self._next_is(described(index.fqn, data.chunk.offsets, data.chunk.sizes))
        return super().resolve_data(write_item)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        if isinstance(found, _Part):
            assert index.offset is not None
            return found.read(index.offset)
        return super().lookup_object(index)


class _Files(FileSystem):
    """Sums what is written to the last file that was opened for it."""

    def __init__(self) -> None:
        self.last: Summed | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", "nothing is read through this"
        with Path(path).open("xb") as file:  # brought to the disk and closed by who asked for it
            self.last = Summed(file)
            self.last.begin("the list of tensors")
            yield self.last

    def next_is(self, what: str) -> None:
        assert self.last is not None
        self.last.begin(what)


@dataclass(frozen=True)
class _Written(WriteResult):
    """A part of a tensor that is written, with its sum."""

    range_: Range


class _Writer(FileSystemWriter):
    """Writes a file for each rank, sums it, and lists all of them with their sums.

    A rank asks the planner for one part, and writes it, before it asks for the next.
    """

    def __init__(self, folder: Path) -> None:
        # It copies ahead in a stream of the device that is current, here another one.
        super().__init__(folder, per_thread_copy_ahead=0)
        self.fs = self.files = _Files()
        self.folder = folder
        self.checksum = ""  # of the sums, where they were written: on rank 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).value()
        assert self.files.last is not None
        written: list[WriteResult] = []
        for result, range_ in zip(results, self.files.last.ranges[1:], strict=True):
            assert result.storage_data.length == range_.num_bytes
            written.append(
                _Written(result.index, result.size_in_bytes, result.storage_data, range_)
            )
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        assert self.files.last is not None
        sums: dict[str, list[Range]] = {METADATA: self.files.last.ranges}
        listed: dict[str, Any] = {}
        sizes: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            listed[name] = {"dtype": dtype, "shape": list(tensor.size), "parts": []}
            for chunk in tensor.chunks:
                sizes[name, tuple(chunk.offsets)] = list(chunk.sizes)
        for result in itertools.chain.from_iterable(results):
            assert isinstance(result, _Written)
            assert result.index.offset is not None
            name, place = result.index.fqn, result.storage_data
            offsets = tuple(result.index.offset)
            file, start, length = place.relative_path, place.offset, place.length
            listed[name]["parts"].append([list(offsets), sizes[name, offsets], file, start, length])
            sums.setdefault(file, []).append(result.range_)
        checked(listed, files_of(self.folder))
        with new_file(self.folder / TENSORS, "the list of tensors") as file:
            file.write(json.dumps(listed, separators=(",", ":")).encode())
        sums[TENSORS] = file.ranges
        self.checksum = write_sums(self.folder, sums)


class Saving:
    """A save that goes on beside training. `wait` raises what went wrong."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self.told = False  # that it did not become one
        self._thread = Thread(target=self._run, args=(work,), name="protrain saves")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._error = error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it is the checkpoint; raises where it did not become one."""
        self._thread.join()
        if self._error is not None:
            self.told = True
            raise self._error


_beside: WeakKeyDictionary[Ranks, Saving] = WeakKeyDictionary()
"""The last save that went on beside training: the next one waits for it."""


def save_parts(
    directory: Path,
    ranks: Ranks,
    values: Mapping[str, Value],
    training: bytes,
    random: bytes,
    *,
    beside: bool,
) -> Saving | None:
    """Write what the ranks have; all of them call. `beside`: copy it first, and write meanwhile."""
    before = _beside.pop(ranks, None)
    if before is not None and not before.told:
        before.wait()
    state: dict[str, Any] = {}
    for name, value in values.items():
        state[name] = _writable(value, writes=ranks.rank < ranks.num_shards, copied=beside)
    state[TRAINING] = _bytes(training)
    state[f"random.{ranks.rank}"] = _bytes(random)
    folder = _next_folder(directory, ranks)
    group = ranks.checkpoint_group()

    def write() -> None:
        writer = _Writer(folder)
        try:
            save_planned(
                state,
                storage_writer=writer,
                planner=_Saves(writer.files.next_is),
                process_group=group,
            )
        except CheckpointException as error:  # on every rank, with those that failed
            rank, (why, _) = next(iter(error.failures.items()))
            raise _not_written(directory, f"rank {rank}: {why}") from error
        problems: list[str] = [""] * ranks.count
        problem = ""
        if ranks.rank == 0:
            pointer = {"protrain_save": folder.name, "num_ranks": ranks.count}
            sealed = {**pointer, "checksums": writer.checksum, "protrain_checksum": ""}
            try:
                put_index(folder, RANKS_FOLDER, POINTER, sealed)
            except (RecordError, OSError) as error:
                reason = error.message if isinstance(error, RecordError) else error.strerror
                problem = f"rank 0: {reason}"
        all_gather_object(problems, problem, group=group)  # who returns may load it
        if problems[0]:
            raise _not_written(directory, problems[0])

    def write_together() -> None:
        with ranks.writing():
            write()

    if beside:
        _beside[ranks] = Saving(write_together)
        return _beside[ranks]
    write_together()
    return None


def _not_written(directory: Path, why: str) -> ProtrainError:
    return ProtrainError(
        f"the checkpoint cannot be written: {why}",
        source=str(directory),
        fix="make room there, or save to another directory; the last checkpoint stands",
    )


def _writable(value: Value, *, writes: bool, copied: bool) -> Any:
    match value:
        case Held(tensor=tensor):
            plain = tensor.detach().resolve_conj().resolve_neg()  # what an archive can say
            return plain.to("cpu", copy=True) if copied else plain
        case Shared():
            part = _Part(value.dtype, value.shape, value.local, writes)
            if copied and writes:
                part.stage()
            return part
        case Stored():
            return _whole(value)
        case _:
            raise AssertionError(value)


def _whole(value: Value) -> torch.Tensor:
    pieces: list[torch.Tensor] = []
    value.copy_to(lambda piece: pieces.append(piece.clone()))
    return torch.cat(pieces).view(value.dtype).view(value.shape)


def _bytes(packed: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _next_folder(directory: Path, ranks: Ranks) -> Path:
    """A new folder, made by rank 0; ProtrainError on every rank where it cannot be."""
    problem: tuple[str, str] | None = None
    name = ""
    if ranks.rank == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if is_of_one_device(directory):
                problem = ("the directory holds a checkpoint of one device", "another directory")
            current = read_pointer(directory).folder if is_distributed(directory) else None
            name = new_folder(directory, RANKS_FOLDER, current).name
        except ProtrainError as error:
            problem = (error.message, "another directory")
        except OSError as error:
            reason = error.strerror or error
            problem = (f"the checkpoint cannot be written: {reason}", "another directory")
    told: tuple[tuple[str, str] | None, str] = ranks.all_objects((problem, name))[0]
    problem, name = told
    if problem is not None:
        raise ProtrainError(problem[0], source=str(directory), fix=f"save to {problem[1]}")
    return directory / name
