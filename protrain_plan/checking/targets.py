"""The machines that a plan is checked on, and what it may take of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from pathlib import Path

from protrain_plan.checking.budgets import MachineBudget
from protrain_plan.checking.cases import Case
from protrain_plan.checking.predicting import not_joined, on_machine
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.records.hardware import Hardware, TierName
from protrain_plan.records.plan import Budgets
from protrain_plan.simulation.ranks import Group, profile_of_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Bytes of a tier that may be taken, and whose number it is."""

    bytes: int
    source: str  # "the plan's budget", "budgets.yaml", "the machine's memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A machine with its limits; `own` where the plan was made for it."""

    hardware: Hardware
    own: bool
    device: Limit
    host: Limit
    disk: Limit
    budget: MachineBudget | None

    @property
    def budgets(self) -> Budgets:
        """The limits, as the planner takes them."""
        return Budgets(device=self.device.bytes, host=self.host.bytes, disk=self.disk.bytes)


def by_machine(budgets: Mapping[str, MachineBudget]) -> dict[str, MachineBudget]:
    """Budgets by the names that machines have themselves, which their files may not be called.

    RecordError where a file with hardware cannot be read.
    """
    return {_own_name(written): budget for written, budget in budgets.items()}


def _own_name(written: str) -> str:
    return load_hardware(written).name if Path(written).suffix in (".yaml", ".yml") else written


def targets(
    case: Case, budgets: Mapping[str, MachineBudget], on: Sequence[Hardware] = ()
) -> list[Target]:
    """The plan's own machine, and those whose budgets name it; or, instead, those in `on`.

    `budgets` are `by_machine`. ProtrainError where a machine that has to fit the plan is not known.
    """
    own = case.profile.hardware
    if on:
        machines = [own if machine.name == own.name else machine for machine in on]
    else:
        named = [
            load_hardware(budget.machine)
            for name, budget in budgets.items()
            if name != own.name and budget.names(case.path)
        ]
        machines = [own, *named]
    return [_target(case, machine, budgets.get(machine.name)) for machine in machines]


def _target(case: Case, machine: Hardware, budget: MachineBudget | None) -> Target:
    """One device's limits. What a budget says is a node's, as is what a machine's devices share."""
    own = machine.name == case.profile.hardware.name
    planned, group = case.plan.budgets, Group.of(case.plan)
    has = machine
    if not_joined(case.plan, machine) is None:
        has = profile_of_rank(on_machine(case.profile, machine), group).hardware
    capacity = {tier.name: tier.capacity_bytes for tier in has.tiers}

    def limit(asked: int | None, in_plan: int, there: int) -> Limit:
        headroom = budget.headroom if budget else 0.0
        size, source = there, "the machine's memory" + " for each device" * (group.in_node > 1)
        if own:
            size, source = in_plan, "the plan's budget"
        if asked is not None and budget is not None and asked <= there:
            size, source = asked, Path(budget.source).name
        if headroom:
            source += f", {100 * headroom:g}% of it free"
        return Limit(bytes=floor(size * (1 - headroom)), source=source)

    def below(tier: TierName, asked: int | None, in_plan: int) -> Limit:
        part = None if asked is None else asked // group.in_node
        return limit(part, in_plan, capacity.get(tier, 0))

    return Target(
        hardware=machine,
        own=own,
        device=limit(
            budget.device if budget else None, planned.device, machine.device.memory_bytes
        ),
        host=below("host", budget.host if budget else None, planned.host),
        disk=below("disk", budget.disk if budget else None, planned.disk),
        budget=budget,
    )
