"""Efficiencies of kernels: laws, and published tables of kernels by themselves."""

import json
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.nn.functional import cross_entropy, dropout

from benchmarks.gpu.kernels import beside_estimates
from benchmarks.published_runs import FLASH_ATTENTION_2
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.hardware.kernels import (
    Attention,
    Product,
    Work,
    attention_efficiency,
    product_efficiency,
)
from protrain_runtime.contract.records.hardware import Rates
from tests.support.commands import ROOT
from tests.support.operator_logs import watching

SIDES = st.integers(1, 20_000)
PRODUCTS = st.builds(Product, st.integers(1, 64), SIDES, SIDES, SIDES)
PROCESSORS = st.integers(1, 304)


def rates_of(name: str) -> Rates:
    rates = load_hardware(name).rates
    assert rates is not None
    return rates


def work(product: Product, multiprocessors: int) -> float:
    """Seconds of a product, in products of one number that all multiprocessors do at once."""
    batches, rows, columns, inner = product
    return batches * rows * columns * inner / product_efficiency(product, multiprocessors)


@given(PRODUCTS, PROCESSORS)
def test_no_product_is_faster_than_large_ones(product: Product, multiprocessors: int) -> None:
    assert 0 < product_efficiency(product, multiprocessors) <= 1


@given(PRODUCTS, PROCESSORS, st.integers(2, 4))
def test_a_product_that_is_larger_in_all_directions_is_no_less_efficient(
    product: Product, multiprocessors: int, factor: int
) -> None:
    larger = product._replace(
        rows=factor * product.rows, columns=factor * product.columns, inner=factor * product.inner
    )
    small, large = (product_efficiency(one, multiprocessors) for one in (product, larger))
    assert large >= small * (1 - 1e-9)


@given(PRODUCTS, PROCESSORS, st.sampled_from(Product._fields))
def test_a_larger_product_never_takes_less(
    product: Product, multiprocessors: int, side: str
) -> None:
    larger = product._replace(**{side: getattr(product, side) + 1})
    assert work(larger, multiprocessors) >= work(product, multiprocessors) * (1 - 1e-9)


@given(st.floats(1, 1e6), st.integers(1, 512), st.booleans())
def test_longer_rows_wider_heads_and_no_mask_are_no_less_efficient(
    keys: float, width: int, backward: bool
) -> None:
    rates = rates_of("a100-80gb")
    one = Attention(keys, width, backward, masked=False)
    found = attention_efficiency(one, rates)
    large = rates.attention_backward_efficiency if backward else rates.attention_efficiency
    assert attention_efficiency(replace(one, masked=True), rates) < found <= large
    assert attention_efficiency(replace(one, keys=2 * keys), rates) > found
    assert attention_efficiency(replace(one, width=width + 1), rates) >= found


@given(PRODUCTS)
def test_machines_that_say_no_more_have_one_efficiency_for_all(product: Product) -> None:
    """Rates of files of hardware from before shapes were looked at."""
    rates = replace(
        rates_of("a100-80gb"),
        multiprocessors=0,
        attention_efficiency=0.0,
        attention_backward_efficiency=0.0,
    )
    for shape in (product, Attention(100.0, 64, backward=True, masked=True)):
        assert Work(1e12, 8, True, shape).seconds(rates) == Work(1e12, 8, True).seconds(rates)


SQUARES = [
    # TFLOP/s in bfloat16 by width, the largest product's last, whose efficiency is taken for all:
    # github.com/zzc0721/torch-performance-test-data issues 79, 108, 126, 78; pytorch/ao pull 2427.
    ("h100-sxm", {1024: 176.62, 2048: 676.59, 4096: 788.72, 8192: 797.51}),
    ("a100-40gb", {1024: 94.89, 2048: 138.46, 4096: 234.14}),  # PCIe: 250 W bind larger ones
    ("a10g", {2048: 60.57, 4096: 62.48, 8192: 66.59, 10240: 69.47}),
    ("rtx-4090", {4096: 151.50, 8192: 160.17, 10240: 158.54}),
    ("b200", {2048: 1130.0, 3072: 1510.0, 4096: 1410.0, 6144: 1450.0, 8192: 1420.0}),
]


@pytest.mark.parametrize(("card", "published"), SQUARES, ids=[card for card, _ in SQUARES])
def test_square_products_are_as_fast_as_published(card: str, published: dict[int, float]) -> None:
    """Smaller ones are slower by tiles, waves and launches; within a fifth."""
    rates = rates_of(card)

    def per_s(width: int, efficiency: float) -> float:
        shape = Product(1, width, width, width)
        work = Work(2.0 * width**3, 6 * width**2, True, shape)
        return 2e-12 * width**3 / work.seconds(replace(rates, compute_efficiency=efficiency))

    largest = max(published)
    efficiency = published[largest] / per_s(largest, 1.0)
    for width, rate in published.items():
        assert per_s(width, efficiency) == pytest.approx(rate, rel=0.2), width


def test_products_of_a_llama_are_as_fast_as_published() -> None:
    """On an H100, of 16,384 tokens; github.com/meta-pytorch/float8_experimental pull 38."""
    rates, tokens = rates_of("h100-sxm"), 16_384
    for inner, columns, seconds in (
        (8192, 1280, 6.04e-4),
        (1024, 8192, 5.00e-4),
        (8192, 7168, 3.57e-3),
        (3584, 8192, 1.59e-3),
    ):
        flops = 2.0 * tokens * inner * columns
        work = Work(flops, 0, True, Product(1, tokens, columns, inner))
        assert work.seconds(rates) == pytest.approx(seconds, rel=0.1)


ATTENTION = [
    # Forward and backward together, TFLOP/s, of 512, 1k, ... 16k keys; figures of
    # github.com/Dao-AILab/flash-attention, README.
    ("a100-80gb", 64, False, (132, 153, 162, 171, 175, 176)),
    ("a100-80gb", 128, False, (150, 173, 187, 196, 201, 203)),
    ("a100-80gb", 64, True, (88, 119, 140, 156, 165, 171)),
    ("a100-80gb", 128, True, (99, 133, 155, 173, 182, 189)),
    ("h100-sxm", 64, False, (215, 254, 274, 288, 294, 296)),
    ("h100-sxm", 128, False, (248, 294, 320, 326, 335, 338)),
    ("h100-sxm", 64, True, (141, 192, 232, 257, 273, 284)),
    ("h100-sxm", 128, True, (163, 221, 265, 294, 308, 328)),
]


@pytest.mark.parametrize(("card", "width", "causal", "published"), ATTENTION)
def test_attention_is_as_fast_as_published(
    card: str, width: int, causal: bool, published: tuple[int, ...]
) -> None:
    rates = rates_of(card)
    if speeds := FLASH_ATTENTION_2.get(card):
        forward, backward = speeds
        rates = replace(rates, attention_efficiency=forward, attention_backward_efficiency=backward)
    for power, rate in enumerate(published):
        keys = 512 * 2**power / (2 if causal else 1)
        passes = (
            (2, Attention(keys, width, False, False)),
            (5, Attention(keys, width, True, False)),
        )
        seconds = sum(
            products / (rates.bfloat16_flops_per_s * attention_efficiency(shape, rates))
            for products, shape in passes
        )
        assert 7 / seconds == pytest.approx(rate * 1e12, rel=0.10 if power else 0.12)


def test_operators_take_about_as_long_as_on_a_card() -> None:
    """All that `benchmarks.gpu --parts kernels` measured on an H200, estimated anew."""
    document = json.loads((ROOT / "benchmarks/results/gpu.json").read_text())
    result = document["cells"]["kernels/operators"]["result"]
    measured = {row["operator"]: row["seconds"] for row in result["rows"]}
    rows = beside_estimates(measured, document["runs"][0]["accelerator"]["name"])["rows"]
    ratios = {
        row["operator"]: row["seconds"] / row["estimated_seconds"]
        for row in rows
        if row["estimated_seconds"]
    }
    assert len(ratios) > 130
    assert statistics.median(ratios.values()) == pytest.approx(1, rel=0.05)
    near = [1 / 1.5 < ratio < 1.5 for ratio in ratios.values()]
    assert sum(near) / len(near) > 0.85
    fused = [ratio for name, ratio in ratios.items() if name.startswith("attention")]
    assert fused == pytest.approx([1.0] * 8, abs=0.25)


def rms_norm(values: Tensor, weight: Tensor) -> Tensor:
    wide = values.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * normed.to(values.dtype)


ELEMENTWISE = [
    # Milliseconds on an A100 SXM, forward; linkedin/Liger-Kernel, benchmark/data/
    # all_benchmark_data.csv at ead96b61, huggingface.
    (4096, 0.280),
    (8192, 0.519),
    (16384, 0.986),
    (32768, 1.919),
]


@pytest.mark.parametrize(("width", "published"), ELEMENTWISE)
def test_a_norm_without_a_kernel_of_its_own_is_as_fast_as_published(
    width: int, published: float
) -> None:
    with FakeTensorMode(), watching() as log:
        values = torch.empty(2048, width, dtype=torch.bfloat16)
        weight = torch.empty(width)
        log.mark()
        rms_norm(values, weight)
    (seconds,) = log.seconds(rates_of("a100-80gb"))
    assert 1e3 * seconds == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize(("classes", "published"), [(32_768, 5.317), (131_072, 20.726)])
def test_the_passes_of_a_long_softmax_are_as_fast_as_published(
    classes: int, published: float
) -> None:
    """Cross entropy of 16,384 rows in float32 (the same table)."""
    with FakeTensorMode(), watching() as log:
        logits, labels = torch.empty(16_384, classes), torch.empty(16_384, dtype=torch.int64)
        log.mark()
        cross_entropy(logits, labels)
    (seconds,) = log.seconds(rates_of("a100-80gb"))
    assert 1e3 * seconds == pytest.approx(published, rel=0.1)


def test_dropout_is_one_kernel_on_an_accelerator() -> None:
    with FakeTensorMode(), watching() as log:
        values = torch.empty(1024, 1024)
        log.mark()
        dropout(values)
    (seconds,) = log.seconds(rates_of("a100-80gb"))
    launching, on_cpu = (
        sum(work.is_launched(rates) for work in log.slots[0])
        for rates in (rates_of("a100-80gb"), replace(rates_of("a100-80gb"), multiprocessors=0))
    )
    assert seconds == Work(0.0, 3 * 4 * 1024**2, False).seconds(rates_of("a100-80gb"))
    assert (launching, on_cpu) == (1, 3)


def test_narrow_products_in_float32_have_narrow_tiles() -> None:
    """Adapters' columns of 16 waste half of a tile, not three quarters."""
    narrow = Product(1, 16_384, 16, 4096)
    assert product_efficiency(narrow, 108, half=False) > 0.4 > product_efficiency(narrow, 108)


# --- operators' work ------------------------------------------------------------------------------


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
