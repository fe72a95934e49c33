"""Parameters that share memory: chunks cannot separate them; they stay on the device."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from protrain_runtime.states.chunks import Chunk
from protrain_runtime.states.stand_ins import AwayParameter


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The byte range of its storage that a tensor spans: [first, past)."""
    if tensor.numel() == 0:
        return 0, 0
    span = 1 + sum(int(n - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + span * tensor.itemsize


def overlapping(chunks: Sequence[Chunk]) -> set[int]:
    """Units with parameters that share memory, with another or within themselves."""
    found: set[int] = set()
    for members in _by_storage(chunks).values():
        reached, last = 0, -1
        for first, past, unit, parameter in sorted(members, key=lambda m: m[:3]):
            if past - first < parameter.numel() * parameter.itemsize:  # expanded
                found.add(unit)
            if first < reached:
                found |= {unit, last}
            if past > reached:
                reached, last = past, unit
    return found


def of_one_storage(chunks: Sequence[Chunk]) -> set[int]:
    """Units with parameters in another unit's storage."""
    groups = ({unit for *_, unit, _ in members} for members in _by_storage(chunks).values())
    return {unit for units in groups if len(units) > 1 for unit in units}


def _by_storage(chunks: Sequence[Chunk]) -> dict[int, list[tuple[int, int, int, nn.Parameter]]]:
    """Non-empty parameters by storage: first byte, past, unit, parameter."""
    found: dict[int, list[tuple[int, int, int, nn.Parameter]]] = defaultdict(list)
    for chunk in chunks:
        for part in chunk.slices:
            if part.numel and not isinstance(part.parameter, AwayParameter):
                storage = part.parameter.untyped_storage()._cdata
                found[storage].append((*extent(part.parameter), chunk.unit, part.parameter))
    return found
