"""Fixes of the commands' refusals, followed: the call that the message names succeeds.

Commands run in this process, as `main` runs them.
"""

import shlex
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from protrain_runtime.contract.records import write_plan, write_profile
from tests.support.checking_cases import PROFILE, offloading
from tests.support.messages import Speaker
from tests.support.planning_cases import cpu, decoder, gpu, joined
from tests.support.record_fuzz import run

Made = tuple[nn.Module, object]
BATCHES = [{"inputs": torch.ones(4, 8)}] * 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden).tanh()


class Small(nn.Module):
    def __init__(self, *, head: Callable[..., nn.Module] = nn.Linear, mean: bool = True) -> None:
        super().__init__()
        self.embed: nn.Module = nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = head(8, 1) if head is nn.Linear else head(1)
        self.mean = mean

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        squares = self.head(hidden).square()
        return squares.mean() if self.mean else squares


def model() -> Made:
    return Small(), BATCHES


def no_batches() -> Made:
    return Small(), []


def numbers() -> Made:
    return Small(), [3, 4]


def no_loss() -> Made:
    return Small(mean=False), BATCHES


def sized(blocks: int) -> Made:
    return Small(), BATCHES[:blocks]


sized_at_three = partial(sized, 3)
models = 3


def frozen() -> Made:
    return Small().requires_grad_(False), BATCHES


def partly_frozen() -> Made:
    small = Small().requires_grad_(False)
    small.head.requires_grad_(True)
    return small, BATCHES


def lazy() -> Made:
    return Small(head=nn.LazyLinear), BATCHES


def replicated() -> Made:
    return nn.DataParallel(Small()), BATCHES


def compiled() -> Made:
    return torch.compile(Small()), BATCHES  # type: ignore[return-value]


def compiled_inside() -> Made:
    outer = Small()
    outer.embed = torch.compile(nn.Sequential(*outer.blocks))  # type: ignore[assignment]
    outer.blocks = nn.ModuleList()
    return outer, BATCHES


def each_compiled() -> Made:
    small = Small()
    for block in small.blocks:
        block.compile()
    return small, BATCHES


def embedded(*, sparse: bool) -> Made:
    small = Small()
    small.embed = nn.Embedding(10, 8, sparse=sparse)
    return small, [{"inputs": torch.arange(4)}] * 40


sparse = partial(embedded, sparse=True)
dense = partial(embedded, sparse=False)


def expanded() -> Made:
    small = Small()
    small.head.weight = nn.Parameter(torch.ones(1).expand(1, 8))
    return small, BATCHES


def contiguous() -> Made:
    small = Small()
    small.head.weight = nn.Parameter(torch.ones(1).expand(1, 8).contiguous())
    return small, BATCHES


HERE = __name__
PROFILES = f"""
{HERE}:modle => {HERE}:model
{HERE}:models => {HERE}:model
no.such.module:factory => {HERE}:model
{HERE}:no_batches => {HERE}:model
{HERE}:numbers => {HERE}:model
{HERE}:no_loss => {HERE}:model
{HERE}:sized => {HERE}:sized_at_three
{HERE}:frozen => {HERE}:partly_frozen
{HERE}:lazy => {HERE}:model
{HERE}:replicated => {HERE}:model
{HERE}:compiled => {HERE}:each_compiled
{HERE}:compiled_inside => {HERE}:each_compiled
{HERE}:sparse => {HERE}:dense
{HERE}:sparse => {HERE}:sparse --optimizer sgd
{HERE}:expanded => {HERE}:contiguous
{HERE}:model --batch-size 2 => {HERE}:model
{HERE}:model --optimizer adan => {HERE}:model --optimizer adam
{HERE}:model --optimizer muon => {HERE}:model --optimizer adamw
{HERE}:model --optimizer 'adamw lr=x' => {HERE}:model --optimizer adamw
{HERE}:model --precision autocast => {HERE}:model --precision autocast --dtype bfloat16
{HERE}:model --allow int8 => {HERE}:model --allow int8-activations
{HERE}:model --lora r=4,targets=iner => {HERE}:model --lora r=4,targets=inner
{HERE}:model --lora r=4,target=inner => {HERE}:model --lora r=4,targets=inner
{HERE}:model --quantize nf4 => {HERE}:model --quantize nf4 --lora r=16
tiny-gpt2 --seq-len 2048 => tiny-gpt2 --seq-len 128
"""
COMMANDS = f"""
plan card.yaml --clip-share 0.3 => plan card.yaml --clip-share 0.3 --clip
plan card.yaml --allow int8-activations => profile {HERE}:model --on l4 --allow int8-activations
plan card.yaml --seq-len 64 => plan {HERE}:model --on l4 -o f
plan {HERE}:model => plan {HERE}:model --on rtx-4090 -o f
plan {HERE}:model --on l4 -o - => plan {HERE}:model --on l4 -o f
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixes")
    write_profile(decoder(cpu(), blocks=3), folder / "cpu.yaml")
    write_profile(decoder(gpu(), blocks=3), folder / "card.yaml")
    write_profile(decoder(joined(gpu()), blocks=3), folder / "joined.yaml")
    write_profile(
        replace(decoder(gpu(host_gb=64), blocks=2), method="measured"), folder / "measured.yaml"
    )
    write_profile(PROFILE, folder / "profile.yaml")
    write_plan(offloading(), folder / "plan.yaml")
    return folder


@pytest.fixture(autouse=True)
def inside(folder: Path) -> Iterator[None]:
    with chdir(folder):
        yield


def rows(table: str) -> list[str]:
    return table.strip().splitlines()


def follow(row: str, assert_says: Speaker, *options: str, before: str = "") -> None:
    refused, followed = row.split(" => ")
    code, told = run([*shlex.split(before + refused), *options])
    assert code == 2, told
    assert "\n  fix: " in told
    assert_says(told)
    code, told = run([*shlex.split(before + followed), *options])
    assert code == 0, told


@pytest.mark.parametrize("row", rows(PROFILES))
def test_a_model_is_profiled_when_the_message_is_followed(row: str, assert_says: Speaker) -> None:
    follow(row, assert_says, "--on", "cpu", "-o", "made.yaml", before="profile ")


@pytest.mark.parametrize("row", rows(COMMANDS))
def test_a_command_succeeds_when_the_message_is_followed(row: str, assert_says: Speaker) -> None:
    follow(row, assert_says)
