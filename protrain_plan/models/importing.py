"""External code: users' names in their modules, and optional packages."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.words import did_you_mean

_MAX_REASON = 500
"""Most characters of a package's message to quote."""


def imported(name: str) -> Callable[..., Any]:
    """The function or class at `package.module:name` or `file.py:name`; runs the user's code."""
    module_name, _, attribute = name.rpartition(":")
    path, is_file = Path(module_name), module_name.endswith(".py")
    try:
        if is_file and not path.is_file():
            raise ImportError("no such file")
        # A file imports its neighbours, like a script.
        first = str(path.resolve().parent if is_file else Path.cwd())
        if first not in sys.path:
            sys.path.insert(0, first)
        if is_file:
            # Its own name: a script may be called like an installed package.
            spec = importlib.util.spec_from_file_location(f"factory in {path.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # looked up by its classes
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise ProtrainError(
            f"cannot import {module_name!r}: {error}",
            source=name,
            fix=None
            if is_file
            else "package.module:factory, with the package installed or in the working directory,"
            " or path/to/file.py:factory",
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        functions = [name for name in dir(module) if callable(getattr(module, name))]
        raise ProtrainError(
            f"{module_name} has no function {attribute!r}",
            source=name,
            fix=did_you_mean(attribute, functions),
        )
    return factory  # type: ignore[no-any-return]


def library(name: str, problem: str, *, source: str | None, fix: str) -> Any:
    """A package; ProtrainError with the `problem` if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ProtrainError(problem, source=source, fix=fix) from error


def reason_of(error: Exception) -> str:
    """A package's refusal, in one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
