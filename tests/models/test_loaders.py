"""Batches that end: what every kind of iterable that a factory may return is to each command."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.planning.outcome import Solved
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import Budgets, Plan
from protrain_runtime.contract.records.profile import Profile
from tests.support.estimates import estimates
from tests.support.hostile_models import WORKLOAD, Chain, Hostile
from tests.support.judging import profiled
from tests.support.messages import Speaker
from tests.support.planning_cases import plan
from tests.support.runtime_cases import profiled_here
from tests.support.thinning import thinned
from tests.support.trained import train

WIDTH, ROWS = 8, 4
PLENTY = Budgets(device=10**12, host=0, disk=0)


def net() -> nn.Module:
    return Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def batches(count: int) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(count)
    return [(torch.randn(ROWS, WIDTH, generator=generator),) for _ in range(count)]


class Stream(IterableDataset[Tensor]):
    """Begins where it ended."""

    def __init__(self, count: int) -> None:
        self.rest = iter([row for (batch,) in batches(count) for row in batch])

    def __iter__(self) -> Iterator[Tensor]:
        return self.rest


class Again:
    """Can be iterated again, and says nothing else."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        yield from batches(self.count)


def rows(count: int, more: int) -> DataLoader[Any]:
    """Batches, the last one of `more` rows, where that is not 0."""
    return DataLoader(TensorDataset(torch.randn(ROWS * count + more, WIDTH)), batch_size=ROWS)


KINDS: dict[str, tuple[Callable[[int], Iterable[Any]], bool]] = {
    "list": (batches, True),
    "tuple": (lambda count: tuple(batches(count)), True),
    "loader": (lambda count: rows(count, 0), True),
    "loader with an incomplete batch": (lambda count: rows(count - 1, 1), True),
    "iterable": (Again, True),
    "iterator": (lambda count: iter(batches(count)), False),
    "generator": (lambda count: (batch for batch in batches(count)), False),
    "iterator of a loader": (lambda count: iter(rows(count, 0)), False),
    "loader of a stream": (lambda count: DataLoader(Stream(count), batch_size=ROWS), False),
}
"""By its kind what makes an iterable of so many batches, and whether that begins again."""


def made() -> tuple[nn.Module, Iterable[Any]]:
    make, _ = KINDS[asked["kind"]]
    return net(), make(asked["count"])


asked: dict[str, Any] = {}


def source_of(kind: str, count: int) -> str:
    asked.update(kind=kind, count=count)
    return f"{__name__}:made"


def estimated(source: str) -> list[Profile]:
    machines = [load_hardware("cpu")]
    options: Any = {"batch_size": ROWS, "seq_len": WIDTH, "dtype": "float32"}
    return estimates(load_source(source), machines=machines, **options)


def bytes_of(profile: Profile) -> list[object]:
    return [
        (unit.name, cost.form, cost.kept_bytes, cost.forward_peak_bytes, cost.backward_peak_bytes)
        for unit in profile.units
        for cost in unit.forms
    ]


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Plan]:
    """A plan for batches of a list, which never ends."""
    workload = replace(WORKLOAD, model=source_of("list", 1))
    subject = Hostile(net, batch=lambda _: batches(1)[0], workload=workload)
    profile = profiled(subject, tmp_path_factory.mktemp("spill"))
    answer = plan(profile, PLENTY)
    assert isinstance(answer, Solved)
    return profile, answer.plan


@pytest.mark.nightly("list", "iterable", "loader of a stream")
@pytest.mark.parametrize("kind", thinned(list(KINDS), every=4))
def test_a_profile_needs_one_batch_of_any_iterable(
    kind: str, solved: tuple[Profile, Plan], tmp_path: Path
) -> None:
    """The bytes are those of a list without end, whatever ends or is smaller."""
    source = source_of(kind, 2)
    assert bytes_of(profiled_here(source, tmp_path, num_steps=3)) == bytes_of(solved[0])
    (found,) = estimated(source)
    (expected,) = estimated(source_of("list", 1))
    assert bytes_of(found) == bytes_of(expected)


@pytest.mark.nightly(but=("generator",))
@pytest.mark.parametrize("kind", KINDS)
def test_training_begins_a_loader_again_and_says_what_an_iterator_lacks(
    kind: str, solved: tuple[Profile, Plan], assert_says: Speaker, tmp_path: Path
) -> None:
    source_of(kind, 3)

    def losses(num_steps: int) -> tuple[float, ...]:
        options: dict[str, Any] = {"text": None, "spill_directory": tmp_path}
        plain = train(solved[1], num_steps=num_steps, plain=True, **options)
        planned = train(solved[1], num_steps=num_steps, plain=False, **options)
        assert plain.losses == planned.losses
        return planned.losses

    assert len(losses(3)) == 3
    if KINDS[kind][1]:
        assert len(losses(8)) == 8
        return
    assert_says.refused(losses, 8)


@pytest.mark.nightly(but=("list",))
@pytest.mark.parametrize("kind", ["list", "generator", "loader of a stream"])
def test_no_batches_are_an_error(kind: str, solved: tuple[Profile, Plan], tmp_path: Path) -> None:
    source = source_of(kind, 0)
    with pytest.raises(ProtrainError, match="there are no batches"):
        profiled_here(source, tmp_path)
    with pytest.raises(ProtrainError, match="there are no batches"):
        estimated(source)
    with pytest.raises(ProtrainError, match="the factory returned 0 batches, but training needs 2"):
        train(solved[1], num_steps=2, plain=True, spill_directory=tmp_path)
