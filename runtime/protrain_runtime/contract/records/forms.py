"""Activation options: in which forms a unit's activations can wait for backward, one entry each.

An entry names the code that carries the form out. Everything else reads this table: the profiler
measures every form of it, the planner offers what a profile has measured, plans and messages name
it, and the runtime runs it. A new option is one file, with its executor, and one entry here.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Literal, get_args

Exactness = Literal["bitwise", "host rounding", "rounding", "approximate"]
"""Grades of difference between training and plain PyTorch: none; in the last bits of optimizer
steps that the host's kernels take by the same formula; in the order of sums and the rounding of
their parts, so that it has the same expectation from the reals; or by what is left out of the
numbers themselves."""

ROUNDING: Final = "rounding"
"""The grade of sums in another order, and the word for `--allow` of all that has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationForm:
    """One form: what is kept of a unit's activations, and how the rest comes back.

    `executor` is `package.module:function`, imported when a unit is to run in the form (records
    import no PyTorch). The function takes the code of a block's forward and the module, and returns
    the code that runs instead; see `protrain_runtime.activations.forms`. The last part is no
    module: the executor of a form of it takes nothing, and returns a context to stand around what
    runs there. `recomputes` says whether the forward runs once more in backward: plans say
    `recompute NAME` then, and `keep NAME` otherwise. A form that is not `bitwise` changes what
    training computes: it is profiled and used only by opt-in (`--allow`), and its plans say
    `exact: false`, and how exact they are. One that `looks_inside` goes by the operators or modules
    in a block: of a compiled block these are gone, so that it is not for such blocks. One that is
    `in_graph` is a part of what is compiled, and for compiled blocks alone.
    """

    name: str
    keeps: str  # for messages
    executor: str
    recomputes: bool = True
    exactness: Exactness = "bitwise"
    of: Literal["blocks", "last part"] = "blocks"  # besides `keep`, which all units have
    looks_inside: bool = False
    in_graph: bool = False

    @property
    def opt_in(self) -> str:
        """The word for `--allow`: one word for all that rounds, one each for what is less."""
        match self.exactness:
            case "bitwise" | "host rounding":
                return ""
            case "rounding":
                return ROUNDING
            case "approximate":
                return f"{self.name}-activations"


_COMPRESSED = "protrain_runtime.activations.compressed"
_SELECTIVE = "protrain_runtime.activations.selective_recompute"

_BUILT_IN = (
    ActivationForm(name="keep", keeps="all that autograd saves", executor="", recomputes=False),
    ActivationForm(
        name="in place",
        keeps="the logits, and nothing that a cross entropy makes of them: it takes a few rows at a"
        " time, and writes their gradient over them",
        executor="protrain_runtime.activations.tiled_loss:loss_in_place",
        recomputes=False,
        of="last part",
    ),
    *(
        ActivationForm(
            name=f"{number} tiles",
            keeps="its input, and a number for every token: logits are computed in so many tiles,"
            " once for the loss and once more for its gradient, and never stand as a whole",
            executor=f"protrain_runtime.activations.tiled_loss:in_{number}_tiles",
            recomputes=False,
            exactness="rounding",
            of="last part",
        )
        for number in (8, 64)
    ),
    ActivationForm(
        name="int8",
        keeps="int8 copies of the activations that autograd saves, with a scale for every 256",
        executor=f"{_COMPRESSED}:int8",
        recomputes=False,
        exactness="approximate",
    ),
    ActivationForm(
        name="low-rank",
        keeps="all that autograd saves, but of the inputs of linear layers random projections on a"
        " quarter of their features",
        executor=f"{_COMPRESSED}:low_rank",
        recomputes=False,
        exactness="approximate",
        looks_inside=True,
    ),
    ActivationForm(
        name="lite",
        keeps="all but what is cheap to compute again: norms, activation functions, element-wise"
        " operators, low-rank products",
        executor=f"{_SELECTIVE}:lite",
        looks_inside=True,
    ),
    ActivationForm(
        name="mlp",
        keeps="what lite keeps, without the MLP",
        executor=f"{_SELECTIVE}:mlp",
        looks_inside=True,
    ),
    ActivationForm(
        name="attn",
        keeps="the input, q, k, v and the attention's output",
        executor=f"{_SELECTIVE}:attn",
        looks_inside=True,
    ),
    ActivationForm(
        name="tiled",
        keeps="the unit's input alone, and in backward what its MLP saves of a few tokens",
        executor="protrain_runtime.activations.tiled_mlp:tiled",
        exactness="rounding",
        looks_inside=True,
    ),
    ActivationForm(
        name="fused",
        keeps="the unit's input alone: its compiled backward computes what it needs of the forward",
        executor="protrain_runtime.activations.recompute:fused",
        exactness="rounding",
        in_graph=True,
    ),
    ActivationForm(
        name="full",
        keeps="the unit's input alone",
        executor="protrain_runtime.activations.recompute:full",
    ),
)

FORMS: dict[str, ActivationForm] = {form.name: form for form in _BUILT_IN}
"""All forms by name: those that keep first, then those that recompute, `full` as the last one."""


PLAN_AGAIN = "plan again: protrain plan"
"""The fix for a plan that was edited to something that cannot be."""


def misfit(name: str, *, compiled: bool) -> str:
    """Why blocks cannot take a form, to follow its name; empty if they can."""
    form = FORMS[name]
    if compiled and form.looks_inside:
        return "goes by the operators inside a block, and compiled blocks show none"
    if form.in_graph and not compiled:
        return "is a part of a block's compiled code, and these blocks are not compiled"
    return ""


def opt_ins_of(names: Collection[str]) -> tuple[str, ...]:
    """List the words for `--allow` of such forms, in order."""
    asked = (form.opt_in for form in FORMS.values() if form.opt_in and form.name in names)
    return tuple(dict.fromkeys(asked))


def allowed_forms(allow: Collection[str], *, compiled: bool = False) -> tuple[str, ...]:
    """Forms that are bitwise or have one of these opt-ins, and fit compiled blocks or others."""
    return tuple(
        name
        for name, form in FORMS.items()
        if (not form.opt_in or form.opt_in in allow) and not misfit(name, compiled=compiled)
    )


def least_exact(grades: Iterable[Exactness]) -> Exactness:
    """The grade of training with parts of these grades."""
    return max(grades, key=get_args(Exactness).index, default="bitwise")


def names_of(units: Literal["blocks", "last part"]) -> tuple[str, ...]:
    """The forms besides `keep` of such units, in order."""
    return tuple(name for name, form in FORMS.items() if name != "keep" and form.of == units)
