"""A recorded step: slots and moves in time, by the simulated names. JSON, read strictly.

    {"protrain": "recording", "version": 1,
     "plan_fingerprint": "sha256:...",
     "step_seconds": 4.19,
     "events": [{"lane": "fetch disk", "name": "fetch 3 @3", "start_s": 0.51, "end_s": 0.53}],
     "slot_bytes": [681000000]}

A recording is of one step; with micro-batches, of the last one and the update. Names, each at most
once, are those of `Program.slot_name`, on the lane "compute", and of `Program.move_name`. Seconds
count from the step's beginning.
"""

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from protrain_runtime.contract.errors import RecordError, cut
from protrain_runtime.contract.program.program import Program
from protrain_runtime.contract.records import fingerprint
from protrain_runtime.contract.records.files import read_text, replace_text
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.records.tree import Document, parsed_json

KIND, VERSION = "recording", 1
MAX_FILE_BYTES = 64 * 2**20
"""Largest recording: half a million moves."""
_MAX_NODES = 5_000_000


Instant = Annotated[float, Meta(ge=0, lt=1e12)]
"""Seconds of a step: no centuries."""


class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A slot's compute, or a move: start and end in seconds of the step."""

    lane: str
    name: str
    start_s: Instant
    end_s: Instant


class Recording(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One recorded step; `slot_bytes` are peaks per slot, the update's last; may be empty."""

    protrain: str = KIND
    version: int = VERSION
    plan_fingerprint: str
    step_seconds: Instant
    slot_bytes: tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...] = ()
    events: tuple[Event, ...]


def read_recording(path: str | Path) -> Recording:
    """The recording in the file; RecordError if invalid."""
    return loads_recording(read_text(path, most_bytes=MAX_FILE_BYTES), str(path))


def write_recording(recording: Recording, path: str | Path) -> None:
    """Write the recording atomically; RecordError if impossible."""
    replace_text(path, dumps_recording(recording))


def dumps_recording(recording: Recording) -> str:
    """The recording as JSON text, an event a line."""
    data = msgspec.structs.asdict(recording)
    events = ",\n".join(json.dumps(msgspec.structs.asdict(event)) for event in data.pop("events"))
    return f'{json.dumps(data)[:-1]}, "events": [\n{events}\n]}}\n'


def loads_recording(text: str, source: str | None = None) -> Recording:
    """The recording in the text; RecordError, naming `source`, if invalid."""
    hooks: Any = {"object_pairs_hook": _once, "parse_constant": _no_number}
    try:
        data = parsed_json(text, source, most=_MAX_NODES, **hooks)
    except RecordError as error:
        error.source = source
        raise
    document = Document("", source, data).headed(KIND, VERSION)
    recording = document.read(Recording)
    for index, event in enumerate(recording.events):
        if event.end_s < event.start_s:
            raise document.at("events", index).error("ends before it starts")
    return recording


def check_recording(
    recording: Recording, plan: Plan, program: Program, source: str | None = None
) -> None:
    """RecordError if the recording is not of this plan's step."""
    document = Document("", source, msgspec.to_builtins(recording))
    if recording.plan_fingerprint != (expected := fingerprint(plan)):
        problem = f"recorded under another plan, {recording.plan_fingerprint}: this is {expected}"
        fix = "record a step of this plan"
        raise document.at("plan_fingerprint").error(problem, fix)
    lanes = {program.slot_name(index): "compute" for index in range(len(program.slots) + 1)}
    lanes |= {program.move_name(n): str(move.lane) for n, move in enumerate(program.moves)}
    seen: set[str] = set()
    for index, event in enumerate(recording.events):
        where = document.at("events", index)
        if event.name not in lanes:
            raise where.at("name").error(f"the plan has nothing called {event.name!r}")
        if event.lane != lanes[event.name]:
            problem = f"{event.name!r} runs on {lanes[event.name]!r}, not on {event.lane!r}"
            raise where.at("lane").error(problem)
        if event.name in seen:
            raise where.at("name").error(f"{event.name!r} appears twice")
        seen.add(event.name)
    expected_slots = len(program.slots) + 1
    if recording.slot_bytes and len(recording.slot_bytes) != expected_slots:
        problem = f"expected {expected_slots} numbers or none, got {len(recording.slot_bytes)}"
        raise document.at("slot_bytes").error(problem)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for n, (key, _) in enumerate(pairs) if key in dict(pairs[:n]))
        problem = f"the key {cut(twice)!r} appears twice"
        raise RecordError(problem, fix="remove one of them")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
