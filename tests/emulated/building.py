"""The extension of the emulated device, compiled by the C++ compiler that is there."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
SOURCES = tuple(sorted((HERE / "src").glob("*.cpp")))
NAME = "emulated_device"
FLAGS = (
    *("-O1", "-std=c++20", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-w"),
    *("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", f"-DTORCH_EXTENSION_NAME={NAME}"),
)


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def load() -> ModuleType:
    """The extension; compiled where it was not, for this PyTorch, from these sources.

    Takes half a minute on two cores, once: processes that ask at the same time wait for the first.
    """
    folder = HERE / ".build" / _digest()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{NAME}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(folder, library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digest() -> str:
    found = hashlib.sha256(f"{torch.__version__} {FLAGS}".encode())
    for file in (*SOURCES, *sorted((HERE / "src").glob("*.h"))):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _compile(folder: Path, library: Path) -> None:
    gxx = compiler()
    assert gxx is not None, "no C++ compiler"
    torch_folder = Path(torch.__file__).parent
    headers = (
        torch_folder / "include",
        torch_folder / "include/torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    )
    command = (gxx, *FLAGS, *(f"-I{header}" for header in headers))
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(partial(_compile_one, command, folder), SOURCES))
    made, where = library.with_suffix(".part"), torch_folder / "lib"
    libraries = ("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", f"-Wl,-rpath,{where}")
    files = (*map(str, objects), "-o", str(made))
    _run((gxx, "-shared", "-fopenmp", *files, f"-L{where}", *libraries))
    made.replace(library)


def _compile_one(command: tuple[str, ...], folder: Path, source: Path) -> Path:
    compiled = folder / f"{source.stem}.o"
    _run((*command, "-c", str(source), "-o", str(compiled)))
    return compiled


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
