"""Out of memory in a planned step: planned and actual bytes of the slot, and the likely cause.

A plan's peaks are upper bounds: memory runs out for a reason outside the plan, such as another
batch, other processes, or less room than planned.
"""

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from protrain_runtime.contract.errors import OutOfMemoryError
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.effects import LiveRangeKind
from protrain_runtime.contract.program.memory import device_bytes, slot_name
from protrain_runtime.contract.records import read_profile
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.units import format_bytes, parse_bytes
from protrain_runtime.devices.device import out_of_memory, refusal
from protrain_runtime.devices.memory_meter import device_of
from protrain_runtime.devices.preflight import Room, room_here
from protrain_runtime.engine.state import held_bytes
from protrain_runtime.model.prepared import prepared_of

Rows = Mapping[str, int]
"""Bytes by holder."""

_ELSE = "activations, all else"
_KINDS: dict[str, tuple[LiveRangeKind, ...]] = {
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
    """OutOfMemoryError, one message, if memory runs out in a planned model's steps inside.

    It names the slot, the request, the present and the planned bytes: by kind with the plan's
    `profile`, else for the whole step. Models without a plan, or with one that keeps everything,
    leave the error unchanged.
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
        per_parameter = prepared.optimizer.inner.state.values()
        states = [v for state in per_parameter for v in state.values() if torch.is_tensor(v)]
        known = {
            "states": standing.states + held_bytes(states, device),
            "gradients": standing.gradients,
            "chunks, swaps": standing.transfers,
            "staging": standing.staging,
        }
        there = {**known, _ELSE: max(0, standing.in_all - sum(known.values()))}
        room = room_here(device, Path.cwd())
        traceback.clear_frames(error.__traceback__)  # the step's memory makes room to explain
        found: Profile | None = None
        with suppress(MemoryError):  # even the profile may not fit
            if isinstance(profile, str | Path):
                found = read_profile(Path(profile))
            elif profile is not None:
                found = profile()
        raise _explained(
            prepared.plan, standing.slot, there, found, room, refusal(error)
        ) from error


def _explained(
    plan: Plan, slot: int, there: Rows, profile: Profile | None, room: Room, said: str
) -> OutOfMemoryError:
    # The step's peak in the device's memory.
    on_cpu, peaks = plan.workload.device == "cpu", plan.prediction.peak_bytes
    peak = peaks.device + (peaks.context + peaks.host if on_cpu else 0)
    planned: dict[str, int] = {}
    if profile:
        by_kind = device_bytes(program_of(plan, profile))[slot].by_kind
        planned = {row: sum(by_kind.get(kind, 0) for kind in _KINDS[row]) for row in _KINDS}
        planned[_ELSE] += peaks.context + peaks.host if on_cpu else 0
    most = sum(planned.values()) if planned else peak
    # The size of the request, if the allocator reports it.
    asked = re.search(r"[Tt]ried to allocate (\d[\d.]*) ?(bytes|[KMGT]iB)", said)
    needed = sum(there.values())
    if asked is not None:
        number, unit = asked.groups()
        needed += int(number) if unit == "bytes" else parse_bytes(f"{number}{unit}")
    likely, fix = _reason(needed, most, peak, room)
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


def _reason(needed: int, most: int, peak: int, room: Room) -> tuple[str, str]:
    """The likely cause, and a fix. `most` was planned for the slot, `peak` for the step."""
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
