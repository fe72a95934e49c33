"""Every decision there is, and how it is told: one table for files, options, strips and sentences.

A decision of a new kind, or on a new tier, is one entry here; its class is in `plan.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from protrain_plan.records.forms import FORMS, ActivationForm
from protrain_plan.records.hardware import TierName
from protrain_plan.records.plan import (
    Activations,
    Keep,
    Offload,
    Persistent,
    Placement,
    Recompute,
    StateTier,
    Swap,
    SwapInput,
)
from protrain_plan.records.profile import Form

Decision = Activations | Placement


@dataclass(frozen=True, slots=True)
class Wording:
    """How a decision is told.

    phrase  in files, in `--pin` and in tables: `swap to host`
    letter  in strips: small on disk, and where only a part is computed again
    clause  to follow the names of units: `swap{s} {their} activations to host`
    gerund  of the same, where the units have been named: `swapping them to host`
    """

    decision: Decision
    phrase: str
    letter: str
    clause: str
    gerund: str

    def does(self, *, many: bool) -> str:
        """What one unit does, or `many`."""
        return self.clause.format(**_grammar(many=many))

    def doing(self, *, many: bool) -> str:
        """What it would be to do so."""
        return self.gerund.format(**_grammar(many=many))


def _grammar(*, many: bool) -> dict[str, str]:
    return {"s": "", "their": "their", "inputs": "inputs"} if many else _ONE


_ONE = {"s": "s", "their": "its", "inputs": "input"}
_TIERS: tuple[TierName, ...] = get_args(TierName)
_STATE_TIERS: tuple[StateTier, ...] = (*_TIERS, "device")
FORM_WORDS = tuple(form for form in FORMS if form not in ("keep", "full"))
"""How the phrases of decisions end that name a form of recomputation."""


def _activations(forms: tuple[Form, ...]) -> Iterator[Wording]:
    kept = [form for form in forms if not FORMS[form].recomputes]
    recomputed = [form for form in forms if FORMS[form].recomputes]
    for form in kept:
        named, of = ("", "") if form == "keep" else (f" {form}", f" ({form})")
        yield Wording(
            Keep(form=form),
            f"keep{named}",
            "k" if named else "K",
            f"keep{{s}} {{their}} activations{of}",
            f"keeping them{of}",
        )
    for form in recomputed:
        named, of = ("", "") if form == "full" else (f" {form}", f" ({form})")
        yield Wording(
            Recompute(form=form),
            f"recompute{named}",
            "r" if named else "R",
            f"recompute{{s}} {{their}} activations{of}",
            f"recomputing them{of}",
        )
    for form in kept:
        named, of = ("", "") if form == "keep" else (f" {form}", f" ({form})")
        for tier in _TIERS:
            yield Wording(
                Swap(tier=tier, form=form),
                f"swap{named} to {tier}",
                _sized("S", tier),
                f"swap{{s}} {{their}} activations{of} to {tier}",
                f"swapping them{of} to {tier}",
            )
    for form in recomputed:
        for tier in _TIERS:
            phrase = f"swap to {tier} and recompute {form}"
            its = the = f"what {form} keeps"
            if form == "full":
                phrase, its, the = f"swap-input to {tier}", "{their} {inputs}", "the {inputs}"
            yield Wording(
                SwapInput(tier=tier, form=form),
                phrase,
                _sized("I", tier),
                f"swap{{s}} {its} to {tier} and recompute{{s}} the rest",
                f"swapping {the} to {tier} and recomputing the rest",
            )


def _placements() -> Iterator[Wording]:
    keep = "keep{s} {their} states on the device"
    yield Wording(Persistent(), "persistent", "P", keep, "keeping them on the device")
    for gathered in (False, True):
        for tier in _STATE_TIERS:
            phrase, letter = f"offload to {tier}", _sized("B" if gathered else "O", tier)
            does, doing = f"offload{{s}} {{their}} states to {tier}", f"offloading them to {tier}"
            if tier == "device":
                phrase, letter = "shard", "d" if gathered else "D"
                does = "shard{s} {their} states over the devices"
                doing = "sharding them over the devices"
            if gathered:
                phrase += " and keep gathered"
                does, doing = f"{does} and keep{{s}} them gathered", f"{doing} and keeping them"
                doing += " gathered"
            decision = Offload(tier=tier, keep_gathered=gathered)
            yield Wording(decision, phrase, letter, does, doing)


def _sized(letter: str, tier: StateTier) -> str:
    return letter.lower() if tier == "disk" else letter


_ACTIVATIONS = tuple(_activations(("keep", "full", *FORM_WORDS)))
_PLACEMENTS = tuple(_placements())
WORDINGS: dict[Decision, Wording] = {told.decision: told for told in (*_ACTIVATIONS, *_PLACEMENTS)}
"""How each decision is told, in the order in which decisions are enumerated."""

ACTIVATIONS: dict[str, Activations] = {
    told.phrase: told.decision for told in _ACTIVATIONS if not isinstance(told.decision, Placement)
}
STATES: Mapping[str, Placement] = {
    told.phrase: told.decision for told in _PLACEMENTS if isinstance(told.decision, Placement)
}


def register_form(form: ActivationForm) -> Callable[[], None]:
    """Add an activation option, for this process; returns what takes it out again."""
    if form.name in FORMS:
        raise ValueError(f"there is an activation option {form.name!r} already")
    ordered = sorted([*FORMS.values(), form], key=lambda one: (one.recomputes, one.name == "full"))
    FORMS.clear()
    FORMS.update((one.name, one) for one in ordered)
    wordings = list(_activations((form.name,)))
    for told in wordings:
        assert not isinstance(told.decision, Placement)
        WORDINGS[told.decision] = told
        ACTIVATIONS[told.phrase] = told.decision

    def unregister() -> None:
        del FORMS[form.name]
        for told in wordings:
            del WORDINGS[told.decision], ACTIVATIONS[told.phrase]

    return unregister


OLD_PHRASES: Mapping[str, str] = {
    "buffer from host": "offload to host and keep gathered",
    "buffer from disk": "offload to disk and keep gathered",
    "buffer from shards": "shard and keep gathered",
}
"""Phrases as version 1 spelled them, and what they are called now."""

FIRST_PHRASES: Mapping[str, str] = {new: old for old, new in OLD_PHRASES.items()}
"""The other way round: for what must not change with the words, as fingerprints must not."""


def activations_text(activations: Activations) -> str:
    """The decision as a phrase: `keep`, `swap-input to disk`, ..."""
    return WORDINGS[activations].phrase


def states_text(states: Placement) -> str:
    """The placement as a phrase: `persistent`, `offload to disk`, `shard`, ..."""
    return WORDINGS[states].phrase
