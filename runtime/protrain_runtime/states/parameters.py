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


ONE_STORAGE, OVERLAPPING = "parameters are views of one storage", "parameters share memory"


def sharing_memory(chunks: Sequence[Chunk]) -> dict[int, str]:
    """How units share memory: ONE_STORAGE with other units, or OVERLAPPING, with any parameter."""
    # By storage: each parameter's first byte, past, unit.
    members = defaultdict[int, list[tuple[int, int, int, nn.Parameter]]](list)
    for chunk in chunks:
        for part in chunk.slices:
            if part.numel and not isinstance(part.parameter, AwayParameter):
                storage = part.parameter.untyped_storage()._cdata
                members[storage].append((*extent(part.parameter), chunk.unit, part.parameter))
    together: set[int] = set()
    overlapping: set[int] = set()
    for of_storage in members.values():
        units = {unit for *_, unit, _ in of_storage}
        together |= units if len(units) > 1 else set()
        reached, last = 0, -1
        for first, past, unit, parameter in sorted(of_storage, key=lambda m: m[:3]):
            if past - first < parameter.numel() * parameter.itemsize:  # expanded
                overlapping.add(unit)
            if first < reached:
                overlapping |= {unit, last}
            if past > reached:
                reached, last = past, unit
    return dict.fromkeys(together, ONE_STORAGE) | dict.fromkeys(overlapping, OVERLAPPING)
