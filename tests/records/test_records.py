"""Records as YAML: what is written reads back equal, byte for byte and number for number."""

import dataclasses
import json
import sys
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from protrain_runtime.contract import records
from protrain_runtime.contract.records import reader, writer
from protrain_runtime.contract.records.decisions import ACTIVATIONS, STATES
from protrain_runtime.contract.records.folding import fold, runs, unfold
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.hardware import (
    Device,
    DeviceKind,
    Hardware,
    Interconnect,
    Link,
    Rates,
    Tier,
    TierName,
)
from protrain_runtime.contract.records.limits import IS_SIZE
from protrain_runtime.contract.records.plan import (
    KEEP,
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    RECOMPUTE,
    PipelinePlan,
    Placement,
    Plan,
    Prediction,
    Schedule,
    StagePlan,
    StepSettings,
    TierBytes,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import (
    FormCost,
    OptimizerCost,
    Profile,
    UnitKind,
    Workload,
)
from protrain_runtime.contract.records.schema import Record, hints
from protrain_runtime.contract.records.words import number_text, unseen
from tests.support.commands import ROOT, ran
from tests.support.messages import Speaker
from tests.support.record_samples import HARDWARE, PLAN, PLAN_TEXT, PROFILE, layers, unit

# Writing


def test_a_plan_of_32_layers_is_this_text() -> None:
    assert records.dumps_plan(PLAN) == PLAN_TEXT
    assert records.loads_plan(PLAN_TEXT) == PLAN


def test_a_change_of_three_layers_is_a_few_lines() -> None:
    swapped = replace(RECOMPUTE, tier="disk")
    decisions = [*[swapped] * 12, *[RECOMPUTE] * 2, *[KEEP] * 3, *[RECOMPUTE] * 15]
    after = records.dumps_plan(replace(PLAN, units=layers(*decisions))).splitlines()
    before = PLAN_TEXT.splitlines()
    assert [line for line in before if line not in after] == [
        "  - {names: model.layers.12-31, activations: recompute, states: offload to disk}"
    ]
    assert [line for line in after if line not in before] == [
        "  - {names: model.layers.12-13, activations: recompute, states: offload to disk}",
        "  - {names: model.layers.14-16, activations: keep, states: offload to disk}",
        "  - {names: model.layers.17-31, activations: recompute, states: offload to disk}",
    ]


def test_other_readers_of_yaml_see_the_same_types() -> None:
    """PyYAML's own loader is the oracle: a number is a number, a name is a text."""
    plain = yaml.safe_load(PLAN_TEXT)
    assert plain["prediction"]["step_seconds"] == 1.25
    assert plain["units"][1]["names"] == "model.layers.0-11"
    assert plain["exact"] is True
    hardware = yaml.safe_load(records.dumps_hardware(HARDWARE))
    assert hardware["tiers"][0]["link"]["read_bytes_per_s"] == 1.2e9


COMMITTED = [path for kind in ("plan", "profile") for path in ROOT.glob(f"plans/*/{kind}.yaml")]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_is_committed_is_written_as_it_is(path: Path) -> None:
    """Rates and what joins devices among it, in blocks of lines or in one."""
    text = path.read_text(encoding="utf-8")
    record: Record = (records.loads_plan if path.stem == "plan" else records.loads_profile)(text)
    assert writer.dumps(record) == text


def test_every_decision_can_be_written() -> None:
    assert {KEEP, RECOMPUTE} <= set(ACTIVATIONS.values())
    assert {PERSISTENT, OPTIMIZER_IN_BACKWARD} <= set(STATES.values())
    for tier in get_args(TierName):
        assert {replace(one, tier=tier) for one in (KEEP, RECOMPUTE)} <= set(ACTIVATIONS.values())
        gathered = Placement(tier=tier, keep_gathered=True)
        assert {Placement(tier=tier), gathered} <= set(STATES.values())


def test_the_same_record_gives_the_same_bytes_in_every_process() -> None:
    script = (
        "import sys; from protrain_runtime.contract import records; "
        "sys.stdout.write(records.dumps_plan(records.loads_plan(sys.stdin.read())))"
    )
    for seed in ("0", "1"):
        command = (sys.executable, "-c", script)
        assert ran(*command, stdin=PLAN_TEXT, PYTHONHASHSEED=seed).stdout == PLAN_TEXT


def test_fingerprints_tell_contents_apart_and_ignore_comments() -> None:
    assert records.fingerprint(PLAN) == records.fingerprint(
        records.loads_plan("# reviewed\n" + PLAN_TEXT)
    )
    others = [
        dataclasses.replace(PLAN, settings=replace(PLAN.settings, piece_bytes=size))
        for size in (1, 2)
    ]
    every: list[Record] = [HARDWARE, PROFILE, PLAN, *others]
    prints = {records.fingerprint(record) for record in every}
    assert len(prints) == 5
    assert all(len(text) == len("sha256:") + 16 for text in prints)
    # A format that changes by accident would make every committed plan a stranger.
    assert records.fingerprint(PLAN) == "sha256:574459f1142ff022"


def test_what_could_not_be_read_is_not_written(tmp_path: Path, assert_says: Speaker) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("old\n")
    cost = dataclasses.replace(PROFILE.optimizer, host_parameters_per_s=float("nan"))
    assert_says.refused(records.write_profile, dataclasses.replace(PROFILE, optimizer=cost), path)
    assert path.read_text() == "old\n"


# Round trips of everything


def test_numbers_are_short_and_are_floats_for_yaml() -> None:
    written = {1e9: "1.0e+9", 0.5: "0.5", 1e-4: "0.0001", 1e22: "1.0e+22", 2.5e-7: "2.5e-7"}
    assert {number: number_text(number) for number in written} == written


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_read_back_equal_for_pyyaml(number: float) -> None:
    read = yaml.safe_load(number_text(number))
    assert isinstance(read, float)
    assert repr(read) == repr(number)


TEXTS = st.text(max_size=12).filter(lambda text: not unseen(text)) | st.sampled_from(
    ["no", "on", "~", "null", "1e9", "12:30", "0x10", "2024-01-01", "- a", "a: b", "a #b", "'", " "]
)
# Names near to runs: what is folded, and what only looks like it.
NAMES = st.from_regex(r"\A[ab.0-3-]{1,8}\Z") | TEXTS
SIZES = st.integers(0, 2**60) | st.integers(0, 2**20).map(lambda n: 256 * n)
Drawn = st.SearchStrategy[Any]


def value(hint: Any) -> Drawn:
    """Any value that a field may have by itself."""
    if (parts := [part for part in get_args(hint) if part is not type(None)]) and parts != [
        *get_args(hint)
    ]:
        return st.none() | value(parts[0])
    match get_origin(hint):
        case origin if origin is Literal:
            return st.sampled_from(get_args(hint))
        case origin if origin is tuple:
            return st.lists(value(parts[0]), max_size=2).map(tuple)
    if isinstance(hint, type) and is_dataclass(hint):
        return record(hint)
    of, *limits = get_args(hint) or (hint,)
    if get_origin(of) is tuple:
        return value(of)
    if of is str:
        return st.sampled_from(["cpu", "cuda"]) if hint is DeviceKind else TEXTS
    if of is bool:
        return st.booleans()
    [meta] = limits
    if meta.extra == IS_SIZE:
        return SIZES.filter(lambda size: meta.ge <= size <= meta.le)
    low, high = meta.ge, min(meta.le, 2**53)
    found: Drawn = st.integers(int(low), int(high)) if of is int else st.floats(low, high)
    return found.filter(lambda number: not 0 < abs(number) < 1e-12)


def record(owner: type, **own: Any) -> Drawn:
    """A record: its fields without defaults are drawn, and of the others those that are `...`."""
    for field in dataclasses.fields(owner):
        required = field.default is field.default_factory is dataclasses.MISSING
        if own.get(field.name, ... if required else None) is ...:
            own[field.name] = value(hints(owner)[field.name])
    return st.builds(owner, **own)


HARDWARES = record(
    Hardware,
    device=record(Device, context_bytes=..., num_threads=...),
    tiers=st.lists(
        record(Tier, link=record(Link, duplex=...)), max_size=2, unique_by=lambda tier: tier.name
    ).map(tuple),
    rates=st.none() | record(Rates, error_low=..., error_high=...),
    interconnect=st.none()
    | record(
        Interconnect, inter_node=..., contention=..., link_share=..., library_bytes=..., below=...
    ),
    sources=...,
)
CONFIGS = st.just("") | TEXTS.map(lambda text: json.dumps({"text": text}))
WORKLOADS = record(Workload, model_config=CONFIGS, seed=...)
FUSED = "fused"  # a form of compiled blocks alone
COSTS = st.lists(
    record(FormCost, form=st.sampled_from([form for form in FORMS if form != FUSED])),
    min_size=1,
    max_size=2,
    unique_by=lambda cost: cost.form,
).map(tuple)
KINDS = st.sampled_from(get_args(UnitKind))
PARAMETERS = st.just(()) | st.lists(TEXTS, max_size=2).map(tuple)
OWN_INPUTS = st.sampled_from([(0,), (), (0, 2)])


@st.composite
def unit_names(draw: st.DrawFn) -> list[str]:
    """Unique names, in them runs that count up."""
    names: dict[str, None] = {}
    for name in draw(st.lists(NAMES, min_size=1, max_size=4)):
        count = draw(st.integers(0, 4))
        names |= {f"{name}.{i}": None for i in range(count)} if count else {name: None}
    return list(names)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    names = draw(unit_names())
    classes = draw(st.lists(COSTS, min_size=1, max_size=2))
    units = []
    for i, name in enumerate(names):
        later = draw(st.sets(st.integers(i, len(names) - 1), max_size=2))
        units.append(
            dataclasses.replace(
                unit(name, draw(st.sampled_from([(), (i,), tuple(sorted({i} | later))]))),
                forms=draw(st.sampled_from(classes)),
                kind=draw(KINDS),
                parameters=draw(PARAMETERS),
                own_inputs=draw(OWN_INPUTS),
            )
        )
    made: Profile = draw(
        record(
            Profile,
            workload=WORKLOADS,
            hardware=HARDWARES,
            optimizer=record(OptimizerCost, workspace_fraction=..., workspace_bytes=...),
            units=st.just(tuple(units)),
        )
    )
    return made


LEADS, DRAINS = st.integers(0, 3), st.none() | st.integers(0, 3)
SCHEDULES = st.builds(
    Schedule,
    forward_lead=LEADS,
    backward_lead=LEADS,
    swap_lead=LEADS,
    swap_drain=DRAINS,
    update_drain=DRAINS,
)
UNIT_PLANS = st.builds(
    UnitPlan,
    name=st.just(""),
    activations=st.sampled_from([one for one in ACTIVATIONS.values() if one.form != FUSED]),
    states=st.sampled_from(list(STATES.values())),
    schedule=st.just(Schedule()) | SCHEDULES,
    kind=KINDS,
    parameters=PARAMETERS,
    own_inputs=OWN_INPUTS,
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    classes = draw(st.lists(UNIT_PLANS, min_size=1, max_size=2))
    names = draw(unit_names())
    units = []
    for i, name in enumerate(names):
        later = draw(st.just([]) | st.lists(st.sampled_from(names[i + 1 :] or [name]), max_size=2))
        also_used_by = tuple(user for user in later if user != name)
        decisions = draw(st.sampled_from(classes))
        units.append(dataclasses.replace(decisions, name=name, also_used_by=also_used_by))
    firsts = draw(st.lists(st.sampled_from(names[1:]), unique=True)) if names[1:] else []
    stages = [
        draw(
            record(
                StagePlan, first_units=st.just((first,)), peak_bytes=record(TierBytes, context=...)
            )
        )
        for first in (names[0], *sorted(firsts, key=names.index))
    ]
    pipeline = PipelinePlan(schedule="1F1B", stages=tuple(stages)) if firsts else None
    return draw(
        record(
            Plan,
            pipeline=st.just(pipeline),
            workload=WORKLOADS,
            prediction=record(
                Prediction,
                peak_bytes=record(TierBytes, context=...),
                host_update_seconds=...,
                host_update_threads=...,
            ),
            settings=record(StepSettings, piece_bytes=...),
            units=st.just(tuple(units)),
        ).map(Plan.regraded)
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "drawn"), [(Hardware, HARDWARES), (Profile, profiles()), (Plan, plans())]
)
@given(st.data())
def test_any_record_reads_back_equal(kind: type[Record], drawn: Drawn, data: st.DataObject) -> None:
    record = data.draw(drawn)
    assert reader.loads(kind, writer.dumps(record)) == record


@given(st.lists(NAMES | st.integers(0, 30).map(lambda i: f"x.{i}.y"), max_size=12))
def test_any_names_fold_and_unfold(names: list[str]) -> None:
    unfolded: list[str] = []
    for run in runs(names, [None] * len(names)):
        text = fold(names[run[0]], names[run[-1]]) if len(run) > 1 else None
        unfolded += [names[run[0]]] if text is None else unfold(text) or []
    assert unfolded == names


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (["layers.3"], ["layers.3"]),
        (["layers.0-3"], ["layers.0-3"]),
        (["l.9", "l.10", "l.11"], ["l.9-11"]),
        (["e.0.m.1", "e.0.m.2", "e.1.m.0"], ["e.0.m.1-2", "e.1.m.0"]),
        (["e.0.block", "e.1.block"], ["e.0-1.block"]),
        (["a-1", "a-2", "a-4"], ["a-1-2", "a-4"]),
        (["0", "1", "2"], ["0-2"]),
        (["l.01", "l.02"], ["l.01", "l.02"]),
        (["l.2", "l.1"], ["l.2", "l.1"]),
        (["999999999", "1000000000"], ["999999999", "1000000000"]),
    ],
)
def test_names_fold_like_this(names: list[str], texts: list[str]) -> None:
    units = [dataclasses.replace(PLAN.units[0], name=name) for name in names]
    plan = dataclasses.replace(PLAN, units=tuple(units))
    entries = yaml.safe_load(records.dumps_plan(plan))["units"]
    assert [entry.get("name", entry.get("names")) for entry in entries] == texts
    assert records.loads_plan(records.dumps_plan(plan)) == plan
