"""Bytes that PyTorch's allocator may reserve beyond tensors, as long as no card has measured it.

Peaks count tensors, and limits are on what the allocator has reserved: blocks are cut from
segments, and what is free of a segment may be too small for the next tensor. A measured profile has
its own figure (`Device.allocator_bytes`), which plans hold back. An estimate knows none: by default
its plans leave room for the most that was seen with `expandable_segments`, which `protrain run`
sets. A plan that leaves less, because its budget is given, is *tight*.

The figures are of runs whose authors published both (LoRA of Llama 2 7B by FSDP). None says that it
set `expandable_segments`, which lowers them:

                                                       GB allocated or active   reserved   more
    AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md                        9.16      10.22   12 %
      the same with 512 tokens                                           8.28      10.24   24 %
    meta-llama/llama-cookbook, pull request 41                          25.86      32.67   26 %
      with limit_all_gathers                                            20.20      27.36   35 %
      and without logits that live on                                   15.22      19.36   27 %

With it, an H200 reserved 4 to 10 % more in four trainings under plans (benchmarks/results/gpu.md).
Others saw more without: GMLake (arXiv 2401.08156) lowers fragmentation by 15 % of what is reserved
in the mean of eight models, by 33 % at most; STAlloc (arXiv 2507.16274) found up to 43 % wasted.
"""

from collections.abc import Sequence

from protrain_runtime.contract.records.hardware import is_accelerator
from protrain_runtime.contract.records.plan import Budgets, TierBytes
from protrain_runtime.contract.records.profile import Profile

PAIRS = ((9.16, 10.22), (8.28, 10.24), (25.86, 32.67), (20.20, 27.36), (15.22, 19.36))
"""GB of tensors and GB reserved in the runs above."""

EXPANDABLE_PAIRS = ((7.41, 7.91), (1.51, 1.59), (10.05, 11.06), (13.99, 14.60))
"""The same with `expandable_segments`, on an H200: SmolLM2 135M without a limit and under 3 GB,
Llama 3.2 1B under 12 and 16 GB."""


def _more(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return sorted(reserved / tensors - 1 for tensors, reserved in pairs)


MEDIAN, EXPANDABLE_MEDIAN = (_more(pairs)[len(pairs) // 2] for pairs in (PAIRS, EXPANDABLE_PAIRS))
"""Medians of bytes reserved beyond tensors over the bytes of tensors, without
`expandable_segments` and with them."""

MOST, EXPANDABLE_MOST = _more(PAIRS)[-1], _more(EXPANDABLE_PAIRS)[-1]
"""The maxima of both."""

_MIB = 2**20


def headroom_bytes(device_bytes: int, besides_bytes: int) -> int:
    """MiB that plans for an estimate leave free by default, for the allocator's reserve."""
    room = max(0, device_bytes - besides_bytes)
    return -(-round(room * EXPANDABLE_MOST / (1 + EXPANDABLE_MOST)) // _MIB) * _MIB


def default_device_bytes(profile: Profile, *, tight: bool = False) -> int:
    """The default budget of the device; with `tight`, all of it."""
    device = profile.hardware.device
    if tight or not is_unknown(profile):
        return device.memory_bytes
    return device.memory_bytes - headroom_bytes(device.memory_bytes, device.besides_bytes)


def left_free_bytes(profile: Profile, budgets: Budgets) -> int:
    """Headroom of plans within these budgets; 0 if not the default ones."""
    if budgets.device != default_device_bytes(profile):
        return 0
    return profile.hardware.device.memory_bytes - budgets.device


def is_unknown(profile: Profile) -> bool:
    """Whether the allocator's reserve was not measured."""
    device = profile.hardware.device
    known = profile.method == "measured" or device.allocator_bytes > 0
    return not known and is_accelerator(device.kind)


def reserved_bytes(profile: Profile, peak: TierBytes) -> int:
    """Approximate bytes of the process with `expandable_segments`, or the measured ones."""
    unknown = is_unknown(profile)
    return peak.on_device + round(EXPANDABLE_MEDIAN * peak.device) * unknown


def is_tight(profile: Profile, peak: TierBytes) -> bool:
    """Whether tensors fit the device, but not with the most seen reserved beyond them."""
    needed = peak.on_device + round(EXPANDABLE_MOST * peak.device) * is_unknown(profile)
    return needed > profile.hardware.device.memory_bytes >= peak.on_device
