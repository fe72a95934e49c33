"""Quantised base weights below adapters (QLoRA, arXiv 2305.14314): `--quantize nf4 | int8`.

The layers are those that transformers replaces for a `BitsAndBytesConfig`: linear ones, but for the
head, what is tied to the embedding, and what the architecture keeps in float32. Weights are
quantised from the workload's dtype, on the CPU, so that they are the same for every device.

- `nf4` (`load_in_4bit=True`): bitsandbytes' `Linear4bit` of NF4, with nested scales ("double
  quantization", as in the paper), which computes in the workload's dtype.
- `int8` (`load_in_8bit=True, llm_int8_threshold=0.0`): bitsandbytes' `Linear8bitLt`, which computes
  in its input's dtype. On a card it quantises its input, too, row by row, and multiplies int8 with
  int8 (LLM.int8, arXiv 2208.07339, without its second product of outliers: how many columns that
  has depends on the data, and so would the bytes of a step).

Layer by layer: a weight of a configuration's model is drawn and packed before the next one is there
(`packed_as_drawn`), with the numbers that the same seed gives without packing.

What is not quantised has the dtype that the precision gives it, and so have adapters of the base's:

- `pure` and `master`: norms, embeddings, head and adapters in the workload's dtype, as in the paper
  and in TRL; with `master` the optimizer steps on float32 copies of the adapters.
- `autocast`: all of them in float32 and products of 4 bits in the workload's dtype, which is what
  `peft.prepare_model_for_kbit_training` and peft's own adapters come to under autocast.

That function also recomputes blocks and makes inputs ask for gradients for the sake of that: here
the plan says what is recomputed.
"""

import importlib
import itertools
import random
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from protrain_plan.models.adapters import routers
from protrain_plan.models.building import TORCH_DTYPES, parameter_dtype
from protrain_plan.models.importing import library
from protrain_plan.models.optimizers import INSTALL_BITSANDBYTES
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.adapters import read_adapter
from protrain_runtime.contract.records.profile import DType, Quantize, Workload
from protrain_runtime.states.absent import replaced
from protrain_runtime.states.quantized import (
    name_scales,
    of_eight_bits,
    packed_layers,
    packed_like,
    refuse_quantized,
    scales_of,
    settle_quantized,
)

KINDS: tuple[Quantize, ...] = ("nf4", "int8")

PACKAGE_MISSING = "quantised weights need the package bitsandbytes"


def read_quantize(text: str | None, *, adapter: str) -> Quantize:
    """Parse `--quantize`, given the adapter; ProtrainError for untrainable combinations."""
    if not text:
        return ""
    for kind in KINDS:
        if text == kind:
            _refuse_without(adapter, key="--quantize")
            return kind
    raise ProtrainError(f"expected {' or '.join(KINDS)}, got {text!r}", key="--quantize")


def _refuse_without(adapter: str, *, key: str) -> None:
    if not adapter:
        raise ProtrainError(
            "quantised weights are frozen: without adapters nothing is trained",
            key=key,
            fix="add --lora r=16",
        )


def quantized(
    model: nn.Module, kind: Quantize, *, adapter: str, dtype: DType, source: str
) -> nn.Module:
    """The model, its linear layers packed in place; unchanged if `kind` is empty.

    Weights on `meta` are packed there: shapes and dtypes without values. ProtrainError if
    bitsandbytes or transformers is missing, there are no such layers, or no adapters.
    """
    if not kind:
        return model
    _refuse_without(adapter, key="quantize")
    library = _imported("bitsandbytes", source)
    plain = dict(model.named_modules())
    _replace(model, kind, dtype, source)
    names = [name for name, _ in packed_layers(model) if name in plain]
    before = {name: plain[name] for name in names if plain[name] is not model.get_submodule(name)}
    del plain
    if not before:
        raise ProtrainError("the model has no linear layers to quantise", source=source)
    for name in list(before):
        _pack(library, model.get_submodule(name), before.pop(name), kind, TORCH_DTYPES[dtype])
    # peft checks this before it adapts such layers
    setattr(model, "is_loaded_in_4bit" if kind == "nf4" else "is_loaded_in_8bit", True)
    return model


def _replace(model: nn.Module, kind: Quantize, dtype: DType, source: str) -> None:
    """Replace the layers that transformers would replace by packed ones on `meta`."""
    transformers = _imported("transformers", source)
    replacing = importlib.import_module("transformers.integrations.bitsandbytes")
    if kind == "nf4":
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=TORCH_DTYPES[dtype],
        )
    else:
        config = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    # Modules that transformers does not quantise.
    if isinstance(model, transformers.PreTrainedModel):
        quantizers = importlib.import_module("transformers.quantizers.base")
        keep = model._keep_in_fp32_modules
        kept = quantizers.HfQuantizer.get_modules_to_not_convert(model, None, keep)
    else:  # the last one
        last = [name for name, _ in model.named_parameters()][-1:]
        kept = [name.rpartition(".")[0] for name in last]
    replacing.replace_with_bnb_linear(
        model, modules_to_not_convert=[*kept, *routers(model)], quantization_config=config
    )


def packed_as_drawn(
    build: Callable[[], nn.Module], workload: Workload, *, source: str
) -> nn.Module:
    """The model of `build`, its weights packed as they are drawn; `quantized` completes it.

    Call it in `seeded`, which restores the random states set here. A model without parameters
    identifies the layers. Then each linear layer frees its memory when made, and gets some while
    transformers initialises it: the same numbers are drawn in the same order. Models that do
    otherwise are built as a whole.
    """
    library = _imported("bitsandbytes", source)
    order: list[nn.Linear] = []
    reset = nn.Linear.reset_parameters

    def noted(layer: nn.Linear) -> None:
        order.append(layer)
        reset(layer)

    with torch.device("meta"), replaced(nn.Linear, "reset_parameters", noted):
        sketch = build()
    before = set(sketch.modules())
    _replace(sketch, workload.quantize, workload.dtype, source)
    left = set(sketch.modules())
    numbers = {n for n, layer in enumerate(order) if layer in before and layer not in left}
    del sketch, before, left
    order.clear()
    _begin(workload.seed)  # whatever the sketch drew
    with suppress(RuntimeError):
        dtype = TORCH_DTYPES[workload.dtype]
        made = _drawn_one_by_one(build, library, workload.quantize, numbers, dtype)
        if made is not None:
            return made
    _begin(workload.seed)
    return build()


def _begin(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def _drawn_one_by_one(
    build: Callable[[], nn.Module],
    library: Any,
    kind: Quantize,
    numbers: Set[int],
    dtype: torch.dtype,
) -> nn.Module | None:
    """The model; None if it does not set its weights one by one, or writes to them afterwards."""
    base: Any = importlib.import_module("transformers").PreTrainedModel
    reset, initialize = nn.Linear.reset_parameters, base._initialize_weights
    count = itertools.count()
    waiting: set[nn.Module] = set()
    packed: list[tuple[torch.Tensor, int]] = []

    def made(layer: nn.Linear) -> None:
        reset(layer)
        if next(count) in numbers and not layer.weight.is_meta:
            layer.weight = nn.Parameter(layer.weight.to("meta"))
            waiting.add(layer)

    def initialized(model: nn.Module, module: Any, *args: Any, **kwargs: Any) -> None:
        waits = module in waiting
        if waits:
            waiting.remove(module)
            module.weight = nn.Parameter(torch.empty_like(module.weight, device="cpu"))
        initialize(model, module, *args, **kwargs)
        if waits:
            module.weight = _packed(library, kind, module.weight.detach().to(dtype))
            packed.append((module.weight, module.weight._version))

    with (
        replaced(nn.Linear, "reset_parameters", made),
        replaced(base, "_initialize_weights", initialized),
    ):
        model = build()
    if waiting or any(weight._version != version for weight, version in packed):
        return None
    return model


def _pack(library: Any, layer: Any, plain: nn.Module, kind: Quantize, dtype: torch.dtype) -> None:
    """Give a new layer on `meta` the weight and bias of the plain layer that it replaces."""
    weight: Any = plain.weight
    if isinstance(weight, library.nn.Params4bit | library.nn.Int8Params):  # packed when drawn
        layer.weight = weight
    else:
        if type(plain) is not nn.Linear:  # GPT-2's own class transposes them
            weight = weight.T
        layer.weight = _packed(library, kind, weight.detach().to(dtype))
    name_scales(layer)
    if plain.bias is not None:
        bias: torch.Tensor = plain.bias.detach()  # type: ignore[operator]
        # In 8 bits the compute dtype is the layer's input's, which is that of norms.
        layer.bias = nn.Parameter(bias.to(dtype) if kind == "nf4" else bias, requires_grad=False)
    if kind == "nf4":
        layer.weight.module = layer  # gets the scales when the weight is moved
    plain.weight = plain.bias = None  # type: ignore[assignment]
    layer.train(plain.training)


def _packed(library: Any, kind: Quantize, values: torch.Tensor) -> nn.Parameter:
    """A weight packed on its values' device, with its scales."""
    if kind == "nf4":
        usual = {"quant_type": kind, "compress_statistics": True}
        empty = library.nn.Params4bit(requires_grad=False, **usual)
    else:
        empty = library.nn.Int8Params(torch.empty(0), requires_grad=False)
    packed: nn.Parameter = packed_like(empty, values, eight=kind == "int8")
    return packed


def as_made(model: nn.Module, *, source: str) -> nn.Module:
    """A factory's model, with waiting layers packed; ProtrainError for unsupported quantisers."""
    for _, layer in packed_layers(model):
        if not scales_of(layer) and layer.weight.is_floating_point():
            layer.weight = packed_like(layer.weight, layer.weight.data, eight=of_eight_bits(layer))
    refuse_quantized(model, source=source)
    settle_quantized(model)
    return model


def settled(model: nn.Module, workload: Workload, *, source: str) -> nn.Module:
    """The model with its adapters, ready for training: see `settle_quantized`.

    Adapters of packed weights are made in float32, and cast to the stored dtype if they follow the
    base. ProtrainError for a quantised layer that no plan supports.
    """
    refuse_quantized(model, source=source)
    settle_quantized(model)
    lora = read_adapter(workload.adapter)
    if workload.quantize and lora is not None and lora.dtype == "base":
        dtype = parameter_dtype(workload.dtype, workload.precision)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return model


def drawn(layer: Any, *, std: float, device: torch.device) -> None:
    """Draw random numbers for a packed weight on `meta`, with its scales."""
    eight = of_eight_bits(layer)
    like = layer.weight if eight else layer.weight.quant_state
    dtype = torch.float16 if eight else like.dtype
    values = torch.empty(like.shape, dtype=dtype, device="cpu").normal_(std=std)
    weight = packed_like(layer.weight, values, eight=eight)
    layer.weight = weight if device.type == "cpu" else weight.to(device)
    name_scales(layer)
    layer.weight.CB = None


def _imported(name: str, source: str) -> Any:
    """A library; ProtrainError that names the extra if it is missing."""
    is_ours = name == "bitsandbytes"
    return library(
        name,
        PACKAGE_MISSING if is_ours else f"--quantize needs the package {name}",
        source=source or None,
        fix=INSTALL_BITSANDBYTES if is_ours else f"pip install {name}",
    )
