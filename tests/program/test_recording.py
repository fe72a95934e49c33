"""Recordings: what is written reads back equal, and everything else is one message."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protrain_runtime.contract.errors import RecordError
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


def refused(text: str) -> str:
    with pytest.raises(RecordError) as caught:
        loads_recording(text, "r.json")
    return str(caught.value)


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("events"), "missing key 'events'"),
        (
            lambda r: r.update(extra=1),
            "unknown key 'extra'\n  fix: the keys are"
            " protrain, version, plan_fingerprint, step_seconds, events, slot_bytes",
        ),
        (lambda r: r.update(protrain="plan"), "protrain: expected 'recording', got 'plan'"),
        (lambda r: r.update(version=2), "version: expected version 1, got 2\n  fix: record again"),
        (lambda r: r.update(plan_fingerprint=3), "plan_fingerprint: expected a text, got 3"),
        (lambda r: r.update(step_seconds="1"), 'step_seconds: expected seconds, got "1"'),
        (lambda r: r.update(step_seconds=-1), "step_seconds: expected seconds, got -1"),
        (lambda r: r.update(step_seconds=True), "step_seconds: expected seconds, got true"),
        (
            lambda r: r.update(step_seconds=10**400),
            "step_seconds: expected seconds, got 1" + 56 * "0" + "...",
        ),
        (lambda r: r.update(events={}), "events: expected a list, got {}"),
        (lambda r: r["events"].append(5), "events[2]: expected a mapping, got 5"),
        (lambda r: r["events"][1].pop("lane"), "events[1]: missing key 'lane'"),
        (
            lambda r: r["events"][1].update(kind="x"),
            "events[1]: unknown key 'kind'\n  fix: the keys are lane, name, start_s, end_s",
        ),
        (lambda r: r["events"][0].update(name=None), "events[0].name: expected a text, got null"),
        (lambda r: r["events"][0].update(start_s=1), "events[0]: ends before it starts"),
        (
            lambda r: r["slot_bytes"].append(1.5),
            "slot_bytes[3]: expected a number of bytes, got 1.5",
        ),
        (lambda r: r["slot_bytes"].append(-1), "slot_bytes[3]: expected a number of bytes, got -1"),
        (lambda r: r.update(slot_bytes=None), "slot_bytes: expected a list, got null"),
    ],
)
def test_what_is_no_recording_is_one_message(change: Change, message: str) -> None:
    record = json.loads(dumps_recording(RECORDING))
    change(record)
    assert refused(json.dumps(record)) == f"r.json: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.json:1: not readable as JSON: Expecting value"),
        ('{\n"protrain": recording}', "r.json:2: not readable as JSON: Expecting value"),
        ("[]", "r.json: expected a mapping, got []"),
        ("[" * 100_000, "r.json: not readable as JSON: nested too deeply"),
        ("1" * 5000, "r.json: not readable as JSON: a number is too long"),
        ('{"a": NaN}', "r.json: NaN is no number of JSON"),
        ('{"a": 1, "a": 2}', "r.json: the key 'a' stands here twice\n  fix: remove one of them"),
    ],
)
def test_what_is_no_json_is_one_message(text: str, message: str) -> None:
    assert refused(text) == message


def test_seconds_beyond_every_number_are_refused() -> None:
    text = dumps_recording(RECORDING).replace('"step_seconds": 1e-05', '"step_seconds": 1e999')
    assert refused(text) == "r.json: step_seconds: expected seconds, got Infinity"


def test_a_recording_belongs_to_one_plan() -> None:
    step = small_step()
    own = fingerprint(step.plan)

    def checked(**changes: Any) -> str:
        recording = Recording(
            **{"plan_fingerprint": own, "step_seconds": 1.0, "events": (), **changes}
        )
        try:
            check_recording(recording, step.plan, step.program, "r.json")
        except RecordError as error:
            return str(error)
        return ""

    forward = Event(lane="compute", name="forward 0", start_s=0, end_s=1)
    gather = Event(lane="fetch host", name="fetch 3 @3", start_s=0, end_s=1)
    last = Event(lane="compute", name="update on the device", start_s=1, end_s=1)
    assert checked(events=(forward, gather, last), slot_bytes=(1,) * 13) == ""
    assert checked(plan_fingerprint="sha256:0") == (
        f"r.json: plan_fingerprint: recorded under another plan, sha256:0: this is {own}\n"
        "  fix: record a step of this plan"
    )
    assert checked(events=(forward, replace(gather, name="fetch 9 @9"))) == (
        "r.json: events[1].name: the plan has nothing called 'fetch 9 @9'"
    )
    assert checked(events=(replace(gather, lane="spill host"),)) == (
        "r.json: events[0].lane: 'fetch 3 @3' runs on 'fetch host', not on 'spill host'"
    )
    assert checked(events=(forward, forward)) == (
        "r.json: events[1].name: 'forward 0' stands there twice"
    )
    assert checked(slot_bytes=(1, 2)) == ("r.json: slot_bytes: expected 13 numbers or none, got 2")
