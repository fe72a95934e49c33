"""Bytes on accelerators, by arithmetic: whole blocks, libraries' workspaces, what is held back."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.building import kernels
from protrain_plan.models.sources import ModelSource
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.outcome import Infeasible
from protrain_plan.planning.questions.growth import in_proportion
from protrain_plan.profiling.memory.unit_bytes import analyze_units
from protrain_plan.profiling.structure.discovery import discover
from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.program.memory import gap_bytes
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import Budgets, Plan
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.records.reader import loads
from protrain_runtime.contract.records.writer import dumps
from protrain_runtime.diagnostics.matching import check_kernels
from protrain_runtime.states.chunk_layouts import make_chunk
from tests.support.estimates import estimate
from tests.support.messages import Speaker
from tests.support.planning_cases import MB, decoder, gpu, solved
from tests.support.planning_cases import plan as solve

BLOCK = 512
HELD_BACK = 300 * MB


class Odd(nn.Module):
    """Parameters, a buffer and inputs of sizes that no block divides."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.register_buffer("shift", torch.ones(3))
        self.head = nn.Linear(5, 200, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            tokens = layer(tokens).relu()
        found: torch.Tensor = self.head(tokens)
        return found.sum() + self.shift.sum()


class OddSource:
    """A model of this module's own, as estimates take it."""

    name, model_config, mixed = "odd", "", None

    def build(self, *_: object, **__: object) -> nn.Module:
        return Odd().train()

    def batches(self, *_: object, **__: object) -> object:
        while True:
            yield (torch.ones(7, 5),)


def rounded(num_bytes: int) -> int:
    return (num_bytes + BLOCK - 1) // BLOCK * BLOCK


def test_parameters_start_at_multiples_of_the_alignment_and_keep_their_values() -> None:
    parameters = [
        (name, nn.Parameter(torch.randn(size)))
        for name, size in (("a", 5), ("b", 128), ("c", 129), ("d", 1))
    ]
    chunk = make_chunk(0, parameters, (0,), alignment=BLOCK)
    assert [part.offset for part in chunk.slices] == [0, 512, 1024, 2048]
    assert chunk.parameter_bytes == sum(rounded(4 * size) for size in (5, 128, 129, 1))
    assert chunk.gradient_bytes == 4 * (5 + 128 + 129 + 1)
    for number, group in enumerate(chunk.groups):
        chunk.buffers[number] = torch.zeros(group.num_bytes, dtype=torch.uint8)
    for part, (_, parameter) in zip(chunk.slices, parameters, strict=True):
        assert part.inside % BLOCK == 0
        view = part.shaped(part.flat(chunk.buffers[part.group]))
        view.copy_(parameter.detach())
        assert torch.equal(view, parameter)
    default = make_chunk(0, parameters, (0,))
    assert [part.offset for part in default.slices] == [0, 64, 576, 1152]


def test_what_stands_beside_units_is_counted_in_blocks() -> None:
    """The oracle counts one tensor after the other, as they would be allocated."""
    model, batch = Odd().train(), (torch.ones(7, 5),)
    anatomy = analyze_units(model, batch, discover(model, batch), device="cuda")
    sizes = [p.numel() * 4 for p in model.parameters()]
    scalars = 3 * BLOCK * len(sizes)  # AdamW's step, and two of a clipped gradient's norm
    # A gradient and one that is added to it; AdamW's two states.
    padding = sum(4 * (rounded(size) - size) for size in sizes)
    loose = (16 + 2) * BLOCK  # losses and the like; what stands for parameters and for gradients
    assert anatomy.fixed_bytes == scalars + padding + loose
    assert anatomy.base_bytes == rounded(7 * 5 * 4) + rounded(3 * 4)
    assert sum(chunk.parameter_bytes for chunk in anatomy.chunks) == sum(map(rounded, sizes))

    here = analyze_units(model, batch, discover(model, batch))
    assert here.fixed_bytes == 0
    assert here.base_bytes == 7 * 5 * 4 + 3 * 4 + len(sizes) * (2 * 4 + 4) + 256


def test_masters_are_states_that_round_up_too() -> None:
    model, batch = Odd().bfloat16().train(), (torch.ones(7, 5, dtype=torch.bfloat16),)
    found = discover(model, batch)
    plain, masters = (
        analyze_units(model, batch, found, device="cuda", precision=precision).fixed_bytes
        for precision in ("pure", "master")
    )
    sizes = [p.numel() * 2 for p in model.parameters()]
    own = sum(2 * (rounded(size) - size) for size in sizes)
    assert masters - plain == sum(3 * (rounded(2 * size) - 2 * size) for size in sizes) - own


def test_sharded_parameters_leave_gaps_of_blocks_on_an_accelerator() -> None:
    lines = ("layers.0-29.weight 40x5 float32 trainable", "head 128 float32 frozen")
    assert gap_bytes(lines, "cuda") == 30 * (3 * (1024 - 800) + 4 * BLOCK) + 4 * BLOCK


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("machine", "mebibytes"), [("h100-sxm", 2 * 32), ("mi300x", 2 * (128 + 76)), ("cpu", 0)]
)
def test_estimates_count_what_libraries_keep(machine: str, mebibytes: int) -> None:
    """Each of two threads has a handle with a workspace."""
    source: ModelSource = OddSource()  # type: ignore[assignment]
    hardware = load_hardware(machine)
    found = estimate(source, hardware=hardware, batch_size=7, seq_len=5, dtype="float32")
    model, batch = Odd().train(), (torch.ones(7, 5),)
    kind = hardware.device.kind
    beside = analyze_units(model, batch, discover(model, batch), device=kind).fixed_bytes
    assert found.fixed_bytes == beside + mebibytes * 2**20


def test_estimates_for_other_accelerators_are_refused(assert_says: Speaker) -> None:
    source: ModelSource = OddSource()  # type: ignore[assignment]
    machine = load_hardware("h100-sxm")
    other = replace(machine, name="other", device=replace(machine.device, kind="xpu"))
    assert_says.refused(estimate, source, hardware=other, batch_size=1, seq_len=1, dtype="float32")


# --- what is held back ----------------------------------------------------------------------------


def with_holes(allocator_bytes: int, *, fixed_bytes: int = 0) -> Profile:
    profile = decoder(gpu(), blocks=4)
    device = replace(profile.hardware.device, allocator_bytes=allocator_bytes)
    hardware = replace(profile.hardware, device=device)
    return replace(profile, hardware=hardware, fixed_bytes=fixed_bytes)


def planned(profile: Profile, device: int) -> Plan:
    return solved(solve(profile, Budgets(device=device, host=10**12, disk=0))).plan


@pytest.mark.nightly
def test_plans_hold_back_what_the_allocator_held_beyond_tensors() -> None:
    """The same decisions as with a budget that is smaller by as much."""
    ample = planned(with_holes(0), 10**12).prediction.peak_bytes
    budget = ample.context + ample.device // 2
    found = planned(with_holes(HELD_BACK), budget)
    peak = found.prediction.peak_bytes
    assert found.units == planned(with_holes(0), budget - HELD_BACK).units
    assert peak.allocator == HELD_BACK
    assert peak.reserved == peak.device + HELD_BACK
    assert peak.on_device == peak.device + HELD_BACK + peak.context <= budget
    assert loads(Plan, dumps(found)) == found


def test_a_shortfall_names_what_is_held_back() -> None:
    profile = with_holes(HELD_BACK)
    found = solve(profile, Budgets(device=10**9, host=10**12, disk=0))
    alike = solve(with_holes(0), Budgets(device=10**9 - HELD_BACK, host=10**12, disk=0))
    assert isinstance(found, Infeasible)
    assert isinstance(alike, Infeasible)
    occupants = dict(found.occupants)
    assert occupants.pop("held back for the allocator") == HELD_BACK
    assert occupants == dict(alike.occupants)
    assert found.shortfall_bytes == alike.shortfall_bytes
    assert found.smallest_budget_bytes == alike.smallest_budget_bytes + HELD_BACK


def plain_bytes(profile: Profile) -> int:
    """The most that the device holds where everything is kept."""
    problem = Problem.of(profile, Budgets(device=10**12, host=10**12, disk=0))
    return max(problem.static_bytes(tuple((0, 0) for _ in profile.units)))


def test_what_libraries_keep_does_not_grow_with_the_batch() -> None:
    small = with_holes(0, fixed_bytes=64 * MB)
    large = in_proportion(small, "batch-size", 8)
    assert large.fixed_bytes == small.fixed_bytes
    assert large.base_bytes > small.base_bytes
    one, eight = (plain_bytes(each) for each in (small, large))
    bare = plain_bytes(in_proportion(with_holes(0), "batch-size", 8))
    assert eight == bare + 64 * MB
    assert one < eight


# --- records --------------------------------------------------------------------------------------


def test_any_type_of_accelerator_is_read_and_nothing_else() -> None:
    machine = gpu()
    for kind in ("cpu", "xpu", "emulated", "npu_2"):
        other = replace(machine, device=replace(machine.device, kind=kind))
        assert loads(Hardware, dumps(other)) == other
    for wrong in ("GPU", "cuda:1", "2d", "''"):
        text = dumps(machine).replace("kind: cuda", f"kind: {wrong}")
        with pytest.raises(RecordError) as caught:
            loads(Hardware, text)
        assert str(caught.value).endswith(
            "device.kind: expected a type of device such as cpu or cuda, got "
            + repr(wrong.strip("'"))
        )


def test_what_is_zero_or_usual_is_not_written() -> None:
    """So that what was committed before stays as it is, and is read."""
    profile = with_holes(0)
    assert not {"allocator_bytes", "fixed_bytes", "deterministic"} & set(dumps(profile).split())
    workload = replace(profile.workload, deterministic=True)
    held = replace(with_holes(5, fixed_bytes=7), workload=workload)
    assert loads(Profile, dumps(held)) == held


# --- kernels --------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_other_kernels_than_the_profiled_ones_are_refused_on_an_accelerator(
    assert_says: Speaker,
) -> None:
    usual = planned(with_holes(0), 10**12)
    exact = replace(usual, workload=replace(usual.workload, deterministic=True))
    check_kernels(usual)
    with kernels(deterministic=True):
        check_kernels(exact)
        assert_says.refused(check_kernels, usual)
    assert not torch.are_deterministic_algorithms_enabled()
    assert_says.refused(check_kernels, exact)
    on_cpu = replace(exact, workload=replace(exact.workload, device="cpu"))
    check_kernels(on_cpu)  # a CPU's are not asked about


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "expandable_segments:True None"),
        ({"PYTORCH_ALLOC_CONF": "x:1"}, "x:1 None"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, "None x:1"),
    ],
)
def test_the_command_line_asks_for_segments_that_grow(given: dict[str, str], found: str) -> None:
    """Before torch is imported, and not where the user says otherwise."""
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    code = (
        "import os, sys, protrain_plan.cli\n"
        f"print(*(os.environ.get(name) for name in {names}), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={name: value for name, value in os.environ.items() if name not in names} | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [*found.split(), "False"]
