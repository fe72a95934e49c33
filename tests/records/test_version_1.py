"""Files of version 1, as they were committed, are read as what they said, and still match."""

from pathlib import Path

import pytest

from protrain_plan.planning.model.options import parse_pin
from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.records import (
    dumps_hardware,
    dumps_plan,
    dumps_profile,
    fingerprint,
    loads_hardware,
    loads_plan,
    loads_profile,
    read_hardware,
    read_plan,
    read_profile,
)
from protrain_runtime.contract.records.decisions import OLD_PHRASES, STATES
from protrain_runtime.contract.records.plan import Offload

OLD = Path(__file__).parents[1] / "formats" / "records-1"


def test_old_phrases_and_keys_are_read() -> None:
    plan, machine = read_plan(OLD / "plan.yaml"), read_hardware(OLD / "hardware.yaml")
    assert "states: buffer from" in (OLD / "plan.yaml").read_text()
    assert any(unit.states == Offload(tier="host", keep_gathered=True) for unit in plan.units)
    joined = machine.interconnect
    assert joined is not None and joined.inter_node is not None
    assert joined.intra_node.gather_bytes_per_s == 3.6e11
    assert joined.inter_node.gather_bytes_per_s == 3e11


def test_an_old_plan_matches_its_old_profile_and_the_same_written_today() -> None:
    plan, profile = read_plan(OLD / "plan.yaml"), read_profile(OLD / "profile.yaml")
    assert fingerprint(profile) == plan.profile_fingerprint
    today = loads_profile(dumps_profile(profile))
    assert (today, fingerprint(today)) == (profile, plan.profile_fingerprint)


def test_what_is_written_is_of_todays_version() -> None:
    plan = read_plan(OLD / "plan.yaml")
    text = dumps_plan(plan)
    assert "\nversion: 2\n" in text and "buffer" not in text
    assert loads_plan(text) == plan
    machine = read_hardware(OLD / "hardware.yaml")
    text = dumps_hardware(machine)
    assert "  intra_node: {" in text and "  within: {" not in text
    assert loads_hardware(text) == machine


@pytest.mark.parametrize("old", OLD_PHRASES)
def test_an_old_phrase_is_read_in_old_files_and_pins_alone(old: str) -> None:
    first = "states: buffer from host"
    text = (OLD / "plan.yaml").read_text()
    assert loads_plan(text.replace(first, f"states: {old}")).units
    assert parse_pin(f"head: {old}").states == parse_pin(f"head: {OLD_PHRASES[old]}").states
    assert parse_pin(f"head: {old}").states == STATES[OLD_PHRASES[old]]
    with pytest.raises(RecordError) as caught:
        loads_plan(text.replace("version: 1", "version: 2").replace(first, f"states: {old}"))
    assert caught.value.message.endswith(f"got {old!r}")
    assert caught.value.fix == f"write {OLD_PHRASES[old]!r}"


@pytest.mark.parametrize(("old", "new"), [("within", "intra_node"), ("across", "inter_node")])
def test_an_old_key_is_refused_in_a_file_of_today(old: str, new: str) -> None:
    machine = read_hardware(OLD / "hardware.yaml")
    text = dumps_hardware(machine).replace(f"  {new}: ", f"  {old}: ")
    assert loads_hardware(text.replace("version: 2", "version: 1")) == machine
    with pytest.raises(RecordError) as caught:
        loads_hardware(text)
    assert caught.value.key == "interconnect"
    assert caught.value.message == f"unknown key {old!r}"
    assert caught.value.fix == f"its name is {new} now"


def test_a_key_stands_in_one_spelling() -> None:
    text = (OLD / "hardware.yaml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("  within: "))
    both = text.replace(line, f"{line}\n{line.replace('within', 'intra_node')}")
    with pytest.raises(RecordError, match="unknown key 'within'"):
        loads_hardware(both)
