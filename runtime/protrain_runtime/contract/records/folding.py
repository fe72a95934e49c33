"""Runs of equal units as one entry: `model.layers.0-11` names twelve of them.

What counts up is the last integer of the name, wherever it is: `encoder.3.block` to
`encoder.5.block` is `encoder.3-5.block`. A name and a run are written under different keys (`name`
and `names`), so that a module that is itself called `layers.0-3` is not mistaken for a run.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

_LAST_INTEGER = re.compile(r"((?:.*[^0-9])?)(0|[1-9][0-9]{0,8})([^0-9]*)", re.DOTALL)
_RUN = re.compile(r"((?:.*[^0-9])?)(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})([^0-9]*)", re.DOTALL)

_PART = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")

MAX_RUN = 1_000
"""Names that an entry may stand for: a slip of the pen should not fill the memory."""


def runs(
    names: Sequence[str], contents: Sequence[object] = (), *, most: int = MAX_RUN
) -> Iterator[range]:
    """The indices of the units in runs of equal `contents`, each as long as possible, in order."""
    contents, start = contents or [None] * len(names), 0
    for i in range(1, len(names) + 1):
        if (
            i == len(names)
            or contents[i] != contents[i - 1]
            or names[i] != _successor(names[i - 1])
            or i - start == most
        ):
            yield range(start, i)
            start = i


def fold(first: str, last: str) -> str:
    """The text for the run from unit `first` to unit `last`; of one unit, its name."""
    if first == last:
        return first
    head, tail = _LAST_INTEGER.fullmatch(first), _LAST_INTEGER.fullmatch(last)
    assert head is not None and tail is not None
    return f"{head[1]}{head[2]}-{tail[2]}{head[3]}"


def unfold(text: str) -> list[str] | None:
    """The names in a run of any length, or None where the text is no run that counts up."""
    match = _RUN.fullmatch(text)
    if match is None or not 1 < run_length(text) <= MAX_RUN:
        return None
    before, first, last, after = match.groups()
    return [f"{before}{number}{after}" for number in range(int(first), int(last) + 1)]


def run_length(text: str) -> int:
    """Count the units that a run names; 0 or less where the text is no run that counts up."""
    match = _RUN.fullmatch(text)
    return 0 if match is None else int(match[3]) - int(match[2]) + 1


def _successor(name: str) -> str | None:
    match = _LAST_INTEGER.fullmatch(name)
    if match is None or match[2] == "999999999":  # the patterns stop at nine digits
        return None
    return f"{match[1]}{int(match[2]) + 1}{match[3]}"


def unfolded(lines: Iterable[str]) -> dict[str, str]:
    """By name, what follows it in lines whose names hold runs: `layers.0-3.weight 2x2 float32`."""
    contents: dict[str, str] = {}
    for line in lines:
        name, _, content = line.partition(" ")
        choices = [_counted(part) for part in name.split(".")]
        if prod(len(choice) for choice in choices) > MAX_RUN:  # a slip of the pen
            choices = [[part] for part in name.split(".")]
        for parts in product(*choices):
            contents[".".join(parts)] = content
    return contents


def _counted(part: str) -> Sequence[str]:
    match = _PART.fullmatch(part)
    if match is None or int(match[2]) - int(match[1]) >= MAX_RUN:
        return [part]
    return [str(number) for number in range(int(match[1]), int(match[2]) + 1)]
