"""Mixed precision by master weights: the optimizer updates float32 copies of the parameters.

For a parameter p of lower precision, with its master m (at first p, exactly) and gradient g:

    m <- the optimizer's step on m with the gradient float32(g);  p <- m, rounded to p's dtype

The master is an optimizer state, "master", beside the user's optimizer's, which are float32, too.
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
    """A factory of optimizers with master weights that step as `factory`'s do.

    `prepare` applies it under a plan of master precision. In plain training:

        optimizer = with_master_weights(partial(torch.optim.AdamW, lr=3e-4))(model.parameters())
    """
    make = partial(MasterOptimizer, factory=factory)
    setattr(make, MASTERS_OF, factory)
    return make


class MasterOptimizer(torch.optim.Optimizer):
    """The user's elementwise optimizer over float32 masters of its parameters.

    Parameters are updated in batches, each by one optimizer of the user's class. A batch's float32
    gradients fit in `room_elements`, or are the largest parameter's if larger. All gradients at
    once would take uncounted memory; one parameter at a time would make and call an optimizer for
    each, most of the time of small ones. A parameter that float32 would not widen (float32,
    float64, complex) is its own master.
    """

    room_elements: int = 0

    def __init__(self, parameters: Iterable[Any], factory: OptimizerFactory) -> None:
        self._factory = factory
        super().__init__(parameters, {})
        dtypes = {_master_dtype(p.dtype) for group in self.param_groups for p in group["params"]}
        dummies = [  # frozen parameters may be integers, such as packed weights
            nn.Parameter(values, requires_grad=values.is_floating_point() or values.is_complex())
            for values in (torch.zeros(1, dtype=dtype) for dtype in dtypes)
        ]
        made = factory([{"params": dummies}])
        self.kind, self.defaults = type(made), made.defaults
        for group in self.param_groups:
            for option, value in self.defaults.items():
                group.setdefault(option, value)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles can step, too."""
        return {**super().__getstate__(), "_factory": self._factory, "kind": self.kind}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the masters, and round them to the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = _batches(self.param_groups, self.room_elements)
        # One buffer for all: returned memory needs its pages cleared again.
        every = (one for batch in batches for one in batch)
        largest = max((one.stop for one in every if _is_narrow(one.parameter.grad)), default=0)
        room = torch.empty(0)
        for batch in batches:
            if room.numel() < largest or room.device != batch[0].parameter.device:
                room = torch.empty(largest, device=batch[0].parameter.device, dtype=torch.float32)
            self._step_on(batch, room)
        return loss

    def _step_on(self, batch: Sequence["_Due"], room: torch.Tensor) -> None:
        """Update a batch's masters; `room` holds their gradients.  # float32 [elements]"""
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
            if _is_narrow(gradient):  # in the room, as float32
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
                # An optimizer may keep the gradient itself, whose memory the next batch reuses.
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
        """Load a `state_dict`; states keep their precision, unlike in torch, which rounds."""
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
    """A parameter with a gradient, its group's number, and its range of the room."""

    group: int
    parameter: nn.Parameter
    start: int
    stop: int


def _is_narrow(gradient: torch.Tensor | None) -> bool:
    """Whether the gradient is copied to the room; sparse ones are not."""
    assert gradient is not None
    return gradient.dtype != _master_dtype(gradient.dtype) and gradient.layout == torch.strided


def _batches(groups: Sequence[Mapping[str, Any]], room_elements: int) -> list[list[_Due]]:
    """Batches per device, each of at most `room_elements` or one parameter."""
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
