"""Machines that a plan is checked on, its limits there, and what it takes there now.

Predictions come from the planner's own functions, which also made the plan's record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor
from pathlib import Path
from typing import NamedTuple

from protrain_plan.checking.budgets import MachineBudget
from protrain_plan.checking.diffing import UnitGrowth, growth
from protrain_plan.checking.plan_files import Case
from protrain_plan.checking.reestimate import Broken, Today, Unavailable
from protrain_plan.checking.reviewed import refuse_outside
from protrain_plan.hardware.catalogue import hardware_names, load_hardware
from protrain_plan.planning.model.problem import Problem, checked
from protrain_plan.planning.search.evaluation import step_seconds
from protrain_plan.planning.stages.pipelines import of_plan, problems_of
from protrain_plan.simulation.group import not_joined, profile_of_rank
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import peak_bytes
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import Budgets, Plan, StagePlan, TierBytes
from protrain_runtime.contract.records.profile import Profile


class Predicted(NamedTuple):
    """Cost of a step: peak bytes of each tier, seconds, and stages of a pipeline."""

    peak_bytes: TierBytes
    step_seconds: float
    stages: tuple[StagePlan, ...] = ()


def predicted(plan: Plan, profile: Profile) -> Predicted:
    """Predict what decisions take; plan and profile have the same units (see `misfit`)."""
    if plan.pipeline is not None:
        found = of_plan(plan, profile)
        return Predicted(found.peak_bytes, found.step_seconds, found.record.stages)
    problem = Problem.of_plan(plan, profile)
    return Predicted(peak_bytes(problem.program(plan.units)), step_seconds(problem, plan.units)[0])


def misfit(plan: Plan, profile: Profile) -> str | None:
    """Say why the plan's units do not decide about the profile's; None where they do."""
    try:
        problem = checked(plan, profile)
        for index, unit in enumerate(plan.units):
            if problem.unit_plan(index, unit.activations, unit.states, unit.schedule) != unit:
                return f"{unit.name} differs from its entry in the profile"
        for of_stage, own in problems_of(plan, profile):
            of_stage.program(own.units)
    except ProtrainError as error:
        return error.message
    return None


class Limit(NamedTuple):
    """Bytes of a tier that may be taken, and whose number it is."""

    bytes: int
    source: str  # "the plan's budget", "budgets.yaml", "the machine's memory"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A plan's case, its model from today's source, and what its repository allows."""

    case: Case
    today: Today | Broken | Unavailable
    allow: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether the model changed since it was profiled."""
        return isinstance(self.today, Today) and (
            bool(self.today.changed_keys)
            or self.today.model_fingerprint != self.case.profile.model_fingerprint
        )

    @cached_property
    def profile(self) -> Profile:
        """Cost of the model on the plan's own machine.

        An unchanged model keeps its measured profile. A model that changed, or whose profile is an
        estimate, is estimated again. On a CPU, peaks depend on kernels that were measured elsewhere
        or bounded: the profile's peaks hold as long as the rest is unchanged.
        """
        recorded = self.case.profile
        if isinstance(self.today, Today) and (self.changed or recorded.method == "estimated"):
            found = self.today.profile(recorded.hardware)
            if isinstance(found, Profile) and (
                self.changed or recorded.workload.device != "cpu" or growth(recorded, found)
            ):
                return found
        return recorded

    @property
    def growth(self) -> tuple[UnitGrowth, ...]:
        """Changes, unit by unit, since the profile was made; empty if unknown."""
        return growth(self.case.profile, self.profile)


@dataclass(frozen=True, kw_only=True)
class PlanOnMachine:
    """A plan with its model on a machine, and the limits there; `own`: it was made for it."""

    model: Model
    hardware: Hardware
    own: bool
    limits: Mapping[str, Limit]  # by tier
    budget: MachineBudget | None

    @property
    def budgets(self) -> Budgets:
        """The limits, as the planner takes them."""
        return Budgets(**{tier: limit.bytes for tier, limit in self.limits.items()})

    @property
    def case(self) -> Case:
        return self.model.case

    @cached_property
    def profile(self) -> Profile:
        """Cost of the model with this machine's memory and links; seconds of compute stay."""
        return replace(self.model.profile, hardware=self.hardware)

    @cached_property
    def misfit(self) -> str | None:
        """Reason why the plan is for another model; None if it is for this one."""
        return misfit(self.case.plan, self.profile)

    @cached_property
    def predicted(self) -> Predicted:
        """Prediction for this machine; only where there is no `misfit`."""
        return predicted(self.case.plan, self.profile)

    @cached_property
    def seconds(self) -> float | Broken | Unavailable:
        """The predicted step; on a machine that is not the plan's own, compute is estimated.

        Estimated seconds are never compared with measured ones.
        """
        if self.own:
            if self.profile.method != self.case.profile.method:
                return Unavailable(reason="the model changed since its seconds were measured")
            return self.predicted.step_seconds
        if not isinstance(self.model.today, Today):
            return Unavailable(reason=f"no estimate for this machine: {self.model.today.reason}")
        if self.hardware.rates is None:
            return Unavailable(reason="no estimate for this machine: its rates are not known")
        found = self.model.today.profile(self.hardware)
        if not isinstance(found, Profile):
            return found
        return predicted(self.case.plan, found).step_seconds


class Machines:
    """Budgets by the machines' own names, and the machines that plans have to fit, read once.

    Raises RecordError if a machine's file cannot be read.
    """

    def __init__(self, budgets: Mapping[str, MachineBudget], plans: Sequence[Path]) -> None:
        self.budgets = {
            _machine(budget).name if Path(name).suffix in (".yaml", ".yml") else name: budget
            for name, budget in budgets.items()
        }
        self._read: dict[str, Hardware | ProtrainError] = {}
        for budget in self.budgets.values():
            if any(budget.names(plan) for plan in plans):
                try:
                    self._read[budget.machine] = _machine(budget)
                except ProtrainError as error:
                    self._read[budget.machine] = error

    def of(self, model: Model, on: Sequence[Hardware] = ()) -> list[PlanOnMachine]:
        """The plan on its own machine and those whose budgets name it, or on those in `on`.

        Raises ProtrainError if a machine that has to fit the plan is unknown.
        """
        own = model.case.profile.hardware
        there = [own if machine.name == own.name else machine for machine in on] or [own]
        for name, budget in () if on else self.budgets.items():
            if name != own.name and budget.names(model.case.path):
                found = self._read[budget.machine]
                if isinstance(found, ProtrainError):
                    raise found
                there.append(found)
        return [_on_machine(model, machine, self.budgets.get(machine.name)) for machine in there]


def _machine(budget: MachineBudget) -> Hardware:
    """Read the machine, from the catalogue, the repository or the budgets' folder only."""
    if budget.machine not in hardware_names():
        refuse_outside(budget.machine, Path(budget.source).parent)
    return load_hardware(budget.machine)


def _on_machine(model: Model, machine: Hardware, budget: MachineBudget | None) -> PlanOnMachine:
    """The limits of one device: budgets of host and disk are for a node, which devices share."""
    case, own = model.case, machine.name == model.case.profile.hardware.name
    group, has = case.plan.whole, machine
    asked = budget or MachineBudget(machine=machine.name, source="")
    if not_joined(case.plan, machine) is None:
        has = profile_of_rank(replace(case.profile, hardware=machine), group).hardware
    there: dict[str, int] = {tier.name: tier.capacity_bytes for tier in has.tiers}
    there["device"] = machine.device.memory_bytes
    limits: dict[str, Limit] = {}
    for tier in ("device", "host", "disk"):
        size = there.get(tier, 0)
        source = "the machine's memory" + " for each device" * (group.in_node > 1)
        if own:
            size, source = getattr(case.plan.budgets, tier), "the plan's budget"
        in_budget: int | None = getattr(asked, tier)
        if in_budget is not None:
            in_budget //= 1 if tier == "device" else group.in_node
            if in_budget <= there.get(tier, 0):
                size, source = in_budget, Path(asked.source).name
        if asked.headroom:
            source += f", {100 * asked.headroom:g}% of it free"
        limits[tier] = Limit(floor(size * (1 - asked.headroom)), source)
    return PlanOnMachine(model=model, hardware=machine, own=own, limits=limits, budget=budget)
