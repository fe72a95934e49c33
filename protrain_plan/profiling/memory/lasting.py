"""Tensors that last between steps: a model's own state, and other tensors."""

import gc
from collections.abc import Callable, Iterable, Set
from itertools import chain

import torch
from torch import nn

from protrain_plan.models.batches import Batch
from protrain_plan.profiling.structure.rerun import held_tensors
from protrain_runtime.activations.trees import tensors_in
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import (
    device_of,
    reachable,
    storage_bytes,
    storages_of,
    strided_parts,
)

_ELSEWHERE = "what its code holds besides its attributes"
_MOST_STEPS = 16
"""Growth beyond this is taken as unbounded: longer memories are refused."""


class Lasting:
    """The tensors in a model's attributes at the start, and their later changes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._tensors()  # held, so that their identities are not reused
        self._bytes = self._sizes()

    def num_bytes(self, *, block: int = 1) -> int:
        """Present bytes in attributes; each storage in whole blocks of `block`.

        Tensors that keep gradients count four times: with the gradient, and both again while the
        loop's last loss, whose graph holds the old ones, lives.
        """
        held = [tensor for tensors in self._attributes().values() for tensor in tensors]
        keeping = [t for t in held if t.requires_grad and (t.is_leaf or t.retains_grad)]
        return storage_bytes(held, block=block) + 3 * storage_bytes(keeping, block=block)

    def num_steps(self, step: Callable[[], object]) -> int:
        """Steps until all replaced tensors are replaced; 0: none. A queue of three takes three."""
        first = self._tensors()
        left = identities(chain(*first.values()))
        if left == identities(chain(*self._before.values())):
            return 0
        for number in range(_MOST_STEPS):
            step()
            still = left & identities(chain(*self._tensors().values()))
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
        """The tensors in attributes on the model's device."""
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


def added_bytes(before: Iterable[torch.Tensor], batch: Batch) -> int:
    """Bytes of host tensors, such as a data set's, besides a batch's and those of `before`."""
    known = storages_of([*before, *tensors_in(batch)]).keys()
    gc.collect()
    return _bytes_besides(reachable(devices.HOST), known)


def _bytes_besides(tensors: Iterable[torch.Tensor], known: Set[int]) -> int:
    """Bytes of the tensors' storages, except known ones."""
    found = storages_of(tensors)
    return sum(storage.nbytes() for key, storage in found.items() if key not in known)


def identities(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Identities of the tensors' live storages; fake tensors have no addresses."""
    return {int(part.untyped_storage()._cdata) for part in strided_parts(tensors)}
