"""Compiled modules: `module.compile()` of a block, `torch.compile(block)` in its place.

A block that was compiled in place is called through its compiled code, which holds the module's
hooks too. What watches or wraps it therefore stands around that code, and not inside.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import finalize, ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from protrain_plan.errors import ProtrainError


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def has_compiled(module: nn.Module) -> bool:
    """Whether the module or one inside it is compiled, in place or as a module around it."""
    return any(is_compiled_in_place(one) or _is_optimized(one) for one in module.modules())


def code_of(module: nn.Module) -> Callable[..., Any]:
    """What a call of the module runs: the code that `module.compile()` made, or its forward."""
    compiled: Callable[..., Any] | None = module._compiled_call_impl
    return module.forward if compiled is None else compiled


def replace_code(module: nn.Module, code: Callable[..., Any]) -> Callable[[], None]:
    """Let calls of the module run `code`; returns what undoes it.

    An instance may have a forward of its own already, and has it again afterwards; where it has
    none, the class's shows again.
    """
    name = "_compiled_call_impl" if is_compiled_in_place(module) else "forward"
    own = module.__dict__.get(name)
    setattr(module, name, code)

    def undo() -> None:
        if own is None:
            delattr(module, name)
        else:
            setattr(module, name, own)

    return undo


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled modules run as plain ones inside, hooks of their parts included."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading it takes memory
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


_EACH_BLOCK = "compile each block by itself: for block in ...: block.compile()"


def refuse_compiled_around(model: nn.Module, blocks: Iterable[nn.Module | None]) -> None:
    """ProtrainError where the model, or a module around one of its blocks, is compiled as one."""
    units = {block for block in blocks if block is not None}
    for path, module in model.named_modules():
        around = module is model or any(m in units for m in module.modules() if m is not module)
        compiled = is_compiled_in_place(module) or _is_optimized(module)
        if around and module not in units and compiled:
            raise ProtrainError(
                f"{path or 'the model'} is compiled as a whole, so that its blocks cannot be told"
                " apart",
                fix=_EACH_BLOCK,
            )


def refuse_wrapped(model: nn.Module) -> None:
    """ProtrainError where the model is a wrapper, which gives the parameters other names."""
    if _is_optimized(model):
        raise ProtrainError("the model is compiled as a whole", fix=_EACH_BLOCK)
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise ProtrainError(
            f"the model is wrapped in {type(model).__name__}",
            fix="prepare the model itself: a plan for several devices does what the wrapper does",
        )


def refuse_wrapping(model: nn.Module) -> Callable[[], None]:
    """Let `torch.compile(model)`, replicas and the like raise from now on; returns the undo."""
    planned = ref(model)  # PyTorch keeps the hook for all modules there are

    def registered(wrapper: nn.Module, _: str, module: nn.Module | None) -> None:
        if module is None or module is not planned():
            return
        if _is_optimized(wrapper):
            refuse()
        if isinstance(wrapper, DistributedDataParallel):
            raise RuntimeError(
                "the model follows a plan, and DistributedDataParallel around it would sum"
                " gradients that the plan has taken: plan with --num-devices"
            )

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(
            f"the model follows a plan, and would be compiled as a whole: {_EACH_BLOCK}, before it"
            " is profiled"
        )

    def refuse_replicas() -> None:
        raise RuntimeError(
            "the model follows a plan, and torch.nn.DataParallel would call copies of it in several"
            " threads, which share its transfers: plan with --num-devices"
        )

    handle = register_module_module_registration_hook(registered)
    last_resort = finalize(model, handle.remove)
    model.__dict__["compile"] = refuse
    model.__dict__["_replicate_for_data_parallel"] = refuse_replicas

    def undo() -> None:
        last_resort.detach()
        handle.remove()
        model.__dict__.pop("compile", None)
        model.__dict__.pop("_replicate_for_data_parallel", None)

    return undo


def _is_optimized(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)
