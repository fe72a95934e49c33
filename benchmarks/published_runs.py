"""Runs that others published: how `published.yaml` is read, and what is predicted of each.

A prediction is what `protrain fit` would say of a run that somebody has already decided: the
estimated profile of its workload on the machine of the catalogue, under the plan that plain PyTorch
follows. Nothing is searched for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from benchmarks.published_models import AsRun, Logits
from benchmarks.uniform import AMPLE, decided, plan_of_units
from protrain_plan.hardware.catalogue import hardware_names, load_hardware
from protrain_plan.models.presets import JsonObject, preset_names
from protrain_plan.models.sources import ConfigSource, ModelSource, load_source
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.questions.alternatives import bucket_bytes
from protrain_plan.planning.search.evaluation import step_seconds
from protrain_plan.simulation.group import group_on
from protrain_plan.simulation.report import report
from protrain_runtime.contract.records.adapters import parse_lora
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    Activations,
    Budgets,
    Placement,
    Schedule,
    StepSettings,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import DType, Precision, Profile, Quantize
from protrain_runtime.contract.records.tree import Document, parsed
from protrain_runtime.contract.units import parse_bytes
from tests.support.estimates import estimates

PUBLISHED = Path(__file__).parent / "published.yaml"

Sharding = Literal["none", "replicated", "full", "full in nodes", "states and gradients"]
Checkpointing = Literal["none", "full", "selective"]
Loss = Literal["plain", "chunked"]
MemoryKind = Literal["allocated", "active", "reserved", "not said"]

ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "Ampere": ("a100-40gb", "a100-80gb", "a10g", "rtx-3090"),
    "Ada": ("rtx-4090", "rtx-6000-ada", "l4", "l40s"),
    "Hopper": ("h100-sxm", "h100-pcie", "h200", "gh200"),
    "Blackwell": ("b200", "rtx-5090", "rtx-pro-6000"),
    "CDNA 3": ("mi300x",),
}

# --- the file -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where runs stand; `path` and `commit` where that is a file of a repository."""

    link: str
    date: str
    versions: Mapping[str, str]
    path: str = ""
    commit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run. The head of `published.yaml` says what its keys mean."""

    name: str
    source: Source
    where: str
    model: str
    gpu: str
    seq: int
    batch: int
    dtype: DType
    precision: Precision
    optimizer: str
    attention: str
    checkpointing: Checkpointing
    compile: bool
    devices: int = 1
    sharding: Sharding = "none"
    micro_batches: int = 1
    clip: bool = False
    lora: str = ""
    quantize: Quantize = ""
    loss: Loss = "plain"
    logits: Logits = "cast for the loss"
    expanded_heads: bool = False
    one_product: bool = False
    inputs_kept: bool = False
    float32_norms: bool = False
    logits_held: bool = False
    joint_adapters: bool = False
    triton_attention: bool = False
    autocast: bool = False
    buckets: bool = False
    memory_bytes: int | None = None
    memory_is: MemoryKind = "not said"
    tokens_per_s: float | None = None
    assumed: Mapping[str, str] = field(default_factory=dict)
    not_held: Mapping[str, str] = field(default_factory=dict)
    excluded: str = ""

    @property
    def architecture(self) -> str:
        """The architecture of its GPU; empty where the catalogue lacks that."""
        return next((name for name, gpus in ARCHITECTURES.items() if self.gpu in gpus), "")

    @property
    def not_asked(self) -> str:
        """Why the run cannot be asked of us; empty where it can."""
        missing = self.gpu not in hardware_names()
        return self.excluded or (f"the catalogue lacks the {self.gpu}" if missing else "")

    @property
    def workload(self) -> tuple[object, ...]:
        """The key of runs whose profiles are estimated at once."""
        shape = (self.model, self.seq, self.batch, self.dtype, self.precision)
        attention = (self.expanded_heads, self.one_product, self.joint_adapters)
        model = (self.logits, self.logits_held, *attention, self.inputs_kept, self.float32_norms)
        how = (self.autocast, self.triton_attention)
        return (*shape, self.optimizer, self.lora, self.quantize, *model, *how)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The whole file: `models` are configurations by name, `unused` says what was left out."""

    models: Mapping[str, JsonObject]
    runs: Mapping[str, Run]
    unused: Sequence[tuple[str, str]]  # link, reason


_KEYS = {
    **{key: kind for key, kind in get_type_hints(Run).items() if key not in ("name", "source")},
    "memory": str,
}
_Said = msgspec.defstruct(
    "Run",
    [(key, kind, None) for key, kind in _KEYS.items() if key != "memory_bytes"],
    kw_only=True,
    forbid_unknown_fields=True,
)
"""The keys of a run."""


_Link = Annotated[str, Meta(pattern="^https://")]


class _Unused(msgspec.Struct, forbid_unknown_fields=True):
    link: _Link
    why: str


class _Source(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    link: _Link
    date: str
    versions: dict[str, str]
    path: str = ""
    commit: str = ""
    common: dict[str, Any] = msgspec.field(default_factory=dict)
    runs: dict[str, Any]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    models: dict[str, Any]
    sources: dict[str, Any]
    unused: list[_Unused]


_REQUIRED = (
    *("where", "model", "gpu", "seq", "batch", "dtype", "precision", "optimizer", "attention"),
    *("checkpointing", "compile"),
)


def read_published(text: str | None = None, where: str = "published.yaml") -> Published:
    """The file's content; RecordError for a key that is unknown, missing or of another kind."""
    text = PUBLISHED.read_text(encoding="utf-8") if text is None else text
    top = parsed(text, where)
    file = top.read(_File)
    models = {name: _config(part) for name, part in top.at("models").mapping().items()}
    runs: dict[str, Run] = {}
    for part in top.at("sources").mapping().values():
        for run in _runs(part, models):
            if run.name in runs:
                raise part.error(f"two runs are called {run.name!r}")
            runs[run.name] = run
    unused = [(entry.link, entry.why) for entry in file.unused]
    return Published(models=models, runs=runs, unused=unused)


def _config(document: Document) -> JsonObject:
    """A Hugging Face configuration, with what it stands for under `_source`."""
    found = document.read(dict[str, str | int | float | bool])
    if "_source" not in found or "model_type" not in found:
        problem = "expected _source, which says what this stands for, and model_type"
        raise document.error(problem)
    return dict(found)


def _runs(document: Document, models: Mapping[str, JsonObject]) -> list[Run]:
    read = document.read(_Source)
    source = Source(
        link=read.link,
        date=read.date,
        versions=read.versions,
        path=read.path,
        commit=read.commit,
    )
    common = _said(document.at("common")) if "common" in document.data else {}
    runs = []
    for name, own in document.at("runs").mapping().items():
        said = common | _said(own)
        for key in ("assumed", "not_held"):  # a run's own beside what all of the source have
            if key in common:
                said[key] = {**common[key], **said[key]}
        if "memory" in said:
            with own.located():
                said["memory_bytes"] = parse_bytes(said.pop("memory"))
        if missing := [key for key in _REQUIRED if key not in said]:
            raise own.error(f"missing key {missing[0]!r}")
        run = Run(name=name, source=source, **said)
        _refuse(run, own, models)
        runs.append(run)
    return runs


def _said(document: Document) -> dict[str, Any]:
    read = document.read(_Said)
    return {key: getattr(read, key) for key in document.data}


def _refuse(run: Run, document: Document, models: Mapping[str, JsonObject]) -> None:
    """RecordError for what does not go together."""
    if run.model not in (*models, *preset_names()):
        raise document.error(f"no model is called {run.model!r}")
    if run.memory_bytes is None and run.tokens_per_s is None:
        raise document.error("neither memory nor tokens_per_s was measured")
    if (run.sharding == "none") != (run.devices == 1):
        raise document.error(f"{run.devices} devices and sharding {run.sharding!r}")
    for key in run.assumed:
        if key not in _KEYS:
            raise document.error(f"assumed is {key!r}, which is no key")
    for key in run.not_held:
        if key not in ("memory", "tokens_per_s"):
            raise document.error(f"not held is {key!r}, which is no measurement")
    if run.excluded:
        return
    if run.lora:
        parse_lora(run.lora)
    if run.compile or run.checkpointing == "selective":
        raise document.error("compiled or selectively checkpointed, and not excluded")


# --- predictions ----------------------------------------------------------------------------------

_PREFETCHED = Schedule(forward_lead=1, backward_lead=1, update_drain=1)
"""As FSDP: one all-gather ahead, and a reduction beside the next block's backward."""


def predicted(names: Sequence[str]) -> dict[str, Any]:
    """By name, the predictions of runs of one workload, of fake tensors."""
    published = read_published()
    runs = [published.runs[name] for name in names]
    first = runs[0]
    gpus = sorted({run.gpu for run in runs})
    profiles = estimates(
        source_of(first, published),
        machines=[machine_of(first, gpu) for gpu in gpus],
        batch_size=first.batch,
        seq_len=first.seq,
        dtype=first.dtype,
        precision=first.precision,
        adapter=str(parse_lora(first.lora)) if first.lora else "",
        quantize=first.quantize,
        optimizer=first.optimizer,
    )
    of_gpu = dict(zip(gpus, profiles, strict=True))
    return {run.name: _prediction(run, of_gpu[run.gpu]) for run in runs}


_TRITON_FORWARD, _TRITON_BACKWARD = 1.4, 2.0
"""How many times as long as FlashAttention-2 FlashAttention in Triton takes on an A100: 1.3 to 1.5
forward, about 2 backward (Dao, FlashAttention-2, arXiv 2307.08691, section 4.1)."""


FLASH_ATTENTION_2 = {"h100-sxm": (0.38, 0.33)}
"""Efficiencies forward and backward, where PyTorch takes a faster kernel since 2.10, cuDNN's: 338
TFLOP/s of 16,384 keys in heads 128 wide (Dao-AILab/flash-attention, README, H100 SXM5), shared out
as on an A100. Published runs are of older versions."""


def machine_of(run: Run, gpu: str) -> Hardware:
    """The catalogue's, with the speed of the attention kernel that the run had."""
    machine = load_hardware(gpu)
    rates = machine.rates
    assert rates is not None, "machines of the catalogue have rates"
    speeds = (rates.attention_efficiency, rates.attention_backward_efficiency)
    forward, backward = FLASH_ATTENTION_2.get(gpu, speeds)
    if run.triton_attention:
        forward, backward = forward / _TRITON_FORWARD, backward / _TRITON_BACKWARD
    rates = replace(rates, attention_efficiency=forward, attention_backward_efficiency=backward)
    return replace(machine, rates=rates)


def source_of(run: Run, published: Published) -> ModelSource:
    """The source of the run's model: a configuration of the file, or of the catalogue."""
    if run.model in published.models:
        stated = published.models[run.model]
        config = {k: v for k, v in stated.items() if not k.startswith("_")}
    else:
        known = load_source(run.model)
        assert isinstance(known, ConfigSource), "the catalogue has configurations"
        config = known.config
    return AsRun(
        run.model,
        config,
        logits=run.logits,
        expanded_heads=run.expanded_heads,
        one_product=run.one_product,
        inputs_kept=run.inputs_kept,
        float32_norms=run.float32_norms,
        logits_held=run.logits_held,
        joint_adapters=run.joint_adapters,
        autocast=run.autocast,
    )


def _prediction(run: Run, profile: Profile) -> dict[str, Any]:
    """Bytes of tensors on a device, tokens of one device per second, and what they consist of.

    `shares` are of the last micro-batch's seconds, with the update: `last part` is the head and the
    loss. `compute_share` is how much of them the device computes.
    """
    problem = problem_of(run, profile)
    plan = plan_of_units(problem, units_of(run, problem))
    program = problem.program(plan.units)
    told = report(program)
    peak = told.fullest
    seconds = [slot.end_s - slot.start_s for slot in told.slots]
    count = len(plan.units)
    tokens = run.batch * run.seq * run.micro_batches
    most = plan.prediction.peak_bytes.device
    if run.sharding != "none" and profile.optimizer.at_once:
        # FSDP's optimizer steps on all shards at once, our runtime on one unit's after the other.
        stepped = sum(state.own.stepped_bytes for state in program.states)
        updating = sum(told.slots[-1].device.by_kind.values())
        most = max(most, updating + round(profile.optimizer.workspace_fraction * stepped))
    return {
        "memory_bytes": most + (bucket_bytes(problem.profile) if run.buckets else 0),
        "tokens_per_s": tokens / step_seconds(problem, plan.units)[0],
        "peak": told.fullest.name,
        "peak_parts": {kind: size for kind, size in peak.device.by_kind.items() if size},
        "shares": {
            "last part": sum(seconds[count - 1 : count + 1]) / told.step_seconds,
            "update": sum(seconds[2 * count :]) / told.step_seconds,
        },
        "compute_share": told.lanes[0].utilisation,
        "lanes": {lane.name: lane.utilisation for lane in told.lanes[1:] if lane.busy_s},
    }


def problem_of(run: Run, profile: Profile) -> Problem:
    """The run's planning problem, which no budget binds."""
    group = group_on(profile.hardware, run.devices)
    if run.sharding == "full in nodes":
        group = group_on(profile.hardware, run.devices, num_replicas=group.num_nodes)
    return Problem.of(
        profile,
        Budgets(device=AMPLE, host=0, disk=0),
        settings=StepSettings(
            updates="after backward",
            micro_batches=run.micro_batches,
            group=group,
            overlap_steps=False,
        ),
    )


def units_of(run: Run, problem: Problem) -> list[UnitPlan]:
    """The decisions of plain PyTorch for every unit.

    A unit that has no such option keeps its activations, and its states on the device.
    """
    checkpointed: tuple[Activations, ...] = (Activations(form="full"), KEEP)
    in_place: tuple[Activations, ...] = (Activations(form="in place"), KEEP)
    sharded: Placement = PERSISTENT
    if run.sharding in ("full", "full in nodes", "states and gradients"):
        whole = run.sharding == "states and gradients"
        sharded = Placement(tier="device", keep_gathered=whole)
    last = len(problem.options) - 1

    def wanted(index: int) -> tuple[Activations, ...]:
        if run.loss == "chunked" and index == last:
            return in_place
        return checkpointed if run.checkpointing == "full" else (KEEP,)

    return [
        decided(problem, index, wanted(index), sharded, _PREFETCHED) for index in range(last + 1)
    ]
