"""A checkpoint in the format of `torch.distributed.checkpoint`, for tools that read only that.

    python -m protrain_runtime.checkpoint.exporting SAVED TARGET

Names are `model.NAME` of parameters and buffers, and `optimizer.state.NAME.KEY` of states.
`torch.distributed.checkpoint.load` reads them into a state dict, and its `format_utils` make one
file. Reading unpickles a list: read only your own exports.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as save_planned

from protrain_runtime.checkpoint.entries import Entry, fill_values
from protrain_runtime.checkpoint.index import Saved
from protrain_runtime.states.values import Held


class _Planner(DefaultSavePlanner):
    """Reads a tensor only when it is written."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        super().__init__(flatten_state_dict=False)
        self._entries = entries

    def lookup_object(self, index: MetadataIndex) -> Any:
        entry = self._entries[index.fqn]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        fill_values([(entry, Held(tensor))])
        return tensor


def export(directory: Path | str, target: Path | str) -> None:
    """Write a checkpoint's tensors to `target`; ProtrainError for a damaged one."""
    saved = Saved(Path(directory))
    entries = {f"model.{name}": entry for name, entry in saved.entries("model").items()}
    for name, entry in saved.entries("optimizer").items():
        entries[f"optimizer.state.{name}"] = entry
    saved.verify(["model", "optimizer"])
    save_planned(
        {n: torch.empty(e.shape, dtype=e.dtype, device="meta") for n, e in entries.items()},
        storage_writer=FileSystemWriter(target, per_thread_copy_ahead=0),
        planner=_Planner(entries),
        no_dist=True,
    )


if __name__ == "__main__":
    export(*sys.argv[1:])
