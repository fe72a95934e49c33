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

_SAME_SIZES = {
    "llama-2-7b": ("meta-llama/Llama-2-7b-chat-hf",),
    "llama-2-13b": ("NousResearch/Llama-2-13b-hf",),
    "llama-3.1-8b": (
        *("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct"),
        *("NousResearch/Meta-Llama-3-8B", "NousResearch/Meta-Llama-3-8B-Instruct"),
        *("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
    ),
    "llama-3.1-70b": (
        *("meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Meta-Llama-3.1-70B-Instruct"),
        "meta-llama/Llama-3.3-70B-Instruct",
    ),
    "llama-3.1-405b": ("meta-llama/Meta-Llama-3.1-405B-Instruct",),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B-Instruct",),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B-Instruct",),
    "qwen2.5-0.5b": ("Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2.5-1.5b": ("Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
    "qwen2.5-7b": ("Qwen/Qwen2-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
    **{f"qwen2.5-{size}b": (f"Qwen/Qwen2.5-{size}B-Instruct",) for size in (14, 32, 72)},
    "qwen3-4b": ("Qwen/Qwen3-4B-Instruct-2507",),
}
"""Repositories of other weights in a preset's sizes. Sources: recipes of torchtune (bd2a0fc7) that
download them for a builder of these sizes; configurations of models made from them
(cognitivecomputations/dolphin-2.9.1-llama-3-8b, unrahul/Meta-Llama-3-8B-Instruct-OpenVINO-fp16,
r4victor/Llama-2-13b-samsum, koutch/qwen_2.json_train_grpo_v1_train_code on huggingface.co)."""

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


def preset_of(repository: str) -> str | None:
    """The preset with the sizes of a repository of Hugging Face; None where that is not known."""
    for name in preset_names():
        source = str(preset_config(name)["_source"])
        published = f"https://huggingface.co/{repository}/blob/"
        if source.startswith(published) or repository in _SAME_SIZES.get(name, ()):
            return name
    return None


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
