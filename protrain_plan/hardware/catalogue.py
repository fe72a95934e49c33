"""The shipped catalogue: published machines as `Hardware` records. No torch, no network."""

import difflib
import os
from functools import cache, reduce
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

import yaml

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import Hardware, loads_hardware, loads_profile
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.reader import kind_of
from protrain_runtime.contract.records.schema import VERSION


def hardware_names() -> tuple[str, ...]:
    """The names that `load_hardware` knows, sorted."""
    return tuple(sorted(_tables()["machines"]))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """The machine of a catalogue name or a file.

    A file holds hardware, or a profile with hardware. ProtrainError, with the nearest names, for an
    unknown machine; RecordError for other files.
    """
    text = str(name_or_path)
    if text in hardware_names():
        return _shipped(text)
    path = Path(name_or_path)
    is_file = os.path.isfile(path)  # noqa: PTH113  (a name that no file can have is none)
    if is_file or path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        content = read_text(path)
        if kind_of(content, text) == "profile":
            return loads_profile(content, text).hardware
        return loads_hardware(content, text)
    known, word = hardware_names(), text.lower()
    longer = [name for name in known if name.startswith(f"{word}-")]
    near = longer or difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    raise ProtrainError(
        f"no such machine: {text!r} is neither in the catalogue nor a file",
        fix=f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(known)}",
    )


@cache
def _tables() -> dict[str, Any]:
    text = files("protrain_plan.hardware").joinpath("machines.yaml").read_text(encoding="utf-8")
    tables: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tables


@cache
def _shipped(name: str) -> Hardware:
    """A catalogue machine, with its parts' values."""
    tables = _tables()
    own = tables["machines"][name]
    found = reduce(_over, [*(tables["parts"][part] for part in own["like"]), own])
    found["tiers"] = [{"name": tier} | values for tier, values in found["tiers"].items()]
    told = [what for what in tables["order"] if what in found["sources"]]
    found["sources"] = [f"{what}: {found['sources'][what]}" for what in told]
    del found["like"]
    head = {"protrain": "hardware", "version": VERSION, "name": name}
    return loads_hardware(yaml.safe_dump(head | found, sort_keys=False, width=inf), name)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merged mappings, recursively; `above` overrides `below`."""
    both = {
        key: _over(below[key], value) if isinstance(value, dict) and key in below else value
        for key, value in above.items()
    }
    return below | both
