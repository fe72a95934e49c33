"""Why no plan meets the budgets, and what would help; solved, not guessed."""

from dataclasses import replace

from protrain_plan.errors import ProtrainError
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.outcome import Infeasible
from protrain_plan.planning.search.choices import Leanest, min_memory
from protrain_plan.planning.search.evaluation import ScheduleRule, schedule
from protrain_plan.program.program import slot_words
from protrain_plan.records.hardware import TierName
from protrain_plan.records.plan import Budgets
from protrain_plan.simulation.memory import device_bytes
from protrain_plan.units import exact_bytes, format_bytes

_BESIDES = "besides tensors"
_HELD_BACK = "held back for the allocator"


def infeasible(problem: Problem, budgets: Budgets, lean: Leanest | None) -> Infeasible:
    """The answer for a problem whose leanest choice, `lean`, exceeds the device's budget."""
    if lean is None:
        # Everything kept and persistent needs nothing below the device: it is the pins that do.
        raise ProtrainError(
            "the pinned decisions need more of the tiers below the device than there is",
            key="--pin",
            fix="pin fewer decisions, or raise --host-memory and --disk",
        )
    besides = problem.profile.hardware.device.besides_bytes
    slot, occupants = _tightest(problem, lean)
    below: tuple[tuple[TierName, int], ...] = (("host", budgets.host), ("disk", budgets.disk))
    for tier, budget in below:
        needs = min_memory(problem, of=tier) if tier in problem.tiers else None
        if needs is None or max(problem.static_bytes(needs.choice)) > problem.device:
            continue
        # More of this tier would make the device's budget enough.
        return Infeasible(
            tier=tier,
            slot=slot,
            occupants=occupants,
            budget_bytes=budget,
            shortfall_bytes=needs.bytes - problem.tiers[tier],
            smallest_budget_bytes=needs.bytes,
            proven_budget_bytes=needs.proven_bytes,
            advice=(
                f"raise the {tier} budget to {enough(needs.bytes)}",
                f"or the device budget to {enough(lean.bytes + besides)}",
            ),
        )
    needed = lean.bytes + besides
    return Infeasible(
        tier="device",
        slot=slot,
        occupants=occupants,
        budget_bytes=budgets.device,
        shortfall_bytes=needed - budgets.device,
        smallest_budget_bytes=needed,
        proven_budget_bytes=lean.proven_bytes + besides,
        advice=_advice(problem, lean, dict(occupants)),
    )


def _tightest(problem: Problem, lean: Leanest) -> tuple[str, tuple[tuple[str, int], ...]]:
    """The slot with the leanest choice's peak, in words, and what stands in it, largest first."""
    static = problem.static_bytes(lean.choice)
    peak = max(static)
    plans = schedule(problem, lean.choice, limit=peak, rule=ScheduleRule(0, 0))
    assert plans, "the peak is enough for itself"
    slots = device_bytes(problem.program(plans))
    tightest = max(range(len(slots)), key=lambda t: (static[t], -t))
    name = slot_words(problem.profile.units, tightest)
    name = f"the {name}" if tightest == 2 * problem.count else name
    device = problem.profile.hardware.device
    standing = [
        *slots[tightest].by_kind.items(),
        (_BESIDES, device.context_bytes),
        (_HELD_BACK, device.allocator_bytes),
    ]
    occupants = sorted(standing, key=lambda item: -item[1])
    return name, tuple((kind, size) for kind, size in occupants if size)


def _advice(problem: Problem, lean: Leanest, occupants: dict[str, int]) -> tuple[str, ...]:
    """What would bring the peak down, the largest occupant's remedies first."""
    besides = problem.profile.hardware.device.besides_bytes
    lines = [f"raise the device budget to {enough(lean.bytes + besides)}"]
    if problem.pins:
        free = min_memory(replace(problem, pins=()))
        if free and free.bytes < lean.bytes:
            lines.append(f"without the pins the device needs {enough(free.bytes + besides)}")
    freed = replace(
        problem,
        tiers={tier.name: tier.capacity_bytes for tier in problem.profile.hardware.tiers},
    )
    if freed.tiers != problem.tiers:
        unlimited = min_memory(freed)
        if unlimited and unlimited.bytes < lean.bytes:
            lines.append(
                "with all of the machine's other tiers the device needs "
                f"{enough(unlimited.bytes + besides)}"
            )
    if not problem.tiers:
        lines.append("this machine has no tier below the device: add host memory or a disk to it")
    total = sum(size for kind, size in occupants.items() if kind not in (_BESIDES, _HELD_BACK))
    if any(len(unit.forms) < 2 and unit.kind == "block" for unit in problem.profile.units):
        lines.append("profile the blocks with recomputation")
    if staying := [unit for unit in problem.profile.units if unit.stays]:
        size = sum(unit.parameter_bytes + unit.state_bytes for unit in staying)
        others = f" and {len(staying) - 1} more" if len(staying) > 1 else ""
        lines.append(
            f"{format_bytes(size)} of states cannot leave the device: those of {staying[0].name}"
            f"{others} ({staying[0].stays})"
        )
    if occupants.get("staging", 0) * 4 >= total:
        lines.append(f"smaller transfer pieces than {exact_bytes(problem.settings.piece_bytes)}")
    return tuple(lines)


def enough(size: int) -> str:
    """A size as one would type it, rounded up to whole MiB."""
    return f"{-(-size // 2**20)}MiB"
