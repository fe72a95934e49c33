"""A batch larger than the planned one is refused before it takes memory."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from protrain_plan.records.profile import Workload
from protrain_runtime.trees import tensors_in


def refuse_larger_batches(model: nn.Module, workload: Workload) -> Callable[[], None]:
    """Let training calls raise where there is more in them than was planned; returns the undo.

    Either way: more sequences, or longer ones. Smaller batches are welcome, and so is any size
    where no graph is recorded. Of a factory's batches, every tensor is compared with that of the
    same argument in the profiled batch; arguments that this one had not are not looked at. Where
    images come with tokens, only sequences count: tokens that stand for images are among them.
    """
    if workload.model_config:
        check = _tokens_within(workload)
    elif workload.inputs:
        check = _inputs_within(model, workload.inputs)
    else:
        return lambda: None

    def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if torch.is_grad_enabled():
            check(args, kwargs)

    return model.register_forward_pre_hook(hook, with_kwargs=True).remove


def with_batch_sizes(workload: Workload, model: nn.Module, batch: object) -> Workload:
    """The workload with the sizes of a factory's batch; a configuration's batches have its own.

    `batch_size` is the first dimension of the first tensor in it that has one. `seq_len` is the
    second of the first tensor of integers with two dimensions and as many rows, which are token ids
    [batch, tokens]; else of the first tensor with three, features [batch, sequence, width]; 1 where
    there is neither.
    """
    if workload.model_config:
        return workload
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = {}
    if isinstance(batch, Mapping):
        kwargs = batch
    else:
        args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    sizes = _sizes(inspect.signature(model.forward), args, kwargs)
    batch_size, seq_len = _batch_and_sequence([t for t in tensors_in(batch) if t.dim()])
    return replace(
        workload,
        inputs=tuple(f"{name} {_product(size)}" for name, size in sizes),
        batch_size=batch_size,
        seq_len=seq_len,
    )


def _batch_and_sequence(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    batch_size = tensors[0].shape[0] if tensors else 1
    rows = [tensor for tensor in tensors if tensor.shape[0] == batch_size]
    tokens = [t for t in rows if t.dim() == 2 and not (t.is_floating_point() or t.is_complex())]
    features = [t for t in rows if t.dim() == 3]
    found = [*tokens, *features]
    return max(1, batch_size), max(1, found[0].shape[1]) if found else 1


Check = Callable[[tuple[object, ...], Mapping[str, object]], None]


def _tokens_within(workload: Workload) -> Check:
    most = (workload.batch_size, workload.seq_len)

    def check(args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
            return
        longer = tokens.shape[1] > most[1] and "pixel_values" not in kwargs
        if tokens.shape[0] > most[0] or longer:
            raise _too_large(f"is {tokens.shape[0]} x {tokens.shape[1]} tokens", most)

    return check


def _inputs_within(model: nn.Module, inputs: tuple[str, ...]) -> Check:
    signature = inspect.signature(model.forward)
    planned: dict[str, tuple[int, ...]] = {}
    for name, _, size in (line.rpartition(" ") for line in inputs):
        planned[name] = tuple(int(length) for length in size.split("x"))

    def check(args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        for name, size in _sizes(signature, args, kwargs):
            most = planned.get(name)
            if most is None or len(size) != len(most):
                continue
            if any(length > limit for length, limit in zip(size, most, strict=True)):
                raise _too_large(f"has {' x '.join(map(str, size))} in {name!r}", most)

    return check


def _too_large(what: str, most: tuple[int, ...]) -> RuntimeError:
    return RuntimeError(
        f"the batch {what}, and the plan was made for at most {' x '.join(map(str, most))}: it"
        " would take more memory than planned. Profile and plan the largest batch"
    )


def _sizes(
    signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors in a call by argument, however it was passed; not those of a single number."""
    try:
        arguments = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call itself will say what is wrong
        return
    for name, argument in arguments.items():
        for path, leaf in tree_flatten_with_path(argument)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                yield f"{name}{keystr(path)}".replace(" ", ""), tuple(leaf.shape)


def _product(size: tuple[int, ...]) -> str:
    return "x".join(str(length) for length in size)
