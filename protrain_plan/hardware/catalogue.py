"""The shipped catalogue: published machines as `Hardware` records. No torch, no network."""

import difflib
import os
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from protrain_plan.errors import ProtrainError
from protrain_plan.records import Hardware, loads_hardware, loads_profile
from protrain_plan.records.files import read_text
from protrain_plan.records.reader import kind_of


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
        return _hardware_in(read_text(path), text)
    near, names = _near(text.lower()), ", ".join(hardware_names())
    raise ProtrainError(
        f"no such machine: {text!r} is neither in the catalogue nor a file",
        fix=f"did you mean {' or '.join(near)}?" if near else f"one of {names}",
    )


def _near(word: str) -> list[str]:
    """The names that begin with the word, or else those closest to it."""
    longer = [name for name in hardware_names() if name.startswith(f"{word}-")]
    return longer or difflib.get_close_matches(word, hardware_names(), n=3, cutoff=0.5)


def _hardware_in(text: str, source: str) -> Hardware:
    if kind_of(text, source) == "profile":
        return loads_profile(text, source).hardware
    return loads_hardware(text, source)


def _folder() -> Traversable:
    return files("protrain_plan.hardware").joinpath("catalogue")
