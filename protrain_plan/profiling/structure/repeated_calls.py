"""Fake tensors whose repeated calls are quick: a model runs the same operators again and again.

PyTorch's own cache of such calls describes each tensor by seventeen properties, and takes some
hundred microseconds for a call: most of an estimate. Here a call is known by what tells its results
apart, and answered by making these again. What is known is checked when it is learnt: results that
cannot be made again just as they were are not remembered, and PyTorch answers such calls.
"""

from collections.abc import Mapping, Sequence, Set
from functools import cache
from typing import Any, NamedTuple

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
"""Arguments that are no tensors, and are told apart by their type and value."""


class _Result(NamedTuple):
    """A result to make again: new memory, a view of an argument, an argument itself, a number."""

    argument: int | None = None  # its place, where the result is it, or of its memory
    number: int | None = None
    shape: torch.Size | None = None  # None: no new tensor
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None


class _Answer(NamedTuple):
    """The result of a call, or a tuple of some."""

    results: tuple[_Result, ...]
    several: bool


class RepeatedCalls(NothingCompiled, FakeMode):
    """A `FakeMode` that remembers the results of calls."""

    def __init__(self) -> None:
        # A model's code may have constants of its own, made before.
        super().__init__(allow_non_fake_inputs=True)
        self._answers: dict[tuple[object, ...], _Answer | None] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        call = self._described(func, args, kwargs) if _repeatable(func) else None
        if call is None:
            return self.dispatch(func, types, args, kwargs or {})
        if call in self._answers:
            answer = self._answers[call]
            if answer is None:
                return self.dispatch(func, types, args, kwargs or {})
            made = [self._made(result, args) for result in answer.results]
            return tuple(made) if answer.several else made[0]
        output = self.dispatch(func, types, args, kwargs or {})
        self._answers[call] = self._learnt(args, kwargs, output)
        return output

    def _described(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object] | None
    ) -> tuple[object, ...] | None:
        """All that the call's results depend on; None where that cannot be said."""
        found: list[object] = [
            func,
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
        ]
        if not self._describe(found, args):
            return None
        if kwargs:
            found.extend(kwargs)
            if not self._describe(found, kwargs.values()):
                return None
        return tuple(found)

    def _describe(self, found: list[object], args: Any) -> bool:
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

    def _learnt(self, args: Sequence[object], kwargs: object, output: object) -> _Answer | None:
        """How to make the output again; None where what is made is not just like it."""
        several = isinstance(output, tuple)
        results: list[_Result] = []
        foreign = {_memory(tensor) for tensor in tensors_in((args, kwargs))}
        for one in output if isinstance(output, tuple) else (output,):
            result = self._learnt_of(args, one, foreign)
            if result is None:
                return None
            if isinstance(one, Tensor):
                foreign.add(_memory(one))  # two results of one memory are not made again
            results.append(result)
        return _Answer(tuple(results), several)

    def _learnt_of(
        self, args: Sequence[object], output: object, foreign: Set[int]
    ) -> _Result | None:
        if output is None or type(output) is int:
            return _Result(number=output)
        if type(output) is not FakeTensor or output.layout is not torch.strided:
            return None
        if output.constant is not None or output.fake_mode is not self:
            return None
        argument = None
        for place, arg in enumerate(args):
            if arg is output:
                return _Result(place)
            if isinstance(arg, Tensor) and _memory(arg) == _memory(output):
                argument = place
        if argument is None and _memory(output) in foreign:
            return None
        result = _Result(
            argument,
            None,
            output.shape,
            output.stride(),
            int(output.storage_offset()),
            output.dtype,
            output.fake_device,
        )
        again = self._made(result, args)
        alike = (
            again.untyped_storage().nbytes() == output.untyped_storage().nbytes()
            and torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(output)
            and again.storage_offset() == output.storage_offset()
            and again.stride() == output.stride()
            and again.requires_grad == output.requires_grad
            and again.is_conj() == output.is_conj()
            and again.is_neg() == output.is_neg()
        )
        return result if alike else None

    def _made(self, result: _Result, args: Sequence[object]) -> Any:
        argument, number, shape, stride, offset, dtype, device = result
        if shape is None:
            return number if argument is None else args[argument]
        with in_kernel_invocation_manager(self):
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if argument is not None:
                memory: Any = args[argument]
                made.set_(memory.untyped_storage(), offset, shape, stride)
        return FakeTensor(self, made, device)


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
