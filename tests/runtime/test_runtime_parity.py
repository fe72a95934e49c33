"""Training under a plan computes what plain PyTorch computes: equal in every bit, no tolerance.

What two of a run's choices make together is asked by test_parity_matrix.
"""

import gc
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from protrain_plan.profiling.memory.unit_bytes import analyze_units, measure_bytes
from protrain_plan.profiling.structure.discovery import discover, undisturbed
from protrain_runtime import MovingAverage, full_parameters, restore, with_master_weights
from protrain_runtime.contract.program.compiling import compile_plan
from protrain_runtime.contract.program.program import MAX_PIECES, disk_pieces
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
    Schedule,
    StepSettings,
)
from protrain_runtime.contract.records.profile import Form
from protrain_runtime.devices.lanes import Backend
from protrain_runtime.devices.memory_meter import MemoryMeter
from protrain_runtime.devices.stores import DiskStore, HostStore, SplitStore
from protrain_runtime.states.chunk_layouts import make_chunk, make_chunks
from protrain_runtime.states.chunks import read_values
from protrain_runtime.states.offloading import offload
from protrain_runtime.states.update_rules import UpdateRules
from tests.support.cards import every_device
from tests.support.hostile_models import WIDTH, Make, batch_of, does, next_token, stack
from tests.support.random_models import Shape, subject
from tests.support.runtime_cases import (
    ADAMW,
    CATALOGUE,
    FRACTIONAL,
    MODELS,
    RECOMPUTED,
    Factory,
    Subject,
    assert_bitwise,
    attached,
    build,
    copied,
    decided,
    decision_name,
    decisions,
    described,
    differences,
    mixed,
    phrase,
)
from tests.support.scenario import Loop, Run, Scenario, Units, restored
from tests.support.thinning import thinned

CPU = torch.device("cpu")
DISK = Placement(tier="disk")

# --- every decision -------------------------------------------------------------------------------


@pytest.mark.nightly("str-Recompute_*-emulated", "str-SwapInput_*-emulated")
@every_device
@pytest.mark.parametrize(
    ("name", "decision"),
    [
        *thinned(MODELS, decisions("disk"), every=18, of_these=3),
        *thinned(["llama-tied", "gpt2", "functional-relu"], decisions("host"), every=9, of_these=3),
    ],
    ids=decision_name,
)
def test_five_steps_match_plain_torch_bitwise(
    name: str, decision: tuple[Activations, Placement], tmp_path: Path
) -> None:
    """On a CPU the host tier is copies in memory: gradients spill as they do to a real host."""
    decide = partial(decided, activations=decision[0], states=decision[1])
    Scenario(model=name, units=decide).assert_like_plain(tmp_path, restored)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", FRACTIONAL, ids=["0", "1"])
def test_fractional_schedules_cut_every_kind_of_transfer(schedule: Schedule) -> None:
    """The tests above run what they say: otherwise they would test less."""
    cut: set[str] = set()
    whole = ((0.0, 0.0), (0.0, 1.0))
    for tier in ("disk", "host"):
        model = build("gpt2")
        units = decided(described("gpt2"), Activations(tier=tier), Placement(tier=tier), schedule)
        chunks = [chunk.size(UpdateRules(ADAMW)) for chunk in make_chunks(model, units)]
        program = compile_plan(units, chunks, StepSettings(piece_bytes=15_000), device="cpu")
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


def test_no_more_than_predicted_is_in_host_memory_beside_a_disk(tmp_path: Path) -> None:
    """The first piece has frozen parameters, and many gaps between trained ones."""
    small = [nn.Parameter(torch.randn(3, 5), requires_grad=n % 50 > 0) for n in range(200)]
    large = [nn.Parameter(torch.randn(4096), requires_grad=False) for _ in range(20)]
    parameters = [(str(n), parameter) for n, parameter in enumerate((*small, *large))]
    before = {name: parameter.detach().clone() for name, parameter in parameters}
    chunk, backend = make_chunk(0, parameters, (0,)), Backend(CPU)
    near, far = HostStore(backend), DiskStore(tmp_path, backend)
    offload(chunk, SplitStore(backend, near, far), rules := UpdateRules(ADAMW), on_disk=3)
    size = chunk.size(rules)
    on_disk = disk_pieces(size, 3)
    states = size.state_bytes
    assert len([piece for piece in on_disk if piece]) > 1
    assert near.num_bytes == size.parameter_bytes - sum(on_disk) + states
    assert all(torch.equal(read_values(chunk, part), before[part.name]) for part in chunk.slices)
    far.close()


# --- optimizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", [ADAMW, partial(torch.optim.SGD, lr=1e-2, momentum=0.9)])
def test_a_cycle_of_rates_and_betas_matches_plain_torch_bitwise(
    factory: Factory, tmp_path: Path
) -> None:
    one_cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=3e-3, total_steps=10)
    script = Loop(scheduler=one_cycle)
    units = busy_with("disk")
    Scenario(model="functional", units=units, factory=factory, script=script).assert_like_plain(
        tmp_path
    )


# --- what else a training loop does ---------------------------------------------------------------


def busy_with(tier: TierName = "disk", seed: int = 7) -> Callable[[Units], Units]:
    """A plan of every kind of decision."""
    return lambda units: mixed(units, random.Random(seed), tier)


@pytest.mark.nightly("emulated")
@every_device
def test_a_plan_that_keeps_everything_installs_nothing(tmp_path: Path) -> None:
    threads = threading.active_count()
    run = Scenario(model="llama").start(tmp_path)
    own, hooks = run.before[""]
    assert attached(run.model) == {
        **run.before,
        "": (sorted([*own, "__reduce_ex__", "_protrain_prepared"]), hooks),
    }
    assert threading.active_count() == threads
    assert_bitwise(Scenario(model="llama").played(run), Scenario(model="llama").plain())
    restored(run)


@pytest.mark.nightly(by_day=6)
@every_device
@pytest.mark.parametrize("name", thinned(MODELS, every=4))
def test_evaluation_between_steps_matches_plain_torch_bitwise(name: str, tmp_path: Path) -> None:
    script = Loop(num_steps=4, looks=(None, torch.no_grad), evaluates=True)
    Scenario(model=name, units=busy_with(), script=script).assert_like_plain(tmp_path)


@pytest.mark.nightly(but=("cuda",))
@every_device
def test_a_dropped_model_takes_its_lanes_with_it(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    run = Scenario(model="llama", units=busy_with()).start(tmp_path)
    run.step(0)
    lanes = set(threading.enumerate()) - others
    names = {thread.name for thread in lanes}
    # Where direct I/O takes the memory as it is, requests have threads of their own, too.
    assert {name for name in names if not name.startswith("protrain file")} == {
        f"protrain {lane} disk" for lane in ("fetch", "read", "spill", "update", "write")
    }
    del run
    gc.collect()
    assert [thread for thread in lanes if thread.is_alive()] == []


# --- averages -------------------------------------------------------------------------------------

AVERAGES: dict[str, Callable[[], Callable[..., None]]] = {
    "exponential": lambda: get_ema_multi_avg_fn(0.9),
    "equal": get_swa_multi_avg_fn,
}


@pytest.mark.nightly("exponential-states0")
@pytest.mark.parametrize(
    ("kind", "states"),
    thinned(tuple(AVERAGES), (DISK, Placement(tier="host"), PERSISTENT), every=2),
)
def test_averages_equal_averaged_model_bitwise(
    kind: str, states: Placement, tmp_path: Path
) -> None:
    asked = Scenario(model="llama", units=lambda units: decided(units, RECOMPUTE, states))
    plain, run = asked.start(), asked.start(tmp_path)
    averaged = AveragedModel(plain.model, multi_avg_fn=AVERAGES[kind]())
    average = MovingAverage(run.model, AVERAGES[kind]())

    def train(number: int) -> None:
        for each in (plain, run):
            each.step(number)
        averaged.update_parameters(plain.model)
        average.update()

    def loss(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return Run(run.subject, model, run.optimizer).loss(9)

    def same(found: dict[str, Tensor]) -> bool:
        expected = averaged.module.state_dict()
        return all(torch.equal(value, expected[name]) for name, value in found.items())

    for number in range(3):
        train(number)
    saved = average.state_dict()
    assert same(saved["parameters"])
    with average.applied():
        assert torch.equal(loss(run.model), loss(averaged.module))
        with pytest.raises(RuntimeError, match=r"inside MovingAverage\.applied"):
            run.step(3)
    assert torch.equal(loss(run.model), loss(plain.model))
    if states != PERSISTENT:
        taken = full_parameters(run.model).num_bytes
        assert average.num_bytes == taken >= sum(p.nbytes for p in run.model.parameters())

    average = MovingAverage(run.model, AVERAGES[kind]())
    average.load_state_dict(saved)
    train(3)
    assert same(average.state_dict()["parameters"])
    restore(run.model)
    with pytest.raises(RuntimeError, match="after restore"):
        average.update()


def with_empty_parameters(model: nn.Module) -> None:
    for module in list(model.modules()):
        module.register_parameter("nothing", nn.Parameter(torch.ones(0)))


@pytest.mark.parametrize("states", [DISK, Placement(tier="host")], ids=phrase)
def test_parameters_without_elements_are_averaged(states: Placement, tmp_path: Path) -> None:
    model = replace(CATALOGUE["functional"], change=with_empty_parameters)
    run = Scenario(model=model, units=lambda units: decided(units, KEEP, states)).start(tmp_path)
    average = MovingAverage(run.model)
    average.update()
    found: dict[str, Tensor] = average.state_dict()["parameters"]
    assert list(differences(found, run.model.state_dict(), "average")) == []


# --- buffers that forwards write ------------------------------------------------------------------


def normed(block: Any, hidden: Tensor) -> Tensor:
    """A residual with a norm over the batch."""
    inner = block.over(block.inner(block.norm(hidden)).transpose(1, 2))
    found: Tensor = hidden + block.outer(torch.relu(inner.transpose(1, 2)))
    return found


def counting(block: Any, hidden: Tensor) -> Tensor:
    """Counts its calls in a buffer, and computes with the count."""
    block.calls += 1
    return hidden + block.computed(hidden) / block.calls  # type: ignore[no-any-return]


def replacing(block: Any, hidden: Tensor) -> Tensor:
    """The same with a new buffer at every call."""
    block.calls = block.calls + 1
    return hidden + block.computed(hidden) / block.calls  # type: ignore[no-any-return]


NORMS: dict[str, Make] = {
    "batch": partial(nn.BatchNorm1d, 2 * WIDTH),
    "cumulative": partial(nn.BatchNorm1d, 2 * WIDTH, momentum=None),
    "instance": partial(nn.InstanceNorm1d, 2 * WIDTH, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("activations", "states"),
    [
        (RECOMPUTE, PERSISTENT),
        (Activations(form="lite"), PERSISTENT),
        (Activations(form="full", tier="disk"), DISK),
    ],
    ids=["full", "lite", "swapped"],
)
def test_running_statistics_count_every_batch_once(
    norm: str, activations: Activations, states: Placement, tmp_path: Path
) -> None:
    run = Scenario(
        model=Subject(stack(does(normed, over=NORMS[norm]), depth=3), batch_of),
        units=lambda units: decided(units, activations, states),
        factory=partial(torch.optim.AdamW, lr=1e-2),
    ).assert_like_plain(tmp_path, restored)
    assert len(list(run.model.named_buffers())) == 9  # of three norms: mean, variance, count


@pytest.mark.parametrize(
    ("block", "recomputed"),
    [
        (does(normed, over=NORMS["batch"]), True),
        (does(counting, calls=lambda: nn.Buffer(torch.zeros(()))), False),
        (does(replacing, calls=lambda: nn.Buffer(torch.zeros(()))), False),
    ],
    ids=["running statistics", "counting", "replacing"],
)
def test_a_block_that_writes_other_buffers_keeps_what_it_saves(
    block: Make, recomputed: bool
) -> None:
    model, batch = Subject(stack(block, depth=3), batch_of).build(), batch_of(0)
    before = copied(model.state_dict())
    with undisturbed(model):
        anatomy = analyze_units(model, batch, discover(model, batch))
        units = measure_bytes(model, batch, anatomy, MemoryMeter)[0]
    assert [len(u.forms) > 1 for u in units if u.kind == "block"] == [recomputed] * 3
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


# --- faults that random models and the matrix found once ------------------------------------------


NORMED = Shape(blocks=(("batch norm", "nothing"),) * 3)


def trained(shape: Shape, *decision: Any, **options: Any) -> Scenario:
    """Three steps of a random model, all of whose units have one decision."""
    return Scenario(
        model=subject(shape),
        units=lambda units: decided(units, *decision),
        script=Loop(num_steps=3),
        **options,
    )


@pytest.mark.nightly(by_day=6)
@every_device
@pytest.mark.parametrize("form", RECOMPUTED)
def test_products_that_were_swapped_may_be_written_to(form: Form, tmp_path: Path) -> None:
    """As `F.linear(...).mul_(0.5)` does in the recomputation."""
    shape = Shape(blocks=(("in place", "nothing"),) * 2)
    decision = Activations(tier="disk", form=form)
    trained(shape, decision, PERSISTENT).assert_like_plain(tmp_path)


def test_states_with_numbers_of_their_own_load_unrounded_into_master_precision() -> None:
    """NAdam's product of momenta, which torch.optim casts to the parameter's dtype."""
    factory = with_master_weights(partial(torch.optim.NAdam, lr=1e-3))
    (first, second) = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    one, other = factory([first]), factory([second])
    for _ in range(3):
        first.grad = torch.full_like(first, 0.3)
        one.step()
    other.load_state_dict(one.state_dict())
    assert one.state[first]["mu_product"].dtype == torch.float32
    assert list(differences(other.state_dict(), one.state_dict(), "states")) == []


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_pieces_are_cut_where_kernels_give_the_bits_of_the_whole(
    tier: TierName, tmp_path: Path
) -> None:
    """SGD on bfloat16 rounds the ends of ranges of odd lengths in another way."""
    shape = Shape(blocks=(("linear", "nothing"),) * 2, unused=True)
    factory = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
    tried = trained(shape, KEEP, Placement(tier=tier), factory=factory, piece_bytes=1_100)
    halved = replace(tried.subject, change=lambda model: model.to(torch.bfloat16))
    replace(tried, model=halved).assert_like_plain(tmp_path)


class WholeNorm(torch.optim.SGD):
    """Steps of length one for each parameter, as LARS makes them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= parameter.grad.norm()
        return super().step(closure)


OFFLOADED = (KEEP, Placement(tier="disk"))


def test_a_parameter_whose_update_needs_all_of_it_is_never_cut(tmp_path: Path) -> None:
    """A small one goes through the optimizer as a whole; of a large one that is not tried."""
    whole = partial(WholeNorm, lr=0.1)
    large = UpdateRules(whole).of(torch.float32, torch.Size([1024, 1024]))
    assert large.reason == "one element's update depends on others"
    trained(NORMED, *OFFLOADED, factory=whole, piece_bytes=256).assert_like_plain(tmp_path)


def with_a_loss(block: Any, hidden: Tensor) -> Tensor:
    """Keeps a loss of its own beside what it hands on, made after that."""
    out = torch.tanh(block.computed(hidden)) + hidden
    block.loss = torch.sigmoid(block.router(hidden)).square().mean()
    return out


def penalized(stack: Any, hidden: Tensor, step: int) -> Tensor:
    stack.penalties = []
    for number, block in enumerate(stack.blocks):
        hidden = block(hidden)
        if number % 2:
            stack.penalties.append(stack.blocks[number - 1].inner.weight.square().mean())
    return hidden


def with_losses(stack: Any, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Autograd comes to what was computed last first, before it comes to what blocks hand on.

    So it comes to a loss that a block has made at its end, and to a penalty on a block's parameter
    that was made between later blocks.
    """
    aside = [*stack.penalties, *(block.loss for block in stack.blocks)]
    return next_token(stack, hidden, tokens) + torch.stack(aside).sum()


ASIDE = does(with_a_loss, router=partial(nn.Linear, WIDTH, WIDTH))


@pytest.mark.nightly(by_day=8)
@every_device
@pytest.mark.parametrize(
    ("activations", "states"),
    [
        (KEEP, Placement(tier="disk")),
        (Activations(tier="disk"), PERSISTENT),
        (Activations(tier="disk"), Placement(tier="host", keep_gathered=True)),
    ],
    ids=decision_name,
)
@pytest.mark.parametrize("lead", [0, 1])
def test_what_is_computed_beside_a_unit_waits_for_its_slot_in_backward(
    activations: Activations, states: Placement, lead: int, tmp_path: Path
) -> None:
    schedule = Schedule(forward_lead=lead, backward_lead=lead, swap_lead=lead)
    Scenario(
        model=Subject(stack(ASIDE, 5, run=penalized, ends=with_losses), batch_of),
        units=lambda units: decided(units, activations, states, schedule),
        script=Loop(num_steps=4),
        options={"lane_delay": lambda: 0.01},
    ).assert_like_plain(tmp_path)


def spared(block: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Computes what nobody uses, too."""
    return hidden + torch.tanh(block.inner(hidden))[..., :WIDTH], torch.tanh(block.spare(hidden))


def remembering(block: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Remembers its weights from step to step."""
    block.held = block.inner.weight.detach().t()
    return spared(block, hidden)


def reads_memory(stack: Any, hidden: Tensor, step: int) -> Tensor:
    held = [block.held for block in stack.blocks]
    hidden = hidden * (1 + sum(each.square().mean() for each in held if each is not None))
    for block in stack.blocks:
        hidden, _ = block(hidden)
    return hidden


def with_memory(*run: Callable[..., Any]) -> Subject:
    """Blocks that do so, one after the other."""
    spare = partial(nn.Linear, WIDTH, WIDTH)
    blocks = [does(each, held=lambda: None, spare=spare) for each in run]
    return Subject(stack(blocks, run=reads_memory), batch_of)


@pytest.mark.nightly("lite-*", "mlp-*", "attn-*")
@every_device
@pytest.mark.parametrize("form", ["keep", *RECOMPUTED])
def test_views_that_are_held_from_step_to_step_are_refused(form: Form, tmp_path: Path) -> None:
    """With the way to do it; what autograd has left of a second run is no such view."""
    activations = KEEP if form == "keep" else Activations(form=form)

    def planned(units: Units) -> Units:
        return decided(units, activations, Placement(tier="host"))

    def pinned(units: Units) -> Units:
        held = decided(units, activations, PERSISTENT)
        pairs = zip(planned(units), held, strict=True)
        return tuple(own if own.name == "blocks.1" else unit for unit, own in pairs)

    model = with_memory(spared, remembering, spared, spared)
    asked = Scenario(model=model, units=planned, script=Loop(num_steps=3))
    run = asked.start(tmp_path)
    with pytest.raises(RuntimeError, match=r"from step to step .* --pin \"blocks.1: persistent"):
        asked.played(run)
    replace(asked, units=pinned).assert_like_plain(tmp_path / "pinned")
    replace(asked, model=with_memory(*[spared] * 4)).assert_like_plain(tmp_path / "unused")
