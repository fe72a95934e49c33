"""A checkpoint's values on their way into the places that a plan has made for them.

`prepare(..., weights=DIRECTORY)` reads each byte once: a rank the ranges that it has, and of what
all ranks have whole its share, which it hands to the others. Damage is found while values are read,
and `prepare` takes everything back then.
"""

import hashlib
from collections.abc import Set
from itertools import chain
from pathlib import Path

from torch import nn

from protrain_runtime.checkpoint.entries import Entry, PartialSum, compare_sums, fill_values
from protrain_runtime.checkpoint.index import Saved
from protrain_runtime.checkpoint.loading import matched
from protrain_runtime.checkpoint.saving import with_extra_state
from protrain_runtime.checkpoint.training import read_training
from protrain_runtime.model.prepared import Prepared
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.values import Held, Value, num_bytes


class Weights:
    """The tensors of a model in a folder. ProtrainError where there are none."""

    def __init__(self, directory: Path | str) -> None:
        self._saved = Saved(Path(directory))
        self._entries = self._saved.entries("model")

    def facts(self) -> str:
        """A digest of what all ranks have to find alike: names, dtypes, shapes and places."""
        digest = hashlib.sha256()
        for name, entry in sorted(self._entries.items()):
            parts = [(part.path.name, *part.place[1:], part.checksum) for part in entry.parts]
            digest.update(f"{name} {entry.dtype} {entry.shape} {parts}\n".encode())
        return f"{len(self._entries)} tensors ({digest.hexdigest()[:12]})"

    def fill(self, model: nn.Module, prepared: Prepared, absent: Set[str]) -> None:
        """Read all values; parameters that are not `absent` keep theirs where the folder has none.

        Floating-point numbers are cast to the model's dtype.
        """
        targets = matched(
            model, self._saved, prepared, entries=self._entries, absent=absent, cast=True
        )
        ranks = prepared.ranks
        if ranks is None:
            fill_values(targets)
        else:
            _fill_together(ranks, targets)
        self._saved.refuse_changed()
        extra = read_training(self._saved).get("modules", {}) if self._saved.folder else {}
        for name, module in with_extra_state(model):
            if name in extra:
                module.set_extra_state(extra[name])


def _fill_together(ranks: Ranks, targets: list[tuple[Entry, Value]]) -> None:
    """Read the ranges that this rank has, and its share of what all ranks have whole."""
    loads = [0] * ranks.count
    whole: list[tuple[Held, int]] = []
    own: list[tuple[Entry, Value]] = []
    for entry, value in targets:
        reader = ranks.rank
        if isinstance(value, Held):
            reader = min(range(ranks.count), key=loads.__getitem__)
            loads[reader] += num_bytes(value)
            whole.append((value, reader))
        if reader == ranks.rank:
            own.append((entry, value))
    sums: list[PartialSum] = []
    fill_values(own, sums)
    compare_sums(chain.from_iterable(ranks.all_objects(sums)))
    for value, reader in whole:
        ranks.broadcast([value.tensor], source=reader)
