"""Plans against plain PyTorch, bit for bit, over everything that a training run may combine.

Every two values of two factors meet in some row: an activation decision with a precision, a tier
with an optimizer, a schedule with a way to resume. Each row trains five steps.
"""

import itertools
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cards import every_device
from tests.support.pairwise import Row, allowed_pairs, covering_rows, pairs_of
from tests.support.parity_rows import FACTORS, IMPOSSIBLE, ROWS, assert_row
from tests.support.random_models import Shape, assert_trains_like_plain, shapes, steady
from tests.support.training_rows import PACKED


@pytest.mark.nightly
def test_rows_cover_every_pair_that_is_possible() -> None:
    """By the definition: what is not covered is impossible by a reason of its own."""
    covered = set().union(*(pairs_of(row, FACTORS) for row in ROWS))
    for one, other in itertools.combinations(FACTORS, 2):
        for pair in itertools.product(
            [(one, value) for value in FACTORS[one]], [(other, value) for value in FACTORS[other]]
        ):
            assert pair in covered or any(each.holds(dict(pair)) for each in IMPOSSIBLE), pair
    assert covered == set(allowed_pairs(FACTORS, IMPOSSIBLE))
    assert not any(each.holds(row) for row in ROWS for each in IMPOSSIBLE)
    assert covering_rows(FACTORS, IMPOSSIBLE, costly=("compiled",)) == ROWS
    for each in IMPOSSIBLE:
        assert all(set(values) < set(FACTORS[factor]) for factor, values in each.values.items())


COMPILED = [number for number, row in enumerate(ROWS) if row["compiled"] != "no"]
QUICK = {*range(0, len(ROWS), 12)} - {*COMPILED}
"""One row in twelve is trained for every change, all of them, and what is compiled, every night."""


@pytest.mark.nightly("0", "24", "36")
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=str(number), marks=() if number in QUICK else pytest.mark.slow)
        for number, row in enumerate(ROWS)
    ],
)
def test_five_steps_match_plain_torch_bitwise(row: Row, tmp_path: Path) -> None:
    assert_row(row, tmp_path)


@pytest.mark.nightly
def test_packed_products_are_recomputed_under_autocast_bitwise(tmp_path: Path) -> None:
    """A package's kernel calls operators that autocast casts, also beneath a form's mode."""
    pytest.importorskip("bitsandbytes")
    row = next(r for r in ROWS if r["trained"] == PACKED and r["optimizer"] == "sgd")
    form = {"activations": "recompute", "form": "lite", "precision": "autocast"}
    assert_row({**row, **form, "model": "llama", "resumed": "no"}, tmp_path)


INDUCED = [
    row for row in ROWS if row["compiled"] == "aot_eager" and row["model"].startswith("llama")
]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("row", INDUCED, ids=[str(number) for number in range(len(INDUCED))])
def test_rows_that_inductor_compiles_match_compiled_torch_bitwise(row: Row, tmp_path: Path) -> None:
    assert_row({**row, "compiled": "inductor"}, tmp_path)


# --- random models, with lanes late at random -----------------------------------------------------


@every_device
@settings(steady, max_examples=3)
@given(shapes, st.integers(0, 2**32))
def test_random_models_train_like_plain(shape: Shape, seed: int) -> None:
    with TemporaryDirectory() as folder:
        assert_trains_like_plain(shape, seed, Path(folder))


@every_device
@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(4))
@settings(steady, max_examples=100, derandomize=False, database=None)
@given(shapes, st.integers(0, 2**32))
def test_hundreds_of_random_models_train_like_plain(hundred: int, shape: Shape, seed: int) -> None:
    with TemporaryDirectory() as folder:
        assert_trains_like_plain(shape, seed, Path(folder))
