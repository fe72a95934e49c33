"""Estimated profiles against what real tensors take on this machine."""

import json
from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from protrain_plan.models.sources import ModelSource, load_source
from protrain_plan.presentation.profiles import profile_text
from protrain_runtime.activations.own_checkpoints import switch_off_checkpointing
from protrain_runtime.contract.program.program import unit_words
from protrain_runtime.contract.records import dumps_profile, loads_profile
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.profile import DType, Profile
from protrain_runtime.diagnostics.matching import model_fingerprint
from tests.support.estimates import batches_of, bytes_alone, estimate, machine, model_of, weighed
from tests.support.messages import Speaker
from tests.support.runtime_cases import described_by

TIED = {"model_type": "llama", "num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 2, "vocab_size": 300, "tie_word_embeddings": True}  # fmt: skip
T5 = {"model_type": "t5", "num_layers": 3, "d_model": 64, "d_ff": 96, "num_heads": 2, "d_kv": 32,
      "vocab_size": 300, "decoder_start_token_id": 0}  # fmt: skip
SOURCES = {"tiny-llama": "", "tiny-gpt2": "", "llama-tied": json.dumps(TIED), "t5": json.dumps(T5)}


def estimated(source: ModelSource, hardware: Hardware, dtype: DType = "float32") -> Profile:
    return estimate(source, batch_size=2, seq_len=32, dtype=dtype, hardware=hardware)


@cache
def tiny_llama() -> Profile:
    return estimated(load_source("tiny-llama"), machine())


@pytest.mark.nightly("llama-tied")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name != "llama-tied" else ())
        for name in SOURCES
    ],
)
def test_bytes_are_those_of_real_tensors(name: str) -> None:
    source = load_source(name, model_config=SOURCES[name])
    profile = estimated(source, machine())
    model = model_of(source)
    batch = next(iter(batches_of(source, batch_size=2, seq_len=32)))
    real, anatomy = weighed(model, batch, warm=True)
    assert list(map(bytes_alone, profile.units, real)) == real
    assert profile.base_bytes == anatomy.base_bytes
    assert profile.model_fingerprint == model_fingerprint(model)


@pytest.mark.nightly
def test_model_flops_are_those_of_palm_s_formula() -> None:
    """6 N + 12 L H Q T for each token (arXiv 2204.02311, appendix B); N as far as it multiplies."""
    profile, source = tiny_llama(), load_source("tiny-llama")
    config = json.loads(source.model_config)
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    weights = {
        name: parameter.numel()
        for name, parameter in model_of(source).named_parameters()
        if parameter.dim() == 2 and "embed_tokens" not in name
    }
    assert "lm_head.weight" in weights
    each = 6 * sum(weights.values()) + 12 * layers * hidden * 32
    assert profile.model_flops == 2 * 32 * each


@pytest.mark.nightly
def test_frozen_weights_have_gradients_of_inputs_alone() -> None:
    source, whole = load_source("tiny-llama"), tiny_llama()
    adapted = estimate(
        source,
        batch_size=2,
        seq_len=32,
        dtype="float32",
        hardware=machine(),
        adapter="lora r=1 dtype=float32",
    )
    assert whole.model_flops * 0.6 < adapted.model_flops < whole.model_flops * 0.75


@pytest.mark.slow
def test_a_factorys_model_can_be_estimated_in_another_dtype() -> None:
    source = load_source("tests.support.functional_model:factory")
    profile = estimated(source, machine(), dtype="bfloat16")
    plain = estimated(source, machine())
    for unit, wide in zip(profile.units, plain.units, strict=True):
        assert 2 * unit.parameter_bytes == wide.parameter_bytes
    assert profile.model_fingerprint == model_fingerprint(model_of(source, dtype="bfloat16"))


def test_the_record_says_that_it_is_estimated_and_is_read_again() -> None:
    profile = estimated(load_source("tiny-llama"), machine("b200"), dtype="bfloat16")
    assert profile.method == "estimated"
    assert profile.workload.device == "cuda"
    assert all(form.forward_s > 0 for unit in profile.units for form in unit.forms)
    assert loads_profile(dumps_profile(profile), "profile.yaml") == profile
    page = Console(width=80, file=StringIO())
    page.print(profile_text(profile, Path("profile.yaml")))
    assert isinstance(page.file, StringIO)
    lines = page.file.getvalue().splitlines()
    assert lines[0].split() == [
        "module",
        "params",
        "states",
        "kept",
        "input",
        "forward",
        "backward",
    ]
    names = [line.split()[0] for line in takewhile(str.strip, lines[1:])]
    assert names[:2] == ["model.embed_tokens", "model.layers.0"]
    assert "model.norm," in names  # lm_head and the loss
    assert "estimated for b200: estimates not validated on this device" in lines


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny-llama", "model.norm, lm_head and the loss"),
        ("llama-tied", "model.norm, the tied model.embed_tokens and the loss"),
        ("tiny-gpt2", "transformer.ln_f, the tied transformer.wte and the loss"),
        ("t5", "decoder.final_layer_norm, the tied encoder.embed_tokens and the loss"),
    ],
)
def test_the_last_unit_is_named_with_what_it_holds(name: str, words: str) -> None:
    """Also in a plan, which knows its units by name; no other unit is named so."""
    profile = estimated(load_source(name, model_config=SOURCES[name]), machine())
    last = len(profile.units) - 1
    for units in (profile.units, described_by(profile)):
        assert unit_words(units, last) == words
        assert [unit_words(units, at) for at in range(last)] == [u.name for u in units[:last]]


@pytest.mark.nightly
def test_modules_below_an_adapter_are_named_by_their_own_names() -> None:
    names = ("base.model.norm.weight", "base.lm_head.base_layer.weight", "base.lm_head.lora_A.d.w")
    part = replace(tiny_llama().units[-1], name="base.model.norm", parameters=names)
    assert unit_words([part], 0) == "base.model.norm, lm_head and the loss"


@pytest.mark.slow
def test_recomputing_takes_longer_and_keeps_less() -> None:
    for unit in tiny_llama().units:
        if unit.kind == "block":
            keep, full = unit.cost("keep"), unit.cost("full")
            assert full.backward_s > keep.backward_s
            assert full.forward_s == keep.forward_s
            assert full.kept_bytes < keep.kept_bytes


@pytest.mark.nightly
def test_the_devices_step_moves_parameters_gradients_and_states() -> None:
    hardware = machine()
    assert hardware.rates is not None
    speed = hardware.rates.memory_bytes_per_s * hardware.rates.memory_efficiency
    profile = tiny_llama()
    moved = 3 * 4 + 2 * 2 * 4  # float32: p, g, p; two states both ways
    assert profile.optimizer.device_parameters_per_s == pytest.approx(speed / moved, rel=1e-3)
    # In host memory also the gradient that arrives and the parameter that is read twice.
    of_node = hardware.rates.host_bandwidth_bytes_per_s / (moved + 3 * 4)
    assert profile.optimizer.node_parameters_per_s == pytest.approx(of_node, rel=1e-3)
    # Where the memory's speed is not told, threads alone bind it.
    host = min(of_node or float("inf"), hardware.rates.host_parameters_per_s)
    assert profile.optimizer.host_parameters_per_s == pytest.approx(host, rel=1e-3)


def test_a_machine_without_rates_is_refused(assert_says: Speaker) -> None:
    assert_says.refused(estimated, load_source("tiny-llama"), replace(machine(), rates=None))


def test_a_processor_whose_kernels_are_not_bounded_is_refused(assert_says: Speaker) -> None:
    hardware = machine()
    arm = replace(hardware, device=replace(hardware.device, name="aarch64", num_threads=10**4))
    assert_says.refused(estimated, load_source("tiny-llama"), arm)


CHECKPOINTED = """
from protrain_plan.models.sources import load_source
from tests.support.estimates import batches_of, model_of

def plain():
    source = load_source("tiny-llama")
    return model_of(source), batches_of(source, batch_size=2, seq_len=32)

def checkpointed():
    model, batches = plain()
    model.gradient_checkpointing_enable()
    return model, batches
"""


def test_a_models_own_checkpointing_is_switched_off_and_on_again() -> None:
    model: Any = model_of(load_source("tiny-llama"))
    model.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match="gradient checkpointing is switched off"):
        switch_on_again = switch_off_checkpointing(model)
    assert not model.is_gradient_checkpointing
    switch_on_again()
    assert model.is_gradient_checkpointing


@pytest.mark.slow
def test_a_models_own_checkpointing_is_off_in_its_estimate(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CHECKPOINTED)
    plain = estimated(load_source(f"{tmp_path}/mine.py:plain"), machine())
    with pytest.warns(UserWarning, match="gradient checkpointing is switched off"):
        found = estimated(load_source(f"{tmp_path}/mine.py:checkpointed"), machine())
    assert found.units == plain.units
