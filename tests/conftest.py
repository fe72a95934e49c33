"""Settings that must hold before torch is imported, the same as on the command line."""

import gc
import os
import zlib
from collections.abc import Callable
from pathlib import Path

# A lane's waiting threads must not spin on the processors that compute; the profiler's allocator
# warnings are about blocks that we know of.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import pytest
from hypothesis import settings

from tests.emulated import building

# The same examples in every run, and none that fails for being slow on a busy machine.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


EMULATED_EVERY = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-golden", action="store_true", help="write the files in tests/golden anew"
    )


@pytest.hookimpl(tryfirst=True)  # before some are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of what the CPU is asked, the emulated device is asked a part in every run, all at night."""
    for item in items:
        if not (isinstance(item, pytest.Function) and item.get_closest_marker("emulated")):
            continue
        elsewhere = item.function.__module__ != item.module.__name__
        table = item.originalname.startswith("test_rows_of_the_parity_matrix")
        if (elsewhere or table) and zlib.crc32(item.name.encode()) % EMULATED_EVERY:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Autograd counts the devices at the first backward: the emulated ones have to be there.

    And let the garbage collector look at what tests make, and not at all that was imported: every
    measured step collects garbage, which took 0.4 s with PyTorch and transformers.
    """
    chosen = any(item.get_closest_marker("emulated") for item in session.items)
    if chosen and not session.config.option.collectonly and building.compiler() is not None:
        from tests.emulated.device import extension

        extension()
    gc.collect()
    gc.freeze()


@pytest.fixture
def assert_golden(request: pytest.FixtureRequest) -> Callable[[str | Path, str], None]:
    """Compares a text with a file in tests/golden, but for blanks at the ends of lines."""

    def compare(path: str | Path, text: str) -> None:
        file = Path(__file__).parent / "golden" / path
        found = "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())
        if request.config.getoption("--write-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(found, encoding="utf-8")
        assert found == file.read_text(encoding="utf-8")

    return compare
