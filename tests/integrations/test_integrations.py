"""Training in a framework under a plan equals the framework's own, bit by bit."""

import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import TorchDynamoPlugin, set_seed
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, default_collate
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from protrain_runtime import restore, with_master_weights, without_parameters
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import write_plan
from protrain_runtime.contract.records.plan import PERSISTENT, Plan
from protrain_runtime.contract.records.profile import Precision
from protrain_runtime.integrations import accelerate as in_accelerate
from protrain_runtime.integrations import transformers as in_transformers
from protrain_runtime.integrations.adopting import follow
from protrain_runtime.model.prepared import engine_of, parameter_values
from tests.support.integration_cases import (
    CLIPPED,
    adapter_plan,
    eight_bits,
    plan,
    rows,
    with_adapter,
    without_overrides,
)
from tests.support.messages import Speaker
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import (
    ADAMW,
    assert_bitwise,
    build,
    described,
    differences,
    mixed,
    outcome,
    plan_for,
    step,
    weight_decay_groups,
)


def refused(attach: Callable[[], object]) -> str:
    with pytest.raises(ProtrainError) as caught:
        attach()
    return str(caught.value)


# --- Trainer --------------------------------------------------------------------------------------

TRAINING: dict[str, Any] = {
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
}


def trainer(name: str, folder: Path, *, optimizer: Any = None, **settings: Any) -> Trainer:
    model = build(name)
    own = optimizer and optimizer(model.parameters())
    return Trainer(
        model,
        TrainingArguments(output_dir=str(folder), **(TRAINING | settings)),
        optimizers=(own, None),
        train_dataset=rows(24, seed=0),
        eval_dataset=rows(8, seed=1),
    )


def logged(trainer: Trainer) -> list[dict[str, float]]:
    """Losses, norms, rates and evaluations, without what clocks say."""
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    return [
        {key: value for key, value in entry.items() if key in names}
        for entry in trainer.state.log_history
    ]


def assert_same_training(found: Trainer, expected: Trainer) -> None:
    assert logged(found) == logged(expected)
    assert_bitwise(
        outcome(found.model, found.optimizer, []), outcome(expected.model, expected.optimizer, [])
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A Trainer, the plan that it follows, and how it trains."""

    make: Callable[[Path], Trainer]
    plan: Callable[[], Plan]
    train: Callable[[Trainer], object] = Trainer.train
    plainly: Callable[[Path], Trainer] | None = None  # where the plain one is made otherwise
    warning: str = ""


def with_optimizer(
    make_model: Callable[[], nn.Module], make: Callable[..., torch.optim.Optimizer], folder: Path
) -> Trainer:
    """A Trainer that is given its optimizer, and makes the scheduler."""
    model = make_model()
    return Trainer(
        model,
        TrainingArguments(output_dir=str(folder), **TRAINING, max_grad_norm=CLIPPED),
        train_dataset=rows(24, seed=0),
        optimizers=(make(weight_decay_groups(model)), None),
    )


def bits(parameters: Any) -> torch.optim.Optimizer:
    """Its bits are an option of the class that stands in no group."""
    package = pytest.importorskip("bitsandbytes")
    made: torch.optim.Optimizer = package.optim.AdamW(
        parameters, lr=1e-3, optim_bits=8, min_8bit_size=512
    )
    return made


def of_compiled_blocks(folder: Path) -> Trainer:
    torch.compiler.reset()
    made = trainer("llama-tied", folder, max_steps=2)
    for number in range(4):
        made.model.get_submodule(f"model.layers.{number}").compile(backend="aot_eager")
    return made


def of_model_init(folder: Path) -> Trainer:
    args = TrainingArguments(output_dir=str(folder), **TRAINING)
    return Trainer(args=args, model_init=lambda: build("gpt2"), train_dataset=rows(24, seed=0))


def of_checkpointing_model(folder: Path) -> Trainer:
    made = trainer("gpt2", folder)
    made.model.activation_checkpointing_enable()
    return made


def twice(trainer: Trainer) -> None:
    trainer.train()
    trainer.train()


def all_on_device(name: str) -> Plan:
    made = plan(name)
    return replace(made, units=tuple(replace(unit, states=PERSISTENT) for unit in made.units))


def of_blocks(name: str) -> Plan:
    """Compiled ones, which are recomputed whole."""
    made = plan(name)
    units = [
        replace(unit, activations=replace(unit.activations, form="full"))
        if unit.activations.recomputes
        else unit
        for unit in made.units
    ]
    return with_settings(made, units=tuple(units), compile="blocks")


def case(name: str, settings: dict[str, Any] | None = None, **planned: Any) -> Case:
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, **(settings or {})}
    return Case(make=partial(trainer, name, **given), plan=partial(plan, name, **planned))


ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
EPOCHS: dict[str, Any] = {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 1}
TIED = partial(build, "llama-tied")
GPT2 = partial(trainer, "gpt2")
TIED_PLAN, GPT2_PLAN = partial(plan, "llama-tied"), partial(plan, "gpt2")
CASES: dict[str, Case] = {
    "clipped": case("llama-tied", {"max_grad_norm": CLIPPED}),
    "dropout": case("gpt2"),
    "host": case("gpt2", {"max_grad_norm": CLIPPED}, tier="host"),
    "not clipped": case("llama-tied", {"max_grad_norm": 0}),
    "sgd": case("llama-tied", {"optim": "sgd", "optim_args": "momentum=0.9"}),
    "accumulated": case("llama-tied", ACCUMULATED, micro_batches=2),
    # 24 rows are 6 batches: an epoch's last update has 2 micro-batches instead of 4.
    "accumulated, epochs": case("gpt2", EPOCHS, micro_batches=4),
    "autocast": case("llama-tied", {"bf16": True}, precision="autocast"),
    "autocast, dropout": case("gpt2", {"bf16": True}, precision="autocast"),
    "8 bits by class": Case(make=partial(with_optimizer, TIED, eight_bits), plan=TIED_PLAN),
    "8 bits by option": Case(make=partial(with_optimizer, TIED, bits), plan=TIED_PLAN),
    "adafactor": Case(
        make=partial(trainer, "llama-tied", optim="adafactor"),
        plan=partial(all_on_device, "llama-tied"),
    ),
    "lora": Case(
        make=partial(with_optimizer, partial(with_adapter, packed=False), ADAMW),
        plan=partial(adapter_plan, packed=False),
    ),
    "qlora": Case(
        make=partial(with_optimizer, partial(with_adapter, packed=True), ADAMW),
        plan=partial(adapter_plan, packed=True),
    ),
    "compiled": Case(make=of_compiled_blocks, plan=partial(of_blocks, "llama-tied")),
    "again": Case(make=partial(trainer, "llama-tied"), plan=TIED_PLAN, train=twice),
    "model_init": Case(make=of_model_init, plan=GPT2_PLAN, train=twice),
    "its checkpointing": Case(
        make=partial(GPT2, activation_checkpointing=True),
        plainly=GPT2,
        plan=GPT2_PLAN,
        warning="activation_checkpointing=True was switched off: the plan says what every block"
        " recomputes",
    ),
    "the model's checkpointing": Case(
        make=of_checkpointing_model,
        plainly=GPT2,
        plan=GPT2_PLAN,
        warning="the model's own gradient checkpointing is switched off while it is profiled or"
        " follows a plan: the plan decides which blocks are recomputed",
    ),
}
AT_NIGHT = ("again", "model_init")


@pytest.mark.nightly(but=("again", "model_init"))
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in AT_NIGHT else ()) for n in CASES]
)
def test_the_trainer_under_a_plan_equals_the_trainer_bitwise(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with without_overrides() if "8 bits" in name else nullcontext():
        expected = (case.plainly or case.make)(tmp_path)
        case.train(expected)
        found = case.make(tmp_path)
        warned = pytest.warns(UserWarning, match=f"^{re.escape(case.warning)}$")
        with warned if case.warning else nullcontext():
            in_transformers.use_plan(found, case.plan(), spill_directory=tmp_path)
            case.train(found)
        assert engine_of(found.model) is not None
        states = found.optimizer.state.values()
        dtypes = {each.dtype for one in states for each in one.values() if isinstance(each, Tensor)}
        assert (torch.uint8 in dtypes) == ("8 bits" in name)
        assert_same_training(found, expected)
        restore(found.model)
        assert_same_training(found, expected)


@pytest.mark.nightly(but=("adafactor",))
@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "adamw_8bit", "adafactor", "adagrad"])
def test_the_trainer_trains_when_the_message_on_its_optimizer_is_followed(
    optim: str, tmp_path: Path, assert_says: Speaker
) -> None:
    """Such as states in float32 of embeddings alone, which the Trainer asks bitsandbytes for."""
    bits: Any = pytest.importorskip("bitsandbytes").optim

    def planned(**settings: Any) -> Trainer:
        made = trainer("llama-tied", tmp_path, **({"max_steps": 1} | settings))
        in_transformers.use_plan(made, plan("llama-tied"), spill_directory=tmp_path)
        return made

    with without_overrides():
        made = planned(optim=optim)
        assert_says(refused(made.train))
        assert engine_of(made.model) is None
        bits.GlobalOptimManager.get_instance().initialize()
        made = planned(optimizer=bits.AdamW8bit if "8bit" in optim else torch.optim.AdamW)
        made.train()
        assert engine_of(made.model) is not None


@pytest.mark.nightly
def test_the_trainer_evaluates_and_generates_under_a_plan(tmp_path: Path) -> None:
    def run(planned: bool) -> list[Any]:
        made = trainer("llama-tied", tmp_path)
        if planned:
            in_transformers.use_plan(made, plan("llama-tied"), spill_directory=tmp_path)
        made.train()
        prompt = rows(2, seed=2)[0]["input_ids"][None, :8]
        return [
            made.evaluate()["eval_loss"],
            made.predict(rows(4, seed=3)).predictions.tolist(),
            made.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, pad_token_id=0
            ),
        ]

    assert list(differences(run(planned=True), run(planned=False), "answers")) == []


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), [("plan", "plain"), ("plain", "plan")])
def test_the_trainers_checkpoints_resume_bitwise_with_and_without_a_plan(
    first: str, second: str, tmp_path: Path
) -> None:
    whole = trainer("gpt2", tmp_path / "whole")
    whole.train()
    for how, resumes in ((first, False), (second, True)):
        made = trainer("gpt2", tmp_path / "half", save_strategy="steps", save_steps=2)
        if how == "plan":
            in_transformers.use_plan(made, plan("gpt2"), spill_directory=tmp_path)
        made.train(resume_from_checkpoint=str(tmp_path / "half/checkpoint-2") if resumes else None)
        assert_bitwise(
            outcome(made.model, made.optimizer, []), outcome(whole.model, whole.optimizer, [])
        )


@pytest.mark.nightly
def test_the_trainer_saves_the_models_own_names_and_shapes(tmp_path: Path) -> None:
    found, expected = trainer("llama-tied", tmp_path), trainer("llama-tied", tmp_path)
    in_transformers.use_plan(found, plan("llama-tied"), spill_directory=tmp_path, check="bitwise")
    for made, folder in ((found, "found"), (expected, "expected")):
        made.train()
        made.save_model(str(tmp_path / folder))
    saved = load_file(tmp_path / "found/model.safetensors")
    own = load_file(tmp_path / "expected/model.safetensors")
    assert list(differences(saved, own, "weights")) == []
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "found")
    assert list(differences(loaded.state_dict(), expected.model.state_dict(), "loaded")) == []


Given = tuple[dict[str, Any], dict[str, Any]]
"""Settings of a framework, and what a plan is for."""

OF_AUTOCAST: dict[str, Any] = {"precision": "autocast"}
WRONG: dict[str, tuple[Given, Given]] = {
    "clips": (({}, {"clips": False}), ({}, {})),
    "accumulates: plan": (
        ({"gradient_accumulation_steps": 4}, {}),
        ({"gradient_accumulation_steps": 4}, {"micro_batches": 4}),
    ),
    "accumulates: set": (({"gradient_accumulation_steps": 4}, {}), ({}, {})),
    "casts: profile": (({"bf16": True}, {}), ({"bf16": True}, OF_AUTOCAST)),
    "casts: set": (({"bf16": True}, {}), ({"bf16": False, "fp16": False}, {})),
    "does not cast: set": (({}, OF_AUTOCAST), ({"bf16": True}, OF_AUTOCAST)),
    "does not cast: profile": (({}, OF_AUTOCAST), ({}, {})),
    "compiles": (({"torch_compile": True}, {}), ({}, {})),
    "changes dtype": (({"bf16_full_eval": True}, {}), ({"bf16_full_eval": False}, {})),
}


@pytest.mark.nightly("accumulates: plan", "casts: profile", "does not cast: set")
@pytest.mark.parametrize(("wrong", "followed"), WRONG.values(), ids=WRONG)
def test_the_trainer_trains_when_the_message_is_followed(
    wrong: Given, followed: Given, tmp_path: Path, assert_says: Speaker
) -> None:
    """Bits under such settings are compared above."""

    def planned(given: Given) -> Trainer:
        settings, made_for = given
        file = tmp_path / "plan.yaml"
        write_plan(plan("llama", **made_for), file)
        made = trainer("llama", tmp_path, **({"max_steps": 1} | settings))
        in_transformers.use_plan(made, file, spill_directory=tmp_path)
        return made

    assert_says(refused(lambda: planned(wrong)))
    made = planned(followed)
    made.train()
    assert engine_of(made.model) is not None


# --- Accelerate -----------------------------------------------------------------------------------


def accelerator(**settings: Any) -> Accelerator:
    """A new one: its settings are the whole process's otherwise."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **settings)


FUSED = partial(torch.optim.AdamW, fused=True)


class Loop:
    """A training loop as Accelerate's documentation writes it."""

    def __init__(
        self,
        planned: Plan | None,
        spill: Path,
        *,
        make: Callable[..., torch.optim.Optimizer] = FUSED,
        **settings: Any,
    ) -> None:
        set_seed(0)
        self.accelerator = accelerator(**settings)
        self.model: nn.Module = build("gpt2")
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer: torch.optim.Optimizer = make(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=1e-3,
        )
        schedule = LinearLR(self.optimizer, 0.1, total_iters=6)
        loader = DataLoader(rows(24, seed=0), batch_size=4, shuffle=True)
        if planned is not None:
            self.optimizer = in_accelerate.use_plan(
                self.accelerator, self.model, self.optimizer, planned, spill_directory=spill
            )
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            self.model, self.optimizer, loader, schedule
        )
        self.losses: list[Tensor] = []

    def run(self, *, epochs: int = 2, clips: bool) -> "Loop":
        for _ in range(epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.accelerator.backward(loss)
                    if clips and self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIPPED)
                        self.losses.append(norm)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.detach())
            self.model.eval()
            with torch.no_grad():
                evaluated = self.model(**default_collate(rows(4, seed=1)))
            self.losses.append(evaluated.loss)
            self.model.train()
        return self


def assert_same_loop(found: Loop, expected: Loop) -> None:
    assert_bitwise(
        outcome(found.model, found.optimizer, found.losses),
        outcome(expected.model, expected.optimizer, expected.losses),
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("precision", "micro_batches", "clips"),
    [("pure", 1, False), ("pure", 2, True), ("autocast", 1, True), ("autocast", 2, False)],
)
def test_an_accelerated_loop_under_a_plan_equals_the_loop_bitwise(
    precision: Precision, micro_batches: int, clips: bool, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "mixed_precision": "bf16" if precision == "autocast" else "no",
        "gradient_accumulation_steps": micro_batches,
    }
    made = plan("gpt2", precision=precision, micro_batches=micro_batches, clips=clips)
    expected = Loop(None, tmp_path, **settings).run(clips=clips)
    found = Loop(made, tmp_path, **settings).run(clips=clips)
    assert_same_loop(found, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("make", [FUSED, eight_bits], ids=["float32 states", "8 bits"])
def test_accelerates_checkpoints_resume_bitwise(
    make: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    whole = Loop(None, tmp_path, make=make).run(clips=True)
    half = Loop(plan("gpt2", seed=1), tmp_path, make=make).run(epochs=1, clips=True)
    half.accelerator.save_state(str(tmp_path / "state"))
    half.accelerator.save_model(half.model, str(tmp_path / "model"))
    saved = load_file(tmp_path / "model/model.safetensors")
    expected = half.model.state_dict()
    assert list(differences(saved, {name: expected[name] for name in saved}, "saved")) == []
    resumed = Loop(plan("gpt2", seed=2), tmp_path, make=make)
    resumed.accelerator.load_state(str(tmp_path / "state"))
    resumed.run(epochs=1, clips=True)
    resumed.losses = half.losses + resumed.losses
    assert_same_loop(resumed, whole)


def test_autocast_is_taken_off_and_the_plan_stays(tmp_path: Path) -> None:
    made = Loop(plan("gpt2", precision="autocast"), tmp_path, mixed_precision="bf16")
    plain = made.accelerator.unwrap_model(made.model, keep_fp32_wrapper=False)
    assert plain is made.model
    batch = default_collate(rows(4, seed=1))
    expected = build("gpt2").eval()(**batch).logits
    assert torch.equal(plain.eval()(**batch).logits, expected)
    assert engine_of(plain) is not None


WRONG_LOOPS: dict[str, tuple[Given, Given]] = {
    "accumulates: plan": (
        ({"gradient_accumulation_steps": 3}, {}),
        ({"gradient_accumulation_steps": 3}, {"micro_batches": 3}),
    ),
    "accumulates: set": (
        ({"gradient_accumulation_steps": 3}, {}),
        ({"gradient_accumulation_steps": 1}, {}),
    ),
    "casts: set": (({"mixed_precision": "bf16"}, {}), ({"mixed_precision": "no"}, {})),
    "casts: profile": (
        ({"mixed_precision": "bf16"}, {}),
        ({"mixed_precision": "bf16"}, OF_AUTOCAST),
    ),
    "compiles": (({"dynamo_plugin": TorchDynamoPlugin(backend="eager")}, {}), ({}, {})),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("wrong", "followed"), WRONG_LOOPS.values(), ids=WRONG_LOOPS)
def test_an_accelerated_loop_trains_when_the_message_is_followed(
    wrong: Given, followed: Given, tmp_path: Path, assert_says: Speaker
) -> None:
    """Bits under such settings are compared above."""

    def loop(given: Given) -> Loop:
        return Loop(plan("gpt2", **given[1]), tmp_path, **given[0])

    assert_says(refused(lambda: loop(wrong)))
    assert engine_of(loop(followed).run(epochs=1, clips=True).model) is not None


# --- optimizers that are adopted ------------------------------------------------------------------


@pytest.mark.nightly
def test_a_schedule_made_before_the_plan_holds_with_master_weights_and_after_loading(
    tmp_path: Path,
) -> None:
    def run(planned: Plan | None) -> Any:
        model = build("llama-tied").bfloat16()
        optimizer: torch.optim.Optimizer
        if planned is None:
            optimizer = with_master_weights(ADAMW)(model.parameters())
        else:
            optimizer = ADAMW(model.parameters())
        schedule = LinearLR(optimizer, 0.1, total_iters=6)
        if planned is not None:
            optimizer = follow(model, planned, optimizer, spill_directory=tmp_path)
        losses = []
        for number in range(4):
            losses.append(step("llama-tied", model, optimizer, number))
            schedule.step()
            if number == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        return outcome(model, optimizer, losses)

    units = mixed(described("llama-tied"), random.Random(0), "disk")
    own = {"precision": "master", "dtype": "bfloat16"}
    made = plan_for(build("llama-tied").bfloat16(), units, **own)
    expected = run(None)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step\(\)"):
        found = run(made)
    assert_bitwise(found, expected)


# --- weights --------------------------------------------------------------------------------------


NAME = "llama-tied"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The values of a model that no constructor here draws."""
    folder = tmp_path_factory.mktemp("weights")
    build(NAME, seed=5).save_pretrained(folder, max_shard_size="100KB")  # type: ignore[operator]
    return folder


def absent() -> nn.Module:
    with without_parameters():
        model = build(NAME)
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


def in_a_trainer(model: nn.Module, weights: Path | None, folder: Path) -> nn.Module:
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(model, args, train_dataset=rows(24, seed=0))
    if weights is not None:
        in_transformers.use_plan(trainer, plan(NAME), weights=weights, spill_directory=folder)
    trainer.train()
    made: nn.Module = trainer.model
    return made


def in_a_loop(model: nn.Module, weights: Path | None, folder: Path) -> nn.Module:
    set_seed(0)
    own = accelerator()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if weights is not None:
        optimizer = in_accelerate.use_plan(
            own, model, optimizer, plan(NAME), weights=weights, spill_directory=folder
        )
    loader = DataLoader(rows(12, seed=0), batch_size=4)
    model, optimizer, loader = own.prepare(model, optimizer, loader)
    for batch in loader:
        own.backward(model(**batch).loss)
        own.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    unwrapped: nn.Module = own.unwrap_model(model)
    return unwrapped


def in_lightning(model: nn.Module, weights: Path | None, folder: Path) -> nn.Module:
    pytest.importorskip("lightning", reason="PyTorch Lightning is not installed")
    from lightning.pytorch import Trainer as LightningTrainer

    from protrain_runtime.integrations.lightning import UsePlan
    from tests.support.lightning_module import Module

    module = Module(NAME)
    module.model = model
    callbacks = [UsePlan(plan(NAME), weights=weights, spill_directory=folder)] if weights else []
    trainer = LightningTrainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=callbacks,
        default_root_dir=folder,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows(12, seed=0), batch_size=4))
    return module.model


@pytest.mark.nightly("in_a_trainer")
@pytest.mark.parametrize("train", [in_a_trainer, in_a_loop, in_lightning])
def test_weights_go_straight_into_the_plan_in_one_line(
    train: Callable[[nn.Module, Path | None, Path], nn.Module], folder: Path, tmp_path: Path
) -> None:
    found = train(absent(), folder, tmp_path)
    expected = train(build(NAME, seed=5), None, tmp_path)
    assert engine_of(found) is not None
    values = dict(parameter_values(found))
    for name, parameter in expected.named_parameters():
        assert torch.equal(values[name], parameter), name
