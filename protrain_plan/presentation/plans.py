"""The output of `protrain plan`, `fit` and `run`: plans, fronts of plans, or reasons for none."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from protrain_plan.planning.outcome import STAGES
from protrain_plan.planning.questions.allocator_slack import EXPANDABLE_MEDIAN, MEDIAN, is_unknown
from protrain_plan.presentation.profiles import caveats, compiled_text, repeats
from protrain_plan.presentation.terminal import Text, fields_of, table_of, wrote
from protrain_plan.simulation.report import in_words as report_in_words
from protrain_plan.simulation.wear import wear, wear_lines
from protrain_runtime.contract.program.memory import Excess, checkpoint_bytes
from protrain_runtime.contract.records.commands import profile_command
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.hardware import is_accelerator
from protrain_runtime.contract.records.plan import KEEP, Plan, TierBytes
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.records.words import listed
from protrain_runtime.contract.units import format_bytes, format_range, format_seconds

if TYPE_CHECKING:
    from protrain_plan.commands.training import Run
    from protrain_plan.planning.explain.explaining import Explanation
    from protrain_plan.planning.outcome import Infeasible, Replicas, Solved
    from protrain_plan.planning.questions.answers import Answer, Point
    from protrain_plan.planning.questions.cells import Tried


def solved_json(solved: "Solved") -> dict[str, Any]:
    """The answer's own fields, its prediction's, and what was planned for."""
    plan = solved.plan
    return {
        **fields_of(solved, but=("plan",)),
        **fields_of(plan.whole),
        **fields_of(plan.prediction),
        **fields_of(plan.prediction, "expected_seconds"),
        **fields_of(plan, "pipeline", "exactness", "allowed"),
        **fields_of(plan.settings, "disk_gain"),
    }


def other_steps(plan: Plan) -> list[str]:
    """A sentence about clipped steps, if these take another time."""
    seconds = plan.prediction.clipped_step_seconds
    share = f"{100 * plan.settings.clip_share:.3g} %"
    words = f"a clipped step takes {format_seconds(seconds)}, as {share} of all are assumed to be"
    return [words] if seconds else []


def other_results(plan: Plan) -> list[str]:
    """Sentences about results that differ from plain PyTorch's, and the options that allow it."""
    lines: list[str] = []
    if plan.allowed:
        how = {"rounding": "up to rounding", "approximate": "approximately"}[plan.exactness]
        forms = [name for name, form in FORMS.items() if form.opt_in and name in plan.forms]
        what = [f"activations in {listed(forms, 'and')}"] if forms else []
        what += ["reductions in every micro-batch"] * plan.settings.adds_shards
        lines.append(
            f"not exact: {listed(what, 'and')} give the results of plain PyTorch {how}, as"
            f" --allow {listed(plan.allowed, 'and')} permits"
        )
    if plan.host_updated:
        lines.append(
            f"last bits differ: {len(plan.host_updated)} of {len(plan.units)} layers update on"
            " CPU (--exact-updates avoids it)"
        )
    return lines


def change_text(
    peak: TierBytes,
    plain_bytes: int,
    budget_bytes: int,
    *,
    gained: tuple[str, float, float] | None = None,
) -> str:
    """The change that helps a plan most; plain PyTorch would need `plain_bytes`.

    `gained` is a change with tokens per second before and after, if known.
    """
    if gained is not None:
        change, before, after = gained
        return f"{change}: {before:,.0f} -> {after:,.0f} tokens/s"
    if peak.disk:
        return f"{format_bytes(peak.disk)} more memory would replace the disk"
    if plain_bytes <= budget_bytes:
        return "only a larger batch or a faster device gives more tokens per second"
    size = format_bytes(plain_bytes)
    return f"with {size} of device memory, nothing would be moved or computed twice"


def solved_text(
    solved: "Solved", profile: Profile, *paths: Path, limits: Sequence[str] = ()
) -> RenderableType:
    """Return what `protrain plan` prints for a plan; `paths` are the files that it wrote."""
    plan, prediction = solved.plan, solved.plan.prediction
    peak, several = prediction.peak_bytes, plan.group.num_devices > 1
    table = table_of("memory", "predicted peak" + " of each device" * several, "budget")
    held_back = f" + {format_bytes(peak.allocator)} for the allocator" if peak.allocator else ""
    device = f"device (tensors + {format_bytes(peak.context)} besides{held_back})"
    table.add_row(device, format_bytes(peak.on_device), format_bytes(plan.budgets.device))
    for tier in profile.hardware.tiers:
        used, budget = getattr(peak, tier.name), getattr(plan.budgets, tier.name)
        table.add_row(tier.name, format_bytes(used), format_bytes(budget))
    expected = format_range(prediction.expected_seconds)
    if expected:  # with its source
        source, machine = "as measured steps were beside estimates", profile.hardware
        if profile.method == "measured":
            source = "by the profile's own repetitions"
        elif (published := machine.published_error) and not machine.is_compared:
            source = f"as {published.runs} published runs were beside estimates"
        expected = f"{expected[:-1]} {source})"
    elif profile.method == "estimated":
        expected = " (estimates not validated on this device)"
    head = (
        f"predicted step {format_seconds(prediction.step_seconds)}{expected},"
        f" at most {solved.gap:.2%} above {fastest(plan)}"
    )
    notes = [f"on {plan.group}, each with batches of its own"] * several
    if len(solved.replicas) > 1:
        others = (one for one in solved.replicas if one.number != plan.group.num_replicas)
        notes.append(f"other numbers of replicas: {', '.join(map(_replicas_text, others))}")
    notes += [*other_results(plan), *other_steps(plan)]
    saving = checkpoint_bytes(plan.units, profile) - peak.device
    if not is_accelerator(profile.hardware.device.kind) and saving > 0:
        notes.append(f"saving a checkpoint takes {format_bytes(saving)} more than a step")
    answer = Group(*map(Text, (head, *limits)))
    return Group(answer, "", table, "", *map(Text, notes), *map(wrote, paths))


def headroom_text(left: Mapping[str, int]) -> list[str]:
    """A sentence about memory that plans leave free, by names of machines."""
    sizes = {name: format_bytes(size) for name, size in left.items() if size}
    named = [f"{name} {size}" if len(sizes) > 1 else size for name, size in sizes.items()]
    return bool(named) * [
        f"{', '.join(named)} of the device stay free for what PyTorch's allocator reserves beyond"
        " tensors; --tight uses them"
    ]


def spared_disk(solved: "Solved") -> list[str]:
    """A sentence about the gain of a disk that is used, or about one that is spared."""
    plan, without = solved.plan, solved.seconds_without_disk
    if without is not None:
        longer = without / plan.prediction.step_seconds - 1
        return [f"without the disk the fastest step found takes {longer:.1%} longer"]
    if plan.keeps_everything or not spares_disk(plan) or solved.solver == STAGES:
        return []
    gain = f"{100 * plan.settings.disk_gain:.3g}%"
    return [
        f"disk not used: no plan found is {gain} faster with it; --disk-gain 0 uses it for less"
    ]


def spares_disk(plan: Plan) -> bool:
    """Return whether the plan does without a disk that it might use for a large gain."""
    is_open = plan.settings.disk_gain > 0 and plan.budgets.disk > 0
    return is_open and plan.pipeline is None and not plan.prediction.peak_bytes.disk


def fastest(plan: Plan) -> str:
    """Return a name for the optimum that the plan's gap refers to."""
    return "the fastest without the disk" if spares_disk(plan) else "the fastest"


def disk_notes(plan: Plan, profile: Profile) -> list[str]:
    """A sentence about how the disk that a plan spills to was measured, if it was."""
    if not plan.prediction.peak_bytes.disk or profile.method != "measured":
        return []
    if plan.settings.page_cache_bytes:
        cache = format_bytes(plan.settings.page_cache_bytes)
        return [f"what is on disk goes through the page cache: up to {cache} beside the budgets"]
    observed = profile.hardware.tier("disk").observed
    if observed is None:
        return [
            "the disk was never measured past the page cache: a step that spills more than the free"
            " memory may take much longer than predicted; profile again"
        ]
    seconds, size = format_seconds(observed.seconds), format_bytes(observed.written_bytes)
    return [f"the disk was observed for {seconds}, in which {size} were written"]


def _replicas_text(one: "Replicas") -> str:
    if one.lower_bound_seconds is None:
        return f"{one.number}: no plan fits"
    least = "at least " * (one.step_seconds is None)
    return f"{one.number}: {least}{format_seconds(one.step_seconds or one.lower_bound_seconds)}"


def infeasible_json(answer: "Infeasible") -> dict[str, Any]:
    """The reason why no plan fits, as JSON."""
    return {"status": "infeasible", **fields_of(answer), "occupants": dict(answer.occupants)}


def infeasible_text(answer: "Infeasible") -> RenderableType:
    """Return what `protrain plan` prints where no plan fits."""
    sizes = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in answer.occupants[:3])
    batch, longest = answer.largest_batch_size, answer.largest_seq_len
    grown = "(if bytes grow in proportion)"
    lines = [
        f"no plan fits: {format_bytes(answer.shortfall_bytes)} more {answer.tier} memory is needed"
        f" than the {format_bytes(answer.budget_bytes)} of the budget",
        f"most is needed in {answer.slot}: {sizes}",
        *(f"- {line}" for line in answer.advice),
    ]
    if batch is None and longest is None:
        lines.append(
            "- no other batch size or sequence length fits with these settings of the step"
        )
    if batch:
        lines.append(f"- the largest batch that fits is {batch} {grown}")
    if longest:
        lines.append(f"- the longest sequence that fits is {longest} tokens {grown}")
    return Group(*map(Text, lines))


def search_text(stage: str, step_seconds: float | None, bound_seconds: float | None) -> str:
    """The progress of a search."""
    known = {"best": step_seconds, "bound": bound_seconds}
    parts = [f"{word} {format_seconds(s)}" for word, s in known.items() if s is not None]
    return ", ".join([stage, *parts])


def facts_of(answer: "Answer", profile: Profile) -> dict[str, Any]:
    """Return facts about a plan, or about the reason for none, for a cell and for one question."""
    solved, none = answer.solved, answer.infeasible
    return {
        **(solved_json(solved) if solved else infeasible_json(none) if none else {}),
        **fields_of(answer, "headroom_bytes"),
        **fields_of(profile, "beside"),
        "repeats": repeats(profile),
        "disk_writes": solved and wear(solved.plan, profile),
    }


def answer_json(answer: "Answer", explanation: "Explanation | None") -> dict[str, Any]:
    """Return what `protrain plan --json` prints."""
    return {
        **facts_of(answer, answer.of_rank),
        "lanes": {
            lane.name: {"busy_seconds": lane.busy_s, "utilisation": lane.utilisation}
            for lane in (answer.report.lanes if answer.report else ())
        },
        **fields_of(answer.least_memory, but=("solved",)),
        **fields_of(answer, "kept_seconds", "seconds_without_pins"),
        "front": front_json(answer.front),
        "explanation": explanation,
    }


def front_json(points: "Sequence[Point]") -> list[dict[str, Any]]:
    """Return plans on the front of memory against time."""
    return [fields_of(point, "device_bytes") | solved_json(point.solved) for point in points]


def answer_text(
    answer: "Answer",
    explanation: "Explanation | None",
    *paths: Path,
    best: "Tried | None" = None,
) -> RenderableType:
    """Return what `protrain plan` prints; `paths` are the files that it wrote, the plan last.

    `best` is the change that gains most, if known.
    """
    headroom = headroom_text({answer.profile.hardware.name: answer.headroom_bytes})
    profile = answer.of_rank
    if answer.infeasible is not None:
        more = caveats(profile) if profile.beside or repeats(profile) else ()
        return Group(infeasible_text(answer.infeasible), *map(Text, (*headroom, *more)))
    assert answer.solved is not None
    assert answer.report is not None
    if answer.front:  # memory against time, with bars in proportion to the slowest step
        table = table_of("device memory", "step", "gap", "")
        slowest = max(point.solved.step_seconds for point in answer.front)
        for point in answer.front:
            solved = point.solved
            cells = (_typed(point), format_seconds(solved.step_seconds), f"{solved.gap:.2%}")
            length = max(1, round(30 * solved.step_seconds / slowest))
            table.add_row(*cells, Text("█" * length, justify="left"))
        said = "each line is a plan; --device-memory with a line's memory writes it"
        return Group(table, "", *map(Text, (said, *headroom)))
    solved, plan = answer.solved, answer.solved.plan
    step_s, kept_s = plan.prediction.step_seconds, answer.kept_seconds
    waits, *sentences = report_in_words(answer.report, plan)
    spared = spared_disk(solved)
    notes = [*wear_lines(plan, profile), *disk_notes(plan, profile), *spared * solved.uses_disk]
    if answer.seconds_without_pins is not None:
        cost = max(0.0, step_s / answer.seconds_without_pins - 1)
        notes.append(f"the pins cost {cost:.2%} of the step")
    if kept_s is not None and kept_s > step_s:
        notes.append(
            "keeping everything on the device fits as well, and its step takes"
            f" {kept_s / step_s - 1:.1%} longer: --pin '*: keep, persistent'"
        )
    if (least := answer.least_memory) is not None:
        notes.append(
            f"within {least.limit_seconds / least.fastest_seconds:g} times the fastest step"
            f" ({format_seconds(least.fastest_seconds)}) no plan needs less device memory than"
            f" {format_bytes(least.lower_bound_bytes)}"
        )
    details = ["protrain show has the decisions, --explain the reasons"]
    if explanation is not None:
        from protrain_plan.planning.explain.explaining import in_words as explained

        found = format_seconds(solved.solve_seconds)
        how = f"{solved.status}, {solved.solver}, {'planned before in ' * solved.kept}{found}"
        details = ["", *explained(explanation), "", how, *sentences, *headroom]
        details += [*spared * (not solved.uses_disk), *[ALLOCATED] * is_unknown(profile)]
        details += caveats(profile)
    from protrain_plan.planning.questions.objectives import plain_bytes
    from protrain_plan.planning.questions.planner import problem_of

    problem = problem_of(solved, answer.question.problems())
    is_busy = not answer.report.stall_by_cause and all(u.activations == KEEP for u in plan.units)
    plain, gained = 0 if is_busy else plain_bytes(problem), None
    if best is not None and answer.tokens_per_s:
        gained = best.cell.words, answer.tokens_per_s, best.tokens_per_s
    change = change_text(plan.prediction.peak_bytes, plain, plan.budgets.device, gained=gained)
    shown = solved_text(solved, profile, *paths, limits=(waits, change))
    return Group(shown, *map(Text, (*notes, *details)))


def point_text(point: "Point") -> str:
    """A point of a front in a line, while others are searched."""
    return f"{_typed(point)}: a step of {format_seconds(point.solved.step_seconds)}"


def _typed(point: "Point") -> str:
    """A point's memory as an option has it, rounded up."""
    return f"{-(-point.device_bytes // 2**20)}MiB"


ALLOCATED = (
    "device: allocated bytes, and the context; reserved are about"
    f" {EXPANDABLE_MEDIAN:.0%} of tensors more with expandable segments, and {MEDIAN:.0%} without"
)

_MOST_OVERRUNS = 3
"""Maximum that is printed; --json has all."""


def run_json(
    plan: Plan,
    run: "Run",
    *,
    plain: bool,
    verified: bool | None,
    overruns: Sequence[Excess] = (),
    profile: Profile | None = None,
) -> dict[str, Any]:
    """Return what `protrain run --json` prints; `profile` is the plan's, if available."""
    expected, outside = plan.prediction.expected_seconds, None
    if expected is not None and len(run.seconds) > 1:  # a first step warms up
        outside = not expected[0] <= run.step_seconds <= expected[1]
    predicted = {
        "predicted_step_seconds": plan.prediction.step_seconds,
        "expected_seconds": expected,
        "outside_expected": outside,
        "predicted_peak_bytes": plan.prediction.peak_bytes,
        "disk_writes": profile and wear(plan, profile),
    }
    again = profile_command(
        plan.workload, optimizer=plan.optimizer, output="profile.yaml", allow=plan.allowed
    )
    return {
        **fields_of(run, but=("slot_bytes", "recording")),
        **fields_of(run, "step_seconds"),
        **fields_of(plan.workload, "compile"),
        **(dict.fromkeys(predicted) if plain else predicted),
        "plain": plain,
        "exactness": "bitwise" if plain else plan.exactness,
        "allowed": () if plain else plan.allowed,
        "verified": verified,
        "overruns": overruns,
        "profile_again": again if overruns else None,
    }


def run_text(plan: Plan, data: dict[str, Any]) -> RenderableType:
    """Return what `protrain run` prints: `run_json`'s `data` as text."""
    names = ("plain", "verified", "measured_peak_bytes", "overruns")
    plain, verified, measured, overruns = (data[name] for name in names)
    resumed = f" from step {data['first_step'] + 1} on" if data["first_step"] else ""
    losses = Text(f"losses{resumed} " + " ".join(f"{loss:.4f}" for loss in data["losses"]))
    took, expected = format_seconds(data["step_seconds"]), format_range(data["expected_seconds"])
    table = table_of("", "predicted", "measured")
    promised = f"{format_seconds(plan.prediction.step_seconds)}{expected}"
    table.add_row("step", "-" if plain else promised, took)
    labels = {
        "device": "device peak, tensors",
        "allocator": "device, allocator",
        "context": "device, besides tensors",
        "host": "host peak",
        "disk": "disk peak",
    }
    for tier, label in labels.items():
        promise, found = getattr(plan.prediction.peak_bytes, tier), getattr(measured, tier, None)
        if promise or found:
            shown = "-" if found is None else format_bytes(found)
            table.add_row(label, "-" if plain else format_bytes(promise), shown)
    notes = [] if plain else [Text(line) for line in other_results(plan)]
    if data["disk_writes"]:
        notes.append(Text(f"it writes to disk {data['disk_writes']}"))
    if compiled := compiled_text(data["compilation"]):
        notes.append(Text(f"{compiled}, mostly in the first step"))
    if data["outside_expected"]:
        said = f"the step took {took} measured, outside what its profile expects{expected}"
        notes.append(Text(said, style="yellow"))
    if measured is None:
        notes.append(Text("peaks are measured in the last step of two or more"))
    if overruns:
        notes.append(Text("NOT as predicted: the measured step took more memory", style="red"))
        notes += [Text(f"  {overrun}") for overrun in overruns[:_MOST_OVERRUNS]]
        if len(overruns) > _MOST_OVERRUNS:
            notes.append(Text(f"  and in {len(overruns) - _MOST_OVERRUNS} slots more"))
        notes.append(Text(f"  fix: measure and plan again: {data['profile_again']}"))
    if verified is not None:
        # Both compile the same blocks: without a compiler, the model has other bits.
        whose = "plain PyTorch's" + " with the same blocks compiled" * bool(plan.workload.compile)
        whose += " with the same updates on the host" * bool(plan.host_updated)
        notes.append(
            Text(f"verified: losses and parameters equal {whose} bitwise", style="green")
            if verified
            else Text(f"NOT verified: losses or parameters differ from {whose}", style="red")
        )
    return Group(losses, table, *notes)
