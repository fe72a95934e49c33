"""Optimizers whose steps differ: the bytes of an SVD every few steps."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.models.sources import load_source
from protrain_plan.profiling.memory.lasting import Lasting
from protrain_plan.profiling.optimizer_cost import workspace_by_rule
from protrain_plan.profiling.structure.discovery import undisturbed
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import promised_bytes
from protrain_runtime.contract.records.plan import (
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    RECOMPUTE,
    Placement,
)
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.devices.memory_meter import MemoryMeter
from protrain_runtime.diagnostics.matching import model_fingerprint
from protrain_runtime.states.update_rules import UpdateRules
from tests.support.estimates import estimate, machine
from tests.support.hostile_models import HOSTILE, Chain, batch_of
from tests.support.peaks import SLACK_BYTES, bytes_of_others
from tests.support.runtime_cases import decided, described_by, plan_for_profile, profiled_here
from tests.support.trained import train

LOW_RANK = "tests.support.low_rank:LowRank"
SHAPES = Counter({(torch.float32, torch.Size([n, 64])): n // 96 for n in (96, 192)})


def test_noise_with_a_gradient_counts_twice_as_the_last_loss_holds_both() -> None:
    """A further forward has them beside those of the last one."""
    model = HOSTILE["peaks: a leaf of its own"].build()
    lasting = Lasting(model)
    loss_of(call_model(model, batch_of(0))).backward()
    noise: torch.Tensor = model.noise  # type: ignore[assignment]
    assert noise.grad is not None
    assert lasting.num_bytes() == 2 * (noise.nbytes + noise.grad.nbytes)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", f"{LOW_RANK}(every=1)"])
def test_a_first_step_that_only_makes_states_is_not_counted(optimizer: str) -> None:
    factory = optimizer_factory(optimizer)
    taken = second_step_bytes(factory, [(number, 64) for number in (96, 192, 192)])
    assert workspace_by_rule(UpdateRules(factory), SHAPES).workspace_bytes == taken


def second_step_bytes(kind: Any, shapes: Iterable[tuple[int, ...]]) -> int:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    made = kind(parameters)
    for each in parameters:
        each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(0))
    made.step()
    with MemoryMeter() as meter:
        meter.mark("second step")
        made.step()
    return meter.segments[0].peak_bytes - meter.segments[0].start_bytes


class TwoRules(torch.optim.Optimizer):
    """Matrices by one rule and all else by another, in one `step` whose names outlive their use.

    in_turn   parameters come as they come; else all of one rule before all of the other
    vectors_first, in_attributes  which rule is first, and whether `self` has names, too
    """

    in_turn = vectors_first = in_attributes = False

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        self.names: tuple[Any, ...] = ()
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        if not self.in_turn:
            parameters.sort(key=lambda p: (p.dim() == 2) is self.vectors_first)
        for p in parameters:
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            momentum = state["momentum"].lerp_(p.grad, 0.1)
            if p.dim() == 2:
                direction = momentum / (momentum.norm() + 1e-7)
                gram = direction @ direction.T
                p.sub_(gram @ direction)
                kept = (direction, gram)
            else:
                square = momentum.square()
                root = (square + 1e-8).sqrt()
                p.addcdiv_(momentum, root, value=-0.01)
                kept = (square, root)
            if self.in_attributes:
                self.names = kept
        self.names = ()


RULES = [
    dict(zip(("in_turn", "vectors_first", "in_attributes"), flags, strict=True))
    for flags in itertools.product((False, True), repeat=3)
]
TWO_RULES = [
    [(256, 256), (256, 256), (256,)],
    [(256, 64), (64, 256), (2**16,), (300,)],
    [(64, 64), (2**17,)],
]


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize("shapes", TWO_RULES, ids=str)
@pytest.mark.parametrize(
    "flags", RULES, ids=lambda flags: "-".join(k for k, v in flags.items() if v)
)
def test_what_a_rule_leaves_beside_another_one_is_counted_in_every_order(
    flags: dict[str, bool], shapes: list[tuple[int, ...]]
) -> None:
    kind = type("TwoRules", (TwoRules,), flags)
    counts = Counter((torch.float32, torch.Size(shape)) for shape in shapes)
    predicted = workspace_by_rule(UpdateRules(kind), counts).workspace_bytes
    taken = [second_step_bytes(kind, order) for order in itertools.permutations(shapes)]
    assert max(taken) <= predicted <= 2 * max(taken)


class Piles(TwoRules):
    """Keeps what it took for each parameter until all are stepped on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        taken = []
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            momentum = state["momentum"].lerp_(p.grad, 0.1)
            taken.append((p, momentum * 2 if p.dim() == 2 else momentum.sign().neg()))
        for p, direction in taken:
            p.sub_(direction)


class LooksAtAll(torch.optim.AdamW):
    """Looks at all gradients in one tensor, whose bytes a step on one of them hides."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [p.grad for group in self.param_groups for p in group["params"]]
        mean = torch.cat([gradient.abs().flatten() for gradient in every]).mean()
        for gradient in every:
            gradient.sub_(mean)
        super().step()


def test_what_a_step_takes_of_all_gradients_is_counted() -> None:
    shapes = [(128, 128)] * 9 + [(64, 256)] * 3 + [(512,)] * 2
    counts = Counter((torch.float32, torch.Size(shape)) for shape in shapes)
    rules = UpdateRules(LooksAtAll)
    predicted, taken = workspace_by_rule(rules, counts), second_step_bytes(LooksAtAll, shapes)
    assert all(rules.of(*kind).together for kind in counts)
    assert taken <= predicted.workspace_bytes <= 1.1 * taken


@pytest.mark.parametrize("numbers", [(1, 1), (3, 2), (5, 0)], ids=str)
def test_what_a_step_piles_up_is_counted(numbers: tuple[int, int]) -> None:
    shapes = [(128, 128)] * numbers[0] + [(512,)] * numbers[1]
    counts = Counter((torch.float32, torch.Size(shape)) for shape in shapes)
    predicted = workspace_by_rule(UpdateRules(Piles), counts)
    taken = second_step_bytes(Piles, shapes)
    if predicted.workspace_bytes:  # else the fraction of one shape is measured
        assert taken <= predicted.workspace_bytes <= 1.5 * taken


EVERY, NUM_STEPS = 3, 4
"""The last step, which is measured, is a slow one; of two steps it is a usual one."""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    others = bytes_of_others()  # are what a script's data would be
    name = f"{LOW_RANK}(every={EVERY},times=8)"
    found = profiled_here("tiny-llama", tmp_path_factory.mktemp("spill"), optimizer=name)
    return replace(found, base_bytes=found.base_bytes - others)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "states", [PERSISTENT, OPTIMIZER_IN_BACKWARD], ids=["after", "in backward"]
)
def test_slow_steps_train_as_plain_torch_within_what_was_predicted(
    profile: Profile, states: Placement, tmp_path: Path
) -> None:
    units = decided(described_by(profile), RECOMPUTE, states)
    plan = plan_for_profile(profile, units, optimizer=profile.optimizer.name)
    most = promised_bytes(plan, profile)
    above = []
    for num_steps in (NUM_STEPS, 2):
        others = bytes_of_others()
        run = train(plan, num_steps=num_steps, plain=False, spill_directory=tmp_path)
        slots = [size - others for size in run.slot_bytes]
        assert all(size <= bound for size, bound in zip(slots, most, strict=True))
        above.append([bound - size for size, bound in zip(slots, most, strict=True)])
        plainly = train(plan, num_steps=num_steps, plain=True, spill_directory=None, compared=True)
        assert (run.losses, run.parameters_sha256) == (plainly.losses, plainly.parameters_sha256)
    # Exact but where the optimizer steps: a usual step takes less of what a slow one may take.
    slow, usual = above
    workspace = profile.optimizer.workspace_bytes
    assert min(slow) <= SLACK_BYTES
    assert max(slow) <= workspace
    assert max(b - a for a, b in zip(slow, usual, strict=True)) > workspace / 4


# --- first forwards -------------------------------------------------------------------------------


WIDTH = 16


class Observed(nn.Module):
    """A linear layer that keeps the largest input of each feature."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)
        self.first = True
        if how in BUFFERS:
            self.register_buffer("seen", BUFFERS[how]())

    def forward(self, x: Tensor) -> Tensor:
        OBSERVE[self.how](self, x.detach().abs().amax((0, 1)))
        result: Tensor = x + self.linear(x) * self.seen.mean()  # type: ignore[operator]
        return result


def resized(module: Any, now: Tensor) -> None:
    if module.seen.numel() == 0:
        module.seen.resize_(now.shape).copy_(now)
    else:
        module.seen.copy_(torch.maximum(module.seen, now))


def assigned(module: Any, now: Tensor) -> None:
    unknown = module.seen is None or module.seen.shape != now.shape
    module.seen = now if unknown else torch.maximum(module.seen, now)


def registered(module: Any, now: Tensor) -> None:
    if not hasattr(module, "seen"):
        module.register_buffer("seen", now)


def flagged(module: Any, now: Tensor) -> None:
    if module.first:
        module.register_buffer("seen", now, persistent=False)
        module.first = False


BUFFERS: dict[str, Callable[[], Tensor | None]] = {
    "resized": lambda: torch.tensor([]),
    "assigned": lambda: torch.zeros(1),
    "none": lambda: None,
}
OBSERVE: dict[str, Callable[[Any, Tensor], None]] = {
    "resized": resized,
    "assigned": assigned,
    "none": assigned,
    "registered": registered,
    "flagged": flagged,
}


def made(how: str) -> tuple[nn.Module, list[Tensor]]:
    return Chain(*(Observed(how) for _ in range(3))), [torch.ones(2, 4, WIDTH)]


@pytest.mark.nightly("flagged")
@pytest.mark.parametrize("how", OBSERVE)
def test_a_buffer_of_the_first_forward_is_profiled_and_taken_back(how: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from tests.profiling.test_first_steps import made\n"
        f"def factory():\n    return made({how!r})\n"
    )
    source = load_source(f"{tmp_path}/mine.py:factory")
    found = estimate(source, batch_size=1, seq_len=1, dtype="float32", hardware=machine())
    assert [unit.name for unit in found.units if unit.kind == "block"] == [
        f"layers.{number}" for number in range(3)
    ]
    model, [batch] = made(how)
    before = model_fingerprint(model)
    assert found.model_fingerprint == before
    with undisturbed(model):
        for _ in range(2):
            with undisturbed(model):
                model(batch)
        assert all(tuple(each.shape) == (WIDTH,) for each in model.buffers())
    assert model_fingerprint(model) == before


def split(params: Any, *, empty: int) -> torch.optim.Optimizer:
    """AdamW with two groups of its own, of which one may stay empty."""
    given = [
        one for each in params for one in (each["params"] if isinstance(each, dict) else [each])
    ]
    groups: list[dict[str, Any]] = [{"params": given}, {"params": []}]
    return torch.optim.AdamW(groups[:: 1 - 2 * empty])


@pytest.mark.parametrize("empty", [0, 1])
def test_a_constructor_may_leave_one_of_its_groups_empty(empty: int) -> None:
    rules = UpdateRules(lambda params: split(params, empty=empty))
    plain = UpdateRules(torch.optim.AdamW)
    try:
        found = rules.of(torch.float32, torch.Size((8, 8)))
    except ProtrainError as error:
        pytest.fail(str(error))
    assert found.element_bytes == plain.of(torch.float32, torch.Size((8, 8))).element_bytes
