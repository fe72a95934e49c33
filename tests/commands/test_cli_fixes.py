"""Fixes of the commands' refusals, followed: the call that the message names succeeds.

Commands run in this process, as `main` runs them.
"""

import json
import random
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo import ZOO
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.presets import preset_config
from protrain_runtime.contract.records import dumps_hardware, write_profile
from protrain_runtime.contract.records.hardware import Hardware
from tests.support.hostile_models import Block
from tests.support.messages import Speaker
from tests.support.planning_cases import cpu, decoder, gpu, joined, with_copies
from tests.support.record_fuzz import run

Made = tuple[nn.Module, object]
BATCHES = [{"inputs": torch.ones(4, 8)}] * 40


class Small(nn.Module):
    def __init__(self, *, head: Callable[..., nn.Module] = nn.Linear, mean: bool = True) -> None:
        super().__init__()
        self.embed: nn.Module = nn.Identity()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = head(8, 1) if head is nn.Linear else head(1)
        self.mean = mean

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        squares: Tensor = self.head(hidden).square()
        return squares.mean() if self.mean else squares


def given(make: Callable[[], Any], batches: object = BATCHES) -> Made:
    return make(), batches


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


def sized(blocks: int) -> Made:
    return Small(), BATCHES[:blocks]


def frozen_but(trains: str) -> Made:
    small = Small().requires_grad_(False)
    small.get_submodule(trains).requires_grad_(True)
    return small, BATCHES


def embedded(*, sparse: bool) -> Made:
    small = Small()
    small.embed = nn.Embedding(10, 8, sparse=sparse)
    return small, [{"inputs": torch.arange(4)}] * 40


def with_head(weight: Tensor) -> Made:
    small = Small()
    small.head.weight = nn.Parameter(weight)
    return small, BATCHES


model = partial(given, Small)
no_batches, numbers = partial(given, Small, []), partial(given, Small, [3, 4])
no_loss = partial(given, partial(Small, mean=False))
lazy = partial(given, partial(Small, head=nn.LazyLinear))
sized_at_three, models = partial(sized, 3), 3
frozen = partial(given, lambda: Small().requires_grad_(False))
partly_frozen = partial(frozen_but, "head")
replicated = partial(given, lambda: nn.DataParallel(Small()))
compiled = partial(given, lambda: torch.compile(Small()))
sparse, dense = partial(embedded, sparse=True), partial(embedded, sparse=False)
expanded = partial(with_head, torch.ones(1).expand(1, 8))
contiguous = partial(with_head, torch.ones(1, 8))

HERE = __name__
PIN = "plan card.yaml --pin '*: offload to host'"
STAGES = "plan p/joined.yaml --num-devices 4 --global-batch 16 --stages"
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
{HERE}:model --optimizer 'adamw lr=x' => {HERE}:model --optimizer 'adamw(lr=0.1)'
{HERE}:model --optimizer 'adam betas=(0., 0.)' => {HERE}:model --optimizer 'adam(betas=(0., 0.))'
{HERE}:model --optimizer 'adamw(lr=x)' => {HERE}:model --optimizer 'adamw(lr=0.1)'
{HERE}:model --lora r=4,targets=zzz => {HERE}:model --lora r=4,targets=inner
{HERE}:model --interconnect l4 => {HERE}:model --interconnect probed.yaml
empty.json --seq-len 64 => llama.json --seq-len 64
clip.json --batch-size 1 --seq-len 8 => clip.json --batch-size 2 --seq-len 8
sound.json => {HERE}:model
{HERE}:model --precision autocast => {HERE}:model --precision autocast --dtype bfloat16
{HERE}:model --allow int8 => {HERE}:model --allow int8-activations
{HERE}:model --lora r=4,targets=iner => {HERE}:model --lora r=4,targets=inner
{HERE}:model --lora r=4,target=inner => {HERE}:model --lora r=4,targets=inner
{HERE}:model --quantize nf4 => {HERE}:model --quantize nf4 --lora r=16
tiny-gpt2 --seq-len 2048 => tiny-gpt2 --seq-len 128
"""
INT8 = "plan some.yaml --allow int8-activations"
COMMANDS = f"""
plan card.yaml --clip-share 0.3 => plan card.yaml --clip-share 0.3 --clip
plan card.yaml --allow rounding => profile {HERE}:model --on l4 --allow rounding
plan card.yaml --seq-len 64 => plan {HERE}:model --on l4
plan {HERE}:model => plan {HERE}:model --on rtx-4090
plan {HERE}:model --on l4 -o - => plan {HERE}:model --on l4 -o f
plan {HERE}:model --on l4 --seq-len 64 => plan {HERE}:model --on l4
plan cpu.yaml --host-memory 8GiB => plan cpu.yaml --device-memory 8GiB
plan measured.yaml --host-memory 2TiB => plan measured.yaml --host-memory 32GiB
plan cpu.yaml --page-cache 4GiB => plan cpu.yaml
plan card.yaml --device-memory 24 => plan card.yaml --device-memory 24GiB
plan card.yaml --device-memory 9.5 => plan card.yaml --device-memory 9.5GiB
plan card.yaml --pin 'layer.0: recompute' => plan card.yaml --pin 'layers.0: recompute'
plan card.yaml --pin 'layers.0: recompte' => plan card.yaml --pin 'layers.0: recompute'
plan card.yaml --pin 'layers.0: keep int8' => plan card.yaml --pin 'layers.0: recompute'
plan some.yaml --pin 'layers.0: keep int8' => {INT8} --pin 'layers.0: keep int8'
{INT8} --pin 'layers.*: keep int8' => {INT8} --pin 'layers.0: keep int8'
plan card.yaml --pin layers.0 => plan card.yaml --pin 'layers.0-2: recompute'
plan card.yaml --pin 'head: recompute' => plan card.yaml --pin 'head: swap to host'
plan card.yaml --pin 'head: recompute' => plan card.yaml --pin 'layers.0-2: recompute'
plan card.yaml --pin 'layers.0: shard' => plan card.yaml --pin 'layers.0: persistent'
{PIN} --host-memory 9MiB => {PIN}
plan card.yaml -o no/plan.yaml => plan card.yaml -o q/plan.yaml
plan card.yaml -o . => plan card.yaml -o plan.yaml
plan card.yaml -o card.yaml => plan card.yaml -o plan.yaml
plan card.yaml --num-devices 2 => profile {HERE}:model --on l4 --interconnect a100-80gb
plan p/joined.yaml --num-devices 16 --nodes 2 => plan p/joined.yaml --num-devices 16 --nodes 4
plan p/joined.yaml --num-devices 4 --stages auto => {STAGES} auto
{STAGES} 3 => {STAGES} auto
{STAGES} 2 --disk-gain 5% => {STAGES} 2
{STAGES} 2 --disk-gain 5% => plan p/joined.yaml --num-devices 4 --disk-gain 5%
{STAGES} 2 --replicas 2 => {STAGES} 2
show p/stages.yaml --stage 4 => show p/stages.yaml --stage 1
export p/stages.yaml --to trl => export p/stages.yaml --to torchtitan
show p/plan.yaml --profile card.yaml => show p/plan.yaml --profile p/own.yaml
simulate p/plan.yaml --profile card.yaml => simulate p/plan.yaml --profile p/own.yaml
report p/plan.yaml --profile card.yaml => report p/plan.yaml --profile p/own.yaml
run p/plan.yaml --steps 2 --resume p/saved => run p/plan.yaml --steps 3 --resume p/saved
run p/sgd.yaml --steps 3 --resume p/saved => run p/plan.yaml --steps 3 --resume p/saved
run p/plan.yaml --steps 2 --resume p => run p/plan.yaml --steps 3 --resume p/saved
run p/plan.yaml --steps 2 --save p/own.yaml => run p/plan.yaml --steps 2 --save again
run p/plan.yaml --steps 2 --save-every 1 => run p/plan.yaml --steps 2 --save-every 1 --save every
run p/plan.yaml --steps 1 --plain --check => run p/plan.yaml --steps 1 --check
run p/plan.yaml --steps 1 --plain --verify => run p/plan.yaml --steps 1 --verify
run p/plan.yaml --steps 1 --text no.txt => run p/plan.yaml --steps 1
run p/plan.yaml --steps 1 --device cuda => run p/plan.yaml --steps 1 --device cpu
run p/few.yaml --steps 4 => run p/few.yaml --steps 3
run p/few.yaml --steps 4 => run p/plan.yaml --steps 4
fit {HERE}:model --on cpu --columns cost => fit {HERE}:model --on cpu --columns cost --price 2.49
fit {HERE}:model --on cpu --columns energy => fit {HERE}:model --on box.yaml --columns energy
fit {HERE}:model --on cpu --price 1,2 => fit {HERE}:model --on cpu --price 1
fit {HERE}:model --on cpu --beside tiny-llama => fit {HERE}:model --on cpu --beside {HERE}:dense
fit {HERE}:model --on rtx-3090 --num-devices 16 => fit {HERE}:model --on nodes.yaml --num-devices 16
fit deepspeed.json --on cpu => fit {HERE}:model --on cpu
fit axolotl.yml --model {HERE}:model --on cpu => fit {HERE}:model --on cpu
hardware show rtx-4091 => hardware show rtx-4090
hardware probe -o no/machine.yaml => hardware show l4
hardware search {HERE}:model => hardware search {HERE}:model --price-limit 3 --among prices.yaml
hardware search {HERE}:model --speed 1 => hardware search {HERE}:model --speed 1 --among prices.yaml
check => check --records-only p
profile {HERE}:model --on bare.yaml => profile {HERE}:model --on l4
profile {HERE}:model --on npu.yaml => profile {HERE}:model --device cpu
profile {HERE}:model --on arm.yaml => profile {HERE}:model
profile {HERE}:model --on l4 --lora r=4,velora => profile {HERE}:model --lora r=4,velora
profile ! --on l4 => models
hardware show toaster => hardware show cpu
hardware probe --device tpu => hardware show cpu
fit other.yml --on cpu => fit axolotl.yml --model tiny-llama --seq-len 64 --on cpu
fit both.yml --on cpu => fit axolotl.yml --model tiny-llama --seq-len 64 --on cpu
plan p/joined.yaml --num-devices 4 --global-batch 15 --stages 2 => {STAGES} 2
plan card.yaml --pin 'layers.0: 7' => plan card.yaml --pin 'layers.0: recompute'
plan card.yaml --device-memory 24G => plan card.yaml --device-memory 24GB
plan twice.yaml => plan card.yaml
show q/moved.yaml => show q/moved.yaml --profile p/own.yaml
run p/plan.yaml --steps 1 --device tpu => run p/plan.yaml --steps 1 --device cpu
run p/stages.yaml --steps 1 => export p/stages.yaml --to torchtitan
run p/stages.yaml --steps 1 => plan p/joined.yaml --num-devices 4 --stages 1 --global-batch 16
run q/over.yaml --steps 1 => run p/plan.yaml --steps 1
run p/plan.yaml --steps 1 --save p/own.yaml/saved => run p/plan.yaml --steps 1 --save other
check --explain BUD01 => check --explain BUD001
"""


def few() -> Made:
    return Small(), iter(BATCHES[:3])


MADE = f"""
profile {HERE}:model --on cpu -o p/own.yaml
plan p/own.yaml -o p/plan.yaml
run p/plan.yaml --steps 2 --save p/saved
profile {HERE}:model --on cpu --optimizer sgd -o p/sgd-profile.yaml
plan p/sgd-profile.yaml -o p/sgd.yaml
profile {HERE}:few --on cpu -o p/few-profile.yaml
plan p/few-profile.yaml -o p/few.yaml
{STAGES} 2 -o p/stages.yaml
hardware copy cpu -o box.yaml
hardware copy rtx-3090 -o nodes.yaml
"""


CPU, CARD_MACHINE = load_hardware("cpu"), load_hardware("l4")


def on(machine: Hardware, **device: Any) -> Hardware:
    changed = replace(machine.device, **device)
    return replace(machine, name=changed.kind, device=changed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixes")
    for place in ("p", "q"):
        (folder / place).mkdir()
    write_profile(decoder(cpu(), blocks=3), folder / "cpu.yaml")
    write_profile(decoder(gpu(), blocks=3), folder / "card.yaml")
    write_profile(decoder(joined(gpu()), blocks=3), folder / "p/joined.yaml")
    write_profile(
        replace(decoder(gpu(host_gb=64), blocks=2), method="measured"), folder / "measured.yaml"
    )
    copies = with_copies(decoder(gpu(), blocks=2), random.Random(0))
    some = [
        unit if unit.name == "layers.0" else replace(unit, forms=unit.forms[:1])
        for unit in copies.units
    ]
    write_profile(replace(copies, units=tuple(some)), folder / "some.yaml")
    (folder / "axolotl.yml").write_text("base_model: tiny-llama\nmicro_batch_size: 1\n")
    (folder / "deepspeed.json").write_text('{"zero_optimization": {"stage": 3}}')
    (folder / "prices.yaml").write_text("rtx-4090: 0.35\nl4: 0.5\n")
    with chdir(folder):
        for command in rows(MADE):
            succeed(command)
    over = "settings: {overlap_steps: true, micro_batches: 2, "
    for name, text in {
        "bare.yaml": dumps_hardware(replace(CPU, rates=None, name="bare")),
        "npu.yaml": dumps_hardware(on(CARD_MACHINE, kind="npu")),
        "arm.yaml": dumps_hardware(on(CPU, name="aarch64", num_threads=10**4)),
        "probed.yaml": dumps_hardware(load_hardware("a100-80gb")),
        "empty.json": "{}",
        "llama.json": json.dumps(preset_config("tiny-llama")),
        "clip.json": ZOO["clip"].source.model_config,
        "sound.json": '{"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}',
        "other.yml": "something: else\n",
        "both.yml": "base_model: tiny-llama\nfinetuning_type: lora\n",
        "twice.yaml": (folder / "card.yaml").read_text() + "hardware: {}\n",
        "q/moved.yaml": (folder / "p/plan.yaml").read_text(),
        "q/over.yaml": (folder / "p/plan.yaml").read_text().replace("settings: {", over),
    }.items():
        (folder / name).write_text(text)
    with (folder / "box.yaml").open("a") as box:
        box.write("power_w: 300\n")
    nodes = (folder / "nodes.yaml").read_text()
    inter = (
        "interconnect:\n  inter_node:\n    gather_bytes_per_s: 1.0e+10\n"
        "    reduce_bytes_per_s: 1.0e+10\n    latency_s: 1.0e-5\n"
    )
    (folder / "nodes.yaml").write_text(nodes.replace("interconnect:\n", inter))
    return folder


@pytest.fixture(autouse=True)
def inside(folder: Path) -> Iterator[None]:
    with chdir(folder):
        yield


def rows(table: str) -> list[str]:
    return table.strip().splitlines()


def refusal(command: str, code: int = 2) -> str:
    found, told = run(shlex.split(command))
    assert found == code, told
    assert "fix: " in told
    return told


def succeed(command: str) -> None:
    code, told = run(shlex.split(command))
    assert code == 0, told


@pytest.mark.nightly("clip.json*")
@pytest.mark.nightly(by_day=18)
@pytest.mark.parametrize("row", rows(PROFILES), ids=str)
def test_a_model_is_profiled_when_the_message_is_followed(row: str, assert_says: Speaker) -> None:
    before, after = (f"profile {each} --on cpu -o made.yaml" for each in row.split(" => "))
    assert_says(refusal(before))
    succeed(after)


# These probe this machine, and profile Llama.
@pytest.mark.nightly("*--device cpu", "fit other.yml*")
@pytest.mark.nightly(by_day=12)
@pytest.mark.parametrize("row", rows(COMMANDS), ids=str)
def test_a_command_succeeds_when_the_message_is_followed(row: str, assert_says: Speaker) -> None:
    before, after = row.split(" => ")
    assert_says(refusal(before))
    succeed(after)


# --- check ----------------------------------------------------------------------------------------

NETWORK = f"import {HERE} as here\n\ndef model():\n    return here.Small(), here.BATCHES\n"
DEEPER = NETWORK.replace("Small()", "Small(head=here.deep)")
CARD = f"protrain profile {HERE}:model --on l4 -o c/own.yaml"
ALLOWED = "protrain profile tiny-llama --seq-len 64 --on l4 --allow int8-activations -o c/own.yaml"
PLAN = "protrain plan c/own.yaml -o c/plan.yaml"
BUDGETS = "protrain: budgets\nversion: 1\nbudgets:\n  {}\n"
TOML = "[tool.protrain.budgets.cpu]\ndevice = '8GiB'\n"


def deep(*_: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))


Step = str | Callable[[], object]
"""A command, with those that a message names as `...`; or a change of files."""


def writes(path: str, text: str) -> Step:
    return lambda: Path(path).write_text(text)


def edits(path: str, before: str, after: str) -> Step:
    def edit() -> None:
        text = Path(path).read_text()
        assert before in text
        Path(path).write_text(text.replace(before, after, 1))

    return edit


def removes(path: str) -> Step:
    return lambda: Path(path).unlink()


def budgets(of: str, name: str = "budgets.yaml") -> Step:
    return writes(name, BUDGETS.format(of))


def linked() -> None:
    Path("c/plan.yaml").rename("../outside.yaml")
    Path("c/plan.yaml").symlink_to("../../outside.yaml")


def copied() -> None:
    Path("c/plan.yaml").unlink()
    Path("c/plan.yaml").write_text(Path("../outside.yaml").read_text())


@dataclass(frozen=True)
class Checked:
    """Steps before a check that fails, and what its message asks for before one that passes."""

    before: tuple[Step, ...] = ()
    fix: tuple[Step, ...] = ("...",)
    fails: str = "c"
    passes: str = "c"


ROUNDED: tuple[Step, ...] = (
    ALLOWED,
    f"{PLAN} --allow int8-activations --pin '*.layers.*: keep int8'",
)
LIMITS = budgets("cpu: {device: 8GiB}")
TABLE = writes("pyproject.toml", TOML)
NO_LEAVE = writes("pyproject.toml", "[tool.protrain]\nallow = []\n")
CHECKS: dict[str, Checked] = {
    "a unit's name": Checked((edits("c/plan.yaml", "name: head", "name: heads"),)),
    "another number": Checked((edits("c/plan.yaml", "step_seconds: ", "step_seconds: 1"),)),
    "another profile": Checked((edits("c/own.yaml", "base_bytes: ", "base_bytes: 1"),)),
    "no profile": Checked((removes("c/own.yaml"),), (CARD.replace("l4", "cpu"),)),
    "another model": Checked(
        (
            writes("net.py", NETWORK),
            "protrain profile net.py:model --on cpu -o c/own.yaml",
            PLAN,
            writes("net.py", DEEPER),
        )
    ),
    "rounding: plan without": Checked(ROUNDED, (PLAN,)),
    "rounding: allow it": Checked(
        ROUNDED, (writes("pyproject.toml", "[tool.protrain]\nallow = ['int8-activations']\n"),)
    ),
    "another kind of device": Checked((), (CARD, PLAN), "c --on l4", "c --on l4"),
    "a budget above the machine": Checked(
        (CARD, PLAN, budgets("l4: {device: 48GiB}")), (budgets("l4: {device: 20GiB}"),)
    ),
    "fewer plans: bring back": Checked(
        (removes("c/plan.yaml"), f"{PLAN.removesuffix('c/plan.yaml')}c/other.yaml"),
        (PLAN,),
        "c --expect 2",
        "c --expect 2",
    ),
    "fewer plans: --expect": Checked((), (), "c --expect 2", "c --expect 1"),
    "a machine's name": Checked((budgets("cpuu: {device: 8GiB}"),), (LIMITS,)),
    "two files of budgets: one": Checked((LIMITS, TABLE), (removes("pyproject.toml"),)),
    "two files of budgets: --budgets": Checked(
        (LIMITS, TABLE), (), passes="c --budgets budgets.yaml"
    ),
    "a name of budgets": Checked(
        (budgets("cpu: {device: 8GiB}", "Budgets.yaml"),),
        (lambda: Path("Budgets.yaml").rename("budgets.yaml"),),
    ),
    "a key of tool.protrain": Checked(
        (writes("pyproject.toml", "[tool.protrain]\nx = 1\n"),), (NO_LEAVE,)
    ),
    "a key that looks like it": Checked(
        (writes("pyproject.toml", '[tool."Protrain"]\nallow = []\n'),), (NO_LEAVE,)
    ),
    "a rule that is none": Checked((), (), "--explain SPEED", "--explain TIME001"),
    "a folder without a plan": Checked((removes("c/plan.yaml"),), (PLAN,)),
    "another folder": Checked((removes("c/plan.yaml"),), (), passes="../p"),
    "a link that leads out: the file": Checked((linked,), (copied,)),
    "a kind that looks like it": Checked(
        (edits("c/plan.yaml", "protrain: plan", "Protrain: plan"),),
        (edits("c/plan.yaml", "Protrain: plan", "protrain: plan"),),
    ),
    "a kind that is none": Checked(
        (edits("c/plan.yaml", "protrain: plan", "protrain: plam"),),
        (edits("c/plan.yaml", "protrain: plam", "protrain: plan"),),
    ),
}


@pytest.mark.nightly("rounding: allow it")
@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes_when_the_message_is_followed(
    name: str, tmp_path: Path, assert_says: Speaker
) -> None:
    row = CHECKS[name]
    looks = [] if name == "another model" else ["--records-only"]  # at what builds the model
    here = tmp_path / "here"
    (here / "c").mkdir(parents=True)
    for file in ("own.yaml", "plan.yaml"):
        (here / "c" / file).write_bytes(Path("p", file).read_bytes())
    (tmp_path / "p").symlink_to(Path("p").absolute())
    with chdir(here):
        taken(row.before)
        code, said = run(["check", *looks, *shlex.split(row.fails), "--format", "json"])
        if code == 1:
            found = [one.get("fix") for one in json.loads(said)["findings"]]
            [said] = [f"fix: {fix}" for fix in found if fix]
        assert "fix: " in said
        assert_says(said)
        taken(row.fix, said)
        succeed(shlex.join(["check", *looks, *shlex.split(row.passes)]))


def taken(steps: Iterable[Step], said: str = "") -> None:
    for step in steps:
        if callable(step):
            step()
            continue
        commands = said.partition("protrain ")[2] if step == "..." else step
        for command in commands.split(" && "):
            succeed(command.removeprefix("protrain "))
