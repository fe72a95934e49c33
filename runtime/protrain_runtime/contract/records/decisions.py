"""Every decision and its wording: one table for files, options, strips and sentences.

A decision of a new kind, or on a new tier, is one entry here; its class is in `plan.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Generic, TypeVar, get_args

from protrain_runtime.contract.records.forms import FORMS, ActivationForm
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    Activations,
    Placement,
)
from protrain_runtime.contract.records.profile import Form

Decision = Activations | Placement
D = TypeVar("D", bound=Decision, covariant=True)


@dataclass(frozen=True, slots=True)
class Wording(Generic[D]):
    """The words for a decision.

    phrase  in files, in `--pin` and in tables: `swap to host`
    letter  in strips: small on disk, and where only a part is computed again
    clause  to follow the names of units: `swap{s} {their} activations to host`
    gerund  of the same, where the units have been named: `swapping them to host`
    """

    decision: D
    phrase: str
    letter: str
    clause: str
    gerund: str

    def does(self, *, many: bool) -> str:
        """Say what one unit does, or `many`."""
        return self.clause.format(**(_MANY if many else _ONE))

    def doing(self, *, many: bool) -> str:
        """Say what it would be to do so."""
        return self.gerund.format(**(_MANY if many else _ONE))


_ONE = {"s": "s", "their": "its", "inputs": "input"}
_MANY = {"s": "", "their": "their", "inputs": "inputs"}
_TIERS: tuple[TierName, ...] = get_args(TierName)
SPECULATIVELY = " speculatively"
"""The end of phrases of placements whose updates run ahead of the norm."""


def _activations(forms: tuple[Form, ...]) -> Iterator[Wording[Activations]]:
    """First what stays on the device, then what is swapped; forms that keep before the others."""
    ordered = sorted(forms, key=lambda form: FORMS[form].recomputes)
    for tiers in ((None,), _TIERS):
        for form, tier in product(ordered, tiers):
            if tier and FORMS[form].of == "last part":
                continue  # parts swap nothing
            yield _activations_wording(form, tier)


def _activations_wording(form: Form, tier: TierName | None) -> Wording[Activations]:
    recomputes = FORMS[form].recomputes
    default = form == ("full" if recomputes else "keep")
    named, of = ("", "") if default else (f" {form}", f" ({form})")
    to, decision = f" to {tier}" if tier else "", Activations(form=form, tier=tier)
    if recomputes and tier:
        its, the = ("{their} {inputs}", "the {inputs}") if default else (f"what {form} keeps",) * 2
        return Wording(
            decision,
            f"swap-input{to}" if default else f"swap{to} and recompute {form}",
            "i" if tier == "disk" else "I",
            f"swap{{s}} {its}{to} and recompute{{s}} the rest",
            f"swapping {the}{to} and recomputing the rest",
        )
    if tier:
        verb, gerund, letter = "swap", "swapping", "s" if tier == "disk" else "S"
    else:
        verb, gerund = ("recompute", "recomputing") if recomputes else ("keep", "keeping")
        letter = verb[0].upper() if default else verb[0]
    return Wording(
        decision,
        f"{verb}{named}{to}",
        letter,
        f"{verb}{{s}} {{their}} activations{of}{to}",
        f"{gerund} them{of}{to}",
    )


ON_DISK = (1, 3)
"""Sixteenths of the frozen parameters in host memory that may lie on disk."""

_OFFLOADS: dict[Placement, str] = {
    Placement(tier="host"): "OB",
    Placement(tier="host", update_on_device=True): "GH",
    Placement(tier="host", update_on_device=True, speculate=True): "VY",
    Placement(tier="host", common_copy=True): "Cc",
    **{Placement(tier="host", on_disk=part): "Ee" for part in ON_DISK},
    Placement(tier="disk"): "ob",
    Placement(tier="disk", speculate=True): "vy",
    Placement(tier="device"): "Dd",
}
"""Placements below the device, with their letters: of parameters that are fetched per use, and of
those that are kept gathered."""


def _placements() -> Iterator[Wording[Placement]]:
    keep = "keep{s} {their} states on the device"
    keeping = "keeping them on the device"
    yield Wording(PERSISTENT, "persistent", "P", keep, keeping)
    yield Wording(
        OPTIMIZER_IN_BACKWARD,
        "persistent and update in backward",
        "U",
        f"{keep} and update{{s}} them in backward",
        f"{keeping} and updating them in backward",
    )
    for gathered, (placement, letters) in product((False, True), _OFFLOADS.items()):
        tier, on_device, ahead = placement.tier, placement.update_on_device, placement.speculate
        phrase, doing = f"offload to {tier}", f"offloading them to {tier}"
        does = f"offload{{s}} {{their}} states to {tier}"
        if tier == "device":
            phrase, doing = "shard", "sharding them over the devices"
            does = "shard{s} {their} states over the devices"
        if placement.common_copy:
            phrase += " with a common copy"
            does += " with a common copy of what is frozen"
            doing += " with a common copy of what is frozen"
        if placement.on_disk:
            part = f" with {placement.on_disk}/16 on disk"
            phrase, does, doing = phrase + part, does + part, doing + part
        if gathered:
            joined = "," if on_device or ahead else " and"
            phrase += " and keep gathered"
            does += f"{joined} keep{{s}} them gathered"
            doing += f"{joined} keeping them gathered"
        if on_device or ahead:
            early = SPECULATIVELY if ahead else ""
            where, there = (" on device", " on the device") if on_device else ("", "")
            phrase += f" and update{where}{early}"
            does += f" and update{{s}} them{there}{early}"
            doing += f" and updating them{there}{early}"
        decision = replace(placement, keep_gathered=gathered)
        yield Wording(decision, phrase, letters[gathered], does, doing)


_ACTIVATIONS = tuple(_activations(tuple(dict.fromkeys(("keep", "full", *FORMS)))))
_PLACEMENTS = tuple(_placements())
_ALL: tuple[Wording[Decision], ...] = (*_ACTIVATIONS, *_PLACEMENTS)
WORDINGS = {wording.decision: wording for wording in _ALL}
"""The words for each decision, in the order in which decisions are enumerated."""

ACTIVATIONS = {wording.phrase: wording.decision for wording in _ACTIVATIONS}
PLAIN = tuple(w.phrase for w in _ACTIVATIONS if w.decision.form in ("keep", "full"))
"""The phrases that name no form: what messages list."""
STATES: Mapping[str, Placement] = {wording.phrase: wording.decision for wording in _PLACEMENTS}


def register_form(form: ActivationForm) -> Callable[[], None]:
    """Add an activation option, for this process; returns what takes it out again."""
    if form.name in FORMS:
        raise ValueError(f"there is an activation option {form.name!r} already")
    ordered = sorted([*FORMS.values(), form], key=lambda one: (one.recomputes, one.name == "full"))
    FORMS.clear()
    FORMS.update((one.name, one) for one in ordered)
    wordings = list(_activations((form.name,)))
    for wording in wordings:
        WORDINGS[wording.decision] = wording
        ACTIVATIONS[wording.phrase] = wording.decision

    def unregister() -> None:
        del FORMS[form.name]
        for wording in wordings:
            del WORDINGS[wording.decision], ACTIVATIONS[wording.phrase]

    return unregister


def activations_text(activations: Activations) -> str:
    """The decision as a phrase: `keep`, `swap-input to disk`, ..."""
    return WORDINGS[activations].phrase


def states_text(states: Placement) -> str:
    """The placement as a phrase: `persistent`, `offload to disk`, `shard`, ..."""
    return WORDINGS[states].phrase
