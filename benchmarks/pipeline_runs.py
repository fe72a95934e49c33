"""The processes of the pipeline benchmark: stages in PyTorch's schedules, and one plain process.

Nothing of the planner is imported here: a process under a limit holds what it trains with.
"""

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from benchmarks.zoo import Specimen
from examples.train_stages import Stage, loss_of, recompute
from protrain_runtime.devices.memory_meter import (
    process_memory,
    reachable,
    return_freed_memory,
    storage_bytes,
)
from protrain_runtime.diagnostics.recording import measure_step
from protrain_runtime.engine.engine import Observer

STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to train a specimen: in stages, or without cuts in one process."""

    specimen: Specimen
    micro_batches: int
    cuts: tuple[str, ...] = ()  # the first units of all stages but the first
    recomputed: tuple[str, ...] = ()  # blocks
    eager: bool = False  # eager 1F1B: PyTorch's interleaved one with one chunk a device
    scale_grads: bool = False  # divide the sum of gradients, as PyTorch does unasked, not losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Parameters and divided losses after all steps, with the most bytes that there were.

    `tensor_bytes` are those of the last step, where they were counted; `resident_bytes` and
    `data_bytes` the process's.
    """

    parameters: dict[str, Tensor]
    losses: list[float]
    tensor_bytes: int
    resident_bytes: int
    data_bytes: int


Pass = Callable[[Tensor], list[Tensor]]
"""All forwards and backwards of a step's sequences; returns the losses."""


def train(way: Way, rank: int = 0, *, counted: bool = False) -> Trained:
    """Train a few steps of AdamW, as one stage of a process group, or plainly."""
    torch.set_num_threads(1)
    others = storage_bytes(reachable(torch.device("cpu")))  # what libraries made
    whole, batches = way.specimen.make()
    names = {id(one): name for name, one in whole.named_parameters()}
    model, run = (_staged if way.cuts else _plain)(whole, way, rank)
    del whole
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses: list[float] = []
    tensor_bytes = data_bytes = 0
    for number in range(STEPS):
        tokens = torch.cat([dict(one)["input_ids"] for one in islice(batches, way.micro_batches)])

        def step(observe: Observer, tokens: Tensor = tokens) -> None:
            losses.extend(loss.item() for loss in run(tokens))
            observe("update")
            optimizer.step()
            optimizer.zero_grad()

        if counted and number == STEPS - 1:
            tensor_bytes = measure_step(model, step, besides_bytes=others).device_bytes
        else:
            step(lambda _: None)
        data_bytes = max(data_bytes, process_memory().data_bytes)
    return Trained(
        parameters={names[id(one)]: one.detach() for one in model.parameters()},
        losses=losses,
        tensor_bytes=tensor_bytes,
        resident_bytes=process_memory().peak_resident_bytes,
        data_bytes=data_bytes,
    )


def _plain(model: Any, way: Way, _: int) -> tuple[nn.Module, Pass]:
    """The model's own forward and loss, one micro-batch after the other."""
    for name in way.recomputed:
        recompute(model.get_submodule(name))

    def run(tokens: Tensor) -> list[Tensor]:
        losses = []
        for one in tokens.chunk(way.micro_batches):
            loss = model(input_ids=one, labels=one, use_cache=False).loss / way.micro_batches
            loss.backward()
            losses.append(loss.detach())
        return losses

    return model, run


def _staged(whole: Any, way: Way, rank: int) -> tuple[nn.Module, Pass]:
    model = Stage(whole, way.cuts, rank, way.recomputed)
    stage = PipelineStage(model, rank, count := len(way.cuts) + 1, torch.device("cpu"))
    divisor = 1 if way.scale_grads else way.micro_batches
    loss = partial(loss_of, model=model.whole, count=divisor)
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": way.scale_grads}
    schedule = (
        ScheduleInterleaved1F1B([stage], way.micro_batches, **options)
        if way.eager
        else Schedule1F1B(stage, way.micro_batches, **options)
    )
    is_last = rank == count - 1

    def run(tokens: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        schedule.step(
            *([] if rank else [tokens]),
            target=tokens if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        return losses

    return model, run


# --- processes ------------------------------------------------------------------------------------


def in_processes(way: Way, *, limit: int = 0, counted: bool = False) -> list[Trained | str]:
    """How each process of a way ends: with its results, or the first line of an error.

    `limit` are the bytes of data that the system lets each of them have (RLIMIT_DATA).
    """
    with TemporaryDirectory() as folder:
        given = way, folder, limit, counted
        processes = [
            get_context("spawn").Process(target=_process, args=(rank, *given), daemon=True)
            for rank in range(len(way.cuts) + 1)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        found = [Path(folder, str(rank)) for rank in range(len(processes))]
        return [
            torch.load(path, weights_only=False) if path.exists() else f"exit code {one.exitcode}"
            for path, one in zip(found, processes, strict=True)
        ]


def _process(rank: int, way: Way, folder: str, limit: int, counted: bool) -> None:
    return_freed_memory()
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    end: Trained | str
    try:
        if way.cuts:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = FileStore(f"{folder}/store", len(way.cuts) + 1)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=len(way.cuts) + 1)
        end = train(way, rank, counted=counted)
    except (RuntimeError, MemoryError) as error:
        end = (str(error).splitlines() or ["out of memory"])[0]
    torch.save(end, f"{folder}/{rank}")
