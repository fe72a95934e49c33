"""`MovingAverage`: averaged parameters of a planned model, kept where its parameters are."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from protrain_plan.errors import ProtrainError
from protrain_runtime.chunks import Chunk
from protrain_runtime.engine import Engine
from protrain_runtime.prepared import prepared_of
from protrain_runtime.state_dicts import offloaded_parameters, write_values

Average = Callable[[list[torch.Tensor], list[torch.Tensor], int], None]
"""Changes averages in place, given the current values and how many were averaged before: what
`torch.optim.swa_utils.AveragedModel` takes as `multi_avg_fn`."""


@dataclass(slots=True)
class _Below:
    """The average of an offloaded chunk: another set of its parameters in its store."""

    chunk: Chunk  # this rank's part, where ranks share it
    offset: int  # bytes from the start of the store


class MovingAverage:
    """The averages that `AveragedModel` computes, to the bit, one parameter at a time.

        average = protrain_runtime.MovingAverage(model)
        ...
        optimizer.step()
        average.update()
        ...
        with average.applied():
            evaluate(model)

    `multi_avg_fn` is that of `torch.optim.swa_utils`: by default an exponential average with a
    decay of 0.999. The average of an offloaded parameter is in the tier of its unit's states, that
    of another one on the device: `num_bytes` in all, as much again as the parameters, which plans
    do not count. An update brings the largest parameter and its average to the device. Averages
    end with `restore(model)`. ProtrainError where a tier has no room for them.
    """

    def __init__(self, model: nn.Module, multi_avg_fn: Average | None = None) -> None:
        self._model = model
        self._average: Average = multi_avg_fn or get_ema_multi_avg_fn(0.999)
        self._engine = _engine(model)
        self.n_averaged = 0
        prepared = prepared_of(model)
        chunks = prepared.chunks if prepared else ()
        self._offloaded = offloaded_parameters(chunks)
        self._below: list[_Below] = []
        for chunk in chunks:
            if chunk.store is not None:
                offset = chunk.store.reserve(chunk.own.parameter_bytes)
                self._below.append(_Below(chunk.own, offset))
        self._held = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if name not in self._offloaded
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of the averages, of ranks this one's, in all tiers."""
        below = sum(each.chunk.parameter_bytes for each in self._below)
        return below + sum(held.nbytes for held in self._held.values())

    @torch.no_grad()
    def update(self) -> None:
        """Average the parameters as they are now. Between steps; RuntimeError elsewhere."""
        self._check("MovingAverage.update() was called")
        parameters = dict(self._model.named_parameters())
        for name, held in self._held.items():
            self._add(held, parameters[name].detach())
        for each in self._below:
            store = each.chunk.store
            assert store is not None
            for part in each.chunk.slices:
                device = part.parameter.device
                places = [each.offset + part.offset, each.chunk.offset + part.offset]
                flat = torch.empty(2, part.num_bytes, dtype=torch.uint8, device=device)
                for place, target in zip(places, flat, strict=True):
                    store.read(place, target)
                values = [t.view(part.dtype).as_strided(part.shape, part.stride) for t in flat]
                self._add(*values)
                store.write(places[0], flat[0])
        self.n_averaged += 1

    def _add(self, average: torch.Tensor, current: torch.Tensor) -> None:
        if self.n_averaged == 0:
            average.copy_(current)
        else:
            self._average([average], [current], self.n_averaged)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """The model with its averages in place of its parameters, at no memory.

        For evaluation and state dicts; training comes after it.
        """
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
        for each in self._below:
            each.chunk.offset, each.offset = each.offset, each.chunk.offset
        parameters = dict(self._model.named_parameters())
        for name, held in self._held.items():
            self._held[name], parameters[name].data = parameters[name].data, held

    def state_dict(self) -> dict[str, Any]:
        """The averages by name, as copies in memory all at once, and how many were averaged."""
        names = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        with self.applied():
            state = self._model.state_dict()
            averages = {name: state[name].clone() for name in state if name in names}
        return {"n_averaged": self.n_averaged, "parameters": averages}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, under any plan. ProtrainError for another model."""
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
                write_values(chunk, part, averages[name].to(part.dtype))

    def _check(self, what: str) -> None:
        if _engine(self._model) is not self._engine:
            raise RuntimeError(
                f"{what} after restore(), or a new prepare(): averages are kept with the states of"
                " a plan. Take state_dict() before, and load it into a new MovingAverage"
            )
        if self._engine is not None:
            self._engine.settle(what)
            self._engine.outside(what)


def _engine(model: nn.Module) -> Engine | None:
    prepared = prepared_of(model)
    return prepared.engine if prepared else None
