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
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.commands.training import Run as Trained
from protrain_plan.models.sources import load_source
from protrain_plan.planning.outcome import Solved
from protrain_runtime import OutOfMemoryError, explain_memory, full_parameters, record, restore
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.program.program import PAGE_BYTES
from protrain_runtime.contract.records.adapters import parse_lora
from protrain_runtime.contract.records.hardware import Hardware, TierName
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Budgets,
    Placement,
    Plan,
    Schedule,
    TierBytes,
)
from protrain_runtime.contract.records.profile import Precision, Profile
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.lanes import SWITCH_INTERVAL_S, Backend
from protrain_runtime.devices.memory_meter import reachable_bytes
from protrain_runtime.devices.preflight import NoRoomError
from protrain_runtime.devices.stores import HostStore
from protrain_runtime.diagnostics.checking import DifferenceError
from protrain_runtime.model.prepared import below_device
from protrain_runtime.states.updates import spare_threads
from tests.support.cards import CARDS, capped, card_called, host_waits
from tests.support.estimates import batches_of, measure, model_of
from tests.support.pairwise import Row
from tests.support.parity_rows import ROWS, assert_row
from tests.support.peaks import trained
from tests.support.plan_settings import with_settings
from tests.support.planning_cases import gpu
from tests.support.planning_cases import plan as solve
from tests.support.runtime_cases import (
    CATALOGUE,
    Subject,
    assert_bitwise,
    attached,
    copied,
    decided,
    decision_name,
    described_by,
    device,
    differences,
    mixed,
    phrase,
    plan_for,
    plan_for_profile,
)
from tests.support.scenario import Loop, Run, Scenario, Units, refusal
from tests.support.thinning import thinned

HOST = Placement(tier="host")


@pytest.fixture(autouse=True, params=CARDS)
def card(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Models and batches of all that is asked here are on the card."""
    name: str = request.param
    with card_called(name, request.node.nodeid) as found:
        yield found


def on_host(
    activations: Activations = KEEP,
    states: Placement = HOST,
    schedule: Schedule = Schedule(forward_lead=1, backward_lead=1, swap_lead=1),  # noqa: B008
    *,
    model: str | Subject = "llama",
    **options: Any,
) -> Scenario:
    return Scenario(
        model=model, units=lambda units: decided(units, activations, states, schedule), **options
    )


# --- everything that a training run may combine ---------------------------------------------------


@pytest.mark.nightly("emulated-*")
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


@pytest.mark.nightly("emulated")
def test_a_half_precision_model_is_scaled_like_plain_torch(tmp_path: Path) -> None:
    """float16 under autocast with torch.amp.GradScaler, from a scale that overflows at first."""

    def script(run: Run) -> None:
        scaler = torch.amp.GradScaler(
            device().type, init_scale=2.0**40, backoff_factor=2.0**-14, growth_interval=4
        )
        for number in range(6):
            with torch.autocast(device().type, dtype=torch.float16, cache_enabled=False):
                loss = run.loss(number)
            scaler.scale(loss).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            run.seen += [loss.detach(), scaler.get_scale()]

    settings = {"updates": "after backward"}
    asked = on_host(RECOMPUTE, model="llama-tied", settings=settings, script=script)
    run = asked.assert_like_plain(tmp_path)
    assert run.seen[1] > run.seen[3] == run.seen[5], "two steps were skipped"


@pytest.mark.parametrize("seed", range(2))
def test_training_on_a_stream_of_its_own_matches_plain_torch_bitwise(
    seed: int, tmp_path: Path
) -> None:
    """Lanes are ordered behind the stream that computes, which need not be the device's own."""
    asked = Scenario(
        model="functional",
        units=lambda given: mixed(given, random.Random(seed), "host", "disk"),
        script=Loop(num_steps=3),
    )
    expected = asked.plain()
    devices.synchronize(device())
    with torch.Stream(device=device()):
        found = asked.played(asked.start(tmp_path))
        devices.synchronize(device())  # what is compared outside is copied here
    assert_bitwise(found, expected)


def test_adamw_on_the_host_takes_the_step_of_a_cpu(tmp_path: Path) -> None:
    """Bit for bit; the card's own AdamW may round the last bit otherwise, and not much more."""
    factory = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    asked = on_host(factory=factory)
    plain, run = asked.start(), asked.start(tmp_path)
    plain.backward(0)
    on_cpu: dict[str, nn.Parameter] = {}
    for name, value in plain.model.named_parameters():
        assert value.grad is not None
        on_cpu[name] = nn.Parameter(value.detach().cpu().clone())
        on_cpu[name].grad = value.grad.cpu()
    factory(on_cpu.values()).step()
    plain.update()
    run.step(0)
    expected = plain.values()
    for name, own in run.values().items():
        if name in on_cpu:
            assert torch.equal(own.cpu(), on_cpu[name].detach()), name
            torch.testing.assert_close(own.cpu(), expected[name].cpu())


# --- parameters that are views for good -----------------------------------------------------------


def changes_between_steps(run: Run) -> None:
    """Steps in which buffers last, and what brings parameters to other memory between them."""
    run.step(0, 1, 2)
    run.model.load_state_dict({k: v * 0.5 for k, v in run.model.state_dict().items()})
    run.step(3)
    run.backward(4, between=lambda: run.look(5))
    run.update()
    with full_parameters(run.model, modify=True) if run.planned else nullcontext():
        for parameter in run.model.parameters():
            parameter.data.mul_(0.9)
    run.step(6, 7)
    run.loss(8)  # without its backward
    run.step(9)


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize(
    ("activations", "states"),
    thinned(
        [KEEP, RECOMPUTE, Activations(tier="host")],
        [HOST, Placement(tier="host", update_on_device=True), Placement(tier="disk")],
    ),
    ids=phrase,
)
def test_buffers_that_last_have_what_is_changed_between_steps(
    activations: Activations, states: Placement, tmp_path: Path
) -> None:
    asked = on_host(activations, states, script=changes_between_steps)
    run = asked.assert_like_plain(tmp_path)
    assert all(chunk.lasts for chunk in run.engine._offloaded)


@pytest.mark.nightly("emulated")
def test_buffers_of_weights_that_are_read_elsewhere_do_not_last(tmp_path: Path) -> None:
    """A penalty on weights is backwarded before the block that it is of."""
    held: list[Tensor] = []

    def penalize(model: nn.Module) -> None:
        block = model.get_submodule("model.layers.1")
        forward = block.forward

        def penalized(*args: object, **kwargs: object) -> object:
            outputs = forward(*args, **kwargs)
            held.append(sum((p.square().mean() for p in block.parameters()), torch.zeros(())))
            return outputs

        block.forward = penalized

    def script(run: Run) -> None:
        for number in range(4):
            loss = run.loss(number) + held.pop()
            loss.backward()
            run.seen.append(loss.detach())
            run.update()

    model = replace(CATALOGUE["llama"], change=penalize)
    run = on_host(model=model, script=script).assert_like_plain(tmp_path)
    assert {chunk.lasts for chunk in run.engine._offloaded} == {True, False}


def views_held(
    first: int, reader: str, *, in_graph: bool, instead: bool = False
) -> Callable[[nn.Module], None]:
    """A block that keeps a view of a weight from a step on, until somebody else reads it.

    `instead` of a view that autograd has kept until then.
    """

    def change(model: nn.Module) -> None:
        block, steps, held = model.get_submodule("model.layers.0"), [0], list[Tensor]()

        def scaled(outputs: Any, by: Tensor) -> Any:
            return tuple(each * by for each in outputs) if type(outputs) is tuple else outputs * by

        def keep(module: nn.Module, _: object, outputs: Any) -> Any:
            steps[0] += module.training
            weight = block.get_parameter("mlp.down_proj.weight")
            if steps[0] >= first:
                held[:] = [weight.view(-1) if in_graph else weight.detach()]
            elif instead:
                return scaled(outputs, weight.t().square().mean())
            return None

        def read(_: nn.Module, _inputs: object, outputs: Any) -> Any:
            if not held:
                return None
            return scaled(outputs, held.pop().square().mean())

        block.register_forward_hook(keep)
        model.get_submodule(reader).register_forward_hook(read)

    return change


@pytest.mark.nightly("emulated-re*", "emulated-keep-offload to host-1-model.layers.1-1-True")
@pytest.mark.parametrize(
    ("activations", "states", "lead", "reader", "first", "in_graph"),
    thinned(
        [KEEP, RECOMPUTE],
        [HOST, Placement(tier="host", update_on_device=True), Placement(tier="disk")],
        [1, 1000],
        ["model.layers.1", "model.norm"],
        [1, 3],
        [True, False],
        every=6,
    ),
    ids=phrase,
)
def test_views_that_are_held_in_any_step_have_the_values(
    activations: Activations,
    states: Placement,
    lead: float,
    reader: str,
    first: int,
    in_graph: bool,
    tmp_path: Path,
) -> None:
    schedule = Schedule(forward_lead=lead, backward_lead=lead, swap_lead=1)
    model = replace(CATALOGUE["llama"], change=views_held(first, reader, in_graph=in_graph))
    asked = on_host(activations, states, schedule, model=model, script=Loop(num_steps=6))
    run = asked.assert_like_plain(tmp_path)
    # The next layer may read it while its weights are still there: then nobody holds what has left.
    lasting = {chunk.lasts for chunk in run.engine._offloaded}
    assert True in lasting and (reader == "model.layers.1" or False in lasting)


def unfreezes(run: Run) -> None:
    """Steps in some of which the blocks' weights are frozen."""
    layers = run.model.get_submodule("model.layers")
    for number in range(6):
        run.model.requires_grad_(True)
        layers.requires_grad_(number not in {0, 1, 4})
        run.step(number)


@pytest.mark.nightly("emulated")
def test_buffers_last_again_when_others_are_trained(tmp_path: Path) -> None:
    run = on_host(model="llama", script=unfreezes).assert_like_plain(tmp_path)
    assert all(chunk.lasts for chunk in run.engine._offloaded)


@pytest.mark.nightly("emulated-3", "emulated-5")
@pytest.mark.parametrize("first", [3, 5])
def test_views_that_are_held_where_autograd_saves_less_have_the_values(
    first: int, tmp_path: Path
) -> None:
    model = replace(CATALOGUE["llama"], change=views_held(first, "model.norm", in_graph=False))
    on_host(model=model, script=unfreezes).assert_like_plain(tmp_path)
    change = views_held(first, "model.norm", in_graph=False, instead=True)
    model = replace(CATALOGUE["llama"], change=change)
    on_host(model=model, script=Loop(num_steps=6)).assert_like_plain(tmp_path / "instead")


@pytest.mark.nightly("emulated")
def test_views_that_are_held_as_an_older_graph_goes_have_the_values(tmp_path: Path) -> None:
    """The graph of a forward without a backward is freed in the next one."""
    graphs: list[Tensor] = []

    def change(model: nn.Module) -> None:
        model.get_submodule("model.layers.0").register_forward_hook(lambda *_: graphs.clear())
        views_held(6, "model.norm", in_graph=False)(model)

    def script(run: Run) -> None:
        for number in range(6):
            graphs.append(run.loss(50 + number))
            run.step(number)

    model = replace(CATALOGUE["llama"], change=change)
    run = on_host(model=model, script=script).assert_like_plain(tmp_path)
    assert {chunk.lasts for chunk in run.engine._offloaded} == {True, False}


# --- state dicts in every order -------------------------------------------------------------------


ACTS: dict[str, Callable[[Run, tuple[Any, Any]], object]] = {
    "step": lambda run, _: run.step(len(run.seen)),
    "read": lambda run, _: run.seen.extend(
        [copied(run.model.state_dict()), copied(run.optimizer.state_dict())]
    ),
    "load model": lambda run, other: run.model.load_state_dict(other[0]),
    "load optimizer": lambda run, other: run.optimizer.load_state_dict(copied(other[1])),
}


@pytest.mark.nightly("emulated-disk-read-load optimizer-step-load model")
@pytest.mark.parametrize(
    ("tier", "order"),
    thinned(["host", "disk"], [*permutations(ACTS)][::5]),
    ids=lambda each: each if isinstance(each, str) else "-".join(each),
)
def test_state_dicts_in_any_order_are_those_of_plain_torch(
    order: tuple[str, ...], tier: TierName, tmp_path: Path
) -> None:
    """Each act twice, with nothing in between that waits; then the plan is taken off."""
    asked = on_host(Activations(tier=tier), Placement(tier=tier), model="functional")
    other = asked.start(seed=7)
    other.step(99)
    states = copied(other.model.state_dict()), copied(other.optimizer.state_dict())

    def script(run: Run) -> None:
        for act in (*order, *order):
            ACTS[act](run, states)
        if run.planned:
            restore(run.model)
        for act in ("read", "step"):
            ACTS[act](run, states)

    replace(asked, script=script).assert_like_plain(tmp_path)


def deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def test_a_plan_may_take_all_that_is_free(tmp_path: Path) -> None:
    """Free memory is free beside the context; a byte more than there is, is too much."""
    asked = on_host(model="functional")
    run = asked.start(tmp_path)
    model = restore(run.model)  # the context has grown to what kernels of `prepare` take
    room, context = devices.room_bytes(device()), devices.context_bytes(device())
    plan = asked.planned_for(model)
    plan = with_settings(plan, device=device().type, deterministic=deterministic())

    def taking(num_bytes: int) -> Scenario:
        peaks = TierBytes(device=num_bytes, context=context, host=0, disk=0)
        return replace(asked, plan=lambda _: with_settings(plan, peak_bytes=peaks))

    restore(taking(room).prepared(model, tmp_path).model)
    refusal(partial(taking(room + 1).prepared, model, tmp_path), NoRoomError)


class Rounding(torch.optim.SGD):
    """Steps whose last bits are others on the host, as AdamW's by its kernels and CUDA's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.device.type == "cpu":
                    parameter.mul_(1 + 2**-20)


@pytest.mark.nightly("emulated-pure")
@pytest.mark.parametrize("precision", ["pure", "master"])
def test_a_checked_run_updates_on_the_host_what_its_plan_updates_there(
    precision: Precision, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if precision == "master" else torch.float32

    def half(units: Units) -> Units:
        half = len(units) // 2
        return (*decided(units[:half], KEEP, HOST), *decided(units[half:], KEEP, PERSISTENT))

    def plan(model: Any) -> Plan:
        made = plan_for(
            model,
            half(CATALOGUE["functional"].units()),
            device=device().type,
            deterministic=deterministic(),
            precision=precision,
            dtype="bfloat16" if precision == "master" else "float32",
        )
        assert made.graded == ("host rounding" if made.host_updated else "bitwise")
        return made

    def trained() -> None:
        Scenario(
            model=replace(CATALOGUE["functional"], change=lambda model: model.to(dtype)),
            plan=plan,
            factory=partial(Rounding, lr=2**-7),
            options={"check": "bitwise"},
        ).start(tmp_path).step(0, 1, 2, 3)

    trained()
    monkeypatch.setattr(Plan, "host_updated", ())  # as if its updates were the device's own
    refusal(trained, DifferenceError)


# --- what only a card shows -----------------------------------------------------------------------

DECISIONS: list[tuple[Activations, Placement]] = [
    (Activations(tier="host"), HOST),
    (Activations(form="full", tier="host"), HOST),
    (Activations(form="lite"), HOST),
    (KEEP, Placement(tier="disk")),
]
AHEAD = Schedule(forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=1, update_drain=1)


@pytest.mark.nightly(
    "emulated-SwapInput_full-Offload", "emulated-Recompute_lite-Offload", "emulated-Keep-Offload"
)
@pytest.mark.parametrize("decision", DECISIONS, ids=decision_name)
def test_steps_wait_for_the_card_no_more_often_than_plain_ones(
    decision: tuple[Activations, Placement], tmp_path: Path
) -> None:
    """Forward and backward of a steady step; what transformers looks at, both wait for.

    Waits for a lane's thread, where bytes come from disk, are none for the card.
    """
    asked = on_host(*decision, AHEAD)
    given = asked.subject.batch(3)
    asked = replace(asked, model=replace(asked.subject, batches=lambda _: given))
    found = []
    plain, run = asked.start(), asked.start(tmp_path)
    run.step(0, 1, 2)
    for each in (plain, run):
        with host_waits() as waits:
            each.loss(3).backward()
        found.append(waits)
    run.optimizer.step()
    assert found[1] <= found[0]


def test_another_number_of_update_threads_than_the_plans_is_told_once(tmp_path: Path) -> None:
    asked, spare = on_host(), spare_threads(device())
    model = asked.subject.build()
    plan = asked.planned_for(model)

    def said(threads: int) -> list[str]:
        made = with_settings(plan, host_update_seconds=0.5, host_update_threads=threads)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            replace(asked, plan=lambda _: made).prepared(model, tmp_path).step(0)
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
    run = on_host(settings={"updates": "after backward"}).start(tmp_path)
    scaler = torch.amp.GradScaler(device().type)
    run.backward(0, weigh=scaler.scale)
    with host_waits() as waits:
        scaler.unscale_(run.optimizer)
    assert waits.total() == 1


@pytest.mark.parametrize("number", [0, 3])
def test_memory_that_cannot_be_pinned_is_one_message(number: int, tmp_path: Path) -> None:
    """And the model is as it was, also where some of its chunks had left the device."""
    if device().type != "emulated":
        pytest.skip("what a driver lets a process pin is not ours to turn")
    from tests.emulated.device import few_pins

    asked = on_host(model="functional")
    model = asked.subject.build()
    before = copied(model.state_dict())
    with few_pins(number):
        error = refusal(partial(asked.prepared, model, tmp_path), OutOfMemoryError)
    assert "of host memory cannot be pinned: emulated device error: out of memory" in str(error)
    assert "ulimit -l" in str(error)
    assert list(differences(model.state_dict(), before, "parameters")) == []
    asked.plain_run(model).step(0)


STRAY = """
import sys, tempfile, torch
from pathlib import Path
from tests.emulated.device import extension
extension()
from protrain_runtime.contract.records.plan import Activations, Placement
from protrain_runtime import restore
from tests.support.runtime_cases import decided, on_device
from tests.support.scenario import Scenario
def units(given):
    half = len(given) // 2
    return (
        *decided(given[:half], Activations(tier="host"), Placement(tier="host")),
        *decided(given[half:], Activations(tier="disk"), Placement(tier="disk")),
    )
torch.accelerator.set_device_index(1)
with on_device("emulated:1"):
    run = Scenario(model="functional", units=units).start(Path(tempfile.gettempdir()))
    run.step(0, 1, 2)
    restore(run.model)
sys.exit(extension().has_context(0) or not extension().has_context(1))
"""


@pytest.mark.nightly("emulated")
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
    asked = on_host(RECOMPUTE, model="gpt2")
    model = asked.subject.build()
    before = attached(model)
    monkeypatch.delattr(torch.get_device_module(device()), "_initialized")
    error = refusal(partial(asked.prepared, model, tmp_path), ProtrainError)
    assert f"devices of type '{device().type}' have no flag" in str(error)
    assert error.fix == "train on another device, or without a plan"
    assert attached(model) == before


def test_python_takes_short_turns_while_a_plan_runs(tmp_path: Path) -> None:
    usual = sys.getswitchinterval()
    run = on_host(model="functional").start(tmp_path)
    assert sys.getswitchinterval() <= SWITCH_INTERVAL_S
    restore(run.model)
    assert sys.getswitchinterval() == usual


def test_host_memory_is_pinned_and_takes_what_is_swapped(tmp_path: Path) -> None:
    run = on_host(Activations(tier="host")).start(tmp_path)
    before, _ = below_device(run.model)
    with record(run.model) as recorder:
        run.step(0, 1)
    lanes = {event.lane for event in recorder.recording().events}
    assert {"compute", "fetch host", "spill host", "update host"} <= lanes
    assert below_device(run.model)[0] > before
    stores = {chunk.store for chunk in run.engine._offloaded}
    assert stores
    for store in stores:
        assert isinstance(store, HostStore)
        assert store.view(0, 1).is_pinned()


# --- bytes ----------------------------------------------------------------------------------------


@pytest.fixture
def profile(card: torch.device) -> Profile:
    """A small model as the card runs it."""
    return _profiled(str(card))


@cache
def _profiled(_: str, adapter: str = "") -> Profile:
    with TemporaryDirectory() as spill:
        return measure(
            load_source("tiny-llama"),
            adapter=adapter,
            batch_size=4,
            seq_len=64,
            dtype="bfloat16",
            device=device(),
            num_steps=2,
            spill_directory=Path(spill),
            # What a probe says of the emulated device's speed tells nothing.
            machine=None if device().type == "cuda" else machine_of(device()),
        )


def machine_of(card: torch.device) -> Hardware:
    """A machine with this card that nobody has measured."""
    made = gpu(disk_gb=1)
    total = devices.free_and_total_bytes(card)[1]
    return replace(made, device=replace(made.device, kind=card.type, memory_bytes=total))


def bytes_of_others() -> int:
    """Bytes of tensors that other tests have left on the card; what libraries keep is predicted."""
    while gc.collect():  # what one collection finalizes, the next one frees
        pass
    return reachable_bytes(device())


def ran(plan: Plan, spill: Path) -> Trained:
    """A run, with the bytes that others have on the card taken off."""
    return trained(plan, spill, others=bytes_of_others(), device=str(device()))


def assert_kept(plan: Plan, profile: Profile, spill: Path) -> tuple[int, int]:
    """Bytes of tensors, in every slot and in all steps; and below the device, to the byte."""
    program, run = program_of(plan, profile), ran(plan, spill)
    predicted = [slot.total for slot in device_bytes(program)]
    over = [(n, m - p) for n, (p, m) in enumerate(zip(predicted, run.slot_bytes, strict=True))]
    assert [(slot, more) for slot, more in over if more > 0] == []
    peak = run.measured_peak_bytes
    assert peak
    assert peak.host <= program.tier_bytes("host")
    assert peak.disk <= program.tier_bytes("disk")
    assert peak.device <= max(predicted)
    return max(run.slot_bytes), max(predicted)


@pytest.mark.nightly("emulated-0")
@pytest.mark.parametrize("seed", thinned(range(6), every=6))
def test_measured_bytes_never_exceed_predicted(profile: Profile, seed: int, tmp_path: Path) -> None:
    units = mixed(described_by(profile), random.Random(seed), "host", "disk")
    assert_kept(plan_for_profile(profile, units), profile, tmp_path)


@pytest.mark.nightly("emulated-apart", "emulated-overlapping", "emulated-ahead of the norm")
@pytest.mark.parametrize("how", ["apart", "overlapping", "ahead of the norm"])
def test_measured_bytes_of_updates_on_the_device_never_exceed_predicted(
    profile: Profile, how: str, tmp_path: Path
) -> None:
    """Bytes of the first step, which makes the optimizer's states, and of those that follow."""
    speculate = how == "ahead of the norm"
    schedule = Schedule(forward_lead=1, update_drain=1)
    states = Placement(tier="host", update_on_device=True, speculate=speculate)
    plan = plan_for_profile(
        profile,
        decided(described_by(profile), RECOMPUTE, states, schedule),
        piece_bytes=1 << 16,
        overlap_steps=how != "apart",
        updates="after backward" if speculate else "in backward",
    )
    measured, predicted = assert_kept(plan, profile, tmp_path)
    assert measured >= 0.9 * predicted


@pytest.mark.slow  # it profiles another model
@pytest.mark.parametrize("part", [1, 3])
@pytest.mark.parametrize("lead", [0, 0.4, 1])
def test_frozen_parameters_come_from_host_memory_and_disk(
    card: torch.device, lead: float, part: int, tmp_path: Path
) -> None:
    profile = _profiled(str(card), str(parse_lora("r=4")))
    schedule = Schedule(forward_lead=lead, backward_lead=lead, update_drain=0)
    states = Placement(tier="host", on_disk=part)
    plan = plan_for_profile(profile, decided(described_by(profile), RECOMPUTE, states, schedule))
    program = program_of(plan, profile)
    fetched = {move.lane.tier for move in program.moves if move.kind == "fetch"}
    assert fetched == {"host", "disk"}
    frozen = sum(unit.parameter_bytes - unit.gradient_bytes for unit in profile.units)
    blocks = 2 * len(profile.units) * PAGE_BYTES
    assert abs(program.tier_bytes("disk") - frozen * part / 16) <= blocks
    measured, predicted = assert_kept(plan, profile, tmp_path)
    assert measured >= 0.9 * predicted


@pytest.mark.nightly("emulated")
def test_a_solved_plan_keeps_its_promise(profile: Profile, tmp_path: Path) -> None:
    """Between the least and what keeping everything takes."""
    ample = Budgets(device=10**12, host=10**12, disk=10**12)
    everything = solve(profile, ample)
    assert isinstance(everything, Solved)
    whole = everything.plan.prediction.peak_bytes
    besides = whole.on_device - whole.device
    besides += profile.fixed_bytes  # workspaces, those of threads of other tests too
    room = whole.device - profile.fixed_bytes
    solved = solve(profile, replace(ample, device=besides + round(0.75 * room)))
    assert isinstance(solved, Solved)
    peak = ran(solved.plan, tmp_path).measured_peak_bytes
    assert peak
    assert peak.device <= solved.plan.prediction.peak_bytes.device


def filling(num_bytes: int) -> Iterator[Tensor]:
    """Tensors of this size until the allocator asks the card for more."""
    reserved = torch.accelerator.memory_reserved(device())
    while torch.accelerator.memory_reserved(device()) == reserved:
        yield torch.empty(num_bytes, dtype=torch.uint8, device=device())


@pytest.mark.nightly("emulated")
def test_memory_that_runs_out_is_told_by_slot(profile: Profile, tmp_path: Path) -> None:
    """A cap below what is planned, set by the allocator."""
    source = load_source("tiny-llama")
    batches = batches_of(source, batch_size=4, seq_len=64, device=device())
    run = Scenario(
        model=Subject(lambda: model_of(source, dtype="bfloat16"), lambda _: next(batches)),
        plan=lambda _: plan_for_profile(profile, decided(described_by(profile), KEEP, HOST)),
    ).start(tmp_path)
    given = run.subject.batch(0)
    run.subject = replace(run.subject, batches=lambda _: given)
    bytes_of_others()
    devices.free_cached(device())  # of other tests, blocks of sizes between those below
    held = [*filling(2**16), *filling(2**20), *filling(2**21)]  # small and large blocks
    with (
        capped(torch.accelerator.memory_reserved(device())),
        pytest.raises(OutOfMemoryError) as caught,
        explain_memory(run.model, lambda: profile),
    ):
        run.backward(0)
    held.clear()
    assert "out of memory" in str(caught.value)
