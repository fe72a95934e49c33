"""What every kind of model source needs to build: dtypes, and random states that are given back."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from protrain_plan.records.profile import DType
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
