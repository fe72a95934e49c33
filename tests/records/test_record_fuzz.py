"""No file ends a command in a traceback, in more than 2 GiB, or in 20 s of a processor.

`python -m tests.support.record_fuzz` looks at as many cases as one has time for.
"""

import os
import re
from contextlib import chdir
from pathlib import Path

import pytest

from protrain_runtime.contract.records import read_plan
from tests.support.checking_cases import commit
from tests.support.messages import Speaker
from tests.support.record_fuzz import OFTEN, SELDOM, WITH_TORCH, judged, run
from tests.support.record_samples import PLAN_TEXT

TINY = '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": %s, "vocab_size": %s}'


def told(folder: Path, *arguments: str) -> str:
    """The one message of a command that is refused."""
    with chdir(folder):
        code, message = run(arguments)
    assert code == 2, message
    assert message.startswith("error: ")
    return message.removeprefix("error: ").strip()


SEEDS = {
    "of records alone": (0, 4, 50, OFTEN),
    "the planner and the page": (10_000, 2, 5, SELDOM),
    "many": (100_000, 40, 100, OFTEN + SELDOM),
    "that build models": (200_000, 10, 10, WITH_TORCH),
}
"""By commands: the first seed, thousands of seeds, and how many of each thousand are taken."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"), [(name, n) for name, seeds in SEEDS.items() for n in range(seeds[1])]
)
def test_hostile_records_are_one_error_each(name: str, number: int, tmp_path: Path) -> None:
    """Changed as data and as bytes."""
    first, _, count, commands = SEEDS[name]
    for seed in range(first + number * 1000, first + number * 1000 + count):
        assert judged(seed, tmp_path, commands) is None, f"seed {seed}"


# --- what is small on disk ------------------------------------------------------------------------

RUNS = [f"  - {{names: m{n}.0-999, activations: keep, states: persistent}}\n" for n in range(100)]
FLOODS = {
    "runs": PLAN_TEXT[: PLAN_TEXT.index("units:")] + "units:\n" + "".join(RUNS),
    "a long run": PLAN_TEXT.replace("model.layers.0-11", "model.layers.0-99999"),
    "nesting": "[" * 100_000,
    "nested blocks": "".join(f"{' ' * n}a:\n" for n in range(1000)),
    "keys": "".join(f"k{n}: 1\n" for n in range(25_001)),
    "digits": PLAN_TEXT.replace("seed: 0", f"seed: {'9' * 5000}"),
    "a version of digits": f"%YAML {'9' * 5000}.1\n---\na: 1\n",
    "a character of digits": 'a: "\\UFFFFFFFF"\n',
    "text": PLAN_TEXT.replace("hardware: laptop", f"hardware: {'x' * 1001}"),
}


@pytest.mark.nightly("keys")
@pytest.mark.parametrize("name", FLOODS)
def test_what_would_fill_the_memory_is_refused(
    name: str, tmp_path: Path, assert_says: Speaker
) -> None:
    (tmp_path / "plan.yaml").write_text(FLOODS[name])
    assert_says(told(tmp_path, "diff", "plan.yaml", "plan.yaml"))


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
        with chdir(tmp_path):
            assert run(["check", "plan.yaml", "--records-only"])[0] == 1


# --- files that are none --------------------------------------------------------------------------


def test_a_named_pipe_is_refused_and_one_of_the_shell_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused = "pipe: this is a named pipe, not a file"
    assert told(tmp_path, "diff", "pipe", "pipe") == refused
    reads, writes = os.pipe()
    content = PLAN_TEXT.encode()
    (tmp_path / "plan.yaml").write_bytes(content)
    assert os.write(writes, content) == len(content)  # as much as a pipe holds
    os.close(writes)
    with chdir(tmp_path):
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

CONFIGURATIONS = {
    "nothing": "",
    "no JSON": "not json",
    "a list": "[]",
    "nesting": "[" * 100_000,
    "digits": TINY % ("9" * 5000, 1),
    "no architecture": "{}",
    "a list as architecture": '{"model_type": ["llama"]}',
    "another architecture": '{"model_type": "zzz"}',
    "many layers": TINY % (10**9, 256),
    "many words": TINY % (2, 10**30),
    "a list as number": TINY % ("[]", 256),
    "a negative number": TINY % (-1, '"7"'),
    "no heads": TINY % (2, '256, "num_attention_heads": 0'),
    "what is no model": TINY % (2, '256, "architectures": ["Trainer"]'),
    "a function": TINY % (2, '256, "architectures": ["pipeline"]'),
    "a number as class": TINY % (2, '256, "architectures": [5]'),
    "many parameters": TINY % (2, f'256, "intermediate_size": {2**31}, "hidden_size": {2**30}'),
}


@pytest.mark.parametrize("what", CONFIGURATIONS)
def test_hostile_configurations_are_one_error(
    what: str, tmp_path: Path, assert_says: Speaker
) -> None:
    (tmp_path / "config.json").write_text(CONFIGURATIONS[what])
    arguments = ("profile", "config.json", "--on", "rtx-4090", "--seq-len", "16")
    message = told(tmp_path, *arguments).partition("\n")[0]
    # Versions and words of transformers are its own.
    message = message.partition("refuses the configuration: ")[0]
    assert_says(re.sub(r"transformers [\d.]+", "transformers", message))
