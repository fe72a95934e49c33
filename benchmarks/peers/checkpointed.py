"""`torch.utils.checkpoint` around every block, as transformers turns it on."""

from torch import nn

from benchmarks.peers.loop import training
from benchmarks.peers.work import Adapter, Training, Work, optimizer_of


def checkpoint_every_block(model: nn.Module) -> None:
    """Recompute every block of a transformers model, the form that PyTorch recommends."""
    enable = getattr(model, "gradient_checkpointing_enable")  # noqa: B009 (nn.Module lacks it)
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _set_up(model: nn.Module, work: Work) -> Training:
    checkpoint_every_block(model)
    return training(model, optimizer_of(work)(model.parameters()))


CHECKPOINTED = Adapter(
    name="checkpoint",
    settings="torch.utils.checkpoint around every block, use_reentrant=False",
    set_up=_set_up,
)
