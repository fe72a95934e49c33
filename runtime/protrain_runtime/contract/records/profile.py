"""`Profile`: what a model costs on a machine, unit by unit, in bytes and seconds.

Live bytes are those of tensors on the device, model states (parameters, gradients, optimizer
states) excluded. Unit u of U runs in slot u (forward) and in slot 2U - 1 - u (backward).
A *level* is the number of live bytes between two slots.
"""

from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

from msgspec import Meta

from protrain_runtime.contract.records import limits
from protrain_runtime.contract.records.hardware import DeviceKind, Hardware

Form = Annotated[str, Meta(description="the name of a form")]
"""In what form a unit's activations wait for backward: the name of an entry of `forms.FORMS`."""

SPARSE = "sparse gradients"
"""Why a unit's states stay (`Unit.stays`) whose gradients grow with what a batch reads."""

HANDS_ON = "hands tensors on in its arguments"
"""Why a unit's states stay that leaves tensors in an object which other units get, too."""

WHOLE = "the optimizer updates whole parameters alone"
"""Why a unit's states stay whose optimizer cannot update a parameter in pieces."""

TOGETHER = "the optimizer steps on all parameters at once"
"""Why a unit's states stay whose parameters cannot be updated apart from all others."""

UnitKind = Literal["block", "part"]
Precision = Literal["pure", "master", "autocast"]
"""pure: parameters, gradients and states of one dtype; master: states hold float32 parameters too;
autocast: float32 parameters, computed with in the workload's dtype."""
DType = Literal["float32", "bfloat16", "float16"]
Quantize = Literal["", "nf4", "int8"]
"""The packing of frozen linear layers below adapters; empty: none."""
Compile = Literal["", "blocks"]
"""The modules that `torch.compile` has compiled: every block by itself; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The model and batch that were profiled, in terms that build them again."""

    model: str  # preset name, path of a config.json, or package.module:factory
    model_config: limits.JsonText  # the resolved configuration as compact JSON ("" for a factory)
    batch_size: limits.Many  # [sequences]
    seq_len: limits.Many  # [tokens]
    dtype: DType
    device: DeviceKind
    seed: limits.Seed
    precision: Precision = "pure"
    adapter: str = ""  # "lora r=16 dtype=float32": what was added, and is trained (see `adapters`)
    inputs: tuple[str, ...] = ()  # of a factory's profiled batch: "tokens 4x64", a tensor each
    deterministic: bool = False  # whether PyTorch took deterministic kernels alone
    quantize: Quantize = ""  # how the frozen linear layers below the adapter are packed
    compile: Compile = ""  # blocks: each block is compiled by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class FormCost:
    """The cost of one form of a unit's activations when it stays on the device.

    forward_peak_bytes   highest live bytes inside the forward slot, above the level before it
    kept_bytes           level after the forward slot minus the level before it
    backward_peak_bytes  highest live bytes inside the backward slot (the unit's own new gradients
                         included), above the level after its forward slot
    swappable_bytes      the part of kept_bytes that a swap can take away: storages that belong to
                         this unit alone, rounded to what the transfer moves
    swap_pieces          swappable_bytes in parts that can move one after the other, first saved
                         first; empty: one part
    forward_launch_s, backward_launch_s
                         seconds of the thread that launches the unit's operators on an accelerator;
                         0: not known, or a processor that computes itself
    """

    form: Form
    forward_peak_bytes: limits.Bytes
    kept_bytes: limits.Bytes
    backward_peak_bytes: limits.BytesBeyond
    swappable_bytes: limits.Bytes
    forward_s: limits.Seconds
    backward_s: limits.Seconds  # recomputation included
    swap_pieces: tuple[limits.Bytes, ...] = ()
    forward_launch_s: limits.Seconds = 0.0
    backward_launch_s: limits.Seconds = 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of the device in forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def launch_s(self) -> float:
        """Seconds of the thread that launches them."""
        return self.forward_launch_s + self.backward_launch_s


HANDED_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Dtypes of tensors that units hand on, with bytes of an element."""

Handed = Annotated[
    str,
    Meta(
        pattern=rf"^[0-9]{{1,15}}(x[0-9]{{1,15}}){{0,9}} ({'|'.join(HANDED_SIZES)})$",
        description="shape and dtype, such as 1x4096x4096 bfloat16",
    ),
]
"""A tensor that a unit hands on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A part of the model that runs as a whole, and the chunk of states first used in it.

    `name` is the module's path for a block and the path of its first module for a part between
    blocks. `num_parameters` counts trainable parameters. `used_by` lists the units that read the
    chunk: the unit itself, and later ones for tied parameters; empty where it has no parameters.
    A block's chunk holds its module's parameters, `parameters` names those of a part (and what a
    block uses besides its own). `own_inputs` are the tensors among a block's inputs, by position,
    that no other unit reads, so that they can be swapped. `parameter_pieces` and `gradient_pieces`
    are parameter_bytes and gradient_bytes in groups of whole parameters that can move one after the
    other, as many of each; empty: one group. `reached` is False for a block that the loss does not
    depend on: its parameters never get gradients, and for those an optimizer makes no states where
    they persist on the device. `stays` says in a few words why the model states cannot leave the
    device; empty: they can. `runs_once` says why the forward of a block cannot run a second time
    with the same result, which leaves it the form `keep` alone; of a part, that layers of it run
    several times in a forward; empty for all others. Of
    `state_bytes`, `uneven_state_bytes` are what some parameters have beyond the usual bytes per
    element, such as the small ones of an 8-bit optimizer. `largest_gradient_bytes` are those of its
    largest parameter, where the optimizer's step needs memory in proportion to them; 0: it needs
    none, or as much as for all of the chunk. `reads` are units before the previous one with a
    differentiated output that it uses (a skip connection, an encoder's output). `gets` are what the
    previous unit hands on, as shape and dtype: `1x4096x4096 bfloat16`; empty if unknown.
    """

    name: str
    kind: UnitKind
    num_parameters: Annotated[int, Meta(ge=0, le=10**15)]
    parameter_bytes: limits.Bytes  # trainable and frozen
    gradient_bytes: limits.Bytes
    state_bytes: limits.Bytes  # optimizer states
    used_by: limits.Indices
    forms: Annotated[tuple[FormCost, ...], Meta(min_length=1, max_length=limits.MAX_LIST)]
    parameters: limits.Names = ()
    own_inputs: tuple[limits.Position, ...] = (0,)
    parameter_pieces: tuple[limits.Bytes, ...] = ()
    gradient_pieces: tuple[limits.Bytes, ...] = ()
    reached: bool = True
    stays: limits.Lines = ""
    runs_once: limits.Lines = ""
    uneven_state_bytes: limits.Bytes = 0
    largest_gradient_bytes: limits.Bytes = 0
    reads: limits.Indices = ()
    gets: tuple[Handed, ...] = ()

    @property
    def model_state_bytes(self) -> int:
        """Bytes of the chunk's parameters, gradients and optimizer states."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes

    @property
    def handed_bytes(self) -> int:
        """Bytes of the previous unit's output; 0 if unknown."""
        sizes = (text.split() for text in self.gets)
        return sum(prod(map(int, shape.split("x"))) * HANDED_SIZES[dtype] for shape, dtype in sizes)

    def cost(self, form: Form) -> FormCost:
        """The costs of `form`; KeyError where the unit cannot take it."""
        return {cost.form: cost for cost in self.forms}[form]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """The optimizer that the profile assumes, and its speed on both sides.

    `workspace_fraction` is what a step needs besides its operands, as a fraction of the bytes of
    the largest parameter that it works on at once; or of all persistent ones, if it takes them
    `at_once`, as `foreach` does. `host_piece_s` are seconds of a step on a piece on the host,
    besides its parameters. A piece is cut up to `cut_elements` from where it should be. It looks at
    blocks of `block` elements, 1 by default, or (0) at whole parameters. Of one that looks at whole
    parameters, one after the other, `workspace_bytes` are the most that a step needs besides its
    operands on any of the model; 0: not known. `node_parameters_per_s` is the limit that a node's
    host memory sets on the updates of all its devices together; 0 if unknown.
    """

    name: str
    host_parameters_per_s: limits.Speed
    device_parameters_per_s: limits.Speed
    workspace_fraction: limits.Factor
    host_piece_s: limits.Seconds = 0.0
    block: Annotated[int, Meta(ge=0, le=10**9)] = 1
    cut_elements: limits.Many = 64
    at_once: bool = False
    workspace_bytes: limits.Bytes = 0
    node_parameters_per_s: limits.SpeedIfKnown = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetitions:
    """How far whole steps of the plain model took other times, and a planned one.

    `low` and `high` are the fastest and the slowest of `num_steps` over the median of those with
    the same form of activations. `planned` is a step with everything offloaded and swapped over
    what is simulated for that plan; 0 where it was not timed.
    """

    num_steps: limits.Many
    low: limits.Share
    high: Annotated[float, Meta(ge=1, le=1e6)]
    planned: limits.Factor = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """The graphs that `torch.compile` made in a process, and how long calls waited for them.

    `cache` says how much of it PyTorch's own cache on the disk had: nothing (cold), a part, or all
    (warm); none where the compiler has no cache.
    """

    num_graphs: limits.Count  # forwards; one that trains has a backward besides
    seconds: limits.Seconds
    cache: Literal["cold", "partly", "warm", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A frozen model that runs a forward without gradients beside the one that is trained.

    Its weights stand on the device for the whole step, and so does the most that its forward takes.
    """

    model: str
    weight_bytes: limits.Bytes
    forward_bytes: limits.Bytes  # at most, its batch and its outputs included
    forward_s: limits.Seconds  # for a batch, before that of the first unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything that planning needs to know of a model on a machine.

    `tensors` names the model's parameters and buffers with their shapes and dtypes, equal ones in
    one line (`model.layers.0-29.mlp.up_proj.weight 1536x576 float32 trainable`), so that a plan can
    say what changed in a model that it was not made for. `fixed_bytes` stand on an accelerator
    whatever the batch: workspaces that its libraries keep in the allocator, scalars, which take a
    block each there, and what rounds states up to blocks. `repetitions` say how sure measured
    seconds are. `model_flops` are what the model computes for one batch on one device, as model
    FLOPs utilisation counts it (`planning/questions/spending.py`); 0: nothing was counted. `varies`
    says how steps differ, where the model does other work from step to step; empty: all steps are
    alike. `allowed` are the opt-ins that it was recorded with, as `--allow` names them: as far as
    that goes, its units have forms that are not exact. `compilation` is what the compiler did while
    it was measured, of which nothing is in the seconds of units; absent where nothing was compiled.
    `beside` is a frozen second model, whose bytes are in `fixed_bytes` and `base_bytes`, and whose
    seconds are in those of the first unit; absent where there is none.
    """

    workload: Workload
    hardware: Hardware
    method: Literal["measured", "estimated"]
    model_fingerprint: str  # of module structure, shapes and dtypes
    optimizer: OptimizerCost
    base_bytes: limits.Bytes  # live before the first slot: the batch, buffers, last step's loss
    units: Annotated[tuple[Unit, ...], Meta(min_length=1, max_length=limits.MAX_UNITS)]
    tensors: limits.Tensors = ()
    fixed_bytes: limits.Bytes = 0
    repetitions: Repetitions | None = None
    model_flops: Annotated[float, Meta(ge=0, le=1e27)] = 0.0
    varies: str = ""
    allowed: tuple[str, ...] = ()
    compilation: Compilation | None = None
    beside: Beside | None = None

    @property
    def error_band(self) -> tuple[float, float]:
        """Measured over predicted step seconds, at least and at most; zeros where unknown."""
        if self.method == "estimated":
            return self.hardware.error_band
        if self.repetitions is None:
            return 0.0, 0.0
        found = self.repetitions
        planned = (found.planned,) if found.planned else ()
        return min(found.low, *planned, 1.0), max(found.high, *planned, 1.0)
