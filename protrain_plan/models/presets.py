"""Configurations as data: those of files, and shipped ones as published. No torch, no network."""

import json
import os
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.tree import parsed_json

JsonObject = dict[str, object]

DEFAULT_OPTIMIZER = "adamw"

# The names that architectures have for the same thing.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A shipped configuration, in short. `num_parameters` is as published, tied ones once.

    `num_layers` and `hidden_size` are those of the encoder where there is a decoder too, and of
    the text where there are images.
    """

    name: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    source: str


def presets() -> tuple[Preset, ...]:
    """All shipped configurations, sorted by name."""
    return tuple(_preset(name, preset_config(name)) for name in preset_names())


def _preset(name: str, config: JsonObject) -> Preset:
    text = config.get("text_config", config)
    assert isinstance(text, dict)
    return Preset(
        name=name,
        num_parameters=_number(config, "_parameters"),
        num_layers=_number(text, *_LAYERS),
        hidden_size=_number(text, *_HIDDEN),
        source=str(config["_source"]),
    )


def _number(config: JsonObject, *names: str) -> int:
    found = next(config[name] for name in names if name in config)
    assert isinstance(found, int)
    return found


def preset_names() -> tuple[str, ...]:
    """The names that `preset_config` knows, sorted."""
    return tuple(sorted(f.name.removesuffix(".json") for f in _folder().iterdir()))


def preset_config(name: str) -> JsonObject:
    """The configuration called `name`, as Hugging Face reads it; KeyError for an unknown name.

    Keys that begin with an underscore are notes of ours: `_source`, `_parameters`, `_note`.
    """
    if name not in preset_names():
        raise KeyError(name)
    config = json.loads(_folder().joinpath(f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config


def read_config(model: str) -> JsonObject | None:
    """The configuration of a preset, or of a config.json (or the folder with it), without notes.

    None where the MODEL argument names neither: a factory. ProtrainError for a file without one.
    """
    if model in preset_names():
        return _without_notes(preset_config(model))
    path = Path(model)
    if os.path.isdir(path):  # noqa: PTH112  (a name that no file can have is none)
        path = path / "config.json"
    if os.path.isfile(path):  # noqa: PTH113
        return parse_config(read_text(path), where=str(path))
    return None


def parse_config(text: str, *, where: str) -> JsonObject:
    """The configuration that a text holds, without notes; ProtrainError where it holds none."""
    config = parsed_json(text, where)
    if not isinstance(config, dict):
        raise ProtrainError(f"expected a JSON object, got {type(config).__name__}", source=where)
    return _without_notes(config)


def _without_notes(config: JsonObject) -> JsonObject:
    """The keys that say how the model is built: no notes, nothing about weights or versions."""
    dropped = ("transformers_version", "torch_dtype", "dtype")
    return {k: v for k, v in config.items() if not k.startswith("_") and k not in dropped}


def _folder() -> Traversable:
    return files("protrain_plan.models").joinpath("catalogue")
