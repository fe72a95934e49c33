"""Offloaded parameters' values for whoever looks at the model: state dicts, reads, restoring."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import nn

from protrain_runtime.away import come_back, let_list
from protrain_runtime.chunks import Chunk, Slice, in_order_of, read_parameter
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


def bring_back(chunk: Chunk) -> None:
    """Give an offloaded chunk's parameters memory of their own again."""
    if not chunk.hollow:
        return
    assert chunk.store is not None
    for part in chunk.slices:
        if part.group not in chunk.hollow:
            continue
        come_back(part.parameter)
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


class _Listing:
    """Real values of offloaded parameters in state dicts, of the model or of a module in it.

    They are copies in host memory, and parameters that are tied share one, in one state dict.
    """

    def __init__(self, engine: Engine, offloaded: Mapping[nn.Parameter, tuple[Chunk, Slice]]):
        self._engine, self._offloaded = engine, offloaded
        self._target: ref[Any] | None = None  # the state dict that is being made
        self._read: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()

    def before(self, module: nn.Module, *_: object) -> None:
        self._engine.settle("state_dict() was called")
        for parameter in module._parameters.values():
            if parameter is not None:
                let_list(parameter)

    def after(self, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        if self._target is None or self._target() is not state:
            self._target = ref(state) if isinstance(state, OrderedDict) else None
            self._read.clear()
        for own, parameter in module._parameters.items():
            found = self._offloaded.get(parameter) if parameter is not None else None
            if found is None or prefix + own not in state:
                continue
            name = found[1].name
            value = self._read.get(name)
            if value is None:
                value = self._read[name] = read_parameter(*found)
            state[prefix + own] = value


def add_state_dict_hooks(
    model: nn.Module, chunks: Sequence[Chunk], engine: Engine, undo: Undo
) -> None:
    """Let state dicts of the model show and accept real values of offloaded parameters.

    Those of a state dict are copies in host memory, all at once, and `load_state_dict` brings them
    all to the device; `protrain_runtime.save` and `load` take one buffer.
    """
    offloaded = offloaded_parameters(chunks)
    below = [chunk for chunk in chunks if chunk.store is not None]
    listing = _Listing(engine, {part.parameter: (c, part) for c, part in offloaded.values()})

    def before_load(_: nn.Module, __: object, ___: str, metadata: Mapping[str, Any], *____: object):  # type: ignore[no-untyped-def]
        engine.settle("load_state_dict() was called")
        engine.outside("load_state_dict() was called")
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) replaces the parameters that the plan has placed:"
                " load without it, or before prepare()"
            )
        for chunk in below:
            bring_back(chunk)

    def after_load(*_: object) -> None:
        for chunk, part in offloaded.values():
            write_values(chunk, part, part.parameter)
        for chunk in below:
            chunk.unbind(chunk.every_group)

    own = {part.parameter for _, part in offloaded.values()}
    handles = [
        model.register_load_state_dict_pre_hook(before_load),
        model.register_load_state_dict_post_hook(after_load),
    ]
    for module in model.modules():
        if module is model or not own.isdisjoint(module._parameters.values()):
            handles.append(module.register_state_dict_pre_hook(listing.before))
            # PyTorch marks the hook, which a bound method does not take.
            handles.append(module.register_state_dict_post_hook(partial(listing.after)))
    undo.extend(handle.remove for handle in handles)


def write_values(chunk: Chunk, part: Slice, values: torch.Tensor) -> None:
    """Let the store have these values of an offloaded parameter.  # part.dtype [part.shape]"""
    assert chunk.store is not None
    if chunk.sharding is not None:
        chunk.sharding.keep(part, values)
        return
    flat = in_order_of(part, values)
    chunk.store.write(chunk.offset + part.offset, flat.view(torch.uint8))
