"""`full_parameters`: offloaded parameters on the device, to look at or change between steps."""

from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.program import SAVING_BYTES
from protrain_runtime.chunks import Chunk, Slice, flat_storage_order
from protrain_runtime.engine import Engine
from protrain_runtime.measure import device_of
from protrain_runtime.preflight import check_free
from protrain_runtime.prepared import prepared_of
from protrain_runtime.state_dicts import write_values


class FullParameters:
    """What `full_parameters` returns. `num_bytes` are what it takes of the device while inside."""

    def __init__(self, model: nn.Module, *, modify: bool, units: Collection[str] | None) -> None:
        self._model, self._modify = model, modify
        prepared = prepared_of(model)
        self._engine: Engine | None = prepared.engine if prepared else None
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
        self._engine.settle("full_parameters() was entered")
        self._engine.outside("full_parameters() was entered")
        check_free(self.num_bytes, device_of(self._model), "the parameters")
        what = ", modify=True" if self._modify else ""
        self._engine.gather(self._chunks, f"full_parameters(model{what})", modify=self._modify)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._engine is None or not self._chunks:
            return
        changed: list[str] = []
        try:
            for chunk in self._chunks:
                for part in chunk.slices:
                    _check_kind(part)
                    if self._modify:
                        write_values(chunk, part, part.parameter)
                    elif kind is None and _differs(chunk, part):
                        changed.append(part.name)
        finally:
            self._engine.ungather()
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise RuntimeError(
                f"{changed[0]!r}{more} changed inside full_parameters(model), and the changes are"
                " dropped: say full_parameters(model, modify=True)"
            )


def full_parameters(
    model: nn.Module, modify: bool = False, *, units: Collection[str] | None = None
) -> FullParameters:
    """A context in which the model's parameters are on its device, whole, between steps.

        with protrain_runtime.full_parameters(model):
            norms = [parameter.norm() for parameter in model.parameters()]

    `units` are names of the plan's units: those alone are brought, so that a loop over them takes
    the memory of the largest. What is written stays with `modify=True`, and is an error without.
    `.num_bytes` of what this returns says what it takes before it is entered; where there is less,
    entering raises NoRoomError. Models that follow no plan have all of theirs: nothing happens.
    On several devices all ranks enter it together, and write the same. Training steps, saving and
    loading come after it. Raises ProtrainError for a unit that the plan does not have.
    """
    return FullParameters(model, modify=modify, units=units)


def _check_kind(part: Slice) -> None:
    found = part.parameter
    if found.shape != part.shape or found.dtype != part.dtype:
        raise RuntimeError(
            f"{part.name!r} has another shape or dtype than the plan placed"
            f" ({tuple(found.shape)}, {found.dtype}): restore(model) before such changes"
        )


def _differs(chunk: Chunk, part: Slice) -> bool:
    """Whether a parameter's bytes are others than those in the store, looked at in pieces."""
    here = part.parameter.detach()
    if here.stride() != part.stride:
        return True  # another tensor was put there
    flat = flat_storage_order(here).view(torch.uint8)
    return any(
        not torch.equal(flat[start : start + stored.numel()].cpu(), stored)
        for start, stored in _stored(chunk, part)
    )


def _stored(chunk: Chunk, part: Slice) -> Iterator[tuple[int, torch.Tensor]]:
    """What the store has of a parameter, in pieces; of ranks, this one's range.

    With the byte of the parameter at which each begins.
    """
    assert chunk.store is not None
    own, begin = part, 0
    if chunk.sharding is not None:
        mine = chunk.sharding.part_of(part.name)
        if mine is None:
            return
        own, begin = mine, mine.first * part.dtype.itemsize
    for start in range(0, own.num_bytes, SAVING_BYTES):
        piece = torch.empty(min(SAVING_BYTES, own.num_bytes - start), dtype=torch.uint8)
        chunk.store.read(chunk.own.offset + own.offset + start, piece)
        yield begin + start, piece
