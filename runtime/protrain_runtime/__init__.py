"""The runtime of protrain-plan: loads a plan and executes it in training.

    model, optimizer = protrain_runtime.prepare(
        model, "plan.yaml", optimizer=partial(torch.optim.AdamW, lr=3e-4)
    )

Everything else of a training loop stays as it is, and computes what plain PyTorch computes.
"""

from protrain_plan.errors import OutOfMemoryError
from protrain_runtime.averaging import MovingAverage
from protrain_runtime.full_parameters import full_parameters
from protrain_runtime.masters import with_master_weights
from protrain_runtime.overruns import explain_memory
from protrain_runtime.preparation import prepare
from protrain_runtime.prepared import restore
from protrain_runtime.recording import record
from protrain_runtime.resuming import load
from protrain_runtime.saving import save

__all__ = [
    "MovingAverage",
    "OutOfMemoryError",
    "explain_memory",
    "full_parameters",
    "load",
    "prepare",
    "record",
    "restore",
    "save",
    "with_master_weights",
]
