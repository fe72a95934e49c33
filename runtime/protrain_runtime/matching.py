"""Whether a model, its optimizer and the devices that there are can follow a plan."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup

from protrain_plan.errors import ProtrainError
from protrain_plan.records.hardware import is_accelerator
from protrain_plan.records.plan import Keep, Persistent, Plan
from protrain_runtime.chunks import Chunk, OptimizerFactory
from protrain_runtime.fingerprint import model_fingerprint
from protrain_runtime.model_changes import model_changes
from protrain_runtime.optimizer import PlannedOptimizer
from protrain_runtime.parameters import overlapping
from protrain_runtime.pieces import check_elementwise, elementwise_states
from protrain_runtime.ranks import check_ranks


def keeps_everything(plan: Plan) -> bool:
    """Whether nothing is to be done: plain PyTorch is what the plan says."""
    return plan.num_devices == 1 and all(
        isinstance(unit.activations, Keep) and isinstance(unit.states, Persistent)
        for unit in plan.units
    )


def check_model(model: nn.Module, plan: Plan) -> list[nn.Module | None]:
    """Each unit's module, None for a part. ProtrainError if the plan is for another model."""
    found = model_fingerprint(model)
    if found != plan.model_fingerprint and plan.tensors:
        changes = model_changes(plan.tensors, model, plan.units)
        same = ["parameters and buffers are the same; a module has another class or place"]
        raise ProtrainError(
            "\n    ".join(["the plan was made for another model:", *(changes or same)]),
            key="model_fingerprint",
            fix="profile and plan this model",
        )
    modules: list[nn.Module | None] = []
    for index, unit in enumerate(plan.units):
        module = None
        if unit.kind == "block":
            try:
                module = model.get_submodule(unit.name)
            except AttributeError as error:
                raise ProtrainError(
                    f"the model has no module '{unit.name}'",
                    key=f"units[{index}]",
                    fix="profile and plan this model; the plan was made for another one",
                ) from error
        modules.append(module)
    if found != plan.model_fingerprint:
        raise ProtrainError(
            f"the plan was made for another model: its fingerprint is"
            f" {plan.model_fingerprint}, this model's is {found}",
            key="model_fingerprint",
            fix="profile and plan this model (layers, shapes, dtypes and what is trainable count)",
        )
    return modules


def check_kernels(plan: Plan) -> None:
    """ProtrainError where an accelerator would not take the kernels that were profiled.

    Deterministic ones are others: attention takes another algorithm, with other bytes and seconds.
    A CPU's take what they take, and are not asked about.
    """
    profiled, here = plan.workload.deterministic, torch.are_deterministic_algorithms_enabled()
    if profiled == here or not is_accelerator(plan.workload.device):
        return
    if profiled:
        raise ProtrainError(
            "the plan is for deterministic kernels, and PyTorch is not told to take them alone:"
            " others may take more memory than was profiled",
            key="workload.deterministic",
            fix="torch.use_deterministic_algorithms(True) before prepare(), on CUDA with"
            " CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment, or profile without"
            " --deterministic",
        )
    raise ProtrainError(
        "PyTorch is told to take deterministic kernels alone, and the plan is for its usual ones:"
        " these may take more memory than was profiled",
        key="workload.deterministic",
        fix="profile with --deterministic and plan again, or"
        " torch.use_deterministic_algorithms(False) before prepare()",
    )


def check_devices(
    model: nn.Module,
    plan: Plan,
    group: ProcessGroup | None,
    check: Literal["bitwise"] | None,
) -> None:
    """ProtrainError where the plan is not for the devices that there are."""
    check_ranks(plan, group)
    if plan.num_devices % plan.num_replicas:
        raise ProtrainError(
            f"{plan.num_devices} devices cannot be {plan.num_replicas} replicas of the same size",
            key="num_replicas",
            fix="let it divide num_devices",
        )
    if plan.num_devices == 1:
        for index, unit in enumerate(plan.units):
            if not isinstance(unit.states, Persistent) and unit.states.tier == "device":
                raise ProtrainError(
                    "one device has nobody to share states with",
                    key=f"units[{index}].states",
                    fix="let them be persistent, or plan with --num-devices",
                )
        return
    if check is not None:
        raise ProtrainError(
            'check="bitwise" trains a plain copy on this rank alone, which is another training than'
            " that of several devices",
            fix="check a plan for one device, or compare with DistributedDataParallel",
        )
    from torch.distributed.tensor import DTensor  # takes a second to import

    distributed = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if distributed:
        raise ProtrainError(
            f"the parameter '{distributed[0]}' is a DTensor: it is spread over devices already, and"
            " a chunk is made of whole parameters",
            fix="prepare the model before it is made tensor-parallel, without it, or leave tensor"
            " parallelism to DistributedDataParallel or FSDP",
        )


def check_pieces(plan: Plan, chunks: Sequence[Chunk], factory: OptimizerFactory) -> None:
    """ProtrainError where an offloaded chunk cannot be updated in pieces."""
    updated: set[torch.dtype] = set()
    shared = overlapping(chunks)
    for chunk, unit in zip(chunks, plan.units, strict=True):
        if isinstance(unit.states, Persistent):
            continue
        if chunk.unit in shared:
            raise ProtrainError(
                f"{unit.name} has parameters that share memory, and states that leave the device"
                " are of parameters by themselves",
                fix="give every parameter its own memory, or let the unit be persistent",
            )
        dtypes = {part.dtype for part in chunk.slices if part.trainable}
        if len(dtypes) > 1:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise ProtrainError(
                f"{unit.name} has trainable parameters of several dtypes ({names}), and states"
                " that leave the device are of one",
                fix="convert them to one dtype, or freeze those of the others",
            )
        updated |= dtypes
    for dtype in updated:
        check_elementwise(factory, dtype)


def check_groups(plan: Plan, chunks: Sequence[Chunk], optimizer: PlannedOptimizer) -> None:
    """ProtrainError where an offloaded parameter that is trained is in no parameter group."""
    grouped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for chunk, unit in zip(chunks, plan.units, strict=True):
        if isinstance(unit.states, Persistent):
            continue
        for part in chunk.slices:
            if part.trainable and part.parameter not in grouped:
                raise ProtrainError(
                    f"{part.name!r} requires a gradient and is in no parameter group, and the plan"
                    f" offloads the states of {unit.name!r}",
                    key="param_groups",
                    fix="give it to the optimizer, or requires_grad_(False) before the model is"
                    " profiled",
                )


def states_of(
    factory: OptimizerFactory, dtype: torch.dtype, optimizer: PlannedOptimizer
) -> dict[str, torch.dtype]:
    """The elementwise states that every group has. ProtrainError where groups differ."""
    found = [
        elementwise_states(factory, dtype, {k: v for k, v in group.items() if k != "params"})
        for group in optimizer.param_groups
    ]
    if any(states != found[0] for states in found):
        raise ProtrainError(
            "the parameter groups' options give them different optimizer states",
            fix="give all groups the same options of this kind, such as amsgrad",
        )
    return found[0]
