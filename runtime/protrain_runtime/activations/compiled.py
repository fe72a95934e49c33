"""Compiled modules: by `module.compile()`, or `torch.compile(block)` in place of the block.

A block compiled in place is called through its compiled code, which includes the module's hooks.
Watchers and wrappers therefore go around that code.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import finalize, ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.devices.lanes import overridden


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def code_of(module: nn.Module) -> Callable[..., Any]:
    """The code of the module's calls: compiled by `module.compile()`, or its forward."""
    compiled: Callable[..., Any] | None = module._compiled_call_impl
    return module.forward if compiled is None else compiled


def replace_code(module: nn.Module, code: Callable[..., Any]) -> Callable[[], None]:
    """Make calls of the module run `code`; returns the undo."""
    name = "_compiled_call_impl" if is_compiled_in_place(module) else "forward"
    return overridden(module, name, code)


def watch_calls(
    module: nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> Callable[[], None]:
    """Call `before` and `after` around the module's calls and compiled code; returns the undo.

    Forward hooks added later also run before `after`: they are part of the call.
    """
    if not is_compiled_in_place(module):
        stack = ExitStack()
        handle = module.register_forward_hook(after, with_kwargs=True)

        def at_call(called: nn.Module, *given: object) -> None:
            hooks: Any = called._forward_hooks  # an OrderedDict
            if handle.id in hooks and next(reversed(hooks)) != handle.id:
                hooks.move_to_end(handle.id)
            before(called, *given)

        stack.callback(module.register_forward_pre_hook(at_call, with_kwargs=True).remove)
        stack.callback(handle.remove)
        return stack.close
    code = code_of(module)

    def between(*args: object, **kwargs: object) -> object:
        before(module, args, kwargs)
        output: object = code(*args, **kwargs)
        after(module, args, kwargs, output)
        return output

    return replace_code(module, between)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules as plain ones inside, with the hooks of their parts."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes memory
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class CompiledBlock:
    """The code of a compiled block's calls, in place of its `_call_impl`.

    The whole block is one graph: graph breaks are refused, with their place. Equal blocks share one
    compilation, because PyTorch keeps compiled code with its source code (`Module._call_impl`), and
    treats parameters as inputs. Each shape is compiled separately.
    """

    def __init__(self, code: Callable[..., object], name: str, *, backend: str) -> None:
        self.name, self.backend = name, backend
        compiler: Any = torch.compile  # its stubs lack the limits
        self._code: Callable[..., object] = compiler(
            code, backend=backend, fullgraph=True, dynamic=False, recompile_limit=_MOST_COMPILATIONS
        )

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            return self._code(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            # With the innermost line outside PyTorch.
            library = f"{Path(torch.__file__).parent}{os.sep}"
            real_stack = getattr(error, "real_stack", None) or ()
            stack = [(frame.filename, frame.lineno) for frame in real_stack]
            outside = [place for place in stack if not place[0].startswith(library)] or stack
            source, line = outside[-1] if outside else (None, None)
            if source is not None and Path(source).is_relative_to(Path.cwd()):
                source = os.path.relpath(source)
            said = str(error).strip().partition("\n\n")[0]
            why = " ".join(text.strip() for text in said.splitlines()[:2])
            raise ProtrainError(
                f"the block {self.name} cannot be compiled as one graph: {why}",
                source=source,
                line=line,
                fix="change that line, or profile without --compile and plan again",
            ) from error
        except RuntimeError as error:
            if _NOTHING_COMPILED not in str(error):
                raise
            raise ProtrainError(
                f"the block {self.name} runs PyTorch's own modules only, which torch.compile skips",
                fix="give the block a class with a forward of your own, or profile without"
                " --compile",
            ) from error


_NOTHING_COMPILED = "found no compiled frames"
"""PyTorch's message if `fullgraph` finds nothing to compile, as in an `nn.Sequential`."""

_MOST_COMPILATIONS = 64
"""Graphs of a process's blocks: kinds of blocks, times shapes of batches, times two where the model
is evaluated, too. PyTorch's own limit is 8, beyond which it gives up."""


def compile_each(
    blocks: Mapping[str, nn.Module], *, backend: str = "inductor"
) -> Callable[[], None]:
    """Compile each block in place, at its first call; returns the undo."""
    stack = ExitStack()
    for name, block in blocks.items():
        code = CompiledBlock(block._call_impl, name, backend=backend)
        stack.callback(overridden(block, "_compiled_call_impl", code))
    return stack.close


def are_compiled(blocks: Mapping[str, nn.Module]) -> bool:
    """Whether all of these blocks are compiled; ProtrainError if only some are."""
    plain = [name for name, block in blocks.items() if not is_compiled(block)]
    if plain and len(plain) < len(blocks):
        other = next(name for name in blocks if name not in plain)
        raise ProtrainError(
            f"the block {other} is compiled, and the block {plain[0]} is not",
            fix="compile all blocks or none; the flag --compile of protrain profile does it",
        )
    return bool(blocks) and not plain


def backends_for_copy(model: nn.Module) -> dict[str, str]:
    """Backends by path of what `prepare` has compiled, before it has changed the modules' code."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        code = module._compiled_call_impl
        if isinstance(code, CompiledBlock):
            found[path] = code.backend
        elif code is not None:
            raise ProtrainError(
                f"{path} was compiled by the training script, and its plain copy would not be",
                key="check",
                fix="leave compiling to prepare: it compiles the blocks where the plan says so",
            )
    return found


def is_compiled(block: nn.Module) -> bool:
    """Whether a module is compiled, in place or by a module around it."""
    return is_compiled_in_place(block) or _is_optimized(block)


_EACH_BLOCK = "compile each block by itself: for block in ...: block.compile()"


def refuse_compiled_around(model: nn.Module, blocks: Iterable[nn.Module | None]) -> None:
    """ProtrainError if the model, or a module around a block, is compiled as a whole."""
    units = {block for block in blocks if block is not None}
    for path, module in model.named_modules():
        around = module is model or any(m in units for m in module.modules() if m is not module)
        if around and module not in units and is_compiled(module):
            raise ProtrainError(
                f"{path or 'the model'} is compiled as a whole, which hides its blocks",
                fix=_EACH_BLOCK,
            )


def refuse_wrapped(model: nn.Module, *, source: str | None = None) -> None:
    """ProtrainError if the model is a wrapper, which renames parameters."""
    if _is_optimized(model):
        raise ProtrainError("the model is compiled as a whole", source=source, fix=_EACH_BLOCK)
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise ProtrainError(
            f"the model is wrapped in {type(model).__name__}",
            source=source,
            fix="profile and prepare the model itself: a plan for several devices does what the"
            " wrapper does",
        )


def refuse_wrapping(model: nn.Module) -> Callable[[], None]:
    """Make `torch.compile(model)`, replicas and the like raise from now on; returns the undo."""
    planned = ref(model)  # PyTorch has one hook for all modules

    def registered(wrapper: nn.Module, _: str, module: nn.Module | None) -> None:
        if module is None or module is not planned():
            return
        if _is_optimized(wrapper):
            refuse(compiled)
        if isinstance(wrapper, DistributedDataParallel):
            refuse(
                "DistributedDataParallel around it would sum gradients that the plan has taken:"
                " plan with --num-devices"
            )

    def refuse(why: str, *_: object, **__: object) -> None:
        raise RuntimeError(f"the model follows a plan, and {why}")

    compiled = f"would be compiled as a whole: {_EACH_BLOCK}, before it is profiled"
    copied = (
        "torch.nn.DataParallel would call copies of it in several threads, which share its"
        " transfers: plan with --num-devices"
    )

    handle = register_module_module_registration_hook(registered)
    stack = ExitStack()
    stack.callback(handle.remove)
    stack.callback(finalize(model, handle.remove).detach)
    stack.callback(overridden(model, "compile", partial(refuse, compiled)))
    stack.callback(overridden(model, "_replicate_for_data_parallel", partial(refuse, copied)))
    return stack.close


def _is_optimized(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)
