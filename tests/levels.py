"""Tests of bytes and peaks with fewer of the processor's instructions: `make levels`.

Kernels are chosen by them, PyTorch's own (`ATEN_CPU_CAPABILITY`) and oneDNN's
(`ONEDNN_MAX_CPU_ISA`), and take other memory while they run. oneDNN stays at AVX2 and above: its
convolutions below that take more than their bounds (see `profiling/onednn_workspaces.py`).
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

FILES = ("tracking", "values", "elision", "unit_by_unit", "peaks")
LEVELS = (("default", "AVX2"), ("avx2", "AVX2"), ("avx512", "AVX512_CORE"))


def main() -> int:
    """Run them at every level up to the processor's own; 1 if any fails."""
    names = [name for name, _ in LEVELS]
    own = torch.backends.cpu.get_cpu_capability().lower()
    known = LEVELS[: names.index(own) + 1] if own in names else LEVELS[:1]
    files = [f"tests/test_{name}.py" for name in FILES]
    failed = False
    for aten, onednn in known:
        print(f"--- {aten}", flush=True)
        levels = {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
        command = (sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu", *files)
        root = Path(__file__).parent.parent
        ran = subprocess.run(command, cwd=root, env=os.environ | levels, check=False)
        failed |= ran.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
