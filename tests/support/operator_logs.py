"""Operators that run, written down as estimates see them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from protrain_plan.hardware.operator_log import OperatorLog


@contextmanager
def watching() -> Iterator[OperatorLog]:
    """A log that is told of every operator inside."""
    log = OperatorLog()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> object:
            result = func(*args, **(kwargs or {}))
            log.note(func, args, kwargs or {}, result)
            return result

    with Watch():  # type: ignore[no-untyped-call]
        yield log
