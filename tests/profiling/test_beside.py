"""A frozen model beside a trained one: the oracles are its measured forward, and sums by hand."""

from functools import cache

import pytest
import torch

from protrain_plan.profiling.beside import with_beside
from protrain_runtime.contract.records import dumps_profile, loads_profile
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.devices.memory_meter import MemoryMeter, storage_bytes
from tests.support.estimates import batches_of, estimate, machine, model_of, small_source


@cache
def estimated(name: str) -> Profile:
    return estimate(
        small_source(name),
        hardware=machine(),
        batch_size=2,
        seq_len=64,
        dtype="float32",
        optimizer="sgd",
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_no_measured_forward_takes_more_than_is_counted(name: str) -> None:
    trained = estimated("llama")
    both = with_beside(trained, estimated(name))
    source = small_source(name)
    model = model_of(source, dtype="float32").requires_grad_(requires_grad=False)
    batch = next(batches_of(source, batch_size=2, seq_len=64))
    assert isinstance(batch, dict)
    standing = storage_bytes([*model.parameters(), *model.buffers(), *batch.values()])
    with torch.no_grad():
        model(**batch)  # caches
        with MemoryMeter(start_bytes=standing) as meter:
            meter.mark("forward")
            outputs = model(**batch)
            meter.mark("held")
    assert outputs.logits is not None
    grown = both.base_bytes + both.fixed_bytes - trained.base_bytes - trained.fixed_bytes
    assert max(segment.peak_bytes for segment in meter.segments) <= grown


def test_seconds_and_weights_are_those_of_its_units() -> None:
    trained = other = estimated("gpt2")
    both = with_beside(trained, other)
    assert both.beside is not None
    seconds = sum(unit.cost("keep").forward_s for unit in other.units)
    for before, after in zip(trained.units[0].forms, both.units[0].forms, strict=True):
        assert after.forward_s == before.forward_s + seconds
    assert both.units[1:] == trained.units[1:]
    parameters = model_of(small_source("gpt2"), dtype="float32", device="meta").parameters()
    assert both.beside.weight_bytes == sum(one.nbytes for one in parameters)
    assert both.fixed_bytes == trained.fixed_bytes + both.beside.weight_bytes
    assert loads_profile(dumps_profile(both)) == both
