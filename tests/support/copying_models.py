"""Models whose code copies tensors, or packs sequences by their lengths: each in its own way."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, WIDTH, BATCH, LENGTH = 48, 16, 4, 24
Made = tuple[nn.Module, list[Any]]
PACKED = pack_padded_sequence(
    torch.arange(1, LENGTH + 1).repeat(2, 1), torch.tensor([LENGTH, 7]), True
)


def _tokens() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)


class Recurrent(nn.Module):
    """Layers that are copies of one, which has a constant, on sequences of several lengths."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = kind(WIDTH, WIDTH, batch_first=True)
        layer.scale = torch.tensor([1.0, 2.0])
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        for layer in self.layers:
            packed, _ = layer(packed)
        hidden, _ = pad_packed_sequence(packed, batch_first=True, total_length=LENGTH)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class Packed(nn.Module):
    """One layer, on a batch that is packed already."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.GRU(WIDTH, WIDTH, num_layers=2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, packed: Any) -> Tensor:
        hidden, _ = self.layer(packed._replace(data=self.embedding(packed.data)))
        return F.cross_entropy(self.head(hidden.data), packed.data)


def recurrent(kind: type[nn.LSTM | nn.GRU] = nn.LSTM) -> Made:
    return Recurrent(kind), [{"tokens": _tokens(), "lengths": torch.tensor([LENGTH, 7, 15, 3])}]


def gated() -> Made:
    return recurrent(nn.GRU)


def packed() -> Made:
    return Packed(), [{"packed": PACKED}]


def adapters() -> Made:
    """PEFT copies the modules that it trains beside its adapters."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    saved = ["embed_tokens", "lm_head", "norm"]
    adapted = get_peft_model(model, LoraConfig(r=2, modules_to_save=saved))
    return adapted, [{"input_ids": _tokens(), "labels": _tokens()}]


COPYING: dict[str, Callable[[], Made]] = {
    made.__name__: made for made in (recurrent, gated, packed, adapters)
}


class Copying(torch.optim.Optimizer):
    """Keeps a copy of each parameter, and of its rows' sums; counts in a tensor."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # as torch's
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["step"] = torch.tensor(0.0)
                        state["first"] = copy.deepcopy(parameter.detach())
                        state["sums"] = torch.zeros_like(parameter).sum(-1)
                    state["step"] += 1
                    parameter.add_(parameter.grad, alpha=-group["lr"])
