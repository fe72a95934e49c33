"""What is not exact is said wherever a plan is shown, and of plain PyTorch nowhere."""

import random
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from protrain_plan.commands.training import Run
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.questions.objectives import Fit, Question, fit
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.planning.search.improving import Effort
from protrain_plan.presentation.plans import fits_text, run_text
from protrain_plan.presentation.report.fit_page import fit_page
from protrain_plan.records.plan import Budgets
from tests.support.planning_cases import random_profile, with_copies

AMPLE = 10**12
LEAVE = ("rounding", "int8-activations")
TOLD = re.compile(
    r"not exact: activations in (8 tiles|int8)( and int8)? give the results of plain PyTorch"
    r" (approximately|up to rounding), by leave for (rounding|int8-activations)"
    r"( and int8-activations)?"
)


def text_of(shown: Any) -> str:
    """What people see, in one line."""
    console = Console(width=400)
    with console.capture() as printed:
        console.print(shown)
    return " ".join(printed.get().split())


@pytest.fixture(scope="module")
def fits() -> tuple[Fit, Fit]:
    """With room for everything; and where nothing exact fits."""
    rng = random.Random(8)
    profile = with_copies(random_profile(rng, max_blocks=3), rng)
    ample = Budgets(device=AMPLE, host=AMPLE, disk=AMPLE)
    lean = min_memory(Problem.of(profile, ample))
    assert lean is not None
    tight = replace(ample, device=lean.bytes - 1 + profile.hardware.device.besides_bytes)
    asked = partial(Question, profile=profile, allow=LEAVE)
    ample_fit, tight_fit = (fit(asked(budgets=one), effort=Effort()) for one in (ample, tight))
    return ample_fit, tight_fit


def test_a_table_and_a_page_of_fits_say_which_plans_are_not_exact(fits: tuple[Fit, Fit]) -> None:
    ample, tight = fits
    for shown in (text_of(fits_text([ample])), fit_page([ample])):
        assert not TOLD.search(shown)
    table, page = text_of(fits_text([ample, tight])), fit_page([ample, tight])
    for shown in (table, page):
        assert len(TOLD.findall(shown)) == 1


def test_a_run_says_that_its_plan_is_not_exact(fits: tuple[Fit, Fit]) -> None:
    run = Run(
        first_step=0,
        losses=(1.0, 0.5),
        seconds=(1.0, 1.0),
        parameters_sha256="",
        measured_peak_bytes=None,
        slot_bytes=(),
    )
    ample, tight = (one.solved.plan for one in fits if one.solved is not None)
    assert TOLD.search(text_of(run_text(tight, run, plain=False, verified=None)))
    assert not TOLD.search(text_of(run_text(tight, run, plain=True, verified=None)))
    assert not TOLD.search(text_of(run_text(ample, run, plain=False, verified=None)))
