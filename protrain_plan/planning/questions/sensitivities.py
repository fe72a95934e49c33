"""What another machine would change: more memory, a faster link, more devices; all else as asked.

The bytes of a profile do not depend on the machine's sizes and links, so that one profile answers
all of these questions.

[Note: more is never slower] A plan for less memory is a plan for more: it takes as many bytes and
as many seconds. So a search begins with the decisions of the plan that is known for less, and that
plan is the answer where the search finds no faster one. For a faster link, a search begins with the
decisions for the slower one. No more is promised there: a move that ends earlier can stand in
another's way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal

from protrain_plan.planning.explain.explaining import lanes_in_a_line
from protrain_plan.planning.model.decision_model import least_lane_seconds
from protrain_plan.planning.model.problem import Choice
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.growth import grown
from protrain_plan.planning.questions.objectives import Question
from protrain_plan.planning.questions.planner import problem_of, solve_any, status_of
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import PCIE, Hardware, TierName
from protrain_runtime.contract.records.profile import SPARSE
from protrain_runtime.contract.units import format_bytes

Resource = Literal["host", "device", "disk", "link"]

WORTH = 0.02
"""What a change has to be worth to be named: the gap that `fit` plans to."""

USUAL_HOST = 8 * 2**30
"""Sizes of host memory are this one's doubles."""

MORE_MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A question with its plan, or why there is none."""

    question: Question
    solved: Solved | None
    infeasible: Infeasible | None

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all devices' micro-batches per second of the predicted step; 0 without one."""
        if self.solved is None:
            return 0.0
        return tokens_of(self.question) / self.solved.plan.prediction.step_seconds

    def binds(self) -> str:
        """What makes up the step, or what there is too little of, in words: a second's work."""
        if self.infeasible is not None:
            return self.infeasible.in_a_line
        assert self.solved is not None
        problem = problem_of(self.solved, self.question.problems())
        return lanes_in_a_line(problem, problem.choice_of(self.solved.plan.units))


def tokens_of(question: Question) -> int:
    """Tokens of a step: those of all devices' micro-batches."""
    workload, devices = question.profile.workload, question.group.num_devices
    return workload.batch_size * workload.seq_len * question.settings.micro_batches * devices


def with_resource(question: Question, resource: Resource, value: float) -> Question:
    """The question on a machine with so many bytes, or with a link of so many bytes per second.

    Host memory and disk are those of a node; the link is that of a device, in both directions. What
    joins several devices stays as it is. ProtrainError where the machine has no such tier.
    """
    machine = question.profile.hardware
    refuse_missing(machine, resource)
    if resource == "device":
        return replace(question, budgets=replace(question.budgets, device=int(value)))
    if resource == "link":
        return _on(question, with_link(machine, "host", value, value))
    of_rank = int(value) // question.group.in_node
    return replace(question, budgets=replace(question.budgets, **{resource: of_rank}))


def refuse_missing(machine: Hardware, resource: Resource) -> None:
    """ProtrainError where a machine does not have what is to be changed."""
    tier = "host" if resource == "link" else resource
    if tier != "device" and all(one.name != tier for one in machine.tiers):
        what = "host memory" if tier == "host" else "disk"
        raise ProtrainError(f"{machine.name} has no {what} below its device", key="--sweep")


def with_link(machine: Hardware, name: TierName, read: float, write: float) -> Hardware:
    """The machine with a link of these speeds between its device and a tier."""
    return replace(
        machine,
        tiers=tuple(
            replace(
                tier,
                link=replace(tier.link, read_bytes_per_s=read, write_bytes_per_s=write),
            )
            if tier.name == name
            else tier
            for tier in machine.tiers
        ),
    )


def _on(question: Question, machine: Hardware) -> Question:
    return replace(question, profile=replace(question.profile, hardware=machine))


def reach(question: Question, *, effort: Effort, known: Reached | None = None) -> Reached:
    """The fastest plan found for a question; no slower than the `known` one where that is for less.

    See [Note: more is never slower].
    """
    problems, before = question.problems(), known and known.solved
    hints: list[Choice] = []
    if known and before and _same_options(question, known.question):
        hints = [problems[0].choice_of(before.plan.units)]
    found = solve_any(problems, question.budgets, effort=effort, hints=hints)
    if known and before and _asks_of_more(question, known.question):
        least = problem_of(before, problems).compute_seconds
        if isinstance(found, Solved):
            least = found.plan.prediction.lower_bound_seconds
        if isinstance(found, Infeasible) or _seconds(before) < _seconds(found):
            prediction = replace(before.plan.prediction, lower_bound_seconds=least)
            plan = replace(before.plan, budgets=question.budgets, prediction=prediction)
            found = replace(before, plan=plan, gap=plan.gap, status=status_of(plan.gap, effort))
    if isinstance(found, Infeasible):
        return Reached(question=question, solved=None, infeasible=found)
    return Reached(question=question, solved=found, infeasible=None)


def _same_options(question: Question, known: Question) -> bool:
    """Whether two questions differ in budgets and hardware alone."""
    profile = replace(known.profile, hardware=question.profile.hardware)
    return replace(known, profile=profile, budgets=question.budgets) == question


def _asks_of_more(question: Question, known: Question) -> bool:
    """Whether two questions differ in budgets alone, none of which has become less."""
    old, new = astuple(known.budgets), astuple(question.budgets)
    at_least = all(one <= other for one, other in zip(old, new, strict=True))
    return at_least and replace(known, budgets=question.budgets) == question


def _seconds(solved: Solved) -> float:
    return solved.plan.prediction.step_seconds


def sweep(questions: Sequence[Question], *, gap: float) -> tuple[Reached, ...]:
    """Each question's plan; where one asks of more than the one before, no slower than that."""
    found: list[Reached] = []
    for question in questions:
        known = found[-1] if found else None
        found.append(reach(question, effort=Effort(gap_target=gap), known=known))
    return tuple(found)


def least_seconds(question: Question) -> float | None:
    """No plan takes less, with any of its numbers of replicas; None where there is no plan.

    The bound of `least_lane_seconds`: what links, updates and compute have to do within the
    budgets. It takes about a second where planning takes ten.
    """
    found = (least_lane_seconds(problem) for problem in question.problems())
    return min((bound for bound in found if bound is not None), default=None)


# --- what would help ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something else than was asked for: "host memory", and in words what of it."""

    what: str
    words: str
    question: Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Helped:
    """What a change is worth: tokens/s with it over those without; 0 where it does not fit either.

    `times` is None where it fits only with the change. A search ends where its bound says that the
    change is worth less than `WORTH`, up to the planner's gap, and `times` is of what it has then.
    `reached` is None where a bound says so before anything is planned.
    """

    change: Change
    times: float | None
    reached: Reached | None

    @property
    def is_worth_it(self) -> bool:
        """Whether the change is to be named."""
        return self.times is None or self.times >= 1 + WORTH

    @property
    def is_too_little(self) -> bool:
        """Whether it fits with the change, and is not worth it."""
        return self.times != 0 and not self.is_worth_it


def changes(question: Question, *, device_sizes: Sequence[int] = ()) -> Iterator[Change]:
    """The few changes that people can make to a machine, or to what they ask of it.

    host memory     the next double of 8 GiB, of a node
    link            the next generation of PCIe that is faster
    device memory   the next of `device_sizes`, with the speed as it is
    disk            twice as fast: two drives, of which each has half of the bytes
    micro-batches   four times as many for each update
    batch           twice as many sequences, grown in proportion (see `growth.grown`)
    """
    profile, machine = question.profile, question.profile.hardware
    tiers = {tier.name: tier for tier in machine.tiers}
    if host := tiers.get("host"):
        there = question.budgets.host * question.group.in_node
        size = USUAL_HOST
        while size <= there:
            size *= 2
        yield Change(
            what="host memory",
            words=f"{format_bytes(size - there)} more host memory ({format_bytes(size)})",
            question=with_resource(question, "host", size),
        )
        slower = min(host.link.read_bytes_per_s, host.link.write_bytes_per_s)
        faster = [name for name, speed in PCIE.items() if speed > 1.1 * slower]
        if faster:
            rate = PCIE[faster[0]]
            yield Change(
                what="link",
                words=f"a link of {rate / 1e9:g} GB/s (PCIe {faster[0][-1]}) in place of"
                f" {slower / 1e9:.3g} GB/s",
                question=with_resource(question, "link", rate),
            )
    if larger := [size for size in sorted(device_sizes) if size > question.budgets.device]:
        yield Change(
            what="device memory",
            words=f"{format_bytes(larger[0])} of device memory in place of"
            f" {format_bytes(question.budgets.device)}",
            question=with_resource(question, "device", larger[0]),
        )
    if disk := tiers.get("disk"):
        read, write = disk.link.read_bytes_per_s, disk.link.write_bytes_per_s
        yield Change(
            what="disk",
            words="a disk that is twice as fast",
            question=_on(question, with_link(machine, "disk", 2 * read, 2 * write)),
        )
    if not any(unit.stays == SPARSE for unit in profile.units):
        settings = question.settings
        many = MORE_MICRO_BATCHES * settings.micro_batches
        yield Change(
            what="micro-batches",
            words=f"{many} micro-batches for each update in place of {settings.micro_batches}",
            question=replace(question, settings=replace(settings, micro_batches=many)),
        )
    size = profile.workload.batch_size
    yield Change(
        what="batch",
        words=f"batches of {2 * size} in place of {size} (bytes and seconds in proportion)",
        question=replace(question, profile=grown(profile, batch_size=2 * size)),
    )


def helped(base: Reached, change: Change, *, gap: float) -> Helped:
    """What a change is worth, planned unless a bound says that it is worth too little."""
    question, before = change.question, base.tokens_per_s
    effort = Effort(gap_target=gap)
    if before:
        # A step has to be faster than this, or the change is worth too little.
        worth_s = tokens_of(question) / (before * (1 + WORTH))
        least = least_seconds(question)
        if least is None or least > worth_s:
            return Helped(change=change, times=0.0 if least is None else 1.0, reached=None)
        effort = replace(effort, below_s=worth_s)
    found = reach(question, effort=effort, known=base)
    times: float | None = found.tokens_per_s / before if before else None
    if found.solved is None:
        times = 0.0
    return Helped(change=change, times=times, reached=found)
