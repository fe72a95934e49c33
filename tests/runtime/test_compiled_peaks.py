"""Bytes that plans of compiled blocks promise, and those that a meter counts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.profiling.measured import measure
from protrain_runtime.contract.records import read_profile, write_profile
from protrain_runtime.contract.records.plan import (
    Activations,
    Keep,
    Offload,
    Persistent,
    Placement,
    Recompute,
)
from protrain_runtime.contract.records.profile import Profile
from tests.support.peaks import assert_within_the_promise, bytes_of_others, peaks
from tests.support.runtime_cases import decided, described_by, made_once


class Block(nn.Module):
    """Attention and an MLP over features [batch, tokens, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(hidden)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        found: torch.Tensor = hidden + self.mlp(hidden)
        return found


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.blocks = nn.Linear(64, 64), nn.ModuleList(Block() for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def stack() -> tuple[nn.Module, list[dict[str, object]]]:
    """A factory: its batches are features [4, 64, 64]."""
    return Stack(), [{"hidden": torch.linspace(-1, 1, 4 * 64 * 64).view(4, 64, 64)}]


@pytest.fixture(params=["aot_eager", "inductor"])
def profile(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Profile]:
    backend = request.param

    def make(path: Path) -> None:
        others = bytes_of_others()
        found = measure(
            load_source(f"{__name__}:stack"),
            batch_size=4,
            seq_len=64,
            dtype="float32",
            compile="blocks",
            allow=("rounding",),
            device="cpu",
            num_steps=1,
            spill_directory=path.parent,
            machine=load_hardware("cpu"),
        )
        write_profile(replace(found, base_bytes=found.base_bytes - others), path)

    torch.compiler.reset()
    with torch.compiler.set_stance("default", force_backend=backend):
        yield read_profile(made_once(tmp_path_factory, f"compiled-{backend}.yaml", make))


@pytest.mark.slow  # a profile compiles every form
@pytest.mark.parametrize(
    ("activations", "states"),
    [
        (Recompute(form="fused"), Offload(tier="disk")),
        (Recompute(form="fused"), Persistent()),
        (Recompute(), Offload(tier="disk")),
        (Keep(), Offload(tier="disk")),
    ],
)
def test_measured_bytes_of_compiled_blocks_never_exceed_predicted(
    profile: Profile, activations: Activations, states: Placement, tmp_path: Path
) -> None:
    forms = [[cost.form for cost in unit.forms] for unit in profile.units if unit.kind == "block"]
    assert all({"keep", "fused", "full"} <= {*names} for names in forms)
    units = decided(described_by(profile), activations, states)
    assert_within_the_promise(peaks(profile, units, tmp_path))
