"""MLPs in tiles of tokens: found by their operators, equal up to rounding, in predicted bytes."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.profiling.estimated import estimate
from protrain_runtime.activations.forms import wrap_forward
from protrain_runtime.activations.tiled_mlp import takes_tokens_apart
from protrain_runtime.contract.records.plan import Offload, Persistent, Placement, Recompute
from protrain_runtime.contract.records.profile import Profile
from tests.support import runtime_cases
from tests.support.peaks import (
    assert_within_the_promise,
    bytes_of_others,
    peaks,
    without_freedom,
)
from tests.support.rounding import assert_as_near, in_every_precision
from tests.support.runtime_cases import decision_name, described_by, profiled_here

SIZES = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def phi3() -> Any:
    return Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0))


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def gpt2(dropout: float = 0.0) -> Any:
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    sizes = {"vocab_size": 300, "n_embd": 96, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "phi3": phi3, "gpt2": gpt2}


def blocks(model: Any) -> list[Any]:
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)


def gradients(model: Any, form: str, *, autocast: bool = False) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    for block in blocks(model):
        wrap_forward(block, form)
    ids = torch.randint(0, 300, (2, 77), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
@in_every_precision
def test_gradients_are_as_near_to_those_of_float64_as_plain_pytorchs(
    name: str, dtype: torch.dtype, autocast: bool
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    true = gradients(copy.deepcopy(model).double(), "keep")
    plain = gradients(model, "keep", autocast=autocast)
    found = gradients(model, "tiled", autocast=autocast)
    assert_as_near(found, plain, true)
    different = [key for key in found if not torch.equal(found[key], plain[key])]
    assert different  # it ran in tiles
    assert all(".mlp." in key for key in different) or dtype == torch.bfloat16


@pytest.mark.parametrize("frozen", ["weights", "inputs", "all but one"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    torch.manual_seed(0)
    model = llama()
    if frozen == "weights":
        for block in blocks(model):
            block.mlp.requires_grad_(False)
    elif frozen == "inputs":
        model.requires_grad_(False)
        blocks(model)[0].mlp.requires_grad_(True)
    else:
        model.requires_grad_(False)
        blocks(model)[1].mlp.down_proj.weight.requires_grad_(True)
    plain, found = gradients(model, "keep"), gradients(model, "tiled")
    assert plain.keys() == found.keys() != set()
    for key, value in plain.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("build", [mixtral, lambda: gpt2(0.1)], ids=["experts", "dropout"])
def test_blocks_without_such_an_mlp_are_recomputed_as_they_are(build: Callable[[], Any]) -> None:
    """Experts move tokens about, and dropout draws numbers in another order."""
    torch.manual_seed(0)
    model = build()
    found = []
    for form in ("full", "tiled"):
        torch.manual_seed(1)
        found.append(gradients(model, form))
    full, tiled = found
    assert all(torch.equal(full[key], tiled[key]) for key in full)


class Mixes(nn.Module):
    """Products as an MLP has them, with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.between = between

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.down(self.between(self.up(tokens)))
        return found


@pytest.mark.parametrize(
    ("between", "apart"),
    [
        (torch.relu, True),
        (lambda x: x * x.sigmoid(), True),
        (lambda x: x / x.float().square().mean(-1, keepdim=True).sqrt().to(x.dtype), True),
        (lambda x: x[..., :16] * torch.softmax(x, -1), True),
        (lambda x: x.flip(1), False),
        (lambda x: x.roll(1, 1), False),
        (lambda x: x + x[:, :1], False),
        (lambda x: x.cumsum(1), False),
        (lambda x: x - x.mean(1, keepdim=True), False),
        (lambda x: torch.softmax(x, 1), False),
        (lambda x: x @ x.transpose(1, 2) @ x, False),
        (lambda x: x.transpose(0, 1).reshape(x.shape), False),
        (lambda x: torch.dropout(x, 0.5, True), False),
        (lambda x: x.sort(1).values, False),
        (lambda x: x.view(x.shape[0], -1, 4, 8).view(x.shape), False),  # raises on few tokens
        (lambda x: x * torch.arange(x.shape[1])[None, :, None], False),
    ],
)
def test_an_mlp_is_told_by_its_operators(between: Callable[[Tensor], Tensor], apart: bool) -> None:
    state = torch.get_rng_state()
    assert takes_tokens_apart(Mixes(between), torch.randn(3, 5, 8)) is apart
    assert takes_tokens_apart(Mixes(between), torch.randn(1, 2, 8)) is apart
    assert state.shape == torch.get_rng_state().shape


# --- profiles and plans ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    others = bytes_of_others()
    folder = tmp_path_factory.mktemp("profile")
    record = profiled_here("tiny-llama", folder, num_steps=2, allow=("rounding",))
    return replace(record, base_bytes=record.base_bytes - others)


def test_it_needs_less_while_it_runs_than_recomputing_in_full(profile: Profile) -> None:
    for unit in profile.units:
        if unit.kind == "block":
            tiled, full = unit.cost("tiled"), unit.cost("full")
            assert tiled.kept_bytes == full.kept_bytes
            assert tiled.backward_peak_bytes < full.backward_peak_bytes


@pytest.mark.parametrize("states", [Persistent(), Offload(tier="disk")], ids=decision_name)
def test_measured_bytes_match_predicted_in_every_slot(
    profile: Profile, states: Placement, tmp_path: Path
) -> None:
    units = without_freedom(
        runtime_cases.decided(described_by(profile), Recompute(form="tiled"), states)
    )
    assert_within_the_promise(peaks(profile, units, tmp_path))


def test_estimates_have_the_forms_that_round() -> None:
    """Of tensors without values, too: an MLP is told by operators, not by numbers."""
    sizes: Any = {"batch_size": 2, "seq_len": 256, "dtype": "float32"}
    machine, source = load_hardware("cpu"), load_source("tiny-llama")
    found = estimate(source, **sizes, hardware=machine, allow=("rounding",))
    for unit in found.units:
        if unit.kind == "block":
            assert unit.cost("tiled").backward_peak_bytes < unit.cost("full").backward_peak_bytes
    last = found.units[-1]
    assert last.cost("8 tiles").kept_bytes < last.cost("in place").kept_bytes
    exact = estimate(source, **sizes, hardware=machine)
    assert not any("tile" in cost.form for unit in exact.units for cost in unit.forms)
