"""`PlannedOptimizer`: a `torch.optim.Optimizer` over parameters in several places.

The user's optimizer itself updates parameters of persistent chunks, in `step()` or chunk by chunk
during backward. Offloaded chunks are updated in pieces: during backward, or in `step()` if the plan
updates after backward; `step()` waits for the last piece. Every update runs the user's class with
the current options of its group.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, SupportsIndex, overload

import torch
from torch import nn

from protrain_runtime.devices.thread_guard import ThreadGuard, guarded
from protrain_runtime.engine.engine import Engine
from protrain_runtime.model.optimizer_state import (
    PlannedStates,
    load_state,
    offloaded_states,
)
from protrain_runtime.states.chunks import Chunk, read_values, write_values
from protrain_runtime.states.compositions import put_together
from protrain_runtime.states.master_weights import MasterOptimizer
from protrain_runtime.states.stand_ins import plainly
from protrain_runtime.states.stepping import (
    OptimizerFactory,
    attributes_of,
    groups_of,
    options_of,
    step_alone,
)

ParameterGroups = Iterable[Any]
"""Groups, parameters, or named parameters, as PyTorch's optimizers take them."""


class PlannedOptimizer(torch.optim.Optimizer):
    """The optimizer of `prepare`. `param_groups` are the user's: schedulers and edits act on them.

    `factory` makes optimizers of the user's class: `inner`, over the model's trainable parameters
    or in `groups`, and those of offloaded chunks.
    """

    # `GradScaler` would ask a fused optimizer to unscale in its kernel. Here it unscales itself:
    # the same bits if the scale is a power of two, as by default.
    _step_supports_amp_scaling = False

    def __init__(
        self, factory: OptimizerFactory, model: nn.Module, groups: ParameterGroups | None
    ) -> None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        given: list[Any] = [{"params": trainable}] if groups is None else [*groups]
        if given and not isinstance(given[0], Mapping):
            given = [{"params": given}]  # one group, as in PyTorch
        self.factory, self.inner = factory, factory([dict(group) for group in given])
        self.kind = type(self.inner)  # the user's class, which updates
        # By identity: calls no code of a parameter's.
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._chunks: Sequence[Chunk] = ()
        self._persistent: Sequence[Chunk] = ()
        self._engine: Engine | None = None
        self._used: list[dict[str, Any]] = []  # the groups' options at updates in backward
        self.mode_listeners: list[Callable[[str], object]] = []  # of `train` and `eval`
        groups, states = self.inner.param_groups, self.inner.state
        super().__init__(groups, self.inner.defaults)
        # The groups are the inner optimizer's, not copies: one set of options.
        self.inner.param_groups, self.inner.state = groups, states
        self.__dict__["param_groups"] = groups
        self._states = self.__dict__["state"] = PlannedStates(self.inner)

    def attach(self, chunks: Sequence[Chunk], engine: Engine) -> None:
        """Take charge of `chunks`; `engine` updates the offloaded ones."""
        self._chunks = [chunk for chunk in chunks if chunk.store is not None]
        self._persistent = [chunk for chunk in chunks if chunk.store is None]
        self._engine = engine
        self._states.attach(self._chunks, engine)

    def __getattr__(self, name: str) -> Any:
        """Attributes and methods of the user's class; methods see this optimizer.

        A method works on `param_groups`, `state` and gradients of all parameters, in any tier.
        `train` and `eval` of schedule-free optimizers also change parameter values.
        """
        inner = self.__dict__.get("inner")
        if name in ("train", "eval") and hasattr(inner, name):
            return partial(self._switch, name)
        if inner is None or not hasattr(inner, name) or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(inner, name)
        whose = isinstance(found, MethodType) and found.__self__ is inner
        return MethodType(found.__func__, self) if whose and self._engine is not None else found

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the inner optimizer's attribute, too: its groups, states or others."""
        inner = self.__dict__.get("inner")
        ready = isinstance(self.__dict__.get("state"), PlannedStates)
        if ready and name == "state":
            given = dict(value)  # may be of these states
            self._states.clear()
            self._states.update(given)
        elif ready and name not in self.__dict__ and name in vars(inner):
            if self._chunks:
                raise RuntimeError(
                    f"optimizer.{name} was set after prepare(): optimizers for the pieces of"
                    f" offloaded parameters are made by calling {self.kind.__name__} and would not"
                    " have it. Set it in the constructor, or in param_groups"
                )
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)
            if ready and name == "param_groups":
                inner.param_groups = value  # type: ignore[union-attr]

    def _switch(self, mode: str) -> None:
        """Switch to a mode, which may change parameter values, offloaded ones included."""
        what = f"optimizer.{mode}()"
        with (
            self._thread_guard.taken(f"{what} was called", what)
            if self._thread_guard
            else nullcontext()
        ):
            self._settle(f"{what} was called")
            groups = zip(self.param_groups, options_of(self), strict=True)
            options = {p: chosen for group, chosen in groups for p in group["params"]}
            for chunk, part, (scalars, states) in offloaded_states(self._chunks):
                shadow = nn.Parameter(read_values(chunk, part))
                vars(shadow).update(attributes_of(part.parameter))
                worker: Any = self.factory(
                    groups_of([(shadow, part.name, options[part.parameter])])
                )
                worker.state[shadow] = put_together(scalars | states, shadow.shape)
                getattr(worker, mode)()
                write_values(chunk, part, shadow)
                load_state(chunk, part, worker.state[shadow])
            getattr(self.inner, mode)()
            self._states.renew()
            for tell in self.mode_listeners:
                tell(mode)
            for parameter in self._states.places:
                if not self.inner.state.get(parameter, True):  # created by a look-up
                    del self.inner.state[parameter]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """RuntimeError once prepared: the plan is for the parameters at `prepare`."""
        if self._engine is not None:
            raise RuntimeError("add parameter groups before prepare(), with param_groups=")
        super().add_param_group(param_group)

    def options(self) -> dict[str, dict[str, Any]]:
        """The current options by parameter name; called when backward updates a chunk."""
        self._used = options_of(self)
        options: dict[str, dict[str, Any]] = {}
        for group, chosen in zip(self.param_groups, self._used, strict=True):
            for parameter in group["params"]:
                # Other parameters concern the inner optimizer only.
                if (name := self.names.get(id(parameter))) is not None:
                    options[name] = chosen
        return options

    def step_on(self, chunk: Chunk) -> None:
        """Step on one persistent chunk's parameters; called when backward updates it."""
        self._used = options_of(self)
        self._make_room([chunk])
        step_alone(self.inner, set(chunk.parameters), self._used)

    def _make_room(self, chunks: Sequence[Chunk]) -> None:
        """Step on masters in the largest chunk's workspace, which the plan counts."""
        if isinstance(self.inner, MasterOptimizer):
            due = (
                sum(each.numel() for each in chunk.parameters if each.grad is not None)
                for chunk in chunks
            )
            self.inner.room_elements = max(due, default=0)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update persistent parameters; update the others or wait for their updates.

        A `closure` runs once before: the step's forwards and backwards. Returns its loss.
        """
        if self._engine is None:  # an optimizer may call its closure several times
            return self.inner.step() if closure is None else self.inner.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        what, engine = "optimizer.step()", self._engine
        with engine.thread_guard.taken(f"{what} was called", what):
            engine.check_step()
            changed = bool(self._used) and self._used != options_of(self)
            if changed and engine.updates_in_backward:
                raise RuntimeError(
                    "a parameter group's options changed between backward() and step(): this plan"
                    " has updated parameters with the old ones; change them before"
                    " backward()"
                )
            if engine.updates_in_backward:
                self._states.refuse_late_writes()
            else:
                self._states.write_back()
            with engine.stepping():
                engine.begin_update(same_options=not changed)
                used = [each for chunk in engine.consuming for each in chunk.drop_consumed()]
                engine.update_shards()
                self._make_room(self._persistent)
                self._step_without([parameter for parameter, _ in used])
                engine.finish_step()
                self._states.renew()
            with plainly():
                for parameter, stand_in in used:
                    parameter.grad = stand_in
            self._used = []
        return loss

    def _step_without(self, parameters: Sequence[nn.Parameter]) -> None:
        """Step the inner optimizer; these parameters are already updated and have no gradient.

        PyTorch's optimizers skip them, but asking a stand-in for its gradient takes longer than
        launching its update. Hooks, and other optimizers, may look at all parameters of a group.
        """
        inner, groups = self.inner, self.inner.param_groups
        listed = [group["params"] for group in groups]
        hooks = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
        updated = {id(parameter) for parameter in parameters}
        try:
            if type(inner).__module__.startswith("torch.optim.") and not hooks:
                for group in groups:
                    group["params"] = [one for one in group["params"] if id(one) not in updated]
            inner.step()
        finally:
            for group, members in zip(groups, listed, strict=True):
                group["params"] = members

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or zero them. ThreadGuardError during another thread's step."""
        if self._thread_guard is not None:
            self._thread_guard.check("optimizer.zero_grad() was called")
        with plainly() if set_to_none else nullcontext():
            super().zero_grad(set_to_none)
        if self._thread_guard is not None:
            self._thread_guard.gradients = False

    @guarded("optimizer.state_dict()", lambda optimizer: optimizer._thread_guard)
    def state_dict(self) -> dict[str, Any]:
        """All states in the user's layout, offloaded ones copied to host memory."""
        self._settle("optimizer.state_dict() was called")
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        with self._all_states():
            found = self.inner.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def __reduce_ex__(self, _: SupportsIndex) -> tuple[Any, ...]:
        """Copy and pickle as a plain optimizer of the user's class, as models do."""
        self._settle("the optimizer was copied")
        with self._all_states():
            state = {**self.inner.__getstate__(), "state": copy(self.inner.state)}
        # Not by `copyreg.__newobj__`, which pickles objects of their own class only.
        return object.__new__, (self.kind,), state

    @contextmanager
    def _all_states(self) -> Iterator[None]:
        """The inner optimizer has the states of offloaded parameters, too, in host memory."""
        with ExitStack() as stack:
            for _, part, (scalars, states) in offloaded_states(self._chunks):
                self.inner.state[part.parameter] = put_together(scalars | states, part.shape)
                stack.callback(self.inner.state.pop, part.parameter)
            yield

    @guarded("optimizer.load_state_dict()", lambda optimizer: optimizer._thread_guard)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of any plan; ValueError for other groups."""
        self._settle("optimizer.load_state_dict() was called")
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                "the state dict has parameter groups of other sizes than the optimizer"
            )
        # The saved numbers of offloaded parameters' states.
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        places, states = self._states.places, state_dict["state"]
        below = {n: places[p] for n, p in zip(saved, own, strict=True) if p in places}
        # The inner optimizer moves loaded states to the parameters' device: not these.
        others = {number: state for number, state in states.items() if number not in below}
        self.inner.load_state_dict({**state_dict, "state": others})
        # Loading replaced the inner optimizer's groups and states. The list of groups stays the
        # same object: an adopted optimizer and its schedulers hold it, too.
        self.param_groups[:] = self.inner.param_groups
        self.inner.param_groups = self.param_groups
        self._states.forget()
        for number, (chunk, part) in below.items():
            if number in states:
                load_state(chunk, part, states[number])
            else:
                chunk.current.updated.discard(part.name)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def give_back(self) -> None:
        """Return all states to the inner optimizer, and act as it from now on."""
        loans = self._states.detach()
        for _, part, (scalars, states) in offloaded_states(self._chunks):
            self.inner.state[part.parameter] = self._states.at_home(part, scalars, states)
        self.inner.state.update({parameter: loan for parameter, loan in loans.items() if loan})
        self._chunks, self._persistent, self._engine = (), (), None

    @property
    def _thread_guard(self) -> ThreadGuard | None:
        return self._engine.thread_guard if self._engine is not None else None

    def _settle(self, what: str) -> None:
        if self._engine is not None:
            self._engine.settle(what)
