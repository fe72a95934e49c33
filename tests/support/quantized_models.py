"""Models that a user has packed with bitsandbytes and given adapters, as factories."""

import importlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from protrain_plan.models.batches import Batch
from protrain_plan.models.building import seeded
from protrain_runtime.contract.records.profile import Quantize

VOCABULARY, BATCH, SEQUENCE = 320, 4, 64
OPTIONS: dict[Quantize, dict[str, Any]] = {
    "nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
"""Options of a BitsAndBytesConfig, by the name of our option."""


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


def packed(linear: nn.Linear, *, bits: int = 4, **settings: Any) -> nn.Module:
    """A layer of so many bits with the linear layer's values, which a move to a device packs."""
    library = importlib.import_module("bitsandbytes")
    usual: dict[str, Any] = {"has_fp16_weights": False}
    if bits == 4:
        usual = {"compute_dtype": torch.float32, "quant_type": "nf4"}
    make = library.nn.Linear4bit if bits == 4 else library.nn.Linear8bitLt
    has_bias = linear.bias is not None
    layer: nn.Module = make(linear.in_features, linear.out_features, has_bias, **usual | settings)
    layer.load_state_dict(linear.state_dict())
    return layer if bits == 4 else layer.requires_grad_(False)


packed_in_8_bits = partial(packed, bits=8)


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


Factory = Callable[[], tuple[nn.Module, Iterable[Batch]]]


def factory(*makers: Any, moved: bool = True, **settings: Any) -> Factory:
    """Layers by the makers in turn; `moved` to the CPU, else packed when the profiler does it."""

    def make() -> tuple[nn.Module, Iterable[Batch]]:
        model, in_turn = llama(), itertools.cycle(makers)
        replace_linears(model, lambda linear: next(in_turn)(linear))
        return with_adapters(model.to("cpu") if moved else model, **settings), batches()

    return make


FP4 = partial(packed, quant_type="fp4", compress_statistics=False)  # scales in float32
nf4_factory = factory(packed)  # with nested scales
plain_scales_factory = factory(FP4, moved=False)
int8_factory = factory(packed_in_8_bits)
mixed_factory = factory(packed, packed_in_8_bits, moved=False)
dora_factory = factory(packed, packed_in_8_bits, use_dora=True, lora_dropout=0.1)


def plain_factory() -> tuple[nn.Module, Iterable[Batch]]:
    """The model as it is, for `--lora` and `--quantize`."""
    return llama(), batches()


PACKINGS: dict[str, tuple[Any, ...]] = {
    "nf4": (packed,),
    "int8": (packed_in_8_bits,),
    "fp4 and int8": (FP4, packed_in_8_bits),
}


def base(dtype: torch.dtype) -> Any:
    """A model whose numbers have a dtype, in float32; the tables that it computes are exact."""
    with seeded(7):
        model = llama()
    model.load_state_dict({name: value.to(dtype) for name, value in model.state_dict().items()})
    return model


def packed_with_adapters(
    kinds: Sequence[Any], make: Callable[[], Any], moves: Sequence[str] = ()
) -> nn.Module:
    """A model packed with the kinds in turn, and adapters of the same numbers every time."""
    model, in_turn = make(), itertools.cycle(kinds)
    replace_linears(model, lambda linear: next(in_turn)(linear))
    for place in moves:
        model = model.to(place)
    with seeded(5):
        return with_adapters(model).train()
