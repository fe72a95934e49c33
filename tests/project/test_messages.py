"""The catalogue of messages has no entries of tests that are gone."""

import ast
from pathlib import Path

from tests.support.messages import catalogue

TESTS = Path(__file__).parents[1]


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
