"""Why units do what they do, in sentences: what excludes or costs every other decision."""

from collections.abc import Sequence

from protrain_plan.planning.alternatives import (
    Alternative,
    Judgement,
    Shortfall,
    Work,
    activation_work,
    state_work,
)
from protrain_plan.planning.network import Network
from protrain_plan.planning.options import ActivationOption, StateOption
from protrain_plan.planning.problem import Problem
from protrain_plan.planning.wording import (
    activations_does,
    listed_words,
    states_does,
    units_text,
)
from protrain_plan.records.plan import Keep, Persistent
from protrain_plan.units import format_bytes, format_seconds

TIE = 2e-4
"""The fraction of the step that does not count: the planner's tidying gives away ten times as
much."""


class Reasons:
    """Sentences about one plan: what its seconds make a tie, and a difference within its gap."""

    def __init__(self, problem: Problem, *, step_s: float, gap: float) -> None:
        self._hardware, self._network = problem.profile.hardware, Network.of(problem)
        self._tie_s = TIE * step_s
        self._gap_s = max(gap, TIE) * step_s

    def sentences(
        self,
        names: Sequence[str],
        activation: ActivationOption,
        state: StateOption,
        activations: Sequence[Judgement],
        states: Sequence[Judgement],
    ) -> str:
        """What the units do, and why."""
        many = len(names) > 1
        does = activations_does(activation.decision, many=many)
        places = states_does(state.decision, many=many)
        subject, again = units_text(names), "They" if many else "It"
        if activation.decision == Keep() and state.decision == Persistent():
            on_device = "activations and states on the device"
            does = f"keep their {on_device}" if many else f"keeps its {on_device}"
            return f"{subject} {does}: {self._plain([*activations, *states], many=many)}."
        work = activation_work(activation, self._hardware)
        why = self._why(work, activations, many=many)
        sentences = f"{subject} {does}: {why}."
        if not states:
            return sentences  # nothing to place, or nowhere else to
        why = self._why(state_work(state, self._hardware, self._network), states, many=many)
        return f"{sentences} {again} {places}: {why}."

    def _plain(self, judgements: Sequence[Judgement], *, many: bool) -> str:
        """Why units do what is least work."""
        if not judgements:
            return f"nothing else is open to {'them' if many else 'it'}"
        extra = min(_extra_seconds(judged.alternative) for judged in judgements)
        words = "there is room, and any other choice only adds work"
        if self._tie_s < extra < float("inf"):
            words += f", at least {format_seconds(extra)}{' per block' if many else ''}"
        return words

    def _why(self, work: Work, judgements: Sequence[Judgement], *, many: bool) -> str:
        """What excludes the decisions that are less work, and what the others cost."""
        less = sorted(
            (judged for judged in judgements if judged.work.is_less_than(work)),
            key=lambda judged: judged.work,
        )
        others = [judged for judged in judgements if judged not in less]
        if not judgements or (not less and all(work.is_less_than(one.work) for one in others)):
            return self._plain(others, many=many)
        # Of what is less work, the plainest and the nearest; of the rest, the fastest.
        told = [*less[:1], *less[1:][-1:]]
        told += sorted(others, key=lambda judged: _extra_seconds(judged.alternative))[:1]
        excluded = [one for one in told if one.alternative.shortfall_bytes is not None]
        fitting = [one for one in told if one not in excluded]
        ties = [
            one for one in fitting if -self._gap_s <= _extra_seconds(one.alternative) <= self._tie_s
        ]
        one_more = " in one more block" if many else ""
        clauses: list[str] = []
        before = None
        for judged in excluded:
            short = _shortfall_of(judged.alternative)
            if before and before[1:] == short[1:]:
                clauses.append(f"so would {judged.doing}, by {format_bytes(short.bytes)}")
            else:
                clauses.append(f"{judged.doing}{one_more} would {_exceed(short)}")
            before = short
        each = " per block" if many else ""
        for judged in fitting:
            extra = _extra_seconds(judged.alternative)
            if judged in ties:
                continue
            if extra < 0:  # such a plan is not the planner's
                clauses.append(f"{judged.doing} would be {format_seconds(-extra)} faster{each}")
            else:
                fits = " fits, but" if judged in less else ""
                clauses.append(f"{judged.doing}{fits} costs {format_seconds(extra)} more{each}")
        if ties:
            doing = listed_words([judged.doing for judged in ties], "or")
            clauses.append(f"{doing}{one_more} would be no slower")
        for judged in ties:
            if judged in less and judged.alternative.in_all:
                clauses.append(
                    f"in all of them, {judged.doing} would " + _exceed(judged.alternative.in_all)
                )
                break
        return "; ".join(clauses)


def _shortfall_of(found: Alternative) -> Shortfall:
    assert found.shortfall_bytes is not None and found.tier is not None
    return Shortfall(found.shortfall_bytes, found.tier, found.slot)


def _extra_seconds(found: Alternative) -> float:
    """Infinite for what does not fit."""
    return float("inf") if found.extra_seconds is None else found.extra_seconds


def _exceed(short: Shortfall) -> str:
    where = f" in the {short.slot}" if short.slot else ""
    return f"exceed the {short.tier} budget by {format_bytes(short.bytes)}{where}"
