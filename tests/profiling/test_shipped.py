"""Shipped tallies are those of today's models. `--write-golden` writes them, minutes for all."""

import gzip
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from protrain_plan.commands.measuring import ProfileRequest
from protrain_plan.commands.option_records import WorkloadOptions
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.presets import preset_names
from protrain_plan.models.sources import load_source
from protrain_plan.profiling import shipped as shipped_tallies
from protrain_plan.profiling.estimate_cache import EstimateRequest
from protrain_plan.profiling.estimated import tallies
from protrain_plan.profiling.shipped import shipped, shipped_file, shipped_texts, versions
from protrain_plan.profiling.tally import Tally, dumps_tally
from protrain_runtime.contract.errors import ProtrainError

LENGTHS = (2048, 4096, 8192)
QUICK = ("smollm2-135m", 2048)
"""Every run looks at this one, and the night at all."""
MACHINES = ("h100-sxm", "rtx-3090", "mi300x")


def asked(name: str, length: int, **options: Any) -> ProfileRequest:
    (request,) = WorkloadOptions(**options).requests(name, [length], [1])
    return request


def question(name: str, length: int, **options: Any) -> EstimateRequest:
    found = asked(name, length, **options).question()
    assert found is not None
    return found


def told(tally: Tally) -> tuple[object, ...]:
    """All of a tally but for the seconds of the day on which it was made."""
    machines = [tally.on(load_hardware(machine)) for machine in MACHINES]
    return tally.work, tally.steps, tally.ran, tally.update, machines


@pytest.mark.nightly("smollm2-135m-2048")
@pytest.mark.parametrize(
    ("name", "length"),
    [
        pytest.param(name, length, marks=() if (name, length) == QUICK else pytest.mark.slow)
        for name in preset_names()
        for length in LENGTHS
    ],
)
def test_a_shipped_tally_is_that_of_the_model(
    name: str, length: int, request: pytest.FixtureRequest
) -> None:
    written, texts = request.config.getoption("--write-golden"), shipped_texts(name)
    if not written and str(length) not in texts:
        pytest.skip("none is shipped for these libraries, or the model takes fewer tokens")
    wanted, machine = asked(name, length), load_hardware(MACHINES[0])
    options = wanted.options(lambda *_: None)
    try:
        (today,) = tallies(load_source(name), wanted.workload, machines=[machine], **options)
    except ProtrainError:
        assert written
        return
    if written:
        data = {"versions": versions(), "tallies": {**texts, str(length): dumps_tally(today)}}
        compressed = gzip.compress(json.dumps(data, sort_keys=True).encode(), mtime=0)
        Path(str(shipped_file(name))).write_bytes(compressed)
    found = shipped(question(name, length))
    assert found is not None
    assert told(found) == told(today)


def test_what_was_not_shipped_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    name, length = QUICK
    known = question(name, length)
    if shipped(known) is None:
        pytest.skip("other versions of PyTorch or transformers: none is used")
    for other in (
        question(name, length - 1),
        question(name, length, precision="pure"),
        question(name, length, lora="r=16"),
        question(name, length, optimizer="sgd"),
        replace(known, workload=replace(known.workload, model=f"../../{name}")),
        replace(known, workload=replace(known.workload, model_config="{}")),
    ):
        assert asdict(other) != asdict(known)
        assert shipped(other) is None
    others: tuple[Mapping[str, str], ...] = ({}, {**versions(), "transformers": "5.0.0"})
    for version in others:
        monkeypatch.setattr(shipped_tallies, "versions", lambda version=version: version)
        assert shipped(known) is None
