"""Small models of many architectures, to try the profiler, the planner and the runtime on.

Each trains a step in well under a second on two cores. What they have between them: grouped
queries, sliding and alternating windows, soft caps, fused and tied projections, dropout, experts,
encoders with decoders, images, sound, contrastive losses, adapters, autocast, blocks that differ.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from protrain_plan.models.batches import Batch
from protrain_plan.models.presets import JsonObject
from protrain_plan.models.sources import ModelSource, load_source
from protrain_runtime.contract.records.profile import DType, Precision, Workload
from tests.support.estimates import batches_of, model_of


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """A model and what it is trained on: a configuration, or a factory where there is none."""

    name: str
    config: JsonObject | None = None
    factory: str = ""
    adapter: str = ""
    dtype: DType = "float32"
    precision: Precision = "pure"
    batch_size: int = 2
    seq_len: int = 32

    @property
    def source(self) -> ModelSource:
        if self.config is None:
            return load_source(self.factory)
        return load_source(self.name, model_config=json.dumps(self.config))

    @property
    def workload(self) -> Workload:
        return Workload(
            model=self.source.name,
            model_config=self.source.model_config,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            dtype=self.dtype,
            device="cpu",
            seed=0,
            precision=self.precision,
            adapter=self.adapter,
        )

    def make(self) -> tuple[nn.Module, Iterator[Batch]]:
        """The model in train mode, the same at every call, and its batches from the first on."""
        source = self.source
        model = model_of(
            source, dtype=self.dtype, precision=self.precision, adapter=self.adapter, seed=0
        )
        batches = batches_of(
            source,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            dtype=self.dtype,
            precision=self.precision,
            seed=0,
        )
        return model, batches


# --- models without a configuration ---------------------------------------------------------------


class ConvolutionalNetwork(nn.Module):
    """Convolutions, then a classifier of several layers: nothing of transformers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU())
                for _ in range(3)
            )
        )
        self.classifier = nn.Sequential(nn.Linear(16 * 64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss, from images [batch, 3, 32, 32] and labels [batch]."""
        features = nn.functional.avg_pool2d(self.stages(self.stem(images)), 4)
        return nn.functional.cross_entropy(self.classifier(features.flatten(1)), labels)


class Drawn:
    """Batches from a seeded generator, again from the start for every iteration, none held."""

    def __init__(self, draw: Callable[[torch.Generator], object]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[object]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield self._draw(generator)


def convolutional() -> tuple[nn.Module, Drawn]:
    def labelled(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(4, 3, 32, 32, generator=generator)
        return images, torch.randint(10, (4,), generator=generator)

    return ConvolutionalNetwork(), Drawn(labelled)


class Widening(nn.Module):
    """A residual layer that doubles the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.mix = nn.Linear(width, 2 * width), nn.Linear(2 * width, 2 * width)

    def forward(self, hidden: Tensor) -> Tensor:
        wide: Tensor = self.mix(nn.functional.gelu(self.up(self.norm(hidden))))
        return torch.cat([hidden, hidden], dim=-1) + wide


class Pyramid(nn.Module):
    """Blocks of one class, each twice as wide as the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(Widening(16 * 2**n) for n in range(4))
        self.head = nn.Linear(256, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting tokens [batch, sequence], each from the one before."""
        hidden = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        targets = tokens[:, 1:].flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets)


def pyramid() -> tuple[nn.Module, Drawn]:
    return Pyramid(), Drawn(lambda generator: torch.randint(256, (4, 33), generator=generator))


# --- models of transformers -----------------------------------------------------------------------

_TEXT: JsonObject = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_DECODER: JsonObject = _TEXT | {"num_key_value_heads": 2, "tie_word_embeddings": False}
_LLAMA: JsonObject = _DECODER | {"model_type": "llama"}
_TIED: JsonObject = {"tie_word_embeddings": True}
_VISION: JsonObject = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}

_CONFIGS: dict[str, JsonObject] = {
    "llama": _LLAMA,
    "llama-tied": _LLAMA | _TIED,
    "mistral": _DECODER | {"model_type": "mistral", "sliding_window": 16},
    "qwen2": _DECODER | _TIED | {"model_type": "qwen2"},
    "qwen3": _DECODER | {"model_type": "qwen3", "head_dim": 16},
    "gemma2": _DECODER
    | _TIED
    | {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "phi3": _DECODER | {"model_type": "phi3", "sliding_window": None},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 320,
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
    "opt": {
        "model_type": "opt",
        "vocab_size": 320,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.1,
    },
    "mixtral": _DECODER
    | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe": _DECODER
    | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "t5": {
        "model_type": "t5",
        "vocab_size": 320,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 3,
        "num_heads": 4,
        "dropout_rate": 0.1,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
    "bert": _TEXT | {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "vit": _VISION
    | {"model_type": "vit", "num_labels": 10, "architectures": ["ViTForImageClassification"]},
    "whisper": {
        "model_type": "whisper",
        "vocab_size": 320,
        "d_model": 64,
        "num_mel_bins": 20,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_source_positions": 40,
        "max_target_positions": 64,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "apply_spec_augment": False,
    },
    "clip": {
        "model_type": "clip",
        "projection_dim": 32,
        "text_config": _TEXT | {"num_hidden_layers": 3, "bos_token_id": 0, "eos_token_id": 2},
        "vision_config": _VISION,
    },
    "llava": {
        "model_type": "llava",
        "image_token_index": 300,
        "text_config": _LLAMA | {"num_hidden_layers": 3},
        "vision_config": _VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
    },
}


def _specimens() -> Iterator[Specimen]:
    for name, config in _CONFIGS.items():
        yield Specimen(name=name, config=config)
    yield Specimen(name="llama-lora", config=_LLAMA, adapter="lora r=8")
    yield Specimen(
        name="llama-autocast", config=_LLAMA | _TIED, dtype="bfloat16", precision="autocast"
    )
    yield Specimen(name="convolutional", factory="benchmarks.zoo:convolutional")
    yield Specimen(name="pyramid", factory="benchmarks.zoo:pyramid")


ZOO: dict[str, Specimen] = {specimen.name: specimen for specimen in _specimens()}
