"""Profiles for other batch sizes and sequence lengths, and the largest that fits."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from protrain_plan.planning.model.options import Pin, parse_pin
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.questions.answers import Quantity
from protrain_plan.planning.questions.growth import between, in_proportion, largest, size_of
from protrain_plan.planning.search.choices import min_memory, plain_choices
from protrain_runtime.contract.records import dumps_profile
from protrain_runtime.contract.records.plan import Budgets
from protrain_runtime.contract.records.profile import FormCost, Profile, Unit
from tests.support.planning_cases import MB, decoder, gpu, random_profile
from tests.support.planning_cases import within as inside

KIB, MIB = 1024, 1 << 20
PIECE_BYTES = 64 << 20


def small(
    batch_size: int = 1, *, tokens: int = 1024, blocks: int = 2, disk: bool = True
) -> Profile:
    """A decoder whose activations and seconds are the same multiple of its tokens."""
    profile = decoder(
        gpu(disk_gb=512 if disk else 0),
        blocks=blocks,
        block_parameters=4 * MB,
        embedding_parameters=20 * MB,
        kept=20 * KIB * tokens * batch_size,
        seconds=0.02 * batch_size * tokens / 1024,
    )
    workload = replace(profile.workload, batch_size=batch_size, seq_len=tokens)
    return replace(profile, workload=workload, base_bytes=512 * batch_size * tokens)


def with_forms(profile: Profile, index: int, *forms: FormCost) -> Profile:
    units = list(profile.units)
    units[index] = replace(units[index], forms=forms)
    return replace(profile, units=tuple(units))


def states(unit: Unit) -> Unit:
    """All of a unit but its activations."""
    return replace(unit, forms=())


@pytest.mark.parametrize("quantity", ["batch-size", "seq-len"])
def test_twice_the_tokens_are_twice_the_activations_and_the_same_states(quantity: Quantity) -> None:
    profile = small()
    keep, full = profile.units[1].forms
    gradients = profile.units[1].gradient_bytes
    keep = replace(keep, backward_peak_bytes=gradients + 1 * MB)
    profile = with_forms(profile, 1, keep, full)
    twice = in_proportion(profile, quantity, 2 * size_of(profile.workload, quantity))
    assert size_of(twice.workload, quantity) == 2 * size_of(profile.workload, quantity)
    assert (twice.method, twice.hardware) == (profile.method, profile.hardware)
    assert twice.base_bytes == 2 * profile.base_bytes
    assert twice.units[1].cost("keep").backward_peak_bytes == -(-(gradients + 2 * MB) // 512) * 512
    for unit, more in zip(profile.units, twice.units, strict=True):
        assert states(more) == states(unit)
        for form, grew in zip(unit.forms, more.forms, strict=True):
            assert grew.kept_bytes == 2 * form.kept_bytes
            assert grew.swappable_bytes == 2 * form.swappable_bytes
            assert grew.forward_peak_bytes == 2 * form.forward_peak_bytes
            assert grew.forward_s == pytest.approx(2 * form.forward_s)
            assert grew.backward_s == pytest.approx(2 * form.backward_s)


def test_growth_to_what_was_profiled_is_the_profile() -> None:
    profile = decoder(gpu(), blocks=2)
    assert in_proportion(profile, "batch-size", 1) is profile
    assert in_proportion(profile, "seq-len", 1024) is profile


def test_sizes_are_whole_blocks_rounded_up() -> None:
    profile = decoder(gpu(), blocks=1, kept=600 * MB + 1)
    for value in (2, 3, 7):
        more = in_proportion(profile, "batch-size", value)
        for unit, big in zip(profile.units, more.units, strict=True):
            for form, grew in zip(unit.forms, big.forms, strict=True):
                for name in ("forward_peak_bytes", "kept_bytes", "swappable_bytes"):
                    assert getattr(grew, name) % 512 == 0
                    assert getattr(grew, name) >= value * getattr(form, name)
                # What a swap leaves on the device must not come out too small either.
                left = form.kept_bytes - form.swappable_bytes
                assert grew.kept_bytes - grew.swappable_bytes >= value * left


def test_pieces_of_a_swap_add_up() -> None:
    profile = decoder(gpu(), blocks=1)
    keep, full = profile.units[1].forms
    pieces = (100, keep.swappable_bytes - 1100, 1000)
    profile = with_forms(profile, 1, replace(keep, swap_pieces=pieces), full)
    grew = in_proportion(profile, "batch-size", 3).units[1].cost("keep")
    assert [-(-3 * piece // 512) * 512 for piece in pieces] == list(grew.swap_pieces)
    assert sum(grew.swap_pieces) == grew.swappable_bytes


def within(limits: Budgets, pins: Sequence[Pin] = ()) -> Callable[[Profile], Problem]:
    return lambda profile: Problem.of(
        profile, limits, pins=pins, settings=replace(OVERLAPPING, piece_bytes=PIECE_BYTES)
    )


def fits(profile: Profile, of: Quantity, budgets: Budgets, value: int) -> bool:
    problem = within(budgets)(in_proportion(profile, of, value))
    lean = min_memory(problem)
    return lean is not None and lean.bytes <= problem.device


def budgets(profile: Profile, device: int, *, host: int = 10**12) -> Budgets:
    return replace(inside(profile, device), host=host)


@pytest.mark.nightly(but=("0", "3"))
@pytest.mark.parametrize("seed", range(6))
def test_one_more_than_the_largest_does_not_fit(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, max_blocks=4)
    limits = budgets(profile, rng.choice([1000, 3000]) * MB, host=rng.choice([0, 200, 10**6]) * MB)
    found = largest(profile, "batch-size", within(limits))
    value = found or 0
    assert value == 0 or fits(profile, "batch-size", limits, value)
    assert not fits(profile, "batch-size", limits, value + 1)


def test_largest_keeps_to_pins() -> None:
    profile = small(tokens=512)
    limits = budgets(profile, 800 * MB)
    free = largest(profile, "batch-size", within(limits))
    pins = (parse_pin("*: keep, persistent"),)
    pinned = largest(profile, "batch-size", within(limits, pins=pins))
    assert free and pinned
    assert pinned < free
    for value, fitting in ((pinned, True), (pinned + 1, False)):
        problem = within(limits, pins)(in_proportion(profile, "batch-size", value))
        # One choice is left, and its bytes are known.
        [choice] = plain_choices(problem)
        assert (max(problem.static_bytes(choice)) <= problem.device) == fitting


def test_largest_is_none_where_nothing_fits_and_ends_at_its_bound() -> None:
    assert largest(small(), "batch-size", within(budgets(small(), 1 * MB))) is None
    profile = replace(decoder(gpu(), blocks=1, kept=0), base_bytes=0)
    assert largest(profile, "batch-size", within(budgets(profile, 10**15))) == 2**20


def test_no_sequence_is_longer_than_the_positions_of_the_model() -> None:
    profile = small(tokens=64)
    config = '{"max_position_embeddings": 1000, "max_target_positions": 300}'
    profile = replace(profile, workload=replace(profile.workload, model_config=config))
    assert largest(profile, "seq-len", within(budgets(profile, 10**15))) == 256


def test_what_grows_in_proportion_is_exact_between_two_batches() -> None:
    low, exact, high = small(1), small(3), small(8)
    assert between(low, high, 1) is low
    assert between(low, high, 8) is high
    told = between(low, high, 3)
    assert dumps_profile(told) == dumps_profile(exact)
