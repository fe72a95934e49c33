"""A small model whose batches choose what they use, for tests of ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from protrain_runtime import prepare
from protrain_runtime.contract.records.plan import KEEP, PERSISTENT, Placement, Plan, UnitPlan
from tests.support.runtime_cases import ADAMW, copied, device, differences, plan_for

SHARED: tuple[Placement, ...] = (PERSISTENT, Placement(tier="device"), Placement(tier="disk"))


class Block(nn.Module):
    """A residual block with two experts, of which a call uses one, and running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, hidden: Tensor, expert: int) -> Tensor:  # [batch, width], twice
        result: Tensor = hidden + self.experts[expert](self.norm(hidden))
        return result


class Routed(nn.Module):
    """Three blocks; the call says which expert.

    The first token's first number adds its value, `large` times, to the gradient alone.
    """

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: Tensor, expert: int, large: float | None = None) -> Tensor:
        hidden = self.embed(tokens)  # of int64 [batch]
        number = hidden[0, 0]
        for block in self.blocks:
            hidden = block(hidden, expert)
        loss = nn.functional.cross_entropy(self.head(hidden), tokens)
        return loss if large is None else loss + large * (number - number.detach())


def built(seed: int = 0) -> Routed:
    torch.manual_seed(seed)
    return Routed().to(device())


def plan_of(model: nn.Module, count: int, places: tuple[Placement, ...], **options: Any) -> Plan:
    names = [("embed", ("embed.weight",)), *((f"blocks.{n}", ()) for n in range(3))]
    units = [
        UnitPlan(
            name=name,
            kind="part" if parameters else "block",
            activations=KEEP,
            states=places[number % len(places)],
            parameters=parameters,
        )
        for number, (name, parameters) in enumerate(
            [*names, ("head", ("head.bias", "head.weight"))]
        )
    ]
    return plan_for(model, units, piece_bytes=2000, num_devices=count, **options)


def made(
    rank: int, count: int, places: tuple[Placement, ...], *, limit_s: float = 60, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = built(rank)
    plan = plan_of(model, count, places, **options)
    return prepare(model, plan, optimizer=ADAMW, wait_limit_s=limit_s)


def batch(seed: int) -> Tensor:
    tokens = torch.randint(16, (8,), generator=torch.Generator().manual_seed(seed))
    return tokens.to(device())


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int, expert: int = 0
) -> Tensor:
    loss: Tensor = model(batch(10 * number + rank), expert)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


Play = Callable[[nn.Module, nn.Module, torch.optim.Optimizer], Any]
"""Trains what runs, with the model inside of it; gives what it has seen."""


def against_ddp(plans: Sequence[Callable[[nn.Module], Plan]], play: Play) -> list[list[str]]:
    """By plan, where training under it differs from DistributedDataParallel's."""
    results = []
    for plan in (None, *plans):
        plain = built()
        model: nn.Module = plain
        optimizer: torch.optim.Optimizer
        if plan is None:
            # The experts that no batch goes to.
            model = DistributedDataParallel(plain, find_unused_parameters=True)
            optimizer = ADAMW(list(plain.parameters()))
        else:
            model, optimizer = prepare(plain, plan(plain), optimizer=ADAMW, wait_limit_s=60)
        seen = play(model, plain, optimizer)
        results.append((seen, copied(plain.state_dict()), copied(optimizer.state_dict())))
    return [list(differences(found, results[0], "")) for found in results[1:]]


def routed(rank: int, count: int, places: tuple[Placement, ...] = SHARED) -> list[str]:
    """Experts that both ranks, one or none of them meet; running statistics of rank 0."""
    routes = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]

    def play(model: nn.Module, _: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [step(model, optimizer, n, rank, route[rank]) for n, route in enumerate(routes)]

    (found,) = against_ddp([lambda plain: plan_of(plain, count, places)], play)
    return found


State = tuple[dict[str, Any], dict[str, Any]]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return copied(model.state_dict()), copied(optimizer.state_dict())


def same(found: State, expected: State) -> None:
    assert list(differences(found, expected, "")) == []
