"""Ranks that reduce every micro-batch: training equals that of FSDP2, which reduces so by default.

FSDP2 computes gradients; one plain optimizer steps on all of them, whole, as in the other tests. On
emulated devices, where FSDP2 does not run, means by DistributedDataParallel are added up.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.presentation.plans import other_results
from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.records import dumps_plan, loads_plan
from protrain_runtime.contract.records.plan import PERSISTENT, RECOMPUTE, Plan, UnitPlan
from tests.support.plan_settings import with_settings
from tests.support.ranks_cases import ranks_on_every_device_at_night, run_ranks
from tests.support.ranks_loops import (
    PLACES,
    ROUNDING,
    Loop,
    RanksRun,
    ddp,
    differing,
    in_turn,
    planned,
    played,
    several,
    under_plan,
    with_norms,
)
from tests.support.runtime_cases import FRACTIONAL, decided, described, device
from tests.support.scenario import Run

SHARED = [place for place in PLACES if not place.is_persistent]


@dataclass
class InFSDP(RanksRun):
    """A plain model, whose gradients are those of a copy in FSDP2."""

    sharded: nn.Module = field(default_factory=nn.Module)

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.model.parameters(), self.sharded.parameters(), strict=True))

    def loss(self, number: int) -> Tensor:
        return loss_of(call_model(self.sharded, self.subject.batch(number)))

    def backward(self, number: int, *, last: bool = True, **options: Any) -> None:
        super().backward(number, last=last, **options)
        for plain, shard in self.pairs() if last else ():
            plain.grad = shard.grad.full_tensor() if isinstance(shard.grad, DTensor) else None
            shard.grad = None

    def copy_weights(self) -> None:
        with torch.no_grad():
            for plain, shard in self.pairs():
                assert isinstance(shard, DTensor)
                mine = distribute_tensor(plain.detach(), shard.device_mesh, shard.placements)
                shard.to_local().copy_(mine.to_local())


def in_fsdp(rank: int, count: int, loop: Loop) -> InFSDP:
    model = loop.subject.build()
    sharded = copy.deepcopy(model)
    blocks = [unit.name for unit in described(loop.name) if unit.kind == "block"]
    wrapped: list[Any] = [fully_shard(sharded.get_submodule(name)) for name in blocks]
    for one in (*wrapped, fully_shard(sharded)):
        one.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    optimizer = loop.factory([{"params": list(model.parameters())}])
    run = InFSDP(loop.subject, model, optimizer, rank=rank, num_ranks=count, sharded=sharded)
    optimizer.register_step_post_hook(lambda *_: run.copy_weights())
    return run


@dataclass
class InAddedDDP(RanksRun):
    """Gradients of every micro-batch are those of a step by itself, and are added up."""

    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def backward(self, number: int, *, last: bool = True, **options: Any) -> None:
        super().backward(number, **options)
        for name, parameter in self.model.named_parameters():
            if (gradient := parameter.grad) is not None:
                self.sums[name] = self.sums[name] + gradient if name in self.sums else gradient
            parameter.grad = self.sums.pop(name, None) if last else None


def in_added_ddp(rank: int, count: int, loop: Loop) -> InAddedDDP:
    model = DistributedDataParallel(loop.subject.build())
    optimizer = loop.factory([{"params": list(model.parameters())}])
    return InAddedDDP(loop.subject, model, optimizer, rank=rank, num_ranks=count)


def compared(
    rank: int, count: int, loop: Loop, plans: Sequence[Plan], spill: Path, tolerance: float
) -> list[list[str]]:
    plain = in_fsdp if device().type == "cpu" else in_added_ddp
    expected = with_norms(plain(rank, count, loop), loop.script)
    made = [planned(rank, count, loop, plan, spill) for plan in plans]
    return [list(differing(found, expected, tolerance)) for found in made]


def sharing(loop: Loop, units: Sequence[UnitPlan], **options: Any) -> Plan:
    made = several(loop, units, 2, **options)
    return with_settings(made, reductions="in every micro-batch")


CASES: dict[str, tuple[Loop, float, bool]] = {
    "tied": (Loop("llama-tied", micro_batches=2), 0.0, False),
    "dropout": (Loop("gpt2", micro_batches=3), 0.0, True),
    "norm": (Loop("gpt2", micro_batches=3, clips=True, double=True), ROUNDING, True),
}


@pytest.mark.nightly("tied-cpu")
@ranks_on_every_device_at_night
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if c[2] else ()) for n, c in CASES.items()]
)
def test_ranks_match_fsdp_that_reduces_every_micro_batch(name: str, tmp_path: Path) -> None:
    loop, tolerance, _ = CASES[name]
    units = [in_turn(loop.name, *SHARED), in_turn(loop.name, *reversed(SHARED), PERSISTENT)]
    units += [decided(described(loop.name), RECOMPUTE, SHARED[0], FRACTIONAL[0])]
    plans = [sharing(loop, each) for each in units]
    plans += [with_settings(plans[0], updates="after backward")]
    for found in run_ranks(compared, 2, tmp_path, loop, plans, tmp_path, tolerance):
        assert found == [[]] * len(plans)


# --- between micro-batches ------------------------------------------------------------------------


def edit(run: RanksRun) -> None:
    """Scale all gradients and drop every third one."""
    model = run.sharded if isinstance(run, InFSDP) else run.model
    for number, parameter in enumerate(model.parameters()):
        if parameter.grad is not None:
            parameter.grad.mul_(0.3)
        if number % 3 == 0:
            parameter.grad = None


def edited(run: Run) -> None:
    """Three steps of three micro-batches; a fourth is given up after its first one."""
    assert isinstance(run, RanksRun)
    for step in range(4):
        for part in range(3):
            number = 2 * (3 * step + part) + run.rank
            run.backward(number, last=part == 2)
            if step == 2 and part == 0:
                for model in (run.model, getattr(run, "sharded", run.model)):
                    model.zero_grad()
                break
            if part < 2:
                edit(run)
        else:
            run.update()


def compared_edited(rank: int, count: int, loop: Loop, plan: Plan, spill: Path) -> list[str]:
    spill = spill / str(rank)
    spill.mkdir()
    run = under_plan(
        loop.subject, rank, count, lambda _: plan, folder=spill, optimizer=loop.factory
    )
    return list(differing(played(run, edited), played(in_fsdp(rank, count, loop), edited), 0.0))


def test_sums_that_are_edited_between_micro_batches_are_those_of_fsdp(tmp_path: Path) -> None:
    loop = Loop("llama", micro_batches=3)
    plan = sharing(loop, in_turn("llama", *SHARED), updates="after backward")
    assert run_ranks(compared_edited, 2, tmp_path, loop, plan, tmp_path) == [[], []]


def differs_from_ddp(rank: int, count: int, loop: Loop, plan: Plan, spill: Path) -> bool:
    found = planned(rank, count, loop, plan, spill)
    return bool(list(differing(found, ddp(rank, count, loop), 0.0)))


@pytest.mark.nightly
def test_sums_are_not_those_of_whole_gradients(tmp_path: Path) -> None:
    """So a plan says that it is not exact, and asks for leave."""
    loop = Loop("llama", micro_batches=3)
    plan = sharing(loop, in_turn("llama", *SHARED)).regraded()
    assert run_ranks(differs_from_ddp, 2, tmp_path, loop, plan, tmp_path) == [True, True]
    assert (plan.exact, plan.exactness, plan.allowed) == (False, "rounding", ("rounding",))
    assert other_results(plan) == [
        "not exact: reductions in every micro-batch give the results of plain PyTorch up to"
        " rounding, as --allow rounding permits"
    ]
    whole = with_settings(plan, reductions="in the last micro-batch").regraded()
    assert (whole.exact, whole.allowed) == (True, ())
    text = dumps_plan(plan)
    assert loads_plan(text) == plan
    with pytest.raises(RecordError) as caught:
        loads_plan(text.replace("exact: false", "exact: true"))
    assert caught.value.message == (
        "expected false: its activations take keep, and reductions are in every micro-batch"
    )
