"""Update rules: what an optimizer's step on a parameter keeps, and where the parameter may be cut.

An entry for an optimizer is one line in `protrain_plan.models.optimizers.OPTIMIZERS`: what it keeps
is not written down, but seen in a step on a small parameter, which tells it of any class of
`torch.optim` and of a user's.

Mixed precision is by master weights: the optimizer steps on float32 copies of the parameters. For
a parameter p of lower precision, with its master m (at first p, exactly) and gradient g:

    m <- the optimizer's step on m with the gradient float32(g);  p <- m, rounded to p's dtype

The master is one of the parameter's optimizer states, "master", beside those of the user's
optimizer, which are float32 with it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, overload

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from protrain_plan.errors import ProtrainError
from protrain_plan.program.program import PIECE_ALIGNMENT, in_blocks

OptimizerFactory = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """What an optimizer keeps of one parameter of a dtype.

    states   the elementwise ones by key: a value for every element, so that they lie in a chunk's
             store beside the parameters, are staged with them, and are cut where these are
    scalars  bytes of each of the others, such as AdamW's step, which stay in the process
    """

    states: Mapping[str, torch.dtype]
    scalars: tuple[int, ...]

    @staticmethod
    def of(
        factory: OptimizerFactory,
        dtype: torch.dtype = torch.float32,
        options: Mapping[str, Any] | None = None,
    ) -> "UpdateRule":
        """That of parameters of `dtype` in a group with these options."""
        dummy = nn.Parameter(torch.zeros(2, dtype=dtype))
        dummy.grad = torch.zeros(2, dtype=dtype)
        optimizer = factory([{**(options or {}), "params": [dummy]}])
        optimizer.step()
        kept = {k: v for k, v in optimizer.state[dummy].items() if isinstance(v, torch.Tensor)}
        return UpdateRule(
            {key: value.dtype for key, value in kept.items() if value.shape == dummy.shape},
            tuple(value.nbytes for value in kept.values() if value.shape != dummy.shape),
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of the elementwise states of one element."""
        return sum(dtype.itemsize for dtype in self.states.values())

    def scalar_bytes(self, *, block: int = 1) -> int:
        """Bytes of the other states of one parameter, each in whole blocks of `block` bytes."""
        return sum(in_blocks(num_bytes, block) for num_bytes in self.scalars)


def check_elementwise(factory: OptimizerFactory, dtype: torch.dtype) -> None:
    """ProtrainError where a step on a matrix is another than steps on its rows, or these fail."""
    values = torch.linspace(-1, 1, 4 * PIECE_ALIGNMENT).reshape(4, PIECE_ALIGNMENT).to(dtype)
    whole = _stepped(factory, values)
    try:
        rows = [_stepped(factory, row) for row in values]
    except ValueError as error:
        raise _not_elementwise(whole, str(error)) from error
    parts = [[row.param_groups[0]["params"][0] for row in rows]]
    wholes = [whole.param_groups[0]["params"][0]]
    state = whole.state[wholes[0]]
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            wholes.append(value)
            parts.append([row.state[row.param_groups[0]["params"][0]].get(key) for row in rows])
    for one, several in zip(wholes, parts, strict=True):
        if any(part is None for part in several) or not torch.equal(one, torch.stack(several)):
            raise _not_elementwise(whole, "one element's update depends on others")


def check_separable(factory: OptimizerFactory, dtype: torch.dtype) -> None:
    """ProtrainError where a step on two parameters is another than a step on each."""
    together = _stepped_twice(factory, dtype, separately=False)
    apart = _stepped_twice(factory, dtype, separately=True)
    if not _same(together, apart):
        raise ProtrainError(
            f"{type(together).__name__} cannot update parameters in backward, chunk by chunk: a"
            " step on all of them is another than a step on each",
            fix="an optimizer that looks at one parameter at a time, such as AdamW or SGD; or plan"
            " with --clip: updates then come after backward",
        )


def _stepped_twice(
    factory: OptimizerFactory, dtype: torch.dtype, *, separately: bool
) -> torch.optim.Optimizer:
    """The optimizer of two matrices after two steps on both of them."""
    values = torch.linspace(-1, 1, 4 * PIECE_ALIGNMENT).reshape(4, PIECE_ALIGNMENT).to(dtype)
    both = [nn.Parameter(values.clone()), nn.Parameter(2 * values.flip(0))]
    optimizer = factory([{"params": both}])
    (group,) = optimizer.param_groups
    for step in range(2):
        for parameter in both:
            parameter.grad = (parameter.detach() + step).flip(-1)
        for parameters in [[one] for one in both] if separately else [both]:
            group["params"] = parameters
            optimizer.step()
        group["params"] = both
    return optimizer


def _same(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Whether two optimizers have the same parameters, states and options, to the bit."""
    kept, others = one.state_dict(), other.state_dict()
    pairs = [
        pair
        for groups in zip(one.param_groups, other.param_groups, strict=True)
        for pair in zip(*(group["params"] for group in groups), strict=True)
    ]
    leaves, more = tree_leaves(kept), tree_leaves(others)
    return (
        all(torch.equal(*pair) for pair in pairs)
        and len(leaves) == len(more)
        and all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(leaves, more, strict=True)
        )
    )


def _stepped(factory: OptimizerFactory, values: torch.Tensor) -> torch.optim.Optimizer:
    """The optimizer of one parameter, after a step."""
    parameter = nn.Parameter(values.clone())
    parameter.grad = values.flip(-1) + 0.25
    optimizer = factory([{"params": [parameter]}])
    optimizer.step()
    return optimizer


def _not_elementwise(optimizer: torch.optim.Optimizer, problem: str) -> ProtrainError:
    return ProtrainError(
        f"{type(optimizer).__name__} cannot update a parameter in pieces: {problem}",
        fix="an elementwise optimizer, such as AdamW or SGD; or a plan whose states stay on the"
        " device",
    )


MASTER = "master"


def with_master_weights(
    factory: OptimizerFactory,
) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """A factory of optimizers with master weights, whose steps are those of `factory`'s.

    `prepare` does this itself under a plan of master precision. Plainly:

        optimizer = with_master_weights(partial(torch.optim.AdamW, lr=3e-4))(model.parameters())
    """
    return partial(MasterOptimizer, factory=factory)


class MasterOptimizer(torch.optim.Optimizer):
    """The user's elementwise optimizer over float32 masters of its parameters.

    Parameters are stepped on in batches, each by one optimizer of the user's class. A batch is what
    has room for its float32 gradients: `room_elements` of them, or those of the largest parameter
    where that is more. All gradients at once would be memory that nobody counts on; one parameter
    after the other would cost an optimizer and a call of its step for each, which is most of what
    small ones take. A parameter that float32 would not widen is its own master: of float32 itself,
    of float64, a complex one.
    """

    room_elements: int = 0

    def __init__(self, parameters: Iterable[Any], factory: OptimizerFactory) -> None:
        self._factory = factory
        super().__init__(parameters, {})
        dtypes = {_master_dtype(p.dtype) for group in self.param_groups for p in group["params"]}
        dummies = [nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in dtypes]
        self.defaults = factory([{"params": dummies}]).defaults
        for group in self.param_groups:
            for option, value in self.defaults.items():
                group.setdefault(option, value)

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
        due = (
            (number, parameter)
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
        )
        batches = _batches(list(due), self.room_elements)
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
        states: list[dict[str, Any]] = []
        narrow: list[torch.Tensor] = []
        wide: list[torch.Tensor] = []
        for one in batch:
            state: dict[str, Any] = dict(self.state.get(one.parameter, {}))
            values = state.pop(MASTER, None)
            if values is None:
                # The same tensor, if it is its own master.
                values = one.parameter.detach().to(_master_dtype(one.parameter.dtype))
            master, gradient = nn.Parameter(values), one.parameter.grad
            assert gradient is not None
            if _is_narrow(gradient):  # a master has it as float32, in the room
                narrow.append(gradient)
                wide.append(room.as_strided(master.shape, master.stride(), one.start))
                master.grad = wide[-1]
            else:
                master.grad = gradient.to(master.dtype)
            masters.append(master)
            states.append(state)
            if one.group not in groups:
                options = self.param_groups[one.group].items()
                groups[one.group] = {k: v for k, v in options if k != "params"} | {"params": []}
            groups[one.group]["params"].append(master)
        if narrow:
            torch._foreach_copy_(wide, narrow)
        worker = self._factory(groups.values())
        for master, state in zip(masters, states, strict=True):
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
                if isinstance(value, torch.Tensor) and lowest <= value.data_ptr() < highest:
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


def _batches(due: Sequence[tuple[int, nn.Parameter]], room_elements: int) -> list[list[_Due]]:
    """Cut into batches of one device each, of at most `room_elements` or one parameter, in order.

    Gradients begin where tensors of their own might (see PIECE_ALIGNMENT).
    """
    limit = max([room_elements, *(parameter.numel() for _, parameter in due)])
    batches: list[list[_Due]] = []
    for group, parameter in due:
        last = batches[-1][-1] if batches else None
        start = 0 if last is None else -(-last.stop // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
        full = start + parameter.numel() > limit
        if last is None or full or last.parameter.device != parameter.device:
            batches.append([])
            start = 0
        batches[-1].append(_Due(group, parameter, start, start + parameter.numel()))
    return batches
