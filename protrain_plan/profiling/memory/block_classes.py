"""Equal blocks run once: a few of each class run, stubs replace the others.

A class has blocks with the same structure, the same operators on tensors of the same shapes, the
same inputs shared with other blocks or saved for backward, and outputs of the same kind, saved by
the next unit or not. Its first two members and its last one run. A stub returns outputs of the
right shapes, and saves the inputs that its block saves: their lifetime counts for their maker, such
as a part that adds a residual outside the blocks. It keeps nothing else for backward, gives its
parameters no gradients and never touches them, so they may be on `meta`.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from protrain_plan.models.batches import Batch, call_model
from protrain_plan.profiling.memory.lasting import identities
from protrain_plan.profiling.memory.passes import SlotWatch, watched
from protrain_plan.profiling.memory.saved import Packed, TrackedStorages
from protrain_plan.profiling.structure.discovery import FoundUnit, undisturbed
from protrain_plan.profiling.structure.dispatching import NothingCompiled
from protrain_plan.profiling.structure.faking import asked
from protrain_plan.profiling.structure.rerun import writing_arguments
from protrain_runtime.activations.compiled import replace_code
from protrain_runtime.activations.trees import is_value, tensors_in, written_arguments
from protrain_runtime.contract.records.profile import Unit


class _Handed(NamedTuple):
    """An output that is an input tensor itself."""

    position: int


class _Made(NamedTuple):
    """An output made by the block."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class _Outputs:
    """A block's result: a tree of made or passed-on tensors, and of other values."""

    tree: TreeSpec
    leaves: tuple[object, ...]
    saves: tuple[int, ...]  # positions of inputs saved for backward

    @property
    def made(self) -> tuple[_Made, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, _Made))


@dataclass(frozen=True, slots=True)
class BlockClasses:
    """Which units run: `representatives[u]` is u itself, or the unit equal to u."""

    representatives: tuple[int, ...]
    outputs: Mapping[int, _Outputs]  # of units that do not run, in order


def equal_blocks(
    model: nn.Module, found: Sequence[FoundUnit], batch: Batch, *, alone: Container[int] = ()
) -> BlockClasses:
    """Find the classes, from one forward of everything. Fake tensors work too.

    Blocks that run: those in `alone`; those that share parameters with other units; those whose
    outputs require gradients though no input does; and those that save their own output for
    backward, which the next block reads too, and a stub would not show. Nor would a stub show a
    block's tensors held outside the next unit: an output that the model's code holds, writes to or
    passes to several units, or tensors in a context or an attribute. A stub cannot write to its
    arguments, or return values other than tensors and plain values.
    """
    with writing_arguments([unit.module for unit in found]) as written:
        seen = _observed(model, found, batch)
    shared = {name for unit in found for name in unit.also_uses}
    readers: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for index, block in seen.items():
        for storages in block.inputs:
            readers[storages].add(index)
    classes: dict[object, list[int]] = defaultdict(list)
    for index, block in seen.items():
        unit = found[index]
        starts_gradients = any(m.requires_grad for m in block.outputs.made) and not block.gradients
        runs = starts_gradients or block.saves_output or block.stays or bool(unit.also_uses)
        leaves = block.outputs.leaves
        can_be_made = all(isinstance(leaf, _Handed | _Made) or is_value(leaf) for leaf in leaves)
        runs = runs or index in written.anything or not can_be_made
        if index in alone or runs or shared.intersection(unit.parameters):
            continue
        foreign = tuple(s if len(readers[s]) > 1 else None for s in block.inputs)
        returned = tuple((type(leaf), leaf) for leaf in leaves)
        kind = str(block.outputs.tree), returned, block.output_is_saved
        classes[unit.signature, block.geometry, foreign, kind, block.outputs.saves].append(index)
    representatives = list(range(len(found)))
    for members in classes.values():
        for index in members[2:-1]:
            # Autograd may run the backward of code before a block in the block's slot, such as a
            # loss beside it: a stub would include it, but not the block it replaces.
            if seen[index].before == seen[members[1]].before:
                representatives[index] = members[1]
    return BlockClasses(
        tuple(representatives),
        {u: seen[u].outputs for u, other in enumerate(representatives) if u != other},
    )


@contextmanager
def stubs_in_place(found: Sequence[FoundUnit], block_classes: BlockClasses) -> Iterator[None]:
    """The model with stubs for blocks that need not run."""
    with ExitStack() as stack:
        for index, outputs in block_classes.outputs.items():
            module = found[index].module
            assert module is not None, "parts always run"
            stack.callback(replace_code(module, partial(_stub, outputs)))
        yield


def filled(units: Sequence[Unit], block_classes: BlockClasses) -> list[Unit]:
    """The units with the costs of those that ran for all of their class.

    Their backward peaks are counted above the gradients of later units that arrived, so that those
    which stubs did not make are not missed.
    """
    return [
        replace(
            unit,
            forms=units[other].forms,
            own_inputs=units[other].own_inputs,
            gradient_bytes=units[other].gradient_bytes,
            gradient_pieces=units[other].gradient_pieces,
            stays=units[other].stays,
        )
        for unit, other in zip(units, block_classes.representatives, strict=True)
    ]


@dataclass(slots=True)
class _Block:
    """One block's arguments and result."""

    inputs: tuple[tuple[int, ...], ...]  # each tensor's storage identities
    geometry: tuple[object, ...]  # of the inputs
    gradients: bool  # some input requires a gradient
    outputs: _Outputs
    before: list[object]  # operators since the block before
    saves_output: bool  # an output of its own is saved for its backward
    output_is_saved: bool = False  # by the next unit
    # Some of its tensors are held when the unit after the next begins, or are written to.
    stays: bool = False


class _Making(NothingCompiled, TorchDispatchMode):
    """Records the blocks' tensors, and which of them others than autograd hold afterwards."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = TrackedStorages()
        self._block = -1  # the running one
        self._made: dict[int, set[int]] = {}
        self._saved_here: set[int] = set()  # by the running block
        self.outputs: dict[int, set[int]] = {}  # of blocks, made by them
        self.saved: set[int] = set()
        self.staying: set[int] = set()  # blocks
        self.before: list[object] = []  # operators since the last block

    def pack(self, tensor: Tensor) -> Packed:
        keys = identities([tensor])
        self.saved |= keys
        self._saved_here |= keys
        return self._known.of(tensor).pack(tensor)

    def keys(self, tensors: Iterable[Tensor]) -> set[int]:
        """The identities of the tensors' storages from here on."""
        return {self._known.of(tensor).key for tensor in tensors}

    def begin(self, block: int) -> None:
        """A block begins: tensors of blocks that ended before the last one should be gone."""
        for other, outputs in self.outputs.items():
            if other != self._block and self._held(outputs):
                self.staying.add(other)
        self._block, self._made[block], self._saved_here = block, set(), set()

    def end(self, block: int, outputs: set[int]) -> set[int]:
        """A block has ended: only its outputs should be left. Returns its saved storages."""
        self.outputs[block] = outputs
        if self._held(self._made.pop(block) - outputs):
            self.staying.add(block)
        return self._saved_here

    def _held(self, keys: Iterable[int]) -> bool:
        return any(self._known[key].held_elsewhere() for key in keys)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return asked(func, args, kwargs or {})
        if func._schema.is_mutable:  # perhaps of a block's output, after its end
            written = identities(written_arguments(func, args, kwargs or {}))
            self.staying |= {block for block, made in self.outputs.items() if made & written}
        result = func(*args, **(kwargs or {}))
        made = self._made.get(self._block)
        if made is None:
            sizes = tuple((t.shape, t.dtype) for t in tensors_in(result))
            self.before.append((func, sizes, torch.is_grad_enabled()))
        else:
            given = identities(t for t in tensors_in((args, kwargs)) if t.layout is torch.strided)
            for tensor in tensors_in(result):
                if tensor.layout is torch.strided and identities([tensor]).isdisjoint(given):
                    made |= self.keys([tensor])
        return result


def _observed(model: nn.Module, found: Sequence[FoundUnit], batch: Batch) -> dict[int, _Block]:
    seen: dict[int, _Block] = {}
    making = _Making()

    def after(index: int, _: nn.Module, args: object, kwargs: object, output: object) -> None:
        inputs = tensors_in((args, kwargs))
        operators, making.before = making.before, []
        made = making.keys(tensors_in(output)) - making.keys(inputs) - identities(inputs)
        own = making.end(index, made)
        leaves, tree = tree_flatten(output)
        seen[index] = _Block(
            inputs=tuple(tuple(identities([tensor])) for tensor in inputs),
            geometry=tuple((t.shape, t.dtype, t.layout, t.requires_grad) for t in inputs),
            gradients=any(tensor.requires_grad for tensor in inputs),
            outputs=_Outputs(
                tree,
                tuple(_leaf(leaf, inputs, leaves) for leaf in leaves),
                tuple(place for place, given in enumerate(inputs) if own & identities([given])),
            ),
            before=operators,
            saves_output=not making.saved.isdisjoint(made),
        )

    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        for index, unit in enumerate(found):
            if unit.module is not None:
                first, last = (lambda *_, index=index: making.begin(index)), partial(after, index)
                stack.callback(unit.module.register_forward_pre_hook(first).remove)
                stack.callback(unit.module.register_forward_hook(last, with_kwargs=True).remove)
        modules = [unit.module for unit in found]
        watch = SlotWatch(lambda *_: None)  # blocks in the model's own checkpoints, too
        stack.enter_context(watched(model, modules, "keep", watch, may_skip=True))
        stack.enter_context(saved_tensors_hooks(making.pack, lambda held: held.tensor))
        stack.enter_context(making)
        call_model(model, batch)
    for index, block in seen.items():
        block.stays = index in making.staying
        block.output_is_saved = not making.saved.isdisjoint(making.outputs[index])
    return seen


def _leaf(leaf: object, inputs: Sequence[Tensor], leaves: Sequence[object]) -> object:
    """The output, described; a bare object where a stand-in cannot make one like it.

    A view, or one of several outputs in the same memory, has gradients that others have, too, and
    one of other strides has gradients of these.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    for position, tensor in enumerate(inputs):
        if leaf is tensor:
            return _Handed(position)
    if leaf.layout != torch.strided or not leaf.is_contiguous():
        return object()
    others = [each for each in (*inputs, *leaves) if isinstance(each, Tensor)]
    if sum(not identities([leaf]).isdisjoint(identities([each])) for each in others) > 1:
        return object()
    return _Made(leaf.shape, leaf.dtype, leaf.requires_grad)


def _stub(outputs: _Outputs, *args: object, **kwargs: object) -> object:
    inputs = tensors_in((args, kwargs))
    made: Iterator[Tensor] = iter(())
    if outputs.made:
        made = iter(_Stub.apply(outputs, *inputs))  # type: ignore[no-untyped-call]
    leaves: list[object] = []
    for leaf in outputs.leaves:
        if isinstance(leaf, _Handed):
            leaves.append(inputs[leaf.position])
        else:
            leaves.append(next(made) if isinstance(leaf, _Made) else leaf)
    result: object = tree_unflatten(leaves, outputs.tree)
    return result


class _Stub(torch.autograd.Function):
    """Outputs from nowhere, and zero gradients; in between it keeps only inputs."""

    @staticmethod
    def forward(ctx: Any, like: _Outputs, *inputs: Tensor) -> tuple[Tensor, ...]:
        made = like.made
        # Something is always saved: a recomputing form holds inputs for dropped tensors.
        ctx.save_for_backward(inputs[0].new_empty(0), *(inputs[place] for place in like.saves))
        ctx.wanted = [(t.shape, t.dtype, t.device) if t.requires_grad else None for t in inputs]
        # Copies of inputs of the same shape: values stay plausible for the model.
        known = {(tensor.shape, tensor.dtype): tensor for tensor in reversed(inputs)}
        found: list[Tensor] = []
        for output in made:
            if (like_it := known.get((output.shape, output.dtype))) is not None:
                found.append(like_it.detach().clone())
            else:
                found.append(torch.zeros(output.shape, dtype=output.dtype, device=inputs[0].device))
        outputs = tuple(found)
        ctx.mark_non_differentiable(
            *(t for t, output in zip(outputs, made, strict=True) if not output.requires_grad)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (
            None if wanted is None else torch.zeros(wanted[0], dtype=wanted[1], device=wanted[2])
            for wanted in ctx.wanted
        )
        return None, *zeros
