"""Profiles that are grown, against estimates of the size itself: no byte is promised too low."""

import itertools
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.planning.questions.growth import grown
from protrain_plan.profiling.estimated import estimates
from protrain_runtime.contract.records.adapters import parse_lora
from protrain_runtime.contract.records.profile import DType, Precision, Profile

Size = tuple[int, int]  # [sequences], [tokens] of each


class Trained(NamedTuple):
    """A model, and sizes of batches [sequences] and of sequences [tokens]."""

    model: str
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: DType = "bfloat16"
    precision: Precision = "pure"
    adapter: str = ""
    machines: tuple[str, ...] = ("rtx-4090", "cpu")


LLAMA = Trained("tiny-llama", (1, 4), (64, 520))
GPT2 = Trained("tiny-gpt2", (1, 4), (64, 250))
TRAINED = [
    LLAMA,
    # On a card grouped heads in float32 keep scores, which follow the square of the length.
    LLAMA._replace(dtype="float32", machines=("cpu",)),
    LLAMA._replace(precision="autocast"),
    LLAMA._replace(precision="master"),
    LLAMA._replace(adapter="r=4"),
    GPT2,
    GPT2._replace(precision="autocast"),
    Trained("smollm2-135m", (1, 4), (256, 1024)),
]


def told(trained: Trained) -> dict[Size, list[Profile]]:
    """By batch and length, an estimate for each of the machines."""
    return {
        (batch, length): estimates(
            load_source(trained.model),
            machines=[load_hardware(name) for name in trained.machines],
            batch_size=batch,
            seq_len=length,
            dtype=trained.dtype,
            precision=trained.precision,
            adapter=trained.adapter and str(parse_lora(trained.adapter)),
        )
        for batch, length in itertools.product(trained.batches, trained.lengths)
    }


def too_low(promised: Profile, true: Profile) -> list[tuple[str, int]]:
    """What the promise says too few bytes of, and how few."""
    found = [("base", true.base_bytes - promised.base_bytes)]
    for unit, real in zip(promised.units, true.units, strict=True):
        forms = {cost.form: cost for cost in real.forms}
        for cost in unit.forms:
            if other := forms.get(cost.form):
                name = f"{unit.name}, {cost.form}"
                left, needed = (one.kept_bytes - one.swappable_bytes for one in (cost, other))
                found += [
                    (f"{name}: kept", other.kept_bytes - cost.kept_bytes),
                    (f"{name}: left by a swap", needed - left),
                    (f"{name}: forward", other.forward_peak_bytes - cost.forward_peak_bytes),
                    (f"{name}: backward", other.backward_peak_bytes - cost.backward_peak_bytes),
                ]
    return [(name, size) for name, size in found if size > 0]


def assert_never_too_low(known: dict[Size, list[Profile]]) -> None:
    """From each size to each that differs in the batch or in the length."""
    compared = 0
    for (size, made), ((batch, length), real) in itertools.permutations(known.items(), 2):
        if (size[0] == batch) != (size[1] == length):
            for profile, true in zip(made, real, strict=True):
                promised = grown(profile, batch_size=batch, seq_len=length)
                assert too_low(promised, true) == [], (size, (batch, length))
                compared += 1
    assert compared >= 2


@pytest.mark.slow
@pytest.mark.parametrize("trained", TRAINED, ids=lambda one: "-".join(map(str, one)))
def test_a_grown_profile_never_says_fewer_bytes_than_an_estimate(trained: Trained) -> None:
    assert_never_too_low(told(trained))


def test_a_grown_profile_of_two_blocks_never_says_fewer_bytes(tmp_path: Path) -> None:
    config = json.loads(load_source("tiny-llama").model_config) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    trained = LLAMA._replace(model=str(tmp_path), lengths=(64,), machines=("rtx-4090",))
    assert_never_too_low(told(trained))
