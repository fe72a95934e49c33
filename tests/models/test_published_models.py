"""Every published model of the catalogue can be estimated, on a machine that need not be there."""

import json

import pytest

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.presets import preset_config, presets
from protrain_plan.models.sources import ModelSource, load_source
from protrain_plan.profiling.estimated import estimate
from protrain_runtime.contract.records.profile import Profile
from tests.support.thinning import thinned

PRESETS = {preset.name: preset for preset in presets()}
BATCHES = {
    "clip-vit-base": (2, 77),
    "tiny-gpt2": (1, 256),
    "whisper-large-v3": (1, 448),
    "whisper-small": (1, 448),
}
"""Sequences and tokens, where it is not one of 512: a contrastive loss compares pairs, and these
have no more positions."""
FROZEN = {"whisper-large-v3": 1500 * 1280, "whisper-small": 1500 * 768}
"""The positions of Whisper's encoder are not trained."""


def estimated(name: str, source: ModelSource, *, adapter: str = "") -> Profile:
    batch_size, seq_len = BATCHES.get(name, (1, 512))
    return estimate(
        source,
        hardware=load_hardware("rtx-4090"),
        batch_size=batch_size,
        seq_len=seq_len,
        dtype="bfloat16",
        precision="master",
        adapter=adapter,
    )


def check(profile: Profile) -> None:
    """Every block can be recomputed, which keeps less and takes longer."""
    for unit in profile.units:
        keep = unit.cost("keep")
        assert min(keep.forward_s, keep.backward_s, keep.kept_bytes) >= 0
        if unit.kind == "block":
            full = unit.cost("full")
            assert 0 <= full.kept_bytes < keep.kept_bytes
            assert full.backward_s > keep.backward_s > 0
            assert full.forward_s == keep.forward_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_published_model_is_estimated(name: str) -> None:
    profile = estimated(name, load_source(name))
    check(profile)
    trained = sum(unit.num_parameters for unit in profile.units)
    assert trained == PRESETS[name].num_parameters - FROZEN.get(name, 0)
    blocks = [unit for unit in profile.units if unit.kind == "block"]
    assert len(blocks) >= PRESETS[name].num_layers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.1-70b", "mixtral-8x7b", "t5-small", "vit-base"])
def test_adapters_of_a_published_model_are_estimated(name: str) -> None:
    profile = estimated(name, load_source(name), adapter="lora r=16")
    check(profile)
    gradients = sum(unit.gradient_bytes for unit in profile.units)
    assert 0 < gradients < 0.05 * sum(unit.parameter_bytes for unit in profile.units)


@pytest.mark.parametrize("name", thinned(["phi-2", "gemma-3-1b", "pythia-1.4b"]))
def test_four_layers_of_architectures_that_no_other_test_has(name: str) -> None:
    config = {**preset_config(name), "num_hidden_layers": 4}
    profile = estimated(name, load_source(name, model_config=json.dumps(config)))
    check(profile)
    assert sum(unit.kind == "block" for unit in profile.units) == 4
