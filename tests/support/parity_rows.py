"""Rows of everything that a training run may combine, trained under a plan and plainly."""

import itertools
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import load, prepare, restore, save
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.states.stand_ins import ConsumedGradient, OffloadedGradient
from tests.support.pairwise import Impossible, Row, covering_rows
from tests.support.runtime_cases import (
    RECOMPUTED,
    Outcome,
    assert_bitwise,
    batch,
    delays,
    device,
    differences,
    outcome,
    random_states,
    set_random_states,
    weight_decay_groups,
)
from tests.support.training_rows import (
    ALWAYS_IMPOSSIBLE,
    OPTIMIZERS,
    PACKED,
    PRECISIONS,
    SCHEDULES,
    optimizer_of,
    plainly,
    plan_of_row,
    uncompiled,
    units,
)

NUM_STEPS, RESUMED_AT = 5, 3

FACTORS: dict[str, tuple[str, ...]] = {
    "model": ("llama", "llama-tied", "gpt2", "functional", "t5"),
    "trained": ("all", "some", "lora", PACKED),
    "activations": ("keep", "recompute", "swap", "swap input", "mixed"),
    "form": ("none", *RECOMPUTED),
    "placement": ("persistent", "stepped", "offload", "buffer", "mixed"),
    "tier": ("disk", "host", "both"),
    "schedule": tuple(SCHEDULES),
    "pieces": ("small", "whole"),
    "micro-batches": ("1", "2", "3"),
    "clipping": ("none", "norm", "loss scale"),
    "updates": ("in backward", "after backward", "ahead of the norm"),
    "steps": ("apart", "overlapping"),
    "precision": tuple(PRECISIONS),
    "optimizer": tuple(OPTIMIZERS),
    "compiled": ("no", "aot_eager"),
    "resumed": ("no", "files into another plan", "states into another plan", "plainly"),
    "lanes": ("prompt", "slow"),
}
IMPOSSIBLE = (
    *ALWAYS_IMPOSSIBLE,
    Impossible(
        reason="a forward in which updates run on is followed by a backward that updates",
        values={"steps": ("overlapping",), "micro-batches": ("2", "3")},
    ),
    *(
        Impossible(
            reason="ahead of the norm run updates below the device, of a step's only backward",
            values={"updates": ("ahead of the norm",), factor: values},
        )
        for factor, values in (
            ("micro-batches", ("2", "3")),
            ("placement", ("persistent", "stepped")),
        )
    ),
    Impossible(
        reason="Dynamo does not trace bitsandbytes' product with packed weights",
        values={"trained": (PACKED,), "compiled": ("aot_eager",)},
    ),
    Impossible(
        reason="plain PyTorch loads no state dict of packed weights that are there already",
        values={"trained": (PACKED,), "resumed": ("states into another plan",)},
    ),
    Impossible(
        reason="torch.optim rounds NAdam's product of momenta to bfloat16 when it loads a state",
        values={
            "optimizer": ("nadam",),
            "precision": ("bfloat16",),
            "resumed": ("states into another plan",),
        },
    ),
)
ROWS = covering_rows(FACTORS, IMPOSSIBLE, costly=("compiled",))


# --- from a row to a model and a plan -------------------------------------------------------------


def built(row: Row, *, seed: int = 0) -> nn.Module:
    model = uncompiled(row, seed=seed)
    if row["compiled"] != "no":
        torch.compiler.reset()
        for unit in units(row["model"], row["trained"]):
            if unit.kind == "block":
                model.get_submodule(unit.name).compile(backend=row["compiled"])
    return model


def plan(row: Row, model: nn.Module, *, seed: int = 0) -> Plan:
    tiers: tuple[TierName, ...] = ("disk", "host")
    if row["tier"] != "both":
        tiers = ("disk",) if row["tier"] == "disk" else ("host",)
    alone = row["updates"] == "in backward" and row["micro-batches"] == "1"
    found = plan_of_row(row, model, seed=seed, states_on=tiers, swaps_to=tiers, stepped=alone)
    return (
        replace(found, settings=replace(found.settings, overlap_steps=True))
        if row["steps"] == "overlapping"
        else found
    )


# --- training -------------------------------------------------------------------------------------

Pair = tuple[nn.Module, torch.optim.Optimizer]


@dataclass
class Trained:
    """What a row's training computed.

    `gradients` are those that stand after backward, by step and parameter; of an offloaded one
    that waits below the device, as its update will see it.
    """

    outcome: Outcome
    gradients: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    norms: list[Tensor] = field(default_factory=list[Tensor])


def trained(row: Row, model: nn.Module, optimizer: torch.optim.Optimizer, resume: Any) -> Trained:
    """Five steps; before the fourth, training goes on with what `resume` gives."""
    torch.manual_seed(1)
    found, losses = Trained(Outcome()), list[Tensor]()
    scales = row["clipping"] == "loss scale"
    scaler = torch.amp.GradScaler(device().type, init_scale=8.0, growth_interval=2, enabled=scales)
    numbers = itertools.count()
    for number in range(NUM_STEPS):
        if number == RESUMED_AT:
            model, optimizer = resume(model, optimizer)
        for _ in range(int(row["micro-batches"])):
            loss = loss_of(call_model(model, batch(row["model"], next(numbers))))
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        if row["clipping"] != "none":
            scaler.unscale_(optimizer)
            found.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        found.gradients.append(standing_gradients(model))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found.outcome = outcome(model, optimizer, losses)
    return found


def standing_gradients(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, OffloadedGradient):
            found[name] = gradient.stored.whole()
        elif gradient is not None and not isinstance(gradient, ConsumedGradient):
            found[name] = gradient.detach().clone()
    return found


def under_plan(row: Row, folder: Path, *, seed: int = 0) -> Pair:
    model = built(row, seed=seed)
    return prepare(
        model,
        plan(row, model, seed=seed),
        optimizer=optimizer_of(row),
        param_groups=weight_decay_groups(model),
        spill_directory=folder,
        lane_delay=delays(seed) if row["lanes"] == "slow" else None,
    )


def resumed(row: Row, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Pair:
    """What training goes on with: the very same, another plan of other weights, or no plan."""
    match row["resumed"]:
        case "files into another plan":
            save(model, optimizer, folder / "checkpoint")
            model, optimizer = under_plan(row, folder, seed=1)
            load(model, optimizer, folder / "checkpoint")
        case "states into another plan":
            weights, states = model.state_dict(), optimizer.state_dict()
            randomness = random_states()
            model, optimizer = under_plan(row, folder, seed=1)
            model.load_state_dict(weights)
            optimizer.load_state_dict(states)
            set_random_states(randomness)
        case "plainly":
            restore(model)
        case _:
            pass
    return model, optimizer


def assert_row(row: Row, folder: Path) -> None:
    model = built(row)
    expected = trained(row, model, plainly(row, model), lambda *pair: pair)
    found = trained(row, *under_plan(row, folder), partial(resumed, row, folder=folder))
    assert_bitwise(found.outcome, expected.outcome)
    assert list(differences(found.norms, expected.norms, "norms")) == []
    for seen, plain in zip(found.gradients, expected.gradients, strict=True):
        standing = {name: plain[name] for name in seen}
        assert list(differences(seen, standing, "gradients")) == []
    if row["placement"] == "persistent" or row["updates"] != "in backward":
        assert [seen.keys() for seen in found.gradients] == [
            plain.keys() for plain in expected.gradients
        ]
