"""Uses of an optimizer besides `step()`, under a plan: as in plain PyTorch, or refused.

Scripts that reset or edit states (LISA, ReLoRA, BAdam) reach them through `optimizer.state`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from protrain_plan.models.optimizers import optimizer_factory
from protrain_runtime import load, prepare, restore, save
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    KEEP,
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    Placement,
    Updates,
)
from protrain_runtime.diagnostics.matching import STATES_OF
from protrain_runtime.states.stand_ins import OffloadedGradient
from protrain_runtime.states.update_rules import UpdateRules
from tests.support.cards import every_device
from tests.support.messages import Speaker
from tests.support.optimizer_habits import (
    EDITS,
    USES,
    by_value,
    centred,
    edited,
    emptied,
    gradients,
    parameters,
)
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import (
    assert_bitwise,
    decided,
    decision_name,
    device,
    weight_decay_groups,
)
from tests.support.scenario import Loop, Run, Scenario, Script, Units, refusal

BOTH: tuple[Updates, ...] = ("in backward", "after backward")
AMSGRAD = partial(torch.optim.AdamW, lr=1e-2, amsgrad=True, foreach=False)


def in_turns(units: Units) -> Units:
    """Neighbours on the disk, in host memory, on the device, and updated in backward."""
    places: tuple[Placement, ...] = (
        *(Placement(tier="disk"), Placement(tier="host")),
        *(PERSISTENT, OPTIMIZER_IN_BACKWARD),
    )
    return [
        decided([unit], KEEP, places[number % len(places)])[0] for number, unit in enumerate(units)
    ]


def tried(script: Script, updates: Updates = "in backward", **options: Any) -> Scenario:
    settings: dict[str, Any] = {"updates": updates, "overlap_steps": options.pop("overlap", False)}
    states = options.pop("states", None)
    units = in_turns if states is None else partial(decided, activations=KEEP, states=states)
    if states is None and updates == "after backward":
        units = partial(decided, activations=KEEP, states=Placement(tier="disk"))
    return Scenario(script=script, units=units, settings=settings, **options)


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("updates", BOTH)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("name", EDITS)
def test_states_that_are_edited_between_steps_are_those_of_plain_pytorch(
    name: str, overlap: bool, updates: Updates, tmp_path: Path
) -> None:
    script = Loop(after=partial(edited, EDITS[name]))
    tried(script, updates, overlap=overlap, factory=AMSGRAD).assert_like_plain(tmp_path)


@pytest.mark.nightly(but=("zeroed-cpu",))
@every_device
@pytest.mark.parametrize("name", ["replaced", "zeroed", "exchanged", "looked_at"])
def test_states_are_edited_alike_on_every_device(name: str, tmp_path: Path) -> None:
    script = Loop(after=partial(edited, EDITS[name]))
    for updates in BOTH:
        tried(script, updates, states=Placement(tier="host")).assert_like_plain(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["emptied", "zeroed", "exchanged"])
def test_states_that_are_edited_before_the_step_are_those_of_plain_pytorch(
    name: str, tmp_path: Path
) -> None:
    """Between backward and step, where the plan's updates come after backward."""
    script = Loop(between=partial(edited, EDITS[name]))
    tried(script, "after backward").assert_like_plain(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("updates", BOTH)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_states_that_a_script_holds_show_and_take_every_step(
    overlap: bool, updates: Updates, tmp_path: Path
) -> None:
    """Dictionaries, tensors and views, taken once after the first step."""
    held: dict[bool, list[Any]] = {}

    def after(run: Run, number: int) -> None:
        if number == 0:
            states = [run.optimizer.state[parameter] for parameter in parameters(run)]
            views = [state["exp_avg"].view(-1)[:8] for state in states[1::2]]
            held[run.planned] = [*states[::2], *views]
        for one in held[run.planned]:
            values = one["exp_avg"] if isinstance(one, dict) else one
            run.seen.append(values.detach().cpu().clone())
            if number == 2:
                values.mul_(0.5)

    tried(Loop(after=after), updates, overlap=overlap).assert_like_plain(tmp_path)


def test_what_is_not_held_is_given_back_before_the_next_is_read(tmp_path: Path) -> None:
    """A loop over all states takes the memory of one parameter's."""
    run = tried(Loop()).start(tmp_path)
    run.step(0)
    most = 0
    for state in run.optimizer.state.values():
        assert state
        most = max(most, len(vars(run.optimizer)["state"]._loans))
    assert most <= 2


def test_held_states_outlive_the_plan(tmp_path: Path) -> None:
    run = tried(Loop()).start(tmp_path)
    run.step(0)
    states = {parameter: run.optimizer.state[parameter] for parameter in parameters(run)}
    for state in states.values():
        state["exp_avg"].zero_()
    restore(run.model)
    for parameter, state in states.items():
        assert run.optimizer.state[parameter]["exp_avg"] is state["exp_avg"]
        assert not state["exp_avg"].any()


@pytest.mark.nightly
def test_edits_are_in_checkpoints_and_end_with_loading(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.step(0, 1)
        emptied(run)
        states = {p: dict(s) for p, s in run.optimizer.state.items()}
        folder = tmp_path / f"checkpoint-{run.planned}"
        save(run.model, run.optimizer, folder)
        run.step(2)
        load(run.model, run.optimizer, folder)
        run.seen.append(torch.tensor(len(states)))
        run.step(3, 4)

    tried(script).assert_like_plain(tmp_path)


@pytest.mark.parametrize("updates", BOTH)
def test_states_that_do_not_fit_are_refused(
    updates: Updates, tmp_path: Path, assert_says: Speaker
) -> None:
    run = tried(Loop(), updates, states=Placement(tier="disk")).start(tmp_path)
    run.step(0)
    parameter = next(parameters(run))
    said: list[str] = []
    for key, value in (
        ("exp_avg", None),
        ("exp_avg", torch.zeros(3)),
        ("exp_avg", torch.zeros(parameter.shape, dtype=torch.float64)),
        ("more", torch.zeros(parameter.shape)),
    ):
        before = dict(run.optimizer.state[parameter])
        changed = {**before, key: value}
        run.optimizer.state[parameter] = {k: v for k, v in changed.items() if v is not None}
        said.append(str(refusal(partial(run.loss, 0))))
        run.optimizer.state[parameter] = before
    said.append(str(refusal(lambda: run.optimizer.state.update({parameter: 3}), TypeError)))
    assert_says(said)
    run.optimizer.state[parameter] = {}  # what the message says
    run.step(1)


def test_states_in_the_middle_of_a_backward_that_updates_are_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    run = tried(Loop(), states=Placement(tier="disk")).start(tmp_path)
    run.step(0)
    parameter = next(parameters(run))
    state = run.optimizer.state[parameter]
    loss = run.loss(1)
    said = [str(refusal(lambda: run.optimizer.state[parameter]))]
    loss.backward()
    said.append(str(refusal(lambda: run.optimizer.state[parameter])))
    state["exp_avg"].zero_()
    said.append(str(refusal(run.optimizer.step)))
    assert_says(said)


# --- everything else ------------------------------------------------------------------------------


class Sophia(torch.optim.Optimizer):
    """A diagonal Hessian that a method of its own estimates every other step."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        self.updates = 0
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def update_hessian(self, scale: float = 1.0) -> int:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "hessian" in state:
                    state["hessian"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1 * scale)
        return 7

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["hessian"] = torch.ones_like(p)
                state["exp_avg"].lerp_(p.grad, 0.1)
                p.addcdiv_(state["exp_avg"], state["hessian"] + 1e-8, value=-group["lr"])


@pytest.mark.nightly(but=("cuda",))
@every_device
def test_a_method_of_the_users_class_works_on_states_below_the_device(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(6):
            run.backward(number)
            run.update()
            if number % 2:
                run.backward(number + 100)
                optimizer: Any = run.optimizer
                assert optimizer.update_hessian(scale=0.5) == 7
                run.optimizer.zero_grad()

    tried(script, "after backward", factory=Sophia).assert_like_plain(tmp_path)


def test_an_attribute_of_the_users_class_is_read_and_not_written(
    tmp_path: Path, assert_says: Speaker
) -> None:
    run = tried(Loop(), factory=Sophia).start(tmp_path)
    optimizer: Any = run.optimizer
    assert optimizer.updates == 0
    assert_says(refusal(partial(setattr, optimizer, "updates", 3)))
    kept = tried(Loop(), factory=Sophia, states=PERSISTENT).start(tmp_path)
    optimizer = kept.optimizer
    optimizer.updates = 3
    assert optimizer.inner.updates == 3
    with pytest.raises(AttributeError, match="no attribute 'hessians'"):
        _ = optimizer.hessians


def hooked(run: Run) -> None:
    """Every hook sees the optimizer that the script holds, once."""
    called: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(optimizer: Any, *_: object) -> None:
            assert optimizer is run.optimizer
            called.append(name)

        return hook

    run.optimizer.register_step_pre_hook(note("before step"))
    run.optimizer.register_step_post_hook(note("after step"))
    run.optimizer.register_state_dict_pre_hook(note("before state_dict"))
    run.optimizer.register_state_dict_post_hook(note("after state_dict"))
    run.optimizer.register_load_state_dict_pre_hook(note("before loading"))
    run.optimizer.register_load_state_dict_post_hook(note("after loading"))
    run.step(0, 1)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.step(2)
    run.seen += [torch.tensor([hash(name) for name in called])]


def changing_hooks(run: Run) -> None:
    def saved(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "more": 3}

    def loaded(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 0.25} for group in state["param_groups"]]
        return {"state": state["state"], "param_groups": groups}

    run.optimizer.register_state_dict_post_hook(saved)
    run.optimizer.register_load_state_dict_pre_hook(loaded)
    run.step(0)
    state = run.optimizer.state_dict()
    assert state["more"] == 3
    run.optimizer.load_state_dict(state)
    run.step(1)


def groups_replaced(run: Run) -> None:
    run.step(0)
    run.optimizer.param_groups = [{**group, "lr": 0.05} for group in run.optimizer.param_groups]
    run.step(1)
    run.optimizer.param_groups[0]["lr"] = 0.01
    run.step(2)


def defaults_changed(run: Run) -> None:
    """They are for groups to come."""
    run.optimizer.defaults["lr"] = 100.0
    run.step(0, 1)


def regrouped(run: Run) -> None:
    """A parameter that changes its group has the options of the new one."""
    for number in range(6):
        run.step(number)
        if number == 3:  # optimizers of pieces are kept by then
            first, last = run.optimizer.param_groups
            last["params"] += [first["params"].pop(n) for n in (5, 2)]


def closed(run: Run) -> None:
    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(0)
        loss.backward()
        return loss

    optimizer: Any = run.optimizer
    with torch.no_grad():  # a closure records its graph all the same
        for _ in range(3):
            run.seen.append(optimizer.step(closure).detach())


SCRIPTS: dict[str, Script] = {
    "hooks": hooked,
    "hooks that change": changing_hooks,
    "groups replaced": groups_replaced,
    "defaults changed": defaults_changed,
    "closures": closed,
    "regrouped": regrouped,
}


@pytest.mark.nightly("hooks-after backward", "groups replaced-after backward")
@pytest.mark.parametrize("updates", BOTH)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_rest_of_an_optimizer_is_as_in_plain_pytorch(
    name: str, updates: Updates, tmp_path: Path
) -> None:
    groups = weight_decay_groups if name == "regrouped" else None
    tried(SCRIPTS[name], updates, groups=groups).assert_like_plain(tmp_path)


# --- gradients ------------------------------------------------------------------------------------


SPECULATED = ("by_value", "by_norm_and_value", "norms_of_each", "past_autograd")


@pytest.mark.nightly(by_day=20)
@every_device
@pytest.mark.parametrize(
    ("name", "read"), [*((name, False) for name in USES), *((name, True) for name in SPECULATED)]
)
def test_gradients_that_wait_are_used_as_in_plain_pytorch(
    name: str, read: bool, tmp_path: Path
) -> None:
    """On a CPU those of chunks on disk do; updates ahead of the norm may have read them."""
    tier: TierName = "disk" if device().type == "cpu" else "host"
    states = Placement(tier=tier, speculate=read, update_on_device=read and tier == "host")
    scenario = tried(Loop(between=USES[name]), "after backward", states=states)
    scenario.assert_like_plain(tmp_path)


@pytest.mark.nightly("emulated")
@every_device
def test_gradients_are_used_between_micro_batches(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(3):
            run.backward(2 * number, last=False)
            by_value(run, number)
            run.backward(2 * number + 1)
            centred(run, number)
            run.update()

    scenario = Scenario(
        script=script,
        units=partial(decided, activations=KEEP, states=Placement(tier="host")),
        settings={"updates": "after backward", "micro_batches": 2},
    )
    scenario.assert_like_plain(tmp_path)


@every_device
def test_one_gradient_at_a_time_is_on_the_device(tmp_path: Path) -> None:
    run = tried(Loop(), "after backward", states=Placement(tier="disk")).start(tmp_path)
    run.backward(0)
    most = 0
    for gradient in gradients(run):
        gradient.add_(1.0)
        lent = [g.stored.lent for g in gradients(run) if isinstance(g, OffloadedGradient)]
        most = max(most, sum(one is not None for one in lent))
    assert most == 1
    by_value(run, 0)
    lent = [g.stored.lent for g in gradients(run) if isinstance(g, OffloadedGradient)]
    assert lent
    assert all(one is None for one in lent)


# --- the optimizer that is given ------------------------------------------------------------------


@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "groups"])
def test_an_optimizer_that_is_made_already_follows_the_plan(grouped: bool, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)
        for number in range(4):
            run.step(number)
            scheduler.step()

    def given(parameters: Any) -> torch.optim.Optimizer:
        own = list(parameters)
        half = len(own) // 2
        groups: Any = [{"params": own[:half], "lr": 1e-3}, {"params": own[half:]}]
        return torch.optim.AdamW(groups if grouped else own, lr=1e-2, weight_decay=0.1)

    scenario = tried(script, factory=given)
    model = scenario.subject.build()
    made = given(model.parameters())
    _, optimizer = prepare(
        model, scenario.planned_for(model), optimizer=made, spill_directory=tmp_path
    )
    assert optimizer.param_groups is made.param_groups
    run = Run(scenario.subject, model, optimizer, folder=tmp_path)
    assert_bitwise(scenario.played(run), scenario.plain())


def test_an_optimizer_that_calls_its_closure_is_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    scenario = tried(Loop(), factory=torch.optim.LBFGS, states=PERSISTENT)
    kept = scenario.start(tmp_path)  # under a plan that moves nothing it is PyTorch's own
    optimizer: Any = kept.optimizer
    losses: list[Tensor] = []

    def closure() -> Tensor:
        kept.optimizer.zero_grad()
        losses.append(kept.loss(0))
        losses[-1].backward()
        return losses[-1]

    optimizer.step(closure)
    assert len(losses) > 1
    for states in (Placement(tier="disk"), OPTIMIZER_IN_BACKWARD):
        asked = tried(Loop(), factory=torch.optim.LBFGS, states=states)
        assert_says(refusal(partial(asked.start, tmp_path), ProtrainError))


@pytest.mark.parametrize("states", [PERSISTENT, Placement(tier="disk")], ids=decision_name)
def test_more_states_than_planned_are_refused(
    states: Placement, tmp_path: Path, assert_says: Speaker
) -> None:
    """A plan for SGD does not have room for AdamW."""
    scenario = tried(Loop(), states=states)
    model = scenario.subject.build()
    plan = scenario.planned_for(model)
    peaks = replace(plan.prediction.peak_bytes, device=2**28)
    promised = with_settings(plan, peak_bytes=peaks)
    for planned, factory in (
        ("sgd", torch.optim.AdamW),
        ("sgd-momentum", torch.optim.AdamW),
        ("adamw", partial(torch.optim.AdamW, amsgrad=True)),
    ):
        asked = partial(prepare, model, replace(promised, optimizer=planned), optimizer=factory)
        assert_says(refusal(asked, ProtrainError))
    for fewer in (torch.optim.SGD, torch.optim.AdamW):
        mine = replace(promised, optimizer="adamw")
        prepare(model, mine, optimizer=fewer, spill_directory=tmp_path)
        restore(model)


@pytest.mark.parametrize("name", STATES_OF)
def test_counts_of_states_are_those_that_optimizers_keep(name: str) -> None:
    rule = UpdateRules(optimizer_factory(name)).of(torch.float32)
    assert rule.element_bytes == 4 * STATES_OF[name]
