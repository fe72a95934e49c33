"""The second step of a user's own loop beside what its plan promises."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from weakref import ref

import torch
from torch.profiler import ProfilerActivity, profile

from protrain_runtime import prepare, restore
from protrain_runtime.contract.records.plan import Offload, Plan, Recompute, TierBytes
from tests.support.cards import every_device
from tests.support.runtime_cases import ADAMW, build, decided, described, device, plan_for, step

MODEL = "functional-relu"


def promising(num_bytes: int) -> tuple[torch.nn.Module, Plan]:
    """A model, and a plan that offloads and recomputes, and promises a peak."""
    model = build(MODEL)
    plan = plan_for(model, decided(described(MODEL), Recompute(), Offload(tier="disk")))
    peak = TierBytes(device=num_bytes, context=0, host=0, disk=0)
    return model, replace(plan, prediction=replace(plan.prediction, peak_bytes=peak))


@contextmanager
def warned() -> Iterator[list[str]]:
    """What is warned of inside."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield said
    said += [str(one.message) for one in found if one.category is RuntimeWarning]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        step(MODEL, model, optimizer, number)


@every_device
def test_a_step_above_its_promise_is_warned_of_once() -> None:
    model, plan = promising(1)
    with warned() as said:
        model, optimizer = prepare(model, plan, optimizer=ADAMW, watch=True)
        train(model, optimizer, 4)
    assert len(said) == 1
    assert said[0].startswith(
        "step 2 took more memory than its plan promises, with all tensors of this process on"
        f" {device()}: the step's peak of tensors, "
    )
    assert ": 1 B predicted, " in said[0]
    restore(model)


@every_device
def test_a_step_within_its_promise_is_silent_and_nothing_stays_attached() -> None:
    model, plan = promising(2**30)
    with warned() as said:
        model, optimizer = prepare(model, plan, optimizer=ADAMW, watch=True)
        train(model, optimizer, 4)
    assert said == []
    assert not optimizer._optimizer_step_post_hooks
    restore(model)


def test_nothing_is_watched_beside_a_profiler() -> None:
    model, plan = promising(1)
    with warned() as said, profile(activities=[ProfilerActivity.CPU]):
        model, optimizer = prepare(model, plan, optimizer=ADAMW, watch=True)
        train(model, optimizer, 3)
    assert said == []
    restore(model)


def test_a_model_that_is_dropped_while_it_is_watched_is_freed() -> None:
    model, plan = promising(1)
    model, optimizer = prepare(model, plan, optimizer=ADAMW, watch=True)
    train(model, optimizer, 1)
    dropped = ref(model)
    del model, optimizer
    gc.collect()
    assert dropped() is None
