"""The runtime on accelerators: what the CPU's tests ask, asked there, and what only they show.

Every test runs on the emulated device (marker `emulated`), whose streams are late at random, and on
a CUDA device where there is one (marker `gpu`), with deterministic kernels. There plain steps are
taken by an optimizer whose bits do not depend on where it runs (see `runtime_cases.on_device`), so
that a chunk that is updated on the host must equal one that is updated on the card. What AdamW
makes of its place is a test of its own.
"""

import gc
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from protrain_plan.commands.training import train
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.sources import load_source
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.planner import plan as solve
from protrain_plan.profiling.measured import measure
from protrain_runtime import OutOfMemoryError, explain_memory, prepare, record, restore
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.hardware import Hardware, TierName
from protrain_runtime.contract.records.plan import (
    Activations,
    Budgets,
    Keep,
    Offload,
    Persistent,
    Placement,
    Plan,
    Recompute,
    Schedule,
    Swap,
    SwapInput,
    TierBytes,
)
from protrain_runtime.contract.records.profile import Precision, Profile
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.lanes import SWITCH_INTERVAL_S, Backend
from protrain_runtime.devices.memory_meter import reachable_bytes
from protrain_runtime.devices.preflight import NoRoomError
from protrain_runtime.devices.stores import HostStore
from protrain_runtime.diagnostics.checking import DifferenceError
from protrain_runtime.model.prepared import below_device, engine_of
from protrain_runtime.states.updates import spare_threads
from tests.support import runtime_cases
from tests.support.cards import CARDS, capped, card_called, host_waits
from tests.support.pairwise import Row
from tests.support.parity_rows import ROWS, assert_row
from tests.support.plan_settings import with_settings
from tests.support.planning_cases import gpu
from tests.support.programs import compile_units
from tests.support.random_models import Shape
from tests.support.random_training import assert_trains_like_plain, shapes, steady
from tests.support.runtime_cases import (
    ADAMW,
    assert_bitwise,
    attached,
    batch,
    build,
    copied,
    decided,
    decision_name,
    described,
    described_by,
    device,
    differences,
    mixed,
    plain,
    plan_for,
    plan_of,
    step,
)
from tests.support.thinning import thinned


@pytest.fixture(autouse=True, params=CARDS)
def card(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Models and batches of all that is asked here are on the card."""
    name: str = request.param
    with card_called(name, request.node.nodeid) as found:
        yield found


# --- everything that a training run may combine ---------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=[str(number) for number in range(len(ROWS))])
def test_rows_of_the_parity_matrix_match_plain_torch_bitwise(row: Row, tmp_path: Path) -> None:
    """Decisions, tiers, micro-batches, clipping, scaling, precisions, adapters, resuming."""
    halves = row["precision"] in ("bfloat16", "master")
    if device().type == "cuda" and row["clipping"] == "loss scale" and halves:
        pytest.skip("PyTorch unscales no bfloat16 gradients on CUDA")
    assert_row({**row, "compiled": "no"}, tmp_path)


@pytest.mark.parametrize("row", [row for row in ROWS if row["compiled"] != "no"][:4])
def test_compiled_rows_match_compiled_torch_bitwise(row: Row, tmp_path: Path) -> None:
    if device().type == "emulated":
        pytest.skip("inductor makes no code for the emulated device")
    assert_row({**row, "compiled": "inductor"}, tmp_path)


@settings(steady, max_examples=8)
@given(shapes(), st.integers(0, 2**32))
def test_random_models_train_like_plain_on_the_card(shape: Shape, seed: int) -> None:
    with TemporaryDirectory() as folder:
        assert_trains_like_plain(shape, seed, Path(folder))


@pytest.mark.slow
@settings(steady, max_examples=100, derandomize=False, database=None)
@given(shapes(), st.integers(0, 2**32))
def test_a_hundred_random_models_train_like_plain_on_the_card(shape: Shape, seed: int) -> None:
    with TemporaryDirectory() as folder:
        assert_trains_like_plain(shape, seed, Path(folder))


def test_a_half_precision_model_is_scaled_like_plain_torch(tmp_path: Path) -> None:
    """float16 under autocast with torch.amp.GradScaler, from a scale that overflows at first."""
    results: list[list[Tensor | float]] = []
    for planned in (False, True):
        model = build("llama-tied")
        optimizer: torch.optim.Optimizer = ADAMW(model.parameters())
        if planned:
            units = decided(described("llama-tied"), Recompute(), Offload(tier="host"))
            plan = with_settings(plan_for(model, units), updates="after backward")
            model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
        scaler = torch.amp.GradScaler(device().type, init_scale=2.0**40, growth_interval=2)
        seen: list[Tensor | float] = []
        for number in range(6):
            with torch.autocast(device().type, dtype=torch.float16, cache_enabled=False):
                loss = loss_of(call_model(model, batch("llama-tied", number)))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [loss.detach(), scaler.get_scale()]
        results.append([*seen, *(value.clone() for value in model.state_dict().values())])
    assert all(
        torch.equal(one.cpu(), two.cpu())
        if isinstance(one, Tensor) and isinstance(two, Tensor)
        else one == two
        for one, two in zip(*results, strict=True)
    )


@pytest.mark.parametrize("seed", range(2))
def test_training_on_a_stream_of_its_own_matches_plain_torch_bitwise(
    seed: int, tmp_path: Path
) -> None:
    """Lanes are ordered behind the stream that computes, which need not be the device's own."""
    expected = plain("functional", num_steps=3)
    devices.synchronize(device())
    with torch.Stream(device=device()):
        model = build("functional")
        units = mixed(described("functional"), random.Random(seed), "host", "disk")
        plan = plan_for(model, units)
        model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
        found = runtime_cases.train("functional", model, optimizer, num_steps=3)
        devices.synchronize(device())  # what is compared outside is copied here
    assert_bitwise(found, expected)


def test_adamw_on_the_host_takes_the_step_of_a_cpu(tmp_path: Path) -> None:
    """Bit for bit; the card's own AdamW may round the last bit otherwise, and not much more."""
    factory = torch.optim.AdamW
    plain = build("llama")
    gradients = gradients_of(plain)
    on_cpu = {name: value.detach().cpu().clone() for name, value in plain.named_parameters()}
    for name, value in on_cpu.items():
        value.requires_grad_()
        value.grad = gradients[name].cpu()
    factory(on_cpu.values(), lr=1e-3, fused=True).step()
    on_card = factory(plain.parameters(), lr=1e-3, fused=True)
    on_card.step()

    model = build("llama")
    units = decided(described("llama"), Keep(), Offload(tier="host"))
    model, optimizer = prepare(
        model,
        plan_for(model, units),
        optimizer=lambda groups: factory(groups, lr=1e-3, fused=True),
        spill_directory=tmp_path,
    )
    step("llama", model, optimizer, 0)
    for name, value in model.state_dict().items():
        if name in on_cpu:
            assert torch.equal(value.cpu(), on_cpu[name].detach()), name
            torch.testing.assert_close(value.cpu(), plain.state_dict()[name].cpu())


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    loss_of(call_model(model, batch("llama", 0))).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# --- state dicts in every order -------------------------------------------------------------------


@dataclass
class Handled:
    """A model that steps, is read and is loaded, under a plan or without one."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    other: tuple[Any, Any]  # a model's and an optimizer's state dicts
    seen: list[Any] = field(default_factory=list[Any])

    def do(self, what: str) -> None:
        match what:
            case "step":
                self.seen.append(step("functional", self.model, self.optimizer, len(self.seen)))
            case "read":
                self.seen.append(copied(self.model.state_dict()))
                self.seen.append(copied(self.optimizer.state_dict()))
            case "load model":
                self.model.load_state_dict(self.other[0])
            case "load optimizer":
                self.optimizer.load_state_dict(copied(self.other[1]))
            case _:
                raise AssertionError(what)


ACTS = ("step", "read", "load model", "load optimizer")


@pytest.mark.parametrize(
    ("tier", "order"),
    thinned(["host", "disk"], [*permutations(ACTS)][::5]),
    ids=lambda each: each if isinstance(each, str) else "-".join(each),
)
def test_state_dicts_in_any_order_are_those_of_plain_torch(
    order: tuple[str, ...], tier: TierName, tmp_path: Path
) -> None:
    """Each act twice, with nothing in between that waits; then the plan is taken off."""
    other = build("functional", seed=7)
    trained = ADAMW(other.parameters())
    step("functional", other, trained, 99)
    given = copied(other.state_dict()), copied(trained.state_dict())
    handled: list[Handled] = []
    for planned in (False, True):
        model = build("functional")
        optimizer: torch.optim.Optimizer = ADAMW(model.parameters())
        if planned:
            units = decided(described("functional"), Swap(tier=tier), Offload(tier=tier))
            model, optimizer = prepare(
                model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path
            )
        torch.manual_seed(1)
        handled.append(Handled(model, optimizer, given))
        for act in (*order, *order):
            handled[-1].do(act)
        if planned:
            restore(model)
        handled[-1].do("read")
        handled[-1].do("step")
    assert list(differences(handled[1].seen, handled[0].seen, "seen")) == []


def test_a_plan_may_take_all_that_is_free(tmp_path: Path) -> None:
    """What is free is free beside the context; a byte more than there is, is too much."""
    model = build("functional")
    units = decided(described("functional"), Keep(), Offload(tier="host"))
    plan = plan_for(model, units)
    prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    restore(model)  # the context has grown to what kernels of `prepare` take
    room, context = devices.room_bytes(device()), devices.context_bytes(device())
    for more in (0, 1):
        peaks = TierBytes(device=room + more, context=context, host=0, disk=0)
        asked = replace(
            plan,
            workload=replace(plan.workload, device=device().type, deterministic=deterministic()),
            prediction=replace(plan.prediction, peak_bytes=peaks),
        )
        if more:
            with pytest.raises(NoRoomError):
                prepare(model, asked, optimizer=ADAMW, spill_directory=tmp_path)
        else:
            prepare(model, asked, optimizer=ADAMW, spill_directory=tmp_path)
            restore(model)


def deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


class Rounding(torch.optim.SGD):
    """Steps whose last bits are others on the host, as AdamW's by its kernels and CUDA's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.device.type == "cpu":
                    parameter.mul_(1 + 2**-20)


@pytest.mark.parametrize("precision", ["pure", "master"])
def test_a_checked_run_updates_on_the_host_what_its_plan_updates_there(
    precision: Precision, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def trained() -> None:
        model = build("functional").to(torch.bfloat16 if precision == "master" else torch.float32)
        found = described("functional")
        half = len(found) // 2
        units = (
            *decided(found[:half], Keep(), Offload(tier="host")),
            *decided(found[half:], Keep(), Persistent()),
        )
        plan = plan_for(model, units)
        workload = replace(
            plan.workload,
            device=device().type,
            deterministic=deterministic(),
            precision=precision,
            dtype="bfloat16" if precision == "master" else "float32",
        )
        plan = replace(plan, workload=workload)
        assert plan.graded == ("host rounding" if plan.host_updated else "bitwise")
        model, optimizer = prepare(
            model,
            plan,
            optimizer=partial(Rounding, lr=2**-7),
            spill_directory=tmp_path,
            check="bitwise",
        )
        for number in range(4):
            step("functional", model, optimizer, number)

    trained()
    monkeypatch.setattr(Plan, "host_updated", ())  # as if its updates were the device's own
    with pytest.raises(DifferenceError):
        trained()


# --- what only a card shows -----------------------------------------------------------------------

DECISIONS: list[tuple[Activations, Placement]] = [
    (Swap(tier="host"), Offload(tier="host")),
    (SwapInput(tier="host"), Offload(tier="host")),
    (Recompute(form="lite"), Offload(tier="host")),
    (Keep(), Offload(tier="disk")),
]


@pytest.mark.parametrize("decision", DECISIONS, ids=decision_name)
def test_steps_wait_for_the_card_no_more_often_than_plain_ones(
    decision: tuple[Activations, Placement], tmp_path: Path
) -> None:
    """Forward and backward of a steady step; what transformers looks at, both wait for.

    Waits for a lane's thread, where bytes come from disk, are none for the card.
    """
    ahead = Schedule(forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=1, update_drain=1)
    plain, model = build("llama"), build("llama")
    units = decided(described("llama"), *decision, ahead)
    model, optimizer = prepare(
        model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path
    )
    inputs = [batch("llama", number) for number in range(4)]
    for number in range(3):
        step("llama", model, optimizer, number)
    found = []
    for each in (plain, model):
        with host_waits() as waits:
            loss_of(call_model(each, inputs[3])).backward()
        found.append(waits)
    optimizer.step()
    assert found[1] <= found[0]


def test_another_number_of_update_threads_than_the_plans_is_told_once(tmp_path: Path) -> None:
    model, spare = build("llama"), spare_threads(device())
    plan = plan_for(model, decided(described("llama"), Keep(), Offload(tier="host")))

    def said(threads: int) -> list[str]:
        promise = replace(plan.prediction, host_update_seconds=0.5, host_update_threads=threads)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = prepare(
                model,
                replace(plan, prediction=promise),
                optimizer=ADAMW,
                spill_directory=tmp_path,
            )
            step("llama", *made, 0)
        restore(model)
        return [str(one.message) for one in caught if "host updates" in str(one.message)]

    assert said(spare) == []
    (message,) = said(3 * spare)
    assert message == (
        f"host updates take 500 ms a step with the {3 * spare} threads that the plan counts on,"
        f" and about 1.50 s with the {spare} of this process: set OMP_NUM_THREADS to one more than"
        " the plan's, or profile with as many as here"
    )


def test_unscaling_waits_for_the_card_once(tmp_path: Path) -> None:
    model = build("llama")
    units = decided(described("llama"), Keep(), Offload(tier="host"))
    plan = with_settings(plan_for(model, units), updates="after backward")
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    scaler = torch.amp.GradScaler(device().type)
    scaler.scale(loss_of(call_model(model, batch("llama", 0)))).backward()
    with host_waits() as waits:
        scaler.unscale_(optimizer)
    assert waits.total() == 1


@pytest.mark.parametrize("number", [0, 3])
def test_memory_that_cannot_be_pinned_is_one_message(number: int, tmp_path: Path) -> None:
    """And the model is as it was, also where some of its chunks had left the device."""
    if device().type != "emulated":
        pytest.skip("what a driver lets a process pin is not ours to turn")
    from tests.emulated.device import few_pins

    model = build("functional")
    before = copied(model.state_dict())
    units = decided(described("functional"), Keep(), Offload(tier="host"))
    with few_pins(number), pytest.raises(OutOfMemoryError) as caught:
        prepare(model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path)
    assert "of host memory cannot be pinned: emulated device error: out of memory" in str(
        caught.value
    )
    assert "ulimit -l" in str(caught.value)
    assert list(differences(model.state_dict(), before, "parameters")) == []
    step("functional", model, ADAMW(model.parameters()), 0)


STRAY = """
import sys, tempfile, torch
from tests.emulated.device import extension
extension()
from protrain_runtime.contract.records.plan import Offload, Swap
from protrain_runtime import prepare, restore
from tests.support.runtime_cases import ADAMW, build, decided, described, on_device, plan_for, step
torch.accelerator.set_device_index(1)
with on_device("emulated:1"):
    units = described("functional")
    half = len(units) // 2
    units = (
        *decided(units[:half], Swap(tier="host"), Offload(tier="host")),
        *decided(units[half:], Swap(tier="disk"), Offload(tier="disk")),
    )
    model = build("functional")
    plan = plan_for(model, units)
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tempfile.gettempdir())
    for number in range(3):
        step("functional", model, optimizer, number)
    restore(model)
sys.exit(extension().has_context(0) or not extension().has_context(1))
"""


def test_no_thread_takes_memory_of_another_device() -> None:
    """A thread's current device is the first one, until it is told."""
    if device().type != "emulated":
        pytest.skip("no call tells which of a process's contexts there are")
    ended = subprocess.run(
        [sys.executable, "-c", STRAY], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def test_pinned_memory_has_huge_pages(tmp_path: Path) -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this system has no huge pages")

    def huge_kib() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))

    before = huge_kib()
    buffer = Backend(device()).empty_host(64 * 2**20).fill_(1)
    assert buffer.is_pinned()
    assert huge_kib() - before >= 48 * 2**10


def test_a_type_that_lacks_something_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without this flag PyTorch recomputes dropout with other numbers, and says nothing."""
    if device().type == "cuda":
        pytest.skip("CUDA's own module asks for the flag, too")
    model = build("gpt2")
    before = attached(model)
    units = decided(described("gpt2"), Recompute(), Offload(tier="host"))
    monkeypatch.delattr(torch.get_device_module(device()), "_initialized")
    with pytest.raises(ProtrainError) as caught:
        prepare(model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path)
    assert f"devices of type '{device().type}' have no flag" in str(caught.value)
    assert caught.value.fix == "train on another device, or without a plan"
    assert attached(model) == before


def test_python_takes_short_turns_while_a_plan_runs(tmp_path: Path) -> None:
    usual = sys.getswitchinterval()
    model = build("functional")
    units = decided(described("functional"), Keep(), Offload(tier="host"))
    model, _ = prepare(model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path)
    assert sys.getswitchinterval() <= SWITCH_INTERVAL_S
    restore(model)
    assert sys.getswitchinterval() == usual


def test_host_memory_is_pinned(tmp_path: Path) -> None:
    model = build("llama")
    units = decided(described("llama"), Swap(tier="host"), Offload(tier="host"))
    model, optimizer = prepare(
        model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path
    )
    step("llama", model, optimizer, 0)
    engine = engine_of(model)
    assert engine
    stores = {chunk.store for chunk in engine._offloaded}
    assert stores
    for store in stores:
        assert isinstance(store, HostStore)
        assert store.view(0, 1).is_pinned()


@pytest.fixture
def profile(card: torch.device) -> Profile:
    """A small model as the card runs it."""
    return _profiled(str(card))


@cache
def _profiled(_: str) -> Profile:
    with TemporaryDirectory() as spill:
        return measure(
            load_source("tiny-llama"),
            batch_size=4,
            seq_len=64,
            dtype="bfloat16",
            device=device(),
            seed=0,
            num_steps=2,
            spill_directory=Path(spill),
            text=None,
            progress=lambda *_: None,
            # What a probe says of the emulated device's speed tells nothing.
            machine=None if device().type == "cuda" else machine_of(device()),
        )


def machine_of(card: torch.device) -> Hardware:
    """A machine with this card that nobody has measured."""
    made = gpu(disk_gb=1)
    total = devices.free_and_total_bytes(card)[1]
    return replace(made, device=replace(made.device, kind=card.type, memory_bytes=total))


def bytes_of_others() -> int:
    """Of tensors that other tests have left on the card; what libraries keep is predicted."""
    while gc.collect():  # what one collection finalizes, the next one frees
        pass
    return reachable_bytes(device())


@pytest.mark.parametrize("seed", thinned(range(6), every=6))
def test_measured_bytes_never_exceed_predicted(profile: Profile, seed: int, tmp_path: Path) -> None:
    """Of tensors, in every slot; and below the device, to the byte."""
    units = mixed(described_by(profile), random.Random(seed), "host", "disk")
    plan = plan_of(units, fingerprint=profile.model_fingerprint, workload=profile.workload)
    program = compile_units(units, profile, piece_bytes=plan.settings.piece_bytes)
    others = bytes_of_others()
    run = train(
        plan, num_steps=3, plain=False, text=None, spill_directory=tmp_path, device=device()
    )
    predicted = [slot.total for slot in device_bytes(program)]
    measured = [size - others for size in run.slot_bytes]
    over = [(n, m - p) for n, (p, m) in enumerate(zip(predicted, measured, strict=True))]
    assert [(number, more) for number, more in over if more > 0] == []
    peak = run.measured_peak_bytes
    assert peak
    assert peak.host <= program.tier_bytes("host")
    assert peak.disk <= program.tier_bytes("disk")


@pytest.mark.parametrize("how", ["apart", "overlapping", "ahead of the norm"])
def test_measured_bytes_of_updates_on_the_device_never_exceed_predicted(
    profile: Profile, how: str, tmp_path: Path
) -> None:
    """Of the first step, in which the optimizer makes its states, and of those that follow."""
    ahead, overlap = how == "ahead of the norm", how != "apart"
    schedule = Schedule(forward_lead=1, update_drain=1)
    states = Offload(tier="host", update_on_device=True, speculate=ahead)
    units = decided(described_by(profile), Recompute(), states, schedule)
    plan = plan_of(units, fingerprint=profile.model_fingerprint, workload=profile.workload)
    plan = replace(
        plan, settings=replace(plan.settings, piece_bytes=1 << 16, overlap_steps=overlap)
    )
    if ahead:
        plan = replace(plan, settings=replace(plan.settings, updates="after backward"))
    predicted = [slot.total for slot in device_bytes(program_of(plan, profile))]
    others = bytes_of_others()
    run = train(
        plan, num_steps=3, plain=False, text=None, spill_directory=tmp_path, device=device()
    )
    measured = [size - others for size in run.slot_bytes]
    over = [(n, m - p) for n, (p, m) in enumerate(zip(predicted, measured, strict=True))]
    assert [(slot, more) for slot, more in over if more > 0] == []
    # Of all steps, the first one too.
    assert run.measured_peak_bytes
    assert run.measured_peak_bytes.device - others <= max(predicted)
    assert max(measured) >= 0.9 * max(predicted)
    assert run.measured_peak_bytes.host <= program_of(plan, profile).tier_bytes("host")


def test_a_solved_plan_keeps_its_promise(profile: Profile, tmp_path: Path) -> None:
    """Between the least and what keeping everything takes."""
    ample = Budgets(device=10**12, host=10**12, disk=10**12)
    everything = solve(profile, ample)
    assert isinstance(everything, Solved)
    whole = everything.plan.prediction.peak_bytes
    besides = whole.on_device - whole.device
    besides += profile.fixed_bytes  # workspaces, those of threads of other tests too
    room = whole.device - profile.fixed_bytes
    budgets = replace(ample, device=besides + round(0.75 * room))
    solved = solve(profile, budgets)
    assert isinstance(solved, Solved)
    others = bytes_of_others()
    run = train(
        solved.plan, num_steps=3, plain=False, text=None, spill_directory=tmp_path, device=device()
    )
    assert run.measured_peak_bytes
    assert run.measured_peak_bytes.device - others <= solved.plan.prediction.peak_bytes.device


def filling(num_bytes: int) -> Iterator[Tensor]:
    """Tensors of this size until the allocator asks the card for more."""
    reserved = torch.accelerator.memory_reserved(device())
    while torch.accelerator.memory_reserved(device()) == reserved:
        yield torch.empty(num_bytes, dtype=torch.uint8, device=device())


def test_memory_that_runs_out_is_told_by_slot(profile: Profile, tmp_path: Path) -> None:
    """A cap below what is planned, set by the allocator."""
    units = decided(described_by(profile), Keep(), Offload(tier="host"))
    plan = plan_of(units, fingerprint=profile.model_fingerprint, workload=profile.workload)
    model = load_source("tiny-llama").build(dtype="bfloat16", device=device())
    model, _ = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    inputs = next(load_source("tiny-llama").batches(batch_size=4, seq_len=64, device=device()))
    bytes_of_others()
    devices.free_cached(device())  # of other tests, blocks of sizes between those below
    held = [*filling(2**16), *filling(2**20), *filling(2**21)]  # small and large blocks
    with (
        capped(torch.accelerator.memory_reserved(device())),
        pytest.raises(OutOfMemoryError) as caught,
        explain_memory(model, lambda: profile),
    ):
        loss_of(call_model(model, inputs)).backward()
    held.clear()
    assert "out of memory" in str(caught.value)


def test_a_recording_has_the_lanes_of_the_card(tmp_path: Path) -> None:
    model = build("llama")
    units = decided(described("llama"), Swap(tier="host"), Offload(tier="host"))
    model, optimizer = prepare(
        model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path
    )
    with record(model) as recorder:
        for number in range(2):
            step("llama", model, optimizer, number)
    lanes = {event.lane for event in recorder.recording().events}
    assert {"compute", "fetch host", "spill host", "update host"} <= lanes


def test_what_is_swapped_stands_in_host_memory(tmp_path: Path) -> None:
    model = build("llama")
    units = decided(described("llama"), Swap(tier="host"), Offload(tier="disk"))
    model, optimizer = prepare(
        model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path
    )
    before, _ = below_device(model)
    step("llama", model, optimizer, 0)
    assert below_device(model)[0] > before
