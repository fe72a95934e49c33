"""Weights that bitsandbytes has packed (`Linear4bit`): in chunks like others, scales beside them.

A packed weight is a frozen parameter of bytes, uint8 [elements / 2, 1], that a chunk holds and
moves as any other. What makes numbers of it again are its *scales*: absmax of every block of 64
elements and tables of codes, tensors in the `quant_state` of the parameter and of its layer, which
no `named_parameters` or `named_buffers` lists. They stay on the device, because kernels read them
through attributes wherever the bytes are needed, and because they are small beside what moves:
with nested scales 0.0159 bytes per element (8 bits per block, and 32 per 256 blocks), without
0.0625, beside 0.5 of the packed weight itself. The profile counts them in its base.

bitsandbytes does three things that no plan could follow, and `settle_quantized` settles them. None
changes a bit of training:

- Its product keeps the packed weight for backward in an attribute of autograd's context, where no
  hook sees it. A chunk's buffer would be held from forward to backward. `save_packed_weights` lets
  it be saved as every operator saves.
- On a CPU with AVX-512 and bfloat16 an evaluation packs a weight anew, in place and for good. It
  would write to what a plan has placed, and training could not go on from there without a plan
  either. The layers are told that the processor has no such instructions.
- The first forward converts a bias to the dtype that is computed in, in place. It is done before.
"""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.program.program import in_blocks

STATE = "quant_state"
"""The attribute of a packed weight, and of its layer, that holds the scales."""

_TENSORS = ("absmax", "code", "offset")
"""Of a `QuantState`; of its `state2`, which has the scales' own scales, too."""


def library() -> ModuleType | None:
    """`bitsandbytes`, where this process has imported it: else no model has layers of it."""
    return sys.modules.get("bitsandbytes")


def packed_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of 4 bits by name, whether their weights are packed already or not."""
    found = library()
    if found is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, found.nn.Linear4bit):
            yield name, module


def scales_of(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a `QuantState` by the path of their attributes: `absmax`, `state2.code`."""
    held = {name: getattr(state, name, None) for name in _TENSORS}
    found = {name: tensor for name, tensor in held.items() if isinstance(tensor, torch.Tensor)}
    if getattr(state, "state2", None) is not None:
        found |= {f"state2.{name}": tensor for name, tensor in scales_of(state.state2).items()}
    return found


def named_scales(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The scales of the model's packed weights, each layer's in order: `fc.weight.absmax`."""
    for name, layer in packed_layers(model):
        for path, tensor in scales_of(getattr(layer.weight, STATE, None)).items():
            yield f"{name}.weight.{path}".removeprefix("."), tensor


def scales(model: nn.Module) -> list[torch.Tensor]:
    """The same without names."""
    return [tensor for _, tensor in named_scales(model)]


def absent_scale_bytes(model: nn.Module, *, block: int = 1) -> int:
    """Bytes of the scales of layers that are on `meta` while others run; in whole blocks each."""
    absent = [scale for scale in scales(model) if scale.is_meta]
    return sum(in_blocks(scale.numel() * scale.itemsize, block) for scale in absent)


def with_scales(state: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A `QuantState` like `state`, with `make(tensor)` in place of each of its tensors."""
    if state is None:
        return None
    made = object.__new__(type(state))
    made.__dict__.update(state.__dict__)
    for name in _TENSORS:
        if isinstance(getattr(state, name, None), torch.Tensor):
            setattr(made, name, make(getattr(state, name)))
    if getattr(state, "state2", None) is not None:
        made.state2 = with_scales(state.state2, make)
    return made


def carry_scales(
    weight: nn.Parameter, made: nn.Parameter, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Let a parameter made in place of a packed weight have what that has besides its bytes."""
    state = weight.__dict__.get(STATE)
    if state is not None:
        made.__dict__.update(weight.__dict__)
        made.__dict__[STATE] = with_scales(state, make)


def refuse_quantized(model: nn.Module, *, source: str) -> None:
    """ProtrainError, naming the layer, for a quantised weight that no plan can follow."""
    method = _other_quantizer(model)
    if method is not None:
        raise ProtrainError(
            f"the model's weights are quantised by {method}: of packed weights, those of"
            " bitsandbytes in 4 bits can be planned",
            source=source,
            fix="BitsAndBytesConfig(load_in_4bit=True), or plan the model before it is quantised",
        )
    found = library()
    if found is None:
        return
    kinds = found.nn
    others = (kinds.Linear8bitLt, kinds.Embedding8bit, kinds.Embedding4bit)
    for name, module in model.named_modules():
        if isinstance(module, others):
            raise ProtrainError(
                f"'{name}' is a {type(module).__name__}: its scales, and what it keeps for"
                " backward, are where a plan cannot follow them",
                source=source,
                fix="let it be a Linear4bit (load_in_4bit=True), or leave it as it was",
            )
    for name, layer in packed_layers(model):
        problem, fix = _problem(layer)
        if problem:
            raise ProtrainError(f"the weight of '{name}' {problem}", source=source, fix=fix)


def _other_quantizer(model: nn.Module) -> str | None:
    """The name of a quantiser besides bitsandbytes that transformers has loaded a model with."""
    for module in model.modules():
        method = module.__dict__.get("quantization_method")
        text = str(getattr(method, "value", method or ""))
        if text and not text.startswith("bitsandbytes"):
            return text
    return None


def _problem(layer: Any) -> tuple[str, str]:
    """Why a layer of 4 bits cannot be planned, and what to do; "" where it can."""
    weight = layer.weight
    state = getattr(weight, STATE, None)
    if state is None:
        return "is not packed yet", "move the model to its device, which packs it"
    if getattr(state, "packing_format_for_cpu", False):
        return (
            "is packed for evaluation on this processor, and cannot be trained with",
            "build the model anew, and train before an evaluation",
        )
    if weight.dtype != torch.uint8:
        dtype = str(weight.dtype).removeprefix("torch.")
        return (
            f"is kept in {dtype}, and a conversion of the model's dtype would take its bytes for"
            " numbers",
            "bnb_4bit_quant_storage=torch.uint8, which is the default",
        )
    if layer.compute_dtype is None:
        return (
            "is computed with in the dtype of the first input, which no profile can know before",
            "Linear4bit(..., compute_dtype=torch.bfloat16), or bnb_4bit_compute_dtype",
        )
    return "", ""


def settle_quantized(model: nn.Module) -> Callable[[], None]:
    """Settle what is said above; returns what lets evaluations pack again.

    The other two stay, because nobody can see them but by the memory that they save. A model
    without packed weights is left alone.
    """
    layers = [layer for _, layer in packed_layers(model)]
    if layers:
        save_packed_weights()
    packing = [layer for layer in layers if layer.support_avx512bf16_for_cpu]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
        if getattr(layer, STATE, None) is None:  # where the scales are looked for to be counted
            layer.quant_state = getattr(layer.weight, STATE, None)
        if layer.bias is not None and layer.compute_dtype is not None:
            layer.bias.data = layer.bias.data.to(layer.compute_dtype)

    def undo() -> None:
        for layer in packing:
            layer.support_avx512bf16_for_cpu = True

    return undo


_PRODUCT = "MatMul4Bit"


def save_packed_weights() -> None:
    """Let the product with a packed weight save it through autograd, in this process from now on.

    The library's own code runs forward and backward, and gives the same bits: what it has put into
    `ctx.tensors` is handed to `save_for_backward`, and is back there when its backward runs.
    """
    functions: Any = sys.modules["bitsandbytes.autograd._functions"]
    plain: Any = getattr(functions, _PRODUCT)
    if getattr(plain, "saves_packed_weights", False):
        return

    class SavingProduct(plain):
        saves_packed_weights = True

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = plain.forward(ctx, *args)
            _, packed = getattr(ctx, "tensors", (None, None))
            if packed is not None:
                ctx.save_for_backward(packed)
                ctx.tensors = None
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            saved = ctx.saved_tensors  # once: what is recomputed is handed out a single time
            if not saved:
                return plain.backward(ctx, *gradients)
            ctx.tensors = (None, *saved)
            try:
                return plain.backward(ctx, *gradients)
            finally:
                ctx.tensors = None

    setattr(functions, _PRODUCT, SavingProduct)
