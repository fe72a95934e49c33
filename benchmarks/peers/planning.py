"""Work before a planned run: a profile, measured or estimated, and a plan."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.outcomes import Refused
from benchmarks.peers import accelerators
from benchmarks.peers.building import built
from benchmarks.peers.limits import Limit
from benchmarks.peers.work import Work
from protrain_plan.models.sources import load_source
from protrain_plan.planning.questions.answers import Objective, Question
from protrain_plan.planning.questions.growth import in_proportion, largest_of
from protrain_plan.planning.questions.objectives import ask
from protrain_plan.planning.search.improving import Effort, Solver
from protrain_plan.profiling.measured import measure_model
from protrain_runtime.contract.records import read_profile, write_plan, write_profile
from protrain_runtime.contract.records.plan import Budgets
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.units import format_bytes
from tests.support.estimates import batches_of
from tests.support.estimates import estimate as estimated

HOST_SHARE = 0.8
"""Share of the host's memory for plans: the rest is for the process, and for building the model."""
TIME_LIMIT_S = 60.0
"""Per plan. With it a plan may depend on the machine's speed; the plans are kept with results."""


def profile(work: Work, out: Path) -> dict[str, Any]:
    """Measure the work without a limit, and write its profile."""
    device = accelerators.found(work.device)
    torch.use_deterministic_algorithms(work.deterministic)
    Limit(work).before_building()
    source = load_source(work.model)
    model = built(source, work, device=device)
    batches = batches_of(
        source,
        batch_size=work.batch_size,
        seq_len=work.seq_len,
        dtype=work.dtype,
        precision=work.precision,
        device=device,
        seed=work.seed,
    )
    record = measure_model(
        model,
        batches,
        workload=work.workload(source.model_config),
        num_steps=work.num_steps,
        spill_directory=Path(tempfile.gettempdir()),
        progress=lambda *_: None,
    )
    return _written(record, out)


def estimate(work: Work, hardware_of: Path, out: Path) -> dict[str, Any]:
    """Estimate the work on the machine that another profile measured, and write its profile."""
    machine = read_profile(hardware_of).hardware
    kind = accelerators.as_estimated(machine)
    record = estimated(
        load_source(work.model),
        hardware=replace(machine, device=replace(machine.device, kind=kind)),
        batch_size=work.batch_size,
        seq_len=work.seq_len,
        dtype=work.dtype,
        precision=work.precision,
        seed=work.seed,
    )
    workload = replace(record.workload, device=work.device)
    return _written(replace(record, workload=workload, hardware=machine), out)


def _written(record: Profile, out: Path) -> dict[str, Any]:
    write_profile(record, out)
    hardware = record.hardware
    return {
        "num_parameters": sum(unit.num_parameters for unit in record.units),
        "num_units": len(record.units),
        "context_bytes": hardware.device.context_bytes,
        "links": {
            tier.name: [tier.link.read_bytes_per_s, tier.link.write_bytes_per_s]
            for tier in hardware.tiers
        },
    }


def plan(
    profile: Path,
    cap_bytes: int,
    out: Path,
    *,
    maximize_batch: bool = False,
    disk: bool = True,
    solver: Solver = "milp",
) -> dict[str, Any]:
    """Plan a profile for a limit (0: all of the device), and write the plan.

    With `maximize_batch`, for the largest batch that fits, in proportion: training shows.
    """
    record = read_profile(profile)
    tiers = {tier.name: tier.capacity_bytes for tier in record.hardware.tiers}
    question = Question(
        profile=record,
        budgets=Budgets(
            device=cap_bytes or record.hardware.device.memory_bytes,
            host=int(HOST_SHARE * tiers.get("host", 0)),
            disk=tiers.get("disk", 0) if disk else 0,
        ),
    )
    if maximize_batch and (size := largest_of(question, "batch-size")):
        question = replace(question, profile=in_proportion(record, "batch-size", size))
    effort = Effort(time_limit_s=TIME_LIMIT_S, solver=solver)
    answer = ask(question, Objective(), effort=effort)
    if answer.solved is None:
        assert answer.infeasible is not None, "without a front there is a plan or a reason"
        missing = format_bytes(answer.infeasible.shortfall_bytes)
        raise Refused(f"needs {missing} more {answer.infeasible.tier} memory")
    write_plan(answer.solved.plan, out)
    predicted = answer.solved.plan.prediction
    return {
        "batch_size": answer.solved.plan.workload.batch_size,
        "step_seconds": predicted.step_seconds,
        "lower_bound_seconds": predicted.lower_bound_seconds,
        "tensor_bytes": predicted.peak_bytes.device,
        "device_bytes": predicted.peak_bytes.on_device,
        "host_bytes": predicted.peak_bytes.host,
        "disk_bytes": predicted.peak_bytes.disk,
        "solve_seconds": answer.solved.solve_seconds,
    }
