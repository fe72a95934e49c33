"""Mixed precision by master weights: the optimizer steps on float32 copies of the parameters.

For a parameter p of lower precision, with its master m (at first p, exactly) and gradient g:

    m <- the optimizer's step on m with the gradient float32(g);  p <- m, rounded to p's dtype

The master is one of the parameter's optimizer states, "master", beside those of the user's
optimizer, which are float32 with it.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, overload

import torch
from torch import nn

from protrain_runtime.chunks import OptimizerFactory

MASTER = "master"


def with_master_weights(
    factory: OptimizerFactory,
) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """A factory of optimizers with master weights, whose steps are those of `factory`'s.

    `prepare` does this itself under a plan of master precision. Plainly:

        optimizer = with_master_weights(partial(torch.optim.AdamW, lr=3e-4))(model.parameters())
    """

    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return MasterOptimizer(parameters, factory)

    return make


class MasterOptimizer(torch.optim.Optimizer):
    """The user's elementwise optimizer over float32 masters of its parameters.

    Parameters are stepped on one at a time: float32 copies of all gradients at once would be
    memory that nobody counts on. A float32 parameter is its own master.
    """

    def __init__(self, parameters: Iterable[Any], factory: OptimizerFactory) -> None:
        self._factory = factory
        dummy = nn.Parameter(torch.zeros(1))
        super().__init__(parameters, factory([{"params": [dummy]}]).defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the masters, and round them to the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_on(parameter, options)
        return loss

    def _step_on(self, parameter: nn.Parameter, options: dict[str, Any]) -> None:
        state: dict[str, Any] = dict(self.state.get(parameter, {}))
        own = parameter.dtype == torch.float32
        values = parameter.detach() if own else state.pop(MASTER, None)
        if values is None:
            values = parameter.detach().float()
        master = nn.Parameter(values)
        assert parameter.grad is not None
        master.grad = parameter.grad.float()
        worker = self._factory([{**options, "params": [master]}])
        if state:
            worker.state[master] = state
        worker.step()
        made = dict(worker.state[master])
        if not own:
            parameter.copy_(values)
            made[MASTER] = values
        self.state[parameter] = made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; states keep their own precision, which torch would round."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(saved, own, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor):
                    device = self.state[parameter][key].device
                    self.state[parameter][key] = value.to(device, copy=True)
