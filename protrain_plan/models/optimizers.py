"""The optimizers that profiles can assume: by name, or the user's own.

Most are elementwise ones of `torch.optim`: every element's update depends on that element alone, so
pieces of a parameter get the bits of a whole update. 8-bit ones are cut at their blocks. Adafactor
and Muon use whole matrices, whose states stay on the device. An optimizer's kind is observed in its
steps (`protrain_runtime.states.update_rules`). Adagrad is missing because its constructor makes all
states, before a plan can place them.

PyTorch's fused kernels require real floating-point parameters and dense gradients. A model with
complex parameters gets the same optimizers unfused; plain SGD, which takes sparse gradients, is
never fused.
"""

import ast
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from protrain_plan.models.importing import imported
from protrain_plan.models.presets import DEFAULT_OPTIMIZER as DEFAULT_OPTIMIZER
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.records.profile import Precision
from protrain_runtime.contract.records.words import did_you_mean
from protrain_runtime.states.master_weights import with_master_weights
from protrain_runtime.states.stepping import in_train_mode

OptimizerFactory = Callable[..., Optimizer]
"""Makes an optimizer of parameters or groups, with options by keyword."""


def _fused(kind: OptimizerFactory, parameters: ParamsT, /, **options: Any) -> Optimizer:
    """The fused optimizer; unfused if a parameter is complex."""
    entries = [
        {**entry, "params": list(_tensors([entry]))} if isinstance(entry, dict) else entry
        for entry in parameters
    ]
    if any(tensor.is_complex() for tensor in _tensors(entries)):
        return kind(entries, **{"foreach": False, **options})
    return kind(entries, **{"fused": True, **options})


def _of_bitsandbytes(kind: str, parameters: ParamsT, /, **options: Any) -> Optimizer:
    """An optimizer of bitsandbytes, imported at first use."""
    package = importlib.import_module(_BITSANDBYTES)
    made: Optimizer = getattr(package.optim, kind)(parameters, **options)
    return made


def _muon(parameters: ParamsT, **options: Any) -> Optimizer:
    """PyTorch's Muon; ProtrainError unless all parameters are matrices."""
    entries: list[Any] = list(parameters)
    if any(tensor.ndim != 2 for tensor in _tensors(entries)):
        raise ProtrainError(
            "muon updates matrices only, not norms, biases or float32 copies",
            key="optimizer",
            fix="--optimizer adamw; or a function of your own that returns an optimizer with Muon"
            " for matrices and AdamW for the rest: --optimizer path/to/file.py:function",
        )
    return torch.optim.Muon(entries, **{"lr": 1e-3, **options})


def _tensors(entries: Iterable[Any]) -> Iterator[Tensor]:
    """The parameters in an optimizer's argument: tensors, named tensors, or groups."""
    for entry in entries:
        if isinstance(entry, Tensor):
            yield entry
        elif isinstance(entry, dict):
            own = entry["params"]
            yield from _tensors([own] if isinstance(own, Tensor) else own)
        else:
            yield entry[1]


# Fused kernels need no temporaries, and loops over parameters few. `foreach`, the default on CUDA,
# would take a copy of all parameters updated at once.
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": partial(_fused, torch.optim.AdamW, lr=3e-4),
    "adam": partial(_fused, torch.optim.Adam, lr=3e-4),
    "adamw-amsgrad": partial(_fused, torch.optim.AdamW, lr=3e-4, amsgrad=True),
    "adamax": partial(torch.optim.Adamax, lr=3e-4, foreach=False),
    "nadam": partial(torch.optim.NAdam, lr=3e-4, foreach=False),
    "radam": partial(torch.optim.RAdam, lr=3e-4, foreach=False),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0, foreach=False),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-4, foreach=False),
    "sgd": partial(torch.optim.SGD, lr=1e-2, foreach=False),
    "sgd-momentum": partial(_fused, torch.optim.SGD, lr=1e-2, momentum=0.9),
}
"""Elementwise ones."""

_BITSANDBYTES = "bitsandbytes"
INSTALL_BITSANDBYTES = "pip install '.[quantize]' in a clone of protrain-plan"
OF_8_BITS: dict[str, OptimizerFactory] = {
    "adamw8bit": partial(_of_bitsandbytes, "AdamW8bit", lr=3e-4),
    "lion8bit": partial(_of_bitsandbytes, "Lion8bit", lr=1e-4),
}
"""bitsandbytes (arXiv 2110.02861): a state is a byte for each element, with a scale for each
block of 256. A parameter of less than 4,096 elements has states of float32."""

OF_MATRICES: dict[str, OptimizerFactory] = {
    "adafactor": partial(torch.optim.Adafactor, lr=1e-3, foreach=False),
    "muon": _muon,
}
"""Whole-parameter updates: their states persist. Muon takes matrices alone."""

KNOWN = {**OPTIMIZERS, **OF_8_BITS, **OF_MATRICES}

_MAX_LENGTH = 1000  # of an optimizer's name with options


def optimizer_named(name: str, options: str | None = None) -> str:
    """The record's name of an optimizer with options: `adamw(lr=0.001)`.

    Options are Python's keyword arguments, only literals. ProtrainError for others;
    `optimizer_factory` knows the names.
    """
    kind, own = _read(name)
    if options:
        own |= _options(options, key="--optimizer-args")
    text = ", ".join(f"{option}={value!r}" for option, value in own.items())
    return f"{kind}({text})" if own else kind


def optimizer_factory(name: str, precision: Precision = "pure") -> OptimizerFactory:
    """A factory of the named optimizer, on master weights if the precision requires it.

    A known name, or `package.module:Class` or `path/to/file.py:function`, called with parameters or
    groups; with options in brackets. ProtrainError, with the known names, for another name or a
    missing package.
    """
    kind, options = _read(name)
    if ":" in kind:
        plain: OptimizerFactory = partial(_in_train_mode, partial(imported(kind), **options))
    elif kind not in KNOWN:
        raise ProtrainError(
            f"expected one of {', '.join(KNOWN)}, or package.module:Class, got {kind!r}",
            key="optimizer",
            fix=did_you_mean(kind, KNOWN),
        )
    elif kind in OF_8_BITS and importlib.util.find_spec(_BITSANDBYTES) is None:
        raise ProtrainError(
            f"the optimizer {kind} needs the package bitsandbytes",
            key="optimizer",
            fix=INSTALL_BITSANDBYTES,
        )
    else:
        plain = partial(KNOWN[kind], **options) if options else KNOWN[kind]
    return with_master_weights(plain) if precision == "master" else plain


def _in_train_mode(factory: OptimizerFactory, parameters: ParamsT, **options: Any) -> Optimizer:
    """The factory's optimizer, in training mode if it has modes.

    With groups that state all options, as in pieces of a chunk, those options set the mode.
    """
    entries: list[Any] = list(parameters)
    said = [set(one) if isinstance(one, dict) else set() for one in entries]
    made = factory(entries, **options)
    anew = any(made.defaults.keys() - own for own in said)
    return in_train_mode(made) if anew else made


def works_in_place(name: str) -> bool:
    """Whether the optimizer's GPU kernels take no extra memory (8 bits: bitsandbytes/csrc)."""
    return _read(name)[0] in OF_8_BITS


_HOST_SHARES = {"adamw8bit": 0.0626, "lion8bit": 0.1142}
"""Shares of float32 AdamW's speed, on one thread each (`docs/decisions/optimizer.md`)."""


def host_share(name: str) -> float:
    """Parameters per second on a host, relative to fused AdamW; 1 if not measured."""
    return _HOST_SHARES.get(_read(name)[0], 1.0)


def _read(name: str) -> tuple[str, dict[str, Any]]:
    """A name and its options; ProtrainError if invalid."""
    found = re.fullmatch(r"([^()]+?)\s*(?:\((.*)\))?", name, re.DOTALL)
    bare = found is not None and re.search(r"\s\w+\s*=", found[1])
    if found is None or bare or len(name) > _MAX_LENGTH:
        raise ProtrainError(
            f"expected a name, or one with options such as adamw(lr=0.001), got {cut(name)!r}",
            key="optimizer",
            fix="put options in parentheses after the name" if bare else None,
        )
    return found[1], _options(found[2], key="optimizer") if found[2] else {}


def _options(text: str, *, key: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f({text}\n)", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(one.arg is None for one in call.keywords):
            raise ValueError("an option has no name")
        return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (ValueError, SyntaxError, AssertionError, RecursionError, MemoryError) as error:
        raise ProtrainError(
            f"expected options such as lr=1e-3, betas=(0.9, 0.95), got {cut(text)!r}",
            key=key,
            fix="numbers, quoted strings, True, False, None, lists and tuples of these",
        ) from error
