"""Refuse docstrings without a noun at their beginning: `python -m tests.support.english`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("protrain_plan", "runtime", "tests", "benchmarks", "docs", "examples", "plans")
REFUSED = ("What", "Of", "That", "Those")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those of attributes included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def main() -> int:
    found = [
        f"{path.relative_to(ROOT)}:{line}: a docstring begins with {text.split()[0]!r}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(path)
        if text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0] in REFUSED
    ]
    print("\n".join([*found, "  fix: begin with a noun or a verb"]) if found else "", end="")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
