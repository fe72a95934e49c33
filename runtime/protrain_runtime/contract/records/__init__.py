"""The YAML contract: `Hardware`, `Profile` and `Plan` as files that people review and commit.

Reading is strict: whatever is not exactly a record of a known version is one `RecordError` that
names file, key, problem and fix. Writing is deterministic and reads back equal. `schema.py`
describes how the files look.
"""

from functools import partial
from pathlib import Path
from typing import TypeVar

from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.records.decisions import activations_text, register_form, states_text
from protrain_runtime.contract.records.files import read_text, replace_text
from protrain_runtime.contract.records.forms import ActivationForm
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.records.reader import loads
from protrain_runtime.contract.records.schema import Record
from protrain_runtime.contract.records.writer import dumps, fingerprint

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

R = TypeVar("R", bound=Record)


def _read(kind: type[R], path: str | Path) -> R:
    """The record of this kind in the file; RecordError where there is none."""
    return loads(kind, read_text(path), str(path))


def _write(record: Record, path: str | Path) -> None:
    """Write the record, whole or not at all; RecordError where it could not be read again."""
    text = dumps(record)
    try:
        loads(type(record), text)
    except RecordError as error:
        problem = f"refused to write what could not be read again: {error.message}"
        raise RecordError(problem, source=str(path), key=error.key, fix=error.fix) from None
    replace_text(path, text)


# A name for each kind, as everything else takes one. `source` is the file that errors name.
read_hardware = partial(_read, Hardware)
read_profile = partial(_read, Profile)
read_plan = partial(_read, Plan)
loads_hardware = partial(loads, Hardware)
loads_profile = partial(loads, Profile)
loads_plan = partial(loads, Plan)
write_hardware = write_profile = write_plan = _write
dumps_hardware = dumps_profile = dumps_plan = dumps
