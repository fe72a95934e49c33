"""The shipped catalogue: published machines as `Hardware` records. No torch, no network."""

import difflib
import os
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import Hardware, loads_hardware, loads_profile
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.reader import kind_of


def hardware_names() -> tuple[str, ...]:
    """The names that `load_hardware` knows, sorted."""
    names = (f.name for f in _folder().iterdir())
    return tuple(sorted(n.removesuffix(".yaml") for n in names if n.endswith(".yaml")))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """The machine called so in the catalogue, or that of a file.

    A file holds hardware, or a profile whose hardware is taken. ProtrainError, with the nearest
    names, where there is no such machine; RecordError where the file holds something else.
    """
    text = str(name_or_path)
    if text in hardware_names():
        file = _folder().joinpath(f"{text}.yaml")
        return loads_hardware(file.read_text(encoding="utf-8"), file.name)
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


def _folder() -> Traversable:
    return files("protrain_plan.hardware").joinpath("catalogue")
