"""Plans with other settings of their step."""

from dataclasses import fields, replace
from typing import Any

from protrain_runtime.contract.records.plan import DeviceGroup, Plan, StepSettings


def with_settings(plan: Plan, **changes: Any) -> Plan:
    """The plan with other values by name: of its step's settings, its devices, or its own."""
    found = {
        owner: {f.name: changes.pop(f.name) for f in fields(owner) if f.name in changes}
        for owner in (DeviceGroup, StepSettings)
    }
    group = found[StepSettings].pop("group", plan.group)
    group = replace(group, **found[DeviceGroup])
    settings = replace(plan.settings, group=group, **found[StepSettings])
    return replace(plan, settings=settings, **changes)
