"""`load`: continue from a checkpoint, in place, under any plan or none, on any number of ranks."""

import random
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain_runtime.checkpoint.entries import Entry, fill_values
from protrain_runtime.checkpoint.files import Sums, damaged, shown
from protrain_runtime.checkpoint.index import Saved
from protrain_runtime.checkpoint.saving import (
    model_values,
    optimizer_class,
    parameter_names,
    settled,
    with_extra_state,
)
from protrain_runtime.checkpoint.training import SavedOptimizer, read_training
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.thread_guard import guarded
from protrain_runtime.model.optimizer_state import PlannedStates
from protrain_runtime.model.prepared import (
    Prepared,
    offloaded_parameters,
    thread_guard_of,
    together,
)
from protrain_runtime.states.compositions import MARK, Composition, put_together, taken_apart
from protrain_runtime.states.values import Held, Target, stored_states

_NUM_NAMED = 3  # parameters named in an error


@guarded("load()", thread_guard_of)
def load(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, directory: Path | str
) -> dict[str, Any]:
    """Load a checkpoint in place; returns the `extra` that it was saved with.

    The model and its optimizer may follow the checkpoint's plan, another one or none. With an
    optimizer, training continues: states, groups' options and random states are the checkpoint's.
    An existing scheduler takes its state from `extra`. Without an optimizer only parameters and
    buffers are read, also from other safetensors checkpoints in Hugging Face's layout.

    Bytes are read to their places with SAVING_BYTES of extra memory. Everything is checked before
    any change: all files are read and compared with their checksums, and again while loading. No
    code of a checkpoint runs.

    ProtrainError if the checkpoint is missing, damaged, or of another model or optimizer;
    RuntimeError between backward and step under plans that update in backward.
    """
    with together(model, "load()"):
        directory = Path(directory)
        prepared = settled(model, optimizer, "load() was called")
        ranks = prepared.ranks if prepared else None
        saved, kinds = Saved(directory), ["model"]
        training = read_training(saved)
        own = dict(model_values(model, prepared))
        targets = matched(model, saved, own, saved.entries("model"))
        resumed, random_states = None, None
        if optimizer is not None:
            kinds.append("optimizer")
            resumed = _Resumed(model, optimizer, prepared, saved, training.optimizer)
            targets += resumed.targets
            # One device's are for all; a rank that did not save has none.
            states = training.random or []
            own_number = ranks.rank if ranks and len(states) != 1 else 0
            random_states = dict(enumerate(states)).get(own_number)
            _try_random(random_states or {}, directory)
        saved.verify(kinds, ranks)
        sums = Sums(saved.rows)
        try:
            fill_values(targets, sums)
            saved.verify(kinds, ranks, sums)
        except ProtrainError as error:  # errors in files come too late here
            raise ProtrainError(
                f"{error.message}: the model is loaded in part",
                source=error.source,
                fix="load another checkpoint, as a whole",
            ) from None
        for name, module in with_extra_state(model):
            if name in training.modules:
                module.set_extra_state(training.modules[name])
        if resumed is not None:
            resumed.finish()
            if random_states is not None:  # a rank that did not save keeps its own
                torch.set_rng_state(random_states["torch"])
                random.setstate(random_states["python"])
                for kind in random_states.keys() - {"torch", "python"}:
                    devices.set_all_random_states(kind, random_states[kind])
        if prepared is not None and (plain := prepared.plain()) is not None:
            copy, its_optimizer = plain
            load(copy, None if optimizer is None else its_optimizer, directory)
        return training.extra


def read_extra(directory: Path | str) -> dict[str, Any]:
    """The `extra` of a checkpoint, without loading it. ProtrainError as in `load`."""
    return read_training(Saved(Path(directory))).extra


def matched(
    model: nn.Module,
    saved: Saved,
    own: Mapping[str, Target],
    entries: Mapping[str, Entry],
    *,
    kept: Set[str] = frozenset(),
    cast: bool = False,
) -> list[tuple[Entry, Target]]:
    """Each saved tensor with its place in the model. ProtrainError if they do not fit.

    Names in `kept` may be missing. With `cast` any floating-point dtype fits another one.
    """
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    aliases = {name: first[parameter] for name, parameter in every}
    aliases |= {base_name(name): own_name for name, own_name in aliases.items()}
    # The last of tied names counts, as in `load_state_dict`.
    order = {name: number for number, name in enumerate(aliases)}
    in_order = sorted(entries, key=lambda name: order.get(name, -1))
    found = {aliases.get(name, name): entries[name] for name in in_order}
    pairs = [(name, found[name], own[name]) for name in own if name in found]
    others: list[str] = []
    for name, theirs, ours in pairs:
        fits = theirs.dtype == ours.dtype
        if cast and theirs.dtype.is_floating_point and ours.dtype.is_floating_point:
            fits = True
        if not fits or theirs.shape != ours.shape:
            there, here = _described(theirs), _described(ours)
            others.append(f"{name} ({there} in the checkpoint, {here} in the model)")
    problems = (
        ("missing from the checkpoint", [n for n in own if n not in found and n not in kept]),
        ("missing from the model", [name for name in found if name not in own]),
        ("of a different shape or dtype", others),
        ("listed in the index but in no file", sorted((saved.weight_map or {}).keys() - entries)),
    )
    if any(names for _, names in problems):
        raise ProtrainError(
            "the checkpoint is for a different model: "
            + "; ".join(f"{what}: {_some(names)}" for what, names in problems if names),
            source=str(saved.directory),
            fix="load it into the model that it was saved from",
        )
    return [(theirs, ours) for _, theirs, ours in pairs]


def base_name(name: str) -> str:
    """The name in the base model of a tensor with this name under PEFT's adapters."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _described(tensor: Entry | Target) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def _some(names: list[str]) -> str:
    first = ", ".join(shown(name) for name in names[:_NUM_NAMED])
    more = len(names) - _NUM_NAMED
    return first if more <= 0 else f"{first} and {more} more"


def _fits(saved: object, own: object) -> bool:
    """Whether a saved option fits a group's, by its type."""
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
        saved: Saved,
        described: SavedOptimizer | None,
    ) -> None:
        self._parameters, self._optimizer = dict(model.named_parameters()), optimizer
        self._offloaded = offloaded_parameters(prepared)
        self._source = str(saved.directory)
        self.targets: list[tuple[Entry, Target]] = []
        self._states: dict[str, dict[str, Any]] = {}  # by parameter: states in memory
        if described is None:
            raise self._other("it was saved without an optimizer")
        self._groups = described.groups
        own_class, own_options = optimizer_class(optimizer), sorted(optimizer.defaults)
        if described.kind != own_class:
            raise self._other(f"its optimizer is {described.kind}, this one {own_class}")
        if described.options != own_options:
            differing = sorted(set(described.options) ^ set(own_options))
            raise self._other(f"one of the two optimizers lacks the options {_some(differing)}")
        own_names = parameter_names(model, optimizer)
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
        for full_name, entry in saved.entries("optimizer").items():
            name, _, key = full_name.rpartition(".")
            by_name.setdefault(name, {})[key] = entry
        for group in self._groups:
            for name in group["params"]:
                others = described.states.get(name, {})
                self._place(name, by_name.get(name, {}), others, group)

    def finish(self) -> None:
        """Install the read states and the groups' options in the optimizer."""
        for name in (name for group in self._groups for name in group["params"]):
            state, parameter = self._states.get(name), self._parameters[name]
            if name in self._offloaded:
                chunk, _ = self._offloaded[name]
                if state is None:
                    chunk.current.updated.discard(name)
                else:
                    chunk.current.scalars[name] = state
                    chunk.current.updated.add(name)
            elif state is None:
                self._optimizer.state.pop(parameter, None)
            else:
                self._optimizer.state[parameter] = state
        if isinstance(states := self._optimizer.state, PlannedStates):
            states.forget()  # loans have old values
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _other(self, problem: str) -> ProtrainError:
        return ProtrainError(
            f"the checkpoint is for a different optimizer: {problem}",
            source=self._source,
            fix="construct the optimizer as for the checkpoint, or load only the parameters with"
            " load(model, None, directory)",
        )

    def _place(
        self,
        name: str,
        entries: Mapping[str, Entry],
        others: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Assign places to a parameter's states; allocate those in memory."""
        if not entries and not others:
            return
        below = self._offloaded.get(name)
        kept = dict(entries)
        if below is not None:  # its states have exactly the places of `prepare`
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
        # Targets for the rest: the optimizer's tensors, or new ones like them.
        parameter = self._parameters[name]
        has = taken_apart(self._optimizer.state.get(parameter, {})) if below is None else {}
        # Counters are placed as by torch.optim: with the kernel that reads them.
        kernels = (options.get("fused"), options.get("capturable"))
        device = parameter.device if below is None and any(on is True for on in kernels) else "cpu"
        for key, entry in kept.items():
            held = has.get(key)
            if isinstance(held, torch.Tensor) and _described(Held(held)) == _described(entry):
                state[key] = held
            elif entry.shape == parameter.shape:
                state[key] = torch.empty_like(parameter, dtype=entry.dtype, requires_grad=False)
            else:
                by_itself = entry.shape.numel() > 1 and below is None  # not a counter
                where = parameter.device if by_itself else device
                try:
                    state[key] = torch.empty(entry.shape, dtype=entry.dtype, device=where)
                except (RuntimeError, MemoryError) as error:  # a shape only such a checkpoint has
                    size = format_bytes(entry.shape.numel() * entry.dtype.itemsize)
                    problem = f"{shown(entry.name)} takes {size}, for which there is no room"
                    raise self._other(problem) from error
            self.targets.append((entry, Held(state[key])))
        # Of offloaded states only the shape: they are read in parts.
        gone = entries.keys() - kept.keys()
        parts = {
            k: torch.empty(entries[k].shape, dtype=entries[k].dtype, device="meta") for k in gone
        }
        try:
            for key in (key for key in state if key.endswith(MARK)):
                state[key] = Composition.read(state[key])
            whole = put_together({**state, **parts}, parameter.shape)
        except Exception as error:  # the checkpoint's own text, parsed by a package's class
            raise self._other(
                f"a state of {shown(name)} cannot be made: {cut(str(error))}"
            ) from error
        self._states[name] = whole if below is None else state


def _try_random(states: Mapping[str, Any], directory: Path) -> None:
    """ProtrainError if accelerators in use refuse these states; they keep their own."""
    kind, own = devices.all_random_states()
    if kind not in states:
        return
    try:
        devices.set_all_random_states(kind, states[kind])
    except (RuntimeError, ValueError, TypeError) as error:
        raise damaged(directory, f"{kind} does not take its random states") from error
    finally:
        devices.set_all_random_states(kind, own)
