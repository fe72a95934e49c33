"""A model that has never been whole in memory trains as one that was built, loaded and prepared."""

import importlib.util
import json
import os
import random
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from protrain_plan.models.adapters import adapted
from protrain_plan.models.building import seeded
from protrain_runtime import prepare, restore, save, save_pretrained, without_parameters
from protrain_runtime.checkpoint.files import joined_sums
from protrain_runtime.checkpoint.index import INDEX
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import KEEP, PERSISTENT, Placement, Plan
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import process_memory, return_freed_memory
from tests.support import quantized_models
from tests.support.cards import every_device
from tests.support.faults import data_limit, descriptors, file_limit
from tests.support.forked import CONTEXT
from tests.support.hostile_models import Chain
from tests.support.messages import Speaker
from tests.support.operator_logs import looking
from tests.support.quantized_models import PACKINGS, base, packed_with_adapters
from tests.support.ranks_cases import run_ranks
from tests.support.ranks_loops import in_turn
from tests.support.runtime_cases import (
    ADAMW,
    CATALOGUE,
    MODELS,
    Subject,
    assert_bitwise,
    attached,
    copied,
    decided,
    described,
    device,
    differences,
    mixed,
    plan_for,
)
from tests.support.scenario import Run

How = Literal["function", "inside", "on meta"]


def without_values(subject: Subject, how: How = "function") -> Any:
    """The model as `prepare` takes it with weights."""
    if how == "function":
        return partial(subject.build, 1)
    with without_parameters() if how == "inside" else torch.device("meta"):
        return subject.make().train()


def trained(subject: Subject, model: Any, plan: Plan, folder: Path, **options: Any) -> Run:
    """Three steps under a plan."""
    planned, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=folder, **options)
    run = Run(subject, planned, optimizer, folder=folder)
    with seeded(3):
        run.step(0, 1, 2)
    return run


def assert_like_the_whole(
    subject: Subject, plan: Plan, folder: Path, weights: Path, given: Any, values: nn.Module
) -> Run:
    """The bits of training from `weights` are those of a model with their `values`."""
    whole = subject.build(2)
    whole.load_state_dict(values.state_dict())
    expected = trained(subject, whole, plan, folder).outcome()
    run = trained(subject, given, plan, folder, weights=weights)
    assert_bitwise(run.outcome(), expected)
    return run


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("number", range(3))
def test_every_placement_has_the_bits_of_the_whole_model(
    name: str, number: int, tmp_path: Path
) -> None:
    subject = CATALOGUE[name]
    ways: tuple[How, ...] = ("function", "inside", "on meta")
    values = subject.build(7)
    if hasattr(values, "save_pretrained"):
        values.save_pretrained(tmp_path / "saved", max_shard_size="100KB" if number else "1GB")  # type: ignore[operator]
    else:
        save(values, None, tmp_path / "saved", shard_bytes=100_000)
    plan = plan_for(values, mixed(described(name), random.Random(number), "disk", "host"))
    given = without_values(subject, ways[number])
    run = assert_like_the_whole(subject, plan, tmp_path, tmp_path / "saved", given, values)
    trained_values = copied(run.model.state_dict())
    restore(run.model)
    assert list(differences(run.model.state_dict(), trained_values, "restored")) == []


@pytest.mark.parametrize("states", [PERSISTENT, Placement(tier="host")], ids=["all", "nothing"])
def test_a_plan_that_keeps_all_and_one_that_keeps_nothing(
    states: Placement, tmp_path: Path
) -> None:
    subject, values = CATALOGUE["llama"], CATALOGUE["llama"].build(7)
    save(values, None, tmp_path / "saved")
    plan = plan_for(values, decided(described("llama"), KEEP, states))
    given = without_values(subject)
    assert_like_the_whole(subject, plan, tmp_path, tmp_path / "saved", given, values)


@pytest.mark.nightly(but=("to0-dtypes1",))
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
def test_numbers_are_cast_as_load_state_dict_casts(
    dtypes: tuple[torch.dtype, ...], to: torch.dtype, tmp_path: Path
) -> None:
    own = CATALOGUE["llama-tied"]
    subject = replace(own, change=lambda model: model.to(to))
    values = subject.build(7)
    tensors = {n: p.detach().clone() for n, p in values.named_parameters()}
    for number, name in enumerate(tensors):
        tensors[name] = tensors[name].to(dtypes[number % 2])
    (tmp_path / "saved").mkdir()
    save_file(tensors, tmp_path / "saved" / "model.safetensors")
    values.load_state_dict(tensors, strict=False)
    plan = plan_for(values, mixed(described("llama-tied"), random.Random(4), "disk", "host"))
    given = without_values(subject)
    assert_like_the_whole(subject, plan, tmp_path, tmp_path / "saved", given, values)


@pytest.mark.nightly
def test_a_plain_copy_is_trained_beside_a_model_from_files(tmp_path: Path) -> None:
    subject, values = CATALOGUE["gpt2"], CATALOGUE["gpt2"].build(7)
    save(values, None, tmp_path / "saved")
    plan = plan_for(values, mixed(described("gpt2"), random.Random(1), "disk", "host"))
    trained(
        subject,
        without_values(subject),
        plan,
        tmp_path,
        weights=tmp_path / "saved",
        check="bitwise",
    )


@pytest.mark.nightly(but=("from files-cuda", "drawn-cuda"))
@every_device
@pytest.mark.parametrize("reads", [True, False], ids=["from files", "drawn"])
def test_every_device_has_the_bits_of_the_whole_model(reads: bool, tmp_path: Path) -> None:
    subject = CATALOGUE["llama-tied"]
    values = subject.build(1)
    save(values, None, tmp_path / "saved")
    units = mixed(described("llama-tied"), random.Random(3), "disk", "host")
    plan = plan_for(values, units, device=device().type)
    expected = trained(subject, values, plan, tmp_path).outcome()
    options: dict[str, Any] = {"weights": tmp_path / "saved"} if reads else {}
    given = partial(subject.build, 1) if reads else make_on_the_host
    with devices.current(device()):
        run = trained(subject, given, plan, tmp_path, **options)
    assert_bitwise(run.outcome(), expected)


def make_on_the_host() -> nn.Module:
    with seeded(1):
        return CATALOGUE["llama-tied"].make().train()


# --- buffers --------------------------------------------------------------------------------------


class Block(nn.Module):
    table: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(8.0).sin(), persistent=False)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, 8], twice
        moved: Tensor = self.linear(hidden - self.mean)
        return hidden + moved * self.table


def buffers() -> nn.Module:
    """Buffers that checkpoints have, and tables that only the constructor knows."""
    return Chain(Block(), Block())


BUFFERS = Subject(buffers, lambda number: torch.full((2, 8), 0.5 + number))


def buffers_saved(folder: Path) -> tuple[nn.Module, Plan]:
    values = BUFFERS.build(7)
    for number, buffer in enumerate(values.get_submodule("layers").buffers()):
        if number % 2:
            buffer.fill_(number)
    save(values, None, folder)
    units = decided(BUFFERS.units(), KEEP, Placement(tier="host"))
    return values, plan_for(values, units)


def test_buffers_are_the_checkpoint_s_or_the_constructor_s(tmp_path: Path) -> None:
    values, plan = buffers_saved(tmp_path / "saved")
    given = without_values(BUFFERS)
    run = assert_like_the_whole(BUFFERS, plan, tmp_path, tmp_path / "saved", given, values)
    for own, theirs in zip(run.model.buffers(), values.buffers(), strict=True):
        assert torch.equal(own, theirs)


def test_a_table_that_nothing_tells_is_refused(tmp_path: Path, assert_says: Speaker) -> None:
    _, plan = buffers_saved(tmp_path / "saved")
    model = without_values(BUFFERS, "on meta")
    assert_says.refused(prepare, model, plan, optimizer=ADAMW, weights=tmp_path / "saved")
    assert all(tensor.is_meta for tensor in model.state_dict().values())


# --- what is refused ------------------------------------------------------------------------------


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def cut_off(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    os.truncate(path, path.stat().st_size - 100)


def removed(files: str, some: slice, folder: Path) -> None:
    for path in sorted(folder.glob(files))[some]:
        path.unlink()


def with_other_keys(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    files = index["weight_map"]
    lost = next(name for name in files if "mlp.up_proj" in name)
    file = files.pop(lost)
    files["model.layers.0.extra"] = file
    (folder / INDEX).write_text(json.dumps(index))
    path = folder / file
    tensors = load_file(path)
    tensors["model.layers.0.extra"] = tensors.pop(lost)
    save_file(tensors, path)


SPOILT: dict[str, Callable[[Path], object]] = {
    "cut off": cut_off,
    "without a file": partial(removed, "*.safetensors", slice(1, 2)),
    "with a file that lacks a key": partial(rewritten, change=lambda t: t.pop(min(t))),
    "with another shape": partial(
        rewritten, change=lambda t: t.update({min(t): torch.zeros(3, 3)})
    ),
    "with whole numbers": partial(
        rewritten, change=lambda t: t.update({min(t): t[min(t)].to(torch.int32)})
    ),
    "with other keys": with_other_keys,
    "that is empty": partial(removed, "*", slice(None)),
}


def refused(model: Any, plan: Plan, folder: Path, weights: Path) -> ProtrainError:
    """The error of `prepare`, which leaves the model as it was and nothing open."""
    before, meta = attached(model), dict(model.named_parameters())
    open_before = descriptors()
    with pytest.raises(ProtrainError) as caught:
        prepare(model, plan, optimizer=ADAMW, spill_directory=folder, weights=weights)
    assert attached(model) == before
    after = dict(model.named_parameters())
    assert all(after[name] is parameter and parameter.is_meta for name, parameter in meta.items())
    assert all(type(parameter) is nn.Parameter for parameter in after.values())
    assert descriptors() == open_before
    return caught.value


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_bad_folder_is_one_error_and_a_good_one_loads_after_it(
    spoilt: str, tmp_path: Path, assert_says: Speaker
) -> None:
    subject, values = CATALOGUE["llama"], CATALOGUE["llama"].build(7)
    for name in ("bad", "good"):
        values.save_pretrained(tmp_path / name, max_shard_size="100KB")  # type: ignore[operator]
    SPOILT[spoilt](tmp_path / "bad")
    plan = plan_for(values, mixed(described("llama"), random.Random(2), "disk", "host"))
    model = without_values(subject, "inside")
    assert_says(refused(model, plan, tmp_path, tmp_path / "bad"))
    options: dict[str, Any] = {"spill_directory": tmp_path, "weights": tmp_path / "good"}
    prepare(model, plan, optimizer=ADAMW, **options)
    assert list(differences(model.state_dict(), copied(values.state_dict()), "")) == []


def test_a_damaged_checkpoint_of_ours_is_found_while_it_is_read(
    tmp_path: Path, assert_says: Speaker
) -> None:
    subject, values = CATALOGUE["llama"], CATALOGUE["llama"].build(7)
    save(values, None, tmp_path / "saved", shard_bytes=100_000)
    path = sorted(tmp_path.glob("saved/*/model-*"))[-1]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    plan = plan_for(values, mixed(described("llama"), random.Random(2), "disk", "host"))
    assert_says(refused(without_values(subject, "inside"), plan, tmp_path, tmp_path / "saved"))


def test_a_full_disk_leaves_the_model_as_it_was(tmp_path: Path, assert_says: Speaker) -> None:
    subject, values = CATALOGUE["llama"], CATALOGUE["llama"].build(7)
    save(values, None, tmp_path / "saved")
    plan = plan_for(values, decided(described("llama"), KEEP, Placement(tier="disk")))
    with file_limit(300_000):
        error = refused(without_values(subject, "inside"), plan, tmp_path, tmp_path / "saved")
    assert_says(error)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write to a file when numbers have been copied once."""
    copied: list[Any] = []

    def look(func: Any, *_: object) -> None:
        if func is torch.ops.aten.copy_.default and not copied:
            copied.append(func)
            path.write_bytes(path.read_bytes())

    with looking(look):
        yield


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    subject, values = CATALOGUE["llama"], CATALOGUE["llama"].build(7)
    values.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    os.utime(tmp_path / "saved" / "model.safetensors", (1, 1))
    plan = plan_for(values, decided(described("llama"), KEEP, Placement(tier="host")))
    model = without_values(subject, "inside")
    with writing(tmp_path / "saved" / "model.safetensors"):
        error = refused(model, plan, tmp_path, tmp_path / "saved")
    assert_says(error)


def test_joined_sums_are_those_of_joined_bytes() -> None:
    rng = random.Random(0)
    for _ in range(20):
        one, other = (rng.randbytes(rng.randrange(3000)) for _ in range(2))
        sums = zlib.crc32(one), zlib.crc32(other)
        assert joined_sums(*sums, len(other)) == zlib.crc32(one + other)


# --- packed weights and adapters ------------------------------------------------------------------

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
)


@pytest.mark.parametrize("kept_in", ["float32", "base"])
def test_adapters_are_there_and_the_base_is_not(kept_in: str) -> None:
    def made() -> nn.Module:
        with seeded(7):
            return adapted(
                quantized_models.llama().bfloat16(), f"lora r=2 dtype={kept_in}", source=""
            )

    whole = dict(made().named_parameters())
    with without_parameters():
        absent = made()
    for name, parameter in absent.named_parameters():
        if parameter.requires_grad:
            assert parameter.shape == whole[name].shape
            assert parameter.dtype == whole[name].dtype
        assert parameter.is_meta != parameter.requires_grad


@pytest.mark.nightly
@needs_bitsandbytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kinds", PACKINGS)
def test_layers_are_packed_as_they_are_read(kinds: str, dtype: torch.dtype, tmp_path: Path) -> None:
    batches = quantized_models.batches()
    subject = Subject(
        partial(packed_with_adapters, PACKINGS[kinds], partial(base, torch.float32), ["cpu"]),
        lambda number: batches[number % 2],
    )
    units = subject.units()
    base(dtype).to(dtype).save_pretrained(tmp_path / "saved")
    whole = packed_with_adapters(PACKINGS[kinds], partial(base, dtype), ["cpu"])
    plan = plan_for(whole, mixed(units, random.Random(1), "disk", "host"))
    adapters = [{"params": [p for p in whole.parameters() if p.requires_grad]}]
    given = partial(packed_with_adapters, PACKINGS[kinds], quantized_models.llama)
    runs = []
    for model, options in (
        (whole, {"param_groups": adapters}),
        (given, {"weights": tmp_path / "saved"}),
    ):
        runs.append(trained(subject, model, plan, tmp_path, **options))
    assert_bitwise(runs[1].outcome(), runs[0].outcome())
    # And from a checkpoint with packed bytes, adapters and all.
    save(runs[0].model, None, tmp_path / "packed")
    again, _ = prepare(
        given, plan, optimizer=ADAMW, weights=tmp_path / "packed", spill_directory=tmp_path
    )
    assert list(differences(again.state_dict(), copied(runs[0].model.state_dict()), "packed")) == []


# --- without a checkpoint -------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_new_model_has_the_numbers_of_its_constructor(
    name: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    subject = CATALOGUE[name]
    if dtype is not None:
        subject = replace(subject, change=lambda model: model.to(dtype))
    plan = plan_for(subject.build(), mixed(described(name), random.Random(5), "disk", "host"))
    expected = trained(subject, subject.build(1), plan, tmp_path).outcome()
    run = trained(subject, partial(subject.build, 1), plan, tmp_path)
    assert_bitwise(run.outcome(), expected)


# --- memory ---------------------------------------------------------------------------------------

WIDTH, NUM_BLOCKS = 1024, 32  # 128 MiB, in units of 4
SLACK_BYTES = 32 * 2**20  # lanes and a programme take some 20 MiB


SGD = partial(torch.optim.SGD, lr=2**-7)
WIDE = Subject(
    lambda: Chain(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS))),
    lambda number: torch.full((2, WIDTH), 1.0 + number),
)


def ended(work: Callable[..., object], folder: Path, *arguments: object) -> str:
    """How work ends in a process of its own."""
    process = CONTEXT.Process(target=_run, args=(work, folder, *arguments))
    process.start()
    process.join(200)
    assert process.exitcode == 0
    return (folder / "told").read_text()


def _run(work: Callable[..., object], folder: Path, *arguments: object) -> None:
    torch.set_num_threads(1)
    return_freed_memory()
    try:
        work(folder, *arguments)
    except Exception as error:  # noqa: BLE001 - told to the test
        (folder / "told").write_text("".join(traceback.format_exception(error)))
    else:
        (folder / "told").write_text("ended")


def limited() -> AbstractContextManager[None]:
    """The process may have SLACK_BYTES more than it has."""
    return data_limit(process_memory().data_bytes + SLACK_BYTES)


def prepare_and_train(folder: Path, plans: Sequence[Plan], weights: Path | None) -> None:
    for subject, plan, small in zip((BUFFERS, WIDE), plans, (True, False), strict=True):
        options: dict[str, Any] = {"optimizer": SGD, "spill_directory": folder}
        if weights is not None:
            options["weights"] = folder / "small" if small else weights
        with nullcontext() if small else limited():  # the first one starts what starts once
            model, optimizer = prepare(partial(subject.build, 1), plan, **options)
    run = Run(WIDE, model, optimizer, folder=folder)
    run.step(0, 1)
    (folder / "losses.json").write_text(json.dumps([loss.item() for loss in run.seen]))


def build_whole(_: Path) -> None:
    with limited():
        WIDE.build(1)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA")
def test_a_model_of_four_times_the_memory_is_loaded_and_drawn(tmp_path: Path) -> None:
    values = WIDE.build(1)
    assert sum(p.nbytes for p in values.parameters()) == 4 * SLACK_BYTES
    save(values, None, tmp_path / "saved", shard_bytes=2**25)
    plans = [
        buffers_saved(tmp_path / "small")[1],
        plan_for(values, decided(WIDE.units(), KEEP, Placement(tier="disk"))),
    ]
    run = Run(WIDE, values, SGD(values.parameters()))
    run.step(0, 1)
    for weights in (tmp_path / "saved", None):
        assert ended(prepare_and_train, tmp_path, plans, weights) == "ended"
        found = json.loads((tmp_path / "losses.json").read_text())
        assert found == [loss.item() for loss in run.seen]
    assert "can't allocate memory" in ended(build_whole, tmp_path)


# --- folders that transformers and PEFT read without us -------------------------------------------


OF_TRANSFORMERS = [name for name in MODELS if not name.startswith("functional")]


def on_its_way(name: str, folder: Path, *, steps: int = 2) -> Any:
    """A model under a plan with every placement, on its way."""
    subject = CATALOGUE[name]
    units = mixed(described(name), random.Random(6), "disk", "host")
    planned, optimizer = prepare(
        partial(subject.build, 1),
        plan_for(subject.build(), units),
        optimizer=ADAMW,
        spill_directory=folder,
    )
    Run(subject, planned, optimizer, folder=folder).step(*range(steps))
    return planned


def assert_reads(model: nn.Module, folder: Path) -> None:
    read, info = type(model).from_pretrained(folder, output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(info.values()), info
    assert list(differences(read.state_dict(), copied(model.state_dict()), "")) == []


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.nightly("llama", "gpt2")
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_transformers_reads_what_is_saved_and_saved_again(name: str, tmp_path: Path) -> None:
    model, saved = on_its_way(name, tmp_path), tmp_path / "saved"
    for shard_bytes in (2**30, 100_000, 100_000, 2**30):
        save_pretrained(model, saved, shard_bytes=shard_bytes)
        assert_reads(model, saved)
    model.config.architectures = [type(model).__name__]
    type(model).from_pretrained(saved).save_pretrained(tmp_path / "theirs")
    assert names_in(saved) == names_in(tmp_path / "theirs")
    assert (saved / "config.json").read_text() == (tmp_path / "theirs/config.json").read_text()


@pytest.mark.parametrize("shard_bytes", [2**30, 100_000], ids=["one file", "several"])
def test_a_full_disk_leaves_what_was_there(
    shard_bytes: int, tmp_path: Path, assert_says: Speaker
) -> None:
    before, model = on_its_way("llama", tmp_path, steps=0), on_its_way("llama", tmp_path)
    save_pretrained(before, tmp_path / "saved", shard_bytes=shard_bytes)
    names = names_in(tmp_path / "saved")
    with file_limit(90_000):
        assert_says.refused(save_pretrained, model, tmp_path / "saved", shard_bytes=shard_bytes)
    assert names_in(tmp_path / "saved") == names
    assert_reads(before, tmp_path / "saved")


# --- adapters -------------------------------------------------------------------------------------


def with_adapters(*, packs: bool) -> Any:
    model = quantized_models.llama()
    if packs:
        quantized_models.replace_linears(model, quantized_models.packed)
    return quantized_models.with_adapters(model.to("cpu")).train()


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes")
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "plain"])
def test_peft_reads_adapters_alone(packs: bool, tmp_path: Path) -> None:
    peft: Any = importlib.import_module("peft")
    batches = quantized_models.batches()
    make = partial(with_adapters, packs=packs)
    subject = Subject(make, lambda number: batches[number % 2])
    units = decided(subject.units(), KEEP, Placement(tier="disk"))
    planned: Any
    planned, optimizer = prepare(
        subject.build(1),
        plan_for(subject.build(), units),
        optimizer=ADAMW,
        spill_directory=tmp_path,
    )
    Run(subject, planned, optimizer, folder=tmp_path).step(0, 1)
    save_pretrained(planned, tmp_path / "saved")
    assert names_in(tmp_path / "saved") == ["adapter_config.json", "adapter_model.safetensors"]
    read = peft.PeftModel.from_pretrained(make().get_base_model(), tmp_path / "saved")
    trained_names = [name for name, p in planned.named_parameters() if p.requires_grad]
    own, theirs = planned.state_dict(), read.state_dict()
    assert trained_names
    assert all(torch.equal(own[name], theirs[name]) for name in trained_names)


# --- ranks ----------------------------------------------------------------------------------------


def saving(rank: int, count: int, folder: Path) -> Any:
    subject = CATALOGUE["llama-tied"]
    units = in_turn(
        "llama-tied",
        *(PERSISTENT, Placement(tier="device"), Placement(tier="host"), Placement(tier="disk")),
    )
    model, _ = prepare(
        subject.build(rank),
        plan_for(subject.build(), units, num_devices=count),
        optimizer=ADAMW,
        spill_directory=folder,
    )
    for shard_bytes in (100_000, 2**30):
        save_pretrained(model, folder / f"saved {shard_bytes}", shard_bytes=shard_bytes)


def test_two_ranks_write_one_folder(tmp_path: Path) -> None:
    run_ranks(saving, 2, tmp_path, tmp_path)
    for folder in tmp_path.glob("saved *"):
        assert_reads(CATALOGUE["llama-tied"].build(0), folder)
