"""Models from the user's own code: `package.module:factory`, `path/to/file.py:factory`."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.models.adapters import adapted
from protrain_plan.models.batches import Batch, batch_to
from protrain_plan.models.building import (
    moved,
    no_larger_than,
    seeded,
    without_parameters,
)
from protrain_plan.models.precision import computing_in, parameter_dtype
from protrain_plan.records.profile import DType, Precision
from protrain_runtime.measure import return_freed_memory
from protrain_runtime.preflight import free_host_bytes

_SHARE_OF_FREE_MEMORY = 0.5
"""For a model that is built to see its batches alone; as much may go into the batches."""


class FactorySource:
    """`package.module:factory`: the user's function returns (module, iterable of batches).

    The working directory is searched for the package first. `path/to/file.py:factory` runs a file,
    such as a training script. The batches are the user's: batch
    size, sequence length and text of `batches` do not change them.
    """

    model_config = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self._factory = _imported(name)
        self._data: tuple[int, Iterable[object]] | None = None  # of the last build: seed, batches

    def build(
        self,
        *,
        dtype: DType = "float32",
        precision: Precision = "pure",
        adapter: str = "",
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> nn.Module:
        """The factory's model in train mode, with its adapter.

        Floating-point parameters and buffers are in the dtype that `precision` gives them.
        ProtrainError where dtype and precision do not go together, or the adapter does not fit.
        """
        stored = parameter_dtype(dtype, precision)
        model, data = self._made(seed)
        self._data = (seed, data)
        with seeded(seed):
            model = adapted(moved(model, dtype=stored), adapter, source=self.name)
        return computing_in(moved(model, device=device), dtype, precision).train()

    def batches(
        self,
        *,
        batch_size: int = 0,  # noqa: ARG002 (the signature of every source)
        seq_len: int = 0,  # noqa: ARG002
        dtype: DType = "float32",
        precision: Precision = "pure",
        device: torch.device | str = "cpu",
        text: Path | None = None,  # noqa: ARG002
        seed: int = 0,
    ) -> Iterator[Batch]:
        """The factory's batches on `device`; again from the start where they can be.

        Floating-point tensors are in the dtype of the parameters. Before `build`, the factory is
        run without memory for its model's parameters, if it can be. ProtrainError where it cannot
        and the model would take half of the host's free memory.
        """
        stored = parameter_dtype(dtype, precision)
        if self._data is None or self._data[0] != seed:
            self._data = (seed, self._batches_alone(seed))
        return (batch_to(batch, device, stored) for batch in _again_and_again(self._data[1]))

    def _batches_alone(self, seed: int) -> Iterable[object]:
        return_freed_memory()  # else the allocator keeps the room of parameters that are gone
        try:
            with without_parameters():
                return self._made(seed)[1]
        except ProtrainError:
            raise
        except Exception:  # noqa: BLE001 (the user's code, which may look at what is not there)
            with no_larger_than(int(_SHARE_OF_FREE_MEMORY * free_host_bytes()), source=self.name):
                return self._made(seed)[1]

    def _made(self, seed: int) -> tuple[nn.Module, Iterable[object]]:
        with seeded(seed):
            made = self._factory()
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise ProtrainError(
                f"the factory returned {type(made).__name__}, not (nn.Module, batches)",
                source=self.name,
            )
        model, data = made
        if not isinstance(data, Iterable):
            raise ProtrainError(
                f"the factory's batches are {type(data).__name__}, which cannot be iterated",
                source=self.name,
            )
        return model, data


def _imported(name: str) -> Callable[[], object]:
    module_name, _, attribute = name.rpartition(":")
    is_file = module_name.endswith(".py")
    try:
        module = _run_file(Path(module_name)) if is_file else _imported_module(module_name)
    except ImportError as error:
        raise ProtrainError(
            f"cannot import {module_name!r}: {error}",
            source=name,
            fix=None
            if is_file
            else "package.module:factory, with the package installed or in the working directory,"
            " or path/to/file.py:factory",
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        raise ProtrainError(
            f"{module_name} has no function {attribute!r}",
            source=name,
            fix=f"did you mean {near[0]}?" if near else None,
        )
    return factory  # type: ignore[no-any-return]


def _imported_module(name: str) -> ModuleType:
    _search_first(Path.cwd())
    return importlib.import_module(name)


def _run_file(path: Path) -> ModuleType:
    """The module that a file makes, which finds its neighbours as a script does."""
    if not path.is_file():
        raise ImportError("there is no such file")
    _search_first(path.resolve().parent)
    # A name of its own: a script may be called like an installed package.
    spec = importlib.util.spec_from_file_location(f"factory in {path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its classes are looked up
    spec.loader.exec_module(module)
    return module


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _again_and_again(data: Iterable[object]) -> Iterator[object]:
    empty = True
    for batch in data:
        empty = False
        yield batch
    while not empty and iter(data) is not data:  # a list or a loader, not a used-up iterator
        yield from data
