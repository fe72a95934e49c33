"""Configurations as data, from files or as published. No torch, no network."""

import difflib
import json
import os
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import chain, product
from pathlib import Path
from typing import Any

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.tree import parsed_json

JsonObject = dict[str, object]

DEFAULT_OPTIMIZER = "adamw"

_CATALOGUE = files("protrain_plan.models").joinpath("catalogue")

_MIRRORS = ("unsloth", "NousResearch")
"""Organisations that republish others' models, with their configurations."""

_RENAMED = {"zai-org": "THUDM"}

# Architectures' names for the same thing.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A shipped configuration, in short. `num_parameters` is as published, tied ones once.

    `num_layers` and `hidden_size` are the encoder's if there is also a decoder, and the text
    model's with images.
    """

    name: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    source: str


def presets() -> tuple[Preset, ...]:
    """All shipped configurations, sorted by name."""
    found: list[Preset] = []
    for name in preset_names():
        config: Any = preset_config(name)
        text = config.get("text_config", config)
        found.append(
            Preset(
                name=name,
                num_parameters=config["_parameters"],
                num_layers=next(text[key] for key in _LAYERS if key in text),
                hidden_size=next(text[key] for key in _HIDDEN if key in text),
                source=config["_source"],
            )
        )
    return tuple(found)


@cache
def preset_names() -> tuple[str, ...]:
    """The names that `preset_config` knows, sorted."""
    return tuple(sorted(f.name.removesuffix(".json") for f in _CATALOGUE.iterdir()))


def preset_of(name: str) -> str | None:
    """The preset of a name, in any case; None if unknown.

    Its own name, or a repository's of its sizes, with or without organisation, or a mirror's.
    """
    return _presets_by_name().get(name.lower())


def known_model(model: str) -> str:
    """A MODEL argument with a preset's own name; paths unchanged."""
    found = None if model in preset_names() or os.path.exists(model) else preset_of(model)  # noqa: PTH110
    return found or model


_AS_NEAR = 0.02
"""Tolerance of the similarity of names, relative to the nearest."""


def near_names(model: str) -> list[str]:
    """The presets with the most similar names, nearest first."""
    by_name = _presets_by_name()
    last = model.lower().rpartition("/")[2]
    names = [name for name in by_name if "/" not in name]
    near = [name for name in names if name.startswith(last)]
    if not near and (found := difflib.get_close_matches(last, names, 1, 0.6)):
        as_near = difflib.SequenceMatcher(None, found[0], last).ratio() - _AS_NEAR
        near = difflib.get_close_matches(last, names, 9, as_near)
    return list(dict.fromkeys(by_name[name] for name in near))[:3]


@cache
def _presets_by_name() -> dict[str, str]:
    """The presets by all of their names, in lower case."""
    found: dict[str, str] = {}
    for preset in preset_names():
        config: Any = preset_config(preset)
        own = config["_source"].split("/blob/")[0].removeprefix("https://huggingface.co/")
        for repository in (own, *chain(*map(_spelt_out, config.get("_same_sizes", ())))):
            organisation, _, name = repository.rpartition("/")
            mirrors = () if preset.startswith("phi") else _MIRRORS  # other splits
            renamed = _RENAMED.get(organisation, organisation)
            for place in (organisation, renamed, *mirrors):
                found[f"{place}/{name}".lower()] = preset
            found[name.lower()] = preset
    return found | {name: name for name in preset_names()}


def _spelt_out(text: str) -> list[str]:
    """All names of a text with optional parts."""
    parts = re.split(r"\[(.*?)\]", text)  # odd parts were in brackets
    choices = [(part, "")[: 1 + number % 2] for number, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def preset_config(name: str) -> JsonObject:
    """The configuration called `name`, as Hugging Face reads it; KeyError for an unknown name.

    Keys with a leading underscore are our notes: `_source`, `_parameters`, `_note`, and
    `_same_sizes`, its repositories of weights; a part in brackets is optional. Their published
    configurations have the same vocabulary, layers, widths, heads, experts and window: bytes and
    seconds depend on nothing else. Names are not parsed. For models with images (Gemma 3 from 4B
    on, Mistral Small 3.1 and 3.2) it is the text model. Sources: these repositories'
    configurations, torchtune's recipes (bd2a0fc7) that download them for a builder of these sizes,
    and parameter counts of model cards.
    """
    if name not in preset_names():
        raise KeyError(name)
    config = json.loads(_CATALOGUE.joinpath(f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config


def read_config(model: str) -> JsonObject | None:
    """The configuration, without notes, of a preset or a config.json (or its folder).

    A preset may have any of its names, unless that is a file's or a folder's. None if the MODEL
    argument names neither: a factory. ProtrainError for an invalid file.
    """
    if model in preset_names():
        return _without_notes(preset_config(model))
    path = Path(model)
    if os.path.isdir(path):  # noqa: PTH112  (a name that no file can have is none)
        path = path / "config.json"
    if os.path.isfile(path):  # noqa: PTH113
        return parse_config(read_text(path), where=str(path))
    known = known_model(model)
    return None if known == model else _without_notes(preset_config(known))


def is_factory(model: str) -> bool:
    """Whether a MODEL argument names code for a model and its batches."""
    return ":" in model and Path(model).suffix != ".json" and read_config(model) is None


def names_model(text: str) -> bool:
    """Whether an argument for a record names a model instead, or a trainer's file."""
    if not os.path.isfile(text):  # noqa: PTH113
        return is_factory(text) or preset_of(text) is not None or os.path.isdir(text)  # noqa: PTH112
    return Path(text).suffix in (".yaml", ".yml", ".json") and "protrain" not in read_text(text)


def parse_config(text: str, *, where: str) -> JsonObject:
    """The configuration in a text, without notes; ProtrainError if invalid."""
    config = parsed_json(text, where)
    if not isinstance(config, dict):
        raise ProtrainError(f"expected a JSON object, got {type(config).__name__}", source=where)
    return _without_notes(config)


def _without_notes(config: JsonObject) -> JsonObject:
    """The keys for building the model: without notes, weights or versions."""
    dropped = ("transformers_version", "torch_dtype", "dtype")
    return {k: v for k, v in config.items() if not k.startswith("_") and k not in dropped}
