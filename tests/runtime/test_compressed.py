"""Compressed copies: bounds on what comes back, and training with them under plans.

What is random in them is a hash of what is saved, so that plans are compared bit by bit with plain
PyTorch that packs alike: without transfers, recomputation of others, and places to wait.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.model.problem import OVERLAPPING
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.objectives import Objective, Question, ask
from protrain_plan.planning.search.improving import Effort
from protrain_runtime import load, prepare, save, with_master_weights
from protrain_runtime.activations import compressed
from protrain_runtime.activations.compressed import GROUP, MIN_ELEMENTS, dequantized, quantized
from protrain_runtime.activations.forms import in_form, wrap_forward
from protrain_runtime.contract.records import read_profile, write_profile
from protrain_runtime.contract.records.decisions import ACTIVATIONS, activations_text
from protrain_runtime.contract.records.plan import (
    Activations,
    Budgets,
    Keep,
    Offload,
    Persistent,
    Placement,
    Plan,
    Recompute,
    Swap,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import Form, Profile
from protrain_runtime.diagnostics.matching import model_fingerprint
from tests.support.compressing import scales_of, seeded
from tests.support.peaks import (
    SLACK_BYTES,
    assert_within_the_promise,
    bytes_of_others,
    peaks,
    without_freedom,
)
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import (
    ADAMW,
    BATCH,
    SEQUENCE,
    Outcome,
    assert_bitwise,
    batch,
    build,
    decided,
    decision_name,
    described,
    described_by,
    differences,
    made_once,
    mixed,
    outcome,
    plain,
    plan_for,
    plan_of,
    profiled_here,
    train,
    units_of,
)
from tests.support.training_rows import uncompiled, workload

LEAVES = ("int8-activations", "low-rank-activations")
FORMS: tuple[Form, ...] = ("int8", "low-rank")
FORM = pytest.mark.parametrize("form", FORMS)
NUM_SEEDS = 400


# --- what comes back ------------------------------------------------------------------------------


def elements(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of sizes that differ from group to group, with zeros among them."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    values *= torch.linspace(0, 30, count).exp2()
    values[::7] = 0
    return values.clamp(-60000, 60000).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [GROUP, 20 * GROUP + 1, 5000])
def test_an_int8_error_is_below_one_scale_and_zero_stays(count: int, dtype: torch.dtype) -> None:
    values = elements(count, dtype)
    packed = quantized(values)
    assert packed.numel() == count + 4 * -(-count // GROUP)
    back = dequantized(packed, dtype)
    # What comes back is rounded to the dtype once more.
    bound = scales_of(packed, count) + values.double().abs() * 2 * torch.finfo(dtype).eps
    assert ((back.double() - values.double()).abs() <= bound).all()
    assert (back[values == 0] == 0).all()
    assert (back * values >= 0).all()


def test_tiles_are_packed_as_a_whole_is(monkeypatch: pytest.MonkeyPatch) -> None:
    values = elements(40 * GROUP + 3)
    whole = quantized(values)
    monkeypatch.setattr(compressed, "TILE", 7 * GROUP)
    cut = quantized(values)  # rounded otherwise: a tile has its own noise
    assert torch.equal(scales_of(cut, values.numel()), scales_of(whole, values.numel()))
    assert torch.equal(dequantized(whole, torch.float32), dequantized_in_one(whole))
    rows, seed = torch.randn(64, 96), torch.tensor(5)
    projection = compressed.projected(rows, seed)
    monkeypatch.setattr(compressed, "TILE", 1 << 22)
    torch.testing.assert_close(compressed.projected(rows, seed), projection)
    again = compressed.rebuilt(projection, seed, 96)
    monkeypatch.setattr(compressed, "TILE", 8 * 24)
    torch.testing.assert_close(compressed.rebuilt(projection, seed, 96), again)


def dequantized_in_one(packed: Tensor) -> Tensor:
    groups = -(-packed.numel() // (GROUP + 4))
    count = packed.numel() - 4 * groups
    integers = packed[4 * groups :].view(torch.int8)
    return torch.mul(integers, scales_of(packed, count)).float()


def test_int8_copies_are_unbiased_with_bounded_variance_and_errors_independent_in_pairs() -> None:
    """Expectations over seeds, within five standard errors."""
    values = elements(4 * GROUP)
    errors = torch.empty(NUM_SEEDS, values.numel(), dtype=torch.float64)
    for seed in range(NUM_SEEDS):
        with seeded(seed):
            packed = quantized(values)
        errors[seed] = (dequantized(packed, torch.float32) - values).double()
    errors /= scales_of(packed, values.numel())
    assert (errors.mean(0).abs() <= 5 * 0.5 / NUM_SEEDS**0.5).all()
    fractions = (values.double() / scales_of(packed, values.numel())) % 1
    variances = fractions * (1 - fractions)
    assert variances.max() <= 0.25
    # Of squares, which are f^2 or (1 - f)^2; what is rare is not seen so often.
    spread = 5 * (1 - 2 * fractions).abs() * (variances / NUM_SEEDS) ** 0.5 + 5e-3
    assert ((errors.square().mean(0) - variances).abs() <= spread).all()
    weights = torch.randn(values.numel(), generator=torch.Generator().manual_seed(1)).double()
    sums = errors @ weights  # their variance is the sum of the variances, if pairs are independent
    assert 0.7 < sums.square().mean() / (weights.square() @ variances) < 1.4


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), float("-inf")])
def test_a_group_that_is_not_finite_comes_back_as_nan_and_others_as_without(worst: float) -> None:
    values = elements(3 * GROUP)
    values[GROUP + 5] = worst
    back = dequantized(quantized(values), torch.float32)
    assert back[GROUP : 2 * GROUP].isnan().all()
    assert back[:GROUP].isfinite().all()
    assert back[2 * GROUP :].isfinite().all()


@pytest.mark.parametrize("size", [1e-45, 1e-38, 3.4028234e38])
def test_the_smallest_and_the_largest_numbers_come_back(size: float) -> None:
    values = torch.full((GROUP,), size)
    back = dequantized(quantized(values), torch.float32)
    assert (back.double() - values.double()).abs().max() <= max(size / 127, 1.2e-38)


def test_projections_are_the_identity_in_expectation_with_the_variance_of_the_note() -> None:
    features, rows = 64, torch.eye(64)
    rank = compressed.rank_of(features)
    assert rank == 16
    mean, square = torch.zeros(64, 64).double(), torch.zeros(64, 64).double()
    for seed in range(NUM_SEEDS):
        word = torch.tensor(seed * 7919)
        found = compressed.rebuilt(compressed.projected(rows, word), word, features).double()
        torch.testing.assert_close(found.diagonal(), torch.ones(64).double())
        mean += found / NUM_SEEDS
        square += found.square() / NUM_SEEDS
    off = ~torch.eye(64, dtype=torch.bool)
    assert (mean[off].abs() <= 5 * (1 / rank / NUM_SEEDS) ** 0.5).all()
    assert abs(square[off].mean() * rank - 1) < 0.02


def test_ranks_are_a_quarter_of_the_features_in_eights() -> None:
    assert [compressed.rank_of(one) for one in (31, 32, 96, 100, 4096)] == [None, 8, 24, 32, 1024]


@FORM
def test_a_linear_layers_gradient_is_unbiased_and_its_inputs_exact(form: Form) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(64, 32)
    hidden = torch.randn(4, 64, 64, generator=generator).requires_grad_()
    above = torch.randn(4, 64, 32, generator=generator)

    def gradients() -> tuple[Tensor, Tensor]:
        output = in_form(form, layer.forward, layer)(hidden * 1)
        assert isinstance(output, Tensor)
        assert torch.equal(output, layer(hidden))
        weight, given = torch.autograd.grad(output, (layer.weight, hidden), above)
        return weight, given

    exact, exact_input = torch.autograd.grad(layer(hidden), (layer.weight, hidden), above)
    mean, variance = torch.zeros_like(exact), 0.0
    for seed in range(NUM_SEEDS):
        with seeded(seed):
            found, found_input = gradients()
        assert torch.equal(found_input, exact_input)
        mean += found / NUM_SEEDS
        variance += (found - exact).square().sum().item() / NUM_SEEDS
    size = exact.square().sum().item()
    if form == "int8":
        scales = scales_of(quantized(hidden.detach().flatten()), hidden.numel()).view(-1, 64)
        bound = (above.view(-1, 32).double().square().T @ scales.square()).sum().item() / 4
        assert variance < bound
    else:
        bound = size * 63 / 16
        assert abs(variance / bound - 1) < 0.1
    # The mean's error has the variance over the number of seeds.
    assert (mean - exact).square().sum().item() < 1.5 * variance / NUM_SEEDS


# --- what is packed -------------------------------------------------------------------------------


class Seen:
    """What reaches the hooks around a block."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor.detach())
        return tensor.detach()

    @property
    def num_bytes(self) -> int:
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in self.tensors}
        return sum(storage.nbytes() for storage in storages.values())

    def shapes(self, dtype: torch.dtype) -> list[tuple[int, ...]]:
        return [tuple(one.shape) for one in self.tensors if one.dtype == dtype]


def saved_by(form: Form, module: nn.Module, *inputs: Tensor, **options: Any) -> Seen:
    seen = Seen()
    with saved_tensors_hooks(seen.pack, lambda kept: kept):
        in_form(form, module.forward, module)(*inputs, **options)
    return seen


class Shared(nn.Module):
    """Two linear layers of one input, a mask, and a product of what they give."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64, bias=bias), nn.Linear(64, 64, bias=bias)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.left(hidden).relu() * self.right(hidden) * mask
        return result


def hidden_and_mask(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(128, 64, dtype=dtype, requires_grad=True) * 1
    return hidden, torch.ones(128, 64, dtype=dtype)


def test_int8_packs_each_activation_once_and_no_weight_or_mask() -> None:
    seen = saved_by("int8", Shared(), *hidden_and_mask())
    groups = 128 * 64 // GROUP
    # The input, relu's result, the other factor, and the product that the mask is multiplied with
    # is not saved: its gradient needs the mask alone.
    assert seen.shapes(torch.uint8) == [(128 * 64 + 4 * groups,)] * 3
    assert set(seen.shapes(torch.float32)) == {(64, 64), (128, 64)}
    assert seen.shapes(torch.float32).count((128, 64)) == 1


def test_low_rank_projects_an_input_once_for_all_linear_layers() -> None:
    seen = saved_by("low-rank", Shared(), *hidden_and_mask())
    assert seen.shapes(torch.float32).count((128, 16)) == 1
    assert seen.shapes(torch.int64) == [()]  # the seed
    frozen = Shared()
    frozen.left.weight.requires_grad_(False)
    frozen.right.weight.requires_grad_(False)
    assert (128, 16) not in saved_by("low-rank", frozen, *hidden_and_mask()).shapes(torch.float32)


@pytest.mark.parametrize("trainable", [True, False])
def test_casts_of_weights_stay_under_autocast(trainable: bool) -> None:
    block = Shared().requires_grad_(trainable)
    with torch.autocast("cpu", torch.bfloat16):
        seen = saved_by("int8", block, *hidden_and_mask())
    assert seen.shapes(torch.bfloat16).count((64, 64)) == 2
    # Autocast casts the input for each of the layers.
    assert len(seen.shapes(torch.uint8)) == (4 if trainable else 2)


def test_small_tensors_and_other_types_stay() -> None:
    class Odd(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            small = hidden[: MIN_ELEMENTS // 64 - 1].exp()
            return small.sum() + hidden.double().exp().sum() + hidden[hidden > 0].sum()

    seen = saved_by("int8", Odd(), hidden_and_mask()[0])
    assert seen.shapes(torch.uint8) == []


def test_an_expanded_tensor_is_packed_without_its_repetitions() -> None:
    class Expanding(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.exp()[None].expand(8, -1, -1).mul(hidden[None].expand(8, -1, -1)).sum()

    hidden = hidden_and_mask()[0]
    seen = saved_by("int8", Expanding(), hidden)
    assert set(seen.shapes(torch.uint8)) == {(128 * 64 + 128,)}
    leaf = torch.randn(128, 64, requires_grad=True)
    block = Expanding()
    result = in_form("int8", block.forward, block)(leaf * 1)
    assert isinstance(result, Tensor)
    result.backward()
    expected = leaf.detach().requires_grad_()
    Expanding()(expected * 1).backward()
    assert leaf.grad is not None
    assert expected.grad is not None
    assert (leaf.grad - expected.grad).norm() < 0.02 * expected.grad.norm()


@pytest.mark.parametrize("view", ["transposed", "cut", "apart"])
def test_views_come_back_in_their_shapes_and_strides(view: str) -> None:
    class Viewing(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            base = hidden * 1
            views = {
                "transposed": base.view(8, 16, 64).transpose(0, 1),
                "cut": base[32:],
                "apart": base[:, 3:60],
            }
            return F.gelu(views[view])

    found: list[Tensor] = []
    block = Viewing()
    leaf = torch.randn(128, 64, requires_grad=True)
    result = in_form("int8", block.forward, block)(leaf)
    assert isinstance(result, Tensor)
    back = result.grad_fn._saved_self  # type: ignore[union-attr]
    found.append(back)
    assert back.shape == result.shape
    assert (back.stride() == result.stride()) or view == "apart"
    expected = {
        "transposed": leaf.view(8, 16, 64).transpose(0, 1),
        "cut": leaf[32:],
        "apart": leaf[:, 3:60],
    }[view]
    assert (back - expected).abs().max() < expected.abs().max() / 127


def test_a_write_after_saving_is_told_as_autograd_tells_it() -> None:
    class Writing(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            result = hidden.exp()
            again = result * 2
            result.mul_(2)
            return again + result

    leaf, block = torch.randn(128, 64, requires_grad=True), Writing()
    result = in_form("int8", block.forward, block)(leaf)
    assert isinstance(result, Tensor)
    told = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=told):
        result.sum().backward()
    with pytest.raises(RuntimeError, match=told):
        block(leaf).sum().backward()


def test_what_is_written_between_two_savings_is_packed_twice() -> None:
    class Between(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            base = hidden * 1
            with torch.no_grad():
                counted = base.detach().clone().requires_grad_()
            return F.gelu(base).sum() + F.gelu(base.add_(0.5)).sum() + counted.sum() * 0

    block = Between()
    assert len(set(map(id, saved_by("int8", block, hidden_and_mask()[0]).tensors))) == 2


# --- training -------------------------------------------------------------------------------------


def alike(name: str, forms: dict[int, Form] | Form, num_steps: int = 3, **options: Any) -> Outcome:
    """Plain PyTorch whose blocks pack so."""
    model = build(name)
    blocks = [unit for unit in described(name) if unit.kind == "block"]
    for place, unit in enumerate(blocks):
        form = forms if isinstance(forms, str) else forms.get(place, "keep")
        wrap_forward(model.get_submodule(unit.name), form)
    optimizer = ADAMW([{"params": list(model.parameters())}])
    return train(name, model, optimizer, num_steps=num_steps, **options)


def approximate(plan: Plan) -> Plan:
    return replace(plan, exact=False, exactness="approximate", allowed=LEAVES)


def planned(name: str, units: tuple[UnitPlan, ...], spill: Path, num_steps: int = 3) -> Outcome:
    model = build(name)
    plan = approximate(plan_for(model, units))
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=spill)
    return train(name, model, optimizer, num_steps=num_steps)


PLACES: list[tuple[str, Placement]] = [
    ("keep", Persistent()),
    ("keep", Offload(tier="host")),
    ("keep", Offload(tier="disk", keep_gathered=True)),
    ("host", Persistent()),
    ("disk", Offload(tier="disk")),
]


@pytest.mark.parametrize("place", PLACES, ids=decision_name)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@FORM
def test_training_is_that_of_plain_pytorch_which_packs_alike_wherever_things_are(
    form: Form, name: str, place: tuple[str, Placement], tmp_path: Path
) -> None:
    """Dropout and its random states included."""
    where, states = place
    activations = ACTIVATIONS[f"keep {form}" if where == "keep" else f"swap {form} to {where}"]
    found = planned(name, decided(described(name), activations, states), tmp_path)
    assert_bitwise(found, alike(name, form))


@FORM
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_the_first_loss_is_exact_and_later_ones_are_near(name: str, form: Form) -> None:
    found, expected = alike(name, form, num_steps=5), plain(name)
    assert torch.equal(found.losses[0], expected.losses[0])  # the first forward is plain
    assert not torch.equal(found.losses[-1], expected.losses[-1])
    # Of gradients that are off by less than a hundredth, and of some with noise twice their size.
    tolerance = {"int8": 1e-3, "low-rank": 0.05}[form]
    torch.testing.assert_close(found.losses, expected.losses, rtol=tolerance, atol=0.0)
    for ours, theirs in zip(found.random_states, expected.random_states, strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_of_mixtures_are_those_of_plain_pytorch_but_for_what_is_packed(
    tmp_path: Path,
) -> None:
    """Exact where no product's input is packed, as attention's output is not by `low-rank`."""
    forms: dict[int, Form] = {0: "int8", 1: "lite", 2: "low-rank", 3: "full"}
    units, place = [], 0
    for unit in described("llama"):
        if unit.kind == "block":
            form = forms[place]
            kept = Keep(form=form) if place % 2 == 0 else Recompute(form=form)
            unit = replace(unit, activations=kept)
            place += 1
        units.append(unit)
    assert_bitwise(planned("llama", tuple(units), tmp_path), alike("llama", forms))

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        loss_of(call_model(model, batch("llama", 0))).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    model = build("llama")
    plan = approximate(plan_for(model, tuple(units)))
    model, _ = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    found, expected = gradients(model), gradients(build("llama"))
    assert found.keys() == expected.keys()
    for name, exact in expected.items():
        error = float((found[name] - exact).norm() / exact.norm())
        if "layers.2." in name and exact.dim() == 2 and "o_proj" not in name:
            # E|G' - G|^2 is |G|^2 times 95 / 24, or for the wider input 127 / 32.
            assert 1.5 < error < 2.5, name
        elif "layers.0." in name or "embed" in name:  # before it in forward
            assert 0 < error < 0.05, name
        else:
            assert error == 0, name


@pytest.mark.parametrize(
    ("precision", "trained"),
    [("autocast", "all"), ("master", "all"), ("bfloat16", "lora"), ("autocast", "lora")],
)
@FORM
def test_precisions_and_adapters_are_those_of_plain_pytorch_which_packs_alike(
    form: Form, precision: str, trained: str, tmp_path: Path
) -> None:
    row = {"model": "llama", "precision": precision, "trained": trained}

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [one for one in model.parameters() if one.requires_grad]}]

    model = uncompiled(row)
    units = units_of(model, batch("llama", 0))
    for unit in units:
        if unit.kind == "block":
            wrap_forward(model.get_submodule(unit.name), form)
    make = with_master_weights(ADAMW) if precision == "master" else ADAMW
    expected = train("llama", model, make(groups(model)), num_steps=3)

    ours = uncompiled(row)
    plan = approximate(
        plan_of(
            decided(units, Keep(form=form), Offload(tier="disk")),
            fingerprint=model_fingerprint(ours),
            workload=workload(row),
        )
    )
    ours, optimizer = prepare(
        ours, plan, optimizer=ADAMW, param_groups=groups(ours), spill_directory=tmp_path
    )
    found = train("llama", ours, optimizer, num_steps=3)
    assert torch.equal(torch.stack(found.losses), torch.stack(expected.losses))
    assert list(differences(found.parameters, expected.parameters, "parameters")) == []


@FORM
def test_micro_batches_add_up_as_they_do_in_plain_pytorch(form: Form, tmp_path: Path) -> None:
    def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
        losses = []
        for step in range(2):
            for part in range(2):
                loss = loss_of(call_model(model, batch("llama", 2 * step + part))) / 2
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return outcome(model, optimizer, losses)

    model = build("llama")
    for unit in described("llama"):
        if unit.kind == "block":
            wrap_forward(model.get_submodule(unit.name), form)
    torch.manual_seed(1)
    expected = accumulated(model, ADAMW([{"params": list(model.parameters())}]))

    ours = build("llama")
    units = decided(described("llama"), Keep(form=form), Offload(tier="disk"))
    plan = with_settings(approximate(plan_for(ours, units)), micro_batches=2)
    ours, optimizer = prepare(ours, plan, optimizer=ADAMW, spill_directory=tmp_path)
    torch.manual_seed(1)
    assert_bitwise(accumulated(ours, optimizer), expected)


@FORM
def test_training_resumes_bitwise(form: Form, tmp_path: Path) -> None:
    def made(seed: int) -> Any:
        model = build("gpt2", seed=seed)
        units = decided(described("gpt2"), Keep(form=form), Persistent())
        return prepare(model, approximate(plan_for(model, units)), optimizer=ADAMW)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[Tensor]:
        losses = []
        for number in numbers:
            torch.manual_seed(number)  # of dropout
            loss = loss_of(call_model(model, batch("gpt2", number)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    model, optimizer = made(0)
    steps(model, optimizer, range(2))
    save(model, optimizer, tmp_path / "saved")
    losses = steps(model, optimizer, range(2, 4))
    expected = outcome(model, optimizer, losses)
    again, its_optimizer = made(1)
    load(again, its_optimizer, tmp_path / "saved")
    losses = steps(again, its_optimizer, range(2, 4))
    assert_bitwise(outcome(again, its_optimizer, losses), expected)


# --- bytes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-gpt2"])
def profile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    def make(path: Path) -> None:
        others = bytes_of_others()  # are what a script's data would be
        record = profiled_here(request.param, path.parent, num_steps=2, allow=LEAVES)
        write_profile(replace(record, base_bytes=record.base_bytes - others), path)

    return read_profile(made_once(tmp_path_factory, f"compressed-{request.param}.yaml", make))


def test_a_profile_says_what_each_form_keeps(profile: Profile) -> None:
    assert profile.allowed == LEAVES
    for unit in profile.units:
        if unit.kind != "block":
            continue
        assert {"int8", "low-rank"} <= {cost.form for cost in unit.forms}
        keep, int8, low_rank = (unit.cost(form) for form in ("keep", "int8", "low-rank"))
        # A quarter of float32, with scales, and what is small or an integer stays.
        assert int8.swappable_bytes < 0.27 * keep.swappable_bytes + (1 << 17)
        assert int8.kept_bytes < 0.33 * keep.kept_bytes
        assert low_rank.kept_bytes < 0.9 * keep.kept_bytes


DECISIONS: list[Activations] = [
    *(Keep(form=form) for form in FORMS),
    *(Swap(tier="disk", form=form) for form in FORMS),
]


@pytest.mark.parametrize("states", [Persistent(), Offload(tier="disk")], ids=decision_name)
@pytest.mark.parametrize("activations", DECISIONS, ids=activations_text)
def test_measured_bytes_match_predicted_in_every_slot_with_copies(
    profile: Profile, activations: Activations, states: Placement, tmp_path: Path
) -> None:
    units = decided(described_by(profile), activations, states)
    found = peaks(profile, without_freedom(units), tmp_path)
    assert_within_the_promise(found)
    # What autograd does not hold, a frame of the model's forward does: the first block's input and
    # the last one's output. They are promised to be there until backward, and go with the frame.
    hidden = 4 * BATCH * SEQUENCE * 96 if activations.form == "int8" else 0
    assert found.excess <= SLACK_BYTES + 2 * hidden


@pytest.mark.parametrize("seed", range(3))
def test_measured_bytes_of_mixtures_with_copies_never_exceed_predicted(
    profile: Profile, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    units = tuple(
        replace(unit, activations=rng.choice([*DECISIONS, unit.activations]))
        if unit.kind == "block"
        else unit
        for unit in mixed(described_by(profile), rng, "disk")
    )
    assert_within_the_promise(peaks(profile, units, tmp_path))


@pytest.mark.parametrize("seed", [4, 9])
def test_measured_bytes_of_mixtures_hold_where_a_block_saves_what_it_hands_on(
    seed: int, tmp_path: Path
) -> None:
    """A block ends in a relu, and the next one would let go of its input, in place of a copy."""
    others = bytes_of_others()
    model = "tests.support.functional_model:relu_factory"
    held = profiled_here(model, tmp_path, allow=LEAVES)
    held = replace(held, base_bytes=held.base_bytes - others)
    rng = random.Random(seed)
    units = tuple(
        replace(unit, activations=rng.choice([Keep(), Keep(), Keep(form="int8"), *DECISIONS]))
        if unit.kind == "block"
        else unit
        for unit in mixed(described_by(held), rng, "disk")
    )
    assert_within_the_promise(peaks(held, units, tmp_path))


@pytest.fixture(scope="module")
def with_adapters(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    def make(path: Path) -> None:
        others = bytes_of_others()
        record = profiled_here(
            "tiny-llama", path.parent, dtype="bfloat16", adapter="lora r=4", allow=LEAVES
        )
        write_profile(replace(record, base_bytes=record.base_bytes - others), path)

    return read_profile(made_once(tmp_path_factory, "compressed-lora.yaml", make))


@pytest.mark.parametrize("activations", DECISIONS, ids=activations_text)
def test_measured_bytes_with_adapters_in_16_bits_never_exceed_predicted(
    with_adapters: Profile, activations: Activations, tmp_path: Path
) -> None:
    units = decided(described_by(with_adapters), activations, Offload(tier="disk"))
    assert activations.form in {cost.form for cost in with_adapters.units[1].forms}
    assert_within_the_promise(peaks(with_adapters, without_freedom(units), tmp_path))


# --- plans ----------------------------------------------------------------------------------------


def solved(profile: Profile, device: int, *pins: str, allow: tuple[str, ...] = ()) -> Plan | None:
    question = Question(
        profile=profile,
        budgets=Budgets(device=device, host=0, disk=0),
        pins=tuple(parse_pin(pin) for pin in pins),
        allow=allow,
        settings=replace(OVERLAPPING, piece_bytes=1 << 16),
    )
    answer = ask(question, Objective(), effort=Effort())
    return answer.solved.plan if isinstance(answer.solved, Solved) else None


def test_a_planner_takes_copies_where_they_are_faster_or_fit_at_all(profile: Profile) -> None:
    # Seconds as an idle machine has them: more for a copy than for what is kept, less than what
    # runs the forward again.
    seconds = {"keep": 0.01, "low-rank": 0.011, "int8": 0.012}
    units = []
    for unit in profile.units:
        forms = [
            replace(cost, forward_s=0.01, backward_s=seconds.get(cost.form, 0.02))
            for cost in unit.forms
        ]
        units.append(replace(unit, forms=tuple(forms)))
    profile = replace(profile, units=tuple(units))
    ample = solved(profile, 1 << 40, allow=LEAVES)
    assert ample is not None
    assert ample.exact
    assert ample.allowed == ()

    peak = ample.prediction.peak_bytes

    def least(allow: tuple[str, ...]) -> int:
        low, high = 0, peak.device + peak.context
        while high - low > 1 << 14:
            middle = (low + high) // 2
            low, high = (low, middle) if solved(profile, middle, allow=allow) else (middle, high)
        return high

    without = least(())
    exact, free = solved(profile, without), solved(profile, without, allow=LEAVES)
    assert exact is not None
    assert exact.exact
    assert free is not None
    assert not free.exact
    assert free.prediction.step_seconds < exact.prediction.step_seconds
    assert least(LEAVES) <= without


def test_a_pin_takes_a_copy_and_the_plan_says_so(profile: Profile) -> None:
    blocks = profile.units[1].name.rpartition(".")[0]
    plan = solved(profile, 1 << 40, f"{blocks}.*: keep int8", allow=LEAVES)
    assert plan is not None
    assert (plan.exact, plan.exactness, plan.allowed) == (False, "approximate", LEAVES[:1])
