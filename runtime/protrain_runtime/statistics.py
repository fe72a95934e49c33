"""Running statistics of blocks whose forward runs twice: they count the batch once.

A norm over batches writes its running mean and variance in forward, and computes nothing from them
while it trains. So its second run may write, and what it wrote is taken back. Of other buffers that
a forward writes nothing is known: blocks with such are not recomputed (`written_buffers`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase


def with_running_statistics(module: nn.Module) -> tuple[nn.Module, ...]:
    """The norms in a module, itself included, that keep statistics of the batches they saw."""
    return tuple(
        norm
        for norm in module.modules()
        if isinstance(norm, _NormBase) and norm.track_running_stats
    )


@contextmanager
def unchanged(norms: Sequence[nn.Module]) -> Iterator[None]:
    """The norms' buffers have the same values afterwards, and the same versions for autograd."""
    buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
    with torch.no_grad():
        values = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                with _unsafe_preserve_version_counter(buffer):
                    buffer.copy_(value)


Written = dict[str, tuple[Tensor, int]]


def other_buffers(module: nn.Module) -> Written:
    """The buffers in a module by name, each with its version, but for running statistics."""
    known = {buffer for norm in with_running_statistics(module) for buffer in norm.buffers()}
    return {
        name: (buffer, buffer._version)
        for name, buffer in module.named_buffers()
        if buffer not in known
    }


def written_buffers(before: Written, after: Written) -> tuple[str, ...]:
    """The names of those that were written to, replaced, made or dropped in between."""
    return tuple(
        name
        for name in {**before, **after}
        if name not in before
        or name not in after
        or before[name][0] is not after[name][0]
        or before[name][1] != after[name][1]
    )
