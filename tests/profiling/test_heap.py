"""Profiles write to no memory that is not theirs.

The allocator of `tests/support/heap_guard.c` looks, and ends the process where one does. `make
heap` runs the tests of the whole zoo under it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("the allocator stands on glibc's", allow_module_level=True)

_ROOT = Path(__file__).parents[2]
_COPY_OF_A_COUNT = """
import gc, torch
from copy import deepcopy
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    constant, copied = torch.tensor(1.0), deepcopy(torch.empty(2))
del constant, copied
gc.collect()
"""
"""PyTorch's own mode: what `FakeMode` is for. Where it is mended there, that can go."""

_PAST_THE_END = (
    "import ctypes; t = ctypes.create_string_buffer(900); ctypes.memset(t, 0, 901); del t"
)

_PROFILES = """
import gc, torch
from protrain_plan.profiling.unit_by_unit import sketched
from protrain_plan.models.sources import load_source
from protrain_runtime.states.update_rules import UpdateRules
from tests.support.copying_models import COPYING, Copying
from tests.support.estimates import asked
told = 0
for name in COPYING:
    source = load_source(f"tests.support.copying_models:{name}")
    workload, _ = asked(source, batch_size=1, seq_len=1, dtype="float32")
    try:
        sketched(source, workload, text=None)
    except Exception as error:  # lengths are values that a sketch has not
        told += 1
    gc.collect()
assert told < len(COPYING)
rules = UpdateRules(Copying)
for rows in (3000, 3001):
    rules.of(torch.float32, torch.Size([rows, 8]))
    gc.collect()
print("profiled")
"""


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    source = _ROOT / "tests/support/heap_guard.c"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def guarded(code: str, guard: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    """The code in a process of its own, under the allocator."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        check=False,
        text=True,
        cwd=_ROOT,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "LD_PRELOAD": str(guard),
            "PYTHONMALLOC": "malloc",
        },
    )


@pytest.mark.nightly("code0-words0")
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (_COPY_OF_A_COUNT, ("a write to freed memory", "freed twice")),
        (_PAST_THE_END, ("a write past",)),
    ],
)
def test_what_the_allocator_finds(
    code: str, words: tuple[str, ...], guard: Path, tmp_path: Path
) -> None:
    told = guarded(code, guard, tmp_path)
    assert told.returncode < 0
    assert any(f"heap_guard: {word}" in told.stderr for word in words)


@pytest.mark.nightly
def test_profiles_of_models_and_optimizers_that_copy_tensors_write_only_to_their_memory(
    guard: Path, tmp_path: Path
) -> None:
    told = guarded(_PROFILES, guard, tmp_path)
    assert (told.returncode, told.stdout) == (0, "profiled\n"), told.stderr
