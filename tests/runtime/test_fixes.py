"""Fixes of refusals, followed: the loop trains then, bit for bit like plain PyTorch."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from protrain_plan.profiling.structure.discovery import fullest
from protrain_runtime import full_parameters
from protrain_runtime.contract.records.plan import Offload, Recompute
from tests.support.hostile_models import Block, Hostile, Stack, batch_of, by_torch
from tests.support.judging import judged
from tests.support.messages import Speaker
from tests.support.runtime_cases import decided
from tests.support.scenario import Run, Scenario, Script, refusal


def skips(run: Run) -> None:
    """A step without an update, as where a loss is not finite."""
    run.step(0)
    run.backward(1)
    run.optimizer.zero_grad()
    run.step(2)


def skips_updates(run: Run) -> None:
    """The same, of which a plan with updates in backward takes the step."""
    run.step(0)
    run.backward(1)
    run.update()
    run.step(2)


def writes(run: Run) -> None:
    run.step(0)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.5)
    run.step(1)


def writes_inside(run: Run, *, modify: bool = True) -> None:
    run.step(0)
    with full_parameters(run.model, modify), torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.5)
    run.step(1)


def writes_unsaid(run: Run) -> None:
    writes_inside(run, modify=False)


def reads(run: Run) -> None:
    run.step(0)
    run.seen += [parameter.detach().norm() for parameter in run.model.parameters()]
    run.step(1)


def reads_inside(run: Run) -> None:
    run.step(0)
    with full_parameters(run.model):
        run.seen += [parameter.detach().norm() for parameter in run.model.parameters()]
    run.step(1)


def drops_a_gradient(run: Run) -> None:
    run.step(0)
    run.backward(1)
    next(run.model.parameters()).grad = None
    run.update()
    run.step(2)


def clips(run: Run) -> None:
    run.backward(0)
    run.clip(0.5)
    run.update()
    run.step(1)


def clips_values(run: Run) -> None:
    run.backward(0)
    torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)
    run.update()
    run.step(1)


def steps_early(run: Run) -> None:
    run.backward(0)
    run.backward(1)
    run.update()
    run.backward(2)
    run.update()


def uses_state_inside(run: Run) -> None:
    run.step(0)
    loss = run.loss(1)
    run.seen.append(run.optimizer.state[next(run.model.parameters())]["exp_avg"].clone())
    loss.backward()
    run.update()


def uses_state_before(run: Run) -> None:
    run.step(0)
    run.seen.append(run.optimizer.state[next(run.model.parameters())]["exp_avg"].clone())
    run.step(1)


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A loop that is refused, and what the message says: another loop, or a plan with --clip."""

    refused: Script
    loop: Script | None = None
    micro_batches: int = 1
    clip: bool = False  # the plan, for the other loop


FIXES = {
    "a skipped step: --clip": Fix(refused=skips, clip=True),
    "a skipped step: step": Fix(refused=skips, loop=skips_updates),
    "writes": Fix(refused=writes, loop=writes_inside),
    "writes, unsaid": Fix(refused=writes_unsaid, loop=writes_inside),
    "reads": Fix(refused=reads, loop=reads_inside),
    "a dropped gradient": Fix(refused=drops_a_gradient, clip=True),
    "clips by norm": Fix(refused=clips, clip=True),
    "clips by value": Fix(refused=clips_values, clip=True),
    "fewer micro-batches": Fix(refused=steps_early, micro_batches=2, clip=True),
    "state in a step: --clip": Fix(refused=uses_state_inside, clip=True),
    "state in a step: before": Fix(refused=uses_state_inside, loop=uses_state_before),
}


@pytest.mark.parametrize("name", FIXES)
def test_a_loop_trains_when_the_message_is_followed(
    name: str, tmp_path: Path, assert_says: Speaker
) -> None:
    fix = FIXES[name]

    def asked(script: Script, updates: Literal["in backward", "after backward"]) -> Scenario:
        return Scenario(
            units=lambda units: decided(units, Recompute(), Offload(tier="disk")),
            script=script,
            settings={"updates": updates, "micro_batches": fix.micro_batches},
        )

    refused = asked(fix.refused, "in backward")
    for folder in (tmp_path / "refused", tmp_path / "trained"):
        folder.mkdir()
    run = refused.start(tmp_path / "refused")
    assert_says(refusal(lambda: refused.played(run)))
    updates: Any = "after backward" if fix.clip else "in backward"
    asked(fix.loop or fix.refused, updates).assert_like_plain(tmp_path / "trained")


def one_of_two(stack: Any, hidden: torch.Tensor, step: int) -> torch.Tensor:
    return stack.blocks[by_torch() < 0.5](hidden)  # type: ignore[no-any-return]


def both(stack: Any, hidden: torch.Tensor, step: int) -> torch.Tensor:
    found = [block(hidden) for block in stack.blocks]
    taken = by_torch() < 0.5
    return found[taken] + 0 * found[not taken]  # type: ignore[no-any-return]


def all_run() -> Hostile:
    return Hostile(partial(Stack, Block, 2, run=both))


def test_blocks_that_take_turns_train_when_the_message_is_followed(assert_says: Speaker) -> None:
    assert_says.refused(fullest, Stack(Block, 2, run=one_of_two), batch_of(0))
    found = judged(all_run, plans=["mixed"], seed=3)
    assert [(one.kind, one.text) for one in found] == [("like plain", "")]
