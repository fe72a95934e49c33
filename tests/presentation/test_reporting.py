"""A step as it is shown, against the simulator's own sums and golden files.

Golden files lie in tests/golden; `pytest --write-golden` on this file writes them anew.
"""

import io
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from protrain_plan.presentation.report import page
from protrain_plan.presentation.report.page import (
    page_text,
    step_data,
    summary_json,
    trace_events,
    trace_text,
)
from protrain_plan.presentation.report.screen import KIND_MARKS, Screen, summary_text
from protrain_plan.presentation.report.stages import StagesScreen
from protrain_plan.presentation.report.step import (
    KINDS,
    MAX_BARS,
    Step,
    bars,
    memory,
    read_step,
    slot_begins_s,
    waits,
)
from protrain_plan.presentation.terminal import plain
from protrain_runtime.contract.program.program import MoveKind
from protrain_runtime.contract.program.recording import Event
from protrain_runtime.contract.records import fingerprint, write_plan, write_profile
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
    UnitPlan,
)
from protrain_runtime.contract.units import format_seconds
from tests.support.messages import Speaker
from tests.support.planning_cases import cpu, decoder
from tests.support.reporting_cases import (
    GOLDEN,
    deep_step,
    random_step,
    recorded,
    small_step,
    stages_files,
    stages_step,
    step_of,
)

LARGEST_PAGE = 300_000  # bytes


def printed(
    step: Step, *, encoding: str = "utf-8", width: int = 80, screen: type[Screen] = Screen
) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="")
    Console(file=file, width=width, emoji=False).print(screen(step=step))
    file.flush()
    return raw.getvalue().decode(encoding)


# --- Bytes and seconds against the simulator ------------------------------------------------------


@pytest.mark.nightly
@settings(max_examples=50)
@given(seed=st.integers(0, 10**9))
def test_every_tier_sums_to_its_peak(seed: int) -> None:
    step = random_step(random.Random(seed))
    peaks = step.report.tier_peaks
    device, *below = memory(step)
    assert device.totals == tuple(slot.device.total + peaks.context for slot in step.report.slots)
    # Room below the device is reserved for the whole step: no moment has more or less.
    found = {tier.name: set(tier.totals) for tier in below}
    expected = {"host": {peaks.host}, "disk": {peaks.disk}}
    assert found == {name: sizes for name, sizes in expected.items() if sizes != {0}}
    for tier in (device, *below):
        assert list(tier.by_kind) == [kind for kind in KINDS if kind in tier.by_kind]
        assert all(min(sizes) >= 0 for sizes in tier.by_kind.values())
        assert all(len(sizes) == len(tier.times_s) for sizes in tier.by_kind.values())
        assert tier.times_s[0] == 0
        assert all(one <= other for one, other in pairwise(tier.times_s))


@pytest.mark.nightly
@settings(max_examples=50)
@given(seed=st.integers(0, 10**9))
def test_a_slot_begins_between_the_compute_before_it_and_its_own(seed: int) -> None:
    step = random_step(random.Random(seed))
    compute = step.timeline.compute
    before = [0.0, *(end for _, end in compute)]
    for index, begin in enumerate(slot_begins_s(step)):
        assert before[index] <= begin <= compute[index][0] + 1e-9


@settings(max_examples=50)
@given(seed=st.integers(0, 10**9))
def test_waits_fill_what_compute_leaves_of_the_step(seed: int) -> None:
    step = random_step(random.Random(seed))
    found = [(wait.start_s, wait.end_s) for wait in waits(step)]
    busy = [span for span in step.timeline.compute if span[1] > span[0]]
    joined = sorted([*found, *busy])
    ends = [0.0, *(end for _, end in joined)]
    starts = [*(start for start, _ in joined), step.report.step_seconds]
    assert starts == pytest.approx(ends, abs=1e-9)


@pytest.mark.nightly
@settings(max_examples=50)
@given(seed=st.integers(0, 10**9))
def test_bars_are_the_moves_of_their_lanes(seed: int) -> None:
    step = random_step(random.Random(seed))
    ran = bars(step, step.timeline.spans)
    for lane in step.report.lanes:
        of_lane = ran.get(lane.name, ())
        assert len(of_lane) == lane.num_moves
        assert sum(bar.bytes for bar in of_lane) == lane.bytes
        busy = sum(bar.end_s - bar.start_s for bar in of_lane)
        assert busy == pytest.approx(lane.busy_s, abs=1e-9)


def test_pieces_of_one_chunk_are_one_bar_where_there_are_too_many() -> None:
    step = small_step()
    number = next(n for n, move in enumerate(step.program.moves) if move.kind == "update")
    name, lane = step.program.move_name(number), str(step.program.moves[number].lane)
    *pieces, last = (
        Event(lane=lane, name=name, start_s=n, end_s=n + 0.5) for n in range(MAX_BARS + 1)
    )
    assert len(bars(step, pieces)[lane]) == MAX_BARS
    (one,) = bars(step, [*pieces, last])[lane]
    assert (one.start_s, one.end_s, one.num_pieces) == (0, MAX_BARS + 0.5, MAX_BARS + 1)


def test_swapped_bytes_lie_on_their_tier_from_swap_to_swap() -> None:
    step = small_step()
    host = next(tier for tier in memory(step) if tier.name == "host")
    swapped = step.profile.units[1].cost("keep").swappable_bytes
    spans = {span.name: span for span in step.timeline.spans}
    for time, size in zip(host.times_s, host.by_kind["activations"], strict=True):
        there = spans["swap out 1 @1"].start_s <= time < spans["swap in 1 @10"].end_s
        assert size == (swapped if there else 0)


# --- The page and the trace -----------------------------------------------------------------------


def test_a_page_of_many_blocks_is_small() -> None:
    step = deep_step()
    assert len(step.plan.units) == 128
    assert len(page_text(step, recording=recorded(step)).encode()) < LARGEST_PAGE


def test_the_data_of_a_recording_compare_it_with_the_prediction() -> None:
    step = small_step()
    as_promised = step_data(step, recording=recorded(step))["recording"]
    assert as_promised["slots_above"] == []
    assert as_promised["step_seconds"] == 1.25 * step.report.step_seconds
    for lane in step.report.lanes:
        assert as_promised["busy_seconds"][lane.name] == pytest.approx(1.25 * lane.busy_s)
    one_more = structs.replace(
        recorded(step), slot_bytes=tuple(slot.device.total + 1 for slot in step.report.slots)
    )
    above = step_data(step, recording=one_more)["recording"]["slots_above"]
    assert above == list(range(len(step.report.slots)))


def test_a_trace_is_in_the_documented_format() -> None:
    step = small_step()
    trace = json.loads(trace_text(step))
    assert trace.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    assert trace["traceEvents"] == list(trace_events(step))
    keys = {
        "M": {"ph", "name", "pid", "tid", "args"},
        "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
        "C": {"ph", "name", "pid", "tid", "ts", "args"},
    }
    threads: dict[int, str] = {}
    slices: dict[str, list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        assert event.keys() == keys[event["ph"]]
        if event["name"] == "thread_name":
            threads[event["tid"]] = event["args"]["name"]
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            span = (event["ts"], event["ts"] + event["dur"])
            slices.setdefault(threads[event["tid"]], []).append(span)
        if event["ph"] == "C":
            assert all(isinstance(size, int) for size in event["args"].values())
    assert len(set(threads.values())) == len(threads)
    for lane in step.report.lanes:
        assert len(slices[lane.name]) == lane.num_moves
        busy = sum(end - start for start, end in slices[lane.name])
        assert busy == pytest.approx(1e6 * lane.busy_s, abs=0.001 * lane.num_moves)
        # Slices of a thread that overlap would be nested.
        in_order = sorted(slices[lane.name])
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(in_order))
    assert len(slices["waits of compute"]) == len(step.timeline.stalls)


# --- The terminal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_plan_of_many_blocks_is_one_screen(encoding: str) -> None:
    lines = printed(deep_step(), encoding=encoding).splitlines()
    assert len(lines) <= 42  # the last says what it writes to the disk
    assert max(map(len, lines)) <= 80


@pytest.mark.nightly("make2-40", "make2-60", "make2-80")
@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("make", [small_step, deep_step, partial(deep_step, 500)])
def test_lines_keep_to_the_width(make: Callable[[], Step], width: int) -> None:
    lines = printed(make(), width=max(width, 60)).splitlines()
    assert max(map(len, lines)) <= min(max(width, 60), 132)


def test_colours_add_nothing_to_the_text() -> None:
    step, file = small_step(), io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard")
    console.print(Screen(step=step))
    assert "\x1b[" in file.getvalue()
    plain = Console(file=io.StringIO(), width=80, record=True)
    plain.print(Screen(step=step))
    assert "\x1b" not in printed(step)
    assert plain.export_text() == printed(step)


def test_every_kind_of_bytes_has_a_letter() -> None:
    assert KIND_MARKS.keys() == set(KINDS) - {"reserved"}
    assert len({letter for letter, _ in KIND_MARKS.values()}) == len(KIND_MARKS)


# --- Golden files ---------------------------------------------------------------------------------


def summary(step: Step) -> str:
    file = io.StringIO()
    Console(file=file, width=80).print(summary_text(step))
    return file.getvalue()


OUTPUTS: dict[str, Callable[[Step], str]] = {
    "show.txt": printed,
    "show-ascii.txt": lambda step: printed(step, encoding="ascii"),
    "simulate.txt": summary,
    "simulate.json": lambda step: json.dumps(plain(summary_json(step)), indent=1) + "\n",
    "trace.json": trace_text,
    "report.html": lambda step: (
        page_text(step).split("<style>")[0].split("<meta http")[0]
        + page_text(step).split("</style>")[1].split('<script type="application')[0]
    ),
}


OF_STAGES: dict[str, Callable[[Step], str]] = {
    "show-stages.txt": partial(printed, screen=StagesScreen),
    "show-stages-ascii.txt": partial(printed, screen=StagesScreen, encoding="ascii"),
    "simulate-stage.txt": summary,
}


@pytest.mark.parametrize("name", [*OUTPUTS, *OF_STAGES])
def test_output_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    found = OF_STAGES[name](stages_step()) if name in OF_STAGES else OUTPUTS[name](small_step())
    if request.config.getoption("--write-golden"):
        (GOLDEN / name).write_text(found, encoding="utf-8")
    assert found == (GOLDEN / name).read_text(encoding="utf-8")


# --- Stages ---------------------------------------------------------------------------------------


def test_stages_are_not_told_to_spare_the_disk() -> None:
    """No `--disk-gain` was asked about them."""
    step = stages_step(0)
    assert step.of_stages
    plans = [
        replace(one, budgets=replace(one.budgets, disk=10**9)) for one in (step.whole, step.plan)
    ]
    step = replace(step, plan=plans[1], of_stages=replace(step.of_stages, plan=plans[0]))
    assert step_data(step)["fastest"] == "the fastest"
    for screen in (Screen, StagesScreen):
        assert "--disk-gain" not in printed(step, screen=screen)


def test_a_stage_s_step_is_that_of_its_own_problem() -> None:
    for stage in range(4):
        step = stages_step(stage)
        of = step.of_stages
        assert of is not None
        own = of.pipeline.stages[stage].plan
        assert (of.stage, step.plan) == (stage, own)
        peak = own.prediction.peak_bytes
        assert step.report.tier_peaks == peak
        assert memory(step)[0].totals[step.report.peak_slot] == peak.on_device
        data = step_data(step)
        assert (data["stage"], data["plan_fingerprint"]) == (stage, fingerprint(of.plan))
    busiest = stages_step()
    assert busiest == replace(stages_step(0), of_stages=busiest.of_stages)


@pytest.mark.parametrize("width", [60, 80, 132, 200])
@pytest.mark.parametrize("micro_batches", [4, 8, 32, 500])
def test_stages_keep_to_the_width(micro_batches: int, width: int) -> None:
    step = stages_step(micro_batches=micro_batches)
    lines = printed(step, screen=StagesScreen, width=width).splitlines()
    assert max(map(len, lines)) <= min(width, 132)
    rows = [line for line in lines if line.startswith("stage ") and line.endswith("%")]
    assert len(rows) == 4
    assert all({"░", "▓", "u"} <= set(row) | {"▒"} for row in rows[:1])
    cut = [" … " in row for row in rows]
    assert len(set(cut)) == 1
    assert cut[0] == (micro_batches > (8 if width < 132 else 32))


def test_a_trace_of_stages_has_a_thread_for_each() -> None:
    step = stages_step()
    of = step.of_stages
    assert of is not None
    events = json.loads(trace_text(step, of_all=True))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(of.pipeline.run.spans)
    assert {event["tid"] for event in slices} == {1, 2, 3, 4}
    assert [event["args"]["name"] for event in events[1:9:2]] == [f"stage {s}" for s in range(4)]
    assert trace_text(step) == trace_text(step, of_all=False)


# --- A plan and its profile -----------------------------------------------------------------------


def written(folder: Path, step: Step) -> Path:
    write_profile(step.profile, folder / "profile.yaml")
    write_plan(step.plan, folder / "plan.yaml")
    return folder / "plan.yaml"


def test_a_plan_is_read_with_the_profile_beside_it(tmp_path: Path) -> None:
    step = small_step()
    path = written(tmp_path, step)
    assert read_step(path) == step
    assert read_step(path, tmp_path / "profile.yaml") == step


def with_unit(number: int, **changes: Any) -> Step:
    step = small_step()
    units = [*step.plan.units]
    units[number] = replace(units[number], **changes)
    return replace(step, plan=replace(step.plan, units=tuple(units)))


def with_units(*units: UnitPlan) -> Step:
    step = small_step()
    return replace(step, plan=replace(step.plan, units=units))


def without_host() -> Step:
    decided = [(u.activations, u.states, u.schedule) for u in small_step().plan.units[:1]] * 3
    kept = step_of(decoder(cpu(), blocks=1), decided)
    first, block, last = kept.plan.units
    units = (first, replace(block, states=Placement(tier="host")), last)
    return replace(kept, plan=replace(kept.plan, units=units))


def idle() -> Step:
    profile = decoder(cpu(), blocks=1, block_parameters=0, embedding_parameters=0, seconds=0.0)
    units = tuple(UnitPlan(name=u.name, activations=KEEP, states=PERSISTENT) for u in profile.units)
    plan = replace(small_step().plan, profile_fingerprint=fingerprint(profile), units=units)
    return replace(small_step(), plan=plan, profile=profile)


UNITS = small_step().plan.units
REFUSED: dict[str, Callable[[], Step]] = {
    "another profile": lambda: replace(small_step(), profile=decoder(cpu(), blocks=3)),
    "another unit": lambda: with_unit(2, name="layer.1"),
    "a part that recomputes": lambda: with_unit(0, activations=RECOMPUTE),
    "a form that was not profiled": lambda: with_unit(1, activations=Activations(form="mlp")),
    "a unit less": lambda: with_units(*UNITS[:-1]),
    "a unit more": lambda: with_units(*UNITS, replace(UNITS[-1], name="tail")),
    "a tier that is not there": without_host,
    "a step that takes no time": idle,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_shown_is_one_message(
    what: str, tmp_path: Path, assert_says: Speaker
) -> None:
    path = written(tmp_path, REFUSED[what]())
    assert_says.refused(read_step, path)


def test_a_stage_that_is_not_there_is_named(tmp_path: Path, assert_says: Speaker) -> None:
    path = stages_files(tmp_path)
    for stage in (4, -1):
        assert_says.refused(read_step, path, stage=stage)
    assert_says.refused(read_step, written(tmp_path, small_step()), stage=0)


def test_a_missing_profile_is_named(tmp_path: Path, assert_says: Speaker) -> None:
    path = written(tmp_path, small_step())
    (tmp_path / "profile.yaml").unlink()
    for profile in (None, tmp_path / "other.yaml"):
        assert_says.refused(read_step, path, profile)


def test_a_step_of_micro_batches_says_which_of_them_is_shown() -> None:
    one = small_step()
    decisions = [(unit.activations, unit.states, unit.schedule) for unit in one.plan.units]
    several = step_of(one.profile, decisions, micro_batches=4)
    lines = printed(several).splitlines()
    assert lines[0] == (
        "synthetic: 1 sequence of 1024 tokens, bfloat16, 4 micro-batches, adamw on gpu"
    )
    assert lines[3] == "the last of 4 micro-batches, with its update:"
    assert "compute waits" not in lines[1]  # of the whole step
    part, step = (
        format_seconds(s)
        for s in (several.report.step_seconds, several.plan.prediction.step_seconds)
    )
    told = " ".join(" ".join(lines).split())
    assert (
        f"of the last of 4 micro-batches, with its update ({part}; the predicted step: {step})"
        in told
    )
    assert summary(several).startswith("the last of 4 micro-batches, with its update: ")


def test_a_step_that_is_not_clipped_says_so() -> None:
    """Predicted seconds are a mean, in which clipped steps have a share."""
    one = small_step()
    prediction = replace(one.plan.prediction, clipped_step_seconds=2.0)
    mean = replace(one, plan=replace(one.plan, prediction=prediction))
    assert printed(mean).splitlines()[3] == "a step, not clipped:"
    assert summary(mean).startswith("a step, not clipped: ")


def test_every_kind_of_move_has_words_and_a_colour() -> None:
    script = (Path(page.__file__).parent / "lanes.js").read_text(encoding="utf-8")
    body = script.split("const MOVES = {", 1)[1].split("};", 1)[0]
    assert set(get_args(MoveKind)) <= set(re.findall(r'"([a-z -]+)": \["[a-z]+", ', body))
