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

import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from protrain_runtime.checkpoint.files import Range, Summed, dtype_name, new_file, write_sums
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
    boxes_of,
    checked,
    described,
    files_of,
    read_pointer,
)
from protrain_runtime.checkpoint.pickled import pack
from protrain_runtime.contract.errors import ProtrainError, RecordError
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.values import Held, PackedSettings, RowFormat, Shared, Stored, Value


class _Part:
    """A rank's part of a tensor, as torch.distributed.checkpoint asks for it."""

    def __init__(self, value: Shared, *, writes: bool, copied: bool) -> None:
        self._value = value
        self._boxes = {b.offsets: (b, start) for b, start in boxes_of(value)} if writes else {}
        self._held: dict[tuple[int, ...], torch.Tensor] = {}
        if copied:  # so that what this rank has may change in its store
            self._held = {offsets: self.read(offsets) for offsets in self._boxes}

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self._value.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties=properties,
                    size=self._value.shape,
                ),
            )
            for box, _ in self._boxes.values()
        ]

    def read(self, offsets: Sequence[int]) -> torch.Tensor:
        """A box's elements, on the host."""
        if tuple(offsets) in self._held:
            return self._held[tuple(offsets)]
        (box, start), dtype = self._boxes[tuple(offsets)], self._value.dtype
        flat = torch.empty(torch.Size(box.sizes).numel() * dtype.itemsize, dtype=torch.uint8)
        assert self._value.local is not None
        self._value.local.store.read(start, flat)
        return flat.view(dtype).view(box.sizes)


class _Files(FileSystem):
    """Sums what is written to the last file that was opened for it."""

    last: Summed

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", "nothing is read through this"
        with Path(path).open("xb") as file:  # brought to the disk and closed by who asked for it
            self.last = Summed(file)
            self.last.begin("the list of tensors")
            yield self.last


class _Saves(DefaultSavePlanner):
    """Tells the files what is written next."""

    def __init__(self, files: _Files) -> None:
        super().__init__(flatten_state_dict=False)
        self._files = files

    def resolve_data(self, write_item: WriteItem) -> Any:
        data, index = write_item.tensor_data, write_item.index
        assert data is not None
        self._files.last.begin(described(index.fqn, data.chunk.offsets, data.chunk.sizes))
        return super().resolve_data(write_item)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        if isinstance(found, _Part):
            assert index.offset is not None
            return found.read(index.offset)
        return super().lookup_object(index)


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
        sums: dict[str, list[Range]] = {METADATA: self.files.last.ranges}
        for result in itertools.chain.from_iterable(results):
            assert isinstance(result, _Written)
            sums.setdefault(result.storage_data.relative_path, []).append(result.range_)
        listed: dict[str, Any] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            parts: list[Any] = []
            for chunk in tensor.chunks:
                place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                box = [list(chunk.offsets), list(chunk.sizes)]
                parts.append([*box, place.relative_path, place.offset, place.length])
            dtype = dtype_name(tensor.properties.dtype)
            listed[name] = {"dtype": dtype, "shape": list(tensor.size), "parts": parts}
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
    weights: Mapping[str, Value],
    states: Mapping[str, Value],
    training: dict[str, Any],
    *,
    beside: bool,
) -> Saving | None:
    """Write what the ranks have; all of them call. `beside`: copy it first, and write meanwhile."""
    if "optimizer" in training:
        known: dict[str, Any] = {}
        for others in ranks.all_objects(training["optimizer"]["states"]):
            known |= others  # a rank knows of what it has
        training["optimizer"]["states"] = known
    own_random = io.BytesIO()
    torch.save(training["random"], own_random)
    packed = {"training": pack(training), f"random.{ranks.rank}": own_random.getvalue()}
    before = _beside.pop(ranks, None)
    if before is not None and not before.told:
        before.wait()
    values = {f"model.{name}": value for name, value in weights.items()}
    values |= {f"optimizer.state.{name}": value for name, value in states.items()}
    writes = ranks.rank < ranks.num_shards
    state: dict[str, Any] = {
        name: _writable(value, writes=writes, copied=beside) for name, value in values.items()
    }
    for name, content in packed.items():
        state[name] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    folder = _next_folder(directory, ranks)
    ranks.checkpoint_group()  # made here, where all ranks are
    if not beside:
        _write(state, folder, ranks)
        return None
    _beside[ranks] = Saving(lambda: _write(state, folder, ranks))
    return _beside[ranks]


def _writable(value: Value, *, writes: bool, copied: bool) -> Any:
    match value:
        case Held(tensor=tensor):
            plain = tensor.detach().resolve_conj().resolve_neg()  # what an archive can say
            return plain.to("cpu", copy=True) if copied else plain
        case Shared():
            return _Part(value, writes=writes, copied=copied)
        case Stored() | PackedSettings() | RowFormat():
            pieces: list[torch.Tensor] = []
            value.copy_to(lambda piece: pieces.append(piece.clone()))
            return torch.cat(pieces).view(value.dtype).view(value.shape)
        case _:
            raise AssertionError(value)


def _next_folder(directory: Path, ranks: Ranks) -> Path:
    """A new folder, made by rank 0; ProtrainError on every rank where it cannot be."""
    problem, name = "", ""
    if ranks.rank == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if is_of_one_device(directory):
                problem = "the directory holds a checkpoint of one device"
            current = read_pointer(directory)[0] if is_distributed(directory) else None
            name = new_folder(directory, RANKS_FOLDER, current).name
        except ProtrainError as error:
            problem = error.message
        except OSError as error:
            problem = f"the checkpoint cannot be written: {error.strerror or error}"
    told: tuple[str, str] = ranks.all_objects((problem, name))[0]
    problem, name = told
    if problem:
        raise ProtrainError(problem, source=str(directory), fix="save to another directory")
    return directory / name


def _write(state: Mapping[str, Any], folder: Path, ranks: Ranks) -> None:
    """Write the folder together, and let rank 0 make it the checkpoint."""

    def not_written(why: str) -> ProtrainError:
        return ProtrainError(
            f"the checkpoint cannot be written: {why}",
            source=str(folder.parent),
            fix="make room there, or save to another directory; the last checkpoint stands",
        )

    writer, group = _Writer(folder), ranks.checkpoint_group()
    with ranks.writing():
        try:
            save_planned(
                dict(state),
                storage_writer=writer,
                planner=_Saves(writer.files),
                process_group=group,
            )
        except CheckpointException as error:  # on every rank, with those that failed
            rank, (why, _) = next(iter(error.failures.items()))
            raise not_written(f"rank {rank}: {why}") from error
        problem = ""
        if ranks.rank == 0:
            pointer = {"protrain_save": folder.name, "num_ranks": ranks.count}
            sealed = {**pointer, "checksums": writer.checksum, "protrain_checksum": ""}
            try:
                put_index(folder, RANKS_FOLDER, POINTER, sealed)
            except (RecordError, OSError) as error:
                reason = error.message if isinstance(error, RecordError) else error.strerror
                problem = f"rank 0: {reason}"
        problems: list[str] = [""] * ranks.count
        all_gather_object(problems, problem, group=group)  # who returns may load it
        if problems[0]:
            raise not_written(problems[0])
