"""The form `fused` of a compiled block: its recomputation is compiled with it.

In `full` a compiled block's code runs twice, unchanged: training has the compiled model's bits.
Here `torch.utils.checkpoint` surrounds the block's plain code, and both are compiled: the backward
graph recomputes only what it needs (not the last product of an MLP) and fuses it with the rest. Its
kernels, and perhaps their rounding, differ from the compiled block's.
"""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from protrain_runtime.activations.compiled import CompiledBlock
from protrain_runtime.activations.forms import Code
from protrain_runtime.activations.recompute import full, with_running_statistics


def fused(forward: Code, module: nn.Module) -> Code:
    """The executor of the form `fused`.

    Falls back to `full` for blocks compiled by the user, uncompiled blocks, and norms with batch
    statistics, which a second run must not write.
    """
    if not isinstance(forward, CompiledBlock) or with_running_statistics(module):
        return full(forward, module)
    recomputed = CompiledBlock(_recomputed, forward.name, backend=forward.backend)

    def run(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return recomputed(module, *args, **kwargs)

    return run


def _recomputed(block: nn.Module, *args: object, **kwargs: object) -> object:
    return checkpoint(partial(block._call_impl, **kwargs), *args, use_reentrant=False)
