"""Leave for activations that are not exact is used where it gains something, and only there."""

import random

import pytest

from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.planning.search.improving import TOLERANCE
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.plan import Budgets
from protrain_runtime.contract.records.profile import Profile
from tests.support.planning_cases import random_profile, with_copies

LEAVE = ("rounding", "int8-activations")
AMPLE = 10**12


def solved(profile: Profile, device: int, allow: tuple[str, ...]) -> Solved | Infeasible:
    budgets = Budgets(device=device, host=AMPLE, disk=AMPLE)
    return solve_problem(Problem.of(profile, budgets, allow=allow), budgets)


@pytest.mark.parametrize(
    "seed", [8, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8))]
)
def test_leave_is_taken_where_it_is_faster_or_fits_at_all(seed: int) -> None:
    """Over budgets from less than any exact plan needs to more than all of them need."""
    rng = random.Random(seed)
    profile = with_copies(random_profile(rng, max_blocks=3), rng)
    besides = profile.hardware.device.besides_bytes
    exact_problem, problem = (
        Problem.of(profile, Budgets(device=AMPLE, host=AMPLE, disk=AMPLE), allow=allow)
        for allow in ((), LEAVE)
    )
    lean, leaner = min_memory(exact_problem), min_memory(problem)
    assert lean is not None and leaner is not None
    most = max(exact_problem.static_bytes(tuple((0, 0) for _ in exact_problem.options)))
    sizes = {leaner.bytes, lean.bytes - 1, lean.bytes}
    sizes |= {lean.bytes + (most - lean.bytes) * part // 3 for part in (1, 2, 3)}
    for size in sorted(size for size in sizes if size >= leaner.bytes):
        with_leave, exact = (solved(profile, size + besides, allow) for allow in (LEAVE, ()))
        assert isinstance(with_leave, Solved)
        plan = with_leave.plan
        assert plan.prediction.lower_bound_seconds <= plan.prediction.step_seconds
        forms = {FORMS[form].leave for form in plan.forms} - {""}
        assert set(plan.allowed) == forms and (plan.exactness == "bitwise") == (not forms)
        if isinstance(exact, Infeasible):
            assert size < lean.bytes
            assert forms
        elif forms:
            slowest = exact.plan.prediction.step_seconds
            assert plan.prediction.step_seconds * (1 + TOLERANCE) < slowest


def test_a_pin_by_leave_is_kept_though_it_gains_nothing() -> None:
    profile = with_copies(random_profile(random.Random(1), max_blocks=4), random.Random(1))
    budgets = Budgets(device=AMPLE, host=AMPLE, disk=AMPLE)
    block = next(unit.name for unit in profile.units if unit.forms[1:])
    pins = (parse_pin(f"{block}: keep int8"),)
    problem = Problem.of(profile, budgets, pins=pins, allow=LEAVE)
    found = solve_problem(problem, budgets)
    assert isinstance(found, Solved)
    assert found.plan.exactness == "approximate"
