"""A step as it was recorded beside the step as it was simulated, lane by lane."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import protrain_runtime
from benchmarks.outcomes import Skipped
from benchmarks.peers import accelerators
from benchmarks.peers.building import built
from benchmarks.peers.limits import Limit
from benchmarks.peers.planned import PLANNED
from benchmarks.peers.work import Work
from protrain_plan.models.sources import load_source
from protrain_plan.simulation.timeline import Span, simulate
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.recording import Event, Recording, write_recording
from protrain_runtime.contract.records import read_plan, read_profile
from tests.support.estimates import batches_of

NUM_WORST = 5


def timeline(work: Work, profile: Path, out: Path) -> dict[str, Any]:
    """Record a planned step, write the recording, and compare it with the simulation."""
    plan = read_plan(work.plan)
    if plan.is_plain:
        raise Skipped("the plan keeps everything, so that nothing runs beside compute")
    device = accelerators.found(work.device)
    limit = Limit(work)
    limit.before_building()
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
    training = PLANNED.set_up(model, work)
    limit.before_training()
    torch.manual_seed(work.seed)
    for _ in range(work.num_warmup):
        training.step(next(batches))
    with protrain_runtime.record(model) as recorder:
        training.step(next(batches))
    recording = recorder.recording()
    write_recording(recording, out)
    profiled = read_profile(profile)
    simulated = simulate(program_of(plan, profiled))
    return compared(recording, simulated.spans)


def compared(recording: Recording, simulated: Iterable[Span]) -> dict[str, Any]:
    """Busy seconds per lane, recorded and simulated, and the events that differ most."""
    spans = list(simulated)
    by_name = {span.name: span for span in spans}
    differing = sorted(
        (
            (_seconds(event) - _seconds(by_name[event.name]), event)
            for event in recording.events
            if event.name in by_name
        ),
        key=lambda pair: -abs(pair[0]),
    )
    ran, expected = _busy(recording.events), _busy(spans)
    return {
        "step_seconds": recording.step_seconds,
        "simulated_step_seconds": max((span.end_s for span in spans), default=0.0),
        "lanes": {
            lane: {"recorded": ran[lane], "simulated": expected[lane]}
            for lane in sorted(ran.keys() | expected.keys())
        },
        "differ_most": [
            {"lane": event.lane, "name": event.name, "recorded_minus_simulated": difference}
            for difference, event in differing[:NUM_WORST]
        ],
    }


def _seconds(span: Event | Span) -> float:
    return span.end_s - span.start_s


def _busy(spans: Iterable[Event | Span]) -> Counter[str]:
    busy: Counter[str] = Counter()
    for span in spans:
        busy[span.lane] += _seconds(span)  # type: ignore[assignment]
    return busy
