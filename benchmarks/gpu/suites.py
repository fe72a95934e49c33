"""What the GPU benchmark trains: on a card, and in a dry run on the emulated device."""

from dataclasses import dataclass, replace

from benchmarks.peers.accelerators import EMULATED
from benchmarks.peers.work import Work

GB = 10**9
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Works, limits and tests; `parts` makes the same cells of every suite.

    base           what others are made from; its device is all cells'
    truth          works whose predictions are compared with measurements, under each of `caps`
    caps           bytes of the device; 0: no limit
    compared       works with a limit that peers train, too, at growing `batches`
    ladder         models of growing size; each is tried after the one before it has run
    compared_bits  works with a limit that train plainly, too, bit by bit
    recorded       works with a limit whose steps are recorded and compared with the simulation
    tests          pytest's arguments for the accelerator's tests
    sanitized      pytest's arguments for planned steps under CUDA's sanitizer
    """

    base: Work
    truth: tuple[Work, ...]
    caps: tuple[int, ...]
    compared: tuple[Work, ...]
    batches: tuple[int, ...]
    ladder: tuple[str, ...]
    compared_bits: tuple[Work, ...]
    recorded: tuple[Work, ...]
    tests: tuple[str, ...]
    sanitized: tuple[str, ...]


_STEPS = "transfers_cut_in_two or all_chunks_at_once or evaluation_between_steps"
"""Tests of planned steps under the schedules in which most is in flight at once."""

_WORK = Work(
    model="llama-3.2-1b",
    batch_size=1,
    seq_len=2048,
    dtype="bfloat16",
    precision="master",
    device="cuda",
)
_8B = "llama-3.1-8b"

CARD = Suite(
    base=_WORK,
    truth=(
        _WORK,
        replace(_WORK, seq_len=8192),
        replace(_WORK, model="llama-3.2-3b", seq_len=4096),
        replace(_WORK, model=_8B),
        replace(_WORK, model=_8B, seq_len=8192),
    ),
    caps=(12 * GB, 16 * GB, 24 * GB, 40 * GB, 80 * GB),
    compared=(
        replace(_WORK, cap_bytes=12 * GB),
        replace(_WORK, model="llama-3.2-3b", cap_bytes=24 * GB),
        replace(_WORK, model=_8B, cap_bytes=24 * GB),
        replace(_WORK, model=_8B, cap_bytes=80 * GB),
    ),
    batches=(1, 2, 4, 8, 16),
    ladder=("llama-3.2-3b", _8B, "qwen2.5-14b", "qwen2.5-32b", "llama-2-70b"),
    compared_bits=(
        replace(_WORK, cap_bytes=12 * GB),
        replace(_WORK, model="llama-3.2-3b", cap_bytes=24 * GB),
    ),
    recorded=(
        replace(_WORK, cap_bytes=12 * GB),
        replace(_WORK, model=_8B, cap_bytes=24 * GB),
    ),
    tests=("-m", "gpu and not slow", "-n", "0"),
    sanitized=(
        "-m",
        "gpu and not slow",
        "-n",
        "0",
        "-k",
        _STEPS,
        "tests/runtime",
    ),
)

_TINY = replace(_WORK, model="tiny-llama", batch_size=4, seq_len=256, device=EMULATED, num_steps=1)
_BINDING = 120 * MIB
"""Between the least that a plan for the tiny model takes, 110 MiB with the context and what is held
back, and what keeping everything takes, 135 MiB."""

DRY = Suite(
    base=_TINY,
    truth=(_TINY,),
    caps=(0, _BINDING, 100 * MIB),  # kept, moved, refused
    compared=(replace(_TINY, cap_bytes=_BINDING),),
    batches=(4, 32),  # the second is too much for some
    ladder=("tiny-gpt2",),
    compared_bits=(replace(_TINY, cap_bytes=_BINDING),),
    recorded=(replace(_TINY, cap_bytes=_BINDING),),
    tests=(
        *("-m", "emulated and not slow", "-n", "0"),
        *("-k", "all_chunks_at_once or pinned", "tests/runtime"),
    ),
    sanitized=CARD.sanitized,
)
"""Every kind of cell, and every peer, with a model and limits that take seconds."""
