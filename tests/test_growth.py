"""Profiles for other batch sizes and sequence lengths, and the largest that fits."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from protrain_plan.errors import ProtrainError
from protrain_plan.planning.candidates import plain_choices
from protrain_plan.planning.growth import Grower, Quantity, fitted, grower, grown
from protrain_plan.planning.largest import STEPS, Largest, largest
from protrain_plan.planning.leanest import leanest
from protrain_plan.planning.pins import parse_pin
from protrain_plan.planning.problem import Problem
from protrain_plan.records import dumps_profile, loads_profile
from protrain_plan.records.plan import Budgets
from protrain_plan.records.profile import FormCost, Profile, Unit
from tests.planning_cases import MB, cpu, decoder, gpu, random_profile

KIB = 1024
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
            assert grew.kept_bytes == 2 * form.kept_bytes
            assert grew.swappable_bytes == 2 * form.swappable_bytes
            assert grew.forward_peak_bytes == 2 * form.forward_peak_bytes
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


def test_a_grown_profile_can_be_written_and_read() -> None:
    for profile in (small(), measured(64), decoder(cpu(), blocks=2, tied=True)):
        for value in (1, 2, 5):
            grew = grown(profile, batch_size=value, seq_len=512)
            assert loads_profile(dumps_profile(grew)) == grew


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


def test_a_fitted_backward_peak_is_never_promised_too_low() -> None:
    for low, high in pairwise(TOKENS):
        for tokens in TOKENS:
            promised = fitted(measured(low), measured(high), seq_len=tokens)
            for form in ("keep", "full"):
                mine, real = promised.units[1].cost(form), measured(tokens).units[1].cost(form)
                assert mine.backward_peak_bytes >= real.backward_peak_bytes


def test_gradients_of_parameters_do_not_grow() -> None:
    profile = measured(64)
    # All of this peak but what the forward could have held is gradients.
    keep, full = profile.units[1].forms
    profile = with_forms(profile, 1, replace(keep, backward_peak_bytes=9 * MB), full)
    forward = keep.forward_peak_bytes
    assert profile.units[1].gradient_bytes == 8 * MB
    grew = grown(profile, seq_len=256).units[1].cost("keep")
    assert grew.backward_peak_bytes == -(-(4 * forward + 9 * MB - forward) // 512) * 512
    less = grown(profile, seq_len=32).units[1].cost("keep")
    assert less.backward_peak_bytes == -(-(9 * MB + 8 * MB) // 2 // 512) * 512


def test_random_state_does_not_shrink() -> None:
    profile = measured(1024)
    keep, full = profile.units[1].forms
    full = replace(full, kept_bytes=1024 * KIB + 5056)
    half = grown(with_forms(profile, 1, keep, full), seq_len=512)
    assert half.units[1].cost("full").kept_bytes == -(-(512 * KIB + 5056) // 512) * 512


def line(value: int, *, of: Quantity) -> Profile:
    """A profile whose bytes and seconds have a part that does not depend on the batch."""
    profile = decoder(
        gpu(),
        blocks=2,
        block_parameters=4 * MB,
        embedding_parameters=20 * MB,
        kept=512 * 64 * (100 + 7 * value),
        seconds=0.02 + 0.005 * value,
    )
    workload = profile.workload
    return replace(
        profile,
        base_bytes=512 * (10 + value),
        workload=replace(workload, batch_size=value)
        if of == "batch-size"
        else replace(workload, seq_len=value),
    )


def at(first: Profile, second: Profile, value: int, of: Quantity) -> Profile:
    return grower(first, of, second).at(value)


QUANTITIES: tuple[Quantity, ...] = ("batch-size", "seq-len")


@pytest.mark.parametrize("of", QUANTITIES)
def test_fitted_reproduces_both_profiles(of: Quantity) -> None:
    first, second = line(8, of=of), line(3, of=of)
    assert at(first, second, 8, of) == first
    assert at(first, second, 3, of) == second


@pytest.mark.parametrize("of", QUANTITIES)
@pytest.mark.parametrize("value", [1, 5, 9, 40])
def test_fitted_finds_the_line_again(of: Quantity, value: int) -> None:
    found, true = at(line(3, of=of), line(8, of=of), value, of), line(value, of=of)
    assert found.workload == true.workload
    assert found.base_bytes == true.base_bytes
    for mine, real in zip(found.units, true.units, strict=True):
        assert states(mine) == states(real)
        for form, exact in zip(mine.forms, real.forms, strict=True):
            left, exactly_left = (one.kept_bytes - one.swappable_bytes for one in (form, exact))
            assert 0 <= left - exactly_left < 512
            assert 0 <= form.swappable_bytes - exact.swappable_bytes < 512
            assert 0 <= form.kept_bytes - exact.kept_bytes < 1024
            assert 0 <= form.forward_peak_bytes - exact.forward_peak_bytes < 1024
            assert form.backward_peak_bytes >= exact.backward_peak_bytes
            assert form.forward_s == pytest.approx(exact.forward_s, rel=1e-3)
            assert form.backward_s == pytest.approx(exact.backward_s, rel=1e-3)


def test_nothing_falls_below_the_larger_profile_beyond_it() -> None:
    first, second = line(3, of="batch-size"), line(8, of="batch-size")
    keep, full = second.units[1].forms
    fast = replace(keep, forward_s=0.001, forward_peak_bytes=keep.kept_bytes)
    second = with_forms(second, 1, fast, full)
    grew = fitted(first, second, batch_size=100).units[1].cost("keep")
    assert grew.forward_s == 0.001
    assert grew.forward_peak_bytes >= grew.kept_bytes > keep.kept_bytes


def test_fitted_below_the_smaller_profile_can_be_written_and_read() -> None:
    steep = (small(8), with_forms(small(9), 1, *small(900).units[1].forms))
    less = fitted(*steep, batch_size=1)
    assert loads_profile(dumps_profile(less)) == less
    assert all(form.forward_s > 0 for unit in less.units for form in unit.forms)


def test_fitted_pieces_add_up_where_the_profiles_are_cut_differently() -> None:
    first, second = small(2), small(4)
    keep, full = second.units[1].forms
    cut = (keep.swappable_bytes // 4, keep.swappable_bytes - keep.swappable_bytes // 4)
    second = with_forms(second, 1, replace(keep, swap_pieces=cut), full)
    between = fitted(first, second, batch_size=3).units[1].cost("keep")
    assert len(between.swap_pieces) == 2
    assert sum(between.swap_pieces) == between.swappable_bytes
    assert between.swap_pieces[0] == pytest.approx(between.swappable_bytes / 4, abs=512)


ONE = small(1)
TWO = small(2)
FIX = "\n  fix: profile the same model on the same machine twice, with another batch size"
UNLIKE = {
    "the two profiles have different models: synthetic and other": replace(
        TWO, workload=replace(TWO.workload, model="other")
    ),
    "the two profiles have different dtypes: bfloat16 and float32": replace(
        TWO, workload=replace(TWO.workload, dtype="float32")
    ),
    "the two profiles have different precisions: pure and master": replace(
        TWO, workload=replace(TWO.workload, precision="master")
    ),
    "the two profiles have different machines: gpu (card) and cpu (cores)": replace(
        TWO, hardware=cpu()
    ),
    "the two profiles have different methods: estimated and measured": replace(
        TWO, method="measured"
    ),
    "the two profiles have different optimizers: adamw and sgd": replace(
        TWO, optimizer=replace(TWO.optimizer, name="sgd")
    ),
    "the two profiles have different sequence lengths: 1024 and 512": replace(
        TWO, workload=replace(TWO.workload, seq_len=512)
    ),
    "the two profiles are of different configurations of synthetic": replace(
        TWO, model_fingerprint="sha256:1"
    ),
    "the two profiles have different numbers of units: 4 and 5": small(2, blocks=3),
    "the two profiles have different units: layers.0 and h.0": replace(
        TWO,
        units=(TWO.units[0], replace(TWO.units[1], name="h.0"), *TWO.units[2:]),
    ),
    "the two profiles disagree on what the unit layers.0 is": with_forms(
        TWO, 1, TWO.units[1].forms[0]
    ),
    "the two profiles have the same batch size: 1": ONE,
}


@pytest.mark.parametrize("message", UNLIKE)
def test_profiles_that_do_not_belong_together(message: str) -> None:
    with pytest.raises(ProtrainError) as caught:
        grower(ONE, "batch-size", UNLIKE[message])
    assert str(caught.value) == message + FIX
    with pytest.raises(ProtrainError) as caught:
        fitted(ONE, UNLIKE[message], batch_size=3)
    assert str(caught.value) == message + FIX


def fits(grower: Grower, budgets: Budgets, value: int) -> bool:
    problem = Problem.of(grower.at(value), budgets, piece_bytes=PIECE_BYTES)
    lean = leanest(problem)
    return lean is not None and lean.bytes <= problem.device


def scanned(grower: Grower, budgets: Budgets) -> int:
    """The largest value that fits, 0 where none does, found by asking one after the other."""
    value = step = STEPS[grower.quantity]
    while fits(grower, budgets, value):
        value += step
    return value - step


def budgets(profile: Profile, device: int, *, host: int = 10**12, disk: int = 10**12) -> Budgets:
    context = profile.hardware.device.context_bytes
    return Budgets(device=device + context, host=host, disk=disk)


@pytest.mark.parametrize(
    ("of", "device", "host"),
    [
        ("batch-size", 300 * MB, 10**12),
        ("batch-size", 600 * MB, 340 * MB),
        ("batch-size", 800 * MB, 0),
        ("seq-len", 120 * MB, 10**12),
        ("seq-len", 560 * MB, 340 * MB),
    ],
)
def test_largest_agrees_with_a_linear_scan(of: Quantity, device: int, host: int) -> None:
    profile = small(1, tokens=512 if of == "batch-size" else 64, disk=False)
    limits = budgets(profile, device, host=host)
    for also in (None, small(3, tokens=512) if of == "batch-size" else small(tokens=192)):
        if also is not None:
            also = replace(also, hardware=profile.hardware)
        growing = grower(profile, of, also)
        found = largest(growing, limits, piece_bytes=PIECE_BYTES)
        assert isinstance(found, Largest)
        assert found.value == scanned(growing, limits)
        assert found.profile == growing.at(found.value)
        assert found.growth == ("in proportion" if also is None else "fitted")


@pytest.mark.parametrize("seed", range(6))
def test_one_more_than_the_largest_does_not_fit(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, max_blocks=4)
    limits = budgets(profile, rng.choice([1000, 3000]) * MB, host=rng.choice([0, 200, 10**6]) * MB)
    growing = grower(profile, "batch-size")
    found = largest(growing, limits, piece_bytes=PIECE_BYTES)
    value = 0 if found is None else found.value
    assert value == 0 or fits(growing, limits, value)
    assert not fits(growing, limits, value + 1)


def test_largest_keeps_to_pins() -> None:
    profile = small(tokens=512)
    limits = budgets(profile, 800 * MB)
    growing = grower(profile, "batch-size")
    free = largest(growing, limits, piece_bytes=PIECE_BYTES)
    pins = (parse_pin("*: keep, persistent"),)
    pinned = largest(growing, limits, piece_bytes=PIECE_BYTES, pins=pins)
    assert free is not None
    assert pinned is not None
    assert pinned.value < free.value
    for value, fitting in ((pinned.value, True), (pinned.value + 1, False)):
        problem = Problem.of(growing.at(value), limits, piece_bytes=PIECE_BYTES, pins=pins)
        # One choice is left, and its bytes are known.
        [choice] = plain_choices(problem)
        assert (max(problem.static_bytes(choice)) <= problem.device) == fitting


def test_largest_is_none_where_nothing_fits() -> None:
    profile = small()
    limits = budgets(profile, 1 * MB)
    assert largest(grower(profile, "batch-size"), limits, piece_bytes=PIECE_BYTES) is None


def test_largest_ends_at_its_bound() -> None:
    profile = decoder(gpu(), blocks=1, kept=0)
    profile = replace(profile, base_bytes=0)
    limits = budgets(profile, 10**15)
    found = largest(grower(profile, "batch-size"), limits, piece_bytes=PIECE_BYTES)
    assert found is not None
    assert found.value == 2**20
