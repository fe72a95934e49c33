"""`save`: a model and its optimizer, by their own names and shapes, under any plan.

The result does not depend on the plan: two plans and plain PyTorch save the same bytes. Several
ranks write together, each its part, and rank 0 the index that makes it a checkpoint.
"""

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import nn
from torch.distributed import all_gather_object

from protrain_runtime.checkpoint.entries import FileRow, PartRow
from protrain_runtime.checkpoint.files import header_of, write_values
from protrain_runtime.checkpoint.folders import ROOM, commit, next_save
from protrain_runtime.checkpoint.index import FORMAT
from protrain_runtime.checkpoint.training import encoded
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.thread_guard import guarded
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.model.prepared import (
    Prepared,
    offloaded_parameters,
    prepared_of,
    thread_guard_of,
    together,
)
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.compositions import Composition, taken_apart
from protrain_runtime.states.quantized import packed_layers
from protrain_runtime.states.values import (
    Copied,
    Held,
    Source,
    Stored,
    Value,
    num_bytes,
    order_of,
    part_bytes,
    part_of,
    scales_beside,
    stored_states,
    stored_value,
)

SHARD_BYTES = 4 * 2**30
"""Most bytes of a file of tensors, except for a single larger tensor."""

Values = dict[str, dict[str, Source]]
"""The tensors of a checkpoint, by kind and name."""

T = TypeVar("T")


@guarded("save()", thread_guard_of)
def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    directory: Path | str,
    *,
    extra: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    beside: bool = False,
) -> "Saving | None":
    """Write a checkpoint for `load`, under any plan or none, bit for bit.

    Saved are parameters, persistent buffers, the optimizer's states and groups, the random states
    of PyTorch and of Python's `random`, and `extra`: the loop's other state, such as `{"step":
    step, "scheduler": scheduler.state_dict()}`, of numbers, texts, tensors, lists, tuples and
    dicts. Call it between a step and the next forward.

    Parameters are safetensors files of at most `shard_bytes`, with Hugging Face's index; tied ones
    are saved once, by their first name. The index has every file's checksum. A checkpoint in
    `directory` is replaced atomically: the old one stays until the new one is complete on disk,
    however the process ends. Bytes are written from their tiers with SAVING_BYTES of extra memory
    (a tensor's, if not row-major).

    Under a plan for several devices all ranks call it, and each writes its own files in a shared
    directory. With `beside` the data are copied to host memory and written while training
    continues: `wait()` for the result before loading; the next save does.

    ProtrainError if the directory is not writable, or the optimizer is not the model's;
    RuntimeError between backward and step under plans that update in backward.
    """
    with together(model, "save()"):
        directory = Path(directory)
        prepared = settled(model, optimizer, "save() was called")
        ranks = prepared.ranks if prepared else None
        if beside and ranks is None:
            raise ProtrainError(
                "one device saves before it trains on", fix="leave beside= out, or plan for several"
            )
        values: Values = {"model": dict(model_values(model, prepared)), "optimizer": {}}
        kind, own = devices.all_random_states()
        generators = {"torch": torch.get_rng_state(), "python": random.getstate()}
        training: dict[str, Any] = {
            "extra": dict(extra or {}),
            "modules": {name: module.get_extra_state() for name, module in with_extra_state(model)},
            "random": [generators | ({kind: own} if kind else {})],
        }
        if optimizer is not None:
            states, training["optimizer"] = optimizer_values(model, optimizer, prepared)
            values["optimizer"] = dict(states)
        if ranks is not None:
            before = _beside.pop(ranks, None)
            if before is not None and not before.reported:
                before.wait()
            if ranks.rank > 0:  # buffers are rank 0's, as in the next forward
                parameters = dict(model.named_parameters())
                values["model"] = {n: v for n, v in values["model"].items() if n in parameters}
            # All ranks' random states, and states of parameters, in one.
            others = training.get("optimizer", {}).get("states", {})
            for states_of_rank, known in ranks.all_objects((training.pop("random"), others)):
                training.setdefault("random", []).extend(states_of_rank)
                others |= known
        tensors: dict[str, Source] = {}
        content = {key: encoded(value, key, tensors) for key, value in training.items()}
        if ranks is not None:
            values = {kind: shared_out(ranks, of_kind) for kind, of_kind in values.items()}
        if ranks is None or ranks.rank == 0:
            values["training"] = tensors
        if beside:
            values = {
                kind: {name: Copied.of(value) for name, value in of_kind.items()}
                for kind, of_kind in values.items()
            }
        write = partial(_write, directory, ranks, values, content, shard_bytes)
        if not beside:
            write()
            return None
        assert ranks is not None
        ranks.checkpoint_group()  # made here, where all ranks are
        _beside[ranks] = Saving(ThreadPoolExecutor(1, "protrain saves").submit(write))
        return _beside[ranks]


def settled(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, what: str
) -> Prepared | None:
    """The model's `Prepared`; raises, with `what`, in the middle of an update."""
    prepared = prepared_of(model)
    if prepared is None:
        return None
    if optimizer is not None and optimizer is not prepared.optimizer:
        raise ProtrainError(
            "the optimizer is not the one that prepare() returned with this model",
            fix="pass that one; the states of offloaded parameters are with it",
        )
    if prepared.engine is not None:
        prepared.engine.settle(what)
    return prepared


def model_values(model: nn.Module, prepared: Prepared | None) -> Iterator[tuple[str, Value]]:
    """Parameters by first name, persistent buffers, and scales of packed weights."""
    offloaded = offloaded_parameters(prepared)
    for name, parameter in model.named_parameters():
        if name in offloaded:
            yield name, stored_value(*offloaded[name])
        else:
            yield name, Held(parameter.detach())
    for prefix, module in model.named_modules():
        passing = module._non_persistent_buffers_set
        for key, buffer in module.named_buffers(recurse=False):
            if key not in passing:
                yield f"{prefix}.{key}" if prefix else key, Held(buffer)
    for name, layer in packed_layers(model):
        yield from scales_beside(name, layer)


def with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with extra state besides tensors, by name."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def optimizer_class(optimizer: torch.optim.Optimizer) -> str:
    """The name of the user's class."""
    return (optimizer.kind if isinstance(optimizer, PlannedOptimizer) else type(optimizer)).__name__


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Each group's parameter names. ProtrainError for a foreign parameter."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names.get(p) for p in group["params"]] for group in optimizer.param_groups]
    known = [[name for name in group if name is not None] for group in groups]
    if known != groups:
        raise ProtrainError(
            "the optimizer has parameters that are not the model's",
            fix="pass the model whose parameters the optimizer was made from",
        )
    return known


def optimizer_values(
    model: nn.Module, optimizer: torch.optim.Optimizer, prepared: Prepared | None
) -> tuple[dict[str, Value], dict[str, Any]]:
    """Tensor states as NAME.KEY, and the rest of the optimizer's state."""
    names = parameter_names(model, optimizer)
    offloaded = offloaded_parameters(prepared)
    tensors: dict[str, Value] = {}
    others: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        state: Mapping[str, Any]
        if name in offloaded:
            chunk, part = offloaded[name]
            updated = chunk.has_states(name)
            stored = stored_states(chunk, part)
            state = {**chunk.current.scalars[name], **stored} if updated else {}
        else:
            state = taken_apart(optimizer.state.get(parameter, {}))
        for key in sorted(state):
            value = state[key]
            if isinstance(value, torch.Tensor):
                tensors[f"{name}.{key}"] = Held(value)
            elif isinstance(value, Stored):
                tensors[f"{name}.{key}"] = value
            elif isinstance(value, Composition):
                # Stores keep a range's rule, checkpoints the whole parameter's.
                others.setdefault(name, {})[key] = value.reshaped(parameter.shape).described()
            else:
                others.setdefault(name, {})[key] = value
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": members}
        for group, members in zip(optimizer.param_groups, names, strict=True)
    ]
    described = {
        "class": optimizer_class(optimizer),
        "options": sorted(optimizer.defaults),
        "groups": groups,
        "states": others,
    }
    return tensors, described


class _Written(NamedTuple):
    """A rank's written files, and each weight's first file and whole bytes."""

    rows: dict[str, FileRow]
    weights: dict[str, tuple[str, int]]


def _write(
    directory: Path,
    ranks: Ranks | None,
    values: Values,
    training: Mapping[str, Any],
    shard_bytes: int,
) -> None:
    """Write a checkpoint's files, and its index when all are complete."""
    first = ranks is None or ranks.rank == 0
    prefix = f"rank-{ranks.rank}-" if ranks else ""
    with ranks.writing() if ranks else nullcontext(), ExitStack() as stack:
        names = on_each(
            ranks,
            lambda: stack.enter_context(next_save(directory)).name if first else "",
            directory,
        )
        folder = directory / names[0]
        written = on_each(ranks, lambda: _files(folder, prefix, values, shard_bytes), directory)
        on_each(
            ranks,
            lambda: commit(folder, _content(folder.name, written, training)) if first else None,
            directory,
        )


def _files(folder: Path, prefix: str, values: Values, shard_bytes: int) -> _Written:
    """Write the values to files of `shard_bytes`."""
    written = _Written({}, {})
    for kind, of_kind in values.items():
        shards = in_shards(of_kind, part_bytes, shard_bytes)
        for number, shard in enumerate(shards, start=1):
            file = f"{prefix}{kind}-{number:05d}-of-{len(shards):05d}.safetensors"
            written.rows[file] = write_file(folder / file, shard)
            if kind == "model":
                written.weights.update({n: (file, num_bytes(v)) for n, v in shard.items()})
    return written


def in_shards(
    values: Mapping[str, Source], size: Callable[[Source], int], shard_bytes: int
) -> list[dict[str, Source]]:
    """The values in files of at most `shard_bytes`, except for a single larger value."""
    shards: list[dict[str, Source]] = []
    room = 0
    for name, value in values.items():
        if not shards or size(value) > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = value
        room -= size(value)
    return shards


def write_file(path: Path, values: Mapping[str, Source]) -> FileRow:
    """Write a file to disk. A part of a tensor is a flat range of elements."""
    parts: dict[str, PartRow] = {}
    tensors: dict[str, tuple[torch.dtype, Sequence[int]]] = {}
    for name, value in values.items():
        (first, count), order = part_of(value), [*order_of(value)]
        tensors[name] = value.dtype, value.shape
        if count != value.shape.numel() or order != sorted(order):
            parts[name] = PartRow(first, [*value.shape], order)
            tensors[name] = value.dtype, [count]
    header, starts = header_of(tensors)
    with path.open("xb") as file:
        file.write(header)
    header_sum = zlib.crc32(header)
    placed = ((start, values[name]) for name, start in starts.items())
    checksum = write_values(path, placed, header_sum)
    return FileRow(path.stat().st_size, header_sum, checksum, parts)


def _content(
    folder: str, written: Sequence[_Written], training: Mapping[str, Any]
) -> dict[str, Any]:
    """An index of the ranks' files."""
    rows: dict[str, FileRow] = {}
    weights: dict[str, tuple[str, int]] = {}
    for of_rank in written:
        rows |= of_rank.rows
        weights = of_rank.weights | weights
    return {
        "metadata": {
            "total_size": sum(size for _, size in weights.values()),
            "protrain_format": FORMAT,
        },
        "weight_map": {name: f"{folder}/{file}" for name, (file, _) in weights.items()},
        "protrain": {
            "folder": folder,
            "files": msgspec.to_builtins(rows),
            "training": dict(training),
        },
    }


def shared_out(ranks: Ranks | None, values: Mapping[str, Source]) -> dict[str, Source]:
    """This rank's parts, and its share, by bytes, of replicated tensors."""
    if ranks is None:
        return dict(values)
    parts = {n for n, v in values.items() if isinstance(v, Stored) and v.part is not None}
    sizes = {name: num_bytes(value) for name, value in values.items() if name not in parts}
    having = ranks.all_objects(sizes)
    loads = [0] * ranks.count
    own: set[str] = set()
    if ranks.rank < ranks.num_shards:  # the others have the same parts
        own |= {name for name in parts if part_bytes(values[name])}
    for name in dict.fromkeys(itertools.chain.from_iterable(having)):
        have = (rank for rank, theirs in enumerate(having) if name in theirs)
        writer = min(have, key=loads.__getitem__)
        loads[writer] += having[writer][name]
        if writer == ranks.rank:
            own.add(name)
    return {name: value for name, value in values.items() if name in own}


def on_each(ranks: Ranks | None, act: Callable[[], T], directory: Path) -> list[T]:
    """Run `act` on every rank; ProtrainError on all if one of them cannot write."""
    if ranks is None:
        return [act()]
    result, problem = None, None
    try:
        result = act()
    except ProtrainError as error:
        problem = error.message, error.source, error.fix
    except OSError as error:
        why = f"rank {ranks.rank}: {error.strerror}"
        problem = f"the checkpoint cannot be written: {why}", str(directory), ROOM
    found: list[Any] = [None] * ranks.count
    all_gather_object(found, (result, problem), group=ranks.checkpoint_group())
    for _, failure in found:
        if failure is not None:
            message, source, fix = failure
            raise ProtrainError(message, source=source, fix=fix)
    return [result for result, _ in found]


@dataclass(eq=False)
class Saving:
    """A save that runs beside training. `wait` raises its error."""

    work: Future[None]
    reported: bool = False  # `wait` raised its error

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self.work.done()

    def wait(self) -> None:
        """Wait until the checkpoint is complete; raises if it failed."""
        self.reported = self.work.exception() is not None
        self.work.result()


_beside: WeakKeyDictionary[Ranks, Saving] = WeakKeyDictionary()
"""The last save beside training: the next one waits for it."""
