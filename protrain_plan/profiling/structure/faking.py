"""A model of fake tensors: built and run without memory for its parameters, or a device.

A model's code may ask for values of tensors all the same: the depths at which layers drop out, from
`linspace`; how many of the tokens stand for an image. What it asks of token ids, of masks made of
them, or of tensors made from numbers does not depend on what the model has learnt. So real tensors
are computed along with those fake ones, from the batch on (`KnownValues`); activations and
parameters have none.
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from protrain_plan.hardware.operators import device_type
from protrain_plan.models.batches import Batch
from protrain_plan.models.building import remake_tensors
from protrain_plan.models.sources import ModelSource
from protrain_plan.profiling.structure.dispatching import NothingCompiled
from protrain_plan.profiling.structure.repeated_calls import RepeatedCalls
from protrain_runtime.activations.compiled import uncompiled
from protrain_runtime.activations.trees import named, taken_apart, tensors_in, written_arguments
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import DeviceKind
from protrain_runtime.contract.records.profile import Workload
from protrain_runtime.devices.memory_meter import PARTS, strided_parts
from protrain_runtime.states.absent import converted, replaced
from protrain_runtime.states.quantized import products_of_a_card

aten = torch.ops.aten

_MOST_BYTES = 2**23
"""The largest tensor whose values are known: a batch of a million tokens, and no mask of all pairs
of 4,096 tokens, whose values would take an eighth of an estimate's time."""

_Given = Mapping[str, Any]  # an operator's arguments by name
_Fake = Callable[[], Any]  # PyTorch's own result for fake tensors

_ATTRIBUTE = "_protrain_value"
_UNDEFINED = ("empty", "new_empty", "resize", "set_")
"""How operators are called whose results do not follow from their arguments."""


class _Traits(NamedTuple):
    """Facts about an operator from its schema."""

    asks_values: bool
    counts: bool  # its result's shape depends on values
    drawn: bool  # its result does not follow from its arguments
    writes: bool


@cache
def _traits(func: Any) -> _Traits:
    name = func._schema.name.partition("::")[2]
    return _Traits(
        asks_values=torch.Tag.data_dependent_output in func.tags,
        counts=torch.Tag.dynamic_output_shape in func.tags,
        drawn=torch.Tag.nondeterministic_seeded in func.tags or name.startswith(_UNDEFINED),
        writes=func._schema.is_mutable,
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """The values of a fake tensor, which a copy of that has in a copy."""

    value: Tensor

    def __deepcopy__(self, _: object) -> "_Known":
        with unset_fake_temporarily():
            return _Known(self.value.clone())


class KnownValues(NothingCompiled, TorchDispatchMode):
    """Computes the values of fake tensors where all that they are computed from is known.

    Enter it inside the `FakeTensorMode`. Views are of the same memory, as fake ones are; where a
    tensor is written with something unknown, the values of all that share its memory are forgotten.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._overwritten: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return asked(func, args, kwargs)
        values = [self.value(tensor) for tensor in tensors_in((args, kwargs))]
        known = all(value is not None for value in values)
        traits = _traits(func)
        if traits.asks_values and known:
            return self._real(func, args, kwargs)
        if traits.counts:
            counted = self._counted(func, args, kwargs, known=known)
            if counted is not None:
                return counted
        if func in _AS_REAL:
            result = _AS_REAL[func](named(func, args, kwargs), partial(func, *args, **kwargs))
        else:
            result = func(*args, **kwargs)
        made = tensors_in(result)
        for tensor in made:
            if tensor.layout is not torch.strided:
                setattr(tensor, PARTS, _parts(func, args, kwargs))
        if known and not traits.drawn and all(map(_is_small, made)):
            real = tensors_in(self._real(func, args, kwargs))
            for tensor, found in zip(made, real, strict=True):
                setattr(tensor, _ATTRIBUTE, _Known(found))
        elif func is aten.random_.default and made[0].dim() == 0:
            with unset_fake_temporarily():  # a seed, which a DataLoader draws: any will do
                seed = torch.zeros((), dtype=made[0].dtype)
            setattr(made[0], _ATTRIBUTE, _Known(seed))
        elif traits.writes:
            for tensor in written_arguments(func, args, kwargs):
                value = self.value(tensor)
                if value is not None:
                    storage = value.untyped_storage()
                    self._overwritten[storage._cdata] = storage
        return result

    def value(self, tensor: Tensor) -> Tensor | None:
        """Values of a fake tensor where they are known; a real one itself."""
        if tensor.requires_grad:
            return None
        value: Tensor | None = tensor
        if isinstance(tensor, FakeTensor):
            known: _Known | None = getattr(tensor, _ATTRIBUTE, None)
            value = None if known is None else known.value
        if value is not None and value.untyped_storage()._cdata in self._overwritten:
            return None
        return value

    def _real(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """The operator's result on the values."""
        real_args, real_kwargs = tree_map_only(Tensor, self.value, (args, dict(kwargs)))
        with unset_fake_temporarily():
            result: object = func(*real_args, **real_kwargs)
        return result

    def _counted(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, known: bool
    ) -> Any:
        """A result whose shape depends on values, all or a mask's; None where that is unknown."""
        if known:
            return tree_map_only(
                Tensor,
                lambda value: know(torch.empty(value.shape, dtype=value.dtype), value),
                self._real(func, args, kwargs),
            )
        if func is aten.masked_select.default:
            arguments = named(func, args, kwargs)
            given, mask = arguments["self"], self.value(arguments["mask"])
            if mask is None:
                return None
            shape = torch.broadcast_shapes(given.shape, mask.shape)
            return given.new_empty(_count(mask) * (shape.numel() // max(1, mask.numel())))
        if func is aten.index.Tensor:
            # `given[:, mask]`: elements of all dimensions that the mask spans become one.
            arguments = named(func, args, kwargs)
            given, indices = arguments["self"], arguments["indices"]
            places = [place for place, index in enumerate(indices) if index is not None]
            if len(places) == 1 and indices[places[0]].dtype == torch.bool:
                mask = self.value(indices[places[0]])
                if mask is not None:
                    before, after = given.shape[: places[0]], given.shape[places[0] + mask.dim() :]
                    return given.new_empty(*before, _count(mask), *after)
        return None


def _cut(whole: Tensor, result: Tensor) -> Tensor:
    """The result, which keeps the memory of what it was made as: something larger."""
    return result.new_empty(whole.shape).resize_(result.shape)


def _loss(given: _Given, fake: _Fake) -> Tensor:
    return _cut(torch.broadcast_tensors(given["self"], given["target"])[0], fake())


def _bags(given: _Given, fake: _Fake) -> tuple[Tensor, ...]:
    rows, bags, *others = fake()
    return rows, _cut(bags.new_empty(given["indices"].numel() + 1), bags), *others


def _normalised(given: _Given, fake: _Fake) -> tuple[Any, ...]:
    """The first tensor in the order that the input suggests, and none where none is asked for."""
    first, *others = fake()
    if not given.get("output_mask", [True])[0]:
        return None, *others
    return first.contiguous(memory_format=suggest_memory_format(given["input"])), *others


def _grouped(given: _Given, _: _Fake) -> Tensor:
    """PyTorch knows the shapes of grouped matrix products of bfloat16 only."""
    left: Tensor = given["self"]
    right, offsets = given["mat2"], given["offs"]
    if left.dim() == 2 and right.dim() == 2:  # one product per group of inner columns
        return left.new_empty(len(offsets), left.shape[0], right.shape[1])
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def _lstm(_: _Given, __: _Fake) -> Tensor:
    raise UnknownBytesError("an LSTM keeps a workspace whose size its library alone knows")


_AS_REAL: dict[Any, Callable[[_Given, _Fake], Any]] = {
    aten.mse_loss.default: _loss,
    aten.smooth_l1_loss.default: _loss,
    aten.soft_margin_loss.default: _loss,
    aten.binary_cross_entropy.default: _loss,
    aten._embedding_bag.default: _bags,
    aten.col2im.default: lambda given, fake: _cut(given["self"], fake()),
    aten.native_batch_norm.default: _normalised,
    aten.native_batch_norm_backward.default: _normalised,
    aten._grouped_mm.default: _grouped,
    aten.mkldnn_rnn_layer.default: _lstm,
}
"""Operators whose fake results are smaller, or lie otherwise in memory, than real ones."""


def asked(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """The answer to a question of the namespace `prim`, which more than half of all calls are.

    On which device a fake tensor is, is answered here, as its own mode does.
    """
    if func is torch.ops.prim.device.default:
        (tensor,) = args
        if isinstance(tensor, FakeTensor) and not tensor.fake_mode.in_kernel_invocation:
            return tensor.fake_device
    return func(*args, **kwargs)


class UnknownBytesError(Exception):
    """Something that takes memory of a size which is not known without running it."""

    @staticmethod
    def sparse(where: object) -> "UnknownBytesError":
        return UnknownBytesError(
            f"there are sparse tensors in {where}: what they take depends on their values"
        )


def _parts(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Indices and values of a new sparse tensor, as the gradient of an embedding is made."""
    if func is aten._sparse_coo_tensor_with_dims_and_tensors.default:
        arguments = named(func, args, kwargs)
        return arguments["indices"], arguments["values"]
    if func in (aten.detach.default, aten.clone.default):  # a gradient is not copied, but kept
        return tuple(strided_parts(args))
    raise UnknownBytesError.sparse(func)


def know(fake: Tensor, value: Tensor) -> Tensor:
    """The fake tensor, with values where they are integers or truths."""
    if not value.is_floating_point() and _is_small(value):
        setattr(fake, _ATTRIBUTE, _Known(value))
    return fake


def _count(mask: Tensor) -> int:
    with unset_fake_temporarily():
        return int(mask.sum())


def _is_small(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.untyped_storage().nbytes() <= _MOST_BYTES
    )


_VALUES_ASKED = (DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def faking(kind: DeviceKind = "cpu") -> Iterator[FakeTensorMode]:
    """Tensors that are made inside are fake, on a CPU. Everything is as before afterwards.

    Compiled modules run uncompiled.

    For another type of device, attention takes the kernels that it would take there
    (`DeviceType.attention`).

    Values of small tensors that depend on no parameters stay known (`values`). Two things act as
    they do with real tensors, which PyTorch and transformers know to be fake:

    - transformers looks for packed sequences in the position ids, and for padding in the mask;
      where it cannot, as in tracing, it makes a mask of all pairs of tokens. Here it looks at
      values that are known.
    - Recomputation saves the CPU's random state, a tensor that no operator makes.
    """
    mode, known = RepeatedCalls(), KnownValues()
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        # What an operator refuses is raised; it would print a traceback besides.
        log = logging.getLogger("torch._subclasses.fake_tensor")
        stack.enter_context(replaced(log, "disabled", True))
        if importlib.util.find_spec("transformers") is not None:
            masking = importlib.import_module("transformers.masking_utils")

            def is_tracing(tensor: Tensor | None = None) -> bool:
                return tensor is not None and known.value(tensor) is None

            stack.enter_context(replaced(masking, "is_tracing", is_tracing))
        num_bytes = torch.get_rng_state().numel()
        stack.enter_context(
            replaced(torch, "get_rng_state", lambda: torch.empty(num_bytes, dtype=torch.uint8))
        )
        stack.enter_context(replaced(torch, "set_rng_state", lambda _: None))
        stack.enter_context(replaced(nn.Module, "_apply", converted))
        # Draws again what lies outside its bounds, and so looks at what it drew; a fake parameter
        # has no values to draw.
        undrawn = replaced(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
        stack.enter_context(undrawn)
        stack.enter_context(mode)
        stack.enter_context(known)
        if kind not in ("cpu", "xpu"):  # as bitsandbytes tells devices apart
            stack.enter_context(products_of_a_card())
        attention = device_type(kind).attention
        if attention is not None:
            # Not a function mode: those are not asked in a backward, where blocks are recomputed.
            functional, name = torch.nn.functional, "scaled_dot_product_attention"
            stack.enter_context(replaced(functional, name, attention))
        yield mode


def fake_model(source: ModelSource, workload: Workload) -> nn.Module:
    """The source's model, of fake tensors on a CPU; call it inside `faking`."""
    if not workload.adapter:
        try:
            return source.build(workload)
        except (ProtrainError, UnknownBytesError, *_VALUES_ASKED):
            raise
        except Exception as error:  # any code of the user's
            if not _is_packing(error):
                raise ProtrainError(
                    f"the model cannot be built from tensors without values: {error}",
                    source=source.name,
                    fix="profile it on the device that it will run on",
                ) from error
    # peft moves its layers after making them, which fake parameters do not allow; and a packed
    # parameter has a class of its own, which fake ones cannot have.
    with unset_fake_temporarily():
        model = source.build(workload, device="meta")
    # Made inside `faking`, so that they are fake ones on a CPU.
    remake_tensors(model, lambda meta: torch.empty(meta.shape, dtype=meta.dtype))
    return model


def _is_packing(error: BaseException | None) -> bool:
    """Whether what failed was to make a packed parameter of a fake tensor."""
    while error is not None:
        if any(f"Tensor subclass {kind}" in str(error) for kind in ("Params4bit", "Int8Params")):
            return True
        error = error.__cause__ or error.__context__
    return False


def fake_batch(mode: FakeTensorMode, batch: Batch) -> Batch:
    """The batch with fake tensors of the same shapes and dtypes.

    Of integers and truths, such as token ids and masks, the values stay known (`values`).
    """
    tensors, rebuild = taken_apart(batch)
    if any(tensor.layout != torch.strided for tensor in tensors):
        raise UnknownBytesError.sparse("the batch")
    made: Batch = rebuild([know(mode.from_tensor(tensor), tensor) for tensor in tensors])
    return made


@contextmanager
def without_values(name: str) -> Iterator[None]:
    """A ProtrainError, naming the model, where its code asks for a tensor's values."""
    try:
        yield
    except UnknownBytesError as error:
        raise ProtrainError(
            str(error), source=name, fix="profile it on the device that it will run on"
        ) from error
    except _VALUES_ASKED as error:
        raise ProtrainError(
            f"the model's code depends on values of tensors, in {error.func}: "
            "what it does cannot be known without running it",
            source=name,
            fix="profile it on the device that it will run on",
        ) from error
