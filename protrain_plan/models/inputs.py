"""What a Hugging Face architecture takes as a batch: text, and features beside it.

Tokens are real text (see `batches`). Images and sound are noise from a seeded generator: what a
step costs does not depend on what they show, and no data set is needed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from protrain_plan.errors import ProtrainError
from protrain_plan.models.batches import NUM_BYTE_TOKENS, text_windows

MASKED_SHARE = 0.15
"""Of the tokens that a masked language model has to find (BERT, arXiv 1810.04805, section 3.1)."""
NOT_A_TARGET = -100
"""The label that Hugging Face losses leave out."""
_WITH_IMAGE_TOKENS = ("llava", "vipllava")
_DEFAULT_IMAGE_SIZE = 224

Inputs = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The batches that are asked for. `seq_len` counts tokens of text, targets where there are."""

    source: str  # for messages
    config: Any  # of transformers
    batch_size: int
    seq_len: int
    text: bytes
    seed: int

    def windows(self) -> Iterator[Tensor]:
        """Consecutive text, int64 [batch_size, seq_len].

        ProtrainError where the model has fewer than 256 tokens, or fewer positions than `seq_len`.
        """
        config = self.config.get_text_config()
        if config.vocab_size < NUM_BYTE_TOKENS:
            raise ProtrainError(
                f"text needs {NUM_BYTE_TOKENS} tokens (one per byte), got {config.vocab_size}",
                source=self.source,
                key="vocab_size",
            )
        for key in ("max_target_positions", "max_position_embeddings"):
            positions = getattr(config, key, None)
            if isinstance(positions, int) and self.seq_len > positions:
                raise ProtrainError(
                    f"a sequence of {self.seq_len} tokens does not fit the model's {positions}"
                    " positions",
                    source=self.source,
                    key=key,
                    fix=f"at most {positions} tokens per sequence",
                )
        return text_windows(
            self.text, batch_size=self.batch_size, seq_len=self.seq_len, seed=self.seed
        )

    def generators(self) -> Iterator[torch.Generator]:
        """One per batch, so that a batch does not depend on those before it."""
        return (torch.Generator().manual_seed(self.seed + 1_000_003 * n) for n in count())

    def images(self, generator: torch.Generator) -> Tensor:
        """Standard normal, as normalised pixels are.  # [batch, channels, height, width]"""
        vision = getattr(self.config, "vision_config", self.config)
        size = getattr(vision, "image_size", _DEFAULT_IMAGE_SIZE)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (self.batch_size, vision.num_channels, height, width)
        return torch.randn(shape, generator=generator)


def inputs_of(model_class: str, request: Request) -> Iterator[Inputs]:
    """Endless batches for a model class of transformers, on the CPU, features in float32.

    ProtrainError where none are known for it, or the request does not fit the model.
    """
    make = _maker(model_class, request.config.model_type)
    if make is None:
        raise ProtrainError(
            f"no batches are known for the architecture {request.config.model_type!r}",
            source=request.source,
            fix="use package.module:factory, which brings its own batches",
        )
    return make(request)


def _maker(model_class: str, model_type: str) -> Callable[[Request], Iterator[Inputs]] | None:
    from transformers.models.auto import modeling_auto as known

    if model_type in _WITH_IMAGE_TOKENS:
        return _images_and_text
    if model_type == "whisper":
        return _sound_and_text
    by_task: tuple[tuple[dict[str, Any], Callable[[Request], Iterator[Inputs]] | None], ...] = (
        (known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, None),  # each has rules of its own
        (known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, _text),
        (known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, _text),
        (known.MODEL_FOR_MASKED_LM_MAPPING_NAMES, _masked_text),
        (known.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES, _pairs),
        (known.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, _labelled_images),
    )
    for names, make in by_task:
        if model_class in names.values():
            return make
    return None


def _text(request: Request) -> Iterator[Inputs]:
    """input_ids and labels are the same [batch, tokens]: the model shifts them itself."""
    return ({"input_ids": w, "labels": w.clone()} for w in request.windows())


def _masked_text(request: Request) -> Iterator[Inputs]:
    """Masked tokens are the last one of the vocabulary; labels are the text there alone."""
    mask_token = request.config.vocab_size - 1

    def masked(window: Tensor, generator: torch.Generator) -> Inputs:
        mask = torch.rand(window.shape, generator=generator) < MASKED_SHARE
        mask[:, 0] = True  # a batch without any has no loss
        return {
            "input_ids": window.masked_fill(mask, mask_token),
            "labels": window.masked_fill(~mask, NOT_A_TARGET),
        }

    return map(masked, request.windows(), request.generators())


def _labelled_images(request: Request) -> Iterator[Inputs]:
    """pixel_values [batch, channels, height, width] with labels [batch]; no text."""

    def labelled(generator: torch.Generator) -> Inputs:
        labels = torch.randint(
            request.config.num_labels, (request.batch_size,), generator=generator
        )
        return {"pixel_values": request.images(generator), "labels": labels}

    return map(labelled, request.generators())


def _pairs(request: Request) -> Iterator[Inputs]:
    """Texts [batch, tokens] and images of one batch, to be told apart by a contrastive loss."""
    if request.batch_size < 2:
        raise ProtrainError(
            "a contrastive loss compares the pairs of a batch, got a batch of 1",
            source=request.source,
            fix="--batch-size 2 or more",
        )

    def paired(window: Tensor, generator: torch.Generator) -> Inputs:
        images = request.images(generator)
        return {"input_ids": window, "pixel_values": images, "return_loss": True}

    return map(paired, request.windows(), request.generators())


def _sound_and_text(request: Request) -> Iterator[Inputs]:
    """input_features [batch, mel bins, frames] with labels [batch, tokens]."""
    config = request.config
    # The encoder's second convolution has a stride of two.
    shape = (request.batch_size, config.num_mel_bins, 2 * config.max_source_positions)

    def transcribed(window: Tensor, generator: torch.Generator) -> Inputs:
        return {"input_features": torch.randn(shape, generator=generator), "labels": window}

    return map(transcribed, request.windows(), request.generators())


def _images_and_text(request: Request) -> Iterator[Inputs]:
    """One image per sequence: its tokens, then the text; labels are the text alone."""
    config = request.config
    vision = config.vision_config
    num_patches = (vision.image_size // vision.patch_size) ** 2
    # "default" leaves the class token out.
    num_image_tokens = num_patches + (config.vision_feature_select_strategy == "full")

    def seen(window: Tensor, generator: torch.Generator) -> Inputs:
        shape = (request.batch_size, num_image_tokens)
        return {
            "input_ids": torch.cat([torch.full(shape, config.image_token_id), window], dim=1),
            "pixel_values": request.images(generator),
            "labels": torch.cat([torch.full(shape, NOT_A_TARGET), window], dim=1),
        }

    return map(seen, request.windows(), request.generators())
