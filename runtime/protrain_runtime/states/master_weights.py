"""Mixed precision by master weights: the optimizer steps on float32 copies of the parameters.

For a parameter p of lower precision, with its master m (at first p, exactly) and gradient g:

    m <- the optimizer's step on m with the gradient float32(g);  p <- m, rounded to p's dtype

The master is one of the parameter's optimizer states, "master", beside those of the user's
optimizer, which are float32 with it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from protrain_runtime.contract.program.program import PIECE_ALIGNMENT, in_blocks
from protrain_runtime.states.compositions import is_composed
from protrain_runtime.states.stepping import MASTERS_OF, OptimizerFactory, attributes_of

MASTER = "master"


def with_master_weights(
    factory: OptimizerFactory,
) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """A factory of optimizers with master weights, whose steps are those of `factory`'s.

    `prepare` does this itself under a plan of master precision. Plainly:

        optimizer = with_master_weights(partial(torch.optim.AdamW, lr=3e-4))(model.parameters())
    """
    make = partial(MasterOptimizer, factory=factory)
    setattr(make, MASTERS_OF, factory)
    return make


class MasterOptimizer(torch.optim.Optimizer):
    """The user's elementwise optimizer over float32 masters of its parameters.

    Parameters are stepped on in batches, each by one optimizer of the user's class. A batch is what
    has room for its float32 gradients: `room_elements` of them, or those of the largest parameter
    where that is more. All gradients at once would take memory that no plan counts; one parameter
    after the other would cost an optimizer and a call of its step for each, which is most of what
    small ones take. A parameter that float32 would not widen is its own master: of float32 itself,
    of float64, a complex one.
    """

    room_elements: int = 0

    def __init__(self, parameters: Iterable[Any], factory: OptimizerFactory) -> None:
        self._factory = factory
        super().__init__(parameters, {})
        dtypes = {_master_dtype(p.dtype) for group in self.param_groups for p in group["params"]}
        dummies = [  # frozen parameters may be of integers, such as packed weights
            nn.Parameter(values, requires_grad=values.is_floating_point() or values.is_complex())
            for values in (torch.zeros(1, dtype=dtype) for dtype in dtypes)
        ]
        made = factory([{"params": dummies}])
        self.kind, self.defaults = type(made), made.defaults
        for group in self.param_groups:
            for option, value in self.defaults.items():
                group.setdefault(option, value)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles step, too."""
        return {**super().__getstate__(), "_factory": self._factory, "kind": self.kind}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the masters, and round them to the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = _batches(self.param_groups, self.room_elements)
        # One room for all: memory that goes back to the system has to have its pages cleared anew.
        every = (one for batch in batches for one in batch)
        largest = max((one.stop for one in every if _is_narrow(one.parameter.grad)), default=0)
        room = torch.empty(0)
        for batch in batches:
            if room.numel() < largest or room.device != batch[0].parameter.device:
                room = torch.empty(largest, device=batch[0].parameter.device, dtype=torch.float32)
            self._step_on(batch, room)
        return loss

    def _step_on(self, batch: Sequence["_Due"], room: torch.Tensor) -> None:
        """Step on the masters of a batch; `room` holds their gradients.  # float32 [elements]"""
        groups: dict[int, dict[str, Any]] = {}
        masters: list[nn.Parameter] = []
        narrow: list[torch.Tensor] = []
        wide: list[torch.Tensor] = []
        for one in batch:
            values = self.state.get(one.parameter, {}).get(MASTER)
            if values is None:
                # The same tensor, if it is its own master.
                values = one.parameter.detach().to(_master_dtype(one.parameter.dtype))
            master, gradient = nn.Parameter(values), one.parameter.grad
            vars(master).update(attributes_of(one.parameter))
            assert gradient is not None
            if _is_narrow(gradient):  # a master has it as float32, in the room
                narrow.append(gradient)
                wide.append(room.as_strided(master.shape, master.stride(), one.start))
                master.grad = wide[-1]
            else:
                master.grad = gradient.to(master.dtype)
            masters.append(master)
            if one.group not in groups:
                options = self.param_groups[one.group].items()
                groups[one.group] = {k: v for k, v in options if k != "params"} | {"params": []}
            groups[one.group]["params"].append(master)
        if narrow:
            torch._foreach_copy_(wide, narrow)
        worker = self._factory(groups.values())
        for one, master in zip(batch, masters, strict=True):
            state = dict(self.state.get(one.parameter, {}))
            state.pop(MASTER, None)
            if state:
                worker.state[master] = state
        worker.step()
        lowest, highest = room.data_ptr(), room.data_ptr() + room.nbytes
        rounded: list[torch.Tensor] = []
        exact: list[torch.Tensor] = []
        for one, master in zip(batch, masters, strict=True):
            made = dict(worker.state[master])
            for key, value in made.items():
                # An optimizer may keep the gradient itself, where the next batch's will stand.
                plain = isinstance(value, torch.Tensor) and not is_composed(value)
                if plain and lowest <= value.data_ptr() < highest:
                    made[key] = value.clone()
            if one.parameter.dtype != master.dtype:
                made[MASTER] = master.detach()
                exact.append(made[MASTER])
                rounded.append(one.parameter)
            self.state[one.parameter] = made
        if rounded:
            torch._foreach_copy_(rounded, exact)

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


def _master_dtype(dtype: torch.dtype) -> torch.dtype:
    narrow = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    return torch.float32 if narrow else dtype


class _Due(NamedTuple):
    """A parameter that has a gradient, the number of its group, and its range of a room."""

    group: int
    parameter: nn.Parameter
    start: int
    stop: int


def _is_narrow(gradient: torch.Tensor | None) -> bool:
    """Whether it is copied to the room; a sparse one has a way of its own."""
    assert gradient is not None
    return gradient.dtype != _master_dtype(gradient.dtype) and gradient.layout == torch.strided


def _batches(groups: Sequence[Mapping[str, Any]], room_elements: int) -> list[list[_Due]]:
    """Batches of one device, of at most `room_elements` or one parameter."""
    every = ((number, p) for number, group in enumerate(groups) for p in group["params"])
    due = [(number, parameter) for number, parameter in every if parameter.grad is not None]
    limit = max([room_elements, *(parameter.numel() for _, parameter in due)])
    batches: list[list[_Due]] = []
    for group, parameter in due:
        last = batches[-1][-1] if batches else None
        start = 0 if last is None else in_blocks(last.stop, PIECE_ALIGNMENT)
        full = start + parameter.numel() > limit
        if last is None or full or last.parameter.device != parameter.device:
            batches.append([])
            start = 0
        batches[-1].append(_Due(group, parameter, start, start + parameter.numel()))
    return batches
