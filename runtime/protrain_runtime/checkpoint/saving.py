"""`save`: a model and its optimizer, in their own names and shapes, whatever plan they follow.

What is written does not depend on the plan: two plans and plain PyTorch save the same bytes.
`load` continues from them, plainly or under any plan.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from protrain_runtime.checkpoint.files import (
    SUMS,
    Entry,
    Range,
    Sums,
    check_sum,
    damaged,
    dtype_name,
    fill_values,
    new_file,
    read_entries,
    read_regular,
    read_sums,
    shown,
    verify,
    write_sums,
    write_tensors,
)
from protrain_runtime.checkpoint.folders import (
    TRAINING,
    Index,
    commit,
    file_in,
    is_distributed,
    next_save,
    read_index,
)
from protrain_runtime.checkpoint.part_files import Saved
from protrain_runtime.checkpoint.pickled import VERSION, pack, unpack
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.turns import in_turn
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.model.prepared import (
    Prepared,
    meet,
    offloaded_parameters,
    prepared_of,
    together,
    turns_of,
)
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.compositions import (
    Composition,
    is_composition,
    put_together,
    taken_apart,
)
from protrain_runtime.states.values import (
    Held,
    Shared,
    Stored,
    Value,
    num_bytes,
    scale_values,
    stored_states,
    stored_value,
)

if TYPE_CHECKING:
    from protrain_runtime.checkpoint.distributed_checkpoints import Saving

SHARD_BYTES = 4 * 2**30
"""What a file of tensors holds at most, unless one tensor alone is more."""


@in_turn("save()", turns_of)
def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    directory: Path | str,
    *,
    extra: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    beside: bool = False,
) -> "Saving | None":
    """Write what `load` continues from, under any plan or plainly, bit for bit.

    Saved are parameters, persistent buffers, the optimizer's states and groups, the random states
    of PyTorch and of Python's `random`, and `extra`: whatever else a loop needs, such as
    `{"step": step, "scheduler": scheduler.state_dict()}`, made of numbers, texts, tensors, lists,
    tuples and dicts. Call it between a step and the next forward.

    Parameters are safetensors files of `shard_bytes` at most, with Hugging Face's index; tied ones
    are there once, by their first name. Every tensor's checksum is written with it. A checkpoint in
    `directory` is replaced at once: until the new one is whole and on the disk, the old one stands,
    however the process ends. Bytes go from where they lie to the files, so that this takes
    SAVING_BYTES of memory besides (a tensor's, for one that is not row-major).

    Under a plan for several devices all ranks call it, and each writes what it has, through
    `torch.distributed.checkpoint` (see `distributed_checkpoints`). With `beside` the states are
    copied to host memory, and written while training goes on: `wait()` for what is returned before
    it is loaded; the next save does. It takes host memory for a rank's part of them.

    ProtrainError where the directory cannot be written, or the optimizer is not the model's;
    RuntimeError between backward and step under plans that update in backward.
    """
    with together(model, "save()"):
        directory = Path(directory)
        prepared = _settled(model, optimizer, "save() was called")
        weights = dict(model_values(model, prepared))
        states: dict[str, Value] = {}
        kind, own = devices.all_random_states()
        of_devices = {"cuda": [], kind: own} if kind else {"cuda": []}
        training: dict[str, Any] = {
            "version": VERSION,
            "extra": dict(extra or {}),
            "random": {"torch": torch.get_rng_state(), **of_devices, "python": random.getstate()},
            "modules": {
                name: module.get_extra_state() for name, module in _with_extra_state(model)
            },
        }
        if optimizer is not None:
            states, training["optimizer"] = _optimizer_values(model, optimizer, prepared)
        if prepared is not None and prepared.ranks is not None:
            if prepared.ranks.rank > 0:  # buffers are rank 0's, as they are in the next forward
                parameters = dict(model.named_parameters())
                weights = {name: weights[name] for name in weights if name in parameters}
            # Takes a second to import, and memory that one device does without.
            from protrain_runtime.checkpoint.distributed_checkpoints import save_parts

            return save_parts(directory, prepared.ranks, weights, states, training, beside=beside)
        if beside:
            raise ProtrainError(
                "one device saves before it trains on", fix="leave beside= out, or plan for several"
            )
        if is_distributed(directory):
            raise ProtrainError(
                "the directory holds a checkpoint of several devices",
                source=str(directory),
                fix="save to another directory",
            )
        with next_save(directory) as folder:
            sums: dict[str, Sequence[Range]] = {}
            model_files = _write(folder, "model", weights, shard_bytes, sums)
            state_files = _write(folder, "optimizer", states, shard_bytes, sums)
            training["files"] = sorted(set(state_files.values()))
            with new_file(folder / TRAINING, "the file") as file:
                file.write(pack(training))
            sums[TRAINING] = file.ranges
            total = sum(num_bytes(value) for value in weights.values())
            commit(folder, model_files, total_bytes=total, sums=write_sums(folder, sums))
        return None


def _settled(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, what: str
) -> Prepared | None:
    """What `prepare` attached; it raises, saying `what`, in the middle of an update."""
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
    """The parameters, each by its first name, and the buffers that belong to the state dict.

    Of packed weights also their scales.
    """
    offloaded = offloaded_parameters(prepared.chunks if prepared else ())
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
    yield from scale_values(model)


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have a state of their own besides tensors, by name."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def _optimizer_class(optimizer: torch.optim.Optimizer) -> str:
    """The name of the user's class."""
    return (optimizer.kind if isinstance(optimizer, PlannedOptimizer) else type(optimizer)).__name__


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The parameters of each group by name. ProtrainError for one that the model does not have."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names.get(p) for p in group["params"]] for group in optimizer.param_groups]
    known = [[name for name in group if name is not None] for group in groups]
    if known != groups:
        raise ProtrainError(
            "the optimizer has parameters that are not the model's",
            fix="pass the model whose parameters the optimizer was made from",
        )
    return known


def _optimizer_values(
    model: nn.Module, optimizer: torch.optim.Optimizer, prepared: Prepared | None
) -> tuple[dict[str, Value], dict[str, Any]]:
    """The states that are tensors, as NAME.KEY, and everything else about the optimizer."""
    names = _parameter_names(model, optimizer)
    offloaded = offloaded_parameters(prepared.chunks if prepared else ())
    tensors: dict[str, Value] = {}
    others: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        state: Mapping[str, Any] = taken_apart(optimizer.state.get(parameter, {}))
        if name in offloaded:
            chunk, part = offloaded[name]
            updated = chunk.has_states(name)
            stored = stored_states(chunk, part)
            state = {**chunk.scalars[name], **stored} if updated else {}
        for key in sorted(state):
            value = state[key]
            if isinstance(value, torch.Tensor):
                tensors[f"{name}.{key}"] = Held(value)
            elif isinstance(value, Stored | Shared):
                tensors[f"{name}.{key}"] = value
            elif isinstance(value, Composition):
                # Of a range it is kept below the device, of the whole it is saved.
                others.setdefault(name, {})[key] = value.reshaped(parameter.shape).described()
            else:
                others.setdefault(name, {})[key] = value
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": members}
        for group, members in zip(optimizer.param_groups, names, strict=True)
    ]
    described = {
        "class": _optimizer_class(optimizer),
        "options": sorted(optimizer.defaults),
        "groups": groups,
        "states": others,
    }
    return tensors, described


def _write(
    folder: Path,
    kind: str,
    values: Mapping[str, Value],
    shard_bytes: int,
    sums: dict[str, Sequence[Range]],
) -> dict[str, str]:
    """Write the values to files of `shard_bytes`; returns each one's file, and adds to `sums`."""
    shards: list[dict[str, Value]] = []
    room = 0
    for name, value in values.items():
        if not shards or num_bytes(value) > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = value
        room -= num_bytes(value)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"{kind}-{number:05d}-of-{len(shards):05d}.safetensors"
        sums[file] = write_tensors(folder / file, shard)
        files |= dict.fromkeys(shard, file)
    return files


_NUM_NAMED = 3  # parameters that an error names


@in_turn("load()", turns_of)
def load(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, directory: Path | str
) -> dict[str, Any]:
    """Take over a checkpoint, in place; returns the `extra` that it was saved with.

    The model and its optimizer may follow the plan of the checkpoint, another one or none. With an
    optimizer, training goes on where it was: states, groups' options and random states are those
    of the checkpoint. A scheduler made before this takes its state from `extra`. Without an
    optimizer only parameters and buffers are read, also those of other safetensors checkpoints in
    Hugging Face's layout.

    Bytes go from the files to where they belong: SAVING_BYTES of memory besides. All that can be
    checked is checked before anything changes: all files are read and compared with their
    checksums, and compared again while they are loaded. No code of a checkpoint is run.

    ProtrainError where there is no checkpoint, where it is damaged, or of another model or
    optimizer; RuntimeError between backward and step under plans that update in backward.
    """
    with together(model, "load()"):
        directory = Path(directory)
        prepared = _settled(model, optimizer, "load() was called")
        ranks = prepared.ranks if prepared else None
        saved = _opened(directory)
        targets = _matched(model, saved.weights(), prepared, directory)
        training = saved.training()
        resumed, random_states = None, None
        if optimizer is not None:
            states = saved.states() if "optimizer" in training else None
            resumed = _Resumed(model, optimizer, prepared, directory, states, training)
            targets += resumed.targets
            random_states = saved.random_states(ranks.rank if ranks else 0)
            _try_random(random_states or {}, directory)
        saved.verify(ranks, lambda name: _unit_of(name, prepared))
        meet(model, "load()")  # each rank has compared some of the files, for all
        saved.prepare(targets)
        meet(model, "load()")  # what is wrong on any rank was told: nothing has changed yet
        saved.fill(targets)
        for name, module in _with_extra_state(model):
            if name in training.get("modules", {}):
                module.set_extra_state(training["modules"][name])
        if resumed is not None:
            resumed.finish()
            if random_states is not None:  # a rank that was not there goes on with its own
                torch.set_rng_state(random_states["torch"])
                random.setstate(random_states["python"])
                for kind in random_states.keys() - {"torch", "python"}:
                    devices.set_all_random_states(kind, random_states[kind])
        extra: dict[str, Any] = training.get("extra", {})
        return extra


def read_extra(directory: Path | str) -> dict[str, Any]:
    """The `extra` of a checkpoint, without loading anything. ProtrainError as `load`."""
    return dict(_opened(Path(directory)).training().get("extra", {}))


def _opened(directory: Path) -> "Saved | _Saved":
    return Saved(directory) if is_distributed(directory) else _Saved(directory)


class _Saved:
    """A checkpoint of one device, or of others, in safetensors files; asked as `Saved` is."""

    def __init__(self, directory: Path) -> None:
        self.index: Index = read_index(directory)
        self._directory, self._read = directory, set[str]()
        self._sums: Sums | None = None
        self._training: dict[str, Any] = {}
        if self.index.folder is not None:
            self._file(TRAINING)
            if self.index.sums is not None:
                self._sums = read_sums(self._file(SUMS).parent, self.index.sums)

    def weights(self) -> dict[str, Entry | None]:
        """The parameters and buffers; None for one that the index names and no file has."""
        named = self.index.weight_map
        files: dict[str, dict[str, Entry]] = {}
        for file in sorted(set(named.values())):
            if self.index.folder is None:
                files[file] = read_entries(file_in(self._directory, file, linked=True))
            else:
                files[file] = self._entries(file)
        return {name: files[file].get(name) for name, file in named.items()}

    def training(self) -> dict[str, Any]:
        """What is no tensor; nothing of a checkpoint of others."""
        if self.index.folder is None:
            return {}
        path = self._file(TRAINING)
        packed = read_regular(path)
        if self._sums is not None:
            check_sum(path, packed, self._sums)
        self._training = unpack(packed, str(path))
        return self._training

    def states(self) -> dict[str, Entry]:
        """The optimizer's states that are tensors, of files that `training` names."""
        if "files" not in self._training:
            raise damaged(self._file(TRAINING), "it does not say which files have the states")
        found: dict[str, Entry] = {}
        for file in sorted(set(self._training["files"])):
            found |= self._entries(f"{self.index.folder}/{file}")
        return found

    def random_states(self, _: int) -> dict[str, Any] | None:
        """Those of the one device, which every rank may go on from."""
        return self._training.get("random")

    def verify(self, _: Ranks | None, unit_of: Callable[[str], str]) -> None:
        """Compare all files whose tensors were asked for with their checksums, on every rank."""
        if self._sums is not None:
            folder = self._file(SUMS).parent
            sums = {file: self._sums[file] for file in self._read}
            verify(folder, sums, where=lambda what: shown(what) + unit_of(what))

    def prepare(self, targets: Iterable[tuple[Entry, Value]]) -> None:
        """The headers were read: nothing is left to see."""

    def fill(self, targets: Sequence[tuple[Entry, Value]]) -> None:
        """Read each entry into its value."""
        fill_values(targets)

    def _entries(self, file: str) -> dict[str, Entry]:
        name = file.removeprefix(f"{self.index.folder}/")
        path = self._file(name)
        if self._sums is None:
            return read_entries(path)
        if name not in self._sums:
            raise damaged(path, f"{SUMS} does not have it")
        self._read.add(name)
        return read_entries(path, self._sums[name])

    def _file(self, name: str) -> Path:
        if "/" in name:
            raise damaged(self._directory, f"{shown(name)} is no file in {self.index.folder}")
        return file_in(self._directory, f"{self.index.folder}/{name}")


def _unit_of(name: str, prepared: Prepared | None) -> str:
    """What errors say of the unit of the plan that has a tensor; "" where that is none, or many."""
    while name and prepared is not None:
        units = {
            prepared.plan.units[chunk.unit].name
            for chunk in prepared.chunks
            for part in chunk.slices
            if f"{part.name}.".startswith(f"{name}.")
        }
        if units:
            return f" (unit {shown(*units)})" if len(units) == 1 else ""
        name = name.rpartition(".")[0]  # of a buffer, or a state: the parameters beside it
    return ""


def _matched(
    model: nn.Module,
    saved: Mapping[str, Entry | None],
    prepared: Prepared | None,
    directory: Path,
) -> list[tuple[Entry, Value]]:
    """Each saved tensor with its place in the model. ProtrainError where they do not fit."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    aliases = {name: first[parameter] for name, parameter in every}
    found = {aliases.get(name, name): entry for name, entry in saved.items() if entry is not None}
    own = dict(model_values(model, prepared))
    kinds = {n: (_described(found[n]), _described(own[n])) for n in own if n in found}
    others = [
        f"{name} ({theirs} in the checkpoint, {ours} in the model)"
        for name, (theirs, ours) in kinds.items()
        if theirs != ours
    ]
    problems = (
        ("lacking in the checkpoint", [name for name in own if name not in found]),
        ("lacking in the model", [name for name in found if name not in own]),
        ("of another shape or dtype", others),
        ("named by the index but in no file", [name for name in saved if saved[name] is None]),
    )
    if any(names for _, names in problems):
        raise ProtrainError(
            "the checkpoint is of another model: "
            + "; ".join(f"{what}: {_some(names)}" for what, names in problems if names),
            source=str(directory),
            fix="load it into the model that it was saved from",
        )
    return [(found[name], own[name]) for name in own]


def _described(tensor: Entry | Value) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _some(names: list[str]) -> str:
    first = ", ".join(shown(name) for name in names[:_NUM_NAMED])
    more = len(names) - _NUM_NAMED
    return first if more <= 0 else f"{first} and {more} more"


def _fits(saved: object, own: object) -> bool:
    """Whether an option of a group can be what it was saved as, by its type."""
    match own:
        case bool():
            return saved is None or isinstance(saved, bool)
        case int() | float() | torch.Tensor():
            number = isinstance(saved, int | float | torch.Tensor) and not isinstance(saved, bool)
            return saved is None or number
        case str():
            return saved is None or isinstance(saved, str)
        case tuple() | list():
            same = isinstance(saved, tuple | list) and len(saved) == len(own)
            return same and all(_fits(s, o) for s, o in zip(saved, own, strict=True))  # type: ignore[call-overload]
        case _:
            return True


class _Resumed:
    """An optimizer's states on their way from a checkpoint: places first, then the rest."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        prepared: Prepared | None,
        directory: Path,
        entries: Mapping[str, Entry] | None,
        training: Mapping[str, Any],
    ) -> None:
        self._parameters, self._optimizer = dict(model.named_parameters()), optimizer
        self._offloaded = offloaded_parameters(prepared.chunks if prepared else ())
        self._source = str(directory)
        self.targets: list[tuple[Entry, Value]] = []
        self._states: dict[str, dict[str, Any]] = {}  # by parameter: what memory is to hold
        if entries is None:
            raise self._other("it was saved without an optimizer")
        saved: dict[str, Any] = training["optimizer"]
        self._groups: list[dict[str, Any]] = saved["groups"]
        own_class, own_options = _optimizer_class(optimizer), sorted(optimizer.defaults)
        if saved["class"] != own_class:
            raise self._other(f"its optimizer is {saved['class']}, this one {own_class}")
        if saved["options"] != own_options:
            differing = sorted(set(saved["options"]) ^ set(own_options))
            raise self._other(f"one of the two optimizers lacks the options {_some(differing)}")
        own_names = _parameter_names(model, optimizer)
        pairs = zip(self._groups, own_names, strict=False)
        for number, (saved_group, names) in enumerate(pairs, start=1):
            if saved_group["params"] != names:
                differing = sorted(set(saved_group["params"]) ^ set(names))
                what = _some(differing) if differing else "the order"
                raise self._other(f"parameter group {number} differs: {what}")
        if len(self._groups) != len(own_names):
            count = f"{len(self._groups)} parameter groups, this one {len(own_names)}"
            raise self._other(f"its optimizer has {count}")
        groups = zip(self._groups, optimizer.param_groups, strict=True)
        for number, (saved_group, group) in enumerate(groups, start=1):
            for option in own_options:
                if option not in saved_group or not _fits(saved_group[option], group.get(option)):
                    raise self._other(f"parameter group {number} has another {shown(option)}")
        by_name: dict[str, dict[str, Entry]] = {}
        for full_name, entry in entries.items():
            name, _, key = full_name.rpartition(".")
            by_name.setdefault(name, {})[key] = entry
        for group in self._groups:
            for name in group["params"]:
                others = saved["states"].get(name, {})
                self._place(name, by_name.get(name, {}), others, group)

    def finish(self) -> None:
        """Let the states, all read, be the optimizer's, and the groups' options with them."""
        for name in (name for group in self._groups for name in group["params"]):
            state, parameter = self._states.get(name), self._parameters[name]
            if name in self._offloaded:
                chunk, _ = self._offloaded[name]
                if state is None:
                    chunk.updated.discard(name)
                else:
                    chunk.scalars[name] = state
                    chunk.updated.add(name)
            elif state is None:
                self._optimizer.state.pop(parameter, None)
            else:
                self._optimizer.state[parameter] = state
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _other(self, problem: str) -> ProtrainError:
        return ProtrainError(
            f"the checkpoint is of another optimizer: {problem}",
            source=self._source,
            fix="make the optimizer as it was made for the checkpoint, or load parameters alone"
            " with load(model, None, directory)",
        )

    def _place(
        self,
        name: str,
        entries: Mapping[str, Entry],
        others: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Say where a parameter's states belong; make room for those that memory holds."""
        if not entries and not others:
            return
        below = self._offloaded.get(name)
        kept = dict(entries)
        if below is not None:  # its states have their places since `prepare`, and no others
            stored, (_, part) = stored_states(*below), below
            fitting = {
                key
                for key, value in stored.items()
                if key in entries and _described(entries[key]) == _described(value)
            }
            same = {k for k, e in entries.items() if e.shape == part.shape and part.numel > 1}
            differing = sorted((stored.keys() | same) ^ fitting)
            if differing:
                raise self._other(f"the states of {part.name} differ: {_some(differing)}")
            self.targets += [(kept.pop(key), value) for key, value in stored.items()]
        state = dict(others)
        # The tensors that are to hold the rest: what the optimizer has, or as it would make them.
        parameter = self._parameters[name]
        has = taken_apart(self._optimizer.state.get(parameter, {})) if below is None else {}
        # Where torch.optim keeps counters: with the kernel that reads them.
        kernels = (options.get("fused"), options.get("capturable"))
        device = parameter.device if below is None and any(on is True for on in kernels) else "cpu"
        for key, entry in kept.items():
            held = has.get(key)
            if isinstance(held, torch.Tensor) and _described(Held(held)) == _described(entry):
                state[key] = held
            elif entry.shape == parameter.shape:
                state[key] = torch.empty_like(parameter, dtype=entry.dtype, requires_grad=False)
            else:
                by_itself = entry.shape.numel() > 1 and below is None  # no counter
                where = parameter.device if by_itself else device
                try:
                    state[key] = torch.empty(entry.shape, dtype=entry.dtype, device=where)
                except (RuntimeError, MemoryError) as error:  # a shape only such a checkpoint has
                    size = format_bytes(entry.shape.numel() * entry.dtype.itemsize)
                    problem = f"{shown(entry.key)} takes {size}, for which there is no room"
                    raise self._other(problem) from error
            self.targets.append((entry, Held(state[key])))
        # Of what is below the device only the shape: it is there in parts.
        gone = entries.keys() - kept.keys()
        parts = {
            k: torch.empty(entries[k].shape, dtype=entries[k].dtype, device="meta") for k in gone
        }
        try:
            for key in (key for key in state if is_composition(key)):
                state[key] = Composition.read(state[key])
            whole = put_together({**state, **parts}, parameter.shape)
        except Exception as error:  # the checkpoint's own words, which a class of a package reads
            raise self._other(
                f"a state of {shown(name)} cannot be made: {cut(str(error))}"
            ) from error
        self._states[name] = whole if below is None else state


def _try_random(states: Mapping[str, Any], directory: Path) -> None:
    """ProtrainError where accelerators in use do not take these states; they keep their own."""
    kind, own = devices.all_random_states()
    if kind not in states:
        return
    try:
        devices.set_all_random_states(kind, states[kind])
    except (RuntimeError, ValueError, TypeError) as error:
        raise damaged(directory, f"{kind} does not take its random states") from error
    finally:
        devices.set_all_random_states(kind, own)
