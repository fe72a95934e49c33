"""Hostile models: each trains like plain PyTorch and below the predicted peak, or is refused."""

import os
import re
from collections.abc import Sequence

import pytest
from torch import Tensor, nn

from protrain_runtime.model.prepared import engine_of
from tests.support.hostile_models import HOSTILE, Hostile, Stack
from tests.support.judging import PLANS, PlanName, Verdict, judged

SEED = 3


def named(name: str) -> Hostile:
    return HOSTILE[name]


def assert_right(name: str, plans: Sequence[PlanName]) -> None:
    verdicts = judged(named, name, plans=plans, seed=SEED)
    wrong = [verdict for verdict in verdicts if not is_right(HOSTILE[name], verdict)]
    assert [f"{verdict.under}: {verdict.kind}: {verdict.text}" for verdict in wrong] == []
    refused = [verdict for verdict in verdicts if verdict.kind == "refused"]
    assert len(verdicts) == len(plans) or (len(verdicts), len(refused)) == (1, 1)


def is_right(model: Hostile, verdict: Verdict) -> bool:
    said = bool(model.refusal and re.search(model.refusal, verdict.text))
    if verdict.kind == "refused":
        return said
    # A plan that keeps everything installs nothing that could refuse a step.
    given_up = () if model.gives_up is None or verdict.under == "kept" else (model.gives_up,)
    if verdict.kind != "like plain" or not model.trains or verdict.gave_up != given_up:
        return False
    return said or not given_up


@pytest.mark.parametrize("name", tuple(HOSTILE)[::6])  # at night all of them
def test_trains_like_plain_or_is_refused_under_mixed_decisions(name: str) -> None:
    assert_right(name, ["mixed"])


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_trains_like_plain_or_is_refused_under_every_plan(name: str) -> None:
    assert_right(name, PLANS)


# --- what the judge itself finds ------------------------------------------------------------------


class Planned(Stack):
    """Does `what` where it follows a plan; the profile's own plan has another optimizer's rate."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls = what, 0

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        loss = super().loss(hidden, tokens)
        self.calls += engine_of(self) is not None
        if self.calls < 4:
            return loss
        if self.what == "ends":
            os._exit(9)
        return loss * 2 if self.what == "differs" else loss


def planned(what: str) -> Hostile:
    return Hostile(make=lambda: Planned(what))


@pytest.mark.parametrize(
    ("what", "told"),
    [("ends", "the process ended with 9"), ("differs", "loss[3]"), ("nothing", "")],
)
def test_the_judge_sees_what_goes_wrong_under_a_plan(what: str, told: str) -> None:
    (verdict,) = judged(planned, what, plans=["offloaded"], seed=SEED)
    assert verdict.kind == ("wrong" if told else "like plain")
    assert verdict.text.startswith(told)


def coin() -> Hostile:
    """A model that is another one every time."""
    return Unseeded(make=Stack)


class Unseeded(Hostile):
    def build(self) -> nn.Module:
        return self.make().train()


def test_the_judge_discards_what_plain_training_does_not_repeat() -> None:
    (verdict,) = judged(coin, plans=["offloaded"], seed=SEED)
    assert verdict.kind == "discarded"
