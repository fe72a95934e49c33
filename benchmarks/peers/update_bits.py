"""AdamW's step on an accelerator beside the same step on its host: how many bits they share.

The host's kernel computes in float32 vectors, CUDA's takes the learning rate, the betas and epsilon
in float64 (aten/src/ATen/native/cpu/FusedAdamKernel.cpp and cuda/fused_adam_utils.cuh).
"""

from typing import Any

import torch

from benchmarks.peers import accelerators
from protrain_runtime.contract.records.hardware import DeviceKind

NUM_ELEMENTS = 2**20
NUM_STEPS = (1, 10)
KERNELS: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}}


def updates(device: DeviceKind) -> dict[str, Any]:
    """Shares of the elements whose bits differ from the host's fused AdamW, by kernel and step."""
    card = accelerators.found(device)
    found: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        start = torch.randn(NUM_ELEMENTS).to(dtype)
        steppers = {
            name: _Stepper(start.to(where), options)
            for name, (where, options) in {
                "host": (torch.device("cpu"), KERNELS["fused"]),
                **{name: (card, options) for name, options in KERNELS.items()},
            }.items()
        }
        for number in range(1, max(NUM_STEPS) + 1):
            gradient = (torch.randn(NUM_ELEMENTS) * 0.01).to(dtype)
            for stepper in steppers.values():
                stepper.step(gradient)
            if number in NUM_STEPS:
                host = steppers["host"].tensors()
                for kernel in KERNELS:
                    differing = {
                        name: (host[name] != value).float().mean().item()
                        for name, value in steppers[kernel].tensors().items()
                    }
                    row = {"dtype": str(dtype).removeprefix("torch."), "kernel": kernel}
                    found.append({**row, "step": number, "differing": differing})
    return {"rows": found}


class _Stepper:
    def __init__(self, start: torch.Tensor, options: dict[str, bool]) -> None:
        self._parameter = start.clone().requires_grad_()
        self._optimizer = torch.optim.AdamW([self._parameter], lr=1e-3, **options)  # type: ignore[arg-type]

    def step(self, gradient: torch.Tensor) -> None:
        self._parameter.grad = gradient.to(self._parameter.device, copy=True)
        self._optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the step has changed, on the host."""
        state = self._optimizer.state[self._parameter]
        moments = {name: state[name].cpu() for name in ("exp_avg", "exp_avg_sq")}
        return {"parameters": self._parameter.detach().cpu(), **moments}
