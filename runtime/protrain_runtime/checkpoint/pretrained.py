"""`save_pretrained`: files for transformers' and PEFT's `from_pretrained`, without us.

[Note: one file decides] Files are written to a folder beside their destination and moved there when
all are complete. transformers reads `model.safetensors`, or else the index: the deciding one is
replaced last, and a new save's shards have new names. An interruption before leaves the old model,
one after it the new one.
"""

import copy
import importlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain_runtime.checkpoint.files import header_of, write_values
from protrain_runtime.checkpoint.folders import ELSEWHERE, locked, sync
from protrain_runtime.checkpoint.index import INDEX, SINGLE_FILE, Saved, found_index
from protrain_runtime.checkpoint.saving import (
    SHARD_BYTES,
    in_shards,
    model_values,
    on_each,
    settled,
    shared_out,
)
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.files import replace_text
from protrain_runtime.devices.thread_guard import guarded
from protrain_runtime.model.prepared import (
    Prepared,
    offloaded_parameters,
    thread_guard_of,
    together,
)
from protrain_runtime.states.chunks import read_values
from protrain_runtime.states.quantized import packed_layers
from protrain_runtime.states.values import Held, Source, num_bytes, order_of, part_of

_STAGING = ".protrain-saving"
_SHARD = re.compile(r"model(-[0-9]+)?-[0-9]{5}-of-[0-9]{5}\.safetensors")
_ADAPTERS = "adapter_model.safetensors"

Files = dict[str, Mapping[str, Source]]
"""The tensors of each file, by its name."""


@guarded("save_pretrained()", thread_guard_of)
def save_pretrained(
    model: nn.Module, directory: Path | str, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a model as its own `save_pretrained` would, piece by piece; of adapters only these.

    transformers' `from_pretrained` reads it bit for bit: config.json, safetensors of at most
    `shard_bytes` with an index, tied weights once. For PEFT's adapters it is
    adapter_model.safetensors and adapter_config.json; adapters not called "default" have a folder
    of their own. Several ranks write together, to a shared directory. Until all is written, the
    previous files stay.

    ProtrainError if the directory is not writable, or the model is from neither package.
    """
    with together(model, "save_pretrained()"):
        prepared = settled(model, None, "save_pretrained() was called")
        values = dict(model_values(model, prepared))
        for adapter in getattr(model, "peft_config", {}):
            folder = Path(directory) if adapter == "default" else Path(directory) / adapter
            names = _adapter_names(model, adapter)
            files: Files = {_ADAPTERS: {name: values[first] for name, first in names.items()}}
            _write(folder, prepared, files, partial(_write_adapter_config, model, adapter), names)
        if not hasattr(model, "peft_config"):
            config = getattr(model, "config", None)
            if not hasattr(config, "save_pretrained") or any(packed_layers(model)):
                raise ProtrainError(
                    "only models of transformers, and adapters of PEFT, have such files",
                    fix="protrain_runtime.save(model, None, directory)",
                )
            left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
            values = {name: value for name, value in values.items() if name not in left_out}
            files = _files(Path(directory), values, shard_bytes)
            _write(Path(directory), prepared, files, partial(_write_config, model), {})


def _write_config(model: Any, folder: Path) -> None:
    """As transformers does, which sets both in the model's configuration."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _write_adapter_config(model: Any, adapter: str, folder: Path) -> None:
    config, base = copy.copy(model.peft_config[adapter]), model.get_base_model()
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    known = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    mapping = known if config.task_type is None else None
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)


def _adapter_names(model: nn.Module, adapter: str) -> dict[str, str]:
    """PEFT's names of an adapter's tensors, with the model's first names."""
    peft: Any = importlib.import_module("peft")
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = {name: first[p] for name, p in model.named_parameters(remove_duplicate=False)}
    every |= {name: name for name, _ in model.named_buffers()}
    names = {name: torch.empty(0, device="meta") for name in every}
    known = {id(tensor): every[name] for name, tensor in names.items()}
    found = peft.get_peft_model_state_dict(
        model, state_dict=names, adapter_name=adapter, save_embedding_layers=False
    )
    return {name: known[id(tensor)] for name, tensor in found.items()}


def _files(directory: Path, values: Mapping[str, Source], shard_bytes: int) -> Files:
    """The tensors by file; several files have unused names."""
    shards = in_shards(values, num_bytes, shard_bytes)
    if len(shards) <= 1:
        return {SINGLE_FILE: values}
    for number in itertools.count():
        prefix = f"model-{number}" if number else "model"
        names = [
            f"{prefix}-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
        ]
        if not any((directory / name).exists() for name in names):
            return dict(zip(names, shards, strict=True))
    raise AssertionError


def _write(
    directory: Path,
    prepared: Prepared | None,
    files: Files,
    write_config: Callable[[Path], None],
    parameters: Mapping[str, str],
) -> None:
    """Write files together, and move them into place; `parameters` have other names in files."""
    ranks = prepared.ranks if prepared else None
    offloaded = offloaded_parameters(prepared)
    staging = directory / _STAGING
    first = ranks is None or ranks.rank == 0
    layouts = {
        file: header_of({name: (value.dtype, value.shape) for name, value in values.items()})
        for file, values in files.items()
    }

    def begin() -> None:
        if not first:
            return
        stack.enter_context(locked(directory))
        if found_index(directory) is not None and Saved(directory).folder:
            raise ProtrainError(
                "the directory holds a checkpoint of protrain_runtime.save()",
                source=str(directory),
                fix=ELSEWHERE,
            )
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        stack.callback(shutil.rmtree, staging, ignore_errors=True)
        write_config(staging)
        for file, (header, _) in layouts.items():
            (staging / file).write_bytes(header)

    def own_values(file: str) -> Iterator[tuple[int, Source]]:
        for name, start in layouts[file][1].items():
            value = files[file][name]
            if order_of(value) != tuple(range(len(value.shape))):  # collective
                value = Held(read_values(*offloaded[parameters.get(name, name)]))
            if name in writes:
                yield start + part_of(value)[0] * value.dtype.itemsize, value

    def write_own() -> None:
        for file in files:
            write_values(staging / file, own_values(file))

    def put_in_place() -> None:
        """See [Note: one file decides]."""
        if not first:
            return
        sync(staging)
        before = [path for path in directory.iterdir() if _SHARD.fullmatch(path.name)]
        index = directory / INDEX
        for path in sorted(staging.iterdir(), key=lambda path: path.name == SINGLE_FILE):
            os.replace(path, directory / path.name)
        sync(directory)
        if len(files) > 1:
            values = [value for of_file in files.values() for value in of_file.values()]
            sizes = {
                "total_parameters": sum(value.shape.numel() for value in values),
                "total_size": sum(map(num_bytes, values)),
            }
            weight_map = {name: file for file, names in files.items() for name in names}
            content = {"metadata": sizes, "weight_map": weight_map}
            replace_text(index, json.dumps(content, indent=2, sort_keys=True) + "\n")
            (directory / SINGLE_FILE).unlink(missing_ok=True)
        elif SINGLE_FILE in files:
            index.unlink(missing_ok=True)
        for path in before if _ADAPTERS not in files else ():
            path.unlink()
        sync(directory)

    everything = {name: value for values in files.values() for name, value in values.items()}
    writes = shared_out(ranks, everything)
    with ranks.writing() if ranks else nullcontext(), ExitStack() as stack:
        for step in (begin, write_own, put_in_place):
            on_each(ranks, step, directory)
