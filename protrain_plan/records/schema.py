"""How records look as YAML: what the reader and the writer have to agree on.

A file starts with `protrain: KIND` and `version: 1`, then has the fields of the record under
their own names, in their own order. What differs from the dataclasses:

- A field that has a default is absent where it has that value.
- A size (see `is_size`) is an integer or a text such as `1.5GiB`.
- A decision is a phrase (see `activations_text`, `states_text`).
- The fields of a unit's `Schedule` stand in the unit itself; a drain that ends with the step is
  `end`.
- Consecutive units that differ in nothing but the last integer of their names are one entry, with
  `names: model.layers.0-11` instead of `name: model.layers.0`.
- A unit whose parameters are used by itself alone has no `used_by`.
"""

import math
from dataclasses import dataclass
from typing import assert_never, get_args

from protrain_plan.records.hardware import (
    Collectives,
    Contention,
    Device,
    Hardware,
    Interconnect,
    Link,
    Rates,
    TierName,
)
from protrain_plan.records.plan import (
    Activations,
    Budgets,
    Buffer,
    Keep,
    Offload,
    Persistent,
    Placement,
    Plan,
    Prediction,
    Recompute,
    StateTier,
    Swap,
    SwapInput,
    TierBytes,
)
from protrain_plan.records.profile import (
    FormCost,
    OptimizerCost,
    Profile,
    RecomputedForm,
    Repetitions,
    Unit,
    Workload,
)

VERSION = 1

DEVICE_KIND = r"[a-z][a-z0-9_]*"
"""What a type of device is called: PyTorch's own names, and those that backends register."""

PATTERNS: dict[tuple[type, str], tuple[str, str]] = {
    (Device, "kind"): (DEVICE_KIND, "a type of device such as cpu or cuda"),
    (Workload, "device"): (DEVICE_KIND, "a type of device such as cpu or cuda"),
}
"""Texts that have a form: as a regular expression, and in words."""

Record = Hardware | Profile | Plan
KINDS: dict[type, str] = {Hardware: "hardware", Profile: "profile", Plan: "plan"}

STEP_END = "end"
"""A drain of `None`: until the step's end."""


def activations_text(activations: Activations) -> str:
    """The decision as a phrase: `keep`, `swap-input to disk`, ..."""
    match activations:
        case Keep():
            return "keep"
        case Recompute(form="full"):
            return "recompute"
        case Recompute(form=form):
            return f"recompute {form}"
        case Swap(tier=tier):
            return f"swap to {tier}"
        case SwapInput(tier=tier, form="full"):
            return f"swap-input to {tier}"
        case SwapInput(tier=tier, form=form):
            return f"swap to {tier} and recompute {form}"
        case _:
            assert_never(activations)


def states_text(states: Placement) -> str:
    """The placement as a phrase: `persistent`, `offload to disk`, `shard`, ..."""
    match states:
        case Persistent():
            return "persistent"
        case Offload(tier="device"):
            return "shard"
        case Buffer(tier="device"):
            return "buffer from shards"
        case Offload(tier=tier):
            return f"offload to {tier}"
        case Buffer(tier=tier):
            return f"buffer from {tier}"
        case _:
            assert_never(states)


_TIERS: tuple[TierName, ...] = get_args(TierName)
_STATE_TIERS: tuple[StateTier, ...] = (*_TIERS, "device")
_FORMS: tuple[RecomputedForm, ...] = ("full", "lite", "mlp", "attn")
FORM_WORDS = _FORMS[1:]
"""How the phrases of decisions end that name a form of recomputation."""
_ACTIVATIONS: tuple[Activations, ...] = (
    Keep(),
    *(Recompute(form=form) for form in _FORMS),
    *(Swap(tier=tier) for tier in _TIERS),
    *(SwapInput(tier=tier, form=form) for form in _FORMS for tier in _TIERS),
)
_STATES: tuple[Placement, ...] = (
    Persistent(),
    *(Offload(tier=tier) for tier in _STATE_TIERS),
    *(Buffer(tier=tier) for tier in _STATE_TIERS),
)
ACTIVATIONS: dict[str, Activations] = {activations_text(a): a for a in _ACTIVATIONS}
STATES: dict[str, Placement] = {states_text(s): s for s in _STATES}


def is_size(owner: type, name: str) -> bool:
    """Whether the integer field `name` of `owner` counts bytes."""
    is_pieces = owner in (Unit, FormCost) and name.endswith("_pieces")
    return name.endswith("_bytes") or is_pieces or owner in (Budgets, TierBytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers that a field can take."""

    low: float = 0
    high: float | None = None
    low_allowed: bool = True

    def __contains__(self, number: float) -> bool:
        above = number >= self.low if self.low_allowed else number > self.low
        return above and (self.high is None or number <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"of at least {self.low:g}" if self.low_allowed else f"above {self.low:g}"
        if self.low_allowed:
            return f"from {self.low:g} to {self.high:g}"
        return f"above {self.low:g} and up to {self.high:g}"


NOT_NEGATIVE = Limits()
_POSITIVE = Limits(low_allowed=False)
_COUNT = Limits(low=1)
_ANY = Limits(low=-math.inf)  # relative to a level, which a slot may leave far below
_SHARE = Limits(high=1, low_allowed=False)

LIMITS: dict[tuple[type, str], Limits] = {
    (Link, "read_bytes_per_s"): _POSITIVE,
    (Link, "write_bytes_per_s"): _POSITIVE,
    (Link, "duplex"): Limits(low=0.5, high=1),
    (Device, "num_threads"): _COUNT,
    (Contention, "compute"): _SHARE,
    (Contention, "lane"): _SHARE,
    (Rates, "float32_flops_per_s"): _POSITIVE,
    (Rates, "bfloat16_flops_per_s"): _POSITIVE,
    (Rates, "compute_efficiency"): _SHARE,
    (Rates, "memory_bytes_per_s"): _POSITIVE,
    (Rates, "memory_efficiency"): _SHARE,
    (Rates, "host_parameters_per_s"): _POSITIVE,
    (Collectives, "gather_bytes_per_s"): _POSITIVE,
    (Collectives, "reduce_bytes_per_s"): _POSITIVE,
    (Interconnect, "devices_per_node"): _COUNT,
    (Interconnect, "link_share"): Limits(low=0.5, high=1),
    (FormCost, "kept_bytes"): _ANY,
    (FormCost, "backward_peak_bytes"): _ANY,
    (Workload, "batch_size"): _COUNT,
    (Workload, "seq_len"): _COUNT,
    (OptimizerCost, "host_parameters_per_s"): _POSITIVE,
    (OptimizerCost, "device_parameters_per_s"): _POSITIVE,
    (Repetitions, "num_steps"): _COUNT,
    (Repetitions, "low"): _SHARE,
    (Repetitions, "high"): Limits(low=1),
    (Prediction, "step_seconds"): _POSITIVE,
    (Prediction, "lower_bound_seconds"): _POSITIVE,
    (Plan, "piece_bytes"): _COUNT,
    (Plan, "micro_batches"): _COUNT,
    (Plan, "num_devices"): _COUNT,
    (Plan, "num_replicas"): _COUNT,
    (Plan, "num_nodes"): _COUNT,
}
"""Where a field takes less than all numbers that are not negative."""
