"""An optimizer that a user might write: a slow step now and then."""

from typing import Any

import torch


class LowRank(torch.optim.Optimizer):
    """As GaLore does: a matrix's momentum in a subspace, of an SVD of the gradient now and then.

    It is computed `times` times, so that no busy machine hides which step is slow.
    """

    def __init__(
        self, parameters: Any, lr: float = 1e-2, rank: int = 4, every: int = 2, times: int = 1
    ) -> None:
        super().__init__(parameters, {"lr": lr, "rank": rank, "every": every, "times": times})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if parameter.dim() == 2:
                    number = state["step"] = state.get("step", -1) + 1
                    if number % group["every"] == 0:
                        for _ in range(group["times"]):
                            _, _, rows = torch.linalg.svd(gradient.float(), full_matrices=False)
                        state["basis"] = rows[: group["rank"]].to(gradient.dtype)
                    gradient = gradient @ state["basis"].T
                momentum = state.setdefault("momentum", torch.zeros_like(gradient))
                update = momentum.mul_(0.9).add_(gradient)
                if parameter.dim() == 2:
                    update = update @ state["basis"]
                parameter.add_(update, alpha=-group["lr"])
