"""A planned pipeline: every stage with its plan, all of them simulated together, as a plan file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.questions.spending import tokens_in_step
from protrain_plan.planning.stages.cycles import Pipeline, Runs
from protrain_plan.planning.stages.schedule import Simulated, StageSeconds, simulated
from protrain_plan.planning.stages.shapes import Shape, shape_of
from protrain_plan.simulation.timeline import simulate
from protrain_runtime.contract.program.effects import BoundProgram
from protrain_runtime.contract.program.memory import peak_bytes
from protrain_runtime.contract.records import fingerprint
from protrain_runtime.contract.records.plan import Budgets, PipelinePlan, Plan, StagePlan, TierBytes
from protrain_runtime.contract.records.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: the units of its chunks, what it holds, and the plan of each of its devices."""

    runs: Runs
    held: int  # micro-batches
    seconds: StageSeconds
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """A shape with its planned stages; `step_seconds` are of all of them, simulated together."""

    pipeline: Pipeline
    stages: tuple[Stage, ...]
    run: Simulated
    step_seconds: float

    @property
    def shape(self) -> Shape:
        return self.pipeline.shape

    @property
    def peak_bytes(self) -> TierBytes:
        """The most that a device of any stage takes of each tier."""
        peaks = [stage.plan.prediction.peak_bytes for stage in self.stages]
        tiers = (field.name for field in fields(TierBytes))
        return TierBytes(**{tier: max(getattr(one, tier) for one in peaks) for tier in tiers})

    @property
    def tokens(self) -> int:
        workload, shape = self.pipeline.profile.workload, self.shape
        return tokens_in_step(workload, shape.group, shape.micro_batches)

    @property
    def record(self) -> PipelinePlan:
        """The pipeline as a plan records it."""
        units = self.pipeline.profile.units
        stages = tuple(
            StagePlan(
                first_units=tuple(units[first].name for first, _ in stage.runs),
                held=stage.held,
                piece_bytes=stage.plan.settings.piece_bytes,
                cycle_seconds=stage.seconds.cycle_s,
                peak_bytes=stage.plan.prediction.peak_bytes,
            )
            for stage in self.stages
        )
        return PipelinePlan(
            schedule=self.shape.schedule,
            layout=self.shape.layout,
            num_nodes=self.pipeline.settings.group.num_nodes,
            stages=stages,
        )

    def plan(self, lower_bound_seconds: float) -> Plan:
        """The plan of all stages, with a bound on all that it was chosen among."""
        first = self.stages[0].plan
        prediction = replace(
            first.prediction,
            step_seconds=self.step_seconds,
            lower_bound_seconds=min(lower_bound_seconds, self.step_seconds),
            peak_bytes=self.peak_bytes,
        )
        if self.shape.stages == 1:
            return replace(first, prediction=prediction)
        units = {unit.name: unit for stage in self.stages for unit in stage.plan.units}
        profile = self.pipeline.profile
        plan = replace(
            first,
            profile_fingerprint=fingerprint(profile),
            prediction=prediction,
            settings=replace(first.settings, held=1),
            pipeline=self.record,
            units=tuple(units[unit.name] for unit in profile.units),
        )
        return plan.regraded()


def pipeline_of(plan: Plan, profile: Profile, budgets: Budgets | None = None) -> Pipeline:
    """The arrangement of a plan with a pipeline, within its own budgets or other ones."""
    settings = replace(plan.settings, group=plan.whole)
    return Pipeline(profile, budgets or plan.budgets, settings, shape_of(plan), plan.allowed)


def problems_of(
    plan: Plan, profile: Profile, budgets: Budgets | None = None
) -> Iterator[tuple[Problem, Plan]]:
    """The problem and the plan of each stage; of a plan without a pipeline, its own."""
    if plan.pipeline is None:
        yield Problem.of_plan(plan, profile, budgets), plan
        return
    pipeline = pipeline_of(plan, profile, budgets)
    for s in range(plan.num_stages):
        own = plan.of_stage(s)
        yield pipeline.problem(plan.runs(s), s, own.settings.piece_bytes), own


def of_plan(plan: Plan, profile: Profile) -> Pipelined:
    """A plan's pipeline, predicted again; ProtrainError for a decision that a stage lacks."""
    stages: list[Stage] = []
    for s, (problem, own) in enumerate(problems_of(plan, profile)):
        peaks = peak_bytes(problem.program(own.units))
        own = replace(own, prediction=replace(own.prediction, peak_bytes=peaks))
        stages.append(planned(problem, plan.runs(s), own))
    return pipelined(pipeline_of(plan, profile), stages)


def planned(problem: Problem, runs: Runs, plan: Plan) -> Stage:
    """A stage with these units and this plan."""
    programs = [problem.program(plan.units, updating=one) for one in (False, True)]
    seconds = stage_seconds(programs[0], programs[1], [end - first for first, end in runs])
    return Stage(runs=runs, held=problem.settings.held, seconds=seconds, plan=plan)


def pipelined(pipeline: Pipeline, stages: Sequence[Stage]) -> Pipelined:
    """Planned stages as a pipeline."""
    run = simulated(
        pipeline.shape,
        [stage.seconds for stage in stages],
        pipeline.hops,
        pipeline.nodes,
        norm_of_all=pipeline.settings.updates == "after backward",
        with_spans=True,
    )
    step_s = run.step_seconds
    if len(stages) == 1:  # where steps may overlap
        step_s = stages[0].plan.prediction.step_seconds
    return Pipelined(pipeline=pipeline, stages=tuple(stages), run=run, step_seconds=step_s)


def stage_seconds(middle: BoundProgram, last: BoundProgram, sizes: Sequence[int]) -> StageSeconds:
    """Seconds of a stage's chunks, from simulated middle micro-batches and the `last` one."""
    chunks = list(pairwise(accumulate(sizes, initial=0)))

    def split(program: BoundProgram) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        timeline = simulate(program)
        ends = [0.0, *(end for _, end in timeline.compute[: 2 * program.num_units])]
        forward = tuple(ends[end] - ends[first] for first, end in chunks)
        # Backward goes through the units from the last to the first.
        backward = tuple(ends[-1 - first] - ends[-1 - end] for first, end in chunks)
        return forward, backward, max(0.0, timeline.step_seconds - ends[-1])

    forward, backward, rest = split(middle)
    _, last_backward, update_s = split(last)
    # What still moves when a micro-batch has been computed, the next one waits for.
    backward = (backward[0] + rest, *backward[1:])
    return StageSeconds(
        forward=forward, backward=backward, last_backward=last_backward, update_s=update_s
    )
