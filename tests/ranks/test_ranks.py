"""Training on several ranks equals DistributedDataParallel on the same batches.

Cases that were thought of, and rows over what a training run may combine: every two values of two
factors meet in some row. Rows are bitwise, on four ranks too, and with clipping:

- In each step two ranks count, and the losses of others are multiplied by zero. A sum of two
  numbers and zeros does not depend on their order, which gloo chooses by where in a buffer they
  lie. Over the steps every rank counts, with others.
- A norm of parts is rounded otherwise than that of the whole. The norm that the plan's ranks clip
  by is compared with the norm that DistributedDataParallel's ranks have, within a few roundings,
  and what they clip by is the same number.
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from protrain_plan.profiling.compiling import compiled_whole
from protrain_runtime.activations.compiled import compile_each
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
    Plan,
    UnitPlan,
)
from tests.support import odd_optimizers
from tests.support.hostile_models import Chain
from tests.support.optimizer_habits import EDITS, by_value, edited, parameters
from tests.support.ranks_cases import ranks_on_every_device, run_ranks
from tests.support.ranks_loops import (
    FACTORS,
    PLACES,
    Loop,
    assert_as_ddp,
    assert_rows,
    compared,
    in_turn,
    numbered,
    several,
)
from tests.support.runtime_cases import decided, described
from tests.support.scenario import Run


def everywhere(name: str) -> list[tuple[UnitPlan, ...]]:
    return [decided(described(name), KEEP, place) for place in PLACES]


def turn(name: str) -> list[tuple[UnitPlan, ...]]:
    return [in_turn(name, *PLACES)]


def loss_in_place(name: str) -> list[tuple[UnitPlan, ...]]:
    *others, last = in_turn(name, *PLACES)
    return [(*others, replace(last, activations=Activations(form="in place")))]


def compiled(name: str) -> list[tuple[UnitPlan, ...]]:
    units = in_turn(name, PERSISTENT, Placement(tier="device"), Placement(tier="disk"))
    moved = [
        replace(unit, activations=RECOMPUTE if number % 2 else Activations(tier="disk"))
        if unit.kind == "block"
        else unit
        for number, unit in enumerate(units)
    ]
    return [units, tuple(moved)]


@dataclass(frozen=True)
class Case:
    """A loop, and the decisions that it trains under."""

    loop: Loop
    units: Callable[[str], Sequence[tuple[UnitPlan, ...]]]
    by_day: bool = False
    num_replicas: int = 1

    def plans(self) -> list[Plan]:
        return [
            several(self.loop, units, 2, num_replicas=self.num_replicas)
            for units in self.units(self.loop.name)
        ]


def case(units: Any, name: str = "llama", by_day: bool = False, **options: Any) -> Case:
    of_loop = {key: options.pop(key) for key in [*options] if key in Loop.__annotations__}
    return Case(Loop(name, **of_loop), units, by_day=by_day, **options)


SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


def writing(feature: str) -> Any:
    """An optimizer that writes into its groups, or into parameters when its mode changes."""
    return partial(odd_optimizers.made, features=feature)


_HELD: dict[int, Any] = {}


def held(run: Run, number: int) -> None:
    """One rank's script holds states from step to step; all read them."""
    if number == 0:
        found = [run.optimizer.state[parameter] for parameter in parameters(run)]
        _HELD[id(run)] = found if run.rank == 1 else None
    for state in _HELD[id(run)] or ():
        run.seen.append(state["exp_avg"].cpu().clone())


CASES: dict[str, Case] = {
    # A sum of two numbers does not depend on their order.
    "llama-tied": case(turn, "llama-tied", by_day=True),
    "everywhere": case(everywhere, "llama-tied"),
    "loss in place, 2": case(loss_in_place, "llama-tied", micro_batches=2),
    "loss in place": case(loss_in_place, "llama-tied"),
    "modes": case(turn, "functional", by_day=True, factory=writing("switches modes")),
    "groups": case(turn, "gpt2", factory=writing("counts in its groups in place")),
    "sgd": case(turn, factory=SGD),
    "states emptied": case(turn, by_day=True, after=partial(edited, EDITS["emptied"])),
    "states replaced": case(turn, after=partial(edited, EDITS["replaced"])),
    "states pruned": case(turn, "functional", after=partial(edited, EDITS["pruned"])),
    "states held": case(turn, "functional", by_day=True, after=held),
    "clipped by value": case(turn, between=by_value),
    "replicas": case(turn, num_replicas=2),
    "compiled": case(compiled, "functional", compiled="aot_eager"),
    "compiled by inductor": case(compiled, micro_batches=2, compiled="inductor"),
}


def compared_each(rank: int, count: int, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """By case and plan, where training differs from DistributedDataParallel's."""
    each = {name: CASES[name] for name in names}
    return {n: compared(rank, count, c.loop, c.plans(), folder) for n, c in each.items()}


def test_cases_of_every_day_match_ddp(tmp_path: Path) -> None:
    """In one start of two ranks."""
    names = [name for name, each in CASES.items() if each.by_day]
    for found in run_ranks(compared_each, 2, tmp_path, names, tmp_path):
        assert found == {name: [[]] for name in names}


@pytest.mark.slow
@ranks_on_every_device
@pytest.mark.parametrize("name", CASES)
def test_ranks_match_ddp(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = CASES[name]
    if found.loop.compiled and "emulated" in request.node.name:
        pytest.skip("blocks are compiled for CPUs")
    if found.loop.compiled == "inductor" and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    assert_as_ddp(2, found.loop, found.plans(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("ranks", FACTORS["ranks"])
def test_five_steps_match_ddp_bitwise(ranks: str, part: int, tmp_path: Path) -> None:
    rows = numbered(ranks, part, 4)
    assert rows
    assert_rows(rows, int(ranks), tmp_path)


# --- compiled blocks ------------------------------------------------------------------------------


def graphs_in_ddp(rank: int, count: int) -> list[int]:
    """How many graphs a step inside DistributedDataParallel compiles: as it is, and whole.

    The block has more parameters than it reduces at first, 1 MiB.
    """
    found: list[int] = []
    for whole in (False, True):
        torch.compiler.reset()
        made: list[torch.fx.GraphModule] = []

        def count_graph(
            graph: torch.fx.GraphModule, _: object, made: list[torch.fx.GraphModule] = made
        ) -> object:
            made.append(graph)
            return graph.forward

        block = Chain(*(nn.Linear(512, 512) for _ in range(4)))
        undo = compile_each({"0": block}, backend=count_graph)  # type: ignore[arg-type]
        model = DistributedDataParallel(nn.Sequential(block))
        with compiled_whole() if whole else nullcontext():
            model(torch.ones(2, 512))
        undo()
        found.append(len(made))
    return found


@pytest.mark.nightly
def test_blocks_inside_ddp_are_compiled_whole(tmp_path: Path) -> None:
    """PyTorch would cut them where DDP's buckets end: other graphs, perhaps with other bits."""
    for cut, whole in run_ranks(graphs_in_ddp, 2, tmp_path):
        assert cut > whole == 1
