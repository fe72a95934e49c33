"""The order of forwards and backwards in every stage, and when each of them begins.

1F1B and interleaved 1F1B as Megatron-LM and PyTorch have them (Narayanan et al., arXiv 2104.04473):
a device begins with forwards, as many as `Shape.warm` says, then does a backward and a forward in
turns, and ends with backwards. With v chunks on each of p devices, chunk k of device s is part
k p + s of the model; micro-batches go through the chunks of a device in rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, count
from typing import NamedTuple

from protrain_plan.planning.stages.shapes import Shape


class Action(NamedTuple):
    """The forward or the backward of one micro-batch through one part of the model."""

    forward: bool
    part: int
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one device: of a micro-batch in each of its chunks, and after the last backward.

    The last micro-batch's backward reduces gradients, and takes longer. `update_s` are seconds
    from its end to that of the last update.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    last_backward: tuple[float, ...]
    update_s: float

    @property
    def cycle_s(self) -> float:
        """Seconds of a micro-batch, in all chunks."""
        return sum(self.forward) + sum(self.backward)


class StageSpan(NamedTuple):
    """A time in which a stage works; without an action, from its last backward to its end."""

    start_s: float
    end_s: float
    stage: int
    action: Action | None

    @property
    def kind(self) -> str:
        """`forward`, `backward` or `update`."""
        if self.action is None:
            return "update"
        return "forward" if self.action.forward else "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A step of all stages: its seconds, the share in which each one waits, and its spans."""

    step_seconds: float
    idle: tuple[float, ...]
    spans: tuple[StageSpan, ...] = ()  # where they were asked for


def actions(shape: Shape, stage: int) -> list[Action]:
    """The order of what a device does in a step."""
    p, v, size = shape.stages, shape.chunks, shape.in_round

    def action(number: int, *, forward: bool) -> Action:
        one_round, within = divmod(number, size * v)
        chunk, place = divmod(within, size)
        part = (chunk if forward else v - 1 - chunk) * p + stage
        return Action(forward, part, one_round * size + place)

    total, warm = shape.micro_batches * v, shape.warm(stage)
    forwards = [action(number, forward=True) for number in range(total)]
    backwards = [action(number, forward=False) for number in range(total)]
    turns = zip(backwards, forwards[warm:], strict=False)
    return [*forwards[:warm], *chain.from_iterable(turns), *backwards[total - warm :]]


def simulated(
    shape: Shape,
    seconds: Sequence[StageSeconds],
    hops: Sequence[float],
    nodes: Sequence[int] = (),
    *,
    norm_of_all: bool = False,
    with_spans: bool = False,
) -> Simulated:
    """Run all stages, event by event: each waits for its own order, and for its neighbours'.

    A forward waits for that of the part before, a backward for that of the part behind. Between
    devices there is a hop of `hops` seconds (by the stage before it); hops in one direction go one
    after the other. So do all that leave a node or come to it, where stages are in several `nodes`.
    Where updates need the `norm_of_all` gradients, they wait for the last backward of all stages.
    """
    p, parts = shape.stages, shape.stages * shape.chunks
    waiting = [actions(shape, stage) for stage in range(p)]
    place, clock, busy, running = [0] * p, [0.0] * p, [0.0] * p, [False] * p
    free: dict[object, float] = {}  # when a hop may begin, by link
    there: set[Action] = set()  # those whose output is where it is read
    spans: list[StageSpan] = []
    events: list[tuple[float, int, Action, bool]] = []  # an action ends, or its output arrives
    order = count()

    def begin(stage: int, now: float) -> None:
        if running[stage] or place[stage] == len(waiting[stage]):
            return
        action = waiting[stage][place[stage]]
        source = _source(action, parts)
        if source is None or source in there:
            of_stage = seconds[stage]
            of_chunks = of_stage.forward if action.forward else of_stage.backward
            if not action.forward and action.micro_batch == shape.micro_batches - 1:
                of_chunks = of_stage.last_backward
            taken = of_chunks[action.part // p]
            running[stage], clock[stage] = True, now + taken
            busy[stage] += taken
            heappush(events, (clock[stage], next(order), action, True))
            if with_spans:
                spans.append(StageSpan(now, clock[stage], stage, action))

    for stage in range(p):
        begin(stage, 0.0)
    while events:
        now, _, action, ended = heappop(events)
        stage = action.part % p
        other = (stage + (1 if action.forward else -1)) % p
        is_last = action.part == (parts - 1 if action.forward else 0)
        if not ended:
            there.add(action)
            begin(other, now)
            continue
        place[stage] += 1
        running[stage] = False
        if p > 1 and not is_last:
            links: tuple[object, ...] = ((stage, other),)
            if nodes and nodes[stage] != nodes[other]:
                links = (("from", nodes[stage]), ("to", nodes[other]))
            start = max(now, *(free.get(link, 0.0) for link in links))
            arrives = start + hops[stage if action.forward else other]
            free.update(dict.fromkeys(links, arrives))
            heappush(events, (arrives, next(order), action, False))
        else:
            there.add(action)
        begin(stage, now)
    begins = [max(clock)] * p if norm_of_all else clock
    ends = [one + of_stage.update_s for one, of_stage in zip(begins, seconds, strict=True)]
    step = max(ends)
    work = [one + of_stage.update_s for one, of_stage in zip(busy, seconds, strict=True)]
    if with_spans:
        last = enumerate(zip(begins, ends, strict=True))
        spans += [StageSpan(begin, end, s, None) for s, (begin, end) in last if begin < end]
    idle = tuple(1 - one / step for one in work)
    return Simulated(step_seconds=step, idle=idle, spans=tuple(spans))


def _source(action: Action, parts: int) -> Action | None:
    """The action of another part that this one needs; the last backward needs its own forward."""
    forward, part, micro_batch = action
    if forward:
        return Action(True, part - 1, micro_batch) if part else None
    if part == parts - 1:
        return Action(True, part, micro_batch)
    return Action(False, part + 1, micro_batch)
