"""Models with habits (`taken_models`): profiled, planned for and trained, or refused by name.

The oracle of training is plain PyTorch, of bytes the step that ran, of estimates what was measured.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.models.building import seeded
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.models.sources import FactorySource
from protrain_plan.profiling.estimated import estimate
from protrain_plan.profiling.measured import refuse_sparse, workspace
from protrain_plan.profiling.memory import passes
from protrain_plan.profiling.memory.unit_bytes import analyze_units, measure_bytes
from protrain_plan.profiling.structure.discovery import discover, undisturbed
from protrain_runtime import prepare
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.plan import (
    Keep,
    Offload,
    Persistent,
    Recompute,
    Swap,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import OptimizerCost, Profile, Unit, Workload
from protrain_runtime.devices.memory_meter import MemoryMeter
from protrain_runtime.diagnostics.matching import model_fingerprint, with_batch_sizes
from protrain_runtime.diagnostics.recording import measure_step
from protrain_runtime.engine.engine import Observer
from protrain_runtime.states.chunks import refuse_parameters
from tests.support import taken_models
from tests.support.estimates import bytes_alone, machine
from tests.support.messages import Speaker
from tests.support.peaks import bytes_of_others, without_freedom
from tests.support.planning_cases import cpu
from tests.support.programs import compile_units
from tests.support.runtime_cases import copied, decided, described_by, differences, plan_of
from tests.support.thinning import thinned

PIECE_BYTES = 1 << 15
NUM_STEPS = 3
CASES = {
    "filters": "complex parameters beside real ones",
    # Fused for real parameters, and unfused for all where one is complex: pieces would differ.
    "spectral": "the optimizer steps on all parameters at once",
    "sparse_embedding": "sparse gradients",
    "sparse_bags": "sparse gradients",
    "sparse_graph": "",
    "dicts": "",
    "objects": "",
    "contexts": "hands tensors on in its arguments",
    "one_storage": "parameters are views of one storage",
    "shared_memory": "parameters share memory",
    "small_parameters": "parameters without elements",
    "several_dtypes": "trainable parameters of several dtypes",
}
"""The models, each with why states of its stay on the device; empty: none do."""


def optimizer_of(name: str) -> str:
    return "sgd" if CASES[name] == "sparse gradients" else "adamw"


def made(name: str) -> tuple[nn.Module, Batch]:
    with seeded(0):
        model, (batch,) = getattr(taken_models, name)()
    return model.train(), batch


def workload(name: str) -> Workload:
    return Workload(
        model=f"tests.support.taken_models:{name}",
        model_config="",
        batch_size=1,
        seq_len=512,
        dtype="float32",
        device="cpu",
        seed=0,
    )


@cache
def profiled(name: str) -> Profile:
    """What the model's units hold, on a machine whose speeds do not matter."""
    model, batch = made(name)
    optimizer = optimizer_of(name)
    with undisturbed(model):
        passes.training_step(model, batch)
        passes.drop_gradients(model)
        found = discover(model, batch)
        anatomy = analyze_units(model, batch, found, forms=("keep", "full"), optimizer=optimizer)
        units = measure_bytes(model, batch, anatomy, lambda: MemoryMeter("cpu")).units
    dtypes = frozenset(parameter.dtype for parameter in model.parameters())
    fraction = workspace(optimizer, "float32", "pure", beside=dtypes)["workspace_fraction"]
    return Profile(
        workload=workload(name),
        hardware=cpu(),
        method="measured",
        model_fingerprint=model_fingerprint(model),
        optimizer=OptimizerCost(
            name=optimizer,
            host_parameters_per_s=1e9,
            device_parameters_per_s=1e9,
            workspace_fraction=fraction,
        ),
        base_bytes=anatomy.base_bytes,
        units=tuple(units),
    )


Follow = Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]


def train(
    name: str, follow: Follow, measured: list[tuple[int, ...]] | None = None
) -> tuple[list[Tensor], object, object]:
    """Losses, parameters and states; `measured` gets the bytes of the last step's slots."""
    others = bytes_of_others() if measured is not None else 0
    model, batch = made(name)
    model, optimizer = follow(model)
    losses: list[Tensor] = []

    def step(observe: Observer) -> None:
        loss = loss_of(call_model(model, batch))
        loss.backward()
        observe("update")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    for number in range(NUM_STEPS):
        if measured is not None and number == NUM_STEPS - 1:
            memory = measure_step(model, partial(step))
            measured.append(tuple(size - others for size in memory.slot_bytes))
        else:
            step(lambda _: None)
    return losses, copied(model.state_dict()), copied(optimizer.state_dict())


@cache
def plain(name: str) -> tuple[list[Tensor], object, object]:
    factory = optimizer_factory(optimizer_of(name))
    return train(name, lambda model: (model, factory(model.parameters())))


def open_to(units: tuple[UnitPlan, ...], profile: Profile) -> tuple[UnitPlan, ...]:
    """The decisions, but for what units cannot do."""

    def opened(plan: UnitPlan, unit: Unit) -> UnitPlan:
        one_form = len(unit.forms) == 1 and isinstance(plan.activations, Recompute)
        return replace(
            plan,
            activations=Keep() if one_form else plan.activations,
            states=Persistent() if unit.stays else plan.states,
        )

    return tuple(opened(plan, unit) for plan, unit in zip(units, profile.units, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_unit_says_why_its_states_stay(name: str) -> None:
    assert {unit.stays for unit in profiled(name).units} - {""} == {CASES[name]} - {""}


@pytest.mark.parametrize(
    ("name", "activations"), thinned(tuple(CASES), (Recompute(), Swap(tier="disk")), every=2)
)
def test_three_steps_match_plain_torch_bitwise_within_the_predicted_bytes(
    name: str, activations: Recompute | Swap, tmp_path: Path
) -> None:
    profile = profiled(name)
    decisions = decided(described_by(profile), activations, Offload(tier="disk"))
    units = open_to(without_freedom(decisions), profile)
    plan = plan_of(
        units,
        fingerprint=profile.model_fingerprint,
        workload=profile.workload,
        piece_bytes=PIECE_BYTES,
    )
    factory = optimizer_factory(optimizer_of(name))
    slots: list[tuple[int, ...]] = []
    follow: Follow = partial(prepare, plan=plan, optimizer=factory, spill_directory=tmp_path)
    found = train(name, follow, slots)
    assert list(differences(list(found), list(plain(name)), "outcome")) == []
    program = compile_units(units, profile, piece_bytes=PIECE_BYTES)
    predicted = [slot.total for slot in device_bytes(program)]
    over = enumerate(zip(slots[0], predicted, strict=True))
    assert [(slot, seen - most) for slot, (seen, most) in over if seen > most] == []


@pytest.mark.parametrize(
    "name", thinned(("spectral", "filters", "dicts", "objects", "sparse_embedding"), every=3)
)
def test_estimates_are_what_is_measured(name: str) -> None:
    source = FactorySource(f"tests.support.taken_models:{name}")
    found = estimate(
        source,
        batch_size=1,
        seq_len=512,
        dtype="float32",
        hardware=machine(),
        optimizer=optimizer_of(name),
    )
    real = profiled(name)
    forms = {"keep", "full"}
    units = [
        replace(unit, forms=tuple(cost for cost in unit.forms if cost.form in forms))
        for unit in found.units
    ]
    if name in ("spectral", "filters"):  # what complex operators take inside is bounded
        pairs = zip(units, real.units, strict=True)
        assert all(
            mine.backward_peak_bytes >= other.backward_peak_bytes
            for unit, there in pairs
            for mine, other in zip(unit.forms, there.forms, strict=True)
        )
        units = [replace(u, forms=r.forms) for u, r in zip(units, real.units, strict=True)]
    assert [bytes_alone(u, r) for u, r in zip(units, real.units, strict=True)] == [
        bytes_alone(unit, unit) for unit in real.units
    ]
    assert (found.workload.batch_size, found.workload.seq_len) == (4, 48)


def test_complex_tensors_stay_complex_whatever_the_workload() -> None:
    source = FactorySource("tests.support.taken_models:filters")
    model = source.build(dtype="bfloat16", precision="master")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.complex64}


def test_an_optimizer_that_takes_no_sparse_gradients_is_named(assert_says: Speaker) -> None:
    with pytest.raises(ProtrainError) as error:
        refuse_sparse({"table.weight"}, "adamw", workload("sparse_embedding"))
    assert_says(error.value)


def test_states_that_stay_are_not_taken_by_hand(tmp_path: Path) -> None:
    """The runtime has no record of the profile: it sees the gradient itself."""
    profile = profiled("sparse_embedding")
    units = decided(described_by(profile), Keep(), Offload(tier="disk"))
    plan = plan_of(units, fingerprint=profile.model_fingerprint, workload=profile.workload)
    factory = optimizer_factory("sgd")
    with pytest.raises(RuntimeError, match=r"the gradient of embedding\.weight is sparse"):
        train(
            "sparse_embedding",
            lambda model: prepare(model, plan, optimizer=factory, spill_directory=tmp_path),
        )


def _lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))


def _sparse() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    return model


class OfItsOwn(torch.Tensor):
    """A class of tensors."""


def _of_a_class() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(OfItsOwn))
    return model


def _expanded() -> nn.Module:
    model = nn.Linear(2, 2)
    model.bias = nn.Parameter(torch.ones(1).expand(2))
    return model


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: nn.Linear(2, 2).requires_grad_(False), "the model has no trainable parameters"),
        (_lazy, "the parameter '1.weight' has no shape yet"),
        (_sparse, "the parameter 'weight' is sparse (torch.sparse_coo)"),
        (_of_a_class, "the parameter 'weight' is a OfItsOwn"),
        (_expanded, "the parameter 'bias' has elements that share memory"),
    ],
    ids=["frozen", "lazy", "sparse", "class", "expanded"],
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
    found = with_batch_sizes(workload("filters"), nn.Identity(), batch)
    assert (found.batch_size, found.seq_len) == sizes


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts on Linux")
def test_a_batch_is_seen_without_memory_for_the_model() -> None:
    """In a process that cannot build the model."""
    room = taken_models.LAYERS * taken_models.LAYER_BYTES // 4
    program = f"""
import resource
from protrain_plan.models.sources import FactorySource
from protrain_runtime.devices.memory_meter import process_memory
source = FactorySource("tests.support.taken_models:large")
limit = process_memory().data_bytes + {room}
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
print(tuple(next(source.batches()).shape))
try:
    source.build()
except RuntimeError:
    print("no room")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("(2, 3, 2048)\nno room\n", 0), done.stderr
