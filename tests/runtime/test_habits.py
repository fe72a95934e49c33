"""Habits of training scripts beside forward, backward and step, on a planned model.

The oracle is plain PyTorch doing the same; what a plan cannot keep is refused in clear words.
"""

import copy
import gc
import io
import pickle
import re
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from protrain_runtime import full_parameters, restore, with_master_weights
from protrain_runtime.contract.records.plan import (
    KEEP,
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
    Updates,
)
from protrain_runtime.contract.records.profile import Form
from protrain_runtime.devices.preflight import NoRoomError
from protrain_runtime.model.prepared import prepared_of
from tests.support.faults import data_limit
from tests.support.hostile_models import Stack, batch_of, does, stack
from tests.support.judging import is_refusal
from tests.support.messages import Speaker
from tests.support.odd_optimizers import odd
from tests.support.runtime_cases import Subject, assert_bitwise, decided, differences, phrase
from tests.support.scenario import Loop, Run, Scenario, Script, Units, refusal

STACK = Subject(Stack, batch_of)
DISK = Placement(tier="disk")
BOTH: tuple[Updates, ...] = ("in backward", "after backward")
BETWEEN = r"between backward\(\) and optimizer\.step\(\)"


def tried(
    script: Script = Loop(),  # noqa: B008
    *,
    updates: Updates = "in backward",
    states: Placement = DISK,
    **options: Any,
) -> Scenario:
    given: dict[str, Any] = {
        "model": STACK,
        "units": lambda units: decided(units, KEEP, states),
        "settings": {"updates": updates},
    }
    return Scenario(script=script, **{**given, **options})


def planned(folder: Path, *, updates: Updates = "in backward", states: Placement = DISK) -> Run:
    return tried(updates=updates, states=states).start(folder)


def with_away(name: str, units: Units) -> Units:
    return [replace(unit, states=DISK if unit.name == name else PERSISTENT) for unit in units]


def assert_refuses(error: Exception, words: str) -> None:
    """The project itself says no, and with these words."""
    assert is_refusal(error), f"{type(error).__name__}: {error}"
    assert re.search(words, str(error)), str(error)


def refused(use: Callable[[], object], words: str, kind: type[Exception] = Exception) -> None:
    assert_refuses(refusal(use, kind), words)


@cache
def plain_values(*numbers: int) -> dict[str, Tensor]:
    run = tried().start()
    run.step(*numbers)
    return run.values()


def assert_values(run: Run, *numbers: int) -> None:
    """The values of plain training with these batches."""
    assert list(differences(run.values(), plain_values(*numbers), "values")) == []


def assert_goes_on(run: Run, *numbers: int) -> None:
    """It takes the last of these steps, and all of them are those of plain training."""
    run.optimizer.zero_grad()
    run.step(numbers[-1])
    assert_values(run, *numbers)


def assert_plain_with(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """A model that follows no plan, with these values, and trains."""
    assert prepared_of(model) is None
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert list(differences(own, expected, "values")) == []
    twin = STACK.build()
    twin.load_state_dict(expected)
    found = []
    for each in (twin, model):
        run = tried().plain_run(each)
        run.step(0)
        found.append(run.values())
    assert list(differences(found[1], found[0], "values")) == []


# --- copies ---------------------------------------------------------------------------------------


def saved_and_loaded(what: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(what: Any) -> Any:
    return pickle.loads(pickle.dumps(what))  # noqa: S301 (what was just made)


@pytest.mark.parametrize("states", [DISK, PERSISTENT])
def test_a_copy_is_plain_with_the_values_that_there_are(states: Placement, tmp_path: Path) -> None:
    run = planned(tmp_path, states=states)
    run.step(0, 1)
    for duplicate in (copy.deepcopy, saved_and_loaded, pickled):
        assert_plain_with(duplicate(run.model), plain_values(0, 1))
    assert_goes_on(run, 0, 1, 2)  # the model that was copied


@pytest.mark.parametrize("states", [DISK, OPTIMIZER_IN_BACKWARD])
def test_a_copy_of_model_and_optimizer_trains_on_plainly(states: Placement, tmp_path: Path) -> None:
    run = planned(tmp_path, states=states)
    run.step(0, 1)
    for duplicate in (copy.deepcopy, saved_and_loaded, pickled):
        model, optimizer = duplicate((run.model, run.optimizer))
        assert type(optimizer) is torch.optim.AdamW
        copied = Run(STACK, model, optimizer)
        copied.step(2)
        assert_values(copied, 0, 1, 2)
    assert_goes_on(run, 0, 1, 2)


def test_a_copy_of_an_optimizer_with_masters_steps() -> None:
    found = []
    for duplicate in (copy.copy, copy.deepcopy):  # of a tuple: the same, and a new one
        model = STACK.build().bfloat16()
        run = Run(STACK, model, with_master_weights(torch.optim.AdamW)(model.parameters()))
        run.step(0)
        run.model, run.optimizer = duplicate((run.model, run.optimizer))
        run.step(1)
        found.append(run.values())
    assert list(differences(found[1], found[0], "values")) == []


def test_a_copy_between_backward_and_step_is_refused(tmp_path: Path) -> None:
    """Some of its parameters are updated and some are not, wherever they are."""
    run = planned(tmp_path)
    loss = run.loss(0)
    go_on = threading.Event()
    (updates,) = (lane for name, lane in run.engine.lanes.items() if name.direction == "update")
    updates.submit("a rest", lambda: None if go_on.wait(60) else pytest.fail("it never ended"), ())
    loss.backward()  # and all that it updates is still on the device
    for module in (each for each in run.model.modules() if list(each.parameters())):
        refused(partial(copy.deepcopy, module), BETWEEN)
    refused(partial(copy.deepcopy, run.optimizer), BETWEEN)
    for parameter in run.model.parameters():
        refused(parameter.sum, "full_parameters")
    go_on.set()
    run.optimizer.step()
    assert_plain_with(copy.deepcopy(run.model), plain_values(0))


@pytest.mark.nightly
def test_a_model_that_was_copied_is_freed_with_its_plan(tmp_path: Path) -> None:
    run = planned(tmp_path)
    run.step(0)
    engine = weakref.ref(run.engine)
    duplicate = copy.deepcopy(run.model)
    del run
    gc.collect()
    assert engine() is None
    assert_plain_with(duplicate, plain_values(0))


def test_restoring_is_done_once_and_may_be_said_again(tmp_path: Path) -> None:
    model = STACK.build()
    assert restore(model) is model
    run = tried().prepared(model, tmp_path)
    run.step(0)
    assert restore(run.model) is model
    assert restore(model) is model
    assert_plain_with(model, plain_values(0))


# --- what parameters that are away answer ---------------------------------------------------------

Use = Callable[[nn.Parameter], object]


def written(write: Use) -> Use:
    return torch.no_grad()(write)


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
    "attributes": lambda p: ({*dir(p)} >= {"shape", "grad"}, getattr(p, "grad_dtype", None)),
    "set": lambda p: (p in {p}, any(p is each for each in [p])),
}


def test_what_is_no_value_can_be_asked_of_a_parameter_that_is_away(tmp_path: Path) -> None:
    found, expected = (
        {(name, path): LOOKS[name](p) for path, p in each.named_parameters() for name in LOOKS}
        for each in (planned(tmp_path).model, STACK.build())
    )
    assert found == expected


def test_a_parameter_that_is_away_says_so_when_it_is_printed(tmp_path: Path) -> None:
    model = planned(tmp_path).model
    for text in (repr(model.get_parameter("head.weight")), str(list(model.parameters()))):
        assert "Parameter" in text
        assert not re.search(r"\d\.\d", text)  # no value that it has not


def test_parameters_that_stay_are_read_as_ever(tmp_path: Path) -> None:
    """Only one unit is away."""
    run = tried(units=partial(with_away, "blocks.1")).start(tmp_path)
    expected = plain_values()
    for name, parameter in run.model.named_parameters():
        if name.startswith("blocks.1."):
            refused(parameter.norm, r"full_parameters", RuntimeError)
        else:
            assert torch.equal(parameter.detach(), expected[name])


# --- refused, and nothing has changed -------------------------------------------------------------


def halved(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        model.get_parameter("blocks.2.inner.bias").data = torch.ones(64)


def called(path: str, *, grad: bool) -> Script:
    def use(run: Run) -> None:
        with torch.set_grad_enabled(grad):
            run.model.get_submodule(path)(torch.ones(4, 40, 32))

    return use


def enter(run: Run, **options: Any) -> None:
    with full_parameters(run.model, **options):
        pass


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
PATHS = ("blocks.1.inner.weight", "head.weight")
REFUSED: dict[str, tuple[list[Script], str, type[Exception]]] = {
    "reads": (
        [
            lambda run, p=path, read=read: read(run.model.get_parameter(p))  # type: ignore[misc]
            for read in READS.values()
            for path in PATHS
        ],
        r"full_parameters",
        RuntimeError,
    ),
    "an average": (
        [lambda run: AveragedModel(run.model).update_parameters(run.model)],
        r"full_parameters",
        RuntimeError,
    ),
    "conversions": (
        [lambda run, to=to: to(run.model) for to in CONVERSIONS.values()],  # type: ignore[misc]
        r"prepare|plan|restore",
        Exception,
    ),
    "calls of a module whose parameters are away": (
        [
            called(path, grad=grad)
            for path in ("blocks.1", "blocks.2.inner", "head")
            for grad in (False, True)
        ],
        r"full_parameters",
        RuntimeError,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    uses, words, kind = REFUSED[name]
    run = planned(tmp_path)
    run.step(0)
    for use in uses:
        refused(partial(use, run), words, kind)
        assert {(p.dtype, p.device.type) for p in run.model.parameters()} == {
            (torch.float32, "cpu")
        }
    assert_goes_on(run, 0, 1)


@pytest.mark.parametrize("updates", BOTH)
def test_gradients_that_are_kept_or_made_zeros_are_refused(
    updates: Updates, tmp_path: Path
) -> None:
    """By a loop that never drops them, or drops them in another way."""
    run = planned(tmp_path, updates=updates)
    run.backward(0)
    run.optimizer.step()
    refused(partial(run.backward, 9), r"zero_grad", RuntimeError)
    run.optimizer.zero_grad()
    run.backward(1)
    run.optimizer.step()
    refused(partial(run.model.zero_grad, set_to_none=False), "")
    refused(partial(run.optimizer.zero_grad, set_to_none=False), r"set_to_none")
    assert_goes_on(run, 0, 1, 2)


# --- full_parameters ------------------------------------------------------------------------------


def full(run: Run, **options: Any) -> AbstractContextManager[object]:
    return full_parameters(run.model, **options) if run.planned else nullcontext()


def test_full_parameters_are_those_of_plain_training(tmp_path: Path) -> None:
    run = planned(tmp_path)
    run.step(0, 1)
    with full_parameters(run.model):
        found = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        norms = [p.norm().item() for p in run.model.parameters()]
    assert list(differences(found, plain_values(0, 1), "values")) == []
    assert norms == [p.norm().item() for p in plain_values(0, 1).values()]
    with pytest.raises(KeyError, match="mine"), full_parameters(run.model):
        raise KeyError("mine")  # the error inside is the one that is seen
    refused(run.model.get_parameter("head.weight").norm, r"full_parameters", RuntimeError)
    assert_goes_on(run, 0, 1, 2)


def test_full_parameters_of_named_units_are_there_alone(tmp_path: Path) -> None:
    model = planned(tmp_path).model
    with full_parameters(model, units=["blocks.1"]):
        for name, parameter in model.named_parameters():
            if name.startswith("blocks.1."):
                assert torch.equal(parameter.detach(), plain_values()[name])
            else:
                refused(parameter.norm, r"full_parameters", RuntimeError)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA")
def test_full_parameters_without_room_are_refused(tmp_path: Path) -> None:
    run = planned(tmp_path)
    entering = full_parameters(run.model)
    with data_limit(2**10), pytest.raises(NoRoomError) as caught:
        entering.__enter__()
    assert_refuses(caught.value, r"unit by unit")
    assert_goes_on(run, 0)


def test_full_parameters_of_a_plain_model_are_its_own() -> None:
    run = tried().start()
    with full_parameters(run.model, modify=True):
        halved(run.model)
    run.step(0)


@pytest.mark.parametrize("away", ["blocks.1", "blocks.3"])
def test_a_module_whose_parameters_are_there_can_be_called_by_itself(
    away: str, tmp_path: Path
) -> None:
    given = torch.ones(4, 40, 32)
    expected = STACK.build().get_submodule("blocks.1")(given).detach()
    run = tried(units=partial(with_away, away)).start(tmp_path)
    bringing = full(run, units=[away]) if away == "blocks.1" else nullcontext()
    with bringing, torch.no_grad():
        assert torch.equal(run.model.get_submodule("blocks.1")(given), expected)
    assert_goes_on(run, 0)


# --- scripts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A script that trains like plain PyTorch, or may be refused with these words."""

    script: Script
    words: str = ""
    updates: tuple[Updates, ...] = ("in backward",)
    model: Subject = STACK


def edited(run: Run) -> None:
    run.step(0, 1)
    with full(run, modify=True):
        halved(run.model)
    run.step(2, 3)


def moved(run: Run) -> None:
    run.step(0)
    model = run.model
    for same in (model.to("cpu"), model.cpu(), model.float(), model.to("cpu:0")):
        assert same is model
    run.step(1)


def frozen_later(run: Run) -> None:
    run.step(0)
    run.model.get_parameter("blocks.2.norm.weight").requires_grad_(False)
    run.step(1, 2)


def by_hand(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.grad = None


DROPS: tuple[Script, ...] = (
    lambda run: run.optimizer.zero_grad(),
    lambda run: run.model.zero_grad(),
    by_hand,
)


def dropped_before_forward(run: Run) -> None:
    for number, drop in enumerate(DROPS):
        drop(run)
        run.backward(number)
        run.optimizer.step()
    run.optimizer.zero_grad()


def dropped_after_forward(run: Run) -> None:
    """Lightning's order."""
    for number, drop in enumerate(DROPS):
        run.backward(number, between=partial(drop, run))
        run.optimizer.step()
    run.optimizer.zero_grad()


def dropping(run: Run) -> None:
    """One gradient is dropped between backward and step."""
    for number in range(3):
        run.backward(number)
        run.model.get_parameter("blocks.1.inner.weight").grad = None
        run.update()


def looked_and_dropped(run: Run) -> None:
    """A loss that was looked at and dropped, as when a batch is skipped."""
    for number in range(3):
        run.loss(number + 100)
        run.step(number)


def steps_without_backward(run: Run) -> None:
    for number in range(2):
        run.optimizer.step()
        run.step(number)


def hooked(run: Run) -> None:
    run.model.get_parameter("blocks.1.inner.weight").register_hook(lambda gradient: gradient * 0.5)
    run.step(0, 1)


def evaluated_inside(run: Run) -> None:
    run.step(0)
    with full(run):
        run.look(7)
    run.step(1)


def compiled(*, in_place: bool) -> Script:
    def script(run: Run) -> None:
        if run.planned and in_place:
            run.model.compile(backend="eager")
        elif run.planned:
            run.model = torch.compile(run.model, backend="eager")  # type: ignore[assignment]
        run.step(0, 1)

    return script


class Body(Stack):
    """Takes hidden states, so that what is checkpointed has an input with a gradient."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.head(self.through(hidden, 0))
        return out.square().mean()


def hidden(number: int) -> Tensor:
    return torch.randn(4, 40, 32, generator=torch.Generator().manual_seed(number))


def checkpointed(*, reentrant: bool) -> Script:
    """Around the whole model."""

    def script(run: Run) -> None:
        for number in range(3):
            given = hidden(number).requires_grad_()
            loss = checkpoint(run.model, given, use_reentrant=reentrant)
            loss.backward()
            assert given.grad is not None
            run.seen += [loss.detach(), given.grad]
            run.update()

    return script


def called_with_others(run: Run) -> None:
    given = {name: value * 0.5 for name, value in plain_values().items()}
    with torch.no_grad():
        run.seen.append(torch.func.functional_call(run.model, given, (), dict(batch_of(5))))
    run.step(0)


def loads_a_block(run: Run) -> None:
    run.step(0)
    block = run.model.get_submodule("blocks.1")
    block.load_state_dict({name: value * 0.5 for name, value in block.state_dict().items()})
    run.step(1)


def loads_through_a_wrapper(run: Run) -> None:
    run.step(0)
    wrapper = nn.Sequential(run.model, nn.Linear(2, 2))
    wrapper.load_state_dict({name: value * 0.5 for name, value in wrapper.state_dict().items()})
    run.step(1)


def caches_weights(run: Run) -> None:
    with nn.utils.parametrize.cached():
        run.step(0)


def steps_another_optimizer(run: Run) -> None:
    run.backward(0)
    torch.optim.SGD(run.model.get_submodule("head").parameters()).step()
    run.update()


SCRIPTS: dict[str, Row] = {
    "a block's state dict": Row(loads_a_block, updates=BOTH),
    "a wrapper's state dict": Row(loads_through_a_wrapper, updates=BOTH),
    "cached weights": Row(caches_weights, r"outside of cached\(\)"),
    "another optimizer": Row(steps_another_optimizer, r"optimizer.* of prepare\(\)", BOTH),
    "edits of full parameters": Row(edited, updates=BOTH),
    "moves to where it is": Row(moved),
    "frozen after prepare": Row(frozen_later),
    "drops before forward": Row(dropped_before_forward, updates=BOTH),
    "drops after forward": Row(dropped_after_forward, updates=BOTH),
    "a gradient dropped": Row(dropping, updates=("after backward",)),
    "a loss that is dropped": Row(looked_and_dropped, updates=BOTH),
    "steps without backward": Row(steps_without_backward, updates=BOTH),
    "a hook on a parameter": Row(hooked, r"hook|full_parameters"),
    "an evaluation inside": Row(evaluated_inside, r"full_parameters"),
    "compiled in place": Row(compiled(in_place=True), r"compile"),
    "compiled": Row(compiled(in_place=False), r"compile"),
    "a checkpoint around it": Row(
        checkpointed(reentrant=False), r"checkpoint|recomput|forward", BOTH, Subject(Body, hidden)
    ),
    "a reentrant checkpoint": Row(
        checkpointed(reentrant=True), r"checkpoint|recomput|forward", BOTH, Subject(Body, hidden)
    ),
    "functional_call": Row(called_with_others, r"full_parameters|prepare|plan|restore"),
}


@pytest.mark.parametrize(
    ("name", "updates"),
    [(name, updates) for name, row in SCRIPTS.items() for updates in row.updates],
)
def test_a_script_trains_like_plain_pytorch_or_is_refused(
    name: str, updates: Updates, tmp_path: Path
) -> None:
    row = SCRIPTS[name]
    asked = tried(row.script, updates=updates, model=row.model)
    run = asked.start(tmp_path)
    try:
        found = asked.played(run)
    except Exception as error:
        if not row.words:
            raise
        assert_refuses(error, row.words)
        return
    assert_bitwise(found, asked.plain())


def head_and_last_block(model: nn.Module) -> list[dict[str, Any]]:
    parts = [model.get_submodule(path) for path in ("head", "blocks.3")]
    return [{"params": [p for part in parts for p in part.parameters()]}]


@pytest.mark.parametrize("listed", [nn.Module.parameters, nn.Module.named_parameters])
def test_parameters_are_given_in_every_way_that_pytorch_takes(listed: Any, tmp_path: Path) -> None:
    tried(groups=listed).assert_like_plain(tmp_path)


def test_a_step_reads_the_names_of_its_parameters(tmp_path: Path) -> None:
    named = tried(groups=nn.Module.named_parameters, factory=odd("goes by name"))
    named.assert_like_plain(tmp_path)


def test_a_model_with_nothing_to_train_has_an_optimizer_without_parameters(tmp_path: Path) -> None:
    asked = tried(states=PERSISTENT)
    optimizer = asked.prepared(asked.subject.build(0).requires_grad_(False), tmp_path).optimizer
    assert [group["params"] for group in optimizer.param_groups] == [[]]


def test_persistent_parameters_in_no_group_stay_what_they_are(tmp_path: Path) -> None:
    away = partial(with_away, "blocks.3")
    script = Loop(num_steps=2)
    tried(script, units=away, groups=head_and_last_block).assert_like_plain(tmp_path)


def scaled(run: Run) -> None:
    """The loss has a factor that is a parameter of another module."""
    scale = run.optimizer.param_groups[0]["params"][-1]
    for number in range(3):
        run.backward(number, weigh=lambda loss: loss * scale.square().mean())
        run.update()
    run.seen.append(scale.detach())


@pytest.mark.nightly("states0-after backward", "states1-in backward")
@pytest.mark.parametrize("updates", BOTH)
@pytest.mark.parametrize("states", [DISK, PERSISTENT])
def test_parameters_of_another_module_are_trained_as_plain(
    updates: Updates, states: Placement, tmp_path: Path
) -> None:
    def with_a_scale(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [*model.parameters(), nn.Parameter(torch.ones(3))]}]

    asked = tried(scaled, updates=updates, states=states, groups=with_a_scale)
    asked.assert_like_plain(tmp_path)


def replaced(model: nn.Module) -> None:
    model.get_submodule("blocks.1.inner").bias = nn.Parameter(torch.ones(64))


def frozen_to_trained(model: nn.Module) -> None:
    model.get_parameter("blocks.1.norm.weight").requires_grad_(True)


def module_replaced(model: nn.Module) -> None:
    model.get_submodule("blocks.1").register_module("inner", nn.Linear(32, 64))


PARTLY_FROZEN = replace(
    STACK, change=lambda model: model.get_parameter("blocks.1.norm.weight").requires_grad_(False)
)


@pytest.mark.parametrize("change", [replaced, frozen_to_trained, module_replaced])
def test_a_model_that_changes_after_prepare_is_refused_at_its_next_forward(
    change: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    run = tried(model=PARTLY_FROZEN).start(tmp_path)
    run.step(0)
    change(run.model)
    refused(partial(run.loss, 1), r"prepare|plan|restore")


# --- between backward and the step ----------------------------------------------------------------


def unscale(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.unscale_(run.optimizer)


TAKEN: tuple[Script, ...] = (
    lambda run: run.clip(1.0),
    lambda run: sum(p.grad.sum() for p in run.model.parameters() if p.grad is not None),
    unscale,
    lambda run: run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
)
"""Uses of gradients that were taken, and of groups."""
READ: tuple[Script, ...] = (
    lambda run: run.backward(0),
    lambda run: run.look(1),
    lambda run: run.model.state_dict(),
    lambda run: run.optimizer.state_dict(),
)


@pytest.mark.parametrize("states", [DISK, OPTIMIZER_IN_BACKWARD], ids=["disk", "device"])
def test_between_backward_and_step_nothing_is_read(
    states: Placement, assert_says: Speaker, tmp_path: Path
) -> None:
    """Where backward updates, whose states are all on disk or on the device."""
    run = planned(tmp_path, states=states)
    run.backward(0)
    if states == DISK:
        refused(partial(enter, run), BETWEEN, RuntimeError)
    for use in (*TAKEN, *READ):
        assert_says(refusal(partial(use, run)))
    before = run.optimizer.param_groups[0]["lr"]
    run.optimizer.param_groups[0]["lr"] = 2 * before
    assert_says(refusal(run.optimizer.step))
    run.optimizer.param_groups[0]["lr"] = before
    run.update()
    assert all(p.grad is None for p in run.model.parameters())
    enter(run)
    for use in reversed(READ):  # after the step it is allowed
        use(run)


# --- modules and activations ----------------------------------------------------------------------


def test_restore_gives_back_a_forward_that_an_instance_had(tmp_path: Path) -> None:
    """As packages leave them that wrap modules on the instance."""
    model = STACK.build()
    block = model.get_submodule("blocks.1")
    mine = block.forward
    block.forward = mine  # on the instance from now on
    run = tried(units=lambda units: decided(units, RECOMPUTE, DISK)).prepared(model, tmp_path)
    assert block.__dict__["forward"] is not mine
    restore(run.model)
    assert block.__dict__["forward"] is mine
    assert "forward" not in model.__dict__


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("held", [False, True], ids=["leaves", "stays"])
def test_a_write_to_a_saved_activation_is_refused_as_in_plain_pytorch(
    held: bool, tmp_path: Path
) -> None:
    """While it leaves, or before backward where somebody holds it, so that it stays."""
    seen: list[Tensor] = []

    def write(_: nn.Module, inputs: tuple[Tensor], __: object) -> None:
        if held:
            seen.append(inputs[0])
        else:
            inputs[0].detach().mul_(2)

    swapping = Scenario(units=lambda units: decided(units, Activations(tier="disk"), PERSISTENT))
    for folder in (None, tmp_path):
        run = swapping.start(folder)
        run.model.get_submodule(DOWN).register_forward_hook(write)
        with pytest.raises(RuntimeError, match=r"in place after it was|by an inplace operation"):
            run.backward(0, between=lambda: [tensor.detach().mul_(2) for tensor in seen])
        seen.clear()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_pass_that_writes_to_a_parameter_that_leaves_is_refused(
    when: str, tmp_path: Path, assert_says: Speaker
) -> None:
    """As an optimizer of the script's own does that steps in hooks."""

    def write(module: nn.Module, *_: object) -> None:
        module.get_parameter("weight").detach().mul_(2)

    model = Scenario().subject.build()
    down = model.get_submodule(DOWN)
    if when == "forward":
        down.register_forward_hook(write)
    else:
        down.register_full_backward_hook(write)
    leaving = tried(model="llama-tied", updates="after backward")
    assert_says(refusal(partial(leaving.prepared(model, tmp_path).backward, 0)))


@pytest.mark.parametrize("states", [Placement(tier="host"), DISK], ids=phrase)
def test_forward_hooks_that_come_after_prepare_are_part_of_their_block(
    states: Placement, tmp_path: Path
) -> None:
    """A penalty on weights, and another output."""

    def script(run: Run) -> None:
        held: list[Tensor] = []

        def penalize(module: nn.Module, _: object, output: Tensor) -> Tensor:
            held.append(sum((p.square().mean() for p in module.parameters()), torch.zeros(())))
            return output * 1.5

        run.model.get_submodule("blocks.1").register_forward_hook(penalize)
        for number in range(3):
            loss = run.loss(number) + held.pop()
            loss.backward()
            run.seen.append(loss.detach())
            run.update()

    tried(script, states=states).assert_like_plain(tmp_path)


@pytest.mark.parametrize("form", ["full", "lite"])
def test_backward_runs_a_forward_again_in_the_mode_that_it_had(form: Form, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(2):
            loss = run.loss(number)
            run.model.eval()
            loss.backward()
            assert not any(module.training for module in run.model.modules())
            run.model.train()
            run.seen.append(loss.detach())
            run.update()

    tried(
        script,
        model=Subject(
            stack(does(lambda b, x: x + F.dropout(b.computed(x), 0.1, b.training))), batch_of
        ),
        units=lambda units: decided(units, Activations(form=form), PERSISTENT),
    ).assert_like_plain(tmp_path)
