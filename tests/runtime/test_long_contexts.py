"""Long texts on a CPU under a limit by the operating system that only a plan with leave stays in."""

import resource
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from protrain_plan.commands.training import Run, train
from protrain_plan.errors import ProtrainError
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.profiling.estimated import estimate
from protrain_plan.records.plan import Budgets, Plan
from protrain_plan.simulation.memory import device_bytes
from protrain_runtime.devices.memory_meter import process_memory
from tests.support.commands import bash
from tests.support.peaks import bytes_of_others

EXAMPLES = Path(__file__).parents[2] / "examples"
ROUNDING = ("rounding",)
MIB = 2**20

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA")


@linux
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_131072_tokens_train_where_nothing_exact_does(tmp_path: Path) -> None:
    """Plain PyTorch, checkpointing and the exact plan are run under the same limit, and fail."""
    script = shlex.quote(str(EXAMPLES / "long_contexts.py"))
    result = bash(f"{shlex.quote(sys.executable)} {script}", folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "everything held"


@linux
def test_4096_tokens_train_where_nothing_exact_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which may take so much more than it holds."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from long_context_model import short_factory

    model, texts = short_factory()
    first = model(next(iter(texts)))
    first.backward()  # makes what a process makes once
    del first, model
    held = process_memory().data_bytes
    machine, room = load_hardware("cpu"), 64 * MIB
    hardware = replace(machine, device=replace(machine.device, context_bytes=held))
    source = load_source(f"{EXAMPLES / 'long_context_model.py'}:short_factory")
    profile = estimate(
        source, hardware=hardware, batch_size=1, seq_len=512, dtype="float32", allow=ROUNDING
    )
    budgets = Budgets(device=held + room, host=0, disk=0)
    problems = [Problem.of(profile, budgets, allow=allow) for allow in ((), ROUNDING)]
    refused, solved = (solve_problem(problem, budgets) for problem in problems)
    assert isinstance(refused, Infeasible) and isinstance(solved, Solved)
    plan = solved.plan
    assert plan.exactness == "rounding"
    ample = replace(budgets, device=refused.smallest_budget_bytes)
    exact = solve_problem(replace(problems[0], device=10**12), ample)
    assert isinstance(exact, Solved)

    def run(plan: Plan, *, plain: bool) -> Run:
        return train(plan, num_steps=2, plain=plain, text=None, spill_directory=tmp_path)

    def checkpointing() -> None:
        model, texts = short_factory()
        model.checkpointing = True
        model(next(iter(texts))).backward()

    others = bytes_of_others()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + room, hard))
    try:
        found = run(plan, plain=False)
        with pytest.raises(ProtrainError, match="out of memory"):
            run(plan, plain=True)
        with pytest.raises(ProtrainError, match="RLIMIT_DATA"):
            run(exact.plan, plain=False)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            checkpointing()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    promised = device_bytes(problems[1].program(plan.units))
    pairs = zip(promised, found.slot_bytes, strict=True)
    assert all(measured - others <= slot.total for slot, measured in pairs)
    assert len(found.losses) == 2
