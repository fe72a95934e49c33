"""A model and a training loop of one's own under a plan: what `prepare` changes is four lines.

protrain profile examples/train.py:factory -o profile.yaml
protrain plan profile.yaml --max-slowdown 2 -o plan.yaml
python examples/train.py plan.yaml
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import protrain_runtime

BATCH_SIZE, SEQ_LEN = 4, 64


class Block(nn.Module):
    """One transformer layer. Blocks of a list are what a plan decides about, one by one."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, sequence, width]
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norm_1(hidden)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        changed: Tensor = hidden + self.down(gelu(self.up(self.norm_2(hidden))))
        return changed


class LanguageModel(nn.Module):
    """A small decoder whose tokens are bytes; its forward returns the loss."""

    def __init__(self, width: int = 64, num_layers: int = 4, num_heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(SEQ_LEN, width)
        self.layers = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, sequence] -> []
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make_batches() -> Iterator[Tensor]:
    """Consecutive bytes of a text that ships with Python, without end."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    window = BATCH_SIZE * SEQ_LEN
    return cycle(text[: len(text) // window * window].view(-1, BATCH_SIZE, SEQ_LEN))


def factory() -> tuple[nn.Module, Iterator[Tensor]]:
    """The factory for `protrain profile`: the model and its batches, as `main` makes them."""
    return LanguageModel(), make_batches()


def main(plan: str, num_steps: int = 5) -> None:
    torch.manual_seed(0)
    model, batches = factory()

    model, optimizer = protrain_runtime.prepare(
        model, plan, optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True)
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=num_steps)

    for step, batch in enumerate(islice(batches, num_steps)):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"step {step}: loss {loss.item():.4f}")

    torch.save(model.state_dict(), "model.pt")  # the model's own names and shapes


if __name__ == "__main__":
    main(sys.argv[1])
