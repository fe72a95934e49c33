"""Rows of everything that a training run may combine, trained under a plan and plainly."""

from functools import partial
from pathlib import Path

from torch import nn

from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Plan
from tests.support.pairwise import Impossible, Row, covering_rows
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import RECOMPUTED, assert_bitwise, delays, weight_decay_groups
from tests.support.scenario import Loop, Run, Scenario, go_on
from tests.support.training_rows import (
    ALWAYS_IMPOSSIBLE,
    OPTIMIZERS,
    PACKED,
    PRECISIONS,
    SCHEDULES,
    of_row,
    optimizer_of,
    plain_optimizer_of,
    plan_of_row,
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


# --- from a row to a scenario ---------------------------------------------------------------------


def plan(row: Row, model: nn.Module, *, seed: int = 0) -> Plan:
    tiers: tuple[TierName, ...] = ("disk", "host")
    if row["tier"] != "both":
        tiers = ("disk",) if row["tier"] == "disk" else ("host",)
    alone = row["updates"] == "in backward" and row["micro-batches"] == "1"
    found = plan_of_row(row, model, seed=seed, states_on=tiers, swaps_to=tiers, stepped=alone)
    return with_settings(found, overlap_steps=row["steps"] == "overlapping")


def scenario(row: Row, *, seed: int = 0) -> Scenario:
    def resume(run: Run, number: int) -> None:
        if number == RESUMED_AT and row["resumed"] != "no":
            go_on(run, partial(scenario(row, seed=1).start, seed=1), row["resumed"])

    return Scenario(
        model=of_row(row),
        plan=partial(plan, row, seed=seed),
        factory=optimizer_of(row),
        plain_factory=plain_optimizer_of(row),
        groups=weight_decay_groups,
        options={"lane_delay": delays(seed) if row["lanes"] == "slow" else None},
        script=Loop(
            num_steps=NUM_STEPS,
            micro_batches=int(row["micro-batches"]),
            clips=None if row["clipping"] == "none" else 0.5,
            scales=row["clipping"] == "loss scale",
            gradients=True,
            before=resume,
        ),
    )


def assert_row(row: Row, folder: Path) -> None:
    tried = scenario(row)
    expected = tried.plain()
    run = tried.start(folder)
    assert_bitwise(tried.played(run), expected)
    if row["placement"] == "persistent" or row["updates"] != "in backward":
        assert [seen.keys() for seen in run.gradients] == [
            plain.keys() for plain in expected.gradients
        ]
