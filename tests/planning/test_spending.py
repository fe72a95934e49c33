"""What a speed means for a bill, worked out by hand."""

from dataclasses import replace

import pytest

from protrain_plan.planning.questions.spending import TOKENS, Spending, spending
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import ALONE, DeviceGroup
from protrain_runtime.contract.records.profile import DType, Profile
from tests.support.planning_cases import MB, RATES, decoder, gpu


def profiled(machine: Hardware, *, dtype: DType = "bfloat16", flops: float = 20e12) -> Profile:
    """Of two sequences of 1,000 tokens."""
    profile = decoder(machine, blocks=2, block_parameters=MB, embedding_parameters=MB)
    workload = replace(profile.workload, batch_size=2, seq_len=1000, dtype=dtype)
    return replace(profile, workload=workload, model_flops=flops)


def test_two_devices_with_micro_batches_pay_for_each_other() -> None:
    machine = replace(gpu(), rates=RATES, price_per_hour=2.5, power_w=400.0)
    group = DeviceGroup(num_devices=2)
    found = spending(profiled(machine), group, micro_batches=3, step_seconds=1.5)
    hours = TOKENS / (2 * 3 * 2000 / 1.5) / 3600
    assert found.mfu == pytest.approx(3 * 20e12 / (1.5 * 100e12))
    assert found.hours == pytest.approx(hours)
    assert found.cost == pytest.approx(2 * 2.5 * hours)
    assert found.energy_kwh == pytest.approx(2 * 0.4 * hours)


def test_the_peak_is_that_of_the_workload_s_dtype() -> None:
    machine = replace(gpu(), rates=RATES)
    found = spending(profiled(machine, dtype="float32"), ALONE, micro_batches=1, step_seconds=4.0)
    assert found.mfu == pytest.approx(0.5)


def test_what_is_not_known_is_not_said() -> None:
    profile = profiled(replace(gpu(), rates=None, price_per_hour=0.0, power_w=0.0))
    found = spending(profile, ALONE, micro_batches=1, step_seconds=1.0)
    assert found == Spending(mfu=None, hours=TOKENS / 2000 / 3600, cost=None, energy_kwh=None)
    counted = profiled(replace(gpu(), rates=RATES), flops=0.0)
    assert spending(counted, ALONE, micro_batches=1, step_seconds=1.0).mfu is None
