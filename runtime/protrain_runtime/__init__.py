"""The runtime of protrain-plan: loads a plan and executes it in training.

    model, optimizer = protrain_runtime.prepare(
        model, "plan.yaml", optimizer=partial(torch.optim.AdamW, lr=3e-4)
    )

Everything else of a training loop stays as it is, and computes what plain PyTorch computes.
"""

from protrain_plan.errors import OutOfMemoryError
from protrain_runtime.checkpoint.loading import load
from protrain_runtime.checkpoint.saving import save
from protrain_runtime.devices.memory_meter import return_freed_memory
from protrain_runtime.diagnostics.out_of_memory import explain_memory
from protrain_runtime.diagnostics.recording import record
from protrain_runtime.model.between_steps import MovingAverage, full_parameters
from protrain_runtime.model.prepared import restore
from protrain_runtime.preparation import compile_blocks, prepare
from protrain_runtime.states.master_weights import with_master_weights

__all__ = [
    "MovingAverage",
    "OutOfMemoryError",
    "compile_blocks",
    "explain_memory",
    "full_parameters",
    "load",
    "prepare",
    "record",
    "restore",
    "return_freed_memory",
    "save",
    "with_master_weights",
]
