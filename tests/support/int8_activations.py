"""An activation option of one's own: int8 copies of what a block saves for backward.

What a new option takes: this file, with its executor, and the entry at its end.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from protrain_plan.records import ActivationForm
from protrain_runtime.activations.forms import Code, outer_hooks

GROUP = 64
"""Elements that share a scale."""


@dataclass(frozen=True)
class Int8Copy:
    """A tensor's values as `int8 x scale`; both are kept by the hooks around the block."""

    values: object  # int8 [groups, GROUP]
    scales: object  # [groups, 1], of the tensor's dtype
    shape: torch.Size


def quantised(tensor: Tensor) -> tuple[Tensor, Tensor]:
    flat = tensor.detach().reshape(-1, GROUP)
    scales = flat.abs().amax(1, keepdim=True).div_(127).clamp_(min=1e-12)
    return (flat / scales).round_().to(torch.int8), scales


def keep_int8(forward: Code, module: nn.Module) -> Code:
    """The executor: around the forward, saved floating-point activations become int8 copies."""

    def run(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with _copying(module):
            return forward(*args, **kwargs)

    return run


def _copying(module: nn.Module) -> AbstractContextManager[None]:
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    keep, bring_back = outer_hooks()
    # A tensor that several operators save is copied once. Nothing is held here: a storage's
    # address is another's when it has died.
    made: dict[tuple[object, ...], tuple[StorageWeakRef, Int8Copy]] = {}

    def pack(tensor: Tensor) -> object:
        storage = tensor.untyped_storage()
        if not tensor.is_floating_point() or tensor.numel() % GROUP or tensor.numel() < 16 * GROUP:
            return keep(tensor)
        if storage._cdata in parameters:
            return keep(tensor)  # a view of a chunk's buffer, which fetches bring back
        place = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        if place in made and not made[place][0].expired():
            return made[place][1]
        values, scales = quantised(tensor)
        copy = Int8Copy(keep(values), keep(scales), tensor.shape)
        made[place] = StorageWeakRef(storage), copy
        return copy

    def unpack(kept: object) -> Tensor:
        if not isinstance(kept, Int8Copy):
            return bring_back(kept)
        values, scales = bring_back(kept.values), bring_back(kept.scales)
        return (values * scales).reshape(kept.shape)

    return saved_tensors_hooks(pack, unpack)


INT8 = ActivationForm(
    name="int8",
    keeps="int8 copies of all that autograd saves, with a scale for every 64 values",
    executor="tests.support.int8_activations:keep_int8",
    recomputes=False,
    exactness="approximate",
)
