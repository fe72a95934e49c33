"""FSDP2 on one rank: `fully_shard` with `CPUOffloadPolicy`, and checkpointing."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from benchmarks.outcomes import Skipped
from benchmarks.peers import accelerators
from benchmarks.peers.checkpointed import checkpoint_every_block
from benchmarks.peers.loop import training
from benchmarks.peers.work import Adapter, Training, Work, factory_of
from protrain_plan.models.building import TORCH_DTYPES
from protrain_runtime.devices import device as devices


def _set_up(model: nn.Module, work: Work) -> Training:
    folder = tempfile.TemporaryDirectory()
    store = Path(folder.name) / "store"
    device = accelerators.found(work.device)
    if not torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device)):
        raise Skipped(
            f"fully_shard moves parameters in place, which PyTorch cannot for '{work.device}'"
        )
    own = "" if devices.on_host(device) else f"{work.device}:{devices.collectives(device)},"
    backend = f"{own}cpu:gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    mesh = init_device_mesh(work.device, (1,))
    checkpoint_every_block(model)
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPES[work.dtype] if work.precision == "master" else None
    )
    offload = CPUOffloadPolicy(pin_memory=not devices.on_host(device))
    for module in (*_blocks(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    # The sharded parameters are the float32 masters; the optimizer steps on them on the host.
    optimizer = factory_of(work)(model.parameters())

    def close() -> None:
        dist.destroy_process_group()
        folder.cleanup()

    return Training(step=training(model, optimizer).step, close=close)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the longest list: what PyTorch's tutorial shards one by one."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _missing(work: Work) -> str | None:
    if not dist.is_available():
        return "this build of torch has no torch.distributed"
    if work.device == "cuda" and not torch.distributed.is_nccl_available():
        return "this build of torch has no NCCL"
    return None


FSDP2 = Adapter(
    name="fsdp2-offload",
    settings="fully_shard per block and on the model, one rank, CPUOffloadPolicy,"
    " MixedPrecisionPolicy(param_dtype), checkpointing",
    set_up=_set_up,
    missing=_missing,
    home="host",
    masters=True,
    on_a_cpu="moves nothing: offloading is to where the model is; what is left is its cost",
)
