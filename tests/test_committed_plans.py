"""The plans in `plans/` still follow from their profiles, by today's code."""

from pathlib import Path

import pytest

from protrain_plan.records import fingerprint, read_plan, read_profile
from protrain_plan.simulation.graph import waits_in_a_circle
from protrain_plan.simulation.memory import compile_units, device_bytes, tier_bytes
from protrain_plan.simulation.timeline import simulate

ROOT = Path(__file__).parent.parent
FOLDERS = sorted(path.parent for path in ROOT.glob("plans/*/plan.yaml"))


def test_there_are_committed_plans() -> None:
    assert FOLDERS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_prediction_follows_from_profile_and_plan(folder: Path) -> None:
    profile, plan = read_profile(folder / "profile.yaml"), read_plan(folder / "plan.yaml")
    assert plan.profile_fingerprint == fingerprint(profile)
    assert plan.model_fingerprint == profile.model_fingerprint
    program = compile_units(plan.units, profile, piece_bytes=plan.piece_bytes)
    assert waits_in_a_circle(program) == []
    predicted = plan.prediction
    slots = device_bytes(program, plan.units, profile)
    assert max(slot.total for slot in slots) == predicted.peak_bytes.device
    assert tier_bytes("disk", plan.units, profile, program.settings) == predicted.peak_bytes.disk
    assert simulate(program, plan.units, profile).step_seconds == predicted.step_seconds
    assert predicted.peak_bytes.device + predicted.peak_bytes.context <= plan.budgets.device
    assert predicted.lower_bound_seconds <= predicted.step_seconds


def test_the_readme_shows_a_committed_plan() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.split("```yaml\n")[1].split("```")[0].splitlines()
    plan = (ROOT / "plans/smollm2-135m-cpu-1100MiB/plan.yaml").read_text(encoding="utf-8")
    assert [line for line in shown if line not in plan.splitlines()] == ["..."]
