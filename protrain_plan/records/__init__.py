"""The YAML contract: `Hardware`, `Profile` and `Plan` as files that people review and commit.

Reading is strict: whatever is not exactly a record of a known version is one `RecordError` that
names file, key, problem and fix. Writing is deterministic and reads back equal. `schema.py`
describes how the files look.
"""

from pathlib import Path

from protrain_plan.errors import RecordError
from protrain_plan.records.decisions import activations_text, register_form, states_text
from protrain_plan.records.files import read_text, replace_text
from protrain_plan.records.forms import ActivationForm
from protrain_plan.records.hardware import Hardware
from protrain_plan.records.plan import Plan
from protrain_plan.records.profile import Profile
from protrain_plan.records.reader import loads
from protrain_plan.records.schema import Record
from protrain_plan.records.writer import dumps, fingerprint

__all__ = [
    "ActivationForm",
    "Hardware",
    "Plan",
    "Profile",
    "Record",
    "activations_text",
    "dumps_hardware",
    "dumps_plan",
    "dumps_profile",
    "fingerprint",
    "loads_hardware",
    "loads_plan",
    "loads_profile",
    "read_hardware",
    "read_plan",
    "read_profile",
    "register_form",
    "states_text",
    "write_hardware",
    "write_plan",
    "write_profile",
]


def read_hardware(path: str | Path) -> Hardware:
    """The hardware in the file; RecordError where there is none."""
    return loads(Hardware, read_text(path), str(path))


def read_profile(path: str | Path) -> Profile:
    """The profile in the file; RecordError where there is none."""
    return loads(Profile, read_text(path), str(path))


def read_plan(path: str | Path) -> Plan:
    """The plan in the file; RecordError where there is none."""
    return loads(Plan, read_text(path), str(path))


def write_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write the hardware, whole or not at all; RecordError where that cannot be done."""
    _write(hardware, path)


def write_profile(profile: Profile, path: str | Path) -> None:
    """Write the profile, whole or not at all; RecordError where that cannot be done."""
    _write(profile, path)


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan, whole or not at all; RecordError where that cannot be done."""
    _write(plan, path)


def loads_hardware(text: str, source: str | None = None) -> Hardware:
    """The hardware in the text; RecordError, naming `source`, where there is none."""
    return loads(Hardware, text, source)


def loads_profile(text: str, source: str | None = None) -> Profile:
    """The profile in the text; RecordError, naming `source`, where there is none."""
    return loads(Profile, text, source)


def loads_plan(text: str, source: str | None = None) -> Plan:
    """The plan in the text; RecordError, naming `source`, where there is none."""
    return loads(Plan, text, source)


def dumps_hardware(hardware: Hardware) -> str:
    """The hardware as YAML text."""
    return dumps(hardware)


def dumps_profile(profile: Profile) -> str:
    """The profile as YAML text."""
    return dumps(profile)


def dumps_plan(plan: Plan) -> str:
    """The plan as YAML text."""
    return dumps(plan)


def _write(record: Record, path: str | Path) -> None:
    """Write what can be read again: no number that is not finite, no two units of one name."""
    text = dumps(record)
    try:
        loads(type(record), text)
    except RecordError as error:
        problem = f"refused to write what could not be read again: {error.message}"
        raise RecordError(problem, source=str(path), key=error.key, fix=error.fix) from None
    replace_text(path, text)
