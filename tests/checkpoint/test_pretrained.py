"""Folders that transformers and PEFT read without us, written from wherever values lie."""

import importlib.util
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protrain_runtime import prepare, save_pretrained
from protrain_runtime.contract.records.plan import KEEP, PERSISTENT, DeviceGroup, Placement
from tests.support import quantized_models
from tests.support.faults import file_limit
from tests.support.messages import Speaker
from tests.support.plan_settings import with_settings
from tests.support.ranks_cases import run_ranks
from tests.support.ranks_loops import in_turn
from tests.support.runtime_cases import (
    ADAMW,
    CATALOGUE,
    MODELS,
    Subject,
    copied,
    decided,
    described,
    differences,
    mixed,
    plan_for,
)
from tests.support.scenario import Run

OF_TRANSFORMERS = [name for name in MODELS if not name.startswith("functional")]


def trained(name: str, folder: Path, *, steps: int = 2) -> Any:
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
    model, saved = trained(name, tmp_path), tmp_path / "saved"
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
    before, model = trained("llama", tmp_path, steps=0), trained("llama", tmp_path)
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
        with_settings(plan_for(subject.build(), units), group=DeviceGroup(num_devices=count)),
        optimizer=ADAMW,
        spill_directory=folder,
    )
    for shard_bytes in (100_000, 2**30):
        save_pretrained(model, folder / f"saved {shard_bytes}", shard_bytes=shard_bytes)


def test_two_ranks_write_one_folder(tmp_path: Path) -> None:
    run_ranks(saving, 2, tmp_path, tmp_path)
    for folder in tmp_path.glob("saved *"):
        assert_reads(CATALOGUE["llama-tied"].build(0), folder)
