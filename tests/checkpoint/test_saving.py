"""Saving and resuming: any plan to any plan, and to plain PyTorch, bit for bit."""

import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

from protrain_plan.commands.training import Run
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.planning.outcome import Solved
from protrain_plan.presentation.plans import solved_text
from protrain_runtime import load, prepare, restore, save, with_master_weights
from protrain_runtime.checkpoint.index import INDEX
from protrain_runtime.checkpoint.loading import read_extra
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import checkpoint_bytes
from protrain_runtime.contract.program.program import SAVING_BYTES
from protrain_runtime.contract.records import read_plan, write_plan
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    Activations,
    Budgets,
    Placement,
    Plan,
)
from protrain_runtime.contract.records.profile import Precision
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.devices.memory_meter import MemoryMeter
from tests.support.commands import MODEL, PROTRAIN, printed, protrain
from tests.support.messages import Speaker
from tests.support.plan_settings import with_settings
from tests.support.planning_cases import cpu, decoder
from tests.support.planning_cases import plan as plan_within
from tests.support.runtime_cases import (
    CATALOGUE,
    Factory,
    Outcome,
    assert_bitwise,
    batch,
    build,
    copied,
    decided,
    described,
    differences,
    llama,
    mixed,
    one_group,
    outcome,
    plan_for,
    weight_decay_groups,
)
from tests.support.scenario import Run as TrainingRun
from tests.support.scenario import Scenario, refusal
from tests.support.trained import train

ROOT = Path(__file__).parents[2]
SIDES = ("plain", "plan", "another plan")

Pair = tuple[nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True)
class Kind:
    factory: Factory
    dtype: torch.dtype = torch.float32
    precision: Precision = "pure"
    name: str = "gpt2"  # with dropout: random states matter

    def planned(self, seed: int, model: nn.Module) -> Plan:
        dtype = "float32" if self.dtype == torch.float32 else "bfloat16"
        units = mixed(described(self.name), random.Random(seed), "disk", "host")
        return plan_for(model, units, dtype=dtype, precision=self.precision)

    def start(self, side: str, folder: Path, *, seed: int = 0) -> TrainingRun:
        own, masters = CATALOGUE[self.name], self.precision == "master"
        made = Scenario(
            model=replace(own, change=lambda model: model.to(self.dtype)),
            plan=partial(self.planned, 3 if side == "plan" else 5),
            factory=self.factory,
            plain_factory=with_master_weights(self.factory) if masters else None,
            groups=weight_decay_groups,
        )
        return made.start(None if side == "plain" else folder, seed=seed)


ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)
MOMENTUM = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
KINDS = {
    "adamw-float32": Kind(ADAMW),
    "adamw-bfloat16": Kind(ADAMW, torch.bfloat16),
    "adamw-master": Kind(ADAMW, torch.bfloat16, "master"),
    "momentum-float32": Kind(MOMENTUM),
    "momentum-bfloat16": Kind(MOMENTUM, torch.bfloat16),
    "momentum-master": Kind(MOMENTUM, torch.bfloat16, "master"),
    "adamw-tied": Kind(ADAMW, name="llama-tied"),
}


@cache
def uninterrupted(kind: Kind) -> Outcome:
    """Steps 0 to 3 in plain PyTorch."""
    torch.manual_seed(1)
    run = kind.start("plain", Path())
    run.step(*range(4))
    return run.outcome()


QUICK = ("adamw-master",)


@pytest.mark.nightly("adamw-master")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, kind in KINDS.items()
    ],
)
def test_training_continues_bitwise_from_anywhere_to_anywhere(kind: Kind, tmp_path: Path) -> None:
    """Saving changes nothing; what is saved does not depend on the plan; loading changes all."""
    for first in SIDES:
        torch.manual_seed(1)
        run = kind.start(first, tmp_path)
        unused = copied(run.optimizer.state_dict())
        run.step(0, 1)
        seen = list(run.seen)
        save(run.model, run.optimizer, tmp_path / first, extra={"step": 2}, shard_bytes=200_000)
        drawn = random.random()
        run.step(2, 3)
        assert_bitwise(run.outcome(), uninterrupted(kind))
        for second in SIDES:
            run = kind.start(second, tmp_path, seed=99)  # other weights
            run.step(0)  # and states to be replaced
            run.optimizer.load_state_dict(unused)  # takes states away
            assert run.optimizer.state_dict()["state"] == {}
            assert load(run.model, run.optimizer, tmp_path / first) == {"step": 2}
            assert random.random() == drawn
            run.seen = list(seen)
            run.step(2, 3)
            assert_bitwise(run.outcome(), uninterrupted(kind))
    files = [
        {path.name: path.read_bytes() for path in tmp_path.glob(f"{first}/*/*.safetensors")}
        for first in SIDES
    ]
    assert len(files[0]) > 4
    assert files[0] == files[1] == files[2]


@pytest.mark.nightly
def test_a_restored_model_saves_and_an_unused_optimizer_too(tmp_path: Path) -> None:
    kind = KINDS["adamw-float32"]
    torch.manual_seed(1)
    run = kind.start("plan", tmp_path)
    save(run.model, run.optimizer, tmp_path / "start")
    run.step(0, 1)
    restore(run.model)
    save(run.model, run.optimizer, tmp_path / "saved")
    run.step(2, 3)
    assert_bitwise(run.outcome(), uninterrupted(kind))
    for side in SIDES:
        run = kind.start(side, tmp_path, seed=99)
        run.step(0)
        load(run.model, run.optimizer, tmp_path / "start")  # states go away again
        assert run.optimizer.state_dict()["state"] == {}
        run.seen.clear()
        run.step(*range(4))
        assert_bitwise(run.outcome(), uninterrupted(kind))


class Odd(nn.Module):
    """Tensors of every other sort: transposed, frozen, unused, empty, scalar, buffers, a state."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(4)
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("passing", torch.randn(2), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # [batch, 3, 8, 8] -> []
        self.calls += 1
        hidden = self.norm(self.convolution(images)).mean((2, 3)) @ self.transposed
        loss: torch.Tensor = (hidden.square() * self.scale).mean() + self.frozen.sum()
        return loss


def test_odd_tensors_and_modules_continue_bitwise(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))
        loss = model(images)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return outcome(model, optimizer, [loss.detach()])

    torch.manual_seed(0)
    model = Odd()
    optimizer = ADAMW(model.parameters())
    run(model, optimizer)
    save(model, optimizer, tmp_path)
    again = Odd()
    resumed = ADAMW(again.parameters())
    load(again, resumed, tmp_path)
    assert again.calls == 1
    assert_bitwise(run(again, resumed), run(model, optimizer))
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        states = (optimizer.state.get(parameter, {}), resumed.state.get(other, {}))
        strides = [{k: v.stride() for k, v in state.items()} for state in states]
        assert strides[0] == strides[1]


def transposed(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("qkv"):
            parameter.data = parameter.detach().t().contiguous().t()


@pytest.mark.nightly
def test_an_offloaded_parameter_need_not_be_row_major(tmp_path: Path) -> None:
    made = Scenario(
        model=replace(CATALOGUE["functional"], change=transposed),
        units=lambda units: decided(units, KEEP, Placement(tier="disk")),
        factory=ADAMW,
    )
    for first in (None, tmp_path):
        run = made.start(first)
        run.step(0)
        save(run.model, run.optimizer, tmp_path / "saved")
        run.seen.clear()
        run.step(1)
        for second in (None, tmp_path):
            again = made.start(second, seed=9)
            load(again.model, again.optimizer, tmp_path / "saved")
            again.step(1)
            assert_bitwise(again.outcome(), run.outcome())


# --- other readers and writers --------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_hugging_face_and_safetensors_read_what_is_saved(tied: bool, tmp_path: Path) -> None:
    kind = Kind(ADAMW, name="llama-tied" if tied else "llama")
    run = kind.start("plan", tmp_path)
    run.step(0, 1)
    directory = tmp_path / "saved"
    save(run.model, run.optimizer, directory, shard_bytes=100_000)
    model = run.model
    model.config.save_pretrained(directory)  # type: ignore[operator, union-attr]
    read, info = type(model).from_pretrained(directory, output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(info.values()), info
    expected = copied(model.state_dict())
    assert list(differences(read.state_dict(), expected, "parameters")) == []
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*/model-*.safetensors")):
        tensors |= load_file(file)
    missing, unexpected = build(kind.name).load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
    index = json.loads((directory / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert set(index["weight_map"]) == set(tensors)


@pytest.mark.nightly(but=("several files-plain", "one file-plain"))
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("size", ["100KB", "1GB"], ids=["several files", "one file"])
def test_parameters_of_hugging_face_load_into_a_plan(
    side: str, size: str, tmp_path: Path, assert_says: Speaker
) -> None:
    kind = Kind(ADAMW, name="llama-tied")
    other = build(kind.name, seed=7)
    other.save_pretrained(tmp_path / "theirs", max_shard_size=size)  # type: ignore[operator]
    run = kind.start(side, tmp_path)
    model, optimizer = run.model, run.optimizer
    assert load(model, None, tmp_path / "theirs") == {}
    assert list(differences(model.state_dict(), copied(other.state_dict()), "parameters")) == []
    assert_says.refused(load, model, optimizer, tmp_path / "theirs")


def test_every_dtype_is_written_as_the_package_writes_it(tmp_path: Path) -> None:
    class Buffers(nn.Module):
        pass

    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    dtypes += [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64]
    tensors = {f"a_{d}".replace(".", "_"): torch.arange(6).view(2, 3).to(d) for d in dtypes}
    model, again = Buffers(), Buffers()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
        again.register_buffer(name, torch.zeros_like(tensor))
    save(model, None, tmp_path / "ours")
    (file,) = (tmp_path / "ours").glob("*/model-*")
    assert list(differences(load_file(file), tensors, "")) == []
    (tmp_path / "theirs").mkdir()
    save_file(tensors, tmp_path / "theirs" / "all.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "all.safetensors")}
    (tmp_path / "theirs" / INDEX).write_text(json.dumps(index))
    load(again, None, tmp_path / "theirs")
    assert list(differences(dict(again.named_buffers()), tensors, "")) == []


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.nightly("on disk")
@pytest.mark.parametrize("states", [PERSISTENT, Placement(tier="disk")], ids=["kept", "on disk"])
def test_saving_and_loading_take_one_buffer(states: Any, tmp_path: Path) -> None:
    model = llama(tied=False)
    big = nn.Linear(2048, 1024)  # 8 MiB in one tensor
    model.add_module("big", big)
    forward = model.forward

    def with_big(**batch: Any) -> Any:
        output = forward(**batch)
        return output.loss + big(torch.ones(2048)).sum() * 0

    model.forward = with_big
    units = list(decided(described("llama"), KEEP, states))
    last = units[-1]
    units[-1] = replace(last, parameters=(*last.parameters, "big.weight", "big.bias"))
    plan = plan_for(model, units)
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    loss = model(**batch("llama", 0))  # type: ignore[arg-type]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del loss
    with MemoryMeter() as meter:
        meter.mark("save")
        save(model, optimizer, tmp_path / "saved")
        meter.mark("load")
        load(model, optimizer, tmp_path / "saved")
    for segment in meter.segments:
        counters = 100_000  # AdamW's steps and random states
        assert segment.peak_bytes <= SAVING_BYTES + counters, segment
        assert segment.end_bytes <= counters, segment


def test_a_plan_says_where_saving_takes_more_than_a_step() -> None:
    """The published sizes take far more in a step; a model of a few bytes does not."""
    tiny = decoder(
        cpu(), blocks=1, block_parameters=64, embedding_parameters=64, kept=64, seconds=1e-6
    )
    for profile, more in ((tiny, True), (decoder(cpu(), blocks=1), False)):
        solved = plan_within(profile, Budgets(device=10**12, host=0, disk=10**12))
        assert isinstance(solved, Solved)
        assert all(unit.states.is_persistent for unit in solved.plan.units)
        standing = sum(unit.parameter_bytes + unit.state_bytes for unit in profile.units)
        expected = profile.base_bytes + standing + SAVING_BYTES
        assert checkpoint_bytes(solved.plan.units, profile) == expected
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(solved_text(solved, profile, Path("plan.yaml")))
        difference = format_bytes(expected - solved.plan.prediction.peak_bytes.device)
        line = f"saving a checkpoint takes {difference} more than a step\n"
        text = console.export_text()
        assert (line in text) == more == ("saving a checkpoint" in text)


# --- what goes wrong ------------------------------------------------------------------------------


def saved_functional(directory: Path, *, seed: int = 0) -> nn.Module:
    model = build("functional", seed=seed)
    save(model, ADAMW(one_group(model)), directory, extra={"seed": seed}, shard_bytes=100_000)
    return model


def offloaded(name: str, folder: Path, **options: Callable[[nn.Module], Any]) -> Pair:
    model = build(name)
    plan = plan_for(model, decided(described(name), KEEP, Placement(tier="disk")))
    given = {key: make(model) for key, make in options.items()}
    return prepare(model, plan, optimizer=ADAMW, spill_directory=folder, **given)


def message(use: Callable[[], object]) -> str:
    with pytest.raises(ProtrainError) as caught:
        use()
    return str(caught.value)


def state_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_a_checkpoint_of_another_model_is_refused_by_name(
    tmp_path: Path, assert_says: Speaker
) -> None:
    def small(width: int, **others: nn.Module) -> nn.Module:
        return nn.ModuleDict({"first": nn.Linear(width, 2, bias=False), **others})

    save(small(3, gone=nn.Linear(2, 1), norm=nn.LayerNorm(2)), None, tmp_path)
    other = small(4, **{f"new_{number}": nn.Linear(1, 1, bias=False) for number in range(5)})
    before = copied(other.state_dict())
    assert_says(message(lambda: load(other, None, tmp_path)))
    assert list(differences(other.state_dict(), before, "")) == []


@pytest.mark.nightly("master", "groups")
@pytest.mark.parametrize(
    "make",
    [
        lambda m: MOMENTUM(m.parameters()),
        lambda m: with_master_weights(ADAMW)(m.parameters()),
        lambda m: ADAMW(weight_decay_groups(m)),
        lambda m: ADAMW(list(m.parameters())[::-1]),
    ],
    ids=["class", "master", "groups", "order"],
)
def test_a_checkpoint_of_another_optimizer_is_refused(
    make: Callable[[nn.Module], torch.optim.Optimizer], tmp_path: Path, assert_says: Speaker
) -> None:
    saved_functional(tmp_path)
    model = build("functional", seed=5)
    before = copied(model.state_dict())
    assert_says(message(lambda: load(model, make(model), tmp_path)))
    assert list(differences(model.state_dict(), before, "")) == []


def test_offloaded_states_have_no_room_for_others(tmp_path: Path, assert_says: Speaker) -> None:
    kind = Kind(partial(torch.optim.AdamW, lr=1e-3, amsgrad=True, fused=True))
    run = kind.start("plain", tmp_path)
    run.step(0)
    save(run.model, run.optimizer, tmp_path / "saved")
    model, optimizer = offloaded("gpt2", tmp_path, param_groups=weight_decay_groups)
    assert_says(message(lambda: load(model, optimizer, tmp_path / "saved")))


def test_where_nothing_can_be_saved(tmp_path: Path, assert_says: Speaker) -> None:
    model, file, theirs = build("functional"), tmp_path / "file", tmp_path / "theirs"
    file.touch()
    build("llama").save_pretrained(theirs)  # type: ignore[operator]
    before = state_of(tmp_path)
    for place in (file, file / "below", theirs):
        assert_says(message(partial(save, model, None, place)))
    unsaved = {"what": [1, object()]}
    assert_says(message(lambda: save(model, None, tmp_path / "weights", extra=unsaved)))
    assert_says(message(lambda: save(model, None, tmp_path / "beside", beside=True)))
    assert state_of(tmp_path) == before


def test_between_backward_and_step_nothing_is_saved_or_loaded(
    tmp_path: Path, assert_says: Speaker
) -> None:
    save(build("functional"), None, tmp_path / "saved")
    model, optimizer = offloaded("functional", tmp_path)
    loss_of(call_model(model, batch("functional", 0))).backward()
    for use in (save, load):
        assert_says(refusal(partial(use, model, optimizer, tmp_path / "saved")))
    optimizer.step()
    save(model, optimizer, tmp_path / "saved")
    load(model, optimizer, tmp_path / "saved")
    strange = ADAMW(model.parameters())
    assert_says(message(lambda: save(model, strange, tmp_path / "saved")))


# --- protrain run ---------------------------------------------------------------------------------


def factory() -> tuple[nn.Module, Iterable[Batch]]:
    """For `protrain run`: GPT-2 with its dropout, on batches without end."""
    return build("gpt2"), (batch("gpt2", number) for number in itertools.count())


def plan_of_factory(**changes: Any) -> Plan:
    own = {"model": "tests.checkpoint.test_saving:factory", "micro_batches": 2}
    units = decided(described("gpt2"), Activations(tier="disk"), Placement(tier="disk"))
    return plan_for(build("gpt2"), units, **own, **changes)


@pytest.mark.slow
def test_a_killed_run_resumes_as_if_nothing_had_happened(tmp_path: Path) -> None:
    plan, directory = tmp_path / "plan.yaml", tmp_path / "saved"
    write_plan(plan_of_factory(), plan)
    endless = ["--steps", "1000000", "--save", str(directory), "--save-every", "2"]
    process = subprocess.Popen(
        [PROTRAIN, "run", str(plan), *endless],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (directory / INDEX).exists() and process.poll() is None:
            time.sleep(0.01)
        assert process.poll() is None, process.stderr and process.stderr.read()
    finally:
        process.kill()
        process.wait(timeout=30)
        assert process.stderr is not None
        process.stderr.close()
    assert process.returncode == -signal.SIGKILL
    done = read_extra(directory)["step"]
    arguments = ("--steps", done + 3, "--resume", directory, "--save", directory)
    resumed = printed(protrain("run", plan, *arguments, "--json", folder=ROOT))
    assert done % 2 == 0
    assert resumed["first_step"] == done
    plain = train(read_plan(plan), num_steps=done + 3, plain=True, spill_directory=None)
    assert resumed["losses"] == list(plain.losses[done:])
    assert resumed["parameters_sha256"] == plain.parameters_sha256
    assert read_extra(directory)["step"] == done + 3


@pytest.mark.nightly
def test_a_run_refuses_what_it_cannot_resume(tmp_path: Path, assert_says: Speaker) -> None:
    def trained(plan: Plan, num_steps: int, **given: Any) -> Run:
        return train(plan, num_steps=num_steps, plain=True, **given)

    plan, saved, others = plan_of_factory(), tmp_path / "saved", tmp_path / "others"
    trained(plan, 1, save=saved)
    save(build("gpt2"), None, others)
    other = with_settings(plan_of_factory(optimizer="sgd"), micro_batches=3)
    for asked, num_steps, directory in ((plan, 1, saved), (other, 2, saved), (plan, 2, others)):
        assert_says(message(partial(trained, asked, num_steps, resume=directory)))
    (tmp_path / "file").touch()
    assert_says(message(lambda: trained(plan, 1, save=tmp_path / "file")))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA")
def test_saving_and_resuming_fit_the_predicted_peak(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def answer(*arguments: object, code: int = 0) -> Any:
        result = protrain(*arguments, "--json", folder=tmp_path)
        assert result.returncode == code, result.stderr
        return json.loads(result.stdout)

    answer("profile", "config.json", "--batch-size", 2, "--seq-len", 128, "--steps", 1)
    least = answer("plan", "profile.yaml", "--device-memory", "1MiB", code=3)
    limit = least["smallest_budget_bytes"]
    answer("plan", "profile.yaml", "--device-memory", limit)
    plain = answer("run", "plan.yaml", "--steps", 5, "--plain")
    limited = ("run", "plan.yaml", "--memory-limit", limit, "--save", "saved")
    first = answer(*limited, "--steps", 3, "--save-every", 2)
    second = answer(*limited, "--steps", 5, "--resume", "saved")
    assert first["losses"] + second["losses"] == plain["losses"]
    assert second["parameters_sha256"] == plain["parameters_sha256"]


# --- interrupted saves ----------------------------------------------------------------------------

SAVES = """
import os, resource, sys, time
import torch
from pathlib import Path
from protrain_runtime.contract.errors import ProtrainError
from protrain_plan.models.building import seeded
from protrain_runtime import save
from tests.support.functional_model import FunctionalStack
how, number, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
if how == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
else:  # to stop at a call of fsync, or to count the calls
    sync, count = os.fsync, 0
    def stop(descriptor):
        global count
        count += 1
        if count == number:
            print("in the middle", flush=True)
            time.sleep(60)
        sync(descriptor)
    os.fsync = stop
with seeded(1):
    model = FunctionalStack()
optimizer = torch.optim.AdamW(model.parameters())
try:
    save(model, optimizer, directory, extra={"seed": 1}, shard_bytes=100_000)
except ProtrainError as error:
    print(error, flush=True)
else:
    print(count if how == "count" else "saved", flush=True)
"""


def saving(how: str, number: int, directory: Path) -> subprocess.Popen[str]:
    paths = [str(ROOT), str(ROOT / "runtime")]
    return subprocess.Popen(
        [sys.executable, "-c", SAVES, how, str(number), str(directory)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_FSIZE")
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, assert_says: Speaker) -> None:
    saved_functional(tmp_path)
    before = state_of(tmp_path)
    said, _ = saving("limit", 50_000, tmp_path).communicate(timeout=120)
    assert_says(said)
    assert state_of(tmp_path) == before


@pytest.mark.nightly(but=("second file",))
@pytest.mark.parametrize(
    ("place", "left"),
    [
        pytest.param(1, 0, id="second file", marks=pytest.mark.slow),
        pytest.param(-2, 0, id="index"),
        pytest.param(-1, 1, id="after the index"),
    ],
)
def test_a_save_that_is_killed_leaves_one_whole_checkpoint(
    place: int, left: int, tmp_path: Path, assert_says: Speaker
) -> None:
    """At one of its calls of fsync, of which the last but one is the index's.

    What is left is the checkpoint before (0) or the new one (1).
    """
    counted = saving("count", 0, tmp_path)
    said, _ = counted.communicate(timeout=120)
    number = range(1, 1 + int(said))[place]
    saved_functional(tmp_path)
    before = state_of(tmp_path)
    process = saving("stop", number, tmp_path)
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said == "in the middle\n"
    assert_says.refused(save, build("functional"), None, tmp_path)
    process.kill()
    process.wait(timeout=30)
    process.stdout.close()
    model = build("functional", seed=5)
    assert load(model, ADAMW(one_group(model)), tmp_path) == {"seed": left}
    expected = build("functional", seed=left).state_dict()
    assert list(differences(model.state_dict(), expected, "")) == []
    assert (before.items() <= state_of(tmp_path).items()) or left == 1
    saved_functional(tmp_path, seed=2)
    assert len(list(tmp_path.iterdir())) == 2  # the index, and the one folder that it names
