"""The cost of a predicted speed: model FLOPs utilisation, hours, cost and energy.

Model FLOPs utilisation (MFU; Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B) is what the
model computes in a step over what the device could compute meanwhile at its peak dense rate in the
workload's dtype. Two FLOPs are counted for each multiplication and addition of forward and backward
in matrix products, convolutions and attention, of which all scores count, also where a kernel skips
those of the future. Recomputation does not count, neither a plan's nor that of attention's own
backward. Products that frozen weights spare do not count either: below adapters, backward has the
gradients of inputs, and of weights none. Embeddings that are looked up, and optimizers, compute no
products.
"""

from dataclasses import dataclass

from protrain_runtime.contract.records.plan import DeviceGroup
from protrain_runtime.contract.records.profile import Profile, Workload

TOKENS = 1_000_000_000
"""Hours, cost and energy are of so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Bill of a way to train; None where not known.

    The cost is in the currency of the machine's price, of all devices; the energy that of all
    devices' boards at the most that each takes, without their hosts.
    """

    model_flops_utilisation: float | None = None
    hours_per_billion_tokens: float | None = None
    cost_per_billion_tokens: float | None = None
    kwh_per_billion_tokens: float | None = None


def tokens_in_step(workload: Workload, group: DeviceGroup, micro_batches: int) -> int:
    """Tokens of all micro-batches of all devices."""
    return workload.batch_size * workload.seq_len * micro_batches * group.num_devices


def spending(
    profile: Profile,
    *,
    num_devices: int,
    num_tokens: int,
    step_seconds: float,
    price_per_hour: float,
) -> Spending:
    """Return the bill for steps of so many seconds and tokens; price and all are of all devices."""
    workload, machine = profile.workload, profile.hardware
    tokens_per_s = num_tokens / step_seconds
    mfu, rates = None, machine.rates
    if rates is not None and profile.model_flops:
        peak = rates.flops_per_s(half=workload.dtype != "float32")
        batches = num_tokens / (workload.batch_size * workload.seq_len)
        mfu = profile.model_flops * batches / (num_devices * step_seconds * peak)
    hours = TOKENS / tokens_per_s / 3600
    kilowatts = num_devices * machine.power_w / 1000
    return Spending(
        model_flops_utilisation=mfu,
        hours_per_billion_tokens=hours,
        cost_per_billion_tokens=price_per_hour * hours or None,
        kwh_per_billion_tokens=kilowatts * hours or None,
    )
