"""Memory that ran out in a planned step: planned and actual bytes of the slot, and what is likely.

A plan's peaks are upper bounds of what its step takes, so that memory runs out for a reason outside
of the plan: another batch, memory that somebody else holds, or less room than was planned with.
"""

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from protrain_plan.errors import OutOfMemoryError
from protrain_plan.program.compiling import program_of
from protrain_plan.program.implications import HoldingKind
from protrain_plan.records import read_profile
from protrain_plan.records.plan import Plan
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.memory import device_bytes, slot_name
from protrain_plan.units import format_bytes, parse_bytes
from protrain_runtime.devices.device import out_of_memory, refusal
from protrain_runtime.devices.memory_meter import device_of
from protrain_runtime.devices.preflight import Room, room_here
from protrain_runtime.engine.state import MemorySnapshot, held_bytes
from protrain_runtime.model.prepared import Prepared, prepared_of

Rows = Mapping[str, int]
"""Bytes by what holds them."""

_ELSE = "activations, all else"
_KINDS: dict[str, tuple[HoldingKind, ...]] = {
    "states": ("states",),
    "gradients": ("gradients",),
    "chunks, swaps": ("buffers", "fetched ahead", "leaving"),
    "staging": ("staging",),
    _ELSE: ("base", "activations"),
}


ProfileSource = Path | str | Callable[[], Profile | None]
"""Where a plan's profile is, or what finds it. It is read when memory has run out, not before: a
profile takes memory, too."""


@contextmanager
def explain_memory(model: nn.Module, profile: ProfileSource | None = None) -> Iterator[None]:
    """OutOfMemoryError, one message, where memory runs out in steps of a planned model inside.

    It says in which slot, what the allocator was asked for, what stood there and what was planned:
    by kind with the `profile` that the plan was made from, else for the whole step. Models that
    follow no plan, or one that keeps everything, leave the error as it is.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        prepared = prepared_of(model)
        if not out_of_memory(error) or prepared is None or prepared.engine is None:
            raise
        standing = prepared.engine.memory_snapshot()
        if standing is None:
            raise
        device = device_of(model)
        there = _there(prepared, standing, device)
        room = room_here(device, Path.cwd())
        traceback.clear_frames(error.__traceback__)  # what the step held makes room to explain
        raise _explained(
            prepared.plan, standing.slot, there, _read(profile), room, refusal(error)
        ) from error


def _read(profile: ProfileSource | None) -> Profile | None:
    """The profile, if there is one and memory for it."""
    try:
        if isinstance(profile, str | Path):
            return read_profile(Path(profile))
        return profile() if profile is not None else None
    except MemoryError:
        return None


def _explained(
    plan: Plan, slot: int, there: Rows, profile: Profile | None, room: Room, said: str
) -> OutOfMemoryError:
    planned = _planned(plan, profile, slot) if profile else None
    peak = _whole(plan)
    most = sum(planned.values()) if planned else peak
    likely, fix = _reason(sum(there.values()) + _asked(said), most, peak, room)
    lines = [f"out of memory in {slot_name(plan, slot)}: {said}"]
    if planned:
        lines.append(f"{'':24}{'planned':>12}{'there':>12}")
        for row, size in there.items():
            lines.append(f"{row:24}{format_bytes(planned[row]):>12}{format_bytes(size):>12}")
        total = (format_bytes(size) for size in (most, sum(there.values())))
        lines.append(f"{'in all':24}" + "".join(f"{size:>12}" for size in total))
    else:
        held = ", ".join(f"{row} {format_bytes(size)}" for row, size in there.items())
        lines.append(f"there: {held}; planned for the whole step: {format_bytes(peak)} at most")
    return OutOfMemoryError("\n    ".join([*lines, f"likely: {likely}"]), fix=fix)


def _whole(plan: Plan) -> int:
    """The most that the step takes of the memory that the device has."""
    peak = plan.prediction.peak_bytes
    return peak.device + (peak.context + peak.host if plan.workload.device == "cpu" else 0)


def _there(prepared: Prepared, standing: MemorySnapshot, device: torch.device) -> Rows:
    states = [
        value
        for state in prepared.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    known = {
        "states": standing.states + held_bytes(states, device),
        "gradients": standing.gradients,
        "chunks, swaps": standing.transfers,
        "staging": standing.staging,
    }
    return {**known, _ELSE: max(0, standing.in_all - sum(known.values()))}


def _planned(plan: Plan, profile: Profile, slot: int) -> Rows:
    by_kind = device_bytes(program_of(plan, profile))[slot].by_kind
    rows = {row: sum(by_kind.get(kind, 0) for kind in kinds) for row, kinds in _KINDS.items()}
    if plan.workload.device == "cpu":
        rows[_ELSE] += plan.prediction.peak_bytes.context + plan.prediction.peak_bytes.host
    return rows


def _asked(said: str) -> int:
    """What the allocator was asked for; 0 where it does not say."""
    found = re.search(r"[Tt]ried to allocate (\d[\d.]*) ?(bytes|[KMGT]iB)", said)
    if found is None:
        return 0
    number, unit = found.groups()
    return int(number) if unit == "bytes" else parse_bytes(f"{number}{unit}")


def _reason(needed: int, most: int, peak: int, room: Room) -> tuple[str, str]:
    """What is likely, and what to do. `most` was planned for the slot, `peak` for the step."""
    if needed > most:
        return (
            f"{format_bytes(needed - most)} more than planned are asked for here: the batch is"
            " larger than the profiled one, the script or a library holds memory besides, or"
            " memory that was freed was not given back",
            "profile what is trained, with its largest batch, and plan again; on a CPU call"
            " protrain_runtime.return_freed_memory() before the model is built",
        )
    limit = room.data_limit if room.device_bytes is None else None
    if limit is not None and limit < peak:
        return (
            f"the process may have {format_bytes(limit)} (RLIMIT_DATA), and the plan's step takes"
            f" up to {format_bytes(peak)}",
            "plan with a smaller --device-memory than the limit, and run that plan",
        )
    return (
        "all that stands here was planned: other processes have taken memory that was free when the"
        " run began, or (CUDA) what is free is in pieces too small",
        "end them, or plan with a smaller --device-memory, and run that plan",
    )
