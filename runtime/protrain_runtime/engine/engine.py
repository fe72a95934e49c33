"""The engine: runs the slots of a `Program` while the model computes.

A step is one program or several: micro-batches before the updating one have their own. At every
boundary of `Boundaries` the engine follows the program around a slot, in order: wait for evictions,
submit fetches, wait for the slot's inputs, compute, release, submit outputs. A forward without a
graph is an `EvaluationPass`.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize

from protrain_runtime.activations.forms import around
from protrain_runtime.activations.saved_tensors import Begun, ByPointer, SavedTensors
from protrain_runtime.activations.twice import RAN, end_runs
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import COLLECT, UPDATE_ON_DEVICE, Lane, Program
from protrain_runtime.contract.records.plan import KEEP
from protrain_runtime.devices.lanes import LaneError, Ticket, WorkLane, is_held, nothing
from protrain_runtime.devices.memory_meter import addresses
from protrain_runtime.devices.thread_guard import ThreadGuard
from protrain_runtime.engine.boundaries import Boundaries, Listener, in_backward
from protrain_runtime.engine.evaluation import EvaluationPass
from protrain_runtime.engine.moves import Moves
from protrain_runtime.engine.state import (
    MemorySnapshot,
    Phase,
    StepState,
    Table,
    has_no_gradients,
    memory_snapshot,
    refuse_unzeroed_gradient,
    speculation_holds,
    unzeroed_gradient,
)
from protrain_runtime.engine.step_times import StepTimes
from protrain_runtime.states.chunks import Chunk, Slice, bring_foreign, refuse_reading
from protrain_runtime.states.stand_ins import ConsumedGradient, plainly
from protrain_runtime.states.unchanged_model import UnchangedModel

Observer = Callable[[str], None]
"""Called at every boundary: "begin", "slot 3" when what must leave before slot 3 has left, and
"backward ended"."""


class Engine(Listener):
    """Executes the programs of a step.

    The program of `moves` ends with the update of offloaded chunks, and is for a clipped step:
    repeats of speculative updates are left out of others. `accumulating` is the program of an
    earlier micro-batch. `step_on` is the optimizer's step on one persistent chunk. Ranks have equal
    `shared_buffers`.
    """

    def __init__(
        self,
        moves: Moves,
        accumulating: Program,
        *,
        step_on: Callable[[Chunk], None],
        shared_buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        program, plans, chunks, backend = moves.program, moves.plans, moves.chunks, moves.backend
        self.program, self._accumulating = program, accumulating
        self._program = program  # of the current micro-batch
        self._tables = {id(each): Table.of(each, plans) for each in (program, accumulating)}
        self._table = self._tables[id(program)]
        self._plans, self._chunks, self._num_units = plans, chunks, program.num_units
        self._moves, self._ranks, self._buffers = moves, moves.ranks, shared_buffers
        # Storages that stay. Not those of offloaded parameters: the first gather frees their
        # stand-ins, and an activation may reuse the address. Nor those of buffers, which a forward
        # may replace; modules hold these anyway.
        staying = [chunk for chunk in chunks if chunk.store is None]
        self._shared = addresses([each for chunk in staying for each in chunk.parameters])
        self._step_on = step_on
        self.observer: Observer | None = None
        # Owned by the model, alive as long as it: begins parts, and checks the model before a step.
        self.boundaries: Callable[[], Boundaries | None] = lambda: None
        self.unchanged: Callable[[], UnchangedModel | None] = lambda: None
        # Called before optimizer states are read or updated, with updating=True before a forward
        # whose backward updates: writes back the loans of states.
        self.before_states_move: Callable[..., object] = lambda **_: None
        self.refuses_views = True  # of parameters, held across steps
        self.held_views: set[int] = set()  # units with views held after the forward
        self._passed_on: set[int] = set()  # units with views held after their slot
        self._read_early: set[int] = set()  # units read by backward before their slot
        self.gathered = ""  # the holder of parameters on the device: `full_parameters`
        self._modified = False  # parameters may change there
        self._lent: EvaluationPass | None = None
        self.recorder: StepTimes | None = None  # of steps of `program`
        self._times: StepTimes | None = None  # the recorder, during such a step
        self.lanes: dict[Lane, WorkLane] = {
            lane: backend.lane(
                str(lane),
                on_device=lane == UPDATE_ON_DEVICE
                or (lane.tier == "host" and lane.direction != "update"),
                num_threads=moves.update_threads if lane.direction == "update" else 1,
            )
            for lane in sorted({move.lane for move in program.moves} - {COLLECT}, key=str)
        }
        if self._ranks is not None:
            self.lanes[COLLECT] = backend.lane(str(COLLECT), on_device=True, patient=True)
        self._offloaded = [chunk for chunk in chunks if chunk.store is not None]
        # Chunks not yet seen in use: see [Note: views for good].
        self._unseen = list(self._offloaded) if backend.resizes else []
        self._stepped = [chunks[unit] for slot in program.slots for unit in slot.stepped]
        self.consuming = [*self._offloaded, *self._stepped]  # whose gradients the plan consumes
        for chunk in self.consuming:
            # A lane's work may hold a chunk after the model is gone.
            chunk.bring = partial(_while_alive, WeakMethod(self.bring), chunk.bring)
            chunk.settle = partial(_while_alive, WeakMethod(self.settle), chunk.settle)
        self._reads = [
            [chunk for chunk in self._offloaded if unit in chunk.used_by]
            for unit in range(program.num_units)
        ]
        backward = partial(_while_alive, WeakMethod(self.begin_backward), lambda _: None)
        self._begins = [partial(backward, unit) for unit in range(program.num_units)]
        # Whether parameters have their next values before `optimizer.step()`.
        self.updates_in_backward = program.settings.updates == "in backward"
        updates = self._stepped or any(move.kind == "update" for move in program.moves)
        self._carried: dict[int, Ticket] = {}  # moves still running, mostly from the last step
        self._ahead: dict[int, Ticket] = {}  # the last backward's speculative updates
        self._runs_on = program.running_on
        self._again = program.again
        # By unit, if steps overlap: the last moves of its updates, for which fetches wait.
        self._awaited: dict[int, set[int]] = {unit: {n} for unit, n in program.updates.items()}
        for number in sorted(program.speculative):
            unit, stop = program.moves[number].unit, program.moves[number].stop
            if unit in self._awaited and stop == chunks[unit].num_trainable:
                self._awaited[unit].add(number)
        self._speculating = [chunk for chunk in chunks if chunk.spare is not None]
        self._state = StepState(
            program.num_units,
            program.settings.micro_batches,
            updates_in_backward=bool(updates) and self.updates_in_backward,
        )
        self.thread_guard = ThreadGuard(
            lambda: (boundaries := self.boundaries()) is not None and boundaries.graph_lives
        )
        self._shown: list[Slice] = []  # parameters whose gradients the last backward consumed
        self._given_up: MemorySnapshot | None = None  # of an interrupted forward
        self._reset()

    def _reset(self) -> None:
        self._state.end_slots()
        for chunk in self._offloaded:
            chunk.end_step()
        self._tickets: dict[int, Ticket] = {}
        self._running: set[int] = set()  # submitted, not yet seen to end
        self._saved: SavedTensors | None = None
        self._around: ExitStack | None = None  # around the last part's forward, where it has a form
        self._handed_on: ByPointer | None = None
        self._slots: dict[int, Begun] = {}  # by unit with swapped tensors
        self._evaluation: EvaluationPass | None = None
        self._outputs: frozenset[int] = frozenset()
        self._lingering: list[tuple[int, StorageWeakRef]] = []  # by unit: buffers still referenced

    def begin(self, *, training: bool) -> None:
        self.thread_guard.at_home(
            "the model was called", self.lanes if training else self._offloaded
        )
        if self.recorder is not None or not training:
            self.end_updates()
        if training:
            self.outside("a training step began")
            if parametrize._cache_enabled:
                raise RuntimeError(
                    "the model was called inside torch.nn.utils.parametrize.cached(), which keeps"
                    " computed weights on the device, and a plan counts each in its block alone:"
                    " train outside of cached()"
                )
            if (unchanged := self.unchanged()) is not None:
                unchanged.check()
        if self._state.slot >= 0:
            self._give_up()  # the last forward had no backward, or was interrupted
        self._state.settle("a second forward began" if training else "the model was evaluated")
        none = training and has_no_gradients(self._chunks)
        if training:
            if not none:
                bring_foreign(self._chunks)
            self._refuse_micro_batch(0 if none else self._state.num_backwards)
            self.before_states_move(updating=self._state.updates_in_backward)
        # An error until here has begun nothing on any rank: see `ranks.failure`.
        with self._failing("a forward"):
            if none:
                self._state.num_backwards = 0
            if self._ranks is not None and not self._state.num_backwards and self._buffers:
                # Every rank computes with rank 0's buffers, from the first micro-batch on.
                self._collect("broadcast buffers", partial(self._ranks.broadcast, self._buffers))
            self._times, self._given_up = None, None
            if not training:
                self._observe("begin")
                self._state.evaluate(0)
                self.begin_between()
                return
            for chunk in () if none else self.consuming:
                chunk.hide_consumed()
            any_may_be_last = not self.updates_in_backward and self._ranks is None
            due = self._state.num_backwards + 1 == self._state.micro_batches
            self._program = self.program if any_may_be_last or due else self._accumulating
            self._table = self._tables[id(self._program)]
            self._moves.clear(self._program)
            if self._moves.may_make_staging:
                self.end_updates()  # the first of all leave states to read
            self._moves.make_staging()
            self._observe("begin")
            if self._program is self.program and self.recorder is not None:
                self._times = self.recorder
                self._times.begin()
            self._begin_slot(0, ())

    def begin_between(self) -> None:
        """The model is evaluated, perhaps between its last forward and that forward's backward."""
        self.thread_guard.at_home("the model was evaluated", self._offloaded)
        self.end_updates()
        self._evaluation = self._evaluated(self._offloaded)
        self._enter(0, ())

    def enter(self, slot: int, inputs: Sequence[torch.Tensor]) -> None:
        in_forward = slot < self._num_units or self._state.slot < 0
        if self._ranks is None or in_forward:  # `abort` reports failures of a forward
            self._enter(slot, inputs)
            return
        with self._failing("a backward"):
            self._enter(slot, inputs)

    def _enter(self, slot: int, inputs: Sequence[torch.Tensor]) -> None:
        evaluating = self._state.phase is Phase.EVALUATING
        if not evaluating:
            self.thread_guard.at_home("backward ran", self.lanes)
        if self._evaluation is not None:
            if evaluating:
                self._state.evaluate(slot)
            self._evaluation.enter(slot)
            return
        if self._state.slot < 0:
            raise RuntimeError(
                "backward ran once more through one forward: under this plan a forward has one"
                " backward. Add the losses up, and call backward() on their sum; a loss of"
                " gradients (create_graph=True) trains without a plan"
            )
        while self._state.slot < slot:
            self._end_slot()
            following = self._state.slot + 1
            self._begin_slot(following, inputs if following == slot else ())

    def leave(self, outputs: Sequence[torch.Tensor]) -> None:
        if self._evaluation is not None:
            return
        self._leave_form()
        if self._saved is not None:
            self._outputs = addresses(outputs) if self._saved.swaps else frozenset()
            self._saved.__exit__()  # the rest is not the unit's, even if no slot begins now

    def differentiate(self, unit: int) -> None:
        plan = self._plans[unit]
        if plan.activations == KEEP and plan.states.is_persistent:
            return
        raise RuntimeError(
            f"the forward asks for gradients itself (torch.autograd.grad) through {plan.name!r},"
            " and the plan has taken away what this needs: leave that out of the forward, or train"
            " without a plan"
        )

    def end_forward(self) -> None:
        if self._evaluation is None:
            self._close_saved()  # the last unit's; its slot ends when backward begins
            self.held_views |= {unit for unit, view in self._lingering if not view.expired()}
            for chunk in self._offloaded:
                chunk.refuse_written()
            return
        self._evaluation.end()
        self._evaluation = None
        if self._state.phase is Phase.EVALUATING:
            self._state.end_slots()

    def end_backward(self) -> None:
        with self._failing("a backward"):
            self._enter(len(self._program.slots) - 1, ())
            self._end_slot()
            # A step's updates run on into `optimizer.step()`, which waits for them; an earlier
            # micro-batch's moves are needed, or in the way, in the next forward.
            if not (self._state.updates_in_backward and self._program is self.program):
                self._ahead = {n: self._tickets[n] for n in self._program.speculative}
                self._let_run(self._program.speculative)
                self._end_moves()
                for chunk in self._offloaded:
                    for stored in chunk.offloaded_gradients.values():
                        stored.arrived = True
            for number in self._program.reduced:
                if number in self._running:
                    self._end(number)
            self._moves.give_sums()
            self._moves.pass_boundary(())
            # In the next step, a view of an evicted buffer would show this step's values.
            held = [unit for unit, view in self._lingering if not view.expired()]
            if held and self.refuses_views:
                name = self._plans[held[0]].name
                raise RuntimeError(
                    f"a view of parameters of {name!r} is kept from step to step (in an attribute,"
                    " a list, the graph of an output that is kept, or that of gradients), and the"
                    " plan takes them off the device, so that it would have old values: keep none,"
                    " detach() outputs, leave create_graph=True out, or plan with"
                    f' --pin "{name}: persistent"'
                )
            self._let_last()
            self._state.end_backward()
            self.thread_guard.gradients = True
            self._shown = []
            with plainly():
                for chunk in self.consuming:
                    chunk.show_consumed()
                    for part in chunk.slices:
                        gradient = part.parameter.grad
                        if isinstance(gradient, ConsumedGradient):
                            self._shown.append(part)
                        elif gradient is not None and self._state.updated:
                            self._state.phase = Phase.TORN
                            raise RuntimeError(
                                f"a gradient of {part.name!r} came after the plan had updated it:"
                                " it was used outside of the units that read it when the model was"
                                " profiled. Profile the model as it runs now, and go on from a"
                                " checkpoint"
                            )
            self._observe("backward ended")

    def _let_last(self) -> None:
        """Keep buffers of chunks that a step has shown to be used only in their slots."""
        boundaries = self.boundaries()
        if not self._unseen or boundaries is None:
            return
        skipped = set(boundaries.skipped)
        never = self._passed_on | self._read_early
        for chunk in [chunk for chunk in self._unseen if skipped.isdisjoint(chunk.used_by)]:
            self._unseen.remove(chunk)
            chunk.last(lasts=never.isdisjoint(chunk.used_by))

    def abort(self) -> None:
        """The model raised, perhaps on this rank alone."""
        if self.thread_guard.forked and self.lanes:
            return  # the current step belongs to another process
        try:
            self._cut_short(sys.exception(), "a forward")
        finally:
            self._give_up()

    def backward_failed(self) -> None:
        """Backward raised; the error is not known here."""
        self._cut_short(ProtrainError("see what that rank says"), "a backward")

    def _cut_short(self, error: BaseException | None, what: str) -> None:
        """End this rank's step; report an error to the other ranks, which wait in it."""
        if self._ranks is not None:
            self._state.cut_short = True
            if error is not None:
                self._ranks.meeting.report(error, what, final=True)

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._cut_short(error, what)
            raise

    def _give_up(self) -> None:
        """Give up what is in flight; gradients of earlier micro-batches stay."""
        state = self._state
        in_backward = state.in_backward
        if in_backward and state.updating:
            state.phase = Phase.TORN
        with suppress(MemoryError):  # low memory must not stop the release below
            self._given_up = self.memory_snapshot()
        self._close_saved()
        state.cut_short |= in_backward and self._ranks is not None
        ends = [lane.submit("the end", nothing, ()) for lane in self.lanes.values()]
        for end in ends:
            # Behind everything in flight, even if a signal came before its ticket was noted.
            # Failures were raised where compute waited for them, or do not matter now.
            with suppress(LaneError):
                end.synchronize()
        with suppress(LaneError, RuntimeError):  # then it is torn
            self.end_updates()
        for number in sorted(self._running):
            with suppress(RuntimeError):  # saved, no longer needed
                self._moves.end(number)
        for chunk in self._offloaded:
            chunk.release(chunk.every_group)
        for chunk in self._stepped:
            chunk.put_back()
        for chunk in self.consuming:
            if in_backward:
                chunk.drop_consumed()
                chunk.clear_gradients()
            else:
                chunk.show_consumed()
        if in_backward:
            state.num_backwards = 0
        self._moves.clear(self._program)
        self._reset()

    def memory_snapshot(self) -> MemorySnapshot | None:
        """Bytes in the running slot, or in the one that was given up."""
        stepping = self._state.phase is Phase.STEPPING
        slot = len(self._program.slots) if stepping else self._state.slot
        if slot < 0:
            return self._given_up
        return memory_snapshot(
            slot, self._chunks, *self._moves.in_transit(), device=self._moves.backend.device
        )

    def _refuse_micro_batch(self, done: int) -> None:
        """RuntimeError if gradients, of `done` micro-batches, leave no room for this one."""
        if self._ranks is not None:
            self._ranks.meeting.refuse_lost()
        if self._state.cut_short:
            raise RuntimeError(
                "a forward or backward was cut short on this rank, and the others have gone on:"
                " start all ranks again, from a checkpoint"
            )
        for chunk in self._offloaded:
            chunk.forget_dropped()
        count = self._state.micro_batches
        waiting = any(chunk.offloaded_gradients for chunk in self._offloaded)
        summed = self._ranks is not None and done >= count
        if summed or (waiting and count == 1):
            raise RuntimeError(
                "a second forward began between backward() and optimizer.step(): this plan has room"
                " for the gradients of one backward. Call optimizer.zero_grad() where they are not"
                " wanted, as after the backward of a GAN's other model; to add several up, plan"
                " with --clip --accumulate"
            )

    def settle(self, what: str, *, outside: bool = False) -> None:
        """RuntimeError, with `what`, if only some parameters are updated."""
        self.thread_guard.at_home(what, self._offloaded)
        self.thread_guard.check(what)
        if self._modified or outside:
            self.outside(what)
        self._state.settle(what)
        self.end_updates()
        self.before_states_move()
        for chunk in self._speculating:  # the caller may change the update's inputs
            chunk.speculated = None

    @property
    def updating_soon(self) -> bool:
        """Whether the backward of a begun forward will update states."""
        boundaries = self.boundaries()
        lives = boundaries is not None and (boundaries.running or boundaries.graph_lives)
        under_way = self._state.in_backward or (self._state.slot >= 0 and lives)
        return self._state.updates_in_backward and under_way

    def outside(self, what: str) -> None:
        """RuntimeError, with `what`, inside `full_parameters(model)`."""
        if self.gathered:
            raise RuntimeError(f"{what} inside {self.gathered}: leave it first")

    def check_step(self) -> None:
        """RuntimeError if `optimizer.step()` does not belong here."""
        self.thread_guard.at_home("optimizer.step() was called", self._offloaded)
        self.outside("optimizer.step() was called")
        state = self._state
        if state.phase in (Phase.STEPPING, Phase.TORN):
            self.settle("optimizer.step() was called")
        if not state.num_backwards and (name := unzeroed_gradient(self.consuming)):
            raise RuntimeError(
                f"optimizer.step() was called again after one backward(): the gradient of {name!r},"
                " which is offloaded, is used up. Run a backward() before every step"
            )
        shown = self._shown if state.updated else []
        with plainly():
            replaced = [p for p in shown if not isinstance(p.parameter.grad, ConsumedGradient)]
        if replaced:
            raise RuntimeError(
                f"the gradient of {replaced[0].name!r} was replaced or set to None between"
                " backward() and optimizer.step(): this plan has updated it in backward. Plan with"
                " --clip: updates then come after backward"
            )
        state.refuse_early_step(on_ranks=self._ranks is not None)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """`optimizer.step()`, once accepted."""
        if self._ranks is not None:
            self._ranks.meeting.refuse_lost()
        with self._failing("optimizer.step()"):
            yield

    def together(self, what: str) -> AbstractContextManager[None]:
        """A collective section: it succeeds on all ranks or on none."""
        return nullcontext() if self._ranks is None else self._ranks.meeting.reporting(what)

    def begin_update(self, *, same_options: bool) -> None:
        """Start deferred updates; rerun speculative ones if options changed."""
        self._state.begin_step()
        if self._times is not None:
            self._times.enter(len(self._program.slots))
        if self.updates_in_backward or not self._state.num_backwards:
            return
        bring_foreign(self._chunks)
        for chunk in self._offloaded:
            chunk.forget_dropped()
            chunk.take_gradients()
            if chunk.sharding is not None and chunk.gradients:
                raise RuntimeError(
                    "a gradient was replaced between backward() and optimizer.step(): on several"
                    " devices each one has a part of it; clip it, unscale it, or set it to None"
                )
            chunk.store_replaced()
        # Speculative results are the step's, or are computed again: if gradients are scaled.
        holds = same_options and speculation_holds(self._speculating)
        for number in self.program.last:
            if not (holds and number in self._again):
                self._submit(number)
        for chunk in self._speculating:
            chunk.exchange()

    def _let_run(self, moves: Collection[int]) -> None:
        """Wait for these moves, if running, only when their results are needed."""
        going_on = self._running & set(moves)
        assert self._carried.keys().isdisjoint(going_on), "those of the last step have ended"
        self._carried |= {number: self._tickets[number] for number in going_on}
        self._running -= going_on

    def end_updates(self) -> None:
        """Wait for the last step's updates in flight; LaneError if one failed."""
        for number in sorted(self._carried):
            self._end_carried(number, self._carried[number].synchronize)

    def _end_carried(self, number: int, wait: Callable[[], None]) -> None:
        try:
            wait()
        except BaseException:
            self._state.phase = Phase.TORN
            raise
        self._carried.pop(number, None)
        self._moves.end(number)

    def update_shards(self) -> None:
        """Update this rank's shards on the device."""
        if self._state.num_backwards:
            self._moves.update_shards()

    def finish_step(self) -> None:
        """End all moves except carried ones; in a recorded step, all."""
        if self._times is not None:
            self._times.leave()
        runs_on = self._runs_on if self._times is None else frozenset[int]()
        for number in sorted(self._carried.keys() - runs_on):
            self._end_carried(number, self._carried[number].synchronize)
        self._let_run(runs_on)
        self._end_moves()
        if self._times is not None:
            self._times.end()
            self._times = None
        updating = {self._program.moves[number].unit for number in self._carried}
        for chunk in self.consuming:
            chunk.clear_gradients(in_use=chunk.unit in updating)
        for chunk in self._stepped:
            chunk.put_back()
        self._state.end_step()
        self.thread_guard.stepped = True

    def _end_moves(self) -> None:
        for number in sorted(self._running):
            if self._program.moves[number].lane == COLLECT:
                self._tickets[number].wait()  # the host reads none of its results
            else:
                self._tickets[number].synchronize()
            self._moves.end(number)
        self._moves.give_sums()
        self._moves.clear(self._program)
        self._reset()

    def close(self) -> None:
        """End the lanes."""
        if self._state.slot >= 0 or self._tickets:
            self._give_up()
        with suppress(LaneError, RuntimeError):
            self.end_updates()
        for chunk in self._stepped:
            chunk.put_back()
        for lane in self.lanes.values():
            lane.close()

    def gather(self, chunks: Sequence[Chunk], what: str, *, modify: bool) -> None:
        """Have these chunks' parameters on the device until `ungather`; `what` has them there."""
        if modify and self._state.slot >= 0:
            raise RuntimeError(f"{what} was entered while a forward waits for its backward")
        self._lent = self._evaluated(chunks)
        self.gathered, self._modified = what, modify
        try:
            with self._failing("full_parameters()"):
                for chunk in chunks:
                    self._lent.lend(chunk)
        except BaseException:
            self.ungather()
            raise

    def ungather(self) -> None:
        """Return the chunks to their state before `gather`."""
        assert self._lent is not None
        self._lent.end(check=False)
        self._lent, self.gathered, self._modified = None, "", False

    def _evaluated(self, chunks: Sequence[Chunk]) -> EvaluationPass:
        return EvaluationPass(chunks, self._moves, self._await_fetches, self._collect)

    def _begin_slot(self, index: int, inputs: Sequence[torch.Tensor]) -> None:
        if index == self._num_units:
            refuse_unzeroed_gradient(self.consuming)
        self._state.enter(index)
        slot = self._program.slots[index]
        # The last step's moves end before backward: compute is behind all fetches.
        for number in sorted(self._carried) if index == self._num_units else ():
            self._end_carried(number, self._carried[number].wait)
        for number in slot.drained_before:
            lane = self._program.moves[number].lane
            for earlier in sorted(n for n in self._carried if n <= number):
                if self._program.moves[earlier].lane == lane:
                    self._end_carried(earlier, self._carried[earlier].wait)
        for earlier in self._table.ends[index]:
            self._end(earlier)
        # After the drained moves, whose buffers may serve these fetches, and before the observer,
        # since unused buffers are not part of this slot.
        self._moves.pass_boundary(slot.submit)
        self._observe(f"slot {index}")
        for number in slot.submit:
            self._submit(number)
        for number in slot.ready:
            # On a stream, compute waits behind the copy and this thread goes on: buffers may be
            # bound before they are filled, since only kernels behind the copy read them.
            self._end(number)
            self._moves.arrive(number)
        if not slot.forward and slot.unit in self._slots:
            self._slots[slot.unit].begun = True
        plan, reads = self._plans[slot.unit], self._reads[slot.unit]
        swaps = plan.activations.tier is not None
        # Autograd saves tensors that leave the device.
        if slot.forward and (swaps or reads):
            own = foreign = frozenset[int]()
            if swaps:
                own = addresses([inputs[place] for place in plan.own_inputs if place < len(inputs)])
                foreign = self._shared | (addresses(inputs) - own)
            self._slots[slot.unit] = Begun(self._begins[slot.unit])
            self._saved = SavedTensors(
                reads,
                swaps=swaps,
                foreign=foreign,
                own=own,
                handed_on=self._handed_on,
                slot=self._slots[slot.unit],
            )
            self._saved.__enter__()
        if index == self._num_units - 1:
            self._around = ExitStack()
            self._around.enter_context(around(plan.activations.form))
        if self._times is not None:
            self._times.enter(index)

    def _end_slot(self) -> None:
        slot = self._program.slots[self._state.slot]
        for unit in slot.stepped:  # with complete gradients, which are consumed
            self._state.updating = True
            chunk = self._chunks[unit]
            self._step_on(chunk)
            chunk.take_gradients()
            chunk.gradients.clear()
            chunk.put_aside()
        if self._times is not None:
            self._times.leave()
        # Before the release below: saved tensors in a chunk's buffer are places by now.
        self._close_saved()
        if RAN and not slot.forward:
            end_runs()
        if self._table.takes[self._state.slot]:  # gradients go to their moves
            self._chunks[slot.unit].take_gradients()
        for unit in slot.release:
            chunk = self._chunks[unit]
            chunk.refuse_written(forward=slot.forward)
            released = chunk.release(chunk.every_group, looks=True)
            if released:
                held = [each.untyped_storage() for each in released if is_held(each)]
                self._lingering += [(unit, StorageWeakRef(storage)) for storage in held]
                if held:  # by the model
                    self._passed_on.add(unit)
                self._moves.buffers.give_up(released)
            del released
        for number in slot.finish:
            move = self._program.moves[number]
            if move.kind == "update":
                # From here on its lane may write to device memory: reading a parameter, or copying
                # the model, would show part of the update.
                self._chunks[move.unit].unbind(self._chunks[move.unit].every_group)
            self._submit(number)

    def _submit(self, number: int) -> None:
        move = self._program.moves[number]
        self._state.updating |= move.kind == "update" and number not in self._program.speculative
        lane = self.lanes[move.lane]
        # An earlier move may have run in the last backward, ahead of the norm.
        after = [self._tickets.get(other) or self._ahead[other] for other in move.after]
        if self._awaited and self._program.awaited(move) is not None:
            awaited = self._awaited[move.unit]
            after += [self._carried[other] for other in awaited if other in self._carried]
        # This thread allocates the move's buffers; until `_end` the moves own them, not the lane.
        work = self._moves.start(number)
        if self._times is not None:
            work = self._times.timed(number, work, lane)
        self._tickets[number] = lane.submit(self._table.names[number], work, after)
        self._running.add(number)

    def _end(self, number: int) -> None:
        self._tickets[number].wait()  # on a stream: memory freed below is reused behind it
        self._running.discard(number)
        self._moves.end(number)

    def _leave_form(self) -> None:
        if self._around is not None:
            around, self._around = self._around, None
            around.close()

    def _close_saved(self) -> None:
        self._leave_form()
        if self._saved is None:
            return
        saved, self._saved = self._saved, None
        saved.__exit__()
        if saved.swaps:
            unit = self._program.slots[self._state.slot].unit
            self._moves.take_swapped(unit, saved.swapped(outputs=self._outputs))
        self._handed_on = saved.handed_on

    def begin_backward(self, unit: int) -> None:
        """Backward reads a unit's saved tensors: its slot begins, unless it has begun."""
        slot = len(self._program.slots) - 1 - unit
        if self._state.slot >= slot or not in_backward():
            return  # it has begun, or a graph is inspected
        if (boundaries := self.boundaries()) is None:
            return
        if boundaries.running:
            self.differentiate(unit)  # backward slots never begin in a forward
        elif 0 <= self._state.slot < slot:
            self._read_early.add(unit)
            self.enter(slot, ())

    def bring(self, chunk: Chunk, name: str) -> None:
        """Code reads an offloaded parameter: a forward may gather it."""
        if self._evaluation is not None:
            self._evaluation.lend(chunk)
            return
        boundaries = self.boundaries()
        if boundaries is not None and boundaries.running:
            later = [unit for unit in chunk.used_by if unit > self._state.slot]
            if not any(map(boundaries.begin_part, later)):
                raise RuntimeError(
                    f"{self._plans[self._state.slot].name!r} reads {name!r}, which it did not when"
                    " it was profiled, and the plan has it away from the device. Profile the model"
                    " as it runs now"
                )
        if chunk.hollow:
            refuse_reading(name)

    def _collect(self, what: str, work: Callable[[], None]) -> None:
        """Run a collective on its lane, behind all before it, and wait for it."""
        self.lanes[COLLECT].submit(what, work, ()).wait()

    def _await_fetches(self, chunk: Chunk) -> None:
        """Wait for fetches to a chunk's buffers; on several ranks, for this rank's shard."""
        for number in sorted(self._running):
            move = self._program.moves[number]
            if move.unit == chunk.unit and move.kind == "fetch":
                self._tickets[number].wait()

    def _observe(self, what: str) -> None:
        if self.observer is not None:
            self.observer(what)


def _while_alive(
    method: Callable[[], Callable[..., None] | None], otherwise: Callable[..., None], *given: Any
) -> None:
    """Call the method while the engine lives, else `otherwise`: it lives as long as its model."""
    (method() or otherwise)(*given)
