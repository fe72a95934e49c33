"""Hostile models: each trains like plain PyTorch and below the predicted peak, or is refused."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from protrain_plan.models.batches import Batch, call_model, loss_of, with_batch_sizes
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.models.sources import load_source
from protrain_plan.planning.model.options import parse_pin, pinned_options
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.profiling.optimizer_cost import refuse_sparse
from protrain_plan.profiling.structure.parameters import refuse_parameters
from protrain_runtime import prepare
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import KEEP, Budgets, Placement
from protrain_runtime.contract.records.profile import Profile, Unit
from protrain_runtime.model.prepared import engine_of
from tests.support import hostile_models
from tests.support.estimates import bytes_alone, estimate, machine, model_of
from tests.support.fuzzed_modules import fuzzed, source
from tests.support.hostile_models import HOSTILE, Hostile, Stack, batch_of, tokens_of
from tests.support.judging import PLANS, PlanName, Verdict, judged, profiled
from tests.support.messages import Speaker
from tests.support.peaks import SLACK_BYTES
from tests.support.runtime_cases import decided, described_by, plan_for_profile
from tests.support.thinning import thinned

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
    # A plan that keeps everything installs nothing that could refuse a step.
    gives_up = model.gives_up is not None and verdict.under != "kept"
    if verdict.kind != "like plain":
        return verdict.kind == "refused" and said and model.gives_up is None
    if gives_up:
        return said and verdict.gave_up == (model.gives_up,)
    trains = model.trains or not model.refusal or model.gives_up is not None
    return trains and not verdict.gave_up


@pytest.mark.parametrize(  # at night all of them
    "name",
    [
        "flow: turned",
        "checkpoints: hooks, attribute 'calls'",
        "peaks: parameters of many pieces",
    ],
)
def test_trains_like_plain_or_is_refused_under_mixed_decisions(name: str) -> None:
    assert_right(name, ["mixed"])


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_trains_like_plain_or_is_refused_under_every_plan(name: str) -> None:
    assert_right(name, PLANS)


@pytest.mark.nightly("0")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 100))]
)
def test_random_modules_train_like_plain_or_are_refused(seed: int) -> None:
    verdicts = judged(fuzzed, seed, plans=PLANS, seed=seed)
    wrong = [f"{each.under}: {each.text}" for each in verdicts if each.kind == "wrong"]
    assert not wrong, "\n".join([*wrong, f"seed {seed}:", source(seed)])


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


class Unseeded(Hostile):
    """A model that is another one every time."""

    def build(self) -> nn.Module:
        return self.make().train()


def planned(what: str) -> Hostile:
    return Unseeded(Stack) if what == "unseeded" else Hostile(lambda: Planned(what))


@pytest.mark.nightly(but=("unseeded-discarded-not the same twice",))
@pytest.mark.parametrize(
    ("what", "kind", "told"),
    [
        ("ends", "wrong", "the process ended with 9"),
        ("differs", "wrong", "loss[3]"),
        ("nothing", "like plain", ""),
        ("unseeded", "discarded", "not the same twice"),
    ],
)
def test_the_judge_sees_what_goes_wrong_under_a_plan(what: str, kind: str, told: str) -> None:
    (verdict,) = judged(planned, what, plans=["offloaded"], seed=SEED)
    assert (verdict.kind, verdict.text[: len(told)]) == (kind, told)


# --- what their profiles say ----------------------------------------------------------------------


def block_of(name: str, folder: Path) -> Unit:
    return profiled(HOSTILE[name], folder).units[2]


@pytest.mark.nightly
def test_what_a_context_or_an_attribute_holds_does_not_swap(tmp_path: Path) -> None:
    """The inner activations are 40 KiB, and a hidden state half of that."""
    ordinary = profiled(Hostile(Stack), tmp_path).units[2].cost("keep").swappable_bytes
    found = {
        name: block_of(name, tmp_path).cost("keep").swappable_bytes - ordinary
        for name in ("peaks: kept on ctx", "peaks: inner kept")
    }
    # What the context holds is in the place of what gelu saved.
    assert found == {"peaks: kept on ctx": -40_960, "peaks: inner kept": -40_960}


@pytest.mark.nightly
def test_a_block_that_draws_may_be_recomputed_and_one_that_differs_not(
    assert_says: Speaker, tmp_path: Path
) -> None:
    drawing = block_of("random: generators of its own", tmp_path)
    assert (drawing.runs_once, drawing.forms[-1].form) == ("", "full")
    profile = profiled(HOSTILE["once: reads a global"], tmp_path)
    assert [cost.form for cost in profile.units[2].forms] == ["keep"]
    budgets = Budgets(device=10**12, host=0, disk=10**12)
    problem = Problem.of(profile, budgets, replace(OVERLAPPING, piece_bytes=1 << 20))
    assert_says.refused(pinned_options, problem.implied, [parse_pin("blocks.1: recompute")])


def estimated(source: str, optimizer: str = "adamw") -> Profile:
    return estimate(
        load_source(source),
        batch_size=1,
        seq_len=512,
        dtype="float32",
        hardware=machine(),
        optimizer=optimizer,
    )


def data(count: int) -> Iterator[Batch]:
    """Batches of a data set that stays in memory."""
    tokens = torch.stack([tokens_of(step) for step in range(count)])
    return ({"tokens": each.clone(), "step": 0} for each in tokens)


def with_data() -> tuple[nn.Module, list[Batch]]:
    return Stack(), [batch_of(step) for step in range(50)]


def with_one_batch() -> tuple[nn.Module, list[Batch]]:
    return Stack(), [batch_of(0)]


@pytest.mark.nightly
def test_data_in_memory_stands_in_every_slot(tmp_path: Path) -> None:
    one, some = tokens_of(0).nbytes, 40
    estimates = [estimated(f"{__name__}:{name}") for name in ("with_data", "with_one_batch")]
    assert estimates[0].base_bytes - estimates[1].base_bytes == 49 * one
    measured = [profiled(Hostile(Stack), tmp_path, partial(data, count)) for count in (10, 10, 50)]
    more = measured[2].base_bytes - measured[1].base_bytes
    assert some * one <= more <= some * one + SLACK_BYTES


class Particular(Stack):
    """Looks at all parameters, in every forward, as kernels of one's own do at theirs."""

    def through(self, hidden: Tensor, step: int) -> Tensor:
        if not all(type(parameter) is nn.Parameter for parameter in self.parameters()):
            raise RuntimeError("parameters have to be parameters")
        return super().through(hidden, step)


def test_a_model_that_no_plan_can_run_is_one_clear_error(
    assert_says: Speaker, tmp_path: Path
) -> None:
    assert_says.refused(profiled, Hostile(Particular), tmp_path)


# --- what a profile takes -------------------------------------------------------------------------

FACTORIES = "tests.support.hostile_models:"


ESTIMATED = {
    "complex_alone": "takes: complex alone",
    "complex": "takes: complex",
    "dicts": "takes: dicts",
    "objects": "takes: objects",
    "sparse": "takes: sparse gradient",
}


@pytest.mark.nightly("complex_alone", "objects")
@pytest.mark.parametrize("name", thinned(tuple(ESTIMATED), every=3))
def test_estimates_are_what_is_measured(name: str, tmp_path: Path) -> None:
    subject = HOSTILE[ESTIMATED[name]]
    found = estimated(f"{FACTORIES}{name}_factory", subject.optimizer)
    real = profiled(subject, tmp_path)
    units = list(found.units)
    if "complex" in name:  # what complex operators take inside is bounded
        for unit, there in zip(units, real.units, strict=True):
            for mine, other in zip(unit.forms, there.forms, strict=True):
                assert mine.backward_peak_bytes >= other.backward_peak_bytes
        units = [replace(u, forms=r.forms) for u, r in zip(units, real.units, strict=True)]
    assert [bytes_alone(u, r) for u, r in zip(units, real.units, strict=True)] == [
        bytes_alone(unit, unit) for unit in real.units
    ]
    assert (found.workload.batch_size, found.workload.seq_len) == (4, 40)


def test_complex_tensors_stay_complex_whatever_the_workload() -> None:
    model = model_of(
        load_source(f"{FACTORIES}complex_factory"), dtype="bfloat16", precision="master"
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.complex64}


WORKLOAD = replace(hostile_models.WORKLOAD, model=f"{FACTORIES}sparse_factory", seq_len=512)


def test_an_optimizer_that_takes_no_sparse_gradients_is_named(assert_says: Speaker) -> None:
    assert_says.refused(refuse_sparse, {"table.weight"}, "adamw", WORKLOAD)


def test_states_that_stay_are_not_taken_by_hand(tmp_path: Path) -> None:
    """The runtime has no record of the profile: it sees the gradient itself."""
    subject = HOSTILE["takes: sparse gradient"]
    profile = profiled(subject, tmp_path)
    plan = plan_for_profile(profile, decided(described_by(profile), KEEP, Placement(tier="disk")))
    factory = optimizer_factory("sgd")
    model, _ = prepare(subject.build(), plan, optimizer=factory, spill_directory=tmp_path)
    with pytest.raises(RuntimeError, match=r"the gradient of embedding\.weight is sparse"):
        loss_of(call_model(model, subject.batch(0))).backward()


class OfItsOwn(torch.Tensor):
    """A class of tensors."""


def with_weight(make: Callable[[Tensor], Tensor]) -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(make(model.weight.detach()))
    return model


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: nn.Linear(2, 2).requires_grad_(False), "the model has no trainable parameters"),
        (
            lambda: with_weight(Tensor.to_sparse),
            "the parameter 'weight' is sparse (torch.sparse_coo)",
        ),
        (
            lambda: with_weight(lambda it: it.as_subclass(OfItsOwn)),
            "the parameter 'weight' is a OfItsOwn",
        ),
        (
            lambda: with_weight(lambda it: it[0].expand(2, 2)),
            "the parameter 'weight' has elements that share memory",
        ),
    ],
    ids=["frozen", "sparse", "class", "expanded"],
)
def test_what_no_chunk_can_hold_is_refused_by_name(
    make: Callable[[], nn.Module], problem: str
) -> None:
    with pytest.raises(ProtrainError) as error:
        refuse_parameters(make(), source="a:b")
    assert str(error.value).startswith(f"a:b: {problem}")


def test_fake_parameters_are_no_class_of_their_own() -> None:
    with FakeTensorMode():
        refuse_parameters(nn.Linear(2, 2), source="")


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        ({"input_ids": torch.zeros(3, 7).long(), "labels": torch.zeros(3)}, (3, 7)),
        ((torch.zeros(5, 3, 8, 8), torch.zeros(5).long()), (5, 1)),
        (torch.zeros(2, 9, 16), (2, 9)),
        ({"nodes": torch.zeros(10, 4), "edges": torch.zeros(2, 30).long()}, (10, 1)),
        ({"scale": torch.tensor(1.0)}, (1, 1)),
    ],
    ids=["tokens", "images", "features", "graph", "number"],
)
def test_sizes_of_a_factorys_batch_are_recorded(batch: Batch, sizes: tuple[int, int]) -> None:
    found = with_batch_sizes(WORKLOAD, nn.Identity(), batch)
    assert (found.batch_size, found.seq_len) == sizes


def large() -> tuple[nn.Module, list[Tensor]]:
    """640 MiB of parameters, which no batch needs."""
    layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(40)))
    return layers.to(torch.float32), [torch.ones(2, 3, 2048)]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts on Linux")
def test_a_batch_is_seen_without_memory_for_the_model() -> None:
    """In a process that cannot build the model."""
    program = f"""
import resource
from protrain_plan.models.sources import load_source
from protrain_runtime.devices.memory_meter import process_memory
from tests.support.estimates import batches_of, model_of
source = load_source("{__file__}:large")
limit = process_memory().data_bytes + 160 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
print(tuple(next(batches_of(source)).shape))
try:
    model_of(source)
except RuntimeError:
    print("no room")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("(2, 3, 2048)\nno room\n", 0), done.stderr
