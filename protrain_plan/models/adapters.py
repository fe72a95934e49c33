"""Adapters: low-rank layers that PEFT adds to a model with frozen parameters.

Trained parameters, dtypes and initial values are PEFT's: a planned run trains the model of
`peft.get_peft_model`. Names that PEFT ignores silently (without a matching module), or refuses, are
refused here by name.
"""

import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from protrain_plan.models.importing import library, reason_of
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.records.adapters import ALL_LINEAR, Lora, read_adapter
from protrain_runtime.contract.records.words import did_you_mean

_MAX_NAMES = 20
"""Most module names in a message."""


def adapted(model: nn.Module, adapter: str, *, source: str) -> nn.Module:
    """The model with its adapter, as PEFT wraps it; unchanged without one.

    Parameters may be on `meta`. ProtrainError if PEFT is missing, the model has no modules of these
    names, or PEFT refuses them.
    """
    lora = read_adapter(adapter)
    if lora is None:
        return model
    peft = library("peft", "adapters need the package peft", source=source, fix="pip install peft")
    excluded = routers(model)
    _refuse_unknown(model, lora, excluded, source=source)
    with warnings.catch_warnings():
        # About what it adapts itself: an older name in transformers, GPT-2's transposed weights.
        warnings.simplefilter("ignore")
        try:
            wrapped: nn.Module = peft.get_peft_model(
                model,
                _configuration(peft, lora, excluded),
                autocast_adapter_dtype=lora.dtype == "float32",
            )
        except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
            problem = f"peft refuses the adapter: {reason_of(error)}"
            raise ProtrainError(problem, source=source) from error
        except RuntimeError as error:
            if not (lora.velora and next(model.parameters()).is_meta):
                raise
            raise ProtrainError(
                "VeLoRA reads values when it is created, and an estimate has none",
                source=source,
                key="--lora",
                fix="profile it on the device that it will run on",
            ) from error
    layers = [each for each in wrapped.modules() if isinstance(each, peft.tuners.lora.LoraLayer)]
    if lora.dtype == "base":
        _settle_meta(layers)
    if lora.freeze == "A":  # the first products' matrices, as drawn
        for name, parameter in (each for layer in layers for each in _adapters_of(layer)):
            if name in ("lora_A", "lora_embedding_A"):
                parameter.requires_grad_(False)
    return wrapped


def routers(model: nn.Module) -> list[str]:
    """Linear layers whose forward returns no tensor, such as Llama 4's routers."""
    found = []
    for name, module in model.named_modules():
        own = type(module).forward is not nn.Linear.forward
        if not (isinstance(module, nn.Linear) and own) or not module.weight.is_floating_point():
            continue
        shapes = {key: each.to("meta") for key, each in module.named_parameters()}
        rows = torch.empty(2, module.in_features, dtype=module.weight.dtype, device="meta")
        with suppress(Exception), torch.no_grad():  # it may need other arguments
            if not isinstance(functional_call(module, shapes, (rows,)), torch.Tensor):
                found.append(name)
    return found


def _configuration(peft: Any, lora: Lora, excluded: list[str]) -> Any:
    every = lora.targets == (ALL_LINEAR,)
    options: dict[str, Any] = {"exclude_modules": excluded} if excluded else {}
    if lora.velora:
        if not hasattr(peft, "VeloraConfig"):
            raise ValueError(f"VeLoRA is missing in its version {peft.__version__}")
        options["velora_config"] = peft.VeloraConfig(init_type=lora.velora)
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=ALL_LINEAR if every else list(lora.targets),
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        bias=lora.bias,
        modules_to_save=list(lora.modules_to_save) or None,
        **options,
    )


def _refuse_unknown(model: nn.Module, lora: Lora, excluded: list[str], *, source: str) -> None:
    """ProtrainError for a name that no module has: PEFT asks that one of several be found.

    And for one that an excluded module has.
    """
    modules = dict(model.named_modules())
    # GPT-2 has its own class of linear layers.
    kinds = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    linear = {
        name: module
        for name, module in modules.items()
        if isinstance(module, kinds) or type(module).__name__ == "Conv1D"
    }
    if lora.targets != (ALL_LINEAR,):
        for target in lora.targets:
            if any(f".{path}".endswith(f".{target}") for path in excluded):
                raise ProtrainError(
                    f"layers called {cut(target)!r} return several values, as routers do: an"
                    " adapter would return one",
                    source=source,
                    key="targets",
                    fix=f"leave {cut(target)} out, as all-linear does",
                )
            _refuse_missing(target, linear, "layers that can be adapted,", "targets", source)
    elif not linear:
        raise ProtrainError("the model has no linear layers to adapt", source=source)
    for name in lora.modules_to_save:
        _refuse_missing(name, modules, "modules", "modules_to_save", source)


def _refuse_missing(
    name: str, modules: dict[str, nn.Module], what: str, key: str, source: str
) -> None:
    if any(f".{path}".endswith(f".{name}") for path in modules):
        return
    known = list(dict.fromkeys(path.rpartition(".")[2] for path in modules if path))
    known = [each for each in known if not each.isdecimal()]
    more = ", ..." if len(known) > _MAX_NAMES else ""
    raise ProtrainError(
        f"the model has no {what} called {cut(name)!r}",
        source=source,
        key=key,
        fix=did_you_mean(name, known) or f"one of {', '.join(known[:_MAX_NAMES])}{more}",
    )


def _adapters_of(layer: Any) -> list[tuple[str, nn.Parameter]]:
    """PEFT's parameters in a layer, each with the attribute that holds it."""
    names = [name for name in layer.adapter_layer_names if hasattr(layer, name)]
    return [(name, each) for name in names for each in getattr(layer, name).parameters()]


def _settle_meta(layers: list[Any]) -> None:
    """Give adapters on `meta` their layer's dtype: PEFT leaves it unchanged."""
    for layer in layers:
        base = layer.get_base_layer()
        # A packed layer's weights are bytes. A 4-bit one has a compute dtype; beside an 8-bit one
        # PEFT leaves adapters unchanged everywhere. PEFT adapts experts in a single parameter by a
        # layer that selects it.
        weight = layer.get_param() if hasattr(layer, "get_param") else base.weight
        packed = not weight.is_floating_point()
        dtype = getattr(base, "compute_dtype", None) if packed else weight.dtype
        if dtype is None:
            continue
        for _, parameter in _adapters_of(layer):
            if parameter.is_meta:
                parameter.data = parameter.data.to(dtype)
