"""Settings that must hold before torch is imported, the same as on the command line."""

import os

# A lane's waiting threads must not spin on the processors that compute; the profiler's allocator
# warnings are about blocks that we know of.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import pytest
from hypothesis import settings

# The same examples in every run, and none that fails for being slow on a busy machine.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-golden", action="store_true", help="write the files in tests/golden anew"
    )
