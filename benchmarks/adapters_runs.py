"""What the benchmark of adapters does in processes of its own: measured runs and predictions."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import peft
import torch

from benchmarks.accuracy_cases import SPECIMENS, PlanKind, plan_of
from benchmarks.processes import Found
from benchmarks.zoo import Specimen
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.models.building import seeded
from protrain_plan.models.sources import ConfigSource
from protrain_plan.profiling.estimated import estimate
from protrain_plan.records.adapters import parse_lora
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import reachable, storage_bytes
from protrain_runtime.diagnostics.recording import measure_step

NUM_STEPS = 3
"""The last one is measured: the first two make the optimizer's states."""
WAYS: dict[str, PlanKind] = {"as it is": "keep", "checkpointed": "recompute"}
"""How plain PyTorch runs, and the plan that says the same."""


@dataclass(frozen=True, slots=True)
class Case:
    """What `--lora` says, and what PEFT is told; of PEFT's defaults but for the rank and alpha."""

    model: str
    lora: str
    options: Mapping[str, Any]

    @property
    def specimen(self) -> Specimen:
        return replace(SPECIMENS[self.model], dtype="bfloat16", adapter="")


_PROJECTIONS = ["q_proj", "v_proj"]
CASES: dict[str, Case] = {
    f"{model}, {lora}": Case(model, lora, options)
    for model, lora, options in (
        ("llama", "r=16", {}),
        ("llama", "r=16,targets=q_proj+v_proj", {"target_modules": _PROJECTIONS}),
        ("llama", "r=64,rslora", {"use_rslora": True}),
        ("llama", "r=16,dropout=0.05", {"lora_dropout": 0.05}),
        ("llama", "r=16,dora", {"use_dora": True}),
        ("llama", "r=16,freeze=A", {}),
        (
            "llama",
            "r=16,modules_to_save=lm_head+embed_tokens",
            {"modules_to_save": ["lm_head", "embed_tokens"]},
        ),
        ("qwen2", "r=16,bias=lora_only", {"bias": "lora_only"}),
        ("gpt2", "r=16,dropout=0.1", {"lora_dropout": 0.1}),
        ("t5", "r=16", {}),
    )
}


def measured(name: str) -> Found:
    """By way, the most bytes of tensors in the last of the steps of plain PyTorch."""
    return {way: _peak_bytes(CASES[name], checkpointed=way == "checkpointed") for way in WAYS}


def _peak_bytes(case: Case, *, checkpointed: bool) -> int:
    source = case.specimen.source
    assert isinstance(source, ConfigSource)
    before = storage_bytes(reachable(devices.HOST))
    config, model_class = source._config_and_class()
    rank = int(case.lora.partition("=")[2].partition(",")[0])
    chosen = {"r": rank, "target_modules": "all-linear"} | dict(case.options)
    with warnings.catch_warnings(), seeded(0):
        warnings.simplefilter("ignore")
        base = model_class._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
        model: Any = peft.get_peft_model(base, peft.LoraConfig(**chosen))
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    if "freeze=A" in case.lora:
        for path, parameter in model.named_parameters():
            if "lora_A" in path:
                parameter.requires_grad_(False)
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), fused=True)

    def step(batch: Batch) -> None:
        loss = loss_of(call_model(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = _batches(case.specimen)
    for _ in range(NUM_STEPS - 1):
        step(next(batches))
    batch = next(batches)
    return measure_step(model, lambda _: step(batch), besides_bytes=before).device_bytes


def _batches(specimen: Specimen) -> Iterator[Batch]:
    return specimen.source.batches(
        batch_size=specimen.batch_size, seq_len=specimen.seq_len, dtype=specimen.dtype
    )


def predicted(name: str, lora: str) -> Found:
    """By way, what its plan is predicted to take with an adapter, of fake tensors."""
    specimen = CASES[name].specimen
    profile = estimate(
        specimen.source,
        batch_size=specimen.batch_size,
        seq_len=specimen.seq_len,
        dtype="bfloat16",
        hardware=load_hardware("cpu"),
        adapter=str(parse_lora(lora)),
    )
    plans = {way: plan_of(kind, profile) for way, kind in WAYS.items()}
    return {way: plan.prediction.peak_bytes.device for way, plan in plans.items()}
