"""Optimizers of the user's class: made with options by group, and stepped on some parameters."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import repeat
from typing import Any

import torch
from torch import nn

from protrain_runtime.contract.errors import ProtrainError

OptimizerFactory = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]

MASTERS_OF = "masters_of"
"""The attribute of a master-weight factory with the user's factory."""


def in_train_mode(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, in training mode if it has modes (schedule-free ones do)."""
    if callable(train := getattr(optimizer, "train", None)):
        train()
    return optimizer


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups' options by value: later in-place changes do not show."""
    return [
        {key: by_value(option) for key, option in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def by_value(option: Any) -> Any:
    """An independent copy of an option, or of a group's options."""
    if isinstance(option, tuple | list):  # such as betas that are tensors
        return type(option)(map(by_value, option)) if type(option) in (tuple, list) else option
    if isinstance(option, Mapping):
        return {key: by_value(value) for key, value in option.items()}
    return option.clone() if isinstance(option, torch.Tensor) else option


OF_PLANS = "_protrain"
"""The prefix of attributes that plans put on parameters."""

NAMES = "param_names"
"""PyTorch's option with the names of a group's parameters."""


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """ProtrainError if a step requires a closure, which it calls any number of times."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ProtrainError(
            f"{type(optimizer).__name__} runs forward and backward several times in a step, by its"
            " closure, and a plan is for the forwards and backwards of one step",
            key="optimizer",
            fix="an optimizer whose step needs no closure, such as AdamW; or train without a plan",
        )


def like(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerFactory:
    """A factory of optimizers like an existing one; for its own groups, that one itself.

    Its schedulers see the steps. ProtrainError if it has states, or parameters of other models.
    """
    kind = type(optimizer)
    if optimizer.state:
        raise ProtrainError(
            f"{kind.__name__} has states before the plan is attached: they would stay on the"
            " device",
            key="optimizer",
            fix="attach the plan before the first step (Adagrad, which makes its states when it is"
            " constructed, cannot follow one)",
        )
    own = set(model.parameters())
    foreign = sum(p not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ProtrainError(
            f"{kind.__name__} has {foreign} parameters that are not of the model that follows the"
            " plan",
            key="optimizer",
            fix="profile and plan the module that holds all of them; for a model that prepare()"
            " makes, give it what makes the optimizer, such as partial(AdamW, lr=3e-4)",
        )
    accepted = inspect.signature(kind).parameters
    options = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    settings = {  # in no group, such as bitsandbytes' bits
        name: value
        for name, value in own_attributes(optimizer).items()
        if is_plain(value) or is_plain(getattr(value, "__dict__", ...))
    }

    def make(groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        given, known = list(groups), optimizer.param_groups
        if [id(group["params"]) for group in given] == [id(group["params"]) for group in known]:
            return optimizer
        made: torch.optim.Optimizer = kind(given, **options)
        vars(made).update(settings)
        return made

    return make


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """A parameter's attributes set by code, such as a learning rate; not by plans."""
    return {key: value for key, value in vars(parameter).items() if not key.startswith(OF_PLANS)}


def groups_of(
    members: Iterable[tuple[nn.Parameter, str, Mapping[str, Any]]],
) -> list[dict[str, Any]]:
    """Groups of parameters or their parts, with parameter names and options."""
    groups: dict[int, dict[str, Any]] = {}  # by shared options
    for parameter, name, chosen in members:
        if id(chosen) not in groups:
            named: dict[str, list[str]] = {NAMES: []} if NAMES in chosen else {}
            # By value: a step that writes them, such as an in-place counter, begins as others do.
            groups[id(chosen)] = {**by_value(chosen), **named, "params": []}
        group = groups[id(chosen)]
        group["params"].append(parameter)
        if NAMES in group:
            group[NAMES].append(name)
    return list(groups.values())


def step_alone(
    optimizer: torch.optim.Optimizer, own: Set[nn.Parameter], options: Sequence[Mapping[str, Any]]
) -> None:
    """Step on these parameters only; writes to groups are undone, and made later."""
    groups = optimizer.param_groups
    alone = groups_of(
        [
            (parameter, name, chosen)
            for group, chosen in zip(groups, options, strict=True)
            for parameter, name in zip(
                group["params"], chosen.get(NAMES) or repeat(""), strict=False
            )
            if parameter in own
        ]
    )
    if not any(one.grad is not None for group in alone for one in group["params"]):
        return
    try:
        optimizer.param_groups = alone
        optimizer.step()
    finally:
        optimizer.param_groups = groups


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's attributes beyond every optimizer's."""
    usual = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    return {name: value for name, value in vars(optimizer).items() if name not in usual}


def is_plain(value: object) -> bool:
    """Whether the value is a number, a text, a dtype, None, or a container of these."""
    if isinstance(value, dict):
        return all(is_plain(one) for one in (*value, *value.values()))
    if isinstance(value, list | tuple):
        return all(is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)
