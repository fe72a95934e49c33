"""Training under a plan computes what plain PyTorch computes: equal in every bit, no tolerance."""

import gc
import io
import random
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import prepare, restore
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.compiling import compile_plan
from protrain_runtime.contract.program.program import MAX_PIECES
from protrain_runtime.contract.records import write_plan
from protrain_runtime.contract.records.plan import (
    Activations,
    Keep,
    Offload,
    Persistent,
    Placement,
    Recompute,
    Schedule,
    StepSettings,
    Swap,
    SwapInput,
)
from protrain_runtime.devices.lanes import Backend
from protrain_runtime.devices.stores import DiskStore, HostStore
from protrain_runtime.diagnostics.matching import model_fingerprint
from protrain_runtime.engine.moves import Moves
from protrain_runtime.states.chunk_layouts import make_chunk, make_chunks
from protrain_runtime.states.chunks import offload, read_values
from protrain_runtime.states.update_rules import UpdateRules
from protrain_runtime.states.updates import UpdateTeam
from tests.support.cards import every_device
from tests.support.messages import Speaker
from tests.support.runtime_cases import (
    ADAMW,
    FRACTIONAL,
    LARGE,
    MODELS,
    PLAIN_ADAMW,
    Outcome,
    Trainer,
    assert_bitwise,
    attached,
    batch,
    build,
    copied,
    decided,
    decision_name,
    decisions,
    delays,
    described,
    differences,
    mixed,
    outcome,
    plain,
    plan_for,
    step,
    train,
    weight_decay_groups,
)
from tests.support.thinning import thinned

CPU = torch.device("cpu")


def assert_trains_bitwise(
    name: str,
    units: Any,
    tmp_path: Path,
    *,
    trainer: Trainer = PLAIN_ADAMW,
    lane_delay: Callable[[], float] | None = None,
    piece_bytes: int = 20_000,
) -> None:
    """Five steps under a plan, and the model that `restore` gives back, against plain PyTorch."""
    expected = plain(name, trainer)
    model = build(name)
    before = attached(model)
    plan = plan_for(model, units, piece_bytes=piece_bytes)
    planned, optimizer = prepare(
        model,
        plan,
        optimizer=trainer.factory,
        param_groups=trainer.groups(model),
        spill_directory=tmp_path,
        lane_delay=lane_delay,
    )
    found = train(name, planned, optimizer, scheduler=trainer.scheduler)
    assert_bitwise(found, expected)

    assert restore(planned) is model
    assert attached(model) == before
    assert list(differences(model.state_dict(), expected.parameters, "restored")) == []
    assert list(differences(optimizer.state_dict(), expected.optimizer, "restored")) == []
    assert list(tmp_path.iterdir()) == []


# --- every decision, alone and mixed --------------------------------------------------------------


@every_device
@pytest.mark.parametrize(
    ("name", "decision"), thinned(MODELS, decisions("disk"), every=18), ids=decision_name
)
def test_five_steps_match_plain_torch_bitwise(
    name: str, decision: tuple[Activations, Placement], tmp_path: Path
) -> None:
    assert_trains_bitwise(name, decided(described(name), *decision), tmp_path)


@every_device
@pytest.mark.parametrize(
    ("name", "decision"),
    thinned(["llama-tied", "gpt2", "functional-relu"], decisions("host"), every=9),
    ids=decision_name,
)
def test_five_steps_on_the_host_tier_match_plain_torch_bitwise(
    name: str, decision: tuple[Activations, Placement], tmp_path: Path
) -> None:
    """On a CPU the host tier is copies in memory: gradients spill as they do to a real host."""
    assert_trains_bitwise(name, decided(described(name), *decision), tmp_path)


@every_device
@pytest.mark.parametrize(("name", "seed"), thinned(MODELS, range(12), every=12))
def test_five_steps_of_mixed_plans_with_slow_lanes_match_plain_torch_bitwise(
    name: str, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(f"{name} {seed}")
    tiers = (("disk",), ("host",), ("disk", "host"))[seed % 3]
    assert_trains_bitwise(
        name,
        mixed(described(name), rng, *tiers),
        tmp_path,
        trainer=TRAINERS["weight decay groups"] if seed % 2 else PLAIN_ADAMW,
        lane_delay=delays(seed),
        piece_bytes=rng.choice([3_000, 20_000, 10**9]),
    )


@every_device
@pytest.mark.parametrize("name", ["llama-tied", "functional"])
@pytest.mark.parametrize(
    "states", [Offload(tier="disk"), Offload(tier="disk", keep_gathered=True)], ids=decision_name
)
def test_all_chunks_at_once_on_the_device_match_plain_torch_bitwise(
    name: str, states: Placement, tmp_path: Path
) -> None:
    """Leads longer than the step: as many buffers as there are offloaded chunks."""
    everything = Schedule(forward_lead=LARGE, backward_lead=LARGE, swap_lead=LARGE)
    units = decided(described(name), Swap(tier="disk"), states, everything)
    assert_trains_bitwise(name, units, tmp_path, lane_delay=delays(0))


@every_device
@pytest.mark.parametrize(
    ("name", "schedule", "states"),
    thinned(
        MODELS,
        FRACTIONAL,
        [Offload(tier="disk"), Offload(tier="disk", keep_gathered=True), Offload(tier="host")],
        every=6,
    ),
    ids=decision_name,
)
def test_transfers_cut_in_two_match_plain_torch_bitwise(
    name: str, schedule: Schedule, states: Placement, tmp_path: Path
) -> None:
    """Under slow lanes, where half of a chunk is here and half is not for most of the step."""
    assert not isinstance(states, Persistent) and states.tier != "device"
    units = decided(described(name), Swap(tier=states.tier), states, schedule)
    assert_trains_bitwise(name, units, tmp_path, lane_delay=delays(1), piece_bytes=15_000)


@pytest.mark.parametrize("schedule", FRACTIONAL, ids=["0", "1"])
def test_fractional_schedules_cut_every_kind_of_transfer(schedule: Schedule) -> None:
    """What the tests above run is what they say: otherwise they would test less."""
    cut: set[str] = set()
    whole = ((0.0, 0.0), (0.0, 1.0))
    for tier in ("disk", "host"):
        model = build("gpt2")
        units = decided(described("gpt2"), Swap(tier=tier), Offload(tier=tier), schedule)
        chunks = [chunk.size(UpdateRules(ADAMW)) for chunk in make_chunks(model, units)]
        program = compile_plan(
            units,
            chunks,
            StepSettings(piece_bytes=15_000),
            device="cpu",
        )
        cut |= {move.kind for move in program.moves if move.share not in whole}
        for unit in range(len(units)):
            own = [m.share for m in program.moves if m.unit == unit and m.kind == "write states"]
            assert tier == "host" or (own[0][0], own[-1][1]) == (0, 1)
    assert cut == {"fetch", "swap in", "swap out", "spill gradients", "write states"}


def test_empty_parameters_lie_in_the_last_group() -> None:
    """They take no bytes, so every group may be full before they come."""
    sizes = [16] * MAX_PIECES + [0, 0]
    parameters = [(str(n), nn.Parameter(torch.ones(size))) for n, size in enumerate(sizes)]
    chunk = make_chunk(0, parameters, (0,))
    assert [len(group.slices) for group in chunk.groups] == [1] * (MAX_PIECES - 1) + [3]
    assert chunk.size(UpdateRules(ADAMW)).parameter_pieces == (64,) * MAX_PIECES


# --- optimizers and schedules ---------------------------------------------------------------------


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Changes the learning rate and, of AdamW, the betas at every step."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=10)


TRAINERS = {
    "weight decay groups": Trainer(groups=weight_decay_groups),
    "one-cycle schedule": Trainer(scheduler=one_cycle),
    "AdamW, not fused": Trainer(partial(torch.optim.AdamW, lr=1e-3)),
    "SGD with momentum": Trainer(
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True), scheduler=one_cycle
    ),
    "SGD without state": Trainer(partial(torch.optim.SGD, lr=1e-2)),
    "Adagrad": Trainer(partial(torch.optim.Adagrad, lr=1e-2)),
}


@pytest.mark.parametrize(
    ("trainer", "tier", "name"),
    thinned(tuple(TRAINERS), ["disk", "host"], ["llama", "functional"], every=4),
)
def test_five_steps_of_any_optimizer_match_plain_torch_bitwise(
    name: str, tier: Any, trainer: str, tmp_path: Path
) -> None:
    units = mixed(described(name), random.Random(0), tier)
    units = tuple(
        replace(unit, states=Offload(tier=tier)) if index % 2 else unit
        for index, unit in enumerate(units)
    )
    assert_trains_bitwise(name, units, tmp_path, trainer=TRAINERS[trainer])


@pytest.mark.parametrize("name", ["gpt2", "functional"])
@pytest.mark.parametrize("drain", [None, 0.5])
def test_updates_from_disk_on_the_host_of_a_gpu_match_plain_torch_bitwise(
    name: str, drain: float | None, tmp_path: Path
) -> None:
    """A GPU machine's moves on this one: states and parameters come from disk through staging.

    Run one after the other, without lanes, the updates by three threads; frozen parameters lie
    between the others.
    """
    model, reference = build(name), build(name)
    for each in (model, reference):
        for number, parameter in enumerate(each.parameters()):
            parameter.requires_grad_(number % 5 != 2)
    schedule = Schedule(update_drain=drain)
    units = decided(described(name), Keep(), Offload(tier="disk"), schedule)
    chunks, store, backend = make_chunks(model, units), DiskStore(tmp_path), Backend(CPU)
    host = HostStore(backend)
    states = UpdateRules(ADAMW)
    for chunk in chunks:
        offload(chunk, store, states, gradient_store=host)
        chunk.unbind(chunk.every_group)
    sizes = [chunk.size(UpdateRules(ADAMW)) for chunk in chunks]
    program = compile_plan(
        units,
        sizes,
        StepSettings(piece_bytes=15_000),
        device="cuda",
    )
    team = UpdateTeam(3, smallest=64)
    moves = Moves(
        program,
        units,
        chunks,
        backend=backend,
        swap_stores={},
        factory=ADAMW,
        options=lambda: {part.name: {} for chunk in chunks for part in chunk.slices},
        team=team,
    )
    plainly = ADAMW([p for p in reference.parameters() if p.requires_grad])
    random_numbers = torch.Generator().manual_seed(3)
    for _ in range(3):
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            if one.requires_grad:
                other.grad = torch.randn(other.shape, generator=random_numbers)
                one.grad = other.grad.clone()
        moves.make_staging()
        for slot in program.slots[len(units) :]:
            chunks[slot.unit].take_gradients()
            for number in slot.finish:
                moves.start(number)()
                moves.end(number)
        for chunk in chunks:
            chunk.clear_gradients()
        moves.clear(program)
        plainly.step()
    reads = [move for move in program.moves if move.kind == "read states"]
    assert len(reads) > 3 * len(units)
    expected = dict(reference.named_parameters())
    for chunk in chunks:
        for part in chunk.slices:
            assert torch.equal(read_values(chunk, part), expected[part.name]), part.name
            for layout in chunk.current.states if part.trainable else ():
                found = read_values(chunk, part, layout)
                assert torch.equal(found, plainly.state[expected[part.name]][layout.key])
    store.close()
    team.close()


# --- what else a training loop does ---------------------------------------------------------------


def busy(name: str, *, seed: int = 7) -> Any:
    """A plan of every kind of decision."""
    return mixed(described(name), random.Random(seed), "disk")


def planned(
    name: str, tmp_path: Path, *, units: Any = None, seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(name, seed=seed)
    plan = plan_for(model, units if units is not None else busy(name))
    return prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)


@every_device
def test_a_plan_that_keeps_everything_installs_nothing(tmp_path: Path) -> None:
    model = build("llama")
    before, threads = attached(model), threading.active_count()
    plan = plan_for(model, decided(described("llama"), Keep(), Persistent()))
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    own, hooks = before[""]
    assert attached(model) == {
        **before,
        "": (sorted([*own, "__reduce_ex__", "_protrain_prepared"]), hooks),
    }
    assert threading.active_count() == threads
    assert_bitwise(train("llama", model, optimizer), plain("llama"))
    restore(model)
    assert attached(model) == before


@every_device
@pytest.mark.parametrize("name", thinned(MODELS, every=2))
def test_training_goes_on_plainly_after_restore_bitwise(name: str, tmp_path: Path) -> None:
    model, optimizer = planned(name, tmp_path)
    torch.manual_seed(1)
    losses = [step(name, model, optimizer, number) for number in range(3)]
    restore(model)
    losses += [step(name, model, optimizer, number) for number in range(3, 5)]
    assert_bitwise(outcome(model, optimizer, losses), plain(name))


@every_device
@pytest.mark.parametrize("name", thinned(MODELS, every=2))
def test_evaluation_between_steps_matches_plain_torch_bitwise(name: str, tmp_path: Path) -> None:
    def train_and_evaluate(
        model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Outcome, list[torch.Tensor]]:
        torch.manual_seed(1)
        losses, evaluated = [], []
        for number in range(4):
            losses.append(step(name, model, optimizer, number))
            model.eval()
            with torch.no_grad():
                evaluated += [loss_of(call_model(model, batch(name, n))) for n in (10, 11)]
            model.train()
        return outcome(model, optimizer, losses), evaluated

    reference = build(name)
    expected, expected_losses = train_and_evaluate(reference, ADAMW(reference.parameters()))
    found, found_losses = train_and_evaluate(*planned(name, tmp_path))
    assert_bitwise(found, expected)
    assert list(differences(found_losses, expected_losses, "evaluated")) == []


def saved_and_loaded(*states: dict[str, Any]) -> list[dict[str, Any]]:
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return list(torch.load(file))


ANOTHER = 23  # the seed of another plan


@every_device
@pytest.mark.parametrize(
    ("name", "sides"),
    thinned(
        ["llama-tied", "gpt2", "functional"],
        [("plan", "another plan"), ("plan", "plain"), ("plain", "plan")],
    ),
)
def test_a_checkpoint_loads_into_any_plan_and_training_continues_bitwise(
    name: str, sides: tuple[str, str], tmp_path: Path
) -> None:
    first, second = sides

    def made(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        if kind == "plain":
            model = build(name, seed=seed)
            return model, ADAMW(model.parameters())
        units = busy(name, seed=ANOTHER) if kind == "another plan" else None
        return planned(name, tmp_path, units=units, seed=seed)

    assert busy(name) != busy(name, seed=ANOTHER)
    model, optimizer = made(first, 0)
    torch.manual_seed(1)
    losses = [step(name, model, optimizer, number) for number in range(3)]
    parameters, states = saved_and_loaded(model.state_dict(), optimizer.state_dict())

    model, optimizer = made(second, 99)  # other weights
    model.load_state_dict(parameters)
    optimizer.load_state_dict(states)
    losses += [step(name, model, optimizer, number) for number in range(3, 5)]
    assert_bitwise(outcome(model, optimizer, losses), plain(name))


@every_device
@pytest.mark.parametrize("name", ["llama", "functional"])
def test_an_exception_in_a_block_costs_that_forward_and_nothing_else(
    name: str, tmp_path: Path
) -> None:
    class InterruptedForwardError(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise InterruptedForwardError

    model, optimizer = planned(name, tmp_path)
    block = "model.layers.2.mlp" if name == "llama" else "blocks.2"
    torch.manual_seed(1)
    losses = []
    for number in range(5):
        handle = model.get_submodule(block).register_forward_pre_hook(interrupt)
        with pytest.raises(InterruptedForwardError):
            step(name, model, optimizer, number)
        handle.remove()
        losses.append(step(name, model, optimizer, number))
    assert_bitwise(outcome(model, optimizer, losses), plain(name))


@every_device
def test_a_forward_without_backward_costs_nothing_else(tmp_path: Path) -> None:
    """A loss that was looked at and dropped, as when a batch is skipped."""
    model, optimizer = planned("llama", tmp_path)
    torch.manual_seed(1)
    losses = []
    for number in range(5):
        loss_of(call_model(model, batch("llama", number + 100)))
        losses.append(step("llama", model, optimizer, number))
    assert_bitwise(outcome(model, optimizer, losses), plain("llama"))


def test_a_second_forward_before_the_optimizers_step_is_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    model, optimizer = planned("llama", tmp_path)
    torch.manual_seed(1)
    loss = loss_of(call_model(model, batch("llama", 0)))
    loss.backward()
    with pytest.raises(RuntimeError) as caught:
        call_model(model, batch("llama", 1))
    assert_says(caught.value)
    optimizer.step()
    optimizer.zero_grad()
    losses = [loss.detach(), *(step("llama", model, optimizer, number) for number in range(1, 5))]
    assert_bitwise(outcome(model, optimizer, losses), plain("llama"))


def test_the_optimizers_step_in_the_middle_of_backward_is_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    model, optimizer = planned("llama", tmp_path)
    loss_of(call_model(model, batch("llama", 0)))
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert_says(caught.value)


def test_a_closure_is_the_step_that_it_contains(tmp_path: Path) -> None:
    model, optimizer = planned("llama", tmp_path)
    losses: list[torch.Tensor] = []

    def closure() -> float:
        loss = loss_of(call_model(model, batch("llama", len(losses))))
        loss.backward()
        losses.append(loss.detach())
        return loss.item()

    torch.manual_seed(1)
    with torch.no_grad():  # a closure records its graph all the same
        for _ in range(5):
            assert optimizer.step(closure) == losses[-1].item()
            optimizer.zero_grad()
    assert_bitwise(outcome(model, optimizer, losses), plain("llama"))


def test_a_plan_is_read_from_its_file(tmp_path: Path) -> None:
    model = build("llama")
    write_plan(plan_for(model, busy("llama")), tmp_path / "plan.yaml")
    (tmp_path / "spill").mkdir()
    model, optimizer = prepare(
        model, str(tmp_path / "plan.yaml"), optimizer=ADAMW, spill_directory=tmp_path / "spill"
    )
    assert_bitwise(train("llama", model, optimizer), plain("llama"))


@every_device
def test_a_dropped_model_takes_its_lanes_with_it(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    model, optimizer = planned("llama", tmp_path)
    step("llama", model, optimizer, 0)
    lanes = set(threading.enumerate()) - others
    names = {thread.name for thread in lanes}
    # Where direct I/O takes the memory as it is, requests have threads of their own, too.
    assert {name for name in names if not name.startswith("protrain file ")} == {
        "protrain fetch disk",
        "protrain read disk",
        "protrain spill disk",
        "protrain update disk",
        "protrain write disk",
    }
    del model, optimizer
    gc.collect()
    assert [thread for thread in lanes if thread.is_alive()] == []


# --- refusals leave the model alone ---------------------------------------------------------------


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """The model is inside and out the same: hooks, attributes, parameters and where they lie."""

    def seen() -> Any:
        places = {name: p.data_ptr() for name, p in model.named_parameters()}
        return attached(model), places

    before, values, threads = seen(), copied(model.state_dict()), set(threading.enumerate())
    yield
    assert seen() == before
    assert set(threading.enumerate()) <= threads  # those of a model that was dropped may end
    assert list(differences(model.state_dict(), values, "parameters")) == []


def test_a_plan_for_another_model_is_refused(tmp_path: Path) -> None:
    model, other = build("llama"), build("llama-tied")
    plan = plan_for(other, busy("llama"))
    with untouched(model), pytest.raises(ProtrainError) as caught:
        prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    assert str(caught.value) == (
        "model_fingerprint: the plan was made for another model: its fingerprint is"
        f" {model_fingerprint(other)}, this model's is {model_fingerprint(model)}\n"
        "  fix: profile and plan this model (layers, shapes, dtypes and what is trainable count)"
    )


def test_a_plan_for_a_module_that_is_not_there_is_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    model = build("llama")
    units = [replace(unit, name=unit.name.replace(".2", ".9")) for unit in busy("llama")]
    with untouched(model), pytest.raises(ProtrainError) as caught:
        prepare(model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path)
    assert_says(caught.value)


def test_a_spill_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    model = build("llama")
    with untouched(model), pytest.raises(ProtrainError) as caught:
        prepare(
            model,
            plan_for(model, busy("llama")),
            optimizer=ADAMW,
            spill_directory=tmp_path / "missing",
        )
    assert_says(caught.value)


def test_a_second_plan_is_refused(tmp_path: Path, assert_says: Speaker) -> None:
    model, _ = planned("llama", tmp_path)
    again = plan_for(model, busy("llama"))
    with pytest.raises(ProtrainError) as caught:
        prepare(model, again, optimizer=ADAMW, spill_directory=tmp_path)
    assert_says(caught.value)


def test_a_full_disk_is_refused_and_every_parameter_comes_back(
    tmp_path: Path, assert_says: Speaker
) -> None:
    """The system refuses in the middle of `prepare`, when half of the chunks have left."""
    model = build("llama")
    before, values = attached(model), copied(model.state_dict())
    plan = plan_for(model, decided(described("llama"), Recompute(), Offload(tier="disk")))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_050_000, limits[1]))
    try:
        with pytest.raises(ProtrainError) as caught:
            prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_says(caught.value)
    assert attached(model) == before
    assert list(differences(model.state_dict(), values, "parameters")) == []
    optimizer = ADAMW(model.parameters())
    assert_bitwise(train("llama", model, optimizer), plain("llama"))


def test_input_swapping_is_one_of_the_decisions() -> None:
    """The mixed plans above hold every kind of decision: otherwise they would test less."""
    kinds = {
        (type(decision), getattr(decision, "keep_gathered", False))
        for name in MODELS
        for seed in range(12)
        for unit in mixed(described(name), random.Random(f"{name} {seed}"), "disk")
        for decision in (unit.activations, unit.states)
    }
    plain = {Keep, Recompute, Swap, SwapInput, Persistent, Offload}
    assert kinds == {(kind, False) for kind in plain} | {(Offload, True)}
