"""Arguments by their names, however a call passes them."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from protrain_plan.hardware.operator_log import _READ
from protrain_plan.hardware.operators import CPU_WORKSPACES, CUDA_WORKSPACES
from protrain_plan.profiling.structure.faking import faking
from protrain_runtime.activations.compressed import _WEIGHTS
from protrain_runtime.activations.trees import named
from tests.support.operator_logs import looking
from tests.support.thinning import thinned

OPERATORS = sorted({*CPU_WORKSPACES, *CUDA_WORKSPACES, *_READ}, key=str)


def passed(values: dict[str, Any], keyword_only: set[str], rng: random.Random) -> Any:
    """The same call with some of the arguments by name, in any order."""
    names = list(values)
    most = next((n for n, name in enumerate(names) if name in keyword_only), len(names))
    by_place = rng.randint(0, most)
    rest = names[by_place:]
    rng.shuffle(rest)
    args = tuple(values[name] for name in names[:by_place])
    return args, {name: values[name] for name in rest}


@pytest.mark.nightly(but=("0", "3"))
@pytest.mark.parametrize("seed", range(5))
def test_an_inspected_operators_arguments_have_the_names_of_its_schema(seed: int) -> None:
    rng = random.Random(seed)
    for operator in (one for one in OPERATORS if not isinstance(one, str)):
        arguments = operator._schema.arguments
        defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        values = {a.name: object() for a in arguments}
        left_out = set(rng.sample(sorted(defaults), rng.randint(0, len(defaults))))
        first = next((n for n, a in enumerate(arguments) if a.name in left_out), len(arguments))
        behind = {a.name for a in arguments[first:] if a.kwarg_only or a.name not in left_out}
        keyword_only = behind | {a.name for a in arguments if a.kwarg_only}
        given = {name: value for name, value in values.items() if name not in left_out}
        args, kwargs = passed(given, keyword_only, rng)
        assert named(operator, args, kwargs) == defaults | given


@pytest.mark.nightly("addmm", "mm")
@pytest.mark.parametrize("function", _WEIGHTS, ids=lambda one: one.__name__)
def test_a_functions_weight_is_found_however_it_is_passed(function: Any) -> None:
    weight, rows = torch.ones(3, 3), torch.zeros(2, 3)
    names = {
        "linear": ("input", "weight"),
        "addmm": ("input", "mat1", "mat2"),
        "mm": ("input", "mat2"),
        "matmul": ("input", "other"),
    }[function.__name__]
    values = dict(zip(names, (torch.zeros(3), rows, weight)[-len(names) :], strict=True))
    for seed in range(8):
        args, kwargs = passed(values, set(), random.Random(seed))
        assert named(function, args, kwargs)[_WEIGHTS[function]] is weight
        function(*args, **kwargs)  # PyTorch takes it, too


def attention_of(args: Any, kwargs: Any) -> list[str]:
    """The operators of an attention on fake tensors for a card."""
    seen: list[str] = []
    with faking("cuda") as mode:
        args, kwargs = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda one: mode.from_tensor(one).requires_grad_(), (args, kwargs)
        )
        with looking(lambda func, *_: seen.append(str(func))):
            functional.scaled_dot_product_attention(*args, **kwargs)
    return seen


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize("seed", thinned(range(24), every=4))
def test_attention_is_replaced_however_it_is_called(seed: int) -> None:
    rng = random.Random(seed)
    heads, grouped = 4, rng.random() < 0.3
    dtype = rng.choice([torch.float32, torch.bfloat16])
    shape: Callable[[int], tuple[int, ...]] = lambda n: (2, n, 8, 16)  # noqa: E731
    values: dict[str, Any] = {
        "query": torch.zeros(shape(heads), dtype=dtype),
        "key": torch.zeros(shape(2 if grouped else heads), dtype=dtype),
        "value": torch.zeros(shape(2 if grouped else heads), dtype=dtype),
        "attn_mask": rng.choice([None, torch.zeros(8, 8, dtype=dtype)]),
        "dropout_p": rng.choice([0.0, 0.1]),
        "is_causal": False,
        "scale": rng.choice([None, 0.5]),
        "enable_gqa": grouped,
    }
    expected = attention_of((), values)
    assert expected
    for _ in range(4):
        assert attention_of(*passed(values, {"scale", "enable_gqa"}, rng)) == expected
