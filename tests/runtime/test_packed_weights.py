"""Adapters beside packed weights: the bits of plain PyTorch, within what was predicted."""

import copy
import json
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protrain_plan.commands.training import Run as Trained
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.batches import call_model
from protrain_plan.models.building import seeded
from protrain_plan.models.quantizing import as_made
from protrain_plan.models.sources import ModelSource, load_source
from protrain_plan.profiling.structure.parameters import refuse_parameters
from protrain_runtime import load, restore, save
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
    Plan,
)
from protrain_runtime.contract.records.profile import Profile, Quantize
from protrain_runtime.states.quantized import (
    named_scales,
    packed_layers,
    products_of_a_card,
    scales_of,
    settle_quantized,
)
from tests.support import quantized_models
from tests.support.estimates import measure, model_of
from tests.support.messages import Speaker
from tests.support.peaks import (
    PIECE_BYTES,
    SLACK_BYTES,
    bytes_of_others,
    profile_made,
    without_freedom,
)
from tests.support.programs import compile_units
from tests.support.runtime_cases import (
    Subject,
    assert_bitwise,
    decided,
    decision_name,
    described_by,
    differences,
    mixed,
    plan_for,
    plan_of,
    units_of,
)
from tests.support.scenario import Loop, Run, Scenario, restored
from tests.support.trained import train

bitsandbytes: Any = pytest.importorskip("bitsandbytes")

CONFIG = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 176, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
ADAPTER = "lora r=4 dtype=float32"
"""As PEFT makes them by default, on a model of 16 bits."""
ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)
BATCH, SEQUENCE = 4, 64
HIDDEN_BYTES = 2 * BATCH * SEQUENCE * 96


@pytest.fixture(scope="module", params=["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> Quantize:
    found: Quantize = request.param
    return found


@pytest.fixture(scope="module")
def profile(kind: Quantize, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    def make(folder: Path) -> Profile:
        return measured(
            load_source("packed", model_config=json.dumps(CONFIG)),
            folder,
            batch_size=BATCH,
            seq_len=SEQUENCE,
            dtype="bfloat16",
            adapter=ADAPTER,
            quantize=kind,
        )

    return profile_made(tmp_path_factory, f"packed-{kind}", make)


def measured(source: ModelSource, folder: Path, **options: Any) -> Profile:
    machine = load_hardware("cpu")
    return measure(
        source, device="cpu", num_steps=1, spill_directory=folder, machine=machine, **options
    )


@pytest.fixture(scope="module")
def plain(profile: Profile) -> Trained:
    """Five steps of plain PyTorch on the same packed model."""
    plan = planned(profile, KEEP, PERSISTENT)
    return train(plan, num_steps=5, plain=True, spill_directory=None)


def planned(profile: Profile, activations: Activations, states: Placement) -> Plan:
    units = without_freedom(decided(described_by(profile), activations, states))
    return plan_of(
        units,
        fingerprint=profile.model_fingerprint,
        workload=profile.workload,
        piece_bytes=PIECE_BYTES,
    )


@pytest.mark.nightly("nf4")
def test_packed_bytes_and_scales_are_counted_to_the_byte(profile: Profile) -> None:
    """In the chunk and in the base, of a weight: of 4 bits 0.5, and 1 of 64 and 4 of 16,384.

    Of 8 bits 1, and 4 of each row.
    """
    eight = profile.workload.quantize == "int8"
    blocks = [unit for unit in profile.units if unit.kind == "block"]
    shapes = [(96, 96), (48, 96), (48, 96), (96, 96), (176, 96), (176, 96), (96, 176)]
    adapters = sum(4 * 4 * (rows + columns) for rows, columns in shapes)
    norms = 2 * 2 * 96
    for block in blocks:
        assert (block.stays, block.runs_once) == ("", "")
        packed = sum(rows * columns // (1 if eight else 2) for rows, columns in shapes)
        assert block.parameter_bytes == packed + adapters + norms
        assert block.gradient_bytes == adapters
    tables = 4 * (16 + 256 + 1)
    counted = sum(r * c // 64 + 4 * -(-r * c // 16384) + tables for r, c in shapes)
    counted = sum(4 * rows for rows, _ in shapes) if eight else counted
    source = load_source("packed", model_config=json.dumps(CONFIG))
    packed_model = model_of(
        source, dtype="bfloat16", adapter=ADAPTER, quantize=profile.workload.quantize
    )
    assert (
        sum(t.numel() * t.itemsize for _, t in named_scales(packed_model)) == len(blocks) * counted
    )
    without = model_of(source, dtype="bfloat16", adapter=ADAPTER, device="meta")
    buffers = sum(b.numel() * b.itemsize for b in without.buffers())
    tokens = 2 * 8 * BATCH * SEQUENCE
    shared = profile.base_bytes - len(blocks) * counted - buffers - tokens
    # What blocks share and recomputed ones hold: here the first one's input; and scalars.
    assert 0 <= shared - HIDDEN_BYTES < SLACK_BYTES


@pytest.mark.nightly(by_day=8)
@pytest.mark.parametrize(
    ("activations", "states"),
    [
        (RECOMPUTE, Placement(tier="disk")),
        (Activations(form="lite"), PERSISTENT),
        (Activations(tier="disk"), Placement(tier="disk", keep_gathered=True)),
        (Activations(form="full", tier="disk"), Placement(tier="disk")),
    ],
    ids=decision_name,
)
def test_training_is_plain_pytorchs_bitwise_within_what_was_predicted(
    profile: Profile, plain: Trained, activations: Activations, states: Placement, tmp_path: Path
) -> None:
    """Over five steps; of the last one's slots none takes more.

    The bound is as close as beside weights that are not packed: the first block's input is counted
    in the base too, and a norm's float32 values where blocks keep what they save.
    """
    plan = planned(profile, activations, states)
    others = bytes_of_others()
    found = train(plan, num_steps=5, plain=False, spill_directory=tmp_path)
    assert found.losses == plain.losses
    assert len(set(found.losses)) == 5
    assert found.parameters_sha256 == plain.parameters_sha256
    program = compile_units(plan.units, profile, piece_bytes=PIECE_BYTES)
    predicted = [slot.total for slot in device_bytes(program)]
    measured = [size - others for size in found.slot_bytes]
    above = [most - size for most, size in zip(predicted, measured, strict=True)]
    assert min(above) >= 0
    assert max(above) <= SLACK_BYTES + 3 * HIDDEN_BYTES


@pytest.mark.nightly("nf4")
def test_a_plain_run_takes_what_is_predicted_within_five_percent(
    profile: Profile, tmp_path: Path
) -> None:
    plan = planned(profile, KEEP, PERSISTENT)
    program = compile_units(plan.units, profile, piece_bytes=PIECE_BYTES)
    predicted = max(slot.total for slot in device_bytes(program))
    others = bytes_of_others()
    found = train(plan, num_steps=3, plain=True, spill_directory=tmp_path)
    assert found.measured_peak_bytes is not None
    measured = found.measured_peak_bytes.device - others
    assert measured <= predicted <= 1.05 * measured


# --- models that a user has packed ----------------------------------------------------------------


def made(kind: Quantize) -> nn.Module:
    model: nn.Module = getattr(quantized_models, f"{kind}_factory")()[0]
    return model


def batch_at(number: int) -> Any:
    batches = quantized_models.batches()
    return batches[number % len(batches)]


def of_kind(kind: Quantize) -> Subject:
    return Subject(partial(made, kind), batch_at)


FOUR = Loop(num_steps=4)
USERS = pytest.mark.parametrize("users_kind", ["nf4", "int8"])


def tried(kind: Quantize, seed: int = 0, **options: Any) -> Scenario:
    """Decisions at random for every unit."""
    options.setdefault("model", of_kind(kind))
    options.setdefault("units", lambda units: mixed(units, random.Random(seed), "disk", "host"))
    options.setdefault("script", FOUR)
    return Scenario(factory=ADAMW, **options)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("users_kind", "seed"), [("nf4", 0), ("nf4", 1), ("nf4", 2), ("int8", 0), ("int8", 1)]
)
def test_a_users_packed_model_trains_like_plain_pytorch_bitwise(
    users_kind: Quantize, seed: int, tmp_path: Path
) -> None:
    run = tried(users_kind, seed).assert_like_plain(tmp_path, restored)
    own = "quant_state.bitsandbytes__nf4" if users_kind == "nf4" else ".SCB"
    assert any(own in name for name in run.model.state_dict())


@pytest.mark.nightly
@USERS
def test_the_usual_script_trains_like_plain_pytorch_bitwise(
    users_kind: Quantize, tmp_path: Path
) -> None:
    """from_pretrained, prepare_model_for_kbit_training, get_peft_model; then a plan."""
    transformers: Any = pytest.importorskip("transformers")
    peft: Any = pytest.importorskip("peft")
    with seeded(0):
        quantized_models.llama().save_pretrained(tmp_path / "base")

    def scripted() -> nn.Module:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base",
            dtype=torch.bfloat16,
            use_cache=False,
            quantization_config=transformers.BitsAndBytesConfig(
                **quantized_models.OPTIONS[users_kind]
            ),
        )
        model = peft.prepare_model_for_kbit_training(
            model, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        with seeded(1):
            adapted: nn.Module = peft.get_peft_model(model, config)
        return adapted.train()

    plain, sketched = scripted(), scripted()
    sketched.gradient_checkpointing_disable()  # type: ignore[operator]
    asked = tried(users_kind)
    expected = asked.plain_run(plain)
    FOUR(expected)
    spill = tmp_path / "spill"
    spill.mkdir()
    for seed in range(2):
        units = mixed(units_of(sketched, batch_at(0)), random.Random(seed), "disk", "host")
        plan = plan_for(sketched, units)
        with pytest.warns(UserWarning, match="checkpoint"):
            run = replace(asked, plan=lambda _, own=plan: own).prepared(scripted(), spill)  # type: ignore[misc]
        FOUR(run)
        assert_bitwise(run.outcome(), expected.outcome())


@pytest.mark.nightly
@USERS
def test_a_model_of_another_seed_takes_a_checkpoint_with_its_scales(
    users_kind: Quantize, tmp_path: Path
) -> None:
    asked = tried(users_kind, 1)
    run, other = asked.start(), asked.start(tmp_path, seed=5)
    run.step(0, 1)
    save(run.model, run.optimizer, tmp_path / "saved")
    assert list(differences(other.values(), run.values(), "")) != []
    load(other.model, other.optimizer, tmp_path / "saved")
    assert list(differences(other.values(), run.values(), "")) == []
    run.seen.clear()
    for each in (run, other):
        each.step(2, 3)
    assert_bitwise(other.outcome(), run.outcome())


@pytest.mark.parametrize(
    ("users_kind", "products"),
    [("nf4", nullcontext), ("int8", nullcontext), ("int8", products_of_a_card)],
)
def test_packed_bytes_are_saved_where_hooks_see_them_and_come_back_from_there(
    users_kind: Quantize, products: Callable[[], AbstractContextManager[None]]
) -> None:
    """The library's own product keeps them in an attribute: a chunk's buffer would be held."""
    model = of_kind(users_kind).build()
    settle_quantized(model)
    with products():
        packed_bytes_come_back(model)


def packed_bytes_come_back(model: nn.Module) -> None:
    layer = next(layer for _, layer in packed_layers(model))
    given = torch.randn(4, 96, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(given).sum(), given)
    packed = layer.weight.untyped_storage().data_ptr()
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.untyped_storage().data_ptr())
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = layer(given)
    assert packed in seen
    layer.weight.data = torch.zeros_like(layer.weight)  # as where its buffer has gone
    (found,) = torch.autograd.grad(result.sum(), given)
    assert torch.equal(found, expected)


@pytest.mark.nightly("nf4")
@USERS
def test_a_copy_of_a_planned_model_has_weights_and_scales_of_its_own(
    users_kind: Quantize, tmp_path: Path
) -> None:
    def copies(run: Run, number: int) -> None:
        if number == 0 and run.planned:
            copied = copy.deepcopy(run.model)
            for layer in (layer for _, layer in packed_layers(copied)):
                for scale in scales_of(layer).values():
                    scale.zero_()
                layer.weight.data.zero_()

    units = partial(decided, activations=RECOMPUTE, states=Placement(tier="disk"))
    script = Loop(num_steps=3, before=copies)
    tried(users_kind, units=units, script=script).assert_like_plain(tmp_path)


@pytest.mark.nightly("int8")
@USERS
def test_an_evaluation_between_steps_gives_plain_pytorchs_logits(
    users_kind: Quantize, tmp_path: Path
) -> None:
    """And on every processor: packing anew for AVX-512 is off, which trained weights need.

    In 8 bits it runs other products than training does: inputs are quantised, too.
    """
    four = users_kind == "nf4"
    asked = tried(users_kind, 2)

    def model_with(*, avx512: bool) -> nn.Module:
        model = asked.subject.build()
        for _, layer in packed_layers(model):
            layer.support_avx512bf16_for_cpu = avx512
        return model

    # As on such a processor, and as it is under a plan.
    run, plain = asked.prepared(model_with(avx512=four), tmp_path), model_with(avx512=False)
    assert not any(layer.support_avx512bf16_for_cpu for _, layer in packed_layers(run.model))
    runs = (run, asked.plain_run(plain))
    for each in runs:
        for number in range(2):
            each.step(number)
            each.model.eval()
            with torch.no_grad():
                output: Any = call_model(each.model, batch_at(0))
            each.seen.append(output.logits)
            each.model.train()
    assert_bitwise(*(each.outcome() for each in runs))
    restore(run.model)
    layers = packed_layers(run.model)
    assert all(layer.support_avx512bf16_for_cpu == four for _, layer in layers)


@pytest.mark.nightly
@pytest.mark.parametrize("factory", ["mixed_factory", "plain_scales_factory", "dora_factory"])
def test_a_factorys_packed_model_is_profiled_planned_and_trained(
    factory: str, tmp_path: Path
) -> None:
    source = load_source(f"tests.support.quantized_models:{factory}")
    record = measured(source, tmp_path, batch_size=1, seq_len=1, dtype="float32")
    assert all(unit.stays == "" and unit.runs_once == "" for unit in record.units)
    plan = planned(record, RECOMPUTE, Placement(tier="disk"))
    found, plainly = (
        train(plan, num_steps=3, plain=plain, spill_directory=tmp_path) for plain in (False, True)
    )
    assert found.losses == plainly.losses
    assert found.parameters_sha256 == plainly.parameters_sha256


# --- what cannot be planned -----------------------------------------------------------------------


def packed(bits: int, *, moved: bool = True, **settings: Any) -> nn.Module:
    make = partial(quantized_models.packed, bits=bits, **settings)
    return quantized_models.factory(make, moved=moved)()[0]


of_four_bits, of_eight_bits = partial(packed, 4), partial(packed, 8)


def embedded() -> nn.Module:
    model: nn.Module = quantized_models.llama()
    model.set_submodule("model.embed_tokens", bitsandbytes.nn.Embedding4bit(320, 96))
    return model


def by_another_quantizer() -> nn.Module:
    """As from_pretrained leaves one with a GPTQConfig."""
    utilities: Any = pytest.importorskip("transformers.utils.quantization_config")
    model: Any = quantized_models.llama()
    model.quantization_method = utilities.QuantizationMethod.GPTQ
    found: nn.Module = model
    return found


def packed_for_evaluation() -> nn.Module:
    """As a processor with AVX-512 and bfloat16 leaves a layer that it has evaluated."""
    model = of_four_bits()
    next(layer for _, layer in packed_layers(model)).weight.quant_state.packing_format_for_cpu = 1
    return model


def computing_in_16_bits() -> nn.Module:
    """As a factory's model is profiled: biases are in that dtype, too."""
    model = of_four_bits(compute_dtype=torch.bfloat16)
    settle_quantized(model)
    return model


FOLLOWED: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "outliers": (partial(of_eight_bits, threshold=6.0), of_eight_bits),
    "packed in every forward": (partial(of_eight_bits, has_fp16_weights=True), of_eight_bits),
    "embedding": (embedded, of_four_bits),
    "storage": (partial(of_four_bits, quant_storage=torch.bfloat16), of_four_bits),
    "computing": (partial(of_four_bits, compute_dtype=None), computing_in_16_bits),
    "quantizer": (by_another_quantizer, of_four_bits),
    "evaluated": (packed_for_evaluation, of_four_bits),
    "before it is quantised": (
        by_another_quantizer,
        lambda: quantized_models.with_adapters(quantized_models.llama()),
    ),
    "not packed yet": (
        partial(of_four_bits, moved=False),
        lambda: of_four_bits(moved=False).to("cpu"),
    ),
}


@pytest.mark.nightly(by_day=2)
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_packed_model_trains_when_the_message_is_followed(
    name: str, tmp_path: Path, assert_says: Speaker
) -> None:
    before, after = FOLLOWED[name]
    model = before()
    error = assert_says.refused(refuse_parameters, model, source="train.py:factory")
    assert error.fix is not None
    if name not in ("before it is quantised", "not packed yet"):
        assert_says.refused(as_made, model, source="train.py:factory")
    subject = replace(of_kind("nf4"), make=after, change=None)
    tried("nf4", model=subject, script=Loop(num_steps=2)).assert_like_plain(tmp_path)


def test_a_bias_that_a_forward_would_convert_is_refused_by_name(assert_says: Speaker) -> None:
    """Conversions of a layer of 8 bits, in place: a plan has placed it."""
    model = of_kind("int8").build()
    settle_quantized(model)
    layer = next(layer for _, layer in packed_layers(model))
    assert_says.refused(layer, torch.randn(4, 96, dtype=torch.bfloat16))
    assert layer.bias.dtype == torch.float32


def test_a_tensor_subclass_of_torchao_is_refused_by_name() -> None:
    quantization: Any = pytest.importorskip("torchao.quantization")
    model = quantized_models.llama()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(ProtrainError, match="which is made of tensors of its own"):
        refuse_parameters(model, source="train.py:factory")
