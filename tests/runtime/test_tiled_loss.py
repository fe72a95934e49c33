"""A head and its loss in tiles: equal to plain PyTorch up to rounding, in the bytes predicted."""

import copy
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from protrain_plan.commands.training import train
from protrain_plan.models.sources import load_source
from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.planner import solve_problem
from protrain_runtime import prepare
from protrain_runtime.activations.forms import around
from protrain_runtime.contract.records import dumps_plan, loads_plan
from protrain_runtime.contract.records.plan import (
    Budgets,
    Keep,
    Offload,
    Persistent,
    Placement,
    Recompute,
)
from protrain_runtime.contract.records.profile import Profile
from tests.support import runtime_cases
from tests.support.peaks import (
    assert_within_the_promise,
    bytes_of_others,
    peaks,
    without_freedom,
)
from tests.support.rounding import assert_as_near, in_every_precision
from tests.support.runtime_cases import (
    ADAMW,
    BATCH,
    SEQUENCE,
    build,
    decision_name,
    described_by,
    plain,
    plan_for,
    profiled_here,
)
from tests.support.runtime_cases import train as train_model

CLASSES = 1000
TOKENS = (2, 77)  # no multiple of a tile


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=CLASSES,
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=1,
            num_attention_heads=4,
        )
    )


def tied() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=CLASSES,
            n_embd=96,
            n_layer=1,
            n_head=4,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class WithBias(nn.Module):
    """A head with a bias, and a loss that is a sum over shifted logits, as older code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 64)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        ahead = logits[..., :-1, :].contiguous().float().view(-1, CLASSES)
        loss = cross_entropy(ahead, labels[..., 1:].reshape(-1), reduction="sum")
        return {"loss": loss, "logits": logits}


class Capped(nn.Module):
    """Logits that are scaled and capped before a mean, in all ways of writing it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 64)
        self.head = nn.Linear(64, CLASSES, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        logits = 3 * self.head(self.embedding(input_ids)) / 2.5
        logits = torch.tanh(logits).mul(4.0).float().div(2).tanh() * 6
        return {"loss": cross_entropy(logits.view(-1, CLASSES), labels.view(-1)), "logits": logits}


def softcapped() -> Any:
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=CLASSES,
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            final_logit_softcapping=5.0,
        )
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "tied": tied,
    "bias": WithBias,
    "capped": Capped,
    "softcapped": softcapped,
}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, CLASSES, TOKENS, generator=generator)
    labels = ids.clone()
    labels[0, :10] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(
    model: nn.Module, context: AbstractContextManager[object], *, autocast: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients; the whole model runs in `context`."""
    model = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), context:
        loss = model(**batch())["loss"]
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


@pytest.mark.parametrize("name", MODELS)
@in_every_precision
def test_gradients_are_as_near_to_those_of_float64_as_plain_pytorchs(
    name: str, dtype: torch.dtype, autocast: bool
) -> None:
    """Every gradient, of a head that is trained and of a frozen one: none is doubled or missing."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    for frozen in (False, True):
        head = model.get_output_embeddings() if name != "bias" else model.head
        if frozen and name not in ("tied", "softcapped"):
            head.requires_grad_(False)
        true_loss, true = gradients(copy.deepcopy(model).double(), nullcontext())
        plain_loss, plain_found = gradients(model, nullcontext(), autocast=autocast)
        for form in ("8 tiles", "64 tiles"):
            loss, found = gradients(model, around(form), autocast=autocast)
            assert loss.dtype == plain_loss.dtype
            assert_as_near(found, plain_found, true)
            torch.testing.assert_close(loss.double(), true_loss.double(), rtol=2e-2, atol=0.0)


@pytest.mark.parametrize("name", ["llama", "capped", "softcapped"])
def test_nothing_is_as_large_as_the_logits(name: str) -> None:
    """Of what autograd keeps; the bytes of all slots are compared below."""
    torch.manual_seed(0)
    model = MODELS[name]()
    sizes: list[int] = []

    def noted(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda kept: kept), around("8 tiles"):
        model(**batch())
    logits = TOKENS[0] * TOKENS[1] * CLASSES
    assert max(sizes) < logits
    with torch.autograd.graph.saved_tensors_hooks(noted, lambda kept: kept):
        model(**batch())
    assert max(sizes) >= logits


class Asking(WithBias):
    """Counts right answers in its forward, before and after the loss."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        before = (logits.detach().argmax(-1) == labels).sum()
        loss = cross_entropy(logits.view(-1, CLASSES), labels.reshape(-1))
        with torch.no_grad():
            after = (logits.argmax(-1) == labels).sum()
        return {"loss": loss, "right": torch.stack([before, after]), "logits": logits}


class UsingTwice(WithBias):
    """Its loss has a second term of the logits."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        loss = cross_entropy(logits.view(-1, CLASSES), labels.reshape(-1))
        return {"loss": loss + 1e-4 * logits.logsumexp(-1).square().mean()}


def test_who_asks_for_logits_in_the_forward_gets_them() -> None:
    torch.manual_seed(0)
    model = Asking()
    with torch.no_grad():
        expected = model(**batch())
    with around("8 tiles"):
        found = model(**batch())
    assert torch.equal(found["right"], expected["right"])
    for frozen in (False, True):
        twice = UsingTwice()
        twice.head.requires_grad_(not frozen)
        _, plain_found = gradients(twice, nullcontext())
        _, tiled = gradients(twice, around("8 tiles"))
        for key, value in plain_found.items():
            torch.testing.assert_close(tiled[key], value, rtol=1e-4, atol=1e-6)


def test_logits_are_refused_after_the_forward() -> None:
    """The head may have left the device by then, or have been updated."""
    model = Asking()
    with around("8 tiles"):
        output = model(**batch())
    assert output["logits"].shape == (*TOKENS, CLASSES)
    with pytest.raises(RuntimeError, match="asked for after the forward"):
        output["logits"].sum()
    output["loss"].backward()
    with pytest.raises(RuntimeError, match="asked for after the forward"):
        output["logits"].argmax(-1)


# --- profiles and plans ---------------------------------------------------------------------------

ROUNDING = ("rounding",)
PIECE_BYTES = 1 << 16
AMPLE = 10**12


@pytest.fixture(scope="module", params=["bfloat16"])
def profile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder = tmp_path_factory.mktemp("profile")
    config = json.loads(load_source("tiny-llama").model_config) | {"vocab_size": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    others = bytes_of_others()
    record = profiled_here(str(folder), folder, dtype=request.param, num_steps=2, allow=ROUNDING)
    return replace(record, base_bytes=record.base_bytes - others)


def test_a_profile_with_leave_has_the_forms_and_their_bytes(profile: Profile) -> None:
    *_, last = profile.units
    costs = {cost.form: cost for cost in last.forms}
    assert list(costs)[:2] == ["keep", "in place"]
    assert {"8 tiles", "64 tiles"} & set(costs)
    logits = BATCH * SEQUENCE * 4096 * 2
    for form in {"8 tiles", "64 tiles"} & set(costs):
        assert costs[form].kept_bytes < costs["in place"].kept_bytes - 0.8 * logits
        assert costs[form].backward_peak_bytes < costs["in place"].backward_peak_bytes
    assert profile.allowed == ROUNDING


@pytest.mark.parametrize("states", [Persistent(), Offload(tier="disk")], ids=decision_name)
@pytest.mark.parametrize("form", ["8 tiles", "64 tiles"])
def test_measured_bytes_match_predicted_in_every_slot(
    profile: Profile, form: str, states: Placement, tmp_path: Path
) -> None:
    if form not in {cost.form for cost in profile.units[-1].forms}:
        pytest.skip("the form needs no less than another one here")
    *before, part = runtime_cases.decided(described_by(profile), Recompute(), states)
    units = without_freedom((*before, replace(part, activations=Keep(form=form))))
    assert_within_the_promise(peaks(profile, units, tmp_path))


def test_a_tight_budget_takes_it_and_says_so(profile: Profile, tmp_path: Path) -> None:
    def answer(device: int, allow: tuple[str, ...] = ROUNDING) -> Solved:
        budgets = Budgets(device=device, host=0, disk=0)
        pins = (parse_pin("layers.*: keep"),)
        problem = Problem.of(
            profile,
            budgets,
            pins=pins,
            allow=allow,
            settings=replace(OVERLAPPING, piece_bytes=PIECE_BYTES),
        )
        found = solve_problem(problem, budgets)
        assert isinstance(found, Solved)
        return found

    def needed(found: Solved) -> int:
        peak = found.plan.prediction.peak_bytes
        return peak.device + peak.context

    ample = answer(AMPLE)
    assert (ample.plan.exactness, ample.plan.allowed) == ("bitwise", ())
    in_place = min(
        needed(answer(AMPLE, ())),
        needed(answer(needed(answer(AMPLE, ())) - BATCH * SEQUENCE * 4096, ())),
    )
    tight = answer(in_place - BATCH * SEQUENCE * 4096)
    assert (tight.plan.exactness, tight.plan.allowed) == ("rounding", ROUNDING)
    assert not tight.plan.exact
    assert "tiles" in tight.plan.units[-1].activations.form
    assert loads_plan(dumps_plan(tight.plan)) == tight.plan
    strange = bytes_of_others()
    run = partial(train, tight.plan, num_steps=3, text=None, spill_directory=tmp_path)
    found = run(plain=False)
    assert found.measured_peak_bytes is not None
    measured = found.measured_peak_bytes.device - strange
    promised = tight.plan.prediction.peak_bytes.device
    assert 0.98 * promised <= measured <= promised
    expected = run(plain=True)
    for one, other in zip(found.losses, expected.losses, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_where_states_wait_changes_no_bit(tmp_path: Path) -> None:
    """Plans with one form of the last part train alike, and near to plain PyTorch."""
    runs = []
    both: tuple[Placement, ...] = (Persistent(), Offload(tier="disk"))
    for number, states in enumerate(both):
        model = build("llama-tied")
        *before, last = runtime_cases.decided(
            runtime_cases.described("llama-tied"), Recompute(), states
        )
        units = (*before, replace(last, activations=Keep(form="8 tiles")))
        plan = replace(plan_for(model, units), exact=False, exactness="rounding", allowed=ROUNDING)
        spill = tmp_path / str(number)
        spill.mkdir()
        model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=spill)
        runs.append(train_model("llama-tied", model, optimizer))
    first, second = runs
    assert all(map(torch.equal, first.losses, second.losses))
    for one, other in zip(first.losses, plain("llama-tied").losses, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=0.0)
