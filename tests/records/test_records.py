"""Records as YAML: what is written reads back equal, byte for byte and number for number."""

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from protrain_runtime.contract import records
from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.records.decisions import ACTIVATIONS, STATES
from protrain_runtime.contract.records.folding import fold, runs, unfold
from protrain_runtime.contract.records.forms import FORMS, exactness_of, leaves_of
from protrain_runtime.contract.records.hardware import (
    Collectives,
    Contention,
    Device,
    Hardware,
    Interconnect,
    Link,
    Rates,
    Tier,
    TierName,
)
from protrain_runtime.contract.records.plan import (
    Activations,
    Budgets,
    Keep,
    Offload,
    Placement,
    Plan,
    Prediction,
    Recompute,
    Schedule,
    Swap,
    SwapInput,
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
from protrain_runtime.contract.records.schema import Record
from protrain_runtime.contract.records.tree import number_text, unseen
from tests.support.messages import Speaker
from tests.support.record_samples import (
    HARDWARE,
    PLAN,
    PLAN_TEXT,
    PROFILE,
    PROFILE_UNITS,
    layers,
    unit,
)

# Writing


def test_a_plan_of_32_layers_is_this_text() -> None:
    assert records.dumps_plan(PLAN) == PLAN_TEXT
    assert records.loads_plan(PLAN_TEXT) == PLAN


def test_equal_units_of_a_profile_are_one_entry() -> None:
    text = records.dumps_profile(PROFILE)
    assert PROFILE_UNITS in text
    assert text.count("used_by: ") == 2
    assert "    used_by: [0, 33]\n" in text
    assert "    used_by: []\n" in text
    assert records.loads_profile(text) == PROFILE


def test_a_change_of_three_layers_is_a_few_lines() -> None:
    swapped: Activations = SwapInput(tier="disk")
    recomputed: Activations = Recompute()
    decisions = [*[swapped] * 12, *[recomputed] * 2, *[Keep()] * 3, *[recomputed] * 15]
    changed = dataclasses.replace(PLAN, units=layers(*decisions))
    before = PLAN_TEXT.splitlines()
    after = records.dumps_plan(changed).splitlines()
    assert [line for line in before if line not in after] == [
        "  - {names: model.layers.12-31, activations: recompute, states: offload to disk}",
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


def test_rates_are_one_line_and_every_source_is_one() -> None:
    rates = Rates(
        float32_flops_per_s=67e12,
        bfloat16_flops_per_s=989e12,
        compute_efficiency=0.75,
        memory_bytes_per_s=3.35e12,
        memory_efficiency=0.9,
        operator_s=5e-6,
        host_parameters_per_s=1.5e9,
        error_high=1.25,
    )
    hardware = dataclasses.replace(HARDWARE, rates=rates, sources=("a data sheet", "link: guess"))
    text = records.dumps_hardware(hardware)
    assert text == records.dumps_hardware(HARDWARE) + (
        "rates: {float32_flops_per_s: 6.7e+13, bfloat16_flops_per_s: 9.89e+14, "
        "compute_efficiency: 0.75, memory_bytes_per_s: 3.35e+12, memory_efficiency: 0.9, "
        "operator_s: 5.0e-6, host_parameters_per_s: 1.5e+9, error_high: 1.25}\n"
        "sources:\n  - a data sheet\n  - 'link: guess'\n"
    )
    assert records.loads_hardware(text) == hardware
    profile = dataclasses.replace(PROFILE, hardware=hardware)
    assert records.loads_profile(records.dumps_profile(profile)) == profile


def test_what_joins_devices_is_a_block_of_lines() -> None:
    joined = Interconnect(
        devices_per_node=8,
        intra_node=Collectives(
            gather_bytes_per_s=3.6e11, reduce_bytes_per_s=3.5e11, latency_s=3e-6
        ),
        contention=Contention(compute=0.82, lane=0.95),
        link_share=0.5,
        library_bytes=10**9,
    )
    hardware = dataclasses.replace(HARDWARE, interconnect=joined)
    text = records.dumps_hardware(hardware)
    assert text == records.dumps_hardware(HARDWARE) + (
        "interconnect:\n"
        "  devices_per_node: 8\n"
        "  intra_node: {gather_bytes_per_s: 3.6e+11, reduce_bytes_per_s: 3.5e+11,"
        " latency_s: 3.0e-6}\n"
        "  contention: {compute: 0.82, lane: 0.95}\n"
        "  link_share: 0.5\n"
        "  library_bytes: 1000000000\n"
    )
    assert records.loads_hardware(text) == hardware


def test_every_decision_can_be_written() -> None:
    known = ACTIVATIONS.values()
    assert {type(decision) for decision in known} == set(get_args(Activations))
    assert {type(placement) for placement in STATES.values()} == set(get_args(Placement))
    for tier in get_args(TierName):
        assert {Swap(tier=tier), SwapInput(tier=tier)} <= set(ACTIVATIONS.values())
        assert {Offload(tier=tier), Offload(tier=tier, keep_gathered=True)} <= set(STATES.values())


def test_the_same_record_gives_the_same_bytes_in_every_process() -> None:
    script = (
        "import sys; from protrain_runtime.contract import records; "
        "sys.stdout.write(records.dumps_plan(records.loads_plan(sys.stdin.read())))"
    )
    for seed in ("0", "1"):
        result = subprocess.run(
            [sys.executable, "-c", script],
            input=PLAN_TEXT,
            env={"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout == PLAN_TEXT


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


def test_files_hold_records(tmp_path: Path) -> None:
    records.write_hardware(HARDWARE, tmp_path / "a")
    records.write_profile(PROFILE, tmp_path / "b")
    records.write_plan(PLAN, tmp_path / "c")
    assert records.read_hardware(tmp_path / "a") == HARDWARE
    assert records.read_profile(tmp_path / "b") == PROFILE
    assert records.read_plan(tmp_path / "c") == PLAN


def test_what_could_not_be_read_is_not_written(tmp_path: Path, assert_says: Speaker) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("old\n")
    cost = dataclasses.replace(PROFILE.optimizer, host_parameters_per_s=float("nan"))
    with pytest.raises(RecordError) as caught:
        records.write_profile(dataclasses.replace(PROFILE, optimizer=cost), path)
    assert_says(caught.value)
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
SECONDS = st.just(0.0) | st.floats(1e-6, 1e6)
SPEEDS = st.floats(1, 1e9)
SHARES = st.floats(0.01, 1)
CONTENTIONS = st.builds(Contention, compute=SHARES, lane=SHARES)
LINKS = st.builds(
    Link,
    read_bytes_per_s=SPEEDS,
    write_bytes_per_s=SPEEDS,
    latency_s=SECONDS,
    duplex=st.floats(0.5, 1),
)
RATES = st.builds(
    Rates,
    float32_flops_per_s=SPEEDS,
    bfloat16_flops_per_s=SPEEDS,
    compute_efficiency=SHARES,
    memory_bytes_per_s=SPEEDS,
    memory_efficiency=SHARES,
    operator_s=SECONDS,
    host_parameters_per_s=SPEEDS,
    error_low=st.just(0.0) | SECONDS,
    error_high=st.just(0.0) | SECONDS,
)
COLLECTIVES = st.builds(
    Collectives, gather_bytes_per_s=SPEEDS, reduce_bytes_per_s=SPEEDS, latency_s=SECONDS
)
INTERCONNECTS = st.builds(
    Interconnect,
    devices_per_node=st.integers(1, 512),
    intra_node=COLLECTIVES,
    inter_node=st.none() | COLLECTIVES,
    contention=CONTENTIONS,
    link_share=st.floats(0.5, 1),
    library_bytes=SIZES,
    below=st.sampled_from(["of the node", "of each device"]),
)
HARDWARES = st.builds(
    Hardware,
    name=TEXTS,
    device=st.builds(
        Device,
        kind=st.sampled_from(["cpu", "cuda"]),
        name=TEXTS,
        memory_bytes=SIZES,
        context_bytes=SIZES,
        num_threads=st.integers(1, 512),
    ),
    tiers=st.lists(
        st.builds(Tier, name=st.sampled_from(get_args(TierName)), capacity_bytes=SIZES, link=LINKS),
        max_size=2,
        unique_by=lambda tier: tier.name,
    ).map(tuple),
    read_contention=CONTENTIONS,
    write_contention=CONTENTIONS,
    update_contention=CONTENTIONS,
    rates=st.none() | RATES,
    interconnect=st.none() | INTERCONNECTS,
    sources=st.lists(TEXTS, max_size=2).map(tuple),
)
WORKLOADS = st.builds(
    Workload,
    model=TEXTS,
    model_config=st.just("") | TEXTS.map(lambda text: json.dumps({"text": text})),
    batch_size=st.integers(1, 2**20),
    seq_len=st.integers(1, 2**20),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    device=st.sampled_from(["cpu", "cuda"]),
    seed=st.integers(0, 2**32),
)
COSTS = st.lists(
    st.builds(
        FormCost,
        form=st.sampled_from(list(FORMS)),
        forward_peak_bytes=SIZES,
        kept_bytes=SIZES,
        backward_peak_bytes=SIZES,
        swappable_bytes=SIZES,
        forward_s=SECONDS,
        backward_s=SECONDS,
    ),
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
    return draw(
        st.builds(
            Profile,
            workload=WORKLOADS,
            hardware=HARDWARES,
            method=st.sampled_from(["measured", "estimated"]),
            model_fingerprint=TEXTS,
            optimizer=st.builds(
                OptimizerCost,
                name=TEXTS,
                host_parameters_per_s=SPEEDS,
                device_parameters_per_s=SPEEDS,
                workspace_fraction=SECONDS,
                workspace_bytes=SIZES,
            ),
            base_bytes=SIZES,
            units=st.just(tuple(units)),
        )
    )


LEADS = st.integers(0, 3)
DRAINS = st.none() | st.integers(0, 3)
UNIT_PLANS = st.builds(
    UnitPlan,
    name=st.just(""),
    activations=st.sampled_from(list(ACTIVATIONS.values())),
    states=st.sampled_from(list(STATES.values())),
    schedule=st.just(Schedule())
    | st.builds(
        Schedule,
        forward_lead=LEADS,
        backward_lead=LEADS,
        swap_lead=LEADS,
        swap_drain=DRAINS,
        update_drain=DRAINS,
    ),
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
    forms = {unit.activations.form for unit in units}
    exactness = exactness_of(forms)
    return draw(
        st.builds(
            Plan,
            workload=WORKLOADS,
            hardware=TEXTS,
            optimizer=TEXTS,
            profile_fingerprint=TEXTS,
            model_fingerprint=TEXTS,
            exact=st.just(exactness == "bitwise"),
            exactness=st.just(exactness),
            allowed=st.just(leaves_of(forms)),
            budgets=st.builds(Budgets, device=SIZES, host=SIZES, disk=SIZES),
            prediction=st.builds(
                Prediction,
                step_seconds=SPEEDS,
                lower_bound_seconds=SPEEDS,
                peak_bytes=st.builds(
                    TierBytes, device=SIZES, context=SIZES, host=SIZES, disk=SIZES
                ),
                host_update_seconds=st.just(0.0) | SPEEDS,
                host_update_threads=st.integers(0, 1000),
            ),
            piece_bytes=st.integers(1, 2**60),
            units=st.just(tuple(units)),
        )
    )


@settings(deadline=None)
@given(HARDWARES)
def test_any_hardware_reads_back_equal(hardware: Hardware) -> None:
    assert records.loads_hardware(records.dumps_hardware(hardware)) == hardware


@settings(deadline=None)
@given(profiles())
def test_any_profile_reads_back_equal(profile: Profile) -> None:
    assert records.loads_profile(records.dumps_profile(profile)) == profile


@settings(deadline=None)
@given(plans())
def test_any_plan_reads_back_equal(plan: Plan) -> None:
    assert records.loads_plan(records.dumps_plan(plan)) == plan


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
