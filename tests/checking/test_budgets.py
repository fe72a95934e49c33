"""Budgets per machine, in pyproject.toml and in budgets.yaml."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from protrain_plan.checking.budgets import Limits, MachineBudget, find_limits
from protrain_runtime.contract.errors import RecordError
from tests.support.messages import Speaker
from tests.support.record_fuzz import FLOODS, TEXTS

YAML = """\
protrain: budgets
version: 1
budgets:
  rtx-4090: {device: 22GiB, host: 1000000000, headroom: 5%, slowdown: 12.5%, plans: ["a/*", "b/*"]}
  a100-80gb: {disk: 1.5TB, step_seconds: 2}
"""
TOML = """\
[tool.protrain.budgets.rtx-4090]
device = "22GiB"
host = 1000000000
headroom = "5%"
slowdown = "12.5%"
plans = ["a/*", "b/*"]

[tool.protrain.budgets.a100-80gb]
disk = "1.5TB"
step_seconds = 2
"""


def expected(source: Path) -> dict[str, MachineBudget]:
    return {
        "rtx-4090": MachineBudget(
            machine="rtx-4090",
            source=str(source),
            device=22 * 2**30,
            host=1000000000,
            headroom=0.05,
            slowdown=0.125,
            plans=("a/*", "b/*"),
        ),
        "a100-80gb": MachineBudget(
            machine="a100-80gb", source=str(source), disk=1_500_000_000_000, step_seconds=2.0
        ),
    }


LEAVES = ("int8-activations", "low-rank-activations")


@pytest.mark.parametrize(
    ("name", "text", "allow"),
    [
        ("budgets.yaml", YAML, ()),
        ("pyproject.toml", TOML, ()),
        ("budgets.yaml", f"{YAML}allow: [{', '.join(LEAVES)}]\n", LEAVES),
        ("pyproject.toml", f"[tool.protrain]\nallow = {list(LEAVES)}\n{TOML}", LEAVES),
    ],
)
def test_both_files_say_the_same(
    name: str, text: str, allow: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    limits = Limits(budgets=expected(path), allow=allow)
    assert find_limits(None, folder=tmp_path) == limits == find_limits(path)


def test_no_file_is_no_budget(tmp_path: Path) -> None:
    assert find_limits(None, folder=tmp_path).budgets == {}
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n")
    assert find_limits(None, folder=tmp_path).budgets == {}


def test_two_files_are_one_too_many(tmp_path: Path, assert_says: Speaker) -> None:
    (tmp_path / "budgets.yaml").write_text(YAML)
    (tmp_path / "pyproject.toml").write_text(TOML)
    assert_says.refused(find_limits, None, folder=tmp_path)


HEAD = "protrain: budgets\nversion: 1\n"
WRONG = {
    **{
        f"YAML, {entry}": ("budgets.yaml", f"{HEAD}budgets:\n  m: {entry}\n")
        for entry in (
            "{devise: 1GiB}",
            "{device: 22G}",
            "{device: 24}",
            "{host: '128'}",
            "{headroom: 0.05}",
            "{headroom: 100%}",
            "{step_seconds: soon}",
            "{step_seconds: -1}",
            "{plans: a/*}",
            "{device: [1GiB]}",
            "{slowdown: {by: 5%}}",
            "big",
        )
    },
    "YAML, leave for what is not": ("budgets.yaml", f"{HEAD}budgets: {{}}\nallow: [int9]\n"),
    "YAML, leave in no list": ("budgets.yaml", f"{HEAD}budgets: {{}}\nallow: int8-activations\n"),
    "TOML, leave for what is not": ("pyproject.toml", "[tool.protrain]\nallow = ['int9']\n"),
    "TOML, leave in no list": ("pyproject.toml", "[tool.protrain]\nallow = 'int8-activations'\n"),
    "TOML, a key": ("pyproject.toml", "[tool.protrain]\nbudget = 1\n"),
    "TOML, no table": ("pyproject.toml", "[tool]\nprotrain = 1\n"),
    "TOML, a number": ("pyproject.toml", "[tool.protrain.budgets.m]\nheadroom = 5\n"),
    "TOML, a machine's key": ("pyproject.toml", "[tool.protrain.budgets.m]\nheadrom = 5\n"),
    "TOML, none": ("pyproject.toml", "[tool\n"),
    "too many machines": (
        "budgets.yaml",
        HEAD + "budgets: " + json.dumps({f"m{n}": {} for n in range(201)}),
    ),
    "too many patterns": (
        "budgets.yaml",
        HEAD
        + "budgets: "
        + json.dumps({f"m{n}": {"plans": [f"a{k}" for k in range(11)]} for n in range(100)}),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_name_the_line_or_the_key(what: str, tmp_path: Path, assert_says: Speaker) -> None:
    name, text = WRONG[what]
    (tmp_path / name).write_text(text)
    assert_says.refused(find_limits, tmp_path / name)


PLAN = Path("plans/a/plan.yaml")
PATTERNS = [text for text in (*TEXTS, "./", "a//b", "*/" * 90) if isinstance(text, str)]


@pytest.mark.parametrize("written", ["YAML", "TOML"])
def test_every_pattern_is_one_or_is_refused(written: str, tmp_path: Path) -> None:
    refused = set()
    for pattern in PATTERNS:
        try:
            text = json.dumps({"m": {"plans": [pattern]}})
            if written == "YAML":
                path = tmp_path / "budgets.yaml"
                path.write_text(f"protrain: budgets\nversion: 1\nbudgets: {text}\n")
            else:
                path = tmp_path / "pyproject.toml"
                path.write_text(f"[tool.protrain.budgets.m]\nplans = {json.dumps([pattern])}\n")
            assert find_limits(path).budgets["m"].names(PLAN) in (True, False)
        except RecordError:
            refused.add(pattern)
    assert {"", ".", "./"} < refused < set(PATTERNS)
    assert not {"*", "**", "/", "[", "?", "a//b"} & refused


@pytest.mark.nightly("6")
@pytest.mark.parametrize("flood", range(len(FLOODS)))
def test_what_takes_long_to_read_is_no_budget(flood: int, tmp_path: Path) -> None:
    """As a whole file, as a part of ours and as a key's; pytest's own time limit ends all else."""
    for count in (30, 3000, 100_000):
        text = FLOODS[flood](count)
        for before, after in (("", ""), (TOML, ""), (f"{TOML}\n[a]\nb = ", ""), ("a.", "b = 1\n")):
            path = tmp_path / "pyproject.toml"
            path.write_text(before + text + after)
            with suppress(RecordError):
                find_limits(path)
            path = tmp_path / "limits.yaml"
            path.write_text(YAML + text)
            with suppress(RecordError):
                find_limits(path)
