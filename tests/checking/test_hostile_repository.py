"""A pull request that wants `protrain check` to pass: whatever its code and its files do, it fails.

The code is run by the command itself, in a repository with a plan that holds among the others.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from protrain_plan.checking.budgets import find_limits
from protrain_plan.checking.looking import Broken, Today, look_away
from protrain_plan.checking.plan_files import search
from protrain_plan.checking.rules import Failed, check
from protrain_plan.kept import SWITCH
from protrain_plan.models.presets import read_config
from protrain_runtime.contract.errors import RecordError
from tests.support import forked
from tests.support.checking_cases import PROFILE, commit, offloading
from tests.support.commands import PROTRAIN, Result, bash, ran, version
from tests.support.record_fuzz import run

ROOT = Path(__file__).parents[2]

SECONDS = f"1000.{os.getpid()}"  # other workers run such code, too

HOSTILE = """
import atexit, ctypes, fcntl, hashlib, json, mmap, os, signal, subprocess, sys, threading, time
from pathlib import Path

HERE = Path(__file__).parent


def exits():
    sys.exit(0)


def exits_hard():
    os._exit(0)


def exits_with_a_thread():
    threading.Thread(target=time.sleep, args=(10**6,)).start()
    atexit.register(os._exit, 0)
    sys.exit(0)


class Ends:
    def __del__(self):
        sys.exit(0)


def ends_when_it_is_deleted():
    Ends()
    return Ends(), [Ends()]


def aborts():
    os.abort()


def segfaults():
    ctypes.string_at(0)


def stops():
    os.kill(0, signal.SIGKILL)


def kills_its_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(10**6)


def prints():
    for text in ("::error::forged", "::set-output name=a::b", "::stop-commands::x", "\\x1b]0;t\\a"):
        print(text, flush=True)
        os.write(2, text.encode())
        with open(f"/proc/{os.getppid()}/fd/1", "w") as file:
            file.write(text)
    raise RuntimeError("\\n::error::forged\\n\\x1b[2J\\u202e")


def floods_output():
    flood = bytes(2**20)
    for _ in range(2**12):
        os.write(1, flood)
    sys.exit(0)


def floods_memory():
    kept = []
    while True:
        kept.append(bytearray(b"x") * 2**26)


def floods_shared_memory():
    kept = []
    while True:
        kept.append(mmap.mmap(-1, 2**26))
        kept[-1].write(b"x" * 2**26)


def leaves_a_process():
    script = "echo $$ > left.pid; exec sleep SECONDS"
    subprocess.Popen(["setsid", "sh", "-c", script], cwd=HERE)
    while not (HERE / "left.pid").exists() or not (HERE / "left.pid").read_text():
        time.sleep(0.01)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            (HERE / "left again.pid").write_text(str(os.getpid()))
            time.sleep(10**6)
        os._exit(0)
    while not (HERE / "left again.pid").exists():
        time.sleep(0.01)
    sys.exit(0)


def forges(*answers):
    for end in range(3, 64):
        try:
            os.write(end, b"".join(json.dumps(answer).encode() + b"\\n" for answer in answers))
        except OSError:
            pass
    time.sleep(10**6)


AS_RECORDED = {"told": {"fingerprint": "FINGERPRINT", "changed": []}}


def forges_that_it_cannot_be_looked_at():
    forges({"failed": ["refused", "torch is not installed", None, None, None, None]})


def forges_that_it_cannot_be_estimated():
    forges(AS_RECORDED, {"failed": ["refused", "no", None, None, None, None]})


def forges_what_is_no_profile():
    forges(AS_RECORDED, {"answer": "protrain: profile"})


def forges_what_is_no_message():
    forges([["["]] * 10**4)


def patches():
    from protrain_plan.checking import looking, rules
    from protrain_plan.checking.rules import Passed

    for module in (rules, looking):
        for name in dir(module):
            if not name.startswith("__"):
                setattr(module, name, lambda *_, **__: Passed())
    sys.exit(0)


def rewrites_the_repository():
    good = (HERE / "plans/good/plan.yaml").read_bytes()
    for path in HERE.glob("plans/*/plan.yaml"):
        path.write_bytes(good)
    for path in HERE.glob("plans/*/profile.yaml"):
        path.unlink()
    (HERE / "budgets.yaml").unlink()
    sys.exit(0)


def reads_the_environment():
    found = b"\\0".join(os.environb.values())
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found += (process / "environ").read_bytes()
        except OSError:
            pass
    (HERE / "environment").write_bytes(found)
    (HERE / "home.json").write_text(json.dumps([str(Path.home()), os.listdir(Path.home())]))
    Path(os.environ["GITHUB_ENV"]).write_text("PATH=/hostile")


def forks_away(step=lambda: None, before=lambda: None):
    # Each process lives until its child does; all hold one lock.
    held = open(HERE / "held", "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    before()
    if os.fork() == 0:
        while True:
            step()
            if os.fork():
                os._exit(0)
    sys.exit(0)


def forks_away_in_sessions():
    forks_away(os.setsid)


def forks_away_past_signals():
    every = set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}
    forks_away(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, every))


def forks_away_without_its_parents():
    def kill():
        for _ in range(3):
            os.kill(os.getppid(), signal.SIGKILL)

    forks_away(before=kill)


def forks_away_by_the_system_call():
    libc, number = ctypes.CDLL(None), {"x86_64": 435, "aarch64": 435}[os.uname().machine]
    arguments = (ctypes.c_uint64 * 11)(*[0] * 4, signal.SIGCHLD)
    os.fork = lambda: libc.syscall(number, arguments, 88)
    forks_away()


def forks_away_in_other_namespaces():
    libc = ctypes.CDLL(None)

    def leave():
        for flags in (0x10000000, 0x20000000):
            libc.unshare(flags)
        for process in Path("/proc").glob("[0-9]*"):
            try:
                namespace = os.open(process / "ns/pid", os.O_RDONLY)
                libc.setns(namespace, 0)
                os.close(namespace)
            except OSError:
                pass

    forks_away(before=leave)


def forges_the_cache():
    for path in Path("CACHE").rglob("*.txt"):
        told = hashlib.sha256((path.stem + "FINGERPRINT").encode()).hexdigest()
        path.write_text(f"{told}\\nFINGERPRINT")
        (HERE / "forged").touch()
    sys.exit(0)


def sleeps():
    time.sleep(10**6)


def spins():
    while True:
        pass


def bombs():
    while True:
        subprocess.Popen(["sleep", "SECONDS"])


def ends_the_check():
    def parent(pid):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    os.kill(parent(os.getppid()), signal.SIGNAL)
    time.sleep(10**6)
""".replace("FINGERPRINT", PROFILE.model_fingerprint).replace("SECONDS", SECONDS)

PROCESS = "the model cannot be built: its process "
DIED = f"{PROCESS}died: "
ENDED = "the model cannot be built: its code ended the "
WORDS = {
    "exits": f"{ENDED}program: sys.exit(0) (at hostile.py:9)",
    "exits_hard": f"{PROCESS}ended with exit code 0",
    "exits_with_a_thread": f"{ENDED}program: sys.exit(0) (at hostile.py:19)",
    "ends_when_it_is_deleted": "the model cannot be built: hostile:ends_when_it_is_deleted: the"
    " factory returned tuple, not (nn.Module, batches)",
    "aborts": f"{DIED}SIGABRT (aborted) (at hostile.py:33)",
    "segfaults": f"{DIED}SIGSEGV (segmentation fault) (at hostile.py:37)",
    "stops": f"{DIED}SIGKILL",
    "prints": "the model cannot be built: RuntimeError: ::error::forged ?[2J? (at hostile.py:",
    "floods_output": f"{ENDED}program: sys.exit(0) (at hostile.py:",
    "floods_memory": "the model cannot be built: MemoryError: (at hostile.py:",
    "floods_shared_memory": f"{PROCESS}took more than 1.00 GiB of memory",
    "leaves_a_process": f"{ENDED}program: sys.exit(0) (at hostile.py:",
    "forges_that_it_cannot_be_looked_at": "the model cannot be built: torch is not installed",
    "forges_that_it_cannot_be_estimated": "the model can no longer be estimated: no estimate: no",
    "forges_what_is_no_profile": "the model can no longer be estimated: its estimate is no profile",
    "forges_what_is_no_message": f"{PROCESS}answers in place of protrain",
    "patches": "the model cannot be built: ",
    "reads_the_environment": "the model cannot be built: KeyError: 'GITHUB_ENV' (at hostile.py:",
    "rewrites_the_repository": f"{ENDED}program: sys.exit(0) (at hostile.py:",
}
"""The finding of each, in a run where memory is limited to 1 GiB."""

SHADOWS = ("yaml.py", "torch.py", "sitecustomize.py", "typer/__init__.py", "protrain_plan/cli.py")


class Repository:
    """A folder with the code above, and a plan for each way to use it."""

    before: tuple[str, ...] = ()  # what the command is run by

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "hostile.py").write_text(HOSTILE.replace("SIGNAL", "SIGTERM"))
        (folder / "leaves.py").write_text("raise SystemExit(0)\n")
        shadow = f"open({str(folder / 'shadowed')!r}, 'w').close()\nraise SystemExit(0)\n"
        for name in SHADOWS:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(shadow)
        (folder / "protrain_plan/__init__.py").write_text("")
        (folder / "budgets.yaml").write_text(
            "protrain: budgets\nversion: 1\nbudgets:\n  box: {device: 1GiB}\n"
        )

    def commit(self, name: str, model: str) -> Path:
        workload = replace(PROFILE.workload, model=model, model_config="")
        profile = replace(PROFILE, workload=workload, method="estimated")
        return commit(self.folder / "plans" / name, offloading(profile), profile)

    def check(self, *arguments: str, **environment: str) -> Result:
        command = (*self.before, PROTRAIN, "check", *arguments)
        return ran(*command, folder=self.folder, **environment)

    def findings(self, *arguments: str, **environment: str) -> dict[str, dict[str, Any]]:
        """The findings about each plan's model, by the plan's folder; the check fails."""
        result = self.check("--json", *arguments, **environment)
        assert (result.returncode, result.stderr) == (1, ""), result
        report = json.loads(result.stdout)
        self.failed = {
            (f["plan"], f["code"]) for f in report["findings"] if f["verdict"] == "failed"
        }
        return {
            Path(finding["plan"]).parent.name: finding
            for finding in report["findings"]
            if finding["code"] == "FPR001"
        }


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    before = processes()
    yield Repository(tmp_path)
    assert processes() <= before
    assert not (tmp_path / "shadowed").exists()


def processes() -> set[str]:
    """The processes that sleep for as long as those above do."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    return {line for line in found.stdout.splitlines() if line.endswith(f"sleep {SECONDS}")}


GOOD = """
import subprocess
from multiprocessing import get_context

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.mean()


def factory():
    with get_context("fork").Pool(1) as workers:
        [size] = workers.map(int, ["8"])
    subprocess.run(["true"], check=True)
    return Model(), [torch.ones(2, size)]
"""


def commit_good(folder: Path) -> None:
    """A model that is as it was profiled, with a plan that holds; its code starts processes."""
    (folder / "good.py").write_text(GOOD)
    (folder / "plans/good").mkdir(parents=True)
    made, options = "plans/good/profile.yaml", ("--device-memory", "1GiB")
    for command in (
        ("profile", "good:factory", "--on", "cpu", "-o", made),
        ("plan", made, *options, "-o", "plans/good/plan.yaml"),
    ):
        result = forked.protrain(*command, folder=folder)
        assert result.returncode == 0, result.stderr


def test_whatever_a_model_s_code_does_fails(repository: Repository) -> None:
    commit_good(repository.folder)
    for name in WORDS:
        repository.commit(name, f"hostile:{name}")
    repository.commit("leaves", "leaves:factory")
    plan = repository.commit("wrong", "gone:factory")  # which one of the others makes right
    plan.write_text(plan.read_text().replace("step_seconds: ", "step_seconds: 1"))
    job = repository.folder / "job.env"
    (home := repository.folder / "home").mkdir()
    (home / ".netrc").touch()
    # Names are no matter: what is not needed to compute is not there.
    names = ["DATABASE_URL", "KUBECONFIG", "X", "PATH_", "HF_TOKEN", "OMP", "_", "PYTHONSTARTUP"]
    secrets = {name: f"secret-{number}-" for number, name in enumerate(names)}
    environment = secrets | {"GITHUB_ENV": str(job), "HOME": str(home)}
    found = repository.findings("--model-memory", "1GiB", **environment)
    assert found.keys() == {*WORDS, "good", "leaves", "wrong"}
    assert found["good"]["verdict"] == "passed", found["good"]
    for name, words in WORDS.items():
        assert found[name]["verdict"] == "failed", found[name]
        assert found[name]["problem"].startswith(words), found[name]
        assert found[name]["fix"]
    assert found["leaves"]["problem"] == f"{ENDED}program: sys.exit(0) (at leaves.py:1)"
    assert "--model-memory" in found["floods_memory"]["fix"]
    seen = (repository.folder / "environment").read_bytes()
    assert b"PATH=" in seen
    assert not [name for name, secret in secrets.items() if secret.encode() in seen]
    there, files = json.loads((repository.folder / "home.json").read_text())
    assert (there != str(home), files) == (True, [])
    assert not job.exists()
    assert ("plans/wrong/plan.yaml", "SIM001") in repository.failed


SLOWER = {
    "sleeps": "its process was not done after 2 s (at hostile.py:",
    "spins": "its process was not done after 2 s (at hostile.py:",
    "bombs": "",  # it started too many processes, or was slow to do so
    "kills_its_parent": "its process was not done after 2 s (at hostile.py:",  # heeds no signal
}


needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "--user", "--pid", "--fork", "true"], check=False).returncode != 0,
    reason="this system allows no namespaces: what is said of some code is otherwise",
)


@pytest.mark.slow
@needs_namespaces
def test_code_that_does_not_end_fails(repository: Repository) -> None:
    """And what comes after it is looked at."""
    for name in SLOWER:
        repository.commit(name, f"hostile:{name}")
    repository.commit("with others", "hostile:exits")
    found = repository.findings("--time-limit", "2")
    for name, words in SLOWER.items():
        assert found[name]["problem"].startswith(f"the model cannot be built: {words}"), found[name]
    assert "--time-limit" in found["sleeps"]["fix"]
    assert found["with others"]["problem"].startswith(f"{ENDED}program")


HIDES = re.findall(r"^def (forks_away\w*)", HOSTILE, re.MULTILINE)


@pytest.mark.parametrize("system", ["with namespaces", "without"])
@needs_namespaces
def test_no_process_outlives_its_check(system: str, repository: Repository) -> None:
    """However it forks; where namespaces are not to be had, no process is."""
    for name in HIDES:
        repository.commit(name, f"hostile:{name}")
    without = system == "without"
    if without:
        repository.before = WITHOUT_NAMESPACES
    found = repository.findings()
    assert set(HIDES) <= found.keys()
    with (repository.folder / "held").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it
    for name in HIDES:
        assert found[name]["verdict"] == "failed"
        refused = "PermissionError: [Errno 1]" in found[name]["problem"]
        assert refused <= without
        assert ("start no process" in found[name]["fix"]) == refused
    assert "PermissionError" in found["forks_away"]["problem"] or not without


@needs_namespaces
def test_a_system_that_holds_no_processes_is_told_of(repository: Repository) -> None:
    """Another architecture, as far as Python knows, so that nobody knows its system calls."""
    repository.commit("a", "hostile:exits")
    repository.before = (*WITHOUT_NAMESPACES, "setarch", "linux32")
    result = repository.check()
    assert result.returncode == 1
    assert " ".join(result.stderr.split()) == (
        "warning: this system cannot hold the processes that a model's code starts: some may"
        " outlive this check"
    )


WITHOUT_NAMESPACES = (
    *("unshare", "--user", "--map-root-user", "sh", "-c"),
    *('echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh"),
)


@pytest.mark.slow
@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGKILL", "SIGINT", "SIGHUP"])
@needs_namespaces
def test_code_that_ends_the_check_does_not_make_it_pass(
    signal_name: str, repository: Repository
) -> None:
    """In namespaces it finds nobody to end but itself; elsewhere the check ends as a failure."""
    (repository.folder / "hostile.py").write_text(HOSTILE.replace("SIGNAL", signal_name))
    repository.commit("ends", "hostile:ends_the_check")
    found = repository.findings()
    died = {"SIGINT": "the model cannot be built: KeyboardInterrupt: (at hostile.py:"}
    assert found["ends"]["problem"].startswith(died.get(signal_name, f"{DIED}{signal_name}"))
    repository.before = WITHOUT_NAMESPACES
    result = repository.check()
    assert result.returncode in (-signal.Signals[signal_name], 130)
    assert "passed" not in result.stdout


@pytest.mark.slow
def test_what_a_model_s_code_leaves_in_the_cache_is_not_believed(
    repository: Repository, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Models of the libraries' code alone are looked at before any other runs."""
    cache = tmp_path_factory.mktemp("cache")
    (repository.folder / "hostile.py").write_text(HOSTILE.replace("CACHE", str(cache)))
    repository.commit("a", "hostile:forges_the_cache")
    config = json.dumps(read_config("tiny-llama"), sort_keys=True, separators=(",", ":"))
    workload = replace(PROFILE.workload, model="tiny-llama", model_config=config)
    profile = replace(PROFILE, workload=workload)
    commit(repository.folder / "plans/b", offloading(profile), profile)
    commit(repository.folder / "plans/c", offloading(profile), profile)
    environment = {"XDG_CACHE_HOME": str(cache)}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(SWITCH, raising=False)
        found = repository.findings(**environment)
    assert (repository.folder / "forged").exists()
    for name in ("b", "c"):
        assert found[name]["verdict"] == "failed", found[name]
        assert found[name]["problem"].startswith("the model changed")


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
ALIKE = {
    "p": "\u0440\u03c1\uff50\U0001d429\u1d56",
    "r": "\u0433\u1d63\uff52\u0280",
    "o": "0\u043e\u03bf\u0585\u00f6\u00ba",
    "t": "\u0442\u03c4\u1d57",
    "a": "\u0430\u03b1\u00e1\u00e4\u0251",
    "i": "1l|\u0456\u03b9\u0131\u00ef\u2170",
    "n": "\u0578\u207f\u0274",
}


def look_alikes() -> Iterator[str]:
    """Spellings of `protrain` that people may take for it: unseen characters, other letters."""
    for number, character in enumerate((*UNSEEN, "\U000e0061", "\U000e0100", "\u0301")):
        yield "protrain"[: number % 8] + character + "protrain"[number % 8 :]
    for place, letter in enumerate("protrain"):
        for other in ALIKE[letter]:
            yield "protrain"[:place] + other + "protrain"[place + 1 :]
    yield "".join(ALIKE[letter][1] if letter in "oai" else letter for letter in "protrain")


@pytest.mark.parametrize("spelling", look_alikes(), ids=ascii)
def test_no_look_alike_of_the_key_hides_a_plan_or_a_budget(spelling: str, tmp_path: Path) -> None:
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
def test_words_of_other_languages_are_no_look_alikes(words: str, tmp_path: Path) -> None:
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
        == f"this link leads out of the folder, to {outside}"
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
        str(tmp_path / "plans"): "2 plans are expected, and 1 are checked"
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
        problem="this cannot be checked: a mistake of protrain's: ZeroDivisionError()"
    )


@pytest.mark.parametrize("redirection", [">&-", "> /dev/full"])
def test_a_verdict_that_cannot_be_printed_is_none(redirection: str, tmp_path: Path) -> None:
    commit(tmp_path / "plans/a")
    command = f"'{PROTRAIN}' check --records-only {redirection}"
    result = ran("sh", "-c", command, folder=tmp_path)
    assert result.returncode


SEARCHED = ("", ":", ":src", "src::lib", "src", ".", "lib/../src/.:", "FOLDER", "FOLDER/link:/")


@pytest.mark.parametrize("searched", SEARCHED)
def test_modules_in_the_working_directory_are_not_ours(
    searched: str, repository: Repository
) -> None:
    """Neither by the command nor by `python -m`, where the package is installed.

    But what Python itself imports at its start is Python's matter, and what of us it finds.
    """
    repository.commit("a", "gone:factory")
    shadow = (repository.folder / "yaml.py").read_text()
    for name in ("sitecustomize.py", "protrain_plan/__init__.py", "protrain_plan/cli.py"):
        (repository.folder / name).unlink()
    (repository.folder / "protrain_plan").rmdir()
    for folder in (".", "src", "lib"):
        (repository.folder / folder).mkdir(exist_ok=True)
        for name in ("yaml", "torch", "traceback", "difflib", "json", "attr", "shellingham"):
            (repository.folder / folder / f"{name}.py").write_text(shadow)
    (repository.folder / "link").symlink_to("src")
    (repository.folder / "src/below").mkdir()
    (repository.folder / ".git").mkdir()
    by_module = (sys.executable, "-m", "protrain_plan.cli")
    result = ran(
        *(by_module if searched in ("", ":src", ".") else (PROTRAIN,)),
        *("check", "--records-only", repository.folder / "plans"),
        folder=repository.folder / ("src/below" if "FOLDER" in searched else "."),
        PYTHONPATH=searched.replace("FOLDER", str(repository.folder)),
    )
    assert (result.returncode, result.stderr) == (0, ""), result


@pytest.mark.parametrize("step", ["Check", "Compare"])
def test_the_action_s_python_imports_nothing_of_the_working_directory(
    step: str, repository: Repository
) -> None:
    """At its own start neither, and of ours neither."""
    repository.commit("a", "gone:factory")
    for name in ("re", "usercustomize"):
        (repository.folder / f"{name}.py").write_text((repository.folder / "yaml.py").read_text())
    version(repository.folder)
    plan = repository.folder / "plans/a/plan.yaml"
    plan.write_text(wrong(plan.read_text()))
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    [run] = [one for one in action["runs"]["steps"] if one.get("name") == step]
    result = bash(
        run["run"],
        folder=repository.folder,
        **dict.fromkeys(run["env"], "")
        | {"BASE": "main", "PLANS": "plans", "RECORDS_ONLY": "true", "PYTHONPATH": ":src"}
        | {"RUNNER_TEMP": str(repository.folder), "GITHUB_STEP_SUMMARY": "/dev/null"},
    )
    assert (result.returncode, result.stderr) == (int(step == "Check"), ""), result


@pytest.mark.parametrize("searched", ["src", ":src", "FOLDER/src"])
def test_models_are_found_where_modules_are_not_ours(searched: str, tmp_path: Path) -> None:
    commit_good(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "good.py").rename(tmp_path / "src/good.py")
    for name in ("yaml", "torch"):  # which are imported before any model's code
        (tmp_path / f"src/{name}.py").write_text(f"open({str(tmp_path / 'shadowed')!r}, 'w')")
    path = searched.replace("FOLDER", str(tmp_path))
    result = ran(PROTRAIN, "check", "--strict", folder=tmp_path, PYTHONPATH=path)
    assert (result.returncode, result.stderr) == (0, ""), result
    assert not (tmp_path / "shadowed").exists()
