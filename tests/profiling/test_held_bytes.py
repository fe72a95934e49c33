"""Bytes that models hold besides what autograd saves for one block, under plans that move them.

The oracles are plain PyTorch, bit by bit, and a measured step, slot by slot.
"""

from pathlib import Path

import pytest
from torch import nn

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.profiling.estimated import estimate
from protrain_runtime.contract.errors import ProtrainError
from tests.support.held_models import (
    HELD,
    KEPT,
    LINKED,
    Block,
    Hoarding,
    InAttribute,
    OnContext,
    Stack,
    batch,
    stack_of,
)
from tests.support.held_training import ABOVE_BYTES, assert_within, profiled
from tests.support.messages import Speaker
from tests.support.peaks import SLACK_BYTES, bytes_of_others
from tests.support.runtime_cases import (
    profiled_here,
)

QUICK = (HELD[0], KEPT[0], LINKED[0])
"""A model of each kind; the others run at night."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
        for kind in (*HELD, *KEPT, *LINKED)
    ],
    ids=lambda kind: kind.__name__,
)
def test_a_step_holds_no_more_than_predicted(kind: type[nn.Module], tmp_path: Path) -> None:
    assert_within(kind, tmp_path, slack=ABOVE_BYTES.get(kind.__name__, SLACK_BYTES))


def test_what_a_context_or_an_attribute_holds_does_not_swap() -> None:
    """The inner activations of OnContext and InAttribute are 64 KiB, held besides autograd."""
    swappable = {
        kind.__name__: profiled(kind).units[2].cost("keep").swappable_bytes
        for kind in (stack_of(Block), stack_of(OnContext), stack_of(InAttribute))
    }
    assert swappable == {
        "StackOfBlock": 196_608,
        "StackOfOnContext": 196_608,  # the sine's output is one more, its input one less
        "StackOfInAttribute": 131_072,
    }


def test_a_model_that_keeps_more_after_every_step_is_refused(assert_says: Speaker) -> None:
    with pytest.raises(ProtrainError) as raised:
        profiled(Hoarding)
    assert_says(raised.value)


@pytest.mark.parametrize("method", ["measured", "estimated"])
def test_data_in_memory_stands_in_every_slot(method: str, tmp_path: Path) -> None:
    others = bytes_of_others()
    source = "tests.support.held_training:with_data"
    if method == "estimated":
        found = estimate(
            load_source(source),
            hardware=load_hardware("cpu"),
            batch_size=4,
            seq_len=64,
            dtype="float32",
        )
        others = 0
    else:
        found = profiled_here(source, tmp_path)
    data = 50 * batch(0).nbytes
    plain = profiled(Stack).base_bytes
    assert data <= found.base_bytes - others - plain <= data + SLACK_BYTES
