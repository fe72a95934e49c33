"""What operators hold in memory only while they run, which fake tensors cannot show, by device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from protrain_plan.profiling.cpu_workspaces import CPU_WORKSPACES, packed_dtypes
from protrain_plan.profiling.cuda_workspaces import CUDA_WORKSPACES
from protrain_plan.profiling.operator_calls import OperatorCall, Workspace
from protrain_plan.program import BLOCK_BYTES, in_blocks
from protrain_plan.records.hardware import Device, is_accelerator
from protrain_runtime.trees import tensors_in


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """How a device's allocator counts: blocks of `block_bytes`, workspaces by operator.

    `python_scalars`: a Python number that meets a tensor becomes a tensor in the device's memory,
    which autograd keeps if a gradient needs it (true of a CPU, whose memory is the host's).
    `packed`: dtypes whose operands of attention a processor may lay out anew.
    """

    workspaces: Mapping[Any, Workspace]
    block_bytes: int
    python_scalars: bool
    num_threads: int
    packed: frozenset[torch.dtype] = frozenset()

    def rounded(self, num_bytes: int) -> int:
        """What a storage of `num_bytes` takes."""
        return in_blocks(num_bytes, self.block_bytes)

    def workspace(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """What `func` takes besides its inputs and outputs while it runs."""
        formula = self.workspaces.get(func)
        if formula is None:
            return 0
        call = OperatorCall(
            func=func,
            args=args,
            kwargs=kwargs,
            outputs=tuple(tensors_in(result)),
            num_threads=self.num_threads,
            packed=self.packed,
        )
        return self.rounded(formula(call))


def allocator_of(device: Device) -> Allocator:
    """How the allocator of `device` counts.

    What operators of other accelerators hold while they run is not known: CUDA's stand for theirs,
    where a model is sketched that will be measured. Estimates are refused (`estimated`).
    """
    if is_accelerator(device.kind):
        return Allocator(
            workspaces=CUDA_WORKSPACES,
            block_bytes=BLOCK_BYTES,
            python_scalars=False,
            num_threads=1,  # no kernel of a card cares
        )
    return Allocator(
        workspaces=CPU_WORKSPACES,
        block_bytes=1,
        python_scalars=True,
        num_threads=device.num_threads,
        packed=packed_dtypes(device.name),
    )
