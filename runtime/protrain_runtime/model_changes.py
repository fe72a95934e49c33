"""What a model holds, in lines short enough for a plan, and what has changed since they were taken.

A line is a tensor's name, then its shape, dtype and role (trainable, frozen or buffer), or what it
is tied to. Where only an integer in the name counts up, one line stands for all of them:

    model.layers.0-29.mlp.up_proj.weight 1536x576 float32 trainable

A fingerprint says that a model is another one; these lines say where.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod

from torch import Tensor, nn

from protrain_plan.records.folding import MAX_RUN, fold, runs
from protrain_plan.records.plan import UnitPlan

MOST_LINES, MOST_WORDS, MOST_NAMES = 12, 6, 3
"""Of one message, of one of its lines, and of equal changes in one: who changed more has another
model in mind."""

_RUN = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")


def model_tensors(model: nn.Module) -> tuple[str, ...]:
    """All parameters and buffers of the model in lines, as a profile and its plans keep them."""
    return _folded(_contents(model))


def model_changes(planned: Iterable[str], model: nn.Module, units: Sequence[UnitPlan]) -> list[str]:
    """What is different in `model` from the `planned` lines, unit by unit; empty: no tensor is."""
    before, after = _unfolded(planned), _contents(model)
    own = {name: unit.name for unit in units for name in unit.parameters}
    blocks = {unit.name for unit in units if unit.kind == "block"}
    held: dict[str, dict[str, list[str]]] = {}  # unit -> change -> names
    counts: dict[str, list[int]] = {}
    for name in dict.fromkeys([*before, *after]):
        unit = own.get(name) or next((path for path in _paths(name) if path in blocks), "")
        count = counts.setdefault(unit, [0, 0])
        for side, tensors in enumerate((before, after)):
            count[side] += name in tensors and not tensors[name].endswith(" buffer")
        change = _change(before.get(name), after.get(name))
        if change:
            short = name.removeprefix(f"{unit}.")
            held.setdefault(unit, {}).setdefault(change, []).append(short)
    names = list(held)
    texts = [_in_words(held[name], counts[name]) for name in names]
    lines: list[str] = []
    for run in runs(names, texts):
        first, last = names[run[0]], names[run[-1]]
        head = f"{first}: " if len(run) == 1 else f"{fold(first, last)}, each: "
        lines.append((head if first else "in no planned unit: ") + texts[run[0]])
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"and {more} more"]


def _contents(model: nn.Module) -> dict[str, str]:
    contents: dict[str, str] = {}
    first_names = {parameter: name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first := first_names[parameter]) != name:
            contents[name] = f"tied to {first}"
        else:
            role = "trainable" if parameter.requires_grad else "frozen"
            contents[name] = f"{_shape_and_dtype(parameter)} {role}"
    for name, buffer in model.named_buffers():
        contents[name] = f"{_shape_and_dtype(buffer)} buffer"
    return contents


def _shape_and_dtype(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def _folded(contents: Mapping[str, str]) -> tuple[str, ...]:
    """Names that differ in one integer that counts up become one: the last integer first."""
    entries = [(tuple(name.split(".")), content) for name, content in contents.items()]
    for place in reversed(range(max((len(parts) for parts, _ in entries), default=0))):
        groups: dict[object, list[tuple[tuple[str, ...], str]]] = {}
        for parts, content in entries:
            counted = place < len(parts) and parts[place].isdecimal()
            key = (parts[:place], parts[place + 1 :], content) if counted else (parts, content)
            groups.setdefault((counted, key), []).append((parts, content))
        entries = []
        for group in groups.values():
            numbers = [parts[place] if place < len(parts) else "" for parts, _ in group]
            for run in runs(numbers, [None] * len(numbers)):
                parts, content = group[run[0]]
                if len(run) > 1:
                    count = f"{numbers[run[0]]}-{numbers[run[-1]]}"
                    parts = (*parts[:place], count, *parts[place + 1 :])
                entries.append((parts, content))
    return tuple(f"{'.'.join(parts)} {content}" for parts, content in entries)


def _unfolded(lines: Iterable[str]) -> dict[str, str]:
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
    match = _RUN.fullmatch(part)
    if match is None or int(match[2]) - int(match[1]) >= MAX_RUN:
        return [part]
    return [str(number) for number in range(int(match[1]), int(match[2]) + 1)]


def _paths(name: str) -> Iterator[str]:
    """The modules that a tensor lies in, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _change(before: str | None, after: str | None) -> str:
    if before == after:
        return ""
    if before is None:
        return f"new ({after})"
    if after is None:
        return f"missing ({before})"
    pairs = list(zip(before.split(), after.split(), strict=False))
    if len(before.split()) != len(after.split()) or "tied" in (pairs[0]):
        return f"{before} -> {after}"
    return ", ".join(f"{one} -> {two}" for one, two in pairs if one != two)


def _in_words(changes: Mapping[str, Sequence[str]], counts: Sequence[int]) -> str:
    if counts[0] and not counts[1]:
        return f"missing, with its {counts[0]} parameters"
    words: list[str] = []
    if counts[0] != counts[1]:
        words.append(f"{counts[0]} -> {counts[1]} parameters")
    for change, names in changes.items():
        which = ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} tensors"
        words.append(f"{which}: {change}")
    more = len(words) - MOST_WORDS
    return "; ".join(words if more <= 0 else [*words[:MOST_WORDS], f"and {more} more"])
