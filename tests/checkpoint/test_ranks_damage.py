"""Checkpoints of several ranks that are damaged, or made by someone: refused, and nothing runs."""

import json
import os
import pickle
import random
import resource
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_without_protrain
from torch.distributed.checkpoint.state_dict_saver import save as save_without_protrain

from protrain_runtime import load, prepare, save
from protrain_runtime.checkpoint.files import SUMS, Range, seal, write_sums
from protrain_runtime.checkpoint.folders import INDEX, POINTER
from protrain_runtime.checkpoint.part_files import METADATA, TENSORS, Saved
from protrain_runtime.checkpoint.pickled import MAX_STEPS, read_pickle
from protrain_runtime.checkpoint.saving import read_extra
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import (
    DeviceGroup,
    Keep,
    Offload,
    Persistent,
    Placement,
    Plan,
    UnitPlan,
)
from protrain_runtime.states.values import Held
from tests.support.plan_settings import with_settings
from tests.support.ranks_cases import run_ranks
from tests.support.runtime_cases import ADAMW, copied, differences, made_once, plan_for

FIRST_FORMAT = Path(__file__).parents[1] / "formats" / "checkpoint-ranks-1"
FOLDER = "protrain-ranks-1"


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6)])
        self.head = nn.Linear(6, 2, bias=False)
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [sequence] -> []
        hidden: Tensor = self.head(self.blocks[0](self.embed(tokens)))
        return hidden.square().mean()


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def plan_of(model: nn.Module, count: int) -> Plan:
    states: dict[str, Placement] = {
        "embed": Persistent(),
        "blocks.0": Offload(tier="device" if count > 1 else "host"),
        "head": Offload(tier="disk"),
    }
    units = [
        UnitPlan(
            name=name,
            kind="block" if name == "blocks.0" else "part",
            activations=Keep(),
            states=placement,
            parameters=() if name == "blocks.0" else (f"{name}.weight",),
        )
        for name, placement in states.items()
    ]
    return with_settings(
        plan_for(model, units, piece_bytes=2000), group=DeviceGroup(num_devices=count)
    )


Made = tuple[nn.Module, torch.optim.Optimizer]


def prepared(count: int, seed: int = 0) -> Made:
    model = tiny(seed)
    return prepare(model, plan_of(model, count), optimizer=ADAMW, wait_limit_s=60)


def plain(seed: int = 9) -> Made:
    """A model that has been trained a little, so that there are states that a load could change."""
    model = tiny(seed)
    optimizer = ADAMW(list(model.parameters()))
    train((model, optimizer), 1)
    return model, optimizer


def train(made: Made, num_steps: int, rank: int = 0) -> None:
    model, optimizer = made
    for step in range(num_steps):
        model(torch.tensor([step, rank, 3])).backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(made: Made) -> Any:
    return copied([made[0].state_dict(), made[1].state_dict()])


def same(found: Any, expected: Any) -> None:
    assert list(differences(found, expected, "")) == []


# ---- one checkpoint for all tests, and what two ranks say of damaged ones ------------------------


@contextmanager
def flipped(path: Path, position: int, bit: int = 0) -> Iterator[None]:
    """One bit of a file is another one, inside."""
    with changed(path, lambda content: _with_bit(content, position, bit)):
        yield


def _with_bit(content: bytes, position: int, bit: int) -> bytes:
    found = bytearray(content)
    found[position] ^= 1 << bit
    return bytes(found)


@contextmanager
def changed(path: Path, change: Callable[[bytes], bytes]) -> Iterator[None]:
    content = path.read_bytes()
    path.write_bytes(change(content))
    try:
        yield
    finally:
        path.write_bytes(content)


DAMAGES = (
    (POINTER, 30),
    (SUMS, 100),
    (TENSORS, 100),
    (METADATA, 1000),
    ("__0_0.distcp", 1000),
    ("__1_0.distcp", 1000),
)
"""What two ranks meet, one at a time: a bit in each file."""


def path_of(directory: Path, file: str) -> Path:
    return directory / file if file == POINTER else directory / FOLDER / file


def saving_and_meeting_damage(rank: int, count: int, directory: Path) -> tuple[list[str], int, Any]:
    """What each damaged one says, the step of the whole one, and how the states differ after."""
    model, optimizer = made = prepared(count)
    train(made, 2, rank)
    save(model, optimizer, directory, extra={"step": 2})
    train(made, 1, rank)
    before, told = state_of(made), []

    def attempt(directory: Path) -> None:
        dist.barrier()
        try:
            load(model, optimizer, directory)
            told.append("nothing was raised")
        except ProtrainError as error:
            told.append(str(error).replace(str(directory.parent), "DIR"))
        dist.barrier()

    for file, position in DAMAGES:
        if rank == 0:
            with flipped(path_of(directory, file), position):
                attempt(directory)
        else:
            attempt(directory)
    # As where each has a disk of its own, and one lacks a file.
    own = directory.parent / f"disk-{rank}"
    shutil.copytree(directory, own)
    if rank == 1:
        path_of(own, "__1_0.distcp").unlink()
    attempt(own)
    found = list(differences(state_of(made), before, "after the damaged ones"))
    train(made, 1, rank)  # all are alive, and go on together
    step = load(model, optimizer, directory)["step"]
    train(made, 1, rank)
    return told, step, found + list(differences(state_of(made), before, "after the whole one"))


@pytest.fixture(scope="module")
def made_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(path: Path) -> None:
        (path / "work").mkdir(parents=True)
        results = run_ranks(saving_and_meeting_damage, 2, path / "work", path / "saved")
        torch.save(results, path / "results.pt")

    return made_once(tmp_path_factory, "ranks-damage", make)


@pytest.fixture
def saved(made_by_ranks: Path, tmp_path: Path) -> Path:
    """A checkpoint of two ranks, of this test alone."""
    shutil.copytree(made_by_ranks / "saved", tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def first_format(tmp_path: Path) -> Path:
    shutil.copytree(FIRST_FORMAT, tmp_path / "first")
    return tmp_path / "first"


def refused(directory: Path, made: Made, before: Any) -> str:
    """The message; fails where it loads, where another error is raised, or the model changes."""
    with pytest.raises(ProtrainError) as caught:
        load(*made, directory)
    same(state_of(made), before)
    return str(caught.value).replace(str(directory), "DIR")


def test_two_ranks_refuse_damage_together_and_go_on(made_by_ranks: Path) -> None:
    results = torch.load(made_by_ranks / "results.pt", weights_only=False)
    fix = "\n  fix: load another checkpoint"
    folder = f"DIR/saved/{FOLDER}"
    found = [  # and by which rank: each compares some of the files
        (f"DIR/saved/{POINTER}: this is no index of a checkpoint, or a damaged one{fix}", None),
        (f"{folder}/{SUMS}: the file is damaged: its checksum is another{fix}", None),
        (f"{folder}/{TENSORS}: the list of tensors is damaged{fix}", None),
        (f"{folder}/{METADATA}: the list of tensors is damaged{fix}", None),
        (f"{folder}/__0_0.distcp: model.embed.weight [0:4, 0:6] (unit embed) is damaged{fix}", 1),
        (
            f"{folder}/__1_0.distcp: optimizer.state.embed.weight.exp_avg [0:4, 0:6]"
            f" (unit embed) is damaged{fix}",
            0,
        ),
        (f"DIR/disk-1/{FOLDER}/__1_0.distcp: the file is missing{fix}", 1),
    ]
    for rank, (told, step, changes) in enumerate(results):
        assert (step, changes) == (2, [])
        assert told == [
            said if by in (None, rank) else f"rank {by} failed in load(): {said}"
            for said, by in found
        ]


# ---- damage --------------------------------------------------------------------------------------


def test_a_whole_one_loads_and_plain_pytorch_reads_it(saved: Path) -> None:
    model, optimizer = made = plain()
    assert load(model, optimizer, saved) == read_extra(saved) == {"step": 2}
    other = tiny(5)
    load_without_protrain({"model": other.state_dict()}, checkpoint_id=saved / FOLDER)
    same(state_of(made)[0], other.state_dict())
    planned = prepared(1, seed=4)
    load(*planned, saved)
    same(state_of(planned), state_of(made))


def flips(directory: Path, files: list[str], stride: int) -> Iterator[tuple[Path, int, int]]:
    for file in files:
        path = path_of(directory, file)
        step = min(stride, 7) if file == POINTER else stride
        for number, position in enumerate(range(0, path.stat().st_size, step)):
            yield path, position, number % 8


FILES = [POINTER, SUMS, TENSORS, METADATA, "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize("stride", [251, pytest.param(17, marks=pytest.mark.slow)])
def test_a_bit_that_is_another_one_is_refused_wherever_it_is(saved: Path, stride: int) -> None:
    made = plain()
    before = state_of(made)
    for path, position, bit in flips(saved, FILES, stride):
        with flipped(path, position, bit):
            message = refused(saved, made, before)
        assert message.startswith(f"DIR/{path.relative_to(saved)}: "), (position, message)
    load(*made, saved)


def test_the_error_names_the_file_the_tensor_and_the_unit(saved: Path) -> None:
    sums = json.loads(path_of(saved, SUMS).read_text())
    position = 0
    for what, count, _ in sums["__0_0.distcp"]:
        if what.startswith("optimizer.state.blocks.0.weight.exp_avg ["):
            break
        position += count
    made = prepared(1)
    with flipped(path_of(saved, "__0_0.distcp"), position + count // 2):
        assert refused(saved, made, state_of(made)) == (
            f"DIR/{FOLDER}/__0_0.distcp: optimizer.state.blocks.0.weight.exp_avg [0:6, 0:6]"
            " (unit blocks.0) is damaged\n"
            "  fix: load another checkpoint"
        )
        load(made[0], None, saved)  # which does not need the states


def changes(content: bytes, other: bytes, stride: int) -> Iterator[bytes]:
    """Blocks of zeros, and files that are cut off, go on, or are another one."""
    for start in range(0, len(content), stride):
        yield content[:start] + bytes(len(content[start : start + 64])) + content[start + 64 :]
        yield content[:start]
    yield content + b"\0"
    yield content + content
    yield other
    yield b""


def test_zeroed_blocks_and_cut_and_swapped_files_are_refused(saved: Path) -> None:
    made = plain()
    before = state_of(made)
    files = [path_of(saved, file) for file in FILES]
    for path, other in zip(files, [*files[1:], files[0]], strict=True):
        content = path.read_bytes()
        for found in changes(content, other.read_bytes(), len(content) // 9):
            if found != content:
                with changed(path, lambda _, found=found: found):  # type: ignore[misc]
                    refused(saved, made, before)
    load(*made, saved)


def test_missing_files_other_files_and_links_are_refused(saved: Path, tmp_path: Path) -> None:
    made = plain()
    before = state_of(made)
    for file in FILES[1:]:
        path, aside = path_of(saved, file), tmp_path / "aside"
        path.rename(aside)
        refused(saved, made, before)
        path.symlink_to(aside)
        refused(saved, made, before)
        path.unlink()
        os.mkfifo(path)  # which a reader would wait for
        refused(saved, made, before)
        path.unlink()
        aside.rename(path)
    for name in ("__2_0.distcp", ".metadata.tmp", "pickled"):
        with changed_folder(saved / FOLDER / name):
            assert refused(saved, made, before) == (
                f"DIR/{FOLDER}/{name}: this is no file of the checkpoint\n"
                "  fix: load another checkpoint"
            )
    load(*made, saved)


@contextmanager
def changed_folder(path: Path) -> Iterator[None]:
    path.write_bytes(b"")
    yield
    path.unlink()


# ---- which folder --------------------------------------------------------------------------------

OLD = {"protrain_save": FOLDER, "num_ranks": 2}
POINTERS: dict[str, Any] = {
    "another directory": OLD | {"protrain_save": "../elsewhere/protrain-ranks-1"},
    "above": OLD | {"protrain_save": ".."},
    "itself": OLD | {"protrain_save": "."},
    "an absolute path": OLD | {"protrain_save": "/tmp/protrain-ranks-1"},
    "another name": OLD | {"protrain_save": "protrain-save-1"},
    "a line more": OLD | {"protrain_save": "protrain-ranks-1\n"},
    "a folder in it": OLD | {"protrain_save": "protrain-ranks-1/protrain-ranks-1"},
    "a list": OLD | {"protrain_save": [FOLDER]},
    "no count": {"protrain_save": FOLDER},
    "a text as count": OLD | {"num_ranks": "2"},
    "another count": OLD | {"num_ranks": 3},
    "true": OLD | {"num_ranks": True},
    "nothing": {},
    "another key": OLD | {"more": 1},
    "no sums": OLD | {"protrain_checksum": "00000000"},
    "none": None,
    "nested": "[" * 100_000,
    "a long number": '{"protrain_save": "protrain-ranks-1", "num_ranks": ' + "1" * 10_000 + "}",
    "a lone surrogate": '{"protrain_save": "\\ud800", "num_ranks": 2}',
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("case", POINTERS)
def test_a_pointer_names_a_folder_beside_it(case: str, first_format: Path, tmp_path: Path) -> None:
    shutil.copytree(first_format, tmp_path / "elsewhere")
    shutil.copytree(first_format / FOLDER, first_format / FOLDER / FOLDER)
    shutil.copytree(first_format / FOLDER, first_format / "protrain-save-1")
    shutil.rmtree(first_format / FOLDER / FOLDER)
    found = POINTERS[case]
    text = found if isinstance(found, str | bytes) else json.dumps(found)
    (first_format / POINTER).write_bytes(text if isinstance(text, bytes) else text.encode())
    made = plain()
    message = refused(first_format, made, state_of(made))
    assert message.startswith(f"DIR/{POINTER}: "), message
    with pytest.raises(ProtrainError):
        read_extra(first_format)


def test_a_folder_that_is_a_link_is_refused(first_format: Path, tmp_path: Path) -> None:
    (first_format / FOLDER).rename(tmp_path / "away")
    (first_format / FOLDER).symlink_to(tmp_path / "away")
    made = plain()
    assert refused(first_format, made, state_of(made)) == (
        f"DIR/{FOLDER}: this is no directory of its own\n  fix: load another checkpoint"
    )


def test_two_kinds_of_checkpoints_in_one_directory_are_refused(saved: Path, tmp_path: Path) -> None:
    save(*plain(), tmp_path / "one")
    made = plain()
    shutil.copy(tmp_path / "one" / INDEX, saved)
    told = (
        "DIR: the directory holds checkpoints of one device and of several\n"
        f"  fix: move {POINTER}, or the other one, to a directory of its own"
    )
    assert refused(saved, made, state_of(made)) == told
    (saved / INDEX).rename(saved / "model.safetensors")
    assert refused(saved, made, state_of(made)) == told
    (saved / "model.safetensors").unlink()
    load(*made, saved)


def test_sums_are_not_left_out(saved: Path) -> None:
    (saved / POINTER).write_text(json.dumps(OLD))  # as before there were any
    made = plain()
    assert "this is no file of the checkpoint" in refused(saved, made, state_of(made))


# ---- the first format ----------------------------------------------------------------------------


def test_the_first_format_loads_bitwise(first_format: Path) -> None:
    model, optimizer = made = plain()
    assert load(model, optimizer, first_format) == read_extra(first_format) == {"step": 2}
    expected = {
        name: torch.empty(entry.shape, dtype=entry.dtype)
        for name, entry in Saved(first_format).entries("").items()
    }
    load_without_protrain(expected, checkpoint_id=first_format / FOLDER)
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, state in optimizer.state[parameter].items():
            found[f"optimizer.state.{name}.{key}"] = state
    assert len(found) == len(expected) - 3 == 17  # training, and two random states
    same(found, {name: expected[name] for name in found})
    planned = prepared(1, seed=4)
    load(*planned, first_format)
    same(state_of(planned), state_of(made))


def save_plainly(directory: Path, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint of the first format, of one rank, with these tensors besides what is needed."""
    source = Saved(FIRST_FORMAT)
    state = dict(tensors)
    for name in ("training", "random.0"):
        packed = source.packed(name)
        assert packed is not None
        state.setdefault(name, torch.frombuffer(bytearray(packed), dtype=torch.uint8))
    save_without_protrain(
        state,
        storage_writer=FileSystemWriter(directory / FOLDER),
        planner=DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    (directory / POINTER).write_text(json.dumps(OLD | {"num_ranks": 1}))
    return directory


def test_all_dtypes_and_strides_are_read_as_plain_pytorch_writes_them(tmp_path: Path) -> None:
    bits = torch.randint(256, (2 * 3 * 4 * 5 * 16,), dtype=torch.uint8)
    tensors = {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3), "one": torch.ones(1, 1, 4)}
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.complex64, torch.complex128, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    ):  # fmt: skip
        whole = bits.view(dtype)[:120].view(2, 3, 4, 5)
        tensors[str(dtype)] = whole
        tensors[f"{dtype}.strided"] = whole.permute(2, 0, 3, 1)
    tensors["bool"] = bits[:120].view(2, 3, 4, 5) > 99
    saved = Saved(save_plainly(tmp_path / "plain", tensors))
    expected = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    load_without_protrain(expected, checkpoint_id=tmp_path / "plain" / FOLDER)
    entries = saved.entries("")
    found = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}
    saved.fill([(entries[name], Held(found[name])) for name in tensors])
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        for other in (tensor, expected[name]):
            flat = other.contiguous().view(-1).view(torch.uint8)
            assert torch.equal(found[name].view(-1).view(torch.uint8), flat), name


# ---- what others wrote ---------------------------------------------------------------------------


MARK = "a-pickle-ran"
TOUCH = f"touch {MARK}"
EVALUATED = f"__import__('os').system('{TOUCH}')"
RECORDS = "torch.distributed.checkpoint.metadata"


class Calls:
    """Pickled, it makes whoever unpickles it call something."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


def pickled(function: Callable[..., Any], *arguments: Any, protocol: int = 4) -> bytes:
    return pickle.dumps(Calls(function, *arguments), protocol)


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


SYSTEM, COMMAND = named("os", "system"), text(TOUCH) + b"\x85"

LIVE = {
    "reduce": pickled(os.system, TOUCH),
    "reduce, as text": f"cos\nsystem\n(S'{TOUCH}'\ntR.".encode(),
    "reduce, protocol 2": pickled(os.system, TOUCH, protocol=2),
    "eval": pickled(eval, EVALUATED),
    "exec": pickled(exec, EVALUATED),
    "getattr": named("builtins", "getattr")
    + named("builtins", "__import__") + text("os") + b"\x85R" + text("system")
    + b"\x86R" + COMMAND + b"R.",
    "map": named("builtins", "list")
    + named("builtins", "map") + SYSTEM + COMMAND + b"\x86R\x85R.",
    "name with dots": b"\x80\x04" + named("torch", "serialization.os.system") + COMMAND + b"R.",
    "inst": f"(S'{TOUCH}'\nios\nsystem\n.".encode(),
    "obj": b"(" + named("subprocess", "Popen") + b"](" + text("touch") + text(MARK) + b"eo.",
    "state set by a function": named("functools", "partial")
    + SYSTEM + b"\x85R" + COMMAND + b"R.",
    "torch's own": b"\x80\x04" + named("torch.utils._config_module", "os.system") + COMMAND + b"R.",
    "forgotten at once": pickled(os.system, TOUCH)[:-1] + b"0N.",
    "in a key": b"}" + SYSTEM + COMMAND + b"RNs.",
}  # fmt: skip
"""Pickles that `pickle` runs."""

OTHERS = {
    "newobj": named("os", "system") + COMMAND + b"\x81.",
    "newobj_ex": named("subprocess", "Popen") + text(TOUCH) + b"\x85}\x92.",
    "built into a class": named(RECORDS, "StorageMeta")
    + b"N}" + text("__setstate__") + SYSTEM + b"s\x86b0"
    + named(RECORDS, "StorageMeta") + b")\x81" + text(TOUCH) + b"b.",
    "built into a name": named(RECORDS, "StorageMeta") + b"}" + text("x") + b"Nsb.",
    "built twice": named(RECORDS, "StorageMeta") + b")\x81}b}b.",
    "a text is called": text("os.system") + COMMAND + b"R.",
    "a name as arguments": named("torch", "Size") + named("torch", "Size") + b"R.",
    "torch.load": named("torch", "load") + text("training.pt") + b"\x85R.",
    "torch.hub.load": named("torch.hub", "load") + text("owner/name") + b"\x85R.",
    "torch._utils._rebuild_tensor_v2": named("torch._utils", "_rebuild_tensor_v2") + b")R.",
    "torch.jit": named("torch.jit._script", "_load") + b")R.",
    "codecs": named("_codecs", "encode") + text("a") + text("rot13") + b"\x86R.",
    "bytearray": named("builtins", "bytearray") + b"J\xff\xff\xff\x7f\x85R.",
    "a list as name": b"]" + text("system") + b"\x93.",
    "extension": b"\x82\x01.",
    "extension of 4 bytes": b"\x84\x01\x00\x00\x00.",
    "persistent text": b"Pfile\n.",
    "persistent": text("file") + b"Q.",
    "next buffer": b"\x80\x05\x97.",
    "read-only buffer": b"\x80\x05\x97\x98.",
    "bytes": b"C\x01a.",
    "bytearray of 2**62 bytes": b"\x96" + (2**62).to_bytes(8, "little") + b".",
    "text of 2**32 bytes": b"X\xff\xff\xff\xff.",
    "number of 2**31 bytes": b"\x8b\xff\xff\xff\x7f.",
    "number of 200 bytes": b"\x8a\xc8" + bytes(200) + b".",
    "digits": b"I" + b"9" * 10_000 + b"\n.",
    "set": b"\x8f(K\x01\x90.",
    "later protocol": b"\x80\x06N.",
    "a number in the memo": b"Nr\xff\xff\xff\xffj\xff\xff\xff\xff.",
    "nothing in the memo": b"h\x07.",
    "below the mark": b"N(\x85.",
    "no end": b"N",
    "more than one": b"NN.",
    "behind its end": b"N.N.",
    "no mark": b"Nt.",
    "an odd mapping": b"}(Nu.",
    "a list as mapping": b"](NNu.",
    "lone surrogate": b"\x8c\x03\xed\xa0\x80.",
    "nothing": b"",
    "nested": b"(" * 10_000 + b"t" * 10_000 + b".",
    "tuples that double": b")" + b"2\x86" * 64 + b".",
    "tuples that double by memo": b")\x94" + b"h\x00h\x00\x86q\x00" * 5_000 + b".",
    "itself": b"]\x94h\x00a.",
    "a mapping with itself": b"}\x94h\x00h\x00s.",
}  # fmt: skip


@pytest.mark.parametrize("gadget", LIVE)
def test_these_pickles_run_where_pickle_reads_them(
    gadget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(LIVE[gadget])  # noqa: S301 - written above
    for _ in range(1000):  # one of them does not wait for what it starts
        if (tmp_path / MARK).exists():
            return
        time.sleep(0.01)
    raise AssertionError("nothing ran")


@pytest.mark.parametrize("gadget", [*LIVE, *OTHERS])
def test_a_load_runs_nothing_of_a_checkpoint(
    gadget: str, first_format: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {**LIVE, **OTHERS}[gadget]
    made = plain()
    before = state_of(made)
    path = path_of(first_format, METADATA)
    whole = path.read_bytes()
    # By itself, and before and behind what belongs there.
    for found in (content, content[:-1] + b"0" + whole[11:], whole[:-1] + b"0" + content):
        with changed(path, lambda _, found=found: found):  # type: ignore[misc]
            message = refused(first_format, made, before)
        assert message.startswith(f"DIR/{FOLDER}/{METADATA}: this is no list of a checkpoint's")
    # In the place of a value that nobody asks for.
    key = text("storage_data")
    with changed(path, lambda old: old.replace(b"N" + key, content[:-1] + key)):
        if gadget in LIVE:
            refused(first_format, made, before)
        else:
            with suppress(ProtrainError):
                load(*plain(), first_format)
    # And in the archive of a tensor, where torch.load would read it.
    with changed(path_of(first_format, "__0_0.distcp"), lambda old: with_pickle(old, content)):
        refused(first_format, made, before)
    assert not (tmp_path / MARK).exists()


def with_pickle(archives: bytes, content: bytes) -> bytes:
    """Archives of which the first has another pickle, of no more bytes than its own."""
    start = archives.index(b"\x80\x02ctorch._utils")
    size = archives.index(b"PK", start) - start
    return archives[:start] + content[:size].ljust(size, b"N") + archives[start + size :]


def resealed(directory: Path) -> None:
    """Let the sums be those of the files, as someone would who wants them to be read."""
    folder = directory / FOLDER
    (folder / SUMS).unlink()
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    found = write_sums(
        folder, {name: [Range("all", len(c), zlib.crc32(c))] for name, c in contents.items()}
    )
    (directory / POINTER).write_bytes(seal(OLD | {"checksums": found, "protrain_checksum": ""}))


def leaves(tree: Any) -> Iterator[tuple[Any, Any]]:
    """The containers and keys of all that a tree has, from the outside."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from leaves(tree[key])


VALUES: tuple[Any, ...] = (
    -1, 0, 1, 3, 2**31, 2**63, 2**200, 1.5, True, None, "", "x", "float64", "qint8", "../x", [], {},
    [[0, 0], [4, 6]], [1] * 100, "__0_0.distcp", "__7_0.distcp", "/etc/hostname", {"dtype": "int8"},
)  # fmt: skip


@pytest.mark.parametrize("num_cases", [150, pytest.param(2_000, marks=pytest.mark.slow)])
def test_lists_that_say_something_else_are_refused(saved: Path, num_cases: int) -> None:
    """With sums that are right: one value of tensors.json is another one, or is not there."""
    rng = random.Random(num_cases)
    made = plain()
    load(*made, saved)
    expected, path = state_of(made), path_of(saved, TENSORS)
    content = path.read_bytes()
    for _ in range(num_cases):
        listed = json.loads(content)
        tree, key = rng.choice(list(leaves(listed)))
        value = rng.choice((*VALUES, *leaves(listed)))
        if rng.random() < 0.2:
            del tree[key]
        else:
            tree[key] = value[0][value[1]] if isinstance(value, tuple) else value
        try:
            changed_content = json.dumps(listed).encode()
        except ValueError:  # it would be in itself
            continue
        if json.loads(changed_content) == json.loads(content):
            continue
        path.write_bytes(changed_content)
        resealed(saved)
        refused(saved, made, expected)
    path.write_bytes(content)
    resealed(saved)
    load(*made, saved)


def test_an_archive_of_another_tensor_is_refused(tmp_path: Path) -> None:
    right = {f"model.{name}": tensor for name, tensor in tiny().state_dict().items()}
    made = plain()[0], None
    before = copied(made[0].state_dict())
    name = "model.blocks.0.weight"
    # Of as many bytes, so that everything else is as it would be.
    for other, told in {
        "float64": (torch.zeros(6, 3, dtype=torch.float64), "float64 [6, 3]"),
        "int32": (torch.zeros(6, 6, dtype=torch.int32), "int32 [6, 6]"),
        "shape": (torch.zeros(4, 9), "float32 [4, 9]"),
    }.values():
        wrong, whole = (
            save_plainly(tmp_path / f"{told} {kind}", {**right, name: tensor})
            for kind, tensor in (("wrong", other), ("whole", right[name]))
        )
        shutil.copy(path_of(wrong, "__0_0.distcp"), path_of(whole, "__0_0.distcp"))
        with pytest.raises(ProtrainError) as caught:
            load(*made, whole)
        same(made[0].state_dict(), before)
        assert str(caught.value) == (
            f"{path_of(whole, '__0_0.distcp')}: {name} [0:6, 0:6] cannot be read: the archive holds"
            f" {told} instead of float32 [6, 6]\n"
            "  fix: load another checkpoint"
        )


@pytest.mark.parametrize(
    "written", [b"K\x06K\x06\x86", b"K\x06K\x01\x86"], ids=["sizes", "strides"]
)
def test_an_archive_whose_geometry_is_a_number_is_refused(written: bytes, tmp_path: Path) -> None:
    right = {f"model.{name}": tensor for name, tensor in tiny().state_dict().items()}
    made = plain()[0], None
    before = copied(made[0].state_dict())
    whole = save_plainly(tmp_path / "whole", right)
    archive = path_of(whole, "__0_0.distcp")
    content = archive.read_bytes()
    assert written in content
    archive.write_bytes(content.replace(written, b"M\x06\x00qc"))  # one number, and no tuple
    with pytest.raises(ProtrainError, match="cannot be read"):
        load(*made, whole)
    same(made[0].state_dict(), before)


def mutated(content: bytes, rng: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        start, size = rng.randrange(len(found) + 1), rng.choice((1, 1, 2, 8, 100))
        other = rng.randrange(len(content))
        match rng.randrange(6):
            case 0:
                found[start : start + size] = rng.randbytes(size)
            case 1:
                del found[start : start + size]
            case 2:
                found[start:start] = content[other : other + size]
            case 3:
                found[start : start + size] = content[other : other + size]
            case 4:
                found[start : start + 1] = rng.choice(
                    b"\x00\xff.0(t)R}b]Nh\x93\x94\x8c\x8a"
                ).to_bytes()
            case _:
                found[start:start] = rng.randbytes(size)
    return bytes(found)


@pytest.mark.parametrize("file", [METADATA, POINTER])
@pytest.mark.parametrize("num_cases", [300, pytest.param(5_000, marks=pytest.mark.slow)])
def test_any_bytes_are_read_or_refused(file: str, num_cases: int, first_format: Path) -> None:
    rng = random.Random(num_cases)
    made = plain()
    load(*made, first_format)
    expected = state_of(made)
    path = path_of(first_format, file)
    content = path.read_bytes()
    num_refused = 0
    for _ in range(num_cases):
        path.write_bytes(mutated(content, rng))
        try:
            load(*made, first_format)
        except ProtrainError:
            num_refused += 1
        # What loads is what was saved, or what has the same names, shapes and places.
        found = state_of(made)
        assert [d for d in differences(found, expected, "") if "by at most" not in d] == []
    assert num_refused > num_cases * 0.3


@pytest.mark.slow
def test_no_pickle_takes_much_memory_or_time() -> None:
    """Of the largest that are read: half a minute, and a gigabyte."""
    steps = {
        "lists": b"]\x94" * MAX_STEPS,
        "marks": b"(" * MAX_STEPS,
        "nested tuples": b")" + b"\x85" * MAX_STEPS,
        "lists in a list": b"]" + (b"(" + b"]" * 1000 + b"e") * (MAX_STEPS // 1000),
        "names": named("torch", "Size") + b"0" + b")" * MAX_STEPS,
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for content in steps.values():
        with pytest.raises(ValueError, match="it "):
            read_pickle(content + b".", {("torch", "Size")})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
