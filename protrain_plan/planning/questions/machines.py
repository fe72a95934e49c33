"""The cheapest machine that reaches a speed, and the fastest that is within a price.

An offer is a machine, a number of its devices and a price, with the question that is to be planned
on it. What the planner would find is bounded without planning: by what units compute at least, at
once, and then by what all lanes do at least within the memory (`sensitivities.least_seconds`).

[Note: why it is the cheapest] Offers are looked at in the order of their prices. One is passed over
where a bound says that no plan of it reaches the speed, or that it has none; otherwise it is
planned. The first whose plan reaches the speed is the answer. Of every cheaper one it is known
that no plan reaches the speed, or that the plan found does not, while the bound on its plans does:
then they are at most that plan's gap apart. So no cheaper offer reaches the speed, but for one that
is named with the speed of its plan and the most that any could reach. All of this is about the
seconds of the profile: how far they are from a machine's is another matter.

[Note: why it is the fastest] Offers are looked at in the order of their first bounds, the fastest
first. One is passed over where a bound is no more than the best plan's speed so far. The search
ends when the first bound of the next offer is. So no offer is faster than the answer, but for the
gaps of those that were planned.

PHAZE (Wang et al., ICML 2024, arXiv 2407.13143) searches among architectures of accelerators, with
an integer programme for each one's schedule inside. Here the machines are those that one can have,
and the planner is inside.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from protrain_plan.planning.questions.objectives import Question
from protrain_plan.planning.questions.sensitivities import Reached, least_seconds, reach, tokens_of
from protrain_plan.planning.search.improving import Effort


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A question on a machine that can be had, for so much an hour in all; `name` says which."""

    name: str
    price_per_hour: float
    question: Question


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    """An offer with its plan, or ruled out without one: `reached` is None.

    No plan of it is faster than `most_tokens_per_s`, by its `bound`: one of those below, or that of
    its plan. It is 0 where none fits.
    """

    offer: Offer
    most_tokens_per_s: float
    bound: str
    reached: Reached | None = None

    @property
    def tokens_per_s(self) -> float:
        """Of the plan; 0 where there is none."""
        return self.reached.tokens_per_s if self.reached else 0.0


COMPUTE = "compute"
"""What units compute at least."""
LANES = "its lanes"
"""What compute, links, updates and collectives have to do at least, within the memory."""
MEMORY = "memory: no plan fits"
PLAN = "its plan"
"""The bound that a plan was proven with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search answers: the best offer, if there is one, and all that was looked at in order.

    `unseen` are those that no longer mattered.
    """

    best: LookedAt | None
    looked_at: tuple[LookedAt, ...]
    unseen: tuple[Offer, ...] = ()


Told = Callable[[Offer], None]
"""Called before an offer is looked at."""


def cheapest(
    offers: Sequence[Offer], *, tokens_per_s: float, gap: float, told: Told = lambda _: None
) -> Found:
    """The cheapest offer that reaches a speed. See [Note: why it is the cheapest].

    Of those that cost the same, the first by its bound of computing. The answer is planned to the
    end: its plan is as fast as the planner finds.
    """
    firsts = {id(offer): _first_bound(offer) for offer in offers}
    ordered = sorted(offers, key=lambda one: (one.price_per_hour, -firsts[id(one)]))
    looked_at: list[LookedAt] = []
    for number, offer in enumerate(ordered):
        told(offer)
        # As fast as that is enough, and a search that cannot get there is given up.
        seconds = tokens_of(offer.question) / tokens_per_s
        effort = Effort(gap_target=gap, enough_s=seconds)
        found = _looked_at(offer, firsts[id(offer)], tokens_per_s, effort)
        if found.tokens_per_s >= tokens_per_s:
            effort = Effort(gap_target=gap)
            best = _planned(offer, reach(offer.question, effort=effort, known=found.reached))
            rest = tuple(ordered[number + 1 :])
            return Found(best=best, looked_at=(*looked_at, best), unseen=rest)
        looked_at.append(found)
    return Found(best=None, looked_at=tuple(looked_at))


def fastest(offers: Sequence[Offer], *, gap: float, told: Told = lambda _: None) -> Found:
    """The fastest offer, whatever it costs. See [Note: why it is the fastest]."""
    firsts = {id(offer): _first_bound(offer) for offer in offers}
    ordered = sorted(offers, key=lambda one: (-firsts[id(one)], one.price_per_hour))
    looked_at: list[LookedAt] = []
    best: LookedAt | None = None
    for number, offer in enumerate(ordered):
        speed = best.tokens_per_s if best else 0.0
        if firsts[id(offer)] <= speed:
            return Found(best=best, looked_at=tuple(looked_at), unseen=tuple(ordered[number:]))
        told(offer)
        below = tokens_of(offer.question) / speed if speed else inf
        effort = Effort(gap_target=gap, below_s=below)
        found = _looked_at(offer, firsts[id(offer)], speed, effort)
        looked_at.append(found)
        if found.tokens_per_s > speed:
            best = found
    return Found(best=best, looked_at=tuple(looked_at))


def _first_bound(offer: Offer) -> float:
    """Tokens per second that no plan exceeds, since its units have to be computed."""
    seconds = min(problem.compute_seconds for problem in offer.question.problems())
    return tokens_of(offer.question) / seconds


def _looked_at(offer: Offer, first: float, tokens_per_s: float, effort: Effort) -> LookedAt:
    """An offer's plan, or why it does not reach a speed without one."""
    if first < tokens_per_s:
        return LookedAt(offer=offer, most_tokens_per_s=first, bound=COMPUTE)
    seconds = least_seconds(offer.question)
    if seconds is None:
        return LookedAt(offer=offer, most_tokens_per_s=0.0, bound=MEMORY)
    if (most := tokens_of(offer.question) / seconds) < tokens_per_s:
        return LookedAt(offer=offer, most_tokens_per_s=most, bound=LANES)
    return _planned(offer, reach(offer.question, effort=effort))


def _planned(offer: Offer, reached: Reached) -> LookedAt:
    if reached.solved is None:
        return LookedAt(offer=offer, most_tokens_per_s=0.0, bound=MEMORY, reached=reached)
    most = tokens_of(offer.question) / reached.solved.plan.prediction.lower_bound_seconds
    return LookedAt(offer=offer, most_tokens_per_s=most, bound=PLAN, reached=reached)
