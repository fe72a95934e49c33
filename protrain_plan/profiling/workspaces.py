"""What operators hold in memory only while they run, which fake tensors cannot show, by device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from protrain_plan.hardware.probe import processor_name
from protrain_plan.profiling.cpu_workspaces import CPU_WORKSPACES
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
    `is_here`: operators can be called on the device itself, so that workspaces can be measured.
    """

    workspaces: Mapping[Any, Workspace]
    block_bytes: int
    python_scalars: bool
    num_threads: int
    is_here: bool = False

    def rounded(self, num_bytes: int) -> int:
        """What a storage of `num_bytes` takes."""
        return in_blocks(num_bytes, self.block_bytes)

    def workspace(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """What `func` takes besides its inputs and outputs while it runs, at most."""
        formula = self.workspaces.get(func)
        if formula is None:
            return 0
        call = OperatorCall(
            func=func,
            args=args,
            kwargs=kwargs,
            outputs=tuple(tensors_in(result)),
            num_threads=self.num_threads,
        )
        return self.rounded(formula(call))


def is_this_machine(device: Device) -> bool:
    """Whether this is the processor at hand, with the threads that PyTorch has here.

    A processor is known by its name alone, as the system tells it.
    """
    here = (processor_name(), torch.get_num_threads())
    return not is_accelerator(device.kind) and (device.name, device.num_threads) == here


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
        is_here=is_this_machine(device),
    )
