"""Answers of `plan` and `fit` that were kept: those of planning, told without a search."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PathDistribution
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from protrain_plan import cache as kept_files
from protrain_plan.cache import SWITCH
from protrain_plan.commands.answering import BestBatch, Fitting, ask
from protrain_plan.commands.cells import Cells, Row, answered
from protrain_plan.commands.option_records import BudgetOptions, WorkloadOptions
from protrain_plan.hardware.offers import offer
from protrain_plan.planning.model.options import EXACT_UPDATES, parse_pin
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.answer_cache import AnswerCache
from protrain_plan.planning.questions.answers import Answer, Objective, Point, Question
from protrain_plan.planning.questions.cells import Cell, with_resource
from protrain_plan.planning.questions.growth import in_proportion
from protrain_plan.planning.search.improving import Effort
from protrain_plan.profiling.estimate_cache import EstimateCache
from protrain_runtime.contract.records import write_profile
from protrain_runtime.contract.records.plan import DeviceGroup
from tests.support.commands import printed, protrain
from tests.support.faults import file_limit
from tests.support.planning_cases import MB, gpu, joined, question, small, solved, within

PROFILE = small(joined(gpu()), blocks=3)
ASKED = question(PROFILE, within(PROFILE, 2500 * MB))
"""Some chunks have to move."""
SEVERAL = replace(
    question(PROFILE, within(PROFILE, 2500 * MB), group=DeviceGroup(num_devices=4)),
    replicas=(1, 2, 4),
)
NONE = question(PROFILE, within(PROFILE, 100 * MB))
SMALL = replace(ASKED, profile=small(gpu(), blocks=1))
FASTEST = Objective()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder, beside the working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/protrain-plan/answers"


def asked(
    question: Question = ASKED,
    objective: Objective = FASTEST,
    *,
    told: list[Point] | None = None,
    **effort: Any,
) -> tuple[Answer, bool]:
    """The answer, and whether it was there: nothing was searched for, or written anew."""
    cache, searched = AnswerCache(), list[str]()

    def files() -> set[int]:
        return {one.inode() for one in os.scandir(cache._folder)} if cache._folder else set()

    before = files()
    found = ask(
        question,
        objective,
        cache,
        effort=Effort(progress=lambda stage, *_: searched.append(stage), **effort),
        report=None if told is None else told.append,
    )
    return found, bool(before) and before == files() and not searched


def as_planned(answer: Any) -> Any:
    """The same answer, as if it had been planned now."""
    if isinstance(answer, Solved):
        return replace(answer, kept=False)
    if isinstance(answer, Answer):
        least = answer.least_memory
        return replace(
            answer,
            solved=as_planned(answer.solved),
            least_memory=least and replace(least, solved=as_planned(least.solved)),
            front=tuple(replace(one, solved=as_planned(one.solved)) for one in answer.front),
        )
    return answer


@pytest.mark.nightly("least")
@pytest.mark.parametrize(
    ("question", "objective"),
    [
        (ASKED, FASTEST),
        (SEVERAL, FASTEST),
        (replace(ASKED, pins=(parse_pin("layers.1: recompute"),)), FASTEST),
        (SMALL, Objective(max_slowdown=1.5)),
        (ASKED, Objective(pareto_points=3)),
        (NONE, FASTEST),
        (NONE, Objective(pareto_points=3)),
    ],
    ids=["fastest", "replicas", "pins", "least", "front", "none", "no front"],
)
def test_a_kept_answer_is_the_planned_one(question: Question, objective: Objective) -> None:
    points: list[list[Point]] = [[], []]
    planned, known_at_first = asked(question, objective, told=points[0])
    kept, is_known = asked(question, objective, told=points[1])
    assert (known_at_first, is_known) == (False, True)
    assert as_planned(kept) == planned
    assert [replace(one, solved=as_planned(one.solved)) for one in points[1]] == points[0]
    if planned.solved:
        assert solved(kept.solved).kept
        assert kept.report == planned.report


@pytest.mark.parametrize("question", [ASKED, SEVERAL, NONE], ids=["one", "several", "none"])
@pytest.mark.parametrize("compare", [False, True])
def test_a_kept_cell_is_the_planned_one(question: Question, compare: bool) -> None:
    fitting, line = Fitting(kept=AnswerCache(), compare=compare), [Cell(question=question)]
    assert fitting.known(line) is None
    planned = fitting(line)
    again = Fitting(kept=AnswerCache(), compare=compare).known(line)
    assert [as_planned(one) for one in again or ()] == planned
    assert [bool(one.alternatives) for one in planned] == [compare]
    assert Fitting(kept=AnswerCache(), compare=not compare).known(line) is None
    assert Fitting(kept=AnswerCache(off=True), compare=compare).known(line) is None


def test_a_kept_line_of_cells_is_the_planned_one() -> None:
    line = [Cell(question=with_resource(ASKED, "device", size * MB)) for size in (100, 2500, 3000)]
    fitting = Fitting(kept=AnswerCache())
    assert fitting.known(line) is None
    planned = fitting(line)
    assert [as_planned(one) for one in fitting.known(line) or ()] == planned
    assert fitting.known(line[1:]) is None  # answers go by those before
    assert fitting.known(line[:1]) is None


def test_the_best_of_some_batches_is_known() -> None:
    profiles = [in_proportion(PROFILE, "batch-size", size) for size in (1, 2)]
    questions = [replace(ASKED, profile=profile) for profile in profiles]
    best = BestBatch(kept=AnswerCache())
    assert best.known(questions) is None
    assert best.known(questions[:1]) is None
    assert best(questions) == best.known(questions)
    assert best.known(questions[::-1]) is None


@pytest.mark.nightly
def test_another_question_is_planned() -> None:
    assert not asked()[1]
    budgets, settings, machine = ASKED.budgets, ASKED.settings, PROFILE.hardware
    slower = machine.with_link("host", 1e9, 1e9)
    others = (
        replace(ASKED, budgets=replace(budgets, device=budgets.device + 1)),
        replace(ASKED, budgets=replace(budgets, host=budgets.host - 1)),
        replace(ASKED, settings=replace(settings, micro_batches=2)),
        replace(ASKED, settings=replace(settings, clip_share=0.5)),
        replace(ASKED, pins=(EXACT_UPDATES,)),
        replace(ASKED, allow=("rounding",)),
        replace(SEVERAL, replicas=(1, 2)),
        replace(ASKED, profile=replace(PROFILE, base_bytes=PROFILE.base_bytes + 1)),
        replace(ASKED, profile=replace(PROFILE, hardware=slower)),
    )
    for other in others:
        assert not asked(other)[1]
        assert asked(other)[1]
    for effort in ({"gap_target": 0.01}, {"seed": 1}, {"time_limit_s": 600.0}):
        assert not asked(**effort)[1]
    assert not asked(solver="recompute-all")[1]
    assert asked()[1]


def test_another_installation_plans_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver of another version; the rest, and damage, are asked by `test_estimate_cache`."""
    asked()
    kept_files._installation.cache_clear()
    try:
        monkeypatch.setattr(PathDistribution, "version", "0.0.1")
        assert not asked()[1]
    finally:
        kept_files._installation.cache_clear()


def test_a_changed_file_has_another_digest(tmp_path: Path) -> None:
    (tmp_path / "planner.py").write_text("DESCENTS = 3\n")
    before = kept_files._digest_of_files(tmp_path)
    (tmp_path / "planner.py").write_text("DESCENTS = 4\n")
    kept_files._digest_of_files.cache_clear()
    assert kept_files._digest_of_files(tmp_path) != before


@pytest.mark.parametrize(
    "change",
    [
        {"kept_seconds": "soon"},
        {"solved": {}},
        {"solved": None, "front": [1]},
        {"largest": "protrain: profile"},
        {"another": 1},
        {"front": {"a": 1}},
        {"infeasible": {"tier": "tape"}},
    ],
    ids=str,
)
def test_what_another_hand_wrote_is_no_answer(change: dict[str, object], folder: Path) -> None:
    """Its checksum is right, as anybody can make it."""
    asked()
    [path] = folder.iterdir()
    content = json.loads(path.read_text().partition("\n")[2]) | change
    for text in (json.dumps(content), "[]", "null", "{", "7"):
        path.write_text(f"{kept_files._digest(path.stem + text)}\n{text}")
        assert AnswerCache().answer(ASKED, FASTEST, "milp", 0.005, None, 0) is None


@pytest.mark.parametrize("cut_off", ["time", "Ctrl-C"])
def test_a_search_that_was_ended_is_not_kept(cut_off: str, folder: Path) -> None:
    ended = {"time_limit_s": 1e-6} if cut_off == "time" else {"stopped": lambda: True}
    asked(**ended)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny-llama", {}),
        ("package.module:factory", {}),
        ("tiny-llama", {"optimizer": "package.module:Mine"}),
    ],
)
def test_answers_are_kept_whosever_code_the_model_is(model: str, options: dict[str, Any]) -> None:
    """An answer depends on its question, which has the profile."""
    cells = Cells(
        rows=[
            Row(request=request, step=ASKED.settings)
            for request in WorkloadOptions(**options).requests(model, [64], [1])
        ],
        offers=[offer(PROFILE.hardware, 1, 0.0)],
        budgets=BudgetOptions(),
        cache=EstimateCache(),
    )
    assert not cells.kept.is_off


def test_a_full_disk_is_no_reason_to_fail(folder: Path) -> None:
    with file_limit(0):
        planned, _ = asked()
        assert not asked()[1]
    assert planned.solved
    assert not list(folder.iterdir())
    asked()
    with file_limit(0):
        assert asked()[1]


def test_a_folder_that_cannot_be_made_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert asked()[0].solved
    assert not asked()[1]


# --- as people type them --------------------------------------------------------------------------

PLAN = ("plan", "profile.yaml", "--device-memory", "2500MB")


@pytest.mark.nightly
def test_a_command_that_is_repeated_says_the_same(folder: Path) -> None:
    here = Path.cwd()
    write_profile(PROFILE, here / "profile.yaml")
    first, second = (
        printed(protrain(*PLAN, "-o", f"{name}.yaml", "--json", folder=here)) for name in "ab"
    )
    assert (first.pop("kept"), second.pop("kept")) == (False, True)
    assert second == first
    assert (here / "a.yaml").read_bytes() == (here / "b.yaml").read_bytes()
    text = protrain(*PLAN, "--explain", folder=here).stdout
    assert ", planned before in " in " ".join(text.split())
    [path] = folder.iterdir()
    before = path.stat()
    again = printed(protrain(*PLAN, "-o", "c.yaml", "--no-cache", "--json", folder=here))
    assert not again["kept"]
    assert path.stat() == before
    larger = protrain(*PLAN[:3], "2600MB", "-o", "d.yaml", "--json", folder=here)
    assert not printed(larger)["kept"]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.nightly
def test_two_processes_at_once_keep_one_answer(folder: Path) -> None:
    here = Path.cwd()
    write_profile(PROFILE, here / "profile.yaml")
    command = [sys.executable, "-m", "protrain_plan.cli", *PLAN]
    running = [
        subprocess.Popen([*command, "-o", f"{name}.yaml"], stdout=subprocess.PIPE, env=os.environ)
        for name in "ab"
    ]
    for process in running:
        process.communicate()
        assert process.returncode == 0
    assert (here / "a.yaml").read_bytes() == (here / "b.yaml").read_bytes()
    assert len(list(folder.iterdir())) == 1
    assert printed(protrain(*PLAN, "--json", folder=here))["kept"] is True


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_bar_moves_whenever_a_question_is_answered(jobs: int) -> None:
    """A known one needs no answer, and the words name one that is open."""
    told: list[tuple[str, float]] = []
    words, asked = "planning {:g}".format, [2.0, 3.0, 4.0, 5.0]
    answers = answered(asked, sqrt, lambda *one: told.append(one), words, {4.0: 2.0}.get, jobs=jobs)
    assert list(answers) == [sqrt(number) for number in asked]
    assert [fraction for _, fraction in told] == [0.25, 0.5, 0.75]
    assert told[0][0] == "planning 2"
    assert {what for what, _ in told} <= {"planning 2", "planning 3", "planning 5"}
