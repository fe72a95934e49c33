"""Imports run one way, and planning does not wait for PyTorch. Read from the syntax trees."""

import ast
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protrain_plan.cache import SWITCH
from protrain_plan.commands.option_records import WorkloadOptions
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.presets import read_config
from protrain_plan.profiling.shipped import shipped
from protrain_plan.profiling.tally import dumps_tally
from tests.support.checking_cases import commit
from tests.support.commands import ROOT, ran
from tests.support.planning_cases import decoder, tally_of

# The floors of the house, from the ground up: a room imports rooms of lower floors, never one of
# its own floor or above. A folder of a package is a room of its own ("planning/model").
FLOORS: tuple[tuple[str, ...], ...] = (
    ("contract", "contract/escaping", "garbage"),
    ("contract/errors",),
    ("contract/units",),
    ("contract/records",),
    ("contract/program",),
    ("__init__", "cache", "simulation", "runtime/devices", "isolated"),
    ("runtime/ranks",),
    ("runtime/states",),
    ("runtime/activations",),
    ("runtime/engine",),
    ("runtime/model",),
    ("runtime/checkpoint", "runtime/diagnostics"),
    ("runtime/preparation",),
    ("runtime",),
    ("runtime/integrations", "models"),
    # What is measured goes through the runtime's own boundaries, meters and stores.
    ("hardware",),
    ("profiling/structure",),
    ("profiling/memory",),
    ("profiling",),
    ("planning",),
    ("planning/model",),
    ("planning/search",),
    ("planning/explain",),
    ("planning/questions",),
    ("planning/stages",),
    ("checking",),
    ("presentation",),
    ("presentation/checks", "presentation/report"),
    ("commands",),
    ("cli",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# The runtime is `runtime`, its top floor what `import protrain_runtime` gives. It imports nothing
# of the planner. What neither says: these never import those, although they are higher.
NEVER = {
    "planning": {"runtime", "models", "hardware", "profiling"},
    "presentation": {"runtime", "models", "hardware", "profiling"},
}
# What a room may name in annotations only (under `if TYPE_CHECKING:`), besides.
NAMED = {"presentation": {"models", "commands", "planning/questions"}}
TORCH = {"torch", "transformers", "peft", "accelerate"}  # all of them import torch
WITH_TORCH = (
    "protrain_plan.hardware.operator_log",
    "protrain_plan.hardware.operators",
    "protrain_plan.hardware.kept_probes",
    "protrain_plan.hardware.probe",
    "protrain_plan.hardware.overheads",
    "protrain_plan.hardware.speeds",
    "protrain_plan.models",
    "protrain_plan.profiling",
    "protrain_plan.commands.launched",
    "protrain_plan.commands.training",
)

FILES = sorted([*ROOT.glob("protrain_plan/**/*.py"), *ROOT.glob("runtime/**/*.py")])


def module_name(file: Path) -> str:
    """`protrain_plan.planning.outcome` of protrain_plan/planning/outcome.py."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "runtime" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The part of the project that a module belongs to: `planning/model`, `contract/records`."""
    package, *rest = module.split(".")
    if rest[:1] == ["contract"]:
        name = "/".join(rest[:2])
        return name if name in FLOOR else "contract"
    if package == "protrain_runtime":
        name = "/".join(("runtime", *rest[:1]))
        return name if name in FLOOR else "runtime"
    if not rest:
        return "__init__"
    name = "/".join(rest[:2])
    return name if name in FLOOR else rest[0]


def imported(file: Path) -> Iterator[str]:
    """The modules that a file imports when it runs, inside functions too."""
    return _imports(ast.parse(file.read_text()), file, for_types=False)


def named(file: Path) -> Iterator[str]:
    """The modules that a file imports for type checkers alone."""
    return _imports(ast.parse(file.read_text()), file, for_types=True)


def _imports(tree: ast.AST, file: Path, *, for_types: bool, inside: bool = False) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            assert not node.orelse, f"{file}: what runs without a type checker stands outside"
            yield from _imports(node, file, for_types=for_types, inside=True)
        elif isinstance(node, ast.Import) and inside == for_types:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and inside == for_types:
            assert node.level == 0, f"{file}: relative imports hide where they point"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from _imports(node, file, for_types=for_types, inside=inside)


def is_ours(module: str) -> bool:
    return module.split(".")[0] in ("protrain_plan", "protrain_runtime")


def may_use_torch(module: str) -> bool:
    return room(module).split("/")[0] == "runtime" or any(
        module == prefix or module.startswith(f"{prefix}.") for prefix in WITH_TORCH
    )


def test_every_room_is_there() -> None:
    assert {room(module_name(file)) for file in FILES} == FLOOR.keys()


def budgets() -> dict[str, int]:
    """The most lines of each row of rooms, as CONTRIBUTING.md has them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| (`.+?) \|.*\| ([\d,]+) \|$", text, re.MULTILINE)
    return {re.sub(r" \(.*\)", "", rooms): int(most.replace(",", "")) for rooms, most in rows}


def test_every_room_keeps_its_budget_of_lines() -> None:
    lines: Counter[str] = Counter()
    for file in ROOT.glob("protrain_plan/**/*"), ROOT.glob("runtime/**/*"):
        for path in file:
            if path.suffix in (".py", ".js", ".css", ".html"):
                lines[room(module_name(path))] += len(path.read_text(encoding="utf-8").splitlines())
    found: Counter[str] = Counter()
    for rooms in budgets():
        for name in re.findall(r"`(.+?)`", rooms):
            found[rooms] += sum(n for one, n in lines.items() if f"{one}/".startswith(f"{name}/"))
    assert sum(lines.values()) - sum(found.values()) < 200  # of packages themselves
    assert {rooms: n for rooms, n in found.items() if n > budgets()[rooms]} == {}


def test_every_folder_says_what_it_is_for() -> None:
    for file in (file for file in FILES if file.name == "__init__.py"):
        assert ast.get_docstring(ast.parse(file.read_text())), file


def outside(file: Path) -> Iterator[str]:
    """Modules that a file imports of rooms that are not below its own."""
    here = room(module_name(file))
    never = NEVER.get(here.split("/")[0], set())
    for names, besides in (
        (imported(file), set()),
        (named(file), NAMED.get(here.split("/")[0], set())),
    ):
        for name, there in ((name, room(name)) for name in names if is_ours(name)):
            above = FLOOR[there] >= FLOOR[here] or there.split("/")[0] in never
            if above and there not in {here} | besides:
                yield name
    if file.is_relative_to(ROOT / "runtime"):
        yield from (name for name in imported(file) if name.split(".")[0] == "protrain_plan")


def test_imports_run_one_way() -> None:
    found = {module_name(file): [*outside(file)] for file in FILES}
    assert {module: names for module, names in found.items() if names} == {}


def test_torch_is_imported_where_models_run() -> None:
    found = {
        module_name(file): [name for name in imported(file) if name.split(".")[0] in TORCH]
        for file in FILES
    }
    wrong = {module: names for module, names in found.items() if names}
    assert [module for module in wrong if not may_use_torch(module)] == []


def run_without_torch(script: str, *args: str, folder: Path = ROOT) -> tuple[int, str]:
    """Exit code and standard error of `script`, in a process that must not load torch."""
    check = f"import sys; loaded = {TORCH} & sys.modules.keys(); assert not loaded, loaded"
    path, code = os.pathsep.join((str(ROOT), str(ROOT / "runtime"))), f"{script}\n{check}"
    result = ran(sys.executable, "-c", code, *args, folder=folder, PYTHONPATH=path)
    return result.returncode, result.stderr


@pytest.mark.nightly
def test_modules_without_torch_import_none_that_has_it() -> None:
    modules = [name for name in map(module_name, FILES) if not may_use_torch(name)]
    script = f"""
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded = {TORCH} & sys.modules.keys()
    assert not loaded, f"{{name}} imports {{loaded}}"
"""
    assert run_without_torch(script, *modules) == (0, "")


CLI = """
import sys
from protrain_plan.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""


HELP = """
import sys
from protrain_plan.cli import app
for command in sys.argv[1:]:
    app([*command.split(), "--help"], standalone_mode=False)
ours = {name for name in sys.modules if name.startswith(("protrain_plan", "protrain_runtime"))}
commands = (
    *("check", "fit", "help", "machines", "option_records", "options", "output", "plan", "plans"),
    *("profile", "run", "staging"),
)
light = (
    *("commands", "cli", "garbage"),
    *("presentation", "presentation.terminal"),
    *("isolated", "isolated.ending"),
)
allowed = {"protrain_plan", "protrain_runtime", "protrain_runtime.contract"}
allowed |= {f"protrain_runtime.contract.{name}" for name in ("errors", "escaping", "units")}
allowed |= {f"protrain_plan.{name}" for name in light}
allowed |= {f"protrain_plan.commands.{name}" for name in commands}
assert ours <= allowed, ours - allowed
heavy = {"yaml", "numpy", "scipy", "highspy", "multiprocessing", "asyncio", "concurrent.futures"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
COMMANDS = (
    *("profile", "fit", "plan", "show", "simulate", "report", "run", "check", "diff", "export"),
    *("models", "hardware", "hardware list", "hardware show", "hardware probe"),
    "hardware search",
)


@pytest.mark.nightly
def test_help_waits_for_nothing_that_a_command_needs() -> None:
    assert run_without_torch(HELP, "", *COMMANDS) == (0, "")


OF_RECORDS = """
hardware list
hardware show h100-sxm
models
check --records-only .
show plan.yaml
simulate plan.yaml
report plan.yaml -o page.html
diff plan.yaml plan.yaml
export plan.yaml --to trl -o trl.yaml
plan profile.yaml -o new.yaml
"""


@pytest.mark.nightly(
    but=("models", "diff plan.yaml plan.yaml", "export plan.yaml --to trl -o trl.yaml")
)
@pytest.mark.parametrize("command", OF_RECORDS.strip().splitlines())
def test_what_reads_records_does_not_wait_for_torch(command: str, tmp_path: Path) -> None:
    commit(tmp_path)
    assert run_without_torch(CLI, *command.split(), folder=tmp_path) == (0, "")
    _, written, name = command.partition(" -o ")
    assert not written or (tmp_path / name).is_file()


# With the command line's settings of libraries, which are in the name of what is kept.
KEEP = """
import json, sys
import protrain_plan.cli
from protrain_plan.profiling.estimate_cache import EstimateCache, EstimateRequest
from protrain_plan.profiling.tally import loads_tally
tally = loads_tally(sys.argv[1])
workload = tally.profile.workload
config = json.loads(workload.model_config)
question = EstimateRequest.of(workload, tally.profile.optimizer.name, config)
EstimateCache().keep_tally(question, tally)
"""


@pytest.mark.nightly
def test_answers_from_known_estimates_do_not_wait_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, machines = json.dumps(read_config("tiny-llama")), ("rtx-4090", "h200")
    profile = decoder(blocks=2, hardware=load_hardware(machines[0]))
    asked = replace(profile.workload, model="tiny-llama", model_config=config)
    tally = tally_of(replace(profile, workload=asked, method="estimated"))
    assert run_without_torch(KEEP, dumps_tally(tally)) == (0, "")
    # What is imported is told by every process, those that plan included.
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    command = ("fit", "tiny-llama", "--on", ",".join(machines), "--json")
    sizes = ("--seq-len", str(asked.seq_len), "--batch-size", str(asked.batch_size))
    kinds = ("--dtype", asked.dtype, "--precision", asked.precision)
    planner = {"protrain_plan.planning.questions.objectives", "highspy"}
    for is_known in (False, True):  # when it is repeated, nothing is planned
        code, told = run_without_torch(CLI, *command, *sizes, *kinds)
        assert code == 0, told
        modules = {line.rpartition("|")[2].strip() for line in told.splitlines()}
        assert planner & modules == (set() if is_known else planner)
        assert not TORCH & modules


@pytest.mark.nightly
def test_a_preset_that_is_shipped_does_not_wait_for_torch() -> None:
    (request,) = WorkloadOptions().requests("smollm2-135m", [2048], [1])
    question = request.question()
    if question is None or shipped(question) is None:
        pytest.skip("other versions of PyTorch or transformers: none is used")
    command = ("fit", "smollm2-135m", "--on", "h100-sxm", "--json", "--no-cache")
    assert run_without_torch(CLI, *command) == (0, "")


@pytest.mark.nightly
def test_no_test_imports_another() -> None:
    """Shared parts are in `tests/support`: a question has one home, and a file may be moved."""
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sorted(ROOT.glob("tests/**/*.py"))
        for name in imported(file)
        if name.startswith("tests.") and ".test_" in name
    ]
    assert wrong == []
