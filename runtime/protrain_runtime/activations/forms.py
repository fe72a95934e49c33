"""Executors: code around a block's forward that keeps its activations in a form.

`contract.records.forms.FORMS` names one for every form. An executor takes a block's forward and
module, and returns the code to run instead: it may rerun the forward in backward (`recompute`), or
surround it with hooks that replace autograd's saved tensors. Such hooks pass their tensors to
`outer_hooks()`, so that these can be swapped, and offloaded parameters' buffers freed, as without
them. Profiler and runtime wrap blocks in the same way: a profile's bytes and seconds are a run's.

The last part is not a module: the executor of its form returns a context (`around`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn

from protrain_runtime.activations.compiled import code_of, replace_code
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.profile import Form

Code = Callable[..., object]
"""The code of a module's calls."""
Executor = Callable[[Code, nn.Module], Code]


@cache
def _imported(executor: str) -> Any:
    module, _, name = executor.partition(":")
    return getattr(import_module(module), name)


def in_form(form: Form, forward: Code, module: nn.Module) -> Code:
    """The code that replaces the module's `forward`, with activations in `form`."""
    executor: Executor = _imported(FORMS[form].executor)
    return executor(forward, module)


def wrap_forward(module: nn.Module, form: Form) -> Callable[[], None]:
    """Keep the module's activations in `form` in every call; returns the undo."""
    if form == "keep":
        return lambda: None
    return replace_code(module, in_form(form, code_of(module), module))


def around(form: Form) -> AbstractContextManager[object]:
    """A context around the last part's forward, with activations in `form`."""
    if FORMS[form].of != "last part":
        return nullcontext()
    context: AbstractContextManager[object] = _imported(FORMS[form].executor)()
    return context


Hooks = tuple[Callable[[torch.Tensor], object], Callable[[object], torch.Tensor]]


def outer_hooks() -> Hooks:
    """The active saved-tensor hooks (pack, unpack): autograd calls only the innermost."""
    active: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if active is not None:
        return active
    # Detached: the tensor itself would keep the graph alive that holds it.
    return torch.Tensor.detach, lambda kept: cast(torch.Tensor, kept)
