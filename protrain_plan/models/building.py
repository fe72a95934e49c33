"""Functions for building models from any source.

Seeds and deterministic kernels, models without memory for their parameters, limits on their sizes,
and dtypes of parameters and computation from a workload's dtype and precision.
"""

import functools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, assert_never

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.profile import DType, Precision
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.devices import device as devices
from protrain_runtime.states.quantized import carry_scales, name_scales, packed_layers

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random states that building may use, and restore them after."""
    before = random.getstate()
    with _disable_current_modes():  # models are also built of fake tensors; states are real
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
    """Use deterministic kernels inside, or any. (cuBLAS needs its workspace size set before.)"""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


MAX_TENSORS = 100_000
"""Most parameter tensors of a configuration's model."""
MAX_PARAMETERS = 10**13
"""Most parameter elements: twenty times the largest published model."""


@contextmanager
def no_larger_than(most_bytes: int | None, *, source: str) -> Iterator[None]:
    """ProtrainError, naming the source, once modules built inside have more parameters.

    None: more than any configuration's model.
    """
    known = WeakTensorKeyDictionary()
    tensors = elements = num_bytes = 0

    def counted(_: nn.Module, __: str, parameter: Any) -> None:
        nonlocal tensors, elements, num_bytes
        if parameter is None or is_lazy(parameter) or parameter in known:
            return
        known[parameter] = None
        tensors += 1
        elements += parameter.numel()
        num_bytes += parameter.numel() * parameter.itemsize
        if most_bytes is not None and num_bytes > most_bytes:
            raise ProtrainError(
                "the factory cannot run without allocating its model, which takes more than the"
                f" {format_bytes(most_bytes)} allowed for reading a batch",
                source=source,
                fix="build the model of plain modules (nn.Linear, ...) in the factory, which are"
                " built without memory, or make its batches without looking at parameters",
            )
        if most_bytes is None and (tensors > MAX_TENSORS or elements > MAX_PARAMETERS):
            what = f"{MAX_TENSORS} tensors" if tensors > MAX_TENSORS else f"{MAX_PARAMETERS}"
            raise ProtrainError(
                f"the configuration describes a model with more than {what} of parameters",
                source=source,
                fix="check its numbers of layers and experts, and its widths",
            )

    with register_module_parameter_registration_hook(counted):
        yield


def moved(
    model: nn.Module, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> nn.Module:
    """`model.to(...)`, in place, also for fake tensors, which `Module.to` cannot exchange.

    To `meta`, parameters are exchanged as well: in `faking`, `Module.to` cannot move real ones.
    `dtype` applies to floating-point tensors; complex ones stay complex.
    """

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    tensors = (*model.parameters(), *model.buffers())
    leaves = device is not None and torch.device(device).type == "meta"
    if not leaves and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
        model._apply(converted)
        return model
    remake_tensors(
        model, lambda tensor: converted(tensor.detach()), make_scale=lambda scale: scale.to(device)
    )
    return model


def float_dtypes(model: nn.Module) -> tuple[torch.dtype, ...]:
    """The floating-point dtypes of the model's tensors, by bytes, without unpacked weights."""
    waiting = {layer.weight for _, layer in packed_layers(model)}
    found: Counter[torch.dtype] = Counter()
    for tensor in {*model.parameters(), *model.buffers()} - waiting:
        if tensor.is_floating_point():
            found[tensor.dtype] += tensor.numel() * tensor.itemsize
    return tuple(dtype for dtype, _ in found.most_common())


def remake_tensors(
    model: nn.Module,
    make: Callable[[torch.Tensor], torch.Tensor],
    *,
    make_scale: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Replace every parameter and buffer by `make(tensor)`, in the model's order.

    Tied parameters stay tied. Parameters stay parameters, and packed ones keep their scales, remade
    by `make_scale` (default: `make`).
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    scales: dict[int, torch.Tensor] = {}  # by identity: layers may share a table of codes

    def remade(scale: torch.Tensor) -> torch.Tensor:
        if id(scale) not in scales:
            scales[id(scale)] = (make_scale or make)(scale)
        return scales[id(scale)]

    for module in model.modules():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for place in places:
            for name, tensor in place.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    found = make(tensor)
                    if isinstance(tensor, nn.Parameter) and found is not tensor:
                        found = nn.Parameter(found, tensor.requires_grad)
                        carry_scales(tensor, found, remade)
                    made[tensor] = found
                place[name] = made[tensor]
        name_scales(module)


def parameter_dtype(dtype: DType, precision: Precision) -> torch.dtype:
    """The dtype of stored parameters; ProtrainError if the two are incompatible."""
    match precision:
        case "pure":
            return TORCH_DTYPES[dtype]
        case "autocast":
            stored, reason = torch.float32, "float32 parameters are cast to a narrower one"
        case "master":
            stored = TORCH_DTYPES[dtype]
            reason = "float32 copies stand for parameters of a narrower one"
        case _:
            assert_never(precision)
    if dtype == "float32":
        raise ProtrainError(
            f"{precision} needs the dtype bfloat16 or float16, got float32: {reason}",
            key="precision",
            fix="--dtype bfloat16, or --precision pure",
        )
    return stored


def stepped_dtype(dtype: DType, precision: Precision) -> DType:
    """The dtype of the optimizer's step."""
    return dtype if precision == "pure" else "float32"


def computing_in(model: nn.Module, dtype: DType, precision: Precision) -> nn.Module:
    """The model, with its forward under autocast if the precision requires it.

    Autocast belongs to the model: every caller computes the same. Its cache of cast weights is off:
    it would keep a copy of every parameter until the forward ends, also of evicted ones, and a
    recomputed block would not get it back.
    """
    if precision != "autocast":
        return model
    forward, narrow = model.forward, TORCH_DTYPES[dtype]

    @functools.wraps(forward)
    def under_autocast(*args: object, **kwargs: object) -> object:
        # At run time: a model may be built without memory for its parameters.
        device_type = next(p.device.type for p in model.parameters() if not p.is_meta)
        with torch.autocast(device_type, dtype=narrow, cache_enabled=False):
            return forward(*args, **kwargs)

    model.forward = under_autocast
    return model
