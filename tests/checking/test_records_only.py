"""Records that strangers wrote: `check --records-only` parses them within limits, executes nothing.

A plan that holds is among the others.
"""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from protrain_plan.checking.budgets import find_limits
from protrain_plan.checking.plan_files import search
from protrain_plan.checking.reestimate import Broken, Today, look_away
from protrain_plan.checking.rules import Failed, check
from protrain_runtime.contract.errors import RecordError
from tests.support.checking_cases import PROFILE, commit, offloading
from tests.support.commands import PROTRAIN, bash, ran, version
from tests.support.record_fuzz import run

ROOT = Path(__file__).parents[2]

# --- forms of records ----------------------------------------------------------------------------


def wrong(text: str) -> str:
    """A plan that some rule does not hold for."""
    return text.replace("step_seconds: ", "step_seconds: 1")


def as_flow(text: str) -> str:
    return json.dumps(yaml.safe_load(text))


FORMS: dict[str, Callable[[str], str | bytes]] = {
    "double quotes": lambda text: text.replace("protrain: plan", 'protrain: "plan"'),
    "single quotes": lambda text: text.replace("protrain: plan", "'protrain': 'plan'"),
    "a quoted key": lambda text: text.replace("protrain: plan", '"protrain"   : plan  # here'),
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "CR": lambda text: text.replace("\n", "\r").encode(),
    "BOM": lambda text: "\ufeff" + text,
    "two BOMs": lambda text: "\ufeff\ufeff" + text,
    "a document's start": lambda text: f"---\n{text}...\n",
    "a directive": lambda text: f"%YAML 1.1\n---\n{text}",
    "a comment first": lambda text: f"# protrain: hardware\n\n{text}",
    "the key last": lambda text: text.replace("protrain: plan\n", "") + "protrain: plan\n",
    "flow style": as_flow,
    "an escape": lambda text: text.replace("protrain: plan", '"protr\\u0061in": plan'),
    "a folded escape": lambda text: text.replace("protrain: plan", '{"prot\\\n rain": plan'),
    "a complex key": lambda text: text.replace("protrain: plan", "? protrain\n: plan"),
    "a tag": lambda text: text.replace("protrain: plan", "!!str protrain: plan"),
    "a tag of its kind": lambda text: text.replace("protrain: plan", "protrain: !plan plan"),
    "an anchor": lambda text: text.replace("protrain: plan", "&a protrain: &b plan"),
    "a merge": lambda text: f"base: &base\n  protrain: plan\n<<: *base\n{text}".replace(
        "\nprotrain: plan\n", "\n"
    ),
    "twice": lambda text: f"protrain: notes\n{text}",
    "a second document": lambda text: f"notes: nothing\n---\n{text}",
    "a list": lambda text: f"[{as_flow(text)}]",
    "capitals": lambda text: text.replace("protrain: plan", "Protrain: plan"),
    "another kind": lambda text: text.replace("protrain: plan", "protrain: Plan"),
    "a number as the kind": lambda text: text.replace("protrain: plan", "protrain: 1"),
    "tabs": lambda text: text.replace("protrain: plan", "protrain:\tplan\t"),
    "a tab before": lambda text: "\t" + text,
    "indentation": lambda text: "".join(f"  {line}\n" for line in text.splitlines()),
    "an open bracket": lambda text: text + "[",
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-32": lambda text: text.encode("utf-32-be"),
    "Latin-1": lambda text: f"# \xe9\n{text}".encode("latin-1"),
    "a NUL": lambda text: text.replace("protrain", "protrain\0"),
    "deep nesting": lambda text: f"{text}notes: {'[' * 10**5}\n",
}


@pytest.mark.nightly("deep nesting")
@pytest.mark.parametrize("form", FORMS)
def test_no_form_hides_a_plan(form: str, tmp_path: Path) -> None:
    commit(tmp_path / "plans/good")
    plan = commit(tmp_path / "plans/hidden")
    content = FORMS[form](wrong(plan.read_text()))
    plan.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert str(plan) in failed(tmp_path / "plans")


def failed(*folders: Path, expect: int | None = None) -> dict[str, str]:
    """The files of which rules fail, with what is said of the first."""
    report = check(folders, look=look_away, budgets={}, expect=expect)
    found: dict[str, str] = {}
    for finding in report.with_verdict(Failed):
        assert isinstance(finding.verdict, Failed)
        found.setdefault(finding.plan, finding.verdict.problem)
    assert report.exit_code == (1 if found else 0)
    assert report.num_failed == len(found)
    return found


UNSEEN = "\u00ad\u034f\u115f\u1160\u17b4\u180b\u200b\u200d\u2060\u2065\u2800\u3164\ufe0f\uffa0"
SPELLINGS = [
    *("protrain"[: n % 8] + c + "protrain"[n % 8 :] for n, c in enumerate(UNSEEN)),
    *("Protrain", "PROTRAIN", "\u200bprotrain\U000e0100"),
]
"""Spellings of `protrain` that people cannot tell from it: with what is not seen, in capitals."""


@pytest.mark.parametrize("spelling", SPELLINGS, ids=ascii)
def test_no_spelling_of_the_key_hides_a_plan_or_a_budget(spelling: str, tmp_path: Path) -> None:
    commit(tmp_path / "plans/good")
    plan = commit(tmp_path / "plans/hidden")
    text = wrong(plan.read_text())
    escaped = "".join(f"\\U{ord(c):08x}" for c in spelling)
    for key in (spelling, f'"{spelling}"', f"'{spelling}'", f'"{escaped}"'):
        plan.write_text(text.replace("protrain:", f"{key}:"))
        assert str(plan) in failed(tmp_path / "plans"), key
    toml = f'[tool."{spelling}".budgets.box]\ndevice = "1B"\n'
    (tmp_path / "pyproject.toml").write_text(toml)
    with pytest.raises(RecordError, match="looks like it"):
        find_limits(None, folder=tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        "\u043e\u043f\u0438\u0441\u0430\u043d\u0438\u0435",
        "\u8a08\u753b\u6a5f\u68b0\u5b66\u7fd2\u8a08\u753b",
        "protecting",
        "pr\u00e9tention",
    ],
)
def test_words_of_other_languages_are_other_words(words: str, tmp_path: Path) -> None:
    commit(tmp_path / "plans/good")
    (tmp_path / "plans/notes.yaml").write_text(f"{words}: [1]\nother: protrain\n")
    (tmp_path / "plans/broken.yaml").write_text(f"{words}: {{{{ no yaml\n")
    assert failed(tmp_path / "plans", expect=1) == {}


SECRET = "ghp-0123456789"
SECRETS = {
    "a text": SECRET,
    "a pair": f"token: {SECRET}",
    "keys": f"{SECRET}: 1",
    "a list": f"- {SECRET}",
    "JSON": json.dumps({SECRET: SECRET}),
    "no YAML": f"{SECRET}: [\n'{SECRET}",
    "no text": f"\udc80 {SECRET}",
    "TOML": f'[tool.protrain.budgets.{SECRET}]\nx = "{SECRET}"',
}
OF_A_BUDGET = "protrain: budgets\nversion: 1\nbudgets:\n  '%s': {device: 1GiB, plans: ['*']}\n"
OF_A_TABLE = "[tool.protrain.budgets.'%s']\ndevice = '1GiB'\nplans = ['*']\n"
NAMED = (
    *("budgets.yaml names", "pyproject.toml names", "budgets.yaml", "pyproject.toml"),
    *("Budgets.yml", "plans/a/plan.yaml", "plans/a/profile.yaml", "plans/a/other.yaml"),
    *("plans/a", "limits.yaml names"),
)


@pytest.mark.parametrize("named", NAMED)
def test_nothing_outside_of_the_repository_is_opened_or_shown(named: str, tmp_path: Path) -> None:
    """Whatever names it, by its path or by a link, and whatever it holds."""
    work, outside = tmp_path / "work", tmp_path / "outside"
    outside.mkdir()
    reaches = (
        ("token.yaml", str(outside / "token.yaml")),
        ("token", "../outside/token"),
        ("token.yaml", "link/token.yaml"),
        ("token", "token"),
    )
    first = NAMED.index(named)
    for number, (form, secret) in enumerate(SECRETS.items(), start=first):
        name, reach = reaches[number % len(reaches)]
        if work.exists():
            shutil.rmtree(work)
        commit(work / "plans/a")
        target = outside / name
        target.write_text(secret, errors="surrogateescape")
        (work / "link").symlink_to(outside)
        (work / "token").symlink_to(target)
        file, _, names = named.partition(" ")
        path = work / file
        if names:
            text = OF_A_TABLE if file.endswith("toml") else OF_A_BUDGET
            path.write_text(text % reach)
        else:
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            path.symlink_to(Path(target).parent if file == "plans/a" else target)
        options = ["--budgets", file] if file == "limits.yaml" else []
        plans = [f"{file}/{name}"] if file == "plans/a" else ["plans/a/plan.yaml"]
        with chdir(work):
            code, told = run(["check", *plans, "--records-only", *options])
        # A file that is no record, and that nothing names, is somebody else's.
        assert code in ((0, 1) if file.endswith("other.yaml") else (1, 2)), (form, reach, told)
        assert SECRET not in told


@pytest.mark.parametrize("form", ["double quotes", "CRLF", "CR", "BOM", "flow style"])
def test_a_form_that_reads_is_a_plan_and_a_profile(form: str, tmp_path: Path) -> None:
    plan = commit(tmp_path / "plans/a")
    for path, kind in ((plan, b"plan"), (plan.parent / "profile.yaml", b"profile")):
        content = FORMS[form](path.read_text().replace("protrain: profile", "protrain: plan", 1))
        content = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(re.sub(rb'(protrain"?: "?)plan', rb"\1" + kind, content, count=1))
    assert failed(tmp_path / "plans", expect=1) == {}


@pytest.mark.parametrize(
    "name", ["plan.YAML", "plan.Yml", ".plan.yaml", ".hidden/plan.yaml", "a.yaml/b/c/d/plan.yml"]
)
def test_no_name_hides_a_plan(name: str, tmp_path: Path) -> None:
    commit(tmp_path / "plans/good")
    hidden = tmp_path / "plans" / name
    hidden.parent.mkdir(parents=True, exist_ok=True)
    hidden.write_text(wrong(commit(tmp_path / "elsewhere").read_text()))
    assert str(hidden) in failed(tmp_path / "plans")


def make_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # the names of sockets are short
    socket.socket(socket.AF_UNIX).bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(5 * 10**9)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "this is a pipe or a device"),
        (Path.mkdir, "this is a directory, not a file"),
        (make_socket, "cannot be read: No such device or address"),
        (make_sparse, "this file is larger than"),
        (lambda path: path.symlink_to("nowhere"), "cannot be read: No such file"),
        (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels"),
        (lambda path: path.symlink_to("/dev/zero"), "this is a pipe or a device"),
    ],
)
def test_what_is_no_file_fails(
    make: Callable[[Path], object], problem: str, tmp_path: Path
) -> None:
    commit(tmp_path / "plans/a")
    path = tmp_path / "plans/strange.yaml"
    make(path)
    assert failed(tmp_path / "plans")[str(path)].startswith(problem)


def test_a_file_without_permission_fails(tmp_path: Path) -> None:
    commit(tmp_path / "plans/a")
    for path in (tmp_path / "plans/b.yaml", tmp_path / "plans/c"):
        (path.mkdir if path.name == "c" else path.touch)(mode=0)
    if os.access(tmp_path / "plans/b.yaml", os.R_OK):
        pytest.skip("this user may read everything")
    assert failed(tmp_path / "plans").keys() == {str(tmp_path / "plans/b.yaml"), str(path)}


def test_links_are_followed_inside_and_fail_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = tmp_path / "work/plans"
    outside, good = commit(tmp_path / "outside"), commit(plans / "good")
    wrong_plan = commit(tmp_path / "work/elsewhere")
    wrong_plan.write_text(wrong(wrong_plan.read_text()))
    (tmp_path / "outside/notes.yaml").write_text("nothing: of ours\n")
    (plans / "up").symlink_to("..")
    (plans / "a").mkdir()
    (plans / "a/notes.yaml").symlink_to(tmp_path / "outside/notes.yaml")
    (plans / "again.yaml").symlink_to("good/plan.yaml")
    (plans / "profile.yaml").symlink_to("good/profile.yaml")
    (plans / "out.yaml").symlink_to(outside)
    (plans / "all").symlink_to(outside.parent)
    monkeypatch.chdir(tmp_path / "work")
    found = failed(Path("plans"), expect=3)
    assert found.keys() == {"plans/up/elsewhere/plan.yaml", "plans/out.yaml", "plans/all"}
    assert (
        found["plans/out.yaml"]
        == found["plans/all"].replace(str(outside.parent), str(outside))
        == f"this link points outside the folder: {outside}"
    )
    assert good.is_file()


def test_a_profile_or_budgets_that_cannot_be_read_fail(tmp_path: Path) -> None:
    plan = commit(tmp_path / "plans/a")
    stray = plan.parent / "old profile.yaml"
    stray.write_text((plan.parent / "profile.yaml").read_text() + "more: 1\n")
    budgets = tmp_path / "plans/limits.yaml"
    budgets.write_text("protrain: budgets\nversion: 1\nbudgets:\n  box: {devise: 1GiB}\n")
    found = failed(tmp_path / "plans", expect=1)
    assert found.keys() == {str(stray), str(budgets)}
    assert found[str(stray)] == "unknown key 'more'"
    assert "devise" in found[str(budgets)]


def test_other_people_s_files_are_theirs(tmp_path: Path) -> None:
    """Names of this repository, and some that speak of us."""
    commit(tmp_path / "plans/a")
    others = [ROOT / "mkdocs.yml", ROOT / "action.yml", ROOT / ".pre-commit-hooks.yaml"]
    others += (ROOT / ".github/workflows").iterdir()
    for path in others:
        (tmp_path / "plans" / path.name).write_bytes(path.read_bytes())
    for number, text in enumerate(
        [
            "services:\n  protrain: &p {image: protrain}\n  again: *p\n",
            "kind: A\n---\nkind: B\nname: protrain\n",
            "- uses: OWNER/protrain-plan@REF\n  with: {protrain: plan}\n",
            "tool: {protrain: plan}\nused: !custom [protrain]\n",
            "protrain plans are below\n",
            "",
            "{{ template }}\n",
        ]
    ):
        (tmp_path / f"plans/other {number}.yaml").write_text(text)
    (tmp_path / "plans/image.yaml").write_bytes(b"\xff\xfe")
    found = search([tmp_path / "plans"])
    assert failed(tmp_path / "plans", expect=1) == {}
    assert (found.num_seen, found.num_records) == (2 + len(others) + 8, 2)


def test_as_many_plans_are_checked_as_are_expected(tmp_path: Path) -> None:
    commit(tmp_path / "plans/a")
    commit(tmp_path / "plans/b")
    assert failed(tmp_path / "plans", expect=2) == {}
    (tmp_path / "plans/b/plan.yaml").rename(tmp_path / "plans/b/plan.txt")
    assert failed(tmp_path / "plans") == {}
    assert failed(tmp_path / "plans", expect=2) == {
        str(tmp_path / "plans"): "expected 2 plans, checked 1"
    }
    with chdir(tmp_path):
        code, told = run(["check", "--records-only", "--expect", "2"])
    assert code == 1
    assert told.endswith("\n3 files seen, 3 records checked, 1 failed\n")


def test_a_plan_that_is_named_is_counted_without_its_neighbours(tmp_path: Path) -> None:
    """Other plans beside it, its profile and files of others are no part of what was named."""
    commit(tmp_path / "plans")
    for copy in ("b2", "b3"):
        (tmp_path / f"plans/{copy}.yaml").write_bytes((tmp_path / "plans/plan.yaml").read_bytes())
    (tmp_path / "plans/other.yaml").write_text("kind: A\n")
    one, two = tmp_path / "plans/plan.yaml", tmp_path / "plans/b2.yaml"
    for paths, counts in (
        ([one], (1, 1)),
        ([one, two], (2, 2)),
        ([one, one], (1, 1)),
        ([tmp_path / "plans"], (5, 4)),
        ([one, tmp_path / "plans"], (5, 4)),
    ):
        found = search(paths)
        assert (found.num_seen, found.num_records) == counts


def test_a_mistake_of_ours_is_no_reason_to_pass(tmp_path: Path) -> None:
    """An error of a rule is a finding of its plan, and others are checked."""
    plan = commit(tmp_path / "plans/a")

    def look(_: object) -> Today:
        def estimate(_: object) -> Broken:
            raise ZeroDivisionError

        return Today(model_fingerprint="sha256:1", changed_keys=(), profile=estimate)

    [finding] = [
        finding
        for finding in check([plan], look=look, budgets={}).with_verdict(Failed)
        if finding.rule.code == "FPR001"
    ]
    assert finding.verdict == Failed(
        problem="this cannot be checked: a bug in protrain: ZeroDivisionError()"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("redirection", [">&-", "> /dev/full"])
def test_a_verdict_that_cannot_be_printed_is_none(redirection: str, tmp_path: Path) -> None:
    commit(tmp_path / "plans/a")
    command = f"'{PROTRAIN}' check --records-only {redirection}"
    result = ran("sh", "-c", command, folder=tmp_path)
    assert result.returncode


SEARCHED = ("", ":", ":src", "src::lib", "src", ".", "lib/../src/.:", "FOLDER", "FOLDER/link:/")


@pytest.fixture
def shadowed(tmp_path: Path) -> Iterator[Path]:
    """A repository with a plan, and modules named like ours and libraries': none is imported."""
    workload = replace(PROFILE.workload, model="gone:factory", model_config="")
    profile = replace(PROFILE, workload=workload, method="estimated")
    commit(tmp_path / "plans/a", offloading(profile), profile)
    for folder in (tmp_path, tmp_path / "src/below", tmp_path / "src", tmp_path / "lib"):
        folder.mkdir(exist_ok=True, parents=True)
        for name in ("yaml", "torch", "traceback", "difflib", "json", "attr", "shellingham"):
            mark = f"open({str(tmp_path / 'imported')!r}, 'w').close()\nraise SystemExit(0)\n"
            (folder / f"{name}.py").write_text(mark)
    (tmp_path / "link").symlink_to("src")
    yield tmp_path
    assert not (tmp_path / "imported").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("searched", SEARCHED)
def test_modules_in_the_repository_are_not_ours(searched: str, shadowed: Path) -> None:
    """Neither by the command nor by `python -m`, where the package is installed.

    But what Python itself imports at its start is Python's matter, and what of us it finds.
    """
    (shadowed / ".git").mkdir()
    by_module = (sys.executable, "-m", "protrain_plan.cli")
    result = ran(
        *(by_module if searched in ("", ":src", ".") else (PROTRAIN,)),
        *("check", "--records-only", shadowed / "plans"),
        folder=shadowed / ("src/below" if "FOLDER" in searched else "."),
        PYTHONPATH=searched.replace("FOLDER", str(shadowed)),
    )
    assert (result.returncode, result.stderr) == (0, ""), result


@pytest.mark.nightly("Check")
@pytest.mark.parametrize("step", ["Check", "Compare"])
def test_the_action_s_python_imports_nothing_of_the_repository(step: str, shadowed: Path) -> None:
    """At its own start neither, and of ours neither."""
    mark = (shadowed / "yaml.py").read_text()
    for name in ("re", "sitecustomize", "usercustomize", "protrain_plan/cli"):
        (shadowed / name).parent.mkdir(exist_ok=True)
        (shadowed / f"{name}.py").write_text(mark)
    version(shadowed)
    plan = shadowed / "plans/a/plan.yaml"
    plan.write_text(wrong(plan.read_text()))
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    [run] = [one for one in action["runs"]["steps"] if one.get("name") == step]
    result = bash(
        run["run"],
        folder=shadowed,
        **dict.fromkeys(run["env"], "")
        | {"BASE": "main", "PLANS": "plans", "RECORDS_ONLY": "true", "PYTHONPATH": ":src"}
        | {"RUNNER_TEMP": str(shadowed), "GITHUB_STEP_SUMMARY": "/dev/null"},
    )
    assert (result.returncode, result.stderr) == (int(step == "Check"), ""), result
