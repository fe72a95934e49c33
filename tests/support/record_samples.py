"""Records, and the texts that they are as files, for the tests of reading and writing."""

from protrain_runtime.contract.records.hardware import Contention, Device, Hardware, Link, Tier
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Budgets,
    Placement,
    Plan,
    Prediction,
    Schedule,
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

GIB = 2**30

HARDWARE = Hardware(
    name="laptop",
    device=Device(
        kind="cpu",
        name="Some CPU @ 2.5 GHz",
        memory_bytes=16 * GIB,
        context_bytes=300 * 2**20,
        num_threads=2,
    ),
    tiers=(
        Tier(
            name="disk",
            capacity_bytes=100 * 10**9,
            link=Link(
                read_bytes_per_s=1.2e9, write_bytes_per_s=8.5e8, latency_s=0.0001, duplex=0.5
            ),
        ),
    ),
    read_contention=Contention(compute=0.95, lane=0.9),
    write_contention=Contention(compute=0.95, lane=0.9),
    update_contention=Contention(compute=0.5, lane=0.5),
)
WORKLOAD = Workload(
    model="llama-small",
    model_config='{"hidden_size":512}',
    batch_size=1,
    seq_len=2048,
    dtype="bfloat16",
    device="cpu",
    seed=0,
)


def unit(name: str, used_by: tuple[int, ...], *forms: Form) -> Unit:
    costs = (
        FormCost(
            form=form,
            forward_peak_bytes=108 * 2**20,
            kept_bytes=16777217,
            backward_peak_bytes=216 * 2**20,
            swappable_bytes=2**24,
            forward_s=0.0125,
            backward_s=0.025,
        )
        for form in forms
    )
    return Unit(
        name=name,
        kind="block",
        num_parameters=1000,
        parameter_bytes=2000,
        gradient_bytes=2000,
        state_bytes=12000,
        used_by=used_by,
        forms=tuple(costs),
    )


PROFILE = Profile(
    workload=WORKLOAD,
    hardware=HARDWARE,
    method="measured",
    model_fingerprint="sha256:0123456789abcdef",
    optimizer=OptimizerCost(
        name="AdamW",
        host_parameters_per_s=6.4e8,
        device_parameters_per_s=6.4e8,
        workspace_fraction=0.0,
    ),
    base_bytes=16384,
    units=(
        unit("embed", (0, 33), "keep"),
        *(unit(f"model.layers.{i}", (i + 1,), "keep", "full") for i in range(32)),
        unit("head", (), "keep"),
    ),
)


def layers(*activations: Activations) -> tuple[UnitPlan, ...]:
    """A plan's units: an embedding, one layer for each decision, a head."""
    names = ("embed", *(f"model.layers.{i}" for i in range(len(activations))), "head")
    decisions = (KEEP, *activations, KEEP)
    return tuple(
        UnitPlan(
            name=name,
            activations=decision,
            states=PERSISTENT if name == "head" else Placement(tier="disk"),
            schedule=Schedule(forward_lead=1, swap_drain=2)
            if decision.tier and decision.recomputes
            else Schedule(),
        )
        for name, decision in zip(names, decisions, strict=True)
    )


PLAN = Plan(
    workload=WORKLOAD,
    hardware="laptop",
    optimizer="AdamW",
    profile_fingerprint="sha256:0123456789abcdef",
    model_fingerprint="sha256:0123456789abcdef",
    exact=True,
    budgets=Budgets(device=4 * GIB, host=0, disk=100 * 10**9),
    prediction=Prediction(
        step_seconds=1.25,
        lower_bound_seconds=1.2,
        peak_bytes=TierBytes(device=3 * GIB, context=300 * 2**20, host=0, disk=5 * GIB),
    ),
    units=layers(*[Activations(form="full", tier="disk")] * 12, *[RECOMPUTE] * 20),
    settings=StepSettings(piece_bytes=256 * 2**20),
)

PLAN_TEXT = """\
# A training plan: what each unit keeps for backward, and where its model states live.
#   names        a run of equal units (layers.0-2: layers.0, layers.1, layers.2)
#   activations  keep | recompute | swap to TIER | swap-input to TIER (and recompute)
#                recompute lite|mlp|attn, swap to TIER and recompute lite|mlp|attn: in part
#   states       persistent (and update in backward) | offload to TIER or shard (and keep gathered)
#   ..._lead     a fetch may start this many slots before the one it serves; absent: 0
#   ..._drain    bytes have left the device this many slots later; absent: by the step's end
#                (1.3: two slots for 30 % of the bytes, one slot for the others)
protrain: plan
version: 3
workload:
  model: llama-small
  model_config: '{"hidden_size":512}'
  batch_size: 1
  seq_len: 2048
  dtype: bfloat16
  device: cpu
  seed: 0
hardware: laptop
optimizer: AdamW
profile_fingerprint: sha256:0123456789abcdef
model_fingerprint: sha256:0123456789abcdef
exact: true
budgets: {device: 4GiB, host: 0, disk: 100000000000}
prediction:
  step_seconds: 1.25
  lower_bound_seconds: 1.2
  peak_bytes: {device: 3GiB, context: 300MiB, host: 0, disk: 5GiB}
settings: {piece_bytes: 256MiB}
units:
  - {name: embed, activations: keep, states: offload to disk}
  - {names: model.layers.0-11, activations: swap-input to disk, states: offload to disk, \
forward_lead: 1, swap_drain: 2}
  - {names: model.layers.12-31, activations: recompute, states: offload to disk}
  - {name: head, activations: keep, states: persistent}
"""
