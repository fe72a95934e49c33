"""Recordings: what is written reads back equal, and everything else is one message."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from protrain_runtime.contract.program.recording import (
    Event,
    Recording,
    check_recording,
    dumps_recording,
    loads_recording,
    read_recording,
    write_recording,
)
from protrain_runtime.contract.records import fingerprint
from tests.support.messages import Speaker
from tests.support.reporting_cases import small_step

RECORDING = Recording(
    plan_fingerprint="sha256:0123456789abcdef",
    step_seconds=1e-5,
    events=(
        Event(lane="compute", name="forward 0", start_s=0.0, end_s=2.5e-06),
        Event(lane="fetch host", name="fetch 3 @3", start_s=1e-06, end_s=1e-06),
    ),
    slot_bytes=(1024, 0, 7),
)


def test_recordings_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "recording.json"
    write_recording(RECORDING, path)
    assert read_recording(path) == RECORDING
    nothing = replace(RECORDING, events=(), slot_bytes=())
    assert loads_recording(dumps_recording(nothing)) == nothing


Change = Callable[[dict[str, Any]], object]
CHANGES: dict[str, Change] = {
    "no events": lambda r: r.pop("events"),
    "another key": lambda r: r.update(extra=1),
    "another kind": lambda r: r.update(protrain="plan"),
    "another version": lambda r: r.update(version=2),
    "a number as fingerprint": lambda r: r.update(plan_fingerprint=3),
    "a text as seconds": lambda r: r.update(step_seconds="1"),
    "negative seconds": lambda r: r.update(step_seconds=-1),
    "a bool as seconds": lambda r: r.update(step_seconds=True),
    "too many seconds": lambda r: r.update(step_seconds=10**400),
    "events in no list": lambda r: r.update(events={}),
    "an event of none": lambda r: r["events"].append(5),
    "an event without lane": lambda r: r["events"][1].pop("lane"),
    "an event of more": lambda r: r["events"][1].update(kind="x"),
    "an event without name": lambda r: r["events"][0].update(name=None),
    "an event that ends first": lambda r: r["events"][0].update(start_s=1),
    "parts of bytes": lambda r: r["slot_bytes"].append(1.5),
    "negative bytes": lambda r: r["slot_bytes"].append(-1),
    "no bytes": lambda r: r.update(slot_bytes=None),
}
TEXTS = {
    "nothing": "",
    "no JSON": '{\n"protrain": recording}',
    "a list": "[]",
    "nesting": "[" * 100_000,
    "digits": "1" * 5000,
    "NaN": '{"a": NaN}',
    "a key twice": '{"a": 1, "a": 2}',
    "infinity": dumps_recording(RECORDING).replace(
        '"step_seconds": 1e-05', '"step_seconds": 1e999'
    ),
}


@pytest.mark.parametrize("what", [*CHANGES, *TEXTS])
def test_what_is_no_recording_is_one_message(what: str, assert_says: Speaker) -> None:
    text = TEXTS.get(what)
    if text is None:
        record = json.loads(dumps_recording(RECORDING))
        CHANGES[what](record)
        text = json.dumps(record)
    assert_says.refused(loads_recording, text, "r.json")


def test_a_recording_belongs_to_one_plan(assert_says: Speaker) -> None:
    step = small_step()
    forward = Event(lane="compute", name="forward 0", start_s=0, end_s=1)
    gather = Event(lane="fetch host", name="fetch 3 @3", start_s=0, end_s=1)
    last = Event(lane="compute", name="update on the device", start_s=1, end_s=1)
    own = Recording(
        plan_fingerprint=fingerprint(step.plan),
        step_seconds=1.0,
        events=(forward, gather, last),
        slot_bytes=(1,) * 13,
    )
    check_recording(own, step.plan, step.program, "r.json")
    changes: list[dict[str, Any]] = [
        {"plan_fingerprint": "sha256:0"},
        {"events": (forward, replace(gather, name="fetch 9 @9"))},
        {"events": (replace(gather, lane="spill host"),)},
        {"events": (forward, forward)},
        {"slot_bytes": (1, 2)},
    ]
    for change in changes:
        assert_says.refused(
            check_recording, replace(own, **change), step.plan, step.program, "r.json"
        )
