"""`protrain check` on records alone: every rule holds, and every rule fails where it should."""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protrain_plan.checking.budgets import MachineBudget, find_limits
from protrain_plan.checking.reestimate import look_away
from protrain_plan.checking.rules import RULES, Failed, Passed, Report, Skipped, check
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import read_hardware, write_hardware
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import (
    Activations,
    Budgets,
    DeviceGroup,
    Placement,
    Plan,
)
from tests.support.checking_cases import PROFILE, AssertGolden, commit, find_plans, offloading
from tests.support.forked import protrain
from tests.support.messages import Speaker
from tests.support.plan_settings import with_settings
from tests.support.planning_cases import cpu, gpu, joined, with_form

ROOT = Path(__file__).parents[2]
RECORDS = ("check", "--records-only")
FORMATS = Path(__file__).parents[1] / "formats"


def checked(
    *plans: Path, budgets: str = "", allow: tuple[str, ...] = (), on: tuple[Hardware, ...] = ()
) -> Report:
    limits: Mapping[str, MachineBudget] = {}
    if budgets:
        file = plans[0].parent.parent / "budgets.yaml"
        file.write_text(f"protrain: budgets\nversion: 1\nbudgets:\n  {budgets}\n")
        limits = find_limits(file).budgets
    return check(plans, look=look_away, budgets=limits, allow=allow, on=on)


def failures(report: Report) -> dict[str, str]:
    return {
        finding.rule.code: finding.verdict.problem
        for finding in report.findings
        if isinstance(finding.verdict, Failed)
    }


def told(report: Report) -> list[str]:
    """All that fails, with the line that it is told of, and what it says to do."""
    found = [f"exit code {report.exit_code}"]
    for one in report.with_verdict(Failed):
        assert isinstance(one.verdict, Failed)
        line = Path(one.plan).read_text().splitlines()[one.line - 1]
        found.append(f"{one.rule.code} at {line.strip()[:40]}")
        found += [one.verdict.problem, f"fix: {one.verdict.fix}"]
    return found


def test_a_plan_beside_its_profile_passes(tmp_path: Path) -> None:
    report = checked(commit(tmp_path / "a"))
    assert (failures(report), report.exit_code) == ({}, 0)
    assert [f.rule.code for f in report.with_verdict(Skipped)] == ["FPR001"]
    codes = [finding.rule.code for finding in report.findings]
    assert codes == [code for code in RULES if code not in ("BUD001", "NUM001")]


# --- rules ----------------------------------------------------------------------------------------

MADE = offloading()
PEAK, SECONDS = MADE.prediction.peak_bytes, MADE.prediction.step_seconds
ON_DEVICE = PEAK.on_device
LIMITED: dict[str, tuple[str, str]] = {
    "MEM001": (f"device: {ON_DEVICE}", f"device: {ON_DEVICE - 1}"),
    "MEM001 with headroom": (
        f"device: {ON_DEVICE * 10 // 9 + 1}, headroom: 10%",
        f"device: {ON_DEVICE * 10 // 9 - 1}, headroom: 10%",
    ),
    "DISK001": (f"disk: {PEAK.disk}", f"disk: {PEAK.disk - 1}"),
    "TIME001": (f"step_seconds: {SECONDS}", f"step_seconds: {SECONDS / 2}"),
}


@pytest.mark.parametrize("name", LIMITED)
def test_limits_are_exact_to_the_byte(name: str, tmp_path: Path) -> None:
    plan = commit(tmp_path / "a")
    enough, less = LIMITED[name]
    assert failures(checked(plan, budgets=f"box: {{{enough}}}")) == {}
    assert failures(checked(plan, budgets=f"box: {{{less}}}")).keys() == {name[:7].strip()}
    assert failures(checked(plan, budgets="box: {slowdown: 0%}")) == {}


def test_host001_is_exact_to_the_byte(tmp_path: Path) -> None:
    profile = replace(
        PROFILE, hardware=gpu(disk_gb=100), workload=replace(PROFILE.workload, device="cuda")
    )
    made = offloading(profile, Budgets(device=10**10, host=10**10, disk=10**10))
    plan, used = commit(tmp_path / "a", made, profile), made.prediction.peak_bytes.host
    assert used  # what goes to disk is updated there
    assert failures(checked(plan, budgets=f"gpu: {{host: {used}}}")) == {}
    assert failures(checked(plan, budgets=f"gpu: {{host: {used - 1}}}")).keys() == {"HOST001"}


def edited(plan: Path, before: str, after: str, *, file: str = "plan.yaml") -> Path:
    path = plan.parent / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    return plan


def with_unit(**change: Any) -> Plan:
    return replace(MADE, units=(*MADE.units[:2], replace(MADE.units[2], **change), *MADE.units[3:]))


def less_told() -> Plan:
    peak = replace(PEAK, device=PEAK.device - 1)
    return with_settings(MADE, peak_bytes=peak)


def without_profile(plan: Path) -> Path:
    (plan.parent / "profile.yaml").unlink()
    return plan


SMALL, SMALLER = ("activations: recompute", "activations: recompte")
WRONG: dict[str, Callable[[Path], Report]] = {
    "VER001": lambda a: checked(edited(commit(a), SMALL, SMALLER)),
    "VER001 of a profile": lambda a: checked(
        edited(commit(a), "version: 3", "version: 4", file="profile.yaml")
    ),
    "PRF001, no profile": lambda a: checked(without_profile(commit(a))),
    "PRF001, another profile": lambda a: checked(
        edited(commit(a), "base_bytes: ", "base_bytes: 1", file="profile.yaml")
    ),
    "PLN001, a unit's name": lambda a: checked(commit(a, with_unit(name="layers.9"))),
    "PLN001, a unit's kind": lambda a: checked(commit(a, with_unit(kind="part"))),
    "PLN001, no such tier": lambda a: checked(commit(a, with_unit(states=Placement(tier="host")))),
    "SIM001, a number": lambda a: checked(commit(a, less_told())),
    "SIM001, a decision": lambda a: checked(edited(commit(a), SMALL, "activations: keep")),
    "HDW001, another kind of device": lambda a: checked(commit(a), on=(gpu(),)),
    "HDW001, a missing tier": lambda a: checked(
        commit(a), on=(replace(cpu(), name="bare", tiers=()),)
    ),
    "HDW001, a budget above the machine": lambda a: checked(
        commit(a), budgets="box: {device: 20GB}"
    ),
    "HDW001, a budget for more disk": lambda a: checked(commit(a), budgets="box: {disk: 2TB}"),
    "MEM001, no plan fits": lambda a: checked(commit(a), budgets="box: {device: 500MB}"),
    "DISK001": lambda a: checked(commit(a), budgets="box: {disk: 1GiB}"),
    "TIME001": lambda a: checked(commit(a), budgets=f"box: {{step_seconds: {SECONDS / 2}}}"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told(name: str, tmp_path: Path, assert_says: Speaker) -> None:
    report = WRONG[name](tmp_path / "a")
    assert {finding.rule.code for finding in report.with_verdict(Failed)} == {name[:7].strip(", ")}
    assert_says(told(report))


def test_prf001_finds_the_profile_by_its_fingerprint(tmp_path: Path) -> None:
    plan = commit(tmp_path / "a")
    (plan.parent / "profile.yaml").rename(plan.parent / "measured.yml")
    assert failures(checked(plan)) == {}


def test_exa001_tells_a_plan_that_the_repository_gives_no_leave_for(
    tmp_path: Path, assert_says: Speaker
) -> None:
    leave = ("int8-activations",)
    profile = with_form(PROFILE, "int8", *leave)
    exact = offloading(profile)
    planned = tuple(
        replace(unit, activations=Activations(form="int8")) if unit.kind == "block" else unit
        for unit in exact.units
    )
    approximate = replace(exact, units=planned, exact=False, exactness="approximate", allowed=leave)
    plan = commit(tmp_path / "a", approximate, profile)
    for allow in ((), ("rounding",), leave):
        [found] = [f for f in checked(plan, allow=allow).findings if f.rule.code == "EXA001"]
        if allow == leave:
            assert found.verdict == Passed(found="approximate")
        else:
            assert isinstance(found.verdict, Failed)
            assert found.verdict.key == "allowed"
            assert_says([found.verdict.problem, found.verdict.fix or ""])


@pytest.mark.nightly
def test_mem001_says_how_to_plan_again(tmp_path: Path) -> None:
    plan, budgets = commit(tmp_path / "a"), f"box: {{device: {ON_DEVICE - 1}}}"
    report = checked(plan, budgets=budgets)
    [finding] = report.with_verdict(Failed)
    verdict = finding.verdict
    assert isinstance(verdict, Failed)
    assert (verdict.excess_bytes, verdict.no_plan_fits, report.exit_code) == (1, False, 1)
    command = re.search(r"another plan fits: protrain (plan .*)", verdict.fix or "")
    assert command
    again = protrain(*command[1].split(), folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert failures(checked(plan, budgets=budgets)) == {}


@pytest.mark.nightly
def test_what_a_rule_says_to_do_makes_the_same_plan(tmp_path: Path) -> None:
    """With all that the plan was asked for."""
    commit(tmp_path / "a plan")
    asked = ("--device-memory", "1500MB", "--disk", "5GiB", "--clip", "--accumulate", 2)
    files = ("a plan/profile.yaml", "-o", "a plan/plan.yaml")
    assert protrain("plan", *files, *asked, folder=tmp_path).returncode == 0
    plan = tmp_path / "a plan/plan.yaml"
    before = plan.read_text()
    [problem] = checked(edited(plan, "step_seconds: ", "step_seconds: 1")).with_verdict(Failed)
    assert isinstance(problem.verdict, Failed)
    said, _, command = (problem.verdict.fix or "").partition(": ")
    assert said == "plan it again"
    _, *arguments = shlex.split(command)
    assert protrain(*arguments, folder=tmp_path).returncode == 0
    assert plan.read_text() == before


def test_a_machine_with_budgets_is_checked_for_the_plans_it_names(tmp_path: Path) -> None:
    machine = tmp_path / "small.yaml"
    write_hardware(replace(cpu(), name="small"), machine)
    budgets = f"{machine}: {{device: 600MB, plans: ['*/a/*.yaml']}}"
    report = checked(commit(tmp_path / "a"), commit(tmp_path / "b"), budgets=budgets)
    on = {(Path(f.plan).parent.name, f.machine) for f in report.findings if f.machine}
    assert on == {("a", "box"), ("a", "small"), ("b", "box")}
    assert failures(report)["MEM001"].endswith("exceeds 572.20 MiB (budgets.yaml) by 368.85 MiB")
    report = checked(tmp_path / "b/plan.yaml", on=(read_hardware(machine),))
    [memory] = [f for f in report.findings if f.rule.code == "MEM001"]
    assert (failures(report), memory.machine) == ({}, "small")


MADE_FOR = "none of the checked plans is for this machine"


@pytest.mark.parametrize(
    ("budgets", "on", "reasons"),
    [
        ("box: {device: 2GB}", (), []),
        ("another: {device: 2GB}", (), [MADE_FOR]),
        (
            "rtx-3090: {device: 2GB, plans: ['b/*', 'c/*']}",
            (),
            [f"{MADE_FOR}, or matches b/* or c/*"],
        ),
        ("boxx: {device: 2GB}", (cpu(),), []),
    ],
)
def test_bud001_tells_a_budget_that_guards_nothing(
    budgets: str, on: tuple[Hardware, ...], reasons: list[str], tmp_path: Path
) -> None:
    report = checked(commit(tmp_path / "a"), budgets=budgets, on=on)
    found = [f for f in report.findings if f.rule.code == "BUD001"]
    assert [f.verdict for f in found] == [Skipped(reason=reason) for reason in reasons]
    assert {f.plan for f in found} <= {str(tmp_path / "budgets.yaml")}
    assert (report.num_plans, report.exit_code) == (1, 0)


def test_seconds_of_another_machine_are_not_guessed(tmp_path: Path) -> None:
    other = (replace(cpu(), name="other"),)
    report = checked(commit(tmp_path / "a"), budgets="other: {step_seconds: 0.001}", on=other)
    [finding] = [f for f in report.findings if f.rule.code == "TIME001"]
    assert finding.verdict == Skipped(
        reason="no estimate for this machine: models are skipped (--records-only)"
    )


@pytest.mark.nightly
def test_the_devices_of_a_node_share_what_is_below_them(tmp_path: Path) -> None:
    """On a machine that has it once, and by a budget, which is a node's."""
    apart = joined(PROFILE.hardware, below="of each device", devices_per_node=2)
    profile = replace(PROFILE, hardware=apart)
    made = offloading(profile, group=DeviceGroup(num_devices=2))
    plan, used = commit(tmp_path / "plans", made, profile), made.prediction.peak_bytes.disk
    once = joined(replace(apart, name="once"), below="of the node", devices_per_node=2)
    for size, lacks in ((2 * used, set[str]()), (2 * used - 2, {"DISK001"})):
        machine = replace(once, tiers=(replace(once.tier("disk"), capacity_bytes=size),))
        found = failures(checked(plan, on=(machine,)))
        assert found.keys() == lacks
        assert all("(the machine's memory for each device) by 1 B" in one for one in found.values())
        assert failures(checked(plan, budgets=f"box: {{disk: {size}}}")).keys() == lacks


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two plans: one that holds, and one that is over the budget of its machine."""
    commit(tmp_path / "plans/fine")
    big = replace(PROFILE, hardware=replace(PROFILE.hardware, name="tight"))
    commit(tmp_path / "plans/over", offloading(big), big)
    (tmp_path / "budgets.yaml").write_text(
        "protrain: budgets\nversion: 1\nbudgets:\n  tight: {device: 800MB, headroom: 5%}\n"
    )
    return tmp_path


@pytest.mark.nightly
@pytest.mark.parametrize("output_format", ["text", "json", "github"])
def test_every_format_says_the_same(
    output_format: str, repository: Path, assert_golden: AssertGolden
) -> None:
    result = protrain(*RECORDS, "--format", output_format, folder=repository, COLUMNS="80")
    assert (result.returncode, result.stderr) == (1, "")
    assert_golden(f"check.{output_format}", result.stdout)


@pytest.mark.nightly
def test_text_is_right_at_80_columns_and_without_colours(repository: Path) -> None:
    piped = protrain(*RECORDS, folder=repository, COLUMNS="80", TERM="xterm-256color")
    assert "\x1b" not in piped.stdout
    assert max(map(len, piped.stdout.splitlines())) <= 80
    shown = protrain(*RECORDS, folder=repository, COLUMNS="80", FORCE_COLOR="1", TERM="xterm")
    assert "\x1b[1;31mFAIL\x1b[0m" in shown.stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout)
    assert [line.rstrip() for line in plain.splitlines()] == piped.stdout.splitlines()


def test_json_is_read_by_programs() -> None:
    data = json.loads((ROOT / "tests/golden/check.json").read_text(encoding="utf-8"))
    assert (data["exit_code"], data["passed"], data["failed"], data["skipped"]) == (1, 21, 1, 2)


@pytest.mark.nightly
def test_code_hosts_find_the_files_from_the_repository_s_root(repository: Path) -> None:
    """Wherever in it the check runs, and whatever the folders are called."""
    folder = repository / "all plans"
    (repository / "plans").rename(folder)

    def told(form: str) -> str:
        arguments = (*RECORDS, "over", "--format", form)
        return protrain(*arguments, folder=folder, GITHUB_WORKSPACE=str(repository)).stdout

    assert "::notice file=all plans/over/plan.yaml,line=1," in told("github")


def test_strict_fails_what_cannot_be_checked(tmp_path: Path) -> None:
    plan = commit(tmp_path / "a")
    assert check([plan], look=look_away, budgets={}).exit_code == 0
    assert check([plan], look=look_away, budgets={}, strict=True).exit_code == 1


def test_every_rule_explains_itself(tmp_path: Path) -> None:
    for rule in RULES.values():
        assert re.fullmatch(r"[A-Z]{3,4}00[0-9]", rule.code)
        assert len(rule.explanation) > len(rule.title) + 40
    result = protrain("check", "--explain", "mem001", folder=tmp_path, COLUMNS="80")
    assert result.stdout.startswith("MEM001\nThe predicted device peak is within the budget.\n\n")


def test_the_documentation_lists_every_rule(assert_golden: AssertGolden) -> None:
    lines = ["| Rule | What holds |", "| --- | --- |"]
    lines += [f"| {rule.code} | {rule.title} |" for rule in RULES.values()]
    text = (ROOT / "docs/checks.md").read_text(encoding="utf-8")
    before, marker, _ = text.partition("<!-- rules -->\n")
    assert marker
    assert_golden(ROOT / "docs/checks.md", before + marker + "\n" + "\n".join(lines))


def test_plans_are_found_at_any_depth(tmp_path: Path) -> None:
    first, second = commit(tmp_path / "a/b"), commit(tmp_path / "c")
    assert find_plans([tmp_path]) == [first, second]
    assert find_plans([second, tmp_path]) == [second, first]
    with pytest.raises(ProtrainError, match="no such file or folder"):
        find_plans([tmp_path / "d"])
