"""Published figures of training with a host's memory, beside predictions."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from protrain_plan.hardware.catalogue import load_hardware
from protrain_runtime.contract.records.hardware import Rates
from tests.support.operator_logs import watching

GRACE_ADAM = (10.4e9, 13.2e9)
"""Parameters per second of DeepSpeed's CPU-Adam and of GraceAdam on a Grace: 8 G in 0.769 and in
0.608 s (deepspeedai/DeepSpeed, blogs/deepspeed-superoffload, figure 5)."""


def rates_of(name: str) -> Rates:
    rates = load_hardware(name).rates
    assert rates is not None
    return rates


def test_a_grace_updates_as_many_parameters_as_published() -> None:
    """Speed at 28 bytes a parameter: nothing was copied meanwhile. A tenth is allowed."""
    rates = rates_of("gh200")
    updated = min(rates.host_parameters_per_s, rates.host_bandwidth_bytes_per_s / 28)
    assert 0.9 * GRACE_ADAM[0] < updated < 1.1 * GRACE_ADAM[1]


def test_an_x86_node_updates_about_as_many_parameters_as_published() -> None:
    """10 G in 2.57 s on a DGX-2 with 256 GB/s of memory (ZeRO-Offload, arXiv 2101.06840, table 4).

    Newer nodes have 1.3 to 1.9 times the bandwidth for all their devices; eight share it.
    """
    for name in ("a100-80gb", "h100-sxm"):
        rates = rates_of(name)
        of_node = rates.host_bandwidth_bytes_per_s / 28
        assert 3.9e9 < of_node < 5 * 3.9e9
        assert of_node / 8 < rates.host_parameters_per_s < of_node


def test_qwen3_14b_on_a_gh200_is_as_fast_as_superoffload_s() -> None:
    """About 500 to 600 TFLOP/s of 4 x 4096 tokens.

    The former in DeepSpeedExamples, training/DeepSpeed-SuperOffload, README, which rounds: 475 is
    allowed; the latter in DeepSpeed, blogs/deepspeed-superoffload.

    As its script counts them, `estimate_transformer_tflops` of finetune_zero3.py: four passes, one
    of them recomputation, and all scores of attention, of which its kernels compute half. What runs
    is a block of transformers' and the head with its loss, without values.
    """
    blocks, hidden, batch, tokens, vocabulary = 40, 5120, 4, 4096, 151_936
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=17_408,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        attn_implementation="sdpa",
    )
    with FakeTensorMode(), watching() as log:
        head = nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16)
        torch.set_default_dtype(torch.bfloat16)
        try:
            block = Qwen3DecoderLayer(config, 0)
        finally:
            torch.set_default_dtype(torch.float32)
        given = torch.empty(batch, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        angles = torch.empty(batch, tokens, 128, dtype=torch.bfloat16)
        labels = torch.empty(batch * tokens, dtype=torch.int64)
        log.mark()
        result = block(given, position_embeddings=(angles, angles))
        log.mark()
        result.backward(torch.empty_like(result))
        log.mark()
        logits = head(given).float().flatten(0, 1)
        cross_entropy(logits, labels).backward()
    rates = rates_of("gh200")
    forward, backward, last = log.seconds(rates)
    seconds = blocks * (2 * forward + backward) + last
    of_block = sum(parameter.numel() for parameter in block.parameters())
    num_parameters = blocks * of_block + 2 * vocabulary * hidden + hidden
    assert num_parameters == 14_768_307_200
    each = 2 * 4 * num_parameters * tokens + 2 * 2 * 4 * blocks * hidden * tokens**2
    assert 475e12 < batch * each / seconds < 600e12
    # And the host's updates, of 34 bytes with what is copied, hide behind it as SuperOffload's do.
    assert num_parameters / (rates.host_bandwidth_bytes_per_s / 34) < seconds
