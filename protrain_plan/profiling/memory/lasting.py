"""Tensors that stand from one step to the next: what a model keeps, and what is none of its own."""

import gc
from collections.abc import Callable, Iterable, Set

import torch
from torch import nn

from protrain_plan.models.batches import Batch
from protrain_plan.profiling.structure.rerun import held_tensors
from protrain_runtime.activations.trees import tensors_in
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import device_of, reachable, storage_bytes, storages_of

_ELSEWHERE = "what its code holds besides its attributes"
_MOST_STEPS = 16
"""After which what still grows is taken to grow on: a memory of more steps is refused."""


class Lasting:
    """The tensors in a model's attributes when this is made, and what becomes of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._tensors()  # held, so that no other takes an identity
        self._bytes = self._sizes()

    def num_bytes(self, *, block: int = 1) -> int:
        """Bytes of all that attributes hold now; each storage in whole blocks of `block`.

        One that keeps its gradient counts four times: with its gradient, and both again while the
        loop has a name for the last loss, whose graph holds the old ones.
        """
        held = [tensor for tensors in self._attributes().values() for tensor in tensors]
        keeping = [t for t in held if t.requires_grad and (t.is_leaf or t.retains_grad)]
        return storage_bytes(held, block=block) + 3 * storage_bytes(keeping, block=block)

    def num_steps(self, step: Callable[[], object]) -> int:
        """Steps until all replaced tensors are replaced; 0: none. A queue of three takes three."""
        first = self._tensors()
        left = _identities(first)
        if left == _identities(self._before):
            return 0
        for number in range(_MOST_STEPS):
            step()
            still = left & _identities(self._tensors())
            if still == left and number:
                return number
            left = still
        return _MOST_STEPS

    def refuse_growth(self, step: Callable[[], object]) -> None:
        """ProtrainError, naming the attribute, where `step` after step leaves more tensors.

        Those that the model's code holds elsewhere (in a global, a closure) count, too; fake ones
        are seen in attributes alone.
        """
        before = self._bytes
        for _ in range(_MOST_STEPS):
            present = self._sizes()
            grown = {path: size - before.get(path, 0) for path, size in present.items()}
            if max(grown.values(), default=0) <= 0:
                return
            before = present
            step()
        path, size = max(grown.items(), key=lambda item: item[1])
        raise ProtrainError(
            f"{path} holds {format_bytes(size)} more after every step: no plan can bound that",
            fix="keep numbers in place of tensors (tensor.item()), or a fixed number of steps",
        )

    def _sizes(self) -> dict[str, int]:
        sizes = {path: storage_bytes(held) for path, held in self._tensors().items()}
        return sizes | {_ELSEWHERE: other_bytes(self._model)}

    def _tensors(self) -> dict[str, list[torch.Tensor]]:
        buffers = {path: [buffer] for path, buffer in self._model.named_buffers()}
        return self._attributes() | buffers

    def _attributes(self) -> dict[str, list[torch.Tensor]]:
        """The tensors in attributes that are where the model is."""
        device = device_of(self._model)
        held = held_tensors(self._model).items()
        found = {path: [t for t in tensors if t.device == device] for path, tensors in held}
        return {path: tensors for path, tensors in found.items() if tensors}


def other_bytes(model: nn.Module) -> int:
    """Bytes on the model's device of other reachable tensors: mostly its data."""
    gc.collect()
    own = [*model.parameters(), *model.buffers()]
    own += [p.grad for p in model.parameters() if p.grad is not None]
    own += [tensor for held in held_tensors(model).values() for tensor in held]
    return _bytes_besides(reachable(device_of(model)), storages_of(own).keys())


class Loaded:
    """The bytes that a source brings into host memory from here on, such as a data set."""

    def __init__(self) -> None:
        self._held = reachable(devices.HOST)  # so that no other takes an identity
        self._before = storages_of(self._held).keys()

    def num_bytes(self, batch: Batch) -> int:
        """Bytes of the tensors there that have come since, but for a batch."""
        known = self._before | storages_of(tensors_in(batch)).keys()
        gc.collect()
        return _bytes_besides(reachable(devices.HOST), known)


def _bytes_besides(tensors: Iterable[torch.Tensor], known: Set[int]) -> int:
    """Bytes of the storages behind tensors but for the known ones."""
    found = storages_of(tensors)
    return sum(storage.nbytes() for key, storage in found.items() if key not in known)


def _identities(tensors: dict[str, list[torch.Tensor]]) -> set[int]:
    return set(storages_of(tensor for held in tensors.values() for tensor in held))
