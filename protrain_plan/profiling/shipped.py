"""Tallies that are shipped: of presets as `fit` asks about them, at usual lengths.

They are for one version of PyTorch and of transformers, and used with no other. Their seconds are
of the day on which they were made: seconds of a machine are always computed anew.
`tests/profiling/test_shipped.py` compares them with the models, and writes them.
"""

import gzip
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from protrain_plan.cache import installed
from protrain_plan.models.presets import preset_names
from protrain_plan.profiling.estimate_cache import EstimateRequest
from protrain_plan.profiling.tally import Tally, read_tally
from protrain_runtime.contract.records.tree import parsed_json


def shipped(question: EstimateRequest) -> Tally | None:
    """The tally that answers a question, None where none is shipped for these libraries."""
    text = shipped_texts(question.workload.model).get(str(question.workload.seq_len))
    if text is None:
        return None
    tally = read_tally(text)
    return tally if question.is_answered_by(tally.profile) else None


def shipped_texts(model: str) -> dict[str, str]:
    """The tallies of a preset by length, as text; none of another model or of other libraries."""
    if model not in preset_names() or not (file := shipped_file(model)).is_file():
        return {}
    found: dict[str, Any] = parsed_json(gzip.decompress(file.read_bytes()), model)
    texts: dict[str, str] = found["tallies"] if found["versions"] == versions() else {}
    return texts


def shipped_file(preset: str) -> Traversable:
    """Where a preset's tallies are: shared, since they have much text in common."""
    return files("protrain_plan.profiling").joinpath("shipped_tallies", f"{preset}.json.gz")


def versions() -> Mapping[str, str]:
    """Versions of the libraries here, for any kind of device; without unknown ones."""
    found = {name: installed(name) for name in ("torch", "transformers")}
    return {name: version[0].partition("+")[0] for name, version in found.items() if version}
