"""A training loop of pipeline stages in PyTorch alone, cut where `protrain plan --stages` cuts.

torchrun --nproc-per-node 2 examples/train_stages.py model.layers.2
"""

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

MICRO_BATCHES, BATCH_SIZE, SEQ_LEN = 6, 2, 64


def recompute(block: nn.Module) -> None:
    """Run the block's forward again in backward; nothing in it is random."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    block.forward = partial(checkpoint, block.forward, **options)


class Elsewhere(nn.Module):
    """A block of another stage: it hands on what it gets."""

    def forward(self, hidden: Tensor, *_: object, **__: object) -> Tensor:
        return hidden


class Stage(nn.Module):
    """One stage of a decoder, run by the decoder's own forward.

    `cuts` are the first units of all stages but the first. The first stage takes token ids [batch,
    sequence], the others hidden states [batch, sequence, hidden], and the last one returns logits.
    `whole` is the model without the parameters of other stages; the rest keep their names.
    """

    def __init__(
        self, whole: Any, cuts: Sequence[str], number: int, recomputed: Collection[str] = ()
    ) -> None:
        super().__init__()
        if whole.config.tie_word_embeddings:
            raise ValueError("tied embeddings are used in two stages, and cannot be cut")
        if any(getattr(whole.config, key, 0) for key in ("attention_dropout", "resid_pdrop")):
            raise ValueError("dropout draws other random numbers in stages than in one process")
        self.whole = whole
        blocks = whole.model.layers
        names = [f"model.layers.{block}" for block in range(len(blocks))]
        starts = [(*names, "model.norm").index(cut) for cut in cuts]
        first, end = (0, *starts)[number], (*starts, len(blocks))[number]
        self.takes = "inputs_embeds" if number else "input_ids"
        for block, name in enumerate(names):
            if not first <= block < end:
                blocks[block] = Elsewhere()
            elif name in recomputed:
                recompute(blocks[block])
        if number:
            whole.model.embed_tokens = None
        if number < len(cuts):
            whole.model.norm, whole.lm_head = nn.Identity(), nn.Identity()

    def forward(self, handed: Tensor) -> Tensor:
        """Return hidden states for the next stage, or logits."""
        logits: Tensor = self.whole(**{self.takes: handed}, use_cache=False).logits
        return logits


def make_model() -> Any:
    """A small Llama with random weights; its tokens are bytes."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def make_batches() -> Iterator[Tensor]:
    """All micro-batches of a step, from a text that ships with Python, without end."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    window = MICRO_BATCHES * BATCH_SIZE * SEQ_LEN
    return cycle(text[: len(text) // window * window].view(-1, window // SEQ_LEN, SEQ_LEN))


def loss_of(logits: Tensor, labels: Tensor, *, model: Any, count: int) -> Tensor:
    """The model's own loss, by the number of micro-batches: gradients then add up to the mean."""
    loss: Tensor = model.loss_function(logits, labels, vocab_size=model.config.vocab_size)
    return loss / count


def main(cuts: Sequence[str], num_steps: int = 5) -> None:
    """Train `num_steps` steps; every process has the stage of its rank."""
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # every rank makes the whole model, and lets go of the rest
    model = Stage(make_model(), cuts, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = Schedule1F1B(
        PipelineStage(model, rank, count, torch.device("cpu")),
        n_microbatches=MICRO_BATCHES,
        loss_fn=partial(loss_of, model=model.whole, count=MICRO_BATCHES),
        scale_grads=False,  # dividing their sum instead would round otherwise
    )
    is_first, is_last = rank == 0, rank == count - 1
    for step, batch in zip(range(num_steps), make_batches(), strict=False):
        losses: list[Tensor] = []
        schedule.step(
            *([batch] if is_first else []),
            target=batch if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,  # the logits of all micro-batches
        )
        optimizer.step()
        optimizer.zero_grad()
        if is_last:
            print(f"step {step}: loss {sum(loss.item() for loss in losses):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
