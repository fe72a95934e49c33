"""Published models: those that take images or sound train on text, and every one is estimated."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.presets import preset_config, presets
from protrain_plan.models.sources import ModelSource, load_source
from protrain_plan.presentation.profiles import caveats
from protrain_runtime.contract.records.profile import Profile, Quantize
from tests.support.estimates import batches_of, estimate, model_of
from tests.support.hostile_models import Hostile
from tests.support.judging import judged
from tests.support.messages import Speaker
from tests.support.thinning import thinned

Config = dict[str, Any]

CONFIGS: dict[str, Any] = json.loads(Path(__file__).with_name("multimodal.json").read_text())
PUBLISHED: dict[str, Config] = CONFIGS["published"]
"""The keys that say what is computed, of published files. Nested ones are partial there, too."""

SMALL: Config = CONFIGS["small"]
"""Their numbers in a small model."""

BY_DEFAULT = (
    *("idefics3", "internvl", "llava_next", "llava_onevision", "paligemma"),
    *("phi4_multimodal", "qwen2_audio", "qwen2_vl", "smolvlm"),
)
"""Others, of which a file says nothing but the name."""


def small(config: Config) -> Config:
    """The same with smaller numbers; what a file leaves out is small where it has to be."""
    made: Config = {}
    for key, value in config.items():
        made[key] = small(value) if isinstance(value, dict) else SMALL.get(key, value)
    if "text_config" in config:
        text = made["text_config"]
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"):
            text.setdefault(key, SMALL[key])
        text["pad_token_id"] = 0
    elif "num_hidden_layers" in config:
        made["pad_token_id"] = 0
    return made


def estimated(config: Config, *, adapter: str = "", quantize: Quantize = "") -> Profile:
    return estimate(
        load_source("config.json", model_config=json.dumps(config)),
        hardware=load_hardware("h100-sxm"),
        batch_size=1,
        seq_len=64,
        dtype="bfloat16",
        adapter=adapter,
        quantize=quantize,
    )


def trained_share(config: Config) -> tuple[int, int]:
    model = model_of(load_source("config.json", model_config=json.dumps(config)), device="meta")
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, grad in sizes if grad), sum(size for size, _ in sizes)


def small_one(name: str) -> Hostile:
    source = load_source("config.json", model_config=json.dumps(small(PUBLISHED[name])))
    batches = batches_of(source, batch_size=4, seq_len=16)
    made = [next(batches) for _ in range(8)]
    return Hostile(partial(model_of, source), batch=lambda step: made[step % 8])


@pytest.mark.nightly("gemma3")
@pytest.mark.parametrize("name", thinned(list(PUBLISHED), every=5))
def test_a_small_one_trains_on_text_as_plain_pytorch_does(name: str) -> None:
    profile = estimated(small(PUBLISHED[name]))
    trained, whole = trained_share(small(PUBLISHED[name]))
    assert 0 < sum(unit.num_parameters for unit in profile.units) == trained < whole
    assert any(said.startswith("batches are text only") for said in caveats(profile))
    found = judged(small_one, name, plans=["recomputed"], seed=0)
    assert [(one.kind, one.text) for one in found] == [("like plain", "")]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_one_is_estimated_whole(name: str) -> None:
    profile = estimated(PUBLISHED[name])
    trained, whole = trained_share(PUBLISHED[name])
    assert sum(unit.num_parameters for unit in profile.units) == trained < whole
    assert sum(unit.parameter_bytes for unit in profile.units) >= 2 * whole


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_DEFAULT)
def test_one_that_says_its_name_alone_is_estimated(name: str) -> None:
    profile = estimated({"model_type": name})
    assert sum(unit.gradient_bytes for unit in profile.units) > 0


ROUTED = small(PUBLISHED["llama4"])


@pytest.mark.nightly
@pytest.mark.parametrize("quantize", ["", "nf4"])
def test_routers_get_no_adapters_and_experts_stay_unpacked(quantize: Quantize) -> None:
    profile = estimated(ROUTED, adapter="lora r=4", quantize=quantize)
    said = [*caveats(profile)]
    adapted = {line.split()[0] for line in profile.tensors if ".lora_A." in line}
    assert any(".o_proj." in name for name in adapted)
    assert not any(".router." in name for name in adapted)
    assert any("no adapters to" in each and "router" in each for each in said)
    # Gate and up, and down, of all experts in every layer, 2 bytes each.
    size = 3 * 4 * 3 * 64 * 96 * 2 / 2**10
    unpacked = [each for each in said if "stay unpacked" in each]
    assert unpacked == ([] if not quantize else unpacked)
    assert all(each.startswith(f"{size:.2f} KiB of weights stay unpacked") for each in unpacked)
    assert len(unpacked) == bool(quantize)


def test_a_named_router_is_one_clear_error(assert_says: Speaker) -> None:
    assert_says.refused(estimated, ROUTED, adapter="lora r=4 targets=q_proj+router")


# --- the catalogue --------------------------------------------------------------------------------

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


def estimated_preset(name: str, source: ModelSource, *, adapter: str = "") -> Profile:
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
    profile = estimated_preset(name, load_source(name))
    check(profile)
    trained = sum(unit.num_parameters for unit in profile.units)
    assert trained == PRESETS[name].num_parameters - FROZEN.get(name, 0)
    blocks = [unit for unit in profile.units if unit.kind == "block"]
    assert len(blocks) >= PRESETS[name].num_layers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.1-70b", "mixtral-8x7b", "t5-small", "vit-base"])
def test_adapters_of_a_published_model_are_estimated(name: str) -> None:
    profile = estimated_preset(name, load_source(name), adapter="lora r=16")
    check(profile)
    gradients = sum(unit.gradient_bytes for unit in profile.units)
    assert 0 < gradients < 0.05 * sum(unit.parameter_bytes for unit in profile.units)


@pytest.mark.nightly("phi-2")
@pytest.mark.parametrize("name", thinned(["phi-2", "gemma-3-1b", "pythia-1.4b"]))
def test_four_layers_of_architectures_that_no_other_test_has(name: str) -> None:
    config = {**preset_config(name), "num_hidden_layers": 4}
    profile = estimated_preset(name, load_source(name, model_config=json.dumps(config)))
    check(profile)
    assert sum(unit.kind == "block" for unit in profile.units) == 4
