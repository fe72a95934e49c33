"""The shipped catalogue: published model configurations as data. No torch, no network."""

import json
from importlib.resources import files
from importlib.resources.abc import Traversable

JsonObject = dict[str, object]


def preset_names() -> tuple[str, ...]:
    """The names that `preset_config` knows, sorted."""
    return tuple(sorted(f.name.removesuffix(".json") for f in _folder().iterdir()))


def preset_config(name: str) -> JsonObject:
    """The configuration called `name`, as Hugging Face reads it; KeyError for an unknown name.

    Keys that begin with an underscore are notes of ours, such as `_source`.
    """
    if name not in preset_names():
        raise KeyError(name)
    config = json.loads(_folder().joinpath(f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config


def _folder() -> Traversable:
    return files("protrain_plan.models").joinpath("catalogue")
