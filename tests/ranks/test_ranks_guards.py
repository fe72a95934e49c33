"""Faults between ranks end with a message, on all of them, within a time limit."""

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from protrain_runtime import full_parameters, load, prepare, restore, save
from protrain_runtime.checkpoint.index import INDEX
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import PERSISTENT, Placement, Plan, Schedule
from protrain_runtime.devices.preflight import Room, for_each
from protrain_runtime.diagnostics.matching import model_fingerprint
from protrain_runtime.ranks.failure import RanksError
from tests.support.messages import Speaker
from tests.support.ranks_cases import (
    end_ranks,
    ranks_on_every_device,
    ranks_on_every_device_at_night,
    run_ranks,
)
from tests.support.routed_model import (
    SHARED,
    State,
    against_ddp,
    batch,
    built,
    made,
    plan_of,
    routed,
    same,
    state_of,
    step,
)
from tests.support.runtime_cases import ADAMW, LARGE, device

# --- what only some ranks do ------------------------------------------------------------------


@pytest.mark.nightly
@ranks_on_every_device
def test_gradients_that_some_ranks_have_and_running_statistics_match_ddp_bitwise(
    tmp_path: Path,
) -> None:
    assert run_ranks(routed, 2, tmp_path) == [[], []]


OVERFLOWS = [(0, 0), (None, 3), (1, 0), (0, 15), (None, 9), (1, 15)]
"""By step: the rank on which one gradient overflows, if any, and the row of the embedding that it
is in. Of two ranks that share an embedding of 16 rows, one has row 0 and the other row 15."""


def scaled(rank: int, count: int, places: Sequence[tuple[Placement, ...]]) -> list[list[str]]:
    """By plan, where losses, states and loss scales differ from DistributedDataParallel's."""

    def play(model: nn.Module, _: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        scaler = torch.amp.GradScaler(device().type, init_scale=1024.0, growth_interval=10)
        seen: list[Any] = []
        for number, (who, token) in enumerate(OVERFLOWS):
            tokens = batch(10 * number + rank)
            tokens[0] = token
            loss = model(tokens, 0, 3e38 if rank == who else 0.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [loss.detach(), scaler.get_scale()]
        assert seen[1::2] == [512.0, 512.0, 256.0, 128.0, 128.0, 64.0]
        return seen

    plans = [
        lambda plain, place=place: plan_of(plain, count, place, updates="after backward")
        for place in places
    ]
    return against_ddp(plans, play)


@pytest.mark.nightly("cpu")
@ranks_on_every_device_at_night
def test_a_step_that_overflows_on_one_rank_is_skipped_by_all(tmp_path: Path) -> None:
    """Whichever rank has the part in which it overflows; bitwise what DDP and its scaler do."""
    places = [(place,) for place in (*SHARED, Placement(tier="host"))]
    assert run_ranks(scaled, 2, tmp_path, places) == [[[]] * len(places)] * 2


def evaluated_between(rank: int, count: int, lead: int) -> list[list[str]]:
    """Differences from DistributedDataParallel, evaluated between forwards and backwards."""

    def plan(plain: nn.Module) -> Plan:
        made = plan_of(plain, count, (*SHARED, Placement(tier="host")))
        schedule = Schedule(forward_lead=lead, backward_lead=lead)
        return replace(made, units=tuple(replace(unit, schedule=schedule) for unit in made.units))

    def play(model: nn.Module, plain: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for number in range(3):
            tokens = batch(rank + number)
            loss = model(tokens, 0)
            plain.eval()
            with torch.no_grad():
                seen.append(plain(tokens.flip(0), 1))
            assert not seen[-1].requires_grad
            plain.train()
            (loss - seen[-1]).square().backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    return against_ddp([plan], play)


@pytest.mark.nightly("1-cpu", "1-emulated")
@ranks_on_every_device
@pytest.mark.parametrize(
    "lead", [1, *(pytest.param(lead, marks=pytest.mark.slow) for lead in (0, LARGE))]
)
def test_ranks_evaluate_between_a_forward_and_its_backward(lead: int, tmp_path: Path) -> None:
    assert run_ranks(evaluated_between, 2, tmp_path, lead) == [[[]], [[]]]


# --- before the first collective --------------------------------------------------------------


def without_one(rank: int, count: int) -> None:
    if rank != 1:
        made(rank, count, SHARED, limit_s=2)


@pytest.mark.nightly
def test_a_rank_that_does_not_come_is_told_by_its_number(
    tmp_path: Path, assert_says: Speaker
) -> None:
    ended = end_ranks(without_one, 2, tmp_path)
    assert_says(ended[0].error)


def late(rank: int, count: int) -> str:
    """Rank 1 comes when rank 0 has given up; then all come."""
    refused = ""
    if rank == 1:
        store = PrefixStore("protrain/0-1/1", dist.distributed_c10d._get_default_store())
        store.wait(["failed/1"], timedelta(seconds=60))
    try:
        made(rank, count, SHARED, limit_s=2)
    except RanksError as error:
        refused = str(error)
    made(rank, count, SHARED)
    return refused


@pytest.mark.nightly
def test_a_rank_that_comes_too_late_is_told_so_and_all_may_come_again(tmp_path: Path) -> None:
    first, second = run_ranks(late, 2, tmp_path)
    assert first.startswith("rank 1 of 2 did not reach prepare() within 2 s")
    assert second.startswith(f"rank 0 failed in prepare(): {first.splitlines()[0]}")


@pytest.mark.parametrize(
    ("count", "nodes"), [(1, 1), (2, 1), (4, 2)], ids=["one device", "no launcher", "no nodes"]
)
def test_who_is_alone_shares_with_nobody(count: int, nodes: int, assert_says: Speaker) -> None:
    assert_says.refused(made, 0, count, SHARED, num_nodes=nodes)


def in_tensor_parallel(rank: int, count: int) -> None:
    model = built()
    plan = plan_of(model, count, SHARED)
    mesh = init_device_mesh("cpu", (count,))
    parallelize_module(model.head, mesh, ColwiseParallel())
    prepare(model, replace(plan, model_fingerprint=model_fingerprint(model)), optimizer=ADAMW)


@pytest.mark.nightly
def test_tensor_parallel_parameters_are_refused(tmp_path: Path) -> None:
    for end in end_ranks(in_tensor_parallel, 2, tmp_path):
        assert end.error.startswith(
            "the parameter 'head.weight' is a DTensor: it is spread over devices already, and a"
            " chunk is made of whole parameters\n"
        ), end.error


# --- on the way -------------------------------------------------------------------------------


def dying(rank: int, count: int) -> None:
    model, optimizer = made(rank, count, SHARED, limit_s=4)
    for number in range(4):
        if (number, rank) == (2, 1):
            os._exit(7)
        step(model, optimizer, number, rank)


@pytest.mark.nightly("2")
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_others_end_when_a_rank_dies(count: int, tmp_path: Path) -> None:
    for rank, end in enumerate(end_ranks(dying, count, tmp_path)):
        if rank == 1:
            assert (end.exit_code, end.error) == (7, "")
            continue
        assert re.fullmatch(
            rf"(all-gather|broadcast|reduce|all-reduce).* failed on lane 'collect': rank {rank} of"
            rf" {count} waited for the others( for 4 s)?: one of them ended, hangs, or has taken"
            r" another path\n"
            r"  fix: see what that rank said last; start all ranks again, from a checkpoint",
            end.error,
        ), end.error


def hanging(rank: int, count: int) -> str:
    model, optimizer = made(rank, count, SHARED, limit_s=2)
    step(model, optimizer, 0, rank)
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["rank 0 has ended"])
        return ""
    try:
        step(model, optimizer, 1, rank)
    except ProtrainError as error:
        return str(error)
    finally:
        dist.distributed_c10d._get_default_store().set("rank 0 has ended", "1")
    return "nothing was raised"


@pytest.mark.nightly
def test_a_rank_that_takes_another_path_is_waited_for_and_no_longer(
    tmp_path: Path, assert_says: Speaker
) -> None:
    told = run_ranks(hanging, 2, tmp_path)[0]
    assert_says(told.split("'collect': ")[1])


def refusing(rank: int, count: int, misuse: str) -> str:
    options: dict[str, Any] = {"micro_batches": 2 if misuse == "early" else 1}
    if misuse == "replace":
        options["updates"] = "after backward"
    model, optimizer = made(rank, count, SHARED, **options)
    tokens = torch.arange(8, device=device())
    try:
        model(tokens, 0).backward()
        if misuse == "replace":
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def reading_early(rank: int, count: int) -> str:
    """A rank reports a gradient that it has after the sum, and the other one before."""
    plain = built()
    if rank == 1:  # its first part reads what the last block alone has read
        bias = plain.get_parameter("blocks.2.experts.1.bias")
        plain.embed.register_forward_hook(lambda *given: given[-1] + bias)
    model, _ = prepare(plain, plan_of(plain, count, (PERSISTENT,)), optimizer=ADAMW)
    try:
        model(batch(rank), 1 - rank).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_gradient_that_comes_after_the_sum_is_no_part_of_it_and_refused(tmp_path: Path) -> None:
    said = run_ranks(reading_early, 2, tmp_path)[1]
    assert said.startswith("a gradient of 'blocks.2.experts.1.bias' came after the ranks had added")


MISUSES = {
    "early": "optimizer.step() was called after 1 of 2 micro-batches: this plan sums gradients over"
    " the devices in backward 2. Run 2 per step",
    "replace": "a gradient was replaced between backward() and optimizer.step(): on several devices"
    " each one has a part of it; clip it, unscale it, or set it to None",
}


@pytest.mark.nightly
@pytest.mark.parametrize("misuse", MISUSES)
def test_loops_that_would_compute_something_else_are_refused(misuse: str, tmp_path: Path) -> None:
    for told in run_ranks(refusing, 2, tmp_path, misuse):
        assert told.startswith(MISUSES[misuse]), told


def drops_one(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(batch(rank + 5), 0).backward()
    optimizer.zero_grad()


def adds_two(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    with getattr(model, "no_sync", nullcontext)():
        model(batch(rank + 5), 0).backward()


def clips(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """The last step before the others, which is clipped."""
    model(batch(rank + 5), 0).backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    assert norm > 0.1
    # Of parts, a norm has other last bits than of the whole, by the processor's vectors.
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm.round(decimals=3))
    optimizer.step()
    optimizer.zero_grad()


def has_none(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(batch(rank + 5), 0).backward()
    for parameter in model.parameters():
        parameter.grad = None
    optimizer.step()


CLIP = {"updates": "after backward"}
FOLLOWED: dict[str, tuple[dict[str, Any], Callable[..., None]]] = {
    "twice: zero_grad": (CLIP, drops_one),
    "twice, early: as many micro-batches": ({"micro_batches": 2}, adds_two),
    "replace: clip": (CLIP, clips),
    "replace: None": (CLIP, has_none),
}


def following(rank: int, count: int, name: str) -> list[list[str]]:
    """Differences from DistributedDataParallel of loops that do what messages say."""
    options, before = FOLLOWED[name]

    def play(model: nn.Module, _: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen = []
        for number in range(3):
            before(model, optimizer, rank)
            seen.append(step(model, optimizer, number, rank))
        return seen

    return against_ddp([lambda plain: plan_of(plain, count, SHARED, **options)], play)


def following_each(rank: int, count: int) -> dict[str, list[list[str]]]:
    return {name: following(rank, count, name) for name in FOLLOWED}


def test_loops_compute_what_ddp_does_when_the_message_is_followed(tmp_path: Path) -> None:
    assert run_ranks(following_each, 2, tmp_path) == [{name: [[]] for name in FOLLOWED}] * 2


def another_optimizer(rank: int, count: int) -> None:
    model = built(rank)
    prepare(model, plan_of(model, count, SHARED), optimizer=(ADAMW, torch.optim.SGD)[rank])


def in_another_call(rank: int, count: int) -> None:
    model, _ = made(rank, count, SHARED)
    if rank == 1:
        restore(model)
    with full_parameters(model):
        pass


DIFFERENT: dict[str, Callable[[int, int], object]] = {
    "the same plan": lambda rank, count: made(rank, count, (SHARED, (PERSISTENT,))[rank]),
    "the same optimizer": another_optimizer,
    "a plan for two": lambda rank, _: made(rank, 1, (PERSISTENT,)),
    "the same calls": in_another_call,
    "a wrapper: a plan for two": lambda rank, count: nn.parallel.DistributedDataParallel(
        made(rank, count, SHARED)[0]
    ),
}
"""Uses that ranks are refused, after which a loop that they have in common trains."""


def mending(rank: int, count: int, name: str) -> tuple[str, list[list[str]]]:
    try:
        DIFFERENT[name](rank, count)
    except (ProtrainError, RuntimeError) as error:
        said = str(error)
    return said, following(rank, count, "replace: clip")


@pytest.mark.nightly(but=("the same plan",))
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_train_as_ddp_when_all_do_what_the_message_says(
    name: str, tmp_path: Path, assert_says: Speaker
) -> None:
    said, differences = zip(*run_ranks(mending, 2, tmp_path, name), strict=True)
    assert_says([re.sub(r"sha256:\w+", "sha256:...", one) for one in said])
    assert differences == ([[]], [[]])


def test_ranks_of_a_machine_share_its_memory_and_its_disk() -> None:
    room = Room(memory_bytes=101, swap_bytes=10, disk_bytes=50, data_limit=40, device_bytes=30)
    assert for_each(room, 2) == replace(room, memory_bytes=50, swap_bytes=5, disk_bytes=25)


# --- a rank that is killed: all are started anew, and nothing is lost or changed ------------------

ALL_PLACES: tuple[Placement, ...] = (
    PERSISTENT,
    Placement(tier="device"),
    Placement(tier="host", keep_gathered=True),
    Placement(tier="disk"),
)
NUM_STEPS, EVERY, KILLED_AT = 7, 2, 4


def training(rank: int, count: int, folder: Path, killed: str) -> State:
    """Seven steps, from the last checkpoint on, saved after every second one."""
    model, optimizer = made(rank, count, ALL_PLACES, limit_s=10)
    first = 0
    if (folder / INDEX).exists():
        first = load(model, optimizer, folder)["step"]
        assert first == KILLED_AT
    for number in range(first, NUM_STEPS):
        if killed == "in backward" and (number, rank) == (KILLED_AT, 1):
            model.get_submodule("blocks.0").register_full_backward_hook(lambda *_: kill())
        step(model, optimizer, number, rank)
        if (number + 1) % EVERY == 0:
            if killed == "while it saves" and (number, rank) == (KILLED_AT + 1, 1):
                kill_on_opening(".safetensors")
            save(model, optimizer, folder, extra={"step": number + 1})
    return state_of(model, optimizer)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_on_opening(part: str) -> None:
    """Let this process end when it opens a file to write it, with this in its name."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and part in str(arguments[0]):
            _, mode, flags = arguments  # of `open`, and of `os.open`
            if "w" in str(mode) or flags & (os.O_WRONLY | os.O_RDWR):
                kill()

    sys.addaudithook(hook)


LAST_WORDS = {
    "in backward": r"reduce-scatter \d @\d failed on lane 'collect': ",
    "while it saves": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("killed", LAST_WORDS)
def test_a_rank_is_killed_and_all_resume_bitwise(killed: str, tmp_path: Path) -> None:
    undisturbed = run_ranks(training, 2, tmp_path / "a", tmp_path / "undisturbed", "never")
    ended = end_ranks(training, 2, tmp_path / "b", tmp_path / "saved", killed)
    assert (ended[1].exit_code, ended[1].error) == (-signal.SIGKILL, "")
    assert re.fullmatch(
        rf"{LAST_WORDS[killed]}rank 0 of 2 waited for the others: one of them ended, hangs, or has"
        r" taken another path\n"
        r"  fix: see what that rank said last; start all ranks again, from a checkpoint",
        ended[0].error,
    ), ended[0].error
    resumed = run_ranks(training, 2, tmp_path / "c", tmp_path / "saved", "never")
    for found, expected in zip(resumed, undisturbed, strict=True):
        same(found, expected)
