"""Use of a planned model by one thread at a time, in the process that prepared it.

A step belongs to one thread: its forwards, backwards and `optimizer.step()`. Steps may come from
different threads in turn. A call during another thread's step, evaluation, save or load is refused,
and the other thread continues. Autograd calls hooks of backward in its own threads: those own no
step, and are never refused.

A forked process has none of the transfer threads, and shares the spill file with its parent: calls
that need either are refused there.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.devices.lanes import forks, overridden

Owner = TypeVar("Owner")
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


class ThreadGuardError(ProtrainError, RuntimeError):
    """The model belongs to another thread or process now."""


@dataclass(eq=False)
class ThreadGuard:
    """`graph_lives`: whether a backward may still come through the last forward.

    Never looks at a tensor: the other thread may be changing it, and reading a gradient while it is
    dropped crashes.
    """

    graph_lives: Callable[[], bool]
    _process: int = field(default_factory=forks, init=False)
    # The current holder. A dict, whose `setdefault` is atomic: a lock could be held by another
    # thread at a fork.
    _now: dict[None, tuple[threading.Thread, str]] = field(
        default_factory=dict[None, tuple[threading.Thread, str]], init=False
    )
    _step_of: threading.Thread | None = field(default=None, init=False)
    stepped: bool = True  # the last step's `optimizer.step()` has ended
    gradients: bool = False  # a backward has left some, not dropped yet
    num_steps: int = 0  # training forwards begun

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the preparing one."""
        return forks() != self._process

    def at_home(self, what: str, needed: Collection[object]) -> None:
        """ThreadGuardError, with `what`, if a forked process needs missing parts."""
        if needed and self.forked:
            raise ThreadGuardError(
                f"{what} in a forked process: the transfers of the plan are carried out by threads"
                " and with files of the process that called prepare()",
                fix="do it in that process; or build the model anew in the fork, and prepare it"
                " there",
            )

    def check(self, what: str, *, step: bool = False) -> None:
        """ThreadGuardError, with `what`, if another thread uses the model or has gradients."""
        holder = self._now.get(None)
        if holder is not None and self._is_another(holder[0]):
            raise _refused(what, *holder)
        if self.of_another or (step and self._is_another(self._step_of) and self.gradients):
            assert self._step_of is not None
            raise _refused(what, self._step_of, "a training step")

    @property
    def of_another(self) -> bool:
        """Whether another thread's step is under way."""
        if self.stepped or not self._is_another(self._step_of):
            return False
        return self.graph_lives() or self.gradients

    def _is_another(self, thread: threading.Thread | None) -> bool:
        """Whether a thread is not this one, and may continue what it has begun."""
        if thread is None or thread is threading.current_thread():
            return False
        return thread.is_alive() and not self.forked

    @contextmanager
    def taken(self, what: str, doing: str, *, step: bool = False) -> Iterator[None]:
        """Hold the model for `doing`; ThreadGuardError, with `what`, if another thread has it."""
        mine = threading.current_thread(), doing
        holder = self._now.setdefault(None, mine)
        if holder is not mine and not holder[0].is_alive():
            self._now[None] = holder = mine  # from the process before the fork
        try:
            self.check(what, step=step)
            if step:
                self._step_of, self.stepped = mine[0], False
                self.num_steps += 1
            yield
        finally:
            if holder is mine:
                del self._now[None]


def guarded(
    what: str, guard_of: Callable[[Any], ThreadGuard | None]
) -> Callable[
    [Callable[Concatenate[Owner, Rest], Result]], Callable[Concatenate[Owner, Rest], Result]
]:
    """Make a function hold its first argument's planned model."""

    def held(
        function: Callable[Concatenate[Owner, Rest], Result],
    ) -> Callable[Concatenate[Owner, Rest], Result]:
        @wraps(function)
        def run(owner: Owner, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
            guard = guard_of(owner)
            with guard.taken(f"{what} was called", what) if guard else nullcontext():
                return function(owner, *args, **kwargs)

        return run

    return held


def watch_zero_grad(model: nn.Module, thread_guard: ThreadGuard) -> Callable[[], None]:
    """Refuse `model.zero_grad()` during another thread's step, else note it; returns the undo."""
    drop: Callable[[bool], None] = model.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        thread_guard.check("zero_grad() was called")
        drop(set_to_none)
        thread_guard.gradients = False

    return overridden(model, "zero_grad", zero_grad)


def _refused(what: str, other: threading.Thread, doing: str) -> ThreadGuardError:
    return ThreadGuardError(
        f"{what} in thread '{threading.current_thread().name}' while {doing} is under way in thread"
        f" '{other.name}': a model under a plan is used by one thread at a time",
        fix="wait for that to end: a step is one thread's from its forward to optimizer.step() and"
        " zero_grad(), or until its loss and gradients are dropped",
    )
