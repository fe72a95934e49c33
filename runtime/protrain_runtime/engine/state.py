"""The state of a step: the program as the engine walks it, its phase, and the chunks' bytes."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import torch

from protrain_runtime.contract.program.program import Program
from protrain_runtime.contract.records.plan import UnitPlan
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import process_memory, storage_bytes
from protrain_runtime.states.chunks import Chunk
from protrain_runtime.states.stand_ins import ConsumedGradient, UsedGradient, plainly


class Table(NamedTuple):
    """A program as the engine walks it.

    names  of moves, for errors
    ends   by slot, the moves that end before its fetches: those that must have left, and those
           before them in their lanes (pieces of a chunk are written in order, and a slot names the
           last of them alone)
    takes  by slot, whether its unit's gradients go from the parameters to where moves take them
    """

    names: Sequence[str]
    ends: Sequence[Sequence[int]]
    takes: Sequence[bool]

    @staticmethod
    def of(program: Program, plans: Sequence[UnitPlan]) -> "Table":
        """Compute the table."""
        names = [program.move_name(number) for number in range(len(program.moves))]
        running: list[int] = []
        ends: list[list[int]] = []
        takes: list[bool] = []
        for slot in program.slots:
            last = {program.moves[number].lane: number for number in sorted(slot.drained)}
            ending = [n for n in running if n <= last.get(program.moves[n].lane, -1)]
            ends.append(ending)
            gone = {*ending, *slot.ready}
            running = [n for n in (*running, *slot.submit) if n not in gone] + slot.finish
            own = any(program.moves[number].unit == slot.unit for number in slot.finish)
            late = plans[slot.unit].schedule.update_late and slot.unit in program.updates
            takes.append(not slot.forward and (own or late))
        return Table(names, ends, takes)


class Phase(Enum):
    """The step of training that the engine is in.

    IDLE -> FORWARD -> BACKWARD -> IDLE    a micro-batch
    IDLE -> STEPPING -> IDLE               `optimizer.step()`
    IDLE -> EVALUATING -> IDLE             a forward without a graph
    BACKWARD, IDLE -> TORN                 some parameters are updated and some are not: for good

    A forward or backward that is given up goes back to IDLE, a step that raises stays STEPPING.
    """

    IDLE = auto()
    EVALUATING = auto()
    FORWARD = auto()
    BACKWARD = auto()
    STEPPING = auto()
    TORN = auto()


@dataclass(slots=True)
class StepState:
    """The phase of a step of `micro_batches` backwards, each of 2 x `num_units` slots.

    updates_in_backward  whether the last of these backwards updates parameters
    slot                 that runs; -1 between forwards, backwards and steps
    updating             the backward that runs, or ran last, has submitted an update
    num_backwards        that have ended since the last update
    cut_short            of several ranks, this one left the others in the middle of a step
    """

    num_units: int
    micro_batches: int
    updates_in_backward: bool
    phase: Phase = Phase.IDLE
    slot: int = -1
    updating: bool = False
    num_backwards: int = 0
    cut_short: bool = False

    def evaluate(self, slot: int) -> None:
        """A unit of a forward without a graph begins."""
        self.phase, self.slot = Phase.EVALUATING, slot

    def enter(self, slot: int) -> None:
        """A slot of a training forward or of its backward begins."""
        self.phase = Phase.FORWARD if slot < self.num_units else Phase.BACKWARD
        self.slot = slot

    def end_slots(self) -> None:
        """The forward and its backward have ended, or were given up."""
        if self.slot >= 0 and self.phase is not Phase.TORN:
            self.phase = Phase.IDLE
        self.slot = -1

    def end_backward(self) -> None:
        """The gradients of a micro-batch are there."""
        self.end_slots()
        self.num_backwards += 1

    def begin_step(self) -> None:
        """`optimizer.step()` changes parameters from here on."""
        if self.phase is not Phase.TORN:
            self.phase = Phase.STEPPING

    def end_step(self) -> None:
        """All parameters are updated."""
        if self.phase is Phase.STEPPING:
            self.phase = Phase.IDLE
        self.num_backwards, self.updating = 0, False

    @property
    def in_backward(self) -> bool:
        return self.slot >= self.num_units

    @property
    def updated(self) -> bool:
        """Whether backward updated parameters, and `optimizer.step()` has not come."""
        return self.updates_in_backward and self.num_backwards >= self.micro_batches

    def settle(self, what: str) -> None:
        """RuntimeError, with `what`, if only some parameters are updated."""
        if self.phase is Phase.TORN or (self.updating and self.in_backward):
            raise RuntimeError(
                f"{what} after backward() was cut short: this plan updates parameters"
                " during backward, so that some are updated and some are not. Go on from a"
                " checkpoint, with a model that is built anew; under a plan with --clip a step that"
                " is cut short is given up"
            )
        if self.phase is Phase.STEPPING:
            raise RuntimeError(
                f"{what} after optimizer.step() was cut short: some parameters are updated and some"
                " are not. Go on from a checkpoint, with a model that is built anew"
            )
        if self.updated:
            count = self.micro_batches
            needs = "every backward needs" if count == 1 else f"every {count} backwards need"
            raise RuntimeError(
                f"{what} between backward() and optimizer.step(): this plan updates"
                f" parameters during backward, so {needs} its step. Run optimizer.step(), or plan"
                " with --clip: updates then come after backward, and a step may be skipped"
                " (optimizer.zero_grad())"
            )

    def refuse_early_step(self, *, on_ranks: bool) -> None:
        """RuntimeError where `optimizer.step()` comes before the last backward of an update."""
        if self.slot >= 0:
            raise RuntimeError("optimizer.step() was called before backward() had ended")
        count = self.micro_batches
        if on_ranks and 0 < self.num_backwards < count:
            raise RuntimeError(
                f"optimizer.step() was called after {self.num_backwards} of {count} micro-batches:"
                f" this plan sums gradients over the devices in backward {count}. Run {count} per"
                " step"
            )
        if self.updates_in_backward and self.num_backwards and not self.updated:
            raise RuntimeError(
                f"optimizer.step() was called after {self.num_backwards} of {count} micro-batches:"
                f" this plan updates parameters in backward {count}. Run {count} per"
                " step, or plan with --clip: updates then come after backward, however many there"
                " were"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """Bytes in one slot, as they stand.

    slot       the program's slot; the one after the last is the device's update
    states     persistent parameters (the optimizer's states are the optimizer's to tell)
    gradients  of all parameters, while they are on the device
    transfers  buffers of chunks, and swapped activations on their way
    staging    what optimizer states and gradients pass through
    in_all     CPU: what the process holds of the kind that RLIMIT_DATA counts; on an accelerator
               what its allocator gave out
    """

    slot: int
    states: int
    gradients: int
    transfers: int
    staging: int
    in_all: int


def memory_snapshot(
    slot: int,
    chunks: Sequence[Chunk],
    moving: Sequence[torch.Tensor],
    staging: Sequence[torch.Tensor],
    *,
    device: torch.device,
) -> MemorySnapshot:
    """Bytes in a slot: of the chunks, of `moving` tensors, and in `staging`."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters]
    taken = [gradient for chunk in chunks for gradient in chunk.gradients.values()]
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers.values()]
    staying = [chunk for chunk in chunks if chunk.store is None]
    kept = [p for chunk in staying for p in (*chunk.parameters, *chunk.aside.values())]
    in_all = 0  # the system does not say
    if not devices.on_host(device):
        in_all = torch.accelerator.memory_allocated(device)
    else:
        with suppress(OSError):
            in_all = process_memory().data_bytes
    return MemorySnapshot(
        slot=slot,
        states=held_bytes(kept, device),
        gradients=held_bytes((*(p.grad for p in parameters), *taken), device),
        transfers=held_bytes((*buffers, *moving), device),
        staging=held_bytes(staging, device),
        in_all=in_all,
    )


def refuse_unzeroed_gradient(consuming: Iterable[Chunk]) -> None:
    """RuntimeError if a backward would add to a gradient that an update has consumed."""
    if name := unzeroed_gradient(consuming):
        raise RuntimeError(
            f"the gradient of {name!r} was not zeroed after optimizer.step(): plain PyTorch"
            " would add the next one to it, and this plan has used it up. Call"
            " optimizer.zero_grad() between every optimizer.step() and the next backward(), of"
            " another model too; to add gradients up, plan with --accumulate"
        )


def has_no_gradients(chunks: Iterable[Chunk]) -> bool:
    """Whether all gradients are absent: none so far, or dropped by a loss scaler."""
    with plainly():
        for chunk in chunks:
            for part in chunk.slices:
                if part.parameter.grad is not None:
                    return False
    return True


def held_bytes(tensors: Iterable[torch.Tensor | None], device: torch.device) -> int:
    """Bytes of the tensors on `device`, each storage once; stand-ins have none."""
    real = [t for t in tensors if t is not None and not isinstance(t, ConsumedGradient)]
    return storage_bytes(t for t in real if t.device == device)


def unzeroed_gradient(chunks: Iterable[Chunk]) -> str | None:
    """A parameter whose consumed gradient was not zeroed; None if there is none."""
    consumed = (part for chunk in chunks for part in chunk.consumed)
    used = (part.name for part in consumed if isinstance(part.parameter.grad, UsedGradient))
    return next(used, None)


def speculation_holds(chunks: Sequence[Chunk]) -> bool:
    """Whether speculative updates used the final gradients; waits for factors."""
    for chunk in chunks:
        used, there = chunk.speculated, chunk.offloaded_gradients
        if used is None or chunk.gradients or used.keys() != there.keys():
            return False
        if any(used[name] is not there[name] or there[name].changed for name in used):
            return False
    stored = (g for chunk in chunks for g in chunk.offloaded_gradients.values())
    factors = {id(factor): factor for one in stored for factor in one.factors}
    return all(factor.item() == 1 for factor in factors.values())
