"""What training scripts do beside forward, backward and step, on a model that follows a plan.

The oracle is plain PyTorch doing the same; what a plan cannot keep is refused in clear words.
"""

import copy
import gc
import io
import pickle
import re
import resource
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import protrain_runtime
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.models.building import seeded
from protrain_runtime import prepare, restore
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import (
    Keep,
    Offload,
    Persistent,
    Placement,
    UnitPlan,
    Updates,
)
from protrain_runtime.devices.preflight import NoRoomError
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.model.prepared import engine_of, prepared_of
from tests.support.hostile_models import Stack, batch_of
from tests.support.judging import is_refusal
from tests.support.runtime_cases import (
    ADAMW,
    Outcome,
    assert_bitwise,
    decided,
    differences,
    outcome,
    plan_for,
    units_of,
)

runtime: Any = protrain_runtime
"""Its names may come later than these tests."""

DISK = Offload(tier="disk")
IN_BACKWARD: Updates = "in backward"
AFTER_BACKWARD: Updates = "after backward"
BOTH: tuple[Updates, ...] = (IN_BACKWARD, AFTER_BACKWARD)

Run = Callable[[nn.Module, Optimizer], Iterable[Tensor]]
"""Trains a model, and gives the losses."""


def build() -> nn.Module:
    with seeded(0):
        return Stack().train()


@cache
def described() -> tuple[UnitPlan, ...]:
    return units_of(build(), batch_of(0))


def with_away(name: str) -> list[UnitPlan]:
    """One unit's states are away."""
    return [
        replace(unit, states=DISK if unit.name == name else Persistent()) for unit in described()
    ]


def planned(
    folder: Path,
    *,
    updates: Updates = IN_BACKWARD,
    states: Placement = DISK,
    model: nn.Module | None = None,
    groups: Sequence[dict[str, Any]] | None = None,
    units: Sequence[UnitPlan] | None = None,
) -> tuple[nn.Module, PlannedOptimizer]:
    """A model that follows a plan with all states in one place."""
    model = build() if model is None else model
    plan = plan_for(model, decided(described() if units is None else units, Keep(), states))
    return prepare(
        model,
        replace(plan, settings=replace(plan.settings, updates=updates)),
        optimizer=ADAMW,
        param_groups=groups,
        spill_directory=folder,
    )


def loss_at(model: nn.Module, number: int) -> Tensor:
    return loss_of(call_model(model, batch_of(number)))


def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
    loss = loss_at(model, number)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def steps(model: nn.Module, optimizer: Optimizer, *numbers: int) -> list[Tensor]:
    return [step(model, optimizer, number) for number in numbers]


def plain() -> tuple[nn.Module, Optimizer]:
    model = build()
    return model, ADAMW(model.parameters())


def ran(run: Run, model: nn.Module, optimizer: Optimizer) -> Outcome:
    torch.manual_seed(1)
    return outcome(model, optimizer, run(model, optimizer))


def assert_like_plain(run: Run, folder: Path, **options: Any) -> None:
    assert_bitwise(ran(run, *planned(folder, **options)), ran(run, *plain()))


def assert_like_plain_or_refused(run: Run, words: str, folder: Path, **options: Any) -> None:
    model, optimizer = planned(folder, **options)
    try:
        found = ran(run, model, optimizer)
    except Exception as error:  # noqa: BLE001 (the assertion says which)
        assert_refuses(error, words)
        return
    assert_bitwise(found, ran(run, *plain()))


def assert_refuses(error: Exception, words: str) -> None:
    """The project itself says no, and with these words."""
    assert is_refusal(error), f"{type(error).__name__}: {error}"
    assert re.search(words, str(error)), str(error)


def refused(what: Callable[[], object], words: str, kind: type[Exception] = Exception) -> None:
    """A clear error of the kind."""
    with pytest.raises(kind) as caught:
        what()
    assert_refuses(caught.value, words)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def values_of_plain(*numbers: int) -> dict[str, Tensor]:
    model, optimizer = plain()
    steps(model, optimizer, *numbers)
    return values(model)


def assert_plain_with(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """A model that follows no plan, with these values, and trains."""
    assert prepared_of(model) is None
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert list(differences(own, expected, "values")) == []
    twin = build()
    twin.load_state_dict(expected)
    for each in (twin, model):
        steps(each, ADAMW(each.parameters()), 0)
    assert list(differences(values(model), values(twin), "values")) == []


# --- copies ---------------------------------------------------------------------------------------


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def pickled(model: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(model))  # noqa: S301 (what was just made)
    return loaded


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_and_loaded, pickled])
@pytest.mark.parametrize("states", [DISK, Persistent()])
def test_a_copy_is_plain_with_the_values_that_there_are(
    duplicate: Callable[[nn.Module], nn.Module], states: Placement, tmp_path: Path
) -> None:
    model, optimizer = planned(tmp_path, states=states)
    steps(model, optimizer, 0, 1)
    assert_plain_with(duplicate(model), values_of_plain(0, 1))
    steps(model, optimizer, 2)  # the model that was copied goes on
    assert list(differences(values(model), values_of_plain(0, 1, 2), "values")) == []


def test_a_copy_between_backward_and_step_is_refused(tmp_path: Path) -> None:
    """Some of its parameters are updated and some are not, wherever they are."""
    model, optimizer = planned(tmp_path)
    engine = engine_of(model)
    assert engine is not None
    loss = loss_at(model, 0)
    go_on = threading.Event()
    (updates,) = (lane for name, lane in engine.lanes.items() if name.direction == "update")
    updates.submit("a rest", lambda: None if go_on.wait(60) else pytest.fail("it never ended"), ())
    loss.backward()  # and all that it updates is still on the device
    with_parameters = [each for each in model.modules() if list(each.parameters())]
    for module in with_parameters:
        refused(partial(copy.deepcopy, module), r"between backward\(\) and optimizer\.step\(\)")
    for parameter in model.parameters():
        refused(parameter.sum, "full_parameters")
    go_on.set()
    optimizer.step()
    assert_plain_with(copy.deepcopy(model), values_of_plain(0))


def averaged(model: nn.Module, optimizer: Optimizer, *, full: bool) -> AveragedModel:
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for number in range(3):
        step(model, optimizer, number)
        if full:
            with runtime.full_parameters(model):
                average.update_parameters(model)
        else:
            average.update_parameters(model)
    return average


def test_averages_of_full_parameters_are_those_of_plain_training(tmp_path: Path) -> None:
    expected = averaged(*plain(), full=False).state_dict()
    found = averaged(*planned(tmp_path), full=True).state_dict()
    assert list(differences(found, expected, "average")) == []


def test_averages_of_parameters_that_are_away_are_refused(tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path)
    average = AveragedModel(model)
    step(model, optimizer, 0)
    refused(lambda: average.update_parameters(model), r"full_parameters", RuntimeError)
    steps(model, optimizer, 1)
    assert list(differences(values(model), values_of_plain(0, 1), "values")) == []


# --- reading parameters that are away -------------------------------------------------------------

Use = Callable[[nn.Parameter], object]


def written(write: Use) -> Use:
    def use(parameter: nn.Parameter) -> object:
        with torch.no_grad():
            return write(parameter)

    return use


READS: dict[str, Use] = {
    "norm": lambda p: p.norm(),
    "data": lambda p: p.data.sum(),
    "detach": lambda p: p.detach().sum(),
    "plus": lambda p: p + 1,
    "right operand": lambda p: torch.ones(1) * p,
    "sum": torch.sum,
    "item": lambda p: p.flatten()[0].item(),
    "index": lambda p: p[0],
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "clone": lambda p: p.clone(),
    "equal": lambda p: torch.equal(p, torch.zeros(p.shape)),
    "comparison": lambda p: p > 0,
    "isnan": lambda p: torch.isnan(p).any(),
    "linear": lambda p: nn.functional.linear(torch.ones(p.shape[-1]), p),
    "norms of many": lambda p: torch.nn.utils.get_total_norm([p]),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "to dtype": lambda p: p.to(torch.float64),
    "print values": lambda p: f"{p.flatten()[0]:.3f}",
    "copy_": written(lambda p: p.copy_(torch.zeros(p.shape))),
    "mul_": written(lambda p: p.mul_(2)),
    "data.copy_": lambda p: p.data.copy_(torch.zeros(p.shape)),
    "init": nn.init.zeros_,
    "lerp_": written(lambda p: p.lerp_(torch.zeros(p.shape), 0.5)),
    "read into another": written(lambda p: torch.zeros(p.shape).copy_(p)),
    "vector to": lambda p: nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("path", ["blocks.1.inner.weight", "head.weight"])
def test_a_read_of_a_parameter_that_is_away_names_the_way(
    name: str, path: str, tmp_path: Path
) -> None:
    model, optimizer = planned(tmp_path)
    steps(model, optimizer, 0)
    refused(lambda: READS[name](model.get_parameter(path)), r"full_parameters", RuntimeError)
    steps(model, optimizer, 1)
    assert list(differences(values(model), values_of_plain(0, 1), "values")) == []


LOOKS: dict[str, Use] = {
    "shape": lambda p: (p.shape, p.size(), p.size(0), p.dim(), p.ndim, len(p)),
    "dtype": lambda p: (p.dtype, p.is_floating_point(), p.element_size(), p.itemsize),
    "device": lambda p: (p.device, p.is_cuda, p.layout),
    "numel": lambda p: (p.numel(), p.nelement(), p.nbytes),
    "graph": lambda p: (p.requires_grad, p.is_leaf, p.grad, p.grad_fn),
    "zeros_like": lambda p: torch.zeros_like(p).sum().item(),
    "empty_like": lambda p: torch.empty_like(p).shape,
    "ones_like": lambda p: torch.ones_like(p).sum().item(),
    "new_zeros": lambda p: p.new_zeros(3).tolist(),
    "kind": lambda p: (isinstance(p, nn.Parameter), torch.is_tensor(p)),
    "set": lambda p: (p in {p}, any(p is each for each in [p])),
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_is_no_value_can_be_asked_of_a_parameter_that_is_away(
    name: str, tmp_path: Path
) -> None:
    expected = build()
    model, _ = planned(tmp_path)
    answers, plain_ones = (
        [(path, LOOKS[name](parameter)) for path, parameter in each.named_parameters()]
        for each in (model, expected)
    )
    assert answers == plain_ones


def test_a_parameter_that_is_away_says_so_when_it_is_printed(tmp_path: Path) -> None:
    model, _ = planned(tmp_path)
    for text in (repr(model.get_parameter("head.weight")), str(list(model.parameters()))):
        assert "Parameter" in text
        assert not re.search(r"\d\.\d", text)  # no value that it has not


def test_parameters_that_stay_are_read_as_ever(tmp_path: Path) -> None:
    """Only one unit is away."""
    model = build()
    expected = values(model)
    plan = plan_for(model, with_away("blocks.1"))
    model, _ = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.1."):
            refused(parameter.norm, r"full_parameters", RuntimeError)
        else:
            assert torch.equal(parameter.detach(), expected[name])


# --- full_parameters ------------------------------------------------------------------------------


def test_full_parameters_are_those_of_plain_training(tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path)
    steps(model, optimizer, 0, 1)
    with runtime.full_parameters(model):
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
        norms = [p.norm().item() for p in model.parameters()]
    assert list(differences(found, values_of_plain(0, 1), "values")) == []
    assert norms == [p.norm().item() for p in values_of_plain(0, 1).values()]
    refused(model.get_parameter("head.weight").norm, r"full_parameters", RuntimeError)
    steps(model, optimizer, 2)
    assert list(differences(values(model), values_of_plain(0, 1, 2), "values")) == []


def halved(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        model.get_parameter("blocks.2.inner.bias").data = torch.ones(64)


@pytest.mark.parametrize("updates", BOTH)
def test_an_edit_of_full_parameters_is_trained_on(updates: Updates, tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
        losses = steps(model, optimizer, 0, 1)
        if engine_of(model) is None:
            halved(model)
        else:
            with runtime.full_parameters(model, modify=True):
                halved(model)
        return losses + steps(model, optimizer, 2, 3)

    assert_like_plain(run, tmp_path, updates=updates)


def test_an_edit_without_leave_is_refused_and_undone(tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path)

    def edit() -> None:
        with runtime.full_parameters(model):
            halved(model)

    refused(edit, r"modify")
    steps(model, optimizer, 0)
    assert list(differences(values(model), values_of_plain(0), "values")) == []


def test_an_error_inside_full_parameters_is_the_one_that_is_seen(tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path)
    with pytest.raises(KeyError, match="mine"), runtime.full_parameters(model):
        raise KeyError("mine")
    refused(model.get_parameter("head.weight").norm, r"full_parameters", RuntimeError)
    steps(model, optimizer, 0)
    assert list(differences(values(model), values_of_plain(0), "values")) == []


def test_full_parameters_of_named_units_are_there_alone(tmp_path: Path) -> None:
    model, _ = planned(tmp_path)
    expected = values(build())
    with runtime.full_parameters(model, units=["blocks.1"]):
        for name, parameter in model.named_parameters():
            if name.startswith("blocks.1."):
                assert torch.equal(parameter.detach(), expected[name])
            else:
                refused(parameter.norm, r"full_parameters", RuntimeError)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA")
def test_full_parameters_without_room_are_refused(tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    entering = runtime.full_parameters(model)
    resource.setrlimit(resource.RLIMIT_DATA, (2**10, hard))
    try:
        with pytest.raises(NoRoomError) as caught:
            entering.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert_refuses(caught.value, r"unit by unit")
    steps(model, optimizer, 0)
    assert list(differences(values(model), values_of_plain(0), "values")) == []


def test_full_parameters_of_a_unit_that_there_is_not(tmp_path: Path) -> None:
    model, _ = planned(tmp_path)

    def enter() -> None:
        with runtime.full_parameters(model, units=["blocks.9"]):
            pass

    refused(enter, r"blocks\.9", ProtrainError)


def test_full_parameters_between_backward_and_step_are_refused(tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path)
    loss_at(model, 0).backward()

    def enter() -> None:
        with runtime.full_parameters(model):
            pass

    refused(enter, r"between backward\(\) and optimizer\.step\(\)", RuntimeError)
    optimizer.step()
    enter()


def test_full_parameters_of_a_plain_model_are_its_own() -> None:
    model, optimizer = plain()
    with runtime.full_parameters(model, modify=True):
        halved(model)
    steps(model, optimizer, 0)


def test_a_step_inside_full_parameters(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
        if engine_of(model) is None:
            return steps(model, optimizer, 0, 1)
        with runtime.full_parameters(model):
            return steps(model, optimizer, 0, 1)

    assert_like_plain_or_refused(run, r"full_parameters", tmp_path)


def test_an_evaluation_inside_full_parameters(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
        losses = steps(model, optimizer, 0)
        with torch.no_grad():
            if engine_of(model) is None:
                losses.append(loss_at(model, 7))
            else:
                with runtime.full_parameters(model):
                    losses.append(loss_at(model, 7))
        return losses + steps(model, optimizer, 1)

    assert_like_plain_or_refused(run, r"full_parameters", tmp_path)


# --- compiling, moving, converting ----------------------------------------------------------------


def test_a_compiled_model_is_refused(tmp_path: Path) -> None:
    model = build()
    plan = plan_for(model, decided(described(), Keep(), DISK))
    compiled: Any = torch.compile(model)
    refused(
        lambda: prepare(compiled, plan, optimizer=ADAMW, spill_directory=tmp_path),
        r"compiled",
        ProtrainError,
    )


def test_a_model_that_is_compiled_in_place_is_refused(tmp_path: Path) -> None:
    model = build()
    plan = plan_for(model, decided(described(), Keep(), DISK))
    model.compile()
    refused(
        lambda: prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path),
        r"compiled",
        ProtrainError,
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_a_planned_model_that_is_compiled_trains_like_plain_or_says_no(
    *, in_place: bool, tmp_path: Path
) -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
        called: Any = model
        if engine_of(model) is not None and in_place:
            model.compile(backend="eager")
        elif engine_of(model) is not None:
            called = torch.compile(model, backend="eager")
        return steps(called, optimizer, 0, 1)

    assert_like_plain_or_refused(run, r"compile", tmp_path)


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "a block": lambda model: model.get_submodule("blocks.1").half(),
    "the list": lambda model: model.get_submodule("blocks").double(),
    "a linear layer": lambda model: model.get_submodule("blocks.2.inner").to(torch.bfloat16),
    "to meta": lambda model: model.to("meta"),
    "share memory": lambda model: model.share_memory(),
    "to empty": lambda model: model.to_empty(device="cpu"),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_after_prepare_is_refused_and_changes_nothing(
    name: str, tmp_path: Path
) -> None:
    model, optimizer = planned(tmp_path)
    refused(lambda: CONVERSIONS[name](model), r"prepare|plan|restore")
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}
    steps(model, optimizer, 0)
    assert list(differences(values(model), values_of_plain(0), "values")) == []


@pytest.mark.parametrize(
    "move",
    [lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.float(), lambda m: m.to("cpu:0")],
)
def test_a_move_to_where_the_model_is_changes_nothing(
    move: Callable[[nn.Module], object], tmp_path: Path
) -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
        losses = steps(model, optimizer, 0)
        assert move(model) is model
        return losses + steps(model, optimizer, 1)

    assert_like_plain(run, tmp_path)


# --- a part of the model by itself ----------------------------------------------------------------


@pytest.mark.parametrize("path", ["blocks.1", "blocks.2.inner", "head"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_module_whose_parameters_are_away_cannot_be_called_by_itself(
    path: str, *, grad: bool, tmp_path: Path
) -> None:
    model, optimizer = planned(tmp_path)
    steps(model, optimizer, 0)
    with torch.set_grad_enabled(grad):
        refused(
            lambda: model.get_submodule(path)(torch.ones(4, 40, 32)),
            r"full_parameters",
            RuntimeError,
        )
    steps(model, optimizer, 1)
    assert list(differences(values(model), values_of_plain(0, 1), "values")) == []


@pytest.mark.parametrize("away", ["blocks.1", "blocks.3"])
def test_a_module_whose_parameters_are_there_can_be_called_by_itself(
    away: str, tmp_path: Path
) -> None:
    model = build()
    given = torch.ones(4, 40, 32)
    expected = model.get_submodule("blocks.1")(given).detach()
    plan = plan_for(model, with_away(away))
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    is_away = away == "blocks.1"
    bringing = runtime.full_parameters(model, units=[away]) if is_away else nullcontext()
    with bringing, torch.no_grad():
        found = model.get_submodule("blocks.1")(given)
    assert torch.equal(found, expected)
    steps(model, optimizer, 0)
    assert list(differences(values(model), values_of_plain(0), "values")) == []


# --- parameters and groups ------------------------------------------------------------------------


@pytest.mark.parametrize("updates", BOTH)
def test_offloaded_parameters_in_no_group_are_refused(updates: Updates, tmp_path: Path) -> None:
    model = build()
    groups = [{"params": list(model.get_submodule("head").parameters())}]
    refused(
        lambda: planned(tmp_path, model=model, groups=groups, updates=updates),
        r"group",
        ProtrainError,
    )
    assert "forward" not in model.__dict__


def test_persistent_parameters_in_no_group_stay_what_they_are(tmp_path: Path) -> None:
    found = []
    for prepared in (False, True):
        model = build()
        trained = [*model.get_submodule("head").parameters()]
        trained += model.get_submodule("blocks.3").parameters()
        optimizer: Optimizer = ADAMW([{"params": trained}])
        if prepared:
            model, optimizer = prepare(
                model,
                plan_for(model, with_away("blocks.3")),
                optimizer=ADAMW,
                param_groups=[{"params": trained}],
                spill_directory=tmp_path,
            )
        found.append((steps(model, optimizer, 0, 1), values(model)))
    assert list(differences(found[1], found[0], "training")) == []


@pytest.mark.parametrize("updates", BOTH)
@pytest.mark.parametrize("states", [DISK, Persistent()])
def test_parameters_of_another_module_are_trained_as_plain(
    updates: Updates, states: Placement, tmp_path: Path
) -> None:
    found = []
    for prepared in (False, True):
        model, scale = build(), nn.Parameter(torch.ones(3))
        groups = [{"params": [*model.parameters(), scale]}]
        optimizer: Optimizer = ADAMW(groups)
        if prepared:
            model, optimizer = planned(
                tmp_path, model=model, groups=groups, updates=updates, states=states
            )
        losses = []
        for number in range(3):
            loss = loss_at(model, number) * scale.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append((losses, values(model), scale.detach(), optimizer.state_dict()))
    assert list(differences(found[1], found[0], "training")) == []


def test_a_hook_on_a_parameter_is_called_as_plain(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
        model.get_parameter("blocks.1.inner.weight").register_hook(lambda gradient: gradient * 0.5)
        return steps(model, optimizer, 0, 1)

    assert_like_plain_or_refused(run, r"hook|full_parameters", tmp_path)


def replaced(model: nn.Module) -> None:
    block = model.get_submodule("blocks.1.inner")
    block.bias = nn.Parameter(torch.ones(64))


def frozen_to_trained(model: nn.Module) -> None:
    model.get_parameter("blocks.1.norm.weight").requires_grad_(True)


def trained_to_frozen(model: nn.Module) -> None:
    model.get_parameter("blocks.2.norm.weight").requires_grad_(False)


def module_replaced(model: nn.Module) -> None:
    model.get_submodule("blocks.1").register_module("inner", nn.Linear(32, 64))


def partly_frozen() -> nn.Module:
    model = build()
    model.get_parameter("blocks.1.norm.weight").requires_grad_(False)
    return model


@pytest.mark.parametrize("change", [replaced, frozen_to_trained, module_replaced])
def test_a_model_that_changes_after_prepare_is_refused_at_its_next_forward(
    change: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    units = units_of(partly_frozen(), batch_of(0))
    model, optimizer = planned(tmp_path, model=partly_frozen(), units=units)
    steps(model, optimizer, 0)
    change(model)
    refused(lambda: loss_at(model, 1), r"prepare|plan|restore")


def test_a_parameter_that_is_frozen_after_prepare(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
        losses = steps(model, optimizer, 0)
        trained_to_frozen(model)
        return losses + steps(model, optimizer, 1, 2)

    assert_like_plain(run, tmp_path)


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", BOTH)
def test_a_loop_that_never_drops_gradients_is_refused(updates: Updates, tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path, updates=updates)
    loss_at(model, 0).backward()
    optimizer.step()
    refused(lambda: loss_at(model, 1).backward(), r"zero_grad", RuntimeError)
    optimizer.zero_grad()
    steps(model, optimizer, 1)
    assert list(differences(values(model), values_of_plain(0, 1), "values")) == []


def by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


DROPS: dict[str, Callable[[nn.Module, Optimizer], object]] = {
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "model": lambda model, _: model.zero_grad(),
    "by hand": lambda model, _: by_hand(model),
}


@pytest.mark.parametrize("updates", BOTH)
@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("after_forward", [False, True])
def test_gradients_may_be_dropped_before_or_after_forward(
    updates: Updates, drop: str, *, after_forward: bool, tmp_path: Path
) -> None:
    """The second is Lightning's order."""

    def run(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
        for number in range(3):
            if not after_forward:
                DROPS[drop](model, optimizer)
            loss = loss_at(model, number)
            if after_forward:
                DROPS[drop](model, optimizer)
            loss.backward()
            optimizer.step()
            yield loss.detach()
        DROPS[drop](model, optimizer)

    assert_like_plain(run, tmp_path, updates=updates)


@pytest.mark.parametrize("updates", BOTH)
@pytest.mark.parametrize("of_model", [False, True])
def test_zeros_in_place_of_no_gradients_are_refused(
    updates: Updates, *, of_model: bool, tmp_path: Path
) -> None:
    model, optimizer = planned(tmp_path, updates=updates)
    loss_at(model, 0).backward()
    optimizer.step()
    dropping = model if of_model else optimizer
    refused(lambda: dropping.zero_grad(set_to_none=False), "" if of_model else r"set_to_none")
    optimizer.zero_grad()
    steps(model, optimizer, 1)
    assert list(differences(values(model), values_of_plain(0, 1), "values")) == []


def with_one_dropped(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
    for number in range(3):
        loss = loss_at(model, number)
        loss.backward()
        model.get_parameter("blocks.1.inner.weight").grad = None
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def test_a_gradient_that_is_dropped_before_the_step_updates_nothing(tmp_path: Path) -> None:
    assert_like_plain(with_one_dropped, tmp_path, updates=AFTER_BACKWARD)


def test_a_gradient_that_is_dropped_after_its_update_is_refused(tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path, updates=IN_BACKWARD)
    refused(lambda: list(with_one_dropped(model, optimizer)), r"grad", RuntimeError)


@pytest.mark.parametrize("updates", BOTH)
def test_a_gradient_that_is_replaced_before_the_step(updates: Updates, tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
        for number in range(3):
            loss = loss_at(model, number)
            loss.backward()
            model.get_parameter("blocks.1.inner.weight").grad = torch.full((64, 32), 0.25)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()

    assert_like_plain_or_refused(run, r"gradient", tmp_path, updates=updates)


def test_gradients_that_autograd_is_asked_for(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
        loss = loss_at(model, 0)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return [loss.detach(), *gradients, *steps(model, optimizer, 1)]

    assert_like_plain_or_refused(run, r"backward|full_parameters|autograd\.grad", tmp_path)


@pytest.mark.parametrize("updates", BOTH)
def test_steps_without_a_backward_between(updates: Updates, tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
        optimizer.step()
        losses = steps(model, optimizer, 0)
        optimizer.step()
        return losses + steps(model, optimizer, 1)

    assert_like_plain(run, tmp_path, updates=updates)


@pytest.mark.parametrize("updates", BOTH)
def test_two_steps_with_the_same_gradients(updates: Updates, tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
        loss = loss_at(model, 0)
        loss.backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), *steps(model, optimizer, 1)]

    assert_like_plain_or_refused(run, r"step\(\)|gradient", tmp_path, updates=updates)


# --- around the model -----------------------------------------------------------------------------


class Body(Stack):
    """Takes hidden states, so that what is checkpointed has an input with a gradient."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.head(self.through(hidden, 0))
        return out.square().mean()


def body() -> nn.Module:
    with seeded(0):
        return Body().train()


def hidden(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 40, 32, generator=generator)


@pytest.mark.parametrize("updates", BOTH)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_whole_model(
    updates: Updates, *, reentrant: bool, tmp_path: Path
) -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for number in range(3):
            given = hidden(number).requires_grad_()
            loss = checkpoint(model, given, use_reentrant=reentrant)
            loss.backward()
            assert given.grad is not None
            losses += [loss.detach(), given.grad]
            optimizer.step()
            optimizer.zero_grad()
        return losses

    units = units_of(body(), hidden(0))
    model, optimizer = planned(tmp_path, model=body(), units=units, updates=updates)
    try:
        found = run(model, optimizer)
    except Exception as error:  # noqa: BLE001 (the assertion says which)
        assert_refuses(error, r"checkpoint|recomput|forward")
        return
    expected = body()
    losses = run(expected, ADAMW(expected.parameters()))
    assert list(differences(found, losses, "loss")) == []
    assert list(differences(values(model), values(expected), "values")) == []


def test_parameters_that_are_given_for_one_call(tmp_path: Path) -> None:
    given = {name: value * 0.5 for name, value in values(build()).items()}

    def run(model: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
        batch: Batch = batch_of(5)
        with torch.no_grad():
            called = torch.func.functional_call(model, given, (), dict(batch))
        return [called, *steps(model, optimizer, 0)]

    assert_like_plain_or_refused(run, r"full_parameters|prepare|plan|restore", tmp_path)


def test_restoring_is_done_once_and_may_be_said_again(tmp_path: Path) -> None:
    model = build()
    assert restore(model) is model
    model, optimizer = planned(tmp_path, model=model)
    steps(model, optimizer, 0)
    assert restore(model) is model
    assert restore(model) is model
    assert_plain_with(model, values_of_plain(0))


def test_a_model_that_was_copied_is_freed_with_its_plan(tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path)
    steps(model, optimizer, 0)
    engine = weakref.ref(engine_of(model))
    duplicate = copy.deepcopy(model)
    del model, optimizer
    gc.collect()
    assert engine() is None
    assert_plain_with(duplicate, values_of_plain(0))
