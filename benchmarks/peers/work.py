"""The training of a cell, and adapters of peers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from protrain_plan.models.batches import Batch
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER, OptimizerFactory, optimizer_factory
from protrain_runtime.contract.records.hardware import DeviceKind
from protrain_runtime.contract.records.profile import DType, Precision, Workload
from protrain_runtime.states.master_weights import with_master_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One cell's training: the same for every peer.

    batch_size     0: that of the plan
    device         its type, as PyTorch names it
    cap_bytes      what the process may take of the device, or at all (CPU); 0: no limit
    num_warmup     steps before those that are timed
    plan           the plan's file, for the planned run alone
    threads        of PyTorch, of which all but one update on the host; 0: as many as it takes
    deterministic  the same bits in every run, wherever the optimizer steps: see `factory_of`
    """

    model: str
    batch_size: int
    seq_len: int
    dtype: DType
    precision: Precision
    device: DeviceKind
    cap_bytes: int = 0
    num_warmup: int = 1
    num_steps: int = 3
    seed: int = 0
    plan: str = ""
    threads: int = 0
    deterministic: bool = False

    def workload(self, model_config: str) -> Workload:
        """The same for a profile."""
        return Workload(
            model=self.model,
            model_config=model_config,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
            precision=self.precision,
            deterministic=self.deterministic,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model that is ready: `step` trains on one batch and returns its loss."""

    step: Callable[[Batch], float]
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One way to train.

    settings  what was set, for the reader of a table
    on_a_cpu  what a reader of a CPU machine's table has to know besides
    missing   why it cannot run this work here; None where it can
    set_up    makes the built model ready
    home      where the worker builds the model's parameters
    masters   whether it keeps float32 parameters itself, so that it is given those
    """

    name: str
    settings: str
    set_up: Callable[[nn.Module, Work], Training]
    missing: Callable[[Work], str | None] = lambda _: None
    home: Literal["device", "host"] = "device"
    masters: bool = False
    on_a_cpu: str = ""


def factory_of(work: Work) -> OptimizerFactory:
    """AdamW; for bits that are compared, SGD whose products are exact.

    AdamW of the same gradient may differ in the last bit between an accelerator and its host, which
    contract products and sums otherwise (docs/decisions.md).
    """
    if work.deterministic:
        return partial(torch.optim.SGD, lr=2**-7, momentum=0.5, foreach=False)
    return optimizer_factory(DEFAULT_OPTIMIZER)


def optimizer_of(work: Work) -> OptimizerFactory:
    """The work's optimizer with, under master precision, float32 copies of the parameters."""
    factory = factory_of(work)
    return with_master_weights(factory) if work.precision == "master" else factory
