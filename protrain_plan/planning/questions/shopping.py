"""Variations of a question: their answers, and which is best.

A variation is the same question with more memory, a faster link, other batches, or on a machine
that can be had. The bytes of a profile do not depend on a machine's sizes and links, so that one
profile answers for all of these. What the planner would find is bounded without planning: by what
units compute at least, at once, and then by what all lanes do at least within the memory.

[Note: more is never slower] A plan for less memory is a plan for more, with as many bytes and as
many seconds. So a search begins with the decisions that are known for less, and their plan is the
answer where no faster one is found; unless it needs the disk where there is memory now, and the
disk is not worth it (see `disk`). For a faster link it begins with those for the slower one, and
no more is promised: a move that ends earlier can stand in another's way.

[Note: why it is the cheapest] Machines are looked at in the order of their prices. One is passed
over where a bound says that no plan of it reaches the speed; otherwise it is planned. The first
whose plan reaches the speed is the answer. A cheaper one may reach it only where its plan does not
and the bound on its plans does, which are at most that plan's gap apart: it is named. All of this
is about the seconds of the profile: how far they are from a machine's is another matter.

[Note: why it is the fastest] Machines are looked at in the order of their first bounds, and passed
over where a bound is no more than the best plan's speed so far. The search ends when the first
bound of the next one is. So none is faster than the answer, but for the gaps of their plans.

PHAZE (Wang et al., ICML 2024, arXiv 2407.13143) searches among architectures of accelerators, with
an integer programme for each one's schedule inside. Here the machines are those that one can have.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from math import inf
from typing import Literal

from protrain_plan.planning.model.decision_model import least_lane_seconds
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.allowance import headroom_bytes, left_free_bytes
from protrain_plan.planning.questions.answers import Fit, Question
from protrain_plan.planning.questions.disk import solve_sparing
from protrain_plan.planning.questions.growth import in_proportion
from protrain_plan.planning.questions.objectives import fit_of
from protrain_plan.planning.questions.planner import Hint, problem_of, proven
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import PCIE, Hardware, TierName
from protrain_runtime.contract.records.profile import SPARSE
from protrain_runtime.contract.units import format_bytes

Resource = Literal["host", "device", "disk", "link"]

WORTH = 0.02
"""Least gain of a change that is named: the gap that `fit` plans to."""

USUAL_HOST = 8 * 2**30
"""Sizes of host memory are this one's doubles."""

MORE_MICRO_BATCHES = 4

COMPUTE = "compute"
"""Bound: what units compute at least."""
LANES = "its lanes"
"""Bound: what compute, links, updates and collectives do at least, within the memory."""
MEMORY = "memory: no plan fits"
PLAN = "its plan"
"""Bound: the one that a plan was proven with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """A question that is asked otherwise: `words` say how, with the price of all devices.

    With an `answer`, it is about as many tokens in other batches, too: those of `others`.
    """

    name: str
    question: Question
    words: str = ""
    price_per_hour: float = 0.0
    answer: Callable[[], Fit] | None = None
    others: tuple[Question, ...] = ()

    @property
    def first_bound(self) -> float:
        """Tokens per second that no plan exceeds: units are computed."""
        asked = (self.question, *self.others)
        return max(q.tokens / min(p.compute_seconds for p in q.problems()) for q in asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A variation with its answer, or ruled out by a bound: `reached` is None.

    No plan is faster than `most_tokens_per_s`, which is 0 where none fits.
    """

    variation: Variation
    most_tokens_per_s: float
    bound: str
    reached: Fit | None = None

    @property
    def tokens_per_s(self) -> float:
        """Speed of the plan; 0 where there is none."""
        return (self.reached and self.reached.tokens_per_s) or 0.0

    def times_as_fast(self, base: Fit) -> float | None:
        """Speed over that of `base`; 0 where neither fits, None where only this does.

        1 where a bound rules it out. A search ends where its bound says that the gain is less than
        `WORTH`, up to the planner's gap, and the speed is the one that it has then.
        """
        if not self.most_tokens_per_s:
            return 0.0
        if self.reached is None:
            return 1.0
        return self.tokens_per_s / base.tokens_per_s if base.tokens_per_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best variation, if there is one, and all that were looked at, in order.

    `unseen` are those that no longer mattered.
    """

    best: Tried | None
    looked_at: tuple[Tried, ...]
    unseen: tuple[Variation, ...] = ()


# --- variations -----------------------------------------------------------------------------------


def refuse_missing(machine: Hardware, resource: Resource) -> None:
    """Raise ProtrainError where a machine does not have what is to be changed."""
    tier = "host" if resource == "link" else resource
    if tier != "device" and all(one.name != tier for one in machine.tiers):
        what = "host memory" if tier == "host" else "disk"
        raise ProtrainError(f"{machine.name} has no {what} below its device", key="--sweep")


def with_resource(question: Question, resource: Resource, value: float) -> Question:
    """Return the question with so many bytes, or with a link of so many bytes per second.

    Host memory and disk are those of a node; the link is that of a device, in both directions. What
    joins several devices stays as it is. ProtrainError where the machine has no such tier.
    """
    refuse_missing(question.profile.hardware, resource)
    if resource == "link":
        return _with_link(question, "host", value, value)
    size = int(value) if resource == "device" else int(value) // question.group.in_node
    return replace(question, budgets=replace(question.budgets, **{resource: size}))


def _with_link(question: Question, tier: TierName, read: float, write: float) -> Question:
    machine = question.profile.hardware.with_link(tier, read, write)
    return replace(question, profile=replace(question.profile, hardware=machine))


def changes(question: Question, *, device_sizes: Sequence[int] = ()) -> Iterator[Variation]:
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
        yield Variation(
            name="host memory",
            words=f"{format_bytes(size - there)} more host memory ({format_bytes(size)})",
            question=with_resource(question, "host", size),
        )
        slower = min(host.link.read_bytes_per_s, host.link.write_bytes_per_s)
        faster = [name for name, speed in PCIE.items() if speed > 1.1 * slower]
        if faster:
            rate = PCIE[faster[0]]
            yield Variation(
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
        yield Variation(
            name="device memory",
            words=f"{format_bytes(larger[0])} of device memory in place of {format_bytes(there)}",
            question=with_resource(question, "device", size),
        )
    if disk := tiers.get("disk"):
        read, write = disk.link.read_bytes_per_s, disk.link.write_bytes_per_s
        yield Variation(
            name="disk",
            words="a disk that is twice as fast",
            question=_with_link(question, "disk", 2 * read, 2 * write),
        )
    if not any(unit.stays == SPARSE for unit in profile.units):
        many = MORE_MICRO_BATCHES * settings.micro_batches
        yield Variation(
            name="micro-batches",
            words=f"{many} micro-batches for each update in place of {settings.micro_batches}",
            question=replace(question, settings=replace(settings, micro_batches=many)),
        )
    size = profile.workload.batch_size
    yield Variation(
        name="batch",
        words=f"batches of {2 * size} in place of {size} (bytes and seconds in proportion)",
        question=replace(question, profile=in_proportion(profile, "batch-size", 2 * size)),
    )


# --- their answers --------------------------------------------------------------------------------


def reach(question: Question, *, effort: Effort, known: Fit | None = None) -> Fit:
    """Find the fastest plan, no slower than the `known` one where that is for less.

    See [Note: more is never slower].
    """
    problems, before = question.problems(), known and known.solved
    hints: list[Hint] = []
    for_more = False
    if known and before:
        asked, machine = known.question, question.profile.hardware
        here = replace(asked, profile=replace(asked.profile, hardware=machine))
        if replace(here, budgets=question.budgets) == question:
            hints = [before.plan.units]
            sizes = zip(astuple(asked.budgets), astuple(question.budgets), strict=True)
            for_more = here == asked and all(one <= other for one, other in sizes)
    found = solve_sparing(problems, question.budgets, effort=effort, hints=hints)
    if isinstance(found, Infeasible) and not for_more and (other := question.adding_shards()):
        return reach(other, effort=effort)
    if before and for_more:
        seconds = before.plan.prediction.step_seconds
        least = problem_of(before, problems).compute_seconds
        if isinstance(found, Solved):
            least = found.plan.prediction.lower_bound_seconds
        spares = isinstance(found, Solved) and before.uses_disk and not found.uses_disk
        worth = 1 + question.settings.disk_gain * spares
        if isinstance(found, Infeasible) or seconds * worth < found.plan.prediction.step_seconds:
            plan = replace(before.plan, budgets=question.budgets)
            found = proven(replace(before, plan=plan), least, effort)
    return fit_of(question, problems, found)


def sweep(questions: Sequence[Question], *, gap: float) -> tuple[Fit, ...]:
    """Answer each question; where one asks of more than the one before, no slower than that."""
    found: list[Fit] = []
    for question in questions:
        known = found[-1] if found else None
        found.append(reach(question, effort=Effort(gap_target=gap), known=known))
    return tuple(found)


def least_seconds(question: Question) -> float | None:
    """Return a bound below all plans, with any number of replicas; None where there is no plan.

    The bound of `least_lane_seconds`: what links, updates and compute have to do within the
    budgets. It takes about a second where planning takes ten.
    """
    found = (least_lane_seconds(problem) for problem in question.problems())
    return min((bound for bound in found if bound is not None), default=None)


def tried(
    variation: Variation,
    tokens_per_s: float,
    effort: Effort,
    *,
    first: float = inf,
    known: Fit | None = None,
) -> Tried:
    """Answer a variation, or rule it out by bounds where it does not reach a speed.

    `first` is a bound on its speed that is at hand, `known` an answer to begin with.
    """
    question = variation.question
    if first < tokens_per_s:
        return Tried(variation=variation, most_tokens_per_s=first, bound=COMPUTE)
    if variation.answer is not None:
        return _planned(variation, variation.answer())
    if tokens_per_s or known is None:
        seconds = least_seconds(question)
        if seconds is None:
            return Tried(variation=variation, most_tokens_per_s=0.0, bound=MEMORY)
        if (most := question.tokens / seconds) < tokens_per_s:
            return Tried(variation=variation, most_tokens_per_s=most, bound=LANES)
    return _planned(variation, reach(question, effort=effort, known=known))


def _planned(variation: Variation, reached: Fit) -> Tried:
    most, bound = 0.0, MEMORY
    if reached.solved is not None:
        bound = PLAN
        most = reached.question.tokens / reached.solved.plan.prediction.lower_bound_seconds
    return Tried(variation=variation, most_tokens_per_s=most, bound=bound, reached=reached)


def helped(base: Fit, change: Variation, *, gap: float) -> Tried:
    """Answer a change, unless a bound says that it is worth too little."""
    worth = (base.tokens_per_s or 0.0) * (1 + WORTH)
    below = change.question.tokens / worth if worth else inf
    return tried(change, worth, Effort(gap_target=gap, below_s=below), known=base)


# --- the best of them -----------------------------------------------------------------------------


def search(
    offers: Sequence[Variation],
    *,
    speed: float | None = None,
    gap: float,
    told: Callable[[Variation], None] = lambda _: None,
    done: Callable[[Tried], None] = lambda _: None,
) -> Found:
    """Find the cheapest offer that reaches a speed; without one, the fastest whatever it costs.

    See [Note: why it is the cheapest] and [Note: why it is the fastest]. Of offers that cost the
    same, the first by its bound of computing. The cheapest is planned to the end: its plan is as
    fast as the planner finds. Each is `told` before it is looked at, and `done` after that.
    """
    firsts = {id(one): one.first_bound for one in offers}

    def order(one: Variation) -> tuple[float, float]:
        price, bound = one.price_per_hour, -firsts[id(one)]
        return (price, bound) if speed else (bound, price)

    ordered, looked_at = sorted(offers, key=order), list[Tried]()
    best: Tried | None = None
    for number, offer in enumerate(ordered):
        needed = speed or (best.tokens_per_s if best else 0.0)
        first = firsts[id(offer)]
        if not speed and first <= needed:
            return Found(best=best, looked_at=tuple(looked_at), unseen=tuple(ordered[number:]))
        told(offer)
        seconds = offer.question.tokens / needed if needed else inf
        # As fast as that is enough; a search that cannot get there is given up.
        effort = Effort(gap_target=gap)
        effort = replace(effort, enough_s=seconds) if speed else replace(effort, below_s=seconds)
        found = tried(offer, needed, effort, first=first)
        if speed and found.tokens_per_s >= speed:
            best, unseen = found, tuple(ordered[number + 1 :])
            if offer.answer is None:
                effort = Effort(gap_target=gap)
                best = _planned(offer, reach(offer.question, effort=effort, known=found.reached))
            done(best)
            return Found(best=best, looked_at=(*looked_at, best), unseen=unseen)
        looked_at.append(found)
        done(found)
        if not speed and found.tokens_per_s > needed:
            best = found
    return Found(best=best, looked_at=tuple(looked_at))


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, the least first."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def fastest_batch(questions: Sequence[Question], *, effort: Effort) -> int | None:
    """Return the number of the question with the fastest step; None where none has a plan.

    The questions are of the same sequences per update, in ever larger micro-batches. One is planned
    where its bound promises a step that is faster by more than the gap asked for: so the answer is
    the fastest but for that gap. Where bounds are equal, the larger micro-batch comes first.
    """
    bounds: dict[int, float] = {}
    asked = list(questions)
    for number, question in enumerate(questions):
        for one in filter(None, (question, question.adding_shards())):
            bound = least_lane_seconds(one.problem(), stopped=effort.spent)
            if bound is not None:  # a larger one may fit where this one adds up whole gradients
                bounds[number], asked[number] = bound, one
                break
    best, best_s = None, inf
    for number in sorted(bounds, key=lambda number: (bounds[number], -number)):
        if bounds[number] * (1 + effort.gap_target) >= best_s:
            break
        question = asked[number]
        found = solve_sparing(
            question.problems(), question.budgets, effort=replace(effort, below_s=best_s)
        )
        if isinstance(found, Solved) and found.plan.prediction.step_seconds < best_s:
            best, best_s = number, found.plan.prediction.step_seconds
    return best
