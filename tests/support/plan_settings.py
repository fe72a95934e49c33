"""Plans with other values by name."""

from dataclasses import fields, replace
from typing import Any

from protrain_runtime.contract.records.plan import DeviceGroup, Plan, Prediction, StepSettings
from protrain_runtime.contract.records.profile import Workload


def with_settings(plan: Plan, **changes: Any) -> Plan:
    """The plan with other values: of its workload, step, devices or prediction, or its own."""
    found = {
        owner: {f.name: changes.pop(f.name) for f in fields(owner) if f.name in changes}
        for owner in (DeviceGroup, StepSettings, Prediction, Workload)
    }
    group = found[StepSettings].pop("group", plan.group)
    group = replace(group, **found[DeviceGroup])
    settings = replace(plan.settings, group=group, **found[StepSettings])
    prediction = replace(changes.pop("prediction", plan.prediction), **found[Prediction])
    workload = replace(changes.pop("workload", plan.workload), **found[Workload])
    return replace(plan, settings=settings, prediction=prediction, workload=workload, **changes)
