"""A profile for another batch size or sequence length, without running the model again.

In proportion, from one profile: r is the target's tokens over the profile's, and bytes of
activations, the batch and seconds are r times as many. Fitted, from two: a straight line through
both. Parameters, gradients and optimizer states stay as they are.

[Note: what grows of a backward peak] Inside a backward slot stand activations and their gradients,
which grow, and the unit's new gradients, which do not: peak = max over t of a(t) + g(t), with
0 <= g(t) <= G. Which of the two a profiled peak was made of is unknown: the peak of a long
sequence comes at the slot's beginning, before there are gradients; that of a short one at its end,
when activations are gone (SmolLM2-135M, float32, 64, 128 and 256 tokens: 12.2, 10.2 and 7.1 MB).
For r < 1

    r a + g = r (a + g) + (1 - r) g <= r peak + (1 - r) G.

For r > 1 it is r peak at most, where all of the peak is activations. They hardly exceed A, what the
unit's forward had at once (each tensor of it has a gradient of its size, and is gone soon after),
with what a recomputation brings back. With a as large as that allows,

    r a + g <= r a' + (peak - a'),    a' = min(peak, max(A, peak - G)).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from protrain_plan.errors import ProtrainError
from protrain_plan.program import BLOCK_BYTES
from protrain_plan.records.profile import FormCost, Profile, Unit
from protrain_plan.units import four_digits

Growth = Literal["in proportion", "fitted"]
Quantity = Literal["batch-size", "seq-len"]

RANDOM_STATE_BYTES = 5056
"""What a recomputed unit keeps whatever the batch: `torch.get_rng_state().nbytes`, torch 2.13."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grower:
    """Profiles of one model on one machine over one quantity; see `grower`."""

    profile: Profile
    quantity: Quantity
    also: Profile | None

    @property
    def kind(self) -> Growth:
        return "in proportion" if self.also is None else "fitted"

    def at(self, value: int) -> Profile:
        """The profile for that many sequences per batch, or tokens per sequence."""
        batch_size = value if self.quantity == "batch-size" else None
        seq_len = value if self.quantity == "seq-len" else None
        if self.also is None:
            return grown(self.profile, batch_size=batch_size, seq_len=seq_len)
        return fitted(self.profile, self.also, batch_size=batch_size, seq_len=seq_len)


def grower(profile: Profile, quantity: Quantity, also: Profile | None = None) -> Grower:
    """`fitted` where there is a second profile, else `grown`.

    ProtrainError where the second is not of the same model on the same machine, or differs in more
    than `quantity`.
    """
    if also is not None:
        _check_alike(profile, also, quantity)
    return Grower(profile=profile, quantity=quantity, also=also)


def grown(
    profile: Profile, *, batch_size: int | None = None, seq_len: int | None = None
) -> Profile:
    """The profile in proportion: r is the tokens of a batch over those of the profiled one.

    kept, swappable, forward peak   r times as many bytes
    backward peak                   see [Note: what grows of a backward peak]
    base                            r times, and never less: the model's buffers do not shrink
    seconds                         r times

    Sizes are rounded up to whole `BLOCK_BYTES`, so that a promise errs on the safe side. It is
    an assumption that seconds are proportional: the time of attention has a part that grows with
    the square of the sequence, which one profile cannot show, and so have the bytes of an attention
    that stores its scores. Small batches fill a device less than large ones. Tables of positions
    depend on the sequence alone: for a smaller batch the unit that makes them comes out too small
    by some hundred bytes per token.
    """
    workload = profile.workload
    target = replace(
        workload,
        batch_size=workload.batch_size if batch_size is None else batch_size,
        seq_len=workload.seq_len if seq_len is None else seq_len,
    )
    if target != workload:
        target = replace(target, inputs=())  # those were of the profiled size
    assert target.batch_size >= 1 and target.seq_len >= 1
    if target == workload:
        return profile
    ratio = Fraction(target.batch_size * target.seq_len, workload.batch_size * workload.seq_len)
    return replace(
        profile,
        workload=target,
        base_bytes=max(profile.base_bytes, _aligned(ratio * profile.base_bytes)),
        units=tuple(
            replace(
                unit,
                forms=tuple(_form_grown(profile, index, form, ratio) for form in unit.forms),
            )
            for index, unit in enumerate(profile.units)
        ),
    )


def _form_grown(profile: Profile, index: int, form: FormCost, ratio: Fraction) -> FormCost:
    staying = form.kept_bytes - form.swappable_bytes
    constant = Fraction(0)  # what a smaller batch has more than its proportion
    if form.form != "keep" and ratio < 1:
        constant = (1 - ratio) * min(max(0, staying), RANDOM_STATE_BYTES)
    return _form(
        form,
        staying=ratio * staying + constant,
        swappable=ratio * form.swappable_bytes,
        pieces=[ratio * piece for piece in form.swap_pieces],
        forward_peak=ratio * form.forward_peak_bytes + constant,
        backward_peak=_backward_peak(profile, index, form, ratio),
        forward_s=float(ratio) * form.forward_s,
        backward_s=float(ratio) * form.backward_s,
    )


def _form(
    form: FormCost,
    *,
    staying: Fraction,
    swappable: Fraction,
    pieces: Sequence[Fraction],
    forward_peak: Fraction,
    backward_peak: Fraction,
    forward_s: float,
    backward_s: float,
) -> FormCost:
    """The costs in whole blocks; `staying` are the kept bytes that a swap leaves on the device."""
    swap_pieces = tuple(_aligned(piece) for piece in pieces)
    moved = sum(swap_pieces) if swap_pieces else _aligned(swappable)
    # Rounded apart, so that neither what a swap leaves on the device nor what it takes of a tier
    # comes out too small.
    kept = _aligned(staying) + moved
    return replace(
        form,
        forward_peak_bytes=max(_aligned(forward_peak), kept),
        kept_bytes=kept,
        backward_peak_bytes=_aligned(backward_peak),
        swappable_bytes=moved,
        swap_pieces=swap_pieces,
        forward_s=four_digits(forward_s),
        backward_s=four_digits(backward_s),
    )


def _backward_peak(profile: Profile, index: int, form: FormCost, ratio: Fraction) -> Fraction:
    """The most that the peak can be. See [Note: what grows of a backward peak]."""
    peak, gradients = form.backward_peak_bytes, _new_gradients(profile, index)
    if ratio <= 1:
        return ratio * peak + (1 - ratio) * gradients
    keep = profile.units[index].cost("keep")
    recomputed = keep.kept_bytes - form.kept_bytes
    activations = keep.forward_peak_bytes + recomputed
    growing = min(peak, max(activations, peak - gradients))
    return ratio * growing + (peak - growing)


def _new_gradients(profile: Profile, index: int) -> int:
    """The most bytes of gradients of parameters that a unit's backward makes.

    Where a later unit has made a tied parameter's gradient already, this one makes another and the
    sum of both.
    """
    return sum(
        unit.gradient_bytes * (1 if index == max(unit.used_by) else 2)
        for unit in profile.units
        if index in unit.used_by
    )


def fitted(
    first: Profile, second: Profile, *, batch_size: int | None = None, seq_len: int | None = None
) -> Profile:
    """The profile on the straight lines through two, which differ in the quantity asked for alone.

    Every byte of activations and every second is y(x) = y1 + (y2 - y1) (x - x1) / (x2 - x1), and at
    x1 and x2 the profile is the one given. Beyond the larger one nothing falls below it; before the
    smaller one sizes stop at zero and seconds at the square of the proportion. A backward peak is a
    maximum of straight lines: between the two their line is safe, outside it is no less than
    what the nearer profile says by itself (see [Note: what grows of a backward peak]). A time that
    grows with the square of the sequence lies below the line between the two and above it outside.

    Exactly one of `batch_size` and `seq_len` is given. ProtrainError where the profiles are not of
    the same model on the same machine, or do not differ in this quantity alone.
    """
    assert (batch_size is None) != (seq_len is None)
    value = batch_size if batch_size is not None else seq_len
    assert value is not None and value >= 1
    quantity: Quantity = "batch-size" if batch_size is not None else "seq-len"
    _check_alike(first, second, quantity)
    low, high = sorted((first, second), key=lambda profile: _value(profile, quantity))
    line = _Line(x=value, low=_value(low, quantity), high=_value(high, quantity))
    if value in (line.low, line.high):
        return low if value == line.low else high
    nearer = low if value < line.low else high
    return replace(
        first,
        workload=replace(
            first.workload,
            batch_size=first.workload.batch_size if batch_size is None else batch_size,
            seq_len=first.workload.seq_len if seq_len is None else seq_len,
            inputs=(),
        ),
        base_bytes=_aligned(line.bytes(low.base_bytes, high.base_bytes)),
        fixed_bytes=max(low.fixed_bytes, high.fixed_bytes),
        units=tuple(
            replace(
                unit,
                forms=tuple(
                    _form_fitted(nearer, index, line, below, above)
                    for below, above in zip(
                        low.units[index].forms, high.units[index].forms, strict=True
                    )
                ),
            )
            for index, unit in enumerate(first.units)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Where between, or beside, two profiles the target lies."""

    x: int
    low: int
    high: int

    def at(self, below: int, above: int) -> Fraction:
        """The line through the numbers of both; beyond the larger profile no less than its own."""
        y = below + Fraction((above - below) * (self.x - self.low), self.high - self.low)
        return max(y, Fraction(above)) if self.x > self.high else y

    def bytes(self, below: int, above: int) -> Fraction:
        """The same for a size."""
        return max(self.at(below, above), Fraction(0))

    def seconds(self, below: float, above: float) -> float:
        """The same for seconds."""
        y = below + (above - below) * (self.x - self.low) / (self.high - self.low)
        if self.x > self.high:
            return max(y, above)
        return max(y, below * (self.x / self.low) ** 2) if self.x < self.low else y

    @property
    def ratio(self) -> Fraction | None:
        """The target over the nearer profile; None between the two."""
        if self.low < self.x < self.high:
            return None
        return Fraction(self.x, self.low if self.x < self.low else self.high)


def _form_fitted(
    nearer: Profile, index: int, line: _Line, below: FormCost, above: FormCost
) -> FormCost:
    backward_peak = line.at(below.backward_peak_bytes, above.backward_peak_bytes)
    if line.ratio is not None:
        form = nearer.units[index].cost(above.form)
        backward_peak = max(backward_peak, _backward_peak(nearer, index, form, line.ratio))
    swappable = line.bytes(below.swappable_bytes, above.swappable_bytes)
    if len(below.swap_pieces) == len(above.swap_pieces):
        pairs = zip(below.swap_pieces, above.swap_pieces, strict=True)
        pieces = [line.bytes(*pair) for pair in pairs]
    else:  # cut in other places: in the shares of the larger profile
        total = max(1, sum(above.swap_pieces))
        pieces = [swappable * piece / total for piece in above.swap_pieces]
    return _form(
        above,
        staying=line.at(
            below.kept_bytes - below.swappable_bytes, above.kept_bytes - above.swappable_bytes
        ),
        swappable=swappable,
        pieces=pieces,
        forward_peak=line.bytes(below.forward_peak_bytes, above.forward_peak_bytes),
        backward_peak=backward_peak,
        forward_s=line.seconds(below.forward_s, above.forward_s),
        backward_s=line.seconds(below.backward_s, above.backward_s),
    )


_WORDS: dict[Quantity, str] = {"batch-size": "batch size", "seq-len": "sequence length"}


def _value(profile: Profile, quantity: Quantity) -> int:
    workload = profile.workload
    return workload.batch_size if quantity == "batch-size" else workload.seq_len


def _check_alike(first: Profile, second: Profile, quantity: Quantity) -> None:
    """ProtrainError unless the profiles differ in the quantity, and in nothing that it is not."""
    one, other = first.workload, second.workload
    word = _WORDS[quantity]
    fix = f"profile the same model on the same machine twice, with another {word}"
    alike: list[tuple[str, str, str]] = [
        ("models", one.model, other.model),
        ("dtypes", one.dtype, other.dtype),
        ("precisions", one.precision, other.precision),
        ("machines", _machine(first), _machine(second)),
        ("methods", first.method, second.method),
        ("optimizers", first.optimizer.name, second.optimizer.name),
    ]
    for rest in ("batch-size", "seq-len"):
        if rest != quantity:
            values = str(_value(first, rest)), str(_value(second, rest))
            alike.append((f"{_WORDS[rest]}s", *values))
    for what, mine, theirs in alike:
        if mine != theirs:
            problem = f"the two profiles have different {what}: {mine} and {theirs}"
            raise ProtrainError(problem, fix=fix)
    if (one.model_config, first.model_fingerprint) != (
        other.model_config,
        second.model_fingerprint,
    ):
        problem = f"the two profiles are of different configurations of {one.model}"
        raise ProtrainError(problem, fix=fix)
    if len(first.units) != len(second.units):
        problem = (
            "the two profiles have different numbers of units: "
            f"{len(first.units)} and {len(second.units)}"
        )
        raise ProtrainError(problem, fix=fix)
    for unit, twin in zip(first.units, second.units, strict=True):
        if _shape(unit) != _shape(twin):
            problem = f"the two profiles disagree on what the unit {unit.name} is"
            if unit.name != twin.name:
                problem = f"the two profiles have different units: {unit.name} and {twin.name}"
            raise ProtrainError(problem, fix=fix)
    if _value(first, quantity) == _value(second, quantity):
        problem = f"the two profiles have the same {word}: {_value(first, quantity)}"
        raise ProtrainError(problem, fix=fix)


def _machine(profile: Profile) -> str:
    hardware = profile.hardware
    return f"{hardware.name} ({hardware.device.name})"


def _shape(unit: Unit) -> tuple[object, ...]:
    """What does not depend on the batch."""
    states = (unit.num_parameters, unit.parameter_bytes, unit.gradient_bytes, unit.state_bytes)
    return (unit.name, unit.kind, states, unit.used_by, tuple(form.form for form in unit.forms))


def _aligned(size: Fraction) -> int:
    """The bytes in whole blocks, rounded up (towards zero where they are below it)."""
    return math.ceil(size / BLOCK_BYTES) * BLOCK_BYTES
