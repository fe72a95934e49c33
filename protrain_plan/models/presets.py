"""Configurations as data, from files or as published. No torch, no network."""

import difflib
import json
import os
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import product
from pathlib import Path

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.json_toml import parsed_json

JsonObject = dict[str, object]

DEFAULT_OPTIMIZER = "adamw"

_MIRRORS = ("unsloth", "NousResearch")
"""Organisations that publish others' models again, with their configurations."""

_SAME_SIZES: dict[str, tuple[str, ...]] = {
    **{
        f"llama-2-{size}": (f"meta-llama/Llama-2-{size}[-chat][-hf]",)
        for size in ("7b", "13b", "70b")
    },
    "llama-3.1-8b": (
        "meta-llama/[Meta-]Llama-3[.1]-8B[-Instruct]",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    ),
    "llama-3.1-70b": (
        *("meta-llama/[Meta-]Llama-3[.1]-70B[-Instruct]", "meta-llama/Llama-3.3-70B-Instruct"),
        "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    ),
    "llama-3.1-405b": ("meta-llama/[Meta-]Llama-3.1-405B[-Instruct]",),
    **{f"llama-3.2-{size}b": (f"meta-llama/Llama-3.2-{size}B[-Instruct]",) for size in (1, 3)},
    **{
        f"qwen2.5-{size}b": (
            f"Qwen/Qwen2.5[-Coder]-{size}B[-Instruct]",
            *([f"Qwen/Qwen2.5-Math-{size}B[-Instruct]"] if size in ("1.5", "7") else []),
            *([f"Qwen/Qwen2-{size}B[-Instruct]"] if size in ("0.5", "1.5", "7") else []),
            *(
                [f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}B"]
                if size not in ("0.5", "3")
                else []
            ),
        )
        for size in ("0.5", "1.5", "3", "7", "14", "32")
    },
    "qwen2.5-72b": ("Qwen/Qwen2[.5]-72B[-Instruct]", "Qwen/Qwen2.5-Math-72B[-Instruct]"),
    **{
        f"qwen3-{size}b": (f"Qwen/Qwen3-{size}B[-Base]",)
        for size in ("0.6", "1.7", "8", "14", "32")
    },
    "qwen3-4b": ("Qwen/Qwen3-4B[-Base]", "Qwen/Qwen3-4B[-Instruct][-Thinking]-2507"),
    "qwen3-30b-a3b": (
        *("Qwen/Qwen3-30B-A3B[-Base]", "Qwen/Qwen3-30B-A3B[-Instruct][-Thinking]-2507"),
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    ),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B[-Instruct][-Thinking]-2507"),
    **{f"gemma-{size}": (f"google/gemma-[1.1-]{size}[-it]",) for size in ("2b", "7b")},
    **{f"gemma-2-{size}b": (f"google/gemma-2-{size}b[-it]",) for size in (2, 9, 27)},
    **{f"gemma-3-{size}b": (f"google/gemma-3-{size}b[-pt][-it]",) for size in (1, 4, 12, 27)},
    "mistral-7b": ("mistralai/Mistral-7B[-Instruct]-v0.1",),
    "mistral-7b-v0.2": ("mistralai/Mistral-7B[-Instruct]-v0.2",),
    "mistral-7b-v0.3": ("mistralai/Mistral-7B[-Instruct]-v0.3",),
    "mistral-small-24b": (
        "mistralai/Mistral-Small-24B[-Base][-Instruct]-2501",
        *("mistralai/Mistral-Small-3.1-24B[-Base][-Instruct]-2503",),
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    ),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B[-Instruct]-v0.1",),
    **{f"gpt-oss-{size}b": (f"openai/gpt-oss[-safeguard]-{size}b",) for size in (20, 120)},
    "glm-4-9b": ("zai-org/GLM-4-9B-0414", "zai-org/GLM-Z1-9B-0414"),
    "glm-4-32b": ("zai-org/GLM-4-32B[-Base]-0414", "zai-org/GLM-Z1-32B-0414"),
    "smollm3-3b": ("HuggingFaceTB/SmolLM3-3B[-Base]",),
    **{
        f"smollm2-{size.lower()}": (f"HuggingFaceTB/SmolLM2-{size}[-Instruct]",)
        for size in ("135M", "360M", "1.7B")
    },
    "phi-3-mini": ("microsoft/Phi-3-mini-4k-instruct",),
}
"""Repositories of weights in a preset's sizes; a part in brackets may be left out.

A name stands for a preset where its published configuration has the same vocabulary, layers,
widths, heads, experts and window: bytes and seconds depend on nothing else of it. Nothing is taken
from how a name looks. Of models that see images (Gemma 3 from 4B on, Mistral Small 3.1 and 3.2) it
is the text model. Sources: the configurations of these repositories, the recipes of torchtune
(bd2a0fc7) that download them for a builder of these sizes, and parameter counts of model cards.
"""
_RENAMED = {"zai-org": "THUDM"}

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


@cache
def preset_names() -> tuple[str, ...]:
    """The names that `preset_config` knows, sorted."""
    return tuple(sorted(f.name.removesuffix(".json") for f in _folder().iterdir()))


def preset_of(name: str) -> str | None:
    """The preset that a name stands for, in any case; None where that is not known.

    Its own, or that of a repository of its sizes, with or without the organisation, or as a mirror
    has it.
    """
    return _presets_by_name().get(name.lower())


def known_model(model: str) -> str:
    """A MODEL argument with a preset by its own name; one that is a file or a folder as it is."""
    found = None if model in preset_names() or os.path.exists(model) else preset_of(model)  # noqa: PTH110
    return found or model


_AS_NEAR = 0.02
"""The part of their letters by which names may be less like one than the nearest, to be named."""


def near_names(model: str) -> list[str]:
    """The presets whose names, or other names, are most like this one, the nearest first."""
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
    """The presets by all names that stand for them, in small letters."""
    found: dict[str, str] = {}
    for preset in preset_names():
        published = str(preset_config(preset)["_source"]).split("/blob/")[0]
        own = published.removeprefix("https://huggingface.co/")
        for repository in (own, *(n for t in _SAME_SIZES.get(preset, ()) for n in _spelt_out(t))):
            organisation, _, name = repository.rpartition("/")
            mirrors = () if preset.startswith("phi") else _MIRRORS  # those are split otherwise
            renamed = _RENAMED.get(organisation, organisation)
            for place in (organisation, renamed, *mirrors):
                found[f"{place}/{name}".lower()] = preset
            found[name.lower()] = preset
    return found | {name: name for name in preset_names()}


def _spelt_out(text: str) -> list[str]:
    """All names that a text with optional parts stands for."""
    parts = re.split(r"\[(.*?)\]", text)  # every second one was in brackets
    choices = [(part, "")[: 1 + number % 2] for number, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


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

    A preset may have any name that stands for it, unless that is a file's or a folder's.
    None where the MODEL argument names neither: a factory. ProtrainError for a file without one.
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
    """Whether a MODEL argument names code that makes a model and its batches."""
    return ":" in model and Path(model).suffix != ".json" and read_config(model) is None


def names_model(text: str) -> bool:
    """Whether an argument for a record names a model in its place, or a trainer's file."""
    if not os.path.isfile(text):  # noqa: PTH113
        return is_factory(text) or preset_of(text) is not None or os.path.isdir(text)  # noqa: PTH112
    return Path(text).suffix in (".yaml", ".yml", ".json") and "protrain" not in read_text(text)


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
