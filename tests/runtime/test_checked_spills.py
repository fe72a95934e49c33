"""`check="spills"`: silent and bitwise where all is well, a stop before a damaged byte is used."""

import copy
import os
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import MovingAverage, full_parameters, load, prepare, restore, save
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import Lane
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    Activations,
    Keep,
    Offload,
    Persistent,
    Placement,
    Plan,
    Recompute,
    Swap,
    SwapInput,
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
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.model.prepared import engine_of, prepared_of
from protrain_runtime.states.chunks import Chunk
from tests.support.cards import every_device
from tests.support.faults import file_limit, spill_descriptor
from tests.support.runtime_cases import (
    ADAMW,
    FRACTIONAL,
    Outcome,
    assert_bitwise,
    batch,
    build,
    decided,
    decision_name,
    delays,
    described,
    mixed,
    outcome,
    plain,
    plan_for,
    step,
    train,
)
from tests.support.thinning import thinned

NAME = "llama-tied"
UNITS = len(described(NAME))
TIERS: tuple[TierName, ...] = ("host", "disk")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def checked(
    plan: Callable[[nn.Module], Plan], folder: Path, name: str = NAME
) -> tuple[nn.Module, PlannedOptimizer]:
    model = build(name)
    return prepare(
        model,
        plan(model),
        optimizer=ADAMW,
        spill_directory=folder,
        check="spills",
        lane_delay=delays(0),
    )


def everywhere(
    activations: Activations, states: Placement, *, name: str = NAME, clipped: bool = False
) -> Callable[[nn.Module], Plan]:
    def plan(model: nn.Module) -> Plan:
        made = plan_for(model, decided(described(name), activations, states))
        return (
            replace(made, settings=replace(made.settings, updates="after backward"))
            if clipped
            else made
        )

    return plan


# --- all is well ----------------------------------------------------------------------------------

SOUND = [
    (Swap(tier="disk"), Offload(tier="host"), False),
    (Swap(tier="host"), Offload(tier="disk", keep_gathered=True), False),
    (SwapInput(tier="host", form="full"), Offload(tier="disk"), True),
    (SwapInput(tier="disk", form="lite"), Offload(tier="host", keep_gathered=True), True),
    (Recompute(form="attn"), Offload(tier="host"), True),
    (Swap(tier="disk"), Persistent(), False),
]


@every_device
@pytest.mark.parametrize(("activations", "states", "clipped"), SOUND, ids=decision_name)
def test_checked_steps_match_plain_torch_bitwise(
    activations: Activations, states: Placement, clipped: bool, tmp_path: Path
) -> None:
    model, optimizer = checked(everywhere(activations, states, clipped=clipped), tmp_path)
    assert_bitwise(train(NAME, model, optimizer), plain(NAME))


@every_device
@pytest.mark.parametrize("seed", range(2))
def test_mixed_plans_match_plain_torch_bitwise(seed: int, tmp_path: Path) -> None:
    """Every unit decided by itself, transfers in fractions, dropout, other strides and dtypes."""

    def plan(model: nn.Module) -> Plan:
        units = mixed(described("functional"), random.Random(seed), "host", "disk")
        if seed:
            units = tuple(replace(unit, schedule=FRACTIONAL[0]) for unit in units)
        return plan_for(model, units)

    model, optimizer = checked(plan, tmp_path, "functional")
    assert_bitwise(train("functional", model, optimizer), plain("functional"))


@pytest.mark.parametrize("tier", TIERS)
def test_whoever_writes_keeps_the_sums(tier: TierName, tmp_path: Path) -> None:
    """Checkpoints, state dicts, averages and changes by hand, between steps that check them."""
    model, optimizer = checked(everywhere(Swap(tier=tier), Offload(tier=tier)), tmp_path)
    average = MovingAverage(model)
    losses = [step(NAME, model, optimizer, number) for number in (0, 1)]
    save(model, optimizer, tmp_path / "checkpoint")
    state, states = model.state_dict(), optimizer.state_dict()
    average.update()
    step(NAME, model, optimizer, 7)
    average.update()
    with average.applied(), torch.no_grad():
        call_model(model, batch(NAME, 1))
    with full_parameters(model, modify=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    load(model, optimizer, tmp_path / "checkpoint")
    losses.append(step(NAME, model, optimizer, 2))
    step(NAME, model, optimizer, 8)
    model.load_state_dict(state)
    optimizer.load_state_dict(states)
    again = step(NAME, model, optimizer, 2)
    assert torch.equal(again, losses[-1])
    losses += [step(NAME, model, optimizer, number) for number in (3, 4)]
    assert_bitwise(outcome(model, optimizer, losses), plain(NAME))
    restore(model)
    assert torch.equal(
        model.state_dict()["lm_head.weight"], plain(NAME).parameters["lm_head.weight"]
    )


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


@pytest.mark.parametrize(("tier", "what", "lane"), STATES)
def test_a_bit_of_a_state_is_found_before_it_is_used(
    tier: TierName, what: str, lane: str, tmp_path: Path
) -> None:
    model, optimizer = checked(everywhere(Keep(), Offload(tier=tier)), tmp_path)
    for number in range(2):
        step(NAME, model, optimizer, number)
    damage(model, what)
    with pytest.raises(LaneError) as caught:
        step(NAME, model, optimizer, 2)
    message = caught.value.message
    assert f" failed on lane '{lane}': spilled bytes {WHERE[tier]} are not those that" in message
    assert WEIGHT in message or f"{BLOCK}.mlp." in message  # a block holds several
    assert what in message and message.endswith(f", of unit '{BLOCK}'")
    assert caught.value.source == (str(tmp_path) if tier == "disk" else None)
    assert caught.value.fix is not None and caught.value.fix.endswith("from a checkpoint")
    with pytest.raises(RuntimeError):  # and no later step trains on
        step(NAME, model, optimizer, 3)


@every_device
@pytest.mark.parametrize("tier", TIERS)
def test_a_bit_of_a_gradient_that_waits_is_found(tier: TierName, tmp_path: Path) -> None:
    plan = everywhere(Keep(), Offload(tier=tier), clipped=True)
    model, optimizer = checked(plan, tmp_path)
    step(NAME, model, optimizer, 0)
    loss_of(call_model(model, batch(NAME, 1))).backward()
    damage(model, "gradient")
    with pytest.raises(LaneError) as caught:
        optimizer.step()
    message = caught.value.message
    where = WHERE["disk" if isinstance(chunk_of(model).gradient_store, DiskStore) else "host"]
    assert f"spilled bytes {where} are not those that were written: " in message
    assert "gradient of " in message and message.endswith(f", of unit '{BLOCK}'")


@every_device
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("activations", [Swap, SwapInput])
def test_a_bit_of_a_swapped_activation_is_found(
    activations: type[Swap | SwapInput], tier: TierName, tmp_path: Path
) -> None:
    """It is flipped when all have left; the step is given up, and the next is a plain one."""
    decision = Swap(tier=tier) if activations is Swap else SwapInput(tier=tier, form="full")
    model, optimizer = checked(everywhere(decision, Persistent()), tmp_path)
    engine = engine_of(model)
    assert engine is not None
    unit = next(n for n, unit in enumerate(described(NAME)) if unit.name == BLOCK)

    def observe(what: str) -> None:
        if what == f"slot {UNITS}":
            engine.lanes[Lane("spill", tier)].submit("the end", nothing, ()).synchronize()
            flip_bit(engine._moves._swap_stores[tier], engine._moves._swap_regions[unit][0][0] + 99)

    losses = [step(NAME, model, optimizer, 0)]
    engine.observer = observe
    with pytest.raises(LaneError) as caught:
        step(NAME, model, optimizer, 1)
    engine.observer = None
    assert caught.value.message.startswith(f"swap in {unit} @")
    assert caught.value.message.endswith(
        f" failed on lane 'fetch {tier}': spilled bytes {WHERE[tier]} are not those that were"
        f" written: swapped activations, of unit '{BLOCK}'"
    )
    optimizer.zero_grad()
    losses += [step(NAME, model, optimizer, number) for number in (2, 3)]
    assert_bitwise(outcome(model, optimizer, losses), plain_steps(0, 2, 3))


def plain_steps(*numbers: int) -> Outcome:
    model = build(NAME)
    optimizer = ADAMW(model.parameters())
    return outcome(model, optimizer, [step(NAME, model, optimizer, n) for n in numbers])


READS: dict[str, Callable[[nn.Module, PlannedOptimizer, Path], object]] = {
    "state_dict": lambda model, _, __: model.state_dict(),
    "optimizer.state_dict": lambda _, optimizer, __: optimizer.state_dict(),
    "save": save,
    "full_parameters": lambda model, _, __: full_parameters(model).__enter__(),
    "evaluation": lambda model, _, __: torch.no_grad()(call_model)(model, batch(NAME, 1)),
    "copy": lambda model, _, __: copy.deepcopy(model),
    "restore": lambda model, _, __: restore(model),
}


@pytest.mark.parametrize(("use", "tier"), thinned(tuple(READS), TIERS, every=2))
def test_whoever_reads_finds_a_bit(use: str, tier: TierName, tmp_path: Path) -> None:
    model, optimizer = checked(everywhere(Keep(), Offload(tier=tier)), tmp_path)
    step(NAME, model, optimizer, 0)
    damage(model, "exp_avg" if use == "optimizer.state_dict" else "parameter")
    with pytest.raises(ProtrainError) as caught:
        READS[use](model, optimizer, tmp_path / "checkpoint")
    assert caught.value.message.startswith(f"spilled bytes {WHERE[tier]} are not those that were")
    assert caught.value.message.endswith(f", of unit '{BLOCK}'")


def test_a_full_disk_costs_a_checked_step_and_nothing_else(tmp_path: Path) -> None:
    """What a write has left half done is neither trusted nor in the way of what comes after."""
    plan = everywhere(Swap(tier="disk"), Offload(tier="disk"))
    model, optimizer = checked(plan, tmp_path)
    states = os.fstat(spill_descriptor(tmp_path)).st_size
    with file_limit(states), pytest.raises(ProtrainError, match="no room for "):
        step(NAME, model, optimizer, 0)
    losses = [step(NAME, model, optimizer, number) for number in (0, 1)]
    assert_bitwise(outcome(model, optimizer, losses), plain_steps(0, 1))


def test_an_unknown_check_is_refused() -> None:
    model = build(NAME)
    plan = everywhere(Keep(), Persistent())(model)
    with pytest.raises(ProtrainError) as caught:
        prepare(model, plan, optimizer=ADAMW, check="spill")  # type: ignore[arg-type]
    assert (caught.value.key, caught.value.message) == ("check", "there is no check 'spill'")


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
