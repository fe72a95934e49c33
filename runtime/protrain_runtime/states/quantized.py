"""Weights that bitsandbytes has packed: in chunks like others, their scales beside them.

A packed weight is a frozen parameter of bytes that a chunk holds and moves as any other. What makes
numbers of it again are its *scales*, which no `named_parameters` or `named_buffers` lists. They
stay on the device, because kernels read them through attributes wherever the bytes are needed, and
because they are small beside what moves. The profile counts them in its base.

- Of 4 bits (`Linear4bit`): uint8 [elements / 2, 1]. Scales are absmax of every block of 64 elements
  and tables of codes, in the `quant_state` of the parameter and of its layer: with nested scales
  0.0159 bytes per element (8 bits per block, and 32 per 256 blocks), without 0.0625, beside 0.5.
- Of 8 bits (`Linear8bitLt`): int8 [rows, columns]. Scales are absmax of every row, float32 [rows],
  `SCB` of the parameter and of its layer's `state`: 4 bytes beside a row's columns.

bitsandbytes does what no plan could follow, and `settle_quantized` settles it. None of that changes
a bit of training:

- Its products keep the packed weight for backward where no hook sees it: in attributes of
  autograd's context, of 8 bits in the layer's `state`, too. A chunk's buffer would be held from
  forward to backward. `save_packed_weights` saves it as every operator saves. Products of
  8 bits keep their input as well, which they need for the gradient of a weight that has one.
- On a CPU with AVX-512 and bfloat16 an evaluation packs a weight of 4 bits anew, in place and for
  good. It would write to what a plan has placed, and training could not go on from there without a
  plan either. The layers are made to see a processor without these instructions.
- DoRA reads a weight as numbers in every forward, and on a CPU PEFT puts a copy into its place; one
  of 8 bits has lost its scales by then, so that PEFT's own second step fails. It knows a packed
  weight by its class, which a fake one has not. `leave_packed_weights` reads it and leaves it.
- The first forward converts a bias to the dtype that is computed in, in place. Of 4 bits, that is
  known, and done before. Of 8 bits it is the input's dtype: where the two differ, it is refused.
"""

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from protrain_runtime.contract.errors import ProtrainError

STATE = "quant_state"
"""The attribute with the scales of a 4-bit weight and its layer."""

ROW_SCALES = "SCB"
"""The attribute with the scales of an 8-bit weight and its layer's `state`."""

_TENSORS = ("absmax", "code", "offset")
"""Tensors of a `QuantState`, and of its `state2`, which holds nested scales."""


def library() -> ModuleType | None:
    """`bitsandbytes`, if imported: otherwise no model has its layers."""
    return sys.modules.get("bitsandbytes")


def packed_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """4-bit and 8-bit layers by name, packed or not."""
    found = library()
    if found is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, found.nn.Linear4bit | found.nn.Linear8bitLt):
            yield name, module


def of_eight_bits(layer: nn.Module) -> bool:
    """Whether a packed layer is 8-bit."""
    found = library()
    return found is not None and isinstance(layer, found.nn.Linear8bitLt)


def scales_of(layer: Any) -> dict[str, torch.Tensor]:
    """A packed layer's scales by path: `weight.absmax`, `weight.state2.code`; or `SCB`."""
    if of_eight_bits(layer):
        # The place depends on whether the layer has run: see `Linear8bitLt.init_8bit_state`.
        own = getattr(layer.weight, ROW_SCALES, None)
        own = layer.state.SCB if own is None else own
        return {} if own is None else {ROW_SCALES: own}
    return state_scales(getattr(layer.weight, STATE, None))


def state_scales(state: Any, prefix: str = "weight.") -> dict[str, torch.Tensor]:
    """The tensors of a 4-bit weight's `QuantState`, if there is one, by path."""
    held = {f"{prefix}{name}": getattr(state, name, None) for name in _TENSORS}
    found = {path: tensor for path, tensor in held.items() if isinstance(tensor, torch.Tensor)}
    if getattr(state, "state2", None) is not None:
        found |= state_scales(state.state2, f"{prefix}state2.")
    return found


def named_scales(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Scales of the model's packed weights, in order of layers: `fc.weight.absmax`."""
    for name, layer in packed_layers(model):
        for path, tensor in scales_of(layer).items():
            yield f"{name}.{path}".removeprefix("."), tensor


def _with_tensors(state: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a `QuantState` with `make(tensor)` for each tensor."""
    made = object.__new__(type(state))
    made.__dict__.update(state.__dict__)
    for name in _TENSORS:
        if isinstance(getattr(state, name, None), torch.Tensor):
            setattr(made, name, make(getattr(state, name)))
    if getattr(state, "state2", None) is not None:
        made.state2 = _with_tensors(state.state2, make)
    return made


def carry_scales(
    weight: nn.Parameter, made: nn.Parameter, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Copy a packed weight's attributes, besides its bytes, to its replacement."""
    own = weight.__dict__
    if own.get(STATE) is not None:
        made.__dict__.update(own)
        made.__dict__[STATE] = _with_tensors(own[STATE], make)
    elif own.get(ROW_SCALES) is not None:
        made.__dict__.update(own)
        made.__dict__[ROW_SCALES] = make(own[ROW_SCALES])
        made.__dict__["CB"] = None  # else the bytes of the replaced weight


def name_scales(module: Any) -> None:
    """Copy the scales of a packed layer's current weight to the layer."""
    weight = module._parameters.get("weight")
    own = {} if weight is None else weight.__dict__
    if own.get(STATE) is not None:
        module.quant_state = own[STATE]
    elif own.get(ROW_SCALES) is not None and of_eight_bits(module):
        module.state.CB, module.state.SCB = None, own[ROW_SCALES]


def packed_like(weight: Any, values: torch.Tensor, *, eight: bool) -> Any:
    """A weight packed from numbers on their device, with another's settings and scales.

    Tables of codes made inside are float32 and on the weight's device; otherwise they would take
    the default dtype, which transformers sets to the model's.
    """
    found: Any = library()
    settings: dict[str, Any] = dict(weight.__dict__)
    if eight:
        kind, settings = found.nn.Int8Params, settings | {ROW_SCALES: None, "CB": None}
    else:
        # With its layer, it would also set that layer's scales.
        unpacked = {STATE: None, "bnb_quantized": False, "module": None}
        kind, settings = found.nn.Params4bit, settings | unpacked
    known = found.functional.name2qmap
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        if "dynamic" not in known:
            # It caches one table of codes, on the first caller's device: make it of real numbers.
            with _disable_current_modes(), torch.device("cpu"):
                known["dynamic"] = found.functional.create_dynamic_map()
        with torch.device(values.device):
            packed = kind(values, requires_grad=False, **settings)._quantize(values.device)
    finally:
        torch.set_default_dtype(before)
    packed.__dict__[PACKED_FROM] = values.dtype
    if not eight:
        packed.module = weight.__dict__.get("module")
    return packed


PACKED_FROM = "packed_from"
"""The attribute with the original dtype of a packed weight."""


def pack_absent(model: nn.Module) -> Callable[[], None]:
    """Give unpacked weights on `meta` their packed shapes; returns the undo."""
    undo = ExitStack()
    for _, layer in packed_layers(model):
        weight = layer.weight
        if weight.is_meta and weight.is_floating_point() and not scales_of(layer):
            undo.callback(setattr, layer, "weight", weight)
            layer.weight = packed_like(weight, weight.data, eight=of_eight_bits(layer))
            name_scales(layer)
    return undo.close


def refuse_quantized(model: nn.Module, *, source: str) -> None:
    """ProtrainError, naming the layer, for a quantised weight that no plan supports."""
    for module in model.modules():  # loaded by transformers with another quantiser
        method = module.__dict__.get("quantization_method")
        method = str(getattr(method, "value", method or ""))
        if method and not method.startswith("bitsandbytes"):
            raise ProtrainError(
                f"the model's weights are quantised by {method}: of packed weights, those of"
                " bitsandbytes can be planned",
                source=source,
                fix="BitsAndBytesConfig(load_in_4bit=True), or plan the model before it is"
                " quantised",
            )
    found = library()
    if found is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, found.nn.Embedding8bit | found.nn.Embedding4bit):
            raise ProtrainError(
                f"'{name}' is a {type(module).__name__}: its scales, and what it keeps for"
                " backward, are where a plan cannot follow them",
                source=source,
                fix="leave embeddings as they were, and pack linear layers",
            )
    for name, layer in packed_layers(model):
        problem, fix = _problem(layer)
        if problem:
            raise ProtrainError(f"the weight of '{name}' {problem}", source=source, fix=fix)


def _problem(layer: Any) -> tuple[str, str]:
    """The reason against planning a packed layer, and the fix; "" if there is none."""
    weight, eight = layer.weight, of_eight_bits(layer)
    if eight and layer.state.has_fp16_weights:
        return (
            "is kept as numbers, and packed again in every forward",
            "Linear8bitLt(..., has_fp16_weights=False), or llm_int8_has_fp16_weight=False",
        )
    if eight and layer.state.threshold > 0:
        return (
            f"is multiplied once more for columns of inputs that reach {layer.state.threshold}: how"
            " many these are, and so what a step takes, depends on the data",
            "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)",
        )
    if not scales_of(layer) or (eight and weight.dtype != torch.int8):
        return "is not packed yet", "move the model to its device, which packs it"
    if eight:
        return "", ""
    if getattr(weight.quant_state, "packing_format_for_cpu", False):
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
    """Adapt bitsandbytes as described above; returns the undo.

    After it, evaluations repack, and 8-bit layers have their bytes in `state`. Products, and biases
    of 4-bit layers, stay adapted: only saved memory shows it. A no-op without packed weights.
    """
    undo = ExitStack()
    for name, layer in packed_layers(model):
        save_packed_weights()
        leave_packed_weights()
        if of_eight_bits(layer):
            _settle_eight_bits(name, layer, undo)
            continue
        if layer.support_avx512bf16_for_cpu:
            undo.callback(partial(setattr, layer, "support_avx512bf16_for_cpu", True))
        layer.support_avx512bf16_for_cpu = False
        if getattr(layer, STATE, None) is None:  # scales are counted there
            layer.quant_state = getattr(layer.weight, STATE, None)
        if layer.bias is not None and layer.compute_dtype is not None:
            layer.bias.data = layer.bias.data.to(layer.compute_dtype)
    return undo.close


def _settle_eight_bits(name: str, layer: Any, undo: ExitStack) -> None:
    """Leave the parameter as the only name of the packed bytes."""
    weight, state = layer.weight, layer.state
    if state.CB is not None or getattr(weight, "CB", None) is not None:
        undo.callback(lambda: setattr(state, "CB", layer.weight.data))
    found = scales_of(layer).get(ROW_SCALES)
    if found is not None:  # moving the weight may have left them behind
        setattr(weight, ROW_SCALES, found.to(weight.device))
        state.SCB = getattr(weight, ROW_SCALES)
    weight.CB = state.CB = None
    hooks = layer._forward_pre_hooks.values()
    if layer.bias is not None and not any(getattr(h, "func", 0) is _refuse_bias for h in hooks):
        undo.callback(layer.register_forward_pre_hook(partial(_refuse_bias, name)).remove)


def _refuse_bias(name: str, layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    own, given = layer.bias.dtype, inputs[0].dtype
    if own != given:
        has, gets = (str(dtype).removeprefix("torch.") for dtype in (own, given))
        raise ProtrainError(
            f"the bias of '{name}' is in {has} and its input in {gets}: a layer of 8 bits would"
            " convert the bias, which a plan has placed",
            fix=f"convert it to {gets} before, or the whole model to one dtype",
        )


def leave_packed_weights() -> None:
    """Make PEFT read packed weights without replacing them, from now on."""
    for name, module in list(sys.modules.items()):
        own = getattr(module, _NUMBERS, None) if name.startswith("peft.") else None
        if own is not None and not isinstance(own, partial):
            setattr(module, _NUMBERS, partial(_numbers_of, own))


def _numbers_of(plain: Callable[..., Any], layer: Any) -> Any:
    """The numbers of a packed layer's weight; `plain` gives those of others."""
    found: Any = library()
    packed = isinstance(layer, found.nn.Linear4bit | found.nn.Linear8bitLt)
    own = scales_of(layer) if packed else {}
    if own and of_eight_bits(layer):
        return found.functional.int8_vectorwise_dequant(layer.weight.data, *own.values())
    if own:
        return found.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return plain(layer)


_NUMBERS = "dequantize_module_weight"
"""PEFT's function, in each module that imports it."""
_FOUR, _EIGHT, _EIGHT_AS_NUMBERS = "MatMul4Bit", "MatMul8bitLt", "MatMul8bitFp"
_SAVES = "saves_packed_weights"


def save_packed_weights() -> None:
    """Make products save packed weights through autograd, process-wide from now on."""
    functions: Any = sys.modules["bitsandbytes.autograd._functions"]
    if hasattr(getattr(functions, _FOUR), _SAVES):
        return
    plain = {name: getattr(functions, name) for name in (_FOUR, _EIGHT, _EIGHT_AS_NUMBERS)}
    setattr(functions, _FOUR, _saving_four_bits(plain[_FOUR]))
    for name in (_EIGHT, _EIGHT_AS_NUMBERS):
        setattr(functions, name, _saving_eight_bits(plain[name], of_cards=plain[_EIGHT]))


def _saving_four_bits(plain: Any) -> Any:
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
            saved = ctx.saved_tensors  # once: recomputed tensors are handed out a single time
            if not saved:
                return plain.backward(ctx, *gradients)
            ctx.tensors = (None, *saved)
            try:
                return plain.backward(ctx, *gradients)
            finally:
                ctx.tensors = None

    return SavingProduct


_as_on_a_card = False


@contextmanager
def products_of_a_card() -> Iterator[None]:
    """Use a card's 8-bit products inside, also on a CPU.

    A card quantises inputs, too; a CPU dequantises the weight. Fake tensors are on a CPU. A card's
    products warn of every bfloat16 input; that warning is silenced here.
    """
    global _as_on_a_card
    log = logging.getLogger("bitsandbytes.autograd._functions")
    before = _as_on_a_card, log.disabled
    _as_on_a_card = log.disabled = True
    try:
        yield
    finally:
        _as_on_a_card, log.disabled = before


def _saving_eight_bits(plain: Any, *, of_cards: Any) -> Any:
    class SavingProduct(plain):
        saves_packed_weights = True

        @staticmethod
        def forward(
            ctx: Any,
            given: torch.Tensor,
            weight: torch.Tensor,
            out: Any = None,
            bias: Any = None,
            state: Any = None,
        ) -> Any:
            ctx.product = of_cards if _as_on_a_card else plain
            packed = weight.dtype == torch.int8 and state.SCB is not None
            if not packed or not given.numel():
                return ctx.product.forward(ctx, given, weight, out, bias, state)
            bound = copy.copy(state)
            bound.CB = weight.detach()
            output = ctx.product.forward(ctx, given, weight, out, bias, bound)
            # For a weight without a gradient, backward reads the state alone.
            ctx.A, ctx.tensors, ctx.tensor_states = None, (None, None, None), (None, None)
            bound.CB, ctx.state = None, bound
            if ctx.needs_input_grad[0]:
                ctx.save_for_backward(weight)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            saved = ctx.saved_tensors  # once: recomputed tensors are handed out a single time
            if not saved or saved[0] is None:
                return ctx.product.backward(ctx, *gradients)
            ctx.state.CB = saved[0].detach()
            try:
                return ctx.product.backward(ctx, *gradients)
            finally:
                ctx.state.CB = None

    return SavingProduct
