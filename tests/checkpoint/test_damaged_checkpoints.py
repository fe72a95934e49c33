"""Checkpoints that are damaged, or were made to do harm: refused, and nothing has changed."""

import itertools
import json
import os
import random
import resource
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import asdict
from safetensors.torch import load as loaded_by_the_package
from torch import Tensor, nn

from protrain_plan.models.building import seeded
from protrain_runtime import load, prepare, save
from protrain_runtime.checkpoint.entries import fill_values
from protrain_runtime.checkpoint.files import Sums
from protrain_runtime.checkpoint.index import INDEX, Saved, seal
from protrain_runtime.checkpoint.loading import read_extra
from protrain_runtime.checkpoint.saving import write_file
from protrain_runtime.checkpoint.training import encoded, read_training
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import KEEP, PERSISTENT, Placement
from protrain_runtime.states.values import Held, Source
from tests.support.ranks_cases import run_ranks
from tests.support.runtime_cases import copied, decided, differences, made_once, plan_for, units_of


class Block(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, 2], twice
        moved: Tensor = self.linear(hidden * self.scale)
        return hidden + moved


class Tiny(nn.Module):
    """As little as can be, of every sort: blocks, a buffer, a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(80, 2))  # so much that ranks share it
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 2)
        self.calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [batch] -> []
        self.calls += 1
        hidden = nn.functional.embedding(tokens, self.embedding)
        for block in self.blocks:
            hidden = block(hidden)
        loss: Tensor = self.head(hidden).square().mean()
        return loss


TOKENS = torch.tensor([0, 1, 2, 3])
EXTRA = {"step": 1, "scale": torch.tensor([2.0, 3.0])}
FOLDER = "protrain-save-1"
FIX = "\n  fix: load another checkpoint"
DAMAGED_FILE = "the file is damaged: its checksum does not match"


@dataclass
class Training:
    """A model and its optimizer after a step, and all that a load could change of them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        self.model(TOKENS).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[Any]:
        own = [copied(self.model.state_dict()), copied(self.optimizer.state_dict())]
        return [*own, torch.get_rng_state(), random.getstate()]

    def refuses(self, directory: Path, *, optimizer: bool = True) -> ProtrainError:
        """The error; fails where it loads, raises something else, or has changed anything."""
        before = self.state()
        with pytest.raises(ProtrainError) as caught:
            load(self.model, self.optimizer if optimizer else None, directory)
        assert list(differences(self.state(), before, "state")) == []
        return caught.value


def trained(tier: str, folder: Path, *, seed: int, count: int = 1) -> Training:
    with seeded(seed):
        model: nn.Module = Tiny()
    factory = partial(torch.optim.AdamW, lr=seed / 100)
    if tier == "plain":
        training = Training(model, factory(model.parameters()))
    else:
        below: Placement = Placement(tier="disk" if tier == "disk" else "device")
        *units, head = decided(units_of(Tiny(), TOKENS), KEEP, below)
        units.append(replace(head, states=PERSISTENT))
        plan = plan_for(model, units, piece_bytes=64, num_devices=count)
        made = prepare(model, plan, optimizer=factory, spill_directory=folder, wait_limit_s=60)
        training = Training(*made)
    training.step()
    return training


# ---- a checkpoint of one device, one of two ranks, and what ranks say of damage ------------------

DAMAGED = (INDEX, "rank-0-model-", "rank-1-optimizer-", "rank-0-training-")
"""Files that two ranks find damaged, one at a time, by a bit."""


def named(directory: Path, start: str) -> Path:
    return next(path for path in files_of(directory) if path.name.startswith(start))


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def saving_and_meeting_damage(rank: int, count: int, directory: Path) -> tuple[list[str], int]:
    """Errors of the damaged ones, and the step of the whole one."""
    training = trained("shared", directory, seed=1, count=count)
    save(training.model, training.optimizer, directory, extra=EXTRA, shard_bytes=400)
    training.step()
    told = []

    def attempt(directory: Path) -> None:
        before = [copied(training.model.state_dict()), copied(training.optimizer.state_dict())]
        dist.barrier()
        try:
            load(training.model, training.optimizer, directory)
            told.append("nothing was raised")
        except ProtrainError as error:
            told.append(str(error).replace(str(directory.parent), "DIR"))
        dist.barrier()
        after = [copied(training.model.state_dict()), copied(training.optimizer.state_dict())]
        assert list(differences(after, before, "")) == []

    for start in DAMAGED:
        path = named(directory, start)
        position = path.stat().st_size - 1 if path.name != INDEX else 30
        if rank == 0:
            flip(path, position)
        attempt(directory)
        if rank == 0:
            flip(path, position)
        dist.barrier()
    # As where each has a disk of its own, and one lacks a file.
    own = directory.parent / f"disk-{rank}"
    copytree(directory, own)
    if rank == 1:
        named(own, "rank-1-model").unlink()
    attempt(own)
    training.step()  # all are alive, and go on together
    return told, load(training.model, training.optimizer, directory)["step"]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(path: Path) -> None:
        (path / "work").mkdir(parents=True)
        results = run_ranks(saving_and_meeting_damage, 2, path / "work", path / "saved")
        (path / "results.json").write_text(json.dumps(results))

    return made_once(tmp_path_factory, "ranks-damage", make)


def of_one(directory: Path, *, seed: int = 1) -> Path:
    training = trained("plain", directory, seed=seed)
    save(training.model, training.optimizer, directory, extra=EXTRA, shard_bytes=400)
    return directory


@pytest.fixture(scope="module", params=["of one", pytest.param("of two", marks=pytest.mark.slow)])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, to be copied."""
    if request.param == "of one":
        return of_one(tmp_path_factory.mktemp("whole") / "saved")
    return Path(request.getfixturevalue("of_ranks")) / "saved"


@pytest.fixture
def checkpoint(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(copytree(whole, tmp_path / "saved"))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A checkpoint of one device, of this test alone."""
    return of_one(tmp_path / "saved")


@pytest.fixture(scope="module", params=["plain", "disk"])
def training(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Whom nothing may happen."""
    return trained(request.param, tmp_path_factory.mktemp("spill"), seed=2)


@pytest.mark.nightly  # by day of one process
def test_two_ranks_refuse_damage_together_and_go_on(of_ranks: Path) -> None:
    results = json.loads((of_ranks / "results.json").read_text())
    saved = of_ranks / "saved"
    paths = [f"DIR/saved/{named(saved, start).relative_to(saved)}" for start in DAMAGED]
    lacking = named(saved, "rank-1-model").relative_to(saved)
    found = [  # and by which rank: each compares some of the files
        (f"{paths[0]}: {DAMAGED_FILE}{FIX}", [0, 1]),
        (f"{paths[1]}: {DAMAGED_FILE}{FIX}", [0]),
        (f"{paths[2]}: {DAMAGED_FILE}{FIX}", [0]),
        (f"{paths[3]}: {DAMAGED_FILE}{FIX}", [0, 1]),
        (f"DIR/disk-1/{lacking}: cannot be read: No such file or directory{FIX}", [1]),
    ]
    for rank, (told, step) in enumerate(results):
        assert step == 1
        assert told == [
            said if rank in by else f"rank {by[0]} failed in load(): {said}" for said, by in found
        ]


# ---- damage --------------------------------------------------------------------------------------


def test_a_whole_one_loads(checkpoint: Path, training: Training) -> None:
    extra = load(training.model, training.optimizer, checkpoint)
    for found in (extra, read_extra(checkpoint)):
        assert list(differences(found, EXTRA, "")) == []
    again = trained("plain", checkpoint, seed=3)
    load(again.model, again.optimizer, checkpoint)
    assert list(differences(again.state(), training.state(), "")) == []


@pytest.mark.nightly(by_day=8)
@pytest.mark.parametrize("stride", [61, pytest.param(7, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_refused_before_anything_changes(
    stride: int, training: Training, checkpoint: Path
) -> None:
    for path in files_of(checkpoint):
        step = stride * (10 if path.name == INDEX or "training" in path.name else 1)
        for number, position in enumerate(range(0, path.stat().st_size, step)):
            flip(path, position, number % 8)
            assert training.refuses(checkpoint).source == str(path)
            if "optimizer" not in path.name:
                training.refuses(checkpoint, optimizer=False)
            if "model-" in path.name or "optimizer" in path.name:
                assert read_extra(checkpoint)["step"] == 1
            else:
                with pytest.raises(ProtrainError):
                    read_extra(checkpoint)
            flip(path, position, number % 8)
    assert load(training.model, None, checkpoint)["step"] == 1


def overwritten(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position : position + 512] = b"U" * len(content[position : position + 512])
    path.write_bytes(content)


def put_instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        path.unlink()
        make(path)

    return put


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    # What it does, and what is said of a file of tensors.
    "cut": (lambda p: os.truncate(p, p.stat().st_size - 1), "the file is cut off: it has "),
    "cut to half": (
        lambda p: os.truncate(p, p.stat().st_size // 2),
        "the file is cut off: it has ",
    ),
    "empty": (lambda p: os.truncate(p, 0), "the file is cut off: it has 0 bytes instead of "),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b" "), "the file extends past its end: "),
    "twice": (lambda p: p.write_bytes(2 * p.read_bytes()), "the file extends past its end: "),
    "zeroed": (lambda p: p.write_bytes(bytes(p.stat().st_size)), "the header is damaged"),
    "overwritten": (lambda p: overwritten(p, 0), "the header is damaged"),
    "overwritten end": (lambda p: overwritten(p, p.stat().st_size - 100), ""),
    "missing": (Path.unlink, "cannot be read: No such file or directory"),
    "a directory": (put_instead(Path.mkdir), "not a regular file"),
    "a pipe": (put_instead(os.mkfifo), "not a regular file"),
    "a device": (put_instead(lambda p: p.symlink_to("/dev/zero")), "a link leads out of "),
}


@pytest.mark.nightly(but=("plain-of one",))
def test_a_damaged_file_is_refused_before_anything_changes(
    training: Training, whole: Path, tmp_path: Path
) -> None:
    for (number, path), (name, damage) in itertools.product(
        enumerate(files_of(whole)), DAMAGES.items()
    ):
        checkpoint = Path(copytree(whole, tmp_path / f"{number} {name}"))
        damage[0](checkpoint / path.relative_to(whole))
        error = training.refuses(checkpoint)
        if path.name != INDEX:
            assert error.source == str(checkpoint / path.relative_to(whole))
            assert error.message.startswith(damage[1])


def test_files_that_were_exchanged_are_refused(
    training: Training, whole: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Within a checkpoint, and with those of another one: of the same model and as long."""
    for first, second in itertools.pairwise(sorted(checkpoint.glob("*/*"))):
        contents = first.read_bytes(), second.read_bytes()
        first.write_bytes(contents[1])
        second.write_bytes(contents[0])
        training.refuses(checkpoint)
        first.write_bytes(contents[0])
        second.write_bytes(contents[1])
    if "rank" in first.name:
        return
    other = of_one(tmp_path / "other", seed=3)
    for path in files_of(checkpoint):
        content, theirs = path.read_bytes(), (other / path.relative_to(checkpoint)).read_bytes()
        if content != theirs:
            path.write_bytes(theirs)
            training.refuses(checkpoint)
            path.write_bytes(content)
    assert load(training.model, training.optimizer, checkpoint)["step"] == 1


def test_bytes_that_change_after_they_were_checked_are_noticed(checkpoint: Path) -> None:
    saved = Saved(checkpoint)
    entries = saved.entries("model")
    saved.verify(["model"])
    targets = [(e, Held(torch.zeros(e.shape, dtype=e.dtype))) for e in entries.values()]
    sums = Sums(saved.rows)
    fill_values(targets, sums)
    saved.verify(["model"], sums=sums)
    model = Tiny()
    load(model, None, checkpoint)
    state = {name: held.tensor for name, held in zip(entries, (t for _, t in targets), strict=True)}
    assert list(differences(state, {n: model.state_dict()[n] for n in state}, "")) == []
    part = entries["embedding"].parts[-1]
    flip(part.path, part.start)
    sums = Sums(saved.rows)
    fill_values(targets, sums)
    flip(part.path, part.start)
    saved.verify(["model"])
    with pytest.raises(ProtrainError) as caught:
        saved.verify(["model"], sums=sums)
    assert str(caught.value) == f"{part.path}: {DAMAGED_FILE}{FIX}"


# ---- the index -----------------------------------------------------------------------------------


def resealed(directory: Path, change: Callable[[Any], object]) -> None:
    """Change the index as somebody does who knows of checksums."""
    index = json.loads((directory / INDEX).read_text())
    del index["protrain_checksum"]
    change(index)
    (directory / INDEX).write_bytes(seal(index))


def at(*keys: Any, value: Any) -> Callable[[Any], object]:
    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = value

    return change


def in_file(name: str) -> Callable[[Any], object]:
    def change(index: Any) -> None:
        files = index["protrain"]["files"]
        files[name] = files.pop("model-00001-of-00002.safetensors")

    return change


ROW = {"first": 0, "shape": [80, 2], "order": [0, 1]}


def part(**changes: Any) -> Callable[[Any], object]:
    """A row that says of a tensor's place in its file what is not so."""

    def change(index: Any) -> None:
        for file, row in index["protrain"]["files"].items():
            if file.startswith("model-"):
                row["parts"] = {"embedding": ROW | changes}

    return change


INDICES: dict[str, Callable[[Any], object]] = {
    "file up": in_file("../../elsewhere/model-00001-of-00002.safetensors"),
    "file absolute": in_file("/elsewhere/model-00001-of-00002.safetensors"),
    "file of zero": in_file("a\0b.safetensors"),
    "file deeper": in_file("a/b.safetensors"),
    "file surrogate": in_file("\ud800.safetensors"),
    "file long": in_file(5000 * "a" + ".safetensors"),
    "file of more": in_file("model-00001-of-00003.safetensors"),
    "folder up": at("protrain", "folder", value="../saved/protrain-save-1"),
    "folder absolute": at("protrain", "folder", value="/etc"),
    "folder of dots": at("protrain", "folder", value=".."),
    "folder a line more": at("protrain", "folder", value="protrain-save-1\n"),
    "folder a number": at("protrain", "folder", value=1),
    "folder not there": at("protrain", "folder", value="protrain-save-2"),
    "newer": at("metadata", "protrain_format", value=5),
    "no files": at("protrain", "files", value={}),
    "files a list": at("protrain", "files", value=[]),
    "nothing": lambda index: index.pop("protrain"),
    "no weights": lambda index: index.pop("weight_map"),
    "shape far": part(shape=[2**59]),
    "shape wide": part(shape=[10**9, 10**9, 10**9, 0]),
    "part far": part(first=2**59),
    "part of more": part(shape=[81, 2]),
    "order": part(order=[0, 0]),
    "order far": part(order=[0, 7]),
}


def test_an_index_that_lies_is_refused(training: Training, single: Path) -> None:
    copytree(single / FOLDER, single.parent / "elsewhere")
    content = (single / INDEX).read_bytes()
    most = largest_bytes()
    for change in INDICES.values():
        resealed(single, change)
        training.refuses(single)
        (single / INDEX).write_bytes(content)
    assert largest_bytes() < most + 2**28


def largest_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def leaves(tree: Any) -> Iterator[tuple[Any, Any]]:
    """The containers and keys of all that a tree has, from the outside."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from leaves(tree[key])


VALUES: tuple[Any, ...] = (
    -1, 0, 1, 3, 2**31, 2**63, 2**200, 1.5, True, None, "", "x", "F64", "../x", [], {},
    [[0, 0], [4, 6]], [1] * 100, "rank-1-model-00001-of-00001.safetensors", {"dtype": "I8"},
)  # fmt: skip


@pytest.mark.nightly("of one-plain-150", "of one-disk-150", "of two-disk-150")
@pytest.mark.parametrize("num_cases", [150, pytest.param(2_000, marks=pytest.mark.slow)])
def test_any_other_list_of_files_is_refused(
    checkpoint: Path, training: Training, num_cases: int
) -> None:
    """With a checksum that is right: one value is another one, or is not there."""
    rng = random.Random(num_cases)
    whole = json.loads((checkpoint / INDEX).read_text())
    for _ in range(num_cases):
        index = json.loads(json.dumps(whole))
        own = index["protrain"]
        found = list(leaves(own["files"]))
        tree, key = rng.choice(found)
        value = rng.choice((*VALUES, *found))
        if rng.random() < 0.2:
            del tree[key]
        else:
            tree[key] = value[0][value[1]] if isinstance(value, tuple) else value
        try:
            if json.loads(json.dumps(index)) == whole:
                continue
        except ValueError:  # it would be in itself
            continue
        del index["protrain_checksum"]
        (checkpoint / INDEX).write_bytes(seal(index))
        training.refuses(checkpoint)


@pytest.mark.parametrize("before", [b"", b"[" * 100_000], ids=["alone", "nested"])
def test_a_text_that_is_no_index_is_refused(before: bytes, tmp_path: Path) -> None:
    texts = (
        b"", b"[]", b"{", b"nothing", b"\xff\xfe{}", b'{"weight_map": ' + b'{"a":' * 100_000,
        b'{"weight_map": {}, "metadata": {"total_size": ' + b"9" * 5000 + b"}}",
        b'{"weight_map": {}, "metadata": []}',
        b'{"weight_map": {}, "metadata": {"x": NaN}}', b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}', b'{"weight_map": {"\\ud800": "a"}}',
    )  # fmt: skip
    for text in texts:
        (tmp_path / INDEX).write_bytes(before + text)
        for use in (partial(load, Tiny(), None), read_extra):
            with pytest.raises(ProtrainError) as caught:
                use(tmp_path)
            assert caught.value.message == "not an index of safetensors files"


def test_an_index_is_ours_by_any_of_its_signs(training: Training, checkpoint: Path) -> None:
    """One that lost its checksum is no checkpoint of others; an older version says so."""
    whole = json.loads((checkpoint / INDEX).read_text())
    for kept in ("protrain_checksum", "metadata", "protrain"):
        index = {key: value for key, value in whole.items() if key == kept} | {"weight_map": {}}
        (checkpoint / INDEX).write_text(json.dumps(index))
        assert training.refuses(checkpoint, optimizer=False).message == (
            "the file is damaged: its checksum does not match"
        )
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": whole["weight_map"]}))
    training.refuses(checkpoint, optimizer=False)
    index = {"weight_map": {}, "metadata": {"protrain_save": FOLDER, "total_size": 7}}
    (checkpoint / INDEX).write_text(json.dumps(index))
    assert str(training.refuses(checkpoint)) == (
        f"{checkpoint / INDEX}: the checkpoint has format 2, this protrain-plan reads 4\n"
        "  fix: load it with the version that wrote it"
    )


@pytest.mark.parametrize("start", [FOLDER, "model-", "training-"])
def test_a_link_that_leaves_the_directory_is_refused(
    start: str, training: Training, single: Path
) -> None:
    path = single / FOLDER if start == FOLDER else named(single, start)
    elsewhere = single.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert training.refuses(single).message == (
        "a link leads out of the directory of the checkpoint"
    )
    link = single.parent / "link"
    path.unlink()
    elsewhere.rename(path)
    link.symlink_to(single)  # of the directory itself
    assert read_extra(link)["step"] == 1
    save(training.model, training.optimizer, link)
    assert read_extra(single) == {}


def test_a_save_removes_nothing_but_folders_of_its_own(single: Path) -> None:
    outside = single.parent / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (single / "protrain-save-2").symlink_to(outside)
    (single / "protrain-save-7").symlink_to(outside)
    (single / "protrain-save-3").mkdir()  # what a save that was killed leaves
    (single / "protrain-save-4").touch()
    model = Tiny()
    for number in (8, 9):
        save(model, None, single)
        assert Saved(single).folder == f"protrain-save-{number}"
    assert (outside / "precious").exists()
    assert sorted(path.name for path in single.iterdir()) == [
        INDEX,
        *(f"protrain-save-{number}" for number in (2, 4, 7, 9)),
    ]
    resealed(single, at("protrain", "folder", value="protrain-save-99"))
    save(model, None, single)
    assert load(model, None, single) == {}
    resealed(single, at("protrain", "folder", value="../outside"))
    with pytest.raises(ProtrainError) as caught:
        save(model, None, single)
    assert caught.value.fix == "save to another directory"
    assert (outside / "precious").exists()


# ---- files of others -----------------------------------------------------------------------------


def file_of(header: object, data: bytes = bytes(range(8)), *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


READ: dict[str, bytes] = {
    "whole": file_of({"a": tensor()}),
    "with metadata": file_of({"__metadata__": {"format": "pt"}, "a": tensor()}),
    "with spaces": file_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   '),
    "turned": file_of({"a": tensor(shape=[1], data_offsets=[4, 8]),
                       "b": tensor(shape=[1], data_offsets=[0, 4])}),
    "empty": file_of({"a": tensor(shape=[0, 7], data_offsets=[0, 0]), "b": tensor(),
                      "c": tensor(shape=[0], data_offsets=[8, 8])}),
    "scalar": file_of({"a": tensor(shape=[], dtype="I64")}),
}  # fmt: skip
REFUSED: dict[str, bytes] = {
    "no header": b"",
    "length far": file_of({"a": tensor()}, length=2**64 - 1),
    "length of a terabyte": file_of({"a": tensor()}, length=2**40),
    "no object": file_of([]),
    "deep": file_of(b'{"a":' * 100_000),
    "5,000 digits": file_of(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000
                            + b'],"data_offsets":[0,8]}}'),
    "no tensor": file_of({"a": 3}),
    "another dtype": file_of({"a": tensor(dtype="F31")}),
    "a dtype that we lack": file_of({"a": tensor(dtype="F8_E8M0", shape=[8])}),
    "shape negative": file_of({"a": tensor(shape=[-1, -2])}),
    "shape too large": file_of({"a": tensor(shape=[2**62, 4])}),
    "shape of a product of 0 mod 2**64": file_of({"a": tensor(shape=[2**32, 2**32])}),
    "shape of another size": file_of({"a": tensor(shape=[3])}),
    "offsets far": file_of({"a": tensor(data_offsets=[2**64 - 8, 2**64])}),
    "a gap": file_of({"a": tensor(), "b": tensor(data_offsets=[12, 20])}, bytes(20)),
    "the same bytes": file_of({"a": tensor(), "b": tensor()}),
    "data cut": file_of({"a": tensor()}, bytes(7)),
    "data longer": file_of({"a": tensor()}, bytes(9)),
}  # fmt: skip


@pytest.mark.parametrize("content", READ.values(), ids=READ)
def test_a_file_of_others_is_read_as_its_package_does(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    expected = loaded_by_the_package(content)
    model = nn.Module()
    for name, value in expected.items():
        model.register_buffer(name, torch.zeros_like(value))
    load(model, None, tmp_path)
    assert list(differences(model.state_dict(), expected, "")) == []


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "model.safetensors", nn.Module()
    model.register_buffer("a", torch.ones(2))
    for content in REFUSED.values():
        path.write_bytes(content)
        with pytest.raises(ProtrainError, match=r"not a safetensors file|is not known") as caught:
            load(model, None, tmp_path)
        assert caught.value.source == str(path)
        assert model.get_buffer("a").sum() == 2


@pytest.mark.parametrize("target", ["nothing", "a.safetensors", "pipe", "/dev/zero"])
def test_what_is_no_regular_file_is_refused_and_nobody_waits(target: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.safetensors").symlink_to(target)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"embedding": "a.safetensors"}}))
    with pytest.raises(ProtrainError) as caught:
        load(Tiny(), None, tmp_path)
    assert caught.value.source == str(tmp_path / "a.safetensors")


def test_an_index_of_others_stays_in_its_directory(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    other, own = tmp_path / "other", tmp_path / "own"
    other.mkdir()
    own.mkdir()
    content = file_of({"weight": tensor(shape=[2, 2], data_offsets=[0, 16])}, bytes(16))
    (other / "a.safetensors").write_bytes(content)
    (own / "sub").symlink_to(other)
    for file in ("../other/a", f"{other}/a", "sub/a", "./a", "a//b", "", "a\0"):
        name = file + ".safetensors" if file else file
        (own / INDEX).write_text(json.dumps({"weight_map": {"weight": name}}))
        with pytest.raises(ProtrainError):
            load(model, None, own)
        assert model.weight.abs().sum() > 0
    # As Hugging Face's cache lies: the file, by its name, is a link.
    (own / "a.safetensors").symlink_to("../other/a.safetensors")
    (own / INDEX).write_text(json.dumps({"weight_map": {"weight": "a.safetensors"}}))
    load(model, None, own)
    assert model.weight.abs().sum() == 0


# ---- what is no tensor ---------------------------------------------------------------------------

STATE = torch.get_rng_state()
PYTHON = random.getstate()[1]
STRUCTURES: dict[str, Callable[[Any], object]] = {
    "another part": at("more", value={}),
    "extra a list": at("extra", value=[]),
    "modules by number": at("modules", value={0: 1}),
    "random a dict": at("random", value={}),
    "random of nobody": at("random", value=[]),
    "random without torch": lambda training: training["random"][0].pop("torch"),
    "random of floats": at("random", 0, "torch", value=torch.zeros(5056)),
    "random cut": at("random", 0, "torch", value=STATE[:100]),
    "random of zeros": at("random", 0, "torch", value=torch.zeros_like(STATE)),
    "python a text": at("random", 0, "python", value="state"),
    "python cut": at("random", 0, "python", value=(3, (1, 2), None)),
    "python's position": at("random", 0, "python", value=(3, (*PYTHON[:-1], 700), None)),
    "python's next": at("random", 0, "python", value=(3, PYTHON, "x")),
    "cuda a tensor": at("random", 0, "cuda", value=STATE),
    "cuda of floats": at("random", 0, "cuda", value=[torch.zeros(16)]),
    "optimizer a list": at("optimizer", value=[]),
    "no groups": lambda training: training["optimizer"].pop("groups"),
    "group a list": at("optimizer", "groups", 0, value=[]),
    "parameters a text": at("optimizer", "groups", 0, "params", value="head.weight"),
    "parameters of numbers": at("optimizer", "groups", 0, "params", 0, value=0),
    "no betas": lambda training: training["optimizer"]["groups"][0].pop("betas"),
    "betas a text": at("optimizer", "groups", 0, "betas", value="x"),
    "one beta": at("optimizer", "groups", 0, "betas", value=(0.9,)),
    "rate a text": at("optimizer", "groups", 0, "lr", value="fast"),
    "rate a dict": at("optimizer", "groups", 0, "lr", value={}),
    "amsgrad a tensor": at("optimizer", "groups", 0, "amsgrad", value=torch.ones(2)),
    "options of numbers": at("optimizer", "options", value=[1]),
    "class a number": at("optimizer", "class", value=1),
    "states a list": at("optimizer", "states", value=[]),
    "states of numbers": at("optimizer", "states", value={"head.weight": 1}),
    "states by number": at("optimizer", "states", value={"head.weight": {0: 1}}),
}


def retrained(directory: Path, change: Callable[[Any], object]) -> None:
    """Change what is no tensor, as a save would write it, with new tensors in a file of its own."""
    found = read_training(Saved(directory))
    assert found.optimizer is not None
    training = asdict(found)
    training["optimizer"] = asdict(found.optimizer)
    training["optimizer"]["class"] = training["optimizer"].pop("kind")
    change(training)
    tensors: dict[str, Source] = {}
    content = {key: encoded(value, key, tensors) for key, value in training.items()}
    path = directory / FOLDER / "training-00001-of-00001.safetensors"
    path.unlink(missing_ok=True)
    row = write_file(path, tensors)

    def put(index: Any) -> None:
        index["protrain"]["training"] = content
        files = index["protrain"]["files"]
        for file in [file for file in files if file.startswith("training-")]:
            del files[file]
        files[path.name] = msgspec.to_builtins(row)

    resealed(directory, put)


def test_what_no_save_writes_is_refused_whole(training: Training, single: Path) -> None:
    content = (single / INDEX).read_bytes()
    for change in STRUCTURES.values():
        retrained(single, change)
        training.refuses(single)
        (single / INDEX).write_bytes(content)
    options = {"initial_lr": 0.5, "foreach": True, "lr": torch.ones(())}  # a scheduler's own
    retrained(single, lambda training: training["optimizer"]["groups"][0].update(options))
    load(training.model, training.optimizer, single)
    assert training.optimizer.param_groups[0]["initial_lr"] == 0.5


MARKS: tuple[Any, ...] = (
    {"$tensor": "nothing"}, {"$tensor": 1}, {"$tuple": {"$tensor": "extra.scale"}}, {"$what": []},
    {"$tuple": 3}, {"$set": [[]]}, {"$dict": [[1]]}, {"$dict": [[[], 1]]}, {"$float": "x"},
    {"$bytes": "x"}, {"$dtype": "torch.nn"}, {"$dtype": []}, {"$device": "nowhere"},
    {"$size": ["x"]}, {"$counter": [1]}, {"$complex": "i"},
)  # fmt: skip


def test_values_that_are_none_are_refused(training: Training, single: Path) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = {"$tuple": [deep]}
    for value in (*MARKS, deep):
        content = (single / INDEX).read_bytes()
        resealed(single, at("protrain", "training", "extra", value={"a": value}))
        assert training.refuses(single).source == str(single / INDEX)
        (single / INDEX).write_bytes(content)


SORTS: dict[str, Any] = {
    "numbers": [1, -1, 2**70, -(2**70), 1.5, -0.0, float("inf"), True, None, 1j],
    "texts": ["a", "\u00e9", "\ud800", b"ab\xff", bytearray(b"12"), bytearray()],
    "dicts": [{3: "x", (1, 2): [None], None: {}}, {"$tuple": 1}, {"\u00e9": {"\ud800": 1}}],
    "nested": [(1, (2, [None, {3: "x"}])), {1, 2}, set(), Counter("ab"), OrderedDict(a=1)],
    "views": [torch.arange(10)[2:8:2], torch.ones(1).expand(3), torch.empty(0, 3), torch.ones(())],
    "dtypes": [torch.ones(2).to(dtype) for dtype in (torch.bfloat16, torch.uint16, torch.bool)]
    + [torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2, dtype=torch.complex64).conj()],
    "of torch": [torch.float32, torch.device("cpu"), torch.Size([1])],
    "one key": {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}},
}


def test_what_can_be_saved_can_be_loaded(tmp_path: Path) -> None:
    save(Tiny(), None, tmp_path, extra=SORTS)
    found = read_extra(tmp_path)
    assert list(differences(found, SORTS, "")) == []
    assert repr(found["numbers"]) == repr(SORTS["numbers"])


class Text(str):
    """A text that is more than one."""


def test_what_cannot_be_read_back_is_refused_by_its_key(tmp_path: Path) -> None:
    itself: list[Any] = []
    itself.append(itself)
    for value, problem in (
        (Text("a"), f"it is a {__name__}.Text"),
        (torch.ones(2).to_sparse(), "it is a torch.Tensor"),
        (torch.ones(2, device="meta"), "it is a torch.Tensor"),
        (2**20_000, "it is a builtins.int"),
        (len, "it is a builtins.builtin_function_or_method"),
        (itself, "it is nested too deeply"),
    ):
        with pytest.raises(ProtrainError) as caught:
            save(Tiny(), None, tmp_path, extra={"a": {7: value}})
        assert str(caught.value.key).startswith("extra.a[0][1]")
        assert caught.value.message == f"this cannot be saved: {problem}"
    assert list(tmp_path.iterdir()) == []
