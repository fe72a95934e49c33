"""Plans with other settings of their step."""

from dataclasses import replace
from typing import Any

from protrain_runtime.contract.records.plan import Plan


def with_settings(plan: Plan, **changes: Any) -> Plan:
    """The plan with these settings (`StepSettings`, by name) in place of its own."""
    return replace(plan, settings=replace(plan.settings, **changes))
