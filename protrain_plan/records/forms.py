"""Activation options: in which forms a block's activations can wait for backward, one entry each.

An entry names the code that carries the form out. Everything else reads this table: the profiler
measures every form of it, the planner offers what a profile has measured, plans and messages name
it, and the runtime runs it. A new option is one file, with its executor, and one entry here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationForm:
    """One form: what is kept of a block's activations, and how the rest comes back.

    `executor` is `package.module:function`, imported when a block is to run in the form (records
    import no PyTorch). The function takes the code of a block's forward and the module, and returns
    the code that runs instead; see `protrain_runtime.activations.forms`. `recomputes` says
    whether the forward runs once more in backward: plans say `recompute NAME` then, and `keep NAME`
    otherwise. A form that is not `exact` changes what training computes: it is used only with leave
    (`protrain plan --allow NAME`), and its plans say `exact: false`.
    """

    name: str
    keeps: str  # in words
    executor: str
    recomputes: bool = True
    exact: bool = True


_SELECTIVE = "protrain_runtime.activations.selective_recompute"

_BUILT_IN = (
    ActivationForm(name="keep", keeps="all that autograd saves", executor="", recomputes=False),
    ActivationForm(
        name="lite",
        keeps="all but what is cheap to compute again: norms, activation functions, element-wise"
        " operators, low-rank products",
        executor=f"{_SELECTIVE}:lite",
    ),
    ActivationForm(
        name="mlp", keeps="what lite keeps, without the MLP", executor=f"{_SELECTIVE}:mlp"
    ),
    ActivationForm(
        name="attn",
        keeps="the input, q, k, v and the attention's output",
        executor=f"{_SELECTIVE}:attn",
    ),
    ActivationForm(
        name="full",
        keeps="the unit's input alone",
        executor="protrain_runtime.activations.recompute:full",
    ),
)

FORMS: dict[str, ActivationForm] = {form.name: form for form in _BUILT_IN}
"""All forms by name: those that keep first, then those that recompute, `full` as the last one."""
