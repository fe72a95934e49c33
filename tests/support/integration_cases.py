"""One model, plan and data for every framework."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from protrain_plan.models.adapters import adapted
from protrain_plan.models.building import seeded
from protrain_plan.models.quantizing import quantized
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.records.profile import Precision
from tests.support.runtime_cases import (
    SEQUENCE,
    VOCABULARY,
    batch,
    build,
    described,
    mixed,
    plan_for,
    speculative,
    units_of,
)


def rows(count: int, *, seed: int) -> Any:
    """A data set: sequences of tokens, int64 [SEQUENCE], with themselves as labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count, SEQUENCE), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def plan(
    name: str,
    *,
    micro_batches: int = 1,
    clips: bool = True,
    precision: Precision = "pure",
    seed: int = 0,
    tier: Any = "disk",
) -> Plan:
    """A plan in which every unit decides for itself."""
    with torch.random.fork_rng():  # describing runs the model, with dropout
        alone = micro_batches == 1 and not clips
        units = mixed(described(name), random.Random(seed), tier, stepped=alone)
        made = plan_for(
            build(name),
            units,
            precision=precision,
            dtype="bfloat16" if precision == "autocast" else "float32",
            updates="after backward" if clips else "in backward",
            micro_batches=micro_batches,
        )
    # Below the device a step is updated before its norm is known, where it has one backward.
    return speculative(made) if clips and micro_batches == 1 else made


CLIPPED = 0.05  # below every norm here


def eight_bits(parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """Bitsandbytes' AdamW8bit, with states of 8 bits for small parameters, too."""
    package = pytest.importorskip("bitsandbytes")
    made: torch.optim.Optimizer = package.optim.AdamW8bit(
        parameters, **({"lr": 1e-3, "min_8bit_size": 512} | options)
    )
    return made


@contextmanager
def without_overrides() -> Iterator[None]:
    """The Trainer tells bitsandbytes of single parameters, for the whole process: it forgets."""
    manager = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()
    manager.initialize()
    try:
        yield
    finally:
        manager.initialize()


def with_adapter(*, packed: bool) -> nn.Module:
    """A small Llama with LoRA; packed: its frozen linear layers have NF4 weights."""
    model = build("llama")
    with seeded(0):
        if packed:
            pytest.importorskip("bitsandbytes")
            model = quantized(model, "nf4", adapter="lora r=4", dtype="float32", source="")
        return adapted(model, "lora r=4", source="").train()


def adapter_plan(*, packed: bool) -> Plan:
    """Every unit decides for itself; updates wait for the norm of all gradients."""
    with torch.random.fork_rng():
        units = units_of(with_adapter(packed=packed), batch("llama", 0))
        decided = mixed(units, random.Random(0), "disk", stepped=False)
        made = plan_for(with_adapter(packed=packed), decided, updates="after backward")
    return speculative(made)
