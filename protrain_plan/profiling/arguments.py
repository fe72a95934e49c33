"""What blocks do to their arguments: containers and objects that they write into."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from protrain_runtime.trees import Rebuild, is_value, leaves_in, taken_apart, tensors_in


@dataclass(frozen=True, slots=True)
class Written:
    """The blocks, by number, that wrote into their arguments.

    anything  wrote at all
    lasting   what they wrote would be seen if they ran again on the same arguments
    tensors   handed tensors on by writing them there, besides those that they returned
    """

    anything: set[int] = field(default_factory=set[int])
    lasting: set[int] = field(default_factory=set[int])
    tensors: set[int] = field(default_factory=set[int])


@contextmanager
def writing_arguments(modules: Sequence[nn.Module | None]) -> Iterator[Written]:
    """Those of the blocks that run while inside; None stands for a part."""
    found = Written()
    before: dict[int, _Arguments] = {}

    def begin(unit: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        before[unit] = _Arguments.of((args, kwargs))

    def end(unit: int, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, now = before.pop(unit), (args, kwargs)
        if _contents(now) == given.contents:
            return
        found.anything.add(unit)
        if _contents(given.again(given.tensors)) != given.repeated:
            found.lasting.add(unit)
        known = {id(tensor) for tensor in (*given.tensors, *tensors_in(output))}
        if any(id(tensor) not in known for tensor in tensors_in(now)):
            found.tensors.add(unit)

    with ExitStack() as stack:
        for unit, module in enumerate(modules):
            if module is not None:
                first, last = partial(begin, unit), partial(end, unit)
                handle = module.register_forward_pre_hook(first, with_kwargs=True)
                stack.callback(handle.remove)
                stack.callback(module.register_forward_hook(last, with_kwargs=True).remove)
        yield found


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Arguments before a run: what stands in them, and what a second run would get."""

    tensors: list[Any]
    again: Rebuild
    contents: list[object]
    repeated: list[object]

    @staticmethod
    def of(tree: object) -> "_Arguments":
        tensors, again = taken_apart(tree)
        return _Arguments(tensors, again, _contents(tree), _contents(again(tensors)))


def _contents(tree: object) -> list[object]:
    """The leaves of a tree: plain values, and the identities of everything else."""
    return [(type(leaf), leaf) if is_value(leaf) else id(leaf) for leaf in leaves_in(tree)]
