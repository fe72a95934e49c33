"""Bytes that PyTorch's allocator may reserve beyond tensors, as long as no card has measured it.

Plans for an estimate leave a part of the device free for them, unless its budget is given
(`headroom_bytes`). That is less than the most that was seen to be taken.

Peaks count tensors, and limits are on what the allocator has reserved: blocks are cut from
segments, and what is free of a segment may be too small for the next tensor. A measured profile has
its own figure (`Device.allocator_bytes`), which plans hold back. An estimate knows none, so that
`fit` says where a peak leaves less room than has been seen to be taken: *tight*.

The figures are of runs whose authors published both (LoRA of Llama 2 7B by FSDP). None says that it
set `expandable_segments`, which lowers them:

                                                       GB allocated or active   reserved   more
    AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md                        9.16      10.22   12 %
      the same with 512 tokens                                           8.28      10.24   24 %
    meta-llama/llama-cookbook, pull request 41                          25.86      32.67   26 %
      with limit_all_gathers                                            20.20      27.36   35 %
      and without logits that live on                                   15.22      19.36   27 %

Others saw more: GMLake (arXiv 2401.08156) lowers fragmentation by 15 % of what is reserved in the
mean of eight models, by 33 % at most; STAlloc (arXiv 2507.16274) found up to 43 % of it wasted.
"""

from protrain_runtime.contract.records.hardware import is_accelerator
from protrain_runtime.contract.records.plan import Budgets, TierBytes
from protrain_runtime.contract.records.profile import Profile

PAIRS = ((9.16, 10.22), (8.28, 10.24), (25.86, 32.67), (20.20, 27.36), (15.22, 19.36))
"""GB of tensors and GB reserved of the runs above."""

MOST = max(reserved / tensors for tensors, reserved in PAIRS) - 1
"""Most bytes reserved beyond tensors, over the bytes of tensors."""

MEDIAN = sorted(reserved / tensors for tensors, reserved in PAIRS)[len(PAIRS) // 2] - 1
"""Median of the same ratio."""

HEADROOM = 0.04
"""Part of a device that plans leave free (docs/decisions/memory.md)."""

_MIB = 2**20


def headroom_bytes(device_bytes: int) -> int:
    """Bytes of a device that plans for an estimate leave free by default: whole MiB."""
    return -(-round(HEADROOM * device_bytes) // _MIB) * _MIB


def default_device_bytes(profile: Profile, *, tight: bool = False) -> int:
    """Budget of the device where none is given; with `tight`, all of it."""
    size = profile.hardware.device.memory_bytes
    return size - headroom_bytes(size) * (not tight and _is_unknown(profile))


def left_free_bytes(profile: Profile, budgets: Budgets) -> int:
    """Headroom of plans within these budgets; 0 where they may use all, or as much as is given."""
    if budgets.device != default_device_bytes(profile):
        return 0
    return profile.hardware.device.memory_bytes - budgets.device


def _is_unknown(profile: Profile) -> bool:
    """Return whether there is an allocator of which nobody measured what it reserves."""
    device = profile.hardware.device
    known = profile.method == "measured" or device.allocator_bytes > 0
    return not known and is_accelerator(device.kind)


def allowance_bytes(profile: Profile, peak: TierBytes) -> int:
    """Bytes that the allocator may reserve beyond `peak.device` bytes of tensors.

    0 for a measured profile, whose peaks have it, and on a CPU, which has no such allocator.
    """
    return round(MOST * peak.device) if _is_unknown(profile) else 0


def is_tight(profile: Profile, peak: TierBytes) -> bool:
    """Return whether the device has less room than `peak` and the allowance take together."""
    needed = peak.on_device + allowance_bytes(profile, peak)
    return needed > profile.hardware.device.memory_bytes >= peak.on_device
