"""Long texts on a CPU, under a limit of the system that only a plan with leave stays in."""

import copy
import resource
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.long_context_model import short_factory
from protrain_plan.commands.training import Run, train
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.profiling.estimated import estimate
from protrain_runtime import prepare
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.plan import Budgets, Keep, Persistent, Plan, Recompute
from protrain_runtime.devices.memory_meter import process_memory
from tests.support.commands import bash
from tests.support.peaks import bytes_of_others
from tests.support.runtime_cases import ADAMW, decided, plan_for, units_of

EXAMPLES = Path(__file__).parents[2] / "examples"
ROUNDING = ("rounding",)
ROOM = 64 * 2**20  # one tensor of the logits' size

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


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """This process may hold so many private bytes inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@linux
def test_tiles_train_under_a_limit_that_plain_pytorch_cannot_meet(tmp_path: Path) -> None:
    """In this process, which may take so much more than it holds."""

    def step(model: Any, *, checkpointing: bool = False) -> float:
        model.checkpointing = checkpointing
        loss: torch.Tensor = model(next(iter(texts)))
        loss.backward()
        return loss.item()

    torch.manual_seed(0)
    model, texts = short_factory()
    expected = step(copy.deepcopy(model))  # and makes what a process makes once
    found = units_of(model, next(iter(texts)))
    before, *blocks, last = decided(found, Recompute(form="tiled"), Persistent())
    units = (before, *blocks, replace(last, activations=Keep(form="64 tiles")))
    plan = replace(plan_for(model, units), exact=False, exactness="rounding", allowed=ROUNDING)
    planned, _ = prepare(copy.deepcopy(model), plan, optimizer=ADAMW, spill_directory=tmp_path)
    with at_most(process_memory().data_bytes + ROOM):
        for checkpointing in (False, True):
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                step(copy.deepcopy(model), checkpointing=checkpointing)
        assert step(planned) == pytest.approx(expected, rel=1e-6)


@linux
@pytest.mark.slow
def test_4096_tokens_train_where_nothing_exact_does(tmp_path: Path) -> None:
    """In this process, which may take so much more than it holds."""
    model, texts = short_factory()
    first = model(next(iter(texts)))
    first.backward()  # makes what a process makes once
    del first, model
    held = process_memory().data_bytes
    machine = load_hardware("cpu")
    hardware = replace(machine, device=replace(machine.device, context_bytes=held))
    source = load_source(f"{EXAMPLES / 'long_context_model.py'}:short_factory")
    profile = estimate(
        source, hardware=hardware, batch_size=1, seq_len=512, dtype="float32", allow=ROUNDING
    )
    budgets = Budgets(device=held + ROOM, host=0, disk=0)
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
    with at_most(held + ROOM):
        found = run(plan, plain=False)
        with pytest.raises(ProtrainError, match="out of memory"):
            run(plan, plain=True)
        with pytest.raises(ProtrainError, match="RLIMIT_DATA"):
            run(exact.plan, plain=False)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            checkpointing()
    promised = device_bytes(problems[1].program(plan.units))
    pairs = zip(promised, found.slot_bytes, strict=True)
    assert all(measured - others <= slot.total for slot, measured in pairs)
    assert len(found.losses) == 2
