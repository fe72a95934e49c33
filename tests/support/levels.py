"""Tests of bytes and peaks with fewer of the processor's instructions: `make levels`.

Kernels are chosen by them, PyTorch's own (`ATEN_CPU_CAPABILITY`) and oneDNN's
(`ONEDNN_MAX_CPU_ISA`), and take other memory while they run.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
FILES = (
    *(
        f"tests/profiling/test_{name}.py"
        for name in ("scratch", "tracking", "values", "elision", "unit_by_unit", "estimated")
    ),
    "tests/runtime/test_peaks.py",
)
LEVELS = (("default", "SSE41"), ("default", "AVX"), ("avx2", "AVX2"), ("avx512", "AVX512_CORE"))


def known() -> list[tuple[str, str]]:
    """The levels of which this processor has all instructions."""
    names = [name for name, _ in LEVELS]
    own = torch.backends.cpu.get_cpu_capability().lower()
    most = names.index(own) if own in names else 0
    return [level for level in LEVELS if names.index(level[0]) <= most]


def environment(level: tuple[str, str]) -> dict[str, str]:
    aten, onednn = level
    return {**os.environ, "ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}


def main() -> int:
    """Run them at every level up to the processor's own; 1 if any fails."""
    command = (sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu", *FILES)
    failed = False
    for level in known():
        print(f"--- {' '.join(level)}", flush=True)
        ran = subprocess.run(command, cwd=ROOT, env=environment(level), check=False)
        failed |= ran.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
