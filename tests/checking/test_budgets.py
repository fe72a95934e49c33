"""Budgets per machine, in pyproject.toml and in budgets.yaml."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from protrain_plan.checking.budgets import Limits, MachineBudget, find_limits
from protrain_runtime.contract.errors import ProtrainError, RecordError
from protrain_runtime.contract.records.forms import FORMS, leaves_of
from protrain_runtime.contract.records.tree import listed
from tests.support.messages import Speaker
from tests.support.record_fuzz import FLOODS, TEXTS

YAML = """\
protrain: budgets
version: 1
budgets:
  rtx-4090: {device: 22GiB, host: 1000, headroom: 5%, slowdown: 12.5%, plans: ["a/*", "b/*"]}
  a100-80gb: {disk: 1.5TB, step_seconds: 2}
"""
TOML = """\
[tool.protrain.budgets.rtx-4090]
device = "22GiB"
host = 1000
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
            host=1000,
            headroom=0.05,
            slowdown=0.125,
            plans=("a/*", "b/*"),
        ),
        "a100-80gb": MachineBudget(
            machine="a100-80gb", source=str(source), disk=1_500_000_000_000, step_seconds=2.0
        ),
    }


@pytest.mark.parametrize(("name", "text"), [("budgets.yaml", YAML), ("pyproject.toml", TOML)])
def test_both_files_say_the_same(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert find_limits(None, folder=tmp_path).budgets == expected(path)
    assert find_limits(path).budgets == expected(path)


LEAVES = ("int8-activations", "low-rank-activations")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("budgets.yaml", f"{YAML}allow: [{', '.join(LEAVES)}]\n"),
        ("pyproject.toml", f"[tool.protrain]\nallow = {list(LEAVES)}\n{TOML}"),
    ],
)
def test_both_files_give_leave(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert find_limits(None, folder=tmp_path).allow == LEAVES
    assert find_limits(path) == Limits(budgets=expected(path), allow=LEAVES)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("[int9-activations]", "expected {}, got 'int9-activations'"),
        ("int8-activations", "expected a list of {}"),
    ],
)
def test_leave_for_what_there_is_not_names_the_key(
    entry: str, problem: str, tmp_path: Path
) -> None:
    known = leaves_of(FORMS)
    told = problem.format(listed(known, "or" if entry.startswith("[") else "and"))
    as_yaml, as_toml = tmp_path / "budgets.yaml", tmp_path / "pyproject.toml"
    as_yaml.write_text(f"protrain: budgets\nversion: 1\nbudgets: {{}}\nallow: {entry}\n")
    as_toml.write_text(
        f"[tool.protrain]\nallow = {entry}\n".replace("int", "'int").replace("ons", "ons'")
    )
    place = "[0]" if entry.startswith("[") else ""
    for path, key in ((as_yaml, f":4: allow{place}"), (as_toml, f": tool.protrain.allow{place}")):
        with pytest.raises(ProtrainError) as caught:
            find_limits(path)
        assert str(caught.value) == f"{path}{key}: {told}"


def test_no_file_is_no_budget(tmp_path: Path) -> None:
    assert find_limits(None, folder=tmp_path).budgets == {}
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n")
    assert find_limits(None, folder=tmp_path).budgets == {}


def test_two_files_are_one_too_many(tmp_path: Path, assert_says: Speaker) -> None:
    (tmp_path / "budgets.yaml").write_text(YAML)
    (tmp_path / "pyproject.toml").write_text(TOML)
    with pytest.raises(ProtrainError) as caught:
        find_limits(None, folder=tmp_path)
    assert_says(caught.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{devise: 1GiB}", "unknown key 'devise'\n  fix: did you mean 'device'?"),
        (
            "{device: 22G}",
            "device: expected a size with its unit, got '22G'\n"
            "  fix: write 22GiB (powers of 1024) or 22GB (powers of 1000)",
        ),
        ("{headroom: 0.05}", "headroom: expected a percentage such as 5%, got '0.05'"),
        ("{headroom: 100%}", "headroom: expected less than 100%"),
        ("{step_seconds: soon}", "step_seconds: expected seconds such as 3.5, got 'soon'"),
        ("{step_seconds: -1}", "step_seconds: expected seconds from 1e-12 to 1e+09, got '-1'"),
        ("{plans: a/*}", "plans: expected a list of patterns such as ['plans/*']"),
        ("{device: [1GiB]}", "device: expected a size, got a list"),
        ("{slowdown: {by: 5%}}", "slowdown: expected a percentage such as 5%, got a mapping"),
        ("big", "expected a mapping, got the text 'big'"),
    ],
)
def test_mistakes_in_yaml_name_the_line(entry: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "budgets.yaml"
    path.write_text(f"protrain: budgets\nversion: 1\nbudgets:\n  m: {entry}\n")
    with pytest.raises(ProtrainError) as caught:
        find_limits(path)
    key = f"{path}:4: budgets.m"
    joint = "." if message.partition(":")[0] in entry else ": "
    assert str(caught.value) == f"{key}{joint}{message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[tool.protrain]\nbudget = 1\n",
            "tool.protrain: unknown key 'budget'\n  fix: did you mean 'budgets'?",
        ),
        ("[tool]\nprotrain = 1\n", "tool.protrain: expected a table, got 1"),
        (
            "[tool.protrain.budgets.m]\nheadroom = 5\n",
            "tool.protrain.budgets.m.headroom: expected a percentage such as 5%, got '5'",
        ),
        (
            "[tool.protrain.budgets.m]\nheadrom = 5\n",
            "tool.protrain.budgets.m: unknown key 'headrom'\n  fix: did you mean 'headroom'?",
        ),
        (
            "[tool\n",
            "not readable as TOML: Expected ']' at the end of a table declaration"
            " (at line 1, column 6)",
        ),
    ],
)
def test_mistakes_in_toml_name_the_key(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(text)
    with pytest.raises(ProtrainError) as caught:
        find_limits(path)
    assert str(caught.value) == f"{path}: {message}"


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


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({f"m{n}": {} for n in range(201)}, "expected at most 200 machines, got 201"),
        (
            {f"m{n}": {"plans": [f"a{k}" for k in range(11)]} for n in range(100)},
            "expected at most 1000 patterns of plans, got 1100",
        ),
    ],
)
def test_budgets_are_as_many_as_one_can_hold_plans_against(
    entries: object, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "budgets.yaml"
    path.write_text(f"protrain: budgets\nversion: 1\nbudgets: {json.dumps(entries)}\n")
    with pytest.raises(RecordError) as caught:
        find_limits(path)
    assert caught.value.message == problem


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
