"""The decisions open to each unit of a profile, and what is left of them where the user fixes some:

    --pin 'layers.0-3: recompute'
    --pin 'model.layers.4: swap to host, persistent'

or the same in a file:

    protrain: pins
    version: 2
    pins:
      layers.0-3: recompute
      '*.layers.*': persistent

A pattern is a unit's name, a run of names such as layers.0-3, or a glob such as '*.layers.*'. It
may leave out what stands before a dot: layers.0-3 is model.layers.0 to model.layers.3 as well,
unless units have the shorter names.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import defstruct

from protrain_runtime.contract.errors import ProtrainError, RecordError
from protrain_runtime.contract.program.effects import ActivationOption, Implications, StateOption
from protrain_runtime.contract.program.program import gradient_home, residencies
from protrain_runtime.contract.program.requirements import unmet
from protrain_runtime.contract.records.decisions import (
    ACTIVATIONS,
    ON_DISK,
    PLAIN,
    SPECULATIVELY,
    STATES,
    WORDINGS,
)
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.folding import fold, runs, unfold
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.hardware import TierName, is_accelerator
from protrain_runtime.contract.records.limits import Text
from protrain_runtime.contract.records.plan import (
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    Activations,
    Placement,
    StateTier,
    StepSettings,
)
from protrain_runtime.contract.records.profile import WHOLE, Unit
from protrain_runtime.contract.records.tree import parsed
from protrain_runtime.contract.records.words import did_you_mean, listed

Option = ActivationOption | StateOption

Decision = tuple[int, int]
"""The numbers of a unit's activation option and state option."""


@dataclass(frozen=True)
class UnitOptions:
    """A unit's options; without pins, keep and persistent come first."""

    unit: Unit
    activations: tuple[ActivationOption, ...]
    states: tuple[StateOption, ...]

    @property
    def kinds(self) -> tuple[Sequence[Option], Sequence[Option]]:
        """The options of both kinds of decisions, in the order of `Decision`."""
        return self.activations, self.states

    @cached_property
    def numbers(self) -> tuple[dict[Activations, int], dict[Placement, int]]:
        """The numbers of the activation options and of the state options, by their decisions."""
        return (
            {option.decision: number for number, option in enumerate(self.activations)},
            {option.decision: number for number, option in enumerate(self.states)},
        )

    def placed(self, open_to: Callable[[StateOption], bool]) -> "UnitOptions":
        """The unit with only these placements, unless none is left."""
        left = tuple(filter(open_to, self.states))
        return replace(self, states=left) if 0 < len(left) < len(self.states) else self


def homes(implied: Implications) -> list[StateTier]:
    """Tiers of non-persistent states, nearest first."""
    shards: list[StateTier] = ["device"] if implied.settings.group.num_devices > 1 else []
    return [*shards, *(tier.name for tier in implied.profile.hardware.tiers)]


def unit_options(implied: Implications) -> tuple[UnitOptions, ...]:
    """The options of every unit, in execution order."""
    units, settings, found = implied.profile.units, implied.settings, []
    tiers = [tier.name for tier in implied.profile.hardware.tiers]
    for index, unit in enumerate(units):
        activations: list[Activations] = []
        for cost in unit.forms:
            activations.append(Activations(form=cost.form))
            if cost.swappable_bytes > 0 and FORMS[cost.form].of == "blocks":
                activations += [Activations(form=cost.form, tier=tier) for tier in tiers]
        states: list[Placement] = [PERSISTENT]
        common: list[Placement] = []
        trained = unit.used_by and unit.reached and unit.num_parameters
        trained = trained and unit.stays in ("", WHOLE)
        # A chunk trained only in small part, as by adapters, has few gradients and states for
        # another place of the update to spare.
        trained = trained and 2 * unit.gradient_bytes >= unit.parameter_bytes
        if trained:
            states.append(OPTIMIZER_IN_BACKWARD)
        for home in homes(implied) if unit.used_by and not unit.stays else ():
            offload, buffer = Placement(tier=home), Placement(tier=home, keep_gathered=True)
            if gradient_home(offload, settings, implied.device) == "host" and "host" not in tiers:
                continue  # this chunk's optimizer would run in host memory
            stays = [residencies(one, unit.used_by, len(units)) for one in (offload, buffer)]
            placements = [offload, buffer] if stays[0] != stays[1] else [offload]
            if home == "host" and unit.gradient_bytes < unit.parameter_bytes:
                common = [replace(one, common_copy=True) for one in placements]
                parts = ON_DISK if "disk" in tiers and is_accelerator(implied.device) else ()
                common += [replace(one, on_disk=part) for part in parts for one in placements]
            if home == "host" and trained and is_accelerator(implied.device):
                placements += [replace(one, update_on_device=True) for one in placements]
            states += placements
        if trained and settings.clip_share < 1:
            # Last: other options keep their numbers.
            offloads = [one for one in states if one.staged]
            states += [replace(one, speculate=True) for one in offloads]
        states += common
        found.append(
            UnitOptions(
                unit,
                tuple(implied.activations(index, decision) for decision in activations),
                tuple(
                    implied.states(index, decision)
                    for decision in states
                    if unmet(decision, settings) is None
                ),
            )
        )
    return tuple(found)


KIND, VERSION = "pins", 2
_MAX_SHOWN = 6
"""Most names of units in a message; a run counts once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Fixed decisions for a pattern's units; `None`: the planner decides.

    `exact_updates` excludes host updates if the model is on an accelerator: their last bits differ
    (see `records.forms.Exactness`). `source` is for messages: `--pin`, or a file with its line.
    """

    units: str
    activations: Activations | None = None
    states: Placement | None = None
    exact_updates: bool = False
    source: str


EXACT_UPDATES = Pin(units="*", exact_updates=True, source="--exact-updates")


def parse_pin(text: str) -> Pin:
    """The pin of an option such as `layers.0-3: recompute`; ProtrainError if invalid."""
    units, colon, decisions = text.rpartition(":")  # decisions have no colon, names might
    units = units.strip()
    if not colon or not units:
        problem = f"expected units and their decisions, got {text!r}"
        raise ProtrainError(problem, source="--pin", fix="for example 'layers.0-3: recompute'")
    try:
        activations, states = _decisions(decisions)
    except ProtrainError as error:
        raise ProtrainError(error.message, source="--pin", key=units, fix=error.fix) from None
    return Pin(units=units, activations=activations, states=states, source="--pin")


def read_pins(path: str | Path) -> tuple[Pin, ...]:
    """The pins in a file, in order; RecordError, with file, line and key, if invalid."""
    source = str(path)
    text = read_text(path)
    try:
        top = parsed(text, source)
    except RecordError as error:
        line = "" if error.line is None else text.splitlines()[error.line - 1 :][:1]
        if line and line[0].lstrip().startswith("*") and error.fix is None:
            error.fix = "put a pattern that starts with * in quotes"  # else YAML sees an alias
        raise
    keys = {"protrain": str, "version": int, "pins": dict[str, Any]}
    top.headed(KIND, VERSION).read(defstruct(KIND, keys.items(), forbid_unknown_fields=True))
    pins: list[Pin] = []
    for units, value in top.at("pins").mapping().items():
        with value.located():
            activations, states = _decisions(value.read(Text))
        place = f"{source}:{value.line}"
        pins.append(Pin(units=units, activations=activations, states=states, source=place))
    if not pins:
        raise top.at("pins").error("expected at least one pin, got none")
    return tuple(pins)


def _decisions(text: str) -> tuple[Activations | None, Placement | None]:
    """The one or two decisions, in any order."""
    found: dict[str, str] = {}
    for phrase in (part.strip() for part in text.split(",")):
        if phrase not in ACTIVATIONS and phrase not in STATES:
            states = [known for known in STATES if not known.endswith(SPECULATIVELY)]
            raise ProtrainError(
                f"expected a decision, got {phrase!r}",
                fix=did_you_mean(phrase, (*ACTIVATIONS, *STATES))
                or f"the decisions are {listed(PLAIN, 'or')} for activations"
                f" and {listed(states, 'or')} for states",
            )
        kind = "activations" if phrase in ACTIVATIONS else "states"
        if kind in found:
            raise ProtrainError(
                f"expected one decision for {kind}, got {found[kind]!r} and {phrase!r}"
            )
        found[kind] = phrase
    return ACTIVATIONS.get(found.get("activations", "")), STATES.get(found.get("states", ""))


def pinned_options(implied: Implications, pins: Sequence[Pin]) -> tuple[UnitOptions, ...]:
    """The options of every unit under the pins.

    A later pin overrides an earlier one of the same kind. ProtrainError if a pattern matches no
    unit, or a unit cannot take its decision.
    """
    options = unit_options(implied)
    names = [unit.unit.name for unit in options]
    activations: dict[str, Pin] = {}
    states: dict[str, Pin] = {}
    if any(pin.exact_updates for pin in pins):
        # The host's optimizer updates nothing.
        exact = ([o for o in unit.states if not o.decision.on_host] for unit in options)
        options = tuple(
            replace(unit, states=tuple(left)) if unit.unit.gradient_bytes else unit
            for unit, left in zip(options, exact, strict=True)
        )
    for pin in pins:
        for name in _matches(pin, names):
            if pin.activations is not None:
                activations[name] = pin
            if pin.states is not None:
                states[name] = pin
    pinned: list[UnitOptions] = []
    for unit in options:
        name = unit.unit.name
        if (asked := activations.get(name)) and asked.activations:
            kept = tuple(o for o in unit.activations if o.decision == asked.activations)
            if not kept:
                raise _cannot(unit, asked, asked.activations, options, implied)
            unit = replace(unit, activations=kept)
        if (placed := states.get(name)) and placed.states:
            left = tuple(o for o in unit.states if o.decision == placed.states)
            if not left:
                raise _cannot(unit, placed, placed.states, options, implied)
            unit = replace(unit, states=left)
        pinned.append(unit)
    return tuple(pinned)


def _cannot(
    unit: UnitOptions,
    pin: Pin,
    decision: Activations | Placement,
    options: Sequence[UnitOptions],
    implied: Implications,
) -> ProtrainError:
    """The refusal of `decision`: its reason, the unit's options, and units that can take it."""

    def phrases(of: UnitOptions) -> list[str]:
        options = of.states if isinstance(decision, Placement) else of.activations
        return [WORDINGS[option.decision].phrase for option in options]

    name, phrase = unit.unit.name, WORDINGS[decision].phrase
    tier = decision.below if isinstance(decision, Placement) else decision.tier
    takers = [other.unit.name for other in options if phrase in phrases(other)]
    tiers: dict[TierName, None] = {}
    for of in options:
        below = [option.decision.tier for option in of.activations]
        below += [option.decision.below for option in of.states]
        tiers.update((one, None) for one in below if one is not None)
    if tier is not None and tier not in tiers:
        here = f"only {listed(tiers, 'and')}" if tiers else "nothing"
        why = f"this machine has {here} below the device"
    elif isinstance(decision, Placement):
        why = _why_not_placed(unit.unit, decision, implied.settings, is_open=bool(takers))
    else:
        why = _why_not_waiting(unit.unit, decision, implied.profile.allowed)
    problem = f"{name} cannot take {phrase!r}" + (f": {why}" if why else "")
    in_order = [words for words in (*ACTIVATIONS, *STATES) if words in phrases(unit)]
    fix = f"it can take {listed(in_order, 'or')}"
    if takers:
        fix += f"; {_shown(takers)} can take {phrase!r}"
    return ProtrainError(problem, source=pin.source, key=pin.units, fix=fix)


def _why_not_placed(unit: Unit, states: Placement, step: StepSettings, *, is_open: bool) -> str:
    """The reason against a placement; `is_open`: another chunk can have it."""
    if missing := unmet(states, step):
        return f"that is for {missing.words}"
    if states.tier and not unit.used_by:
        return "it has no parameters of its own"
    if states.tier and unit.stays:
        return f"its states stay on the device ({unit.stays})"
    if states.common_copy or states.on_disk:
        return "that is for units with frozen parameters"
    if is_open:
        return ""
    where = ", on accelerators" * states.update_on_device
    return f"that is for units most of whose parameters are trained{where}"


def _why_not_waiting(unit: Unit, activations: Activations, allowed: Collection[str]) -> str:
    """The reason against a form of a unit's activations."""
    form = FORMS[activations.form]
    if form.of == "last part":
        return (
            "that is for a last part with a cross entropy whose logits nothing else in the forward"
            " uses"
        )
    if unit.kind == "part":
        return "it is a part between blocks, not a block"
    if form.opt_in and form.opt_in not in allowed:
        return (
            "it changes what training computes, and is profiled and planned with --allow"
            f" {form.opt_in} alone"
        )
    return unit.runs_once if activations.recomputes else ""


def _matches(pin: Pin, names: Sequence[str]) -> list[str]:
    """The pin's units, at least one; for a run, at least one per name."""
    if pin.units in names:  # even if the name looks like a run or a glob
        return [pin.units]
    if any(sign in pin.units for sign in "*?["):
        for whole in (pin.units, f"*.{pin.units}"):
            if found := [name for name in names if fnmatchcase(name, whole)]:
                return found
        raise _no_unit(pin, pin.units, names)
    called: dict[str, list[str]] = {}
    for wanted in unfold(pin.units) or [pin.units]:
        longer = [name for name in names if name.endswith(f".{wanted}")]
        called[wanted] = [wanted] if wanted in names else longer
    missing = [name for name, units in called.items() if not units]
    if missing:
        raise _no_unit(pin, pin.units if len(missing) == len(called) else missing[0], names)
    return [unit for units in called.values() for unit in units]


def _no_unit(pin: Pin, wanted: str, names: Sequence[str]) -> ProtrainError:
    what = "fits" if any(sign in wanted for sign in "*?[") else "is called"
    problem = f"no unit {what} {wanted!r}: the units are {_shown(names)}"
    fix = did_you_mean(wanted, (*_folded(names), *names))
    return ProtrainError(problem, source=pin.source, key=pin.units, fix=fix)


def _shown(names: Sequence[str]) -> str:
    """The names, runs folded, truncated to a few."""
    folded = _folded(names)
    if len(folded) > _MAX_SHOWN:
        folded = [*folded[: _MAX_SHOWN - 1], f"{len(folded) - _MAX_SHOWN + 1} more"]
    return listed(folded, "and")


def _folded(names: Sequence[str]) -> list[str]:
    return [fold(names[run[0]], names[run[-1]]) for run in runs(names)]
