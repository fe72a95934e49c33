"""No file ends a command in a traceback, in more than 2 GiB, or in 20 s of a processor.

`python -m tests.support.record_fuzz` looks at as many cases as one has time for.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protrain_runtime.contract.records import read_plan
from protrain_runtime.contract.records.schema import MAX_UNITS
from tests.support.checking_cases import commit
from tests.support.record_fuzz import OFTEN, SELDOM, WITH_TORCH, judged, run
from tests.support.record_samples import PLAN_TEXT

TINY = '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": %s, "vocab_size": %s}'


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def told(folder: Path, *arguments: str) -> str:
    """What a command says that is refused, in one message."""
    with inside(folder):
        code, message = run(arguments)
    assert code == 2, message
    assert message.startswith("error: ")
    return message.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 3))]
)
def test_hostile_records_are_one_error_each(number: int, tmp_path: Path) -> None:
    """Changed as data and as bytes, through the commands that read records alone."""
    for seed in range(number * 1000, number * 1000 + 50):
        assert judged(seed, tmp_path, OFTEN) is None, f"seed {seed}"


@pytest.mark.parametrize("number", range(2))
def test_the_planner_and_the_page_take_hostile_records(number: int, tmp_path: Path) -> None:
    for seed in range(10_000 + number * 1000, 10_000 + number * 1000 + 5):
        assert judged(seed, tmp_path, SELDOM) is None, f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_many_hostile_records_are_one_error_each(number: int, tmp_path: Path) -> None:
    for seed in range(100_000 + number * 1000, 100_000 + number * 1000 + 100):
        assert judged(seed, tmp_path, OFTEN + SELDOM) is None, f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_commands_that_build_models_take_hostile_records(number: int, tmp_path: Path) -> None:
    for seed in range(200_000 + number * 1000, 200_000 + number * 1000 + 10):
        assert judged(seed, tmp_path, WITH_TORCH) is None, f"seed {seed}"


# --- what is small on disk ------------------------------------------------------------------------

FLOODS = {
    "runs": (
        PLAN_TEXT[: PLAN_TEXT.index("units:")]
        + "units:\n"
        + "".join(
            f"  - {{names: m{n}.0-999, activations: keep, states: persistent}}\n"
            for n in range(100)
        ),
        f"units: expected at most {MAX_UNITS} units, runs unfolded, got 2000 up to 'm1.999'",
    ),
    "a long run": (
        PLAN_TEXT.replace("model.layers.0-11", "model.layers.0-99999"),
        f"units[1].names: expected a run of at most {MAX_UNITS} units, got 100000",
    ),
    "nesting": ("[" * 100_000, "not readable as YAML: nested more than 20 deep"),
    "nested blocks": (
        "".join(f"{' ' * n}a:\n" for n in range(1000)),
        "not readable as YAML: nested more than 20 deep",
    ),
    "keys": (
        "".join(f"k{n}: 1\n" for n in range(25_001)),
        "not readable as YAML: more than 50000 keys and values",
    ),
    "digits": (
        PLAN_TEXT.replace("seed: 0", f"seed: {'9' * 5000}"),
        f"workload.seed: expected an integer below 2**63, got {'9' * 57}...",
    ),
    "a version of digits": (f"%YAML {'9' * 5000}.1\n---\na: 1\n", "a number in it is too large"),
    "a character of digits": ('a: "\\UFFFFFFFF"\n', "a number in it is too large"),
    "text": (
        PLAN_TEXT.replace("hardware: laptop", f"hardware: {'x' * 1001}"),
        "hardware: expected a text of at most 1000 characters, got 1001 of them",
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_what_would_fill_the_memory_is_refused(name: str, tmp_path: Path) -> None:
    text, message = FLOODS[name]
    (tmp_path / "plan.yaml").write_text(text)
    assert message in told(tmp_path, "diff", "plan.yaml", "plan.yaml")


def test_pieces_that_never_end_are_refused(tmp_path: Path) -> None:
    path = commit(tmp_path)
    size = read_plan(path).settings.piece_bytes
    text = path.read_text()
    for pieces in ("1", "1000"):
        path.write_text(text.replace("piece_bytes: 8MiB", f"piece_bytes: {pieces}"))
        assert size == 8 * 2**20
        message = told(tmp_path, "show", "plan.yaml")
        assert message.startswith(
            "plan.yaml: settings.piece_bytes: optimizer states would move in "
        )
        with inside(tmp_path):
            assert run(["check", "plan.yaml", "--records-only"])[0] == 1


# --- files that are none --------------------------------------------------------------------------


def test_files_that_never_end_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "sparse.yaml").open("wb") as file:
        file.truncate(5 * 2**30)
    larger = "this file is larger than the 2.00 MiB that are read of one"
    for path in ("sparse.yaml", "/dev/zero"):
        assert told(tmp_path, "show", path) == f"{path}: {larger}"
        assert told(tmp_path, "hardware", "show", path) == f"{path}: {larger}"


def test_a_named_pipe_is_refused_and_one_of_the_shell_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused = "pipe: this is a named pipe, not a file"
    assert told(tmp_path, "diff", "pipe", "pipe") == refused
    reads, writes = os.pipe()
    content = PLAN_TEXT.encode()
    (tmp_path / "plan.yaml").write_bytes(content)
    assert os.write(writes, content) == len(content)  # as much as a pipe holds
    os.close(writes)
    with inside(tmp_path):
        assert run(["diff", f"/dev/fd/{reads}", "plan.yaml"])[0] == 0
    os.close(reads)


@pytest.mark.parametrize(
    "name", ["x" * 5000, "/".join(["d" * 200] * 40), "a\nb", "a\0b", "a\udcffb", "/dev/null", "."]
)
def test_names_that_no_file_has_are_one_error(name: str, tmp_path: Path) -> None:
    commit(tmp_path)
    for arguments in (
        ("show", name),
        ("show", "plan.yaml", "--profile", name),
        ("diff", name, name),
        ("hardware", "show", name),
        ("report", "plan.yaml", "--recording", name),
        ("plan", "profile.yaml", "--pins", name),
        ("check", "plan.yaml", "--records-only", "--budgets", name),
        ("check", "plan.yaml", "--records-only", "--on", name),
    ):
        told(tmp_path, *arguments)
    if "x" * 256 in name or "\0" in name:
        told(tmp_path, "simulate", "plan.yaml", "--trace", name)
        told(tmp_path, "check", name, "--records-only")


# --- configurations -------------------------------------------------------------------------------

LLAMA = "expected a number of at most"
CONFIGURATIONS = {
    "": "not readable as JSON: Expecting value",
    "not json": "not readable as JSON: Expecting value",
    "[]": "expected a JSON object, got list",
    "[" * 100_000: "not readable as JSON: ",
    TINY % ("9" * 5000, 1): "not readable as JSON: ",
    "{}": "model_type: the configuration does not say which architecture it is of",
    '{"model_type": ["llama"]}': "model_type: the configuration does not say",
    '{"model_type": "zzz"}': "has no architecture 'zzz'",
    TINY % (10**9, 256): f"num_hidden_layers: {LLAMA} 480, got 1000000000",
    TINY % (2, 10**30): f"vocab_size: {LLAMA} 2147483648, got more than 2**63",
    TINY % ("[]", 256): "transformers refuses the configuration",
    TINY % (-1, '"7"'): "transformers refuses the configuration",
    TINY % (2, '256, "num_attention_heads": 0'): "transformers refuses the configuration",
    TINY % (2, '256, "architectures": ["Trainer"]'): "architectures: transformers",
    TINY % (2, '256, "architectures": ["pipeline"]'): "architectures: transformers",
    TINY % (2, '256, "architectures": [5]'): "architectures: expected a list of names",
    TINY % (2, f'256, "intermediate_size": {2**31}, "hidden_size": {2**30}'): (
        "the configuration is of a model with more than 10000000000000 of parameters"
    ),
}


@pytest.mark.parametrize("number", range(len(CONFIGURATIONS)))
def test_hostile_configurations_are_one_error(number: int, tmp_path: Path) -> None:
    text, message = list(CONFIGURATIONS.items())[number]
    (tmp_path / "config.json").write_text(text)
    arguments = ("profile", "config.json", "--on", "rtx-4090", "--seq-len", "16")
    assert message in told(tmp_path, *arguments)
