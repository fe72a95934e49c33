"""Rows of training matrices: from a value for each factor to a model, a plan and an optimizer."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
from torch import nn

from protrain_plan.models.adapters import adapted
from protrain_plan.models.building import computing_in, parameter_dtype, seeded
from protrain_plan.models.optimizers import OF_8_BITS
from protrain_plan.models.quantizing import quantized
from protrain_runtime import with_master_weights
from protrain_runtime.contract.records.forms import misfit
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    KEEP,
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    Activations,
    Placement,
    Plan,
    Schedule,
    StateTier,
    UnitPlan,
    Updates,
)
from protrain_runtime.contract.records.profile import Form, Precision, Workload
from tests.support.pairwise import Impossible, Row
from tests.support.runtime_cases import (
    ADAMW,
    CATALOGUE,
    FRACTIONAL,
    LARGE,
    RECOMPUTED,
    WORKLOAD,
    Factory,
    Subject,
    activation_decisions,
    batch,
    build,
    device,
    offloads,
    on_device,
    plan_for,
    random_schedule,
    speculative,
    units_of,
    weight_decay_groups,
)

PACKED = "lora on nf4"
"""Trained are adapters beside frozen linear layers that bitsandbytes has packed."""

OPTIMIZERS: dict[str, Factory] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "adamw, not fused": partial(torch.optim.AdamW, lr=1e-3, amsgrad=True, foreach=False),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd": partial(torch.optim.SGD, lr=1e-2),
    "nadam": partial(torch.optim.NAdam, lr=1e-3, foreach=False),
    "adamw8bit": partial(OF_8_BITS["adamw8bit"], lr=1e-3, min_8bit_size=512),
}
AHEAD = Schedule(forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=1, update_drain=1)
EVERYTHING = Schedule(forward_lead=LARGE, backward_lead=LARGE, swap_lead=LARGE)
SCHEDULES: dict[str, Callable[[random.Random], Schedule]] = {
    "at the last moment": lambda _: Schedule(swap_drain=0, update_drain=0),
    "one ahead": lambda _: AHEAD,
    "all at once": lambda _: EVERYTHING,  # as many buffers as offloaded chunks
    "cut in two": lambda rng: rng.choice(FRACTIONAL),
    "random": random_schedule,
}
PRECISIONS: dict[str, Precision] = {
    "float32": "pure",
    "bfloat16": "pure",
    "autocast": "autocast",
    "master": "master",
}
ALWAYS_IMPOSSIBLE = (
    Impossible(
        reason="what is kept or swapped as a whole is not recomputed; mixed plans draw forms",
        values={"activations": ("keep", "swap", "mixed"), "form": RECOMPUTED},
    ),
    Impossible(
        reason="what is recomputed has a form",
        values={"activations": ("recompute", "swap input"), "form": ("none",)},
    ),
    Impossible(
        reason="a norm needs the gradients of all parameters before the first is updated",
        values={
            "clipping": ("norm", "loss scale"),
            "updates": ("in backward",),
            "placement": ("offload", "buffer", "mixed"),
        },
    ),
    *(
        Impossible(
            reason="what is updated in backward waits for no other gradient",
            values={"placement": ("stepped",), factor: values},
        )
        for factor, values in (
            ("updates", ("after backward",)),
            ("micro-batches", ("2", "3")),
            ("clipping", ("norm", "loss scale")),
        )
    ),
    Impossible(
        reason="adapters stand beside linear modules, and the functional model has none",
        values={"model": ("functional",), "trained": ("lora", PACKED)},
    ),
)
"""Combinations that no row of any matrix has."""


def uncompiled(row: Row, *, seed: int = 0) -> nn.Module:
    model = build(row["model"], seed=seed)
    precision, dtype = workload(row).precision, workload(row).dtype
    model = model.to(parameter_dtype(dtype, precision))
    if row["trained"] == "some":
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(number % 3 != 0)  # the embedding is frozen
    elif row["trained"] in ("lora", PACKED):
        with seeded(seed):
            if row["trained"] == PACKED:
                pytest.importorskip("bitsandbytes")
                stored = workload(row).dtype if precision != "autocast" else "float32"
                model = quantized(model, "nf4", adapter="lora r=4", dtype=stored, source="")
            model = adapted(model, "lora r=4", source="").train()
    return computing_in(model, dtype, precision)


def workload(row: Row) -> Workload:
    precision = row["precision"]
    return replace(
        WORKLOAD,
        dtype="float32" if precision == "float32" else "bfloat16",
        precision=PRECISIONS[precision],
        compile="" if row.get("compiled", "no") == "no" else "blocks",
    )


@cache
def units(model: str, trained: str) -> tuple[UnitPlan, ...]:
    """As the profiler finds them: the same in every precision, compiled or not."""
    row = {"model": model, "trained": trained, "precision": "float32"}
    with on_device("cpu"):
        return units_of(uncompiled(row), batch(model, 0))


@dataclass(frozen=True)
class OfRow(Subject):
    """A row's model; in its precision, with what is trained, compiled if the row says so."""

    row: tuple[tuple[str, str], ...] = ()

    def build(self, seed: int = 0) -> nn.Module:
        row = dict(self.row)
        model = uncompiled(row, seed=seed)
        if self.change is not None:
            self.change(model)
        if row.get("compiled", "no") != "no":
            torch.compiler.reset()
            for unit in units(row["model"], row["trained"]):
                if unit.kind == "block":
                    model.get_submodule(unit.name).compile(backend=row["compiled"])
        return model


def of_row(row: Row) -> Subject:
    own = CATALOGUE[row["model"]]
    return OfRow(own.make, own.batches, row=tuple(row.items()))


def plan_of_row(
    row: Row,
    model: nn.Module,
    *,
    seed: int,
    states_on: Sequence[StateTier],
    swaps_to: Sequence[TierName],
    stepped: bool = False,
) -> Plan:
    """A plan of the row's decisions; what it leaves open is drawn, otherwise for another seed.

    `stepped`: mixed placements are with persistent chunks that are updated in backward.
    """
    rng = random.Random(f"{sorted(row.items())} {seed}")

    def fits(form: Form) -> bool:
        """Whether blocks of this row may take the form: compiled ones show no operators."""
        return not misfit(form, compiled=row.get("compiled", "no") != "no")

    form: Form = next((f for f in RECOMPUTED if f == row["form"] and fits(f)), "full")

    def activations() -> Activations:
        tier = rng.choice(swaps_to)
        match row["activations"]:
            case "keep":
                return KEEP
            case "recompute":
                return Activations(form=form)
            case "swap":
                return Activations(tier=tier)
            case "swap input":
                return Activations(tier=tier, form=form)
            case _:
                return rng.choice([d for d in activation_decisions(tier) if fits(d.form)])

    def states() -> Placement:
        tier = rng.choice(states_on)
        match row["placement"]:
            case "persistent":
                return PERSISTENT
            case "stepped":
                return OPTIMIZER_IN_BACKWARD
            case "offload" | "buffer" as name:
                on_device = tier == "host" and rng.random() < 0.5
                gathered = name == "buffer"
                return Placement(tier=tier, keep_gathered=gathered, update_on_device=on_device)
            case _:
                last = [OPTIMIZER_IN_BACKWARD] if stepped else []
                return rng.choice([PERSISTENT, *offloads(tier), *last])

    decided = [
        replace(
            unit,
            activations=activations() if unit.kind == "block" else KEEP,
            states=states(),
            schedule=SCHEDULES[row["schedule"]](rng),
        )
        for unit in units(row["model"], row["trained"])
    ]
    updates: Updates = "in backward" if row["updates"] == "in backward" else "after backward"
    plan = plan_for(
        model,
        decided,
        workload=workload(row),
        piece_bytes=3_000 if row["pieces"] == "small" else 10**9,
        updates=updates,
        micro_batches=int(row["micro-batches"]),
    )
    return speculative(plan) if row["updates"] == "ahead of the norm" else plan


def optimizer_of(row: Row) -> Factory:
    return OPTIMIZERS[row["optimizer"]] if device().type == "cpu" else ADAMW


def plain_optimizer_of(row: Row) -> Factory:
    factory = optimizer_of(row)
    return with_master_weights(factory) if row["precision"] == "master" else factory


def plainly(row: Row, model: nn.Module) -> torch.optim.Optimizer:
    return plain_optimizer_of(row)(weight_decay_groups(model))
