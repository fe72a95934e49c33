"""Optimizers with every feature, wherever a plan may update: bitwise, or refused before a step.

The oracle is the same optimizer in plain PyTorch. `apart` in a case: plans may update it anywhere,
and refuse nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.planning.model.problem import Problem
from protrain_runtime import prepare, with_master_weights
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import (
    STEPPED,
    Budgets,
    Offload,
    Persistent,
    Placement,
    Plan,
    Recompute,
    UnitPlan,
)
from protrain_runtime.states.update_rules import UpdateRules
from tests.support import judging, odd_optimizers
from tests.support.hostile_models import Hostile
from tests.support.messages import Speaker
from tests.support.odd_optimizers import APART, TOGETHER, UNCOUNTED, WHOLE, Factory, odd
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import (
    Outcome,
    assert_bitwise,
    batch,
    build,
    decided,
    described,
    outcome,
    plan_for,
    speculative,
    weight_decay_groups,
)
from tests.support.thinning import thinned

NAME = "gpt2"
NUM_STEPS = 5


@dataclass(frozen=True)
class Way:
    """Where updates run, and the loop that goes with it."""

    states: tuple[Placement, ...]
    clips: bool = False
    speculates: bool = False
    micro_batches: int = 1

    def plan(self, model: nn.Module) -> Plan:
        units: list[UnitPlan] = []
        own = decided(described(NAME), Recompute(), Persistent())
        for number, unit in enumerate(own):
            units.append(replace(unit, states=self.states[number % len(self.states)]))
        after = self.clips or self.micro_batches > 1
        plan = with_settings(
            plan_for(model, tuple(units)),
            updates="after backward" if after else "in backward",
            micro_batches=self.micro_batches,
        )
        return speculative(plan) if self.speculates else plan


HOST, DISK = Offload(tier="host"), Offload(tier="disk")
ON_DEVICE = Offload(tier="host", update_on_device=True)
WAYS = {
    "host": Way((HOST,)),
    "disk": Way((DISK,)),
    "in backward": Way((STEPPED,)),
    "on the device": Way((ON_DEVICE,)),
    "ahead of the norm": Way((HOST, DISK), clips=True, speculates=True),
    "micro-batches": Way((HOST,), micro_batches=2),
    "everywhere": Way((HOST, Persistent(), STEPPED, DISK)),
    "clipped": Way((DISK, Persistent()), clips=True),
}
STAYING = Way((Persistent(),))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, way: Way) -> Outcome:
    """Steps whose gradients differ in size, with the optimizer's modes where it has them."""
    torch.manual_seed(1)
    losses: list[Tensor] = []
    modes: Any = optimizer
    has_modes = hasattr(optimizer, "eval")
    for number in range(NUM_STEPS):
        if has_modes:
            modes.train()
        for part in range(way.micro_batches):
            loss = loss_of(call_model(model, batch(NAME, 10 * number + part)))
            (loss * 10.0 ** (3 * number % 5)).backward()
            losses.append(loss.detach())
        if way.clips:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        if has_modes:
            modes.eval()
            with torch.no_grad():
                losses.append(loss_of(call_model(model, batch(NAME, 100 + number))))
    return outcome(model, optimizer, losses)


def built() -> nn.Module:
    """The model, with what some optimizers read on parameters."""
    model = build(NAME)
    for parameter in model.parameters():
        parameter.slower_by = 1.0 / parameter.dim()  # type: ignore[attr-defined]
    return model


def plainly(factory: Factory, way: Way) -> Outcome:
    odd_optimizers.COUNTS["calls"] = 0
    model = built()
    found = train(model, factory(weight_decay_groups(model)), way)
    odd_optimizers.COUNTS["calls"] = 0
    return found


def planned(factory: Factory, way: Way, spill: Path) -> Outcome:
    model = built()
    model, optimizer = prepare(
        model,
        way.plan(model),
        optimizer=factory,
        param_groups=weight_decay_groups(model),
        spill_directory=spill,
    )
    return train(model, optimizer, way)


@pytest.mark.parametrize(("feature", "way"), thinned(APART, [*WAYS]))
def test_what_looks_at_one_parameter_at_a_time_trains_everywhere_bitwise(
    feature: str, way: str, tmp_path: Path
) -> None:
    expected = plainly(odd(feature), WAYS[way])
    assert_bitwise(planned(odd(feature), WAYS[way], tmp_path), expected)


@pytest.mark.parametrize(("feature", "way"), thinned(TOGETHER, [*WAYS], every=6))
def test_what_looks_at_all_parameters_is_refused_and_trains_where_all_stay(
    feature: str, way: str, tmp_path: Path
) -> None:
    """What trials have counted in a class or a module is forgotten."""
    own, other = odd(feature), odd(feature)
    expected = plainly(other, STAYING)
    with pytest.raises(ProtrainError, match=r"cannot update"):
        planned(own, WAYS[way], tmp_path)
    assert_bitwise(planned(own, STAYING, tmp_path), expected)


@contextmanager
def refused_or_not() -> Iterator[list[Outcome]]:
    """What is put into the list; nothing, where a ProtrainError came before."""
    found: list[Outcome] = []
    with suppress(ProtrainError):
        yield found


@pytest.mark.parametrize("way", WAYS)
def test_what_looks_at_whole_parameters_trains_or_is_refused(way: str, tmp_path: Path) -> None:
    """Parameters of this model that are cut are refused, by name."""
    (feature,) = WHOLE
    expected = plainly(odd(feature), WAYS[way])
    with refused_or_not() as found:
        found.append(planned(odd(feature), WAYS[way], tmp_path))
    assert found or way != "in backward"
    for outcome_of_plan in found:
        assert_bitwise(outcome_of_plan, expected)


def of_feature(feature: str) -> Hostile:
    """A small model that an odd optimizer trains, for the profile's open decisions."""

    def make() -> nn.Module:
        odd_optimizers.COUNTS["calls"] = 0
        odd_optimizers.forget()
        return build("gpt2")

    optimizer = f"tests.support.odd_optimizers:made(features={feature!r})"
    return Hostile(make, optimizer=optimizer, batch=partial(batch, "gpt2"))


class JudgeOfOpen(judging.Judge):
    """Of plans' decisions, those that the profile leaves open."""

    def _decided(self, name: judging.PlanName, units: tuple[UnitPlan, ...]) -> tuple[UnitPlan, ...]:
        problem = Problem.of(self.profile, Budgets(device=2**40, host=2**40, disk=2**40))
        kinds = [
            {(type(one.decision), one.decision == STEPPED) for one in options.states}
            for options in problem.options
        ]
        return tuple(
            unit
            if (type(unit.states), unit.states == STEPPED) in kind
            else replace(unit, states=Persistent())
            for unit, kind in zip(super()._decided(name, units), kinds, strict=True)
        )


@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(feature, marks=() if number % 12 == 0 else pytest.mark.slow)
        for number, feature in enumerate([*APART, *WHOLE, *TOGETHER])
    ],
)
def test_what_a_profile_leaves_open_is_not_refused_and_trains_bitwise(
    feature: str, tmp_path: Path
) -> None:
    for verdict in JudgeOfOpen(of_feature(feature), 0, tmp_path).verdicts(judging.PLANS):
        assert (verdict.kind, verdict.text) == ("like plain", "")


@pytest.mark.parametrize("feature", UNCOUNTED)
def test_a_profile_refuses_what_keeps_more_than_its_first_step_shows(
    feature: str, tmp_path: Path
) -> None:
    (verdict,) = JudgeOfOpen(of_feature(feature), 0, tmp_path).verdicts(judging.PLANS)
    assert (verdict.under, verdict.kind) == ("profile", "refused")


RULES = [
    *((one, other, True) for one in TOGETHER for other in APART),
    *((one, other, False) for one in (*APART, *WHOLE) for other in APART),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [[{}], [{}, {"lr": 2e-3}]], ids=["one group", "two groups"])
def test_features_are_found_whatever_comes_with_them(
    dtype: torch.dtype, groups: list[dict[str, Any]]
) -> None:
    wrong = [
        (one, other, shape)
        for number, (one, other, together) in enumerate(RULES)
        for shape in ([300], [64, 48])
        if number % 5 == len(groups) + len(shape)
        if UpdateRules(odd(one, other), groups).of(dtype, torch.Size(shape)).together != together
    ]
    assert wrong == []


IN_STATES = ("adamw", "counts in its states", "reads attributes of parameters")
"""What a feature keeps is in the states of parameters alone."""


@pytest.mark.parametrize("feature", [*APART, *WHOLE, *TOGETHER])
def test_master_weights_are_for_what_keeps_all_in_states(feature: str) -> None:
    """They are stepped on in batches, each by an optimizer that is made for it."""
    rules = UpdateRules(with_master_weights(odd(feature)))
    if feature in IN_STATES + WHOLE:
        assert not rules.of(torch.bfloat16, torch.Size([300])).together
        return
    with pytest.raises(ProtrainError, match="cannot step on master weights"):
        rules.of(torch.bfloat16, torch.Size([300]))


@pytest.mark.parametrize("feature", APART)
def test_a_plain_copy_is_stepped_as_the_plan_is(feature: str, tmp_path: Path) -> None:
    """With what a step writes into groups, and in the modes that the loop chooses."""
    model = build(NAME)
    way = WAYS["everywhere"]
    model, optimizer = prepare(
        model,
        way.plan(model),
        optimizer=odd(feature),
        param_groups=weight_decay_groups(model),
        spill_directory=tmp_path,
        check="bitwise",
    )
    train(model, optimizer, way)


def test_master_weights_are_refused_where_all_states_stay() -> None:
    model = build(NAME)
    plan = STAYING.plan(model)
    plan = replace(plan, workload=replace(plan.workload, precision="master"))
    with pytest.raises(ProtrainError, match="master weights"):
        prepare(model, plan, optimizer=odd("clips"))


def test_groups_may_name_parameters_as_the_model_does(tmp_path: Path) -> None:
    """An optimizer that goes by name has a name for each piece."""

    def trained(prefix: str, *, plainly: bool) -> Outcome:
        model = build(NAME)
        groups = [{"params": [(prefix + name, p) for name, p in model.named_parameters()]}]
        if plainly:
            return train(model, odd("goes by name")(iter(groups)), WAYS["host"])
        planned, optimizer = prepare(
            model,
            WAYS["host"].plan(model),
            optimizer=odd("goes by name"),
            param_groups=groups,
            spill_directory=tmp_path,
        )
        return train(planned, optimizer, WAYS["host"])

    assert_bitwise(trained("", plainly=False), trained("", plainly=True))
    with pytest.raises(ProtrainError, match="is called 'my"):
        trained("my.", plainly=False)


@pytest.mark.parametrize("feature", UNCOUNTED)
@pytest.mark.parametrize("shape", [[300], [64, 48]])
def test_what_keeps_more_than_its_first_step_shows_is_refused(
    feature: str, shape: list[int], assert_says: Speaker
) -> None:
    with pytest.raises(ProtrainError) as caught:
        UpdateRules(odd(feature)).of(torch.float32, torch.Size(shape))
    assert_says(caught.value)
