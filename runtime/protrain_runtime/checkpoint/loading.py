"""`load`: continue from what `save` wrote, plainly or under a plan."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.units import format_bytes
from protrain_runtime.checkpoint.checksums import (
    SUMS,
    Sums,
    check_sum,
    damaged,
    read_regular,
    read_sums,
    shown,
    verify,
)
from protrain_runtime.checkpoint.folders import TRAINING, Index, file_in, is_distributed, read_index
from protrain_runtime.checkpoint.part_files import Saved
from protrain_runtime.checkpoint.saving import (
    model_values,
    optimizer_class,
    parameter_names,
    settled,
    with_extra_state,
)
from protrain_runtime.checkpoint.tensor_files import Entry, fill_values, read_entries
from protrain_runtime.checkpoint.training_state import unpack
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.turns import in_turn
from protrain_runtime.model.prepared import Prepared, meet, offloaded_parameters, together, turns_of
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.chunks import Chunk, Slice
from protrain_runtime.states.values import Held, Value, stored_states

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
        return _load(model, optimizer, Path(directory))


def _load(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, directory: Path
) -> dict[str, Any]:
    prepared = settled(model, optimizer, "load() was called")
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
    saved.verify(ranks, unit_names(prepared))
    meet(model, "load()")  # each rank has compared some of the files, for all
    saved.prepare(targets)
    meet(model, "load()")  # what is wrong on any rank was told: nothing has changed yet
    saved.fill(targets)
    for name, module in with_extra_state(model):
        if name in training.get("modules", {}):
            module.set_extra_state(training["modules"][name])
    if resumed is not None:
        resumed.finish()
        if random_states is not None:  # a rank that was not there goes on with its own
            _set_random(random_states)
    extra: dict[str, Any] = training.get("extra", {})
    return extra


def read_extra(directory: Path | str) -> dict[str, Any]:
    """The `extra` of a checkpoint, without loading anything. ProtrainError as `load`."""
    return dict(_opened(Path(directory)).training().get("extra", {}))


class _Checkpoint(Protocol):
    """What a load asks, whoever saved. Methods raise ProtrainError for what is damaged."""

    def weights(self) -> Mapping[str, Entry | None]:
        """The parameters and buffers; None for one that is named and in no file."""
        ...

    def training(self) -> dict[str, Any]:
        """What is no tensor; nothing of a checkpoint of others."""
        ...

    def states(self) -> Mapping[str, Entry]:
        """The optimizer's states that are tensors, as NAME.KEY."""
        ...

    def random_states(self, rank: int) -> dict[str, Any] | None:
        """The random states of a rank; None where it has none."""
        ...

    def verify(self, ranks: Ranks | None, unit_of: Callable[[str], str]) -> None:
        """Compare all tensors that were asked for with their checksums.

        Of several ranks each compares a part. `unit_of` is what errors say of a tensor besides.
        """
        ...

    def prepare(self, targets: Iterable[tuple[Entry, Value]]) -> None:
        """See whether `fill` can read what it is to read."""
        ...

    def fill(self, targets: Sequence[tuple[Entry, Value]]) -> None:
        """Read each entry into its value."""
        ...


def _opened(directory: Path) -> _Checkpoint:
    return Saved(directory) if is_distributed(directory) else _Saved(directory)


class _Saved:
    """A checkpoint of one device, or of others, in safetensors files."""

    def __init__(self, directory: Path) -> None:
        self.index: Index = read_index(directory)
        self._directory, self._read = directory, set[str]()
        self._sums: Sums | None = None
        self._training: dict[str, Any] = {}
        if self.index.folder is not None:
            folder = self._file(TRAINING).parent
            if self.index.sums is not None:
                self._file(SUMS)
                self._sums = read_sums(folder, self.index.sums)

    def weights(self) -> dict[str, Entry | None]:
        """The parameters and buffers; None for one that the index names and no file has."""
        named = self.index.weight_map
        files = {
            file: self._others(file) if self.index.folder is None else self._entries(file)
            for file in sorted(set(named.values()))
        }
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

    def _others(self, file: str) -> dict[str, Entry]:
        return read_entries(file_in(self._directory, file, linked=True))

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


def unit_names(prepared: Prepared | None) -> Callable[[str], str]:
    """What errors say of the unit of the plan that has a tensor; "" where that is none, or many."""
    units: dict[str, set[str]] = {}  # by the names of parameters, and all that they begin with
    for chunk in prepared.chunks if prepared else ():
        unit = prepared.plan.units[chunk.unit].name if prepared else ""
        for part in chunk.slices:
            parts = part.name.split(".")
            for count in range(1, len(parts) + 1):
                units.setdefault(".".join(parts[:count]), set()).add(unit)

    def unit_of(name: str) -> str:
        # Of a buffer, or a state, that is the unit of the parameters beside it.
        start = name
        while start and start not in units:
            start = start.rpartition(".")[0]
        of = units.get(start, set())
        return f" (unit {shown(next(iter(of)))})" if len(of) == 1 else ""

    return unit_of


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
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


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
        self._model, self._optimizer, self._source = model, optimizer, str(directory)
        self._offloaded = offloaded_parameters(prepared.chunks if prepared else ())
        self.targets: list[tuple[Entry, Value]] = []
        self._states: dict[str, dict[str, Any]] = {}  # by parameter: what memory is to hold
        if entries is None:
            raise self._other("it was saved without an optimizer")
        self._saved: dict[str, Any] = training["optimizer"]
        self._check()
        groups = zip(parameter_names(model, optimizer), self._saved["groups"], strict=True)
        options = {name: group for names, group in groups for name in names}
        own = dict(model.named_parameters())
        by_name: dict[str, dict[str, Entry]] = {}
        for full_name, entry in entries.items():
            name, _, key = full_name.rpartition(".")
            by_name.setdefault(name, {})[key] = entry
        for name in options:
            self._place(name, own[name], by_name.get(name, {}), options[name])

    def finish(self) -> None:
        """Let the states, all read, be the optimizer's, and the groups' options with them."""
        own = dict(self._model.named_parameters())
        for name, state in self._states.items():
            if name in self._offloaded:
                chunk, _ = self._offloaded[name]
                chunk.scalars[name] = state
                chunk.updated.add(name)
            else:
                self._optimizer.state[own[name]] = state
        for name in {name for names in self._names() for name in names} - self._states.keys():
            if name in self._offloaded:
                self._offloaded[name][0].updated.discard(name)
            else:
                self._optimizer.state.pop(own[name], None)
        for group, saved in zip(self._optimizer.param_groups, self._saved["groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _names(self) -> list[list[str]]:
        return parameter_names(self._model, self._optimizer)

    def _check(self) -> None:
        """ProtrainError where the optimizer is of another class, or has other groups."""
        saved = (self._saved["class"], self._saved["options"])
        own = (optimizer_class(self._optimizer), sorted(self._optimizer.defaults))
        if saved[0] != own[0]:
            raise self._other(f"its optimizer is {saved[0]}, this one {own[0]}")
        if saved[1] != own[1]:
            differing = sorted(set(saved[1]) ^ set(own[1]))
            raise self._other(f"one of the two optimizers lacks the options {_some(differing)}")
        saved_names = [group["params"] for group in self._saved["groups"]]
        for number, (theirs, ours) in enumerate(
            zip(saved_names, self._names(), strict=False), start=1
        ):
            if theirs != ours:
                differing = sorted(set(theirs) ^ set(ours))
                what = _some(differing) if differing else "the order"
                raise self._other(f"parameter group {number} differs: {what}")
        if len(saved_names) != len(self._names()):
            count = f"{len(saved_names)} parameter groups, this one {len(self._names())}"
            raise self._other(f"its optimizer has {count}")
        for number, (saved_group, group) in enumerate(
            zip(self._saved["groups"], self._optimizer.param_groups, strict=True), start=1
        ):
            for option in own[1]:
                if option not in saved_group or not _fits(saved_group[option], group.get(option)):
                    raise self._other(f"parameter group {number} has another {shown(option)}")

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
        parameter: nn.Parameter,
        entries: Mapping[str, Entry],
        options: Mapping[str, Any],
    ) -> None:
        """Say where a parameter's states belong; make room for those that memory holds."""
        others: dict[str, Any] = self._saved["states"].get(name, {})
        below = self._offloaded.get(name)
        kept = dict(entries)
        if below is not None and (entries or others):
            stored = stored_states(*below)
            self._check_layout(below, stored.keys(), entries)
            for key, value in stored.items():
                self.targets.append((kept.pop(key), value))
        state = dict(others)
        for key, entry in kept.items():
            state[key] = self._room(parameter, key, entry, options, below=below is not None)
            self.targets.append((entry, Held(state[key])))
        if entries or others:
            self._states[name] = state

    def _check_layout(
        self, below: tuple[Chunk, Slice], keys: Iterable[str], entries: Mapping[str, Entry]
    ) -> None:
        """An offloaded parameter's states have their places since `prepare`, and no others."""
        _, part = below
        stored = stored_states(*below)
        fitting = {
            key
            for key in keys
            if key in entries and _described(entries[key]) == _described(stored[key])
        }
        elementwise = {k for k, e in entries.items() if e.shape == part.shape and part.numel > 1}
        differing = sorted((set(keys) | elementwise) ^ fitting)
        if differing:
            raise self._other(f"the states of {part.name} differ: {_some(differing)}")

    def _room(
        self,
        parameter: nn.Parameter,
        key: str,
        entry: Entry,
        options: Mapping[str, Any],
        *,
        below: bool,
    ) -> torch.Tensor:
        """The tensor that is to hold a state: what the optimizer has, or as it would make one."""
        held = None if below else self._optimizer.state.get(parameter, {}).get(key)
        if isinstance(held, torch.Tensor) and _described(Held(held)) == _described(entry):
            return held
        if entry.shape == parameter.shape:
            return torch.empty_like(parameter, dtype=entry.dtype, requires_grad=False)
        # Where torch.optim keeps counters: with the kernel that reads them.
        kernels = (options.get("fused"), options.get("capturable"))
        device = parameter.device if not below and any(on is True for on in kernels) else "cpu"
        try:
            return torch.empty(entry.shape, dtype=entry.dtype, device=device)
        except (RuntimeError, MemoryError) as error:  # a shape that only such a checkpoint has
            size = format_bytes(entry.shape.numel() * entry.dtype.itemsize)
            raise self._other(
                f"{shown(entry.key)} takes {size}, for which there is no room"
            ) from error


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


def _set_random(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    for kind in states.keys() - {"torch", "python"}:
        devices.set_all_random_states(kind, states[kind])
