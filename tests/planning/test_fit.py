"""Answers of fit beside a plan: alternatives, the best micro-batch, a bill."""

from dataclasses import replace
from typing import Literal

import pytest

from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.allocator_slack import (
    EXPANDABLE_MOST,
    EXPANDABLE_PAIRS,
    default_device_bytes,
    is_unknown,
)
from protrain_plan.planning.questions.alternatives import alternatives
from protrain_plan.planning.questions.answers import Alternative, Objective, Question
from protrain_plan.planning.questions.grid import fastest_batch
from protrain_plan.planning.questions.growth import in_proportion
from protrain_plan.planning.questions.objectives import ask, fit
from protrain_plan.planning.questions.planner import solve_any
from protrain_plan.planning.questions.spending import TOKENS, Spending, spending
from protrain_plan.planning.search.improving import Effort
from protrain_plan.simulation.report import report
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import ALONE, Budgets, DeviceGroup
from protrain_runtime.contract.records.profile import DType, Profile
from tests.support.planning_cases import (
    MB,
    RATES,
    decoder,
    gpu,
    joined,
    kept_bytes,
    least_bytes,
    small,
    solved,
)
from tests.support.planning_cases import question as asked_of

GB, GAP = 1000 * MB, 0.02
NAMES = {1: ["plain PyTorch", "ZeRO-Offload"], 2: ["DDP", "FSDP2", "FSDP2, offload"]}


def question(*, device: int, host: int = 100 * GB, num_devices: int = 1) -> Question:
    profile = small(joined(gpu()), kept=400 * MB, pieces=5)
    group = DeviceGroup(num_devices=num_devices) if num_devices > 1 else ALONE
    return asked_of(profile, Budgets(device=device, host=host, disk=0), group=group)


def by_name(found: tuple[Alternative, ...]) -> dict[tuple[str, bool], Alternative]:
    return {(one.name, one.checkpointing): one for one in found}


@pytest.mark.parametrize("num_devices", [1, 2])
def test_each_library_is_there_with_and_without_checkpointing(num_devices: int) -> None:
    asked = question(device=100 * GB, num_devices=num_devices)
    answer = fit(asked, effort=Effort(gap_target=GAP), compare=True)
    others = by_name(answer.alternatives)
    assert list(others) == [(name, more) for name in NAMES[num_devices] for more in (False, True)]
    plain = others[NAMES[num_devices][0], False]
    assert plain.step_seconds == pytest.approx(answer.kept_seconds)
    assert plain.peak_bytes.on_device == answer.plain_bytes
    assert answer.solved is not None
    for name in NAMES[num_devices]:
        kept, recomputed = others[name, False], others[name, True]
        assert kept.step_seconds and recomputed.step_seconds
        assert recomputed.peak_bytes.device <= kept.peak_bytes.device
        assert answer.solved.plan.prediction.step_seconds <= kept.step_seconds * (1 + GAP)


def test_what_does_not_fit_says_of_which_memory_there_is_too_little() -> None:
    others = by_name(alternatives(question(device=3 * GB, host=1 * GB).problems()))
    plain, offloaded = others["plain PyTorch", False], others["ZeRO-Offload", True]
    assert plain.step_seconds is offloaded.step_seconds is None
    assert (plain.lacks, offloaded.lacks) == (("device",), ("host",))
    assert plain.peak_bytes.on_device > 3 * GB >= offloaded.peak_bytes.on_device
    assert offloaded.peak_bytes.host > 1 * GB


def test_offloaded_states_are_updated_after_backward_on_the_host() -> None:
    asked = question(device=100 * GB)
    (problem,) = asked.problems()
    kept = by_name(alternatives([problem]))["ZeRO-Offload", False]
    assert any(unit.states.tier for unit in kept.units)
    after = replace(
        asked, settings=replace(asked.settings, updates="after backward", overlap_steps=False)
    ).problem()
    told = report(after.program(kept.units))
    assert kept.step_seconds == pytest.approx(told.step_seconds)
    parameters = sum(unit.num_parameters for unit in asked.profile.units)
    assert told.step_seconds > parameters / asked.profile.optimizer.host_parameters_per_s


@pytest.mark.nightly("3000000000")
@pytest.mark.parametrize("device", [100 * GB, 3 * GB])
def test_the_fastest_micro_batch_is_that_of_planning_all(device: int) -> None:
    questions = [
        replace(
            asked,
            profile=in_proportion(asked.profile, "batch-size", size),
            settings=replace(asked.settings, micro_batches=8 // size),
        )
        for asked in [question(device=device)]
        for size in (1, 2, 4, 8)
    ]
    effort = Effort(gap_target=GAP)
    found = [solve_any(one.problems(), effort=effort) for one in questions]
    seconds = [one.plan.prediction.step_seconds for one in found if isinstance(one, Solved)]
    assert len(seconds) == (4 if device > 3 * GB else 3)
    number = fastest_batch(questions, effort=effort)
    assert number is not None
    assert seconds[number] <= min(seconds) * (1 + GAP)


def test_a_batch_is_found_that_fits_only_where_no_gradients_add_up() -> None:
    """Gradients of several micro-batches stand whole on each device; those of one in shards."""

    def asked(size: int, device: int) -> Question:
        one = question(device=device, num_devices=2)
        light = small(joined(gpu()), kept=1 * MB, pieces=5)
        return replace(
            one,
            profile=in_proportion(light, "batch-size", size),
            settings=replace(one.settings, micro_batches=4 // size),
        )

    least = [least_bytes(asked(size, 100 * GB).problem()) for size in (1, 2, 4)]
    assert least[-1] < least[0]
    context = question(device=1 * GB).profile.hardware.device.besides_bytes
    questions = [asked(size, least[-1] + context + MB) for size in (1, 2, 4)]
    assert fastest_batch(questions, effort=Effort(gap_target=GAP)) == 2
    refused = ask(questions[0], Objective(), effort=Effort()).infeasible
    assert refused is not None
    assert "with one micro-batch per update, up to" in refused.advice[-1]


def test_no_micro_batch_is_the_fastest_where_none_fits() -> None:
    assert fastest_batch([question(device=1 * GB, host=0)], effort=Effort()) is None


def test_ddp_holds_gradients_twice_and_others_do_not() -> None:
    asked = question(device=100 * GB, num_devices=2)
    (problem,) = asked.problems()
    copies = sum(unit.gradient_bytes for unit in problem.profile.units)
    others = by_name(alternatives([problem]))
    ddp = others["DDP", False]
    assert ddp.peak_bytes.device == kept_bytes(problem) + copies > copies > 0
    # What fits without buckets alone does not fit.
    for less, lacks in ((1, ("device",)), (0, ())):
        tight = question(device=ddp.peak_bytes.on_device - less, num_devices=2).problems()
        assert by_name(alternatives(tight))["DDP", False].lacks == lacks
    alone = by_name(alternatives(question(device=100 * GB).problems()))["plain PyTorch", False]
    assert alone.peak_bytes.on_device == fit(question(device=100 * GB), effort=Effort()).plain_bytes


def test_a_peak_is_tight_where_what_is_reserved_does_not_fit() -> None:
    asked = question(device=100 * GB)
    profile = replace(asked.profile, method="estimated")
    answer = fit(replace(asked, profile=profile), effort=Effort(gap_target=GAP), compare=True)
    peak = solved(answer.solved).plan.prediction.peak_bytes
    assert max(r / t for t, r in EXPANDABLE_PAIRS) == 1 + EXPANDABLE_MOST > 1
    needed = peak.on_device + round(EXPANDABLE_MOST * peak.device)
    assert answer.reserved_bytes < needed

    def on(
        memory_bytes: int, method: Literal["measured", "estimated"] = "estimated"
    ) -> tuple[bool, set[bool]]:
        device = replace(profile.hardware.device, memory_bytes=memory_bytes)
        hardware = replace(profile.hardware, device=device)
        there = replace(profile, hardware=hardware, method=method)
        budgets = Budgets(device=memory_bytes, host=100 * GB, disk=0)
        found = fit(
            replace(asked, profile=there, budgets=budgets),
            effort=Effort(gap_target=GAP),
            compare=True,
        )
        plain = {other.is_tight for other in found.alternatives if other.name == "plain PyTorch"}
        return found.is_tight, plain

    assert not on(needed)[0]
    assert on(needed - 1)[0]
    assert on(peak.on_device)[0]
    assert on(peak.on_device, "measured") == (False, {False})
    assert True in on(peak.on_device)[1]
    device = replace(profile.hardware.device, allocator_bytes=1)  # which was measured
    known = replace(profile, hardware=replace(profile.hardware, device=device))
    assert is_unknown(profile)
    assert not is_unknown(known)


@pytest.mark.parametrize("memory", [24 * GB, 80 * GB])
def test_what_fits_by_default_fits_with_what_is_reserved(memory: int) -> None:
    """A plan within the default budget, which may use all of it, and the most that was seen."""
    asked = question(device=memory)
    device = replace(asked.profile.hardware.device, memory_bytes=memory)
    hardware = replace(asked.profile.hardware, device=device)
    profile = replace(asked.profile, hardware=hardware, method="estimated")
    budget = default_device_bytes(profile)
    tensors = budget - device.besides_bytes
    assert budget + EXPANDABLE_MOST * tensors <= memory
    budgets = Budgets(device=budget, host=500 * GB, disk=0)
    found = fit(replace(asked, profile=profile, budgets=budgets), effort=Effort(gap_target=GAP))
    assert found.verdict != "does not fit"
    assert found.reserved_bytes <= memory
    assert not found.is_tight


# --- what a speed means for a bill, worked out by hand --------------------------------------------


def profiled(machine: Hardware, *, dtype: DType = "bfloat16", flops: float = 20e12) -> Profile:
    """Two sequences of 1,000 tokens."""
    profile = decoder(machine, blocks=2, block_parameters=MB, embedding_parameters=MB)
    workload = replace(profile.workload, batch_size=2, seq_len=1000, dtype=dtype)
    return replace(profile, workload=workload, model_flops=flops)


def test_two_devices_with_micro_batches_pay_for_each_other() -> None:
    machine = replace(gpu(), rates=RATES, power_w=400.0)
    found = spending(
        profiled(machine),
        num_devices=2,
        num_tokens=2 * 3 * 2000,
        step_seconds=1.5,
        price_per_hour=2 * 2.5,
    )
    hours = TOKENS / (2 * 3 * 2000 / 1.5) / 3600
    assert found.model_flops_utilisation == pytest.approx(3 * 20e12 / (1.5 * 100e12))
    assert found.hours_per_billion_tokens == pytest.approx(hours)
    assert found.cost_per_billion_tokens == pytest.approx(2 * 2.5 * hours)
    assert found.kwh_per_billion_tokens == pytest.approx(2 * 0.4 * hours)


def billed(profile: Profile, step_seconds: float) -> Spending:
    return spending(
        profile, num_devices=1, num_tokens=2000, step_seconds=step_seconds, price_per_hour=0.0
    )


def test_the_peak_is_that_of_the_workload_s_dtype() -> None:
    machine = replace(gpu(), rates=RATES)
    found = billed(profiled(machine, dtype="float32"), 4.0)
    assert found.model_flops_utilisation == pytest.approx(0.5)


def test_what_is_not_known_is_not_said() -> None:
    profile = profiled(replace(gpu(), rates=None, power_w=0.0))
    assert billed(profile, 1.0) == Spending(hours_per_billion_tokens=TOKENS / 2000 / 3600)
    counted = profiled(replace(gpu(), rates=RATES), flops=0.0)
    assert billed(counted, 1.0).model_flops_utilisation is None
