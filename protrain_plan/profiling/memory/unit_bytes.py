"""Bytes that a model's units hold: found by running it, on real tensors or on fake ones.

First `analyze_units` looks at what each unit saves, then `measure_bytes` at the live bytes of whole
steps.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from protrain_plan.models.batches import Batch
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER, optimizer_factory
from protrain_plan.profiling.memory import passes
from protrain_plan.profiling.memory.lasting import Lasting
from protrain_plan.profiling.memory.saved import SavedBytes, saved_bytes
from protrain_plan.profiling.structure.discovery import (
    FURTHER_STEPS,
    FoundUnit,
    Variation,
    starting_from,
)
from protrain_plan.profiling.structure.rerun import aliases, run_once, writing_arguments
from protrain_runtime.activations.trees import tensors_in
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import BLOCK_BYTES, block_bytes, in_blocks
from protrain_runtime.contract.records.forms import FORMS, allowed_forms, names_of
from protrain_runtime.contract.records.hardware import DeviceKind, is_accelerator
from protrain_runtime.contract.records.plan import KEEP, PERSISTENT, UnitPlan
from protrain_runtime.contract.records.profile import (
    HANDS_ON,
    SPARSE,
    TOGETHER,
    WHOLE,
    Form,
    FormCost,
    Precision,
    Unit,
)
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.devices.memory_meter import Segment, storage_bytes
from protrain_runtime.states.chunk_layouts import make_chunks, sharing_memory
from protrain_runtime.states.chunks import ALIGNMENT, Chunk, Slice
from protrain_runtime.states.quantized import named_scales
from protrain_runtime.states.update_rules import UpdateRule, UpdateRules


@dataclass(frozen=True, kw_only=True)
class ModelStructure:
    """A model's units, their parameters, and what each saves that is its own.

    `units` are as a plan names them, with nothing decided. `base_bytes` are live before the first
    slot, and `fixed_bytes` are as in the profile, without what libraries keep. `once` are the
    blocks whose forward cannot run twice, with the reasons (see `rerun`), and `stays` says of units
    why their states stay on the device. `num_warm` steps replace what the model keeps from one to
    the next. `shared_bytes` are those of base_bytes that a recomputed block may hold of what others
    read too. `rules` are the optimizer's. `unused` are the blocks that the loss does not depend on:
    nothing that they saved outlives the forward. `kept` ones have one form: they keep what they
    save, whatever the others do. `last_forms` are forms to try of the last part. Storages take
    whole blocks of `block` bytes. `variation` are further steps of a model that does other work
    from step to step.
    """

    found: tuple[FoundUnit, ...]
    units: Sequence[UnitPlan]
    chunks: Sequence[Chunk]
    saved: dict[Form, list[SavedBytes]]
    base_bytes: int
    fixed_bytes: int
    once: Mapping[int, str]
    num_warm: int
    shared_bytes: int
    stays: Mapping[int, str]
    rules: UpdateRules
    unused: Set[int]
    kept: Set[int]
    last_forms: Sequence[Form] = ()
    block: int = 1
    variation: Variation | None = None


def analyze_units(
    model: nn.Module,
    batch: Batch,
    found: tuple[FoundUnit, ...],
    *,
    device: DeviceKind = "cpu",
    forms: Sequence[Form] | None = None,
    optimizer: str = DEFAULT_OPTIMIZER,
    precision: Precision = "pure",
    once: Mapping[int, str] | None = None,
    variation: Variation | None = None,
) -> ModelStructure:
    """Run forwards of the model, and look at what its units save in each of the forms.

    `forms` are by default all that are exact. `device` is the type of those that the profile is
    for: fake tensors are on a CPU. `optimizer` and `precision` say what states the parameters have.
    `once` is what `run_once` has found, where it was asked before. ProtrainError where the model
    keeps more and more tensors.
    """
    modules = [unit.module for unit in found]
    block = block_bytes(device)
    once = dict(run_once(model, found, batch) if once is None else once)
    lasting = Lasting(model)
    with writing_arguments(modules) as arguments:
        keep = saved_bytes(model, modules, batch, "keep")
    # What is handed on in arguments is held there, so that a swap would free nothing.
    handing = arguments.tensors
    keep = [s.staying() if index in handing else s for index, s in enumerate(keep)]
    for index in arguments.lasting | handing:
        once.setdefault(index, "its forward writes into its arguments")
    for index, unit in enumerate(found):
        if unit.writes:
            once.setdefault(index, f"its forward writes the parameter {unit.writes[0]!r}")
    blocks = [index for index, unit in enumerate(found) if unit.kind == "block"]
    differentiated = any(saved.differentiated for saved in keep)
    for index in blocks if differentiated else ():  # one of them, and perhaps on through others
        once.setdefault(index, DIFFERENTIATED)
    own_inputs = [unit.own_inputs for unit in keep]
    unused = frozenset(index for index in blocks if not keep[index].awaited)
    kept = unused | once.keys()
    tried = allowed_forms(()) if forms is None else forms

    def look(form: Form, batch: Batch = batch, *, may_skip: bool = False) -> list[SavedBytes]:
        inputs = None if form == "keep" else own_inputs
        return saved_bytes(
            model, modules, batch, form, own_inputs=inputs, kept=kept, may_skip=may_skip
        )

    saved = {"keep": keep} | {form: look(form) for form in names_of("blocks") if form in tried}
    for start, other in variation.steps if variation else ():
        with starting_from(model, start):
            for form, units in saved.items():
                # Tiers have places for the bytes that were seen: other ones stay on the device.
                saved[form] = [
                    unit if not now.pieces or now.pieces == unit.pieces else unit.staying()
                    for unit, now in zip(units, look(form, other, may_skip=True), strict=True)
                ]

    step = partial(saved_bytes, model, modules, batch, "keep")
    lasting.refuse_growth(step)
    on_blocks = is_accelerator(device)
    undecided = _undecided(found, own_inputs)
    chunks = make_chunks(model, undecided, alignment=BLOCK_BYTES if on_blocks else ALIGNMENT)
    parts = [part for chunk in chunks for part in chunk.slices]
    rules = UpdateRules(optimizer_factory(optimizer, precision))
    stepped = {part.name: part.rule(rules) for part in parts if part.trainable}
    base = storage_bytes([*model.buffers(), *tensors_in(batch)], block=block)
    held_inputs = sum(in_blocks(size, block) for unit in keep for size in unit.shared_inputs)
    absent = sum(in_blocks(s.nbytes, block) for _, s in named_scales(model) if s.is_meta)
    base += lasting.num_bytes(block=block) + held_inputs + absent
    if not on_blocks:
        # An optimizer's scalars per parameter (AdamW's step) are cloned while an update is in
        # flight, and one element is there for an offloaded parameter; losses and their gradients
        # are a few more.
        base += 2 * sum(rule.scalar_bytes() for rule in stepped.values())
        base += sum(part.dtype.itemsize for part in parts) + 256
    return ModelStructure(
        found=found,
        units=undecided,
        chunks=chunks,
        saved=saved,
        base_bytes=base,
        fixed_bytes=_beside_in_blocks(parts, stepped) if on_blocks else 0,
        once=once,
        num_warm=lasting.num_steps(step),
        shared_bytes=held_inputs,
        stays=dict.fromkeys(range(len(found)), DIFFERENTIATED)
        if differentiated
        else _staying(
            found, chunks, handing, stepped, aliases(model).union(*(unit.gives for unit in keep))
        ),
        rules=rules,
        unused=unused,
        kept=kept,
        last_forms=[form for form in names_of("last part") if form in tried]
        if keep[-1].ends_in_cross_entropy and not differentiated
        else (),
        block=block,
        variation=variation,
    )


PLACED = "parameters are read by their place in a storage (as_strided, set_)"
ALIASED = "views of parameters are attributes, or results of blocks"
DIFFERENTIATED = "the forward differentiates through the units (torch.autograd.grad)"


def _staying(
    found: Sequence[FoundUnit],
    chunks: Sequence[Chunk],
    handing: Set[int],
    stepped: Mapping[str, UpdateRule],
    aliased: Set[int],
) -> dict[int, str]:
    """Why the chunks stay that cannot be moved parameter by parameter, by unit."""
    written = {name for unit in found for name in unit.writes}
    placed = {name for unit in found for name in unit.placed}
    stays = sharing_memory(chunks)
    for chunk in chunks:
        dtypes = {part.dtype for part in chunk.slices if part.trainable}
        if len(dtypes) > 1:
            mixed = len({dtype.is_complex for dtype in dtypes}) > 1
            beside = "complex parameters beside real ones"
            stays[chunk.unit] = beside if mixed else "trainable parameters of several dtypes"
    stays |= dict.fromkeys(handing, HANDS_ON)
    for chunk in chunks:
        for part in chunk.slices:
            if part.name in written:
                stays[chunk.unit] = f"the forward writes to {part.name!r}"
            elif part.name in placed:
                stays[chunk.unit] = PLACED
            elif part.parameter.untyped_storage()._cdata in aliased:
                stays[chunk.unit] = ALIASED
            elif part.trainable and stepped[part.name].reason:
                stays.setdefault(chunk.unit, TOGETHER if stepped[part.name].together else WHOLE)
    return stays


_NORMS = 2
"""A gradient's scalars while it is clipped: one taken as it left, or by `clip_grad_norm_`, and what
of that is multiplied."""

_GRADIENTS = 2
"""Gradients of a parameter at once, where micro-batches add up: the sum, and its summand."""

_LOOSE_BLOCKS = 16
"""The last step's loss, this one's with its share of a mean and their gradients, the total norm
and the factor of clipping, a gradient scaler's scale and its growth; some more for the model's."""


def _beside_in_blocks(parts: Sequence[Slice], rules: Mapping[str, UpdateRule]) -> int:
    """Bytes of an accelerator's allocator that belong to no unit: scalars take a block each.

    A parameter that stays there has its optimizer's scalars there too, and its gradient and its
    states, storages of their own, round up to blocks, which the units' bytes do not say. One
    element of each dtype takes the place of all offloaded parameters, and one of their gradients.
    """
    total = (_LOOSE_BLOCKS + 2 * len({part.dtype for part in parts})) * BLOCK_BYTES
    for part in (part for part in parts if part.trainable):
        rule = rules[part.name]
        total += rule.scalar_bytes(block=BLOCK_BYTES) + _NORMS * BLOCK_BYTES
        total += _GRADIENTS * (-part.num_bytes % BLOCK_BYTES)
        total += sum(-size % BLOCK_BYTES for size in rule.state_sizes(part.numel))
    return total


def measure_bytes(
    model: nn.Module, batch: Batch, structure: ModelStructure, meter: passes.MeterFactory
) -> tuple[list[Unit], int]:
    """The units with their bytes, from one training step per form, and those that a step leaves.

    Seconds are zero. What is left is live in the next step: a loop has a name for its loss then.
    `meter` makes what counts live bytes, of real tensors or of fake ones: one for each form of
    `structure.saved`, in order, one for each of `structure.last_forms`, one where units can swap
    and for each form in which other inputs leave, and one for each mixture where the model is more
    than a chain.
    """
    keep, modules = structure.saved["keep"], [unit.module for unit in structure.found]
    # Of parameters that get a gradient, its bytes. A sparse one may have more than the parameter: a
    # row for every time that it is read.
    arrived: dict[str, int] = {}
    in_step: dict[str, int] = {}
    sparse: set[str] = set()

    def gradients(slot: int) -> int:
        return _live_gradients(structure, arrived | in_step, after=2 * len(modules) - 1 - slot)

    segments, swapped = (
        partial(run, model, modules, meter=meter, kept=structure.kept, num_warm=structure.num_warm)
        for run in (passes.memory_segments, passes.swapped_segments)
    )
    if not any(saved.differentiated for saved in keep):
        segments = partial(segments, gradients=gradients)

    def batches() -> Iterator[Batch]:
        """The step's batch, and those of further steps, each from where it starts."""
        yield batch
        for start, other in structure.variation.steps if structure.variation else ():
            with starting_from(model, start):
                yield other

    def note(part: Slice, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        in_step[part.name] = part.num_bytes
        if gradient.layout != torch.strided:
            sparse.add(part.name)
            in_step[part.name] = storage_bytes([gradient])

    def step(form: Form, batch: Batch = batch, *, may_skip: bool = False) -> list[_Levels]:
        in_step.clear()
        cuts = segments(batch, form, may_skip=may_skip)
        arrived.update(in_step)
        return _levels(cuts, structure, in_step)

    with ExitStack() as stack:
        for part in (part for chunk in structure.chunks for part in chunk.slices):
            if part.trainable:
                handle = part.parameter.register_post_accumulate_grad_hook(partial(note, part))
                stack.callback(handle.remove)
        steps = {form: [step(form)] for form in structure.saved}
        last: dict[Form, list[_Levels]] = {}
        for form in structure.last_forms:
            with suppress(Exception):  # any code of the model runs here, and refusals of the form
                last[form] = _levels(segments(batch, form), structure, arrived)
            model.zero_grad()
        varies = structure.variation
        for start, other in varies.steps if varies and not varies.by_values else ():
            with starting_from(model, start):
                for form, each in steps.items():
                    each.append(step(form, other, may_skip=True))
    # Every unit takes what it takes at most in one of the steps. A GAN's two, say: each takes more
    # in another model, so that neither bounds mixed forms.
    memory = {
        form: [_Levels(*map(max, zip(*unit, strict=True))) for unit in zip(*each, strict=True)]
        for form, each in steps.items()
    }
    units = [_unit(structure, index, memory, last, arrived, sparse) for index in range(len(keep))]
    for form in memory:
        forms = [form if any(c.form == form for c in unit.forms) else "keep" for unit in units]
        saved = [structure.saved[own][index] for index, own in enumerate(forms)]
        # Code may have a name for what leaves, of an input up to the end of the next unit.
        if any(
            one.leaving and (form == "keep" or one.input_leaves > same.input_leaves)
            for one, same in zip(saved, keep, strict=True)
        ):
            leaving = [one.leaving for one in saved]
            for other in batches():
                cuts = swapped(other, forms, leaving)
                units = _raised(units, forms, cuts, structure, arrived)
    if len(memory) > 1 and any(saved.linked for saved in keep):
        for forms in _mixtures(units):
            units = _raised(units, forms, segments(batch, forms), structure, arrived)
    if structure.variation is not None:
        units = _held_in(
            units,
            lambda forms: (segments(one, forms, may_skip=one is not batch) for one in batches()),
            structure,
            arrived,
        )
    left = max(levels[0].left for levels in memory.values()) - gradients(2 * len(modules))
    loss = in_blocks(_LOSS_BYTES, structure.block)
    return units, max(0, left - loss)


class _Levels(NamedTuple):
    """Bytes of a unit in a step.

    forward, backward  the peaks above the level that the slot begins with
    kept               what the level rises by in forward
    left               the level after the unit's backward, above that before its forward
    """

    forward: int
    kept: int
    backward: int
    left: int


def _levels(
    cuts: Sequence[Segment], structure: ModelStructure, arrived: Mapping[str, int]
) -> list[_Levels]:
    """The units' bytes in a step in which these gradients arrive.

    Gradients of units that ran before in backward are live in its slots; a plan says what becomes
    of them. A tied one is live from its last use on.
    """
    found: list[_Levels] = []
    for index in range(len(structure.found)):
        before, after, backward = cuts[index], cuts[index + 1], cuts[len(cuts) - 2 - index]
        gradients = _live_gradients(structure, arrived, after=index)
        found.append(
            _Levels(
                forward=before.peak_bytes - before.start_bytes,
                kept=after.start_bytes - before.start_bytes,
                backward=backward.peak_bytes - after.start_bytes - gradients,
                left=cuts[len(cuts) - 1 - index].start_bytes - before.start_bytes,
            )
        )
    return found


_LOSS_BYTES = 64
"""Bytes of a loss, with room for what a wrapper keeps of it: the base has them."""


def _mixtures(units: Sequence[Unit]) -> list[list[Form]]:
    """Blocks in different forms, for models where they depend on more than their neighbours.

    Every other block in its leanest form, from the first or the second one on, and the others in
    `keep`; then all at random. Costs are measured with all blocks in one form; what a mixture takes
    beyond their sum is added to the slots in which it does.
    """
    blocks = [index for index, unit in enumerate(units) if unit.kind == "block"]
    mixtures: list[list[Form]] = []
    for first in range(2):
        leanest = set(blocks[first::2])
        mixtures.append([u.forms[-1].form if i in leanest else "keep" for i, u in enumerate(units)])
    rng = random.Random(0)
    return [*mixtures, [rng.choice(unit.forms).form for unit in units]]


def _raised(
    units: Sequence[Unit],
    forms: Sequence[Form],
    cuts: Sequence[Segment],
    structure: ModelStructure,
    arrived: Mapping[str, int],
) -> list[Unit]:
    """The units with peaks that are not below those of a step of such forms.

    Segments of a forward alone are those of one in which what can be swapped leaves.
    """
    start = cuts[0].start_bytes + structure.shared_bytes  # which the base has
    level = 0
    raised: list[Unit] = []
    for index, (unit, form) in enumerate(zip(units, forms, strict=True)):
        cost = unit.cost(form)
        gradients = _live_gradients(structure, arrived, after=index)
        forward = cuts[index].peak_bytes - start - level
        level += cost.kept_bytes
        more_forward, more_backward = max(0, forward - cost.forward_peak_bytes), 0
        if len(cuts) > len(units):
            backward = cuts[2 * len(units) - 1 - index].peak_bytes - start - level - gradients
            more_backward = max(0, backward - cost.backward_peak_bytes)
        else:
            level -= cost.swappable_bytes
        raised.append(_higher(unit, forward=more_forward, backward=more_backward))
    return raised


def _held_in(
    units: list[Unit],
    further: Callable[[Sequence[Form]], Iterable[tuple[Segment, ...]]],
    structure: ModelStructure,
    arrived: Mapping[str, int],
) -> list[Unit]:
    """The units with peaks that are not below those of `further` steps, in several mixtures.

    Where bytes go by values, no number of steps shows the most, and the range of every slot's peaks
    is to spare: of nine steps more than four standard deviations above the mean. ProtrainError
    where every step takes more than the one before.
    """
    spare = [0] * (2 * len(units))
    for forms in (["keep"] * len(units), *_mixtures(units)):
        steps = list(further(forms))
        peaks = [[cut.peak_bytes - cuts[0].start_bytes for cut in cuts] for cuts in steps]
        most = [max(of_step) for of_step in peaks]
        rising = all(later > earlier for earlier, later in pairwise(most[1:]))
        if rising and len(most) > FURTHER_STEPS:
            raise ProtrainError(
                f"every step takes more than the one before: {format_bytes(most[0])} of activations"
                f" in the first, {format_bytes(most[-1])} {len(most) - 1} steps later",
                fix="make steps do equal work, such as by a fixed number of rounds",
            )
        for cuts in steps:
            units = _raised(units, forms, cuts, structure, arrived)
        ranges = [max(of_slot) - min(of_slot) for of_slot in zip(*peaks, strict=True)]
        spare = list(map(max, spare, ranges))
    if structure.variation is None or not structure.variation.by_values:
        return units
    return [
        _higher(unit, forward=spare[index], backward=spare[~index])
        for index, unit in enumerate(units)
    ]


def _higher(unit: Unit, *, forward: int = 0, kept: int = 0, backward: int = 0) -> Unit:
    """The unit with so many bytes more in each of its forms."""
    forms = (
        replace(
            form,
            forward_peak_bytes=form.forward_peak_bytes + forward,
            kept_bytes=form.kept_bytes + kept,
            backward_peak_bytes=form.backward_peak_bytes + backward,
        )
        for form in unit.forms
    )
    return replace(unit, forms=tuple(forms))


def without_falls(units: Sequence[Unit]) -> list[Unit]:
    """The units with levels that never fall: no `kept_bytes` is negative.

    A unit that ends with less than it began with frees outputs of earlier units: so many bytes
    belong to its peak, and to theirs, and to no level between. The sums of all slots are as before,
    but where the first unit frees what the last step has left.
    """
    settled = list(units)
    for index in reversed(range(len(settled))):
        fall = -min(0, *(form.kept_bytes for form in settled[index].forms))
        if fall:
            settled[index] = _higher(settled[index], forward=fall if index else 0, kept=fall)
        if fall and index:
            settled[index - 1] = _higher(settled[index - 1], kept=-fall, backward=fall)
    return settled


def _live_gradients(structure: ModelStructure, arrived: Mapping[str, int], *, after: int) -> int:
    """Gradients of the chunks that are used last by units after `after`."""
    return sum(
        in_blocks(arrived[part.name], structure.block)
        for chunk in structure.chunks
        if chunk.used_by and max(chunk.used_by) > after
        for part in chunk.slices
        if part.name in arrived
    )


def _undecided(found: Sequence[FoundUnit], own_inputs: Sequence[tuple[int, ...]]) -> list[UnitPlan]:
    """The units as a plan names them, with nothing decided."""
    owner = {name: index for index, unit in enumerate(found) for name in unit.parameters}
    users: list[dict[str, None]] = [{} for _ in found]
    for unit in found:
        for name in unit.also_uses:
            users[owner[name]][unit.name] = None
    return [
        UnitPlan(
            name=unit.name,
            kind=unit.kind,
            parameters=unit.listed,
            also_used_by=tuple(using),
            own_inputs=inputs,
            activations=KEEP,
            states=PERSISTENT,
        )
        for unit, using, inputs in zip(found, users, own_inputs, strict=True)
    ]


def _unit(
    structure: ModelStructure,
    index: int,
    memory: Mapping[Form, Sequence[_Levels]],
    last: Mapping[Form, Sequence[_Levels]],
    arrived: Mapping[str, int],
    sparse: Set[str],
) -> Unit:
    unit, chunk, keep = structure.found[index], structure.chunks[index], structure.saved["keep"]
    size = chunk.size(structure.rules)

    def cost(form: Form, levels: _Levels, pieces: tuple[int, ...] = ()) -> FormCost:
        handed = gone = 0
        if FORMS[form].opt_in and unit.kind == "block":
            # An opt-in form need not hold a block's input. The block before may, in another form.
            handed = in_blocks(keep[index].handed_bytes, structure.block)
            # [Note: what a frame holds of a block that does not keep its input]
            # An opt-in form need not hold a block's input, and a frame of the model's forward may,
            # until that forward ends: it is in the block's level, and no more there in backward.
            # So the backward of later blocks was measured above a level that was too high, which it
            # is not where the earlier blocks are in another form.
            gone = max(0, memory["keep"][index].left - levels.left) if index else 0
        return FormCost(
            form=form,
            forward_peak_bytes=levels.forward,
            kept_bytes=levels.kept + handed,
            backward_peak_bytes=levels.backward + gone,
            swappable_bytes=sum(pieces),
            swap_pieces=pieces if len(pieces) > 1 else (),
            forward_s=0.0,
            backward_s=0.0,
        )

    forms = [
        cost(form, levels[index], structure.saved[form][index].pieces)
        for form, levels in memory.items()
    ]
    if unit.kind == "part":
        # Its costs whatever forms the blocks have. One that is recomputed may hold inputs that
        # several units share, which otherwise end with the model's forward.
        either = replace(
            forms[0],
            forward_peak_bytes=max(form.forward_peak_bytes for form in forms),
            kept_bytes=max(form.kept_bytes for form in forms),
            backward_peak_bytes=max(form.backward_peak_bytes for form in forms),
        )
        own = last if index == len(keep) - 1 else {}
        leaner = [cost(form, levels[index]) for form, levels in own.items()]
        forms = [either, *_leaner(either, forms[0], leaner)]
    else:
        forms = forms[:1] if index in structure.kept else _worthwhile(forms)
    trainable = [part for part in chunk.slices if part.trainable]
    is_sparse = any(part.name in sparse for part in trainable)
    stays = structure.stays.get(index, "")
    if is_sparse:
        stays = SPARSE
    elif not all(part.numel for part in trainable if part.name in arrived):
        # An optimizer has states for these, too; a store has no place for them.
        stays = "parameters without elements"
    if is_sparse:
        gradient_bytes = sum(arrived.get(part.name, part.num_bytes) for part in trainable)
        size = replace(
            size,
            gradient_bytes=gradient_bytes,
            largest_gradient_bytes=0,
            parameter_pieces=(),
            gradient_pieces=(),
        )
    return Unit(
        name=unit.name,
        kind=unit.kind,
        **asdict(size),
        forms=tuple(forms),
        parameters=unit.listed,
        own_inputs=keep[index].own_inputs if unit.kind == "block" else (0,),
        reached=index not in structure.unused
        or size.used_by != (index,)
        or any(part.name in arrived for part in chunk.slices),
        stays=stays,
        runs_once=structure.once.get(index, unit.repeats),
        reads=keep[index].reads,
        gets=keep[index].gets,
    )


def _leaner(either: FormCost, keep: FormCost, forms: Sequence[FormCost]) -> Iterator[FormCost]:
    """The last part's forms that need less at most than `either`, its costs in `keep`.

    They were measured with the blocks in `keep`, as `keep` was, and with other forms of the blocks
    they take as much more as it does.
    """
    for form in forms:
        higher = replace(
            form,
            **{
                name: getattr(form, name) + getattr(either, name) - getattr(keep, name)
                for name in ("forward_peak_bytes", "kept_bytes", "backward_peak_bytes")
            },
        )
        if _most(higher) < _most(either):
            yield higher


def _most(cost: FormCost) -> int:
    """The most bytes that a unit needs with such activations, in forward and in backward."""
    return max(cost.forward_peak_bytes, cost.kept_bytes + cost.backward_peak_bytes)


def _worthwhile(forms: Sequence[FormCost]) -> list[FormCost]:
    """The forms that a block's record names, of those in the order of `FORMS`.

    A form of partial recomputation has to hold less than every form that recomputes less, and more
    than the input: one that a block cannot take keeps nothing else. One that keeps no more than
    `full` has to need less while it runs, or to be other code (`in_graph`). A form that keeps has
    to hold less than `keep` itself.
    """
    full = next((form for form in forms if form.form == "full"), None)
    held = 0 if full is None else full.kept_bytes
    chosen: list[FormCost] = []
    least = forms[0].kept_bytes  # of `keep`, then of the forms of partial recomputation
    for form in forms:
        recomputes = FORMS[form.form].recomputes
        if form.form in ("keep", "full"):
            chosen.append(form)
        elif full is not None and recomputes and form.kept_bytes <= held:
            other_code = FORMS[form.form].in_graph and replace(form, form="full") != full
            if other_code or _most(form) < _most(full):
                chosen.append(form)
        elif (held if recomputes else 0) < form.kept_bytes < least:
            chosen.append(form)
            least = form.kept_bytes if recomputes else least
    return chosen
