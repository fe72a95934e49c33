"""`optimizer_cost`: bytes that an optimizer takes to step on a model's parameters, by trial."""

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from protrain_plan.models.building import parameter_dtype
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER, optimizer_factory, works_in_place
from protrain_plan.profiling.first_steps import MANY, first_steps, step_bytes
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import PIECE_ALIGNMENT
from protrain_runtime.contract.records.profile import (
    DType,
    OptimizerCost,
    Precision,
    Unit,
    Workload,
)
from protrain_runtime.contract.units import four_digits
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import storage_bytes
from protrain_runtime.states.update_rules import UpdateRules


def optimizer_cost(
    model: nn.Module, workload: Workload, name: str, *, device: torch.device | None, sparse: bool
) -> OptimizerCost:
    """The cost of a step on the model's parameters, without speeds.

    Steps run on `device`; None: here, for a device of the workload's type. `sparse`: some gradients
    are.
    """
    rules = UpdateRules(optimizer_factory(name, workload.precision))
    trained = [p for p in model.parameters() if p.requires_grad]
    on_card = device is None and workload.device == "cuda"
    elementwise = workspace(
        # On cards those kernels work in place, as fused ones do.
        DEFAULT_OPTIMIZER if on_card and works_in_place(name) else name,
        workload.dtype,
        workload.precision,
        device=device or devices.HOST,
        beside={p.dtype for p in trained},
        sparse=sparse,
        strided=not all(p.is_contiguous() for p in trained),
        on_card=on_card,
    )
    seen = first_steps(rules, Counter((p.dtype, p.shape) for p in trained), device=device)
    at_once = elementwise.at_once and not seen.together  # else it has seen what all of them take
    # Masters have room for the gradients of a whole chunk: theirs grows with the chunk.
    known = not at_once and workload.precision != "master"
    return OptimizerCost(
        name=name,
        host_parameters_per_s=0.0,
        device_parameters_per_s=0.0,
        workspace_fraction=four_digits(max(elementwise.workspace_fraction, seen.fraction)),
        workspace_bytes=seen.workspace_bytes if known else 0,
        at_once=at_once,
        **cuts_of(model, rules),
    )


def cuts_of(model: nn.Module, rules: UpdateRules) -> dict[str, int]:
    """`OptimizerCost.block` and `.cut_elements` for the model's trainable parameters."""
    found = [rules.of(p.dtype, p.shape) for p in model.parameters() if p.requires_grad]
    return {
        "block": 0 if any(rule.reason for rule in found) else max(rule.block for rule in found),
        "cut_elements": max([PIECE_ALIGNMENT, *(rule.shift for rule in found)]),
    }


def told_of_steps(
    units: Iterable[Unit], workload: Workload, cost: OptimizerCost
) -> tuple[Unit, ...]:
    """The units with `largest_gradient_bytes` where the optimizer's step needs memory by them.

    Master weights are stepped on in batches, with the room of the largest chunk.
    """
    by_largest = cost.workspace_fraction and not cost.at_once and workload.precision != "master"
    if by_largest:
        return tuple(units)
    return tuple(replace(unit, largest_gradient_bytes=0) for unit in units)


class Workspace(NamedTuple):
    """The fields of `OptimizerCost` of these names."""

    workspace_fraction: float
    at_once: bool


def workspace(
    optimizer: str,
    dtype: DType,
    precision: Precision,
    *,
    device: torch.device = devices.HOST,
    beside: Set[torch.dtype] = frozenset(),
    sparse: bool = False,
    strided: bool = False,
    on_card: bool = False,
) -> Workspace:
    """A step's workspace, as a fraction of the gradient's bytes.

    The most of several: parameters have the workload's dtype, and those `beside` it; `sparse` where
    some gradients are, `strided` where some are dense and not contiguous, such as in channels-last
    order: fused kernels of a CPU copy those. `on_card`: as on a CUDA device, where PyTorch takes
    `foreach` by default.
    """
    stored = parameter_dtype(dtype, precision)
    dtypes = sorted({stored, *beside}, key=str)
    make = optimizer_factory(optimizer, precision)
    cases = [(each, False, False) for each in dtypes]
    cases += [(stored, True, False)] * sparse + [(stored, False, True)] * strided
    most, at_once = 0.0, False
    for each, is_sparse, is_strided in cases:
        # Of a large parameter and two: a loop still has a name for what the last one took.
        extra: list[float] = []
        for rows, count in ((2**14, 1), (2**14, 2), (2**8, MANY), (2**8, MANY + 1)):
            large = [torch.zeros(rows, 2**6, dtype=each) for _ in range(count)]
            large = [values.t() for values in large] if is_strided else large
            small = [torch.zeros(64, dtype=one) for one in dtypes if one != each]
            every = [nn.Parameter(values.to(device)) for values in (*large, *small)]
            stepper = make(every)
            for group in stepper.param_groups if on_card else ():
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True
            taken = 0
            for _ in range(2):
                for parameter in every[:count]:
                    parameter.grad = _gradient_of(parameter, sparse=is_sparse)
                taken = step_bytes(stepper, device)
            gradient = every[0].grad
            assert gradient is not None
            extra.append(taken / storage_bytes([gradient]))
        together = extra[3] - extra[2] > _GROWTH
        most = max(most, extra[0] if together else max(extra[:2]))
        at_once = at_once or together
    return Workspace(workspace_fraction=four_digits(most), at_once=at_once)


_GROWTH = 0.1
"""Least part of a gradient that one more of many parameters adds to what a step takes at once."""


def refuse_sparse(names: Set[str], optimizer: str, workload: Workload) -> None:
    """ProtrainError where the optimizer takes no sparse gradients, and these parameters have some.

    Asked is the optimizer itself.
    """
    if not names:
        return
    stored = parameter_dtype(workload.dtype, workload.precision)
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=stored))
    parameter.grad = _gradient_of(parameter, sparse=True)
    stepper = optimizer_factory(optimizer, workload.precision)([parameter])
    try:
        stepper.step()
    except RuntimeError as error:
        raise ProtrainError(
            f"the gradient of '{min(names)}' is sparse, and the optimizer {optimizer} takes none:"
            f" {error}",
            source=workload.model,
            key="optimizer",
            fix="give the embedding dense gradients (sparse=False), or --optimizer sgd",
        ) from error


def _gradient_of(parameter: nn.Parameter, *, sparse: bool) -> torch.Tensor:
    """Zeros; sparse ones name every row, the last one first, and are not coalesced."""
    zeros = torch.zeros_like(parameter)
    if not sparse:
        return zeros
    rows = torch.arange(len(zeros) - 1, -1, -1, device=zeros.device)[None]
    return torch.sparse_coo_tensor(rows, zeros, zeros.shape)
