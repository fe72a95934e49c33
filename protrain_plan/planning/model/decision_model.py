"""The linear model of decisions and their bytes by slot, as fractions of the device's budget."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pulp

from protrain_plan.planning.model.options import Option
from protrain_plan.planning.model.problem import SAFE, Choice, Problem
from protrain_plan.planning.model.solver import Stopped, relaxed
from protrain_runtime.contract.program.effects import (
    NO_STAGING,
    ActivationOption,
    StateOption,
    staging_parts,
)
from protrain_runtime.contract.program.memory import base_bytes
from protrain_runtime.contract.program.program import PASSING_BYTES, Channel, Lane
from protrain_runtime.contract.records import activations_text, states_text
from protrain_runtime.contract.records.files import replace_text
from protrain_runtime.contract.records.hardware import TierName, is_accelerator
from protrain_runtime.contract.records.plan import Activations

Terms = list[tuple[pulp.LpVariable, float]]

Decided = tuple[Option, pulp.LpVariable, Sequence[int]]
"""An option, the variable that counts its units, and these units."""

LE, EQ, GE = pulp.LpConstraintLE, pulp.LpConstraintEQ, pulp.LpConstraintGE

KINDS = ("act", "states")
"""The kinds of decisions, as variables and rows name them."""

COUNTED = 3
"""Least equal units for counting variables."""

SHORT_OF_PASSAGES = 100
"""A host budget of more passages than this does not depend on one of them."""


class LinearModel:
    """Rows and variables of one problem's decisions; bytes are fractions of the device's budget."""

    def __init__(self, problem: Problem, name: str) -> None:
        self.problem = problem
        self.end = 2 * problem.count
        self.byte_unit = float(max(1, problem.device))
        self.pulp = pulp.LpProblem(name, pulp.LpMinimize)
        self.uses: list[pulp.LpVariable] = []

    def each(self) -> Iterable[Decided]:
        """Every option with its units."""
        raise NotImplementedError

    def variable(self, name: str) -> pulp.LpVariable:
        """A continuous variable >= 0."""
        return self.pulp.add_variable(name, 0.0)

    def row(self, name: str, terms: Terms, sense: int, right: float = 0.0) -> pulp.LpConstraint:
        """Add a named row `sum of terms (sense) right`."""
        merged: dict[pulp.LpVariable, float] = defaultdict(float)
        for variable, factor in terms:
            merged[variable] += factor
        row = pulp.LpConstraint(pulp.LpAffineExpression(list(merged.items())), sense, name, right)
        self.pulp.addConstraint(row)
        return row

    def minimise(self, terms: Terms) -> None:
        self.pulp.setObjective(pulp.LpAffineExpression(terms))

    def used(self, name: str, numbers: Iterable[tuple[pulp.LpVariable, int]]) -> pulp.LpVariable:
        """A variable that is 1 if any of the numbers, with its maximum, is not 0."""
        found = self.pulp.add_variable(name, 0, 1)
        for number, most in dict(numbers).items():  # one variable per set of equal units
            self.row(f"{name}_{number.name}", [(found, float(most)), (number, -1.0)], GE)
        self.uses.append(found)
        return found

    def staging(
        self, used: Sequence[tuple[StateOption, pulp.LpVariable]], *, on_device: bool
    ) -> Terms:
        """The bytes of `effects.staging_bytes`, by use of options; one byte less is safe."""
        prefix, optimizer = "on_device_" if on_device else "", self.problem.profile.optimizer
        each = [staging_parts(state, optimizer, on_device=on_device) for state, _ in used]
        staging: Terms = []
        for part in zip(*each, strict=True):
            name, _, times = part[0]
            sizes = [size - (name == "workspace") for _, size, _ in part]
            ones = [one for _, one in used]
            staging.append((self.maximum(f"{prefix}{name}", sizes, ones), float(times)))
        return staging

    def maximum(
        self, name: str, sizes: Iterable[float], used: Iterable[pulp.LpVariable]
    ) -> pulp.LpVariable:
        """A variable of at least the largest used size."""
        largest = self.variable(name)
        for number, (size, one) in enumerate(zip(sizes, used, strict=True)):
            if size > 0:
                terms = [(largest, 1.0), (one, -size / self.byte_unit)]
                self.row(f"{name}_{number}", terms, GE)
        return largest

    def tier_terms(self, tier: TierName) -> Terms:
        """Bytes on a tier below the device, without staging."""
        return [
            (number, size / self.byte_unit)
            for option, number, _ in self.each()
            if (size := option.tier_bytes.get(tier, 0))
        ]

    def add_tiers(self, staging: Terms) -> None:
        """States, swapped activations and transient gradients fit each tier's budget."""
        accelerator = is_accelerator(self.problem.implied.device)
        for tier, limit in self.problem.tiers.items():
            terms = self.tier_terms(tier)
            if tier == "host" and accelerator:
                terms += staging
                is_short = limit <= SHORT_OF_PASSAGES * PASSING_BYTES
                if is_short and "disk" in self.problem.tiers:
                    # Bytes to and from disk pass through: `effects.tier_staging_bytes`.
                    on_disk = (
                        (n, len(units)) for o, n, units in self.each() if "disk" in o.tier_bytes
                    )
                    terms.append((self.used("passes", on_disk), PASSING_BYTES / self.byte_unit))
            self.row(f"budget_{tier}", terms, LE, limit / self.byte_unit)

    def busy(self, second_unit: float = 1.0) -> dict[Channel | Lane | str, Terms]:
        """Least seconds of each lane by the decisions."""
        lanes, last = self.problem.lane_seconds, (self.problem.count - 1,)
        busy: dict[Channel | Lane | str, Terms] = {lane: [] for lane in lanes.lanes}
        for option, number, units in self.each():
            for lane, taken in lanes.of(option, last=tuple(units) == last).items():
                busy[lane].append((number, taken / second_unit))
        return busy


class DecisionModel(LinearModel):
    """One problem's decisions as binaries, shared by classes if `alike`, and bytes by slot."""

    def __init__(self, problem: Problem, *, alike: bool = False) -> None:
        super().__init__(problem, "protrain_plan")
        self.binaries: list[list[list[pulp.LpVariable]]] = []  # by unit and kind
        first_of = {unit: units[0] for units in problem.classes for unit in units}
        for unit, options in enumerate(problem.options):
            if alike and (first := first_of[unit]) < unit:
                self.binaries.append(self.binaries[first])
                continue
            self.binaries.append([])
            for kind, of_kind in zip(KINDS, options.kinds, strict=True):
                chosen = [
                    self.pulp.add_variable(f"{kind}_{unit}_{_name(option)}", 0, 1, pulp.LpInteger)
                    for option in of_kind
                ]
                self.binaries[unit].append(chosen)
                # Every unit takes exactly one option.
                self.row(f"one_{kind}_{unit}", [(x, 1.0) for x in chosen], EQ, 1)

    # Names and rows

    def slot_name(self, slot: int) -> str:
        """f0, f1, ... for forward, b3, b2, ... for backward, end for the device's update."""
        count = self.problem.count
        if slot == self.end:
            return "end"
        return f"f{slot}" if slot < count else f"b{self.end - 1 - slot}"

    def each(self) -> Iterable[Decided]:
        for unit, option, x in self.each_activation():
            yield option, x, (unit,)
        for unit, state, y in self.each_state():
            yield state, y, (unit,)

    def each_activation(self) -> Iterable[tuple[int, ActivationOption, pulp.LpVariable]]:
        """(unit, option, its binary)."""
        for unit, options in enumerate(self.problem.options):
            for option, x in zip(options.activations, self.binaries[unit][0], strict=True):
                yield unit, option, x

    def each_state(self) -> Iterable[tuple[int, StateOption, pulp.LpVariable]]:
        """(unit, option, its binary)."""
        for unit, options in enumerate(self.problem.options):
            for option, y in zip(options.states, self.binaries[unit][1], strict=True):
                yield unit, option, y

    def count_units(self) -> None:
        """Require integer numbers of units per option in a class, not integer decisions.

        For units of equal cost, the bound depends on numbers of units, hardly on which ones. This
        relaxation is nearly as tight as integer decisions, with hundreds of times fewer cases: a
        search over orders of equal units proves nothing.
        """
        for variable in self.uses:
            variable.cat = pulp.LpInteger
        for number, units in enumerate(self.problem.classes):
            if len(units) < COUNTED:
                continue
            for of_kind in zip(*(self.binaries[unit] for unit in units), strict=True):
                for of_option in zip(*of_kind, strict=True):
                    name = count_name(number, of_option[0])
                    count = self.pulp.add_variable(name, 0, len(units), pulp.LpInteger)
                    terms: Terms = [(count, 1.0)]
                    for one in of_option:
                        one.cat = pulp.LpContinuous
                        terms.append((one, -1.0))
                    # The number of the class's units that take the option.
                    self.row(name, terms, EQ)

    # Memory

    def add_memory(self) -> list[pulp.LpVariable]:
        """m: bytes per slot by the decisions, from their changes; also the other tiers' budgets."""
        problem, unit = self.problem, self.byte_unit
        # Every placement, and whether any unit of a class takes it (0 or 1): a maximum over
        # fractional chunks would be a fraction of one chunk's need.
        used: list[tuple[StateOption, pulp.LpVariable]] = []
        for number, units in enumerate(problem.classes):
            of_options = zip(*(self.binaries[unit][1] for unit in units), strict=True)
            for option, ones in zip(problem.options[units[0]].states, of_options, strict=True):
                if len(units) < COUNTED:
                    used += [(option, y) for y in ones]
                elif option.staging != NO_STAGING or option.device_workspace:
                    name = f"used_{number}_{ones[0].name.split('_', 2)[2]}"
                    used.append((option, self.used(name, ((y, 1) for y in ones))))
        staging = self.staging(used, on_device=False)
        sizes = [state.device_workspace - 1 for state, _ in used]
        device_workspace = self.maximum("device_workspace", sizes, [y for _, y in used])
        change: list[Terms] = [[] for _ in range(self.end + 2)]

        for each, one, _ in self.each():
            for held in each.live_ranges:
                change[held.first].append((one, held.bytes / unit))
                change[held.last + 1].append((one, -held.bytes / unit))
        if not is_accelerator(problem.implied.device):
            change[0] += staging
        if any(state.decision.update_on_device for state, _ in used):
            change[0] += self.staging(used, on_device=True)
        change[self.end].append((device_workspace, 1.0))
        memory = [self.variable(f"m_{self.slot_name(t)}") for t in range(self.end + 1)]
        for t, m in enumerate(memory):
            # m_t - m_{t-1} = bytes that begin to be live in slot t, less those that end.
            before: Terms = [(memory[t - 1], -1.0)] if t else []
            base = base_bytes(problem.profile, problem.settings) / unit if t == 0 else 0.0
            terms = [(m, 1.0), *before, *((x, -size) for x, size in change[t])]
            self.row(f"static_{self.slot_name(t)}", terms, EQ, base)
        self.add_tiers(staging)
        return memory

    def add_needs(self) -> list[Terms]:
        """`add_memory`, and each slot's least bytes by the decisions."""
        needs: list[Terms] = [[(standing, 1.0)] for standing in self.add_memory()]
        # The last slot's eviction is live in the device's update: no slot waits for it.
        needs[self.end] += [
            (y, leaving.kept / self.byte_unit)
            for _, state, y in self.each_state()
            if (leaving := state.leaving) and leaving.slot == self.end - 1
        ]
        return needs

    # Reading and writing

    def fix(self, choice: Choice) -> None:
        """Fix the decisions."""
        for decided, of_unit in zip(choice, self.binaries, strict=True):
            for taken, binaries in zip(decided, of_unit, strict=True):
                for number, one in enumerate(binaries):
                    one.bounds(float(number == taken), float(number == taken))

    def choice_values(self, values: Mapping[str, float]) -> list[list[list[float]]]:
        """The fractions of options, by unit and kind."""
        return [[[values[x.name] for x in xs] for xs in of_unit] for of_unit in self.binaries]

    def write_lp(self, path: Path) -> None:
        """Write the model in the readable `.lp` format."""
        with TemporaryDirectory() as folder:
            file = Path(folder, "model.lp")
            self.pulp.writeLP(str(file))
            replace_text(path, file.read_text(encoding="utf-8"))


def count_name(number: int, one: pulp.LpVariable) -> str:
    """The name of a class's count of an option, from one unit's binary."""
    kind, _, option = one.name.split("_", 2)
    return f"count_{number}_{kind}_{option}"


def _name(option: Option) -> str:
    """An option's name in the model, whose columns the solver's interface sorts by name.

    Ties between equally good plans depend on that order: names are not wording, a change may change
    plans.
    """
    decision = option.decision
    if isinstance(decision, Activations):
        name = activations_text(decision)
    elif decision.keep_gathered:
        name = f"gathered from {'shards' if decision.tier == 'device' else decision.tier}"
        name += " with a common copy" * decision.common_copy
        name += f" with {decision.on_disk} on disk" * (decision.on_disk > 0)
        name += " and updated on device" * decision.update_on_device
        name += " speculatively" * decision.speculate
    else:
        name = states_text(decision)
    return name.replace(" ", "_").replace("-", "_")


def least_lane_seconds(problem: Problem, *, stopped: Stopped | None = None) -> float | None:
    """A lower bound on every plan's seconds; None if there is no plan.

    The fluid model's bound is tighter, as it knows when bytes are needed; for a hundred units on a
    machine with two tiers it takes half a minute, and this a second.
    """
    model = DecisionModel(problem)
    for t, terms in enumerate(model.add_needs()):
        # The decisions' own bytes in a slot fit the device.
        model.row(f"fits_{model.slot_name(t)}", terms, LE, 1.0)
    busiest = model.variable("step")
    for lane, terms in model.busy().items():
        model.row(f"busy_{lane}".replace(" ", "_"), [*terms, (busiest, -1.0)], LE)
    model.minimise([(busiest, 1.0)])
    answer = relaxed(model.pulp, stopped=stopped)
    if answer.status == "infeasible":
        return None
    known = problem.compute_seconds
    return max(known, answer.bound * (1 - SAFE)) if answer.status == "optimal" else known
