"""`save`: a model and its optimizer, in their own names and shapes, whatever plan they follow.

What is written does not depend on the plan: two plans and plain PyTorch save the same bytes.
"""

import io
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_runtime.checkpoint.checksums import Range, new_file, write_sums
from protrain_runtime.checkpoint.folders import TRAINING, commit, is_distributed, next_save
from protrain_runtime.checkpoint.tensor_files import write_tensors
from protrain_runtime.checkpoint.training_state import VERSION, pack
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.turns import in_turn
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.model.prepared import (
    Prepared,
    offloaded_parameters,
    prepared_of,
    together,
    turns_of,
)
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.values import (
    Held,
    Shared,
    Stored,
    Value,
    num_bytes,
    stored_parameter,
    stored_states,
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
        return _save(model, optimizer, Path(directory), extra, shard_bytes, beside=beside)


def _save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    directory: Path,
    extra: Mapping[str, Any] | None,
    shard_bytes: int,
    *,
    beside: bool,
) -> "Saving | None":
    prepared = settled(model, optimizer, "save() was called")
    weights = dict(model_values(model, prepared))
    states: dict[str, Value] = {}
    training: dict[str, Any] = {
        "version": VERSION,
        "extra": dict(extra or {}),
        "random": _random(),
        "modules": {name: module.get_extra_state() for name, module in with_extra_state(model)},
    }
    if optimizer is not None:
        states, training["optimizer"] = _optimizer_values(model, optimizer, prepared)
    if prepared is not None and prepared.ranks is not None:
        if prepared.ranks.rank > 0:  # buffers are rank 0's, as they are in the next forward
            own = dict(model.named_parameters())
            weights = {name: value for name, value in weights.items() if name in own}
        return _save_parts(directory, prepared.ranks, weights, states, training, beside)
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


def _save_parts(
    directory: Path,
    ranks: Ranks,
    weights: Mapping[str, Value],
    states: Mapping[str, Value],
    training: dict[str, Any],
    beside: bool,
) -> "Saving | None":
    # Takes a second to import, and memory that one device does without.
    from protrain_runtime.checkpoint.distributed_checkpoints import save_parts

    values = {f"model.{name}": value for name, value in weights.items()}
    values |= {f"optimizer.state.{name}": value for name, value in states.items()}
    if "optimizer" in training:
        known: dict[str, Any] = {}
        for others in ranks.all_objects(training["optimizer"]["states"]):
            known |= others  # a rank knows of what it has
        training["optimizer"]["states"] = known
    own = io.BytesIO()
    torch.save(training["random"], own)
    packed = pack(training)
    return save_parts(directory, ranks, values, packed, own.getvalue(), beside=beside)


def settled(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, what: str
) -> Prepared | None:
    """What `prepare` attached, with nothing in the middle of an update.

    ProtrainError where the optimizer is not the prepared model's; RuntimeError, saying `what`,
    where some parameters are updated and some are not.
    """
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
    """The parameters, each by its first name, and the buffers that belong to the state dict."""
    offloaded = offloaded_parameters(prepared.chunks if prepared else ())
    for name, parameter in model.named_parameters():
        if name in offloaded:
            yield name, stored_parameter(*offloaded[name])
        else:
            yield name, Held(parameter.detach())
    for prefix, module in model.named_modules():
        passing = module._non_persistent_buffers_set
        for key, buffer in module.named_buffers(recurse=False):
            if key not in passing:
                yield f"{prefix}.{key}" if prefix else key, Held(buffer)


def with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have a state of their own besides tensors, by name."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def optimizer_class(optimizer: torch.optim.Optimizer) -> str:
    """The name of the user's class."""
    return (optimizer.kind if isinstance(optimizer, PlannedOptimizer) else type(optimizer)).__name__


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
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
    names = parameter_names(model, optimizer)
    offloaded = offloaded_parameters(prepared.chunks if prepared else ())
    tensors: dict[str, Value] = {}
    others: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        state: Mapping[str, Any] = optimizer.state.get(parameter, {})
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


def _random() -> dict[str, Any]:
    kind, states = devices.all_random_states()
    of_devices = {"cuda": [], kind: states} if kind else {"cuda": []}
    return {"torch": torch.get_rng_state(), **of_devices, "python": random.getstate()}


def _write(
    folder: Path,
    kind: str,
    values: Mapping[str, Value],
    shard_bytes: int,
    sums: dict[str, Sequence[Range]],
) -> dict[str, str]:
    """Write the values, in their order, to files of `shard_bytes`; returns each one's file.

    The files' checksums are added to `sums`.
    """
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
