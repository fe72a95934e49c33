"""Imports run one way, and planning does not wait for PyTorch. Read from the syntax trees."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protrain_plan.records import write_profile
from tests.checking_cases import commit
from tests.planning_cases import MB, cpu, decoder

ROOT = Path(__file__).parent.parent
BASE = {"errors", "units"}
ABOVE_PROGRAM = BASE | {"records", "program", "compiling"}
# What each room of protrain_plan may import besides itself; cli is at the top.
ALLOWED = {
    "__init__": set[str](),
    "errors": set[str](),
    "units": {"errors"},
    "records": BASE,
    "program": BASE | {"records"},
    "compiling": BASE | {"records", "program"},
    # Decided: what a model is built with starts from a seed, on every accelerator too.
    "models": BASE | {"records", "runtime"},
    "hardware": BASE | {"records", "models", "runtime"},
    # Decided: a measured profile looks through the runtime's own boundaries and meters, so that
    # what it counts is what a run meets.
    # And it holds a step that it ran beside the simulated one, to say how sure seconds are.
    "profiling": ABOVE_PROGRAM | {"hardware", "models", "runtime", "simulation"},
    "simulation": ABOVE_PROGRAM,
    "planning": ABOVE_PROGRAM | {"simulation"},
    "fitting": BASE | {"records", "planning", "simulation"},
    "reporting": ABOVE_PROGRAM | {"simulation"},
    # Checks read records; the model is looked at, and torch imported, inside one function.
    "checking": ABOVE_PROGRAM
    | {"simulation", "planning", "hardware", "models", "profiling", "runtime"},
    "rendering": BASE | {"records", "planning", "simulation"},
    "running": BASE | {"records", "models", "runtime", "simulation"},
    "commands": ABOVE_PROGRAM
    | {"checking", "fitting", "hardware", "models", "profiling", "simulation", "planning"}
    | {"rendering", "reporting", "running", "runtime"},
    "cli": BASE | {"commands", "rendering"},
    # runtime/protrain_runtime, which stands beside. Decided: what it records is written in the
    # simulated timeline's format, to be laid over it.
    "runtime": ABOVE_PROGRAM | {"simulation"},
}
# What a room may name in annotations only (under `if TYPE_CHECKING:`), besides.
NAMED = {"rendering": {"fitting", "models", "running"}}
TORCH = {"torch", "transformers", "peft", "accelerate"}  # all of them import torch
WITH_TORCH = (
    "protrain_plan.hardware.interference",
    "protrain_plan.hardware.joined",
    "protrain_plan.hardware.overheads",
    "protrain_plan.hardware.probe",
    "protrain_plan.hardware.rates",
    "protrain_plan.models",
    "protrain_plan.profiling",
    "protrain_plan.running",
)

FILES = sorted([*ROOT.glob("protrain_plan/**/*.py"), *ROOT.glob("runtime/**/*.py")])


def module_name(file: Path) -> str:
    """`protrain_plan.records.plan` of protrain_plan/records/plan.py."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "runtime" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The part of the project that a module belongs to."""
    package, *rest = module.split(".")
    if package == "protrain_runtime":
        return "runtime"
    return rest[0] if rest else "__init__"


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
    return room(module) == "runtime" or any(
        module == prefix or module.startswith(f"{prefix}.") for prefix in WITH_TORCH
    )


def test_every_room_is_there() -> None:
    assert {room(module_name(file)) for file in FILES} == ALLOWED.keys()


@pytest.mark.parametrize("file", FILES, ids=lambda file: module_name(file))
def test_imports_run_one_way(file: Path) -> None:
    module = module_name(file)
    allowed = ALLOWED[room(module)] | {room(module)}

    def wrong(names: Iterator[str], rooms: set[str]) -> list[str]:
        # `from protrain_plan import __version__` reads the package itself, which is fine.
        rooms = rooms | {"__version__"}
        return [name for name in names if is_ours(name) and room(name) not in rooms]

    assert wrong(imported(file), allowed) == []
    assert wrong(named(file), allowed | NAMED.get(room(module), set())) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: module_name(file))
def test_torch_is_imported_where_models_run(file: Path) -> None:
    module = module_name(file)
    wrong = [name for name in imported(file) if name.split(".")[0] in TORCH]
    assert may_use_torch(module) or wrong == []


def run_without_torch(script: str, *args: str) -> tuple[int, str]:
    """Exit code and standard error of `script`, in a process that must not load torch."""
    check = f"import sys; loaded = {TORCH} & sys.modules.keys(); assert not loaded, loaded"
    result = subprocess.run(
        [sys.executable, "-c", f"{script}\n{check}", *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "runtime")))},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return result.returncode, result.stderr


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


COMMANDS = ("plan", "show", "simulate", "report", "run")


@pytest.mark.parametrize(
    "args", [("--help",), *((name, "--help") for name in COMMANDS)], ids=" ".join
)
def test_help_does_not_wait_for_torch(args: tuple[str, ...]) -> None:
    assert run_without_torch(CLI, *args) == (0, "")


@pytest.mark.parametrize("args", [("list",), ("show", "h100-sxm")], ids=" ".join)
def test_the_catalogue_of_machines_does_not_wait_for_torch(args: tuple[str, ...]) -> None:
    assert run_without_torch(CLI, "hardware", *args) == (0, "")


def test_checking_records_does_not_wait_for_torch(tmp_path: Path) -> None:
    commit(tmp_path / "plans")
    assert run_without_torch(CLI, "check", "--records-only", str(tmp_path / "plans")) == (0, "")


def test_planning_does_not_wait_for_torch(tmp_path: Path) -> None:
    profile, plan = tmp_path / "profile.yaml", tmp_path / "plan.yaml"
    write_profile(decoder(blocks=2, hardware=cpu()), profile)
    budget = ("--device-memory", f"{5000 * MB}")
    assert run_without_torch(CLI, "plan", str(profile), "-o", str(plan), *budget) == (0, "")
    assert plan.is_file()
