"""Models whose buffers get their size or are made in the first forward, and split optimizers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.models.sources import load_source
from protrain_plan.profiling.structure.discovery import undisturbed
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.diagnostics.matching import model_fingerprint
from protrain_runtime.states.update_rules import UpdateRules
from tests.support.estimates import estimate, machine
from tests.support.hostile_models import Chain

WIDTH = 16


class Observed(nn.Module):
    """A linear layer that keeps the largest input of each feature."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)
        self.first = True
        if how in BUFFERS:
            self.register_buffer("seen", BUFFERS[how]())

    def forward(self, x: Tensor) -> Tensor:
        OBSERVE[self.how](self, x.detach().abs().amax((0, 1)))
        result: Tensor = x + self.linear(x) * self.seen.mean()  # type: ignore[operator]
        return result


def resized(module: Any, now: Tensor) -> None:
    if module.seen.numel() == 0:
        module.seen.resize_(now.shape).copy_(now)
    else:
        module.seen.copy_(torch.maximum(module.seen, now))


def assigned(module: Any, now: Tensor) -> None:
    unknown = module.seen is None or module.seen.shape != now.shape
    module.seen = now if unknown else torch.maximum(module.seen, now)


def registered(module: Any, now: Tensor) -> None:
    if not hasattr(module, "seen"):
        module.register_buffer("seen", now)


def flagged(module: Any, now: Tensor) -> None:
    if module.first:
        module.register_buffer("seen", now, persistent=False)
        module.first = False


BUFFERS: dict[str, Callable[[], Tensor | None]] = {
    "resized": lambda: torch.tensor([]),
    "assigned": lambda: torch.zeros(1),
    "none": lambda: None,
}
OBSERVE: dict[str, Callable[[Any, Tensor], None]] = {
    "resized": resized,
    "assigned": assigned,
    "none": assigned,
    "registered": registered,
    "flagged": flagged,
}


def made(how: str) -> tuple[nn.Module, list[Tensor]]:
    return Chain(*(Observed(how) for _ in range(3))), [torch.ones(2, 4, WIDTH)]


@pytest.mark.nightly("flagged")
@pytest.mark.parametrize("how", OBSERVE)
def test_a_buffer_of_the_first_forward_is_profiled_and_taken_back(how: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from tests.profiling.test_first_forwards import made\n"
        f"def factory():\n    return made({how!r})\n"
    )
    source = load_source(f"{tmp_path}/mine.py:factory")
    found = estimate(source, batch_size=1, seq_len=1, dtype="float32", hardware=machine())
    assert [unit.name for unit in found.units if unit.kind == "block"] == [
        f"layers.{number}" for number in range(3)
    ]
    model, [batch] = made(how)
    before = model_fingerprint(model)
    assert found.model_fingerprint == before
    with undisturbed(model):
        for _ in range(2):
            with undisturbed(model):
                model(batch)
        assert all(tuple(each.shape) == (WIDTH,) for each in model.buffers())
    assert model_fingerprint(model) == before


def split(params: Any, *, empty: int) -> torch.optim.Optimizer:
    """AdamW with two groups of its own, of which one may stay empty."""
    given = [
        one for each in params for one in (each["params"] if isinstance(each, dict) else [each])
    ]
    groups: list[dict[str, Any]] = [{"params": given}, {"params": []}]
    return torch.optim.AdamW(groups[:: 1 - 2 * empty])


@pytest.mark.parametrize("empty", [0, 1])
def test_a_constructor_may_leave_one_of_its_groups_empty(empty: int) -> None:
    rules = UpdateRules(lambda params: split(params, empty=empty))
    plain = UpdateRules(torch.optim.AdamW)
    try:
        found = rules.of(torch.float32, torch.Size((8, 8)))
    except ProtrainError as error:
        pytest.fail(str(error))
    assert found.element_bytes == plain.of(torch.float32, torch.Size((8, 8))).element_bytes
