"""Pieces: ranges of an offloaded chunk on their way through the optimizer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.program import PIECE_ALIGNMENT, in_blocks
from protrain_runtime.chunks import Chunk, OptimizerFactory, Slice
from protrain_runtime.masters import MasterOptimizer
from protrain_runtime.stores import HostStore
from protrain_runtime.update_team import UpdateTeam, ranges
from protrain_runtime.waiting import scaled

_PARAMETERS, _GRADIENTS = "parameters ", "gradients "
"""Stand for these among the elementwise states, whose keys are names."""


@dataclass(frozen=True, slots=True)
class _Due:
    """The gradient of the elements of a parameter that a piece covers, as it lies in memory."""

    part: Slice
    low: int
    high: int
    elements: torch.Tensor  # [high - low]
    factors: Sequence[torch.Tensor]  # that it is to be multiplied by, one after the other


@dataclass(frozen=True, slots=True)
class _Range:
    """What one optimizer of the user's steps on: runs of parameters, and their gradients' factors.

    Ranges share nothing, so that each may be stepped on by a thread of its own.
    """

    worker: torch.optim.Optimizer
    shadows: list[tuple[nn.Parameter, Slice, int, int]]
    factors: list[tuple[torch.Tensor, Sequence[torch.Tensor]]]

    def step(self) -> None:
        for elements, factors in self.factors:
            scaled(elements, factors)
        self.worker.step()


@dataclass(slots=True)
class Piece:
    """A range of a chunk's trainable elements on its way through the optimizer.

    `staging` holds one tensor per elementwise state, filled by "read states" and written back by
    "write states"; before the first step there is nothing to read, and the optimizer makes them.
    With `in_place` they are the store's own bytes.
    `parameters` are, by name, the elements that the piece covers, where the optimizer runs, and
    `gradients` those of gradients that waited on disk. A piece refers to nothing outside its range:
    what other pieces need may leave the device before it.
    """

    chunk: Chunk
    start: int
    stop: int
    staging: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    parameters: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    made: list[tuple[Slice, int, int, dict[str, Any]]] = field(
        default_factory=list[tuple[Slice, int, int, dict[str, Any]]]
    )
    in_place: bool = False

    def parts(self) -> Iterable[tuple[Slice, int, int]]:
        """The parameters that the piece covers, with the element range within each."""
        for part in self.chunk.slices:
            if not part.trainable:
                continue
            low = max(self.start, part.start) - part.start
            high = min(self.stop, part.start + part.numel) - part.start
            if low < high:
                yield part, low, high

    def read(self, ring: torch.Tensor, *, parameters: bool, gradients: bool) -> None:
        """Fill the staging tensors from the store; `ring` is this piece's staging buffer.

        `parameters` and `gradients` where the optimizer has them from there too.
        """
        store = self.chunk.store
        assert store is not None
        regions = self._regions(ring, parameters=parameters, gradients=gradients)
        for layout in self.chunk.states if self.chunk.updated else ():
            target = self.staging[layout.key] = regions[layout.key]
            place = layout.offset + self.start * layout.dtype.itemsize
            store.start_read(place, target.view(torch.uint8))
        for part, low, high in self.parts():
            here = slice(part.start + low - self.start, part.start + high - self.start)
            if parameters:
                target = self.parameters[part.name] = regions[_PARAMETERS][here]
                place = self.chunk.offset + part.offset + low * part.dtype.itemsize
                store.start_read(place, target.view(torch.uint8))
            waiting = self.chunk.waiting.get(part.name)
            if gradients and waiting is not None:
                target = self.gradients[part.name] = regions[_GRADIENTS][here]
                place = waiting.offset + low * part.dtype.itemsize
                waiting.store.start_read(place, target.view(torch.uint8))

    def _regions(
        self, ring: torch.Tensor, *, parameters: bool, gradients: bool
    ) -> dict[str, torch.Tensor]:
        """One region of the ring per state, and for parameters and gradients where asked for."""
        wanted = [(layout.key, layout.dtype) for layout in self.chunk.states]
        for key in [_PARAMETERS] * parameters + [_GRADIENTS] * gradients:
            wanted += [(key, part.dtype) for part, _, _ in self.parts()][:1]
        regions: dict[str, torch.Tensor] = {}
        offset, count = 0, self.stop - self.start
        # Wide elements first: what follows is aligned to its own.
        for key, dtype in sorted(wanted, key=lambda region: -region[1].itemsize):
            size = count * dtype.itemsize
            regions[key] = ring[offset : offset + size].view(dtype)
            offset += size
        return regions

    def view_device(self) -> None:
        """Use the parameters in place, on the device."""
        for part, low, high in self.parts():
            self.parameters[part.name] = part.flat(self.chunk.buffers[part.group])[low:high]

    def view_store(self) -> None:
        """Use the parameters and their states in place, where the store is host memory."""
        store = self.chunk.store
        assert isinstance(store, HostStore)
        self.in_place = True
        for part, low, high in self.parts():
            size = part.dtype.itemsize
            place = store.view(self.chunk.offset + part.offset + low * size, (high - low) * size)
            self.parameters[part.name] = place.view(part.dtype)
        for layout in self.chunk.states if self.chunk.updated else ():
            size = (self.stop - self.start) * layout.dtype.itemsize
            place = store.view(layout.offset + self.start * layout.dtype.itemsize, size)
            self.staging[layout.key] = place.view(layout.dtype)

    def update(
        self,
        factory: OptimizerFactory,
        options: Mapping[str, Mapping[str, Any]],
        gradients: Mapping[str, torch.Tensor],
        team: UpdateTeam | None = None,
    ) -> None:
        """The optimizer's own step on this range, by the team's threads where there is one.

        `options` are the hyperparameters by parameter name, `gradients` those of the elements that
        the piece covers and that did not wait below the device, flat in storage order. Elementwise
        optimizers compute every element by itself, so a range of a parameter gets the bits that the
        whole would get, and every range starts from the same scalars.
        """
        due = list(self._due(gradients))
        lengths = [one.high - one.low for one in due]
        # On a device kernels have threads of their own, and the larger they are, the better.
        longest = sum(lengths) if team is None else team.longest
        cut = ranges(lengths, 1, longest=longest) if team is None else team.ranges(lengths)
        # Here and not in their threads: the first optimizer of a class changes the class.
        stepped = [
            self._range(factory, options, [(due[i], start, stop) for i, start, stop in spans])
            for spans in cut
        ]
        for each in stepped:
            if isinstance(each.worker, MasterOptimizer):
                # A piece's workspace is counted for all of its elements: this is no more.
                elements = sum(shadow.numel() for shadow, *_ in each.shadows)
                each.worker.room_elements = min(elements, longest)
        if team is None:
            for each in stepped:
                each.step()
        else:
            team.run([each.step for each in stepped])
        for each in stepped:
            for shadow, part, low, high in each.shadows:
                self.made.append((part, low, high, dict(each.worker.state[shadow])))

    def _due(self, gradients: Mapping[str, torch.Tensor]) -> Iterable[_Due]:
        """The gradients that there are, from where each of them is."""
        for part, low, high in self.parts():
            elements = gradients.get(part.name)
            factors: list[torch.Tensor] = []
            waiting = self.chunk.waiting.get(part.name)
            if elements is None and waiting is not None and not waiting.is_none():
                elements = self.gradients.get(part.name)
                if elements is None:
                    elements = waiting.in_host(low, high)
                # Here once, not in every thread: a factor may be on a device.
                factors = [factor.to(elements.device) for factor in waiting.factors]
            if elements is not None:
                yield _Due(part, low, high, elements, factors)

    def _range(
        self,
        factory: OptimizerFactory,
        options: Mapping[str, Mapping[str, Any]],
        spans: Sequence[tuple[_Due, int, int]],
    ) -> _Range:
        """An optimizer over these elements of gradients and of the parameters that have them."""
        shadows: list[tuple[nn.Parameter, Slice, int, int]] = []
        scales: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []
        groups: dict[int, dict[str, Any]] = {}  # by the options that parameters share
        for due, start, stop in spans:
            part = due.part
            shadow = nn.Parameter(self.parameters[part.name][start:stop])
            shadow.grad = due.elements[start:stop]
            if due.factors:
                scales.append((shadow.grad, due.factors))
            chosen = options[part.name]
            group = groups.setdefault(id(chosen), {**chosen, "params": []})
            group["params"].append(shadow)
            shadows.append((shadow, part, due.low + start, due.low + stop))
        worker = factory(groups.values())
        for shadow, part, low, high in shadows:
            first = part.start + low - self.start
            if part.name in self.chunk.updated:
                state = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in self.chunk.scalars[part.name].items()
                }
                for key, values in self.staging.items():
                    state[key] = values[first : first + high - low]
                worker.state[shadow] = state
        return _Range(worker, shadows, scales)

    def write(self, *, parameters: bool) -> None:
        """Bring the new states, and the parameters where asked for, to the store.

        The last range of a parameter settles its scalars: until then, every range of it starts from
        the same ones.
        """
        store = self.chunk.store
        assert store is not None
        stepped = {part.name for part, *_ in self.made}
        for part, low, _ in self.parts() if parameters else ():
            if part.name in stepped:
                place = self.chunk.offset + part.offset + low * part.dtype.itemsize
                store.start_write(place, self.parameters[part.name].view(torch.uint8))
        for part, low, high, state in self.made:
            first = part.start + low
            for layout in self.chunk.states:
                values = state.pop(layout.key)
                if not self._stands(layout.key, first - self.start, values):
                    place = layout.offset + first * layout.dtype.itemsize
                    store.start_write(place, values.view(torch.uint8))
            if high == part.numel:
                self.chunk.scalars[part.name] = state
                self.chunk.updated.add(part.name)
        self.made.clear()
        self.staging.clear()
        self.parameters.clear()
        self.gradients.clear()

    def _stands(self, key: str, first: int, values: torch.Tensor) -> bool:
        """Whether these are the store's own bytes, from the piece's element `first` on."""
        if not self.in_place or key not in self.staging:
            return False
        staged = self.staging[key]
        return values.data_ptr() == staged.data_ptr() + first * staged.itemsize


def elementwise_states(
    factory: OptimizerFactory, dtype: torch.dtype, options: Mapping[str, Any] | None = None
) -> dict[str, torch.dtype]:
    """The optimizer's elementwise states for parameters of `dtype`: those of a step on a dummy.

    `options` are those of the parameters' group.
    """
    dummy, state = _dummy_state(factory, dtype, options)
    return {
        key: value.dtype
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == dummy.shape
    }


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


def scalar_state_bytes(factory: OptimizerFactory, *, block: int = 1) -> int:
    """Bytes of the states that are not elementwise, such as AdamW's step, for one parameter.

    Each takes whole blocks of `block` bytes.
    """
    dummy, state = _dummy_state(factory, torch.float32, None)
    return sum(
        in_blocks(value.nbytes, block)
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.shape != dummy.shape
    )


def _dummy_state(
    factory: OptimizerFactory, dtype: torch.dtype, options: Mapping[str, Any] | None
) -> tuple[nn.Parameter, dict[str, Any]]:
    """A parameter of two elements, and what the optimizer keeps for it after a step."""
    dummy = nn.Parameter(torch.zeros(2, dtype=dtype))
    dummy.grad = torch.zeros(2, dtype=dtype)
    optimizer = factory([{**(options or {}), "params": [dummy]}])
    optimizer.step()
    state: dict[str, Any] = optimizer.state[dummy]
    return dummy, state
