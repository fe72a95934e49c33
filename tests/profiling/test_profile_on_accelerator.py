"""A profile that is measured on an accelerator: the emulated one, and not the current device."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from protrain_plan.hardware.overheads import measure_overheads
from protrain_plan.hardware.probe import probe
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER
from protrain_plan.planning.model.problem import Problem
from protrain_plan.profiling.measured import measure_model
from protrain_plan.profiling.memory.unit_bytes import analyze_units
from protrain_plan.profiling.optimizer_cost import optimizer_cost
from protrain_plan.profiling.rehearsal import ALLOWANCE_BYTES, Reserve
from protrain_plan.profiling.structure.discovery import discover
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.program.program import BLOCK_BYTES
from protrain_runtime.contract.records.hardware import LaunchKind
from protrain_runtime.contract.records.plan import Budgets
from protrain_runtime.contract.records.profile import DType, Profile
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import reachable_bytes
from tests.support.cards import need_compiler
from tests.support.estimates import asked as options_of
from tests.support.estimates import batches_of, model_of, small_source
from tests.support.operator_logs import looking
from tests.support.planning_cases import gpu, kept_bytes, least_bytes, solved
from tests.support.planning_cases import plan as solve
from tests.support.programs import compile_units
from tests.support.trained import train

pytestmark = pytest.mark.emulated

MIB = 2**20
SOURCE = small_source("llama", num_hidden_layers=2)
WORKSPACES = 2 * MIB  # the emulated device's matrix products take 1 MiB per thread and stream
CONTEXT = 48 * MIB  # what its driver says that a process takes besides
AMPLE = Budgets(device=2**32, host=10**12, disk=10**12)


@pytest.fixture(autouse=True)
def card() -> Iterator[torch.device]:
    need_compiler("nothing of a profile on an accelerator is tested")
    from tests.emulated.device import extension

    extension()
    yield devices.found("emulated:1")
    gc.collect()


@cache
def profiled(where: torch.device) -> Profile:
    """While others have tensors and the libraries have run."""
    others = torch.ones(MIB, device=where).requires_grad_()
    (others.view(1024, 1024) @ others.view(1024, 1024)).sum().backward()
    others.grad = None
    return measured_model(where, "bfloat16")


def measured_model(where: torch.device, dtype: DType) -> Profile:
    """A profile of a machine that is not probed, nor is its optimizer timed."""
    machine = gpu(disk_gb=1)
    device = replace(machine.device, kind="emulated", memory_bytes=2**32)
    batches = batches_of(SOURCE, batch_size=2, seq_len=64, dtype=dtype, device=where)
    model = model_of(SOURCE, dtype=dtype, device=where)
    workload, _ = options_of(SOURCE, batch_size=2, seq_len=64, dtype=dtype)
    workload = replace(workload, device=where.type)
    cost = optimizer_cost(model, workload, DEFAULT_OPTIMIZER, device=where, sparse=False)
    with TemporaryDirectory() as spill:
        return measure_model(
            model,
            batches,
            workload=workload,
            num_steps=1,
            spill_directory=Path(spill),
            progress=lambda *_: None,
            machine=replace(machine, device=device),
            cost=replace(cost, host_parameters_per_s=1e8, device_parameters_per_s=1e8),
        )


@pytest.mark.nightly
def test_a_profile_counts_workspaces_and_context_and_the_other_device_has_nothing(
    card: torch.device,
) -> None:
    other = torch.device("emulated", 0)
    before = torch.accelerator.memory_allocated(other)
    profile = profiled(card)
    assert torch.accelerator.memory_allocated(other) == before
    assert profile.workload.device == profile.hardware.device.kind == "emulated"
    model = model_of(SOURCE, dtype="bfloat16", device=card)
    batch = next(batches_of(SOURCE, batch_size=2, seq_len=64, dtype="bfloat16", device=card))
    anatomy = analyze_units(model, batch, discover(model, batch), device="emulated")
    kept = profile.fixed_bytes - anatomy.fixed_bytes
    assert kept >= WORKSPACES
    # Threads of tests before may have some too; besides them, what stands for parameters, and a
    # further batch that was looked at.
    assert kept % MIB <= BLOCK_BYTES + sum(t.nbytes for t in tree_leaves(batch))
    assert profile.base_bytes == anatomy.base_bytes
    assert profile.hardware.device.context_bytes == CONTEXT + ALLOWANCE_BYTES
    assert profile.hardware.device.allocator_bytes > 0
    assert all(form.forward_s > 0 for unit in profile.units for form in unit.forms)


def test_what_is_gone_since_hides_no_workspace(card: torch.device) -> None:
    """On an H200 tensors of tests before did: plans took 0.9 MiB more than predicted."""
    others = torch.ones(MIB, device=card)
    reserve = Reserve(card)
    none = reserve.library_bytes()
    # Python reaches what a graph saves of operators' insides as little as a library's workspace.
    rows = torch.ones((2**16, 2), device=card, requires_grad=True)
    graph = nn.functional.layer_norm(rows, (2,)).sum()
    with_graph = reserve.library_bytes()
    saved = 2 * 4 * 2**16
    assert with_graph >= none + saved
    del others
    assert none + saved <= reserve.library_bytes() <= with_graph
    del graph


Kernels = set[tuple[str, frozenset[torch.dtype]]]


@contextmanager
def kernels_on_device() -> Iterator[Kernels]:
    """Operators that run on the device inside, with the dtypes of their tensors."""
    seen: Kernels = set()

    def look(func: Any, *given: Any) -> None:
        found = [tensor for tensor in tree_leaves(given) if isinstance(tensor, torch.Tensor)]
        if any(t.device.type == "emulated" and type(t) is not FakeTensor for t in found):
            seen.add((func.name(), frozenset(tensor.dtype for tensor in found)))

    with looking(look):
        yield seen


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clipping_and_unscaling_load_no_kernel_after_the_context_was_measured(
    card: torch.device, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kernels_on_device() as kernels:
        measured: list[set[Any]] = []

        def context_bytes(device: torch.device) -> int:
            measured.append(kernels.copy())
            return asked(device)

        asked = devices.context_bytes
        monkeypatch.setattr(devices, "context_bytes", context_bytes)
        measured_model(card, dtype)
    weights = [
        torch.nn.Parameter(torch.ones(24, dtype=getattr(torch, dtype), device=card))
        for _ in range(2)
    ]
    stepper = torch.optim.SGD(weights, lr=0.1)
    scaler = torch.amp.GradScaler(card.type, enabled=dtype == "float32")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with kernels_on_device() as between:
        if scaler.is_enabled():
            scaler.scale(torch.ones((), device=card))
            scaler.unscale_(stepper)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
    assert between
    assert between <= measured[-1]


@pytest.mark.nightly("0.0")
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_plan_runs_under_a_limit_on_what_it_predicts(
    card: torch.device, share: float, tmp_path: Path
) -> None:
    """The limit is on what the allocator holds; measured peaks are predicted, slot by slot."""
    from tests.emulated.device import capped

    profile = profiled(card)
    problem = Problem.of(profile, AMPLE)
    least = least_bytes(problem)
    room = least + round(share * (kept_bytes(problem) - least))
    budgets = replace(AMPLE, device=room + profile.hardware.device.besides_bytes)
    plan = solved(solve(profile, budgets)).plan
    peak = plan.prediction.peak_bytes
    assert peak.on_device <= budgets.device
    program = compile_units(
        plan.units,
        profile,
        piece_bytes=plan.settings.piece_bytes,
        updates=plan.settings.updates,
        overlap_steps=plan.settings.overlap_steps,
    )
    slots = device_bytes(program)
    predicted = [slot.total for slot in slots]
    gc.collect()
    devices.free_cached(card)
    # What other tests have left on the device, and what libraries keep, of which the plan knows.
    others = reachable_bytes(card)
    kept = torch.accelerator.memory_reserved(card) if others else 0
    with capped(card, peak.reserved + kept):
        run = train(plan, num_steps=3, plain=False, spill_directory=tmp_path, device=str(card))
    measured = [size - others for size in run.slot_bytes]
    over = [(n, m - p) for n, (m, p) in enumerate(zip(measured, predicted, strict=True))]
    assert [(slot, more) for slot, more in over if more > 0] == []
    # Copies may end early: what leaves is promised for as long as it can take, and so is what
    # gradients pass through where updates run on, which the timings decide.
    staying = [
        slot.total - slot.by_kind.get("leaving", 0) - slot.by_kind.get("staging", 0)
        for slot in slots
    ]
    assert max(measured) >= 0.9 * max(staying)


@pytest.mark.nightly
def test_launching_is_measured_beside_what_the_device_takes(
    card: torch.device, tmp_path: Path
) -> None:
    """A move's seconds by the probe's layers, and of every block in the thread that launches it."""
    assert 1e-6 < measure_overheads(tmp_path, device=card).move_s < 0.1
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:  # as under `profile --deterministic`
        assert 1e-6 < measure_overheads(tmp_path, device=card).move_s < 0.1
    finally:
        torch.use_deterministic_algorithms(mode=before)
    blocks = [unit for unit in profiled(card).units if unit.kind == "block"]
    for cost in (cost for unit in blocks for cost in unit.forms):
        assert 0 < cost.forward_launch_s < 10
        assert 0 < cost.backward_launch_s < 10


@pytest.mark.slow
def test_a_probe_measures_the_link_and_what_lanes_take_from_compute(
    card: torch.device, tmp_path: Path
) -> None:
    hardware = probe(str(card), spill_directory=tmp_path)
    assert hardware.device.kind == "emulated"
    assert hardware.device.context_bytes == CONTEXT
    assert hardware.device.memory_bytes == devices.free_and_total_bytes(card)[1]
    assert [tier.name for tier in hardware.tiers] == ["host", "disk"]
    assert 1e6 < hardware.tier("host").link.read_bytes_per_s < 1e12
    assert 1e-6 < hardware.move_s < 0.1
    assert {cost.kind for cost in hardware.launches} == set(get_args(LaunchKind))
    for cost in hardware.launches:  # by one parameter and nine
        assert 1e-6 < cost.seconds + 9 * cost.tensor_s < 0.1
    for both in (hardware.read_contention, hardware.write_contention, hardware.update_contention):
        assert 0 < both.compute <= 1
        assert 0 < both.lane <= 1
    assert list(tmp_path.iterdir()) == []
