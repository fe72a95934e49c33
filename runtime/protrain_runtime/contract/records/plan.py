"""`Plan`: the decisions, and what they are predicted to cost. Reviewed and committed like code."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from msgspec import Meta

from protrain_runtime.contract.records import limits
from protrain_runtime.contract.records.folding import unfolded
from protrain_runtime.contract.records.forms import (
    FORMS,
    ROUNDING,
    Exactness,
    least_exact,
    opt_ins_of,
)
from protrain_runtime.contract.records.hardware import TierName, is_accelerator
from protrain_runtime.contract.records.profile import Form, UnitKind, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Form and place of a unit's activations until backward; by default all, on the device.

    Tensors that `form` keeps stay on the device, or go to `tier` after forward and return for
    backward; what the form does not keep is recomputed.
    """

    form: Form = "keep"
    tier: TierName | None = None

    @property
    def recomputes(self) -> bool:
        """Whether the unit's forward runs once more in backward."""
        return FORMS[self.form].recomputes


KEEP = Activations()
RECOMPUTE = Activations(form="full")

StateTier = Literal["device", "host", "disk"]
"""Where a rank's share of a chunk lives. On several devices it can be the device itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a chunk's states live, and where and when they are updated.

    Without a `tier` they are persistent: parameters, gradients and optimizer states stay on the
    device, and are updated there at `optimizer.step()`. With `update_in_backward` they are updated
    as soon as the unit's backward has ended, and their gradients are gone then. On several devices
    each one has all of them, and gradients are summed over all.

    With a `tier` states live there; parameters are fetched for forward and again for backward. With
    `keep_gathered` they are fetched once and held until backward, as FSDP2 holds them with
    `reshard_after_forward=False`.

    The optimizer then runs in host memory. With `update_on_device`, which is for states in host
    memory, these stream to the device piece by piece, are updated there, and stream back.

    Where updates come after backward, one with `speculate` runs in backward all the same, for
    gradients that are not scaled. It reads the states and writes a second copy of them on their
    tier, which `optimizer.step()` declares to be the states. Where gradients were scaled, as in a
    step that is clipped, it is done again, from the first copy. It is for states that move to be
    updated: there a second copy takes no time.

    On several devices each one has its share on the tier, and all-gathers what was fetched. Shares
    on `device` only have to be gathered; see `Plan.num_devices`.

    With `common_copy`, which is for host memory, frozen parameters lie there whole, once for all
    devices of a node, and each device fetches them by itself. Trained ones are shared as always.

    With `on_disk`, which is for host memory, as many sixteenths of the frozen parameters, the first
    ones, lie on disk, and are fetched from there.
    """

    tier: StateTier | None = None
    update_in_backward: bool = False
    common_copy: bool = False
    on_disk: int = 0
    keep_gathered: bool = False
    update_on_device: bool = False
    speculate: bool = False

    @property
    def is_persistent(self) -> bool:
        """Whether states stay on the device, whole on each of several."""
        return self.tier is None

    @property
    def below(self) -> TierName | None:
        """The tier below the device that states live on; None where they are on devices."""
        return None if self.tier == "device" else self.tier

    @property
    def uses_disk(self) -> bool:
        """Whether states lie on disk, all or a part."""
        return self.tier == "disk" or self.on_disk > 0

    @property
    def on_host(self) -> bool:
        """Whether the optimizer runs in host memory."""
        return self.below is not None and not self.update_on_device

    @property
    def staged(self) -> bool:
        """Whether an update moves the states piece by piece, through staging buffers."""
        return self.tier == "disk" or self.update_on_device


PERSISTENT = Placement()
OPTIMIZER_IN_BACKWARD = Placement(update_in_backward=True)

_TRAINED = " trainable"
"""The end of a line of `Plan.tensors` for a trained parameter."""

Updates = Literal["in backward", "after backward"]
"""When the optimizer works on offloaded chunks; clipping by a global norm needs all gradients."""

Reductions = Literal["in the last micro-batch", "in every micro-batch"]
"""When ranks reduce the gradients of chunks that they share: added up whole on each until then, or
every micro-batch's, whose sums are added up in shards (other roundings, and less memory)."""

CLIP_SHARE = 0.05
"""The part of all steps whose gradients are taken to be clipped, unless the user says otherwise."""

DISK_GAIN = 0.1
"""Part by which a step is longer without the disk before the disk is used: drives wear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a unit's transfers may run, in slots relative to the slot they serve.

    With a lead of n a fetch may start when the n-th slot before its own starts (0: only when its
    own slot is about to start). With a drain of n, n slots may start after the one that produced
    the bytes before compute waits until they have left the device; `None` is until the step's end.
    A lead or drain of n + f, with 0 < f < 1, is n + 1 for the fraction f of the bytes and n for the
    others: pieces are not cut, so f is rounded down to whole ones.

    Where steps overlap, a chunk that is updated late begins its update when backward has ended, in
    the order of the next forward; what it holds until then stays on the device.
    """

    forward_lead: limits.Slots = 0  # parameters for forward
    backward_lead: limits.Slots = 0  # parameters for backward
    swap_lead: limits.Slots = 0  # swapped activations for backward
    swap_drain: limits.Slots | None = None  # swapped activations after forward
    update_drain: limits.Slots | None = None  # gradients, and states going down, after backward
    update_late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """The decisions for one unit and for the chunk of states first used in it.

    The last four fields say what the unit is, as its profile found it; see `profile.Unit`.
    `also_used_by` names the later units that read the chunk too (tied parameters).
    """

    name: str
    activations: Activations
    states: Placement
    schedule: Schedule = Schedule()
    kind: UnitKind = "block"
    parameters: limits.Names = ()
    also_used_by: Annotated[tuple[str, ...], Meta(max_length=limits.MAX_UNITS)] = ()
    own_inputs: tuple[limits.Position, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """Bytes on each tier.

    `device` counts tensors, `context` what the process holds besides, and `allocator` what the
    device's allocator may hold beyond the tensors (see `Device.allocator_bytes`).
    """

    device: limits.Bytes
    context: limits.Bytes
    host: limits.Bytes
    disk: limits.Bytes
    allocator: limits.Bytes = 0

    @property
    def reserved(self) -> int:
        """Device bytes of the allocator, which a limit on it is compared with."""
        return self.device + self.allocator

    @property
    def on_device(self) -> int:
        """All that the process takes of the device."""
        return self.device + self.allocator + self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The planner's promise: peaks are upper bounds, seconds are estimates.

    A measured step is expected within `error_low` and `error_high` times `step_seconds`, as far as
    the profile knows (see `Profile.error_band`); zeros where it does not. One that is clipped may
    take longer.

    Where steps overlap, `step_seconds` are those from one step's start to the next one's, and
    `first_step_seconds` those of a step by itself, until its last update has ended.

    Where updates are speculative, `step_seconds` are the mean of clipped steps and others, by
    `StepSettings.clip_share`, and `clipped_step_seconds` those of a step that is clipped.
    """

    step_seconds: limits.StepSeconds
    lower_bound_seconds: limits.StepSeconds  # no schedule within the budgets is faster
    peak_bytes: TierBytes
    error_low: limits.Factor = 0.0
    error_high: limits.Factor = 0.0
    first_step_seconds: limits.OtherStepSeconds = 0.0  # where steps overlap
    clipped_step_seconds: limits.OtherStepSeconds = 0.0  # where updates are speculative
    host_update_seconds: limits.OtherStepSeconds = 0.0  # of a step, beside an accelerator
    host_update_threads: limits.Number = 0  # of a rank, that take these

    @property
    def expected_seconds(self) -> tuple[float, float] | None:
        """The fastest and the slowest step to expect; None where the profile does not say."""
        if not self.error_high:
            return None
        longest = max(self.step_seconds, self.clipped_step_seconds)
        return self.error_low * self.step_seconds, self.error_high * longest


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """The most that a run may take of each tier; of the device, with all besides tensors."""

    device: limits.Bytes
    host: limits.Bytes
    disk: limits.Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """The devices that train one model: ranks of a data-parallel group, with batches of their own.

    Ranks that follow one another form a group of `num_devices / num_replicas` that shares the
    states of each chunk that is not persistent; the groups are replicas of each other.
    """

    num_devices: limits.Count = 1
    num_replicas: limits.Count = 1  # of the sharded states; divides num_devices
    num_nodes: limits.Count = 1  # that the devices are in, as many in each

    @property
    def in_node(self) -> int:
        """Devices in each node."""
        return self.num_devices // self.num_nodes

    @property
    def num_shards(self) -> int:
        """Ranks that share the states of a chunk."""
        return self.num_devices // self.num_replicas

    def __str__(self) -> str:
        """`8 devices in 2 nodes, 2 replicas`."""
        devices = "1 device" if self.num_devices == 1 else f"{self.num_devices} devices"
        nodes = f" in {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return devices + nodes + (f", {self.num_replicas} replicas" * (self.num_replicas > 1))

    @property
    def replica_counts(self) -> tuple[int, ...]:
        """Numbers of replicas, fewest first, that have whole nodes each, or equal parts of one."""
        count, node = self.num_devices, self.in_node
        sizes = ((n, count // n) for n in range(1, count + 1) if count % n == 0)
        return tuple(n for n, size in sizes if size % node == 0 or node % size == 0)


ALONE = DeviceGroup()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of a whole step: how the optimizer runs, and on how many devices.

    With `overlap_steps` a step does not wait for its last updates: the next forward does, unit by
    unit, when it fetches what is updated.

    The disk is read and written past the page cache. With `page_cache_bytes` its bytes go through
    the cache, and are no more than that: memory beside the budgets, which it may fill.

    `disk_gain` says what the disk has to be worth to the planner: it is used where nothing fits
    without it, or where the step without it takes so much longer.

    A stage of a pipeline has the activations of `held` micro-batches at a time.
    """

    piece_bytes: limits.SomeBytes = 0  # in which states move and are updated; 0: to be chosen
    updates: Updates = "in backward"
    micro_batches: limits.MicroBatches = 1  # forwards and backwards per update
    reductions: Reductions = "in the last micro-batch"  # of ranks
    group: DeviceGroup = ALONE
    overlap_steps: bool = False
    page_cache_bytes: limits.Bytes = 0  # of memory, that what is on disk may fill
    clip_share: limits.ShareIfKnown = CLIP_SHARE  # of all steps, those whose gradients are clipped
    disk_gain: limits.Gain = DISK_GAIN
    held: limits.MicroBatches = 1  # micro-batches whose activations stand together

    @property
    def is_single(self) -> bool:
        """Whether a step is one forward and backward, on one device."""
        return self.micro_batches == self.group.num_devices == 1

    @property
    def adds_shards(self) -> bool:
        """Whether ranks add up shards of reduced gradients, and not whole gradients."""
        several = self.micro_batches > 1 < self.group.num_devices
        return several and self.reductions == "in every micro-batch"


SETTINGS = {
    "page_cache_bytes": ("page cache", "--page-cache"),
    "updates": ("updates", "--clip"),
    "clip_share": ("clipped steps", "--clip-share"),
    "disk_gain": ("least gain of the disk", "--disk-gain"),
    "micro_batches": ("micro-batches", "--accumulate"),
    "reductions": ("reductions", None),
    "held": ("micro-batches held", None),
    "group": ("devices", None),
    "piece_bytes": ("pieces of states", None),
}
"""Displayed settings of a step: their names for readers, and the options of `protrain plan`."""


PipelineSchedule = Literal["1F1B", "eager 1F1B", "interleaved 1F1B"]
"""The order of forwards and backwards in a stage; an eager one begins with more forwards."""

PipelineLayout = Literal["stages across nodes", "stages within nodes"]
"""Where the devices of a stage are: neighbours of each other, or as many in each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage of a pipeline: where its units begin, and what each of its devices takes.

    A device has the units from each of `first_units` up to the next one that a stage begins with:
    one run of units, or several chunks where the schedule is interleaved.
    """

    first_units: tuple[str, ...]  # of each chunk
    held: limits.MicroBatches  # micro-batches whose activations stand together
    piece_bytes: limits.SomeBytes
    cycle_seconds: limits.StepSeconds  # of a micro-batch: all its forwards and backwards
    peak_bytes: TierBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The stages of a plan, each on as many devices as `Plan.settings.group` has."""

    schedule: PipelineSchedule
    layout: PipelineLayout = "stages across nodes"
    num_nodes: limits.Count = 1  # that all devices are in, as many in each
    stages: Annotated[tuple[StagePlan, ...], Meta(min_length=2, max_length=limits.MAX_LIST)]

    @property
    def chunks(self) -> int:
        """Runs of units of a device."""
        return len(self.stages[0].first_units)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A training step under budgets: one decision per unit, in execution order.

    `tensors` says what the model holds, as in its profile. Workload, budgets (`host` and `disk`
    too) and peaks are those of one rank. With a `pipeline`, settings are those of each stage, and
    peaks the largest of any.
    """

    workload: Workload
    hardware: str  # the name of the machine planned for
    optimizer: str  # the one whose states were counted
    profile_fingerprint: str
    model_fingerprint: str
    exact: bool  # whether `exactness` is bitwise
    exactness: Exactness = "bitwise"
    allowed: tuple[str, ...] = ()  # approximations, as `--allow` names them
    budgets: Budgets
    prediction: Prediction
    settings: StepSettings
    pipeline: PipelinePlan | None = None
    units: Annotated[tuple[UnitPlan, ...], Meta(min_length=1, max_length=limits.MAX_UNITS)]
    tensors: limits.Tensors = ()

    @property
    def num_stages(self) -> int:
        """Stages of its pipeline, or one."""
        return len(self.pipeline.stages) if self.pipeline else 1

    @property
    def whole(self) -> DeviceGroup:
        """The devices of all stages."""
        if self.pipeline is None:
            return self.group
        count = self.group.num_devices * self.num_stages
        return replace(self.group, num_devices=count, num_nodes=self.pipeline.num_nodes)

    @property
    def global_batch(self) -> int:
        """Sequences of a step: all stages work on the same."""
        settings = self.settings
        return self.workload.batch_size * settings.micro_batches * settings.group.num_devices

    def runs(self, stage: int) -> tuple[tuple[int, int], ...]:
        """The units of each chunk of a stage: from one up to another."""
        if self.pipeline is None:
            return ((0, len(self.units)),)
        places = {unit.name: place for place, unit in enumerate(self.units)}
        firsts = sorted(
            places[name] for of_stage in self.pipeline.stages for name in of_stage.first_units
        )
        ends = dict(zip(firsts, [*firsts[1:], len(self.units)], strict=True))
        own = (places[name] for name in self.pipeline.stages[stage].first_units)
        return tuple((first, ends[first]) for first in own)

    def of_stage(self, stage: int) -> "Plan":
        """The plan of one stage's devices."""
        if self.pipeline is None:
            return self
        own = self.pipeline.stages[stage]
        units = [unit for first, end in self.runs(stage) for unit in self.units[first:end]]
        return replace(
            self,
            settings=replace(self.settings, held=own.held, piece_bytes=own.piece_bytes),
            prediction=replace(self.prediction, peak_bytes=own.peak_bytes),
            units=tuple(units),
            pipeline=None,
        )

    @property
    def group(self) -> DeviceGroup:
        """The devices that the plan is for; of a pipeline, those of each stage."""
        return self.settings.group

    @property
    def forms(self) -> frozenset[Form]:
        """In which the activations of some unit wait."""
        return frozenset(unit.activations.form for unit in self.units)

    @property
    def keeps_everything(self) -> bool:
        """Whether all activations and states stay on the device, and updates wait for the step."""
        return all(one.activations == KEEP and one.states == PERSISTENT for one in self.units)

    @property
    def is_plain(self) -> bool:
        """Whether the plan is plain PyTorch: one device keeps everything."""
        return self.group.num_devices == 1 and self.keeps_everything

    @property
    def host_updated(self) -> tuple[UnitPlan, ...]:
        """Units whose parameters the host's optimizer updates for a model on an accelerator."""
        if not is_accelerator(self.workload.device):
            return ()
        trained = {name for name, kind in unfolded(self.tensors).items() if kind.endswith(_TRAINED)}
        found: list[UnitPlan] = []
        for unit in self.units:
            inside = unit.kind == "block" and any(n.startswith(f"{unit.name}.") for n in trained)
            is_trained = inside or not trained.isdisjoint(unit.parameters)
            if unit.states.on_host and (is_trained or not self.tensors):
                found.append(unit)
        return tuple(found)

    @property
    def opt_in(self) -> tuple[Exactness, tuple[str, ...]]:
        """The grade of the plan's forms and sums, and the opt-ins that they need."""
        allowed = opt_ins_of(self.forms)
        grade = least_exact(FORMS[form].exactness for form in self.forms)
        if not self.settings.adds_shards:
            return grade, allowed
        return least_exact([grade, ROUNDING]), tuple(dict.fromkeys([ROUNDING, *allowed]))

    @property
    def graded(self) -> Exactness:
        """The grade of the plan's forms, sums and updates: the right value of `exactness`."""
        grade, _ = self.opt_in
        return least_exact([grade, "host rounding"]) if self.host_updated else grade

    def regraded(self) -> "Plan":
        """The same plan, with its exactness and its opt-ins."""
        graded, (_, allowed) = self.graded, self.opt_in
        return replace(self, exact=graded == "bitwise", exactness=graded, allowed=allowed)

    @property
    def gap(self) -> float:
        """The predicted step's distance from the best one, as a fraction of the bound."""
        return self.prediction.step_seconds / self.prediction.lower_bound_seconds - 1
