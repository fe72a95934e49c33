"""Estimates of packed models: bytes beside real tensors, and by hand for a card."""

import json
from functools import cache

import pytest
import torch

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.hardware.operator_log import OperatorLog
from protrain_plan.hardware.operators import INT8_PRODUCT, PACKED_PRODUCT, allocator_of
from protrain_plan.models.sources import load_source
from protrain_runtime.contract.program.program import BLOCK_BYTES, in_blocks
from protrain_runtime.contract.records.profile import DType, Profile, Quantize
from protrain_runtime.diagnostics.matching import model_fingerprint
from tests.support.estimates import batches_of, bytes_alone, estimate, machine, model_of, weighed

pytest.importorskip("bitsandbytes")

LAYERS = 2
SMALL = (256, 512, 128)
WIDTH, INNER, FEW = 1024, 2048, 8
"""So few tokens that a layer's weight is more than all activations, and a reduction's scratch."""

SHAPES = [*[(WIDTH, WIDTH)] * 4, (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)]


def config(width: int, inner: int) -> str:
    return json.dumps(
        {"model_type": "llama", "hidden_size": width, "intermediate_size": inner,
         "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
         "vocab_size": 320}
    )  # fmt: skip


@cache
def estimated(
    hardware_name: str,
    *,
    quantize: Quantize = "nf4",
    dtype: DType = "bfloat16",
    adapter: str = "lora r=4",
    sizes: tuple[int, int, int],
) -> Profile:
    width, inner, tokens = sizes
    hardware = machine() if hardware_name == "cpu" else load_hardware(hardware_name)
    return estimate(
        load_source("packed", model_config=config(width, inner)),
        batch_size=1,
        seq_len=tokens,
        dtype=dtype,
        adapter=adapter,
        quantize=quantize,
        hardware=hardware,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", ["lora r=4", "lora r=4 dora"])
@pytest.mark.parametrize(("dtype", "kind"), [("float32", "nf4"), ("float32", "int8")])
def test_bytes_are_those_of_real_tensors(dtype: DType, kind: Quantize, adapter: str) -> None:
    width, inner, tokens = SMALL
    profile = estimated("cpu", dtype=dtype, quantize=kind, adapter=adapter, sizes=SMALL)
    source = load_source("packed", model_config=config(width, inner))
    model = model_of(source, dtype=dtype, adapter=adapter, quantize=kind)
    batch = next(iter(batches_of(source, batch_size=1, seq_len=tokens, dtype=dtype)))
    real, structure = weighed(model, batch, warm=True)
    assert list(map(bytes_alone, profile.units, real)) == real
    assert profile.base_bytes == structure.base_bytes
    assert profile.model_fingerprint == model_fingerprint(model)


@pytest.mark.nightly
def test_an_estimate_for_a_card_has_packed_bytes_and_the_workspace_of_both_passes() -> None:
    """By hand: half a byte of each weight, and a layer as numbers while it is multiplied with."""
    packed = estimated("rtx-4090", sizes=(WIDTH, INNER, FEW))
    plain = estimated("rtx-4090", quantize="", sizes=(WIDTH, INNER, FEW))
    weights = sum(rows * columns for rows, columns in SHAPES)
    for unit, other in zip(packed.units, plain.units, strict=True):
        less = (2 * weights - weights // 2) if unit.kind == "block" else 0
        assert other.parameter_bytes - unit.parameter_bytes == less
        assert other.gradient_bytes == unit.gradient_bytes
        assert other.state_bytes == unit.state_bytes
    scales = sum(
        in_blocks(rows * columns // 64, BLOCK_BYTES)  # 8 bits of each block
        + in_blocks(4 * -(-rows * columns // 16384), BLOCK_BYTES)  # and what these are scaled by
        + in_blocks(4 * 16, BLOCK_BYTES)
        + in_blocks(4 * 256, BLOCK_BYTES)
        + BLOCK_BYTES  # their mean
        for rows, columns in SHAPES
    )
    assert packed.base_bytes - plain.base_bytes == LAYERS * scales
    # The scales stand in float32 beside the weight, and twice as they are made.
    largest = 2 * WIDTH * INNER
    most = largest + in_blocks(2 * 4 * WIDTH * INNER // 64, BLOCK_BYTES)
    for unit, other in zip(packed.units, plain.units, strict=True):
        if unit.kind != "block":
            continue
        full, before = unit.cost("full"), other.cost("full")
        for peak in ("forward_peak_bytes", "backward_peak_bytes"):
            without = getattr(before, peak)
            assert without < largest < getattr(full, peak) <= without + most
        assert full.forward_s > before.forward_s
        assert full.backward_s > before.backward_s


@pytest.mark.nightly
def test_an_estimate_for_a_card_has_int8_bytes_and_numbers_in_backward_alone() -> None:
    """By hand: forward multiplies int8 with int8, and backward a layer as numbers."""
    packed = estimated("rtx-4090", quantize="int8", sizes=(WIDTH, INNER, FEW))
    plain = estimated("rtx-4090", quantize="", sizes=(WIDTH, INNER, FEW))
    weights = sum(rows * columns for rows, columns in SHAPES)
    scales = sum(in_blocks(4 * rows, BLOCK_BYTES) for rows, _ in SHAPES)
    assert packed.base_bytes - plain.base_bytes == LAYERS * scales
    largest = 2 * WIDTH * INNER
    # Of a layer's input in float16 and int8 with a scale of each token, and sums of int32.
    inputs = FEW * INNER * (2 + 1 + 4 + 2) + 2 * BLOCK_BYTES
    for unit, other in zip(packed.units, plain.units, strict=True):
        if unit.kind != "block":
            continue
        assert other.parameter_bytes - unit.parameter_bytes == (2 - 1) * weights
        assert other.gradient_bytes == unit.gradient_bytes
        full, before = unit.cost("full"), other.cost("full")
        assert full.forward_peak_bytes <= before.forward_peak_bytes + inputs < largest
        assert before.backward_peak_bytes < largest < full.backward_peak_bytes
        assert full.backward_peak_bytes <= before.backward_peak_bytes + largest + inputs
        assert unit.cost("keep").kept_bytes == other.cost("keep").kept_bytes


def test_an_int8_product_takes_its_sums_and_at_most_a_product_of_16_bits_seconds() -> None:
    operator = torch.ops.bitsandbytes.int8_scaled_mm.default
    assert operator._schema.name == INT8_PRODUCT
    workspace = allocator_of(load_hardware("rtx-4090").device).workspace
    tokens, rows = 512, 1024
    for inner, dtype, expected in (
        (2048, torch.float16, 4 * tokens * rows),
        (2048, torch.bfloat16, (4 + 2) * tokens * rows),  # numbers are float16 first
        (2046, torch.float16, 4 * 2046 * (tokens + rows) + 3 * 4 * tokens * rows),
    ):
        given, weight = (
            torch.empty(size, inner, dtype=torch.int8, device="meta") for size in (tokens, rows)
        )
        scales = (torch.empty(size, device="meta") for size in (tokens, rows))
        arguments = (given, weight, *scales)
        result = operator(*arguments, dtype=dtype)
        assert workspace(operator, arguments, {"dtype": dtype}, result) == expected
        log = OperatorLog()
        log.mark()
        log.note(operator, arguments, {"dtype": dtype}, result)
        ((work,),) = log.slots
        assert (work.flops, work.half) == (2 * tokens * rows * inner, True)
        read = inner * (tokens + rows) + 4 * (tokens + rows)
        assert work.bytes == read + (2 * 4 + 2) * tokens * rows


def test_a_packed_product_takes_its_bytes_and_the_products_seconds() -> None:
    rows, columns, tokens = 4096, 4096, 2048
    given = torch.empty(tokens, columns, dtype=torch.bfloat16, device="meta")
    packed = torch.empty(rows * columns // 2, 1, dtype=torch.uint8, device="meta")
    scales = torch.empty(rows * columns // 64, dtype=torch.float32, device="meta")
    arguments = (given, packed, [rows, columns], scales, 64, "nf4")
    operator = torch.ops.bitsandbytes.gemm_4bit.default
    assert operator._schema.name == PACKED_PRODUCT
    result = operator(*arguments)
    hardware = load_hardware("rtx-4090")
    workspace = allocator_of(hardware.device).workspace(operator, arguments, {}, result)
    assert workspace == 2 * rows * columns + 2 * 4 * rows * columns // 64
    log = OperatorLog()
    log.mark()
    log.note(operator, arguments, {}, result)
    making, product = log.slots[0]
    assert (making.flops, making.bytes) == (
        0,
        rows * columns // 2 + 4 * rows * columns // 64 + 2 * rows * columns,
    )
    assert product.flops == 2 * tokens * rows * columns
    assert product.bytes == 2 * (tokens * columns + rows * columns + tokens * rows)
