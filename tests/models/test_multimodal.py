"""Configurations of models that take images or sound, as published: they train on text."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from protrain_plan.commands.training import train
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.questions.objectives import Objective, Question, ask
from protrain_plan.planning.search.improving import Effort
from protrain_plan.presentation.profiles import caveats
from protrain_plan.profiling.estimated import estimate
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import Budgets
from protrain_runtime.contract.records.profile import Profile, Quantize
from tests.support.runtime_cases import profiled_here
from tests.support.thinning import thinned

Config = dict[str, Any]

CONFIGS: dict[str, Any] = json.loads(Path(__file__).with_name("multimodal.json").read_text())
PUBLISHED: dict[str, Config] = CONFIGS["published"]
"""The keys that say what is computed, of published files. Nested ones are partial there, too."""

SMALL: Config = CONFIGS["small"]
"""What their numbers become in a small model."""

BY_DEFAULT = (
    *("idefics3", "internvl", "llava_next", "llava_onevision", "paligemma"),
    *("phi4_multimodal", "qwen2_audio", "qwen2_vl", "smolvlm"),
)
"""Others, of which a file says nothing but the name."""


def small(config: Config, *, only: tuple[str, ...] = ()) -> Config:
    """The same with smaller numbers; what a file leaves out is small where it has to be."""
    made: Config = {}
    for key, value in config.items():
        if isinstance(value, dict):
            made[key] = small(value, only=only)
        else:
            made[key] = SMALL[key] if key in SMALL and (not only or key in only) else value
    if "text_config" in config and not only:
        text = made["text_config"]
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"):
            text.setdefault(key, SMALL[key])
        text["pad_token_id"] = 0
    elif not only and "num_hidden_layers" in config:
        made["pad_token_id"] = 0
    return made


def few_layers(config: Config) -> Config:
    keys = ("num_hidden_layers", "depth", "fullatt_block_indexes", "deepstack_visual_indexes")
    return small(copy.deepcopy(config), only=keys)


def estimated(
    config: Config, *, adapter: str = "", quantize: Quantize = "", seq_len: int = 64
) -> Profile:
    return estimate(
        load_source("config.json", model_config=json.dumps(config)),
        hardware=load_hardware("h100-sxm"),
        batch_size=1,
        seq_len=seq_len,
        dtype="bfloat16",
        adapter=adapter,
        quantize=quantize,
    )


def trained_share(config: Config) -> tuple[int, int]:
    model = load_source("config.json", model_config=json.dumps(config)).build(device="meta")
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, grad in sizes if grad), sum(size for size, _ in sizes)


@pytest.mark.parametrize("name", thinned(list(PUBLISHED), every=5))
def test_a_small_one_trains_on_text_as_plain_pytorch_does(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small(PUBLISHED[name])))
    profile = profiled_here(str(path), tmp_path, seq_len=16)
    trained, whole = trained_share(json.loads(profile.workload.model_config))
    assert 0 < sum(unit.num_parameters for unit in profile.units) == trained < whole
    assert any(said.startswith("batches are text alone") for said in caveats(profile))
    budgets = Budgets(device=10**12, host=0, disk=10**10)
    pins = (parse_pin("*layers.*: recompute, offload to disk"),)
    answer = ask(
        Question(profile=profile, budgets=budgets, pins=pins), Objective(), effort=Effort()
    )
    assert answer.solved is not None
    planned, plain = (
        train(answer.solved.plan, num_steps=3, plain=plain, text=None, spill_directory=tmp_path)
        for plain in (False, True)
    )
    assert planned.losses == plain.losses
    assert planned.parameters_sha256 == plain.parameters_sha256
    assert planned.measured_peak_bytes is not None
    assert planned.measured_peak_bytes.device <= answer.solved.plan.prediction.peak_bytes.device


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


def test_a_named_router_is_one_clear_error() -> None:
    with pytest.raises(ProtrainError) as caught:
        estimated(ROUTED, adapter="lora r=4 targets=q_proj+router")
    assert str(caught.value) == (
        "config.json: targets: layers called 'router' return several values, as routers do: an"
        " adapter would return one\n  fix: leave router out; all-linear does, too"
    )
