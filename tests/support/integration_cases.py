"""One model, plan and data for every framework."""

import random
from dataclasses import replace
from typing import Any

import torch

from protrain_plan.records.plan import Plan
from protrain_plan.records.profile import Precision
from tests.support.runtime_cases import (
    SEQUENCE,
    VOCABULARY,
    build,
    described,
    mixed,
    plan_for,
    speculative,
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
        made = plan_for(build(name), units)
    made = replace(
        made,
        updates="after backward" if clips else "in backward",
        micro_batches=micro_batches,
        workload=replace(
            made.workload,
            precision=precision,
            dtype="bfloat16" if precision == "autocast" else "float32",
        ),
    )
    # Below the device a step is updated before its norm is known, where it has one backward.
    return speculative(made) if clips and micro_batches == 1 else made


CLIPPED = 0.05  # below every norm here
