"""An activation option that is one file and one entry: profiled, planned with leave, and run.

The option is `tests/support/half_activations.py`. It is not exact, so that its oracle is plain
training up to a tolerance; its bytes are held to the plan's, like any other's.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from protrain_plan.commands.options import opt_ins_named
from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.model.problem import OVERLAPPING
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.answers import Objective, Question
from protrain_plan.planning.questions.objectives import ask
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.records import (
    dumps_plan,
    dumps_profile,
    loads_plan,
    loads_profile,
    register_form,
)
from protrain_runtime.contract.records.decisions import ACTIVATIONS
from protrain_runtime.contract.records.plan import KEEP, PERSISTENT, Activations, Budgets, Plan
from protrain_runtime.contract.records.profile import Profile
from tests.support.half_activations import HALF
from tests.support.messages import Speaker
from tests.support.peaks import assert_disk_within, profile_made, trained
from tests.support.planning_cases import cpu, decoder, with_form
from tests.support.runtime_cases import decided, profiled_here
from tests.support.scenario import Scenario

AMPLE = 10**12
LEAVE = ("half-activations",)


@pytest.fixture(scope="module")
def registered() -> Iterator[Callable[[], None]]:
    """The option is there; what takes it out again."""
    unregister = register_form(HALF)
    yield unregister
    unregister()


@pytest.fixture(scope="module")
def profile(registered: Callable[[], None], tmp_path_factory: pytest.TempPathFactory) -> Profile:
    make = partial(profiled_here, "tiny-llama", num_steps=2, allow=LEAVE)
    return profile_made(tmp_path_factory, "half-activations", make)


def planned(profile: Profile, *pins: str, allow: tuple[str, ...] = ()) -> Plan:
    disk = profile.hardware.tier("disk").capacity_bytes
    question = Question(
        profile=profile,
        budgets=Budgets(device=AMPLE, host=0, disk=disk),
        pins=tuple(parse_pin(pin) for pin in pins),
        allow=allow,
        settings=replace(OVERLAPPING, piece_bytes=1 << 16),
    )
    answer = ask(question, Objective(), effort=Effort())
    assert isinstance(answer.solved, Solved)
    return answer.solved.plan


BLOCKS = "model.layers.*"


@pytest.fixture
def by_hand(registered: Callable[[], None]) -> Profile:
    """A profile with the form, of what is planned alone."""
    return with_form(decoder(cpu(), blocks=2), "half", *LEAVE)


@pytest.mark.nightly
def test_a_block_keeps_fewer_bytes_in_it_than_all_that_autograd_saves(profile: Profile) -> None:
    blocks = [unit for unit in profile.units if unit.kind == "block"]
    assert [cost.form for cost in blocks[0].forms][:2] == ["keep", "half"]
    for unit in blocks:
        # Two bytes for four, and views of one storage by themselves.
        assert unit.cost("half").kept_bytes < 0.7 * unit.cost("keep").kept_bytes
        assert unit.cost("half").swappable_bytes > 0
        assert unit.cost("half").backward_s > 0


@pytest.mark.nightly
@pytest.mark.parametrize("decision", ["keep half", "swap half to disk"])
def test_a_plan_with_it_stays_below_its_predicted_peak(
    profile: Profile, decision: str, tmp_path: Path
) -> None:
    plan = planned(profile, f"{BLOCKS}: {decision}, offload to disk", allow=LEAVE)
    assert {unit.activations for unit in plan.units} == {
        KEEP,
        Activations(form="half")
        if decision.startswith("keep")
        else Activations(tier="disk", form="half"),
    }
    assert not plan.exact
    assert (plan.exactness, plan.allowed) == ("approximate", LEAVE)
    assert f"activations: {decision}," in dumps_plan(plan)
    assert loads_plan(dumps_plan(plan)) == plan

    run = trained(plan, tmp_path)
    assert run.measured_peak_bytes is not None
    assert run.measured_peak_bytes.device <= plan.prediction.peak_bytes.device
    promised, slots = plan.prediction.peak_bytes.disk, 2 * len(plan.units) + 1
    assert_disk_within(promised, run.measured_peak_bytes.disk, num_slots=slots)


def test_losses_are_close_to_plain_training_and_not_equal_in_every_bit(
    registered: Callable[[], None], tmp_path: Path
) -> None:
    asked = Scenario(
        model="llama",
        units=partial(decided, activations=Activations(form="half"), states=PERSISTENT),
        settings={"exact": False, "exactness": "approximate", "allowed": LEAVE},
    )
    found, expected = asked.played(asked.start(tmp_path)), asked.plain()
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-2, atol=0.0)
    assert torch.equal(found.losses[0], expected.losses[0])  # the first forward is plain
    assert not torch.equal(found.losses[-1], expected.losses[-1])


def test_without_leave_it_is_no_option(by_hand: Profile, assert_says: Speaker) -> None:
    plan = planned(by_hand)
    assert plan.exact
    assert all(unit.activations.form != "half" for unit in plan.units)
    assert_says.refused(planned, by_hand, "layers.*: keep half")


def test_a_name_of_no_such_option_is_refused(
    registered: Callable[[], None], assert_says: Speaker
) -> None:
    assert opt_ins_named(["half-activations"] * 2) == LEAVE
    assert_says.refused(opt_ins_named, ["hall-activations"])


def test_a_plan_that_uses_it_cannot_say_that_it_is_exact(by_hand: Profile) -> None:
    plan = planned(by_hand, "layers.*: keep half", allow=LEAVE)
    text = dumps_plan(plan)
    for told, other, problem in (
        (
            "exact: false",
            "exact: true",
            "exact: expected false: its activations take half and keep",
        ),
        ("exactness: approximate", "exactness: rounding", "exactness: expected approximate"),
        ("allowed: [half-activations]\n", "", "expected half-activations"),
    ):
        assert told in text
        with pytest.raises(RecordError, match=problem):
            loads_plan(text.replace(told, other))


def test_where_it_is_not_registered_records_do_not_know_it(
    registered: Callable[[], None], by_hand: Profile
) -> None:
    with pytest.raises(ValueError, match="there is an activation option 'half' already"):
        register_form(HALF)
    text = dumps_profile(by_hand)
    assert "keep half" in ACTIVATIONS
    registered()
    try:
        with pytest.raises(
            RecordError, match="form: expected keep, in place, 8 tiles, 64 tiles, int8,"
        ):
            loads_profile(text)
        assert "keep half" not in ACTIVATIONS
    finally:
        register_form(HALF)
