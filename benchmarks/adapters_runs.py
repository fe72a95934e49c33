"""What the benchmark of adapters does in processes of its own: measured runs and predictions."""

import copy
import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

from benchmarks.accuracy_cases import SPECIMENS, plan_of
from benchmarks.processes import Found
from benchmarks.zoo import Specimen
from protrain_plan.commands.training import train
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.hardware.probe import processor_name
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.models.building import seeded
from protrain_plan.models.sources import ConfigSource
from protrain_plan.profiling.estimated import estimate
from protrain_runtime.contract.records import dumps_plan, loads_plan
from protrain_runtime.contract.records.adapters import parse_lora
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.profile import Precision, Profile, Quantize
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import reachable, storage_bytes
from protrain_runtime.diagnostics.recording import measure_step

NUM_STEPS = 3
"""The last one is measured: the first two make the optimizer's states."""
WAYS = ("as it is", "planned", "checkpointed")
"""Plain PyTorch; a plan that recomputes every block; transformers' gradient checkpointing."""


@dataclass(frozen=True, slots=True)
class Case:
    """What `--lora`, `--quantize` and `--precision` say, and what PEFT is told.

    PEFT has its defaults but for the rank and alpha.
    """

    model: str
    lora: str
    options: Mapping[str, Any]
    quantize: Quantize = ""
    precision: Precision = "pure"

    @property
    def specimen(self) -> Specimen:
        return replace(SPECIMENS[self.model], dtype="bfloat16", adapter="")

    @property
    def name(self) -> str:
        said = (self.model, self.lora, self.quantize, self.precision.removeprefix("pure"))
        return ", ".join(filter(None, said))


_PROJECTIONS = ["q_proj", "v_proj"]
_CASES = (
    Case("llama", "r=16", {}),
    Case("llama", "r=16,targets=q_proj+v_proj", {"target_modules": _PROJECTIONS}),
    Case("llama", "r=64,rslora", {"use_rslora": True}),
    Case("llama", "r=16,dropout=0.05", {"lora_dropout": 0.05}),
    Case("llama", "r=16,dora", {"use_dora": True}),
    Case("llama", "r=16,freeze=A", {}),
    Case(
        "llama",
        "r=16,modules_to_save=lm_head+embed_tokens",
        {"modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    Case("qwen2", "r=16,bias=lora_only", {"bias": "lora_only"}),
    Case("gpt2", "r=16,dropout=0.1", {"lora_dropout": 0.1}),
    Case("t5", "r=16", {}),
    Case("llama", "r=16", {}, "nf4"),
    Case("llama", "r=16", {}, "nf4", "autocast"),
    Case("qwen2", "r=16", {}, "nf4"),
    Case("qwen2", "r=16", {}, "nf4", "autocast"),
)
CASES: dict[str, Case] = {case.name: case for case in _CASES}


# --- runs of plain PyTorch ------------------------------------------------------------------------


def measured(name: str, checkpointed: bool) -> Found:
    """The most bytes of tensors in the last of the steps of plain PyTorch."""
    case = CASES[name]
    before = storage_bytes(reachable(devices.HOST))
    model = _by_peft(case, checkpointed=checkpointed)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), fused=True)
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    if case.precision == "autocast":
        autocast = partial(torch.autocast, "cpu", torch.bfloat16)

    def step(batch: Batch) -> None:
        with autocast():
            loss = loss_of(call_model(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = _batches(case.specimen)
    for _ in range(NUM_STEPS - 1):
        step(next(batches))
    batch = next(batches)
    found = measure_step(model, lambda _: step(batch), besides_bytes=before)
    return {"bytes": found.device_bytes}


def _by_peft(case: Case, *, checkpointed: bool) -> Any:
    """The model as a script of transformers, bitsandbytes and PEFT makes it."""
    rank = int(case.lora.partition("=")[2].partition(",")[0])
    chosen = {"r": rank, "target_modules": "all-linear"} | dict(case.options)
    settings = {"use_reentrant": False}
    with warnings.catch_warnings(), seeded(0):
        warnings.simplefilter("ignore")
        base = _base(case)
        if case.precision == "autocast":
            base = peft.prepare_model_for_kbit_training(
                base,
                use_gradient_checkpointing=checkpointed,
                gradient_checkpointing_kwargs=settings,
            )
        model: Any = peft.get_peft_model(base, peft.LoraConfig(**chosen))
        if checkpointed and case.precision == "pure":
            model.gradient_checkpointing_enable(settings)
    if "freeze=A" in case.lora:
        for path, parameter in model.named_parameters():
            if "lora_A" in path:
                parameter.requires_grad_(False)
    return model.train()


def _base(case: Case) -> Any:
    source = case.specimen.source
    assert isinstance(source, ConfigSource)
    config, model_class = source._config_and_class()
    common: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": torch.bfloat16}
    base = model_class._from_config(copy.deepcopy(config), **common)
    if not case.quantize:
        return base
    transformers = importlib.import_module("transformers")
    packed = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=case.quantize,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        return model_class.from_pretrained(
            folder, config=config, quantization_config=packed, **common
        )


def _batches(specimen: Specimen) -> Iterator[Batch]:
    return specimen.source.batches(
        batch_size=specimen.batch_size, seq_len=specimen.seq_len, dtype=specimen.dtype
    )


# --- predictions, and the run of a plan -----------------------------------------------------------


class _InputsAskForGradients(ConfigSource):
    """The model when transformers has switched its checkpointing on, and recomputes nothing."""

    def build(self, **options: Any) -> nn.Module:
        model: Any = super().build(**options)
        model.enable_input_require_grads()
        found: nn.Module = model
        return found


def predicted(name: str) -> Found:
    """By way, what a step is predicted to take, of fake tensors; and the plan that recomputes."""
    case = CASES[name]
    source = case.specimen.source
    assert isinstance(source, ConfigSource)
    profile = _estimated(case, source, case.lora)
    asking = _estimated(case, _InputsAskForGradients(source.name, source.config), case.lora)
    planned = plan_of("recompute", profile)
    plans = {"as it is": plan_of("keep", profile), "planned": planned}
    plans["checkpointed"] = plan_of("recompute", asking)
    return {
        "bytes": {way: plan.prediction.peak_bytes.device for way, plan in plans.items()},
        "plan": dumps_plan(planned),
    }


def _estimated(case: Case, source: Any, lora: str) -> Profile:
    specimen = case.specimen
    return estimate(
        source,
        batch_size=specimen.batch_size,
        seq_len=specimen.seq_len,
        dtype="bfloat16",
        precision=case.precision,
        hardware=_here(),
        adapter=str(parse_lora(lora)),
        quantize=case.quantize,
    )


def _here() -> Hardware:
    """The catalogue's machine as this one, whose operators are called, and not bounded."""
    machine = load_hardware("cpu")
    device = replace(machine.device, name=processor_name(), num_threads=torch.get_num_threads())
    return replace(machine, device=device)


def under_plan(plan: str) -> Found:
    """The most bytes of tensors in the last of the steps that follow a plan."""
    before = storage_bytes(reachable(devices.HOST))
    with tempfile.TemporaryDirectory() as folder:
        found = train(
            loads_plan(plan),
            num_steps=NUM_STEPS,
            plain=False,
            text=None,
            spill_directory=Path(folder),
        )
    return {"bytes": max(found.slot_bytes) - before}
