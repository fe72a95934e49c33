"""Models that a user has packed with bitsandbytes and given adapters, as factories."""

import importlib
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from protrain_plan.models.batches import Batch
from protrain_plan.models.building import seeded

VOCABULARY, BATCH, SEQUENCE = 320, 4, 64


def llama() -> LlamaForCausalLM:
    """A small one, with biases in its attention."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=96,
            intermediate_size=176,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            attention_bias=True,
            use_cache=False,
        )
    )


def replace_linears(model: nn.Module, make: Any) -> None:
    """Put `make(linear)` into the place of every linear layer but the head."""
    linears = [n for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"]
    for name in linears:
        model.set_submodule(name, make(model.get_submodule(name)))


def packed(linear: nn.Linear, **settings: Any) -> nn.Module:
    """A layer of 4 bits with the linear layer's values, which a move to a device packs."""
    library = importlib.import_module("bitsandbytes")
    bias = linear.bias is not None
    settings = {"compute_dtype": torch.float32, "quant_type": "nf4", **settings}
    layer: nn.Module = library.nn.Linear4bit(
        linear.in_features, linear.out_features, bias, **settings
    )
    layer.load_state_dict(linear.state_dict())
    return layer


def packed_in_8_bits(linear: nn.Linear, **settings: Any) -> nn.Module:
    """A layer of 8 bits with the linear layer's values, which a move to a device packs."""
    library = importlib.import_module("bitsandbytes")
    settings = {"has_fp16_weights": False, **settings}
    layer: nn.Module = library.nn.Linear8bitLt(
        linear.in_features, linear.out_features, linear.bias is not None, **settings
    )
    layer.load_state_dict(linear.state_dict())
    return layer.requires_grad_(False)


def with_adapters(model: nn.Module, **settings: Any) -> nn.Module:
    """The model with LoRA beside all of its packed layers."""
    peft = importlib.import_module("peft")
    for kind in ("is_loaded_in_4bit", "is_loaded_in_8bit"):  # as from_pretrained leaves one
        setattr(model, kind, True)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **settings)
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def batches() -> list[Batch]:
    """Two of random tokens."""
    with seeded(1):
        tokens = [torch.randint(VOCABULARY, (BATCH, SEQUENCE)) for _ in range(2)]
    return [{"input_ids": one, "labels": one} for one in tokens]


def nf4_factory() -> tuple[nn.Module, Iterable[Batch]]:
    """NF4 with nested scales, packed by the move to the CPU."""
    model = llama()
    replace_linears(model, packed)
    return with_adapters(model.to("cpu")), batches()


def plain_scales_factory() -> tuple[nn.Module, Iterable[Batch]]:
    """FP4 with scales in float32; its layers are packed when the profiler moves them."""
    model = llama()
    replace_linears(
        model, lambda linear: packed(linear, quant_type="fp4", compress_statistics=False)
    )
    return with_adapters(model), batches()


def int8_factory() -> tuple[nn.Module, Iterable[Batch]]:
    """Of 8 bits, packed by the move to the CPU."""
    model = llama()
    replace_linears(model, packed_in_8_bits)
    return with_adapters(model.to("cpu")), batches()


def mixed_factory() -> tuple[nn.Module, Iterable[Batch]]:
    """Layers of 8 bits among those of NF4; they are packed when the profiler moves them."""
    model, makers = llama(), itertools.cycle((packed, packed_in_8_bits))
    replace_linears(model, lambda linear: next(makers)(linear))
    return with_adapters(model), batches()


def dora_factory() -> tuple[nn.Module, Iterable[Batch]]:
    """Layers of 8 bits among those of NF4 with DoRA and dropout."""
    model, makers = llama(), itertools.cycle((packed, packed_in_8_bits))
    replace_linears(model, lambda linear: next(makers)(linear))
    return with_adapters(model.to("cpu"), use_dora=True, lora_dropout=0.1), batches()


def plain_factory() -> tuple[nn.Module, Iterable[Batch]]:
    """The model as it is, for `--lora` and `--quantize`."""
    return llama(), batches()
