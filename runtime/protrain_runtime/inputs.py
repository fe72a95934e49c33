"""A batch larger than the planned one is refused before it takes memory."""

from collections.abc import Callable

import torch
from torch import nn

from protrain_plan.records.profile import Workload


def refuse_larger_batches(model: nn.Module, workload: Workload) -> Callable[[], None]:
    """Let training calls raise where there are more tokens than planned; returns what undoes it.

    Either way: more sequences, or longer ones. Smaller batches are welcome, and so is any size
    where no graph is recorded. A factory's batches are what they are: a plan does not know them.
    Where images come as well, only sequences count: tokens that stand for images are among them.
    """
    if not workload.model_config:
        return lambda: None
    most = (workload.batch_size, workload.seq_len)

    def check(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if not torch.is_grad_enabled() or not isinstance(tokens, torch.Tensor):
            return
        if tokens.dim() != 2:
            return
        longer = tokens.shape[1] > most[1] and "pixel_values" not in kwargs
        if tokens.shape[0] > most[0] or longer:
            raise RuntimeError(
                f"the batch is {tokens.shape[0]} x {tokens.shape[1]} tokens, and the plan was made"
                f" for at most {most[0]} x {most[1]}: it would take more memory than planned."
                " Profile and plan the largest batch"
            )

    return model.register_forward_pre_hook(check, with_kwargs=True).remove
