"""A model of fake tensors: built and run without memory for its parameters, or a device."""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from protrain_plan.errors import ProtrainError
from protrain_plan.models.batches import Batch
from protrain_plan.models.building import converted, replaced
from protrain_plan.models.sources import ModelSource
from protrain_plan.profiling.values import KnownValues, SparseError, know
from protrain_plan.records.hardware import DeviceKind
from protrain_plan.records.profile import DType, Precision
from protrain_runtime.compiled import uncompiled
from protrain_runtime.trees import taken_apart

_VALUES_ASKED = (DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def faking(kind: DeviceKind = "cpu") -> Iterator[FakeTensorMode]:
    """Tensors that are made inside are fake, on a CPU. Everything is as before afterwards.

    Compiled modules run uncompiled.

    Where they stand for tensors on CUDA, attention takes the kernels that it would take there.

    Values of small tensors that depend on no parameters stay known (`values`). Two things act as
    they do with real tensors, which PyTorch and transformers know to be fake:

    - transformers looks for packed sequences in the position ids; where it cannot, as in tracing,
      it makes a mask of all pairs of tokens. Batches here have one sequence per row: it looks, and
      there is no mask.
    - Recomputation saves the CPU's random state, a tensor that no operator makes.
    """
    mode = FakeTensorMode()
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        # What an operator refuses is raised; it would print a traceback besides.
        log = logging.getLogger("torch._subclasses.fake_tensor")
        stack.enter_context(replaced(log, "disabled", True))
        if importlib.util.find_spec("transformers") is not None:
            masking = importlib.import_module("transformers.masking_utils")
            looked = _looked(masking.find_packed_sequence_indices)
            stack.enter_context(replaced(masking, "find_packed_sequence_indices", looked))
        num_bytes = torch.get_rng_state().numel()
        stack.enter_context(
            replaced(torch, "get_rng_state", lambda: torch.empty(num_bytes, dtype=torch.uint8))
        )
        stack.enter_context(replaced(torch, "set_rng_state", lambda _: None))
        stack.enter_context(replaced(nn.Module, "_apply", converted))
        # Draws again what lies outside its bounds, and so looks at what it drew.
        stack.enter_context(replaced(nn.init, "_no_grad_trunc_normal_", _undrawn))
        stack.enter_context(mode)
        stack.enter_context(KnownValues())
        stack.enter_context(_GroupedProducts())  # type: ignore[no-untyped-call]
        if kind == "cuda":
            # Not a function mode: those are not asked in a backward, where blocks are recomputed.
            functional = torch.nn.functional
            name = "scaled_dot_product_attention"
            stack.enter_context(replaced(functional, name, _cuda_attention))
        yield mode


def fake_model(
    source: ModelSource, *, dtype: DType, precision: Precision, adapter: str, seed: int
) -> nn.Module:
    """The source's model, of fake tensors on a CPU; call it inside `faking`."""
    if not adapter:
        try:
            return source.build(dtype=dtype, precision=precision, seed=seed)
        except (ProtrainError, SparseError, *_VALUES_ASKED):
            raise
        except Exception as error:  # any code of the user's
            raise ProtrainError(
                f"the model cannot be built of tensors without values: {error}",
                source=source.name,
                fix="profile it on the device that it is to run on",
            ) from error
    # peft moves its layers after making them, which fake parameters do not allow.
    with unset_fake_temporarily():
        model = source.build(
            dtype=dtype, precision=precision, adapter=adapter, seed=seed, device="meta"
        )
    fakes: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in fakes:
                    fakes[parameter] = nn.Parameter(_unmade(parameter), parameter.requires_grad)
                module._parameters[name] = fakes[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _unmade(buffer)
    return model


def _unmade(meta: Tensor) -> Tensor:
    """A fake tensor on a CPU that is like one on `meta`."""
    return torch.empty(meta.shape, dtype=meta.dtype)


def fake_batch(mode: FakeTensorMode, batch: Batch) -> Batch:
    """The batch with fake tensors of the same shapes and dtypes.

    Of integers and truths, such as token ids and masks, the values stay known (`values`).
    """
    if isinstance(batch, Tensor):
        return know(mode.from_tensor(batch), batch)
    if isinstance(batch, Mapping):
        return {name: _fake(mode, value) for name, value in batch.items()}
    return tuple(_fake(mode, value) for value in batch)


@contextmanager
def without_values(name: str) -> Iterator[None]:
    """A ProtrainError, naming the model, where its code asks for a tensor's values."""
    try:
        yield
    except SparseError as error:
        raise ProtrainError(
            f"there are sparse tensors in {error}: what they take depends on their values",
            source=name,
            fix="profile it on the device that it is to run on",
        ) from error
    except _VALUES_ASKED as error:
        raise ProtrainError(
            f"the model's code depends on values of tensors, in {error.func}: "
            "what it does cannot be known without running it",
            source=name,
            fix="profile it on the device that it is to run on",
        ) from error


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    tensors, rebuild = taken_apart(value)
    if any(tensor.layout != torch.strided for tensor in tensors):
        raise SparseError("the batch")
    return rebuild([know(mode.from_tensor(tensor), tensor) for tensor in tensors])


def _looked(look: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
    """The same operators, whose results are some models' highest; it finds nothing."""

    def find_nothing(position_ids: Tensor) -> None:
        look(position_ids)

    return find_nothing


def _undrawn(tensor: Tensor, *_: object, **__: object) -> Tensor:
    """In place of an initialisation: a fake parameter has no values to draw."""
    return tensor


def _cuda_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Which attention keeps its scores on CUDA: read in PyTorch's sources, not tried on a device.

    The fused kernels there draw dropout themselves; on a CPU dropout means that scores are kept.
    In float32 none of them shares keys and values among heads (ATen/native/transformers/cuda/
    sdp_utils.cpp), so that grouped heads mean it there.
    """
    if kwargs.get("enable_gqa") and args[0].dtype == torch.float32:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(*args, **kwargs)
    return scaled_dot_product_attention(*args, **{**kwargs, "dropout_p": 0.0})


class _GroupedProducts(TorchDispatchMode):
    """Shapes of grouped matrix products in every dtype; PyTorch knows those of bfloat16 only."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func is torch.ops.aten._grouped_mm.default:
            left, right, offsets = args[:3] if len(args) > 2 else (*args, (kwargs or {})["offs"])
            if left.dim() == 2 and right.dim() == 2:  # one product per group of inner columns
                return left.new_empty(len(offsets), left.shape[0], right.shape[1])
            return left.new_empty(*left.shape[:-1], right.shape[-1])
        return func(*args, **(kwargs or {}))
