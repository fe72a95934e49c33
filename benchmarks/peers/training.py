"""One cell: an adapter trains a work, step after step, and says what that took."""

import hashlib
import statistics
import time
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.outcomes import DidNotFit, Refused
from benchmarks.peers import accelerators
from benchmarks.peers.building import built
from benchmarks.peers.limits import Limit
from benchmarks.peers.registry import ADAPTERS
from benchmarks.peers.work import Work
from protrain_plan.models.sources import load_source
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import read_plan
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.device import out_of_memory
from protrain_runtime.devices.preflight import NoRoomError
from protrain_runtime.devices.stores import memory_of
from protrain_runtime.model.prepared import parameter_values
from tests.support.estimates import batches_of


def train(work: Work, adapter: str) -> dict[str, Any]:
    """Warm up, time steps, and read the peaks. Losses are those of all steps, warm-up included."""
    peer = ADAPTERS[adapter]
    if not work.batch_size:
        work = replace(work, batch_size=read_plan(work.plan).workload.batch_size)
    device = accelerators.found(work.device)
    torch.use_deterministic_algorithms(work.deterministic)
    if work.threads:
        torch.set_num_threads(work.threads)
    source = load_source(work.model)
    # Loads the model's code: a limit that refuses libraries says nothing about training.
    batches = batches_of(
        source,
        batch_size=work.batch_size,
        seq_len=work.seq_len,
        dtype=work.dtype,
        precision=work.precision,
        device=device,
        seed=work.seed,
    )
    limit = Limit(work)
    limit.before_building()
    try:
        home = device if peer.home == "device" else devices.HOST
        model = built(source, work, device=home, masters=peer.masters and _mixed(work))
        training = peer.set_up(model, work)
        limit.before_training()
        losses, seconds = [], []
        torch.manual_seed(work.seed)  # of dropout
        for _ in range(work.num_warmup + work.num_steps):
            batch = next(batches)
            devices.synchronize(device)
            start = time.perf_counter()
            losses.append(training.step(batch))
            devices.synchronize(device)
            seconds.append(time.perf_counter() - start)
        peaks = limit.peaks()
        parameters = _digest(model) if work.deterministic else None
        training.close()
    except NoRoomError as error:
        raise Refused(f"needs {format_bytes(error.missing_bytes)} more") from error
    except (RuntimeError, MemoryError, ProtrainError) as error:
        # A model whose building ran out of memory is refused with that as the cause.
        if not out_of_memory(error) and not out_of_memory(error.__cause__ or error):
            raise
        raise DidNotFit("out of memory") from error
    timed = seconds[work.num_warmup :]
    step_s = statistics.median(timed)
    return {
        "adapter": peer.name,
        "settings": peer.settings,
        "batch_size": work.batch_size,
        "step_seconds": timed,
        "warmup_seconds": seconds[: work.num_warmup],
        "median_step_seconds": step_s,
        "tokens_per_s": work.batch_size * work.seq_len / step_s,
        "losses": losses,
        "parameters_sha256": parameters,
        **asdict(peaks),
    }


def _mixed(work: Work) -> bool:
    return work.precision == "master"


def _digest(model: torch.nn.Module) -> str:
    """SHA-256 over all parameters' bytes, in the model's order."""
    sha = hashlib.sha256()
    for _, value in parameter_values(model):
        sha.update(memory_of(value.cpu().contiguous().view(-1).view(torch.uint8)))
    return sha.hexdigest()
