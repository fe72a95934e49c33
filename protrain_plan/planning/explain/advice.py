"""Reasons why no plan meets the budgets, and remedies; solved, not guessed."""

from collections.abc import Sequence
from dataclasses import replace

from protrain_plan.planning.model.problem import AMPLE, Problem
from protrain_plan.planning.outcome import Infeasible
from protrain_plan.planning.search.choices import Leanest, min_memory
from protrain_plan.planning.search.evaluation import plans_of
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.program.program import slot_words
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Schedule
from protrain_runtime.contract.units import exact_bytes, format_bytes

_BESIDES = "besides tensors"
_HELD_BACK = "held back for the allocator"


def infeasible(problem: Problem, lean: Leanest | None) -> Infeasible:
    """The answer for a problem whose leanest choice, `lean`, exceeds the device's budget."""
    if lean is None:
        # A persistent choice that keeps everything needs nothing below the device: the pins do.
        raise ProtrainError(
            "the pinned decisions exceed the tiers below the device",
            key="--pin",
            fix="pin fewer decisions, or raise --host-memory and --disk",
        )
    budgets, besides = problem.budgets, problem.profile.hardware.device.besides_bytes
    slot, occupants = _tightest(problem, lean)
    needed = lean.bytes + besides
    word, lacking = _lacking(problem)
    if lacking:
        # More of these tiers would suffice.
        (tier, needs), *others = lacking
        lines = [f"raise the {tier} budget to {enough(needs.bytes)}"]
        lines += [f"{word} the {other} budget to {enough(n.bytes)}" for other, n in others]
        return Infeasible(
            tier=tier,
            slot=slot,
            occupants=occupants,
            budget_bytes=budgets.host if tier == "host" else budgets.disk,
            shortfall_bytes=needs.bytes - problem.tiers[tier],
            smallest_budget_bytes=needs.bytes,
            proven_budget_bytes=needs.proven_bytes,
            advice=(*lines, f"or the device budget to {enough(needed)}"),
        )
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


def _lacking(problem: Problem) -> tuple[str, Sequence[tuple[TierName, Leanest]]]:
    """The least sufficient size of tiers below the device; none if the device is too small.

    Combined by "or" or by "and". Tiers that the machine has come first, then the smallest shortage.
    """
    each = ((tier, _enough_of(tier, problem)) for tier in problem.tiers)
    if found := [(tier, needs) for tier, needs in each if needs]:
        there = {tier.name: tier.capacity_bytes for tier in problem.profile.hardware.tiers}
        lacks = {tier: needs.bytes - problem.tiers[tier] for tier, needs in found}
        return "or", sorted(found, key=lambda one: (one[1].bytes > there[one[0]], lacks[one[0]]))
    if len(problem.tiers) < 2:
        return "", ()
    first, second = problem.tiers
    ample = problem.changed(tiers={**problem.tiers, second: AMPLE})
    if (needs := _enough_of(first, ample)) is None:
        return "", ()
    raised = problem.changed(tiers={**problem.tiers, first: needs.bytes})
    more = _enough_of(second, raised)
    return "and", ((first, needs), (second, more)) if more else ()


def _enough_of(tier: TierName, problem: Problem) -> Leanest | None:
    """The least of a tier that admits a plan; None if no amount does."""
    needs = min_memory(problem, of=tier)
    if needs is None or max(problem.static_bytes(needs.choice)) > problem.device:
        return None
    return needs if needs.bytes > problem.tiers[tier] else None


def _tightest(problem: Problem, lean: Leanest) -> tuple[str, tuple[tuple[str, int], ...]]:
    """The slot of the leanest choice's peak, as text, and its occupants, largest first."""
    static = problem.static_bytes(lean.choice)
    at_once = Schedule(swap_drain=0, update_drain=0)
    plans = plans_of(problem, lean.choice, [at_once] * problem.count)
    slots = device_bytes(problem.program(plans))
    tightest = static.index(max(static))
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
    """Remedies for the peak, the largest occupant's first."""
    besides = problem.profile.hardware.device.besides_bytes
    lines = [f"raise the device budget to {enough(lean.bytes + besides)}"]
    if problem.pins:
        free = min_memory(replace(problem, pins=()))
        if free and free.bytes < lean.bytes:
            lines.append(f"without the pins the device needs {enough(free.bytes + besides)}")
    freed = replace(
        problem, tiers={tier.name: tier.capacity_bytes for tier in problem.profile.hardware.tiers}
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
    """A size to type, rounded up to whole MiB."""
    return f"{-(-size // 2**20)}MiB"
