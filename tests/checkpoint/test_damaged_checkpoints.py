"""Checkpoints that are damaged, or were made to do harm: refused, and nothing has changed."""

import io
import itertools
import json
import os
import pickle
import random
import resource
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from protrain_plan.models.building import seeded
from protrain_runtime import load, prepare, save
from protrain_runtime.checkpoint.files import (
    SUMS,
    fill_values,
    read_entries,
    read_sums,
    seal,
    verify,
)
from protrain_runtime.checkpoint.folders import INDEX, TRAINING
from protrain_runtime.checkpoint.pickled import unpack
from protrain_runtime.checkpoint.saving import read_extra
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import Keep, Offload
from protrain_runtime.states.values import Held
from tests.support.runtime_cases import copied, decided, differences, plan_for, units_of

OLD = Path(__file__).parents[1] / "formats" / "checkpoint-1"


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
        self.embedding = nn.Parameter(torch.randn(4, 2))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 1)
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
EXTRA = {"step": 1}
SIDES = ("plain", "plan")


@dataclass
class Training:
    """A model and its optimizer after a step, and all that a load could change of them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state(self) -> list[Any]:
        return [
            copied(self.model.state_dict()),
            copied(self.optimizer.state_dict()),
            torch.get_rng_state(),
            random.getstate(),
        ]


def trained(side: str, folder: Path, *, seed: int) -> Training:
    with seeded(seed):
        model: nn.Module = Tiny()
    factory = partial(torch.optim.AdamW, lr=seed / 100)
    if side == "plain":
        optimizer: torch.optim.Optimizer = factory(model.parameters())
    else:
        units = decided(units_of(Tiny(), TOKENS), Keep(), Offload(tier="disk"))
        plan = plan_for(model, units, piece_bytes=64)
        model, optimizer = prepare(model, plan, optimizer=factory, spill_directory=folder)
    model(TOKENS).backward()
    optimizer.step()
    optimizer.zero_grad()
    return Training(model, optimizer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, to be copied."""
    directory = tmp_path_factory.mktemp("whole") / "saved"
    training = trained("plain", directory, seed=1)
    save(training.model, training.optimizer, directory, extra=EXTRA, shard_bytes=64)
    return directory


@pytest.fixture
def checkpoint(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(copytree(whole, tmp_path / "saved"))


@pytest.fixture(scope="module", params=SIDES)
def training(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Whom nothing may happen."""
    return trained(request.param, tmp_path_factory.mktemp("spill"), seed=2)


def refused(use: Callable[[], object]) -> ProtrainError:
    with pytest.raises(ProtrainError) as caught:
        use()
    return caught.value


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def assert_refused(training: Training, directory: Path, damaged: Path) -> None:
    """By all who read that file; those who do not read what is there."""
    kind = damaged.name.partition("-")[0]
    before = training.state()
    error = refused(lambda: load(training.model, training.optimizer, directory))
    assert error.source == str(damaged), error
    if kind != "optimizer":
        refused(lambda: load(training.model, None, directory))
    if kind in ("optimizer", "model"):
        assert read_extra(directory) == EXTRA
    else:
        refused(lambda: read_extra(directory))
    assert list(differences(training.state(), before, "state")) == []


@pytest.mark.parametrize("stride", [31, pytest.param(3, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_refused_before_anything_changes(
    stride: int, training: Training, checkpoint: Path
) -> None:
    for path in files_of(checkpoint):
        content = path.read_bytes()
        step = stride * (4 if path.name == TRAINING else 1)  # mostly random states
        for number, at in enumerate(range(0, len(content), step)):
            changed = bytearray(content)
            changed[at] ^= 1 << number % 8
            path.write_bytes(changed)
            assert_refused(training, checkpoint, path)
        path.write_bytes(content)
    assert load(training.model, None, checkpoint) == EXTRA


def zeroed(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + 512] = bytes(len(content[at : at + 512]))
    path.write_bytes(content)


def replaced_by_another(path: Path) -> None:
    others = sorted(path.parent.glob(f"{path.name.partition('-')[0]}-*"))
    path.write_bytes(next(other for other in others if other != path).read_bytes())


def put_instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        path.unlink()
        make(path)

    return put


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut to half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "zeroed": lambda path: zeroed(path, 0),
    "zeroed end": lambda path: zeroed(path, path.stat().st_size - 100),
    "missing": Path.unlink,
    "a directory": put_instead(Path.mkdir),
    "a pipe": put_instead(os.mkfifo),
    "a device": put_instead(lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_before_anything_changes(
    damage: Callable[[Path], object], training: Training, whole: Path, tmp_path: Path
) -> None:
    for number, path in enumerate(files_of(whole)):
        checkpoint = Path(copytree(whole, tmp_path / str(number)))
        damage(checkpoint / path.relative_to(whole))
        before = training.state()
        refused(lambda where=checkpoint: load(training.model, training.optimizer, where))  # type: ignore[misc]
        assert list(differences(training.state(), before, "state")) == []


def test_files_that_were_exchanged_are_refused(training: Training, checkpoint: Path) -> None:
    before = training.state()
    folder = checkpoint / "protrain-save-1"
    for first, second in itertools.pairwise(sorted(folder.glob("*.safetensors"))):
        contents = first.read_bytes(), second.read_bytes()
        first.write_bytes(contents[1])
        second.write_bytes(contents[0])
        refused(lambda: load(training.model, training.optimizer, checkpoint))
        first.write_bytes(contents[0])
        second.write_bytes(contents[1])
    assert list(differences(training.state(), before, "state")) == []


def test_files_of_another_save_are_refused(training: Training, whole: Path, tmp_path: Path) -> None:
    """Each is whole, of the same model and of the same length."""
    other = trained("plain", tmp_path, seed=3)
    save(other.model, other.optimizer, tmp_path / "other", extra=EXTRA, shard_bytes=64)
    before = training.state()
    for number, path in enumerate(files_of(whole)):
        checkpoint = Path(copytree(whole, tmp_path / str(number)))
        name = path.relative_to(whole)
        content = (tmp_path / "other" / name).read_bytes()
        if content != path.read_bytes():
            (checkpoint / name).write_bytes(content)
            refused(lambda where=checkpoint: load(training.model, training.optimizer, where))  # type: ignore[misc]
    assert list(differences(training.state(), before, "state")) == []


def changed_tensor(directory: Path, kind: str, name: str) -> Path:
    """Flip a bit in a tensor; returns its file."""
    for path in sorted(directory.glob(f"*/{kind}-*")):
        entry = read_entries(path).get(name)
        if entry is not None:
            content = bytearray(path.read_bytes())
            content[entry.start] ^= 1
            path.write_bytes(content)
            return path
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("kind", "name", "unit"),
    [
        ("model", "blocks.1.linear.weight", "blocks.1"),
        ("model", "blocks.0.scale", "blocks.0"),
        ("optimizer", "blocks.0.linear.bias.exp_avg_sq", "blocks.0"),
    ],
)
def test_the_error_names_file_tensor_and_unit(
    kind: str, name: str, unit: str, checkpoint: Path, tmp_path: Path
) -> None:
    for side in SIDES:
        training = trained(side, tmp_path, seed=2)
        directory = Path(copytree(checkpoint, tmp_path / side))
        path = changed_tensor(directory, kind, name)
        error = refused(lambda: load(training.model, training.optimizer, directory))  # noqa: B023
        what = f"{name} (unit {unit})" if side == "plan" else name
        assert str(error) == f"{path}: {what} is damaged\n  fix: load another checkpoint"


def test_bytes_that_change_after_they_were_checked_are_noticed(checkpoint: Path) -> None:
    folder = checkpoint / "protrain-save-1"
    sums = read_sums(folder, json.loads((checkpoint / INDEX).read_text())["metadata"][_SUMS])
    path = next(folder.glob("model-00001-*"))
    verify(folder, {path.name: sums[path.name]})
    entries = read_entries(path, sums[path.name])
    targets = [(e, Held(torch.zeros(e.shape, dtype=e.dtype))) for e in entries.values()]
    fill_values(targets)
    assert list(differences({e.key: h.tensor for e, h in targets}, load_file(path), "")) == []
    name = list(entries)[-1]
    changed_tensor(checkpoint, "model", name)
    assert str(refused(lambda: fill_values(targets))) == (
        f"{path}: {name} is not what it was a moment ago: the model is loaded in part\n"
        "  fix: load another checkpoint, the whole of it"
    )


# --- the index ------------------------------------------------------------------------------------

_SUMS = "protrain_sums"


def rewritten(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index as somebody does who knows of checksums."""
    index = json.loads((directory / INDEX).read_text())
    change(index)
    index["metadata"]["protrain_checksum"] = ""
    (directory / INDEX).write_bytes(seal(index))


def named(file: str) -> Callable[[dict[str, Any]], object]:
    return lambda index: index["weight_map"].update(dict.fromkeys(index["weight_map"], file))


def in_folder(folder: object) -> Callable[[dict[str, Any]], object]:
    def change(index: dict[str, Any]) -> None:
        index["metadata"]["protrain_save"] = folder
        for name, file in index["weight_map"].items():
            index["weight_map"][name] = f"{folder}/{file.partition('/')[2]}"

    return change


INDICES: dict[str, Callable[[dict[str, Any]], object]] = {
    "up": named("protrain-save-1/../../elsewhere/model-00001-of-00002.safetensors"),
    "absolute": named("/elsewhere/model-00001-of-00002.safetensors"),
    "deeper": named("protrain-save-1/a/b"),
    "zero byte": named("protrain-save-1/a\0b"),
    "surrogate": named("protrain-save-1/\ud800"),
    "long": named("protrain-save-1/" + 5000 * "a"),
    "no text": lambda index: index["weight_map"].update(head=1),
    "folder up": in_folder("../saved/protrain-save-1"),
    "folder absolute": in_folder("/etc"),
    "folder of dots": in_folder(".."),
    "folder a number": in_folder(1),
    "folder a list": in_folder(["protrain-save-1"]),
    "folder not there": in_folder("protrain-save-2"),
    "newer": lambda index: index["metadata"].update(protrain_format=3),
    "no format": lambda index: index["metadata"].pop("protrain_format"),
    "no sums": lambda index: index["metadata"].pop(_SUMS),
    "sums a number": lambda index: index["metadata"].update({_SUMS: 7}),
    "other sums": lambda index: index["metadata"].update({_SUMS: "00000000"}),
    "no weights": lambda index: index.pop("weight_map"),
}


@pytest.mark.parametrize("change", INDICES.values(), ids=INDICES)
def test_an_index_names_nothing_outside_of_its_directory(
    change: Callable[[dict[str, Any]], object], training: Training, checkpoint: Path
) -> None:
    copytree(checkpoint / "protrain-save-1", checkpoint.parent / "elsewhere")
    rewritten(checkpoint, change)
    before = training.state()
    for optimizer in (training.optimizer, None):
        refused(lambda with_it=optimizer: load(training.model, with_it, checkpoint))  # type: ignore[misc]
    assert list(differences(training.state(), before, "state")) == []


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b"nothing",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"weight_map": ' + b'{"a":' * 100_000,
        b'{"weight_map": {}, "metadata": {"total_size": ' + b"9" * 5000 + b"}}",
        b'{"weight_map": {"a": "b", "a": "c"}}',
        b'{"weight_map": {}, "metadata": []}',
        b'{"weight_map": {}, "metadata": {"x": NaN}}',
        b'{"weight_map": []}',
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_text_that_is_no_index_is_refused(
    text: bytes, training: Training, tmp_path: Path
) -> None:
    (tmp_path / INDEX).write_bytes(text)
    for use in (lambda: load(training.model, None, tmp_path), lambda: read_extra(tmp_path)):
        assert refused(use).message == "this is no index of safetensors files"


@pytest.mark.parametrize("what", ["protrain-save-1", "protrain-save-1/training.pt", "a model file"])
def test_a_link_that_leaves_the_directory_is_refused(
    what: str, training: Training, checkpoint: Path
) -> None:
    path = checkpoint / what if what != "a model file" else next(checkpoint.glob("*/model-*"))
    elsewhere = checkpoint.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    before = training.state()
    error = refused(lambda: load(training.model, training.optimizer, checkpoint))
    assert error.message == "a link leads out of the directory of the checkpoint"
    assert list(differences(training.state(), before, "state")) == []
    link = checkpoint.parent / "link"
    path.unlink()
    elsewhere.rename(path)
    link.symlink_to(checkpoint)  # of the directory itself
    assert read_extra(link) == EXTRA
    save(training.model, training.optimizer, link)
    assert read_extra(checkpoint) == {}


def test_a_save_removes_nothing_but_folders_of_its_own(checkpoint: Path) -> None:
    outside = checkpoint.parent / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (checkpoint / "protrain-save-2").symlink_to(outside)
    (checkpoint / "protrain-save-7").symlink_to(outside)
    (checkpoint / "protrain-save-3").mkdir()  # what a save that was killed leaves
    (checkpoint / "protrain-save-4").touch()
    model = Tiny()
    for number in (3, 5):
        save(model, None, checkpoint)
        assert json.loads((checkpoint / INDEX).read_text())["metadata"]["protrain_save"] == (
            f"protrain-save-{number}"
        )
    assert (outside / "precious").exists()
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        INDEX,
        *(f"protrain-save-{number}" for number in (2, 4, 5, 7)),
    ]
    rewritten(checkpoint, in_folder("protrain-save-999999999"))
    save(model, None, checkpoint)
    assert load(model, None, checkpoint) == {}
    rewritten(checkpoint, in_folder("../outside"))
    error = refused(lambda: save(model, None, checkpoint))
    assert error.fix == "save to another directory"
    assert (outside / "precious").exists()


# --- files of tensors -----------------------------------------------------------------------------


def file_of(header: object, data: bytes = bytes(8), *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


HEADERS: dict[str, bytes] = {
    "whole": file_of({"a": tensor()}),
    "with metadata": file_of({"__metadata__": {"format": "pt"}, "a": tensor()}),
    "with spaces": file_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   '),
    "two": file_of({"a": tensor(shape=[1], data_offsets=[4, 8]),
                    "b": tensor(shape=[1], data_offsets=[0, 4])}),
    "empty": file_of({}, b""),
    "empty tensors": file_of({"a": tensor(shape=[0, 7], data_offsets=[0, 0]),
                              "b": tensor(), "c": tensor(shape=[0], data_offsets=[8, 8])}),
    "no header": b"",
    "cut in its length": b"\x08\0\0",
    "length zero": file_of(b"", b""),
    "length far": file_of({"a": tensor()}, length=2**64 - 1),
    "length of a terabyte": file_of({"a": tensor()}, length=2**40),
    "length short": file_of({"a": tensor()}, length=9),
    "no object": file_of([]),
    "a number": file_of(7),
    "space before": file_of(b' {"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "not UTF-8": file_of(b'{"\xff":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "UTF-16": file_of(json.dumps({"a": tensor()}).encode("utf-16-le")),
    "twice": file_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
                     b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "deep": file_of(b'{"a":' * 100_000),
    "deep shape": file_of(b'{"a":{"dtype":"F32","shape":' + b"[" * 100_000),
    "5,000 digits": file_of(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000
                            + b'],"data_offsets":[0,8]}}'),
    "metadata of numbers": file_of({"__metadata__": {"format": 1}, "a": tensor()}),
    "metadata a list": file_of({"__metadata__": [], "a": tensor()}),
    "no tensor": file_of({"a": 3}),
    "a list": file_of({"a": ["F32", [2], [0, 8]]}),
    "no dtype": file_of({"a": {"shape": [2], "data_offsets": [0, 8]}}),
    "another dtype": file_of({"a": tensor(dtype="F31")}),
    "dtype a list": file_of({"a": tensor(dtype=["F32"])}),
    "shape a number": file_of({"a": tensor(shape=2)}),
    "shape of texts": file_of({"a": tensor(shape=["2"])}),
    "shape of floats": file_of({"a": tensor(shape=[2.0])}),
    "shape of booleans": file_of({"a": tensor(shape=[True, 2])}),
    "shape negative": file_of({"a": tensor(shape=[-1, -2])}),
    "shape too large": file_of({"a": tensor(shape=[2**62, 4])}),
    "shape of 2**64": file_of({"a": tensor(shape=[2**64])}),
    "shape of a product of 0 mod 2**64": file_of({"a": tensor(shape=[2**32, 2**32])}),
    "shape large and empty": file_of({"a": tensor(shape=[2**62, 4, 0], data_offsets=[0, 0])}, b""),
    "shape of another size": file_of({"a": tensor(shape=[3])}),
    "many dimensions": file_of({"a": tensor(shape=[1] * 100_000 + [2])}),
    "offsets a number": file_of({"a": tensor(data_offsets=8)}),
    "one offset": file_of({"a": tensor(data_offsets=[0])}),
    "three offsets": file_of({"a": tensor(data_offsets=[0, 8, 8])}),
    "offsets of floats": file_of({"a": tensor(data_offsets=[0.0, 8.0])}),
    "offsets of booleans": file_of({"a": tensor(dtype="I8", shape=[1],
                                                data_offsets=[False, True])}, b"0"),
    "negative offsets": file_of({"a": tensor(data_offsets=[-8, 0])}),
    "offsets turned": file_of({"a": tensor(data_offsets=[8, 0])}),
    "offsets far": file_of({"a": tensor(data_offsets=[2**64 - 8, 2**64])}),
    "offsets behind": file_of({"a": tensor(data_offsets=[8, 16])}),
    "not from 0": file_of({"a": tensor(data_offsets=[4, 12])}, bytes(12)),
    "a gap": file_of({"a": tensor(), "b": tensor(data_offsets=[12, 20])}, bytes(20)),
    "the same bytes": file_of({"a": tensor(), "b": tensor()}),
    "overlapping": file_of({"a": tensor(), "b": tensor(data_offsets=[4, 12])}, bytes(12)),
    "data cut": file_of({"a": tensor()}, bytes(7)),
    "data longer": file_of({"a": tensor()}, bytes(9)),
    "no tensors, and data": file_of({}, bytes(4)),
}  # fmt: skip
READ = ("whole", "with metadata", "with spaces", "two", "empty", "empty tensors")


def check_against_the_package(path: Path) -> bool:
    """What we read is what the package of the format reads; whether it was read."""
    try:
        entries = read_entries(path)
    except ProtrainError:
        return False
    assert {name: list(entry.shape) for name, entry in entries.items()} == {
        name: described["shape"]
        for name, described in safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    }
    return True


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_is_read_if_it_holds_and_else_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HEADERS[name])
    assert check_against_the_package(path) == (name in READ)
    if name not in READ:
        model = Tiny()
        before = copied(model.state_dict())
        assert refused(lambda: load(model, None, tmp_path)).source == str(path)
        assert list(differences(model.state_dict(), before, "")) == []


VALUES: tuple[Any, ...] = (
    -1,
    0,
    1,
    2,
    4,
    8,
    12,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    True,
    None,
    1.0,
    "F32",
    "F64",
    [],
    {},
)


def mutated(rng: random.Random) -> bytes:
    """A file of two tensors with something else somewhere."""
    header: dict[str, Any] = {"a": tensor(), "b": tensor(shape=[1, 2], data_offsets=[8, 16])}
    for _ in range(rng.randint(0, 2)):
        entry = header[rng.choice("ab")]
        key = rng.choice(list(entry))
        value = entry[key]
        if isinstance(value, list) and value and rng.random() < 0.8:
            value[rng.randrange(len(value))] = rng.choice(VALUES)
        else:
            entry[key] = rng.choice(VALUES)
    content = bytearray(file_of(header, bytes(16)))
    for _ in range(rng.choice((0, 0, 1, 3))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content[: rng.choice((len(content), rng.randrange(len(content))))])


@pytest.mark.parametrize("cases", [500, pytest.param(50_000, marks=pytest.mark.slow)])
def test_headers_that_were_mutated_are_read_as_the_package_does_or_refused(
    cases: int, tmp_path: Path
) -> None:
    rng, path, read = random.Random(cases), tmp_path / "model.safetensors", 0
    for _ in range(cases):
        path.write_bytes(mutated(rng))
        read += check_against_the_package(path)
    assert cases / 20 < read < cases / 2


@pytest.mark.parametrize("link", ["to nothing", "in a circle", "to a pipe", "to a device"])
def test_what_is_no_regular_file_is_refused_and_nobody_waits(link: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    targets = {
        "to nothing": "nothing",
        "in a circle": "a.safetensors",
        "to a pipe": "pipe",
        "to a device": "/dev/zero",
    }
    (tmp_path / "a.safetensors").symlink_to(targets[link])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"embedding": "a.safetensors"}}))
    error = refused(lambda: load(Tiny(), None, tmp_path))
    assert error.source == str(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "file",
    ["../other/a.safetensors", "{}/other/a.safetensors", "sub/a.safetensors", "./a", "a//b", ""],
)
def test_an_index_of_others_stays_in_its_directory(file: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "own").mkdir()
    content = file_of({"weight": tensor(shape=[2, 2], data_offsets=[0, 16])}, bytes(16))
    (tmp_path / "other" / "a.safetensors").write_bytes(content)
    (tmp_path / "own" / "sub").symlink_to(tmp_path / "other")
    (tmp_path / "own" / INDEX).write_text(
        json.dumps({"weight_map": {"weight": file.format(tmp_path)}})
    )
    refused(lambda: load(model, None, tmp_path / "own"))
    assert model.weight.abs().sum() > 0
    # As Hugging Face's cache lies: the file, by its name, is a link.
    (tmp_path / "own" / "a.safetensors").symlink_to("../other/a.safetensors")
    (tmp_path / "own" / INDEX).write_text(json.dumps({"weight_map": {"weight": "a.safetensors"}}))
    load(model, None, tmp_path / "own")
    assert model.weight.abs().sum() == 0


# --- what is no tensor ----------------------------------------------------------------------------


def unsealed(directory: Path) -> None:
    """Let a checkpoint be one of the first format: nothing but a reader's care is in the way."""
    index = json.loads((directory / INDEX).read_text())
    for key in ("protrain_format", "protrain_sums", "protrain_checksum"):
        index["metadata"].pop(key)
    (directory / INDEX).write_text(json.dumps(index))
    (directory / "protrain-save-1" / SUMS).unlink()


def packed_training(directory: Path) -> dict[str, Any]:
    read: dict[str, Any] = torch.load(directory / "protrain-save-1" / TRAINING, weights_only=True)
    return read


def at(*keys: Any, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(training: dict[str, Any]) -> None:
        for key in keys[:-1]:
            training = training[key]
        training[keys[-1]] = value

    return change


STATE = torch.get_rng_state()
STRUCTURES: dict[str, Callable[[dict[str, Any]], object]] = {
    "version a text": at("version", value="1"),
    "version true": at("version", value=True),
    "newer": at("version", value=2),
    "extra a list": at("extra", value=[]),
    "modules a list": at("modules", value=[]),
    "modules by number": at("modules", value={0: 1}),
    "files a text": at("files", value="model-00001-of-00002.safetensors"),
    "files up": at("files", value=["../../elsewhere"]),
    "files absolute": at("files", value=["/dev/zero"]),
    "files a folder": at("files", value=["."]),
    "files not there": at("files", value=["optimizer-00009-of-00004.safetensors"]),
    "no files": lambda training: training.pop("files"),
    "random a list": at("random", value=[]),
    "random without torch": lambda training: training["random"].pop("torch"),
    "random of floats": at("random", "torch", value=torch.zeros(5056)),
    "random cut": at("random", "torch", value=STATE[:100]),
    "random of zeros": at("random", "torch", value=torch.zeros_like(STATE)),
    "python a text": at("random", "python", value="state"),
    "python cut": at("random", "python", value=(3, (1, 2), None)),
    "python's position": at("random", "python", value=(3, (*([1] * 624), 700), None)),
    "python's next": at("random", "python", value=(3, (*([1] * 624), 7), "x")),
    "cuda a tensor": at("random", "cuda", value=STATE),
    "cuda of floats": at("random", "cuda", value=[torch.zeros(16)]),
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


@pytest.mark.parametrize("change", STRUCTURES.values(), ids=STRUCTURES)
def test_what_is_no_tensor_is_refused_whole(
    change: Callable[[dict[str, Any]], object], training: Training, checkpoint: Path
) -> None:
    unsealed(checkpoint)
    content = packed_training(checkpoint)
    change(content)
    torch.save(content, checkpoint / "protrain-save-1" / TRAINING)
    before = training.state()
    refused(lambda: load(training.model, training.optimizer, checkpoint))
    assert list(differences(training.state(), before, "state")) == []


def test_a_scheduler_s_own_option_is_no_damage(training: Training, checkpoint: Path) -> None:
    unsealed(checkpoint)
    content = packed_training(checkpoint)
    content["optimizer"]["groups"][0] |= {"initial_lr": 0.5, "foreach": True, "lr": torch.ones(())}
    torch.save(content, checkpoint / "protrain-save-1" / TRAINING)
    assert load(training.model, training.optimizer, checkpoint) == EXTRA
    assert training.optimizer.param_groups[0]["initial_lr"] == 0.5


MARK = "PROTRAIN_CODE_HAS_RUN"


class Runs:
    """Code in a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"import os; os.environ[{MARK!r}] = 'yes'",)


def test_no_load_runs_code(training: Training, checkpoint: Path) -> None:
    unsealed(checkpoint)
    path = checkpoint / "protrain-save-1" / TRAINING
    content = packed_training(checkpoint)
    content["extra"] = {"what": Runs()}
    torch.save(content, path)
    whole = path.read_bytes()
    torch.save(content, path, _use_new_zipfile_serialization=False)
    for attack in (whole, path.read_bytes(), pickle.dumps(content), pickle.dumps(Runs())):
        path.write_bytes(attack)
        before = training.state()
        for use in (
            lambda: load(training.model, training.optimizer, checkpoint),
            lambda: load(training.model, None, checkpoint),
            lambda: read_extra(checkpoint),
        ):
            assert refused(use).message == "the file is damaged"
        assert list(differences(training.state(), before, "state")) == []
    assert MARK not in os.environ
    torch.load(io.BytesIO(whole), weights_only=False)  # which it would have
    assert os.environ.pop(MARK) == "yes"


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return pickle.LONG1 + b"\x08" + value.to_bytes(8, "little", signed=True)


def call(name: str, *arguments: bytes) -> bytes:
    """A call of a global, `module name`, in the words of a pickle."""
    function = b"c" + name.replace(" ", "\n").encode() + b"\n"
    return function + b"(" + b"".join(arguments) + b"tR"


def several(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def stored(numel: int, *, key: str = "0", kind: str = "Float") -> bytes:
    class_ = f"ctorch\n{kind}Storage\n".encode()
    return several(text("storage"), class_, text(key), text("cpu"), number(numel)) + b"Q"


def view(storage: bytes, size: int, stride: int) -> bytes:
    shape, strides = several(number(size)), several(number(stride))
    none = call("collections OrderedDict")
    return call(
        "torch._utils _rebuild_tensor_v2", storage, number(0), shape, strides, b"\x89", none
    )


HUGE = 10**11
ENCODED = call("_codecs encode", text("a"), text("latin1"))
LAYOUT = call("torch.serialization _get_layout", text("torch.sparse_coo"))
GREEDY = {
    "bytes": call("__builtin__ bytearray", number(HUGE)),
    "bytes by another way": call(
        "torch._tensor _rebuild_from_type_v2",
        b"c__builtin__\nbytearray\n",
        b"ctorch\nTensor\n",
        several(number(HUGE)),
        b"}",
    ),
    "doubling": call("_codecs encode", ENCODED, text("hex")),
    "a tensor behind its storage": view(stored(2), HUGE, 1),
    "a storage behind its record": view(stored(HUGE), 2, 1),
    "a negative storage": view(stored(-1), 2, 1),
    "a storage that is not there": view(stored(2, key="7"), 2, 1),
    "a tensor by its class": call("torch FloatTensor", number(HUGE)),
    "a storage by its class": call("torch.storage UntypedStorage", number(HUGE)),
    "a set of a wide tensor": call("__builtin__ set", view(stored(2), HUGE, 0)),
    "counted": call("UserDict Counter", view(stored(2), HUGE, 0)),
    "converted": call(
        "torch._utils _rebuild_device_tensor_from_cpu_tensor",
        view(stored(2), HUGE, 0),
        b"ctorch\nfloat64\n",
        text("cpu"),
        b"\x89",
    ),
    "sparse": call(
        "torch._utils _rebuild_sparse_tensor",
        LAYOUT,
        several(
            view(stored(1, kind="Long"), HUGE, 0),
            view(stored(2), HUGE, 0),
            several(number(5)),
            b"\x88",
        ),
    ),
    "another protocol": b"\x80\x05N",
    "a long text": pickle.BINUNICODE + struct.pack("<I", 2**32 - 1) + b"a",
}


def archived(pickled: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in (
            ("data.pkl", pickled),
            ("version", b"3\n"),
            ("byteorder", b"little"),
            ("data/0", bytes(8)),
        ):
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def with_extra(value: bytes) -> bytes:
    """The pickle of a training whose extra has this value."""
    extra = b"}" + text("a") + value + b"s"
    return b"\x80\x02}(" + text("version") + b"K\x01" + text("extra") + extra + b"u."


@pytest.mark.parametrize("name", GREEDY)
def test_a_small_file_takes_no_memory(name: str) -> None:
    """The right calls are read, these are refused: before PyTorch would carry them out."""
    few = unpack(archived(with_extra(view(stored(2), 2, 1))), "file")["extra"]["a"]
    assert torch.equal(few, torch.zeros(2))
    most = largest_bytes()
    assert refused(lambda: unpack(archived(with_extra(GREEDY[name])), "file")).source == "file"
    assert largest_bytes() < most + 2**28


def largest_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_compressed_archive_is_refused() -> None:
    buffer = io.BytesIO()
    torch.save({"version": 1, "extra": {"a": torch.zeros(10**7)}}, buffer)
    small = io.BytesIO()
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(small, "w") as copy:
        for name in archive.namelist():
            copy.writestr(name, archive.read(name), zipfile.ZIP_DEFLATED)
    assert len(small.getvalue()) < 10**5
    refused(lambda: unpack(small.getvalue(), "file"))
    many = bytearray(archived(with_extra(b"N")))  # the same bytes by two names
    with zipfile.ZipFile(io.BytesIO(many)) as archive:
        first = archive.infolist()[0]
    entry = many.rindex(b"PK\x01\x02")
    many[entry + 42 : entry + 46] = struct.pack("<I", first.header_offset)
    refused(lambda: unpack(bytes(many), "file"))


SORTS: dict[str, Any] = {
    "numbers": [1, -1, 2**70, -(2**70), 1.5, True, None, 1j],
    "texts": ["a", "\u00e9", b"ab\xff", bytearray(b"12"), bytearray()],
    "nested": [(1, (2, [None, {3: "x"}])), {1, 2}, set(), Counter("ab"), OrderedDict(a=1)],
    "views": [torch.arange(10)[2:8:2], torch.ones(1).expand(3), torch.empty(0, 3), torch.ones(())],
    "dtypes": [torch.ones(2).to(dtype) for dtype in (torch.bfloat16, torch.uint16, torch.bool)]
    + [torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2, dtype=torch.complex64).conj()],
    "of torch": [torch.float32, torch.device("cpu"), torch.Size([1]), torch.strided],
    "parameters": [nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(1))],
}


@pytest.mark.parametrize("sort", SORTS)
def test_what_can_be_saved_can_be_loaded(sort: str, tmp_path: Path) -> None:
    save(Tiny(), None, tmp_path, extra={"a": SORTS[sort]})
    assert list(differences(read_extra(tmp_path)["a"], SORTS[sort], "")) == []


# --- checkpoints from before there were checksums -------------------------------------------------


def test_an_old_checkpoint_loads(tmp_path: Path) -> None:
    """Written by the first format's own code; the oracle is what PyTorch and safetensors read."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    extra = load(model, optimizer, OLD)
    scale = extra.pop("scale")
    assert extra == {"step": 1, "epochs": (1, 2.5)}
    assert torch.equal(scale, torch.tensor([2.0, 3.0]))
    (weights,), (states,) = OLD.glob("*/model-*"), OLD.glob("*/optimizer-*")
    assert list(differences(copied(model.state_dict()), load_file(weights), "")) == []
    found = {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    assert list(differences(found, load_file(states), "")) == []
    training = torch.load(OLD / "protrain-save-1" / TRAINING, weights_only=True)
    assert torch.equal(torch.get_rng_state(), training["random"]["torch"])
    assert random.getstate() == training["random"]["python"]
    assert optimizer.param_groups[0]["lr"] == 0.01
    copy = Path(copytree(OLD, tmp_path / "copy"))
    save(model, optimizer, copy)  # the next one has checksums
    assert read_extra(copy) == {}
    assert (copy / "protrain-save-2" / SUMS).exists()


def test_an_old_index_is_old_by_its_keys_alone(training: Training, checkpoint: Path) -> None:
    """What has checksums does not become old by losing some of them."""
    before = training.state()
    whole = (checkpoint / INDEX).read_bytes()
    for keys in (["protrain_checksum"], ["protrain_sums", "protrain_format"], ["protrain_save"]):
        index = json.loads(whole)
        for key in keys:
            index["metadata"].pop(key)
        (checkpoint / INDEX).write_text(json.dumps(index))
        refused(lambda: load(training.model, training.optimizer, checkpoint))
    index["metadata"] = {"total_size": 1, "protrain_save": "protrain-save-1"}
    (checkpoint / INDEX).write_text(json.dumps(index))
    refused(lambda: load(training.model, training.optimizer, checkpoint))  # its sums are there
    for metadata in ({}, {"total_size": 1}, {"total_size": 1, "qrotrain_save": "protrain-save-1"}):
        index["metadata"] = metadata
        (checkpoint / INDEX).write_text(json.dumps(index))
        refused(lambda: load(training.model, None, checkpoint))
    assert list(differences(training.state(), before, "state")) == []


@pytest.mark.parametrize("stride", [19, pytest.param(2, marks=pytest.mark.slow)])
def test_a_damaged_old_checkpoint_loads_or_is_refused_whole(
    stride: int, training: Training, checkpoint: Path
) -> None:
    """Without checksums values may be others; there is no other error, and nothing in part."""
    unsealed(checkpoint)
    loaded = 0
    for path in files_of(checkpoint):
        content = path.read_bytes()
        step = stride * (8 if path.name == TRAINING else 1)
        before = training.state()
        for number, at_byte in enumerate(range(0, len(content), step)):
            changed = bytearray(content)
            changed[at_byte] ^= 1 << number % 8
            path.write_bytes(changed)
            try:
                load(training.model, training.optimizer, checkpoint)
            except ProtrainError:
                assert list(differences(training.state(), before, "state")) == []
            else:
                loaded += 1
                before = training.state()
        path.write_bytes(content)
    assert loaded > 0
