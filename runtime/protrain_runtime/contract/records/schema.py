"""Records as YAML: what the reader and the writer have to agree on.

A file starts with `protrain: KIND` and `version: 3`, then has the fields of the record under
their own names, in their own order. What differs from the dataclasses:

- A field that has a default is absent where it has that value.
- A size (see `is_size`) is an integer or a text such as `1.5GiB`.
- A decision is a phrase (see `decisions`).
- The fields of a unit's `Schedule` are keys of the unit itself; a drain that ends with the step is
  `end`.
- Consecutive units that differ in nothing but the last integer of their names are one entry, with
  `names: model.layers.0-11` instead of `name: model.layers.0`.
- A unit whose parameters are used by itself alone has no `used_by`.

Files of earlier versions are refused.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Any

from protrain_runtime.contract.records.hardware import (
    Contention,
    Device,
    Hardware,
    Interconnect,
    Link,
    Observed,
    PublishedError,
    Rates,
)
from protrain_runtime.contract.records.plan import (
    Budgets,
    Plan,
    Prediction,
    StagePlan,
    StepSettings,
    TierBytes,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import (
    HANDED,
    Compilation,
    FormCost,
    OptimizerCost,
    Profile,
    Repetitions,
    Unit,
    Workload,
)
from protrain_runtime.contract.units import MAX_BYTES, exact_bytes

VERSION = 3

DEVICE_KIND = r"[a-z][a-z0-9_]{0,99}"
"""Names of device types: PyTorch's own, and those that backends register."""

PATTERNS: dict[tuple[type, str], tuple[str, str]] = {
    (Device, "kind"): (DEVICE_KIND, "a type of device such as cpu or cuda"),
    (Workload, "device"): (DEVICE_KIND, "a type of device such as cpu or cuda"),
    (Unit, "gets"): (HANDED, "shape and dtype, such as 1x4096x4096 bfloat16"),
}
"""Texts that have a form: as a regular expression, and in words."""

Record = Hardware | Profile | Plan
KINDS: dict[type, str] = {Hardware: "hardware", Profile: "profile", Plan: "plan"}

STEP_END = "end"
"""A drain of `None`: until the step's end."""


def may_miss(owner: Any) -> tuple[str, ...]:
    """Names of the fields that a file may leave out: those with a default value."""
    names = (f.name for f in fields(owner) if f.default is not MISSING)
    return tuple(name for name in names if (owner, name) != (StepSettings, "piece_bytes"))


def is_size(owner: type, name: str) -> bool:
    """Whether the integer field `name` of `owner` counts bytes."""
    is_pieces = owner in (Unit, FormCost) and name.endswith("_pieces")
    return name.endswith("_bytes") or is_pieces or owner in (Budgets, TierBytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers that a field can take: those from `low` to `high`, and 0 with `or_zero`."""

    low: float = 0
    high: float
    or_zero: bool = False

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high or (self.or_zero and number == 0)

    def __str__(self) -> str:
        zero = ", or 0" if self.or_zero else ""
        return f"from {_words(self.low)} to {_words(self.high)}{zero}"


_LARGEST = exact_bytes(MAX_BYTES)


def _words(end: float) -> str:
    if abs(end) == MAX_BYTES:
        return f"-{_LARGEST}" if end < 0 else _LARGEST
    return str(end) if isinstance(end, int) else f"{end:g}"


MAX_UNITS = 1_000
"""Units of a model, runs unfolded: as many as a command looks at in seconds."""
MAX_UNFOLDED = 500_000
"""Keys and values of all units, those of a run counted for each of its units."""
MAX_LIST = 1_000
"""Entries of a list of which nothing else is said."""
MAX_COUNT = 100_000
"""Devices, threads: what there can be of things."""
MAX_SECONDS = 1e9

SIZES = Limits(high=MAX_BYTES)
_SIGNED_SIZES = Limits(low=-MAX_BYTES, high=MAX_BYTES)  # relative to a level: may be far below it
_COUNTS = Limits(low=1, high=MAX_COUNT)
_MANY = Limits(low=1, high=10**9)
_SECONDS = Limits(low=1e-12, high=1e6, or_zero=True)
STEPS = Limits(low=1e-12, high=MAX_SECONDS)
_SPEEDS = Limits(low=1.0, high=1e21)
_SHARES = Limits(low=1e-6, high=1.0)
_SHARES_OR_NONE = Limits(low=1e-6, high=1.0, or_zero=True)
_SPEEDS_OR_NONE = Limits(low=1.0, high=1e21, or_zero=True)
_HALVES = Limits(low=0.5, high=1.0)
_FACTORS = Limits(low=1e-12, high=1e6, or_zero=True)
PRICES = Limits(low=1e-6, high=1e6, or_zero=True)
_WATTS = Limits(low=1.0, high=1e6, or_zero=True)
_FLOPS = Limits(low=1.0, high=1e27, or_zero=True)
_SLOTS = Limits(low=1e-6, high=2.0 * MAX_UNITS, or_zero=True)

LIMITS: dict[tuple[type, str], Limits] = {
    (Hardware, "price_per_hour"): PRICES,
    (Hardware, "power_w"): _WATTS,
    (Profile, "model_flops"): _FLOPS,
    (Link, "duplex"): _HALVES,
    (Observed, "seconds"): _SECONDS,
    (Compilation, "seconds"): _SECONDS,
    (Contention, "compute"): _SHARES,
    (Contention, "lane"): _SHARES,
    (Rates, "compute_efficiency"): _SHARES,
    (Rates, "memory_efficiency"): _SHARES,
    (Rates, "multiprocessors"): Limits(high=MAX_COUNT),
    (Rates, "attention_efficiency"): _SHARES_OR_NONE,
    (Rates, "attention_backward_efficiency"): _SHARES_OR_NONE,
    (Rates, "host_bandwidth_bytes_per_s"): _SPEEDS_OR_NONE,
    (PublishedError, "low"): _FACTORS,
    (PublishedError, "high"): _FACTORS,
    (PublishedError, "runs"): _COUNTS,
    (OptimizerCost, "node_parameters_per_s"): _SPEEDS_OR_NONE,
    (Interconnect, "devices_per_node"): _COUNTS,
    (Interconnect, "link_share"): _HALVES,
    (FormCost, "backward_peak_bytes"): _SIGNED_SIZES,
    (Workload, "batch_size"): _MANY,
    (Workload, "seq_len"): _MANY,
    (Workload, "seed"): Limits(high=2**63 - 1),
    (Unit, "num_parameters"): Limits(high=10**15),
    (Unit, "used_by"): Limits(high=MAX_UNITS - 1),
    (Unit, "reads"): Limits(high=MAX_UNITS - 1),
    (Unit, "own_inputs"): Limits(high=MAX_LIST),
    (UnitPlan, "own_inputs"): Limits(high=MAX_LIST),
    (OptimizerCost, "workspace_fraction"): _FACTORS,
    (OptimizerCost, "block"): Limits(high=10**9),
    (OptimizerCost, "cut_elements"): Limits(low=1, high=10**9),
    (Repetitions, "num_steps"): _MANY,
    (Repetitions, "low"): _SHARES,
    (Repetitions, "high"): Limits(low=1.0, high=1e6),
    (Repetitions, "planned"): _FACTORS,
    (Prediction, "step_seconds"): STEPS,
    (Prediction, "lower_bound_seconds"): STEPS,
    (Prediction, "first_step_seconds"): Limits(low=1e-12, high=MAX_SECONDS, or_zero=True),
    (Prediction, "clipped_step_seconds"): Limits(low=1e-12, high=MAX_SECONDS, or_zero=True),
    (Prediction, "host_update_seconds"): Limits(low=1e-12, high=MAX_SECONDS, or_zero=True),
    (Prediction, "host_update_threads"): Limits(high=MAX_COUNT),
    (StepSettings, "clip_share"): Limits(low=1e-6, high=1.0, or_zero=True),
    (StepSettings, "disk_gain"): Limits(high=100.0),
    (StepSettings, "piece_bytes"): Limits(low=1, high=MAX_BYTES),
    (StepSettings, "micro_batches"): Limits(low=1, high=10**6),
    (StepSettings, "held"): Limits(low=1, high=10**6),
    (StagePlan, "held"): Limits(low=1, high=10**6),
    (StagePlan, "piece_bytes"): Limits(low=1, high=MAX_BYTES),
    (StagePlan, "cycle_seconds"): STEPS,
}
"""Fields whose values their names do not tell."""


def limits_of(owner: type, name: str) -> Limits:
    """The numbers that a field takes. With these, no sum, product or quotient overflows."""
    if (found := LIMITS.get((owner, name))) is not None:
        return found
    if is_size(owner, name):
        return SIZES
    if name.endswith("_per_s"):
        return _SPEEDS
    if name.endswith("_s"):
        return _SECONDS
    if name.endswith(("_lead", "_drain")):
        return _SLOTS
    if name.startswith("num_"):
        return _COUNTS
    if name.startswith("error_"):
        return _FACTORS
    raise AssertionError(f"{owner.__name__}.{name} has no limits")


MAX_ENTRIES: dict[tuple[type, str], int] = {
    (Profile, "tensors"): 100_000,
    (Plan, "tensors"): 100_000,
    (Unit, "parameters"): 100_000,
    (UnitPlan, "parameters"): 100_000,
    (Unit, "used_by"): MAX_UNITS,
    (Unit, "reads"): MAX_UNITS,
    (UnitPlan, "also_used_by"): MAX_UNITS,
}
"""The longest lists of those that may have more than `MAX_LIST` entries."""

MAX_CHARACTERS: dict[tuple[type, str], int] = {
    (Workload, "model_config"): 1_000_000,
    (Hardware, "sources"): 10_000,
    (Profile, "tensors"): 10_000,
    (Plan, "tensors"): 10_000,
    (Unit, "stays"): 10_000,
    (Unit, "runs_once"): 10_000,
}
"""The longest texts of those that may have more than `tree.MAX_TEXT` characters."""

OF_LINES = ((Hardware, "sources"), (Unit, "stays"), (Unit, "runs_once"))
"""Texts that may have several lines."""
