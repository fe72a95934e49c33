"""One stage of a pipeline: its planning problem, and bounds on the step that has it.

A stage is planned as any model is: its units, as many micro-batches as there are, and the
activations of those that it holds. Three bounds on the pipeline's step follow, each dearer than the
one before, with p stages of which this is number s, M micro-batches, and h held:

    compute   what others compute before its first forward and after its last backward, and
                  M (F + B)                                                 of its own
              and, of chunks that are not interleaved, from the first backward on
                  sum over all others of (F + B) + (M - h + 1) F + M B
              and, since a micro-batch is begun only h after one that has come back, (M - 1) / h + 1
              times (rounded down) F and B of this stage and of all behind it, with the hops
    lanes     also the work of every lane, over numbers of equal units per option
    fluid     also when bytes are needed (`model/fluid.py`), with what comes before and after

F and B are seconds of a micro-batch, of other stages the least ones.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, permutations
from math import inf
from typing import Any

import highspy
import numpy as np

from protrain_plan.planning.model.decision_model import LE
from protrain_plan.planning.model.fluid import Fluid
from protrain_plan.planning.model.problem import SAFE, Problem
from protrain_plan.planning.model.solver import relaxed
from protrain_plan.planning.stages.cuts import handed_bytes
from protrain_plan.planning.stages.shapes import Shape, hop_seconds, joined_for
from protrain_plan.simulation.group import profile_of_rank
from protrain_plan.simulation.rates import crossing
from protrain_runtime.contract.program.effects import ActivationOption, standing_bytes
from protrain_runtime.contract.program.memory import base_bytes
from protrain_runtime.contract.program.program import COMPUTE, NETWORK, Channel
from protrain_runtime.contract.records.plan import Budgets, StepSettings
from protrain_runtime.contract.records.profile import Profile, Unit

WINDOWS = 8
"""Windows of slots in a forward that the fluid bound is found with."""

BOUNDS = ("compute", "lanes", "fluid")
"""The bounds of a stage, the cheapest first."""

Runs = tuple[tuple[int, int], ...]
"""The units of a device: from one up to another, for each of its chunks."""


@dataclass(frozen=True)
class Pipeline:
    """A profile of one device's batch, its machine, and an arrangement of devices.

    `budgets` are one device's. `profile` is of the whole node's machine, `settings` have all
    devices.
    """

    profile: Profile
    budgets: Budgets
    settings: StepSettings
    shape: Shape
    allow: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Units of the model."""
        return len(self.profile.units)

    @cached_property
    def of_device(self) -> Profile:
        """The profile with one device's part of the machine."""
        profile = profile_of_rank(self.profile, self.settings.group)
        return replace(profile, hardware=joined_for(profile.hardware, self.shape))

    @cached_property
    def handed(self) -> tuple[int, ...]:
        """Bytes that each unit gets from the one before it; the last entry is of no unit."""
        return (*(handed_bytes(self.profile, unit) for unit in range(self.count)), 0)

    @cached_property
    def hops(self) -> tuple[float, ...]:
        """Seconds from each stage to the next one, and from the last to the first."""
        whole, num_bytes = self.settings.group, max(self.handed)
        return hop_seconds(self.profile.hardware, whole, self.shape, num_bytes)

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """The node of each stage; none where every stage is in all of them."""
        whole, each = self.settings.group, self.shape.group.num_devices
        if self.shape.layout == "stages within nodes" or whole.num_nodes == 1:
            return ()
        return tuple(s * each // whole.in_node for s in range(self.shape.stages))

    # Stages

    def runs(self, ends: Sequence[int], s: int) -> Runs:
        """The units of stage s: one run up to `ends[s]`, or as many of each of its chunks."""
        firsts = (0, *ends)
        if self.shape.chunks == 1:
            return ((firsts[s], firsts[s + 1]),)
        sizes = [end - first for first, end in zip(firsts, ends, strict=False)]
        v = self.shape.chunks
        each = [size // v + (k < size % v) for k in range(v) for size in sizes]
        places = list(accumulate(each, initial=0))
        return tuple((places[n], places[n + 1]) for n in range(s, len(each), self.shape.stages))

    def problem(self, runs: Runs, s: int, piece_bytes: int = 0) -> Problem:
        """The planning problem of stage s with these units; 0: pieces are to be chosen."""
        if self.shape.stages == 1:
            return self.problem_of(self.profile, s)
        numbers = [unit for first, end in runs for unit in range(first, end)]
        places = {unit: place for place, unit in enumerate(numbers)}
        of_device = self.of_device
        units = [
            replace(unit, used_by=tuple(places[user] for user in unit.used_by), reads=())
            for unit in (of_device.units[number] for number in numbers)
        ]
        base = of_device.base_bytes + self.buffer_bytes(runs, s)
        profile = replace(of_device, units=tuple(units), base_bytes=base)
        return self.problem_of(profile, s, piece_bytes)

    def problem_of(self, profile: Profile, s: int, piece_bytes: int = 0) -> Problem:
        """The problem of stage s with a profile of some units."""
        settings = replace(
            self.settings,
            piece_bytes=piece_bytes or self.settings.piece_bytes,
            group=self.shape.group,
            micro_batches=self.shape.micro_batches,
            held=self.shape.held(s),
            overlap_steps=self.settings.overlap_steps and self.shape.stages == 1,
        )
        problem = Problem.of(profile, self.budgets, settings, allow=self.allow)
        # No trainer of pipelines does updates again that ran ahead of the norm of all stages.
        return problem if self.shape.stages == 1 else problem.speculating()

    def buffer_bytes(self, runs: Runs, s: int) -> int:
        """Bytes of what comes from a stage's neighbours and goes there.

        Inputs wait for backward with their micro-batches; what is on its way has buffers of its
        own, one in each direction.
        """
        inputs = sum(self.handed[first] * (self.shape.held(s) + 2) for first, _ in runs if first)
        return inputs + sum(self.handed[end] * 2 for _, end in runs)

    # Bounds

    @cached_property
    def _both(self) -> list[float]:
        """Least seconds of forward and backward of the units up to each."""
        return _sums(self.profile.units, 1.0, 1.0)

    @cached_property
    def _turned(self) -> list[list[float]]:
        """The same from the first backward on, over all micro-batches, for each stage."""
        many = self.shape.micro_batches
        held = [self.shape.held(s) for s in range(self.shape.stages)]
        return [_sums(self.profile.units, many - h + 1.0, float(many)) for h in held]

    def around_seconds(self, first: int, s: int) -> float:
        """Seconds before a stage's first forward and after its last backward."""
        both, v = self._both, self.shape.chunks
        # Of each stage before, only the first chunk: no less than its part rounded down.
        units = first if v == 1 else max(0, first - s * (v - 1)) // v
        return both[units] + 2 * sum(self.hops[:s])

    def compute_bound(self, s: int, first: int, end: int) -> float:
        """Seconds of the step, by what the stage and the others compute."""
        shape, both, many = self.shape, self._both, self.shape.micro_batches
        own, around = both[end] - both[first], self.around_seconds(first, s)
        bounds = [around + many * own]
        if shape.chunks == 1:
            hops_s, turned = 2 * sum(self.hops[:-1]), self._turned[s]
            bounds.append(both[-1] - own + hops_s + turned[end] - turned[first])
            through = both[-1] - both[first] + 2 * sum(self.hops[s:-1])
            bounds.append(around + ((many - 1) // shape.held(s) + 1) * through)
        # In one direction go activations to the next stage and gradients to the one before.
        if shape.stages > 1:
            bounds.append(
                many * shape.chunks * max(self.hops[: shape.stages - (shape.chunks == 1)])
            )
        return max(bounds) * (1 - SAFE)

    def fluid_bound(self, s: int, first: int, end: int) -> float:
        """Seconds of the step, by when the stage needs its bytes; inf: it does not fit."""
        problem = self.problem(((first, end),), s)
        fluid = Fluid(problem, window=-(-problem.count // WINDOWS))
        step, seconds, updating = fluid.variable("step"), fluid.seconds(), fluid.phases[0]
        fluid.row("alone", [*seconds, (step, -1.0)], LE)
        # All but the update lies between what others do before and after.
        update = [(updating.stall[-1], -1.0), (updating.compute[-1], -1.0)]
        around = self.around_seconds(first, s) / fluid.second_unit
        fluid.row("with_others", [*seconds, *update, (step, -1.0)], LE, -around)
        fluid.minimise([(step, 1.0)])
        answer = relaxed(fluid.pulp)
        if answer.status == "infeasible":
            return inf
        return fluid.lower_bound_seconds(answer.bound) if answer.status == "optimal" else 0.0


def _sums(units: Sequence[Unit], forward: float, backward: float) -> list[float]:
    """Sums over the units up to each of the least `forward` F + `backward` B of their forms."""
    least = (
        min(forward * cost.forward_s + backward * cost.backward_s for cost in unit.forms)
        for unit in units
    )
    return list(accumulate(least, initial=0.0))


class Lanes:
    """The linear program of one stage's lanes, over numbers of equal units per option.

    Rows are those of `CountProgram`: bytes of the device where forward turns into backward and at
    the end of the step, bytes of the tiers, and the work of lanes and of links. The solver keeps
    it, and runs of units differ in their numbers alone.
    """

    def __init__(self, pipeline: Pipeline, kinds: Sequence[int], s: int) -> None:
        self.pipeline, self.s = pipeline, s
        first_of = {kind: unit for unit, kind in reversed(list(enumerate(kinds)))}
        self.num_kinds = len(first_of)
        # One unit of each kind, those that are there once at the ends: only these are known to
        # compute when all others wait.
        outer = [kinds[0]] * (kinds.count(kinds[0]) > 1)
        order = [*outer, *range(self.num_kinds), *([kinds[-1]] * (kinds.count(kinds[-1]) > 1))]
        units = [
            replace(one, used_by=(place,) if one.used_by else (), reads=())
            for place, kind in enumerate(order)
            for one in [pipeline.of_device.units[first_of[kind]]]
        ]
        profile = replace(pipeline.of_device, units=tuple(units))
        self.problem = problem = pipeline.problem_of(profile, s)
        self.base = base_bytes(problem.profile, problem.settings)
        end, lanes = 2 * len(units), problem.lane_seconds
        slots = (len(units) - 1, len(units), end - 1, end)
        self._highs: Any = highspy.Highs()
        for name, value in (("output_flag", False), ("threads", 1), ("presolve", "off")):
            self._highs.setOptionValue(name, value)
        self.columns: list[int] = []  # the kind of each
        rows = defaultdict[object, list[tuple[int, float]]](list)
        ones: list[list[int]] = []
        for kind in range(self.num_kinds):
            options = problem.options[kind + len(outer)]
            for of_kind in options.kinds:
                ones.append([])
                for option in of_kind:
                    column = len(self.columns)
                    self.columns.append(kind)
                    ones[-1].append(column)
                    for slot in slots:
                        rows[slot].append((column, standing_bytes(option, slot)))
                    for tier, size in option.tier_bytes.items():
                        rows[tier].append((column, size))
                    work = lanes.of(option)
                    if isinstance(option, ActivationOption):
                        rows[COMPUTE].append((column, work[COMPUTE]))
                    for lane, taken in work.items():
                        rows["lane", lane].append((column, taken))
                        if isinstance(lane, Channel):
                            rows["channel", lane].append((column, taken))
                    for channel, taken in lanes.streamed(option):
                        rows["channel", channel].append((column, taken))
        count = len(self.columns)
        self._highs.addVars(count + 1, np.zeros(count + 1), np.full(count + 1, inf))
        self._highs.changeColCost(count, 1.0)
        self._memory = [self._row(rows[slot], problem.device) for slot in slots]
        for tier, limit in problem.tiers.items():
            self._row(rows[tier], limit)
        seconds = {key: of for key, of in rows.items() if isinstance(key, tuple)}
        for (what, _), of_lane in seconds.items():
            if what == "lane":
                self._row([*of_lane, (count, -1.0)], 0.0)
        # What others compute after a stage's last backward, they do beside its update.
        self._compute = self._row([*rows[COMPUTE], (count, -1.0)], 0.0)
        hardware = problem.profile.hardware
        channels = [lane for what, lane in seconds if what == "channel"]
        for one, other in permutations(channels, 2):
            if one.link == other.link or NETWORK in (one, other):
                crossed = crossing(hardware, one, other) if hardware.interconnect else 0.0
                both = [(column, crossed * taken) for column, taken in seconds["channel", other]]
                self._row([*seconds["channel", one], *both, (count, -1.0)], 0.0)
        self._ones = [self._row([(column, 1.0) for column in each], 0.0) for each in ones]

    def _row(self, terms: Sequence[tuple[int, float]], most: float) -> int:
        merged: dict[int, float] = {}
        for column, factor in terms:
            merged[column] = merged.get(column, 0.0) + factor
        scale = most if most > 0 else 1.0  # bytes are parts of what there is
        factors = np.array(list(merged.values())) / scale
        indices = np.array(list(merged), dtype=np.int32)
        self._highs.addRow(-inf, most / scale, len(merged), indices, factors)
        return int(self._highs.getNumRow()) - 1

    def seconds(self, counts: Sequence[int], buffers: int, around_s: float) -> float:
        """The least step with so many units of each kind; inf: their bytes do not fit."""
        for number, row in enumerate(self._ones):
            self._highs.changeRowBounds(row, counts[number // 2], counts[number // 2])
        room = 1.0 - (self.base + buffers) / max(1, self.problem.device)
        for row in self._memory:
            self._highs.changeRowBounds(row, -inf, room)
        self._highs.changeRowBounds(self._compute, -inf, -around_s)
        self._highs.run()
        status = self._highs.getModelStatus()
        if status == highspy.HighsModelStatus.kOptimal:
            return float(self._highs.getInfo().objective_function_value) * (1 - SAFE)
        infeasible = status == highspy.HighsModelStatus.kInfeasible
        return inf if infeasible or room <= 0 else 0.0


class Bounds:
    """Bounds of one shape's stages, each found once for equal units, and lifted where asked.

    Shapes of the same profiles share the programs of their `lanes`.
    """

    def __init__(self, pipeline: Pipeline, lanes: dict[object, Lanes] | None = None) -> None:
        self.pipeline = pipeline
        kinds: dict[object, int] = {}
        self.kinds = [
            kinds.setdefault(
                replace(unit, name="", parameters=(), used_by=(), reads=(), gets=(), own_inputs=()),
                len(kinds),
            )
            for unit in pipeline.profile.units
        ]
        # Units of each kind before each unit.
        one = np.eye(len(kinds), dtype=int)[self.kinds]
        self._before = np.vstack([np.zeros((1, len(kinds)), dtype=int), np.cumsum(one, axis=0)])
        self._found: dict[object, tuple[int, float]] = {}
        self._keys: dict[tuple[int, int, int], object] = {}
        self._lanes = {} if lanes is None else lanes

    def _key(self, s: int, first: int, end: int) -> object:
        """Equal for runs whose bounds are."""
        run = s, first, end
        if run not in self._keys:
            around = round(self.pipeline.around_seconds(first, s), 9)
            counts = (self._before[end] - self._before[first]).tobytes()
            self._keys[run] = s, first > 0, end < self.pipeline.count, around, counts
        return self._keys[run]

    def seconds(self, s: int, first: int, end: int) -> float:
        """The best bound that is known."""
        key = self._key(s, first, end)
        if key not in self._found:
            self._found[key] = 0, self.pipeline.compute_bound(s, first, end)
        return self._found[key][1]

    def level(self, s: int, first: int, end: int) -> int:
        """The number of the best bound that is known, of `BOUNDS`."""
        self.seconds(s, first, end)
        return self._found[self._key(s, first, end)][0]

    def lift(self, s: int, first: int, end: int) -> None:
        """Find the next better bound."""
        level, seconds = self.level(s, first, end) + 1, self.seconds(s, first, end)
        pipeline, shape = self.pipeline, self.pipeline.shape
        if BOUNDS[level] == "lanes":
            # All that a stage's problem has of its shape.
            alike = replace(shape, chunks=1, eager=False), shape.held(s)
            if alike not in self._lanes:
                self._lanes[alike] = Lanes(pipeline, self.kinds, s)
            counts = [int(number) for number in self._before[end] - self._before[first]]
            buffers = pipeline.buffer_bytes(((first, end),), s)
            better = self._lanes[alike].seconds(counts, buffers, pipeline.around_seconds(first, s))
        else:
            better = pipeline.fluid_bound(s, first, end)
        self._found[self._key(s, first, end)] = level, max(seconds, better)
