"""What every kind of model source needs to build: dtypes, and random states that are given back."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from protrain_plan.errors import ProtrainError
from protrain_plan.records.profile import DType
from protrain_plan.units import format_bytes
from protrain_runtime import devices

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The random states that building may use start from the seed, and are put back after."""
    before = random.getstate()
    with _disable_current_modes():  # models are built of fake tensors too; states are real
        kind, accelerators = devices.all_random_states()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            yield
    finally:
        random.setstate(before)
        with _disable_current_modes():
            devices.set_all_random_states(kind, accelerators)


@contextmanager
def kernels(*, deterministic: bool) -> Iterator[None]:
    """Inside, operators take deterministic kernels alone, or any: as a workload was profiled.

    cuBLAS has deterministic ones where its workspace has a size that it is told before its first.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


@contextmanager
def without_parameters() -> Iterator[None]:
    """Parameters of modules that are built inside come to be on `meta`, one after the other.

    Buffers are real, and so are all other tensors. A parameter that two modules share stays one.
    Modules may be converted and moved inside: parameters take the dtype, and stay where they are.
    """
    known = WeakTensorKeyDictionary()

    def moved(_: nn.Module, __: str, parameter: Any) -> nn.Parameter | None:
        if parameter is None or is_lazy(parameter) or parameter.is_meta:
            return None
        if parameter not in known:
            known[parameter] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        made: nn.Parameter = known[parameter]
        return made

    with _each_parameter(moved), replaced(nn.Module, "_apply", converted):
        yield


@contextmanager
def no_larger_than(most_bytes: int, *, source: str) -> Iterator[None]:
    """ProtrainError, naming the source, once modules that are built inside have more parameters."""
    known = WeakTensorKeyDictionary()
    total = 0

    def counted(_: nn.Module, __: str, parameter: Any) -> None:
        nonlocal total
        if parameter is None or is_lazy(parameter) or parameter in known:
            return
        known[parameter] = None
        total += parameter.numel() * parameter.itemsize
        if total > most_bytes:
            raise ProtrainError(
                "the factory cannot be run without memory for its model, and the model takes more"
                f" than the {format_bytes(most_bytes)} that may be taken to see a batch",
                source=source,
                fix="let the factory build the model of plain modules (nn.Linear, ...), which are"
                " built without memory, or make its batches without looking at parameters",
            )

    with _each_parameter(counted):
        yield


@contextmanager
def _each_parameter(hook: Callable[..., nn.Parameter | None]) -> Iterator[None]:
    handle = register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """`owner` has `value` under `name` inside, and what it had before afterwards."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def converted(module: nn.Module, convert: Any, recurse: bool = True) -> nn.Module:
    """In place of `Module._apply`, for parameters that are fake or on `meta`.

    PyTorch exchanges the first, which ties and optimizers would not see, and cannot move the
    second. Gradients are not looked at: a model that is being built has none.
    """
    for each in module.modules() if recurse else (module,):
        for parameter in each.parameters(recurse=False):
            if parameter.is_meta:
                dtype = convert(torch.empty(0, dtype=parameter.dtype)).dtype
                parameter.data = parameter.data.to(dtype)
            else:
                parameter.data = convert(parameter.data)
        for name, buffer in each.named_buffers(recurse=False):
            each._buffers[name] = convert(buffer)
    return module


def moved(
    model: nn.Module, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> nn.Module:
    """`model.to(...)`, in place, and for fake tensors too, which `Module.to` cannot exchange.

    `dtype` is for what is floating-point; complex tensors stay complex.
    """

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    tensors = (*model.parameters(), *model.buffers())
    if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
        model._apply(converted)
        return model
    made: dict[torch.Tensor, torch.Tensor] = {}  # a tied parameter stays one
    for module in model.modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in own:
            if tensor not in made:
                found = converted(tensor.detach())
                is_parameter = isinstance(tensor, nn.Parameter)
                made[tensor] = nn.Parameter(found, tensor.requires_grad) if is_parameter else found
            setattr(module, name, made[tensor])
    return model
