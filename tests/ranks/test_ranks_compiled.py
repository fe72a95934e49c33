"""Compiled blocks on several ranks: the bits of DistributedDataParallel around the same blocks."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from protrain_runtime.activations.compiled import compile_each
from protrain_runtime.contract.records.plan import Offload, Persistent, Recompute, Swap
from protrain_runtime.diagnostics.compiling import compiled_whole
from tests.support.ranks_cases import run_ranks
from tests.support.ranks_loops import Loop, assert_as_ddp, in_turn, several

BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
        ],
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_of_compiled_blocks_match_ddp_of_them_bitwise(
    backend: str, tmp_path: Path
) -> None:
    loop = Loop(name="llama", micro_batches=2, compiled=backend)
    units = in_turn("llama", Persistent(), Offload(tier="device"), Offload(tier="disk"))
    decided = [
        replace(unit, activations=Recompute() if number % 2 else Swap(tier="disk"))
        if unit.kind == "block"
        else unit
        for number, unit in enumerate(units)
    ]
    plans = [several(loop, units, 2), several(loop, decided, 2)]
    assert_as_ddp(2, loop, plans, tmp_path)


class Wide(nn.Module):
    """A block of more parameters than DistributedDataParallel reduces at first, 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def graphs_in_ddp(rank: int, count: int) -> list[int]:
    """How many graphs a step inside DistributedDataParallel compiles: as it is, and whole."""
    found: list[int] = []
    for whole in (False, True):
        torch.compiler.reset()
        made: list[torch.fx.GraphModule] = []

        def count_graph(
            graph: torch.fx.GraphModule, _: object, made: list[torch.fx.GraphModule] = made
        ) -> object:
            made.append(graph)
            return graph.forward

        block = Wide()
        undo = compile_each({"0": block}, backend=count_graph)  # type: ignore[arg-type]
        model = DistributedDataParallel(nn.Sequential(block))
        with compiled_whole() if whole else nullcontext():
            model(torch.ones(2, 512))
        undo()
        found.append(len(made))
    return found


def test_blocks_inside_ddp_are_compiled_whole(tmp_path: Path) -> None:
    """PyTorch would cut them where DDP's buckets end: other graphs, perhaps with other bits."""
    for cut, whole in run_ranks(graphs_in_ddp, 2, tmp_path):
        assert cut > whole == 1
