"""Policies used without a planner, from the same profile and simulator.

Each alternative decides the same for all units, as its library does, with updates after backward
and steps that do not overlap. Its schedule is the planner's best: its potential, not a particular
run. Device memory is its tensors', with DDP's buckets; other libraries' further bytes are unknown.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from protrain_plan.planning.explain.explaining import lanes_in_a_line
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.questions.allocator_slack import is_tight
from protrain_plan.planning.questions.answers import Alternative
from protrain_plan.planning.search.choices import uniform
from protrain_plan.planning.search.evaluation import Evaluation, Evaluator
from protrain_runtime.contract.program.memory import peak_bytes
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Placement,
    Plan,
    StateTier,
    TierBytes,
)
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.units import format_bytes


class Policy(NamedTuple):
    """A policy by device count ("": not available); with `buckets`, see `bucket_bytes`."""

    alone: str
    joined: str
    states: Placement
    buckets: bool = False


POLICIES = (
    Policy("plain PyTorch", "DDP", PERSISTENT, buckets=True),
    Policy("", "FSDP2", Placement(tier="device")),
    Policy("ZeRO-Offload", "FSDP2, offload", Placement(tier="host")),
)
"""Each as it is, and with every block recomputed (gradient checkpointing).

FSDP2 shards all states over all devices, as ZeRO-3 does. Of several micro-batches it reduces the
gradients of every one, or of the last one alone, whichever is faster. FSDP2's CPUOffloadPolicy, and
ZeRO-Offload (arXiv 2101.06840) with parameters below the device as well, fetch each unit for
forward and for backward, and update all states on the host when backward has ended."""


def bucket_bytes(profile: Profile) -> int:
    """Bytes per device of `DistributedDataParallel`'s buckets: as many as gradients.

    Gradients are copied to buckets for reduction, unless `gradient_as_bucket_view=True`, which is
    not the default; per its documentation that saves the bytes of all gradients. Of 1.10 G
    parameters in bfloat16 it took 2.20 GB more than one device (`thunder-ddp` and `thunder-1` in
    benchmarks/published.yaml).
    """
    return sum(unit.gradient_bytes for unit in profile.units)


def alternatives(problems: Sequence[Problem]) -> tuple[Alternative, ...]:
    """All policies that a question's machine can follow, in the order of `POLICIES`.

    `problems` are the question's, fewest replicas first. States without another place (see
    `Unit.stays`) persist under every policy.
    """
    fewest = problems[0]
    settings = replace(fewest.settings, updates="after backward", overlap_steps=False)
    problem = replace(fewest, settings=settings, pins=())
    sharded = replace(problem, settings=replace(settings, reductions="in every micro-batch"))
    evaluators: dict[tuple[int, bool], Evaluator] = {}  # by further bytes, and reductions
    found: dict[Choice, Alternative] = {}
    for policy, checkpointing in itertools.product(POLICIES, (False, True)):
        several = settings.group.num_devices > 1
        name = policy.joined if several else policy.alone
        activations = RECOMPUTE if checkpointing else KEEP
        choice = uniform(problem, [activations], policy.states)
        # A policy without effect on any unit equals an earlier one.
        if not name or choice in found:
            continue
        held = bucket_bytes(problem.profile) if several and policy.buckets else 0
        ways: list[Alternative] = []
        for one in dict.fromkeys((False, sharded.settings.adds_shards and not policy.buckets)):
            if (held, one) not in evaluators:
                asked = sharded if one else problem
                evaluators[held, one] = Evaluator(asked.changed(device=asked.device - held))
            way = _alternative(name, checkpointing, evaluators[held, one], choice, held)
            ways.append(replace(way, adds_shards=one))
        # The faster one; if neither fits, the one that lacks less.
        found[choice] = min(
            ways, key=lambda way: (way.step_seconds or inf, way.peak_bytes.on_device)
        )
    return tuple(found.values())


def _alternative(
    name: str, checkpointing: bool, evaluator: Evaluator, choice: Choice, held: int
) -> Alternative:
    """A policy, with `held` bytes of the device beyond its program's."""
    problem = evaluator.problem
    found: Evaluation | None = evaluator.best_schedule(choice)
    if found is not None:
        peaks, lacks = peak_bytes(problem.program(found.plans)), dict[StateTier, int]()
        bottleneck = lanes_in_a_line(problem, choice)
    else:
        machine, lacks = problem.profile.hardware.device, problem.beyond(choice)
        needed = {tier: problem.tier_use(tier, choice) for tier in problem.tiers}
        peaks = TierBytes(
            device=max(problem.static_bytes(choice)),
            context=machine.context_bytes,
            host=needed.get("host", 0),
            disk=needed.get("disk", 0),
            allocator=machine.besides_bytes - machine.context_bytes,
        )
        words = [f"{format_bytes(size)} of {tier} memory" for tier, size in lacks.items()]
        bottleneck = ", ".join(words) or "room on the device for what it fetches"
    peaks = replace(peaks, device=peaks.device + held)
    return Alternative(
        name=name,
        checkpointing=checkpointing,
        step_seconds=found.seconds if found else None,
        peak_bytes=peaks,
        bottleneck=bottleneck,
        lacks=tuple(lacks),
        units=found.plans if found else (),
        is_tight=found is not None and is_tight(problem.profile, peaks),
    )


def planned(name: str, plan: Plan, profile: Profile, bottleneck: str) -> Alternative:
    """A plan under other conditions, such as another optimizer, as an alternative."""
    made = plan.prediction
    return Alternative(
        name=name,
        checkpointing=False,
        step_seconds=made.step_seconds,
        peak_bytes=made.peak_bytes,
        bottleneck=bottleneck,
        units=plan.units,
        is_tight=is_tight(profile, made.peak_bytes),
    )
