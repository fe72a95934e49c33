"""Adapters: small trainable layers that are added to a model whose own parameters are frozen."""

import difflib
import importlib
import warnings
from dataclasses import dataclass

from torch import nn

from protrain_plan.errors import ProtrainError, cut

ALL_LINEAR = "all-linear"
_KIND = "lora"
_MAX_DIGITS = 6  # of ranks
_EXAMPLE = "r=16, or r=16,alpha=32,targets=q_proj+v_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685): W x + (alpha / rank) B A x, with A and B trained.

    `targets` are the last parts of linear modules' names, or `all-linear`: all but the head.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...] = (ALL_LINEAR,)

    def __str__(self) -> str:
        """For `Workload.adapter`: `lora r=16`, and what differs from the defaults."""
        words = [_KIND, f"r={self.rank}"]
        if self.alpha != 2 * self.rank:
            words.append(f"alpha={self.alpha}")
        if self.targets != (ALL_LINEAR,):
            words.append(f"targets={'+'.join(self.targets)}")
        return " ".join(words)


def parse_lora(text: str) -> Lora:
    """The adapter that `r=16[,alpha=32][,targets=q_proj+v_proj]` says; alpha is 2 r by default.

    ProtrainError for another text.
    """
    return _lora(text.split(","), text, key="--lora")


def read_adapter(text: str) -> Lora | None:
    """What a record's `Workload.adapter` says; None where nothing was added."""
    if not text:
        return None
    kind, *words = text.split()
    if kind != _KIND:
        raise ProtrainError(f"expected 'lora r=...', got {text!r}", key="adapter")
    return _lora(words, text, key="adapter")


def _lora(entries: list[str], text: str, *, key: str) -> Lora:
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.strip().partition("=")
        if not equals or not value or name in found:
            raise ProtrainError(f"expected {_EXAMPLE}, got {text!r}", key=key)
        if name not in ("r", "alpha", "targets"):
            raise ProtrainError(
                f"expected r, alpha or targets, got {name!r}", key=key, fix=f"such as {_EXAMPLE}"
            )
        found[name] = value
    if "r" not in found:
        raise ProtrainError(f"expected {_EXAMPLE}, got {text!r}", key=key)
    rank = _count("r", found["r"], key)
    return Lora(
        rank=rank,
        alpha=_count("alpha", found["alpha"], key) if "alpha" in found else 2 * rank,
        targets=tuple(found.get("targets", ALL_LINEAR).split("+")),
    )


def _count(name: str, text: str, key: str) -> int:
    if not text.isdecimal() or len(text) > _MAX_DIGITS or int(text) < 1:
        raise ProtrainError(
            f"expected {name} to be a whole number above 0, got {cut(text)!r}", key=key
        )
    return int(text)


def adapted(model: nn.Module, adapter: str, *, source: str) -> nn.Module:
    """The model with its adapter, as `peft` wraps it; the model itself where there is none.

    Adapters have the dtype and the device of the layers that they are added to. ProtrainError
    where peft is missing, or the model has no such layers.
    """
    lora = read_adapter(adapter)
    if lora is None:
        return model
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ProtrainError(
            "adapters need the package peft", source=source, fix="pip install peft"
        ) from error
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=_targets(model, lora, source)
    )
    dtype = next(model.parameters()).dtype
    with warnings.catch_warnings():
        # Of what it settles by itself: an older name in transformers, GPT-2's transposed weights.
        warnings.simplefilter("ignore")
        wrapped: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in wrapped.parameters():
        if parameter.requires_grad and parameter.is_meta:  # peft leaves those as they were made
            parameter.data = parameter.data.to(dtype)
    return wrapped


def _targets(model: nn.Module, lora: Lora, source: str) -> list[str]:
    """The names of the modules that get an adapter, in the model's order."""
    linear = _linear_modules(model)
    if lora.targets == (ALL_LINEAR,):
        chosen = linear
    else:
        known = dict.fromkeys(name.rpartition(".")[2] for name in linear)
        for target in lora.targets:
            if target not in known:
                near = difflib.get_close_matches(target, known, n=1)
                raise ProtrainError(
                    f"the model has no linear layers called {target!r}",
                    source=source,
                    key="targets",
                    fix=f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}",
                )
        chosen = [name for name in linear if name.rpartition(".")[2] in lora.targets]
    if not chosen:
        raise ProtrainError("the model has no linear layers to adapt", source=source)
    return chosen


def _linear_modules(model: nn.Module) -> list[str]:
    """Linear modules by name, without the head; GPT-2 has a class of its own for them."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    return [
        name
        for name, module in model.named_modules()
        if module is not head
        and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    ]
