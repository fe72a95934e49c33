"""Checkpoints of several ranks, through `torch.distributed.checkpoint`: each writes what it has.

    DIR/protrain-distributed.json        which folder is the checkpoint
    DIR/protrain-ranks-3/.metadata ...   what torch.distributed.checkpoint writes

The names are `model.NAME` of parameters and buffers, `optimizer.state.NAME.KEY` of the optimizer's
states, `training` and `random.RANK`. Tensors are whole ones to whoever reads them: other numbers of
ranks, one device, or plain PyTorch with `torch.distributed.checkpoint.load`. A rank's part of a
parameter is a range of its elements in row-major order: a few boxes of it. As in `checkpoints`, a
save has a folder of its own, and the index is replaced when all of it is there.
"""

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed import all_gather_object
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_planned
from torch.distributed.checkpoint.state_dict_saver import save as save_planned

from protrain_plan.errors import ProtrainError, RecordError
from protrain_plan.records.files import replace_text
from protrain_runtime.checkpoints import INDEX, POINTER, is_distributed
from protrain_runtime.ranks import CHECKPOINT_LIMIT_S, Ranks
from protrain_runtime.tensor_files import Entry
from protrain_runtime.values import Held, Local, Shared, Stored, Value, num_bytes

TRAINING = "training"
_FOLDER = re.compile(r"protrain-ranks-([0-9]{1,9})")

LOADED_BYTES = 2**28
"""What is read at once, before it goes to where it belongs; a larger tensor goes by itself."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor along its dimensions; its elements are consecutive from `first` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


def boxes(shape: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """The boxes of elements first:stop in row-major order."""
    inner = torch.Size(shape[1:]).numel()
    if first >= stop:
        return
    if not shape:
        yield Box((), (), 0)
        return
    row, last = first // inner, (stop - 1) // inner
    if row == last and (first % inner or stop % inner):
        for box in boxes(shape[1:], first - row * inner, stop - row * inner):
            yield Box((row, *box.offsets), (1, *box.sizes), row * inner + box.first)
        return
    whole = -(-first // inner), stop // inner
    yield from boxes(shape, first, min(whole[0] * inner, stop)) if first % inner else ()
    if whole[0] < whole[1]:
        offsets = (whole[0], *(0 for _ in shape[1:]))
        yield Box(offsets, (whole[1] - whole[0], *shape[1:]), whole[0] * inner)
    yield from boxes(shape, whole[1] * inner, stop) if stop % inner else ()


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
                    chunk=box.chunk, properties=properties, size=self.shape
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

    def room(self, offsets: Sequence[int]) -> torch.Tensor:
        """Where a box's new elements go, on the host."""
        known = self.held.get(tuple(offsets))
        if known is None:
            box = next(box for box in self.boxes() if box.offsets == tuple(offsets))
            known = self.held[box.offsets] = torch.empty(box.sizes, dtype=self.dtype)
        return known

    def keep(self) -> None:
        """Write the new elements to the store."""
        assert self.local is not None or not self.held
        for box in self.boxes():
            assert self.local is not None
            before = (box.first - self.local.first) * self.dtype.itemsize
            values = self.held[box.offsets].contiguous().view(-1).view(torch.uint8)
            self.local.store.write(self.local.offset + before, values)
        self.held.clear()


class _Saves(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        if isinstance(found, _Part):
            assert index.offset is not None
            return found.read(index.offset)
        return super().lookup_object(index)


class _Loads(DefaultLoadPlanner):
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # The default one looks into dataclasses for tensors, and puts what it found in their place.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        # The default looks for tensors and refuses what else has parts.
        assert self.metadata is not None
        whole = {n: v for n, v in self.state_dict.items() if not isinstance(v, _Part)}
        items = list(create_default_local_load_plan(whole, self.metadata).items)
        for name, part in self.state_dict.items():
            if isinstance(part, _Part):
                chunks = [box.chunk for box in part.boxes()]
                saved = self.metadata.state_dict_metadata[name]
                assert isinstance(saved, TensorStorageMetadata)
                items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = self.state_dict[index.fqn]
        if isinstance(found, _Part):
            assert index.offset is not None
            return found.room(index.offset)
        tensor: torch.Tensor = super().lookup_tensor(index)
        return tensor


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
        try:
            save_planned(
                state,
                # It copies ahead in a stream of the device that is current, here another one.
                storage_writer=FileSystemWriter(folder, per_thread_copy_ahead=0),
                planner=_Saves(flatten_state_dict=False),
                process_group=group,
            )
        except CheckpointException as error:  # on every rank, with those that failed
            rank, (why, _) = next(iter(error.failures.items()))
            raise _not_written(directory, f"rank {rank}: {why}") from error
        problems: list[str] = [""] * ranks.count
        problem = _commit(folder, ranks.count) if ranks.rank == 0 else ""
        all_gather_object(problems, problem, group=group)  # who returns may load it
        if problems[0]:
            raise _not_written(directory, problems[0])

    def write_together() -> None:
        with ranks.meeting(CHECKPOINT_LIMIT_S):
            write()

    if beside:
        _beside[ranks] = Saving(write_together)
        return _beside[ranks]
    write_together()
    return None


def _commit(folder: Path, num_ranks: int) -> str:
    """Make a whole folder the checkpoint, and remove the one before; what went wrong, or ""."""
    directory = folder.parent
    try:
        text = json.dumps({"protrain_save": folder.name, "num_ranks": num_ranks})
        replace_text(directory / POINTER, text + "\n")
    except RecordError as error:
        return f"rank 0: {error.message}"
    for old in _folders(directory):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    return ""


def _not_written(directory: Path, why: str) -> ProtrainError:
    return ProtrainError(
        f"the checkpoint cannot be written: {why}",
        source=str(directory),
        fix="make room there, or save to another directory; the last checkpoint stands",
    )


def _writable(value: Value, *, writes: bool, copied: bool) -> Any:
    match value:
        case Held(tensor=tensor):
            return tensor.detach().to("cpu", copy=True) if copied else tensor.detach()
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
            if (directory / INDEX).exists():
                problem = ("the directory holds a checkpoint of one device", "another directory")
            current = _pointer(directory)["protrain_save"] if is_distributed(directory) else ""
            for folder in _folders(directory):
                if folder.name != current:
                    shutil.rmtree(folder)
            match = _FOLDER.fullmatch(current)
            name = f"protrain-ranks-{int(match[1]) + 1 if match else 1}"
            (directory / name).mkdir()
        except OSError as error:
            problem = (f"the checkpoint cannot be written: {error.strerror}", "another directory")
    told: tuple[tuple[str, str] | None, str] = ranks.all_objects((problem, name))[0]
    problem, name = told
    if problem is not None:
        raise ProtrainError(problem[0], source=str(directory), fix=f"save to {problem[1]}")
    return directory / name


def _folders(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if _FOLDER.fullmatch(path.name)]


def _pointer(directory: Path) -> dict[str, Any]:
    path = directory / POINTER
    try:
        read: dict[str, Any] = json.loads(path.read_bytes())
        if isinstance(read["protrain_save"], str):
            return read
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ProtrainError("this is no index of a checkpoint", source=str(path))


class Saved:
    """A checkpoint that several ranks saved, to be read by any number of them."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / _pointer(directory)["protrain_save"]
        try:
            found = FileSystemReader(self._folder).read_metadata().state_dict_metadata
        except Exception as error:
            raise ProtrainError(
                f"the checkpoint cannot be read: {str(error).splitlines()[0]}",
                source=str(self._folder),
                fix="load another checkpoint",
            ) from error
        self._entries = {
            name: Entry(
                path=self._folder, dtype=item.properties.dtype, shape=item.size, start=0, key=name
            )
            for name, item in found.items()
            if isinstance(item, TensorStorageMetadata)
        }

    def entries(self, prefix: str) -> dict[str, Entry]:
        """The tensors whose names begin so, by what follows."""
        return {
            name.removeprefix(prefix): entry
            for name, entry in self._entries.items()
            if name.startswith(prefix)
        }

    def packed(self, name: str) -> io.BytesIO | None:
        """What was saved as bytes; None where it was not."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        read = torch.empty(entry.shape, dtype=torch.uint8)
        load_planned(
            {name: read},
            storage_reader=FileSystemReader(self._folder),
            planner=_Loads(flatten_state_dict=False),
            no_dist=True,
        )
        return io.BytesIO(read.numpy().tobytes())

    def fill(self, targets: Sequence[tuple[Entry, Value]]) -> None:
        """Read each entry into its value, some at a time. Ranks need not meet for it."""
        left = iter(targets)
        while batch := list(_batch(left)):
            state: dict[str, Any] = {}
            for entry, value in batch:
                match value:
                    case Held(tensor=tensor):
                        state[entry.key] = tensor.detach()
                    case Shared():
                        state[entry.key] = _Part(value.dtype, value.shape, value.local)
                    case _:
                        state[entry.key] = torch.empty(value.shape, dtype=value.dtype)
            load_planned(
                state,
                storage_reader=FileSystemReader(self._folder),
                planner=_Loads(flatten_state_dict=False),
                no_dist=True,
            )
            for entry, value in batch:
                read = state[entry.key]
                if isinstance(read, _Part):
                    read.keep()
                elif not isinstance(value, Held):
                    value.copy_from(_from(read))


def _batch(targets: Iterator[tuple[Entry, Value]]) -> Iterator[tuple[Entry, Value]]:
    room = LOADED_BYTES
    for entry, value in islice(targets, 64):
        yield entry, value
        room -= num_bytes(value)
        if room <= 0:
            return


def _from(whole: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Fills one buffer after the other with a tensor's bytes."""
    flat, done = whole.contiguous().view(-1).view(torch.uint8), 0

    def fill(target: torch.Tensor) -> None:
        nonlocal done
        target.copy_(flat[done : done + target.numel()])
        done += target.numel()

    return fill
