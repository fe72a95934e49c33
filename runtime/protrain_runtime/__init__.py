"""The runtime of protrain-plan: loads a plan and executes it in training.

    model, optimizer = protrain_runtime.prepare(
        model, "plan.yaml", optimizer=partial(torch.optim.AdamW, lr=3e-4)
    )

The rest of the training loop does not change, and results equal plain PyTorch's.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protrain_runtime.checkpoint.loading import load
    from protrain_runtime.checkpoint.pretrained import save_pretrained
    from protrain_runtime.checkpoint.saving import save
    from protrain_runtime.contract.errors import OutOfMemoryError
    from protrain_runtime.devices.memory_meter import return_freed_memory
    from protrain_runtime.diagnostics.out_of_memory import explain_memory
    from protrain_runtime.diagnostics.recording import record
    from protrain_runtime.model.between_steps import MovingAverage, full_parameters
    from protrain_runtime.model.prepared import restore
    from protrain_runtime.preparation import compile_blocks, prepare
    from protrain_runtime.states.absent import without_parameters
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
    "save_pretrained",
    "with_master_weights",
    "without_parameters",
]

# Imported when first asked for: `protrain_runtime.contract` does not wait for PyTorch.
_HOMES = {
    "MovingAverage": "model.between_steps",
    "OutOfMemoryError": "contract.errors",
    "compile_blocks": "preparation",
    "explain_memory": "diagnostics.out_of_memory",
    "full_parameters": "model.between_steps",
    "load": "checkpoint.loading",
    "prepare": "preparation",
    "record": "diagnostics.recording",
    "restore": "model.prepared",
    "return_freed_memory": "devices.memory_meter",
    "save": "checkpoint.saving",
    "save_pretrained": "checkpoint.pretrained",
    "with_master_weights": "states.master_weights",
    "without_parameters": "states.absent",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
