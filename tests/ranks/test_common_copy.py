"""Frozen parameters that the ranks of a node have once: bits, bytes, and what is left of them."""

import importlib.util
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from protrain_runtime import full_parameters, load, prepare, restore, save
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    DeviceGroup,
    Placement,
    Plan,
    UnitPlan,
)
from protrain_runtime.model.prepared import below_device, prepared_of
from protrain_runtime.ranks import common_memory
from tests.support import quantized_models
from tests.support.messages import Speaker
from tests.support.ranks_cases import end_ranks, ranks_on_every_device_at_night, run_ranks
from tests.support.ranks_loops import Loop as RanksLoop
from tests.support.ranks_loops import (
    RanksRun,
    compared,
    differing,
    in_ddp,
    played,
    under_plan,
)
from tests.support.runtime_cases import (
    ADAMW,
    CATALOGUE,
    FRACTIONAL,
    Subject,
    copied,
    decided,
    differences,
    labelled,
    llama,
    plan_for,
)
from tests.support.scenario import Loop

COMMON = Placement(tier="host", common_copy=True)
HELD = replace(COMMON, keep_gathered=True)


def freeze(model: nn.Module) -> None:
    """Train two matrices of every block, as adapters are beside what is frozen."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "v_proj" in name)


SUBJECT = Subject(partial(llama, tied=False), labelled, change=freeze)
PACKED = Subject(
    lambda: quantized_models.mixed_factory()[0].to("cpu"),
    lambda number: quantized_models.batches()[number % 2],
)
CATALOGUE |= {"frozen in part": SUBJECT, "packed beside adapters": PACKED}


def trained(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def plan_on(
    count: int, units: Sequence[UnitPlan], subject: Subject = SUBJECT, **options: Any
) -> Plan:
    group = DeviceGroup(num_devices=count, **options)
    return plan_for(subject.build(), units, group=group)


def made(plan: Plan, rank: int, folder: Path, **options: Any) -> RanksRun:
    spill = folder / f"spill-{rank}"
    spill.mkdir(exist_ok=True)
    return under_plan(
        SUBJECT,
        rank,
        plan.group.num_devices,
        lambda _: plan,
        folder=spill,
        groups=trained,
        optimizer=ADAMW,
        **options,
    )


MAPPED = re.compile(
    r" (\d+) +/memfd:protrain common copy.*?\nSize: +(\d+) kB.*?\nPss: +(\d+) kB", re.DOTALL
)


def shared(process: object = "self") -> list[tuple[int, int, int]]:
    """A process's maps of common copies: their file, bytes, and its part where others map it."""
    text = Path(f"/proc/{process}/smaps").read_text(encoding="utf-8", errors="replace")
    return [(int(f), int(size) * 1024, int(pss) * 1024) for f, size, pss in MAPPED.findall(text)]


# --- training -------------------------------------------------------------------------------------


def compared_in_turn(
    rank: int, count: int, loop: RanksLoop, plans: Sequence[Plan], folder: Path
) -> list[list[str]]:
    found = compared(rank, count, loop, plans, folder)
    assert shared() == []
    return found


def assert_resumes_like_ddp(name: str, plans: Sequence[Plan], folder: Path) -> None:
    loop = RanksLoop(name, groups=trained, num_steps=4, resumes=True)
    for found in run_ranks(compared_in_turn, 2, folder, loop, plans, folder):
        assert found == [[]] * len(plans)


def in_turn(*places: Placement, subject: Subject = SUBJECT) -> tuple[UnitPlan, ...]:
    units = decided(subject.units(), RECOMPUTE, PERSISTENT, FRACTIONAL[0])
    return tuple(replace(u, states=places[n % len(places)]) for n, u in enumerate(units))


@pytest.mark.nightly("cpu")
@ranks_on_every_device_at_night
def test_two_ranks_match_ddp_bitwise(tmp_path: Path) -> None:
    plans = [
        plan_on(2, decided(SUBJECT.units(), KEEP, COMMON)),
        plan_on(2, in_turn(HELD, COMMON, Placement(tier="device"), PERSISTENT)),
    ]
    assert_resumes_like_ddp("frozen in part", plans, tmp_path)


@pytest.mark.nightly  # by day packed weights on one device, and other weights among ranks
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_two_ranks_with_adapters_beside_packed_weights_match_ddp_bitwise(tmp_path: Path) -> None:
    """Weights of 4 and 8 bits: bytes are shared, scales are rank 0's."""
    places = (Placement(tier="device"), PERSISTENT, Placement(tier="host"), Placement(tier="disk"))
    plans = [
        plan_on(2, units, PACKED)
        for units in (
            decided(PACKED.units(), RECOMPUTE, Placement(tier="device")),
            in_turn(*places, subject=PACKED),
        )
    ]
    assert_resumes_like_ddp("packed beside adapters", plans, tmp_path)


def on_two_nodes(rank: int, count: int, plan: Plan, folder: Path) -> tuple[list[str], float]:
    """Where training differs from DistributedDataParallel's; how many processes share a copy."""
    expected = played(in_ddp(SUBJECT, rank, count, ADAMW, groups=trained), Loop(num_steps=2))
    run = made(plan, rank, folder)
    found = differing(played(run, Loop(num_steps=2)), expected, 1e-5)
    [(_, size, part)] = shared()
    return found, size / part


@pytest.mark.slow
def test_nodes_have_a_copy_each(tmp_path: Path) -> None:
    """Four ranks on one machine, which the plan takes for two; sums of four are rounded."""
    plan = plan_on(4, decided(SUBJECT.units(), KEEP, COMMON), num_nodes=2)
    for found, sharing in run_ranks(on_two_nodes, 4, tmp_path, plan, tmp_path):
        assert found == []
        assert sharing == pytest.approx(2, rel=0.1)


def from_folder(
    rank: int, _count: int, plan: Plan, weights: Path
) -> tuple[list[int], dict[str, Any]]:
    """The sizes of a rank's common copies, and its model's values, read from a folder."""
    make = partial(SUBJECT.build, rank)
    model, _ = prepare(make, plan, optimizer=ADAMW, weights=weights, wait_limit_s=60.0)
    return [size for _, size, _ in shared()], copied(model.state_dict())


def test_a_folders_weights_go_straight_into_the_common_copy(tmp_path: Path) -> None:
    model: Any = SUBJECT.build(seed=5)
    model.save_pretrained(tmp_path / "weights", max_shard_size="100KB")
    plan = plan_on(2, decided(SUBJECT.units(), KEEP, COMMON))
    for sizes, values in run_ranks(from_folder, 2, tmp_path, plan, tmp_path / "weights"):
        assert sizes
        assert not [*differences(values, copied(model.state_dict()), "loaded")]


# --- bytes ----------------------------------------------------------------------------------------


def frozen_bytes() -> int:
    return sum(p.nbytes for p in SUBJECT.build().parameters() if not p.requires_grad)


def counting(rank: int, _: int, plan: Plan, folder: Path) -> tuple[list[int], int, int]:
    """Bytes that are mapped, and this rank's part; host bytes that it tells, and would without."""
    seen, told = [0], list[int]()
    for states in (COMMON, Placement(tier="host")):
        units = decided(plan.units, KEEP, states)
        run = made(replace(plan, units=units), rank, folder)
        if states == COMMON:
            assert frozen(run.model) == []
            dist.barrier()  # all have read it
            [(_, *seen)] = shared()
            dist.barrier()
        told.append(below_device(run.model)[0])
        restore(run.model)
    return seen, told[0], told[1]


def test_a_node_has_frozen_parameters_once(tmp_path: Path) -> None:
    """As the system counts, and as the runtime tells."""
    plan = plan_on(3, decided(SUBJECT.units(), KEEP, COMMON))
    found = run_ranks(counting, 3, tmp_path, plan, tmp_path)
    pages = 4096 * len(plan.units)
    for (size, part), told, apart in found:
        assert frozen_bytes() <= size <= frozen_bytes() + pages
        assert part == pytest.approx(size / 3, abs=8192)
        assert abs(told - apart) <= pages + 256 * 3 * 100  # padding of shards


# --- ranks that end, and values that are written --------------------------------------------------


def frozen(model: nn.Module, *, seed: int = 0) -> list[str]:
    """Where what a rank reads of frozen parameters is not what they were at first."""
    expected = SUBJECT.build(seed).state_dict()
    prepared = prepared_of(model)
    assert prepared is not None
    names = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    values = {part.name: (chunk, part) for chunk in prepared.chunks for part in chunk.slices}
    found: dict[str, torch.Tensor] = {}
    for name in names:
        chunk, part = values[name]
        assert chunk.sharding is not None
        found[name] = chunk.sharding.gather(chunk, part)
    return list(differences(found, {name: expected[name] for name in names}, ""))


def ending(rank: int, _: int, plan: Plan, folder: Path) -> tuple[int, list[str]]:
    """Rank 0, which made the copy, is killed: its file, and what rank 1 reads then."""
    run = made(plan, rank, folder)
    [(file, *_bytes)] = shared()
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    return file, frozen(run.model)


def test_a_killed_rank_leaves_the_others_their_values_and_no_memory(tmp_path: Path) -> None:
    plan = plan_on(2, decided(SUBJECT.units(), KEEP, COMMON))
    killed, left = end_ranks(ending, 2, tmp_path, plan, tmp_path)
    assert killed.exit_code == -signal.SIGKILL
    file, found = left.result
    assert found == []
    running = [path.parent.name for path in Path("/proc").glob("[0-9]*/smaps")]
    files: set[int] = set()
    for process in running:
        with suppress(OSError):  # another's, or it has ended
            files |= {one for one, *_ in shared(process)}
    assert file not in files


def writing(rank: int, count: int, plan: Plan, folder: Path) -> list[list[str]]:
    """Where values differ after each way to write them."""
    run = made(plan, rank, folder)
    model, found = run.model, [frozen(run.model)]
    with full_parameters(model, modify=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    doubled = SUBJECT.build().state_dict()
    doubled = {name: 2 * value for name, value in doubled.items()}
    found.append(list(differences(model.state_dict(), doubled, "doubled")))
    model.load_state_dict(SUBJECT.build(5).state_dict())
    found.append(frozen(model, seed=5))
    save(model, run.optimizer, folder / "saved")
    model.load_state_dict(doubled)
    load(model, run.optimizer, folder / "saved")
    found.append(frozen(model, seed=5))
    with full_parameters(model):
        now = copied(dict(model.named_parameters()))
    found.append(list(differences(now, SUBJECT.build(5).state_dict(), "whole")))
    restore(model)
    found.append(list(differences(model.state_dict(), SUBJECT.build(5).state_dict(), "restored")))
    return found


@pytest.mark.nightly
def test_frozen_values_are_written_for_all_ranks_and_saved_once(tmp_path: Path) -> None:
    plan = plan_on(3, decided(SUBJECT.units(), KEEP, COMMON))
    for found in run_ranks(writing, 3, tmp_path, plan, tmp_path):
        assert found == [[]] * len(found)
    alone = SUBJECT.build(9)
    load(alone, None, tmp_path / "saved")
    assert list(differences(alone.state_dict(), SUBJECT.build(5).state_dict(), "")) == []
    files = sum(file.stat().st_size for file in tmp_path.glob("saved/*/*.safetensors"))
    assert files < 1.5 * sum(value.nbytes for value in alone.state_dict().values())


# --- refusals -------------------------------------------------------------------------------------


def on_machines(rank: int, count: int, plan: Plan, folder: Path) -> str:
    """Words of a rank where the second one is on another machine."""
    common_memory._machine = lambda: (f"node-{rank}", "")
    try:
        made(plan, rank, folder)
    except ProtrainError as error:
        return str(error)
    return "nothing was raised"


def test_a_copy_is_for_ranks_of_one_machine(tmp_path: Path, assert_says: Speaker) -> None:
    plan = plan_on(2, decided(SUBJECT.units(), KEEP, COMMON))
    told = run_ranks(on_machines, 2, tmp_path, plan, tmp_path)
    # Who hears it of the other rank first says so.
    first = next(each for each in told if each.startswith("settings.group"))
    assert all(first.partition(": ")[2] in each for each in told)
    assert_says(first)
