"""What published runs computed otherwise than transformers of today does: models as they ran.

Each difference is one that the code of the run has, and `published.yaml` says where. Only bytes
and operators change: nothing here is a factor.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from protrain_plan.models.sources import ConfigSource
from protrain_plan.records.profile import DType, Precision, Quantize

Logits = Literal["cast for the loss", "kept in float32", "in 16 bits"]
"""What the loss takes of a head's 16-bit logits.

cast for the loss   transformers of today: a float32 copy, which lives as long as the loss runs
kept in float32     transformers until 4.44, torchtune of 2024: what the model returns is float32,
                    and the loss takes a copy of all logits but the last of each sequence
in 16 bits          litgpt, Thunder, LLMs from scratch: a cross entropy of the logits themselves
"""


@dataclass(frozen=True)
class AsRun(ConfigSource):
    """A configuration's model with the loss and the attention of other code.

    With `expanded_heads` keys and values are copied for every head of the queries, as code did that
    is older than `enable_gqa` of PyTorch 2.5. With `one_product` the values are a view of the
    product that queries and keys came out of, too, so that attention keeps all three for backward.
    With `inputs_kept` products with 4-bit weights keep their inputs, which nothing needs
    (`ctx.tensors = (A, B)` in bitsandbytes' autograd/_functions.py; today `(None, B)`).
    """

    logits: Logits = "cast for the loss"
    expanded_heads: bool = False
    one_product: bool = False
    inputs_kept: bool = False

    def build(
        self,
        *,
        dtype: DType = "float32",
        precision: Precision = "pure",
        adapter: str = "",
        quantize: Quantize = "",
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> nn.Module:
        """As `ConfigSource.build`. The attention changes for the whole process."""
        model = super().build(
            dtype=dtype,
            precision=precision,
            adapter=adapter,
            quantize=quantize,
            device=device,
            seed=seed,
        )
        plain: Any = model
        if adapter:
            plain = plain.get_base_model()
        if self.expanded_heads:
            from transformers.integrations import sdpa_attention

            vars(sdpa_attention)["use_gqa_in_sdpa"] = lambda *_: False
        if self.logits == "in 16 bits":
            plain.loss_function = _of_logits
        elif self.logits == "kept in float32":
            head: nn.Module = plain.get_output_embeddings()
            head.register_forward_hook(_to_float32)
            plain.loss_function = _of_shifted_copy
        for name, module in list(model.named_modules()):
            if self.one_product and name.endswith(".v_proj"):
                module.register_forward_hook(_with_room_for_three)
            if self.inputs_kept and type(module).__name__ == "Linear4bit":
                module.register_forward_hook(_keep_input)
        return model


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


def _to_float32(_head: nn.Module, _inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
    return logits.float()


def _of_logits(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
    """Of all logits [batch, tokens, vocabulary]: labels are shifted, and padded by one."""
    targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return cross_entropy(logits.view(-1, vocab_size), targets.reshape(-1))


def _of_shifted_copy(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
    shifted = logits[..., :-1, :].contiguous()
    return cross_entropy(shifted.view(-1, vocab_size), labels[..., 1:].reshape(-1))
