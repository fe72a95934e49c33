"""A grid of cells: the same question with other settings, each with its answer.

A setting is more memory, a faster link, another batch, or another machine. A profile's bytes do not
depend on a machine's sizes and links: one profile answers for all. Results are bounded before
planning: by the units' least compute, at once, and then by all lanes' least work within the memory.

[Note: why it is the cheapest] Machines are tried in order of price. One is skipped if a bound
excludes the speed; otherwise it is planned. The first whose plan reaches the speed is the answer. A
cheaper one may reach it only if its plan does not and the bound on its plans does, at most that
plan's gap apart: it is named. All this concerns the profile's seconds, not their distance from a
real machine's.

[Note: why it is the fastest] Machines are tried in order of their first bounds, and skipped if a
bound is at most the best plan's speed so far. The search ends when the next first bound is. None is
faster than the answer, up to the plans' gaps.

PHAZE (Wang et al., ICML 2024, arXiv 2407.13143) searches among architectures of accelerators, with
an integer program for each one's schedule inside. Here the machines are available ones.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from protrain_plan.planning.model.decision_model import least_lane_seconds
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.allocator_slack import headroom_bytes, left_free_bytes
from protrain_plan.planning.questions.answers import Answer, Question
from protrain_plan.planning.questions.cells import (
    COMPUTE,
    GAP,
    LANES,
    MEMORY,
    MUCH,
    WORTH,
    Cell,
    Tried,
    planned,
    with_link,
    with_resource,
)
from protrain_plan.planning.questions.disk import solve_sparing
from protrain_plan.planning.questions.growth import in_proportion
from protrain_plan.planning.questions.objectives import fit
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import PCIE
from protrain_runtime.contract.records.profile import SPARSE
from protrain_runtime.contract.units import format_bytes

USUAL_HOST = 8 * 2**30
"""Host memory sizes are this times powers of two."""

MORE_MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best cell, if any, and all cells in order; `unseen` ones no longer mattered."""

    best: Tried | None
    looked_at: tuple[Tried, ...]
    unseen: tuple[Cell, ...] = ()


def changes(question: Question, *, device_sizes: Sequence[int] = ()) -> Iterator[Cell]:
    """Yield the few changes that people can make to a machine, or to what they ask of it.

    host memory     the next double of 8 GiB, of a node
    link            the next generation of PCIe that is faster
    device memory   the next of `device_sizes`, with the speed as it is
    disk            twice as fast: two drives, of which each has half of the bytes
    micro-batches   four times as many for each update
    batch           twice as many sequences, in proportion (see `growth.in_proportion`)
    """
    profile, budgets, settings = question.profile, question.budgets, question.settings
    tiers = {tier.name: tier for tier in profile.hardware.tiers}
    if host := tiers.get("host"):
        there, size = budgets.host * question.group.in_node, USUAL_HOST
        while size <= there:
            size *= 2
        yield Cell(
            name="host memory",
            words=f"{format_bytes(size - there)} more host memory ({format_bytes(size)})",
            question=with_resource(question, "host", size),
        )
        slower = min(host.link.read_bytes_per_s, host.link.write_bytes_per_s)
        faster = [name for name, speed in PCIE.items() if speed > 1.1 * slower]
        if faster:
            rate = PCIE[faster[0]]
            yield Cell(
                name="link",
                words=f"a link of {rate / 1e9:g} GB/s (PCIe {faster[0][-1]}) in place of"
                f" {slower / 1e9:.3g} GB/s",
                question=with_resource(question, "link", rate),
            )
    left = left_free_bytes(profile, budgets)
    there = budgets.device + left
    if larger := [size for size in sorted(device_sizes) if size > there]:
        besides = profile.hardware.device.besides_bytes
        size = larger[0] - (headroom_bytes(larger[0], besides) if left else 0)
        yield Cell(
            name="device memory",
            words=f"{format_bytes(larger[0])} of device memory in place of {format_bytes(there)}",
            question=with_resource(question, "device", size),
        )
    if disk := tiers.get("disk"):
        read, write = disk.link.read_bytes_per_s, disk.link.write_bytes_per_s
        yield Cell(
            name="disk",
            words="a disk that is twice as fast",
            question=with_link(question, "disk", 2 * read, 2 * write),
        )
    if not any(unit.stays == SPARSE for unit in profile.units):
        many = MORE_MICRO_BATCHES * settings.micro_batches
        yield Cell(
            name="micro-batches",
            words=f"{many} micro-batches for each update in place of {settings.micro_batches}",
            question=replace(question, settings=replace(settings, micro_batches=many)),
        )
    size = profile.workload.batch_size
    yield Cell(
        name="batch",
        words=f"batches of {2 * size} in place of {size} (bytes and seconds in proportion)",
        question=replace(question, profile=in_proportion(profile, "batch-size", 2 * size)),
    )


# --- answers --------------------------------------------------------------------------------------


def fits(questions: Sequence[Question], *, compare: bool = False, gap: float = GAP) -> list[Answer]:
    """Answer each question; none is slower than an earlier one with no more memory."""
    found: list[Answer] = []
    for question in questions:
        less = [one for one in found if one.is_for_less(question)]
        known = max(less or found[-1:], key=lambda one: one.tokens_per_s or 0.0, default=None)
        found.append(fit(question, effort=Effort(gap_target=gap), compare=compare, known=known))
    return found


def least_seconds(question: Question) -> float | None:
    """Return a bound below all plans, with any number of replicas; None where there is no plan.

    The bound of `least_lane_seconds`: what links, updates and compute have to do within the
    budgets. It takes about a second where planning takes ten.
    """
    found = (least_lane_seconds(problem) for problem in question.problems())
    return min((bound for bound in found if bound is not None), default=None)


def tried(
    cell: Cell,
    tokens_per_s: float,
    effort: Effort,
    *,
    first: float = inf,
    known: Answer | None = None,
) -> Tried:
    """Answer a cell, or rule it out by bounds where it does not reach a speed.

    `first` is a bound on its speed that is at hand, `known` an answer to begin with.
    """
    question = cell.question
    if first < tokens_per_s:
        return Tried(cell=cell, most_tokens_per_s=first, bound=COMPUTE)
    if cell.answer is not None:
        return planned(cell, cell.answer())
    if tokens_per_s or known is None:
        seconds = least_seconds(question)
        if seconds is None:
            return Tried(cell=cell, most_tokens_per_s=0.0, bound=MEMORY)
        if (most := question.tokens / seconds) < tokens_per_s:
            return Tried(cell=cell, most_tokens_per_s=most, bound=LANES)
    return planned(cell, fit(question, effort=effort, known=known))


def helped(base: Answer, change: Cell) -> Tried:
    """Answer a change, unless a bound excludes a worthwhile gain."""
    worth = (base.tokens_per_s or 0.0) * (1 + WORTH)
    below = change.question.tokens / worth if worth else inf
    return tried(change, worth, Effort(gap_target=GAP, below_s=below), known=base)


def best_change(
    base: Answer, changes: Sequence[Cell], answer: Callable[[Cell, float], Answer]
) -> Tried | None:
    """Return the change that gains most; None where none gains `MUCH`, or `base` has no plan.

    They are planned in the order of their bounds, until the next bound is no faster. An `answer`
    with fewer tokens per second than given may be any.
    """
    if not base.tokens_per_s:
        return None
    best, speed = None, base.tokens_per_s * (1 + MUCH)
    bounds: list[tuple[float, Cell]] = []
    for change in changes:
        with suppress(ProtrainError):  # a pin may exclude it: speculation, several micro-batches
            seconds = least_seconds(change.question) or inf
            bounds.append((change.question.tokens / seconds, change))
    for bound, change in sorted(bounds, key=lambda one: -one[0]):
        if bound <= speed:
            break
        found = planned(change, answer(change, speed))
        if found.tokens_per_s > speed:
            best, speed = found, found.tokens_per_s
    return best


def search(
    cells: Sequence[Cell],
    *,
    speed: float | None = None,
    report: Callable[[Cell, float], None] = lambda *_: None,
    done: Callable[[Tried], None] = lambda _: None,
) -> Found:
    """Find the cheapest cell of a speed; without a speed, the fastest at any price.

    See [Note: why it is the cheapest] and [Note: why it is the fastest]. Cells of equal price are
    ordered by their compute bound. The cheapest is planned to the end: its plan is the planner's
    fastest. Each cell is reported before it is tried, with the completed fraction, and `done` after
    that.
    """

    def rank(one: tuple[float, Cell]) -> tuple[float, float]:
        first, price = one[0], one[1].price_per_hour
        return (price, -first) if speed else (-first, price)

    ordered = sorted(((cell.first_bound, cell) for cell in cells), key=rank)
    looked_at: list[Tried] = []
    best: Tried | None = None
    for first, cell in ordered:
        needed = speed or (best.tokens_per_s if best else 0.0)
        if not speed and first <= needed:
            break
        report(cell, len(looked_at) / len(ordered))
        seconds = cell.question.tokens / needed if needed else inf
        # Reaching this speed suffices; a search that cannot is abandoned.
        effort = Effort(gap_target=GAP)
        effort = replace(effort, enough_s=seconds) if speed else replace(effort, below_s=seconds)
        found = tried(cell, needed, effort, first=first)
        reaches = bool(speed) and found.tokens_per_s >= needed
        if reaches and cell.answer is None:
            effort = Effort(gap_target=GAP)
            found = planned(cell, fit(cell.question, effort=effort, known=found.reached))
        looked_at.append(found)
        done(found)
        if reaches or (not speed and found.tokens_per_s > needed):
            best = found
        if reaches:
            break
    unseen = tuple(cell for _, cell in ordered[len(looked_at) :])
    return Found(best=best, looked_at=tuple(looked_at), unseen=unseen)


def fastest_batch(questions: Sequence[Question], *, effort: Effort) -> int | None:
    """The index of the question with the fastest step; None if none has a plan.

    The questions have the same sequences per update, in ever larger micro-batches. One is planned
    if its bound promises a step faster by more than the requested gap: the answer is the fastest up
    to that gap. At equal bounds, the larger micro-batch is first.
    """
    bounds: dict[int, float] = {}
    asked = list(questions)
    for number, question in enumerate(questions):
        for one in filter(None, (question, question.adding_shards())):
            bound = least_lane_seconds(one.problem(), stopped=effort.spent)
            if bound is not None:  # a larger one may fit where this one accumulates whole gradients
                bounds[number], asked[number] = bound, one
                break
    best, best_s = None, inf
    for number in sorted(bounds, key=lambda number: (bounds[number], -number)):
        if bounds[number] * (1 + effort.gap_target) >= best_s:
            break
        question = asked[number]
        found = solve_sparing(question.problems(), effort=replace(effort, below_s=best_s))
        if isinstance(found, Solved) and found.step_seconds < best_s:
            best, best_s = number, found.step_seconds
    return best
