"""`load_source`: a MODEL argument becomes something that builds the model and its batches.

Building is deterministic in the seed and leaves the global random states as they were.
"""

import difflib
import json
from pathlib import Path

from protrain_plan.errors import ProtrainError
from protrain_plan.models.factory import FactorySource
from protrain_plan.models.hugging_face import ConfigSource
from protrain_plan.models.presets import JsonObject, preset_config, preset_names

ModelSource = ConfigSource | FactorySource


def load_source(model: str, *, model_config: str = "") -> ModelSource:
    """The source that a MODEL argument names.

    A preset's name, the path of a config.json (or of the folder with it), or a factory in a module
    or in a file: `package.module:factory`, `path/to/file.py:factory`. With `model_config`, the JSON
    of a record's `Workload.model_config`, the configuration comes from there: a profile can be used
    where the file is not.
    ProtrainError, with the nearest preset names, where there is no such model.
    """
    if model_config:
        return ConfigSource(model, _parsed(model_config, where=model))
    if model in preset_names():
        return ConfigSource(model, _without_notes(preset_config(model)))
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return ConfigSource(model, _parsed(_text(path), where=str(path)))
    if ":" in model and path.suffix != ".json":
        return FactorySource(model)
    near = difflib.get_close_matches(model.lower(), preset_names(), n=3, cutoff=0.5)
    known = f"did you mean {' or '.join(near)}?" if near else "protrain models lists the presets"
    raise ProtrainError(
        f"no such model: {model!r} is not a preset, a config.json or package.module:factory",
        fix=known,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProtrainError(f"cannot read the configuration: {error}", source=str(path)) from error


def _parsed(text: str, *, where: str) -> JsonObject:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProtrainError(
            f"not JSON: {error.msg} at line {error.lineno}", source=where
        ) from error
    if not isinstance(config, dict):
        raise ProtrainError(f"expected a JSON object, got {type(config).__name__}", source=where)
    return _without_notes(config)


def _without_notes(config: JsonObject) -> JsonObject:
    """What says how the model is built: no notes, nothing about weights or versions."""
    dropped = ("transformers_version", "torch_dtype", "dtype")
    return {k: v for k, v in config.items() if not k.startswith("_") and k not in dropped}
