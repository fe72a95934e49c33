"""Cells that compare: one work under one limit, planned and by every peer."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.peers.planned import PLANNED
from benchmarks.peers.registry import ADAPTERS, PEERS
from benchmarks.peers.work import Work
from benchmarks.runner import Cell
from protrain_runtime.contract.units import format_bytes


def named(work: Work) -> str:
    """`llama-3.2-1b 1x2048`, with limit and threads where they are set, and how bits are."""
    words = [work.model, f"{work.batch_size}x{work.seq_len}"]
    if work.cap_bytes:
        words.append(limit_text(work.cap_bytes))
    if work.threads:
        words.append(f"{work.threads} threads")
    if work.deterministic:
        words.append("deterministic")
    return " ".join(words)


def limit_text(cap_bytes: int) -> str:
    """As one would type it, 24GB or 1100MiB; else as everywhere."""
    for size, unit in ((10**9, "GB"), (2**20, "MiB")):
        whole, rest = divmod(cap_bytes, size)
        if not rest:
            return f"{whole}{unit}"
    return format_bytes(cap_bytes).replace(" ", "")


def file_of(kind: str, name: str, suffix: str = ".yaml") -> str:
    """Where a cell writes, relative to the run's folder."""
    return f"{kind}/{name.replace(' ', '-').replace('/', '-')}{suffix}"


def profile_cell(part: str, work: Work) -> Cell:
    """Measures the work without a limit; parts share it."""
    free = replace(work, cap_bytes=0)
    return Cell(
        key=f"profile/{named(free)}",
        part=part,
        task="profile",
        arguments={"work": asdict(free), "out": file_of("profiles", named(free))},
    )


def plan_cell(part: str, work: Work, profile: Cell) -> Cell:
    """Plans the work's profile for its limit."""
    return Cell(
        key=f"plan/{named(work)}",
        part=part,
        task="plan",
        arguments={
            "profile": profile.arguments["out"],
            "cap_bytes": work.cap_bytes,
            "out": file_of("plans", named(work)),
        },
        needs=(profile.key,),
    )


def planned_cell(part: str, work: Work, plan: Cell) -> Cell:
    """Trains under the plan."""
    planned = replace(work, plan=plan.arguments["out"])
    return train_cell(part, planned, PLANNED.name, needs=(plan.key,))


def train_cell(part: str, work: Work, adapter: str, *, needs: Sequence[str] = ()) -> Cell:
    """Trains by an adapter."""
    return Cell(
        key=f"train/{named(work)}/{adapter}",
        part=part,
        task="train",
        arguments={"work": asdict(work), "adapter": adapter},
        needs=tuple(needs),
        skipped=ADAPTERS[adapter].missing(work) or "",
    )


def planned_cells(part: str, works: Sequence[Work]) -> list[Cell]:
    """A profile, then for every limit a plan and its run. The works differ in limits alone."""
    profile = profile_cell(part, works[0])
    cells = [profile]
    for work in works:
        plan = plan_cell(part, work, profile)
        cells += [plan, planned_cell(part, work, plan)]
    return cells


def peer_cells(part: str, works: Sequence[Work], *, batches: Sequence[int]) -> list[Cell]:
    """Every peer on every work at growing batches, up to the first that does not run."""
    return [
        cell for peer in PEERS for work in works for cell in _ladder(part, work, peer.name, batches)
    ]


def _ladder(part: str, work: Work, adapter: str, batches: Sequence[int]) -> Iterator[Cell]:
    before: tuple[str, ...] = ()
    for batch in batches:
        cell = train_cell(part, replace(work, batch_size=batch), adapter, needs=before)
        yield cell
        before = (cell.key,)


def largest_batch_cells(part: str, work: Work) -> list[Cell]:
    """The planner's answer to the largest batch, trained."""
    profile = profile_cell(part, work)
    name = f"{named(work)} largest batch"
    arguments: dict[str, Any] = {
        "profile": profile.arguments["out"],
        "cap_bytes": work.cap_bytes,
        "out": file_of("plans", name),
        "maximize_batch": True,
    }
    plan = Cell(
        key=f"plan/{name}", part=part, task="plan", arguments=arguments, needs=(profile.key,)
    )
    largest = replace(work, plan=arguments["out"], batch_size=0)
    train = Cell(
        key=f"train/{name}/{PLANNED.name}",
        part=part,
        task="train",
        arguments={"work": asdict(largest), "adapter": PLANNED.name},
        needs=(plan.key,),
    )
    return [profile, plan, train]


def once(cells: Iterable[Cell]) -> list[Cell]:
    """The first of each key: parts share profiles, plans and runs."""
    found: dict[str, Cell] = {}
    for cell in cells:
        found.setdefault(cell.key, cell)
    return list(found.values())
