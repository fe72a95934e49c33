"""A table of optimizer classes; all other facts are observed in their steps (`update_rules`)."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.states.stepping import OptimizerFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Facts of a class that its steps do not show.

    blocks     of an optimizer: elements of a block of its states, and of the smallest parameter
               whose states are of blocks
    in_turn    none may be made, or step, beside another
    by_lines   its fused kernel shares tensors out among PyTorch's threads by whole cache lines
    is_kernel  its fused step is `torch._fused_adam_` or `_fused_adamw_`, and nothing else
    """

    blocks: Callable[[Any], tuple[float, float]] = lambda _: (1, 1)
    in_turn: bool = False
    by_lines: bool = False
    is_kernel: bool = False


KNOWN: Mapping[type | str, Known] = {
    # aten/src/ATen/native/cpu/FusedAdamKernel.cpp and FusedAdagradKernel.cpp
    torch.optim.Adam: Known(by_lines=True, is_kernel=True),
    torch.optim.AdamW: Known(by_lines=True, is_kernel=True),
    torch.optim.Adagrad: Known(by_lines=True),
    # Of 180 short runs of AdamW8bit in three threads, 11 gave other bits; one at a time, none did.
    "bitsandbytes": Known(
        blocks=lambda made: (256, made.args.min_8bit_size if made.args.optim_bits == 8 else 1),
        in_turn=True,
    ),
    # Each changes a compiler setting during its step, and restores it.
    "torchao": Known(blocks=lambda made: (made.block_size, 4096), in_turn=True),
}
"""By class, subclasses excluded; or by the package of a base class."""


def known(kind: type) -> Known:
    """The row of a class; an empty one if unknown."""
    if kind in KNOWN:
        return KNOWN[kind]
    packages = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((KNOWN[name] for name in packages if name in KNOWN), Known())


_TURN = threading.RLock()


def in_turn(factory: OptimizerFactory) -> OptimizerFactory:
    """The same optimizers; those that may not step side by side take turns.

    Lanes and the compute thread update their own parameters at the same time. ProtrainError if
    bitsandbytes has options for single parameters: it finds them by a parameter's identity and
    position, which a piece does not have.
    """

    def make(groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        with _TURN:
            made = factory(groups)
        if known(type(made)).in_turn:
            _refuse_overrides(made)
            step = made.step

            def alone(*arguments: Any, **options: Any) -> Any:
                with _TURN:
                    return step(*arguments, **options)

            made.step = alone  # type: ignore[method-assign]
        return made

    return make


def _refuse_overrides(optimizer: Any) -> None:
    """ProtrainError if bitsandbytes' process-wide manager has overrides."""
    manager = getattr(optimizer, "mng", None)
    if manager is None or not (
        manager.module_weight_config_triple or manager.pid2config or manager.index2config
    ):
        return
    named = {
        f"{type(module).__name__}.{name}: {', '.join(f'{k}={v}' for k, v in options.items())}"
        for module, name, options in manager.module_weight_config_triple
    }
    raise ProtrainError(
        "bitsandbytes has overrides for states of single parameters"
        f" ({'; '.join(sorted(named)) or 'GlobalOptimManager.override_config'}): a plan does not"
        " count them, and a piece of a parameter would not have them",
        key="optimizer",
        fix="remove the overrides: Trainer(..., optimizers=(AdamW8bit(...), None)) instead of"
        " optim='adamw_bnb_8bit'; bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()"
        " drops those that an earlier training has left",
    )
