"""Measured steps beside their promises: bytes slot by slot, and seconds within a range."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from protrain_plan.planning.search.improving import Effort
from protrain_plan.presentation.profiles import trust, unsteady
from protrain_runtime.contract.program.memory import exceeded, promised_bytes
from protrain_runtime.contract.records import (
    dumps_profile,
    loads_profile,
    read_profile,
    write_profile,
)
from protrain_runtime.contract.records.hardware import PublishedError
from protrain_runtime.contract.records.plan import Budgets, Plan
from protrain_runtime.contract.records.profile import Profile, Repetitions
from tests.support import forked
from tests.support.commands import printed, protrain
from tests.support.peaks import profile_file
from tests.support.planning_cases import MB, RATES, cpu, decoder, solved
from tests.support.planning_cases import plan as solve

BUDGETS = Budgets(device=5000 * MB, host=0, disk=10**12)
REPETITIONS = Repetitions(num_steps=9, low=0.9, high=1.05, planned=1.3)


def decoder_measured() -> Profile:
    return replace(decoder(cpu(), blocks=3), method="measured", repetitions=REPETITIONS)


@cache
def case() -> tuple[Plan, Profile]:
    profile = decoder(cpu(), blocks=3)
    return solved(solve(profile, BUDGETS, effort=Effort(solver="offload-all"))).plan, profile


def test_a_step_within_its_promise_exceeds_nothing() -> None:
    plan, profile = case()
    slots = promised_bytes(plan, profile)
    peak = plan.prediction.peak_bytes
    assert len(slots) == 2 * len(plan.units) + 1
    assert max(slots) == peak.device
    assert exceeded(plan, peak, slots, profile) == ()
    assert exceeded(plan, peak, slots) == ()
    assert exceeded(plan, peak, slots[-1:], profile) == ()


def test_every_slot_that_takes_more_is_named_the_worst_first() -> None:
    plan, profile = case()
    slots = list(promised_bytes(plan, profile))
    last = len(plan.units) - 1
    slots[0] += 1
    slots[2 * last] += 2
    slots[-1] += 3
    found = exceeded(plan, plan.prediction.peak_bytes, slots, profile)
    names = [unit.name for unit in plan.units]
    assert [(one.where, one.measured_bytes - one.predicted_bytes) for one in found] == [
        ("the update on the device", 3),
        (f"backward of {names[1]}", 2),
        (f"forward of {names[0]}", 1),
    ]


def test_without_the_profile_the_peak_is_named_with_its_slot() -> None:
    plan, profile = case()
    slots = list(promised_bytes(plan, profile))
    peak = plan.prediction.peak_bytes
    slots[slots.index(peak.device)] += 7
    more = replace(peak, device=peak.device + 7, context=peak.context + 1, disk=peak.disk + 2)
    first, disk, beside = exceeded(plan, more, slots)
    assert first.where.startswith("the step's peak of tensors, ")
    assert str(disk).startswith("disk: ") and str(disk).endswith(" measured, 2 B more")
    assert beside.where == "the process besides tensors"
    (whole,) = exceeded(plan, replace(peak, device=peak.device + 7), ())
    assert whole == replace(first, where="the step's peak of tensors")


@pytest.mark.nightly
def test_run_says_what_took_more_and_fails_a_verification(tiny_llama: Path, tmp_path: Path) -> None:
    """A profile whose backward of one block was forgotten."""
    profile = read_profile(tiny_llama)
    index = next(n for n, unit in enumerate(profile.units) if unit.kind == "block")
    unit = profile.units[index]
    forms = tuple(replace(form, backward_peak_bytes=-(2**21)) for form in unit.forms)
    units = (*profile.units[:index], replace(unit, forms=forms), *profile.units[index + 1 :])
    write_profile(replace(profile, units=units), tmp_path / "profile.yaml")
    made = protrain("plan", "profile.yaml", "--solver", "offload-all", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    command = ("run", "plan.yaml", "--steps", 2, "--verify")
    result = forked.protrain(*command, "--json", folder=tmp_path)
    assert (result.returncode, result.stderr) == (1, "")
    answer = json.loads(result.stdout)
    assert answer["verified"] is True
    assert [one["where"] for one in answer["overruns"]] == [f"backward of {unit.name}"]
    again = "protrain profile tiny-llama --batch-size 2 --seq-len 64 -o profile.yaml"
    assert answer["profile_again"] == again


# --- seconds --------------------------------------------------------------------------------------


def test_a_measured_profile_knows_how_its_steps_varied(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    profile = read_profile(
        profile_file(tmp_path_factory, "tests.support.functional_model:relu_factory")
    )
    found = profile.repetitions
    assert found is not None
    forms = {form.form for unit in profile.units for form in unit.forms}
    assert found.num_steps == 2 * len(forms)
    assert found.low <= 1 <= found.high
    assert found.planned > 0
    assert profile.error_band == (min(found.low, found.planned), max(found.high, found.planned))


@pytest.mark.nightly
def test_the_range_of_a_profile_is_its_plans() -> None:
    measured = decoder_measured()
    assert measured.error_band == (0.9, 1.3)
    assert loads_profile(dumps_profile(measured)) == measured
    promise = solved(solve(measured, BUDGETS, effort=Effort(solver="offload-all"))).plan.prediction
    step = promise.step_seconds
    assert promise.expected_seconds == (0.9 * step, 1.3 * step)
    unknown = replace(measured, repetitions=None)
    assert unknown.error_band == (0.0, 0.0)


def test_the_range_of_an_estimate_is_its_machines() -> None:
    rates = replace(RATES, error_low=1.1, error_high=1.9)
    estimated = replace(decoder(cpu(), blocks=3), method="estimated", repetitions=REPETITIONS)
    assert estimated.error_band == (0.0, 0.0)
    known = replace(estimated, hardware=replace(estimated.hardware, rates=rates))
    assert known.error_band == (1.1, 1.9)
    # What was measured on the machine goes before what others published of its architecture.
    published = PublishedError(low=0.8, high=1.2, runs=5, source="a page")
    both = replace(known, hardware=replace(known.hardware, published_error=published))
    assert both.error_band == (1.1, 1.9)
    machine = replace(estimated.hardware, published_error=published)
    assert replace(estimated, hardware=machine).error_band == (0.8, 1.2)
    assert trust(machine) == (
        "5 published runs of its architecture took 0.80 to 1.20 times as long (a page)"
    )


def test_a_busy_machine_is_told() -> None:
    steady = decoder_measured()
    assert unsteady(steady) is None
    busy = replace(steady, repetitions=replace(REPETITIONS, low=0.8, high=1.08))
    assert unsteady(busy) == (
        "repetitions varied by 35%: the machine was busy; profile again on a quiet one"
    )


@pytest.mark.nightly
def test_plan_and_show_print_the_range(tmp_path: Path) -> None:
    write_profile(decoder_measured(), tmp_path / "profile.yaml")
    text = " ".join(protrain("plan", "profile.yaml", folder=tmp_path).stdout.split())
    assert " by the profile's own repetitions), at most " in text
    prediction = yaml.safe_load((tmp_path / "plan.yaml").read_text())["prediction"]
    assert (prediction["error_low"], prediction["error_high"]) == (0.9, 1.3)
    step = prediction["step_seconds"]
    shown = printed(protrain("simulate", "plan.yaml", "--json", folder=tmp_path))
    assert shown["expected_seconds"] == [0.9 * step, 1.3 * step]
