"""Options of commands, grouped into records whose fields are options.

    @option_record
    class StepOptions:
        accumulate: int = option("Micro-batches per update.", default=1, min=1)
        clip: bool = flag("The short form of --updates after-backward.")

    def fit(model: ModelArgument, workload: WorkloadOptions, step: StepOptions) -> None:

has the options of both records (`with_options`); `help.GROUPS` has their places in the help.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, dataclass_transform, get_args

import typer

from protrain_plan.commands.options import (
    SpillOption,
    choice,
    on_command_line,
    opt_ins_named,
    part,
    size,
)
from protrain_runtime.contract.errors import ProtrainError

if TYPE_CHECKING:
    from protrain_plan.commands.measuring import ProfileRequest
    from protrain_plan.models.trainer_files import TrainerFile
    from protrain_runtime.contract.records.hardware import Hardware
    from protrain_runtime.contract.records.plan import Budgets, DeviceGroup, StepSettings
    from protrain_runtime.contract.records.profile import Profile


Record = TypeVar("Record")


@dataclass_transform(kw_only_default=True)
def option_record(record: type[Record]) -> type[Record]:
    """Make a record of options, without comparison and repr: --help creates all of them."""
    return dataclass(kw_only=True, eq=False, repr=False)(record)


def option(text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """A field of a record, or a parameter of a command, that is an option with this help.

    Its name is the field's by default; `more` are arguments of typer.Option.
    """
    return field(default=default, metadata={"help": text, "names": names, **more})


def flag(text: str, *names: str, **more: Any) -> Any:
    """An option that is off by default and has no --no- form."""
    return option(text, *names, default=False, **more)


def output_option(what: str, default: str) -> Any:
    """The file that a command writes."""
    text = f"The {what} to write; - is standard output."
    return option(text, "-o", "--output", default=Path(default))


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """A parameter as typer reads it; its default may be a field made by `option`."""
    if isinstance(default, Field):
        said, default = {**default.metadata}, default.default
        if said:
            own = (f"--{name.replace('_', '-')}",) if kind is bool else ()
            default = typer.Option(default, *(said.pop("names") or own), **said)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its own options, and one for each field of its records."""
    signature = inspect.signature(command)
    records: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            records[name] = kind
            parameters += (_parameter(one.name, one.type, one) for one in fields(kind))
        else:
            parameters.append(_parameter(name, kind, parameter.default))

    @functools.wraps(command)
    def called(**values: Any) -> None:
        for name, record in records.items():
            values[name] = record(**{f.name: values.pop(f.name) for f in fields(record)})
        command(**values)

    del called.__dict__["__wrapped__"]  # its signature is another one
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    called.__dict__["__signature__"] = signature.replace(parameters=parameters)
    return called


def given(record: Any) -> list[str]:
    """Return the options of a record that differ from their defaults."""
    said = [f.name for f in fields(record) if getattr(record, f.name) != f.default]
    return ["--" + name.replace("_", "-") for name in said]


def filled(record: Record, values: Mapping[str, Any]) -> Record:
    """Return the record with the `values` for its options, named as typed or as fields."""
    known: Any = record
    named = {name.replace("-", "_"): value for name, value in values.items()}
    own = {f.name: named[f.name] for f in fields(known) if f.name in named}
    return cast(Record, replace(known, **own))


@option_record
class DiskOptions:
    """Options for measuring a disk."""

    spill_directory: SpillOption = None
    disk_seconds: float = option(
        "Seconds of writes before measuring: disks slow down after some GB.", default=2.0, min=0.0
    )
    disk_bytes: str = option("Maximum bytes of these writes.", default="2GiB")

    def watch(self) -> tuple[float, int]:
        """Return the seconds and bytes of a `probe.Watch`; ProtrainError for an invalid size."""
        return self.disk_seconds, size("--disk-bytes", self.disk_bytes, 0)


@option_record
class WorkloadOptions:
    """Options for dtypes, adapters and optimizer. None is the command's default."""

    dtype: str | None = option("float32, bfloat16, float16. Default: bfloat16; profile: float32.")
    precision: str | None = option(
        "pure: all in --dtype. autocast: float32 parameters, computation in --dtype. master: the"
        " optimizer steps on float32 copies. Default: master; for profile pure."
    )
    lora: str | None = option(
        "Train PEFT's low-rank adapters alone: r=16, then any of alpha=32, targets=q_proj+v_proj,"
        " dtype=base, dropout=0.05, rslora, dora, velora, bias=all|lora_only,"
        " modules_to_save=lm_head+embed_tokens, freeze=A, joined by commas. Default: alpha is 2r,"
        " targets are all linear layers but the head, and adapters are float32."
    )
    quantize: str | None = option(
        "Store frozen layers below the adapters as nf4 (4 bits, as QLoRA does) or int8."
    )
    compile: bool = flag(
        "Compile each block (torch.compile), in the plan's runs, too. Estimates are for blocks"
        " that are not compiled."
    )
    optimizer: str | None = option(
        "adamw, sgd, adamw8bit, adafactor, ... (a wrong name lists all), or your own:"
        " package.module:Class, path/to/file.py:function. Default: adamw."
    )
    optimizer_args: str | None = option(
        "The optimizer's arguments in Python syntax: 'lr=1e-3, betas=(0.9, 0.95)'."
    )

    def requests(
        self,
        model: str,
        lengths: Sequence[int],
        batches: Sequence[int],
        *,
        allow: Sequence[str] | None = None,
        defaults: tuple[str, str] = ("bfloat16", "master"),
        seed: int = 0,
        deterministic: bool = False,
        **others: Any,
    ) -> "list[ProfileRequest]":
        """A request for each length with each batch; ProtrainError for unknown choices.

        `defaults` are those of the dtype and the precision, `others` further fields.
        """
        from protrain_plan.commands.measuring import ProfileRequest
        from protrain_plan.models.presets import DEFAULT_OPTIMIZER, known_model
        from protrain_runtime.contract.records.adapters import parse_lora
        from protrain_runtime.contract.records.profile import DType, Precision, Quantize, Workload

        named, asked = self.dtype or defaults[0], self.precision or defaults[1]
        dtype: DType = choice("--dtype", named, get_args(DType))
        precision: Precision = choice("--precision", asked, get_args(Precision))
        if dtype == "float32" and precision == defaults[1] == "master":
            precision = "pure"  # float32 parameters need no copies
        adapter = "" if self.lora is None else str(parse_lora(self.lora))
        quantize: Quantize = ""
        if self.quantize is not None:
            from protrain_plan.models.quantizing import read_quantize

            quantize = read_quantize(self.quantize, adapter=adapter)
        workloads = [
            Workload(
                model=known_model(model),
                model_config="",
                batch_size=batch,
                seq_len=length,
                dtype=dtype,
                device="cuda",
                seed=seed,
                precision=precision,
                adapter=adapter,
                quantize=quantize,
                compile="blocks" if self.compile else "",
                deterministic=deterministic,
            )
            for length, batch in product(lengths, batches)
        ]
        optimizer = self.optimizer or DEFAULT_OPTIMIZER
        others |= {"optimizer_args": self.optimizer_args, "allow": opt_ins_named(allow)}
        return [ProfileRequest(workload=one, optimizer=optimizer, **others) for one in workloads]


@option_record
class StepOptions:
    """Options for the updates of a step."""

    updates: str | None = option(
        "in-backward, the default; or after-backward, which clipping by the global norm needs:"
        " updates wait for the norm, or run ahead on a second copy of the states."
    )
    clip: bool = flag("Clip by the global norm: short for --updates after-backward.")
    clip_share: float | None = option(
        "Share of steps whose gradients are scaled, by clipping or by a loss scaler: they redo"
        " updates that ran ahead. 1: none runs ahead. Default: 0.05."
    )
    accumulate: int = option("Micro-batches per update.", default=1, min=1)
    disk_gain: str | None = option(
        "Use the disk only if no plan fits without it, or if steps without it take this much"
        " longer. 0: for any gain. Default: 10%."
    )

    def settings(self) -> "StepSettings":
        """The requested step, on one device; ProtrainError if options contradict each other."""
        from protrain_plan.planning.model.problem import OVERLAPPING
        from protrain_runtime.contract.records.plan import StepSettings
        from protrain_runtime.contract.records.schema import hints
        from protrain_runtime.contract.records.tree import checked

        given = self.updates or ("after-backward" if self.clip else "in-backward")
        after = choice("--updates", given, ("in-backward", "after-backward")) == "after-backward"
        if self.clip and not after:
            raise ProtrainError("--clip means --updates after-backward", key="--updates")
        if self.clip_share is not None and not after:
            problem = "only for updates after backward"
            raise ProtrainError(problem, key="--clip-share", fix="add --clip")
        share = OVERLAPPING.clip_share if self.clip_share is None else self.clip_share
        return replace(
            OVERLAPPING,
            updates="after backward" if after else "in backward",
            clip_share=checked(share, hints(StepSettings)["clip_share"], "--clip-share"),
            micro_batches=self.accumulate,
            disk_gain=part("--disk-gain", self.disk_gain, "disk_gain"),
        )


@option_record
class BudgetOptions:
    """Options for budgets; by default all of the machine's memory and disk, less headroom."""

    device_memory: str | None = option("Maximum device memory per process, such as 1.5GiB.")
    host_memory: str | None = option("Maximum pinned host memory of the node.")
    disk: str | None = option("Maximum disk space of the node.")
    tight: bool = flag(
        "Plan with all memory of an estimated device. By default, where no budget is given, the"
        " allocator has a reserve of a tenth of the tensors' bytes."
    )

    def machine(self, name: str) -> "Hardware":
        """A machine of the catalogue or of a file, with the requested host memory and disk."""
        from protrain_plan.hardware.catalogue import load_hardware

        size("--device-memory", self.device_memory, 0)  # refuse a wrong size before estimating
        machine = load_hardware(name)
        asked = {
            "host": size("--host-memory", self.host_memory, -1),
            "disk": size("--disk", self.disk, -1),
        }
        for tier in machine.tiers:
            if asked[tier.name] >= 0:
                machine = machine.with_tier(replace(tier, capacity_bytes=asked[tier.name]))
        return machine

    def of(self, profile: "Profile", group: "DeviceGroup") -> "Budgets":
        """The budgets of a device, one of a group."""
        from protrain_plan.planning.questions.allocator_slack import default_device_bytes
        from protrain_plan.simulation.group import profile_of_rank
        from protrain_runtime.contract.records.plan import Budgets

        machine = profile_of_rank(profile, group).hardware
        most = default_device_bytes(profile, tight=self.tight)
        there = {tier.name: tier.capacity_bytes * group.in_node for tier in machine.tiers}
        return Budgets(
            device=size("--device-memory", self.device_memory, most),
            host=size("--host-memory", self.host_memory, there.get("host", 0)) // group.in_node,
            disk=size("--disk", self.disk, there.get("disk", 0)) // group.in_node,
        )

    def refuse_host_memory(self, machines: "Sequence[Hardware]") -> None:
        """ProtrainError for `--host-memory` if no machine has host memory besides its device's."""
        names = {tier.name for machine in machines for tier in machine.tiers}
        if self.host_memory is not None and "host" not in names:
            problem = "a CPU machine computes in host memory, and has no tier below it"
            fix = "set its size with --device-memory"
            raise ProtrainError(problem, key="--host-memory", fix=fix)


_REPLACED = {
    "named": ("model",),
    "global_batch": ("batch_size", "accumulate"),
    "updates": ("clip",),
}
"""Options of a file that are replaced by an option of the command line with another name."""


@option_record
class FileOptions:
    """Options for models that a trainer's file may leave open."""

    named: str | None = option(
        "The model, if MODEL is a trainer's file that names no known one.",
        "--model",
        metavar="MODEL",
    )
    beside: str | None = option(
        "A frozen model that runs a forward on the same batch in each step, such as a teacher or a"
        " reference: a preset, a config.json, a factory, or none.",
        metavar="MODEL",
    )

    def frozen(self, model: str, file: "TrainerFile | None") -> str:
        """The frozen model beside the trained one; empty for none."""
        from protrain_plan.models.presets import is_factory, known_model

        named = self.beside if self.beside is not None else file and file.options.get("beside")
        if named in (None, "none"):
            return ""
        if is_factory(model) != is_factory(str(named)):
            problem = "a factory makes its own batches, and both models need the same ones"
            fix = "name two factories with such batches, or two models"
            raise ProtrainError(problem, key="--beside", fix=fix)
        return known_model(str(named))

    def read(self, context: typer.Context, model: str) -> "TrainerFile | None":
        """The file that a MODEL argument names; None for a model."""
        from protrain_plan.models.presets import is_factory

        if Path(model).suffix.lower() in (".yaml", ".yml", ".json"):  # others need no reader
            from protrain_plan.models.trainer_files import TrainerFile, is_trainer_file

            if is_trainer_file(model):
                if self.named is not None and is_factory(self.named):
                    problem = "a factory makes its own batches, not those of a file"
                    fix = "pass the factory in place of the file, with options for the rest"
                    raise ProtrainError(problem, key="--model", fix=fix)
                given = on_command_line(context)  # even with default values
                given.remove("model" if "model" in given else "profile")  # the argument itself
                answered = [option for name in given for option in _REPLACED.get(name, (name,))]
                return TrainerFile(model, given=answered, model=self.named)
        if self.named is not None:
            problem = f"{model} is not a trainer's file, and already names a model"
            raise ProtrainError(problem, key="--model")
        return None
