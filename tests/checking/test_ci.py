"""The example repository, the action and the hooks, as a continuous integration would run them."""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from protrain_plan.checking.budgets import find_limits
from protrain_plan.checking.rules import Failed, Report, Skipped, check
from protrain_plan.presentation.checks.reports import text
from protrain_runtime.contract.escaping import one_line
from tests.support.checking_cases import AssertGolden, commit, find_plans, look
from tests.support.commands import EXAMPLE, Result, bash, copy_example, protrain, shell, version
from tests.support.markdown import code, rendered

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/how-to/ci.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    folder = tmp_path / "example"
    copy_example(folder)
    return folder


def widen(example: Path) -> None:
    """Edits that the example's README says to try."""
    config = example / "model/config.json"
    before, after = '"intermediate_size": 2816', '"intermediate_size": 4096'
    assert before in config.read_text()
    assert after in (EXAMPLE / "README.md").read_text()
    config.write_text(config.read_text().replace(before, after))


def report_on(example: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.chdir(example)
    return check(find_plans([Path("plans")]), look=look, budgets=find_limits(None).budgets)


@pytest.mark.nightly
def test_the_example_holds(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_on(example, monkeypatch)
    assert report.with_verdict(Failed) == report.with_verdict(Skipped) == []


@pytest.mark.slow
def test_a_wider_layer_fails_on_the_smaller_machine(
    example: Path, monkeypatch: pytest.MonkeyPatch, assert_golden: AssertGolden
) -> None:
    widen(example)
    report = report_on(example, monkeypatch)
    assert [(f.rule.code, f.machine) for f in report.with_verdict(Failed)] == [
        ("FPR001", None),
        ("MEM001", "rtx-3090"),
    ]
    for finding in report.with_verdict(Failed):
        assert isinstance(finding.verdict, Failed)
        [grown] = finding.verdict.growth
        # Three matrices of 1280 more rows or columns, as parameters, gradients and two states.
        assert (grown.units, grown.states_bytes) == ("model.layers.0-7", 3 * 1280 * 1024 * 2 * 4)
    console = Console(width=80, file=io.StringIO())
    console.print(text(report), highlight=False)
    assert isinstance(console.file, io.StringIO)
    assert_golden("ci/grown.text", console.file.getvalue())


def test_the_documentation_shows_what_check_says() -> None:
    """The lines in the guide to CI are those of the example's failure."""
    [shown] = re.findall(r"```text\n(.*?)```", GUIDE, re.DOTALL)
    golden = (ROOT / "tests/golden/ci/grown.text").read_text()
    assert [line for line in shown.splitlines() if line not in golden.splitlines()] == []


# --- the action and the hooks ---------------------------------------------------------------------

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"] if "name" in step}


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.y*ml"))


def texts() -> dict[str, str]:
    """The action, the workflows and those that the documentation shows, as YAML."""
    files = (ROOT / "action.yml", *WORKFLOWS)
    found = {path.name: path.read_text(encoding="utf-8") for path in files}
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")):
        blocks = re.findall(r"```ya?ml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        shown = [block for block in blocks if "uses:" in block]
        found |= {f"{page.relative_to(ROOT)} {n}": block for n, block in enumerate(shown)}
    return found


TEXTS = texts()


def steps_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    jobs = document.get("jobs", {"action": document.get("runs")})
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("name", TEXTS)
def test_workflows_trust_nobody_s_text(name: str) -> None:
    """Actions of others by commit, with the version as a comment; texts as variables only."""
    document = yaml.safe_load(TEXTS[name])
    steps, used = steps_of(document), re.findall(r"uses: *(.*)", TEXTS[name])
    assert len(used) == sum("uses" in step for step in steps) > 0
    for line in used:  # REF stands for a commit of this repository
        by_commit = re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)
        assert by_commit or line in ("./", "OWNER/protrain-plan@REF"), line
    for step in steps:
        assert "${{" not in step.get("run", "")
        # eval, and a variable outside of quotes, would read it once more.
        words = re.sub(r"\"[^\"]*\"|'[^']*'|\$\?|#.*", "", step.get("run", ""))
        assert not re.search(r"\$[A-Za-z{(]|`|\beval\b", words.replace("=$(git", "=")), words
    if name != "action.yml":
        assert document["permissions"] == {"contents": "read"}
        assert not any("permissions" in job for job in document["jobs"].values())
        assert "pull_request_target" not in str(document)
        taken = [step for step in steps if "checkout" in step.get("uses", "")]
        assert taken
        assert all(step["with"]["persist-credentials"] is False for step in taken)


def test_what_the_action_installs_is_held_to_what_was_tried(tmp_path: Path) -> None:
    lines = [line.strip() for line in STEPS["Install"]["run"].splitlines()]
    installs = [line for line in lines if "pip install" in line]
    assert installs
    assert all(line.startswith('pip install -c "$tried" ') for line in installs)
    # What is there stays, whatever its name's spelling; the rest is pinned.
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "pip").write_text(
        "#!/bin/sh\n[ $1 != list ] || printf 'Torch==2.11.0\\nPy_YAML==1\\nMine==3\\n'\n"
    )
    (folder / "pip").chmod(0o755)
    result = bash(
        STEPS["Install"]["run"],
        folder=tmp_path,
        PATH=f"{folder}{os.pathsep}{os.environ['PATH']}",
        RUNNER_TEMP=str(tmp_path),
        GITHUB_ACTION_PATH=str(ROOT),
    )
    assert (result.returncode, result.stderr) == (0, "")
    held = (tmp_path / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert held[:3] == ["Torch==2.11.0", "Py_YAML==1", "Mine==3"]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert held[3:] == [line for line in pinned.splitlines() if not line.startswith("torch==")]
    for package in ("torch", "hatchling", "transformers", "rich", "typer", "pyyaml"):
        assert re.search(rf"^{package}==", pinned, re.MULTILINE | re.IGNORECASE), package


def test_every_input_is_used_and_documented() -> None:
    action = (ROOT / "action.yml").read_text(encoding="utf-8")
    used = set(re.findall(r"\$\{\{ inputs\.([a-z-]+) \}\}", action))
    assert used == ACTION["inputs"].keys()
    assert all(given["description"] for given in ACTION["inputs"].values())


def test_the_workflow_uses_the_action() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/plans.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["check"]
    assert job["steps"][-1]["uses"] == "./"
    assert job["steps"][-1]["with"].keys() <= ACTION["inputs"].keys()
    assert all((ROOT / folder / "plans").is_dir() for folder in job["strategy"]["matrix"]["folder"])


def test_what_runs_nightly_are_targets_of_the_makefile() -> None:
    """All tests but those for a GPU among them, with the actions at the versions used elsewhere."""
    folder = ROOT / ".github/workflows"
    workflow = yaml.safe_load((folder / "nightly.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["make"]
    run, given = job["steps"][-1]["run"], job["steps"][-1]["env"]
    assert given == {"TARGET": "${{ matrix.target }}"}
    targets = [shlex.split(target) for target in job["strategy"]["matrix"]["target"]]
    rest = ["MARKERS=not gpu", "THREADS=2", "EXTRAS=hf,dev,torchao"]
    shards = [["test", f"SHARD={number}/6", *rest] for number in range(1, 7)]
    assert [target for target in targets if target[0] == "test"] == shards
    for target, words in zip(job["strategy"]["matrix"]["target"], targets, strict=True):
        asked = bash(run.replace("make", "printf '%s\\n'"), folder=ROOT, TARGET=target)
        assert (asked.returncode, asked.stdout.splitlines()) == (0, words)
    for name, *_ in targets:
        assert re.search(rf"^{name}:.* ##", (ROOT / "Makefile").read_text(), re.MULTILINE), name
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "action.yml", *folder.iterdir())]
    used = set(re.findall(r"uses: (actions/\S+)@(\S+)", "".join(texts)))
    assert len(used) == len({name for name, _ in used}) == 2


@pytest.mark.nightly(but=("environment3-1",))
@pytest.mark.parametrize(
    ("environment", "code"),
    [
        ({"PLANS": "plans", "STRICT": "false"}, 0),
        ({"PLANS": "plans\n", "BUDGETS": "tight.yaml", "STRICT": "false"}, 1),
        ({"PLANS": "plans/a b", "MACHINES": "cpu\n", "STRICT": "false"}, 0),
        ({"PLANS": "plans", "STRICT": "true"}, 1),
        ({"PLANS": "plans", "EXPECT": "1", "RECORDS_ONLY": "true"}, 0),
        ({"PLANS": "plans", "EXPECT": "2", "RECORDS_ONLY": "true"}, 1),
    ],
)
def test_the_check_of_the_action(environment: dict[str, str], code: int, tmp_path: Path) -> None:
    commit(tmp_path / "plans/a b")
    (tmp_path / "tight.yaml").write_text(
        "protrain: budgets\nversion: 1\nbudgets:\n  box: {device: 900MB}\n"
    )
    unset = dict.fromkeys(STEPS["Check"]["env"], "")
    result = bash(STEPS["Check"]["run"], folder=tmp_path, **(unset | environment))
    assert result.returncode == code, result.stderr
    assert ("::error file=plans/a b/plan.yaml," in result.stdout) == bool(
        code and "BUDGETS" in environment
    )
    assert ("::error file=plans,line=1,title=NUM001" in result.stdout) == bool(
        code and "EXPECT" in environment
    )
    assert "::notice file=plans/a b/plan.yaml," in result.stdout  # no model is called synthetic


def compare(folder: Path, *, base: str, summary: Path) -> Result:
    """Run the action's comparison, which writes for the job's summary and beside it."""
    return bash(
        STEPS["Compare"]["run"],
        folder=folder,
        BASE=base,
        RUNNER_TEMP=str(summary.parent),
        GITHUB_STEP_SUMMARY=str(summary),
    )


def test_the_comparison_of_the_action(example: Path, tmp_path: Path) -> None:
    plan = example / "plans/llama/plan.yaml"
    plan.write_text(re.sub(r"step_seconds: \S+", "step_seconds: 9.5", plan.read_text()))
    summary = tmp_path / "summary.md"
    result = compare(example, base="main", summary=summary)
    assert (result.returncode, result.stderr) == (0, "")
    title, _, words, *_ = summary.read_text().splitlines()
    assert title == "### Memory plan `plans/llama/plan.yaml`"
    assert re.fullmatch(
        r"No decision differs\. The predicted step grows from \S+ m?s to 9\.50 s\.", words
    )
    nothing = compare(example, base="", summary=tmp_path / "none.md")
    assert nothing.returncode == 0
    assert not (tmp_path / "none.md").exists()


@pytest.mark.nightly
def test_a_plan_that_cannot_be_read_is_told_in_the_summary(tmp_path: Path) -> None:
    """The comparison goes on: that it cannot be read is for the check to fail."""
    newer, changed = commit(tmp_path / "plans/a b"), commit(tmp_path / "plans/c")
    version(tmp_path)
    newer.write_text(newer.read_text().replace("version: 3", "version: 4"))
    changed.write_text(changed.read_text().replace("step_seconds: ", "step_seconds: 1"))
    summary = tmp_path / "summary.md"
    result = compare(tmp_path, base="main", summary=summary)
    assert (result.returncode, result.stderr) == (0, "")
    first, _, words, _, message, _, _, second, *_ = summary.read_text().splitlines()
    assert first == "### Memory plan `plans/a b/plan.yaml`"
    assert words == "It cannot be compared:"
    assert message.startswith("    plans/a b/plan.yaml:")
    assert "version 4 is newer than this program" in message
    assert second == "### Memory plan `plans/c/plan.yaml`"


HOSTILE = (
    "-rf --output=x $(touch created) `touch created`.YAML",
    "a\nb\n::error::x\n# head %0A::error::\x1b[31m \u202ex.yml",
    "`a` @someone #1 [x](http:__evil.example) <img src=x> | b.yaml",
)


@pytest.mark.nightly
def test_plans_of_any_name_are_compared_in_the_summary(tmp_path: Path) -> None:
    """Also such as other readers of YAML see them; files that are no plans are not told."""
    work = tmp_path / "work"
    plan = commit(work)
    for name in HOSTILE:
        (work / name).write_bytes(plan.read_bytes())
    (work / "quoted.yaml").write_text(plan.read_text())
    (work / "other.yaml").write_text("a: [b]\n")
    (work / "broken.yaml").write_text("a: b\n")
    version(work)
    for name in HOSTILE:
        changed = (work / name).read_text().replace("step_seconds: ", "step_seconds: 1")
        (work / name).write_text(changed)
    quoted = plan.read_text().replace("protrain: plan", 'protrain: "plan"')
    quoted = quoted.replace("step_seconds: ", "step_seconds: 1").replace("\n", "\r\n")
    (work / "quoted.yaml").write_bytes(quoted.encode())
    (work / "other.yaml").write_text("protrain: other\n")
    (work / "broken.yaml").write_text("a: [\n")
    plan.write_text("protrain: plan\nversion: 1\n`@x`: <img src=x>\n")
    summary = tmp_path / "summary.md"
    result = compare(work, base="main", summary=summary)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    tokens = rendered(summary.read_text(encoding="utf-8"))
    heads = [n for n, token in enumerate(tokens) if token.type == "heading_open"]
    titles = [code([tokens[n + 1]])[0] for n in heads]
    expected = {*HOSTILE, "quoted.yaml", "plan.yaml"}
    assert set(titles) == {one_line(name).replace("|", r"\x7c") for name in expected}
    assert sum(token.type == "code_block" for token in tokens) == 1  # of plan.yaml
    assert not (work / "created").exists()


@pytest.mark.parametrize("base", ["--output=created", "-h", "main --", "no\n::error::x", "main..x"])
def test_a_base_that_is_no_commit_is_told(base: str, tmp_path: Path) -> None:
    commit(tmp_path / "plans")
    version(tmp_path)
    result = compare(tmp_path, base=base, summary=tmp_path / "summary.md")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "compare-with: there is no such commit here (fetch-depth: 0 fetches all)\n"
    )
    assert not (tmp_path / "created").exists()


@pytest.fixture
def runner(tmp_path: Path) -> dict[str, str]:
    """The environment of a job: an empty Python whose packages are those of this one.

    pip then finds what the action installs there already, and asks no index for it.
    """
    made = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", made], check=True)
    older = (made / "bin/pip", "uninstall", "-q", "-y", "setuptools")  # than torch wants
    subprocess.run(older, check=True)
    [packages] = made.glob("lib/*/site-packages")
    (packages / "here.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    variables = ("GITHUB_WORKSPACE", "GITHUB_ACTION_PATH", "RUNNER_TEMP", "GITHUB_STEP_SUMMARY")
    places = (tmp_path / "work", ROOT, tmp_path, tmp_path / "summary.md")
    return {
        **dict(zip(variables, map(str, places), strict=True)),
        "PATH": f"{made / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": "",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which is how pip reads "without"
        "COLUMNS": "80",
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_step_of_the_action_runs_as_in_a_job(runner: dict[str, str]) -> None:
    """The example in a folder of a repository: a wider layer fails, and is mended."""
    work = Path(runner["GITHUB_WORKSPACE"])
    example = work / "models"
    shutil.copytree(EXAMPLE, example)
    version(work)
    values = {f"inputs.{name}": given["default"] for name, given in ACTION["inputs"].items()}
    values |= {"inputs.compare-with": "main", "inputs.working-directory": "models"}

    def job() -> list[Result]:
        done: list[Result] = []
        for step in (step for step in ACTION["runs"]["steps"] if "run" in step):
            folder = work / filled(step.get("working-directory", "."), values)
            given = {name: filled(text, values) for name, text in step.get("env", {}).items()}
            done.append(shell(step["run"], folder=folder, environment=runner | given))
            if done[-1].returncode:
                break
        return done

    installed, *_, held = job()
    assert installed.returncode == held.returncode == 0, (installed, held)
    passed = "::notice title=protrain check::17 passed in 1 plan; 2 files seen, 2 records checked,"
    assert held.stdout == f"{passed} 0 failed\n"
    widen(example)
    *_, over = job()
    assert over.returncode == 1
    assert "::error file=models/plans/llama/plan.yaml," in over.stdout
    again = shell("./plan.sh", folder=example, environment=runner)
    assert again.returncode == 0, again.stderr
    *_, mended = job()
    assert (mended.returncode, mended.stdout) == (0, f"{passed} 0 failed\n")
    summary = Path(runner["GITHUB_STEP_SUMMARY"]).read_text()
    assert summary.startswith("### Memory plan `plans/llama/plan.yaml`\n")


def filled(text: str, values: dict[str, str]) -> str:
    """A text of the action with its expressions replaced, as GitHub does."""
    return re.sub(r"\$\{\{ (\S+) \}\}", lambda found: values[found[1]], text)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pre_commit") is None, reason="pre-commit is not installed")
def test_pre_commit_runs_the_hook_as_the_example_says(example: Path, tmp_path: Path) -> None:
    """The README's configuration, with a repository that holds our hooks for OWNER's."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", hooks)
    version(hooks)
    revision = bash("git rev-parse HEAD", folder=hooks).stdout.strip()
    [shown] = re.findall(r"```yaml\n(repos:.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    told = shown.replace("https://github.com/OWNER/protrain-plan", str(hooks))
    (example / ".pre-commit-config.yaml").write_text(told.replace("REF", revision))
    environment = {"PRE_COMMIT_HOME": str(tmp_path / "cache")}

    def commits() -> Result:
        script = "git add -A && git commit -q -m change"
        return bash(script, folder=example, **environment)

    assert bash("pre-commit install", folder=example, **environment).returncode == 0
    first = commits()
    assert (first.returncode, "protrain check" in first.stderr) == (0, True), first.stderr
    widen(example)
    second = commits()
    assert second.returncode == 1
    assert "15 passed, 2 failed in 1 plan" in second.stderr


@pytest.mark.nightly
def test_the_hooks_run_our_commands(tmp_path: Path) -> None:
    commit(tmp_path / "plans")
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert [hook["id"] for hook in hooks] == ["protrain-check", "protrain-check-records"]
    for hook in hooks:
        assert re.search(hook["files"], "plans/llama/plan.yaml")
        first, *arguments = shlex.split(hook["entry"])
        assert first == "protrain"
        result = protrain(*arguments, folder=tmp_path)
        assert result.returncode == 0, result.stderr
