"""The simulated step in Chrome's trace event format, which Perfetto opens.

Compute, its waits and every lane are threads of one process, the tiers' bytes counters of another.
Timestamps are microseconds, as the format has them.
"""

import json
from collections.abc import Iterator
from typing import Any

from protrain_plan import __version__
from protrain_plan.presentation.report.step import Step, TierMemory, memory, named, waits
from protrain_plan.simulation.report import COMPUTE

STEP, MEMORY = 1, 2  # the processes
WAITS = "waits of compute"

Event = dict[str, Any]


def trace_text(step: Step) -> str:
    """The trace as JSON, an event a line."""
    workload = step.plan.workload
    about = {
        "program": f"protrain-plan {__version__}",
        "model": workload.model,
        "plan": "simulated step",
        "hardware": step.plan.hardware,
    }
    events = ",\n".join(json.dumps(event) for event in trace_events(step))
    head = json.dumps({"displayTimeUnit": "ms", "otherData": about})
    return f'{head[:-1]}, "traceEvents": [\n{events}\n]}}\n'


def trace_events(step: Step) -> Iterator[Event]:
    """The names of processes and threads first, then what happens on each."""
    lanes = [lane.name for lane in step.report.lanes]
    order = [COMPUTE, WAITS, *lanes[1:]]
    threads = {name: number for number, name in enumerate(order, 1)}
    yield _name("process_name", STEP, 0, f"{step.plan.workload.model}: simulated step")
    yield _name("process_name", MEMORY, 0, "memory")
    for name, thread in threads.items():
        yield _name("thread_name", STEP, thread, name)
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": STEP,
            "tid": thread,
            "args": {"sort_index": thread},
        }
    for lane in lanes:
        yield from _lane(step, lane, threads[lane])
    for wait in waits(step):
        details = {"waited_for": wait.waited_for, "lane": wait.lane, "slot": wait.slot}
        name = f"for {wait.cause}"
        yield _slice(name, "wait", threads[WAITS], wait.start_s, wait.end_s, details)
    for tier in memory(step):
        yield from _counters(tier)


def _lane(step: Step, lane: str, thread: int) -> Iterator[Event]:
    known, names = named(step), step.unit_names
    for span in step.timeline.spans:
        if span.lane != lane:
            continue
        bar = known[span.name]
        details: Event = {"name": span.name, "slot": bar.slot}
        shown = bar.kind
        if bar.slot < len(step.program.slots):
            details["unit"] = names[bar.unit]
            shown = f"{bar.kind} {names[bar.unit]}"
        if bar.bytes:
            details["bytes"] = bar.bytes
        yield _slice(shown, bar.kind, thread, span.start_s, span.end_s, details)


def _counters(tier: TierMemory) -> Iterator[Event]:
    for index, time in enumerate(tier.times_s):
        values = {kind: sizes[index] for kind, sizes in tier.by_kind.items()}
        yield {
            "ph": "C",
            "name": f"{tier.name} bytes",
            "pid": MEMORY,
            "tid": 0,
            "ts": _microseconds(time),
            "args": values,
        }


def _slice(
    name: str, category: str, thread: int, start_s: float, end_s: float, details: Event
) -> Event:
    """A complete event; its end is rounded like the next one's start, so that none overlap."""
    start, end = _microseconds(start_s), _microseconds(end_s)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": STEP,
        "tid": thread,
        "ts": start,
        "dur": round(end - start, 3),
        "args": details,
    }


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    """Whole nanoseconds: what the format's readers keep."""
    return round(seconds * 1e9) / 1000
