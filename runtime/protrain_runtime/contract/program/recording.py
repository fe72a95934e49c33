"""A recorded step: what ran when, under the names of the simulated one. JSON, read strictly.

    {"protrain": "recording", "version": 1,
     "plan_fingerprint": "sha256:...",
     "step_seconds": 4.19,
     "events": [{"lane": "fetch disk", "name": "fetch 3 @3", "start_s": 0.51, "end_s": 0.53}],
     "slot_bytes": [681000000]}

A recording is of one step, with micro-batches of the last of them and the update after it. Names
are those of `Program.slot_name`, which run on the lane "compute", and of `Program.move_name`; each
stands there at most once. Seconds count from the step's
beginning.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.program.program import Program
from protrain_runtime.contract.records import fingerprint
from protrain_runtime.contract.records.files import read_text, replace_text
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.records.tree import parsed_json

KIND, VERSION = "recording", 1
MAX_FILE_BYTES = 64 * 2**20
"""Largest recording: half a million moves."""
_MAX_NODES = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A slot's compute, or a move, from start to end in seconds since the step began."""

    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One step of a plan as it ran.

    `slot_bytes` are the peaks of tensors on the device in each slot, and last in the device's
    update; empty where they were not counted.
    """

    plan_fingerprint: str
    step_seconds: float
    events: tuple[Event, ...]
    slot_bytes: tuple[int, ...] = ()


def read_recording(path: str | Path) -> Recording:
    """The recording in the file; RecordError where there is none."""
    return loads_recording(read_text(path, most_bytes=MAX_FILE_BYTES), str(path))


def write_recording(recording: Recording, path: str | Path) -> None:
    """Write the recording, whole or not at all; RecordError where that cannot be done."""
    replace_text(path, dumps_recording(recording))


def dumps_recording(recording: Recording) -> str:
    """The recording as JSON text, an event a line."""
    head = json.dumps(
        {
            "protrain": KIND,
            "version": VERSION,
            "plan_fingerprint": recording.plan_fingerprint,
            "step_seconds": recording.step_seconds,
            "slot_bytes": recording.slot_bytes,
        }
    )
    events = ",\n".join(json.dumps(asdict(event)) for event in recording.events)
    return f'{head[:-1]}, "events": [\n{events}\n]}}\n'


def loads_recording(text: str, source: str | None = None) -> Recording:
    """The recording in the text; RecordError, naming `source`, where there is none."""
    reader = _Reader(source)
    data = reader.mapping(
        reader.parsed(text),
        None,
        ("protrain", "version", "plan_fingerprint", "step_seconds", "events", "slot_bytes"),
    )
    if data["protrain"] != KIND:
        reader.fail(f"expected {KIND!r}, got {data['protrain']!r}", "protrain")
    if data["version"] != VERSION:
        reader.fail(
            f"expected version {VERSION}, got {data['version']!r}", "version", "record again"
        )
    sizes = data["slot_bytes"]
    return Recording(
        plan_fingerprint=reader.text(data["plan_fingerprint"], "plan_fingerprint"),
        step_seconds=reader.seconds(data["step_seconds"], "step_seconds"),
        events=tuple(
            reader.event(event, f"events[{index}]")
            for index, event in enumerate(reader.of(list, data["events"], "a list", "events"))
        ),
        slot_bytes=tuple(
            reader.of(int, size, "a number of bytes", f"slot_bytes[{index}]", below=2**63)
            for index, size in enumerate(reader.of(list, sizes, "a list", "slot_bytes"))
        ),
    )


def check_recording(
    recording: Recording, plan: Plan, program: Program, source: str | None = None
) -> None:
    """RecordError where the recording is not one of this plan's step."""
    reader = _Reader(source)
    if recording.plan_fingerprint != (expected := fingerprint(plan)):
        problem = f"recorded under another plan, {recording.plan_fingerprint}: this is {expected}"
        reader.fail(problem, "plan_fingerprint", "record a step of this plan")
    lanes = {program.slot_name(index): "compute" for index in range(len(program.slots) + 1)}
    lanes |= {program.move_name(n): str(move.lane) for n, move in enumerate(program.moves)}
    seen: set[str] = set()
    for index, event in enumerate(recording.events):
        key = f"events[{index}]"
        if event.name not in lanes:
            reader.fail(f"the plan has nothing called {event.name!r}", f"{key}.name")
        if event.lane != lanes[event.name]:
            problem = f"{event.name!r} runs on {lanes[event.name]!r}, not on {event.lane!r}"
            reader.fail(problem, f"{key}.lane")
        if event.name in seen:
            reader.fail(f"{event.name!r} stands there twice", f"{key}.name")
        seen.add(event.name)
    expected_slots = len(program.slots) + 1
    if recording.slot_bytes and len(recording.slot_bytes) != expected_slots:
        problem = f"expected {expected_slots} numbers or none, got {len(recording.slot_bytes)}"
        reader.fail(problem, "slot_bytes")


class _Reader:
    """Checks of what JSON holds; every failure names the file and the key."""

    def __init__(self, source: str | None) -> None:
        self._source = source

    def fail(self, problem: str, key: str | None = None, fix: str | None = None) -> NoReturn:
        raise RecordError(problem, source=self._source, key=key, fix=fix)

    def parsed(self, text: str) -> object:
        hooks = {"object_pairs_hook": self._once, "parse_constant": self._no_number}
        parsed: object = parsed_json(text, self._source, most=_MAX_NODES, **hooks)
        return parsed

    def of(self, kind: Any, value: Any, expected: str, key: str | None, below: float = 0) -> Any:
        """The value, which is of that type; with `below`, a number from 0 to less than that."""
        right = isinstance(value, kind) and not isinstance(value, bool)
        if not right or (below and not 0 <= value < below):
            shown = text if len(text := json.dumps(value)) <= 60 else f"{text[:57]}..."
            self.fail(f"expected {expected}, got {shown}", key)
        return value

    def mapping(self, value: object, key: str | None, keys: Collection[str]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.of(dict, value, "a mapping", key)
        for name in found:
            if name not in keys:
                self.fail(f"unknown key {name!r}", key, f"the keys are {', '.join(keys)}")
        for name in keys:
            if name not in found:
                self.fail(f"missing key {name!r}", key)
        return found

    def event(self, value: object, key: str) -> Event:
        data = self.mapping(value, key, ("lane", "name", "start_s", "end_s"))
        event = Event(
            lane=self.text(data["lane"], f"{key}.lane"),
            name=self.text(data["name"], f"{key}.name"),
            start_s=self.seconds(data["start_s"], f"{key}.start_s"),
            end_s=self.seconds(data["end_s"], f"{key}.end_s"),
        )
        if event.end_s < event.start_s:
            self.fail("ends before it starts", key)
        return event

    def text(self, value: object, key: str) -> str:
        return str(self.of(str, value, "a text", key))

    def seconds(self, value: object, key: str) -> float:
        # Centuries are not seconds of a step; what is too large for a float (1e999) is infinite.
        return float(self.of(int | float, value, "seconds", key, below=1e12))

    def _once(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, value in pairs:
            if name in found:
                self.fail(f"the key {name!r} stands here twice", fix="remove one of them")
            found[name] = value
        return found

    def _no_number(self, text: str) -> NoReturn:
        self.fail(f"{text} is no number of JSON")
