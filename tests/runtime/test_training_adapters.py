"""Training with adapters under plans: the bits of plain PyTorch on the model that PEFT makes.

And the bytes that were predicted: an upper bound in every slot of a step that ran.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.zoo import ZOO, Specimen
from protrain_plan.commands.training import digest
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.profiling.memory.unit_bytes import ModelStructure, analyze_units
from protrain_plan.profiling.structure.discovery import discover
from protrain_runtime import prepare, restore
from protrain_runtime.contract.records.adapters import parse_lora
from protrain_runtime.contract.records.plan import (
    KEEP,
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
)
from protrain_runtime.contract.records.profile import Precision, Profile
from protrain_runtime.diagnostics.recording import measure_step
from tests.support.by_peft import by_peft
from tests.support.peaks import (
    SLACK_BYTES,
    assert_disk_within,
    bytes_of_others,
    peaks,
    profile_made,
    without_freedom,
)
from tests.support.runtime_cases import (
    BATCH,
    SEQUENCE,
    Subject,
    decided,
    described_by,
    open_to,
    plan_for,
    profiled_here,
    units_of,
)
from tests.support.scenario import Run
from tests.support.trained import train

PIECE_BYTES = 1 << 15
NUM_STEPS = 4


@dataclass(frozen=True)
class Case:
    """An adapter as `--lora` says it and as PEFT is told."""

    text: str
    options: tuple[tuple[str, Any], ...] = ()
    model: str = "qwen2"  # which has biases
    precision: Precision = "pure"
    stays: bool = False  # trainable parameters of several dtypes in a block

    @property
    def specimen(self) -> Specimen:
        adapter = str(parse_lora(self.text))
        precision = self.precision
        return replace(ZOO[self.model], dtype="bfloat16", precision=precision, adapter=adapter)


CASES: dict[str, Case] = {
    "float32": Case("r=2"),
    "base": Case("r=2,dtype=base"),
    "dropout": Case("r=2,dropout=0.1,rslora", (("lora_dropout", 0.1), ("use_rslora", True))),
    "dora": Case("r=2,dora", (("use_dora", True),)),
    "dora with dropout": Case("r=2,dora,dropout=0.1", (("use_dora", True), ("lora_dropout", 0.1))),
    "VeLoRA": Case("r=2,velora,dropout=0.1", (("velora_config", {}), ("lora_dropout", 0.1))),
    "VeLoRA by chance": Case("r=2,velora=random", (("velora_config", {"init_type": "random"}),)),
    "LoRA-FA": Case("r=2,freeze=A,dropout=0.1", (("lora_dropout", 0.1),)),
    "saved modules": Case(
        "r=2,modules_to_save=lm_head+embed_tokens",
        (("modules_to_save", ["lm_head", "embed_tokens"]),),
    ),
    "a saved tied head": Case(
        "r=2,modules_to_save=lm_head", (("modules_to_save", ["lm_head"]),), model="llama-tied"
    ),
    "an embedding": Case(
        "r=2,targets=q_proj+embed_tokens", (("target_modules", ["q_proj", "embed_tokens"]),)
    ),
    "biases": Case("r=2,bias=lora_only", (("bias", "lora_only"),), stays=True),
    "GPT-2": Case("r=2,dora", (("use_dora", True),), model="gpt2"),
    "T5": Case("r=2,dropout=0.1", (("lora_dropout", 0.1),), model="t5"),
    "experts": Case("r=2", model="mixtral"),
    "master weights": Case(
        "r=2,modules_to_save=lm_head", (("modules_to_save", ["lm_head"]),), precision="master"
    ),
    "autocast": Case("r=2,dropout=0.1", (("lora_dropout", 0.1),), precision="autocast"),
}

DECISIONS: dict[str, tuple[Activations, Placement]] = {
    "persistent": (KEEP, PERSISTENT),
    "updated in backward": (Activations(form="lite"), OPTIMIZER_IN_BACKWARD),
    "host, recomputed": (Activations(form="full"), Placement(tier="host")),
    "host and disk": (Activations(form="full"), Placement(tier="host", on_disk=3)),
    "host and disk, swapped": (
        Activations(tier="disk"),
        Placement(tier="host", on_disk=3, keep_gathered=True),
    ),
    "disk, swapped": (Activations(tier="disk"), Placement(tier="disk")),
    "disk, input swapped": (
        Activations(tier="disk", form="attn"),
        Placement(tier="disk", keep_gathered=True),
    ),
}


def freeze_first(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)


@cache
def plainly(name: str) -> tuple[list[float], str]:
    """Losses and parameters of plain PyTorch on the model that PEFT makes."""
    case = CASES[name]
    specimen = case.specimen
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    stored = specimen.dtype
    if case.precision == "autocast":
        stored = "float32"
        autocast = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
    options = {"r": 2, "lora_alpha": 4} | dict(case.options)
    own = "dtype=base" not in case.text
    model = by_peft(specimen.source, options, dtype=stored, autocast=own)
    if "freeze=A" in case.text:
        freeze_first(model)
    factory = optimizer_factory("adamw", case.precision)
    optimizer = factory(p for p in model.parameters() if p.requires_grad)
    _, batches = specimen.make()
    run = Run(Subject(lambda: model, lambda _: next(batches)), model, optimizer)
    torch.manual_seed(0)
    for number in range(NUM_STEPS):
        with autocast():
            loss = run.loss(number)
        loss.backward()
        run.update()
        run.seen.append(loss.item())
    return run.seen, digest(model)


@pytest.mark.nightly(by_day=40)
@pytest.mark.parametrize("decisions", DECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_adapters_train_as_plain_torch_trains_what_peft_makes(
    name: str, decisions: str, tmp_path: Path
) -> None:
    case = CASES[name]
    activations, states = DECISIONS[decisions]
    model, batches = case.specimen.make()
    units = decided(units_of(model, next(batches)), activations, states)
    if case.stays and not states.is_persistent:
        units = tuple(
            replace(unit, states=PERSISTENT) if unit.kind == "block" else unit for unit in units
        )
    plan = plan_for(model, units, workload=case.specimen.workload, piece_bytes=PIECE_BYTES)
    del model
    found = train(plan, num_steps=NUM_STEPS, plain=False, spill_directory=tmp_path, compared=True)
    losses, parameters = plainly(name)
    assert list(found.losses) == losses
    assert len(set(losses)) == NUM_STEPS
    assert found.parameters_sha256 == parameters


# --- bytes ----------------------------------------------------------------------------------------

WIDTH, LAYERS = 96, 4  # of tiny-llama
FIRST_INPUT_BYTES = 2 * BATCH * SEQUENCE * WIDTH
"""It asks for no gradient, and the base counts it as if nothing else held it."""
LAST_PART_BYTES = 4 * BATCH * SEQUENCE * WIDTH + 512
"""The last norm's float32 copy: a part has the costs of the costliest form that blocks may have."""
OPTIONS = (
    "r=4",
    "r=4,dora",
    "r=4,dropout=0.1",
    "r=4,freeze=A,dropout=0.1",
    "r=4,velora",
    "r=4,velora=random",
    "r=4,modules_to_save=lm_head+embed_tokens",
)


@pytest.fixture(scope="module", params=OPTIONS)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    adapter = str(parse_lora(request.param))
    make = partial(profiled_here, "tiny-llama", dtype="bfloat16", adapter=adapter, num_steps=2)
    return profile_made(tmp_path_factory, f"adapters-{request.param}", make)


@pytest.mark.slow  # by day: test_low_rank, in the forms that recompute adapters
@pytest.mark.parametrize("decisions", [name for name in DECISIONS if name != "persistent"])
def test_bytes_of_adapters_are_those_predicted(
    measured: Profile, decisions: str, tmp_path: Path
) -> None:
    units = decided(described_by(measured), *DECISIONS[decisions])
    found = peaks(measured, without_freedom(open_to(measured, units)), tmp_path)
    above = [most - size for most, size in zip(found.predicted, found.measured, strict=True)]
    assert min(above) >= 0
    assert bool(found.measured_disk) == ("disk" in decisions)
    assert_disk_within(found.predicted_disk, found.measured_disk, num_slots=len(above))
    assert max(above) <= SLACK_BYTES + FIRST_INPUT_BYTES + LAST_PART_BYTES
    inner = above[: LAYERS + 1] + above[LAYERS + 3 :]
    assert max(inner) <= SLACK_BYTES + FIRST_INPUT_BYTES


@pytest.mark.nightly
def test_a_scripts_own_checkpointing_takes_nothing_beside_the_plan(tmp_path: Path) -> None:
    """With it, outputs of frozen embeddings ask for gradients: GPT-2's dropout keeps its mask."""
    case = CASES["GPT-2"]
    _, batches = case.specimen.make()
    batch: Any = next(batches)

    def run(*, checkpointing: bool) -> tuple[float, tuple[int, ...]]:
        others = bytes_of_others()
        model: Any = by_peft(case.specimen.source, {"r": 2}, dtype="bfloat16")
        units = decided(units_of(model, batch), RECOMPUTE, PERSISTENT)
        plan = plan_for(model, units, workload=case.specimen.workload)
        expected: Any = nullcontext()
        if checkpointing:
            model.activation_checkpointing_enable()
            expected = pytest.warns(UserWarning, match="own gradient checkpointing")
        with expected as caught:
            _, optimizer = prepare(
                model, plan, optimizer=optimizer_factory("adamw"), spill_directory=tmp_path
            )
        assert not checkpointing or [one.filename for one in caught] == [__file__]
        torch.manual_seed(0)
        loss = loss_of(call_model(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        def step(observe: Callable[[str], None]) -> None:
            loss_of(call_model(model, batch)).backward()
            observe("update")
            optimizer.step()

        found = measure_step(model, step, besides_bytes=others)
        restore(model)
        embedding: Any = model.get_input_embeddings()
        assert embedding(batch["input_ids"]).requires_grad == checkpointing
        return loss.item(), found.slot_bytes

    assert run(checkpointing=True) == run(checkpointing=False)


# --- what stays, what is its own master -----------------------------------------------------------


def measured_as(adapter: str, precision: Precision = "pure") -> tuple[nn.Module, ModelStructure]:
    specimen = replace(
        ZOO["qwen2"], dtype="bfloat16", precision=precision, adapter=str(parse_lora(adapter))
    )
    model, batches = specimen.make()
    batch = next(batches)
    return model, analyze_units(model, batch, discover(model, batch), precision=precision)


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", ["r=2,bias=lora_only", "r=2,modules_to_save=input_layernorm"])
def test_parameters_of_several_dtypes_stay_on_the_device(adapter: str) -> None:
    """A block's float32 adapters beside what PEFT trains in bfloat16; other units may move."""
    _, structure = measured_as(adapter)
    blocks = [n for n, unit in enumerate(structure.found) if unit.kind == "block"]
    assert structure.stays == dict.fromkeys(blocks, "trainable parameters of several dtypes")
    _, of_base = measured_as(f"{adapter},dtype=base")
    assert of_base.stays == {}


@pytest.mark.nightly
def test_float32_adapters_are_their_own_masters() -> None:
    """AdamW's two states alone; a copy that is bfloat16 has a master besides."""
    model, structure = measured_as("r=2,modules_to_save=lm_head", "master")
    trained = dict.fromkeys((torch.float32, torch.bfloat16), 0)
    for parameter in model.parameters():
        trained[parameter.dtype] += parameter.numel() * parameter.requires_grad
    assert all(trained.values())
    kept = {dtype: structure.rules.of(dtype).element_bytes for dtype in trained}
    assert kept == {torch.float32: 8, torch.bfloat16: 12}
    states = sum(chunk.size(structure.rules).state_bytes for chunk in structure.chunks)
    assert states == 8 * trained[torch.float32] + 12 * trained[torch.bfloat16]
