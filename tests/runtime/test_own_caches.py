"""Caches of keys and values: off in training, under a plan and in its profile; on in decoding."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from protrain_plan.models.sources import load_source
from protrain_plan.presentation.profiles import caveats
from protrain_runtime import restore
from protrain_runtime.activations.own_caches import switch_off_caches
from protrain_runtime.contract.records.plan import RECOMPUTE, Placement
from protrain_runtime.contract.records.profile import HANDS_ON, Profile
from tests.support.estimates import estimate, machine
from tests.support.runtime_cases import (
    VOCABULARY,
    Subject,
    assert_bitwise,
    attached,
    decided,
    labelled,
    llama,
    t5,
    tokens,
)
from tests.support.scenario import Loop, Run, Scenario

WARNING = (
    "config.use_cache is off in forwards with gradients while the model is profiled or follows a"
    " plan: training has no use for a cache of keys and values"
)
PATCH, NUM_LAYERS = 8, 3
SIZES: Mapping[str, Any] = {"hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 4}


def caching(make: Callable[[], nn.Module]) -> nn.Module:
    """The model with the cache that its configuration has by default."""
    model = make()
    for path, module in model.named_modules():
        if hasattr(module, "config") and not path.startswith("encoder"):
            module.config.use_cache = True
    return model


def composite() -> nn.Module:
    """The language model has a configuration within another one."""
    seeing = {"image_size": 2 * PATCH, "patch_size": PATCH, "num_hidden_layers": 1}
    config = LlavaConfig(
        text_config=LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=NUM_LAYERS, **SIZES),
        vision_config=CLIPVisionConfig(**seeing, **SIZES),
        image_token_index=VOCABULARY - 1,
    )
    model: nn.Module = LlavaForConditionalGeneration(config)
    for parameter in model.get_submodule("model.vision_tower").parameters():
        parameter.requires_grad_(False)
    return model


def adapted() -> nn.Module:
    model: Any = caching(partial(llama, tied=False))
    found: nn.Module = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    return found


class Wrapped(nn.Module):
    """A model of transformers in a module that is none, called with arguments of its own."""

    def __init__(self, asks: Callable[[], dict[str, Any]] = dict) -> None:
        super().__init__()
        self.inner, self.asks = caching(partial(llama, tied=True)), asks

    def forward(self, ids: Tensor) -> Any:
        return self.inner(input_ids=ids, labels=ids, **self.asks())


SUBJECTS = {
    "a decoder": Subject(partial(caching, partial(llama, tied=False)), labelled),
    "an encoder and a decoder": Subject(partial(caching, t5), labelled),
    "a configuration in another": Subject(
        composite, lambda n: {"input_ids": tokens(n) % (VOCABULARY - 1), "labels": tokens(n)}
    ),
    "adapters": Subject(adapted, labelled),
    "a wrapper": Subject(Wrapped, tokens),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_plan_trains_without_the_cache_and_like_plain_pytorch_with_it(
    name: str, tmp_path: Path
) -> None:
    subject = SUBJECTS[name]
    without = replace(subject, change=partial(switch_off_caches, stacklevel=None))
    found: list[Any] = []

    def script(run: Run) -> None:
        Loop(num_steps=3)(run)
        batch = subject.batch(0)
        call = partial(run.model, **batch) if isinstance(batch, dict) else partial(run.model, batch)
        found.append(call().past_key_values)
        with torch.no_grad():
            found.append(call().past_key_values)
            own = getattr(found[-1], "self_attention_cache", found[-1])
            run.seen += [layer.keys for layer in own.layers]

    asked = Scenario(
        model=subject,
        units=decided(without.units(), RECOMPUTE, Placement(tier="host")),
        script=script,
    )
    model = subject.build()
    before = attached(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = asked.prepared(model, tmp_path)
    assert [str(warning.message) for warning in caught] == [WARNING]
    assert_bitwise(asked.played(run), asked.plain())
    assert [cache is None for cache in found] == [True, False, False, False]
    restore(model)
    assert attached(model) == before


def test_a_plain_copy_trains_without_the_cache(tmp_path: Path) -> None:
    subject = SUBJECTS["a decoder"]
    units = decided(subject.units(), RECOMPUTE, Placement(tier="host"))
    run = Scenario(model=subject, units=units, options={"check": "bitwise"}).start(tmp_path)
    run.step(0, 1, 2)


SCRIPT = """
import tests.runtime.test_own_caches as cases
from transformers import DynamicCache

def made(model):
    return model, [cases.tokens(0)]

def default():
    return made(cases.Wrapped())

def off():
    model = cases.Wrapped()
    model.inner.config.use_cache = False
    return made(model)

def asked():
    return made(cases.Wrapped(lambda: {"use_cache": True}))

def given():
    return made(cases.Wrapped(lambda: {"past_key_values": DynamicCache()}))
"""


def profiled(path: Path, name: str) -> Profile:
    return estimate(
        load_source(f"{path}:{name}"), batch_size=1, seq_len=1, dtype="float32", hardware=machine()
    )


@pytest.mark.nightly
def test_a_profile_is_of_forwards_without_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    plain = profiled(path, "off")
    with pytest.warns(UserWarning, match=WARNING):
        found = profiled(path, "default")
    assert found.units == plain.units
    assert not any(unit.stays for unit in found.units)


@pytest.mark.nightly
def test_a_cache_that_is_asked_for_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    for name in ("asked", "given"):
        with pytest.warns(UserWarning, match=WARNING):
            found = profiled(path, name)
        blocks = [unit for unit in found.units if unit.kind == "block"]
        assert {unit.stays for unit in blocks} == {HANDS_ON}
        assert list(caveats(found)) == [
            f"a plan can neither move nor recompute {blocks[0].name} and {len(blocks) - 1} more,"
            " whose forward hands tensors on in its arguments. If these are a cache of keys and"
            " values (past_key_values, use_cache=True), call the model without it: training has no"
            " use for one"
        ]
