"""What moves and works beside compute in the fluid model: flows, and the lanes they run on."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import pulp

from protrain_plan.planning.decision_model import Terms
from protrain_plan.records.hardware import Contention, TierName


@dataclass(slots=True)
class Flow:
    """One kind of work on a lane: what is done during stalls, during compute, and what waits.

    `rate` turns its unit (bytes / M, or seconds) into fractions of the plain compute time.
    """

    stall: list[pulp.LpVariable]
    compute: list[pulp.LpVariable]
    waiting: list[pulp.LpVariable]
    rate: float
    amounts: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))


class Lane(NamedTuple):
    """A lane beside compute, the link that it shares, and what runs on it."""

    name: str
    link: TierName | Literal["network"] | None  # None: the optimizer on the host
    duplex: float
    contention: Contention
    flows: list[Flow]


def work(lane: Lane, slot: int, factor: float) -> Terms:
    """`factor` times the seconds that a lane works beside a slot's compute."""
    return [(f.compute[slot], factor * f.rate / lane.contention.lane) for f in lane.flows]


def rates_of(running: Sequence[Lane], link_share: float) -> tuple[float, dict[str, float]]:
    """The rates of compute, and of each lane, while these lanes run."""
    compute, lanes = 1.0, {}
    links = [lane.link for lane in running if lane.link is not None]
    crossed = "network" in links and set(links) != {"network"}
    for lane in running:
        compute *= lane.contention.compute
        shared = lane.link is not None and links.count(lane.link) == 2
        lanes[lane.name] = lane.contention.lane * (lane.duplex if shared else 1.0)
        if crossed and lane.link is not None:
            lanes[lane.name] *= link_share
    return compute, lanes


def crossing(share: float) -> float:
    """What a second of another lane takes of this one's, if both keep `share` of their speed.

    Exact for shares >= 1/2, optimistic below.
    """
    return min(1.0, 1 / share - 1)
