"""`load`: continue from what `save` wrote, plainly or under a plan."""

import io
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_runtime import devices
from protrain_runtime.checkpoints import TRAINING, is_distributed, read_index
from protrain_runtime.chunks import Chunk, Slice
from protrain_runtime.prepared import Prepared
from protrain_runtime.saving import (
    VERSION,
    model_values,
    optimizer_class,
    parameter_names,
    settled,
    with_extra_state,
)
from protrain_runtime.state_dicts import offloaded_parameters
from protrain_runtime.tensor_files import Entry, fill_values, read_entries
from protrain_runtime.values import Held, Value, stored_states

_NUM_NAMED = 3  # parameters that an error names


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
    checked is checked before anything changes. ProtrainError where there is no checkpoint, where it
    is damaged, or of another model or optimizer; RuntimeError between backward and step under
    plans that update in backward.
    """
    directory = Path(directory)
    prepared = settled(model, optimizer, "load() was called")
    if is_distributed(directory):
        return _load_parts(model, optimizer, prepared, directory)
    index = read_index(directory)
    saved = _entries(directory, set(index.weight_map.values()))
    targets = _matched(model, saved, index.weight_map, prepared, directory)
    training: dict[str, Any] = {}
    if index.folder is not None:
        training = _training(directory / index.folder / TRAINING)
    resumed = None
    if optimizer is not None:
        states = None
        if index.folder is not None and "optimizer" in training:
            states = _entries(directory / index.folder, training["files"])
        resumed = _Resumed(model, optimizer, prepared, directory, states, training)
        targets += resumed.targets
    fill_values(targets)
    return _finish(model, resumed, training, training.get("random"))


def _load_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    prepared: Prepared | None,
    directory: Path,
) -> dict[str, Any]:
    """The same of a checkpoint of several ranks: each takes what it is to have."""
    from protrain_runtime.distributed_checkpoints import Saved  # as in `saving`

    ranks = prepared.ranks if prepared else None
    saved = Saved(directory)
    weights = saved.entries("model.")
    names = dict.fromkeys(weights, directory.name)
    targets = _matched(model, weights, names, prepared, directory)
    training = _read_training(saved.packed("training"), directory)
    resumed = None
    if optimizer is not None:
        states = saved.entries("optimizer.state.") if "optimizer" in training else None
        resumed = _Resumed(model, optimizer, prepared, directory, states, training)
        targets += resumed.targets
    saved.fill(targets)
    own = saved.packed(f"random.{ranks.rank if ranks else 0}")
    random_states = None if own is None else torch.load(own, weights_only=True)
    return _finish(model, resumed, training, random_states)


def _finish(
    model: nn.Module,
    resumed: "_Resumed | None",
    training: dict[str, Any],
    random_states: dict[str, Any] | None,
) -> dict[str, Any]:
    """What is no tensor; returns the `extra`."""
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
    directory = Path(directory)
    if is_distributed(directory):
        from protrain_runtime.distributed_checkpoints import Saved  # as in `saving`

        found: dict[str, Any] = _read_training(Saved(directory).packed("training"), directory)
        return dict(found["extra"])
    folder = read_index(directory).folder
    extra: dict[str, Any] = (
        {} if folder is None else _training(directory / folder / TRAINING)["extra"]
    )
    return extra


def _entries(directory: Path, files: Iterable[str]) -> dict[str, Entry]:
    return {
        name: entry
        for file in sorted(files)
        for name, entry in read_entries(directory / file).items()
    }


def _training(path: Path) -> dict[str, Any]:
    try:
        packed = io.BytesIO(path.read_bytes())
    except OSError as error:
        raise ProtrainError(
            f"cannot be read: {error.strerror}", source=str(path), fix="load another checkpoint"
        ) from None
    return _read_training(packed, path)


def _read_training(packed: io.BytesIO | None, path: Path) -> dict[str, Any]:
    try:
        assert packed is not None
        read: dict[str, Any] = torch.load(packed, weights_only=True, map_location="cpu")
        version = read["version"]
    except Exception:  # noqa: BLE001 - of any damage, torch.load has many
        raise ProtrainError(
            "the file is damaged", source=str(path), fix="load another checkpoint"
        ) from None
    if version != VERSION:
        raise ProtrainError(
            f"the checkpoint has version {version}, this protrain-plan reads {VERSION}",
            source=str(path),
            fix="load it with the version that wrote it",
        )
    return read


def _matched(
    model: nn.Module,
    saved: Mapping[str, Entry],
    weight_map: Mapping[str, str],
    prepared: Prepared | None,
    directory: Path,
) -> list[tuple[Entry, Value]]:
    """Each saved tensor with its place in the model. ProtrainError where they do not fit."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    aliases = {name: first[parameter] for name, parameter in every}
    found = {aliases.get(name, name): saved[name] for name in weight_map if name in saved}
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
        ("named by the index but in no file", [name for name in weight_map if name not in saved]),
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
    shown = ", ".join(names[:_NUM_NAMED])
    more = len(names) - _NUM_NAMED
    return shown if more <= 0 else f"{shown} and {more} more"


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
        on_device = not below and bool(options.get("fused") or options.get("capturable"))
        device = parameter.device if on_device else "cpu"
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)


def _set_random(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    for kind in states.keys() - {"torch", "python"}:
        devices.set_all_random_states(kind, states[kind])
