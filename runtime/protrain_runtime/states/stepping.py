"""Making optimizers of the user's class, with options by group, and stepping on some parameters."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import repeat
from typing import Any

import torch
from torch import nn

from protrain_runtime.contract.errors import ProtrainError

OptimizerFactory = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]

MASTERS_OF = "masters_of"
"""The attribute in which a factory of optimizers with master weights has the user's factory."""


def in_train_mode(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, in its training mode where it has modes, as schedule-free ones do."""
    if callable(train := getattr(optimizer, "train", None)):
        train()
    return optimizer


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of its groups, by value: those that change in place later do not change here."""
    return [
        {key: by_value(option) for key, option in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def by_value(option: Any) -> Any:
    """A copy of an option, or of all of a group's, that does not change with it."""
    if isinstance(option, tuple | list):  # of betas that are tensors, say
        return type(option)(map(by_value, option)) if type(option) in (tuple, list) else option
    if isinstance(option, Mapping):
        return {key: by_value(value) for key, value in option.items()}
    return option.clone() if isinstance(option, torch.Tensor) else option


OF_PLANS = "_protrain"
"""The beginning of the names of attributes that plans put on parameters."""

NAMES = "param_names"
"""The option in which PyTorch has the names of a group's parameters."""


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """ProtrainError where a step has to have a closure, which it calls as often as it likes."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ProtrainError(
            f"{kind_of(optimizer)} runs forward and backward several times in a step, by its"
            " closure, and a plan is for the forwards and backwards of one step",
            key="optimizer",
            fix="an optimizer whose step needs no closure, such as AdamW; or train without a plan",
        )


def like(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerFactory:
    """A factory of optimizers like one that was made already; over its own groups, that one itself.

    So schedulers that were made for it see its steps. ProtrainError where it has states, or
    parameters that are not the model's.
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
    settings = {  # in no group, such as the bits of bitsandbytes
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
    """Attributes that code has put on a parameter, such as a learning rate; not those of plans."""
    return {key: value for key, value in vars(parameter).items() if not key.startswith(OF_PLANS)}


def groups_of(
    members: Iterable[tuple[nn.Parameter, str, Mapping[str, Any]]],
) -> list[dict[str, Any]]:
    """Groups of parameters, or of parts of them: each with its parameter's name and its options."""
    groups: dict[int, dict[str, Any]] = {}  # by the options that parameters share
    for parameter, name, chosen in members:
        if id(chosen) not in groups:
            named: dict[str, list[str]] = {NAMES: []} if NAMES in chosen else {}
            # By value: a step that writes them, as a counter in place, is to begin where others do.
            groups[id(chosen)] = {**by_value(chosen), **named, "params": []}
        group = groups[id(chosen)]
        group["params"].append(parameter)
        if NAMES in group:
            group[NAMES].append(name)
    return list(groups.values())


def step_alone(
    optimizer: torch.optim.Optimizer, own: Set[nn.Parameter], options: Sequence[Mapping[str, Any]]
) -> None:
    """Step on these parameters alone; what is written to groups is lost, and made later."""
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
    """Attributes of an optimizer besides those that every optimizer has."""
    usual = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    return {name: value for name, value in vars(optimizer).items() if name not in usual}


def is_plain(value: object) -> bool:
    """Whether it is a number, a text, a dtype, None, or a container of these."""
    if isinstance(value, dict):
        return all(is_plain(one) for one in (*value, *value.values()))
    if isinstance(value, list | tuple):
        return all(is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def kind_of(value: object) -> str:
    """The name of its class."""
    return type(value).__name__
