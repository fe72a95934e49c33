"""Parameters without memory: on `meta` while a model is built, with places once it is prepared.

`without_parameters` builds a model with parameters on `meta` and real buffers. `give_places` puts
parameters in their planned tiers before they have values; offloaded ones hold nothing on the
device. A parameter stays the same object for optimizers, ties and attributes.
"""

import os
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils import swap_tensors
from torch.utils.weak import WeakTensorKeyDictionary

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.states.chunks import refuse_reading
from protrain_runtime.states.quantized import carry_scales, name_scales, packed_layers
from protrain_runtime.states.stand_ins import Elsewhere, come_back, hollow, send_away

_BUILD_OTHERWISE = (
    "build the model in a function that prepare() calls, prepare(make_model, plan, ...), or inside"
    " `with protrain_runtime.without_parameters():`, which leave buffers real"
)
_NO_VALUES = "{!r} has no values yet: prepare() reads them when all is in place"


@contextmanager
def without_parameters(*, adapters: bool = True) -> Iterator[None]:
    """Parameters of modules built inside go to `meta`, one by one.

    All other tensors are real, with `adapters` also those that PEFT adds to a model. Shared
    parameters stay shared. Modules may be converted and moved, inside and until they have values:
    parameters take the dtype and stay on `meta`.
    """
    known = WeakTensorKeyDictionary()

    def moved(module: nn.Module, _: str, parameter: Any) -> Any:
        if parameter is None or is_lazy(parameter) or parameter.is_meta:
            return None
        if adapters and _is_adding_adapters():
            return None
        if parameter not in known:
            absent = parameter.to("meta")
            if isinstance(absent, nn.Parameter):  # of a class of its own: to be packed
                absent.__dict__.update(parameter.__dict__)
            else:
                absent = nn.Parameter(absent, parameter.requires_grad)
            known[parameter] = absent
        module.__dict__["_apply"] = partial(_apply, module)
        return known[parameter]

    with (
        register_module_parameter_registration_hook(moved),
        replaced(nn.Module, "_apply", converted),
    ):
        yield


_ADDING = ("inject_adapter", "cast_adapter_dtype")
"""PEFT's functions that make an adapter's parameters, and remake them in float32."""


def _is_adding_adapters() -> bool:
    """Whether PEFT, imported from anywhere, is adding adapters to a model."""
    frame = sys._getframe() if "peft" in sys.modules else None
    while frame is not None:
        where = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name in _ADDING and where.startswith("peft."):
            return True
        frame = frame.f_back
    return False


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` inside, and restored afterwards."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def converted(module: nn.Module, convert: Any, recurse: bool = True) -> nn.Module:
    """Replace `Module._apply` for fake parameters and parameters on `meta`.

    PyTorch exchanges the former, unseen by ties and optimizers, and cannot move the latter.
    Gradients are ignored: a model being built has none.
    """
    for each in module.modules() if recurse else (module,):
        for parameter in each.parameters(recurse=False):
            if parameter.is_meta:
                dtype = convert(torch.empty(0, dtype=parameter.dtype)).dtype
                parameter.data = parameter.data.to(dtype)
            else:
                found = convert(parameter.data)
                # Adapters follow the weights beside them, which have no device.
                parameter.data = parameter.data.to(found.dtype) if found.is_meta else found
        for name, buffer in each.named_buffers(recurse=False):
            each._buffers[name] = convert(buffer)
    return module


def _apply(module: nn.Module, convert: Any, recurse: bool = True) -> nn.Module:
    """Replace `Module._apply` of a module while it has parameters on `meta`."""
    if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return converted(module, convert, recurse)
    del module.__dict__["_apply"]
    module._apply(convert, recurse)
    return module


@contextmanager
def parameters_in_files(directory: Path) -> Iterator[None]:
    """Parameters of modules built inside lie in unnamed files, mapped into memory.

    Constructors write to them and draw the same numbers; the system can page this memory to disk,
    and does not count it as the process's. A parameter stays the same object. Parameters with
    shared memory stay in memory.
    """
    apply: Any = nn.Module._apply
    known = WeakTensorKeyDictionary()  # places of parameters in files

    def to_file(parameter: Any) -> None:
        if parameter is None or is_lazy(parameter):
            return
        if parameter.device.type != "cpu" or parameter.nbytes < _FILE_FROM:
            return
        storage = parameter.untyped_storage()
        alone = torch._C._storage_Use_Count(storage._cdata) <= 2  # the parameter, and this name
        if alone and storage.data_ptr() != known.get(parameter):
            parameter.data = _in_file(parameter.data, directory)
            known[parameter] = parameter.untyped_storage().data_ptr()

    def applied(module: nn.Module, convert: Any, recurse: bool = True) -> nn.Module:
        apply(module, convert, recurse)
        for parameter in module.parameters(recurse=False):
            to_file(parameter)
        return module

    with (
        register_module_parameter_registration_hook(lambda *given: to_file(given[-1])),
        replaced(nn.Module, "_apply", applied),
    ):
        yield


_FILE_FROM = 2**16
"""Least bytes of a parameter in a file."""


def _in_file(values: torch.Tensor, directory: Path) -> torch.Tensor:
    """A copy in a file of its own, removed with the copy's last reference."""
    size = values.untyped_storage().nbytes()
    try:
        with TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # else a full disk would fault later
            name = f"/proc/self/fd/{file.fileno()}"
            memory = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
    except OSError as error:
        raise ProtrainError(
            f"no room for a parameter of {format_bytes(size)}: {error.strerror}",
            source=str(directory),
            fix="free some space there, or name another directory with spill_directory=",
        ) from error
    typed = memory.view(values.dtype)
    copy = typed.as_strided(values.shape, values.stride(), values.storage_offset())
    return copy.copy_(values)


def take_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Take the values of host parameters, by first name; the parameters are then on `meta`."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.device.type == "cpu":
            found[name] = parameter.data
            made: Any = torch.Tensor._make_subclass(
                type(parameter), parameter.data.to("meta"), parameter.requires_grad
            )
            made.__dict__.update(parameter.__dict__)
            swap_tensors(parameter, made)
    return found


def absent_parameters(model: nn.Module) -> set[str]:
    """The parameters on `meta`, by first name."""
    return {name for name, parameter in model.named_parameters() if parameter.is_meta}


def give_places(
    model: nn.Module, device: torch.device, below: Set[nn.Parameter]
) -> Callable[[], None]:
    """Move all tensors of the model to the device, those on `meta` without values.

    Parameters `below` the device hold nothing: their chunk sends them to its store. Returns the
    undo. ProtrainError for a tensor whose values are unknown.
    """
    undo = ExitStack()
    try:
        _place_buffers(model, device, undo)
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                shape, stride, dtype = parameter.shape, parameter.stride(), parameter.dtype
                away = parameter in below
                values = (
                    hollow(dtype, device, shape)
                    if away
                    else torch.empty_strided(shape, stride, dtype=dtype, device=device)
                )
                undo.callback(_exchange(parameter, values))
                if away:
                    refuse = partial(refuse_reading, why=_NO_VALUES)
                    place = Elsewhere(
                        name=name, stride=stride, bring=refuse, values=partial(refuse, name)
                    )
                    send_away((parameter, place))
                    undo.callback(come_back, parameter)
            elif parameter.device != device:
                undo.callback(setattr, parameter, "data", parameter.data)
                parameter.data = parameter.data.to(device)
        for _, layer in packed_layers(model):
            undo.callback(name_scales, layer)
            name_scales(layer)
    except BaseException:
        undo.close()
        raise
    return undo.close


@contextmanager
def holding_nothing(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give parameters on `meta` their shapes on the device inside; they are never read."""
    with ExitStack() as undo:
        for parameter in model.parameters():
            if parameter.is_meta:
                values = hollow(parameter.dtype, device, parameter.shape)
                undo.callback(_exchange(parameter, values))
        yield


def _exchange(parameter: nn.Parameter, values: torch.Tensor) -> Callable[[], None]:
    """Give a parameter on `meta` these values; returns the undo."""
    made: Any = torch.Tensor._make_subclass(type(parameter), values, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    carry_scales(parameter, made, partial(torch.empty_like, device=values.device))
    swap_tensors(parameter, made)  # `made` is on `meta` now
    return partial(swap_tensors, parameter, made)


def _place_buffers(model: nn.Module, device: torch.device, undo: ExitStack) -> None:
    """Put buffers on the device; those in checkpoints without values."""
    made: dict[int, torch.Tensor] = {}  # by identity: modules may share a buffer
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise _lost(f"attribute '{path}.{key}'")
        lost = {
            key
            for key, buffer in module.named_buffers(recurse=False)
            if buffer.is_meta and key in module._non_persistent_buffers_set
        }
        rebuilt = _rebuilt(model, path, module, lost) if lost else {}
        for key, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in made:
                if not buffer.is_meta:
                    made[id(buffer)] = buffer.to(device)
                elif key in rebuilt:
                    made[id(buffer)] = rebuilt[key].to(device)
                else:
                    made[id(buffer)] = torch.empty_like(buffer, device=device)
            undo.callback(module._buffers.__setitem__, key, buffer)
            module._buffers[key] = made[id(buffer)]


def _rebuilt(
    model: nn.Module, path: str, module: nn.Module, keys: Set[str]
) -> dict[str, torch.Tensor]:
    """The module's buffers that transformers recomputes; ProtrainError for others.

    Its models initialise tables of rotary embeddings and positions with the weights. A buffer
    counts as recomputed if two different initial fillings end in the same bytes.
    """
    owner: Any = None  # the innermost transformers model with the module
    for name, each in model.named_modules():
        if hasattr(each, "_init_weights") and f"{path}.".startswith(f"{name}." if name else ""):
            owner = each
    own = {key: module._buffers[key] for key in keys}
    runs: list[dict[str, torch.Tensor]] = []
    try:
        for first in (0, 1) if owner is not None else ():
            for key, buffer in own.items():
                assert buffer is not None
                module._buffers[key] = torch.full_like(buffer, first, device="cpu")
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                owner._init_weights(module)
            runs.append({key: module._buffers[key] for key in keys})  # type: ignore[misc]
    finally:
        module._buffers.update(own)
    for key in keys:
        if not runs or not torch.equal(runs[0][key], runs[1][key]):
            raise _lost(f"buffer '{path}.{key}'")
    return runs[0]


def _lost(what: str) -> ProtrainError:
    return ProtrainError(
        f"the {what} is on meta, and checkpoints do not have it: its values are unknown",
        fix=_BUILD_OTHERWISE,
    )
