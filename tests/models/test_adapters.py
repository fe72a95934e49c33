"""Adapters: their text, and the models that they make. The oracle of a model is PEFT itself."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.zoo import ZOO
from protrain_plan.models.sources import load_source
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.adapters import Lora, option_of, parse_lora, read_adapter
from protrain_runtime.contract.records.commands import profile_command
from protrain_runtime.contract.records.profile import DType
from tests.support.by_peft import by_peft
from tests.support.estimates import model_of
from tests.support.hostile_models import WORKLOAD
from tests.support.messages import Speaker

# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize(
    ("text", "lora", "option", "recorded"),
    [
        ("r=16", Lora(rank=16, alpha=32), "r=16", "lora r=16 dtype=float32"),
        ("alpha=32,r=16", Lora(rank=16, alpha=32), "r=16", "lora r=16 dtype=float32"),
        ("r=8,alpha=8", Lora(rank=8, alpha=8), "r=8,alpha=8", "lora r=8 alpha=8 dtype=float32"),
        ("r=4, targets=all-linear", Lora(rank=4, alpha=8), "r=4", "lora r=4 dtype=float32"),
        (
            "r=4,targets=q_proj+self_attn.v_proj,dtype=base",
            Lora(rank=4, alpha=8, targets=("q_proj", "self_attn.v_proj"), dtype="base"),
            "r=4,targets=q_proj+self_attn.v_proj,dtype=base",
            "lora r=4 targets=q_proj+self_attn.v_proj",
        ),
        (
            "dora,r=4,dropout=0.050,rslora,bias=all",
            Lora(rank=4, alpha=8, dropout=0.05, rslora=True, dora=True, bias="all"),
            "r=4,dropout=0.05,rslora,dora,bias=all",
            "lora r=4 dtype=float32 dropout=0.05 rslora dora bias=all",
        ),
        (
            "r=4,freeze=A,modules_to_save=lm_head+embed_tokens,dropout=0,dtype=float32",
            Lora(rank=4, alpha=8, freeze="A", modules_to_save=("lm_head", "embed_tokens")),
            "r=4,modules_to_save=lm_head+embed_tokens,freeze=A",
            "lora r=4 dtype=float32 modules_to_save=lm_head+embed_tokens freeze=A",
        ),
        (  # keys may have the names that PEFT gives them
            "r=4,lora_alpha=4,target_modules=q_proj,lora_dropout=0.1,use_dora,use_rslora",
            parse_lora("r=4,alpha=4,targets=q_proj,dropout=0.1,dora,rslora"),
            "r=4,alpha=4,targets=q_proj,dropout=0.1,rslora,dora",
            "lora r=4 alpha=4 targets=q_proj dtype=float32 dropout=0.1 rslora dora",
        ),
        (
            "r=4,velora",
            Lora(rank=4, alpha=8, velora="batch_average"),
            "r=4,velora",
            "lora r=4 dtype=float32 velora",
        ),
        (
            "velora=random,r=4,dtype=base",
            Lora(rank=4, alpha=8, dtype="base", velora="random"),
            "r=4,dtype=base,velora=random",
            "lora r=4 velora=random",
        ),
    ],
)
def test_adapters_have_one_text(text: str, lora: Lora, option: str, recorded: str) -> None:
    assert parse_lora(text) == lora
    assert lora.option == option_of(recorded) == option
    assert str(lora) == recorded
    assert parse_lora(option) == read_adapter(recorded) == lora


def test_a_record_of_before_says_adapters_in_the_dtype_of_their_layers() -> None:
    """Such records have no dtype; the command that makes them anew has one."""
    old = read_adapter("lora r=16")
    assert old == Lora(rank=16, alpha=32, dtype="base")
    assert str(old) == "lora r=16"
    workload = replace(WORKLOAD, model="tiny-llama", model_config="{}", adapter="lora r=16")
    command = profile_command(workload, optimizer="adamw", output="profile.yaml")
    assert "--lora r=16,dtype=base" in command


@pytest.mark.nightly(by_day=12)
@pytest.mark.parametrize(
    "text",
    [
        "16",
        "alpha=3",
        "r=4,r=5",
        "r=4,lora_alpha=5,alpha=5",
        "r=0",
        "r=²",
        "r=4,dropuot=0.1",
        "r=4,init=gaussian",
        "r=4,dropout=1",
        "r=4,dropout=nan",
        "r=4,dtype=bfloat16",
        "r=4,dtype=floot32",
        "r=4,freeze=B",
        "r=4,bias=lora",
        "r=4,dora=true",
        "r=4,rslora,rslora",
        "r=4,velora=mean",
        "r=4,velora=",
        "r=4,targets=q_proj+",
        "r=4,modules_to_save=lm head",
    ],
)
def test_a_wrong_adapter_is_one_clear_error(text: str, assert_says: Speaker) -> None:
    error = assert_says.refused(parse_lora, text)
    assert str(error.key).startswith("--lora")


def test_a_wrong_adapter_of_a_record_is_one_clear_error(assert_says: Speaker) -> None:
    found = []
    for text in ("qlora r=4", "lora r=4 dropuot=0.1"):
        with pytest.raises(ProtrainError) as caught:
            read_adapter(text)
        assert caught.value.key == "adapter"
        found.append(str(caught.value))
        assert option_of(text) == text
    assert_says(found)


# --- models ---------------------------------------------------------------------------------------


def seen(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype, bool]]:
    return {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}


@pytest.mark.nightly(but=("llama", "mixtral"))
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "t5", "mixtral", "bert", "vit"])
def test_all_linear_is_what_peft_takes_it_to_be(name: str) -> None:
    source = ZOO[name].source
    expected = by_peft(source, {"r": 2, "lora_alpha": 4}, dtype="bfloat16")
    adapter = str(parse_lora("r=2"))
    assert seen(model_of(source, adapter=adapter, dtype="bfloat16")) == seen(expected)
    on_meta = model_of(source, adapter=adapter, dtype="bfloat16", device="meta")
    assert seen(on_meta) == seen(expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "r=2": {},
    "r=2,dtype=base": {},
    "r=2,targets=q_proj+mlp.down_proj": {"target_modules": ["q_proj", "mlp.down_proj"]},
    "r=2,targets=q_proj+embed_tokens": {"target_modules": ["q_proj", "embed_tokens"]},
    "r=2,dropout=0.1,rslora,alpha=3": {"lora_dropout": 0.1, "use_rslora": True, "lora_alpha": 3},
    "r=2,dora": {"use_dora": True},
    "r=2,dora,dtype=base": {"use_dora": True},
    "r=2,velora": {"velora_config": {}},
    "r=2,bias=all": {"bias": "all"},
    "r=2,bias=lora_only": {"bias": "lora_only"},
    "r=2,modules_to_save=lm_head+norm": {"modules_to_save": ["lm_head", "norm"]},
    "r=2,modules_to_save=lm_head": {"modules_to_save": ["lm_head"]},
}


@pytest.mark.nightly(by_day=8)
@pytest.mark.parametrize("text", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_with_adapters_is_the_one_that_peft_makes(text: str, dtype: DType) -> None:
    """Every parameter has PEFT's bits, and the whole has its structure.

    Qwen2 has biases. A tied head that is saved is a copy of its own, and no longer tied.
    """
    source = ZOO["llama-tied" if text.endswith("lm_head") else "qwen2"].source
    lora = parse_lora(text)
    options = {"r": 2, "lora_alpha": 4} | OPTIONS[text]
    expected = by_peft(source, options, dtype=dtype, autocast=lora.dtype == "float32")
    found = model_of(source, adapter=str(lora), dtype=dtype)
    assert seen(found) == seen(expected)
    assert repr(found) == repr(expected)
    values = expected.state_dict()
    assert all(torch.equal(value, values[key]) for key, value in found.state_dict().items())
    on_meta = model_of(source, adapter=str(lora), dtype=dtype, device="meta")
    assert seen(on_meta) == seen(expected)


@pytest.mark.parametrize("text", ["r=4,freeze=A", "r=4,freeze=A,targets=q_proj+embed_tokens"])
def test_of_frozen_first_products_the_second_ones_are_trained_alone(text: str) -> None:
    source = load_source("tiny-llama")
    model = model_of(source, adapter=str(parse_lora(text)))
    both = model_of(source, adapter=str(parse_lora(text.replace(",freeze=A", ""))))
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), both.parameters(), strict=True)
    )
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == sum(p.requires_grad for p in both.parameters()) // 2
    assert all("lora_B" in name or "lora_embedding_B" in name for name in trained)


def test_adapters_fit_models_of_other_classes() -> None:
    source = ZOO["pyramid"].source
    first, again = (model_of(source, adapter="lora r=2").state_dict() for _ in range(2))
    assert any("lora_A" in key for key in first)
    assert all(torch.equal(value, again[key]) for key, value in first.items())


@pytest.mark.nightly(
    but=(
        "lora r=4 targets=qproj",
        "lora r=4 targets=embed_tokens dropout=0.1 dora modules_to_save=embed_tokens",
    )
)
@pytest.mark.parametrize(
    "adapter",
    [
        "lora r=4 targets=qproj",
        "lora r=4 targets=self_attn",
        "lora r=4 modules_to_save=lmhead",
        "lora r=4 targets=embed_tokens dropout=0.1 dora modules_to_save=embed_tokens",
        "lora r=4 velora dora",
        "lora r=4 velora targets=embed_tokens",
    ],
)
def test_what_a_model_has_not_is_refused_by_name(adapter: str, assert_says: Speaker) -> None:
    error = assert_says.refused(model_of, load_source("tiny-llama"), adapter=adapter)
    assert error.source == "tiny-llama"
