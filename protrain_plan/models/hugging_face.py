"""Models from a Hugging Face configuration: built with random weights, fed with bytes of text."""

import difflib
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.models.batches import NUM_BYTE_TOKENS, Batch, byte_tokens, text_windows
from protrain_plan.models.building import TORCH_DTYPES, seeded
from protrain_plan.models.presets import JsonObject
from protrain_plan.records.profile import DType


@dataclass(frozen=True)
class ConfigSource:
    """A Hugging Face configuration, given random weights."""

    name: str  # the MODEL argument
    config: JsonObject

    @property
    def model_config(self) -> str:
        """For `Workload.model_config`: compact JSON that `load_source` reads again."""
        return json.dumps(self.config, sort_keys=True, separators=(",", ":"))

    def build(
        self, *, dtype: DType = "float32", device: torch.device | str = "cpu", seed: int = 0
    ) -> nn.Module:
        """The model on `device` in train mode, without a key-value cache, attention by sdpa.

        The weights are drawn on the CPU, so that they are the same for every device; on `meta`
        none are drawn. ProtrainError where transformers is missing or refuses the configuration.
        """
        transformers = _transformers(self.name)
        config = self._transformers_config(transformers)
        model_class = self._model_class(transformers, config)
        attention = "sdpa" if model_class._supports_sdpa else "eager"
        on_meta = torch.device(device).type == "meta"
        with seeded(seed), torch.device("meta" if on_meta else "cpu"):
            try:
                model: nn.Module = model_class._from_config(
                    config, attn_implementation=attention, dtype=TORCH_DTYPES[dtype]
                )
            except Exception as error:  # a modelling file may fail in any way
                raise self._refused(error) from error
        if torch.device(device).type not in ("cpu", "meta"):
            model.to(device)
        model.train()
        return model

    def batches(
        self,
        *,
        batch_size: int,
        seq_len: int,
        device: torch.device | str = "cpu",
        text: Path | None = None,
        seed: int = 0,
    ) -> Iterator[Batch]:
        """Endless {"input_ids", "labels"}, both int64 [batch_size, seq_len], labels = input ids.

        ProtrainError where the architecture takes no text, has fewer than 256 tokens, or has
        fewer positions than `seq_len`.
        """
        config = self._transformers_config(_transformers(self.name))
        self._check_takes(config, seq_len)
        windows = text_windows(byte_tokens(text), batch_size=batch_size, seq_len=seq_len, seed=seed)
        return ({"input_ids": w.to(device), "labels": w.clone().to(device)} for w in windows)

    def _check_takes(self, config: Any, seq_len: int) -> None:
        from transformers.models.auto import modeling_auto as known

        takes_text = (
            known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            known.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        )
        if not any(config.model_type in names for names in takes_text):
            raise ProtrainError(
                f"no batches are known for the architecture {config.model_type!r}",
                source=self.name,
                fix="use package.module:factory, which brings its own batches",
            )
        if config.vocab_size < NUM_BYTE_TOKENS:
            raise ProtrainError(
                f"text needs {NUM_BYTE_TOKENS} tokens (one per byte), got {config.vocab_size}",
                source=self.name,
                key="vocab_size",
            )
        positions = getattr(config, "max_position_embeddings", None)
        if isinstance(positions, int) and seq_len > positions:
            raise ProtrainError(
                f"a sequence of {seq_len} tokens does not fit the model's {positions} positions",
                source=self.name,
                key="max_position_embeddings",
                fix=f"at most {positions} tokens per sequence",
            )

    def _transformers_config(self, transformers: ModuleType) -> Any:
        values = {k: v for k, v in self.config.items() if k not in ("model_type", "use_cache")}
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str):
            raise ProtrainError(
                "the configuration does not say which architecture it is of",
                source=self.name,
                key="model_type",
                fix='a config.json as published with a model, such as {"model_type": "llama", ...}',
            )
        try:
            return transformers.AutoConfig.for_model(model_type, **values, use_cache=False)
        except Exception as error:  # its validators raise classes of their own
            if model_type not in transformers.CONFIG_MAPPING:
                near = difflib.get_close_matches(model_type, transformers.CONFIG_MAPPING, n=1)
                raise ProtrainError(
                    f"transformers {transformers.__version__} has no architecture {model_type!r}",
                    source=self.name,
                    key="model_type",
                    fix=f"did you mean {near[0]!r}?" if near else None,
                ) from error
            raise self._refused(error) from error

    def _model_class(self, transformers: ModuleType, config: Any) -> Any:
        from transformers.models.auto import modeling_auto as known

        encodes = getattr(config, "is_encoder_decoder", False)
        named = config.architectures or [
            names[config.model_type]
            for names in (
                known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if encodes else {},
                known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
                known.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            )
            if config.model_type in names
        ]
        found = getattr(transformers, named[0], None) if named else None
        if found is None:
            raise ProtrainError(
                f"transformers {transformers.__version__} has no model class "
                f"{named[0] if named else 'with a loss'!r} for {config.model_type!r}",
                source=self.name,
                key="architectures",
            )
        return found

    def _refused(self, error: Exception) -> ProtrainError:
        reason = " ".join(str(error).split())
        return ProtrainError(f"transformers refuses the configuration: {reason}", source=self.name)


def _transformers(name: str) -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ProtrainError(
            "a Hugging Face configuration needs the package transformers",
            source=name,
            fix="pip install transformers, or use package.module:factory",
        ) from error
