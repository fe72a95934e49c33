"""Predicted bytes of forms by leave against measured ones: master weights, autocast, micro-batches.

A table of every form in each precision. The promise holds in each slot, and the peak is near.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protrain_plan.models.sources import load_source
from protrain_runtime.contract.records import read_profile, write_profile
from protrain_runtime.contract.records.decisions import activations_text
from protrain_runtime.contract.records.plan import (
    Activations,
    Keep,
    Offload,
    Persistent,
    Placement,
    Recompute,
    Swap,
    Updates,
)
from protrain_runtime.contract.records.profile import DType, Precision, Profile
from protrain_runtime.devices.device import HOST
from protrain_runtime.devices.memory_meter import reachable, storage_bytes
from tests.support.peaks import (
    PIECE_BYTES,
    SLACK_BYTES,
    assert_within_the_promise,
    bytes_of_others,
    peaks,
    without_freedom,
)
from tests.support.runtime_cases import (
    decided,
    decision_name,
    described_by,
    made_once,
    profiled_here,
)

LEAVES = ("rounding", "int8-activations", "low-rank-activations")
BATCH, TOKENS, WIDTH, CLASSES, BLOCKS = 2, 256, 96, 2048, 2
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": CLASSES, "num_hidden_layers": BLOCKS, "intermediate_size": 384},
    "gpt2": {"vocab_size": CLASSES, "n_layer": BLOCKS},
}


@dataclass(frozen=True, slots=True)
class Trained:
    """What is trained, in which numbers."""

    model: str
    precision: Precision
    dtype: DType = "bfloat16"
    adapter: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.model, self.precision, self.dtype, self.adapter)))


TRAINED = [
    Trained("llama", "autocast"),
    Trained("llama", "master"),
    Trained("llama", "pure", "float32"),
    Trained("llama", "autocast", adapter="lora r=4"),
    Trained("gpt2", "autocast"),
    Trained("gpt2", "master"),
]

FORMS: list[tuple[Activations, Keep]] = [  # of blocks, and of the last part
    (Keep(form="int8"), Keep()),
    (Swap(tier="disk", form="int8"), Keep()),
    (Keep(form="low-rank"), Keep()),
    (Swap(tier="disk", form="low-rank"), Keep()),
    (Recompute(form="tiled"), Keep()),
    (Recompute(), Keep(form="8 tiles")),
    (Recompute(), Keep(form="64 tiles")),
    (Recompute(form="tiled"), Keep(form="64 tiles")),
    (Keep(form="int8"), Keep(form="64 tiles")),
]

Step = tuple[Updates, int]
STEPS: list[Step] = [
    ("in backward", 1),
    ("after backward", 1),
    ("in backward", 2),
    ("after backward", 3),
]

QUICK = [FORMS[0], FORMS[4], FORMS[6]]

STATES: list[Placement] = [Persistent(), Offload(tier="disk")]


def profile_of(factory: pytest.TempPathFactory, trained: Trained) -> Profile:
    """Measured once for all processes."""

    def make(path: Path) -> None:
        folder = factory.mktemp("model")
        config = json.loads(load_source(f"tiny-{trained.model}").model_config)
        (folder / "config.json").write_text(json.dumps(config | SIZES[trained.model]))
        others = bytes_of_others()  # are what a script's data would be
        record = profiled_here(
            str(folder),
            path.parent,
            dtype=trained.dtype,
            precision=trained.precision,
            adapter=trained.adapter,
            allow=LEAVES,
            batch_size=BATCH,
            seq_len=TOKENS,
        )
        write_profile(replace(record, base_bytes=record.base_bytes - others), path)

    return read_profile(made_once(factory, f"by-leave-{trained}.yaml", make))


def excess_bytes(profile: Profile, states: Placement, step: Step) -> int:
    """What the promised peak may stand above the measured one."""
    most = SLACK_BYTES + 8 * BATCH * TOKENS  # and the tokens, as what is to be predicted
    # The first block's input and the last one's output, in float32, and with adapters one more: a
    # frame of the model's forward holds them, and autograd under `int8` does not. A part is
    # promised the most of all forms.
    most += 3 * 4 * BATCH * TOKENS * WIDTH
    if isinstance(states, Offload):
        most += 4 * PIECE_BYTES  # staging: a small plan has fewer pieces than are counted
    if step[1] > 1:
        # Gradients are counted to the end of the last backward, and the running unit's twice.
        most += 2 * max(unit.gradient_bytes for unit in profile.units)
    return most


def _cases() -> Iterator[object]:
    """Two kinds of steps for every form in every precision; each kind meets each of both."""
    kinds = list(itertools.product(STEPS, STATES))
    for number, (trained, forms) in enumerate(itertools.product(TRAINED, FORMS)):
        if trained.model == "gpt2" and forms[0].form == "tiled":
            continue  # its MLP ends in dropout, which draws numbers: it is no form there
        for kind in (number, 3 * number + 5):
            step, states = kinds[kind % len(kinds)]
            quick = trained is TRAINED[0] and kind == number and forms in QUICK
            marks = () if quick else pytest.mark.slow
            activations = " and ".join(map(activations_text, forms))
            name = f"{trained}, {activations}, {step[0]} {step[1]}, {decision_name(states)}"
            yield pytest.param(trained, forms, step, states, id=name, marks=marks)


@pytest.mark.parametrize(("trained", "forms", "step", "states"), [*_cases()])
def test_measured_bytes_of_forms_by_leave_never_exceed_predicted_and_are_near(
    trained: Trained,
    forms: tuple[Activations, Keep],
    step: Step,
    states: Placement,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    profile = profile_of(tmp_path_factory, trained)
    blocks, last = forms
    assert blocks.form in {cost.form for cost in profile.units[1].forms}
    assert last.form in {cost.form for cost in profile.units[-1].forms}
    *before, part = decided(described_by(profile), blocks, states)
    units = without_freedom((*before, replace(part, activations=last)))
    updates, micro_batches = step
    spill = tmp_path_factory.mktemp("spill")
    found = peaks(profile, units, spill, updates=updates, micro_batches=micro_batches)
    assert_within_the_promise(found)
    excess = max(found.predicted) - max(found.measured)
    assert excess <= excess_bytes(profile, states, step)


def test_what_others_let_go_of_is_counted_until_the_next_measurement() -> None:
    left = [torch.ones(1 << 16)]
    counted = bytes_of_others()
    left.clear()
    assert storage_bytes(reachable(HOST)) >= counted
    assert bytes_of_others() == counted - (4 << 16)
