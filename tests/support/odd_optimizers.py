"""Optimizers that do more than AdamW's step: each feature alone, and any of them together.

`APART` are features with which a parameter's step depends on nothing but the parameter, so that
plans may update it anywhere; with one of `TOGETHER`, a step has to have all parameters.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Factory = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]

COUNTS: dict[str, int] = {"calls": 0}
"""A counter of this module."""

APART = (
    "adamw",
    "counts in its groups",
    "counts in its states",
    "counts in its groups in place",
    "keeps a list in its groups",
    "switches modes",
    "looks at groups without gradients",
    "reads attributes of parameters",
)
WHOLE = ("clips each parameter when it is large",)
"""A parameter's step has all of the parameter."""

TOGETHER = (
    "clips",
    "clips when it is large",
    "skips where a gradient is infinite",
    "scales by all",
    "counts in itself",
    "counts in its class",
    "counts in its module",
    "counts in a tensor of its class",
    "looks ahead in some steps",
    "stacks gradients",
    "stacks gradients to look at them",
    "concatenates gradients to look at them",
    "goes by position",
    "goes by number",
    "goes by name",
    "draws",
)
UNCOUNTED = ("keeps more and more", "keeps more later", "keeps copies beside")
"""A first step does not tell what they keep."""


class Odd(torch.optim.AdamW):
    """AdamW's step with features around it."""

    features: frozenset[str] = frozenset()
    calls_of_class = 0
    tensor_of_class = torch.zeros(())

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, lr=lr, foreach=False, **options)
        self.calls = 0
        self.copies: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"]]
        for feature in sorted(self.features - {"adamw"}):
            _BEFORE[feature](self, every)
        with self._slower():
            super().step()

    @contextmanager
    def _slower(self) -> Iterator[None]:
        """With the learning rate of this call."""
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            for feature in sorted(self.features & _SLOWER.keys()):
                group["lr"] /= float(_SLOWER[feature](self, group))
        try:
            yield
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


class OddWithModes(Odd):
    """Its parameters are averages in the mode of evaluation (arXiv 2405.15682)."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            group.setdefault("training", False)

    def train(self) -> None:
        self._switch(training=True)

    def eval(self) -> None:
        self._switch(training=False)

    @torch.no_grad()
    def _switch(self, *, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for parameter in group["params"]:
                    if "behind" in (state := self.state.get(parameter, {})):
                        parameter.lerp_(state["behind"], -1.0 if training else 0.5)
            group["training"] = training


def _gradients(every: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in every if p.grad is not None]


Before = Callable[[Odd, list[nn.Parameter]], object]


def _of_gradients(change: Callable[[Tensor], object]) -> Before:
    return lambda _, every: [change(gradient) for gradient in _gradients(every)]


def _of_groups(change: Callable[[dict[str, Any]], object]) -> Before:
    return lambda optimizer, _: [change(group) for group in optimizer.param_groups]


def _of_stepped(change: Callable[[Odd, Any], object]) -> Before:
    """The change, for parameters that have a gradient."""
    return lambda optimizer, every: [change(optimizer, p) for p in every if p.grad is not None]


def _clip_large(optimizer: Odd, every: list[nn.Parameter]) -> None:
    norm = torch.nn.utils.get_total_norm(_gradients(every)) if _gradients(every) else 0
    if norm > 5e3:
        nn.utils.clip_grad_norm_(every, 5e3)


def _clip_one(gradient: Tensor) -> None:
    if (norm := gradient.norm()) > 500:
        gradient.mul_(500 / norm)


def _skip(optimizer: Odd, every: list[nn.Parameter]) -> None:
    if not all(bool(g.isfinite().all()) for g in _gradients(every)):
        for parameter in every:
            parameter.grad = None


def _scale(optimizer: Odd, every: list[nn.Parameter]) -> None:
    total = sum(float(g.abs().sum()) for g in _gradients(every))
    for group in optimizer.param_groups:
        group["scale"] = max(group.get("scale", 0.5), 1 / (1 + total))


def _count_in_state(optimizer: Odd, parameter: Any) -> None:
    state = _state(optimizer, parameter)
    state["calls"] = state.get("calls", 0) + 1
    parameter.grad.div_(state["calls"])


def _state(optimizer: Odd, parameter: nn.Parameter) -> dict[str, Any]:
    """A parameter's state with AdamW's in it, which makes them where there is nothing."""
    state: dict[str, Any] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
    return state


def _count(optimizer: Odd, every: list[nn.Parameter]) -> None:
    optimizer.calls += 1


def _count_in_class(optimizer: Odd, every: list[nn.Parameter]) -> None:
    type(optimizer).calls_of_class += 1


def _look_ahead(optimizer: Odd, every: list[nn.Parameter]) -> None:
    optimizer.calls += 1
    if optimizer.calls % 4 == 0:
        for gradient in _gradients(every):
            gradient.mul_(0.5)


def _stack(optimizer: Odd, every: list[nn.Parameter]) -> None:
    mean = torch.cat([g.flatten() for g in _gradients(every)]).mean()
    for gradient in _gradients(every):
        gradient.sub_(mean)


def _by_position(optimizer: Odd, every: list[nn.Parameter]) -> None:
    for number, parameter in enumerate(every):
        if parameter.grad is not None:
            parameter.grad.div_(1 + number)


def _by_name(group: dict[str, Any]) -> None:
    """Names of parameters without names are their numbers."""
    names = group.get("param_names") or [str(n) for n in range(len(group["params"]))]
    for name, parameter in zip(names, group["params"], strict=True):
        if parameter.grad is not None and "1" in name:
            parameter.grad.mul_(0.5)


def _copy_all(optimizer: Odd, every: list[nn.Parameter], *, now: bool) -> None:
    if now:
        optimizer.copies = [p.detach().clone() for p in every]


def _grow_later(optimizer: Odd, every: list[nn.Parameter]) -> None:
    optimizer.calls += 1
    _copy_all(optimizer, every, now=optimizer.calls == 3)


def _average(optimizer: Odd, every: list[nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        _average_group(optimizer, group)


def _average_group(optimizer: Odd, group: dict[str, Any]) -> None:
    if not group["training"]:
        raise RuntimeError("not in train mode")
    group["k"] = group.get("k", 0) + 1
    for parameter in group["params"]:
        if parameter.grad is not None:
            state = _state(optimizer, parameter)
            if "behind" not in state:
                state["behind"] = parameter.detach().clone()
            state["behind"].lerp_(parameter, 1 / group["k"])


_BEFORE: dict[str, Before] = {
    "clips": lambda _, every: nn.utils.clip_grad_norm_(every, 0.1),
    "clips when it is large": _clip_large,
    "clips each parameter when it is large": _of_gradients(_clip_one),
    "skips where a gradient is infinite": _skip,
    "scales by all": _scale,
    "counts in its groups": _of_groups(lambda group: group.update(calls=group.get("calls", 0) + 1)),
    "counts in its states": _of_stepped(_count_in_state),
    "counts in its groups in place": _of_groups(
        lambda group: group.setdefault("counted", torch.zeros(())).add_(1)
    ),
    "keeps a list in its groups": _of_groups(
        lambda group: group.setdefault("kept", []).append(len(group["kept"]) % 3)
    ),
    "looks at groups without gradients": _of_groups(
        lambda group: group.update(steps=group.get("steps", 0) + bool(group["params"]))
    ),
    "counts in itself": _count,
    "counts in its class": _count_in_class,
    "counts in its module": lambda *_: COUNTS.update(calls=COUNTS["calls"] + 1),
    "counts in a tensor of its class": lambda optimizer, _: type(optimizer).tensor_of_class.add_(1),
    "reads attributes of parameters": _of_stepped(
        lambda _, parameter: parameter.grad.mul_(getattr(parameter, "slower_by", 1.0))
    ),
    "looks ahead in some steps": _look_ahead,
    "stacks gradients": _stack,
    "stacks gradients to look at them": lambda _, every: torch.stack(
        [gradient.norm() for gradient in _gradients(every)]
    ).max(),
    "concatenates gradients to look at them": lambda _, every: torch.cat(
        [gradient.flatten() for gradient in _gradients(every)]
    ).mean(),
    "goes by position": _by_position,
    "goes by number": lambda *_: None,
    "goes by name": _of_groups(_by_name),
    "draws": _of_gradients(lambda gradient: gradient.add_(torch.randn_like(gradient), alpha=1e-3)),
    "keeps more and more": _of_stepped(
        lambda optimizer, parameter: optimizer.copies.append(parameter.grad.clone())
    ),
    "keeps more later": _grow_later,
    "keeps copies beside": lambda optimizer, every: _copy_all(
        optimizer, every, now=not optimizer.copies
    ),
    "switches modes": _average,
}


_SLOWER: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "counts in its groups": lambda _, group: group["calls"],
    "counts in its groups in place": lambda _, group: group["counted"],
    "scales by all": lambda _, group: 1 / group["scale"],
    "counts in itself": lambda optimizer, _: optimizer.calls,
    "counts in its class": lambda optimizer, _: type(optimizer).calls_of_class,
    "counts in a tensor of its class": lambda optimizer, _: type(optimizer).tensor_of_class,
    "counts in its module": lambda *_: COUNTS["calls"],
    "goes by number": lambda _, group: len(group["params"]),
    "keeps a list in its groups": lambda _, group: 1 + sum(group["kept"]),
}


def odd(*features: str) -> type[Odd]:
    """A class of its own with these features: what counts in a class begins anew."""
    base = OddWithModes if "switches modes" in features else Odd
    counters = {"calls_of_class": 0, "tensor_of_class": torch.zeros(())}
    return type("Odd", (base,), {"features": frozenset(features), **counters})


def made(params: Any, features: str = "", **options: Any) -> torch.optim.Optimizer:
    """One with these features, with commas between them, of one class."""
    if features not in _CLASSES:
        _CLASSES[features] = odd(*features.split(","))
    return _CLASSES[features](params, **options)


def forget() -> None:
    """Let classes that `made` makes count from the beginning."""
    for one in _CLASSES.values():
        one.calls_of_class = 0
        one.tensor_of_class = torch.zeros(())


_CLASSES: dict[str, type[Odd]] = {}
