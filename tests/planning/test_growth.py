"""Profiles for other batch sizes and sequence lengths, and the largest that fits."""

import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.planning.model.options import Pin, parse_pin
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.questions.answers import Quantity
from protrain_plan.planning.questions.growth import (
    LOOSE_BYTES,
    between,
    grown,
    largest,
)
from protrain_plan.planning.search.choices import min_memory, plain_choices
from protrain_plan.profiling.estimated import estimates
from protrain_runtime.contract.records import dumps_profile
from protrain_runtime.contract.records.adapters import parse_lora
from protrain_runtime.contract.records.plan import Budgets
from protrain_runtime.contract.records.profile import DType, FormCost, Precision, Profile, Unit
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


@pytest.mark.parametrize(("batch_size", "seq_len"), [(2, None), (None, 2048), (2, 1024)])
def test_twice_the_tokens_are_twice_the_activations_and_the_same_states(
    batch_size: int | None, seq_len: int | None
) -> None:
    profile = small()
    twice = grown(profile, batch_size=batch_size, seq_len=seq_len)
    assert (twice.workload.batch_size, twice.workload.seq_len) == (
        batch_size or 1,
        seq_len or 1024,
    )
    assert twice.method == profile.method
    assert twice.hardware == profile.hardware
    assert twice.base_bytes == 2 * profile.base_bytes
    for unit, more in zip(profile.units, twice.units, strict=True):
        assert states(more) == states(unit)
        for form, grew in zip(unit.forms, more.forms, strict=True):
            assert grew.kept_bytes == 2 * form.kept_bytes + 2 * LOOSE_BYTES
            assert grew.swappable_bytes == 2 * form.swappable_bytes
            assert grew.forward_peak_bytes == 2 * form.forward_peak_bytes + 2 * LOOSE_BYTES
            assert grew.forward_s == pytest.approx(2 * form.forward_s)
            assert grew.backward_s == pytest.approx(2 * form.backward_s)


def test_growth_to_what_was_profiled_is_the_profile() -> None:
    profile = decoder(gpu(), blocks=2)
    assert grown(profile) is profile
    assert grown(profile, batch_size=1, seq_len=1024) is profile


def test_sizes_are_whole_blocks_rounded_up() -> None:
    profile = decoder(gpu(), blocks=1, kept=600 * MB + 1)
    for value in (2, 3, 7):
        more = grown(profile, batch_size=value)
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
    grew = grown(profile, batch_size=3).units[1].cost("keep")
    assert [-(-3 * piece // 512) * 512 for piece in pieces] == list(grew.swap_pieces)
    assert sum(grew.swap_pieces) == grew.swappable_bytes


def backward_peak(tokens: int, gradients: int) -> int:
    """The peak of a unit's backward that holds 3 KiB per token first and the gradients last."""
    return max(3 * KIB * tokens, gradients - 12 * KIB * tokens)


def measured(tokens: int) -> Profile:
    """One block whose backward's peak is what a slot's bytes make it, not a multiple of tokens."""
    profile = small(tokens=tokens, blocks=1)
    unit = profile.units[1]
    keep, full = (
        replace(
            form,
            kept_bytes=kept * tokens,
            swappable_bytes=0,
            forward_peak_bytes=20 * KIB * tokens,
            backward_peak_bytes=backward_peak(tokens, unit.gradient_bytes)
            if form.form == "keep"
            else 3 * KIB * tokens + 16 * KIB * tokens,
        )
        for form, kept in zip(unit.forms, (17 * KIB, 1 * KIB), strict=True)
    )
    return with_forms(profile, 1, keep, full)


TOKENS = (64, 128, 256, 512, 1024)


@pytest.mark.parametrize("profiled", TOKENS)
def test_a_backward_peak_is_never_promised_too_low(profiled: int) -> None:
    for tokens in TOKENS:
        promised, true = grown(measured(profiled), seq_len=tokens), measured(tokens)
        for form in ("keep", "full"):
            mine, real = promised.units[1].cost(form), true.units[1].cost(form)
            assert mine.backward_peak_bytes >= real.backward_peak_bytes
            assert mine.kept_bytes >= real.kept_bytes


def test_gradients_of_parameters_do_not_grow() -> None:
    profile = measured(64)
    # All of this peak but what the forward could have held is gradients.
    keep, full = profile.units[1].forms
    profile = with_forms(profile, 1, replace(keep, backward_peak_bytes=9 * MB), full)
    forward = keep.forward_peak_bytes
    assert profile.units[1].gradient_bytes == 8 * MB
    grew = grown(profile, seq_len=256).units[1].cost("keep")
    growing = (forward + 2 * full.kept_bytes) * 17 // 16  # and gradients of what is handed on
    expected = 4 * growing + 9 * MB - growing + 4 * LOOSE_BYTES
    assert grew.backward_peak_bytes == -(-expected // 512) * 512
    less = grown(profile, seq_len=32).units[1].cost("keep")
    assert less.backward_peak_bytes == -(-(9 * MB + 8 * MB + MIB) // 2 // 512) * 512 + LOOSE_BYTES


def test_random_state_does_not_shrink() -> None:
    profile = measured(1024)
    keep, full = profile.units[1].forms
    full = replace(full, kept_bytes=1024 * KIB + 5056)
    half = grown(with_forms(profile, 1, keep, full), seq_len=512)
    expected = -(-(512 * KIB + 5056) // 512) * 512 + LOOSE_BYTES
    assert half.units[1].cost("full").kept_bytes == expected


def sized(profile: Profile, quantity: Quantity, value: int) -> Profile:
    if quantity == "batch-size":
        return grown(profile, batch_size=value)
    return grown(profile, seq_len=value)


def within(limits: Budgets, pins: Sequence[Pin] = ()) -> Callable[[Profile], Problem]:
    return lambda profile: Problem.of(
        profile, limits, pins=pins, settings=replace(OVERLAPPING, piece_bytes=PIECE_BYTES)
    )


def fits(profile: Profile, of: Quantity, budgets: Budgets, value: int) -> bool:
    problem = within(budgets)(sized(profile, of, value))
    lean = min_memory(problem)
    return lean is not None and lean.bytes <= problem.device


def budgets(profile: Profile, device: int, *, host: int = 10**12) -> Budgets:
    return replace(inside(profile, device), host=host)


@pytest.mark.parametrize("seed", range(6))
def test_one_more_than_the_largest_does_not_fit(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, max_blocks=4)
    limits = budgets(profile, rng.choice([1000, 3000]) * MB, host=rng.choice([0, 200, 10**6]) * MB)
    found = largest(profile, "batch-size", within(limits))
    value = 0 if found is None else found.workload.batch_size
    assert value == 0 or fits(profile, "batch-size", limits, value)
    assert not fits(profile, "batch-size", limits, value + 1)


def test_largest_keeps_to_pins() -> None:
    profile = small(tokens=512)
    limits = budgets(profile, 800 * MB)
    free = largest(profile, "batch-size", within(limits))
    pins = (parse_pin("*: keep, persistent"),)
    pinned = largest(profile, "batch-size", within(limits, pins=pins))
    assert free and pinned
    assert pinned.workload.batch_size < free.workload.batch_size
    most = pinned.workload.batch_size
    for value, fitting in ((most, True), (most + 1, False)):
        problem = within(limits, pins)(sized(profile, "batch-size", value))
        # One choice is left, and its bytes are known.
        [choice] = plain_choices(problem)
        assert (max(problem.static_bytes(choice)) <= problem.device) == fitting


def test_largest_is_none_where_nothing_fits_and_ends_at_its_bound() -> None:
    assert largest(small(), "batch-size", within(budgets(small(), 1 * MB))) is None
    profile = replace(decoder(gpu(), blocks=1, kept=0), base_bytes=0)
    found = largest(profile, "batch-size", within(budgets(profile, 10**15)))
    assert found is not None
    assert found.workload.batch_size == 2**20


def test_what_grows_in_proportion_is_exact_between_two_batches() -> None:
    low, exact, high = small(1), small(3), small(8)
    assert between(low, high, 1) is low
    assert between(low, high, 8) is high
    told = between(low, high, 3)
    assert dumps_profile(told) == dumps_profile(exact)


# --- profiles that are grown, against estimates of the size itself: no byte is promised too low ---

Size = tuple[int, int]  # [sequences], [tokens] of each


class Trained(NamedTuple):
    """A model, and sizes of batches [sequences] and of sequences [tokens]."""

    model: str
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: DType = "bfloat16"
    precision: Precision = "pure"
    adapter: str = ""
    machines: tuple[str, ...] = ("rtx-4090", "cpu")


LLAMA = Trained("tiny-llama", (1, 4), (64, 520))
GPT2 = Trained("tiny-gpt2", (1, 4), (64, 250))
TRAINED = [
    LLAMA,
    # On a card grouped heads in float32 keep scores, which follow the square of the length.
    LLAMA._replace(dtype="float32", machines=("cpu",)),
    LLAMA._replace(precision="autocast"),
    LLAMA._replace(precision="master"),
    LLAMA._replace(adapter="r=4"),
    GPT2,
    GPT2._replace(precision="autocast"),
    Trained("smollm2-135m", (1, 4), (256, 1024)),
]


def told(trained: Trained) -> dict[Size, list[Profile]]:
    """By batch and length, an estimate for each of the machines."""
    return {
        (batch, length): estimates(
            load_source(trained.model),
            machines=[load_hardware(name) for name in trained.machines],
            batch_size=batch,
            seq_len=length,
            dtype=trained.dtype,
            precision=trained.precision,
            adapter=trained.adapter and str(parse_lora(trained.adapter)),
        )
        for batch, length in itertools.product(trained.batches, trained.lengths)
    }


def too_low(promised: Profile, true: Profile) -> list[tuple[str, int]]:
    """Slots of which the promise says too few bytes, and how few."""
    found = [("base", true.base_bytes - promised.base_bytes)]
    for unit, real in zip(promised.units, true.units, strict=True):
        forms = {cost.form: cost for cost in real.forms}
        for cost in unit.forms:
            if other := forms.get(cost.form):
                name = f"{unit.name}, {cost.form}"
                left, needed = (one.kept_bytes - one.swappable_bytes for one in (cost, other))
                found += [
                    (f"{name}: kept", other.kept_bytes - cost.kept_bytes),
                    (f"{name}: left by a swap", needed - left),
                    (f"{name}: forward", other.forward_peak_bytes - cost.forward_peak_bytes),
                    (f"{name}: backward", other.backward_peak_bytes - cost.backward_peak_bytes),
                ]
    return [(name, size) for name, size in found if size > 0]


def assert_never_too_low(known: dict[Size, list[Profile]]) -> None:
    """From each size to each that differs in the batch or in the length."""
    compared = 0
    for (size, made), ((batch, length), real) in itertools.permutations(known.items(), 2):
        if (size[0] == batch) != (size[1] == length):
            for profile, true in zip(made, real, strict=True):
                promised = grown(profile, batch_size=batch, seq_len=length)
                assert too_low(promised, true) == [], (size, (batch, length))
                compared += 1
    assert compared >= 2


@pytest.mark.slow
@pytest.mark.parametrize("trained", TRAINED, ids=lambda one: "-".join(map(str, one)))
def test_a_grown_profile_never_says_fewer_bytes_than_an_estimate(trained: Trained) -> None:
    assert_never_too_low(told(trained))


def test_a_grown_profile_of_two_blocks_never_says_fewer_bytes(tmp_path: Path) -> None:
    config = json.loads(load_source("tiny-llama").model_config) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    trained = LLAMA._replace(model=str(tmp_path), lengths=(64,), machines=("rtx-4090",))
    assert_never_too_low(told(trained))
