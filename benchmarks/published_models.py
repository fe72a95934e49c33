"""Models of published runs, where they differ from transformers of today.

Each difference is one that the code of the run has, and `published.yaml` says where. Only bytes
and operators change: nothing here is a factor.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from protrain_plan.models.building import computing_in
from protrain_plan.models.sources import ConfigSource
from protrain_runtime.contract.records.profile import Workload

Logits = Literal[
    "cast for the loss", "cast and shifted", "kept in float32", "returned in float32", "in 16 bits"
]
"""The form in which the loss takes a head's 16-bit logits.

cast for the loss   transformers of today: a float32 copy, which lives as long as the loss runs
cast and shifted    transformers 4.46 to 4.49: the float32 copy beside those that the model returns,
                    and a copy of all but the last of each sequence (loss/loss_utils.py, 4.48.1)
kept in float32     transformers until 4.45, torchtune of 2024: what the model returns is float32,
                    and the loss takes a copy of all logits but the last of each sequence
returned in float32 litgpt, Thunder: Lightning's Fabric makes what a 16-bit model returns float32
                    (`convert_output` of plugins/precision/half.py), and the loss takes that
in 16 bits          LLMs from scratch: a cross entropy of the logits themselves
"""


@dataclass(frozen=True)
class AsRun(ConfigSource):
    """A configuration's model with the loss and the attention of other code.

    With `expanded_heads` keys and values are copied for every head of the queries, as code did that
    is older than `enable_gqa` of PyTorch 2.5. With `one_product` the values are a view of the
    product that queries and keys came out of, too, so that attention keeps all three for backward.
    With `inputs_kept` products with 4-bit weights keep their inputs, which nothing needs
    (`ctx.tensors = (A, B)` in bitsandbytes' autograd/_functions.py; today `(None, B)`).
    With `float32_norms` a norm's product with its weight is one of float32 values, which its
    backward needs, as in litgpt. With `logits_held` the loop has a name for the logits until
    the model returns those of the next step. With `joint_adapters` those of a block's queries, keys
    and values are one, as litgpt's: they share what dropout leaves of their input, and where one of
    the three has none, what the others add is copied to a wider tensor, whose backward needs it
    (`index_copy` of `LoRAQKVLinear.zero_pad`, and `source` in PyTorch's derivatives.yaml).
    With `autocast` the forward runs under autocast, as with a trainer's `bf16`, though parameters
    are in 16 bits: products with float32 adapters are in 16 bits, too.
    """

    logits: Logits = "cast for the loss"
    expanded_heads: bool = False
    one_product: bool = False
    inputs_kept: bool = False
    float32_norms: bool = False
    logits_held: bool = False
    joint_adapters: bool = False
    autocast: bool = False

    def build(self, workload: Workload, *, device: torch.device | str = "cpu") -> nn.Module:
        """As `ConfigSource.build`. The attention changes for the whole process."""
        model = super().build(workload, device=device)
        plain: Any = model
        if workload.adapter:
            plain = plain.get_base_model()
        if self.expanded_heads:
            from transformers.integrations import sdpa_attention

            vars(sdpa_attention)["use_gqa_in_sdpa"] = lambda *_: False
        if self.logits in ("kept in float32", "returned in float32"):
            head: nn.Module = plain.get_output_embeddings()
            beside = self.logits_held and self.logits == "returned in float32"
            head.register_forward_hook(partial(_to_float32, beside_old=beside))
        if self.logits in ("kept in float32", "cast and shifted"):
            plain.loss_function = _of_shifted_copy
        elif self.logits != "cast for the loss":
            plain.loss_function = _of_logits
        if self.logits_held:
            beside = self.logits == "kept in float32"
            plain.loss_function = partial(_holding, plain.loss_function, beside_old=beside)
        if self.joint_adapters:
            _join_adapters(model)
        for name, module in list(model.named_modules()):
            if self.one_product and name.endswith(".v_proj"):
                module.register_forward_hook(_with_room_for_three)
            if self.inputs_kept and type(module).__name__ == "Linear4bit":
                module.register_forward_hook(_keep_input)
            if self.float32_norms and type(module).__name__.endswith("RMSNorm"):
                vars(module)["forward"] = partial(_float32_norm, module)
        return computing_in(model, workload.dtype, "autocast") if self.autocast else model


def _holding(
    loss_of: Any, logits: Tensor, *arguments: Any, beside_old: bool, **named: Any
) -> Tensor:
    """The loss, whose backward keeps the logits alive to its end.

    Where the model computes the loss, `beside_old`, those of the step before are there meanwhile.
    """
    old = torch.empty_like(logits) if beside_old else None
    loss = loss_of(logits, *arguments, **named)
    del old
    held: Tensor = _Holding.apply(loss, logits)  # type: ignore[no-untyped-call]
    return held


class _Holding(torch.autograd.Function):
    """The first of two tensors as it is; the second lives until backward has ended."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, held: Tensor) -> Tensor:
        ctx.held = held.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(delattr, ctx, "held"))
        return grad, None


def _join_adapters(model: nn.Module) -> None:
    """Let the adapters of q, k and v of a block take and keep what one for all three does."""
    for block in list(model.modules()):
        layers = [getattr(block, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        own: list[Any] = [layer for layer in layers if hasattr(layer, "lora_dropout")]
        if len(own) > 1:
            shared = _SharedDropout(own[0].lora_dropout["default"])
            for layer in own:
                layer.lora_dropout["default"] = shared
        if 0 < len(own) < len(layers):
            for layer in own:
                layer.lora_B["default"].register_forward_hook(_keep_output)


def _keep_output(_layer: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    kept: Tensor = _Kept.apply(output, output)  # type: ignore[no-untyped-call]
    return kept


class _SharedDropout(nn.Module):
    """A dropout that gives those who ask for the same input one output."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.dropout = dropout
        self._last: list[ref[Tensor]] = []  # the input and what is left of it

    def forward(self, values: Tensor) -> Tensor:
        """Values of any shape, as dropout leaves them."""
        if self._last and self._last[0]() is values and (left := self._last[1]()) is not None:
            return left
        dropped: Tensor = self.dropout(values)
        self._last = [ref(values), ref(dropped)]
        return dropped


def _float32_norm(norm: Any, values: Tensor) -> Tensor:
    """Values [batch, tokens, width] by their root mean square, and rounded after the weight."""
    wide = values.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    result: Tensor = (normed * norm.weight.float()).to(values.dtype)
    return result


def _with_room_for_three(_v: nn.Module, _inputs: tuple[Tensor, ...], values: Tensor) -> Tensor:
    """Values [batch, tokens, width] as the last third of what is three times as wide."""
    others = values.new_empty(*values.shape[:-1], 2 * values.shape[-1])
    return torch.cat((others, values), dim=-1)[..., -values.shape[-1] :]


def _keep_input(_layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    kept: Tensor = _Kept.apply(output, inputs[0])  # type: ignore[no-untyped-call]
    return kept


class _Kept(torch.autograd.Function):
    """The first of two tensors as it is; the second waits for backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, waiting: Tensor) -> Tensor:
        ctx.save_for_backward(waiting)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert len(ctx.saved_tensors) == 1
        return grad, None


def _to_float32(
    _head: nn.Module, _inputs: tuple[Tensor, ...], logits: Tensor, *, beside_old: bool
) -> Tensor:
    """Logits in float32; `beside_old`: those of the step before are there, too."""
    old = torch.empty_like(logits, dtype=torch.float32) if beside_old else None
    wide = logits.float()
    del old
    return wide


def _of_logits(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
    """The loss of all logits [batch, tokens, vocabulary]: labels are shifted, and padded by one."""
    targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return cross_entropy(logits.view(-1, vocab_size), targets.reshape(-1))


def _of_shifted_copy(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
    wide = logits.float()
    shifted = wide[..., :-1, :].contiguous()
    return cross_entropy(shifted.view(-1, vocab_size), labels[..., 1:].reshape(-1))
