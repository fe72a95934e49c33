"""Scratch memory of operators: measured here, bounded for other processors."""

import sys
from typing import Any

import pytest
import torch

from protrain_plan.hardware.operators import Allocator
from protrain_plan.profiling.memory.fake_meter import (
    MOST_BYTES,
    FakeMeter,
    MeasuredCall,
    measured_bytes,
)
from protrain_plan.profiling.structure.faking import faking
from protrain_runtime.activations.trees import tensors_in
from tests.support.commands import ran
from tests.support.levels import environment, known
from tests.support.random_calls import overruns

aten = torch.ops.aten


def called(func: Any, *args: Any) -> MeasuredCall | None:
    return MeasuredCall.of(func, args, {}, tensors_in(func(*args)))


def measured(func: Any, *args: Any) -> int | None:
    call = called(func, *args)
    assert call is not None
    return measured_bytes([call])[call]


def test_bounds_hold_with_this_processors_kernels() -> None:
    assert list(overruns(12, seed=0)) == []


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2, 8])
@pytest.mark.parametrize("level", known(), ids="-".join)
def test_bounds_hold_at_every_level_of_instructions(
    level: tuple[str, str], num_threads: int
) -> None:
    command = (sys.executable, "-m", "tests.support.random_calls", "150", "3", str(num_threads))
    found = ran(*command, **environment(level))
    assert (found.stdout.strip(), found.returncode) == ("", 0)


def test_calls_are_told_apart_by_geometry_and_by_the_types_of_numbers() -> None:
    square, whole = torch.ones(8, 8), torch.ones(8, 8, dtype=torch.int64)
    calls = [
        called(aten.clone.default, square),
        called(aten.clone.default, square.t()),
        called(aten.clone.default, whole),
        called(aten.mul.Tensor, whole, 1),
        called(aten.mul.Tensor, whole, True),
    ]
    assert len(set(calls)) == 5
    assert called(aten.clone.default, torch.zeros(8, 8)) == calls[0]


def test_large_operands_and_those_whose_values_matter_are_not_called() -> None:
    with faking():
        large = torch.empty(MOST_BYTES)
        assert called(aten.neg.default, large) is None
        expanded = torch.empty(1).expand(MOST_BYTES)  # has one element in memory
        assert called(aten.sum.default, expanded) is not None
    mask = torch.ones(4, 4, dtype=torch.bool)
    assert measured(aten.masked_select.default, torch.ones(4, 4), mask) is None


def test_operators_that_refuse_zeros_are_not_known() -> None:
    assert measured(aten.multinomial.default, torch.ones(4), 1) is None


def test_measuring_leaves_random_numbers_and_fake_tensors_as_they_are() -> None:
    given = torch.ones(64, 3)
    state = torch.get_rng_state()
    with faking() as mode:
        fake = mode.from_tensor(given)
        assert measured(aten.native_dropout.default, fake, 0.25, True) == given.nbytes
        assert type(torch.ones(1)) is type(fake)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("width", "scratch"), [(100, 80), (MOST_BYTES, 7)])
def test_a_meter_takes_what_is_measured_or_else_the_bound(width: int, scratch: int) -> None:
    """The sort's indices of a row of ten, measured; not of rows that are too large to be sorted."""
    allocator = Allocator(
        workspaces={aten.sort.default: lambda _: 7},
        block_bytes=1,
        python_scalars=True,
        num_threads=torch.get_num_threads(),
        is_here=True,
    )
    with faking():
        given = torch.empty(width // 10, 10)
        with FakeMeter(allocator) as meter:
            meter.mark("sort")
            kept = torch.sort(given)
    (segment,) = meter.segments
    assert segment.end_bytes == sum(tensor.nbytes for tensor in kept)
    assert segment.peak_bytes - segment.end_bytes == scratch
