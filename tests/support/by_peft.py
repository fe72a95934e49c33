"""Models with adapters as PEFT makes them, by plain code: the oracle of ours."""

import warnings
from typing import Any

import peft
import torch
from torch import nn

from protrain_plan.models.building import seeded
from protrain_plan.models.sources import ModelSource
from protrain_runtime.contract.records.profile import DType


def by_peft(
    source: ModelSource, options: dict[str, Any], *, dtype: DType, autocast: bool = True
) -> nn.Module:
    """A configuration's model as PEFT wraps it, in train mode, in the random state of a build.

    `options` are those of `LoraConfig`; `autocast` is PEFT's `autocast_adapter_dtype`.
    """
    config, model_class = source._config_and_class()  # type: ignore[union-attr]
    with seeded(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attention = "sdpa" if model_class._supports_sdpa else "eager"
        base = model_class._from_config(
            config, attn_implementation=attention, dtype=getattr(torch, dtype)
        )
        asked = peft.LoraConfig(**{"target_modules": "all-linear"} | options)
        found: nn.Module = peft.get_peft_model(base, asked, autocast_adapter_dtype=autocast)
    return found.train()
