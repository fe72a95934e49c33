"""The form `in place` of the last part: plain PyTorch's bits, the bytes that were promised.

The oracle is `cross_entropy` as PyTorch runs it, and whole training steps without a plan.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import BertConfig, BertForMaskedLM, Gemma2Config, Gemma2ForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from protrain_plan.commands.training import train
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.models.building import seeded
from protrain_plan.models.sources import load_source
from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.growth import grown
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.profiling.estimated import estimate
from protrain_runtime import prepare
from protrain_runtime.activations.late_values import LateValues, UsedTwiceError
from protrain_runtime.activations.tiled_loss import TILE_ROWS, loss_in_place, tile_rows
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records import dumps_plan, dumps_profile, loads_plan, loads_profile
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
from protrain_runtime.contract.records.profile import DType, Profile
from protrain_runtime.devices.memory_meter import MemoryMeter
from protrain_runtime.model.prepared import restore
from tests.support import runtime_cases
from tests.support.cards import every_device
from tests.support.peaks import SLACK_BYTES, bytes_of_others, without_freedom
from tests.support.programs import compile_units
from tests.support.runtime_cases import (
    ADAMW,
    BATCH,
    SEQUENCE,
    VOCABULARY,
    batch,
    build,
    decision_name,
    described,
    described_by,
    differences,
    moved_to_device,
    plan_for,
    plan_of,
    profiled_here,
    units_of,
)

IN_PLACE = Keep(form="in place")
NUM_STEPS = 5
DTYPES: dict[torch.dtype, DType] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

# --- one loss -------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of logits [batch, sequence, classes] and labels [batch, sequence]."""


def causal(logits: Tensor, labels: Tensor) -> Tensor:
    """As `transformers` has it for language models that predict the next token, and BERT."""
    wide = logits.float().view(-1, logits.shape[-1])
    return cross_entropy(wide, labels.reshape(-1))


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """As scripts have it, and `transformers` had."""
    wide = logits.float()[..., :-1, :].contiguous()
    return cross_entropy(wide.view(-1, wide.size(-1)), labels[..., 1:].reshape(-1))


def narrow(logits: Tensor, labels: Tensor) -> Tensor:
    """As T5 and BART have it: in the dtype of the logits."""
    loss: Tensor = nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), labels.view(-1))
    return loss


def of_all_items(logits: Tensor, labels: Tensor) -> Tensor:
    """As `Trainer` has it where micro-batches add up."""
    wide = logits.to(torch.float32).view(-1, logits.shape[-1])
    return cross_entropy(wide, labels.view(-1), reduction="sum") / torch.tensor(777)


def ignoring_zero(logits: Tensor, labels: Tensor) -> Tensor:
    """Class 0 is no target: the number that the sums have for `ignored` is none of the model's."""
    wide = logits.to(dtype=torch.float32).flatten(0, 1)
    return cross_entropy(wide, labels.flatten().clamp(min=0), ignore_index=0)


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    """Soft-capped, as Gemma 2 has it: `tanh` saves what it returns."""
    return causal(torch.tanh(logits / 30) * 30, labels)


def capped_last(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss reads what `tanh` has saved for its own backward."""
    return narrow(torch.tanh(logits), labels)


def looked_at(logits: Tensor, labels: Tensor) -> Tensor:
    """The share of right answers is counted before and after."""
    wide = logits.float()
    with torch.no_grad():
        right = wide.argmax(-1) == labels
    loss = cross_entropy(wide.view(-1, wide.shape[-1]), labels.view(-1))
    assert torch.equal(right, wide.argmax(-1) == labels)
    return loss


def masked_before(logits: Tensor, labels: Tensor) -> Tensor:
    """Some classes are ruled out, in place, in the float32 values."""
    wide = logits.float()
    wide[..., ::7] = -1e9
    return cross_entropy(wide.view(-1, wide.shape[-1]), (labels.view(-1) // 7 * 7 + 1).clamp(min=0))


def with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A second term from the logits themselves, which it saves."""
    return causal(logits, labels) + 0.01 * torch.logsumexp(logits, -1).square().mean()


IN_TILES: tuple[Loss, ...] = (
    causal,
    shifted,
    narrow,
    of_all_items,
    ignoring_zero,
    capped,
    capped_last,
    looked_at,
    masked_before,
    with_z_loss,
)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, logits.shape[-1])
    return cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1), weight=weight)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.float().view(-1, logits.shape[-1])
    return cross_entropy(wide, labels.view(-1), label_smoothing=0.1)


def of_every_row(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.float().view(-1, logits.shape[-1])
    return cross_entropy(wide, labels.view(-1), reduction="none").square().mean()


def of_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    targets = torch.softmax(torch.outer(labels.view(-1).clamp(min=0), torch.arange(5.0)), -1)
    wide = logits.float().view(-1, logits.shape[-1])
    return cross_entropy(wide[:, :5], targets)


def of_an_image(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.float().transpose(1, 2), labels)


def written_out(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = torch.log_softmax(logits.float(), -1).gather(-1, labels.clamp(min=0)[..., None])
    return -chosen.mean()


PLAIN: tuple[Loss, ...] = (
    weighted,
    smoothed,
    of_every_row,
    of_probabilities,
    of_an_image,
    written_out,
)


def differentiated(
    loss: Loss, dtype: torch.dtype, *, in_place: bool, upstream: float = 1.0, bias: bool = False
) -> list[Tensor]:
    """A loss on a linear head, and the gradients of the head and of what goes into it."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden, weight = random(3, 50, 24).requires_grad_(), random(1001, 24).requires_grad_()
    start = random(1001).requires_grad_() if bias else None
    labels = torch.randint(1001, (3, 50), generator=generator)
    labels[:, ::7] = -100
    stands: AbstractContextManager[object] = loss_in_place() if in_place else nullcontext()
    with stands:
        found = loss(linear(hidden, weight, start), labels)
    (found if upstream == 1 else found * upstream).backward()
    leaves = [hidden, weight, *([] if start is None else [start])]
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(gradients) == len(leaves)
    return [found.detach(), *gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("loss", [*IN_TILES, *PLAIN], ids=lambda loss: loss.__name__)
def test_a_loss_and_its_gradients_are_plain_pytorchs_bitwise(
    loss: Loss, dtype: torch.dtype
) -> None:
    found = differentiated(loss, dtype, in_place=True)
    assert list(differences(found, differentiated(loss, dtype, in_place=False), "")) == []


@pytest.mark.parametrize("loss", [causal, narrow, of_all_items], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("autocast", [False, True])
def test_so_they_are_with_a_bias_another_upstream_gradient_and_autocast(
    loss: Loss, autocast: bool
) -> None:
    def both(*, in_place: bool) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return differentiated(loss, torch.float32, in_place=in_place, upstream=0.3, bias=True)

    assert list(differences(both(in_place=True), both(in_place=False), "")) == []


@pytest.mark.parametrize("loss", IN_TILES, ids=lambda loss: loss.__name__)
def test_what_takes_tiles_takes_less_memory(loss: Loss) -> None:
    def peak(*, in_place: bool) -> int:
        with MemoryMeter() as meter:
            meter.mark("both ways")
            differentiated(loss, torch.bfloat16, in_place=in_place)
        return meter.segments[0].peak_bytes

    saved = peak(in_place=False) - peak(in_place=True)
    assert saved >= 2 * 150 * 1001  # bytes of the logits; where they are cast, more than theirs


def test_tiles_are_few_and_of_whole_groups_of_rows() -> None:
    assert tile_rows(8192, 128_256) == 128
    assert tile_rows(8192, 32_000) == 512
    assert tile_rows(128, 320) == 16
    assert tile_rows(7, 1000) == TILE_ROWS
    assert tile_rows(8192, 10**9) == TILE_ROWS


# --- logits that others have ----------------------------------------------------------------------


def head(num_rows: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """What goes into a head, its weight, and the targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(300, 16, generator=generator).bfloat16().requires_grad_()
    return hidden, weight, torch.randint(300, (num_rows,), generator=generator)


def test_who_has_the_logits_reads_them_before_and_after_backward() -> None:
    hidden, weight, targets = head()
    with loss_in_place():
        logits = linear(hidden, weight)
        loss = cross_entropy(logits.float(), targets)
    expected = linear(hidden, weight)
    assert type(logits) is Tensor
    assert torch.equal(logits, expected)
    loss.backward()
    assert torch.equal(logits, expected)
    found = weight.grad
    weight.grad = None
    cross_entropy(expected.float(), targets).backward()
    assert list(differences(found, weight.grad, "gradient")) == []


def test_gradients_are_written_over_logits_that_nobody_has() -> None:
    hidden, weight, targets = head()
    seen: list[int] = []
    with loss_in_place():
        logits = linear(hidden, weight)
        address = logits.data_ptr()
        assert logits.grad_fn is not None
        logits.grad_fn.register_prehook(lambda given: seen.append(given[0].data_ptr()))
        loss = cross_entropy(logits.float(), targets)
    del logits
    loss.backward()
    assert seen == [address]


def test_the_float32_logits_that_a_model_returns_are_there_for_whoever_asks() -> None:
    hidden, weight, targets = head()
    with loss_in_place():
        wide = linear(hidden, weight).float()
        loss = cross_entropy(wide, targets)
    assert isinstance(wide, LateValues)
    expected = linear(hidden, weight).float()
    assert (wide.shape, wide.dtype, wide.requires_grad) == (expected.shape, torch.float32, True)
    assert torch.equal(wide, expected)
    loss.backward()
    assert torch.equal(wide, expected)
    assert wide.argmax(-1).tolist() == expected.argmax(-1).tolist()
    assert wide[0, 0].item() == expected[0, 0].item()


def test_a_loss_in_compiled_code_is_the_compilers() -> None:
    hidden, weight, targets = head()

    def of_rows(hidden: Tensor) -> Tensor:
        return cross_entropy(linear(hidden, weight).float(), targets)

    compiled = torch.compile(of_rows, backend="aot_eager")
    expected = compiled(hidden)
    with loss_in_place():
        found = compiled(hidden)
    assert type(found.grad_fn).__name__ == type(expected.grad_fn).__name__
    assert torch.equal(found, expected)


# --- what is refused ------------------------------------------------------------------------------


def test_a_second_use_of_the_float32_logits_is_refused() -> None:
    hidden, weight, targets = head()
    with loss_in_place():
        wide = linear(hidden, weight).float()
        cross_entropy(wide, targets)
        with pytest.raises(UsedTwiceError, match="uses the logits once more besides the loss"):
            wide.square().mean()
        with pytest.raises(UsedTwiceError):
            cross_entropy(wide[:32], targets[:32])
        with pytest.raises(UsedTwiceError):
            wide.register_hook(lambda gradient: gradient)


def test_logits_that_were_written_since_are_refused() -> None:
    hidden, weight, targets = head()
    with loss_in_place():
        logits = linear(hidden, weight)
        wide = logits.float()
        logits.mul_(2)
        with pytest.raises(RuntimeError, match="written in place after it was cast"):
            cross_entropy(wide, targets)
        loss = cross_entropy(logits.float(), targets)
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="written in place between the loss and its backward"):
        loss.backward()


def test_a_second_backward_is_refused() -> None:
    hidden, weight, targets = head()
    with loss_in_place():
        loss = cross_entropy(linear(hidden, weight).float(), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran once more through a loss"):
        loss.backward()


# --- whole steps ----------------------------------------------------------------------------------


def bert() -> nn.Module:
    """A masked language model: the head is tied, and has a bias."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=SEQUENCE,
    )
    model: nn.Module = BertForMaskedLM(config)
    return model


def gemma2() -> nn.Module:
    """The head is tied, and its logits are soft-capped."""
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_cache=False,
    )
    assert config.final_logit_softcapping
    model: nn.Module = Gemma2ForCausalLM(config)
    return model


class Float32Logits(nn.Module):
    """Returns the float32 logits, as Accelerate makes models do under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3)
        )
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden).float()
        loss = cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))
        return CausalLMOutput(loss=loss, logits=logits)


_OWN: dict[str, Callable[[], nn.Module]] = {
    "bert": bert,
    "gemma2": gemma2,
    "float32-logits": Float32Logits,
}
LOOPS = ("llama", "llama-tied", "gpt2", "t5", "functional", *_OWN)


def built(name: str, dtype: torch.dtype) -> nn.Module:
    if name not in _OWN:
        return build(name).to(dtype)
    with seeded(0):
        return moved_to_device(_OWN[name]()).train().to(dtype)  # type: ignore[no-any-return]


def given(name: str, number: int) -> Batch:
    """A batch with labels of which some are ignored."""
    made = batch(name, number)
    if isinstance(made, dict):
        made["labels"][:, :: 3 if name == "bert" else 9] = -100
    return made


def trained(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, *, micro_batches: int = 1
) -> list[object]:
    """Losses, the logits of every step and the parameters after five steps."""
    torch.manual_seed(1)
    found: list[object] = []
    for number in range(NUM_STEPS):
        for micro in range(micro_batches):
            output = call_model(model, given(name, number * micro_batches + micro))
            loss = loss_of(output)
            (loss / micro_batches).backward()
            logits = getattr(output, "logits", None)
            found += [loss.detach(), None if logits is None else logits.detach().clone()]
            del output, logits, loss
        optimizer.step()
        optimizer.zero_grad()
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return [*found, state]


def planned(model: nn.Module, units: tuple[UnitPlan, ...], dtype: torch.dtype) -> Plan:
    plan, kind = plan_for(model, units), DTYPES[dtype]
    return replace(plan, workload=replace(plan.workload, dtype=kind))


def decided(units: tuple[UnitPlan, ...], *, offloads: bool) -> tuple[UnitPlan, ...]:
    """All states on the disk and the blocks recomputed, or nothing decided but the last part."""
    states: Placement = Offload(tier="disk") if offloads else Persistent()
    blocks: Activations = Recompute() if offloads else Keep()
    *others, last = runtime_cases.decided(units, blocks, states)
    return (*others, replace(last, activations=IN_PLACE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_five_steps_match_plain_torch_bitwise(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = built(name, dtype)
    expected = trained(name, model, ADAMW(model.parameters()))
    model = built(name, dtype)
    units = units_of(model, given(name, 0))
    for offloads in (False, True):
        model = built(name, dtype)
        plan = planned(model, decided(units, offloads=offloads), dtype)
        spill = tmp_path / str(offloads)
        spill.mkdir()
        model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=spill)
        found = trained(name, model, optimizer)
        restore(model)
        assert list(differences(found, expected, name)) == []


@every_device
@pytest.mark.parametrize("offloads", [False, True])
def test_accumulated_steps_match_plain_torch_bitwise(offloads: bool, tmp_path: Path) -> None:
    dtype = torch.bfloat16
    model = built("llama-tied", dtype)
    expected = trained("llama-tied", model, ADAMW(model.parameters()), micro_batches=2)
    model = built("llama-tied", dtype)
    units = units_of(model, given("llama-tied", 0))
    plan = planned(model, decided(units, offloads=offloads), dtype)
    plan = replace(plan, settings=replace(plan.settings, micro_batches=2))
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    found = trained("llama-tied", model, optimizer, micro_batches=2)
    assert list(differences(found, expected, "")) == []


# --- profiles and plans ---------------------------------------------------------------------------

PIECE_BYTES = 1 << 16
AMPLE = 10**12


CLASSES = 4096  # so many that logits are the most of a step, as they are in large models


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def profile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder = tmp_path_factory.mktemp("profile")
    config = json.loads(load_source("tiny-llama").model_config) | {"vocab_size": CLASSES}
    (folder / "config.json").write_text(json.dumps(config))
    others = bytes_of_others()  # of other tests, as a script's data would be
    record = profiled_here(str(folder), folder, dtype=request.param, num_steps=2)
    return replace(record, base_bytes=record.base_bytes - others)


def test_the_last_part_needs_less_in_it(profile: Profile) -> None:
    *others, last = profile.units
    assert all("in place" not in {cost.form for cost in unit.forms} for unit in others)
    assert [cost.form for cost in last.forms] == ["keep", "in place"]
    keep, in_place = last.forms
    logits = BATCH * SEQUENCE * CLASSES * (2 if profile.workload.dtype == "bfloat16" else 4)
    assert logits < in_place.kept_bytes < 1.1 * logits
    assert in_place.forward_peak_bytes < 2 * logits
    assert in_place.backward_peak_bytes < last.gradient_bytes + 1.2 * logits
    assert keep.kept_bytes + keep.backward_peak_bytes > 2.9 * logits
    assert in_place.forward_s > 0 < in_place.backward_s
    assert loads_profile(dumps_profile(profile)) == profile


@pytest.mark.parametrize("states", [Persistent(), Offload(tier="disk")], ids=decision_name)
@pytest.mark.parametrize("blocks", [Keep(), Recompute(), Swap(tier="disk")], ids=decision_name)
def test_measured_bytes_match_predicted_in_every_slot(
    profile: Profile, blocks: Activations, states: Placement, tmp_path: Path
) -> None:
    """As near as where the last part keeps all, which `test_peaks` compares to the byte."""

    def excess(last: Activations) -> list[int]:
        *before, part = runtime_cases.decided(described_by(profile), blocks, states)
        units = without_freedom((*before, replace(part, activations=last)))
        plan = plan_of(
            units,
            fingerprint=profile.model_fingerprint,
            workload=profile.workload,
            piece_bytes=PIECE_BYTES,
        )
        program = compile_units(units, profile, piece_bytes=PIECE_BYTES)
        others = bytes_of_others()
        run = train(plan, num_steps=3, plain=False, text=None, spill_directory=tmp_path)
        predicted = [slot.total for slot in device_bytes(program)]
        return [a - (b - others) for a, b in zip(predicted, run.slot_bytes, strict=True)]

    found = excess(IN_PLACE)
    assert min(found) >= 0
    if (blocks, states) != (Keep(), Persistent()):  # which would be no plan's run
        kept = excess(Keep())
        assert all(own - other <= SLACK_BYTES for own, other in zip(found, kept, strict=True))


def test_a_tight_budget_takes_it_and_stays_within_the_peak_bitwise(
    profile: Profile, tmp_path: Path
) -> None:
    """With the blocks pinned, whose seconds a busy machine says anyhow."""

    def answer(device: int) -> Solved:
        budgets = Budgets(device=device, host=0, disk=0)
        pins = (parse_pin("layers.*: keep"),)
        problem = Problem.of(
            profile, budgets, pins=pins, settings=replace(OVERLAPPING, piece_bytes=PIECE_BYTES)
        )
        found = solve_problem(problem, budgets)
        assert isinstance(found, Solved)
        return found

    ample = answer(AMPLE)
    assert {unit.activations for unit in ample.plan.units} == {Keep()}
    needed = ample.plan.prediction.peak_bytes
    tight = answer(needed.device + needed.context - BATCH * SEQUENCE * CLASSES)
    assert tight.plan.exact
    assert tight.plan.units[-1].activations == IN_PLACE
    assert loads_plan(dumps_plan(tight.plan)) == tight.plan

    strange = bytes_of_others()
    run = partial(train, tight.plan, num_steps=NUM_STEPS, text=None, spill_directory=tmp_path)
    found = run(plain=False)
    assert found.measured_peak_bytes is not None
    measured = found.measured_peak_bytes.device - strange
    promised = tight.plan.prediction.peak_bytes.device
    assert 0.98 * promised <= measured <= promised
    expected = run(plain=True)
    assert found.losses == expected.losses
    assert found.parameters_sha256 == expected.parameters_sha256


@pytest.mark.slow
def test_a_profile_that_is_grown_or_shrunk_promises_no_less_than_one_of_that_size() -> None:
    """Between these sizes a tile grows from 16 rows to 32: more than in proportion."""
    found = {
        seq_len: estimate(
            load_source("tiny-llama"),
            hardware=load_hardware("h200"),
            batch_size=1,
            seq_len=seq_len,
            dtype="bfloat16",
        )
        for seq_len in (240, 256)
    }
    assert [tile_rows(seq_len, 320) for seq_len in found] == [16, 32]
    for seq_len, other in ((240, 256), (256, 240)):
        promised = grown(found[seq_len], seq_len=other).units[-1].cost("in place")
        needed = found[other].units[-1].cost("in place")
        assert promised.forward_peak_bytes >= needed.forward_peak_bytes
        in_backward = needed.kept_bytes + needed.backward_peak_bytes
        assert promised.kept_bytes + promised.backward_peak_bytes >= in_backward


# --- who may have it ------------------------------------------------------------------------------


def test_others_are_refused_with_the_reason(profile: Profile) -> None:
    def refused(given: Profile, pin: str) -> ProtrainError:
        budgets = Budgets(device=AMPLE, host=0, disk=AMPLE)
        problem = Problem.of(given, budgets, pins=(parse_pin(pin),))
        with pytest.raises(ProtrainError) as error:
            _ = problem.options
        return error.value

    last = profile.units[-1]
    before = replace(profile, units=(*profile.units[:-1], replace(last, forms=last.forms[:1])))
    why = (
        "that is for a last part with a cross entropy whose logits nothing else in the forward uses"
    )
    of_block = refused(profile, "layers.0: keep in place")
    assert of_block.message == f"model.layers.0 cannot take 'keep in place': {why}"
    assert of_block.fix is not None
    assert of_block.fix.endswith("; model.norm can take 'keep in place'")
    forms = tuple(replace(cost, swappable_bytes=2**20) for cost in last.forms)
    claims = replace(profile, units=(*profile.units[:-1], replace(last, forms=forms)))
    problem = Problem.of(claims, Budgets(device=AMPLE, host=0, disk=AMPLE))
    found = [one.decision for one in problem.options[-1].activations]  # parts swap nothing in it
    assert found == [Keep(), Swap(tier="disk"), IN_PLACE]
    of_part = refused(before, "model.norm: keep in place")
    assert of_part.message == f"model.norm cannot take 'keep in place': {why}"


@pytest.mark.parametrize(
    ("place", "decision", "why"),
    [
        (1, IN_PLACE, "model.layers.0 cannot take 'keep in place': that is for the last part"),
        (0, IN_PLACE, "model.embed_tokens cannot take 'keep in place': that is for the last part"),
        (-1, Recompute(), "model.norm cannot take 'recompute': that is for blocks"),
    ],
)
def test_a_plan_that_gives_it_to_others_is_refused(
    place: int, decision: Activations, why: str, tmp_path: Path
) -> None:
    units = list(described("llama"))
    units[place] = replace(units[place], activations=decision)
    model = build("llama")
    with pytest.raises(ProtrainError) as error:
        prepare(model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path)
    assert error.value.message == why
