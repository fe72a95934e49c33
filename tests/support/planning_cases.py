"""Synthetic profiles for tests of planning: records only, sizes of a decoder."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from protrain_plan.hardware.kernels import Work
from protrain_plan.planning.model.options import Pin
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.answers import Question
from protrain_plan.planning.questions.planner import Hint, solve_problem
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.planning.search.improving import Effort
from protrain_plan.profiling.tally import Tally, UpdateWork
from protrain_runtime.contract.records import fingerprint
from protrain_runtime.contract.records.hardware import (
    Collectives,
    Contention,
    Device,
    Hardware,
    Interconnect,
    Link,
    Rates,
    Shared,
    Tier,
)
from protrain_runtime.contract.records.plan import (
    Budgets,
    DeviceGroup,
    Plan,
    Prediction,
    StepSettings,
    TierBytes,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import (
    Form,
    FormCost,
    OptimizerCost,
    Profile,
    Unit,
    Workload,
)

MB = 1_000_000
RATES = Rates(
    float32_flops_per_s=10e12,
    bfloat16_flops_per_s=100e12,
    compute_efficiency=0.5,
    memory_bytes_per_s=1e12,
    memory_efficiency=0.8,
    operator_s=1e-6,
    host_parameters_per_s=1e9,
)
FREE = Contention(compute=1.0, lane=1.0)


def gpu(
    *,
    pcie: float = 20e9,
    duplex: float = 0.8,
    host_gb: float = 512,
    disk_gb: float = 0,
    contention: Contention = FREE,
) -> Hardware:
    """A machine with a graphics card, host memory, and a disk if `disk_gb` says so."""
    link = Link(read_bytes_per_s=pcie, write_bytes_per_s=pcie, latency_s=20e-6, duplex=duplex)
    tiers = [Tier(name="host", capacity_bytes=int(host_gb * 1e9), link=link)]
    if disk_gb:
        slow = Link(read_bytes_per_s=5e9, write_bytes_per_s=3e9, latency_s=1e-4, duplex=0.6)
        tiers.append(Tier(name="disk", capacity_bytes=int(disk_gb * 1e9), link=slow))
    return Hardware(
        name="gpu",
        device=Device(
            kind="cuda",
            name="card",
            memory_bytes=80 * 10**9,
            context_bytes=500 * MB,
            num_threads=16,
        ),
        tiers=tuple(tiers),
        read_contention=contention,
        write_contention=contention,
        update_contention=contention,
    )


def cpu(
    *,
    read: float = 1.5e9,
    write: float = 0.8e9,
    duplex: float = 0.6,
    contention: float = 0.85,
    disk_gb: float = 512,
) -> Hardware:
    """A machine whose device is host memory, with a disk below it."""
    link = Link(read_bytes_per_s=read, write_bytes_per_s=write, latency_s=1e-4, duplex=duplex)
    both = Contention(compute=contention, lane=contention)
    return Hardware(
        name="cpu",
        device=Device(
            kind="cpu", name="cores", memory_bytes=16 * 10**9, context_bytes=300 * MB, num_threads=2
        ),
        tiers=(Tier(name="disk", capacity_bytes=int(disk_gb * 1e9), link=link),),
        read_contention=both,
        write_contention=both,
        update_contention=Contention(compute=0.6, lane=0.6),
    )


def unit(
    name: str,
    *,
    parameters: int,
    kept: int,
    seconds: float,
    inputs: int = 0,
    used_by: tuple[int, ...] = (),
    parameter_width: int = 2,
    state_width: int = 12,
    workspace: int = 0,
    pieces: int = 1,
) -> Unit:
    """A unit that keeps `kept` bytes, or `inputs` bytes in the form full (none: no such form)."""
    gradient = parameters * parameter_width
    keep = FormCost(
        form="keep",
        forward_peak_bytes=kept + workspace,
        kept_bytes=kept,
        backward_peak_bytes=gradient + workspace + kept // 8,
        swappable_bytes=kept - kept // 16,
        forward_s=seconds,
        backward_s=2 * seconds,
        swap_pieces=split(kept - kept // 16, pieces),
    )
    forms = [keep]
    if inputs:
        full = FormCost(
            form="full",
            forward_peak_bytes=inputs + workspace + kept // 4,
            kept_bytes=inputs,
            backward_peak_bytes=gradient + workspace + kept // 8 + kept - inputs,
            swappable_bytes=inputs,
            forward_s=seconds,
            backward_s=3 * seconds,
            swap_pieces=split(inputs, min(pieces, 2)),
        )
        forms.append(full)
    return Unit(
        name=name,
        kind="block" if inputs else "part",
        num_parameters=parameters,
        parameter_bytes=parameters * parameter_width,
        gradient_bytes=gradient,
        state_bytes=parameters * state_width,
        used_by=used_by,
        forms=tuple(forms),
        parameter_pieces=split(parameters * parameter_width, pieces),
        gradient_pieces=split(gradient, pieces),
    )


def split(size: int, pieces: int) -> tuple[int, ...]:
    """`size` bytes in pieces, the later ones larger."""
    if pieces == 1 or size < 100:
        return ()
    weights = range(1, pieces + 1)
    sizes = [size * weight // sum(weights) // 8 * 8 for weight in weights]
    return (*sizes[:-1], size - sum(sizes[:-1]))


def with_form(profile: Profile, form: Form, leave: str) -> Profile:
    """A profile by leave: in another form blocks keep half of what they keep."""
    units = []
    for unit in profile.units:
        half = replace(unit.forms[0], form=form, kept_bytes=unit.forms[0].kept_bytes // 2)
        forms = (unit.forms[0], half, *unit.forms[1:]) if unit.kind == "block" else unit.forms
        units.append(replace(unit, forms=forms))
    return replace(profile, units=tuple(units), allowed=(leave,))


def tally_of(profile: Profile) -> Tally:
    """A profile with the seconds of some operators, one a slot and more of each form."""
    forms = dict.fromkeys(cost.form for unit in profile.units for cost in unit.forms)
    slots = range(2 * len(profile.units) + 1)
    logs = {
        form: [[Work(1e12 * number, 10**9 * (1 + slot), half=True)] for slot in slots]
        for number, form in enumerate(forms)
    }
    update = UpdateWork(device_bytes=28.0, host_bytes=34.0, host_share=1.0)
    return Tally.of(profile, logs, tuple(range(len(profile.units))), update)


def decoder(
    hardware: Hardware,
    *,
    blocks: int,
    block_parameters: int = 200 * MB,
    embedding_parameters: int = 130 * MB,
    kept: int = 600 * MB,
    seconds: float = 0.02,
    tied: bool = False,
    parameter_width: int = 2,
    state_width: int = 12,
    host_speed: float = 1.5e9,
    device_speed: float = 40e9,
    pieces: int = 1,
) -> Profile:
    """An embedding, `blocks` equal blocks and a head with its loss."""
    last = blocks + 1
    widths = {"parameter_width": parameter_width, "state_width": state_width}
    units = [
        unit(
            "embedding",
            parameters=embedding_parameters,
            kept=kept // 16,
            seconds=seconds / 20,
            used_by=(0, last) if tied else (0,),
            **widths,
        )
    ]
    units += [
        unit(
            f"layers.{n}",
            parameters=block_parameters,
            kept=kept,
            inputs=kept // 16,
            seconds=seconds,
            used_by=(n + 1,),
            workspace=kept // 10,
            pieces=pieces,
            **widths,
        )
        for n in range(blocks)
    ]
    units.append(
        unit(
            "head",
            parameters=0 if tied else embedding_parameters,
            kept=kept // 2,
            seconds=seconds / 2,
            used_by=() if tied else (last,),
            workspace=kept // 4,
            **widths,
        )
    )
    return Profile(
        workload=Workload(
            model="synthetic",
            model_config="",
            batch_size=1,
            seq_len=1024,
            dtype="bfloat16" if parameter_width == 2 else "float32",
            device=hardware.device.kind,
            seed=0,
        ),
        hardware=hardware,
        method="estimated",
        model_fingerprint="sha256:0",
        optimizer=OptimizerCost(
            name="adamw",
            host_parameters_per_s=host_speed,
            device_parameters_per_s=device_speed,
            workspace_fraction=0.0 if hardware.device.kind == "cuda" else 0.5,
        ),
        base_bytes=20 * MB,
        units=tuple(units),
    )


def small(hardware: Hardware, *, blocks: int = 6, **own: Any) -> Profile:
    """A decoder of 20 ms a block, with states that a slow host updates; `own` is what differs."""
    sizes = {"block_parameters": 40 * MB, "embedding_parameters": 20 * MB, "kept": 200 * MB}
    return decoder(hardware, blocks=blocks, **{**sizes, "host_speed": 1e9, **own})


def within(profile: Profile, device: int, below: int = 10**12) -> Budgets:
    context = profile.hardware.device.context_bytes
    return Budgets(device=device + context, host=below, disk=below)


def question(
    profile: Profile, budgets: Budgets, *pins: Pin, replicas: tuple[int, ...] = (), **own: Any
) -> Question:
    """A question about steps that overlap; `own` settings are what differs."""
    settings = replace(OVERLAPPING, **own)
    return Question(
        profile=profile, budgets=budgets, settings=settings, pins=pins, replicas=replicas
    )


def drafted(
    profile: Profile,
    units: Sequence[UnitPlan],
    budgets: Budgets,
    settings: StepSettings,
    seconds: float = 1.0,
) -> Plan:
    """A plan with these decisions, good or bad; what it predicts means nothing."""
    nothing = TierBytes(device=0, context=0, host=0, disk=0)
    return Plan(
        workload=profile.workload,
        hardware=profile.hardware.name,
        optimizer=profile.optimizer.name,
        profile_fingerprint=fingerprint(profile),
        model_fingerprint=profile.model_fingerprint,
        exact=True,
        budgets=budgets,
        prediction=Prediction(
            step_seconds=seconds, lower_bound_seconds=seconds, peak_bytes=nothing
        ),
        units=tuple(units),
        settings=settings,
    )


def solved(outcome: Solved | Infeasible | None) -> Solved:
    assert isinstance(outcome, Solved)
    return outcome


def infeasible(outcome: Solved | Infeasible | None) -> Infeasible:
    assert isinstance(outcome, Infeasible)
    return outcome


def least_bytes(problem: Problem) -> int:
    """Device bytes of tensors with which some choice fits."""
    lean = min_memory(problem)
    assert lean
    return lean.bytes


def kept_bytes(problem: Problem) -> int:
    """Device bytes where everything is kept and persistent."""
    return max(problem.static_bytes(tuple((0, 0) for _ in problem.options)))


def joined(
    hardware: Hardware,
    *,
    network: float = 5e9,
    devices_per_node: int = 4,
    across: float | None = 1e9,
    link_share: float = 1.0,
    contention: Contention = FREE,
    library_bytes: int = 0,
    below: Shared = "of each device",
) -> Hardware:
    """The machine with others like it beside it."""
    speeds = Collectives(
        gather_bytes_per_s=network, reduce_bytes_per_s=0.8 * network, latency_s=1e-5
    )
    far = None
    if across:
        far = replace(speeds, gather_bytes_per_s=across, reduce_bytes_per_s=across)
    return replace(
        hardware,
        interconnect=Interconnect(
            devices_per_node=devices_per_node,
            intra_node=speeds,
            inter_node=far,
            contention=contention,
            link_share=link_share,
            library_bytes=library_bytes,
            below=below,
        ),
    )


GROUPS = (
    DeviceGroup(num_devices=2),
    DeviceGroup(num_devices=3),
    DeviceGroup(num_devices=2, num_replicas=2),
    DeviceGroup(num_devices=4, num_replicas=2),
    DeviceGroup(num_devices=8, num_nodes=2),
    DeviceGroup(num_devices=8, num_nodes=2, num_replicas=2),
)


def on_several(profile: Profile, rng: random.Random) -> tuple[Profile, DeviceGroup]:
    """The profile's machine joined with others in some way, and a group of them."""
    hardware = joined(
        profile.hardware,
        network=rng.choice([2e8, 5e9, 1e11]),
        link_share=rng.choice([0.5, 0.7, 1.0]),
        contention=Contention(compute=rng.choice([0.8, 1.0]), lane=rng.choice([0.9, 1.0])),
        library_bytes=rng.choice([0, 10 * MB]),
        below=rng.choice(["of the node", "of each device"]),
    )
    return replace(profile, hardware=hardware), rng.choice(GROUPS)


def random_profile(rng: random.Random, *, max_blocks: int = 6) -> Profile:
    """Some small model on some machine: every kind of lane, tied weights, frozen parts."""
    contention = Contention(compute=rng.choice([1.0, 0.9]), lane=rng.choice([1.0, 0.8]))
    hardware = rng.choice(
        [
            gpu(duplex=rng.choice([0.5, 0.8, 1.0]), contention=contention),
            gpu(disk_gb=1000, contention=contention),
            cpu(duplex=rng.choice([0.4, 0.6, 1.0]), contention=rng.choice([0.7, 0.85, 1.0])),
        ]
    )
    profile = decoder(
        hardware,
        blocks=rng.randint(1, max_blocks),
        block_parameters=rng.choice([4, 12, 40]) * MB,
        embedding_parameters=rng.choice([2, 20, 60]) * MB,
        kept=rng.choice([20, 80, 300]) * MB,
        seconds=rng.choice([0.005, 0.05, 0.3]),
        tied=rng.random() < 0.4,
        parameter_width=rng.choice([2, 4]),
        state_width=rng.choice([0, 8, 12]),
        host_speed=rng.choice([2e8, 2e9]),
        device_speed=rng.choice([4e8, 4e10]),
        pieces=rng.choice([1, 2, 7]),
    )
    units = []
    for one in profile.units:
        if one.num_parameters and rng.random() < 0.2:  # frozen in part, or as a whole
            trainable = one.num_parameters // rng.choice([8, 10**9])
            one = replace(
                one,
                num_parameters=trainable,
                gradient_bytes=one.gradient_bytes * trainable // one.num_parameters,
                state_bytes=one.state_bytes * trainable // one.num_parameters,
                parameter_pieces=(),
                gradient_pieces=(),
            )
        units.append(one)
    return replace(
        profile,
        units=tuple(units),
        hardware=replace(hardware, move_s=rng.choice([0.0, 1e-4, 1e-2])),
        optimizer=replace(profile.optimizer, host_piece_s=rng.choice([0.0, 1e-3, 0.1])),
    )


def with_launches(profile: Profile, rng: random.Random) -> Profile:
    """A profile in which some units take longer to launch than to compute."""
    units = []
    for one in profile.units:
        forward, backward = (rng.choice([0.0, 0.5, 2.0]) for _ in range(2))
        forms = tuple(
            replace(
                cost,
                forward_launch_s=forward * cost.forward_s,
                backward_launch_s=backward * cost.backward_s,
            )
            for cost in one.forms
        )
        units.append(replace(one, forms=forms))
    return replace(profile, units=tuple(units))


def with_copies(profile: Profile, rng: random.Random) -> Profile:
    """A profile that was recorded with leave: blocks in int8, a head in 8 tiles, as fast or not."""
    slower, of_copies = rng.choice([1.0, 1.05, 2.0]), rng.choice([2, 4])
    units = []
    for one in profile.units:
        keep, *others = one.forms
        forms = [keep, *others]
        if one.kind == "block":
            kept = keep.kept_bytes // of_copies
            int8 = replace(
                keep,
                form="int8",
                kept_bytes=kept,
                swappable_bytes=kept - kept // 16,
                swap_pieces=(),
                backward_peak_bytes=keep.backward_peak_bytes + kept // 4,
                forward_s=keep.forward_s * slower,
            )
            forms = [keep, int8, *others]
        elif one is profile.units[-1]:
            tiles = replace(
                keep,
                form="8 tiles",
                forward_peak_bytes=keep.forward_peak_bytes // 4,
                kept_bytes=keep.kept_bytes // 8,
                swappable_bytes=0,
                swap_pieces=(),
                backward_s=keep.backward_s * slower,
            )
            forms = [keep, tiles]
        units.append(replace(one, forms=tuple(forms)))
    return replace(profile, units=tuple(units), allowed=("rounding", "int8-activations"))


def plan(
    profile: Profile,
    budgets: Budgets,
    settings: StepSettings = OVERLAPPING,
    *,
    effort: Effort | None = None,
    hints: Sequence[Hint] = (),
) -> Solved | Infeasible:
    """The fastest plan found within `budgets` (context included), or `Infeasible`."""
    problem = Problem.of(profile, budgets, settings)
    return solve_problem(problem, effort=effort or Effort(), hints=hints)
