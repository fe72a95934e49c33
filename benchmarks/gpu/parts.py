"""The parts of the GPU benchmark as groups of cells; what follows in a group needs what precedes.

Groups of different parts take turns, so that a short run has seen some of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain, zip_longest
from typing import Literal, get_args

from benchmarks.gpu.suites import Suite
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
from benchmarks.peers.testing import unseen
from benchmarks.peers.work import Work
from benchmarks.runner import Cell

Part = Literal[
    "tests", "updates", "truth", "timeline", "kernels", "parity", "peers", "size", "sanitizer"
]
PARTS: tuple[Part, ...] = get_args(Part)


def cells(parts: Sequence[Part], suite: Suite) -> list[Cell]:
    """The cells of the parts, in turns."""

    def trials(work: Work, num_batches: int) -> list[Cell]:
        return peer_cells("peers", [work], batches=suite.batches[:num_batches])

    groups = {
        "tests": lambda: [[_tests(suite, name) for name in suite.tests]],
        "updates": lambda: [[_updates(suite)]],
        "kernels": lambda: [[_kernels(suite)]],
        "truth": lambda: [
            planned_cells("truth", [replace(work, cap_bytes=cap) for cap in caps])
            for work, caps in suite.truth
        ],
        "timeline": lambda: [_timeline(work, suite.threads) for work in suite.recorded],
        "parity": lambda: [_parity(work) for work in suite.compared_bits],
        # A first comparison with peers, before any of them is asked for larger batches.
        "peers": lambda: [
            *([*planned_cells("peers", [work]), *trials(work, 1)] for work in suite.compared),
            *(trials(work, len(suite.batches)) for work in suite.compared),
            *(largest_batch_cells("peers", work) for work in suite.compared),
        ],
        "size": lambda: list(_size(suite)),
        "sanitizer": lambda: [[_sanitizer(suite)]],
    }
    turns = zip_longest(*(groups[part]() for part in parts), fillvalue=())
    return once(cell for turn in turns for group in turn for cell in group)


def _sanitizer(suite: Suite) -> Cell:
    """Planned steps of small models while CUDA's sanitizer looks on."""
    return Cell(
        key="tests/sanitizer",
        part="sanitizer",
        task="sanitized",
        arguments={"arguments": list(suite.sanitized), "limit_s": SANITIZED_S},
        skipped=unseen(suite.base.device) or "",
    )


SANITIZED_S = 150.0
"""Seconds, of a first run of nine minutes: the sanitizer slows every operator down."""


def _size(suite: Suite) -> Iterator[list[Cell]]:
    """The largest model that trains on the whole device, with host memory, and with disk."""
    base = replace(suite.base, num_steps=1)
    probed = profile_cell("size", base)
    tried: dict[str, tuple[str, ...]] = dict.fromkeys(ADAPTERS, ())
    yield [probed]
    for model in suite.ladder:
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
        ours = [_sized(work, estimate, disk=disk) for disk in (False, True)]
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


def _parity(work: Work) -> list[Cell]:
    """The planned run under its limit, and a plain one without any, with deterministic kernels."""
    exact = replace(work, deterministic=True)
    profile = profile_cell("parity", exact)
    plan = plan_cell("parity", exact, profile)
    plain = train_cell("parity", replace(exact, cap_bytes=0), PLAIN.name)
    return [profile, plan, plain, planned_cell("parity", exact, plan)]


def _tests(suite: Suite, name: str) -> Cell:
    """Tests, with what pytest printed in a file of their own."""
    arguments = {
        "arguments": list(suite.tests[name]),
        "limit_s": TESTED_S,
        "out": file_of("tests", name, ".txt"),
    }
    return Cell(key=f"tests/{name}", part="tests", task="tests", arguments=arguments)


TESTED_S = 150.0
"""Seconds, of nine minutes: on an H200 beside 16 processors all of them take 140 s."""


def _updates(suite: Suite) -> Cell:
    return Cell(
        key="updates/adamw",
        part="updates",
        task="updates",
        arguments={"device": suite.base.device},
    )


def _kernels(suite: Suite) -> Cell:
    device = suite.base.device
    return Cell(
        key="kernels/operators",
        part="kernels",
        task="kernels",
        arguments={"device": device},
        skipped="" if device == "cuda" else "only CUDA's events time single operators",
    )


def _timeline(work: Work, threads: Sequence[int]) -> list[Cell]:
    """A recorded step, and steps with other numbers of threads: do updates leave launching one?"""
    profile = profile_cell("timeline", work)
    plan = plan_cell("timeline", work, profile)
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
    others = [planned_cell("timeline", replace(work, threads=number), plan) for number in threads]
    return [profile, plan, timed, *others]
