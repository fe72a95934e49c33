"""Operators that run, written down as estimates see them."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from protrain_plan.hardware.operator_log import OperatorLog

Look = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], object]
"""Called with an operator that has run, its arguments and its result."""


class _Looking(TorchDispatchMode):
    def __init__(self, look: Look) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.look = look

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.look(func, args, kwargs or {}, result)
        return result


@contextmanager
def looking(look: Look) -> Iterator[None]:
    """Look at every operator inside."""
    with _Looking(look):
        yield


@contextmanager
def watching() -> Iterator[OperatorLog]:
    """A log that is told of every operator inside."""
    log = OperatorLog()
    with looking(log.note):
        yield log


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts the operators inside, by their names."""
    names: Counter[str] = Counter()
    with looking(lambda func, *_: names.update([func._schema.name])):
        yield names
