"""The largest batch or sequence that fits in proportion, and profiles between two that are known.

[Note: in proportion] r is the target's tokens over the profile's: bytes of activations and of the
batch, and seconds, are r times as many. Parameters, gradients and optimizer states stay as they
are, and so do a unit's new gradients in the peak of its backward. It says where to look, and is a
hint where nothing was profiled: what follows the square of a length grows more, and workspaces of
kernels, casts of weights and tables of positions less. No plan to train with is made from it.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from protrain_plan.planning.model.fitting import least_bytes
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.questions.answers import Quantity, Question
from protrain_plan.planning.search.choices import has_plan
from protrain_runtime.contract.program.program import BLOCK_BYTES
from protrain_runtime.contract.records.profile import FormCost, Profile, Workload
from protrain_runtime.contract.units import four_digits


def _aligned(size: Fraction) -> int:
    """Whole blocks of bytes, rounded up (negative sizes towards zero)."""
    return math.ceil(size / BLOCK_BYTES) * BLOCK_BYTES


def size_of(workload: Workload, quantity: Quantity) -> int:
    """A workload's batch or sequence size."""
    return workload.batch_size if quantity == "batch-size" else workload.seq_len


def sized(workload: Workload, quantity: Quantity, value: int) -> Workload:
    """The workload with another batch or sequence size."""
    changed = {quantity.replace("-", "_"): value, "inputs": ()}  # they had the previous size
    return replace(workload, **changed)  # type: ignore[arg-type]


def in_proportion(profile: Profile, quantity: Quantity, value: int) -> Profile:
    """The profile of another size. See [Note: in proportion]."""
    ratio = Fraction(value, size_of(profile.workload, quantity))
    if ratio == 1:
        return profile
    gradients = [
        sum(unit.gradient_bytes for unit in profile.units if index in unit.used_by)
        for index in range(len(profile.units))
    ]
    workload = sized(profile.workload, quantity, value)
    return _between(profile, profile, workload, lambda one, _: ratio * one, gradients)


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
    workload = sized(first, "batch-size", batch_size)
    return _between(low, high, workload, lambda one, other: one + share * (other - one))


_Line = Callable[[Fraction, Fraction], Fraction]


def _between(
    low: Profile, high: Profile, workload: Workload, line: _Line, staying: Sequence[int] = ()
) -> Profile:
    """The profile on a `line` between two; `staying` bytes of a unit's backward are constant."""

    def size(one: int, other: int) -> int:
        return _aligned(line(Fraction(one), Fraction(other)))

    def amount(one: float, other: float) -> float:
        return float(line(Fraction(one), Fraction(other)))

    def form_between(one: FormCost, other: FormCost, gradients: int) -> FormCost:
        alike = len(one.swap_pieces) == len(other.swap_pieces)
        pieces = tuple(map(size, one.swap_pieces, other.swap_pieces)) if alike else ()
        moved = sum(pieces) if pieces else size(one.swappable_bytes, other.swappable_bytes)
        kept = moved + size(
            one.kept_bytes - one.swappable_bytes, other.kept_bytes - other.swappable_bytes
        )
        stays = min(gradients, max(0, one.backward_peak_bytes))
        ends = (one.backward_peak_bytes - stays, other.backward_peak_bytes - stays)
        return replace(
            one,
            forward_peak_bytes=max(kept, size(one.forward_peak_bytes, other.forward_peak_bytes)),
            kept_bytes=kept,
            backward_peak_bytes=_aligned(line(Fraction(ends[0]), Fraction(ends[1])) + stays),
            swappable_bytes=moved,
            swap_pieces=pieces,
            forward_s=four_digits(amount(one.forward_s, other.forward_s)),
            backward_s=four_digits(amount(one.backward_s, other.backward_s)),
        )

    return replace(
        low,
        workload=workload,
        base_bytes=max(low.base_bytes, size(low.base_bytes, high.base_bytes)),  # buffers, too
        fixed_bytes=max(low.fixed_bytes, high.fixed_bytes),
        model_flops=amount(low.model_flops, high.model_flops),
        units=tuple(
            replace(
                unit,
                forms=tuple(
                    form_between(one, other, stays)
                    for one in unit.forms
                    for other in beyond.forms
                    if one.form == other.form
                ),
                gets=(),
            )
            for unit, beyond, stays in zip(
                low.units, high.units, staying or [0] * len(low.units), strict=True
            )
        ),
    )


STEPS: dict[Quantity, int] = {"batch-size": 1, "seq-len": 64}
"""Values are multiples of these: sequences, and tokens."""

MOST: dict[Quantity, int] = {"batch-size": 2**20, "seq-len": 2**24}
"""Ends of the search."""


def largest_of(question: Question, quantity: Quantity) -> int | None:
    """The largest batch or sequence that fits in proportion, with sums in shards if allowed.

    None where none does.
    """
    asked = filter(None, (question, question.adding_shards()))
    found = (
        largest(one.profile, quantity, partial(one.problem_of, group=one.group)) for one in asked
    )
    return max(filter(None, found), default=None)


def largest(
    profile: Profile, quantity: Quantity, problem_of: Callable[[Profile], Problem]
) -> int | None:
    """Return the largest multiple of the quantity's step that has a plan in proportion.

    None where none has; `MOST` may not be the largest one. The batch is that of one micro-batch.
    ProtrainError where a pin cannot be met.
    """
    step, most = STEPS[quantity], MOST[quantity]
    if quantity == "seq-len" and profile.workload.model_config:
        config = json.loads(profile.workload.model_config)
        positions = [config.get(key) for key in ("max_target_positions", "max_position_embeddings")]
        most = min([most, *(one for one in positions if isinstance(one, int))])

    # `fitting` fits, `beyond` does not: growing strides, then bisection.
    fitting, beyond, stride = 0, most // step + 1, 1
    while beyond - fitting > 1:
        number = min(fitting + stride, (fitting + beyond) // 2)
        problem = problem_of(in_proportion(profile, quantity, number * step))
        if least_bytes(problem) <= problem.device and has_plan(problem):
            fitting, stride = number, 2 * stride
        else:
            beyond = number
    return fitting * step or None
