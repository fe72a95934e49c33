"""A plain training loop that keeps blocks' states in a file and overlaps nothing.

What one would write first: before a block runs, its parameters are read; after it has run they are
dropped. In backward they are read again, the block is recomputed (`torch.utils.checkpoint`), and
when its last gradient is there, the optimizer's states are read, the optimizer steps on the block,
and both are written. Every read, step and write happens in the training thread, one after the
other.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from protrain_plan.models.optimizers import optimizer_factory
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.devices.stores import memory_of

Optimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class _Block:
    """One block, and its states in the file: parameters first, then the optimizer's tensors."""

    def __init__(self, module: nn.Module, make: Optimizer, file: int, offset: int) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._file, self._offset = file, offset
        self._optimizer = make(self._parameters)
        self._left = len(self._parameters)  # gradients that are not there yet
        self._forward: Callable[..., object] = module.forward
        self._empty = torch.empty(())
        module.forward = self._run
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._count)
        self._save([parameter.data for parameter in self._parameters], offset)
        self._drop()

    @property
    def num_bytes(self) -> int:
        """What its states take in the file: parameters, and AdamW's two."""
        return 3 * sum(parameter.nbytes for parameter in self._parameters)

    def _run(self, *args: object, **kwargs: object) -> object:
        def loaded(*inputs: object) -> object:
            self._load()
            return self._forward(*inputs, **kwargs)

        result: object = checkpoint(loaded, *args, use_reentrant=False)
        self._drop()
        return result

    def _count(self, _: torch.Tensor) -> None:
        """One gradient more; after the last one the block is updated and saved."""
        self._left -= 1
        if self._left:
            return
        self._left = len(self._parameters)
        sizes = [parameter.nbytes for parameter in self._parameters]
        place = self._offset + sum(sizes)
        states = self._optimizer.state
        for key in ("exp_avg", "exp_avg_sq") if states else ():
            for parameter in self._parameters:
                states[parameter][key] = self._read(parameter, place)
                place += parameter.nbytes
        self._optimizer.step()
        self._save([parameter.data for parameter in self._parameters], self._offset)
        place = self._offset + sum(sizes)
        for key in ("exp_avg", "exp_avg_sq"):
            self._save([states[parameter].pop(key) for parameter in self._parameters], place)
            place += sum(sizes)
        self._optimizer.zero_grad()
        self._drop()

    def _load(self) -> None:
        place = self._offset
        for parameter in self._parameters:
            size = parameter.numel() * parameter.itemsize
            parameter.data = self._read(parameter, place)
            place += size

    def _read(self, like: torch.Tensor, place: int) -> torch.Tensor:
        """A tensor from the file, of the shape and dtype of another."""
        flat = torch.empty(like.numel() * like.itemsize, dtype=torch.uint8)
        view = memory_of(flat)
        while view:
            count = os.preadv(self._file, [view], place)
            view, place = view[count:], place + count
        return flat.view(like.dtype).view(like.shape)

    def _save(self, tensors: Sequence[torch.Tensor], place: int) -> None:
        for tensor in tensors:
            view = memory_of(tensor.view(-1).view(torch.uint8))
            while view:
                count = os.pwrite(self._file, view, place)
                view, place = view[count:], place + count

    def _drop(self) -> None:
        for parameter in self._parameters:
            parameter.data = self._empty.expand(parameter.shape)


class LoadComputeSave(torch.optim.Optimizer):
    """Attaches the loop to a model's blocks; its step is that of the parameters outside them."""

    def __init__(self, model: nn.Module, profile: Profile, folder: Path) -> None:
        make = optimizer_factory(profile.optimizer.name)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (open while the model trains)
        offset, inside = 0, set[nn.Parameter]()
        self._blocks: list[_Block] = []
        for unit in profile.units:
            if unit.kind == "block":
                module = model.get_submodule(unit.name)
                inside.update(module.parameters())
                size = 3 * sum(parameter.nbytes for parameter in module.parameters())
                self._blocks.append(_Block(module, make, self._file.fileno(), offset))
                offset += size
        outside = [parameter for parameter in model.parameters() if parameter not in inside]
        self._rest = make(outside)
        super().__init__(outside, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update what is outside the blocks."""
        assert closure is None
        self._rest.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients outside the blocks; those inside are gone."""
        self._rest.zero_grad(set_to_none)
