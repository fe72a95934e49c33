"""Fake tensors whose repeated calls are quick: a model runs the same operators again and again.

PyTorch's own cache of such calls describes each tensor by seventeen properties, and takes some
hundred microseconds for a call: most of an estimate. Here a call is known by what tells its results
apart, and answered by making these again. What is known is checked when it is learnt: results that
cannot be made again just as they were are not remembered, and PyTorch answers such calls.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from protrain_plan.profiling.structure.dispatching import NothingCompiled
from protrain_runtime.activations.trees import tensors_in
from protrain_runtime.devices.fake import FakeMode

_PLAIN = frozenset(
    (
        *(int, float, bool, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
"""Arguments other than tensors, compared by type and value."""


_Again = Callable[[Sequence[Any]], Any]
"""Makes a call's result again, of the call's arguments."""


class RepeatedCalls(NothingCompiled, FakeMode):
    """A `FakeMode` that remembers the results of calls."""

    def __init__(self) -> None:
        # A model's code may have constants of its own, made before.
        super().__init__(allow_non_fake_inputs=True)
        self._known: dict[tuple[object, ...], _Again | None] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        # All that the call's results depend on.
        found: list[object] = [
            func,
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
            *kwargs,
        ]
        if not _repeatable(func) or not self._describe(found, (*args, *kwargs.values())):
            return self.dispatch(func, types, args, kwargs)
        call = tuple(found)
        if (again := self._known.get(call)) is not None:
            return again(args)
        output = self.dispatch(func, types, args, kwargs)
        if call not in self._known:
            self._known[call] = self._learnt(args, kwargs, output)
        return output

    def _describe(self, found: list[object], args: Any) -> bool:
        """Add what tells arguments apart; False where that cannot be said."""
        add = found.append
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                if (
                    arg.fake_mode is not self
                    or arg.constant is not None
                    or arg.layout is not torch.strided
                ):
                    return False
                add(arg.shape)
                add(arg.stride())
                add(arg.dtype)
                add(arg.fake_device)
                add(arg.storage_offset())
                add(arg.untyped_storage().nbytes())
                add((arg.requires_grad, arg.is_conj(), arg.is_neg(), arg.is_inference()))
            elif kind in _PLAIN:
                add(kind)  # 1, 1.0 and True are equal, and not the same
                add(arg)
            elif kind is list or kind is tuple:
                add((kind, len(arg)))
                if not self._describe(found, arg):
                    return False
            else:
                return False
        return True

    def _learnt(self, args: Sequence[object], kwargs: object, output: object) -> _Again | None:
        """A function that makes the output again; None where its result is not just like it."""
        foreign = {_memory(tensor) for tensor in tensors_in((args, kwargs))}
        if not isinstance(output, tuple):
            return self._learnt_of(args, output, foreign)
        each: list[_Again] = []
        for one in output:
            again = self._learnt_of(args, one, foreign)
            if again is None:
                return None
            if isinstance(one, Tensor):
                foreign.add(_memory(one))  # two results of one memory are not made again
            each.append(again)
        return lambda args: tuple(again(args) for again in each)

    def _learnt_of(
        self, args: Sequence[object], output: object, foreign: Set[int]
    ) -> _Again | None:
        if output is None or type(output) is int:
            return lambda _: output
        if type(output) is not FakeTensor or output.layout is not torch.strided:
            return None
        if output.constant is not None or output.fake_mode is not self:
            return None
        viewed = None
        for place, arg in enumerate(args):
            if arg is output:
                return itemgetter(place)
            if isinstance(arg, Tensor) and _memory(arg) == _memory(output):
                viewed = place
        if viewed is None and _memory(output) in foreign:
            return None
        # Not the output itself, whose memory would live on.
        shape, stride, offset = output.shape, output.stride(), int(output.storage_offset())
        dtype, device = output.dtype, output.fake_device

        def again(args: Sequence[Any]) -> FakeTensor:
            with in_kernel_invocation_manager(self):
                made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                if viewed is not None:
                    made.set_(args[viewed].untyped_storage(), offset, shape, stride)
            return FakeTensor(self, made, device)

        return again if _properties(again(args)) == _properties(output) else None


def _properties(tensor: Tensor) -> tuple[object, ...]:
    return (
        torch._C._dispatch_key_set(tensor),
        tensor.untyped_storage().nbytes(),
        tensor.storage_offset(),
        tensor.stride(),
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )


@cache
def _repeatable(func: Any) -> bool:
    """Whether results follow from the arguments' geometry, and are of memory that is known."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    asked = (
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    )
    name = func._schema.name.partition("::")[2]
    return (
        not any(tag in func.tags for tag in asked)
        and not name.startswith(("lift", "set_", "resize", "_resize"))
        and all(
            argument.alias_info is None or not argument.kwarg_only
            for argument in func._schema.arguments
        )
    )


def _memory(tensor: Tensor) -> int:
    """The identity of the tensor's memory."""
    return int(tensor.untyped_storage()._cdata)
