"""JSON and TOML within limits: no input takes long to read."""

import json
import tomllib
from typing import Any

from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.records.tree import MAX_DEPTH

_MAX_JSON, _MAX_TOML, _MAX_DOTS = 1_000_000, 20_000, 10_000
"""Keys and values of a JSON text and of a TOML text, and dots of the latter."""


def parsed_json(
    text: str | bytes, source: str | None, *, most: int = _MAX_JSON, **hooks: Any
) -> Any:
    """Parse a JSON text of at most so many keys and values; RecordError where it is none."""
    line: int | None = None
    try:
        if isinstance(text, bytes):
            text = text.decode()
        if sum(map(text.count, ",[{:")) > most:
            raise ValueError(f"more than {most} keys and values")
        return json.loads(text, **hooks)
    except UnicodeDecodeError:
        problem = "not UTF-8 text"
    except json.JSONDecodeError as error:
        problem, line = error.msg, error.lineno
    except (RecursionError, ValueError) as error:
        problem = _unreadable(error)
    raise RecordError(f"not readable as JSON: {problem}", source=source, line=line) from None


def parsed_toml(text: str, source: str) -> dict[str, Any]:
    """Parse a TOML text, not nested deeply, of few dots; RecordError where it is none."""
    try:
        if text.count(".") > _MAX_DOTS:  # a key of n parts takes tomllib n ** 2
            raise ValueError(f"more than {_MAX_DOTS} dots")
        inner: list[Any] = [found := tomllib.loads(text)]
        count = depth = 0
        while inner:
            values = (one.values() if isinstance(one, dict) else one for one in inner)
            level = [value for some in values for value in some]
            inner = [value for value in level if isinstance(value, dict | list)]
            count, depth = count + len(level), depth + 1
            if count > _MAX_TOML or depth > MAX_DEPTH:
                raise ValueError(
                    f"more than {_MAX_TOML} values, or nested more than {MAX_DEPTH} deep"
                )
        return found
    except (RecursionError, ValueError) as error:
        problem = _unreadable(error)
    raise RecordError(f"not readable as TOML: {problem}", source=source)


def _unreadable(error: Exception) -> str:
    """Say what a parser of Python's library found wrong."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number is too long" if "integer string conversion" in str(error) else str(error)
