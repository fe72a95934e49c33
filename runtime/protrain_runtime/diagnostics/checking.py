"""`check="bitwise"`: the first steps beside a plain copy of the model, compared bit for bit.

The copy trains on the same batches, from the same random states, with the gradients that the
training loop gave the model's outputs: the loop's own loss runs once. Compared are the outputs, the
gradients readable after backward, and the parameters after the step. The copy takes plain
training's memory.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from protrain_runtime.activations.compiled import compile_each, replace_code
from protrain_runtime.activations.own_caches import switch_off_caches
from protrain_runtime.activations.trees import tensors_in
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.devices import device as devices
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.model.prepared import parameter_values
from protrain_runtime.states.host_steps import stepping_as
from protrain_runtime.states.stand_ins import ConsumedGradient, OffloadedGradient
from protrain_runtime.states.stepping import options_of

CHECKED_STEPS = 3
"""The second step is the first to read optimizer states, the third to read its writes."""


class DifferenceError(ProtrainError):
    """A planned step's bits differ from plain PyTorch's."""

    exit_code: ClassVar[int] = 1


@dataclass(slots=True)
class _MicroBatch:
    """A forward's call, its result, and the result's gradients."""

    args: Any
    kwargs: Any
    set_random_states: Callable[[], None]  # to the forward's first ones
    autocast: Callable[[], torch.autocast]  # as around the forward
    outputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    gradients: list[torch.Tensor | None] = field(default_factory=list[torch.Tensor | None])


def _random_states(device: torch.device) -> Callable[[], None]:
    """Return a function that restores the present random states, of host and accelerator."""
    host, own = torch.get_rng_state(), devices.random_state(device)

    def set_again() -> None:
        torch.set_rng_state(host)
        devices.set_random_state(device, own)

    return set_again


class _Tap(torch.autograd.Function):
    """Passes tensors on, and reports their gradients from outside."""

    @staticmethod
    def forward(
        ctx: Any, tell: Callable[[Sequence[torch.Tensor | None]], None], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.tell = tell
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)  # a loop may write them (`loss *= 2`)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.tell(gradients)
        return (None, *gradients)


class Check:
    """Compares the first CHECKED_STEPS with a copy's, made before the model follows its plan."""

    def __init__(
        self,
        model: nn.Module,
        planned: PlannedOptimizer,
        plan: Plan,
        backends: Mapping[str, str],  # of blocks to compile, by path
    ) -> None:
        self._model, self._planned = model, planned
        self._plain = copy.deepcopy(model)
        for path, backend in backends.items():
            compile_each({path: self._plain.get_submodule(path)}, backend=backend)
        switch_off_caches(self._plain, stacklevel=None)
        copies = dict(zip(model.parameters(), self._plain.parameters(), strict=True))
        self._optimizer = stepping_as(plan, self._plain, planned.factory)(
            [
                {**group, "params": [copies[parameter] for parameter in group["params"]]}
                for group in planned.param_groups
            ]
        )
        self._device = next(model.parameters()).device
        self._micro_batches: list[_MicroBatch] = []
        self._gradients: Mapping[str, torch.Tensor] = {}  # as left by the last backward
        self._steps = 0
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Watch the model's forward, and the optimizer's steps."""
        self._forward: Callable[..., Any] = self._model.forward
        self._planned.mode_listeners.append(lambda mode: getattr(self._optimizer, mode)())
        self._undo = [
            self._planned.register_step_pre_hook(self._begin_step).remove,
            self._planned.register_step_post_hook(lambda *_: self._after_step()).remove,
            replace_code(self._model, self._run),
            self._planned.mode_listeners.clear,
            self._planned.register_load_state_dict_pre_hook(
                lambda _, state: self._optimizer.load_state_dict(copy.deepcopy(state))
            ).remove,
            self._model.register_load_state_dict_pre_hook(self._load).remove,
        ]

    def _load(self, _: nn.Module, state: Mapping[str, Any], prefix: str, *__: object) -> None:
        own = {name.removeprefix(prefix): value for name, value in state.items()}
        self._plain.load_state_dict(own, strict=False)

    def pair(self) -> tuple[nn.Module, torch.optim.Optimizer] | None:
        """The copy and its optimizer, which load whatever the model loads; None after the check."""
        return (self._plain, self._optimizer) if self._undo else None

    def stop(self) -> None:
        """Remove all hooks from the model, and drop the copy; idempotent."""
        if self._undo:
            while self._undo:
                self._undo.pop()()
            self._micro_batches.clear()
            del self._plain, self._optimizer

    def _run(self, *args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if all(parameter.grad is None for parameter in self._model.parameters()):
            self._micro_batches.clear()  # a loss scaler skipped the step
        copied_args, copied_kwargs = tree_map(_copied, (args, kwargs))
        states, casts = _random_states(self._device), devices.autocast_as_now(self._device.type)
        called = _MicroBatch(copied_args, copied_kwargs, states, casts)
        result = self._forward(*args, **kwargs)
        outputs = tensors_in(result)
        called.outputs = [_copied(tensor) for tensor in outputs]
        tapped = [tensor for tensor in outputs if tensor.requires_grad]
        self._micro_batches.append(called)

        def tell(gradients: Sequence[torch.Tensor | None]) -> None:
            called.gradients = [None if g is None else g.clone() for g in gradients]
            # Called at the end of backward, then again after the engine's callback.
            end = torch.autograd.Variable._execution_engine.queue_callback
            end(lambda: end(self._after_backward))

        handed_on: Sequence[torch.Tensor] = _Tap.apply(tell, *tapped)  # type: ignore[no-untyped-call]
        given = dict(zip(map(id, tapped), handed_on, strict=True))
        return tree_map(lambda leaf: given.get(id(leaf), leaf), result)

    def _after_backward(self) -> None:
        readable = _readable_gradients(self._model)
        self._gradients = {name: gradient.clone() for name, gradient in readable}

    def _begin_step(self, _: object, args: Any, kwargs: Any) -> Any:
        """Run the copy's step up to gradients, after the step's closure, if any."""
        own = inspect.signature(type(self._planned).step).bind(*args, **kwargs)
        if (closure := own.arguments.get("closure")) is None:
            self._before_step()
            return None

        def then_look() -> Any:
            loss = closure()
            self._before_step()
            return loss

        own.arguments["closure"] = then_look
        return own.args, own.kwargs

    def _before_step(self) -> None:
        # A scheduler may have changed the groups' options, and the next step may write them.
        planned = options_of(self._planned)
        for mine, theirs in zip(self._optimizer.param_groups, planned, strict=True):
            mine.update(theirs)
        set_present_states = _random_states(self._device)
        try:
            for called in self._micro_batches:
                called.set_random_states()
                with called.autocast():
                    outputs = tensors_in(self._plain(*called.args, **called.kwargs))
                names = [f"{index + 1} of the forward" for index in range(len(outputs))]
                self._compare(
                    "output",
                    dict(zip(names, called.outputs, strict=True)),
                    dict(zip(names, outputs, strict=True)),
                )
                roots = [tensor for tensor in outputs if tensor.requires_grad]
                given = zip(roots, called.gradients, strict=True)
                used = [(root, gradient) for root, gradient in given if gradient is not None]
                torch.autograd.backward([root for root, _ in used], [g for _, g in used])
        finally:
            set_present_states()
        own = dict(self._plain.named_parameters())
        expected = {name: own[name].grad for name in self._gradients}
        self._compare("gradient of", self._gradients, expected)
        for name, gradient in _readable_gradients(self._model):
            own[name].grad = gradient.clone()  # clipped or unscaled meanwhile

    def _after_step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
        plain = dict(self._plain.named_parameters())
        self._compare("parameter", dict(parameter_values(self._model)), plain)
        self._micro_batches.clear()
        self._steps += 1
        if self._steps == CHECKED_STEPS:
            self.stop()

    def _compare(
        self,
        what: str,
        found: Mapping[str, torch.Tensor],
        expected: Mapping[str, torch.Tensor | None],
    ) -> None:
        different = [name for name in found if not _same_bits(found[name], expected[name])]
        if different:
            self.stop()
            more = f" and of {len(different) - 1} more" if len(different) > 1 else ""
            raise DifferenceError(
                f"step {self._steps + 1} differs from plain PyTorch: {what} {different[0]}{more}",
                fix="see whether the model computes the same twice (torch.use_deterministic_"
                "algorithms) and keeps no state between forwards; report it if it does",
            )


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _same_bits(one: torch.Tensor, two: torch.Tensor | None) -> bool:
    if two is None or (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    # As bytes: a NaN equals itself, and zero differs from minus zero.
    flat = [t.detach().to("cpu").contiguous().view(-1).view(torch.uint8) for t in (one, two)]
    return torch.equal(*flat)


def _readable_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Gradients not yet consumed, offloaded ones one at a time."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, OffloadedGradient):
            yield name, gradient.stored.whole()
        elif gradient is not None and not isinstance(gradient, ConsumedGradient):
            yield name, gradient
