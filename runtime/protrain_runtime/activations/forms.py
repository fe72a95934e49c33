"""Executors: what runs a block's forward so that its activations wait in a form.

`contract.records.forms.FORMS` names one for every form. An executor takes the code of a block's
forward and the block's module, and returns the code that runs instead: it may run the forward again
in backward (`recompute`), or stand around it with hooks of its own that keep something else in
place of what autograd saves. Such hooks hand what they keep to `outer_hooks()`, so that it can be
swapped, and the buffers of offloaded parameters go, as without them. Profiler and runtime wrap
blocks in the same way, so that a profile's bytes and seconds are a run's.

The last part is no module: the executor of a form for it returns a context, which stands around
what runs there (`around`).
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
    """Return code in place of `forward`, that of `module`, so that its activations wait so."""
    executor: Executor = _imported(FORMS[form].executor)
    return executor(forward, module)


def wrap_forward(module: nn.Module, form: Form) -> Callable[[], None]:
    """Keep the module's activations in `form` in every call; returns the undo."""
    if form == "keep":
        return lambda: None
    return replace_code(module, in_form(form, code_of(module), module))


def around(form: Form) -> AbstractContextManager[object]:
    """A context around the forward of the last part, whose activations wait in `form`."""
    if FORMS[form].of != "last part":
        return nullcontext()
    context: AbstractContextManager[object] = _imported(FORMS[form].executor)()
    return context


Hooks = tuple[Callable[[torch.Tensor], object], Callable[[object], torch.Tensor]]


def outer_hooks() -> Hooks:
    """The active saved-tensor hooks (pack, unpack): autograd calls none around the innermost."""
    active: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if active is not None:
        return active
    # Detached: the tensor itself would hold the graph that holds it.
    return torch.Tensor.detach, lambda kept: cast(torch.Tensor, kept)
