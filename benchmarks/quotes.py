"""Quotes of the benchmarks in README and documentation: `python -m benchmarks.quotes` writes it.

A page marks the place, and everything between the marks is made from benchmarks/results/*.json:

    <!-- quoted: front -->
    <!-- end of quote -->

A test makes all blocks again and compares, so that no number is copied by hand.
"""

import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import accuracy, front, planner
from benchmarks.pages import bars_table, markdown_table
from benchmarks.peers.tables import compared
from benchmarks.runner import RESULTS, ROOT, Document, found
from protrain_runtime.contract.records.files import replace_text
from protrain_runtime.contract.units import format_seconds

PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
BLOCK = re.compile(r"^<!-- quoted: (.+?) -->\n(.*?)^<!-- end of quote -->$", re.DOTALL | re.M)

WIDTH = 100

Lines = Iterator[str]


def main() -> None:
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = with_quotes(before)
        if after != before:
            replace_text(page, after)
            print(f"wrote {page.relative_to(ROOT)}")


def with_quotes(text: str, *, results: Path = RESULTS) -> str:
    """The page with its blocks made from the files in `results`; KeyError for unknown blocks."""

    def block(match: re.Match[str]) -> str:
        lines = "".join(f"{line}\n" for line in quoted(match[1], results))
        return f"<!-- quoted: {match[1]} -->\n{lines}<!-- end of quote -->"

    return BLOCK.sub(block, text)


def quoted(name: str, results: Path) -> list[str]:
    """The lines of a block; one that says so where there are no results."""
    stem, write = BLOCKS[name]
    path = results / f"{stem}.json"
    if not path.exists():
        return [f"Not measured yet: there is no `benchmarks/results/{path.name}`."]
    document = json.loads(path.read_text(encoding="utf-8"))
    return list(_set(write(document)))


def _set(lines: Lines) -> Lines:
    """Tables as they are; sentences that follow each other as a paragraph."""
    for is_prose, group in itertools.groupby(lines, key=lambda line: line[:1] not in ("", "|")):
        found = list(group)
        if is_prose:
            found = textwrap.wrap(" ".join(found), WIDTH, break_on_hyphens=False)
        yield from found


# --- the planner ----------------------------------------------------------------------------------


def _planner_in_short(document: Document) -> Lines:
    yield from planner.in_short(found(document))
    yield f"({_source('planner', document)})"


# --- accuracy -------------------------------------------------------------------------------------


def _accuracy(document: Document) -> Lines:
    """The bars, and what came."""
    yield from bars_table(accuracy.bars(document))
    yield ""
    yield f"({_source('accuracy', document)})"


def _accuracy_in_short(document: Document) -> Lines:
    yield from accuracy.in_short(document)
    yield f"({_source('accuracy', document)})"


# --- peers and the front --------------------------------------------------------------------------


def _cpu(document: Document) -> Lines:
    """The rows that ran, without their work; who did not fit under which limit is a sentence."""
    header, *rows = compared(document["cells"])
    ran = [row[1:] for row in rows if row[4] != "did not fit"]
    yield from markdown_table([header[1:], *ran])
    yield ""
    missing: dict[str, list[str]] = {}
    for _, limit, _, name, told, *_ in rows:
        if told == "did not fit":
            missing.setdefault(limit, []).append(name)
    limits: dict[str, list[str]] = {}
    for limit, names in missing.items():
        limits.setdefault(", ".join(names), []).append(limit)
    for who, ones in limits.items():
        yield f"Did not fit under {', '.join(ones)}: {who}."
    yield f"({_source('cpu', document)})"


def _front(document: Document) -> Lines:
    """Steps of an 8B in full, without clipping and with it."""
    rows = [["machine", "device", "step", "gap", "device, clipping", "step", "gap"]]
    alike: dict[tuple[str, float], list[str]] = {}
    for key, one in found(document).items():
        asked = document["cells"][key]["arguments"]
        if (asked["model"], asked["adapter"]) != (front.MODELS[0], "") or asked["host"]:
            continue
        told = [f"{one['device'] / 2**30:.1f} GiB", "-", "-"]
        if one["status"] != "infeasible":
            told[1:] = [format_seconds(one["step_seconds"]), f"{one['gap']:.1%}"]
        alike.setdefault((asked["machine"], asked["share"]), []).extend(told)
    rows += [[machine, *told] for (machine, _), told in alike.items()]
    yield from markdown_table(rows, numbers_from=1)
    yield ""
    solved = {k: one for k, one in found(document).items() if one["status"] != "infeasible"}
    yield front.baselines_in_short(solved)
    yield f"({_source('front', document)})"


# --- blocks ---------------------------------------------------------------------------------------

BLOCKS: dict[str, tuple[str, Callable[[Document], Lines]]] = {
    "planner in short": ("planner", _planner_in_short),
    "front": ("front", _front),
    "accuracy": ("accuracy", _accuracy),
    "accuracy in short": ("accuracy", _accuracy_in_short),
    "peers on a CPU": ("cpu", _cpu),
}
"""Blocks that a page may quote: the file of results, and what makes lines of it."""


def _source(stem: str, document: Document) -> str:
    """The file, and what it says of its run: the day and the commit, where it has them."""
    date, commit = (document["runs"][-1].get(key) for key in ("date", "commit"))
    words = [f"`benchmarks/results/{stem}.md`", *([date] if date else [])]
    return ", ".join(words + ([f"commit {commit}"] if commit else []))


if __name__ == "__main__":
    main()
