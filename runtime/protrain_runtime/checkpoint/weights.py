"""A checkpoint's values on their way to their planned tiers.

`prepare(..., weights=DIRECTORY)` reads each byte once: a rank reads its ranges, and its share of
replicated tensors, which it sends to the others. Damage is found during the read, and `prepare`
then undoes everything.
"""

import hashlib
from collections.abc import Set
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from protrain_runtime.checkpoint.entries import Entry, fill_values
from protrain_runtime.checkpoint.files import Sums
from protrain_runtime.checkpoint.index import Saved
from protrain_runtime.checkpoint.loading import base_name, matched
from protrain_runtime.checkpoint.saving import model_values, with_extra_state
from protrain_runtime.checkpoint.training import read_training
from protrain_runtime.model.prepared import Prepared, meet, offloaded_parameters
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.quantized import scales_of
from protrain_runtime.states.values import (
    Held,
    Target,
    Unpacked,
    num_bytes,
    scales_beside,
    unpacked_values,
)


class Weights:
    """A folder's tensors for `absent` and other parameters. ProtrainError without a checkpoint."""

    def __init__(self, directory: Path | str, absent: Set[str]) -> None:
        self._absent = absent
        self._saved = Saved(Path(directory))
        self._entries = self._saved.entries("model")

    def facts(self) -> str:
        """A digest of facts equal on all ranks: names, dtypes, shapes and places."""
        digest = hashlib.sha256()
        for name, entry in sorted(self._entries.items()):
            parts = [(part.path.name, part.start) for part in entry.parts]
            digest.update(f"{name} {entry.dtype} {entry.shape} {parts}\n".encode())
        digest.update(str(sorted(self._saved.rows.items())).encode())
        return f"{len(self._entries)} tensors ({digest.hexdigest()[:12]})"

    def fill(self, model: nn.Module, prepared: Prepared | None) -> None:
        """Read all values, cast to the model's dtype; values missing in the folder stay."""
        own: dict[str, Target] = dict(model_values(model, prepared))
        kept = {name for name, _ in model.named_parameters()} - self._absent
        found = self._entries.items()
        names = {base_name(name) for name, entry in found if entry.dtype.is_floating_point}
        offloaded = offloaded_parameters(prepared)
        for layer_name, name, unpacked in unpacked_values(model, offloaded):
            if base_name(name) in names:  # else it was saved packed, with its scales
                own[name] = unpacked
                for beside, _ in scales_beside(layer_name, unpacked.layer):
                    del own[beside]
        targets = matched(model, self._saved, own, self._entries, kept=kept, cast=True)
        ranks, sums = prepared.ranks if prepared else None, Sums(self._saved.rows)
        if ranks is None:
            fill_values(targets, sums)
        else:
            _fill_together(ranks, targets, sums)
        self._saved.verify(["model"], ranks, sums)
        modules = read_training(self._saved).modules
        for name, module in with_extra_state(model):
            if name in modules:
                module.set_extra_state(modules[name])


def _fill_together(ranks: Ranks, targets: list[tuple[Entry, Target]], sums: Sums) -> None:
    """Read this rank's ranges, and its share of replicated tensors."""
    loads = [0] * ranks.count
    whole: list[tuple[Held, int]] = []
    own: list[tuple[Entry, Target]] = []
    to_pack: list[tuple[Entry, Unpacked]] = []
    for entry, value in targets:
        reader = ranks.rank
        if isinstance(value, Unpacked):
            to_pack.append((entry, value))
            continue
        if isinstance(value, Held):
            reader = min(range(ranks.count), key=loads.__getitem__)
            loads[reader] += num_bytes(value)
            whole.append((value, reader))
        if reader == ranks.rank:
            own.append((entry, value))
    fill_values(own, sums)
    meet(ranks, "reading weights")  # a rank that cannot read ends this for all
    for value, reader in whole:
        ranks.broadcast([value.tensor], source=reader)
    for first in range(0, len(to_pack), ranks.count):  # each rank packs one, and all get it
        layers = to_pack[first : first + ranks.count]
        mine: list[torch.Tensor] = []
        for entry, unpacked in layers[ranks.rank : ranks.rank + 1]:
            fill_values([(entry, replace(unpacked, place=mine.append))], sums)
        for reader, (_, unpacked) in enumerate(layers):
            weight = unpacked.layer.weight
            packed = (
                mine.pop()
                if reader == ranks.rank
                else torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            )
            ranks.broadcast([packed, *scales_of(unpacked.layer).values()], source=reader)
            unpacked.place(packed)
