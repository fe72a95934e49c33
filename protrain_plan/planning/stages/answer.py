"""The best pipeline for a global batch, or one stage, with a proof.

    bounds    of every shape: the best cuts under the bounds of stages that are known
    search    the shape with the least bound: lift the bounds of its stages, and cut again; if there
              are no better bounds, plan its stages and simulate all of them
    end       when no shape's bound is below the best step by more than the gap that is good enough
    proof     the least bound of all shapes

One stage is a shape like others, and always planned: stages are compared with it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from protrain_plan.planning.outcome import Infeasible
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.planning.search.improving import Effort, Progress
from protrain_plan.planning.stages.cuts import Cuts, best_cuts, possible_cuts
from protrain_plan.planning.stages.cycles import BOUNDS, Bounds, Lanes, Pipeline
from protrain_plan.planning.stages.pipelines import Pipelined, Stage, pipelined, planned
from protrain_plan.planning.stages.schedule import StageSeconds, simulated
from protrain_plan.planning.stages.shapes import Shape, shapes
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.forms import ROUNDING
from protrain_runtime.contract.records.plan import Budgets, Plan, StepSettings
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.units import format_seconds

GAP = 0.02
"""A step this close to the bound is good enough to end the search among shapes."""

MOST_PLANNED = 3
"""Shapes whose stages are planned, at most, of one stage and of several: each takes seconds."""

MOST_LIFTED = 20
"""Bounds of stages by the fluid model that are found for the proof alone, at most."""

FEW, ROUNDS = 12, 6
"""Units of a model whose cuts are made again for so many plans of all stages, at most."""

UNCUT = "this model cannot be cut: units share parameters, or read more than the last one"

LANES, FLUID = BOUNDS.index("lanes"), BOUNDS.index("fluid")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesQuestion:
    """A model's profiles by batch size, its budgets, and devices for one global batch.

    `stages` are the numbers to choose from; none: every one that divides the devices. With more
    than one number of `chunks`, schedules may be interleaved.
    """

    profiles: Mapping[int, Profile]
    budgets: Budgets
    settings: StepSettings  # with all devices
    global_batch: int  # [sequences]
    stages: tuple[int, ...] = ()
    chunks: tuple[int, ...] = (1, 2)
    allow: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return self.global_batch * next(iter(self.profiles.values())).workload.seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesAnswer:
    """The best of one stage and of several, and what nothing is faster than.

    `bounds` are by the number of stages: no shape with so many is faster; infinity where none fits.
    """

    question: StagesQuestion
    single: Pipelined | None
    several: Pipelined | None
    bounds: Mapping[int, float]
    num_shapes: int
    cuts: tuple[int, ...]  # units that a stage may begin with

    @property
    def best(self) -> Pipelined | None:
        """The faster one; one stage where both take as long."""
        return faster(self.single, self.several)

    @property
    def plan(self) -> Plan | None:
        return self.best.plan(self.lower_bound_seconds) if self.best else None

    @property
    def lower_bound_seconds(self) -> float:
        """Seconds that no plan of any shape is faster than."""
        return min(self.bounds.values(), default=inf)

    @property
    def gap(self) -> float | None:
        """The best step's distance from the bound, as a fraction of it."""
        return self.best.step_seconds / self.lower_bound_seconds - 1 if self.best else None

    @property
    def speedup(self) -> float | None:
        """How many times as fast several stages are as one; None where one of them has no plan."""
        if not self.single or not self.several:
            return None
        return self.single.step_seconds / self.several.step_seconds

    @property
    def worth(self) -> str:
        """A sentence on the worth of several stages."""
        single, several = self.single, self.several
        if 1 not in self.bounds:
            devices = self.question.settings.group.num_devices
            many = self.question.global_batch
            return f"{many} sequences cannot be divided evenly among {devices} devices in one stage"
        if single is None:
            return "one stage does not fit"
        if not self.cuts:
            return f"one stage: {UNCUT}"
        if len(self.bounds) == 1:
            return "one stage: no other number was asked about, or is possible with these devices"
        alone = f"one stage takes {format_seconds(single.step_seconds)} ({single.shape})"
        if self.best is single:
            least = min((s for p, s in self.bounds.items() if p > 1), default=0.0)
            if not isfinite(least) or not least:
                return "one stage is best: several do not fit"
            most = max(0.0, single.step_seconds / least - 1)
            return f"one stage is best: no pipeline found is more than {most:.1%} faster"
        assert several, "it is the best one"
        return f"{self.speedup:.2f} times as fast as one stage: {alone}"


def faster(one: Pipelined | None, other: Pipelined | None) -> Pipelined | None:
    """The faster pipeline; the first where both take as long, None where there is none."""
    found = [each for each in (one, other) if each]
    return min(found, key=lambda each: each.step_seconds, default=None)


class Search:
    """Shapes with their bounds; see the module."""

    def __init__(self, question: StagesQuestion, shapes: Iterable[Shape], effort: Effort) -> None:
        self.question, self.effort, self.lifted = question, effort, 0
        self.starts = possible_cuts(next(iter(question.profiles.values())))
        self.bounds: dict[Shape, Bounds] = {}
        lanes: dict[object, Lanes] = {}
        self.cuts: dict[Shape, Cuts] = {}
        self.levels: dict[Shape, int] = {}  # the lowest of the bounds of the shape's best cuts
        self.planned: dict[Shape, Pipelined | None] = {}
        for shape in shapes:
            profile, budgets = question.profiles[shape.batch], question.budgets
            pipeline = Pipeline(profile, budgets, question.settings, shape, question.allow)
            self.bounds[shape] = Bounds(pipeline, lanes)
            self.cuts[shape], self.levels[shape] = Cuts(0.0, ()), -1  # not looked at yet

    def _cut(self, shape: Shape, below_s: float) -> None:
        bounds = self.bounds[shape]
        found = best_cuts(bounds.seconds, bounds.pipeline.count, self.starts, shape.stages, below_s)
        self.cuts[shape] = Cuts(max(found.seconds, self.cuts[shape].seconds), found.ends)
        self.levels[shape] = min((bounds.level(*run) for run in found.runs), default=FLUID)

    def improve(self, shape: Shape, most: int, below_s: float = inf) -> bool:
        """Lift the bounds of the shape's best cuts, and cut again; False: all are lifted.

        Cuts with a bound of at least `below_s` are of no use.
        """
        bounds, level = self.bounds[shape], self.levels[shape]
        if level >= most:
            return False
        if level >= 0:
            # The cheapest first, and of these that which decides.
            of_level = [run for run in self.cuts[shape].runs if bounds.level(*run) == level]
            bounds.lift(*max(of_level, key=lambda run: bounds.seconds(*run)))
            self.lifted += level + 1 == FLUID
        self._cut(shape, below_s)
        return True

    def bound(self, stages: Iterable[int]) -> float:
        """The least bound of shapes with so many stages."""
        return min((c.seconds for s, c in self.cuts.items() if s.stages in stages), default=inf)

    def run(
        self, stages: Sequence[int], below_s: float, report: Callable[[str], None]
    ) -> Pipelined | None:
        """The fastest pipeline with one of these numbers of stages, if faster than `below_s`."""
        best: Pipelined | None = None
        best_s = below_s
        shapes = [shape for shape in self.cuts if shape.stages in stages]

        def is_open(shape: Shape) -> bool:
            return self.cuts[shape].seconds * (1 + GAP) < best_s * (1 - 1e-9) and (
                shape not in self.planned
            )

        # The lanes of all, then the fluid model of the most promising, which is planned at once: a
        # good step closes many others.
        while lower := [one for one in shapes if is_open(one) and self.levels[one] < LANES]:
            if self.effort.spent():
                return best
            ready = min(lower, key=lambda one: self.cuts[one].seconds)
            self.improve(ready, LANES, best_s / (1 + GAP))
        for _ in range(MOST_PLANNED):
            shape = min(filter(is_open, shapes), key=self.estimate, default=None)
            if shape is None or self.effort.spent():
                break
            report(str(shape))
            while is_open(shape) and self.improve(shape, FLUID, best_s / (1 + GAP)):
                pass
            if not is_open(shape):
                continue
            found = self.planned[shape] = self.plan(shape)
            if best := faster(best, found):
                best_s = min(best_s, best.step_seconds)
        # What is left proves how far from the best the step may be.
        self.lifted = 0
        while self.lifted < MOST_LIFTED and not self.effort.spent():
            left = filter(is_open, shapes)
            shape = min(left, key=lambda one: self.cuts[one].seconds, default=None)
            if shape is None or self.cuts[shape].seconds > self.bound(stages) * (1 + 1e-9):
                break  # the least bound is that of a shape that has a plan
            if not self.improve(shape, FLUID, best_s / (1 + GAP)):
                break
        return best

    def estimate(self, shape: Shape) -> float:
        """Seconds of a step whose stages take no longer than their bounds; at least that.

        It ranks shapes: a bound sees what one stage waits for, and this what all wait for.
        """
        bounds, cuts, v = self.bounds[shape], self.cuts[shape], shape.chunks
        if not cuts.ends:
            return inf
        pipeline, stages = bounds.pipeline, list[StageSeconds]()
        for s, first, end in cuts.runs:
            around_s = pipeline.around_seconds(first, s)
            cycle_s = max(0.0, bounds.seconds(s, first, end) - around_s) / shape.micro_batches
            part = cycle_s / (3 * v)  # a backward takes about two forwards
            backward = (2 * part,) * v
            one = StageSeconds(
                forward=(part,) * v, backward=backward, last_backward=backward, update_s=0.0
            )
            stages.append(one)
        run = simulated(shape, stages, pipeline.hops, pipeline.nodes)
        return max(cuts.seconds, run.step_seconds)

    def plan(self, shape: Shape) -> Pipelined | None:
        """The shape's best cuts with a plan of every stage; None where one of them has none.

        The disk is for what does not fit without. Plans take longer than bounds say: of a model
        with few units, the cuts are then made again with what is known, until they stay.
        """
        bounds, cuts = self.bounds[shape], self.cuts[shape]
        pipeline, known = bounds.pipeline, dict[tuple[int, int, int], float]()
        best: Pipelined | None = None
        for _ in range(ROUNDS if pipeline.count <= FEW else 1):
            found = self._planned(shape, cuts)
            best = faster(best, found)
            for s, first, end in cuts.runs:
                known[s, first, end] = inf
                if found:
                    taken = shape.micro_batches * found.stages[s].seconds.cycle_s
                    known[s, first, end] = pipeline.around_seconds(first, s) + taken
            after = best_cuts(
                lambda *run: max(bounds.seconds(*run), known.get(run, 0.0)),
                pipeline.count,
                self.starts,
                shape.stages,
            )
            if not after.ends or all(run in known for run in after.runs):
                break
            cuts = after
        return best

    def _planned(self, shape: Shape, cuts: Cuts) -> Pipelined | None:
        """These cuts with a plan of every stage; None where one of them has none."""
        pipeline, stages = self.bounds[shape].pipeline, list[Stage]()
        for s in range(shape.stages):
            runs = pipeline.runs(cuts.ends, s)
            if any(first == end for first, end in runs):
                return None  # a chunk without units
            problem = pipeline.problem(runs, s)
            dry = problem.changed(tiers={**problem.tiers, "disk": 0})
            found = solve_problem(dry, effort=self.effort)
            if isinstance(found, Infeasible) and problem.tiers.get("disk"):
                found = solve_problem(problem, effort=self.effort)
            if isinstance(found, Infeasible):
                return None
            problem = problem.overlapping(found.plan.settings.overlap_steps)
            stages.append(planned(problem, runs, found.plan))
        return pipelined(pipeline, stages)


def stages_of(question: StagesQuestion) -> tuple[int, ...]:
    """The numbers of stages to look at, one among them; ProtrainError where one cannot be."""
    count = question.settings.group.num_devices
    if question.stages:
        for number in question.stages:
            if count % number:
                raise ProtrainError(
                    f"{count} devices cannot be divided evenly into {number} stages",
                    key="--stages",
                    fix="--stages auto tries all possible numbers",
                )
        return tuple(sorted({1, *question.stages}))
    most = 1 + len(possible_cuts(next(iter(question.profiles.values()))))
    return tuple(p for p in range(1, min(count, most) + 1) if count % p == 0)


def searched(question: StagesQuestion, effort: Effort) -> Search:
    """The search, with all shapes; ProtrainError where there is none."""
    group, profiles = question.settings.group, question.profiles
    # Several chunks are open where all units but the outer two are alike: those of a device are
    # then as good as a run of as many.
    units = next(iter(profiles.values())).units[1:-1]
    inner = {(unit.kind, unit.parameter_bytes, unit.state_bytes) for unit in units}
    chunks = question.chunks if len(inner) == 1 else (1,)
    numbers = stages_of(question)
    found = list(shapes(group, question.global_batch, sorted(profiles), numbers, chunks=chunks))
    if not found:
        sizes = ", ".join(map(str, sorted(profiles)))
        raise ProtrainError(
            f"{question.global_batch} sequences cannot be divided evenly among {group.num_devices}"
            f" devices with batches of {sizes}",
            key="--global-batch",
            fix=f"a multiple of {group.num_devices * min(profiles)}",
        )
    return Search(question, found, effort)


def plan_stages(
    question: StagesQuestion, *, effort: Effort, progress: Progress | None = None
) -> StagesAnswer:
    """The fastest step of `global_batch` sequences, by one stage and by several, and a bound."""
    questions = [question]
    if ROUNDING in question.allow:
        settings = replace(question.settings, reductions="in every micro-batch")
        questions.append(replace(question, settings=settings))
    searches = [searched(one, effort) for one in questions]
    numbers = sorted({shape.stages for shape in searches[0].cuts})

    def bound(stages: Sequence[int]) -> float:
        return min(search.bound(stages) for search in searches)

    def tell(what: str) -> None:
        if progress:
            seconds = [
                one.step_seconds for each in searches for one in each.planned.values() if one
            ]
            least_s = bound(numbers)
            progress(what, min(seconds, default=None), least_s if least_s < inf else None)

    def fastest(stages: Sequence[int], below_s: float) -> Pipelined | None:
        best: Pipelined | None = None
        for search in searches:
            found = search.run(stages, min(below_s, best.step_seconds if best else inf), tell)
            best = faster(best, found)
        return best

    single = fastest([1], inf)
    below_s = single.step_seconds if single else inf
    several = fastest([p for p in numbers if p > 1], below_s)
    return StagesAnswer(
        question=question,
        single=single,
        several=several,
        bounds={p: bound([p]) for p in numbers},
        num_shapes=sum(len(search.cuts) for search in searches),
        cuts=searches[0].starts,
    )


def planned_again(answer: StagesAnswer, profile: Profile, effort: Effort) -> StagesAnswer:
    """The answer with its best shape planned for a better profile of the same batch."""
    best = answer.best
    assert best is not None
    settings = best.pipeline.settings
    profiles = {profile.workload.batch_size: profile}
    question = replace(answer.question, profiles=profiles, settings=settings)
    search, stages = Search(question, [best.shape], effort), best.shape.stages
    found = search.run([stages], inf, lambda _: None)
    least_s = min(answer.bounds[stages], search.bound([stages]))
    bounds = {**answer.bounds, stages: least_s}
    if best is answer.single:
        return replace(answer, single=found, bounds=bounds)
    return replace(answer, several=found, bounds=bounds)
