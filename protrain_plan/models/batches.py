"""Batches of real text without a tokeniser, and how a batch goes through a model.

A byte of text is a token: ids 0..255, the same on every machine with the same text.
"""

import random
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protrain_plan.errors import ProtrainError
from protrain_runtime.trees import taken_apart

Batch = Mapping[str, Any] | tuple[Any, ...] | Tensor
"""What one call of a model takes: keyword arguments, positional arguments, or one tensor.

Arguments need not be tensors (`return_loss=True`).
"""

NUM_BYTE_TOKENS = 256
_DEFAULT_TEXT_BYTES = 4 * 2**20


def byte_tokens(text: Path | None) -> bytes:
    """The bytes of a text file: each is a token id.

    By default: what Python itself ships as text, its licence and the sources of its standard
    library, 4 MiB at most. ProtrainError where `text` cannot be read.
    """
    if text is None:
        content = _standard_text()
    else:
        try:
            content = text.read_bytes()
        except OSError as error:
            raise ProtrainError(
                f"cannot read the text: {error.strerror}",
                source=str(text),
                fix="give the path of a plain text file",
            ) from error
    return content


def _standard_text() -> bytes:
    folder = Path(sysconfig.get_path("stdlib"))
    content = bytearray()
    for path in (*sorted(folder.glob("LICENSE*")), *sorted(folder.glob("*.py"))):
        content += path.read_bytes()
        if len(content) >= _DEFAULT_TEXT_BYTES:
            break
    if not content:
        raise ProtrainError(
            "this Python ships no text files to train on",
            source=str(folder),
            fix="give the path of a plain text file",
        )
    return bytes(content[:_DEFAULT_TEXT_BYTES])


def text_windows(tokens: bytes, *, batch_size: int, seq_len: int, seed: int) -> Iterator[Tensor]:
    """Consecutive windows of `tokens`, int64 [batch_size, seq_len], without end.

    The seed chooses the first window; after the last one the text starts again.
    `tokens` is repeated where it is shorter than one window. ProtrainError for an empty text.
    """
    if batch_size < 1 or seq_len < 1:
        raise ProtrainError(
            f"a batch needs at least one sequence of one token, got {batch_size} x {seq_len}"
        )
    if not tokens:
        raise ProtrainError("the text is empty")
    window = batch_size * seq_len
    tokens *= -(-window // len(tokens))
    num_windows = len(tokens) // window
    at = random.Random(seed).randrange(num_windows)
    while True:
        chosen = bytearray(tokens[at * window : (at + 1) * window])
        yield torch.frombuffer(chosen, dtype=torch.uint8).long().view(batch_size, seq_len)
        at = (at + 1) % num_windows


def call_model(model: nn.Module, batch: Batch) -> object:
    """The model's output for one batch: a mapping goes in by keyword, a tuple by position."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def batch_to(batch: object, device: torch.device | str, dtype: torch.dtype) -> Batch:
    """The same batch on `device`, floating-point tensors in `dtype`, what is no tensor as it is.

    Tensors in nested containers and in objects too. ProtrainError where it is no kind of `Batch`.
    """

    def moved(value: object) -> Any:
        tensors, rebuild = taken_apart(value)
        return rebuild([t.to(device, dtype if t.is_floating_point() else None) for t in tensors])

    if isinstance(batch, Tensor):
        moved_batch: Tensor = moved(batch)
        return moved_batch
    if isinstance(batch, Mapping):
        return {str(key): moved(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(moved(value) for value in batch)
    raise ProtrainError(
        f"a batch is a dict, a tuple or a tensor, got {type(batch).__name__}",
        fix="let the factory's iterable give what the model's forward takes",
    )


def loss_of(output: object) -> Tensor:
    """The scalar that training differentiates, from whatever a forward returned.

    Its `.loss` or `["loss"]`, itself where it is a scalar, or its first element where that is
    one. ProtrainError otherwise.
    """
    loss: object = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor) and hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, tuple | list) and output:
        loss = output[0]
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    raise ProtrainError(
        f"the model's output holds no scalar loss: {_described(output)}",
        fix="return the loss from forward, or an output with `.loss`",
    )


def _described(output: object) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {list(output.shape)}"
    return type(output).__name__
