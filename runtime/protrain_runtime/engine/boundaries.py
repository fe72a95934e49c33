"""Unit boundaries, seen by hooks on the model.

A model's units alternate between blocks (modules) and parts (code before, between and after
blocks). `Boundaries` calls `Listener.enter(slot)` at the start of each slot, in program order:

- a block's forward slot begins when the block is called, a part's when the block before it returns
  (or when the model is called);
- a unit's backward slot begins when the gradient of its outputs is complete: of a block's outputs,
  of the inputs of the block after a part, or of the model's outputs for the last part.

Without a graph, a call of a module with blocks counts as a call of the model: `generate` calls
encoders, and models inside adapters, by themselves.

A step may skip blocks: the next unit begins the slots in between. It may not repeat or reorder
them: there are no slots for that. Nothing here knows what a slot does.
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import MethodType
from weakref import finalize, ref

import torch
from torch import nn

from protrain_runtime.activations import own_checkpoints
from protrain_runtime.activations.compiled import replace_code, watch_calls
from protrain_runtime.activations.trees import tensors_in
from protrain_runtime.devices.thread_guard import ThreadGuard, ThreadGuardError


class Listener:
    """A runner of slots, called at their boundaries; it overrides those that it wants."""

    def begin(self, *, training: bool) -> None:
        """The model was called; slot 0 begins. `training`: a graph is being recorded."""

    def begin_between(self) -> None:
        """The model was called without a graph, while its last forward waits for its backward."""

    def enter(self, slot: int, inputs: Sequence[torch.Tensor]) -> None:
        """Slot `slot` begins, all before it have ended; `inputs` are a block's tensors."""

    def leave(self, outputs: Sequence[torch.Tensor]) -> None:
        """The current forward slot has computed these tensors."""

    def differentiate(self, unit: int) -> None:
        """The running forward computes gradients itself, through this unit's outputs."""

    def end_forward(self) -> None:
        """The model returned."""

    def end_backward(self) -> None:
        """The backward pass is over."""

    def abort(self) -> None:
        """The model raised."""

    def backward_failed(self) -> None:
        """The backward pass raised; the error surfaces in its caller."""


def _method_of(module: nn.Module, run: Callable[..., object]) -> Callable[..., object]:
    """`run` as a method with the signature of the module's forward, which libraries inspect."""

    def forward(_: nn.Module, /, *args: object, **kwargs: object) -> object:
        return run(*args, **kwargs)

    method = MethodType(forward, module)
    parameters = inspect.signature(module.forward).parameters.values()
    own = inspect.signature(forward).parameters["_"]
    forward.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
    return method


class Boundaries:
    """Hooks on `model` and on its blocks; `units` has each unit's module, None for a part.

    `names` are the units' names. A part is named after the first module that runs in it, if any: a
    call of that module begins the part if the blocks before were skipped. `thread_guard` checks
    which thread calls the model.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module | None],
        listener: Listener,
        *,
        names: Sequence[str] = (),
        thread_guard: ThreadGuard | None = None,
    ) -> None:
        self._units, self._listener = tuple(units), listener
        self._model = model
        self._blocks = frozenset(module for module in self._units if module is not None)
        self._names, self._thread_guard = tuple(names), thread_guard
        self._words = [*map(repr, names)] or [f"unit {index}" for index in range(len(units))]
        self._thread = 0  # runs the forward
        self._undo = ExitStack()
        self._step = 0  # counts forwards: tells hooks of an abandoned graph
        self._backward_began = False
        self._training = False
        self._unit = -1  # of the running forward; -1: none
        self.skipped: tuple[int, ...] = ()  # blocks that the last forward skipped
        self._in_block = False
        self._graph: ref[Callable[..., None]] | None = None  # alive as long as the last forward's
        inside = {module for block in self._blocks for module in block.modules()}
        for holder in (module for module in model.modules() if module not in inside):
            if holder is model or not self._blocks.isdisjoint(holder.modules()):
                run = partial(self._run, holder.forward, whole=holder is model)
                self._undo.callback(replace_code(holder, _method_of(holder, run)))
        for index, module in enumerate(self._units):
            if module is not None:
                self._watch_block(index, module)
        modules = dict(model.named_modules())
        for index, name in enumerate(self._names):
            # A part begins with the module of its name, if no other part has that name.
            twice = "#" in name or f"{name}#2" in self._names
            if index and self._units[index] is None and name in modules and not twice:

                def at_part(_: nn.Module, *given: object, index: int = index) -> None:
                    self.begin_part(index, tensors_in(given))

                handle = modules[name].register_forward_pre_hook(at_part, with_kwargs=True)
                self._undo.callback(handle.remove)

    def remove(self) -> None:
        """Remove all hooks from the model."""
        self._undo.close()

    def _run(
        self, forward: Callable[..., object], *args: object, whole: bool, **kwargs: object
    ) -> object:
        training = torch.is_grad_enabled()
        if not whole and (training or self._unit >= 0):
            return forward(*args, **kwargs)
        call = partial(forward, *args, **kwargs)
        if (
            training
            and in_backward()
            and (self._thread_guard is None or not self._thread_guard.of_another)
        ):
            self._step += 1
            self._listener.abort()
            raise RuntimeError(
                "the model was called inside backward(), as torch.utils.checkpoint around it does:"
                " a plan says itself what is recomputed. Call the model without that"
            )
        if self._thread_guard is None:
            return self._call(call)
        doing = "a training step" if training else "an evaluation"
        with self._thread_guard.taken("the model was called", doing, step=training):
            return self._call(call)

    def _call(self, call: Callable[[], object]) -> object:
        if self._unit >= 0:
            raise RuntimeError("the model was called inside its own forward: a plan is for one")
        # Backward may still come through the last forward: evaluation leaves it alone.
        awaits_backward = self._training and not self._backward_began and self.graph_lives
        if awaits_backward and not torch.is_grad_enabled():
            self._training = False
            try:
                self._listener.begin_between()
                result = self._run_forward(call)
                self._listener.end_forward()
            except BaseException:
                self._step += 1  # the waiting forward is given up, too
                self._listener.abort()
                raise
            self._training = True
            return result
        self._step += 1
        self._backward_began = False
        self._training = torch.is_grad_enabled()
        if self._training:
            self._graph = None
        self._listener.begin(training=self._training)
        try:
            result = self._run_forward(call)
            if self._training:
                # Its loss, or the loop's function of it: backward first comes through one of them.
                self._graph = ref(self._watch(tensors_in(result), len(self._units)))
            self._listener.leave(tensors_in(result))
            self._listener.end_forward()
        except BaseException:
            self._listener.abort()
            raise
        return result

    def _run_forward(self, call: Callable[[], object]) -> object:
        self._unit, self._in_block, self._thread = 0, False, threading.get_ident()
        self._called: set[int] = set()
        try:
            with own_checkpoints.replaced(self._may_hold_a_block):
                return call()
        finally:
            self._unit = -1
            blocks = (index for index, module in enumerate(self._units) if module is not None)
            self.skipped = tuple(index for index in blocks if index not in self._called)

    def _may_hold_a_block(self, function: object) -> bool:
        """Whether a block may begin in a checkpoint's function; never inside a block."""
        if self._in_block or self._unit == len(self._units) - 1:
            return False
        while isinstance(function, partial):
            function = function.func
        module = getattr(function, "__self__", function)  # it is one, or its method
        return not isinstance(module, nn.Module) or not self._blocks.isdisjoint(module.modules())

    @property
    def graph_lives(self) -> bool:
        """Whether the graph of the last training forward is alive."""
        return self._graph is not None and self._graph() is not None

    @property
    def running(self) -> bool:
        """Whether the model's forward runs."""
        return self._unit >= 0

    def begin_part(self, index: int, inputs: Sequence[torch.Tensor] = ()) -> bool:
        """Begin a part after skipped blocks; False if impossible."""
        can_begin = self._unit >= 0 and not self._in_block and self._units[index] is None
        if not can_begin or index <= self._unit:
            return False
        self._pass_on(inputs)
        self._unit = index
        self._listener.enter(index, ())
        return True

    def _pass_on(self, tensors: Sequence[torch.Tensor]) -> None:
        """End the running part, if any, with these outputs."""
        if self._units[self._unit] is None:
            if self._training:
                self._watch(tensors, 2 * len(self._units) - 1 - self._unit)
            self._listener.leave(tensors)

    def _watch_block(self, index: int, module: nn.Module) -> None:
        """Hook a block with functions: a model's copy would copy bound methods."""

        def before(_: nn.Module, *given: object) -> None:  # arguments: positional, and by name
            if self._unit < 0 and self._training and in_backward():
                raise RuntimeError(
                    f"{self._words[index]} was called in backward, as code that recomputes it does:"
                    " a plan says itself what is recomputed, in place of"
                    " torch.utils.checkpoint.checkpoint, but of no other function. Call the block"
                    " without it"
                )
            if self._unit < 0:
                return  # called by itself
            here = threading.get_ident() == self._thread
            if self._thread_guard is not None and not here and not in_backward():
                raise ThreadGuardError(
                    f"{self._words[index]} was called in thread '{threading.current_thread().name}'"
                    " while the model's forward runs in another: a model under a plan is used by"
                    " one thread at a time",
                    fix="call blocks where the model is called, and the model in one thread",
                )
            inputs = tensors_in(given)
            if self._step == 1 and own_checkpoints.inside():
                own_checkpoints.refuse_around(self._model, module)
            if self._training and index <= self._unit:
                again = index == self._unit
                what = "a second time" if again else f"after {self._words[self._unit]}"
                raise RuntimeError(
                    f"{self._words[index]} was called {what} in one forward, and the plan was made"
                    " for blocks that run once, in the profiled order: they may be skipped, not"
                    " repeated or moved. Profile the model as it runs now"
                )
            self._pass_on(inputs)
            self._unit, self._in_block = index, True
            self._called.add(index)
            self._listener.enter(index, inputs)

        def after(_: nn.Module, __: object, ___: object, output: object) -> None:
            if self._unit < 0:
                return
            self._in_block = False
            outputs = tensors_in(output)
            if self._training:
                self._watch(outputs, 2 * len(self._units) - 1 - index)
            self._listener.leave(outputs)
            if index + 1 < len(self._units) and self._units[index + 1] is None:
                self._unit = index + 1
                self._listener.enter(index + 1, ())

        self._undo.callback(watch_calls(module, before, after))

    def _watch(self, tensors: Sequence[torch.Tensor], slot: int) -> Callable[..., None]:
        """Enter `slot` at the first complete gradient; returns what the graph holds."""
        step = self._step

        def hook(*_: object) -> None:
            if self._unit >= 0 and step == self._step:
                # The forward differentiates: its graph is part of the step's.
                self._listener.differentiate(2 * len(self._units) - 1 - slot)
                return
            if step != self._step:
                raise RuntimeError(
                    "backward ran through a forward that was not the last one: under a plan every"
                    " forward has its backward before the next begins. Where one loss compares"
                    " several inputs, give them to one forward, as one batch; or call backward() on"
                    " each loss in turn, under a plan with --clip --accumulate"
                )
            if not self._backward_began:
                self._backward_began = True
                end = _Ending(self._listener)
                torch.autograd.Variable._execution_engine.queue_callback(end)
            self._listener.enter(slot, ())

        for tensor in tensors:
            if tensor.is_leaf:  # its gradient comes in no fixed order with those of parameters
                continue
            # The node, not the tensor: an in-place write gives a tensor another node, and PyTorch
            # 2.13 crashes if a tensor has hooks from before and after. An in-place write to a view
            # takes its node out of the graph, but not its base's.
            base = tensor._base if tensor._is_view() else None
            for each in (tensor, base):
                if each is not None and each.grad_fn is not None:
                    each.grad_fn.register_prehook(hook)
        return hook


class _Ending:
    """The callback at backward's end. If backward raises, autograd drops it uncalled.

    No `__del__`: after a backward in another thread it would be the first Python code to run, and a
    pending KeyboardInterrupt would be lost there.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._dropped = finalize(self, listener.backward_failed)
        self._dropped.atexit = False

    def __call__(self) -> None:
        self._dropped.detach()
        self._listener.end_backward()


def in_backward() -> bool:
    """Whether autograd calls this, in whichever thread."""
    return torch._C._current_graph_task_id() >= 0
