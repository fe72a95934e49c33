"""`check="bitwise"` and `check="spills"`: silent where all is well, a stop where a bit is not."""

import copy
import os
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain_runtime import MovingAverage, full_parameters, load, restore, save
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import Lane
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
    Updates,
)
from protrain_runtime.devices.lanes import Backend, LaneError, nothing
from protrain_runtime.devices.stores import (
    BLOCK_BYTES,
    CheckedDiskStore,
    CheckedHostStore,
    DiskStore,
    HostStore,
    Store,
)
from protrain_runtime.diagnostics.checking import CHECKED_STEPS, DifferenceError
from protrain_runtime.model.prepared import prepared_of
from protrain_runtime.states.chunks import Chunk
from tests.support.cards import every_device
from tests.support.faults import file_limit, spill_descriptor
from tests.support.functional_model import FunctionalBlock
from tests.support.runtime_cases import (
    CATALOGUE,
    FRACTIONAL,
    assert_bitwise,
    decided,
    decision_name,
    delays,
    described,
    mixed,
    weight_decay_groups,
)
from tests.support.scenario import Loop, Run, Scenario, Units, refusal, restored
from tests.support.thinning import thinned

NAME = "llama-tied"
UNITS = len(described(NAME))
TIERS: tuple[TierName, ...] = ("host", "disk")

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


# --- a plain copy beside the plan -----------------------------------------------------------------

STOP = (
    "\n  fix: see whether the model computes the same twice (torch.use_deterministic_algorithms)"
    " and keeps no state between forwards; report it if it does"
)


def copied_beside(model: Any = NAME, updates: Updates = "in backward", **options: Any) -> Scenario:
    return Scenario(
        model=model,
        units=options.pop("units", partial(all_on_disk)),
        settings={"updates": updates, **options.pop("settings", {})},
        options={"check": "bitwise"},
        **options,
    )


def all_on_disk(units: Units) -> Units:
    return decided(units, RECOMPUTE, Placement(tier="disk"))


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "functional"])
def test_a_checked_run_is_the_plain_run(name: str, tmp_path: Path) -> None:
    """gpt2 has dropout: the copy's random numbers are the model's, and cost it none."""
    copied_beside(
        name, units=lambda units: mixed(units, random.Random(3), "disk", "host")
    ).assert_like_plain(tmp_path, restored)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize("updates", ["in backward", "after backward"])
def test_micro_batches_clipping_groups_and_schedules_are_checked_too(
    updates: Updates, tmp_path: Path
) -> None:
    script = Loop(
        num_steps=CHECKED_STEPS,
        micro_batches=2,
        clips=0.1 if updates == "after backward" else None,
        scheduler=halving,
    )
    copied_beside(
        updates=updates,
        settings={"micro_batches": 2},
        groups=weight_decay_groups,
        script=script,
    ).assert_like_plain(tmp_path)


class CountingBlock(FunctionalBlock):
    """Computes something else in every forward: recomputed, it is not the same."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(hidden + self.calls)


def counting(model: nn.Module) -> None:
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    blocks[1] = CountingBlock(96)


@pytest.mark.parametrize(
    ("updates", "what"), [("in backward", "parameter"), ("after backward", "gradient of")]
)
def test_a_block_that_computes_something_else_again_is_stopped(
    updates: Updates, what: str, tmp_path: Path
) -> None:
    """Its own seven gradients are wrong, those of the block before, and that of the embedding."""
    functional = CATALOGUE["functional"]
    asked = copied_beside(
        replace(functional, change=counting), updates, units=all_on_disk(functional.units())
    )
    assert str(refusal(partial(asked.start(tmp_path).step, 0), DifferenceError)) == (
        f"step 1 differs from plain PyTorch: {what} embedding and of 14 more" + STOP
    )


def test_parameters_that_somebody_else_changes_are_a_difference(tmp_path: Path) -> None:
    """Loading other weights is not a step: the next forward's output differs from the copy's."""
    run = copied_beside("functional").start(tmp_path)
    run.step(0)
    run.model.load_state_dict(run.subject.build(1).state_dict())
    assert str(refusal(partial(run.step, 1), DifferenceError)) == (
        "step 2 differs from plain PyTorch: output 1 of the forward" + STOP
    )


# --- sums of what is spilled ----------------------------------------------------------------------


def summed(
    activations: Activations = KEEP,
    states: Placement = PERSISTENT,
    *,
    clipped: bool = False,
    **options: Any,
) -> Scenario:
    options.setdefault("units", lambda units: decided(units, activations, states))
    return Scenario(
        settings={"updates": "after backward" if clipped else "in backward"},
        options={"check": "spills", "lane_delay": delays(0)},
        **options,
    )


def assert_trained(run: Run, *numbers: int) -> None:
    """As plain PyTorch with these batches."""
    plain = summed().start()
    plain.step(*numbers)
    assert_bitwise(run.outcome(), plain.outcome())


SOUND = [
    (Activations(tier="disk"), Placement(tier="host"), False),
    (Activations(tier="host"), Placement(tier="disk", keep_gathered=True), False),
    (Activations(tier="host", form="full"), Placement(tier="disk"), True),
    (Activations(tier="disk", form="lite"), Placement(tier="host", keep_gathered=True), True),
    (Activations(form="attn"), Placement(tier="host"), True),
    (Activations(tier="disk"), PERSISTENT, False),
]


@every_device
@pytest.mark.parametrize(("activations", "states", "clipped"), SOUND, ids=decision_name)
def test_checked_steps_match_plain_torch_bitwise(
    activations: Activations, states: Placement, clipped: bool, tmp_path: Path
) -> None:
    summed(activations, states, clipped=clipped).assert_like_plain(tmp_path)


@every_device
@pytest.mark.parametrize("seed", range(2))
def test_mixed_plans_match_plain_torch_bitwise(seed: int, tmp_path: Path) -> None:
    """Every unit decided by itself, transfers in fractions, dropout, other strides and dtypes."""

    def units(given: Units) -> Units:
        found = mixed(given, random.Random(seed), "host", "disk")
        return [replace(unit, schedule=FRACTIONAL[0]) for unit in found] if seed else found

    summed(model="functional", units=units).assert_like_plain(tmp_path)


@pytest.mark.parametrize("tier", TIERS)
def test_whoever_writes_keeps_the_sums(tier: TierName, tmp_path: Path) -> None:
    """Checkpoints, state dicts, averages and changes by hand, between steps that check them."""
    run = summed(Activations(tier=tier), Placement(tier=tier)).start(tmp_path)
    model, optimizer = run.model, run.optimizer
    average = MovingAverage(model)
    run.step(0, 1)
    save(model, optimizer, tmp_path / "checkpoint")
    state, states = model.state_dict(), optimizer.state_dict()
    average.update()
    run.step(7)
    average.update()
    with average.applied():
        run.look(1)
    with full_parameters(model, modify=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    load(model, optimizer, tmp_path / "checkpoint")
    run.step(2, 8)
    model.load_state_dict(state)
    optimizer.load_state_dict(states)
    run.step(2)
    assert torch.equal(run.seen[-1], run.seen[-3])
    run.seen[2:] = run.seen[-1:]
    run.step(3, 4)
    assert_trained(run, 0, 1, 2, 3, 4)
    trained = run.values()
    restore(model)
    assert torch.equal(model.state_dict()["lm_head.weight"], trained["lm_head.weight"])


# --- damage ---------------------------------------------------------------------------------------

BLOCK = "model.layers.2"
WEIGHT = f"{BLOCK}.mlp.up_proj.weight"


def flip_bit(store: Store, offset: int, bit: int = 5) -> None:
    """In the spill file itself, or in the memory that is the host's tier."""
    if isinstance(store, DiskStore):
        # Opened anew: direct I/O, which the store may have, takes no single bytes.
        descriptor = os.open(f"/proc/self/fd/{store._file.fileno()}", os.O_RDWR)
        (found,) = os.pread(descriptor, 1, offset)
        assert os.pwrite(descriptor, bytes([found ^ 1 << bit]), offset) == 1
        os.close(descriptor)
    else:
        assert isinstance(store, HostStore)
        store.view(offset, 1).bitwise_xor_(1 << bit)


def chunk_of(model: nn.Module, unit: str = BLOCK) -> Chunk:
    prepared = prepared_of(model)
    assert prepared is not None
    return next(c for c in prepared.chunks if prepared.plan.units[c.unit].name == unit)


def damage(model: nn.Module, what: str) -> None:
    """Flip a bit in the middle of what the store has of WEIGHT."""
    chunk = chunk_of(model)
    part = next(part for part in chunk.slices if part.name == WEIGHT)
    middle = part.num_bytes // 2
    if what == "gradient":
        assert chunk.gradient_store is not None
        place = chunk.gradient_offset + part.start * part.dtype.itemsize
        flip_bit(chunk.gradient_store, place + middle)
        return
    assert chunk.store is not None
    starts = {layout.key: layout.offset + part.start * 4 for layout in chunk.current.states}
    flip_bit(
        chunk.store, {"parameter": chunk.current.offset + part.offset, **starts}[what] + middle
    )


WHERE = {"host": "in host memory", "disk": "on disk"}
STATES = [
    (tier, what, lane)
    for tier in TIERS
    for what, lane in (
        ("parameter", f"fetch {tier}"),
        ("exp_avg", "update host" if tier == "host" else "read disk"),
        ("exp_avg_sq", "update host" if tier == "host" else "read disk"),
    )
]


@linux
@pytest.mark.parametrize(("tier", "what", "lane"), STATES)
def test_a_bit_of_a_state_is_found_before_it_is_used(
    tier: TierName, what: str, lane: str, tmp_path: Path
) -> None:
    run = summed(states=Placement(tier=tier)).start(tmp_path)
    run.step(0, 1)
    damage(run.model, what)
    error = refusal(partial(run.step, 2), LaneError)
    message = error.message
    assert f" failed on lane '{lane}': spilled bytes {WHERE[tier]} are not those that" in message
    assert WEIGHT in message or f"{BLOCK}.mlp." in message  # a block holds several
    assert what in message and message.endswith(f", of unit '{BLOCK}'")
    assert error.source == (str(tmp_path) if tier == "disk" else None)
    assert error.fix is not None and error.fix.endswith("from a checkpoint")
    refusal(partial(run.step, 3))  # and no later step trains on


@linux
@every_device
@pytest.mark.parametrize("tier", TIERS)
def test_a_bit_of_a_gradient_that_waits_is_found(tier: TierName, tmp_path: Path) -> None:
    run = summed(states=Placement(tier=tier), clipped=True).start(tmp_path)
    run.step(0)
    run.backward(1)
    damage(run.model, "gradient")
    message = refusal(run.optimizer.step, LaneError).message
    where = WHERE["disk" if isinstance(chunk_of(run.model).gradient_store, DiskStore) else "host"]
    assert f"spilled bytes {where} are not those that were written: " in message
    assert "gradient of " in message and message.endswith(f", of unit '{BLOCK}'")


@linux
@every_device
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("swaps_input", [False, True])
def test_a_bit_of_a_swapped_activation_is_found(
    swaps_input: bool, tier: TierName, tmp_path: Path
) -> None:
    """It is flipped when all have left; the step is given up, and the next is a plain one."""
    decision = Activations(tier=tier, form="full") if swaps_input else Activations(tier=tier)
    run = summed(decision).start(tmp_path)
    engine = run.engine
    unit = next(n for n, unit in enumerate(described(NAME)) if unit.name == BLOCK)

    def observe(what: str) -> None:
        if what == f"slot {UNITS}":
            engine.lanes[Lane("spill", tier)].submit("the end", nothing, ()).synchronize()
            flip_bit(engine._moves._swap_stores[tier], engine._moves._swap_regions[unit][0][0] + 99)

    run.step(0)
    engine.observer = observe
    message = refusal(partial(run.step, 1), LaneError).message
    engine.observer = None
    assert message.startswith(f"swap in {unit} @")
    assert message.endswith(
        f" failed on lane 'fetch {tier}': spilled bytes {WHERE[tier]} are not those that were"
        f" written: swapped activations, of unit '{BLOCK}'"
    )
    run.optimizer.zero_grad()
    del run.seen[1:]
    run.step(2, 3)
    assert_trained(run, 0, 2, 3)


READS: dict[str, Callable[[Run, Path], object]] = {
    "state_dict": lambda run, _: run.model.state_dict(),
    "optimizer.state_dict": lambda run, _: run.optimizer.state_dict(),
    "save": lambda run, folder: save(run.model, run.optimizer, folder / "checkpoint"),
    "full_parameters": lambda run, _: full_parameters(run.model).__enter__(),
    "evaluation": lambda run, _: run.look(1),
    "copy": lambda run, _: copy.deepcopy(run.model),
    "restore": lambda run, _: restore(run.model),
}


@linux
@pytest.mark.parametrize(("use", "tier"), thinned(tuple(READS), TIERS, every=2))
def test_whoever_reads_finds_a_bit(use: str, tier: TierName, tmp_path: Path) -> None:
    run = summed(states=Placement(tier=tier)).start(tmp_path)
    run.step(0)
    damage(run.model, "exp_avg" if use == "optimizer.state_dict" else "parameter")
    message = refusal(partial(READS[use], run, tmp_path), ProtrainError).message
    assert message.startswith(f"spilled bytes {WHERE[tier]} are not those that were")
    assert message.endswith(f", of unit '{BLOCK}'")


@linux
def test_a_full_disk_costs_a_checked_step_and_nothing_else(tmp_path: Path) -> None:
    """A write that is left half done is neither trusted nor in the way of the next."""
    run = summed(Activations(tier="disk"), Placement(tier="disk")).start(tmp_path)
    states = os.fstat(spill_descriptor(tmp_path)).st_size
    with file_limit(states), pytest.raises(ProtrainError, match="no room for "):
        run.step(0)
    run.seen.clear()
    run.step(0, 1)
    assert_trained(run, 0, 1)


def test_an_unknown_check_is_refused(tmp_path: Path) -> None:
    asked = replace(summed(), options={"check": "spill"})
    error = refusal(partial(asked.start, tmp_path), ProtrainError)
    assert (error.key, error.message) == ("check", "there is no check 'spill'")


# --- the sums themselves --------------------------------------------------------------------------

SIZES = (3 * BLOCK_BYTES + 17, 1, 0, BLOCK_BYTES, 5000, 2 * BLOCK_BYTES)


def opened(tier: str, folder: Path) -> tuple[CheckedHostStore | CheckedDiskStore, list[int]]:
    backend = Backend(torch.device("cpu"))
    store: CheckedHostStore | CheckedDiskStore
    if tier == "host":
        store = CheckedHostStore(backend, lambda _, start, stop: f"{start}:{stop}")
    else:
        store = CheckedDiskStore(folder, backend, lambda _, start, stop: f"{start}:{stop}")
    return store, [store.reserve(size) for size in SIZES]


def some_bytes(rng: random.Random, count: int) -> torch.Tensor:
    return torch.tensor(list(rng.randbytes(count)), dtype=torch.uint8)


def some_range(rng: random.Random, starts: list[int]) -> tuple[int, int]:
    """Any range of a region, those that begin or end with a block among them."""
    region = rng.choice([number for number, size in enumerate(SIZES) if size])
    edges = [*range(0, SIZES[region], BLOCK_BYTES), SIZES[region], rng.randint(0, SIZES[region])]
    low, high = sorted(rng.choice([e, rng.randint(0, SIZES[region])]) for e in rng.sample(edges, 2))
    return starts[region] + low, high - low


@pytest.mark.parametrize("tier", TIERS)
def test_any_reads_and_writes_agree_with_memory_and_any_bit_is_found(
    tier: str, tmp_path: Path
) -> None:
    rng = random.Random(0)
    store, starts = opened(tier, tmp_path)
    memory = torch.zeros(store.num_bytes, dtype=torch.uint8)  # what was never written is zeros
    for number in range(400):
        offset, count = some_range(rng, starts)
        target = torch.empty(count, dtype=torch.uint8)
        match rng.choice(["read", "write", "in place", "damage"]):
            case "write":
                memory[offset : offset + count] = source = some_bytes(rng, count)
                store.write(offset, source)
            case "in place" if isinstance(store, CheckedHostStore) and count:
                with store.in_place(offset, count) as held:
                    held.add_(number % 256)
                memory[offset : offset + count] += number % 256
            case "damage" if count:
                place, bit = offset + rng.randrange(count), rng.randrange(8)
                flip_bit(store, place, bit)
                with pytest.raises(ProtrainError) as caught:
                    store.read(offset, target)
                start, stop = map(int, caught.value.message.rpartition(" ")[2].split(":"))
                assert start <= place < stop
                flip_bit(store, place, bit)
            case _:
                store.read(offset, target)
                assert torch.equal(target, memory[offset : offset + count])
    store.close()


@pytest.mark.parametrize("tier", TIERS)
def test_a_write_beside_a_damaged_byte_does_not_make_it_a_good_one(
    tier: str, tmp_path: Path
) -> None:
    store, starts = opened(tier, tmp_path)
    flip_bit(store, starts[0] + 10)
    with pytest.raises(ProtrainError, match="are not those that were written: 0:"):
        store.write(starts[0] + 20, torch.ones(10, dtype=torch.uint8))
    store.write(starts[0], torch.ones(BLOCK_BYTES, dtype=torch.uint8))  # all of the block
    store.read(starts[0] + 5, torch.empty(10, dtype=torch.uint8))
    store.close()


@pytest.mark.parametrize("tier", TIERS)
def test_threads_share_a_block(tier: str, tmp_path: Path) -> None:
    """Each writes and reads a range of its own, and all are in the same two blocks."""
    store, starts = opened(tier, tmp_path)
    size = 2 * BLOCK_BYTES // 4
    wrong: list[object] = []

    def use(thread: int) -> None:
        rng = random.Random(thread)
        target = torch.empty(size, dtype=torch.uint8)
        for _ in range(40):
            source = some_bytes(rng, size)
            try:
                place = starts[0] + thread * size
                if isinstance(store, CheckedHostStore) and rng.random() < 0.3:
                    with store.in_place(place, size) as held:
                        held.copy_(source)
                else:
                    store.write(place, source)
                store.read(place, target)
                assert torch.equal(source, target)
            except (ProtrainError, AssertionError) as error:
                wrong.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    store.close()


def test_a_write_that_failed_is_not_read_as_one_that_did_not(tmp_path: Path) -> None:
    store, starts = opened("disk", tmp_path)
    source = some_bytes(random.Random(1), SIZES[0])
    target = torch.empty_like(source)
    with file_limit(starts[0] + BLOCK_BYTES + 1000), pytest.raises(ProtrainError, match="written"):
        store.write(starts[0], source)
    with pytest.raises(ProtrainError, match="were not written to their end"):
        store.read(starts[0], target)
    store.write(starts[0], source)
    store.read(starts[0], target)
    assert torch.equal(source, target)
    store.close()
