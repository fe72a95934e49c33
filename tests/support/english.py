"""Refuse text that does not read as plain English: `python -m tests.support.english`.

Docstrings begin with a noun or a verb. Docstrings, comments and texts of the product have none of
the words of `FORBIDDEN`.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("protrain_plan", "runtime", "tests", "benchmarks", "docs", "examples", "plans")
PRODUCT = ("protrain_plan", "runtime")
REFUSED = ("What", "Of", "That", "Those")
MADE = ("Let", "Lets")  # in docstrings of the product
FORBIDDEN = re.compile(
    r"\b(told|nobody|somebody|whoever|in\s+words|so\s+it\s+was|programmes?|let\s+its?)\b", re.I
)
TEXTS = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those of attributes included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every comment and string."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in TEXTS:
                yield token.start[0], token.string


def faults(path: Path) -> Iterator[tuple[int, str]]:
    """Line and fault of a file."""
    ours = path.relative_to(ROOT).parts[0] in PRODUCT
    for line, text in docstrings(path):
        if (first := (text.split() or [""])[0]) in (REFUSED + MADE if ours else REFUSED):
            yield line, f"a docstring begins with {first!r}"
    for line, text in texts(path) if ours else ():
        if found := FORBIDDEN.search(text):
            yield line + text.count("\n", 0, found.start()), f"a text has {found.group()!r}"


def main() -> int:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, fault in faults(path)
    ]
    print("\n".join([*found, "  fix: say who does what, noun first"]) if found else "", end="")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
