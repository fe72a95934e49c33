"""The parts of the GPU benchmark as groups of cells; what follows in a group needs what precedes.

Groups of different parts take turns, so that a short run has seen some of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain, zip_longest
from typing import Literal, get_args

from benchmarks.peers.cells import Cell
from benchmarks.peers.comparing import (
    file_of,
    largest_batch_cells,
    named,
    once,
    peer_cells,
    plan_cell,
    planned_cell,
    planned_cells,
    profile_cell,
    train_cell,
)
from benchmarks.peers.plain import PLAIN
from benchmarks.peers.planned import PLANNED
from benchmarks.peers.registry import ADAPTERS, PEERS
from benchmarks.peers.work import Work

Part = Literal["truth", "peers", "size", "parity", "timeline"]
PARTS: tuple[Part, ...] = get_args(Part)

GB = 10**9
WORK = Work(
    model="llama-3.2-1b",
    batch_size=1,
    seq_len=2048,
    dtype="bfloat16",
    precision="master",
    device="cuda",
)
CAPS = (12 * GB, 16 * GB, 24 * GB, 40 * GB, 80 * GB)
BATCHES = (1, 2, 4, 8, 16)
LADDER = ("llama-3.2-3b", "llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-2-70b")
"""Models of growing size; each is tried after the one before it has run."""

TRUTH = (
    WORK,
    replace(WORK, seq_len=8192),
    replace(WORK, model="llama-3.2-3b", seq_len=4096),
    replace(WORK, model="llama-3.1-8b"),
    replace(WORK, model="llama-3.1-8b", seq_len=8192),
)
COMPARED = (
    replace(WORK, cap_bytes=12 * GB),
    replace(WORK, model="llama-3.2-3b", cap_bytes=24 * GB),
    replace(WORK, model="llama-3.1-8b", cap_bytes=24 * GB),
    replace(WORK, model="llama-3.1-8b", cap_bytes=80 * GB),
)
PARITY = (replace(WORK, cap_bytes=12 * GB), replace(WORK, model="llama-3.2-3b", cap_bytes=24 * GB))
TIMED = (
    replace(WORK, cap_bytes=12 * GB),
    replace(WORK, model="llama-3.1-8b", cap_bytes=24 * GB),
)

SMOKE = replace(
    WORK,
    model="tiny-llama",
    seq_len=32,
    dtype="float32",
    precision="pure",
    device="cpu",
    num_steps=1,
)
"""The same cells where there is no GPU: everything but CUDA."""


def cells(parts: Sequence[Part], *, smoke: bool) -> list[Cell]:
    """What the parts run, in turns."""
    groups = {
        "truth": lambda: [planned_cells("truth", work) for work in _truth(smoke)],
        "peers": lambda: [_peers(work, smoke) for work in ((SMOKE,) if smoke else COMPARED)],
        "size": lambda: list(_size(smoke)),
        "parity": lambda: [
            *(_parity(w, smoke) for w in ((SMOKE,) if smoke else PARITY)),
            _tests(smoke),
        ],
        "timeline": lambda: [_timeline(work, smoke) for work in ((SMOKE,) if smoke else TIMED)],
    }
    turns = zip_longest(*(groups[part]() for part in parts), fillvalue=())
    return once(cell for turn in turns for group in turn for cell in group)


def _truth(smoke: bool) -> list[list[Work]]:
    works, caps = ([SMOKE], (0,)) if smoke else (list(TRUTH), CAPS)
    return [[replace(work, cap_bytes=cap) for cap in caps] for work in works]


def _peers(work: Work, smoke: bool) -> list[Cell]:
    """A planned run at the same batch, every peer, and the largest batch that can be planned."""
    batches = (1,) if smoke else BATCHES
    largest = [] if smoke else largest_batch_cells("peers", work)
    return [
        *planned_cells("peers", [work]),
        *peer_cells("peers", [work], batches=batches),
        *largest,
    ]


def _size(smoke: bool) -> Iterator[list[Cell]]:
    """The largest model that trains on the whole device, with host memory, and with disk."""
    base, ladder = (SMOKE, ("tiny-llama",)) if smoke else (WORK, LADDER)
    base = replace(base, num_steps=1)
    probed = profile_cell("size", base)
    tried: dict[str, tuple[str, ...]] = dict.fromkeys(ADAPTERS, ())
    yield [probed]
    for model in ladder:
        work = replace(base, model=model)
        free = named(work)
        estimate = Cell(
            key=f"estimate/{free}",
            part="size",
            task="estimate",
            arguments={
                "work": asdict(work),
                "hardware_of": probed.arguments["out"],
                "out": file_of("profiles", f"{free} estimated"),
            },
            needs=(probed.key,),
        )
        ours = [
            _sized(work, estimate, disk=disk) for disk in ((False,) if smoke else (False, True))
        ]
        peers = []
        for peer in PEERS:
            cell = train_cell("size", work, peer.name, needs=tried[peer.name])
            tried[peer.name] = (cell.key,)
            peers.append(cell)
        yield [estimate, *chain.from_iterable(ours), *peers]


def _sized(work: Work, profile: Cell, *, disk: bool) -> tuple[Cell, Cell]:
    name = f"{named(work)} {'with' if disk else 'without'} disk"
    plan = Cell(
        key=f"plan/{name}",
        part="size",
        task="plan",
        arguments={
            "profile": profile.arguments["out"],
            "cap_bytes": 0,
            "out": file_of("plans", name),
            "disk": disk,
        },
        needs=(profile.key,),
    )
    train = planned_cell("size", work, plan)
    return plan, replace(train, key=f"train/{name}/{PLANNED.name}")


def _parity(work: Work, smoke: bool) -> list[Cell]:
    """The planned run under its limit, and a plain one without any, with deterministic kernels."""
    exact = replace(work, deterministic=True)
    profile = profile_cell("parity", work)
    plan = _plan("parity", work, profile, smoke)
    plain = train_cell("parity", replace(exact, cap_bytes=0), PLAIN.name)
    return [profile, plan, plain, planned_cell("parity", exact, plan)]


def _tests(smoke: bool) -> list[Cell]:
    arguments = ["-m", "gpu and not slow", "-n", "0", *(["tests/test_program.py"] if smoke else [])]
    return [Cell(key="tests/gpu", part="parity", task="tests", arguments={"arguments": arguments})]


def _plan(part: str, work: Work, profile: Cell, smoke: bool) -> Cell:
    """A plan for the limit. A tiny model fits without one, so a smoke test's plan offloads it."""
    plan = plan_cell(part, work, profile)
    if not smoke:
        return plan
    out = file_of("plans", f"{named(work)} offload-all")
    offloaded = {**plan.arguments, "out": out, "solver": "offload-all"}
    return replace(plan, key=f"{plan.key} offload-all", arguments=offloaded)


def _timeline(work: Work, smoke: bool) -> list[Cell]:
    profile = profile_cell("timeline", work)
    plan = _plan("timeline", work, profile, smoke)
    planned = replace(work, plan=plan.arguments["out"])
    arguments = {
        "work": asdict(planned),
        "profile": profile.arguments["out"],
        "out": file_of("recordings", named(work), ".json"),
    }
    timed = Cell(
        key=f"timeline/{named(work)}",
        part="timeline",
        task="timeline",
        arguments=arguments,
        needs=(plan.key,),
    )
    return [profile, plan, timed]
