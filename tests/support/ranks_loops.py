"""A training loop on several ranks: plain with DistributedDataParallel, and under plans."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from protrain_plan.profiling.compiling import compiled_whole
from protrain_runtime import prepare, restore
from protrain_runtime.activations.compiled import compile_each
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    PERSISTENT,
    DeviceGroup,
    Placement,
    Plan,
    Schedule,
    StateTier,
    UnitPlan,
)
from tests.support import scenario
from tests.support.pairwise import Impossible, Row, covering_rows
from tests.support.plan_settings import with_settings
from tests.support.ranks_cases import run_ranks
from tests.support.runtime_cases import (
    ADAMW,
    CATALOGUE,
    RECOMPUTED,
    Factory,
    Groups,
    Outcome,
    Subject,
    copied,
    described,
    differences,
    one_group,
    outcome,
    plan_for,
    weight_decay_groups,
)
from tests.support.scenario import Run, Script
from tests.support.training_rows import (
    ALWAYS_IMPOSSIBLE,
    PRECISIONS,
    SCHEDULES,
    of_row,
    optimizer_of,
    plain_optimizer_of,
    plan_of_row,
)

STEPS = 5

TIERS: tuple[StateTier, ...] = ("device", "host", "disk")


PLACES: tuple[Placement, ...] = (
    PERSISTENT,
    *(Placement(tier=tier) for tier in TIERS),
    *(Placement(tier=tier, keep_gathered=True) for tier in TIERS),
)


@dataclass(frozen=True)
class Loop:
    """The options of a training script on ranks."""

    name: str = "llama"
    factory: Factory = ADAMW
    groups: Groups = one_group
    num_steps: int = STEPS
    micro_batches: int = 1
    clips: bool = False
    double: bool = False  # everything in float64
    compiled: str = ""  # a backend of torch.compile's, for the blocks; empty: they are plain
    between: scenario.Hook | None = None  # backward and the optimizer's step, which is after it
    after: scenario.Hook | None = None
    resumes: bool = False  # from files half-way, under the last of its plans

    @property
    def subject(self) -> Subject:
        own = CATALOGUE[self.name]
        return replace(own, change=nn.Module.double) if self.double else own

    @property
    def script(self) -> scenario.Loop:
        clips = 0.05 if self.clips else None
        return scenario.Loop(
            num_steps=self.num_steps,
            micro_batches=self.micro_batches,
            clips=clips,
            between=self.between,
            after=self.after,
        )


@dataclass
class RanksRun(Run):
    """A run on one rank of several: under a plan, or in DistributedDataParallel."""

    factor: float = 1.0  # of the losses
    clips_by: Sequence[Tensor] | None = None  # norms of others; its own, without them
    norms: list[Tensor] = field(default_factory=list[Tensor])

    def backward(
        self,
        number: int,
        *,
        weigh: Callable[[Tensor], Tensor] | None = None,
        between: Callable[[], object] | None = None,
        last: bool = True,
    ) -> None:
        def weighed(loss: Tensor) -> Tensor:
            return (loss * self.factor) if weigh is None else weigh(loss * self.factor)

        ddp = self.model if isinstance(self.model, DistributedDataParallel) else None
        with ddp.no_sync() if ddp is not None and not last else nullcontext():
            super().backward(number, weigh=weighed, between=between, last=last)

    def clip(self, max_norm: float, **options: Any) -> None:
        parameters = list(self.model.parameters())
        if self.clips_by is None:
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, **options)
        else:
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            by = self.clips_by[len(self.norms)]
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, by)
        self.norms.append(norm.detach().clone())

    def outcome(self) -> Outcome:
        ddp = isinstance(self.model, DistributedDataParallel)
        plain = self.model.module if ddp else self.model
        return outcome(plain, self.optimizer, self.seen)  # type: ignore[arg-type]


def in_ddp(
    subject: Subject,
    rank: int,
    count: int,
    factory: Factory,
    *,
    groups: Groups = one_group,
    clips_by: Sequence[Tensor] | None = None,
) -> RanksRun:
    model = DistributedDataParallel(subject.build())
    run = RanksRun(subject, model, factory(groups(model)), rank=rank, num_ranks=count)
    return replace(run, clips_by=clips_by)


def under_plan(
    subject: Subject,
    rank: int,
    count: int,
    plan: Callable[[nn.Module], Plan],
    *,
    folder: Path,
    seed: int = 0,
    groups: Groups = one_group,
    **options: Any,
) -> RanksRun:
    # Rank 0's weights are everybody's, as with DistributedDataParallel.
    model = subject.build(seed if rank == 0 else 5)
    rng = random.Random(rank)
    made = prepare(
        model,
        plan(model),
        param_groups=groups(model),
        spill_directory=folder,
        wait_limit_s=60,
        lane_delay=lambda: rng.random() * 0.0005,
        **options,
    )
    return RanksRun(subject, *made, folder=folder, rank=rank, num_ranks=count)


def ended(run: Run, again: Callable[[Path], RanksRun]) -> Callable[[Path], RanksRun]:
    """Another run, which begins when this one's plan has ended."""
    model = run.model
    return lambda folder: (restore(model), again(folder))[1]


def played(run: RanksRun, script: Script) -> Outcome:
    """The outcome of a script, with dropout from a state of this rank's."""
    torch.manual_seed(1 + run.rank)
    script(run)
    return run.outcome()


def with_norms(run: RanksRun, script: scenario.Loop) -> Outcome:
    run.factor = 1 / script.micro_batches
    found = played(run, script)
    return replace(found, losses=[*found.losses, *run.norms])


def ddp(rank: int, count: int, loop: Loop) -> Outcome:
    def build(model: nn.Module) -> None:
        if (change := loop.subject.change) is not None:
            change(model)
        units = described(loop.name) if loop.compiled else ()
        blocks = {u.name: model.get_submodule(u.name) for u in units if u.kind == "block"}
        if blocks:
            compile_each(blocks, backend=loop.compiled)

    subject = replace(loop.subject, change=build)
    return with_norms(in_ddp(subject, rank, count, loop.factory, groups=loop.groups), loop.script)


def planned(
    rank: int, count: int, loop: Loop, plan: Plan, spill: Path, *, resumes: bool = False
) -> Outcome:
    folder = spill / str(rank)
    folder.mkdir(exist_ok=True)

    def start(seed: int = 0) -> RanksRun:
        options: dict[str, Any] = {"groups": loop.groups, "optimizer": loop.factory, "seed": seed}
        return under_plan(loop.subject, rank, count, lambda _: plan, folder=folder, **options)

    def half_way(run: Run, step: int) -> None:
        if resumes and step == loop.num_steps // 2:
            scenario.go_on(run, ended(run, lambda _: start(7)), "files", spill)

    run = start()
    found = with_norms(run, replace(loop.script, before=half_way))
    restore(run.model)
    restored = copied(run.model.state_dict())
    assert list(differences(restored, found.parameters, "restored")) == []
    return found


def compared(
    rank: int, count: int, loop: Loop, plans: Sequence[Plan], spill: Path
) -> list[list[str]]:
    """By plan, where its training differs from DistributedDataParallel's."""
    with _backend(loop.compiled):
        expected = ddp(rank, count, loop)
        resumed = [loop.resumes and plan is plans[-1] for plan in plans]
        made = [
            planned(rank, count, loop, plan, spill, resumes=resumes)
            for plan, resumes in zip(plans, resumed, strict=True)
        ]
        return [list(differing(found, expected, 0.0)) for found in made]


def _backend(name: str) -> AbstractContextManager[object]:
    """PyTorch compiles with this one inside, as a plan compiles in DDP, too."""
    stack = ExitStack()
    if name:
        stack.enter_context(torch.compiler.set_stance("default", force_backend=name))
        stack.enter_context(compiled_whole())
    return stack


def differing(found: Outcome, expected: Outcome, tolerance: float) -> list[str]:
    """Bits where `tolerance` is 0, else numbers further apart, relative to the largest."""
    trees = [
        (found.losses, expected.losses),
        (found.parameters, expected.parameters),
        (found.optimizer, expected.optimizer),
    ]
    if not tolerance:
        return [line for one, other in trees for line in differences(one, other, "")]
    pairs = [pair for one, other in trees for pair in zip(leaves(one), leaves(other), strict=True)]
    return [
        f"{(one - other).abs().max().item():.3g} of {other.abs().max().item():.3g}"
        for one, other in pairs
        if (one - other).abs().max() > tolerance * other.abs().max()
    ]


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree.cpu()]  # states may be on the host
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree, key=str)]
    return [leaf for each in tree for leaf in leaves(each)] if isinstance(tree, list) else []


def several(loop: Loop, units: Sequence[UnitPlan], count: int, **options: Any) -> Plan:
    updates = "after backward" if loop.clips or loop.between else "in backward"
    own = {"num_devices": count, "updates": updates, "micro_batches": loop.micro_batches}
    own["compile"] = "blocks" if loop.compiled else ""
    return plan_for(loop.subject.build(), units, **{**own, **options})


def in_turn(name: str, *places: Placement) -> tuple[UnitPlan, ...]:
    schedule = Schedule(forward_lead=1, backward_lead=2, update_drain=1)
    return tuple(
        replace(unit, states=place, schedule=schedule)
        for unit, place in zip(described(name), itertools.cycle(places), strict=False)
    )


def assert_as_ddp(count: int, loop: Loop, plans: Sequence[Plan], folder: Path) -> None:
    for found in run_ranks(compared, count, folder, loop, plans, folder):
        assert found == [[]] * len(plans)


ROUNDING = 1e-11
"""In float64, of what five steps make of roundings in the last of 53 bits."""


# --- rows of all that a run on several ranks may combine ------------------------------------------

NUM_STEPS, OVERFLOWS_AT, RESUMED_AT = 5, 1, 3
CLIP_NORM = 0.5
COUNTED = {2: [(0, 1)] * NUM_STEPS, 4: [(0, 1), (2, 3), (1, 2), (0, 3), (1, 3)]}
"""By the number of ranks, the two that count in each step."""

ROW_TIERS: dict[str, tuple[StateTier, ...]] = {
    "device": ("device",),
    "host": ("host",),
    "disk": ("disk",),
    "all": ("device", "host", "disk"),
}
SWAPS: dict[str, tuple[TierName, ...]] = {"host": ("host",), "disk": ("disk",)}
FACTORS: dict[str, tuple[str, ...]] = {
    "ranks": ("2", "4"),
    "replicas": ("1", "2", "4"),
    "model": ("llama", "llama-tied", "gpt2", "functional", "t5"),
    "trained": ("all", "some", "lora"),
    "activations": ("keep", "recompute", "swap", "swap input", "mixed"),
    "form": ("none", *RECOMPUTED),
    "placement": ("persistent", "offload", "buffer", "mixed"),
    "tier": tuple(ROW_TIERS),
    "schedule": tuple(SCHEDULES),
    "pieces": ("small", "whole"),
    "micro-batches": ("1", "2", "3"),
    "clipping": ("none", "norm", "loss scale"),
    "updates": ("in backward", "after backward"),
    "precision": tuple(PRECISIONS),
    "optimizer": ("adamw", "adamw, not fused", "momentum", "sgd"),
    "resumed": ("no", "files into another plan", "states into another plan"),
}
IMPOSSIBLE = (
    Impossible(
        reason="each replica has as many ranks", values={"ranks": ("2",), "replicas": ("4",)}
    ),
    *ALWAYS_IMPOSSIBLE,
)


@cache
def every_row() -> list[Row]:
    """Not made by the ranks, which import this module too."""
    return covering_rows(FACTORS, IMPOSSIBLE, costly=("ranks",))


def plan_for_row(row: Row, model: nn.Module, *, seed: int) -> Plan:
    swaps_to = SWAPS.get(row["tier"], ("host", "disk"))
    found = plan_of_row(row, model, seed=seed, states_on=ROW_TIERS[row["tier"]], swaps_to=swaps_to)
    units = (replace(u, states=replace(u.states, on_disk=0)) for u in found.units)  # one device's
    found = replace(found, units=tuple(units))
    count, replicas = int(row["ranks"]), int(row["replicas"])
    return with_settings(found, group=DeviceGroup(num_devices=count, num_replicas=replicas))


def planned_row(row: Row, rank: int, folder: Path, *, seed: int = 0) -> RanksRun:
    return under_plan(
        of_row(row),
        rank,
        int(row["ranks"]),
        partial(plan_for_row, row, seed=seed),
        folder=folder,
        seed=seed,
        groups=weight_decay_groups,
        optimizer=optimizer_of(row),
    )


def script_of(row: Row, folder: Path) -> scenario.Loop:
    """Five steps on each rank's batches; the last rank's loss overflows in the second."""
    count, scales = int(row["ranks"]), row["clipping"] == "loss scale"

    def before(run: Run, step: int) -> None:
        """Go on under another plan, with what was saved or handed over; count, or not."""
        assert isinstance(run, RanksRun)
        run.factor = 1.0 if run.rank in COUNTED[count][step] else 0.0
        if scales and step == OVERFLOWS_AT and run.rank == count - 1:
            run.factor = math.inf
        if step == RESUMED_AT and row["resumed"] != "no":
            other = ended(run, partial(planned_row, row, run.rank, seed=1))
            scenario.go_on(run, other, row["resumed"])

    clips = None if row["clipping"] == "none" else CLIP_NORM
    return scenario.Loop(
        num_steps=NUM_STEPS,
        micro_batches=int(row["micro-batches"]),
        clips=clips,
        scales=scales,
        before=before,
    )


def compared_rows(
    rank: int, _: int, rows: Sequence[tuple[int, Row]], folder: Path
) -> dict[int, tuple[list[str], list[float]]]:
    """By row, where a plan's training differs from DistributedDataParallel's, and its norms."""
    found: dict[int, tuple[list[str], list[float]]] = {}
    for number, row in rows:
        run, loop = planned_row(row, rank, folder), script_of(row, folder)
        own = played(run, loop)
        plain = plain_optimizer_of(row)
        groups = weight_decay_groups
        ddp = in_ddp(of_row(row), rank, int(row["ranks"]), plain, groups=groups, clips_by=run.norms)
        expected = played(ddp, loop)
        wrong = [*differing(own, expected, 0), *far(run.norms, ddp.norms)]
        wrong += differences(own.random_states, expected.random_states, "random states")
        found[number] = wrong, [norm.item() for norm in run.norms]
    return found


def far(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Iterator[str]:
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        eps = torch.finfo(other.dtype).eps
        if not torch.isclose(one, other, rtol=ROUNDINGS * eps, atol=0, equal_nan=True):
            yield f"norm {step}: {one.item()}, not {other.item()}"


ROUNDINGS = 8
"""In the last bits of a norm, of what sums of squares in another order make."""


def numbered(ranks: str, part: int, parts: int) -> list[tuple[int, Row]]:
    """Some of the rows for so many ranks, by their numbers."""
    rows = [(number, row) for number, row in enumerate(every_row()) if row["ranks"] == ranks]
    return rows[part::parts]


def assert_rows(rows: Sequence[tuple[int, Row]], count: int, folder: Path) -> None:
    by_rank = run_ranks(compared_rows, count, folder, rows, folder)
    for number, row in rows:
        for found in by_rank:
            differences, norms = found[number]
            assert differences == [], (number, row)
            assert repr(norms) == repr(by_rank[0][number][1]), (number, row)
