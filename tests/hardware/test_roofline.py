"""Seconds worked out by hand from what operators compute and move."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from protrain_runtime.contract.records.hardware import Rates
from tests.support.operator_logs import watching

RATES = Rates(
    float32_flops_per_s=1e9,
    bfloat16_flops_per_s=4e9,
    compute_efficiency=0.5,
    memory_bytes_per_s=1e9,
    memory_efficiency=0.25,
    operator_s=1e-3,
    host_parameters_per_s=1.0,
)


def test_a_product_takes_its_flops_and_a_sum_its_bytes() -> None:
    a, b = torch.ones(64, 128), torch.ones(128, 256)
    with watching() as log:
        a @ b  # before the first mark: counts for nothing
        log.mark()
        c = a @ b
        log.mark()
        c + c
        log.mark()
        c.view(-1).t()
        log.mark()
        a.bfloat16() @ b.bfloat16()
    product, total, views, half = log.seconds(RATES)
    flops = 2 * 64 * 128 * 256
    assert product == pytest.approx(flops / 0.5e9 + 1e-3)
    assert total == pytest.approx(3 * 4 * 64 * 256 / 0.25e9 + 1e-3)  # two reads, one write
    assert views == 0
    casts = 6 * (64 * 128 + 128 * 256) / 0.25e9 + 2e-3
    moved = 2 * (64 * 128 + 128 * 256 + 64 * 256) / 0.25e9
    assert half == pytest.approx(casts + max(flops / 2e9, moved) + 1e-3)


def test_attention_counts_two_products_forward_and_five_backward() -> None:
    fast = replace(
        replace(RATES, float32_flops_per_s=1e6, bfloat16_flops_per_s=1e6, compute_efficiency=1.0),
        memory_bytes_per_s=1e12,
        memory_efficiency=1.0,
        operator_s=0.0,
    )
    q = torch.ones(1, 4, 128, 32, requires_grad=True)  # [batch, heads, sequence, width]
    k = torch.ones(1, 2, 128, 32)
    with watching() as log:
        log.mark()
        out = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        log.mark()
        F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        gradient = torch.ones_like(out)
        log.mark()
        torch.autograd.grad(out, q, gradient)
    product = 2 * 4 * 128 * 128 * 32 / 1e6
    forward, causal, backward = log.seconds(fast)
    assert forward == pytest.approx(2 * product, rel=1e-4)
    assert causal == pytest.approx(product, rel=1e-4)
    assert backward == pytest.approx(5 * product, rel=1e-4)
    # Model FLOPs: all scores, and none again in backward.
    flops = [sum(work.model_flops for work in slot) for slot in log.slots]
    assert flops == [2 * product * 1e6, 2 * product * 1e6, 4 * product * 1e6]


def test_grouped_products_count_one_weight_per_row() -> None:
    rows, weights = torch.ones(64, 32).bfloat16(), torch.ones(4, 32, 16).bfloat16()
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    with watching() as log:
        log.mark()
        torch._grouped_mm(rows, weights, offs=ends)
    moved = 2 * (64 * 32 + 4 * 32 * 16 + 64 * 16) + 4 * 4
    assert log.seconds(RATES)[0] == pytest.approx(
        max(2 * 64 * 32 * 16 / 2e9, moved / 0.25e9) + 1e-3
    )


def test_an_embedding_reads_the_rows_that_it_looks_up() -> None:
    table, tokens = torch.ones(1000, 64), torch.zeros(8, dtype=torch.int64)
    with watching() as log:
        log.mark()
        F.embedding(tokens, table)
    assert log.seconds(RATES)[0] == pytest.approx((2 * 8 * 64 * 4 + 8 * 8) / 0.25e9 + 1e-3)
