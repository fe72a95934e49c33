"""How often garbage is looked for: seldom in planning, as usual where bytes are counted."""

import gc
import subprocess
import sys

import pytest

from protrain_plan.garbage import SELDOM, USUAL, collected
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.contract.records.plan import Budgets
from tests.support.estimates import estimates
from tests.support.planning_cases import plan


def interrupted() -> None:
    with collected(SELDOM):
        assert gc.get_threshold() > USUAL
        with collected(USUAL):
            assert gc.get_threshold() == USUAL
        assert gc.get_threshold() > USUAL
        raise KeyboardInterrupt


def test_thresholds_are_put_back_whatever_happens() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gc.get_threshold() == USUAL


@pytest.mark.nightly
def test_bytes_are_counted_as_usual_and_plans_are_made_seldom() -> None:
    seen: dict[str, tuple[int, ...]] = {}

    def progress(what: str, *_: float | None) -> None:
        seen[what] = gc.get_threshold()

    machine = load_hardware("rtx-4090")
    with collected(SELDOM):
        (profile,) = estimates(
            load_source("tiny-llama"),
            machines=[machine],
            batch_size=1,
            seq_len=64,
            dtype="float32",
            progress=progress,
        )
    assert seen["finding units"] == seen["counting bytes and operations"] == USUAL
    seen.clear()
    plan(profile, Budgets(device=2**31, host=2**31, disk=0), effort=Effort(progress=progress))
    assert seen
    assert all(thresholds > USUAL for thresholds in seen.values())
    assert gc.get_threshold() == USUAL


def test_a_command_begins_with_a_collector_that_is_on() -> None:
    """The help, which ends before there is garbage, comes without."""
    told = """
import gc, sys
import protrain_plan.models.presets as presets
presets.presets = lambda: sys.exit(0 if gc.isenabled() else 1)
sys.argv = ["protrain", "models"]
from protrain_plan.cli import main
main()
"""
    assert subprocess.run([sys.executable, "-c", told], check=False).returncode == 0
