"""Products that are cheap to run again, such as LoRA's second: which they are, what that saves.

What must not change a block that has them is in test_forms.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from protrain_plan.hardware.catalogue import hardware_names, load_hardware
from protrain_plan.hardware.operator_log import OperatorLog
from protrain_plan.models.sources import load_source
from protrain_runtime.activations.selective_recompute import LARGEST_RANK, is_low_rank, kind_of
from protrain_runtime.contract.records.profile import Form, Profile
from tests.support.estimates import batches_of, estimate, model_of
from tests.support.hostile_models import Hostile
from tests.support.judging import PlanName, judged
from tests.support.operator_logs import looking
from tests.support.peaks import SLACK_BYTES
from tests.support.runtime_cases import BATCH, SEQUENCE

RANK = LARGEST_RANK


def made(*shape: int) -> Tensor:
    return torch.zeros(shape)


# --- which they are -------------------------------------------------------------------------------

PRODUCTS: dict[str, tuple[Callable[[], object], bool]] = {
    "matrices": (lambda: made(96, RANK) @ made(RANK, 80), True),
    "one too many": (lambda: made(96, RANK + 1) @ made(RANK + 1, 80), False),
    "an outer product": (lambda: made(96, 1) @ made(1, 80), True),
    "linear": (lambda: F.linear(made(2, 48, 16), made(80, 16)), True),
    "linear with a bias": (lambda: F.linear(made(2, 48, 16), made(80, 16), made(80)), True),
    "matmul, broadcast": (lambda: made(2, 48, 16) @ made(16, 80), True),
    "batches": (lambda: made(3, 48, 16) @ made(3, 16, 80), True),
    "einsum": (lambda: torch.einsum("ore,eri->eoi", made(80, 4, 3), made(3, 4, 48)), True),
    "added to batches": (lambda: made(3, 48, 80).baddbmm(made(3, 48, 8), made(3, 8, 80)), True),
    "a result smaller than the left operand": (lambda: made(96, 64) @ made(64, 63), False),
    "a result smaller than the right operand": (lambda: made(15, 16) @ made(16, 80), False),
    "LoRA's first": (lambda: F.linear(made(2, 48, 96), made(16, 96)), False),
    "a matrix and a vector": (lambda: made(96, 16) @ made(16), False),
    "a convolution": (lambda: F.conv1d(made(2, 8, 32), made(32, 8, 1)), False),
    "a sparse operand": (lambda: torch.sparse.mm(made(96, 16).to_sparse(), made(16, 80)), False),
}


@pytest.mark.nightly(by_day=12)
@pytest.mark.parametrize("name", PRODUCTS)
def test_an_inner_dimension_that_is_small_for_the_result_makes_a_low_rank_product(
    name: str,
) -> None:
    run, expected = PRODUCTS[name]
    found: list[bool] = []

    def look(func: Any, args: Any, kwargs: Any, _: object) -> None:
        if kind_of(func) in ("product", "batched product"):
            found.append(is_low_rank(func, args, kwargs))

    with looking(look):
        run()
    assert found == [expected]


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize("machine", hardware_names())
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1.0), (torch.float32, 1.45)])
def test_a_low_rank_product_takes_about_as_long_as_an_addition(
    machine: str, dtype: torch.dtype, most: float
) -> None:
    """The largest one, of its result's size, by the rates of every machine of the catalogue.

    In float32 the last wave of tiles leaves processors idle: 1.34 times as long on an A100, 1.42
    on a B200, whose memory is fast for its units of float32.
    """
    rates = load_hardware(machine).rates
    assert rates is not None
    left, right = (torch.empty(s, RANK, dtype=dtype, device="meta") for s in (8192, 4096))
    result = left @ right.T
    aten, log = torch.ops.aten, OperatorLog()
    log.mark()
    log.note(aten.mm.default, (left, right.T), {}, result)
    log.mark()
    log.note(aten.add.Tensor, (result, result), {}, result)
    product, addition = log.seconds(rates)
    assert product <= most * addition


# --- what it saves --------------------------------------------------------------------------------


def kept_bytes(profile: Profile, form: Form) -> int:
    return profile.units[2].cost(form).kept_bytes  # the first block is given no gradients


@pytest.mark.slow
def test_a_block_of_8b_with_adapters_keeps_no_outputs_of_theirs_in_lite(tmp_path: Path) -> None:
    """By Llama-3.1's widths; the 8B itself has 32 such blocks."""
    config = load_source("llama-3.1-8b").model_config
    path = tmp_path / "blocks.json"
    path.write_text(json.dumps(json.loads(config) | {"num_hidden_layers": 3}))
    tokens, hidden, rank = 8192, 4096, 16

    def estimated(adapter: str) -> Profile:
        return estimate(
            load_source(str(path)),
            batch_size=1,
            seq_len=tokens,
            dtype="bfloat16",
            hardware=load_hardware("h200"),
            adapter=adapter,
        )

    without, adapted = estimated(""), estimated("lora r=16")
    # Of adapters their seven first products; and of the last base product, which nothing needed
    # before, what the recomputation passes on its way to the adapter behind it.
    more = kept_bytes(adapted, "lite") - kept_bytes(without, "lite")
    assert more == 2 * tokens * (7 * rank + hidden)
    assert round(kept_bytes(adapted, "lite") / 1e6) == 842
    assert round(kept_bytes(adapted, "keep") / 1e6) == 1513
    # q, k, v are in all forms of partial recomputation, without what their adapters add.
    for form in ("mlp", "attn"):
        by_adapters = kept_bytes(adapted, form) - kept_bytes(without, form)
        assert by_adapters == 2 * tokens * 3 * rank


# --- LoRA under plans -----------------------------------------------------------------------------


def adapted() -> Hostile:
    """A small Llama whose adapters alone are trained.

    The first block's input asks for no gradient: the base counts it as if nothing else did. What
    operators take besides differs by 1.5 KiB from processor to processor.
    """
    source = load_source("tiny-llama")
    batches = batches_of(source, batch_size=BATCH, seq_len=SEQUENCE)
    made = [next(batches) for _ in range(20)]
    return Hostile(
        lambda: model_of(source, adapter="lora r=4"),
        batch=lambda step: made[step % 20],
        above_slots=2 * SLACK_BYTES + 4 * BATCH * SEQUENCE * 96,
    )


@pytest.mark.nightly
def test_adapters_train_like_plain_torch_within_what_was_predicted() -> None:
    """Bitwise; the last step's slots take what was predicted, but for scalars."""
    plans: tuple[PlanName, ...] = ("lite", "mlp", "attn", "swap lite")
    found = judged(adapted, plans=plans, seed=0)
    assert [(one.under, one.kind, one.text) for one in found] == [
        (name, "like plain", "") for name in plans
    ]
