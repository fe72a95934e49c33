"""Models of the catalogue with weights that are there in seconds, the same on every device.

Drawing eight billion normals on a CPU takes a minute, and every cell builds its model anew. So
matrices are filled from one tile of normals, and what a step costs does not depend on them.
"""

from contextlib import AbstractContextManager

import torch
from accelerate import init_empty_weights
from torch import nn

from benchmarks.peers.work import Work
from protrain_plan.models.building import moved
from protrain_plan.models.sources import ModelSource
from tests.support.estimates import model_of

TILE = 2**22
"""Numbers in the tile: large enough for rows of a matrix to differ."""
_SCALE = 0.02


def built(
    source: ModelSource, work: Work, *, device: torch.device, masters: bool = False
) -> nn.Module:
    """The work's model on `device`; `masters` asks for float32 parameters."""
    with _without_parameters():
        model = model_of(source, dtype="float32" if masters else work.dtype)
    getattr(model, "tie_weights")()  # noqa: B009 (ties were lost on the way to meta)
    tile = torch.randn(TILE, generator=torch.Generator().manual_seed(work.seed)).mul_(_SCALE)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                made[parameter] = nn.Parameter(_values(name, parameter, tile, device))
            setattr(module, name, made[parameter])
    return moved(model, device=device)


def _without_parameters() -> AbstractContextManager[object]:
    """Parameters stay on `meta`; buffers, such as rotary frequencies, are computed."""
    context: AbstractContextManager[object] = init_empty_weights(include_buffers=False)
    return context


def _values(
    name: str, parameter: nn.Parameter, tile: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Normals for matrices, ones for scales of norms, zeros for biases."""
    if parameter.dim() < 2:
        fill = 0.0 if "bias" in name else 1.0
        return torch.full(parameter.shape, fill, dtype=parameter.dtype, device=device)
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    here = tile.to(device, parameter.dtype)
    flat = values.view(-1)
    whole = flat.numel() // TILE * TILE
    flat[:whole].view(-1, TILE).copy_(here.expand(whole // TILE, TILE))
    flat[whole:].copy_(here[: flat.numel() - whole])
    return values
