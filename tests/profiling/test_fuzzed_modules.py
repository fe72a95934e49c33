"""Random modules: each trains like plain PyTorch and below the predicted peak, or is refused."""

import pytest

from tests.support.fuzzed_modules import fuzzed, source
from tests.support.judging import PLANS, judged


def assert_right(seed: int) -> None:
    verdicts = judged(fuzzed, seed, plans=PLANS, seed=seed)
    wrong = [f"{each.under}: {each.text}" for each in verdicts if each.kind == "wrong"]
    assert not wrong, "\n".join([*wrong, f"seed {seed}:", source(seed)])


@pytest.mark.parametrize("seed", range(1))
def test_random_modules_train_like_plain_or_are_refused(seed: int) -> None:
    assert_right(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 100))
def test_a_hundred_random_modules_train_like_plain_or_are_refused(seed: int) -> None:
    assert_right(seed)


def test_most_random_modules_are_trained_by_plain_pytorch() -> None:
    """Else nothing would be asked of the others."""
    built = [fuzzed(seed).build() for seed in range(20)]
    assert len({source(seed) for seed in range(20)}) == 20
    assert all(sum(1 for _ in model.parameters()) > 4 for model in built)
