"""Times of a step's slots and moves, taken where they start and end.

Host work is timed by the host's clock, stream work by events in that stream, which cost no wait.
Both count from one moment at which the device was idle.
"""

import time
from collections.abc import Callable

import torch

from protrain_runtime.contract.program.program import COMPUTE, Program
from protrain_runtime.contract.program.recording import Event
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.lanes import WorkLane

Stamp = float | torch.Event
"""A moment: the host's clock, or an event in a stream."""


_Span = tuple[str, str, Stamp, Stamp]
"""The names of a lane and its work, with start and end."""


class StepTimes:
    """Times the steps of `program`; `last`: events and seconds of the last complete step."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._program, self._device = program, device
        self._on_host = devices.on_host(device)
        self.last: tuple[tuple[Event, ...], float] | None = None
        self._spans: list[_Span] = []
        self._slot: tuple[str, Stamp] | None = None  # the slot that computes, and its start

    def begin(self) -> None:
        """Begin a step; drop the times of an unfinished one."""
        self._spans, self._slot = [], None
        self._origin_event = None
        devices.synchronize(self._device)
        before = after = time.perf_counter()
        if not self._on_host:
            self._origin_event = self._event()
            self._origin_event.synchronize()
            after = time.perf_counter()
        self._origin_s = (before + after) / 2  # the event came in between

    def enter(self, slot: int) -> None:
        """A slot begins to compute; the slot after the last is the device's update."""
        self._slot = (self._program.slot_name(slot), self._now())

    def leave(self) -> None:
        """The slot has computed."""
        if self._slot is not None:
            name, start = self._slot
            self._spans.append((COMPUTE, name, start, self._now()))
            self._slot = None

    def timed(self, number: int, work: Callable[[], None], lane: WorkLane) -> Callable[[], None]:
        """The work of a move, timed on its lane."""
        name, lane_name = self._program.move_name(number), str(self._program.moves[number].lane)
        spans = self._spans  # of this step, even if the lane runs late
        stamp: Callable[[], Stamp] = self._event if lane.on_stream else time.perf_counter
        copies = self._program.moves[number].lane.direction in ("fetch", "spill")

        def run() -> None:
            if copies and not (self._on_host or lane.on_stream):
                devices.current_stream(self._device).synchronize()  # it starts behind compute
            start = stamp()
            work()
            if not (self._on_host or lane.on_stream):
                devices.current_stream(self._device).synchronize()  # the lane's own, for its copies
            spans.append((lane_name, name, start, stamp()))

        return run

    def end(self) -> None:
        """All moves of the step and the device's update have ended."""
        devices.synchronize(self._device)
        step_seconds = time.perf_counter() - self._origin_s
        events = [
            Event(lane=lane, name=name, start_s=self._seconds(start), end_s=self._seconds(end))
            for lane, name, start, end in self._spans
        ]
        by_start = sorted(events, key=lambda event: (event.start_s, event.end_s))
        self.last = tuple(by_start), step_seconds

    def _seconds(self, stamp: Stamp) -> float:
        """Seconds since the step's origin; the device has reached the step's end."""
        if isinstance(stamp, float):
            return stamp - self._origin_s
        assert self._origin_event is not None
        milliseconds: float = self._origin_event.elapsed_time(stamp)
        return milliseconds / 1e3

    def _now(self) -> Stamp:
        return time.perf_counter() if self._on_host else self._event()

    def _event(self) -> torch.Event:
        return devices.record_event(self._device, timing=True)
