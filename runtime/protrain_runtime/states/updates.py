"""The optimizer's step on offloaded chunks: pieces of a chunk, and threads that split them.

A piece is a range of a chunk's trainable elements on its way through the optimizer. A host
optimizer is bound by one processor's bandwidth, so several work on a piece.

[Note: PyTorch's threads or threads of ours] Fused kernels of Adam split a tensor among PyTorch's
own threads by whole cache lines: bits do not depend on their number. One call then updates a piece,
and the interpreter is free for the thread that launches compute. Other operators cut a tensor
anywhere, and compute the remainder of a vector with other instructions (such as SGD's of bfloat16).
For these, each range of a piece is updated by its own optimizer of the user's class, on a thread
with one intra-op thread.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from protrain_runtime.contract.program.program import LONGEST_SPAN
from protrain_runtime.devices.device import on_host
from protrain_runtime.devices.lanes import started_pool, take_threads
from protrain_runtime.devices.preflight import ranks_here
from protrain_runtime.devices.stores import HostStore, Store, copies
from protrain_runtime.states.chunks import Chunk, Copy, Cut, Slice, StateKind, StateLayout
from protrain_runtime.states.compositions import put_together, taken_apart
from protrain_runtime.states.kept_steps import KeptRanges, Options, Range, Shadow, Span
from protrain_runtime.states.known_optimizers import known
from protrain_runtime.states.master_weights import MasterOptimizer
from protrain_runtime.states.stand_ins import GradientInStore
from protrain_runtime.states.stepping import OptimizerFactory, attributes_of
from protrain_runtime.states.trials import ElementRange

SMALLEST_RANGE = 2**17
"""Elements that are worth a thread: about 150 us of AdamW's step, several times what handing a
range to a thread and back takes (`docs/decisions/seconds.md`)."""


def spare_threads(device: torch.device) -> int:
    """The number of threads, at least 1, that update chunks in host memory.

    Beside an accelerator: this process's threads, minus one that launches its work. Each of several
    ranks has its share of the node's processors: torchrun leaves them one thread each, by
    OMP_NUM_THREADS, unless set. On a CPU one thread updates beside compute.
    """
    if on_host(device):
        return 1
    ranks = ranks_here()
    launched = ranks > 1 and os.environ.get("OMP_NUM_THREADS") == "1"
    threads = len(os.sched_getaffinity(0)) // ranks if launched else torch.get_num_threads()
    return max(1, threads - 1)


def updates_by_lines(optimizer: torch.optim.Optimizer) -> bool:
    """Whether PyTorch's own threads may split its steps (see the note above)."""
    kind = optimizer.kind if isinstance(optimizer, MasterOptimizer) else type(optimizer)
    return known(kind).by_lines and all(group.get("fused") for group in optimizer.param_groups)


class UpdateTeam:
    """The update lane's thread, and `num_threads` - 1 more: PyTorch's in it, or helpers.

    See [Note: PyTorch's threads or threads of ours]. `inside` are the lane thread's own. Must be
    made on a thread with the process's number of intra-op threads.
    """

    def __init__(
        self,
        num_threads: int = 1,
        *,
        by_lines: bool = False,
        smallest: int = SMALLEST_RANGE,
        longest: int = LONGEST_SPAN,
    ) -> None:
        self.inside = num_threads if by_lines else 1
        self.num_threads = num_threads // self.inside
        self.longest = longest * self.inside
        self._smallest = smallest
        self._helpers: ThreadPoolExecutor | None = None
        if self.num_threads > 1:
            threads = torch.get_num_threads()
            self._helpers = started_pool(self.num_threads - 1, "update", initializer=take_threads)
            # Setting their own number also changed the default of later threads.
            torch.set_num_threads(threads)

    def ranges(self, lengths: Sequence[int], cuts: Sequence[Cut] = ()) -> list[list[ElementRange]]:
        """Each thread's ranges of tensors of these lengths, cut by `cuts`."""
        most = max(1, sum(lengths) // self._smallest)
        return ranges(lengths, min(self.num_threads, most), longest=self.longest, cuts=cuts)

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run all tasks, the first one here; raise an error when all have ended."""
        assert len(tasks) <= self.num_threads
        if len(tasks) == 1:
            tasks[0]()
            return
        others = [self._helpers.submit(task) for task in tasks[1:]] if self._helpers else []
        try:
            for task in tasks[:1]:
                task()
        finally:
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        if self._helpers is not None:
            self._helpers.shutdown()


def ranges(
    lengths: Sequence[int], count: int, *, longest: int, cuts: Sequence[Cut] = ()
) -> list[list[ElementRange]]:
    """At most `count` ranges of about equal numbers of elements, over tensors of these lengths.

    Tensors are cut by `cuts`, at multiples of PIECE_ALIGNMENT by default, with spans no longer than
    `longest` if there is a cut for that.
    """
    ends = [sum(lengths) * number // count for number in range(1, count + 1)]
    shares: list[list[ElementRange]] = [[] for _ in ends]
    number = done = 0
    for tensor, length in enumerate(lengths):
        may_cut = cuts[tensor] if cuts else Cut()
        start = 0
        while start < length:
            room = ends[number] - (done + start)
            rest = length - start
            last = number == len(ends) - 1
            taken = rest if room >= rest or last else may_cut.before(room, rest)
            if taken <= 0:
                number += 1
                continue
            if taken > (most := min(longest, may_cut.most)):
                taken = may_cut.before(most, rest) or taken
            shares[number].append(ElementRange(tensor, start, start + taken))
            start += taken
        done += length
    return [share for share in shares if share]


_PARAMETERS, _GRADIENTS = "parameters ", "gradients "
"""Keys for these among the elementwise states, whose keys are names."""


class _Staged(NamedTuple):
    """Staged values of one kind of states, from index `first` of their region on."""

    values: torch.Tensor
    first: int

    def of(self, layout: StateLayout, part: Slice, low: int, count: int) -> torch.Tensor:
        """The values of `count` elements, from one of a parameter on."""
        begin = layout.value(part.name, low) - self.first
        return self.values[begin : begin + layout.rule.count(count)]


class _Due(NamedTuple):
    """Elements of a parameter with gradients, and the gradients' factors."""

    span: Span
    elements: torch.Tensor  # of gradients  # [elements]
    factors: Sequence[torch.Tensor]
    waits: bool  # the gradients have waited below the device


@dataclass(slots=True)
class Piece:
    """A range of a chunk's trainable elements on its way through the optimizer.

    `staging` holds one tensor per kind of states, filled by "read states" and written back by
    "write states"; before the first step it is empty, and the optimizer makes the states. With
    `stands` they are the store's own bytes. By parameter name, `waiting` are the chunk's gradients
    below the device, `parameters` the piece's elements, on the optimizer's device, and `gradients`
    those of gradients that waited on disk. A piece refers to nothing outside its range: the rest
    may leave the device first.

    It reads the states' current copy at its making. If `apart`, it writes all of its range to the
    chunk's spare copy, also unchanged values. If it `keeps`, it is used in every step: its staging,
    and everything else, stays in place. Then `kept` are its optimizers, as long as these are valid.
    """

    chunk: Chunk
    start: int
    stop: int
    waiting: Mapping[str, GradientInStore] = field(default_factory=dict[str, GradientInStore])
    staging: dict[StateKind, _Staged] = field(default_factory=dict[StateKind, _Staged])
    parameters: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    made: list[tuple[Shadow, dict[str, Any]]] = field(
        default_factory=list[tuple[Shadow, dict[str, Any]]]
    )
    stands: bool = False
    apart: bool = False
    keeps: bool = False
    reads: list[tuple[int, torch.Tensor]] = field(default_factory=list[tuple[int, torch.Tensor]])
    kept: KeptRanges | None = None
    stepped: tuple[list[Range], "UpdateTeam"] | None = None
    source: Copy = field(init=False)
    target: Copy = field(init=False)
    parts: list[Span] = field(init=False)

    def __post_init__(self) -> None:
        trainable = [part for part in self.chunk.slices if part.trainable]
        covered = [
            Span(part, max(self.start - part.start, 0), min(self.stop - part.start, part.numel))
            for part in trainable
        ]
        self.parts = [span for span in covered if span.low < span.high]
        self.source = self.target = self.chunk.current
        if self.apart:
            assert self.chunk.spare is not None
            self.target = self.chunk.spare

    def _states(self) -> Iterator[tuple[StateLayout, int, int, int]]:
        """The piece's kinds of states: first value, its offset, and bytes."""
        for layout in self.source.states:
            own = [one for one in self.parts if one[0].name in layout.starts]
            if own:
                (first, low, _), (last, _, high) = own[0], own[-1]
                value, width = layout.value(first.name, low), layout.dtype.itemsize
                count = layout.value(last.name, 0) + layout.rule.count(high) - value
                yield layout, value, layout.offset + value * width, count * width

    def ring_bytes(self, *, parameters: bool, gradients: bool) -> int:
        """Bytes of `read`'s staging buffer."""
        states = sum(num_bytes for *_, num_bytes in self._states())
        widths = [part.dtype.itemsize for part, _, _ in self.parts][:1]
        return states + (parameters + gradients) * (self.stop - self.start) * sum(widths)

    def read(self, ring: torch.Tensor, *, parameters: bool, gradients: bool) -> None:
        """Fill the staging tensors in `ring` with the optimizer's inputs from the store."""
        if self.kept is not None:
            self.kept.read()
        else:
            assert self.chunk.store is not None
            self._place(ring, parameters=parameters, gradients=gradients)
            for place, target in self.reads:
                self.chunk.store.start_read(place, target)
        for part, low, _ in self.parts if gradients else ():
            if (stored := self.waiting.get(part.name)) is not None:
                place = stored.offset + low * part.dtype.itemsize
                stored.store.start_read(place, self.gradients[part.name].view(torch.uint8))

    def _place(self, ring: torch.Tensor, *, parameters: bool, gradients: bool) -> None:
        """Assign places in `ring` to what is read."""
        states = list(self._states())
        wanted: list[tuple[StateKind | str, torch.dtype, int]] = [
            (layout.kind, layout.dtype, num_bytes) for layout, _, _, num_bytes in states
        ]
        for dtype in [part.dtype for part, _, _ in self.parts][:1]:
            size = (self.stop - self.start) * dtype.itemsize
            wanted += [(_PARAMETERS, dtype, size)] * parameters
            wanted += [(_GRADIENTS, dtype, size)] * gradients
        regions: dict[StateKind | str, torch.Tensor] = {}
        offset = 0
        # Wide elements first: the following ones are then aligned.
        for region, dtype, size in sorted(wanted, key=lambda one: -one[1].itemsize):
            regions[region] = ring[offset : offset + size].view(dtype)
            offset += size
        self.reads = []
        for layout, first, place, _ in states if self.source.updated else ():
            self.staging[layout.kind] = _Staged(regions[layout.kind], first)
            self.reads.append((place, regions[layout.kind].view(torch.uint8)))
        for part, low, high in self.parts:
            here = slice(part.start + low - self.start, part.start + high - self.start)
            if parameters:
                self.parameters[part.name] = regions[_PARAMETERS][here]
            if gradients:
                self.gradients[part.name] = regions[_GRADIENTS][here]
        if parameters:
            self.reads += _joined(self._placed(self.source, self.parts))

    def view_device(self) -> None:
        """Use the parameters in place, on the device."""
        if self.kept is not None:
            return
        for part, low, high in self.parts:
            own = part.flat(self.chunk.buffers[part.group])
            self.parameters[part.name] = own if high - low == part.numel else own[low:high]

    def view_store(self) -> None:
        """Use the parameters and their states in place, in a host store."""
        store = self.chunk.store
        assert isinstance(store, HostStore)
        self.stands = True
        for part, low, high in self.parts:
            size = part.dtype.itemsize
            own = store.view(self.source.place(part) + low * size, (high - low) * size)
            self.parameters[part.name] = own.view(part.dtype)
        for layout, first, place, size in self._states() if self.source.updated else ():
            values = store.view(place, size).view(layout.dtype)
            self.staging[layout.kind] = _Staged(values, first)

    def update(
        self,
        factory: OptimizerFactory,
        options: Options,
        gradients: Mapping[str, torch.Tensor],
        team: UpdateTeam | None = None,
    ) -> None:
        """The optimizer's step on this range, by the team's threads if there is one.

        `options` are the hyperparameters by parameter name, `gradients` those of the piece's
        elements that did not wait below the device, flat in storage order. Elementwise optimizers
        update each element separately: a range gets the whole's bits, and every range starts from
        the same scalars.
        """
        kept = self.kept
        if kept is not None and kept.begin(options, self.waiting, gradients):
            if kept.step():
                return
            stepped = kept.ranges
        else:
            due = list(self._due(gradients))
            if team is None:
                # Device kernels have their own threads: the larger, the better.
                team = UpdateTeam(longest=sum(one.elements.numel() for one in due))
            lengths = [one.elements.numel() for one in due]
            cuts = [self.chunk.cut_of(one.span.part) for one in due]
            # Not in their threads: the first optimizer of a class changes the class.
            stepped = [
                self._range(factory, options, [(due[i], start, stop) for i, start, stop in share])
                for share in team.ranges(lengths, cuts)
            ]
            for each in stepped:
                if isinstance(each.worker, MasterOptimizer):
                    # At most the piece's workspace, which is counted for all of its elements.
                    elements = sum(one.parameter.numel() for one in each.shadows)
                    each.worker.room_elements = min(elements, team.longest)
            team.run([each.step for each in stepped])
            self.stepped = (stepped, team) if self.keeps else None
        self.kept = None
        for each in stepped:
            states = map(taken_apart, each.states())
            self.made += zip(each.shadows, states, strict=True)

    def _due(self, gradients: Mapping[str, torch.Tensor]) -> Iterator[_Due]:
        """The available gradients, from wherever they are."""
        for part, low, high in self.parts:
            elements, factors = gradients.get(part.name), list[torch.Tensor]()
            stored, waits = self.waiting.get(part.name), elements is None
            # Some rank may have had a waiting one, or none.
            if waits and stored is not None and (stored.count is None or stored.count.item()):
                elements = self.gradients.get(part.name)
                if elements is None:  # in host memory
                    assert isinstance(stored.store, HostStore)
                    size = stored.dtype.itemsize
                    values = stored.store.view(stored.offset + low * size, (high - low) * size)
                    elements = values.view(stored.dtype)
                # Once, not in every thread: a factor may be on a device.
                factors = [factor.to(elements.device) for factor in stored.factors]
            if elements is not None:
                yield _Due(Span(part, low, high), elements, factors, waits)

    def _range(
        self,
        factory: OptimizerFactory,
        options: Options,
        ranges: Sequence[tuple[_Due, int, int]],
    ) -> Range:
        """An optimizer over these elements and gradients."""
        shadows: list[Shadow] = []
        for due, start, stop in ranges:
            part, low, _ = due.span
            parameter = nn.Parameter(self.parameters[part.name][start:stop])
            vars(parameter).update(attributes_of(part.parameter))
            parameter.grad = due.elements[start:stop]
            staged: dict[str, torch.Tensor] | None = None
            if part.name in self.source.updated:
                staged = {
                    one.key: self.staging[one.kind].of(one, part, low + start, stop - start)
                    for one in self.source.of(part)
                    if one.kind in self.staging
                }
            shadows.append(
                Shadow(
                    parameter=parameter,
                    name=part.name,
                    span=Span(part, low + start, low + stop),
                    ends=low + stop == part.numel,
                    staged=staged,
                    waits=due.waits,
                )
            )
        made = Range.of(factory, shadows, options)
        for (due, *_), one in zip(ranges, shadows, strict=True):
            assert one.parameter.grad is not None
            if due.factors:
                made.factors.append((one.parameter.grad, due.factors))
            if one.staged is None:
                continue
            chosen, place = options[one.name], one.parameter.device
            # A fused optimizer's counters are on its device, a table is with its codes.
            moved = chosen.get("fused") or chosen.get("capturable")
            state = {
                key: value.to(place if moved or value.numel() > 1 else value.device, copy=True)
                if isinstance(value, torch.Tensor)
                else value
                for key, value in self.source.scalars[one.name].items()
            }
            state.update(one.staged)
            made.worker.state[one.parameter] = put_together(state, one.parameter.shape)
        return made

    def write_made(self) -> None:
        """Write states that the optimizer made outside of staging, in its own stream."""
        store = self.chunk.store
        assert store is not None
        for shadow, state in self.made:
            part, low, _ = shadow.span
            for layout in self.target.of(part):
                values = state[layout.key]
                if not self._staged(layout, part, low, values):
                    store.start_write(layout.place(part.name, low), values.view(torch.uint8))
                    del state[layout.key]

    def _staged(self, layout: StateLayout, part: Slice, low: int, values: torch.Tensor) -> bool:
        """Whether values from this element on are in staging."""
        staged = self.staging.get(layout.kind)
        if staged is None:
            return False
        begin = (layout.value(part.name, low) - staged.first) * layout.dtype.itemsize
        return values.data_ptr() == staged.values.data_ptr() + begin

    def write(self, *, parameters: bool) -> None:
        """Write the new states; a parameter's last range sets its scalars."""
        store = self.chunk.store
        assert store is not None
        if self.kept is None:
            self._write_made(store, parameters=parameters)
        else:
            self.kept.write()
        self.waiting = {}
        if not self.keeps:
            self.parameters.clear()
            self.staging.clear()
            self.gradients.clear()

    def _write_made(self, store: Store, *, parameters: bool) -> None:
        """Write new optimizers' states, and keep these optimizers if reusable."""
        stepped = {shadow.name for shadow, _ in self.made}
        # By region of the store: adjacent values of many parameters are one write.
        writes = defaultdict[StateKind, list[tuple[int, torch.Tensor]]](list)
        changed = [span for span in self.parts if span.part.name in stepped or self.apart]
        parameters_written = _joined(self._placed(self.target, changed)) if parameters else []
        for part, low, high in self.parts if self.apart else ():
            if part.name in stepped:
                continue
            # The states of a parameter without a gradient are copied, unchanged.
            if part.name not in self.source.updated:
                self.target.updated.discard(part.name)
                continue
            for layout in self.target.of(part):
                values = self.staging[layout.kind].of(layout, part, low, high - low)
                store.start_write(layout.place(part.name, low), values.view(torch.uint8))
            if high == part.numel:
                self.target.scalars[part.name] = self.source.scalars[part.name]
                self.target.updated.add(part.name)
        for shadow, state in self.made:
            part, low, _ = shadow.span
            for layout in self.target.of(part):
                values = state.pop(layout.key, None)
                if values is None or (self.stands and self._staged(layout, part, low, values)):
                    continue  # already written, or the store's own bytes
                place = layout.place(part.name, low)
                writes[layout.kind].append((place, values.view(torch.uint8)))
        states_written = [pair for region in writes.values() for pair in _joined(region)]
        for place, values in (*parameters_written, *states_written):
            store.start_write(place, values)
        for shadow, state in self.made:
            if shadow.ends:
                self.target.scalars[shadow.name] = state
                self.target.updated.add(shadow.name)
        self.made.clear()
        if self.stepped is None:
            return
        ranges, team = self.stepped
        self.stepped = None
        for each in ranges:
            for shadow, state in zip(each.shadows, each.states(), strict=True):
                if not (each.usual and shadow.in_place(state)):
                    return
                if not (shadow.waits or shadow.span in self.parts):
                    return  # its gradient is a new tensor each time and is consumed whole
        self.kept = KeptRanges(
            ranges,
            team.run,
            parts=self.parts,
            copy=self.source,
            waiting=self.waiting,
            read=copies(store, self.reads, writes=False),
            write=copies(store, parameters_written + states_written, writes=True),
        )

    def _placed(self, copy: Copy, parts: Sequence[Span]) -> Iterator[tuple[int, torch.Tensor]]:
        """The bytes of these parameters, and their offsets in a copy."""
        for part, low, _ in parts:
            place = copy.place(part) + low * part.dtype.itemsize
            yield place, self.parameters[part.name].view(torch.uint8)


def _joined(writes: Iterable[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    """Writes to one region, merged if adjacent there and in memory."""
    found: list[tuple[int, torch.Tensor]] = []
    for place, values in sorted(writes, key=lambda write: write[0]):
        if found:
            start, before = found[-1]
            size = before.numel()
            follows = place == start + size and values.data_ptr() == before.data_ptr() + size
            mine, its = values.untyped_storage(), before.untyped_storage()
            if follows and mine.data_ptr() == its.data_ptr():
                found[-1] = start, before.as_strided((size + values.numel(),), (1,))
                continue
        found.append((place, values))
    return found
