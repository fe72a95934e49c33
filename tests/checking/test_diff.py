"""`protrain diff`: what a reviewer of a new plan is told."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from protrain_plan.checking.diffing import in_words, plan_diff
from protrain_plan.checking.plan_on_machine import predicted
from protrain_plan.presentation.checks.diffs import diff_markdown, diff_text
from protrain_runtime.contract.records import write_plan
from protrain_runtime.contract.records.plan import KEEP, PERSISTENT, Plan, Schedule
from tests.support.checking_cases import BUDGETS, PROFILE, AssertGolden, offloading
from tests.support.forked import protrain
from tests.support.planning_cases import MB

OLD = offloading()


def faster(plan: Plan = OLD) -> Plan:
    """Two blocks keep everything, for which there is a larger budget."""
    units = tuple(
        replace(unit, activations=KEEP, states=PERSISTENT, schedule=Schedule())
        if unit.name in ("layers.1", "layers.2")
        else unit
        for unit in plan.units
    )
    changed = replace(plan, units=units, budgets=replace(BUDGETS, device=3000 * MB))
    found = predicted(changed, PROFILE)
    prediction = replace(
        plan.prediction, step_seconds=found.step_seconds, peak_bytes=found.peak_bytes
    )
    return replace(changed, prediction=prediction)


@pytest.mark.parametrize("output_format", ["text", "json", "markdown"])
def test_every_format_says_the_same(
    output_format: str, tmp_path: Path, assert_golden: AssertGolden
) -> None:
    write_plan(OLD, tmp_path / "old.yaml")
    write_plan(faster(), tmp_path / "new.yaml")
    arguments = ("diff", "old.yaml", "new.yaml", "--format", output_format)
    result = protrain(*arguments, folder=tmp_path, COLUMNS="80")
    assert (result.returncode, result.stderr) == (0, "")
    assert_golden(f"diff.{output_format}", result.stdout)
    if output_format == "json":
        assert json.loads(result.stdout)["num_changed"] == 2


def test_equal_plans_differ_in_nothing() -> None:
    diff = plan_diff(OLD, OLD)
    assert (diff.facts, diff.decisions) == ((), ())
    assert in_words(diff) == "No decision differs. All predictions are the same."


def test_a_first_step_that_is_like_every_other_takes_as_long() -> None:
    carried = replace(OLD, prediction=replace(OLD.prediction, first_step_seconds=9.0))
    (first,) = (one for one in plan_diff(carried, OLD).amounts if one.name == "first step")
    assert (first.before, first.after) == (9.0, OLD.prediction.step_seconds)
    assert "first step" not in [one.name for one in plan_diff(OLD, OLD).amounts]


def test_leads_alone_are_told_as_such() -> None:
    unit = OLD.units[2]
    later = replace(unit, schedule=replace(unit.schedule, forward_lead=2.5, update_drain=None))
    new = replace(OLD, units=(*OLD.units[:2], later, *OLD.units[3:]))
    [change] = plan_diff(OLD, new).decisions
    assert (change.units, change.num_units) == ("layers.1", 1)
    same = "recompute; offload to disk, with"
    assert change.before == f"{same} leads 1/1/0, drains end/1"
    assert change.after == f"{same} leads 2.5/1/0, drains end/end"


def test_units_that_come_and_go() -> None:
    gone = replace(OLD, units=(*OLD.units[:3], OLD.units[-1]))
    [change] = plan_diff(OLD, gone).decisions
    assert (change.units, change.num_units, change.after) == ("layers.2-3", 2, None)
    [change] = plan_diff(gone, OLD).decisions
    assert (change.units, change.num_units, change.before) == ("layers.2-3", 2, None)
    assert in_words(plan_diff(OLD, gone)).startswith("2 of 6 layers decide otherwise.")


def test_names_on_a_terminal_leave_out_what_all_begin_with() -> None:
    """An adapter's models have long names, which a table of 80 columns would fold."""
    before, after = (
        replace(plan, units=tuple(replace(u, name=f"base.model.{u.name}") for u in plan.units))
        for plan in (OLD, faster())
    )
    console = Console(width=80, file=StringIO())
    console.print(diff_text(plan_diff(before, after)))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "\nlayers.1-2  recompute; offload to disk  keep; persistent" in text
    markdown = diff_markdown(plan_diff(before, after), title="")
    assert "| `base.model.layers.1-2` | recompute; offload to disk | keep; persistent |" in markdown


def test_what_is_given_is_compared() -> None:
    workload = replace(OLD.workload, batch_size=2, adapter="lora r=16")
    new = replace(
        OLD,
        workload=workload,
        settings=replace(OLD.settings, updates="after backward", micro_batches=4),
    )
    assert [(fact.name, fact.before, fact.after) for fact in plan_diff(OLD, new).facts] == [
        ("batch", "1 x 1024 tokens", "2 x 1024 tokens"),
        ("adapter", "none", "lora r=16"),
        ("updates", "in backward", "after backward"),
        ("micro-batches", "1", "4"),
    ]
