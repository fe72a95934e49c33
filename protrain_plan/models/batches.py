"""Batches without a tokeniser or a data set, and their way through a model.

Text is real: a byte is a token, ids 0..255, equal on every machine for equal text. Images and sound
are noise from a seeded generator: a step's cost does not depend on their content.
"""

import importlib
import inspect
import random
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, repeat
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protrain_runtime.activations.trees import taken_apart, tensors_in
from protrain_runtime.contract.errors import ProtrainError, RecordError
from protrain_runtime.contract.records.files import read_bytes
from protrain_runtime.contract.records.profile import Workload
from protrain_runtime.diagnostics.matching import call_sizes

Batch = Mapping[str, Any] | tuple[Any, ...] | Tensor
"""The arguments of one call of a model: keyword arguments, positional arguments, or one tensor.

Arguments need not be tensors (`return_loss=True`).
"""

NUM_BYTE_TOKENS = 256
MAX_TEXT_BYTES = 2**28
"""Most bytes read from a training file."""
MAX_TOKENS = 2**26
"""Most tokens of a batch: 64 M, half a GiB of them."""
_DEFAULT_TEXT_BYTES = 4 * 2**20


def byte_tokens(text: Path | None) -> bytes:
    """The bytes of a text file as token ids.

    Default: text shipped with Python, its licence and the sources of its standard library, at most
    4 MiB. ProtrainError if `text` cannot be read.
    """
    if text is not None:
        try:
            return read_bytes(text, most_bytes=MAX_TEXT_BYTES)
        except RecordError as error:
            raise ProtrainError(
                f"cannot read the text: {error.message}",
                source=str(text),
                fix="give the path of a plain text file",
            ) from None
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


def text_windows(tokens: bytes, workload: Workload) -> Iterator[Tensor]:
    """Endless consecutive windows of `tokens`, int64 [batch_size, seq_len].

    The seed chooses the first window; the text restarts after the last one. `tokens` shorter than a
    window are repeated. ProtrainError for an empty text.
    """
    batch_size, seq_len = workload.batch_size, workload.seq_len
    if batch_size < 1 or seq_len < 1:
        raise ProtrainError(
            f"a batch needs at least one sequence of one token, got {batch_size} x {seq_len}"
        )
    if not tokens:
        raise ProtrainError("the text is empty")
    window = batch_size * seq_len
    if window > MAX_TOKENS:
        raise ProtrainError(
            f"a batch of {batch_size} x {seq_len} tokens is larger than {MAX_TOKENS} tokens"
        )
    tokens *= -(-window // len(tokens))
    num_windows = len(tokens) // window
    at = random.Random(workload.seed).randrange(num_windows)
    while True:
        chosen = bytearray(tokens[at * window : (at + 1) * window])
        yield torch.frombuffer(chosen, dtype=torch.uint8).long().view(batch_size, seq_len)
        at = (at + 1) % num_windows


def first_of(batches: Iterator[Batch], *, source: str) -> Batch:
    """The first batch; ProtrainError, naming the source, without one."""
    for batch in batches:
        return batch
    raise ProtrainError(
        "there are no batches",
        source=source,
        fix="return an iterable of at least one batch from the factory",
    )


def of_one_size(batches: Iterator[Batch], first: Batch) -> Iterator[Batch]:
    """Endless batches of `first`'s shapes, which replaces smaller last ones."""
    shapes = [tensor.shape for tensor in tensors_in(first)]
    for batch in batches:
        yield batch if [tensor.shape for tensor in tensors_in(batch)] == shapes else first
    yield from repeat(first)


def call_model(model: nn.Module, batch: Batch) -> object:
    """The model's output for one batch: mappings are passed by keyword, tuples by position."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def batch_to(batch: object, device: torch.device | str, dtype: torch.dtype | None) -> Batch:
    """The batch on `device`, floating-point tensors in `dtype` (None: their own).

    Includes tensors in nested containers and in objects; other values are unchanged. ProtrainError
    if it is not a `Batch`.
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
        fix="yield what the model's forward takes from the factory's iterable",
    )


def loss_of(output: object) -> Tensor:
    """The scalar that training differentiates, from any forward's output.

    Its `.loss` or `["loss"]`, itself or its first element if scalar. ProtrainError otherwise.
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
    described = type(output).__name__
    if isinstance(output, Tensor):
        described = f"a tensor of shape {list(output.shape)}"
    raise ProtrainError(
        f"the model's output holds no scalar loss: {described}",
        fix="return the loss from forward, or an output with `.loss`",
    )


MASKED_SHARE = 0.15
"""Share of masked tokens of a masked language model (BERT, arXiv 1810.04805, section 3.1)."""
NOT_A_TARGET = -100
"""The label that Hugging Face losses ignore."""
_WITH_IMAGE_TOKENS = ("llava", "vipllava")
_DEFAULT_IMAGE_SIZE = 224
MAX_NUMBERS = 2**28
"""The most features in a batch: a GiB of them."""

Inputs = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A request for a workload's batches, whose `seq_len` counts tokens of text, or of targets."""

    source: str  # for messages
    config: Any  # transformers'
    workload: Workload
    text: bytes

    def windows(self) -> Iterator[Tensor]:
        """Consecutive text, int64 [batch_size, seq_len].

        ProtrainError if the model has fewer than 256 tokens, or fewer positions than `seq_len`.
        """
        config, seq_len = self.config.get_text_config(), self.workload.seq_len
        if config.vocab_size < NUM_BYTE_TOKENS:
            raise ProtrainError(
                f"text needs {NUM_BYTE_TOKENS} tokens (one per byte), got {config.vocab_size}",
                source=self.source,
                key="vocab_size",
            )
        for key in ("max_target_positions", "max_position_embeddings"):
            positions = getattr(config, key, None)
            if isinstance(positions, int) and seq_len > positions:
                raise ProtrainError(
                    f"a sequence of {seq_len} tokens does not fit the model's {positions}"
                    " positions",
                    source=self.source,
                    key=key,
                    fix=f"at most {positions} tokens per sequence",
                )
        return text_windows(self.text, self.workload)

    def generators(self) -> Iterator[torch.Generator]:
        """One per batch: batches do not depend on earlier ones."""
        seed = self.workload.seed
        return (torch.Generator().manual_seed((seed + 1_000_003 * n) % 2**63) for n in count())

    def images(self, generator: torch.Generator) -> Tensor:
        """Standard normal, like normalised pixels.  # [batch, channels, height, width]"""
        vision = getattr(self.config, "vision_config", self.config)
        size = getattr(vision, "image_size", _DEFAULT_IMAGE_SIZE)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return noise((self.workload.batch_size, vision.num_channels, height, width), generator)


def noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard normal numbers; ProtrainError if absurdly many."""
    if (total := prod(shape)) > MAX_NUMBERS:
        raise ProtrainError(f"a batch of {total} numbers is larger than {MAX_NUMBERS} of them")
    return torch.randn(shape, generator=generator)


def classes(task: str) -> Mapping[str, str]:
    """The names of transformers' model classes for a task, by architecture."""
    known = importlib.import_module("transformers.models.auto.modeling_auto")
    found: Mapping[str, str] = getattr(known, f"MODEL_FOR_{task}_MAPPING_NAMES")
    return found


_Make = Callable[[BatchRequest, Tensor, torch.Generator], Inputs]
"""Makes a batch of a window of text, with numbers from a generator."""


def inputs_of(model_class: str, request: BatchRequest) -> Iterator[Inputs]:
    """Endless batches for a model class of transformers, on the CPU; ProtrainError if unknown."""
    model_type = request.config.model_type
    by_task: dict[str, _Make] = {
        "SEQ_TO_SEQ_CAUSAL_LM": _text,
        "CAUSAL_LM": _text,
        "MASKED_LM": _masked_text,
        "ZERO_SHOT_IMAGE_CLASSIFICATION": _pairs,
        "IMAGE_CLASSIFICATION": _labelled_images,
    }
    if model_type in _WITH_IMAGE_TOKENS:
        make: _Make | None = _images_and_text
    elif model_type == "whisper":
        make = _sound_and_text
    elif _is_multimodal(model_class):
        make = _text
    else:
        found = (by_task[task] for task in by_task if model_class in classes(task).values())
        make = next(found, None)
    if make is None:
        raise ProtrainError(
            f"no batches are known for the architecture {model_type!r}",
            source=request.source,
            fix="use package.module:factory, which brings its own batches",
        )
    if make is _pairs and request.workload.batch_size < 2:
        raise ProtrainError(
            "a contrastive loss compares the pairs of a batch, got a batch of 1",
            source=request.source,
            fix="--batch-size 2 or more",
        )
    windows = repeat(torch.empty(0)) if make is _labelled_images else request.windows()
    return map(partial(make, request), windows, request.generators())


def _text(_: BatchRequest, window: Tensor, __: torch.Generator) -> Inputs:
    """input_ids and labels are the same [batch, tokens]: the model shifts them itself."""
    return {"input_ids": window, "labels": window.clone()}


def _is_multimodal(model_class: str) -> bool:
    """Whether a model class writes text about images or sound, each with its own rules."""
    return any(
        model_class in classes(task).values() for task in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    )


def of_text_alone(model: nn.Module, model_class: str) -> nn.Module:
    """The model, with parts for images or sound frozen if batches have neither."""
    made: Any = model
    if _is_multimodal(model_class) and made.config.model_type not in _WITH_IMAGE_TOKENS:
        towers = (made.get_decoder(), made.get_input_embeddings(), made.get_output_embeddings())
        of_text = {one for tower in towers if tower is not None for one in tower.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in of_text)
    return model


def _masked_text(request: BatchRequest, window: Tensor, generator: torch.Generator) -> Inputs:
    """Masked tokens are the vocabulary's last one; labels are their text alone."""
    mask = torch.rand(window.shape, generator=generator) < MASKED_SHARE
    mask[:, 0] = True  # a batch without masks has no loss
    return {
        "input_ids": window.masked_fill(mask, request.config.vocab_size - 1),
        "labels": window.masked_fill(~mask, NOT_A_TARGET),
    }


def _labelled_images(request: BatchRequest, _: Tensor, generator: torch.Generator) -> Inputs:
    """pixel_values [batch, channels, height, width] with labels [batch]; no text."""
    shape, num_labels = (request.workload.batch_size,), request.config.num_labels
    labels = torch.randint(num_labels, shape, generator=generator)
    return {"pixel_values": request.images(generator), "labels": labels}


def _pairs(request: BatchRequest, window: Tensor, generator: torch.Generator) -> Inputs:
    """Texts [batch, tokens] and images of one batch, for a contrastive loss."""
    return {"input_ids": window, "pixel_values": request.images(generator), "return_loss": True}


def _sound_and_text(request: BatchRequest, window: Tensor, generator: torch.Generator) -> Inputs:
    """input_features [batch, mel bins, frames] with labels [batch, tokens]."""
    config = request.config
    # The encoder's second convolution has a stride of two.
    shape = (request.workload.batch_size, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": noise(shape, generator), "labels": window}


def _images_and_text(request: BatchRequest, window: Tensor, generator: torch.Generator) -> Inputs:
    """One image per sequence: its tokens, then the text; labels are the text alone."""
    config = request.config
    vision = config.vision_config
    num_patches = (vision.image_size // vision.patch_size) ** 2
    # "default" leaves the class token out.
    num_image_tokens = num_patches + (config.vision_feature_select_strategy == "full")
    shape = (request.workload.batch_size, num_image_tokens)
    return {
        "input_ids": torch.cat([torch.full(shape, config.image_token_id), window], dim=1),
        "pixel_values": request.images(generator),
        "labels": torch.cat([torch.full(shape, NOT_A_TARGET), window], dim=1),
    }


def with_batch_sizes(workload: Workload, model: nn.Module, batch: object) -> Workload:
    """The workload with a factory batch's sizes; a configuration's batches have its own.

    `batch_size` is the first dimension of the first tensor that has one. `seq_len` is the second of
    the first integer tensor with two dimensions and that many rows, token ids [batch, tokens]; else
    of the first tensor with three, features [batch, sequence, width]; else 1, as for images alone.
    """
    if workload.model_config:
        names = set(batch) if isinstance(batch, Mapping) else set()
        return replace(workload, seq_len=1) if names == {"pixel_values", "labels"} else workload
    signature = inspect.signature(model.forward)
    if isinstance(batch, Mapping):
        sizes = call_sizes(signature, (), batch)
    else:
        sizes = call_sizes(
            signature, tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}
        )
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    batch_size = tensors[0].shape[0] if tensors else 1
    rows = [tensor for tensor in tensors if tensor.shape[0] == batch_size]
    tokens = [t for t in rows if t.dim() == 2 and not (t.is_floating_point() or t.is_complex())]
    features = [t for t in rows if t.dim() == 3]
    found = [*tokens, *features]
    return replace(
        workload,
        inputs=tuple(f"{name} {'x'.join(map(str, size))}" for name, size in sizes),
        batch_size=max(1, batch_size),
        seq_len=max(1, found[0].shape[1]) if found else 1,
    )
