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
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.decisions import activations_text, states_text
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import (
    Budgets,
    Keep,
    Offload,
    Persistent,
    Recompute,
    Swap,
    SwapInput,
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
    """The decisions of the units that have one option left, by name."""
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
    """What the pins change: the decisions that were open without them."""
    before, after = (
        decided(of.options),
        decided(pinned_options(of.implied, [parse_pin(text) for text in texts])),
    )
    return {name: words for name, words in after.items() if words != before[name]}


@pytest.mark.parametrize(
    ("text", "pin"),
    [
        (
            "layers.0-3: recompute",
            Pin(units="layers.0-3", activations=Recompute(), states=None, source="--pin"),
        ),
        (
            "model.layers.4: swap to host, persistent",
            Pin(
                units="model.layers.4",
                activations=Swap(tier="host"),
                states=Persistent(),
                source="--pin",
            ),
        ),
        (
            "*:offload to disk , swap to disk and recompute mlp",
            Pin(
                units="*",
                activations=SwapInput(tier="disk", form="mlp"),
                states=Offload(tier="disk"),
                source="--pin",
            ),
        ),
        ("a:b: keep", Pin(units="a:b", activations=Keep(), states=None, source="--pin")),
    ],
)
def test_a_pin_is_units_and_one_or_two_decisions(text: str, pin: Pin) -> None:
    assert parse_pin(text) == pin


DECISIONS = (
    "the decisions are keep, recompute, swap to host, swap to disk, swap-input to host"
    " or swap-input to disk for activations and persistent, persistent and update in backward,"
    " offload to host, offload to host and update on device, offload to disk, shard,"
    " offload to host and keep gathered, offload to host and keep gathered and update on device,"
    " offload to disk and keep gathered or shard and keep gathered for states"
)
PIN_ERRORS = {
    "layers.0": "--pin: expected units and their decisions, got 'layers.0'\n"
    "  fix: for example 'layers.0-3: recompute'",
    ": keep": "--pin: expected units and their decisions, got ': keep'\n"
    "  fix: for example 'layers.0-3: recompute'",
    "layers.0: recompte": "--pin: layers.0: expected a decision, got 'recompte'\n"
    "  fix: did you mean 'recompute'?",
    "layers.0: keep, ofload to host": "--pin: layers.0: expected a decision, got 'ofload to host'\n"
    "  fix: did you mean 'offload to host'?",
    "layers.0: 7": f"--pin: layers.0: expected a decision, got '7'\n  fix: {DECISIONS}",
    "layers.0: keep,": f"--pin: layers.0: expected a decision, got ''\n  fix: {DECISIONS}",
    "layers.0: keep, recompute": "--pin: layers.0: expected one decision for activations,"
    " got 'keep' and 'recompute'",
    "layers.0: persistent, keep, offload to disk": "--pin: layers.0: expected one decision for"
    " states, got 'persistent' and 'offload to disk'",
}


@pytest.mark.parametrize("text", PIN_ERRORS)
def test_what_is_wrong_in_a_pin(text: str) -> None:
    with pytest.raises(ProtrainError) as caught:
        parse_pin(text)
    assert str(caught.value) == PIN_ERRORS[text]


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
        Pin(units="layers.0-3", activations=Recompute(), states=None, source=f"{path}:4"),
        Pin(units="*.layers.*", activations=Keep(), states=Persistent(), source=f"{path}:5"),
    )


# (what the good file says, what the bad one says instead, the whole error)
FILE_ERRORS = [
    (
        "protrain: pins\n",
        "",
        "pins.yaml:1: missing key 'protrain'\n  fix: start the file with protrain: pins",
    ),
    ("protrain: pins", "protrain: plan", "pins.yaml:1: protrain: expected pins, got 'plan'"),
    (
        "protrain: pins",
        "protrain: pin",
        "pins.yaml:1: protrain: expected pins, got 'pin'\n  fix: did you mean 'pins'?",
    ),
    (
        "version: 2",
        "version: 3",
        "pins.yaml:2: version: version 3 is newer than this program, which reads 2\n"
        "  fix: update protrain-plan",
    ),
    ("version: 2", "version: 0", "pins.yaml:2: version: expected version 2, got 0"),
    ("version: 2\n", "", "pins.yaml:1: missing key 'version'\n  fix: write version: 2"),
    ("version: 2", "version: 2\nunits: 3", "pins.yaml:3: unknown key 'units'\n"
     "  fix: the keys are protrain, version and pins"),
    ("recompute", "recompte", "pins.yaml:4: pins.layers.0-3: expected a decision, got 'recompte'\n"
     "  fix: did you mean 'recompute'?"),
    ("recompute", "1", "pins.yaml:4: pins.layers.0-3: expected a text, got 1\n"
     "  fix: put it in quotes: '1'"),
    ("'*.layers.*'", "layers.0-3", "pins.yaml:5: pins: the key 'layers.0-3' stands here twice\n"
     "  fix: remove one of them"),
    ("'*.layers.*'", "*layers", "pins.yaml:5: not readable as YAML: aliases are not allowed\n"
     "  fix: put a pattern that starts with * in quotes"),
    (FILE[FILE.index("pins:\n"):], "pins: {}\n",
     "pins.yaml:3: pins: expected at least one pin, got none"),
]  # fmt: skip


@pytest.mark.parametrize(("good", "bad", "message"), FILE_ERRORS)
def test_what_is_wrong_in_a_file_of_pins(
    good: str, bad: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pins.yaml").write_text(FILE.replace(good, bad, 1))
    with pytest.raises(ProtrainError) as caught:
        read_pins("pins.yaml")
    assert str(caught.value) == message


def test_a_pattern_is_quoted_where_it_would_be_an_alias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assert_says: Speaker
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pins.yaml").write_text(FILE.replace("'", ""))
    with pytest.raises(ProtrainError) as caught:
        read_pins("pins.yaml")
    assert caught.value.line == 5
    assert_says(caught.value.fix)


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


def test_a_part_of_a_word_is_no_name() -> None:
    with pytest.raises(ProtrainError):
        pinned(problem(), "ayers.0: recompute")


def test_a_whole_name_comes_before_an_ending() -> None:
    units = problem(blocks=2, names=["embedding", "decoder.layers.1", "layers.1", "head"])
    assert list(pinned(units, "layers.1: recompute")) == ["layers.1"]
    assert list(pinned(units, "decoder.layers.1: recompute")) == ["decoder.layers.1"]


def test_a_unit_may_be_called_like_a_run() -> None:
    units = problem(blocks=2, names=["embedding", "layers.1-4", "layers.1", "head"])
    assert list(pinned(units, "layers.1-4: recompute")) == ["layers.1-4"]


def test_pins_leave_the_decision_alone_and_the_rest_as_it_was() -> None:
    of = problem(gpu(disk_gb=512))
    units = of.options
    left = pinned_options(
        of.implied, [parse_pin("layers.1: swap to disk"), parse_pin("layers.2: offload to host")]
    )
    assert [option.decision for option in left[2].activations] == [Swap(tier="disk")]
    assert left[2].states == units[2].states
    assert left[3].activations == units[3].activations
    assert [option.decision for option in left[3].states] == [Offload(tier="host")]
    assert (left[0], left[1], *left[4:]) == (units[0], units[1], *units[4:])
    assert left[2].activations[0] in units[2].activations
    assert pinned_options(of.implied, []) == units


def test_a_later_pin_holds() -> None:
    units = problem(tied=True)
    found = pinned(
        units,
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


UNIT_ERRORS = [
    (
        "blocks.0-3: recompute",
        "--pin: blocks.0-3: no unit is called 'blocks.0-3': the units are embedding,"
        " model.layers.0-3 and head",
    ),
    (
        "layer.0-3: recompute",
        "--pin: layer.0-3: no unit is called 'layer.0-3': the units are embedding,"
        " model.layers.0-3 and head\n  fix: did you mean 'model.layers.0-3'?",
    ),
    (
        "layers.2-5: recompute",
        "--pin: layers.2-5: no unit is called 'layers.4': the units are embedding,"
        " model.layers.0-3 and head\n  fix: did you mean 'model.layers.3'?",
    ),
    (
        "embeding: persistent",
        "--pin: embeding: no unit is called 'embeding': the units are embedding,"
        " model.layers.0-3 and head\n  fix: did you mean 'embedding'?",
    ),
    (
        "*.h.*: recompute",
        "--pin: *.h.*: no unit fits '*.h.*': the units are embedding, model.layers.0-3 and head",
    ),
    (
        "*: recompute",
        "--pin: *: embedding cannot take 'recompute': it is a part between blocks, not a block\n"
        "  fix: it can take keep or swap to host; model.layers.0-3 can take 'recompute'",
    ),
    (
        "layers.0: recompute mlp",
        "--pin: layers.0: model.layers.0 cannot take 'recompute mlp'\n"
        "  fix: it can take keep, recompute, swap to host or swap-input to host",
    ),
    (
        "layers.0-3: offload to disk",
        "--pin: layers.0-3: model.layers.0 cannot take 'offload to disk': this machine has"
        " only host below the device\n"
        "  fix: it can take persistent, persistent and update in backward, offload to host,"
        " offload to host and update on device, offload to host and keep gathered or"
        " offload to host and keep gathered and update on device",
    ),
    (
        "head: offload to host",
        "--pin: head: head cannot take 'offload to host': it has no parameters of its own\n"
        "  fix: it can take persistent; embedding and model.layers.0-3 can take 'offload to host'",
    ),
]


@pytest.mark.parametrize(("text", "message"), UNIT_ERRORS)
def test_what_units_cannot_do(text: str, message: str) -> None:
    with pytest.raises(ProtrainError) as caught:
        pinned(problem(prefix="model.", tied=True), text)
    assert str(caught.value) == message


def test_a_message_names_a_few_units_at_most(assert_says: Speaker) -> None:
    units = problem(blocks=9, names=[f"part{2 * number}" for number in range(11)])
    with pytest.raises(ProtrainError) as caught:
        pinned(units, "zzz: keep")
    assert_says(caught.value)


def test_a_machine_without_tiers_says_so(assert_says: Speaker) -> None:
    with pytest.raises(ProtrainError) as caught:
        pinned(problem(replace(cpu(), tiers=())), "layers.0: swap to disk")
    assert_says(caught.value)


def test_a_file_and_its_line_are_named_where_a_unit_cannot(
    tmp_path: Path, assert_says: Speaker
) -> None:
    path = tmp_path / "pins.yaml"
    path.write_text(FILE)
    with pytest.raises(ProtrainError) as caught:
        pinned_options(problem(blocks=2).implied, read_pins(path))
    assert_says(caught.value)
