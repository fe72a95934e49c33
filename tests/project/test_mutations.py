"""Mutations of the product, cases for the night and the catalogue of messages are today's.

That the tests fail under mutations is seen at night: `python -m tests.support.mutations`.
"""

import ast
import sys
from pathlib import Path

import pytest

from tests.support.commands import ran
from tests.support.messages import catalogue
from tests.support.mutations import ALL, BY_DEFAULT, mutated_text

TESTS = Path(__file__).parents[1]


def collected(*arguments: str) -> set[str]:
    """The names of the tests that pytest would run."""
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    listed = ran(*command, *arguments)
    assert listed.returncode == 0, listed.stdout
    return {line for line in listed.stdout.splitlines() if "::" in line}


@pytest.mark.nightly
def test_every_function_has_its_line_once() -> None:
    for mutation in ALL:
        changed = mutated_text(mutation, mutation.file.read_text(encoding="utf-8"))
        compile(changed, mutation.where, "exec")


@pytest.mark.nightly
def test_the_tests_that_kill_mutations_run_for_every_change() -> None:
    needed = {one.test for one in ALL}
    files = {test.partition("::")[0] for test in needed}
    assert needed <= collected("-m", BY_DEFAULT, *sorted(files))


@pytest.mark.slow
def test_cases_for_the_night_are_cases_that_there_are() -> None:
    named: set[str] = set()
    for file in TESTS.rglob("test_*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in (one for one in tree.body if isinstance(one, ast.FunctionDef)):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.nightly":
                    texts = (one.value for one in ast.walk(mark) if isinstance(one, ast.Constant))
                    test = f"tests/{file.relative_to(TESTS).as_posix()}::{node.name}"
                    named |= {
                        f"{test}[{case}]"
                        for case in texts
                        if isinstance(case, str) and "*" not in case
                    }
    assert named
    assert named <= collected()


# --- the catalogue of messages has no entries of tests that are gone ------------------------------


def test_every_message_is_some_tests() -> None:
    """A test that is renamed is written anew, and its old entry removed by hand."""
    for file, tests in catalogue().items():
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        asking = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and "assert_says" in {argument.arg for argument in node.args.args}
        }
        assert {name.partition("[")[0] for name in tests} == asking, file
