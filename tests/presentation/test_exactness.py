"""Plans that are not exact say so wherever they are shown, and plain PyTorch nowhere."""

import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from protrain_plan.commands.training import Run
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.questions.answers import Answer, Question
from protrain_plan.planning.questions.cells import Cell, planned
from protrain_plan.planning.questions.objectives import fit
from protrain_plan.planning.search.improving import Effort
from protrain_plan.presentation.grids import grid_text, row_of
from protrain_plan.presentation.plans import run_json, run_text
from protrain_plan.presentation.profiles import profile_json, profile_text
from protrain_plan.presentation.report.fit_page import fit_page
from protrain_runtime.contract.records import dumps_profile, loads_profile
from protrain_runtime.contract.records.plan import Budgets, Plan
from protrain_runtime.contract.records.profile import Compilation
from tests.support.planning_cases import cpu, decoder, least_bytes, random_profile, with_copies

AMPLE = 10**12
LEAVE = ("rounding", "int8-activations")
TOLD = re.compile(
    r"not exact: activations in (8 tiles|int8)( and int8)? give the results of plain PyTorch"
    r" (approximately|up to rounding), as --allow (rounding|int8-activations)"
    r"( and int8-activations)?"
)


def text_of(shown: Any) -> str:
    """The line that people see."""
    console = Console(width=400)
    with console.capture() as printed:
        console.print(shown)
    return " ".join(printed.get().split())


@pytest.fixture(scope="module")
def fits() -> tuple[Answer, Answer]:
    """With room for everything; and where nothing exact fits."""
    rng = random.Random(8)
    profile = with_copies(random_profile(rng, max_blocks=3), rng)
    ample = Budgets(device=AMPLE, host=AMPLE, disk=AMPLE)
    least = least_bytes(Problem.of(profile, ample))
    tight = replace(ample, device=least - 1 + profile.hardware.device.besides_bytes)
    asked = partial(Question, profile=profile, allow=LEAVE)
    ample_fit, tight_fit = (fit(asked(budgets=one), effort=Effort()) for one in (ample, tight))
    return ample_fit, tight_fit


def test_a_table_and_a_page_of_fits_say_which_plans_are_not_exact(
    fits: tuple[Answer, Answer],
) -> None:
    ample, tight = (row_of(planned(Cell(question=one.question), one)) for one in fits)
    for shown in (text_of(grid_text([ample])), fit_page([ample])):
        assert not TOLD.search(shown)
    table, page = text_of(grid_text([ample, tight])), fit_page([ample, tight])
    for shown in (table, page):
        assert len(TOLD.findall(shown)) == 1


RUN = Run(
    first_step=0,
    losses=(1.0, 0.5),
    seconds=(1.0, 1.0),
    parameters_sha256="",
    measured_peak_bytes=None,
    slot_bytes=(),
)


def said_of(plan: Plan, run: Run, *, plain: bool, verified: bool | None = None) -> str:
    return text_of(run_text(plan, run_json(plan, run, plain=plain, verified=verified)))


def test_a_run_says_that_its_plan_is_not_exact(fits: tuple[Answer, Answer]) -> None:
    run = RUN
    ample, tight = (one.solved.plan for one in fits if one.solved is not None)
    assert TOLD.search(said_of(tight, run, plain=False, verified=None))
    assert not TOLD.search(said_of(tight, run, plain=True, verified=None))
    assert not TOLD.search(said_of(ample, run, plain=False, verified=None))


def test_a_run_of_compiled_blocks_says_what_it_was_compared_with(
    fits: tuple[Answer, Answer],
) -> None:
    assert fits[0].solved is not None
    plain = fits[0].solved.plan
    compiled = replace(plain, workload=replace(plain.workload, compile="blocks"))
    whose = "plain PyTorch's with the same blocks compiled"
    for plan, said in ((compiled, whose), (plain, "plain PyTorch's")):
        for verified, how in (
            (True, f" verified: losses and parameters equal {said} bitwise"),
            (False, f" NOT verified: losses or parameters differ from {said}"),
        ):
            shown = said_of(plan, RUN, plain=False, verified=verified)
            assert shown.endswith(how)
            data = run_json(plan, RUN, plain=False, verified=verified)
            assert (data["compile"], data["compilation"]) == (plan.workload.compile, None)


@pytest.mark.parametrize(
    ("num_graphs", "seconds", "cache", "said"),
    [
        (2, 19.0, "cold", "compiled 2 graphs in 19.0 s (cold)"),
        (1, 3.0, "warm", "compiled 1 graph in 3.00 s (warm)"),
        (2, 9.0, "partly", "compiled 2 graphs in 9.00 s (partly warm)"),
        (1, 0.5, "none", "compiled 1 graph in 500 ms"),
    ],
)
def test_what_the_compiler_did_is_said_of_a_run_and_of_a_profile(
    fits: tuple[Answer, Answer], num_graphs: int, seconds: float, cache: Any, said: str
) -> None:
    found = Compilation(num_graphs=num_graphs, seconds=seconds, cache=cache)
    assert fits[0].solved is not None
    run = replace(RUN, compilation=found)
    shown = said_of(fits[0].solved.plan, run, plain=True, verified=None)
    assert f" {said}, mostly in the first step" in shown
    data = run_json(fits[0].solved.plan, run, plain=True, verified=None)
    assert data["compilation"] == found
    profile = replace(decoder(cpu(), blocks=2), compilation=found)
    assert f" {said} " in text_of(profile_text(profile, Path("profile.yaml")))
    assert profile_json(profile)["compilation"] == found
    assert loads_profile(dumps_profile(profile)) == profile
