"""Trainings of the GPU benchmark: on a card, and in a dry run on the emulated device."""

from dataclasses import dataclass, replace

from benchmarks.peers.accelerators import EMULATED
from benchmarks.peers.work import Work

GB = 10**9
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Works, limits and tests; `parts` makes the same cells of every suite.

    base           what others are made from; its device is all cells'
    truth          works whose predictions are compared with measurements, with the limits for each:
                   bytes of the device, or 0 for none
    compared       works with a limit that peers train, too, at growing `batches`
    ladder         models of growing size; each is tried after the one before it has run
    compared_bits  works with a limit that train plainly, too, bit by bit
    recorded       works with a limit whose steps are recorded and compared with the simulation
    threads        numbers of PyTorch's threads that these are trained with, too
    tests          pytest's arguments for the accelerator's tests, by what is tested
    sanitized      pytest's arguments for planned steps under CUDA's sanitizer
    """

    base: Work
    truth: tuple[tuple[Work, tuple[int, ...]], ...]
    compared: tuple[Work, ...]
    batches: tuple[int, ...]
    ladder: tuple[str, ...]
    compared_bits: tuple[Work, ...]
    recorded: tuple[Work, ...]
    threads: tuple[int, ...]
    tests: dict[str, tuple[str, ...]]
    sanitized: tuple[str, ...]


_FOLDERS = ("tests/runtime", "tests/hardware")
_STEPS = "transfers_cut_in_two or all_chunks_at_once or evaluation_between_steps"
"""Tests of planned steps under the schedules in which most is in flight at once."""

_WORK = Work(
    model="llama-3.2-1b",
    batch_size=1,
    seq_len=2048,
    dtype="bfloat16",
    precision="master",
    device="cuda",
    num_warmup=3,  # on an H200 the second and third step were up to 1.8 times as long as the fourth
    num_steps=5,
)
_8B = "llama-3.1-8b"
_SMALL = replace(_WORK, model="smollm2-135m", batch_size=4, seq_len=1024)
_CAPS = (12 * GB, 16 * GB, 24 * GB, 40 * GB, 80 * GB)

_MEMORY = "measured_bytes or solved_plan or runs_out or free or probe or meter or wait_for_the_card"
"""Tests of all that a card has free, which others' processes would disturb."""

CARD = Suite(
    base=_WORK,
    truth=(
        (_SMALL, (0, 4 * GB, 3 * GB)),
        (_WORK, (*_CAPS, 0)),
        (replace(_WORK, model=_8B), _CAPS),
        (replace(_WORK, seq_len=8192), _CAPS),
        (replace(_WORK, model="llama-3.2-3b", seq_len=4096), _CAPS),
        (replace(_WORK, model=_8B, seq_len=8192), _CAPS),
    ),
    compared=(
        replace(_WORK, cap_bytes=12 * GB),
        replace(_WORK, model="llama-3.2-3b", cap_bytes=24 * GB),
        replace(_WORK, model=_8B, cap_bytes=24 * GB),
        replace(_WORK, model=_8B, cap_bytes=80 * GB),
    ),
    batches=(1, 2, 4, 8, 16),
    ladder=("llama-3.2-3b", _8B, "qwen2.5-14b", "qwen2.5-32b", "llama-2-70b"),
    compared_bits=(
        replace(_SMALL, cap_bytes=3 * GB),
        replace(_WORK, cap_bytes=12 * GB),
        replace(_WORK, model="llama-3.2-3b", cap_bytes=24 * GB),
    ),
    recorded=(
        replace(_SMALL, cap_bytes=3 * GB),
        replace(_WORK, cap_bytes=12 * GB),
        replace(_WORK, model=_8B, cap_bytes=24 * GB),
    ),
    threads=(4, 8),
    tests={
        "bits": ("-m", "gpu and not slow", "-n", "12", "-k", f"not ({_MEMORY})", *_FOLDERS),
        "memory": ("-m", "gpu and not slow", "-n", "0", "-k", _MEMORY, *_FOLDERS),
    },
    sanitized=("-m", "gpu and not slow", "-n", "0", "-k", _STEPS, "tests/runtime"),
)

_TIMED = replace(_WORK, num_steps=6)
SHORT = replace(
    CARD,
    base=_TIMED,
    truth=(
        (replace(_SMALL, num_steps=6), (0, 3 * GB)),
        (_TIMED, (12 * GB, 16 * GB)),
        (replace(_TIMED, model=_8B), (24 * GB, 40 * GB)),
    ),
    compared=(replace(_TIMED, cap_bytes=12 * GB),),
    batches=(1,),
    recorded=(replace(_SMALL, cap_bytes=3 * GB), replace(_TIMED, cap_bytes=12 * GB)),
    threads=(3, 8, 16),
    tests={"bits": ("-m", "gpu and not slow", "-n", "12", "-k", _STEPS, "tests/runtime")},
)
"""Steps that may wait for the host: `--short`, in eight minutes."""

_TINY = replace(_WORK, model="tiny-llama", batch_size=4, seq_len=256, device=EMULATED, num_steps=1)
_BINDING = 120 * MIB
"""Between the least that a plan for the tiny model takes, 110 MiB with the context and what is held
back, and what keeping everything takes, 135 MiB."""

DRY = Suite(
    base=_TINY,
    truth=((_TINY, (0, _BINDING, 100 * MIB)),),  # kept, moved, refused
    compared=(replace(_TINY, cap_bytes=_BINDING),),
    batches=(4, 32),  # the second is too much for some
    ladder=("tiny-gpt2",),
    compared_bits=(replace(_TINY, cap_bytes=_BINDING),),
    recorded=(replace(_TINY, cap_bytes=_BINDING),),
    threads=(1,),
    tests={
        name: ("-m", "emulated and not slow", "-n", "0", "-k", words, "tests/runtime")
        for name, words in (("bits", "cannot_be_pinned"), ("memory", "is_pinned"))
    },
    sanitized=CARD.sanitized,
)
"""Every kind of cell, and every peer, with a model and limits that take seconds."""
