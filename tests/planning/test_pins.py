"""Decisions that the user fixes: their words, the units they speak of, and what they leave."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from protrain_plan.planning.model.options import (
    Pin,
    UnitOptions,
    parse_pin,
    pinned_options,
    read_pins,
)
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_runtime.contract.records.decisions import activations_text, states_text
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Budgets,
    Placement,
)
from tests.support.messages import Speaker
from tests.support.planning_cases import cpu, decoder, gpu


def problem(
    hardware: Hardware | None = None,
    *,
    blocks: int = 4,
    tied: bool = False,
    prefix: str = "",
    names: Sequence[str] = (),
) -> Problem:
    """The problem of an embedding, blocks and a head; blocks with a prefix, or all with `names`."""
    profile = decoder(hardware or gpu(), blocks=blocks, tied=tied)
    given = names or [
        unit.name if unit.kind == "part" else f"{prefix}{unit.name}" for unit in profile.units
    ]
    units = (replace(unit, name=name) for unit, name in zip(profile.units, given, strict=True))
    budgets = Budgets(device=10**12, host=10**12, disk=10**12)
    profile = replace(profile, units=tuple(units))
    return Problem.of(profile, budgets, settings=replace(OVERLAPPING, piece_bytes=1 << 20))


def decided(units: tuple[UnitOptions, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for unit in units:
        words: list[str] = []
        if len(unit.activations) == 1:
            words.append(activations_text(unit.activations[0].decision))
        if len(unit.states) == 1:
            words.append(states_text(unit.states[0].decision))
        found[unit.unit.name] = ", ".join(words)
    return found


def pinned(of: Problem, *texts: str) -> dict[str, str]:
    """Changes by pins: the decisions that were open without them."""
    pins = [parse_pin(text) for text in texts]
    before, after = decided(of.options), decided(pinned_options(of.implied, pins))
    return {name: words for name, words in after.items() if words != before[name]}


def pin(units: str, activations: Activations, states: Placement | None, source: str) -> Pin:
    return Pin(units=units, activations=activations, states=states, source=source)


@pytest.mark.parametrize(
    ("text", "units", "activations", "states"),
    [
        ("layers.0-3: recompute", "layers.0-3", RECOMPUTE, None),
        ("model.4: swap to host, persistent", "model.4", Activations(tier="host"), PERSISTENT),
        (
            "*:offload to disk , swap to disk and recompute mlp",
            "*",
            Activations(tier="disk", form="mlp"),
            Placement(tier="disk"),
        ),
        ("a:b: keep", "a:b", KEEP, None),
    ],
)
def test_a_pin_is_units_and_one_or_two_decisions(
    text: str, units: str, activations: Activations, states: Placement | None
) -> None:
    assert parse_pin(text) == pin(units, activations, states, "--pin")


@pytest.mark.nightly(
    but=("layers.0", "layers.0: keep, ofload to host", "layers.0: keep, recompute")
)
@pytest.mark.parametrize(
    "text",
    [
        "layers.0",
        ": keep",
        "layers.0: recompte",
        "layers.0: keep, ofload to host",
        "layers.0: 7",
        "layers.0: keep,",
        "layers.0: keep, recompute",
        "layers.0: persistent, keep, offload to disk",
    ],
)
def test_what_is_wrong_in_a_pin(text: str, assert_says: Speaker) -> None:
    assert_says.refused(parse_pin, text)


FILE = """\
protrain: pins
version: 2
pins:
  layers.0-3: recompute
  '*.layers.*': persistent, keep
"""


def test_pins_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "pins.yaml"
    path.write_text(FILE)
    assert read_pins(path) == (
        pin("layers.0-3", RECOMPUTE, None, f"{path}:4"),
        pin("*.layers.*", KEEP, PERSISTENT, f"{path}:5"),
    )


# (what the good file says, what the bad one says instead)
FILE_ERRORS = [
    ("protrain: pins\n", ""),
    ("protrain: pins", "protrain: plan"),
    ("protrain: pins", "protrain: pin"),
    ("version: 2", "version: 3"),
    ("version: 2", "version: 0"),
    ("version: 2\n", ""),
    ("version: 2", "version: 2\nunits: 3"),
    ("recompute", "recompte"),
    ("recompute", "1"),
    ("'*.layers.*'", "layers.0-3"),
    ("'*.layers.*'", "*layers"),
    ("'*.layers.*'", "*.layers.*"),
    (FILE[FILE.index("pins:\n") :], "pins: {}\n"),
]


@pytest.mark.parametrize(("good", "bad"), FILE_ERRORS)
def test_what_is_wrong_in_a_file_of_pins(
    good: str, bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assert_says: Speaker
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pins.yaml").write_text(FILE.replace(good, bad, 1))
    assert_says.refused(read_pins, "pins.yaml")


@pytest.mark.parametrize("prefix", ["", "model.", "model.decoder."])
def test_a_pattern_may_leave_out_what_stands_before_a_dot(prefix: str) -> None:
    units = problem(prefix=prefix)
    names = [unit.unit.name for unit in units.options]
    blocks = names[1:5]
    assert list(pinned(units, "layers.1: recompute")) == blocks[1:2]
    assert list(pinned(units, "layers.0-2: recompute")) == blocks[:3]
    assert list(pinned(units, f"{prefix}layers.0-3: recompute")) == blocks
    assert list(pinned(units, "layers.*: recompute")) == blocks
    assert list(pinned(units, "*layers.*: recompute")) == blocks
    assert list(pinned(units, "*: persistent")) == names


def test_a_whole_name_comes_before_an_ending() -> None:
    units = problem(blocks=2, names=["embedding", "decoder.layers.1", "layers.1", "head"])
    assert list(pinned(units, "layers.1: recompute")) == ["layers.1"]
    assert list(pinned(units, "decoder.layers.1: recompute")) == ["decoder.layers.1"]


def test_a_unit_may_be_called_like_a_run() -> None:
    units = problem(blocks=2, names=["embedding", "layers.1-4", "layers.1", "head"])
    assert list(pinned(units, "layers.1-4: recompute")) == ["layers.1-4"]


def test_a_later_pin_holds() -> None:
    found = pinned(
        problem(tied=True),
        "*: recompute, offload to host",
        "embedding: keep",
        "head: keep, persistent",
        "layers.2: keep",
        "layers.2: persistent",
    )
    assert found == {
        "embedding": "keep, offload to host",
        "layers.0": "recompute, offload to host",
        "layers.1": "recompute, offload to host",
        "layers.2": "keep, persistent",
        "layers.3": "recompute, offload to host",
        "head": "keep, persistent",
    }


CALLED = [f"part{2 * number}" for number in range(11)]
UNITS = problem(prefix="model.", tied=True)
UNIT_ERRORS = {
    "blocks.0-3: recompute": UNITS,
    "layer.0-3: recompute": UNITS,
    "ayers.0: recompute": UNITS,
    "layers.2-5: recompute": UNITS,
    "embeding: persistent": UNITS,
    "*.h.*: recompute": UNITS,
    "*: recompute": UNITS,
    "layers.0: recompute mlp": UNITS,
    "layers.0-3: offload to disk": UNITS,
    "head: offload to host": UNITS,
    "zzz: keep": problem(blocks=9, names=CALLED),  # a few units at most are named
    "layers.0: swap to disk": problem(replace(cpu(), tiers=())),
}


@pytest.mark.parametrize("text", UNIT_ERRORS)
def test_what_units_cannot_do(text: str, assert_says: Speaker) -> None:
    assert_says.refused(pinned, UNIT_ERRORS[text], text)


def test_a_file_and_its_line_are_named_where_a_unit_cannot(
    tmp_path: Path, assert_says: Speaker
) -> None:
    path = tmp_path / "pins.yaml"
    path.write_text(FILE)
    assert_says.refused(pinned_options, problem(blocks=2).implied, read_pins(path))
