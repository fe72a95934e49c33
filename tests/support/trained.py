"""Runs as `protrain run` makes them, with its options by keywords."""

from pathlib import Path
from typing import Any

from protrain_plan.commands import training
from protrain_plan.commands.run import RunOptions
from protrain_runtime.contract.records.plan import Plan


def train(
    plan: Plan,
    *,
    num_steps: int,
    plain: bool,
    spill_directory: Path | None = None,
    compared: bool = False,
    rank: int = 0,
    **options: Any,
) -> training.Run:
    """A run of so many steps; of one that is `compared` bytes do not count."""
    asked = RunOptions(steps=num_steps, spill_directory=spill_directory, **options)
    return training.train(plan, asked, plain=plain, compared=compared, rank=rank)
