"""Random models under random plans, with lanes late at random: the bits of plain PyTorch."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.random_models import (
    Shape,
)
from tests.support.random_training import assert_trains_like_plain, shapes, steady


@settings(steady, max_examples=20)
@given(shapes(), st.integers(0, 2**32))
def test_random_models_train_like_plain(shape: Shape, seed: int) -> None:
    with TemporaryDirectory() as folder:
        assert_trains_like_plain(shape, seed, Path(folder))


@pytest.mark.slow
@settings(steady, max_examples=400, derandomize=False, database=None)
@given(shapes(), st.integers(0, 2**32))
def test_hundreds_of_random_models_train_like_plain(shape: Shape, seed: int) -> None:
    with TemporaryDirectory() as folder:
        assert_trains_like_plain(shape, seed, Path(folder))
