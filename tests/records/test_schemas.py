"""The published JSON Schemas agree with the reader: what one refuses, the other refuses."""

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from docs.json_schema import SCHEMAS
from protrain_plan.checking.budgets import find_limits
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import dumps_hardware, dumps_plan, dumps_profile
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.records.reader import loads
from tests.support.checking_cases import PROFILE, AssertGolden, offloading
from tests.support.record_samples import HARDWARE, PLAN
from tests.support.record_samples import PROFILE as SMALL_PROFILE
from tests.support.thinning import thinned

ROOT = Path(__file__).parents[2]
Json = Any

BUDGETS = """\
protrain: budgets
version: 1
budgets:
  rtx-4090: {device: 22GiB, host: 1000000000, headroom: 5%, slowdown: 12.5%, plans: ["a/*", "b/*"]}
  box: {step_seconds: 2.5}
"""
SAMPLES: dict[str, list[str]] = {
    "hardware": [dumps_hardware(HARDWARE), dumps_hardware(PROFILE.hardware)],
    "profile": [dumps_profile(SMALL_PROFILE), dumps_profile(PROFILE)],
    "plan": [dumps_plan(PLAN), dumps_plan(offloading())],
    "budgets": [BUDGETS],
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_published_schema_is_todays(name: str, assert_golden: AssertGolden) -> None:
    schema = SCHEMAS[name]()
    Draft202012Validator.check_schema(schema)
    assert_golden(ROOT / f"schemas/{name}.schema.json", json.dumps(schema, indent=2))


def accepted(name: str, document: Json) -> bool:
    return bool(Draft202012Validator(SCHEMAS[name]()).is_valid(document))


@pytest.fixture
def reads(tmp_path: Path) -> Callable[[str, Json], bool]:
    """Whether the reader takes a document."""
    kinds: dict[str, type[Hardware] | type[Profile] | type[Plan]] = {
        "hardware": Hardware,
        "profile": Profile,
        "plan": Plan,
    }

    def read(name: str, document: Json) -> bool:
        text = yaml.safe_dump(document, sort_keys=False)
        try:
            if name == "budgets":
                (tmp_path / "budgets.yaml").write_text(text)
                find_limits(tmp_path / "budgets.yaml")
            else:
                loads(kinds[name], text)
        except ProtrainError:
            return False
        return True

    return read


WRITTEN = {
    **{f"{name} {n}": (name, text) for name, ts in SAMPLES.items() for n, text in enumerate(ts)},
    **{
        f"{path.parent.name}/{kind}": (kind, path.read_text(encoding="utf-8"))
        for kind in ("plan", "profile")
        for path in sorted(ROOT.glob(f"plans/**/{kind}.yaml"))
    },
}


@pytest.mark.parametrize("what", WRITTEN)
def test_what_is_written_is_valid(what: str) -> None:
    kind, text = WRITTEN[what]
    Draft202012Validator(SCHEMAS[kind]()).validate(yaml.safe_load(text))


def places(node: Json, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every value in a document, by its path."""
    if path:
        yield path
    if isinstance(node, dict):
        for key, value in node.items():
            yield from places(value, (*path, key))
    elif isinstance(node, list) and node:
        yield from places(node[0], (*path, 0))


def at(document: Json, path: tuple[str | int, ...]) -> tuple[Json, str | int]:
    """The container of the value at a path, and its key there."""
    for key in path[:-1]:
        document = document[key]
    return document, path[-1]


PARTS = 4  # of all changes; each kind of record has one in every run
WRONG: tuple[Json, ...] = (None, True, "strange", "1.5GiB", -1, 0, 1.5, 2**70, [], {}, [[]])


@pytest.mark.nightly("profile-3", "plan-2")
@pytest.mark.parametrize(("name", "part"), thinned(tuple(SCHEMAS), range(PARTS), every=PARTS))
def test_schema_and_reader_agree_on_every_change(
    name: str, part: int, reads: Callable[[str, Json], bool]
) -> None:
    """Every value replaced by others, every key dropped, and a strange one in every mapping."""
    original = yaml.safe_load(SAMPLES[name][0])
    assert reads(name, original)
    changes = itertools.product(places(original), (*WRONG, "drop", "add"))
    for path, wrong in itertools.islice(changes, part, None, PARTS):
        document = copy.deepcopy(original)
        holder, key = at(document, path)
        if wrong == "drop" and isinstance(holder, dict):
            del holder[key]
        elif wrong == "add" and isinstance(holder[key], dict):
            holder[key]["strange"] = 1
        else:
            holder[key] = wrong
        if beyond_a_schema(path, wrong):
            assert accepted(name, document) >= reads(name, document), (path, wrong)
        else:
            assert accepted(name, document) == reads(name, document), (path, wrong)


def beyond_a_schema(path: tuple[str | int, ...], wrong: Json) -> bool:
    """Mistakes for the reader alone: references between units, runs, huge whole numbers."""
    together = {"parameter_bytes", "gradient_bytes", "num_parameters"}
    return wrong == 2**70 or bool({"used_by", "also_used_by", "names", *together} & set(path))


@pytest.mark.parametrize("name", SCHEMAS)
def test_nothing_is_without_limits(name: str) -> None:
    """Numbers have both ends, texts and lists a length; so a new field has limits of its own."""
    limits = {
        **dict.fromkeys(("integer", "number"), ({"minimum", "maximum"},)),
        "string": ({"maxLength"}, {"pattern"}),
        "array": ({"maxItems"},),
    }

    def parts(schema: Json, where: str) -> Iterator[tuple[str, Json]]:
        if isinstance(schema, dict):
            yield where, schema
        items = schema.items() if isinstance(schema, dict) else ()
        for key, value in enumerate(schema) if isinstance(schema, list) else items:
            yield from parts(value, f"{where}.{key}")

    for where, part in parts(SCHEMAS[name](), name):
        for keys in [limits[part["type"]]] if part.get("type") in limits else []:
            assert any(found <= part.keys() for found in keys), where
