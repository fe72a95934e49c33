"""The plans in `plans/` hold by today's code, and one command makes them as they were committed."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from plans.make import PAGE, PAIRS, Pair, page
from protrain_plan.checking.plan_files import opened, read_files
from protrain_plan.checking.reestimate import Look, look_away
from protrain_plan.checking.rules import Failed, Skipped, check, plan_command, profile_command
from protrain_runtime.contract.records import read_plan
from protrain_runtime.contract.units import exact_bytes
from tests.support.checking_cases import find_plans, look
from tests.support.commands import ran

ROOT = Path(__file__).parents[2]
MEASURED = "smollm2-135m-cpu-1100MiB"
FOLDERS = sorted(path.parent for path in ROOT.glob("plans/*/plan.yaml"))


def test_every_folder_is_made_by_the_script_or_measured() -> None:
    assert {folder.name for folder in FOLDERS} == {MEASURED} | {pair.name for pair in PAIRS}


def verdicts(folder: Path, look: Look) -> dict[str, list[str]]:
    """The rules that fail and those that are skipped, by `protrain check` on one plan."""
    report = check(find_plans([folder]), look=look, budgets={})
    assert len(report.findings) >= 11
    found = {"failed": report.with_verdict(Failed), "skipped": report.with_verdict(Skipped)}
    return {word: [finding.rule.code for finding in some] for word, some in found.items()}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_records_hold(folder: Path) -> None:
    assert verdicts(folder, look_away) == {"failed": [], "skipped": ["FPR001"]}
    plan = read_plan(folder / "plan.yaml")
    assert plan.prediction.lower_bound_seconds <= plan.prediction.step_seconds


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(folder, marks=() if folder.name == MEASURED else pytest.mark.slow)
        for folder in FOLDERS
    ],
    ids=lambda folder: folder.name,
)
def test_today_s_models_hold(folder: Path) -> None:
    assert verdicts(folder, look) == {"failed": [], "skipped": []}


def options(command: str) -> dict[str, str]:
    """The options of a command with their values, and what it is about as `of`."""
    name, what, *words = shlex.split(command)
    assert (name, what in ("profile", "plan")) == ("protrain", True)
    found = {"of": words.pop(0)}
    while words:
        option = words.pop(0)
        found[option] = "" if not words or words[0].startswith("-") else words.pop(0)
    return found


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_commands_that_made_them_are_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fix of a rule that fails is what was done."""
    monkeypatch.chdir(ROOT)
    case = opened(read_files(Path("plans") / pair.name / "plan.yaml"))
    assert case is not None
    profiled, planned = pair.commands
    assert options(profile_command(case.profile, str(case.profile_path))) == {
        "--batch-size": "1"
    } | options(profiled)
    device = exact_bytes(case.plan.budgets.device)
    again = options(plan_command(case, case.plan.budgets))
    again["--tight"] = ""  # a budget that is given is taken as it is
    assert again == {"--device-memory": device} | options(planned)


def test_the_page_says_what_is_committed() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [pair.name for pair in PAIRS])
def test_one_command_makes_them_as_they_are(name: str, tmp_path: Path) -> None:
    """One at a time, so that each can be tried by itself."""
    shutil.copytree(ROOT / "plans", tmp_path / "plans")
    shutil.rmtree(tmp_path / "plans" / name)
    (tmp_path / "docs").mkdir()
    path = os.pathsep.join([str(ROOT), str(ROOT / "runtime")])
    command = (sys.executable, "plans/make.py", name)
    result = ran(*command, folder=tmp_path, timeout=1800, PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    for made in (f"plans/{name}/profile.yaml", f"plans/{name}/plan.yaml", PAGE.relative_to(ROOT)):
        assert (tmp_path / made).read_text() == (ROOT / made).read_text()


def test_the_tutorial_shows_a_committed_plan() -> None:
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    shown = tutorial.split("```yaml\n")[1].split("```")[0].splitlines()
    plan = (ROOT / "plans" / MEASURED / "plan.yaml").read_text(encoding="utf-8")
    assert [line for line in shown if line not in plan.splitlines()] == ["..."]
