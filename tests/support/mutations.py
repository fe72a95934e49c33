"""Lines of the runtime that keep an order, taken away one by one, and the page that lists them."""

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "reference"


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A line of the runtime that keeps an order, and the scenario that does not hold without it.

    `owner` is the class whose function `name` has `line`, once; `keeps` says what the line keeps
    from happening.
    """

    owner: Any
    name: str
    line: str
    instead: str
    keeps: str
    scenario: Callable[..., Any]

    @property
    def place(self) -> str:
        return f"{self.owner.__module__.rpartition('.')[2]}.{self.owner.__qualname__}.{self.name}"


def names(mutations: Sequence[Mutation]) -> list[str]:
    """For pytest."""
    return [f"{number}-{mutation.place}" for number, mutation in enumerate(mutations)]


def mutated(monkeypatch: pytest.MonkeyPatch, mutation: Mutation) -> None:
    """Replace the line, and the function with it."""
    function = inspect.getattr_static(mutation.owner, mutation.name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutation.line) == 1, mutation.line
    made: dict[str, Any] = {}
    code = compile(source.replace(mutation.line, mutation.instead), mutation.place, "exec")
    exec(code, function.__globals__, made)  # noqa: S102 (the runtime's own source)
    monkeypatch.setattr(mutation.owner, mutation.name, made[mutation.name])


ON_A_DEVICE = (
    "# Order beside compute",
    "",
    "Every wait and fence of the runtime on an accelerator, what happens without it, and the",
    "scenario of `tests/runtime/test_ordering.py` that shows it. That test takes each line away in",
    "turn, on an emulated device whose streams come late to their work.",
)
AMONG_RANKS = (
    "# Order among ranks",
    "",
    "What [order beside compute](ordering.md) is on one accelerator, of collectives: every line",
    "that keeps them in their place, what happens without it, and the scenario in",
    "`tests/ranks/test_ordering_ranks.py` that shows it, on two ranks, each on its own device.",
)


def page(mutations: Sequence[Mutation], said: Sequence[str]) -> str:
    """The table, as Markdown, behind what is said of it."""
    lines = [
        *said,
        "",
        "| Where | Line | Without it | Shown by |",
        "| --- | --- | --- | --- |",
    ]
    for mutation in mutations:
        change = " ".join(mutation.line.split())
        if mutation.instead.strip() not in ("", "pass"):
            change += f"` becomes `{' '.join(mutation.instead.split())}"
        scenario = mutation.scenario.__name__.replace("_", " ")
        lines.append(f"| `{mutation.place}` | `{change}` | {mutation.keeps} | {scenario} |")
    return "\n".join(lines) + "\n"


def assert_page(
    request: pytest.FixtureRequest,
    name: str,
    mutations: Sequence[Mutation],
    said: Sequence[str] = ON_A_DEVICE,
) -> None:
    """The committed page is made of these; `--write-golden` makes it."""
    found = page(mutations, said)
    if request.config.getoption("--write-golden"):
        (PAGES / name).write_text(found, encoding="utf-8")
    assert (PAGES / name).read_text(encoding="utf-8") == found
