"""Ranks that load a model which none of them has whole: same bits, and each byte is read once."""

import importlib.util
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protrain_runtime import prepare, save
from protrain_runtime.checkpoint.index import Saved
from protrain_runtime.contract.records.plan import KEEP, PERSISTENT, Placement, Plan
from tests.support import quantized_models
from tests.support.quantized_models import PACKINGS, base, packed_with_adapters
from tests.support.ranks_cases import end_ranks, ranks_on_every_device_at_night, run_ranks
from tests.support.runtime_cases import CATALOGUE, Subject, copied, decided, differences, plan_for

PLACES = (Placement(tier="device"), PERSISTENT, Placement(tier="host"), Placement(tier="disk"))
SGD = partial(torch.optim.SGD, lr=2**-7)


class Wide(nn.Module):
    """Some megabytes in few tensors: headers and messages of ranks are small beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(512, 512, bias=n % 2 == 0) for n in range(16)))
        self.register_buffer("scale", torch.ones(512))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [batch, 512] -> []
        loss: torch.Tensor = (self.blocks(hidden) * self.scale).square().mean()
        return loss


KINDS = PACKINGS["fp4 and int8"]
CATALOGUE["packed"] = Subject(
    partial(packed_with_adapters, KINDS, quantized_models.llama),
    lambda number: quantized_models.batches()[number % 2],
)
CATALOGUE["wide"] = Subject(Wide, lambda number: torch.full((2, 512), 1.0 + number))


def plan_of(subject: Subject, count: int) -> Plan:
    units = tuple(
        replace(unit, states=PLACES[number % len(PLACES)])
        for number, unit in enumerate(decided(subject.units(), KEEP, PERSISTENT))
    )
    return plan_for(subject.build(), units, num_devices=count)


def read_bytes() -> int:
    """The bytes that this process has had from reads, of files and of sockets."""
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found is not None
    return int(found[1])


def loading(
    rank: int, count: int, name: str, plan: Plan, folder: Path, weights: Path | None
) -> tuple[int, dict[str, Any]]:
    """The bytes that a rank read from files, and the model that it has then."""
    spill, options = folder / str(rank), {"optimizer": SGD, "wait_limit_s": 60.0}
    spill.mkdir(exist_ok=True)
    for _ in range(2):  # the first time libraries are read, too
        before = read_bytes()
        model, _ = prepare(
            partial(CATALOGUE[name].build, rank),
            plan,
            spill_directory=spill,
            weights=weights,
            **options,  # type: ignore[arg-type]
        )
        read = read_bytes() - before
    return read, copied(model.state_dict())


@pytest.mark.nightly(
    "cpu-a checkpoint of ours-4", "cpu-one of transformers-2", "cpu-one of transformers-4"
)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("ours", [True, False], ids=["a checkpoint of ours", "one of transformers"])
@ranks_on_every_device_at_night
def test_ranks_have_the_values_of_the_files(count: int, ours: bool, tmp_path: Path) -> None:
    values: Any = CATALOGUE["llama-tied"].build(7)
    if ours:
        save(values, None, tmp_path / "saved", shard_bytes=200_000)
    else:
        values.save_pretrained(tmp_path / "saved", max_shard_size="200KB")
    plan = plan_of(CATALOGUE["llama-tied"], count)
    for _, found in run_ranks(
        loading, count, tmp_path, "llama-tied", plan, tmp_path, tmp_path / "saved"
    ):
        assert list(differences(found, copied(values.state_dict()), "")) == []


def test_ranks_have_the_numbers_that_rank_0_draws(tmp_path: Path) -> None:
    plan = plan_of(CATALOGUE["llama-tied"], 2)
    for _, found in run_ranks(loading, 2, tmp_path, "llama-tied", plan, tmp_path, None):
        assert (
            list(differences(found, copied(CATALOGUE["llama-tied"].build(0).state_dict()), ""))
            == []
        )


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes")
def test_ranks_pack_layers_in_turn(tmp_path: Path) -> None:
    plain = base(torch.float32)
    plain.save_pretrained(tmp_path / "saved")
    values = packed_with_adapters(KINDS, lambda: plain, ["cpu"])
    subject = replace(CATALOGUE["packed"], make=lambda: values)
    plan, arguments = plan_of(subject, 2), (tmp_path, tmp_path / "saved")
    for _, found in run_ranks(loading, 2, tmp_path, "packed", plan, *arguments):
        assert list(differences(found, copied(values.state_dict()), "")) == []


def test_damage_that_one_rank_reads_is_told_to_all(tmp_path: Path) -> None:
    values = CATALOGUE["wide"].build(7)
    save(values, None, tmp_path / "saved")
    part = Saved(tmp_path / "saved").entries("model")["blocks.0.weight"].parts[0]
    content = bytearray(part.path.read_bytes())
    content[part.start] ^= 1
    part.path.write_bytes(content)
    plan = plan_of(CATALOGUE["wide"], 2)
    ended = end_ranks(loading, 2, tmp_path, "wide", plan, tmp_path, tmp_path / "saved")
    told = f"{part.path}: the file is damaged: its checksum does not match"
    assert all(told in end.error for end in ended)


@pytest.mark.nightly("4")
@pytest.mark.parametrize("count", [2, 4])
def test_together_they_read_each_byte_once(count: int, tmp_path: Path) -> None:
    values = CATALOGUE["wide"].build(7)
    save(values, None, tmp_path / "saved", shard_bytes=2**22)
    plan = plan_of(CATALOGUE["wide"], count)
    ended = run_ranks(loading, count, tmp_path, "wide", plan, tmp_path, tmp_path / "saved")
    size = sum(tensor.nbytes for tensor in values.state_dict().values())
    together = sum(read for read, _ in ended)
    assert size <= together <= size + count * 2**18
    assert max(read for read, _ in ended) <= size / count * 1.2 + 2**18
