"""Offloaded parameters' values for whoever looks at the model: state dicts, reads, restoring."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from protrain_runtime.chunks import Chunk, Slice, flat_storage_order
from protrain_runtime.engine import Engine

Undo = list[Callable[[], object]]
"""What takes a plan off a model again, run last to first."""


def offloaded_parameters(chunks: Sequence[Chunk]) -> dict[str, tuple[Chunk, Slice]]:
    """By name, where the parameters lie that are not on the device between steps."""
    return {
        part.name: (chunk, part)
        for chunk in chunks
        if chunk.store is not None
        for part in chunk.slices
    }


def read_parameter(chunk: Chunk, part: Slice) -> torch.Tensor:
    """An offloaded parameter's values, from its store.  # part.dtype [part.shape], on the host

    Of what ranks share, all of them ask for it.
    """
    assert chunk.store is not None
    if chunk.sharding is not None:
        buffer = chunk.sharding.gather(chunk, part.group)
        return part.flat(buffer).clone().as_strided(part.shape, part.stride).cpu()
    flat = torch.empty(part.num_bytes, dtype=torch.uint8)
    chunk.store.read(chunk.offset + part.offset, flat)
    return flat.view(part.dtype).as_strided(part.shape, part.stride)


def bring_back(chunk: Chunk) -> None:
    """Give an offloaded chunk's parameters memory of their own again."""
    if not chunk.hollow:
        return
    assert chunk.store is not None
    for part in chunk.slices:
        if part.group not in chunk.hollow:
            continue
        if chunk.sharding is not None:
            part.parameter.data = read_parameter(chunk, part).to(part.parameter.device)
            continue
        whole = torch.empty(part.num_bytes, dtype=torch.uint8, device=part.parameter.device)
        chunk.store.read(chunk.offset + part.offset, whole)
        part.parameter.data = whole.view(part.dtype).as_strided(part.shape, part.stride)
    chunk.hollow.clear()


def bring_back_gradients(chunk: Chunk) -> None:
    """Give an offloaded chunk's parameters the gradients that wait below the device."""
    chunk.forget_dropped()
    for part in chunk.slices:
        if part.name in chunk.waiting:
            part.parameter.grad = chunk.waiting[part.name].whole()
    chunk.clear_gradients()


def add_state_dict_hooks(
    model: nn.Module, chunks: Sequence[Chunk], engine: Engine, undo: Undo
) -> None:
    """Let state dicts of the model show and accept real values of offloaded parameters.

    Those of a state dict are copies in host memory, all at once, and `load_state_dict` brings them
    all to the device; `protrain_runtime.save` and `load` take one buffer.
    """
    offloaded = offloaded_parameters(chunks)
    below = [chunk for chunk in chunks if chunk.store is not None]
    canonical = {parameter: name for name, parameter in model.named_parameters()}
    aliases = {
        name: canonical[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if canonical[parameter] in offloaded
    }

    def after_state_dict(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
        engine.settle("state_dict() was called")
        read: dict[str, torch.Tensor] = {}
        for alias, name in aliases.items():
            if prefix + alias not in state:
                continue
            if name not in read:
                read[name] = read_parameter(*offloaded[name])
            state[prefix + alias] = read[name]

    def before_load(*_: object) -> None:
        engine.settle("load_state_dict() was called")
        for chunk in below:
            bring_back(chunk)

    def after_load(*_: object) -> None:
        for chunk, part in offloaded.values():
            assert chunk.store is not None
            if chunk.sharding is not None:
                chunk.sharding.keep(part, part.parameter)
                continue
            values = flat_storage_order(part.parameter.detach())
            chunk.store.write(chunk.offset + part.offset, values.view(torch.uint8))
        for chunk in below:
            chunk.unbind(chunk.every_group)

    handles = (
        model.register_state_dict_post_hook(after_state_dict),
        model.register_load_state_dict_pre_hook(before_load),
        model.register_load_state_dict_post_hook(after_load),
    )
    undo.extend(handle.remove for handle in handles)
