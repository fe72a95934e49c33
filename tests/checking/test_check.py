"""`protrain check` on records alone: every rule holds, and every rule fails where it should."""

import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest
from xmlschema import XMLSchema

from protrain_plan.checking.budgets import MachineBudget, find_limits
from protrain_plan.checking.looking import look_away
from protrain_plan.checking.rules import RULES, Failed, Passed, Report, Skipped, check
from protrain_plan.cli import main
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import read_hardware, write_hardware
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import Budgets, DeviceGroup, Keep, Offload, Plan
from tests.support.checking_cases import PROFILE, AssertGolden, commit, find_plans, offloading
from tests.support.forked import protrain
from tests.support.planning_cases import cpu, gpu, joined

ROOT = Path(__file__).parents[2]
RECORDS = ("check", "--records-only")
FORMATS = Path(__file__).parents[1] / "formats"


def checked(
    *plans: Path, budgets: str = "", allow: tuple[str, ...] = (), on: tuple[Hardware, ...] = ()
) -> Report:
    """The report on plans, with the budgets in a text."""
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


def test_a_plan_beside_its_profile_passes(tmp_path: Path) -> None:
    report = checked(commit(tmp_path / "a"))
    assert failures(report) == {}
    assert report.exit_code == 0
    assert [f.rule.code for f in report.with_verdict(Skipped)] == ["FPR001"]
    codes = [finding.rule.code for finding in report.findings]
    assert codes == [code for code in RULES if code not in ("BUD001", "NUM001")]


def test_the_committed_plans_pass() -> None:
    report = checked(*find_plans([ROOT / "plans"]))
    assert failures(report) == {}


# --- files and records ----------------------------------------------------------------------------


def edited(plan: Path, before: str, after: str, *, file: str = "plan.yaml") -> Path:
    path = plan.parent / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    return plan


def test_ver001_names_the_line(tmp_path: Path) -> None:
    plan = edited(commit(tmp_path / "a"), "activations: recompute", "activations: recompte")
    [finding] = checked(plan).findings
    assert isinstance(finding.verdict, Failed)
    assert finding.rule.code == "VER001"
    assert finding.verdict.problem == (
        "units[1].activations: expected keep, recompute, swap to host, swap to disk,"
        " swap-input to host or swap-input to disk, got 'recompte'"
    )
    assert finding.verdict.fix == "did you mean 'recompute'?"
    assert plan.read_text().splitlines()[finding.line - 1].startswith("  - {names: layers.0-3,")


def test_ver001_of_a_profile(tmp_path: Path) -> None:
    plan = edited(commit(tmp_path / "a"), "version: 3", "version: 4", file="profile.yaml")
    problem = failures(checked(plan))["VER001"]
    assert problem == (
        f"{plan.parent / 'profile.yaml'}:5: version: version 4 is newer than this program, which"
        " reads 3"
    )


def test_prf001_finds_the_profile_by_its_fingerprint(tmp_path: Path) -> None:
    plan = commit(tmp_path / "a")
    (plan.parent / "profile.yaml").rename(plan.parent / "measured.yml")
    assert failures(checked(plan)) == {}
    (plan.parent / "measured.yml").unlink()
    assert failures(checked(plan)) == {"PRF001": f"there is no profile in {plan.parent}"}


def test_prf001_tells_another_profile(tmp_path: Path) -> None:
    plan = edited(commit(tmp_path / "a"), "base_bytes: ", "base_bytes: 1", file="profile.yaml")
    wanted = offloading().profile_fingerprint
    assert failures(checked(plan)) == {
        "PRF001": f"the plan was made from the profile {wanted}, which profile.yaml is not"
    }


def with_units(plan: Plan, change: dict[int, dict[str, object]]) -> Plan:
    units = tuple(replace(u, **change.get(i, {})) for i, u in enumerate(plan.units))  # type: ignore[arg-type]
    return replace(plan, units=units)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({2: {"name": "layers.9"}}, "the plan decides nothing for layers.1"),
        ({2: {"kind": "part"}}, "layers.1 is described otherwise in the profile"),
        (
            {2: {"states": Offload(tier="host")}},
            "layers.1 cannot have its states there",
        ),
    ],
)
def test_pln001_tells_decisions_about_something_else(
    change: dict[int, dict[str, object]], problem: str, tmp_path: Path
) -> None:
    report = checked(commit(tmp_path / "a", with_units(offloading(), change)))
    assert failures(report) == {"PLN001": problem}
    assert len(report.findings) == 3


def test_sim001_tells_numbers_that_do_not_follow(tmp_path: Path) -> None:
    made = offloading()
    peak = made.prediction.peak_bytes
    wrong = replace(made.prediction, peak_bytes=replace(peak, device=peak.device - 1))
    plan = commit(tmp_path / "a", replace(made, prediction=wrong))
    report = checked(plan)
    assert failures(report) == {
        "SIM001": f"a peak of {peak.device - 1} bytes is recorded (device),"
        f" and {peak.device} come out"
    }
    [finding] = report.with_verdict(Failed)
    assert "peak_bytes" in plan.read_text().splitlines()[finding.line - 1]


def test_sim001_tells_decisions_that_were_edited(tmp_path: Path) -> None:
    plan = edited(commit(tmp_path / "a"), "activations: recompute", "activations: keep")
    assert failures(checked(plan)).keys() == {"SIM001"}


# --- machines -------------------------------------------------------------------------------------


def test_exa001_tells_a_plan_that_the_repository_gives_no_leave_for(tmp_path: Path) -> None:
    leave = ("int8-activations",)
    units = []
    for unit in PROFILE.units:
        int8 = replace(unit.forms[0], form="int8")
        forms = (unit.forms[0], int8, *unit.forms[1:]) if unit.kind == "block" else unit.forms
        units.append(replace(unit, forms=forms))
    profile = replace(PROFILE, allowed=leave, units=tuple(units))
    exact = offloading(profile)
    planned = tuple(
        replace(unit, activations=Keep(form="int8")) if unit.kind == "block" else unit
        for unit in exact.units
    )
    approximate = replace(exact, units=planned, exact=False, exactness="approximate", allowed=leave)
    plan = commit(tmp_path / "a", approximate, profile)
    found = {
        allow: next(one for one in checked(plan, allow=allow).findings if one.rule.code == "EXA001")
        for allow in ((), ("rounding",), leave)
    }
    for allow in ((), ("rounding",)):
        verdict = found[allow].verdict
        assert isinstance(verdict, Failed)
        assert verdict.problem == (
            "the plan takes int8-activations, and the repository gives no leave for it: its results"
            " are not those of plain PyTorch (approximate)"
        )
        assert verdict.key == "allowed"
        assert verdict.fix == "plan without --allow, or add it to allow in [tool.protrain]"
    assert found[leave].verdict == Passed(found="approximate")


def test_hdw001_tells_another_kind_of_device(tmp_path: Path) -> None:
    report = checked(commit(tmp_path / "a"), on=(gpu(),))
    assert failures(report) == {"HDW001": "the plan is for a cpu device, and this one is cuda"}
    assert "MEM001" not in {finding.rule.code for finding in report.findings}


def test_hdw001_tells_a_missing_tier(tmp_path: Path) -> None:
    bare = replace(cpu(), name="bare", tiers=())
    assert failures(checked(commit(tmp_path / "a"), on=(bare,))) == {
        "HDW001": "the plan uses disk, which this machine does not have"
    }


def test_hdw001_tells_a_budget_above_the_machine(tmp_path: Path) -> None:
    report = checked(commit(tmp_path / "a"), budgets="box: {device: 20GB}")
    source = tmp_path / "budgets.yaml"
    assert failures(report) == {
        "HDW001": f"the device budget of 18.63 GiB in {source} is above the 14.90 GiB that there"
        " are"
    }


def peak_of(plan: Plan) -> int:
    return plan.prediction.peak_bytes.device + plan.prediction.peak_bytes.context


def test_mem001_is_exact_to_the_byte(tmp_path: Path) -> None:
    plan, peak = commit(tmp_path / "a"), peak_of(offloading())
    assert failures(checked(plan, budgets=f"box: {{device: {peak}}}")) == {}
    assert failures(checked(plan, budgets=f"box: {{device: {peak - 1}}}")).keys() == {"MEM001"}


def test_mem001_leaves_the_headroom_free(tmp_path: Path) -> None:
    plan, peak = commit(tmp_path / "a"), peak_of(offloading())
    tenth = f"box: {{device: {peak * 10 // 9 + 1}, headroom: 10%}}"
    assert failures(checked(plan, budgets=tenth)) == {}
    less = f"box: {{device: {peak * 10 // 9 - 1}, headroom: 10%}}"
    assert failures(checked(plan, budgets=less)).keys() == {"MEM001"}


def test_mem001_says_how_to_plan_again(tmp_path: Path) -> None:
    plan, peak = commit(tmp_path / "a"), peak_of(offloading())
    report = checked(plan, budgets=f"box: {{device: {peak - 1}}}")
    [finding] = report.with_verdict(Failed)
    verdict = finding.verdict
    assert isinstance(verdict, Failed)
    assert (verdict.excess_bytes, verdict.no_plan_fits, report.exit_code) == (1, False, 1)
    assert verdict.fix is not None
    command = re.search(r"another plan fits: protrain (plan .*)", verdict.fix)
    assert command
    again = protrain(*command[1].split(), folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert failures(checked(plan, budgets=f"box: {{device: {peak - 1}}}")) == {}


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
    assert problem.verdict.fix is not None
    said, _, command = problem.verdict.fix.partition(": ")
    assert said == "plan it again"
    _, *arguments = shlex.split(command)
    assert protrain(*arguments, folder=tmp_path).returncode == 0
    assert plan.read_text() == before


def test_mem001_says_where_no_plan_fits(tmp_path: Path) -> None:
    report = checked(commit(tmp_path / "a"), budgets="box: {device: 500MB}")
    [finding] = report.with_verdict(Failed)
    assert isinstance(finding.verdict, Failed)
    assert finding.verdict.no_plan_fits
    assert finding.verdict.fix is not None
    needed = re.fullmatch(
        r"no plan of this workload fits: the leanest needs ([0-9.]+) MiB of the device",
        finding.verdict.fix,
    )
    assert needed
    assert report.exit_code == 3


def test_a_machine_with_budgets_is_checked_for_the_plans_it_names(tmp_path: Path) -> None:
    write_hardware(replace(cpu(), name="small"), tmp_path / "small.yaml")
    machine = tmp_path / "small.yaml"
    budgets = f"{machine}: {{device: 600MB, plans: ['*/a/*.yaml']}}"
    report = checked(commit(tmp_path / "a"), commit(tmp_path / "b"), budgets=budgets)
    on = {(Path(f.plan).parent.name, f.machine) for f in report.findings if f.machine}
    assert on == {("a", "box"), ("a", "small"), ("b", "box")}
    assert failures(report)["MEM001"].endswith("exceeds 572.20 MiB (budgets.yaml) by 368.85 MiB")


def test_hdw001_tells_a_budget_for_more_disk_than_there_is(tmp_path: Path) -> None:
    found = failures(checked(commit(tmp_path / "a"), budgets="box: {disk: 2TB}"))
    assert found["HDW001"].startswith("the disk budget of 1.82 TiB in ")


@pytest.mark.parametrize(
    ("budgets", "on", "reasons"),
    [
        ("box: {device: 2GB}", (), []),
        (
            "boxx: {device: 2GB}",
            (),
            ["no plan that is checked was made for this machine; did you mean 'box'?"],
        ),
        (
            "rtx-3090: {device: 2GB, plans: ['b/*', 'c/*']}",
            (),
            ["no plan that is checked was made for this machine, or matches b/* or c/*"],
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


def test_disk001_tells_too_little_disk(tmp_path: Path) -> None:
    found = failures(checked(commit(tmp_path / "a"), budgets="box: {disk: 1GiB}"))
    assert found == {
        "DISK001": "the predicted disk space of 1.04 GiB exceeds 1.00 GiB (budgets.yaml)"
        " by 44.25 MiB"
    }


def test_host001_tells_too_little_host_memory(tmp_path: Path) -> None:
    machine = gpu(disk_gb=100)
    profile = replace(PROFILE, hardware=machine, workload=replace(PROFILE.workload, device="cuda"))
    made = offloading(profile, Budgets(device=10**10, host=10**10, disk=10**10))
    plan, used = commit(tmp_path / "a", made, profile), made.prediction.peak_bytes.host
    assert used  # what goes to disk is updated there
    assert failures(checked(plan, budgets=f"gpu: {{host: {used}}}")) == {}
    assert failures(checked(plan, budgets=f"gpu: {{host: {used - 1}}}")).keys() == {"HOST001"}


def test_time001_limits_the_step(tmp_path: Path) -> None:
    plan, seconds = commit(tmp_path / "a"), offloading().prediction.step_seconds
    assert failures(checked(plan, budgets=f"box: {{step_seconds: {seconds}}}")) == {}
    assert failures(checked(plan, budgets="box: {slowdown: 0%}")) == {}
    found = failures(checked(plan, budgets=f"box: {{step_seconds: {seconds / 2}}}"))
    assert found.keys() == {"TIME001"}
    assert re.fullmatch(
        r"the predicted step of \S+ m?s exceeds \S+ m?s, the budget in \S+budgets.yaml",
        found["TIME001"],
    )


def test_seconds_of_another_machine_are_not_guessed(tmp_path: Path) -> None:
    other = replace(cpu(), name="other")
    plan = commit(tmp_path / "a")
    report = checked(plan, budgets="other: {step_seconds: 0.001}", on=(other,))
    [finding] = [f for f in report.findings if f.rule.code == "TIME001"]
    assert finding.verdict == Skipped(
        reason="no estimate for this machine: models are not looked at (--records-only)"
    )


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


@pytest.mark.parametrize("output_format", ["text", "json", "junit", "sarif", "github"])
def test_every_format_says_the_same(
    output_format: str, repository: Path, assert_golden: AssertGolden
) -> None:
    result = protrain(*RECORDS, "--format", output_format, folder=repository, COLUMNS="80")
    assert (result.returncode, result.stderr) == (1, "")
    assert_golden(f"check.{output_format}", result.stdout)


def test_text_is_right_at_80_columns_and_without_colours(repository: Path) -> None:
    piped = protrain(*RECORDS, folder=repository, COLUMNS="80", TERM="xterm-256color")
    assert "\x1b" not in piped.stdout
    assert max(map(len, piped.stdout.splitlines())) <= 80
    shown = protrain(*RECORDS, folder=repository, COLUMNS="80", FORCE_COLOR="1", TERM="xterm")
    assert "\x1b[1;31mFAIL\x1b[0m" in shown.stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout)
    assert [line.rstrip() for line in plain.splitlines()] == piped.stdout.splitlines()


def test_json_and_junit_are_read_by_programs(repository: Path) -> None:
    data = json.loads(protrain(*RECORDS, "--json", folder=repository).stdout)
    assert (data["exit_code"], data["passed"], data["failed"], data["skipped"]) == (1, 21, 1, 2)
    suites = ET.fromstring(protrain(*RECORDS, "--format", "junit", folder=repository).stdout)
    assert suites.attrib["tests"] == "24"
    assert [suite.attrib["failures"] for suite in suites] == ["0", "1"]
    assert len(suites.findall(".//failure")) == 1
    assert len(suites.findall(".//skipped")) == 2


def test_junit_is_what_its_readers_take(repository: Path) -> None:
    found = protrain(*RECORDS, "--format", "junit", folder=repository).stdout
    schema = XMLSchema(FORMATS / "junit.xsd")
    assert [str(error) for error in schema.iter_errors(found)] == []
    assert not schema.is_valid(found.replace("classname=", "class="))  # the schema says something


def test_sarif_is_what_its_readers_take(repository: Path) -> None:
    found = json.loads(protrain(*RECORDS, "--format", "sarif", folder=repository).stdout)
    schema = json.loads((FORMATS / "sarif.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(found, schema, cls=jsonschema.Draft202012Validator)
    run = found["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    assert [rules[r["ruleIndex"]]["id"] for r in run["results"]] == [
        r["ruleId"] for r in run["results"]
    ]


def test_code_hosts_find_the_files_from_the_repository_s_root(repository: Path) -> None:
    """Wherever in it the check runs, and whatever the folders are called."""
    folder = repository / "all plans"
    (repository / "plans").rename(folder)

    def told(form: str) -> str:
        arguments = (*RECORDS, "over", "--format", form)
        return protrain(*arguments, folder=folder, GITHUB_WORKSPACE=str(repository)).stdout

    assert "::notice file=all plans/over/plan.yaml,line=1," in told("github")
    [result] = json.loads(told("sarif"))["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place == {"uri": "all%20plans/over/plan.yaml"}


def test_strict_fails_what_cannot_be_checked(tmp_path: Path) -> None:
    plan = commit(tmp_path / "a")
    assert check([plan], look=look_away, budgets={}).exit_code == 0
    assert check([plan], look=look_away, budgets={}, strict=True).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "error: nothing: there is no such file or folder\n"),
        (
            ("empty",),
            "error: empty: there is no plan in this folder\n"
            "  fix: write one with protrain plan -o, or name another folder\n",
        ),
        (
            ("--format", "html"),
            "error: --format: expected text, json, junit, sarif or github, got 'html'\n",
        ),
        (
            ("--explain", "MEM01"),
            "error: --explain: there is no rule 'MEM01'\n  fix: did you mean 'MEM001'?\n",
        ),
        (
            ("--on", "rtx-409"),
            "error: no such machine: 'rtx-409' is neither in the catalogue nor a file\n"
            "  fix: did you mean rtx-4090 or rtx-5090 or rtx-3090?\n",
        ),
    ],
)
def test_mistakes_are_one_message(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commit(tmp_path / "plans")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["protrain", "check", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert (stopped.value.code, *capsys.readouterr()) == (2, "", message)


def test_without_plans_there_is_nothing_to_check(tmp_path: Path) -> None:
    result = protrain("check", folder=tmp_path)
    message = "error: there is no folder plans/ here\n  fix: name plans, or folders with plans\n"
    assert (result.returncode, result.stderr) == (2, message)


def test_every_rule_explains_itself(tmp_path: Path) -> None:
    for rule in RULES.values():
        assert re.fullmatch(r"[A-Z]{3,4}00[0-9]", rule.code)
        assert len(rule.explanation) > len(rule.title) + 40
    result = protrain("check", "--explain", "mem001", folder=tmp_path, COLUMNS="80")
    assert result.stdout.startswith("MEM001\nThe predicted device peak is within the budget.\n\n")


def test_the_documentation_lists_every_rule(assert_golden: AssertGolden) -> None:
    lines = ["| Rule | What holds |", "| --- | --- |"]
    lines += [f"| [{r.code}](#{r.code.lower()}) | {r.title} |" for r in RULES.values()]
    for rule in RULES.values():
        lines += ["", f"## {rule.code}", "", rule.explanation]
    text = (ROOT / "docs/checks.md").read_text(encoding="utf-8")
    before, marker, _ = text.partition("<!-- rules -->\n")
    assert marker
    assert_golden(ROOT / "docs/checks.md", before + marker + "\n" + "\n".join(lines))


def test_plans_are_found_at_any_depth(tmp_path: Path) -> None:
    first, second = commit(tmp_path / "a/b"), commit(tmp_path / "c")
    (tmp_path / "a" / "notes.yaml").write_text("protrain plans are below\n")
    (tmp_path / "a" / "image.yaml").write_bytes(b"\xff\xfe")
    assert find_plans([tmp_path]) == [first, second]
    assert find_plans([second, tmp_path]) == [second, first]
    with pytest.raises(ProtrainError, match="there is no such file or folder"):
        find_plans([tmp_path / "d"])


def test_the_devices_of_a_node_share_what_is_below_them(tmp_path: Path) -> None:
    """On a machine that has it once, and by a budget, which is a node's."""
    apart = joined(PROFILE.hardware, below="of each device", devices_per_node=2)
    profile = replace(PROFILE, hardware=apart)
    made = offloading(profile, group=DeviceGroup(num_devices=2))
    plan = commit(tmp_path / "plans", made, profile)
    used = made.prediction.peak_bytes.disk
    once = joined(replace(apart, name="once"), below="of the node", devices_per_node=2)

    def with_disk(size: int) -> Hardware:
        return replace(once, tiers=(replace(once.tier("disk"), capacity_bytes=size),))

    assert failures(checked(plan, on=(with_disk(2 * used),))) == {}
    short = failures(checked(plan, on=(with_disk(2 * used - 2),)))
    assert list(short) == ["DISK001"]
    assert "(the machine's memory for each device) by 1 B" in short["DISK001"]
    assert failures(checked(plan, budgets=f"box: {{disk: {2 * used}}}")) == {}
    assert list(failures(checked(plan, budgets=f"box: {{disk: {2 * used - 2}}}"))) == ["DISK001"]


def test_a_machine_can_be_a_file(tmp_path: Path) -> None:
    plan = commit(tmp_path / "plans")
    write_hardware(replace(cpu(), name="small"), tmp_path / "small.yaml")
    report = checked(plan, on=(read_hardware(tmp_path / "small.yaml"),))
    assert {f.machine for f in report.findings} == {None, "small"}
    assert all(not isinstance(f.verdict, Failed) for f in report.findings)
    [memory] = [f for f in report.findings if f.rule.code == "MEM001"]
    assert isinstance(memory.verdict, Passed)
    assert memory.verdict.found.endswith(" of 14.90 GiB")
