"""Models from a Hugging Face configuration: built with random weights, fed with bytes of text."""

import copy
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
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from protrain_plan.errors import ProtrainError
from protrain_plan.models.adapters import adapted
from protrain_plan.models.batches import Batch, batch_to, byte_tokens
from protrain_plan.models.building import seeded
from protrain_plan.models.inputs import Request, inputs_of
from protrain_plan.models.precision import computing_in, parameter_dtype
from protrain_plan.models.presets import JsonObject
from protrain_plan.records.profile import DType, Precision


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
        self,
        *,
        dtype: DType = "float32",
        precision: Precision = "pure",
        adapter: str = "",
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> nn.Module:
        """The model on `device` in train mode, without a key-value cache, attention by sdpa.

        The weights are drawn on the CPU, so that they are the same for every device; on `meta`
        none are drawn. ProtrainError where transformers is missing or refuses the configuration,
        dtype and precision do not go together, or the adapter does not fit.
        """
        stored = parameter_dtype(dtype, precision)
        transformers = _transformers(self.name)
        config = self._transformers_config(transformers)
        model_class = self._model_class(transformers, config)
        attention = "sdpa" if model_class._supports_sdpa else "eager"
        on_meta = torch.device(device).type == "meta"
        with seeded(seed), torch.device("meta" if on_meta else "cpu"):
            try:
                model: nn.Module = model_class._from_config(
                    config, attn_implementation=attention, dtype=stored
                )
            except (DataDependentOutputException, DynamicOutputShapeException):
                raise  # of fake tensors: the configuration is not at fault
            except Exception as error:  # a modelling file may fail in any way
                raise self._refused(error) from error
            model = adapted(model, adapter, source=self.name)
        if torch.device(device).type not in ("cpu", "meta"):
            model.to(device)
        return computing_in(model, dtype, precision).train()

    def batches(
        self,
        *,
        batch_size: int,
        seq_len: int,
        dtype: DType = "float32",
        precision: Precision = "pure",
        device: torch.device | str = "cpu",
        text: Path | None = None,
        seed: int = 0,
    ) -> Iterator[Batch]:
        """Endless batches of what the architecture takes: see `inputs`.

        For a language model {"input_ids", "labels"}, both int64 [batch_size, seq_len]. Features
        that are no tokens are in the dtype of the parameters. ProtrainError where no batches are
        known for the architecture, it has fewer than 256 tokens, or fewer positions than
        `seq_len`.
        """
        stored = parameter_dtype(dtype, precision)
        transformers = _transformers(self.name)
        config = self._transformers_config(transformers)
        request = Request(
            source=self.name,
            config=config,
            batch_size=batch_size,
            seq_len=seq_len,
            text=byte_tokens(text),
            seed=seed,
        )
        model_class = self._model_class(transformers, config).__name__
        return (batch_to(inputs, device, stored) for inputs in inputs_of(model_class, request))

    def _transformers_config(self, transformers: ModuleType) -> Any:
        # A copy: transformers writes into nested mappings, such as those of rotary embeddings.
        values = copy.deepcopy(self.config)
        values = {k: v for k, v in values.items() if k not in ("model_type", "use_cache")}
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str):
            raise ProtrainError(
                "the configuration does not say which architecture it is of",
                source=self.name,
                key="model_type",
                fix='a config.json as published with a model, such as {"model_type": "llama", ...}',
            )
        try:
            config = transformers.AutoConfig.for_model(model_type, **values, use_cache=False)
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
        config.get_text_config().use_cache = False  # of a model with a tower for images, too
        return config

    def _model_class(self, transformers: ModuleType, config: Any) -> Any:
        from transformers.models.auto import modeling_auto as known

        encodes = getattr(config, "is_encoder_decoder", False)
        named = config.architectures or [
            names[config.model_type]
            for names in (
                known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if encodes else {},
                known.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES if encodes else {},
                known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
                known.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
                known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
                known.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
                known.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
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
