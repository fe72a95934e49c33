"""Compiled modules: `module.compile()` of a block, `torch.compile(block)` in its place.

A block that was compiled in place is called through its compiled code, which holds the module's
hooks too. What watches or wraps it therefore stands around that code, and not inside.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from protrain_plan.errors import ProtrainError


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


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


def refuse_compiled_around(model: nn.Module, blocks: Iterable[nn.Module | None]) -> None:
    """ProtrainError where the model, or a module around one of its blocks, is compiled as one."""
    units = {block for block in blocks if block is not None}
    for path, module in model.named_modules():
        around = module is model or any(m in units for m in module.modules() if m is not module)
        if around and module not in units and _is_compiled(module):
            raise ProtrainError(
                f"{path or 'the model'} is compiled as a whole, so that its blocks cannot be told"
                " apart",
                fix="compile each block by itself: for block in ...: block.compile()",
            )


def refuse_wrapped(model: nn.Module) -> None:
    """ProtrainError where the model is inside a wrapper, which gives its parameters other names."""
    dynamo = sys.modules.get("torch._dynamo")
    compiled = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    if compiled or isinstance(model, DataParallel | DistributedDataParallel):
        what = "torch.compile" if compiled else type(model).__name__
        way = (
            "compile each block by itself: for block in ...: block.compile()"
            if compiled
            else "prepare the model itself: a plan for several devices does what the wrapper does"
        )
        raise ProtrainError(f"the model is wrapped by {what}, and a plan is for the model", fix=way)


def _is_compiled(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo")
    return is_compiled_in_place(module) or (
        dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    )
