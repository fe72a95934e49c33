"""The simulated step as plain data, as one HTML file, and as a trace."""

import base64
import hashlib
import html
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from math import floor, log10
from string import Template
from typing import Any

from protrain_plan.planning.stages.schedule import StageSpan
from protrain_plan.presentation.plans import fastest
from protrain_plan.presentation.report.step import (
    OfStages,
    Step,
    Wait,
    bars,
    memory,
    named,
    slot_begins_s,
    waits,
)
from protrain_plan.presentation.staging import layout_text, pace_text, pipelined_json
from protrain_plan.presentation.terminal import fields_of, plain
from protrain_plan.simulation.report import in_words, part_in_words
from protrain_plan.simulation.timeline import Span
from protrain_plan.simulation.wear import wear, wear_lines
from protrain_runtime.contract import __version__
from protrain_runtime.contract.escaping import one_line
from protrain_runtime.contract.program.program import COMPUTE, unit_words
from protrain_runtime.contract.program.recording import Recording
from protrain_runtime.contract.records import activations_text, fingerprint, states_text

Data = dict[str, Any]


PANELS = ("shared", "memory", "lanes", "time", "decisions", "alternatives", "page")
"""The page's scripts, which are put into one, in this order."""


class _Scale:
    """Columns in which times are ticks and kinds are numbers."""

    def __init__(self, step: Step) -> None:
        seconds = step.report.step_seconds
        kinds = dict.fromkeys(bar.kind for bar in named(step).values())
        self.tick_s = 10.0 ** (floor(log10(seconds)) - 7) if seconds else 1e-9
        self.kinds = {kind: n for n, kind in enumerate(kinds)}

    def ticks(self, seconds: Iterable[float]) -> list[int]:
        return [round(time / self.tick_s) for time in seconds]

    def columns(self, found: Sequence[Any], *names: str) -> Data:
        """Return start and end of each, and its other fields of these names."""
        lists = {name: [getattr(one, name) for one in found] for name in names}
        if "kind" in lists:
            lists["kind"] = [self.kinds[kind] for kind in lists["kind"]]
        starts, ends = (one.start_s for one in found), (one.end_s for one in found)
        return {"start": self.ticks(starts), "end": self.ticks(ends), **lists}


def summary_json(step: Step) -> Data:
    """The step's seconds and peaks, in seconds and bytes; `step_data` adds the time line."""
    report = step.report
    return {
        **_summed_up(step),
        **fields_of(report, "critical_path", "stall_by_lane", "lanes"),
        "peak_slot": report.fullest.name,
        "peak_slot_bytes": report.fullest.device.by_kind,
        "peak_bytes": report.tier_peaks,
    }


def _summed_up(step: Step) -> Data:
    """The common part of the summary and the page."""
    prediction, of, pipeline = step.plan.prediction, step.of_stages, None
    if of is not None:
        words = f"{pace_text(of.pipeline)}{layout_text(of.pipeline)}"
        pipeline = {"words": words, **pipelined_json(of.pipeline, with_spans=True)}
    return {
        **fields_of(step.plan.group),
        "stage": of and of.stage,
        "pipeline": pipeline,
        **fields_of(step.report, "step_seconds"),
        "predicted_step_seconds": prediction.step_seconds,
        **fields_of(prediction, "clipped_step_seconds", "expected_seconds"),
        **fields_of(step.report, "stall_seconds", "stall_by_cause"),
    }


def step_data(
    step: Step, *, recording: Recording | None = None, front: Sequence[Data] = ()
) -> Data:
    """All data about a step, with its `recording` and the `front` of `plan --json`."""
    scale, plan, report = _Scale(step), step.plan, step.report
    ran, of_bars = bars(step, step.timeline.spans), ("kind", "unit", "slot", "bytes", "num_pieces")
    return {
        **_summed_up(step),
        "program": f"protrain-plan {__version__}",
        **fields_of(plan.workload, "model"),
        "workload": workload_text(step),
        **fields_of(plan, "hardware", "optimizer", "exactness", "allowed", "gap"),
        **fields_of(plan.settings, "updates", "micro_batches"),
        "part": part_in_words(plan),
        "plan_fingerprint": fingerprint(step.whole),
        "profile_fingerprint": plan.profile_fingerprint,
        "profile_method": step.profile.method,
        "tick_seconds": scale.tick_s,
        "fastest": fastest(step.whole),
        "words": [*in_words(report, plan), *wear_lines(plan, step.profile)],
        "disk_writes": wear(plan, step.profile),
        "units": [
            {
                **fields_of(decided, "name", "kind"),
                "words": unit_words(plan.units, index),
                "activations": activations_text(decided.activations),
                "states": states_text(decided.states),
                **fields_of(decided.schedule),
                "state_bytes": unit.model_state_bytes,
                "keep_bytes": unit.cost("keep").kept_bytes,
            }
            for index, (decided, unit) in enumerate(
                zip(plan.units, step.profile.units, strict=True)
            )
        ],
        "slots": scale.columns(report.slots) | {"begin": scale.ticks(slot_begins_s(step))},
        **fields_of(report, "peak_slot"),
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
            {**fields_of(lane), "bars": scale.columns(ran.get(lane.name, ()), *of_bars)}
            for lane in report.lanes
        ],
        "waits": scale.columns(waits(step), "slot", "cause", "waited_for", "lane"),
        "front": front,
        "recording": recording and _recording(step, recording, scale),
    }


def workload_text(step: Step) -> str:
    """`2 sequences of 256 tokens on each of 8 devices, float32`."""
    workload, many = step.plan.workload, step.plan.settings.micro_batches
    sequences = "1 sequence" if workload.batch_size == 1 else f"{workload.batch_size} sequences"
    devices = f" on each of {step.plan.group}" if step.plan.group.num_devices > 1 else ""
    parts = (
        f"{sequences} of {workload.seq_len} tokens{devices}",
        workload.dtype,
        f"{workload.precision} precision" if workload.precision != "pure" else "",
        workload.adapter,
        f"{workload.quantize} weights" if workload.quantize else "",
        "compiled blocks" if workload.compile else "",
        "deterministic kernels" if workload.deterministic else "",
        f"{many} micro-batches" if many > 1 else "",
    )
    return ", ".join(filter(None, parts))


def _recording(step: Step, recording: Recording, scale: _Scale) -> Data:
    """The recorded step, which is drawn over the simulated one."""
    busy: dict[str, float] = defaultdict(float)
    for one in recording.events:
        busy[one.lane] += one.end_s - one.start_s
    sizes = zip(recording.slot_bytes, step.report.slots, strict=False)
    return {
        **fields_of(recording, "step_seconds", "slot_bytes"),
        "lanes": {
            lane: scale.columns(of_lane, "kind", "unit")
            for lane, of_lane in bars(step, recording.events).items()
        },
        "busy_seconds": busy,
        "slots_above": [n for n, (size, slot) in enumerate(sizes) if size > slot.device.total],
    }


def page_text(step: Step, *, recording: Recording | None = None, front: Sequence[Data] = ()) -> str:
    """The page; a recording must be one of the step's plan."""
    # Invisible characters of names are shown as escapes.
    data = plain(step_data(step, recording=recording, front=front), one_line)
    several = step.of_stages is not None
    style = part("page.css") + (part("stages.css") if several else "")
    panels = "".join(part(f"{name}.js") for name in (*PANELS, *["stages"] * several))
    # A block, since at the top, names such as `top` are the window's.
    script = f'"use strict";\n{{\n{panels}}}\n'
    # A name may hold any character; none can end the element around the data.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return Template(part("head.html") + part("page.html")).substitute(
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


STEP, MEMORY = 1, 2  # processes of a trace
WAITS = "waits of compute"


def trace_text(step: Step, *, of_all: bool = False) -> str:
    """The step in Chrome's trace event format for Perfetto; `of_all`: all stages."""
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
    """Yield the names of processes and threads, then the events on each.

    Compute, its waits and every lane are threads of one process; bytes of tiers are counters of
    another. Timestamps are microseconds, as the format has them.
    """
    lanes = [lane.name for lane in step.report.lanes]
    threads = {name: number for number, name in enumerate([COMPUTE, WAITS, *lanes[1:]], 1)}
    yield _about("process_name", STEP, 0, name=f"{step.plan.workload.model}: simulated step")
    yield _about("process_name", MEMORY, 0, name="memory")
    for name, thread in threads.items():
        yield _about("thread_name", STEP, thread, name=name)
        yield _about("thread_sort_index", STEP, thread, sort_index=thread)
    known = named(step)
    for span in sorted(step.timeline.spans, key=lambda span: lanes.index(span.lane)):
        bar = known[span.name]
        details: Data = {"name": span.name, "slot": bar.slot}
        shown = bar.kind
        if bar.slot < len(step.program.slots):
            details["unit"] = step.plan.units[bar.unit].name
            shown = f"{bar.kind} {details['unit']}"
        if bar.bytes:
            details["bytes"] = bar.bytes
        yield _slice(span, shown, bar.kind, threads[span.lane], details)
    for wait in waits(step):
        details = fields_of(wait, "waited_for", "lane", "slot")
        yield _slice(wait, f"for {wait.cause}", "wait", threads[WAITS], details)
    for tier in memory(step):
        for index, time in enumerate(tier.times_s):
            at = {"pid": MEMORY, "tid": 0, "ts": _microseconds(time)}
            sizes = {kind: each[index] for kind, each in tier.by_kind.items()}
            yield {"ph": "C", "name": f"{tier.name} bytes", **at, "args": sizes}


def stage_events(of: OfStages) -> Iterator[Data]:
    """Yield stages as threads of one process, with their computations."""
    yield _about("process_name", STEP, 0, name=f"{of.plan.workload.model}: simulated stages")
    for stage in range(of.plan.num_stages):
        yield _about("thread_name", STEP, stage + 1, name=f"stage {stage}")
        yield _about("thread_sort_index", STEP, stage + 1, sort_index=stage)
    for span in of.pipeline.run.spans:
        details = span.action._asdict() if span.action else {}
        name = f"{span.kind} {details['micro_batch']}" if details else span.kind
        yield _slice(span, name, span.kind, span.stage + 1, details)


def _about(what: str, process: int, thread: int, **said: str | int) -> Data:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": said}


def _slice(span: Span | Wait | StageSpan, name: str, kind: str, thread: int, details: Data) -> Data:
    """A complete event; its end is rounded like the next one's start, so that none overlap."""
    start, end = _microseconds(span.start_s), _microseconds(span.end_s)
    at = {"pid": STEP, "tid": thread, "ts": start, "dur": round(end - start, 3)}
    return {"ph": "X", "name": name, "cat": kind, **at, "args": details}


def _microseconds(seconds: float) -> float:
    """Microseconds in whole nanoseconds, which the format's readers keep."""
    return round(seconds * 1e9) / 1000
