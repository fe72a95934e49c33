"""Use of a planned model between steps.

`full_parameters` brings offloaded parameters to the device, to read or change. `MovingAverage`
keeps averaged parameters in the tiers of the parameters.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import SAVING_BYTES
from protrain_runtime.devices.memory_meter import device_of
from protrain_runtime.devices.preflight import check_free
from protrain_runtime.devices.thread_guard import guarded
from protrain_runtime.model.prepared import (
    engine_of,
    offloaded_parameters,
    prepared_of,
    thread_guard_of,
    writing_together,
)
from protrain_runtime.states.chunks import (
    Chunk,
    Copy,
    Slice,
    flat_storage_order,
    place_of,
    write_values,
)


class full_parameters:  # noqa: N801 (a context, as `torch.no_grad`)
    """A context in which the model's parameters are whole and on its device, between steps.

        with protrain_runtime.full_parameters(model):
            norms = [parameter.norm() for parameter in model.parameters()]

    `units` names units of the plan: only these are brought, so a loop over units takes the memory
    of the largest. Writes persist with `modify=True` and are an error without. `.num_bytes` of the
    result is its size before it is entered; NoRoomError if the device has less. A no-op for models
    without a plan. All ranks enter together and write the same. Training steps, saving and loading
    come after it. Raises ProtrainError for an unknown unit.
    """

    def __init__(
        self, model: nn.Module, modify: bool = False, *, units: Collection[str] | None = None
    ) -> None:
        self._model, self._modify = model, modify
        prepared, self._engine = prepared_of(model), engine_of(model)
        self._chunks: Sequence[Chunk] = ()
        if prepared is not None:
            names = [unit.name for unit in prepared.plan.units]
            for unit in units or ():
                if unit not in names:
                    raise ProtrainError(
                        f"the plan has no unit {unit!r}", fix=f"its units are {', '.join(names)}"
                    )
            self._chunks = [
                chunk
                for chunk in prepared.chunks
                if chunk.store is not None and (units is None or names[chunk.unit] in units)
            ]
        self.num_bytes = sum(chunk.parameter_bytes for chunk in self._chunks)

    def __enter__(self) -> Self:
        if self._engine is None or not self._chunks:
            return self
        with self._engine.together("full_parameters()"):
            self._engine.settle("full_parameters() was entered", outside=True)
            check_free(self.num_bytes, device_of(self._model))
        what = ", modify=True" if self._modify else ""
        self._engine.gather(self._chunks, f"full_parameters(model{what})", modify=self._modify)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._engine is None or not self._chunks:
            return
        changed: list[str] = []
        written = self._chunks if self._modify else ()
        try:
            with writing_together(written, "full_parameters()"):
                changed = self._taken_over(look=kind is None)
        finally:
            self._engine.ungather()
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise RuntimeError(
                f"{changed[0]!r}{more} changed inside full_parameters(model), and the changes are"
                " dropped: say full_parameters(model, modify=True)"
            )

    def _taken_over(self, *, look: bool) -> list[str]:
        """Write the values, or `look` for those that changed; returns their names."""
        changed: list[str] = []
        for chunk in self._chunks:
            for part in chunk.slices:
                now = part.parameter
                if now.shape != part.shape or now.dtype != part.dtype:
                    raise RuntimeError(
                        f"{part.name!r} has another shape or dtype than the plan placed"
                        f" ({tuple(now.shape)}, {now.dtype}): restore(model) before such"
                        " changes"
                    )
                if self._modify:
                    write_values(chunk, part, part.parameter)
                elif look and _differs(chunk, part):
                    changed.append(part.name)
        return changed


def _differs(chunk: Chunk, part: Slice) -> bool:
    """Whether a parameter's bytes differ from the store's, compared in pieces."""
    here = part.parameter.detach()
    if here.stride() != part.stride:
        return True  # another tensor was put in its place
    flat = flat_storage_order(here).view(torch.uint8)
    place = place_of(chunk, part)
    if place is None:
        return False
    begin, num_bytes = (count * part.dtype.itemsize for count in (place.first, place.numel))
    for start in range(0, num_bytes, SAVING_BYTES):
        stored = torch.empty(min(SAVING_BYTES, num_bytes - start), dtype=torch.uint8)
        place.store.read(place.offset + start, stored)
        if not torch.equal(flat[begin + start :][: stored.numel()].cpu(), stored):
            return True
    return False


Average = Callable[[list[torch.Tensor], list[torch.Tensor], int], None]
"""Changes averages in place, given the current values and how many were averaged before: what
`torch.optim.swa_utils.AveragedModel` takes as `multi_avg_fn`."""


class MovingAverage:
    """The averages of `AveragedModel`, bit for bit, one parameter at a time.

        average = protrain_runtime.MovingAverage(model)
        ...
        optimizer.step()
        average.update()
        ...
        with average.applied():
            evaluate(model)

    `multi_avg_fn` is that of `torch.optim.swa_utils`: by default an exponential average with a
    decay of 0.999. The average of an offloaded parameter is in its unit's state tier, others are on
    the device: `num_bytes` in all, the size of the parameters, which plans do not count. An update
    brings the largest parameter and its average to the device. Frozen parameters with a common copy
    are their own averages. Averages end with `restore(model)`. ProtrainError if a tier has no room
    for them.
    """

    def __init__(self, model: nn.Module, multi_avg_fn: Average | None = None) -> None:
        self._model = model
        self._average: Average = multi_avg_fn or get_ema_multi_avg_fn(0.999)
        self._engine = engine_of(model)
        self.n_averaged = 0
        prepared = prepared_of(model)
        self._offloaded = offloaded_parameters(prepared)
        # Of offloaded chunks, or this rank's shards: a second copy of the parameters in the store.
        self._below: list[tuple[Chunk, Copy]] = []
        for chunk in prepared.chunks if prepared else ():
            if chunk.store is not None:
                offset = chunk.store.reserve(chunk.own.parameter_bytes)
                self._below.append((chunk.own, Copy(offset)))
        self._held = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if name not in self._offloaded
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of the averages in all tiers, on this rank."""
        below = sum(chunk.parameter_bytes for chunk, _ in self._below)
        return below + sum(held.nbytes for held in self._held.values())

    @guarded("MovingAverage.update()", lambda average: thread_guard_of(average._model))
    @torch.no_grad()
    def update(self) -> None:
        """Average the current parameters. RuntimeError except between steps."""
        self._check("MovingAverage.update() was called")
        parameters = dict(self._model.named_parameters())
        for name, held in self._held.items():
            self._add(held, parameters[name].detach())
        for chunk, average in self._below:
            store = chunk.store
            assert store is not None
            for part in chunk.slices:
                device = part.parameter.device
                places = [average.place(part), chunk.current.place(part)]
                flat = [
                    torch.empty(part.num_bytes, dtype=torch.uint8, device=device) for _ in places
                ]
                for place, target in zip(places, flat, strict=True):
                    store.read(place, target)
                self._add(*map(part.shaped, flat))
                store.write(places[0], flat[0])
        self.n_averaged += 1

    def _add(self, average: torch.Tensor, current: torch.Tensor) -> None:
        if self.n_averaged == 0:
            average.copy_(current)
        else:
            self._average([average], [current], self.n_averaged)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Replace parameters by their averages inside, for evaluation and state dicts."""
        if not self.n_averaged:
            raise RuntimeError("MovingAverage.applied() was entered before the first update()")
        self._check("MovingAverage.applied() was entered")
        self._exchange()
        if self._engine is not None:
            self._engine.gathered = "MovingAverage.applied()"
        try:
            yield self._model
        finally:
            if self._engine is not None:
                self._engine.gathered = ""
            self._exchange()

    def _exchange(self) -> None:
        for chunk, average in self._below:
            copy = chunk.current
            copy.offset, average.offset = average.offset, copy.offset
        parameters = dict(self._model.named_parameters())
        for name, held in self._held.items():
            self._held[name], parameters[name].data = parameters[name].data, held

    def state_dict(self) -> dict[str, Any]:
        """The averages by name, all copied to memory at once, and the number of updates."""
        names = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        with self.applied():
            state = self._model.state_dict()
            averages = {name: state[name].clone() for name in state if name in names}
        return {"n_averaged": self.n_averaged, "parameters": averages}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict`'s result, under any plan. ProtrainError for another model."""
        averages: Mapping[str, torch.Tensor] = state_dict["parameters"]
        shapes = {name: parameter.shape for name, parameter in self._model.named_parameters()}
        for name, shape in shapes.items():
            if name not in averages or averages[name].shape != shape:
                raise ProtrainError(
                    "the averages are of another model",
                    key=name,
                    fix="load those that were saved with this model",
                )
        self._check("MovingAverage.load_state_dict() was called")
        self.n_averaged = max(1, int(state_dict["n_averaged"]))
        with self.applied():
            parameters = dict(self._model.named_parameters())
            for name in self._held:
                parameters[name].copy_(averages[name])
            for name, (chunk, part) in self._offloaded.items():
                place = place_of(chunk, part)
                if place is not None and place.store is chunk.store:
                    write_values(chunk, part, averages[name].to(part.dtype))

    def _check(self, what: str) -> None:
        if engine_of(self._model) is not self._engine:
            raise RuntimeError(
                f"{what} after restore(), or a new prepare(): averages are kept with the states of"
                " a plan. Take state_dict() before, and load it into a new MovingAverage"
            )
        if self._engine is not None:
            self._engine.settle(what, outside=True)
