"""The simulated step as plain data, as one HTML file, and as a trace."""

import base64
import hashlib
import html
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from math import floor, log10
from string import Template
from typing import Any, NamedTuple

from protrain_plan.presentation.plans import fastest
from protrain_plan.presentation.report.step import (
    Bar,
    OfStages,
    Step,
    bars,
    memory,
    named,
    slot_begins_s,
    waits,
)
from protrain_plan.presentation.staging import layout_text, pace_text, pipelined_json
from protrain_plan.simulation.report import in_words, part_in_words
from protrain_plan.simulation.wear import wear, wear_lines
from protrain_runtime.contract import __version__
from protrain_runtime.contract.escaping import one_line
from protrain_runtime.contract.program.program import COMPUTE, unit_words
from protrain_runtime.contract.program.recording import Recording
from protrain_runtime.contract.records import activations_text, fingerprint, states_text
from protrain_runtime.contract.records.plan import UnitPlan

Data = dict[str, Any]


class FrontPoint(NamedTuple):
    """A plan on the front of memory against time; `device_bytes` with the context."""

    device_bytes: int
    step_seconds: float
    gap: float


class _Scale:
    """Writer of times and kinds as numbers."""

    def __init__(self, step: Step) -> None:
        seconds = step.report.step_seconds
        kinds = dict.fromkeys(bar.kind for bar in named(step).values())
        self.tick_s = 10.0 ** (floor(log10(seconds)) - 7) if seconds else 1e-9
        self.kinds = {kind: n for n, kind in enumerate(kinds)}

    def ticks(self, seconds: Iterable[float]) -> list[int]:
        return [round(time / self.tick_s) for time in seconds]

    def bars(self, found: Sequence[Bar]) -> Data:
        return {
            "start": self.ticks(bar.start_s for bar in found),
            "end": self.ticks(bar.end_s for bar in found),
            "kind": [self.kinds[bar.kind] for bar in found],
            "unit": [bar.unit for bar in found],
        }

    def moved(self, found: Sequence[Bar]) -> Data:
        """Return the same, with what each transfers."""
        return self.bars(found) | {
            "slot": [bar.slot for bar in found],
            "bytes": [bar.bytes for bar in found],
            "pieces": [bar.num_pieces for bar in found],
        }


def step_data(
    step: Step,
    *,
    recording: Recording | None = None,
    front: Sequence[FrontPoint] = (),
) -> Data:
    """Everything that is shown of a step; a recording must be one of its plan."""
    scale, found, ran = _Scale(step), waits(step), bars(step, step.timeline.spans)
    plan, report = step.plan, step.report
    workload, prediction = plan.workload, plan.prediction
    worn = wear(plan, step.profile)
    units: list[Data] = []
    for index, (decided, unit) in enumerate(zip(plan.units, step.profile.units, strict=True)):
        one: Data = {
            "name": decided.name,
            "activations": activations_text(decided.activations),
            "states": states_text(decided.states),
            "state_bytes": unit.parameter_bytes + unit.gradient_bytes + unit.state_bytes,
            "keep_bytes": unit.cost("keep").kept_bytes,
        }
        if (words := unit_words(plan.units, index)) != unit.name:
            one["words"] = words
        units.append(one)
    return {
        "program": f"protrain-plan {__version__}",
        "model": workload.model,
        "workload": workload_text(step),
        "hardware": plan.hardware,
        "optimizer": plan.optimizer,
        "exactness": plan.exactness,
        "allowed": plan.allowed,
        "updates": plan.settings.updates,
        "micro_batches": plan.settings.micro_batches,
        "part": part_in_words(plan),
        **asdict(plan.group),
        **pipeline_data(step),
        "plan_fingerprint": fingerprint(step.whole),
        "profile_fingerprint": plan.profile_fingerprint,
        "profile_method": step.profile.method,
        "tick_seconds": scale.tick_s,
        "step_seconds": report.step_seconds,
        "predicted_step_seconds": prediction.step_seconds,
        "expected_seconds": prediction.expected_seconds,
        "gap": plan.gap,
        "fastest": fastest(step.whole),
        "stall_seconds": report.stall_seconds,
        "stall_by_cause": report.stall_by_cause,
        "words": [*in_words(report, plan), *wear_lines(plan, step.profile)],
        "disk_writes": asdict(worn) if worn else None,
        "units": units,
        "decisions": decisions(step),
        "slots": {
            "begin": scale.ticks(slot_begins_s(step)),
            "start": scale.ticks(slot.start_s for slot in report.slots),
            "end": scale.ticks(slot.end_s for slot in report.slots),
        },
        "peak_slot": report.peak_slot.index,
        "tiers": [
            {
                "name": tier.name,
                "budget": tier.budget_bytes,
                "peak": max(tier.totals),
                "time": scale.ticks(tier.times_s),
                "kinds": {
                    # A single number for bytes that never change.
                    kind: list(sizes[:1] if len(set(sizes)) == 1 else sizes)
                    for kind, sizes in tier.by_kind.items()
                },
            }
            for tier in memory(step)
        ],
        "kinds": list(scale.kinds),
        "lanes": [
            {
                "name": lane.name,
                "busy_seconds": lane.busy_s,
                "utilisation": lane.utilisation,
                "bytes": lane.bytes,
                "num_moves": lane.num_moves,
                "bars": scale.moved(ran.get(lane.name, ())),
            }
            for lane in report.lanes
        ],
        "waits": {
            "start": scale.ticks(wait.start_s for wait in found),
            "end": scale.ticks(wait.end_s for wait in found),
            **{
                name: [getattr(wait, name) for wait in found]
                for name in ("slot", "cause", "waited_for", "lane")
            },
        },
        "front": [point._asdict() for point in front],
        "recording": None if recording is None else _recording(step, recording, scale),
    }


def pipeline_data(step: Step) -> Data:
    """The pipeline that the step's stage is of, where it is of one."""
    if (of := step.of_stages) is None:
        return {"stage": None, "pipeline": None}
    found = of.pipeline
    told = {"words": f"{pace_text(found)}{layout_text(found)}"}
    return {"stage": of.stage, "pipeline": told | pipelined_json(found, with_spans=True)}


def workload_text(step: Step) -> str:
    """`2 sequences of 256 tokens on each of 8 devices, float32`."""
    workload = step.plan.workload
    sequences = "1 sequence" if workload.batch_size == 1 else f"{workload.batch_size} sequences"
    devices = f" on each of {step.plan.group}" if step.plan.group.num_devices > 1 else ""
    parts = [f"{sequences} of {workload.seq_len} tokens{devices}", workload.dtype]
    if workload.precision != "pure":
        parts.append(f"{workload.precision} precision")
    if workload.adapter:
        parts.append(workload.adapter)
    if workload.quantize:
        parts.append(f"{workload.quantize} weights")
    if workload.compile:
        parts.append("compiled blocks")
    if workload.deterministic:
        parts.append("deterministic kernels")
    if step.plan.settings.micro_batches > 1:
        parts.append(f"{step.plan.settings.micro_batches} micro-batches")
    return ", ".join(parts)


def decisions(step: Step) -> list[Data]:
    """Runs of units with the same decisions, in order."""
    found: list[Data] = []

    def decided_alike(item: tuple[int, UnitPlan]) -> object:
        # Parts that happen to follow one another are no run.
        _, unit = item
        name = unit.name if unit.kind == "part" else ""
        return name, unit.activations, unit.states, unit.schedule

    for _, run in itertools.groupby(enumerate(step.plan.units), key=decided_alike):
        members = list(run)
        first, decided = members[0]
        found.append(
            {
                "first": first,
                "last": members[-1][0],
                "activations": activations_text(decided.activations),
                "states": states_text(decided.states),
                **asdict(decided.schedule),
            }
        )
    return found


def _recording(step: Step, recording: Recording, scale: _Scale) -> Data:
    """The recorded step, to be drawn over the simulated one."""
    by_lane = bars(step, recording.events)
    busy: dict[str, float] = {}
    for one in recording.events:
        busy[one.lane] = busy.get(one.lane, 0.0) + one.end_s - one.start_s
    predicted = [slot.device.total for slot in step.report.slots]
    above = [index for index, size in enumerate(recording.slot_bytes) if size > predicted[index]]
    return {
        "step_seconds": recording.step_seconds,
        "lanes": {lane: scale.bars(of_lane) for lane, of_lane in by_lane.items()},
        "busy_seconds": busy,
        "slot_bytes": list(recording.slot_bytes),
        "slots_above": above,
    }


def page_text(
    step: Step, *, recording: Recording | None = None, front: Sequence[FrontPoint] = ()
) -> str:
    """The page; a recording must be one of the step's plan."""
    data = _shown(step_data(step, recording=recording, front=front))
    style, script = part("page.css"), part("page.js")
    several = step.of_stages is not None
    style += part("stages.css") if several else ""
    script = script.replace("  /* stages.js */\n", part("stages.js") if several else "")
    # No name, which may hold any character, can end the element around the data.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return Template(part("page.html")).substitute(
        title=html.escape(f"{data['model']}: {data['workload']}"),
        policy=f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none';"
        f" style-src '{hash_source(style)}'; script-src '{hash_source(script)}'",
        style=style,
        stages=part("stages.html") if several else "",
        script=script,
        data=embedded,
    )


def part(name: str) -> str:
    """The text of a file of this folder."""
    text = (files("protrain_plan.presentation.report") / name).read_text(encoding="utf-8")
    return re.sub(r"^ *//.*\n", "", text, flags=re.MULTILINE)  # a script's comments


def hash_source(text: str) -> str:
    """Name a style or a script as a page's policy does."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _shown(data: Any) -> Any:
    """Return the data; in names, what cannot be seen is shown as an escape."""
    match data:
        case str():
            return one_line(data)
        case list() | tuple():
            return [_shown(value) for value in data]
        case dict():
            return {_shown(key): _shown(value) for key, value in data.items()}
        case _:
            return data


# The trace

STEP, MEMORY = 1, 2  # the processes
WAITS = "waits of compute"


def trace_text(step: Step, *, of_all: bool = False) -> str:
    """The step in Chrome's trace event format, which Perfetto opens: JSON, an event a line.

    With `of_all`, it is the step of all stages, where there are several.
    """
    about = {
        "program": f"protrain-plan {__version__}",
        "model": step.plan.workload.model,
        "plan": "simulated step",
        "hardware": step.plan.hardware,
    }
    several = step.of_stages if of_all else None
    found = trace_events(step) if several is None else stage_events(several)
    events = ",\n".join(json.dumps(event) for event in found)
    head = json.dumps({"displayTimeUnit": "ms", "otherData": about})
    return f'{head[:-1]}, "traceEvents": [\n{events}\n]}}\n'


def trace_events(step: Step) -> Iterator[Data]:
    """The names of processes and threads first, then what happens on each.

    Compute, its waits and every lane are threads of one process, the tiers' bytes counters of
    another. Timestamps are microseconds, as the format has them.
    """
    lanes = [lane.name for lane in step.report.lanes]
    threads = {name: number for number, name in enumerate([COMPUTE, WAITS, *lanes[1:]], 1)}
    model = step.plan.workload.model
    yield _about("process_name", STEP, 0, name=f"{model}: simulated step")
    yield _about("process_name", MEMORY, 0, name="memory")
    for name, thread in threads.items():
        yield _about("thread_name", STEP, thread, name=name)
        yield _about("thread_sort_index", STEP, thread, sort_index=thread)
    known = named(step)
    for span in (span for lane in lanes for span in step.timeline.spans if span.lane == lane):
        bar = known[span.name]
        details: Data = {"name": span.name, "slot": bar.slot}
        shown = bar.kind
        if bar.slot < len(step.program.slots):
            details["unit"] = step.plan.units[bar.unit].name
            shown = f"{bar.kind} {details['unit']}"
        if bar.bytes:
            details["bytes"] = bar.bytes
        yield _slice(shown, bar.kind, threads[span.lane], span.start_s, span.end_s, details)
    for wait in waits(step):
        details = {"waited_for": wait.waited_for, "lane": wait.lane, "slot": wait.slot}
        name = f"for {wait.cause}"
        yield _slice(name, "wait", threads[WAITS], wait.start_s, wait.end_s, details)
    for tier in memory(step):
        for index, time in enumerate(tier.times_s):
            yield {
                "ph": "C",
                "name": f"{tier.name} bytes",
                "pid": MEMORY,
                "tid": 0,
                "ts": _microseconds(time),
                "args": {kind: sizes[index] for kind, sizes in tier.by_kind.items()},
            }


def stage_events(of: OfStages) -> Iterator[Data]:
    """Stages as threads of one process, with what each of them computes."""
    yield _about("process_name", STEP, 0, name=f"{of.plan.workload.model}: simulated stages")
    for stage in range(of.plan.num_stages):
        yield _about("thread_name", STEP, stage + 1, name=f"stage {stage}")
        yield _about("thread_sort_index", STEP, stage + 1, sort_index=stage)
    for span in of.pipeline.run.spans:
        details = span.action._asdict() if span.action else {}
        name = f"{span.kind} {details['micro_batch']}" if details else span.kind
        yield _slice(name, span.kind, span.stage + 1, span.start_s, span.end_s, details)


def _about(what: str, process: int, thread: int, **said: str | int) -> Data:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": said}


def _slice(
    name: str, category: str, thread: int, start_s: float, end_s: float, details: Data
) -> Data:
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


def _microseconds(seconds: float) -> float:
    """Whole nanoseconds: what the format's readers keep."""
    return round(seconds * 1e9) / 1000
