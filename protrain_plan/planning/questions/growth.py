"""A profile of another batch size or sequence length, in proportion; and the largest that fits.

r is the target's tokens over the profile's: bytes of activations, the batch and seconds are r times
as many. Parameters, gradients and optimizer states stay as they are. Bytes C of a quantity may not
depend on the batch at all. It is then r (size - C) + C: with the least that C can be for a larger
batch, and the most for a smaller one, sizes err on the safe side.

[Note: what grows of a backward peak] A backward slot holds activations and their gradients,
which grow, and the unit's new gradients, which do not: peak = max over t of a(t) + g(t), with
0 <= g(t) <= G. Which of the two a profiled peak was made of is unknown: the peak of a long
sequence comes at the slot's beginning, before there are gradients; that of a short one at its end,
when activations are gone (SmolLM2-135M, float32, 64, 128 and 256 tokens: 12.2, 10.2 and 7.1 MB).
So C = G for r < 1, with G what else does not shrink. For r > 1 activations are no more than the
whole peak. They hardly exceed A, what the unit's forward had at once (each tensor of it has a
gradient of its size, and is gone soon after), with what a recomputation brings back, and the
gradients of its output and of its input; to be on the safe side, A is taken a sixteenth larger.
With a as large as that allows, C = peak - min(peak, max(A, peak - G)).

In tiles more than G stays as it is: g(t) <= c G. An MLP in tiles (`tiled`) holds, beside its new
gradients, float32 sums of them and those of one tile, and casts of its weights under autocast: at
most 10 bytes for 4 of float32, and 6 for 2 of 16 bits, so that c = 3. A head in tiles holds its
gradient and, of one tile, a cast of its weights and a product: c = 2.

[Note: what does not shrink] A profile does not say which of its bytes follow the batch. Of a
smaller batch, at most these do not:

- partial results of kernels: 1 MiB on an accelerator; on a CPU, packed blocks for every thread;
- weights that autocast casts, or that were packed, as numbers;
- a recomputed unit's random state;
- in a part before the last one, all but the hidden states that it hands on: tables of positions
  follow the length, and not the batch; in its backward, sums of an embedding's rows in float32;
- tensors that are now too small to be swapped, at most 256 KiB of a block.

What follows the square of the length (scores that are kept, masks) grows more than r, which one
profile cannot show: a length that was found so is to be profiled.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

from protrain_plan.planning.model.fitting import least_bytes
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.questions.answers import Quantity, Question
from protrain_plan.planning.search.choices import min_memory, plain_choices
from protrain_runtime.contract.program.program import BLOCK_BYTES
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.hardware import is_accelerator
from protrain_runtime.contract.records.plan import Activations, Placement
from protrain_runtime.contract.records.profile import FormCost, Profile
from protrain_runtime.contract.units import four_digits

RANDOM_STATE_BYTES = 5056
"""Bytes that a recomputed unit keeps: `torch.get_rng_state().nbytes`, torch 2.13."""

LOOSE_BYTES = 8 * BLOCK_BYTES
"""Bytes by which an accelerator's allocator rounds tensors up. In proportion, those of one that is
gone at a peak count r times against it."""

_KERNEL_BYTES = 2**15
"""Bytes per thread of kernels of a CPU once they have more rows, as in `hardware.operators`."""

_SMALL_BYTES = 16 * 2**14
"""Bytes of tensors that may get too small to be swapped: 16 of `MIN_SWAP_BYTES`, of a runtime that
imports torch."""

_SCRATCH_BYTES = 2**20
"""Bytes for partial results of an accelerator's kernels: the bound of `hardware.operators`, which
imports torch. On a CPU every thread packs blocks of 2.7 MiB at most."""

_STAYING = {"tiled": 3, "8 tiles": 2, "64 tiles": 2}
"""c of [Note: what grows of a backward peak]; 1 for all that is not in tiles."""

_MORE_THAN_FORWARD = Fraction(17, 16)
"""Activations of a backward over the forward's, A of [Note: what grows of a backward peak]."""


def _aligned(size: Fraction) -> int:
    """Return the bytes in whole blocks, rounded up (towards zero where they are below it)."""
    return math.ceil(size / BLOCK_BYTES) * BLOCK_BYTES


def grown(
    profile: Profile, *, batch_size: int | None = None, seq_len: int | None = None
) -> Profile:
    """Return the profile in proportion, in whole `BLOCK_BYTES`, rounded up.

    Its base never shrinks, as the model's buffers do not. It is an assumption that seconds are
    proportional: the work of attention has a part that grows with the square of the sequence, and
    small batches fill a device less than large ones. Between two factors, of the batch and of the
    length, it is the product that counts: a shorter batch of more tokens comes out too small by its
    tables of positions.
    """
    workload = profile.workload
    target = replace(
        workload,
        batch_size=workload.batch_size if batch_size is None else batch_size,
        seq_len=workload.seq_len if seq_len is None else seq_len,
    )
    assert target.batch_size >= 1 and target.seq_len >= 1
    if target == workload:
        return profile
    ratio = Fraction(target.batch_size * target.seq_len, workload.batch_size * workload.seq_len)
    units = (
        replace(
            unit,
            forms=tuple(_form_grown(profile, index, form, ratio) for form in unit.forms),
            gets=(),
        )
        for index, unit in enumerate(profile.units)
    )
    return replace(
        profile,
        workload=replace(target, inputs=()),  # those were of the profiled size
        base_bytes=max(profile.base_bytes, _aligned(ratio * profile.base_bytes)),
        model_flops=float(ratio) * profile.model_flops,
        units=tuple(units),
    )


def between(low: Profile, high: Profile, batch_size: int) -> Profile:
    """The profile of a batch size from two of one workload, a smaller and a larger one.

    What is live at a moment is a sum of tensors, each constant or in proportion to the batch. So
    bytes that are kept grow along a straight line, and a peak, the largest of many such sums, along
    a convex line. Between two batches it is at most on the straight line between its ends, which is
    what this profile has: bytes in whole `BLOCK_BYTES`, rounded up. Seconds and FLOPs are on that
    line, too. A form of activations that only one of the two has is left out. That the batch does
    not change which kernels run is assumed, and not always so (of few rows an embedding's backward
    is another one): a plan to train with is made from an estimate of its own batch.
    """
    first, last = low.workload, high.workload
    assert replace(first, batch_size=0, inputs=()) == replace(last, batch_size=0, inputs=())
    assert first.batch_size <= batch_size <= last.batch_size
    if batch_size in (first.batch_size, last.batch_size):
        return low if batch_size == first.batch_size else high
    share = Fraction(batch_size - first.batch_size, last.batch_size - first.batch_size)

    def line(one: int, other: int) -> int:
        return _aligned(one + share * (other - one))

    def form_between(one: FormCost, other: FormCost) -> FormCost:
        alike = len(one.swap_pieces) == len(other.swap_pieces)
        pieces = tuple(map(line, one.swap_pieces, other.swap_pieces)) if alike else ()
        moved = sum(pieces) if pieces else line(one.swappable_bytes, other.swappable_bytes)
        kept = moved + line(
            one.kept_bytes - one.swappable_bytes, other.kept_bytes - other.swappable_bytes
        )
        forward = line(one.forward_peak_bytes, other.forward_peak_bytes)
        return replace(
            one,
            forward_peak_bytes=max(forward, kept),
            kept_bytes=kept,
            backward_peak_bytes=line(one.backward_peak_bytes, other.backward_peak_bytes),
            swappable_bytes=moved,
            swap_pieces=pieces,
            forward_s=four_digits(one.forward_s + float(share) * (other.forward_s - one.forward_s)),
            backward_s=four_digits(
                one.backward_s + float(share) * (other.backward_s - one.backward_s)
            ),
        )

    return replace(
        low,
        workload=replace(first, batch_size=batch_size, inputs=()),
        base_bytes=line(low.base_bytes, high.base_bytes),
        fixed_bytes=max(low.fixed_bytes, high.fixed_bytes),
        model_flops=low.model_flops + float(share) * (high.model_flops - low.model_flops),
        units=tuple(
            replace(
                unit,
                forms=tuple(
                    form_between(one, other)
                    for one in unit.forms
                    for other in beyond.forms
                    if one.form == other.form
                ),
                gets=(),
            )
            for unit, beyond in zip(low.units, high.units, strict=True)
        ),
    )


def _form_grown(profile: Profile, index: int, form: FormCost, ratio: Fraction) -> FormCost:
    """Return the costs in whole blocks."""
    constants = (_least_constant if ratio > 1 else _most_constant)(profile, index, form)
    staying = form.kept_bytes - form.swappable_bytes  # what a swap leaves on the device

    def scaled(size: int, constant: int) -> Fraction:
        if ratio < 1:
            constant = min(max(size, 0), constant)
        # What is below the level after the slot may be constant: it has gone.
        return ratio * size + (1 - ratio) * (constant if size >= 0 or ratio < 1 else size)

    loose, more = 0, Fraction(_KERNEL_BYTES * profile.hardware.device.num_threads)
    if is_accelerator(profile.workload.device):
        loose = LOOSE_BYTES * math.ceil(max(ratio, Fraction(1)))
        more = Fraction(loose)
    pieces = tuple(_aligned(ratio * piece) for piece in form.swap_pieces)
    moved = sum(pieces) if pieces else _aligned(ratio * form.swappable_bytes)
    # A tensor that has become small stays where it is.
    small = min(moved, _SMALL_BYTES) if ratio < 1 else 0
    # Rounded apart, so that neither what a swap leaves on the device nor what it takes of a tier
    # comes out too small.
    left = _aligned(scaled(staying, constants[0]) + loose) + small
    kept = max(left + moved, _aligned(scaled(form.kept_bytes, constants[0]) + loose))
    forward = scaled(form.forward_peak_bytes, constants[1]) + more
    backward = ratio * form.backward_peak_bytes + (1 - ratio) * constants[2] + more
    if FORMS[form.form].of == "last part":
        # A tile of rows need not shrink with the batch, and may grow by a group of rows more than
        # the batch does, which is a tile at most. Forward has one or two of a tile's size, and
        # backward three (`tiled_loss.tile_rows`).
        tile = Fraction(max(0, form.forward_peak_bytes - form.kept_bytes))
        tile *= Fraction(1) if ratio > 1 else 1 - ratio
        forward += tile
        backward += 3 * tile
    return replace(
        form,
        forward_peak_bytes=max(_aligned(forward), kept),
        kept_bytes=kept,
        backward_peak_bytes=_aligned(backward),
        swappable_bytes=moved,
        swap_pieces=pieces,
        forward_s=four_digits(float(ratio) * form.forward_s),
        backward_s=four_digits(float(ratio) * form.backward_s),
    )


def _least_constant(profile: Profile, index: int, form: FormCost) -> tuple[int, int, Fraction]:
    """Bytes that stay as they are for a larger batch, at least: kept, at the two peaks.

    See [Note: what grows of a backward peak].
    """
    unit, peak = profile.units[index], form.backward_peak_bytes
    keep = unit.cost("keep")
    handed = next((cost.kept_bytes for cost in unit.forms if cost.form == "full"), 0)
    activations = keep.forward_peak_bytes + keep.kept_bytes - form.kept_bytes + 2 * handed
    most = max(_MORE_THAN_FORWARD * activations, Fraction(peak - _gradients(profile, index)))
    growing = min(Fraction(peak), most)
    return 0, 0, peak - max(growing, Fraction(0))


def _most_constant(profile: Profile, index: int, form: FormCost) -> tuple[int, int, int]:
    """Bytes that do not shrink with the batch, at most: kept, at the two peaks.

    See [Note: what does not shrink].
    """
    workload, unit = profile.workload, profile.units[index]
    parameters = sum(one.parameter_bytes for one in profile.units if index in one.used_by)
    casts = 0  # of weights
    if workload.precision == "autocast":
        casts = parameters // 2
    elif workload.quantize:
        casts = 4 * parameters
    kept = casts + RANDOM_STATE_BYTES * (form.form != "keep")
    threads = 1 if is_accelerator(workload.device) else 3 * profile.hardware.device.num_threads
    scratch = threads * _SCRATCH_BYTES
    gradients = _gradients(profile, index) * _STAYING.get(form.form, 1)
    forward, backward = kept + scratch, gradients + casts + scratch
    if unit.kind == "part" and index < len(profile.units) - 1:
        # Tables of positions, and what makes them: all but the hidden states that it hands on.
        full = [cost.kept_bytes for u in profile.units for cost in u.forms if cost.form == "full"]
        hidden = max(0, min(full, default=0) - RANDOM_STATE_BYTES)
        kept = max(kept, form.kept_bytes - hidden)
        forward = max(forward, form.forward_peak_bytes - hidden)
        # Sums of rows of an embedding in float32, too.
        backward = max(backward + 2 * parameters, form.backward_peak_bytes - hidden)
    return kept, forward, backward


def _gradients(profile: Profile, index: int) -> int:
    """Bytes of the gradients that a unit's backward makes.

    Where a later unit has made a tied parameter's already, it makes another, and the sum of both.
    """
    return sum(
        one.gradient_bytes * (1 if index == max(one.used_by) else 2)
        for one in profile.units
        if index in one.used_by
    )


STEPS: dict[Quantity, int] = {"batch-size": 1, "seq-len": 64}
"""Values are multiples of these: sequences, and tokens."""

MOST: dict[Quantity, int] = {"batch-size": 2**20, "seq-len": 2**24}
"""Ends of the search, whatever fits."""


def largest_of(question: Question, quantity: Quantity) -> Profile | None:
    """The largest batch or sequence that fits, by leave with sums in shards; None: none does."""
    asked = filter(None, (question, question.adding_shards()))
    found = (
        largest(one.profile, quantity, partial(one.problem_of, group=one.group)) for one in asked
    )
    workloads = (one for one in found if one)
    return max(
        workloads, key=lambda one: getattr(one.workload, quantity.replace("-", "_")), default=None
    )


_Decisions = list[tuple[Activations, Placement]]


def largest(
    profile: Profile, quantity: Quantity, problem_of: Callable[[Profile], Problem]
) -> Profile | None:
    """Return the profile with the largest multiple of the quantity's step that has a plan.

    None where none has; `MOST` may not be the largest one. It is the largest for which the leanest
    decisions do. The least peak is a mixed-integer programme, a given choice's peak a sum; so that
    few sizes need the programme, a choice once found is carried as far as it fits, and the
    programme is asked only about what lies beyond. The batch is that of one micro-batch.
    ProtrainError where a pin cannot be met.
    """
    step = STEPS[quantity]
    most = MOST[quantity] // step
    found: _Decisions | None = None

    def at(number: int) -> Profile:
        return grown(profile, **{quantity.replace("-", "_"): number * step})

    def problem_at(number: int) -> Problem:
        return problem_of(at(number))

    def fits_plainly(number: int) -> bool:
        problem = problem_at(number)
        if least_bytes(problem) > problem.device:
            return False
        return any(problem.fits(choice) for choice in plain_choices(problem))

    def fits_as_found(number: int) -> bool:
        assert found, "asked when there is a choice"
        problem = problem_at(number)
        # Another size can close an option: what is too small is not swapped.
        choice = problem.known_choice(found)
        return choice is not None and problem.fits(choice)

    # `fitting` fits, `beyond` does not; ever larger strides in between, until one is too large.
    fitting, beyond, stride = _last(fits_plainly, 0, most + 1), most + 1, 1
    while beyond - fitting > 1:
        number = min(fitting + stride, beyond - 1)
        problem = problem_at(number)
        lean = None if least_bytes(problem) > problem.device else min_memory(problem)
        if lean is None or lean.bytes > problem.device:
            beyond, stride = number, 1
        else:
            fitting, stride = number, 2 * stride
        if lean is not None:
            found = problem.decisions(lean.choice)
            fitting = _last(fits_as_found, fitting, beyond)
    return at(fitting) if fitting else None


def _last(fits: Callable[[int], bool], fitting: int, beyond: int) -> int:
    """The last number from `fitting` on, and before `beyond`, that fits: strides, then halves."""
    stride = 1
    while beyond - fitting > 1:
        number = min(fitting + stride, (fitting + beyond) // 2)
        if fits(number):
            fitting, stride = number, 2 * stride
        else:
            beyond = number
    return fitting
