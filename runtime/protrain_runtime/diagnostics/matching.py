"""Whether a model, its optimizer, its batches and the present devices can follow a plan.

A fingerprint detects another model; the model's tensors, in lines short enough for a plan, show the
difference. A line is a tensor's name, then its shape, dtype and role (trainable, frozen, buffer, or
scale of a packed weight), or its tie. One line stands for all names that differ in a counting
integer:

    model.layers.0-29.mlp.up_proj.weight 1536x576 float32 trainable
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import gt

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import keystr, tree_flatten_with_path

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.requirements import check_step, refuse_pipeline
from protrain_runtime.contract.records.decisions import activations_text
from protrain_runtime.contract.records.folding import MAX_RUN, fold, runs, unfolded
from protrain_runtime.contract.records.forms import FORMS, PLAN_AGAIN, misfit
from protrain_runtime.contract.records.hardware import is_accelerator
from protrain_runtime.contract.records.plan import (
    OPTIMIZER_IN_BACKWARD,
    Plan,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import Workload
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.ranks.group import check_ranks
from protrain_runtime.states.chunk_layouts import OVERLAPPING, sharing_memory
from protrain_runtime.states.chunks import Chunk
from protrain_runtime.states.quantized import named_scales
from protrain_runtime.states.stepping import NAMES, options_of
from protrain_runtime.states.update_rules import UpdateRules


def _check_form(index: int, plan: Plan) -> None:
    """ProtrainError if a unit's activations have another kind of unit's form."""
    unit = plan.units[index]
    form = FORMS[unit.activations.form]
    own = "blocks" if unit.kind == "block" else "last part" if unit is plan.units[-1] else ""
    if form.name != "keep" and form.of != own:
        raise ProtrainError(
            f"{unit.name} cannot take {activations_text(unit.activations)!r}: that is for"
            f" {'the last part' if form.of == 'last part' else 'blocks'}",
            key=f"units[{index}].activations",
            fix=PLAN_AGAIN,
        )
    if why := misfit(form.name, compiled=bool(plan.workload.compile)):
        raise ProtrainError(
            f"{unit.name}: {activations_text(unit.activations)!r} {why}",
            key=f"units[{index}].activations",
            fix=PLAN_AGAIN,
        )


_CHANGED_LATER = "; where its first forward changes it, run one before prepare()"


def check_model(model: nn.Module, plan: Plan) -> list[nn.Module | None]:
    """Each unit's module, None for a part. ProtrainError if the plan is for another model."""
    refuse_pipeline(plan)
    found = model_fingerprint(model)
    if found != plan.model_fingerprint and plan.tensors:
        changes = model_changes(plan.tensors, model, plan.units)
        same = ["parameters and buffers are the same; a module has another class or place"]
        raise ProtrainError(
            "\n    ".join(["the plan was made for another model:", *(changes or same)]),
            key="model_fingerprint",
            fix=f"profile and plan this model{_CHANGED_LATER}",
        )
    modules: list[nn.Module | None] = []
    for index, unit in enumerate(plan.units):
        _check_form(index, plan)
        try:
            modules.append(model.get_submodule(unit.name) if unit.kind == "block" else None)
        except AttributeError as error:
            raise ProtrainError(
                f"the model has no module '{unit.name}'",
                key=f"units[{index}]",
                fix="profile and plan this model; the plan was made for another one",
            ) from error
    if found != plan.model_fingerprint:
        raise ProtrainError(
            f"the plan was made for another model: its fingerprint is"
            f" {plan.model_fingerprint}, this model's is {found}",
            key="model_fingerprint",
            fix="profile and plan this model (layers, shapes, dtypes and what is trainable count)"
            + _CHANGED_LATER,
        )
    return modules


def check_kernels(plan: Plan) -> None:
    """ProtrainError if an accelerator would use other kernels than the profiled ones."""
    profiled, here = plan.workload.deterministic, torch.are_deterministic_algorithms_enabled()
    if profiled == here or not is_accelerator(plan.workload.device):
        return
    if profiled:
        raise ProtrainError(
            "the plan requires deterministic kernels, and PyTorch does not use them exclusively:"
            " others may take more memory than was profiled",
            key="workload.deterministic",
            fix="torch.use_deterministic_algorithms(True) before prepare(), on CUDA with"
            " CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment, or profile without"
            " --deterministic",
        )
    raise ProtrainError(
        "PyTorch uses deterministic kernels only, and the plan is for its default ones:"
        " these may take more memory than was profiled",
        key="workload.deterministic",
        fix="profile with --deterministic and plan again, or"
        " torch.use_deterministic_algorithms(False) before prepare()",
    )


def check_devices(
    model: nn.Module, plan: Plan, group: ProcessGroup | None, *, copies: bool
) -> None:
    """ProtrainError for other devices, or ones without plain copies (`copies`)."""
    check_ranks(plan, group)
    devices, replicas = plan.group.num_devices, plan.group.num_replicas
    if devices % replicas:
        raise ProtrainError(
            f"{devices} devices cannot be {replicas} replicas of the same size",
            key="settings.group.num_replicas",
            fix="choose a divisor of num_devices",
        )
    check_step(plan.units, plan.settings)
    if plan.group.num_devices == 1:
        return
    if copies:
        raise ProtrainError(
            'check="bitwise" trains a plain copy on this rank only, which is another training than'
            " that of several devices",
            fix="check a plan for one device, or compare with DistributedDataParallel",
        )
    from torch.distributed.tensor import DTensor  # takes a second to import

    distributed = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if distributed:
        raise ProtrainError(
            f"the parameter '{distributed[0]}' is a DTensor: it is spread over devices already, and"
            " a chunk is made of whole parameters",
            fix="prepare the model without tensor parallelism, or train without a plan",
        )


def check_offloaded(
    plan: Plan, chunks: Sequence[Chunk], rules: UpdateRules, optimizer: PlannedOptimizer
) -> None:
    """ProtrainError if an offloaded chunk cannot be updated in pieces, or not entirely."""
    units = zip(chunks, plan.units, strict=True)
    offloaded = [each for each in units if not each[1].states.is_persistent]
    shared = sharing_memory(chunks)
    for chunk, unit in offloaded:
        if shared.get(chunk.unit) == OVERLAPPING:
            raise ProtrainError(
                f"{unit.name} has parameters that share memory, and offloaded states need"
                " parameters with memory of their own",
                fix="give every parameter its own memory, or make the unit persistent",
            )
        dtypes = {part.dtype for part in chunk.slices if part.trainable}
        if len(dtypes) > 1:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise ProtrainError(
                f"{unit.name} has trainable parameters of several dtypes ({names}), and offloaded"
                " states need a single dtype",
                fix="convert them to one dtype, or freeze those of the others",
            )
    grouped = _grouped(optimizer)
    called = {  # the groups' names for parameters, if any
        parameter: name
        for group in optimizer.param_groups
        for parameter, name in zip(group["params"], group.get(NAMES, ()), strict=False)
    }
    for chunk, unit in offloaded:
        for part in (part for part in chunk.slices if part.trainable):
            rule = part.rule(rules)
            if rule.reason:
                raise ProtrainError(
                    f"the optimizer cannot update {part.name!r} in pieces: {rule.reason}",
                    key="optimizer",
                    fix="an elementwise optimizer, such as AdamW or SGD; or a plan whose states"
                    " stay on the device",
                )
            if chunk.sharding is not None and rule.block > 1:
                raise ProtrainError(
                    f"the optimizer's states of {part.name!r} are of {rule.block} elements each,"
                    f" and devices share {unit.name!r} in ranges that may cut these",
                    key="optimizer",
                    fix="an elementwise optimizer, such as AdamW; or a plan whose states stay",
                )
            if called.get(part.parameter, part.name) != part.name:
                raise ProtrainError(
                    f"{part.name!r} is called {called[part.parameter]!r} in its parameter group,"
                    " and pieces of it would have the model's name",
                    key="param_groups",
                    fix="name parameters as model.named_parameters() does, or not at all",
                )
        _refuse_ungrouped(chunk, grouped, f"offloads the states of {unit.name!r}")


STATES_OF = {
    **dict.fromkeys(("adamw", "adam", "adamax", "nadam", "radam", "adadelta"), 2),
    "adamw-amsgrad": 3,
    "rmsprop": 1,
    "sgd": 0,
    "sgd-momentum": 1,
}
"""By an optimizer's name in plans: states per parameter, each of the parameter's size."""


def check_states(plan: Plan, optimizer: PlannedOptimizer) -> None:
    """ProtrainError if an optimizer keeps more states than the plan counts."""
    count = STATES_OF.get(plan.optimizer)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if count is None or not trained or not plan.prediction.peak_bytes.device:
        return
    largest = max(trained, key=nn.Parameter.numel)
    width = largest.dtype.itemsize
    if plan.workload.precision == "master":
        width = max(width, torch.float32.itemsize)
        count += width > largest.dtype.itemsize  # the master itself
    rule = rules_of(optimizer).of(largest.dtype, largest.shape, parameter=largest)
    kept = rule.state_bytes(largest.numel()) / largest.numel()
    if kept > count * width:
        raise ProtrainError(
            f"{optimizer.kind.__name__} keeps {kept:.3g} bytes of states per parameter, and the"
            f" plan has room for {count * width} ({plan.optimizer})",
            key="optimizer",
            fix=f"train with {plan.optimizer}, or profile with --optimizer and plan again",
        )


def _grouped(optimizer: PlannedOptimizer) -> set[nn.Parameter]:
    """The parameters in groups."""
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _refuse_ungrouped(chunk: Chunk, grouped: set[nn.Parameter], does: str) -> None:
    """ProtrainError if a parameter that the plan updates is in no group."""
    for part in chunk.slices:
        if part.trainable and part.parameter not in grouped:
            raise ProtrainError(
                f"{part.name!r} requires a gradient and is in no parameter group, and the plan"
                f" {does}",
                key="param_groups",
                fix="give it to the optimizer, or requires_grad_(False) before the model is"
                " profiled; models with optimizers of their own (a GAN's) are profiled, planned and"
                " prepared one by one",
            )


def check_stepped(
    plan: Plan, chunks: Sequence[Chunk], rules: UpdateRules, optimizer: PlannedOptimizer
) -> None:
    """ProtrainError if a persistent chunk cannot be updated on its own, in backward."""
    shared, grouped = sharing_memory(chunks), _grouped(optimizer)
    for index, (chunk, unit) in enumerate(zip(chunks, plan.units, strict=True)):
        if unit.states != OPTIMIZER_IN_BACKWARD:
            continue
        _refuse_ungrouped(chunk, grouped, f"updates {unit.name!r} in backward")
        if chunk.unit in shared:
            raise ProtrainError(
                f"{unit.name} has parameters that share memory, and its update in backward would"
                " change what other units read",
                key=f"units[{index}].states",
                fix="make it persistent",
            )
        for rule in (part.rule(rules) for part in chunk.slices if part.trainable):
            if rule.together:
                raise ProtrainError(
                    f"{optimizer.kind.__name__} cannot update parameters in backward, chunk by"
                    f" chunk: {rule.reason}",
                    key=f"units[{index}].states",
                    fix="profile the model with this optimizer, and plan: states then stay on the"
                    " device, and a step is on all of them; or take one that looks at one parameter"
                    " at a time, such as AdamW or SGD",
                )


def rules_of(optimizer: PlannedOptimizer) -> UpdateRules:
    """The rules of the optimizer with the options of its groups."""
    members = {p: place for place, g in enumerate(optimizer.param_groups) for p in g["params"]}
    return UpdateRules(optimizer.factory, options_of(optimizer), members)


_BESIDE = ("buffer", "scale")
"""Roles of tensors other than parameters."""


def model_fingerprint(model: nn.Module) -> str:
    """A digest of modules, and of tensors by name, shape, dtype, trainability and ties."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"module {name} {type(module).__qualname__}\n".encode())
    for name, tensor, role, first in _tensors(model):
        line = f"{name} {'x'.join(map(str, tensor.shape))} {tensor.dtype}"
        if role in _BESIDE:
            digest.update(f"{role} {line}\n".encode())
        else:
            tied = "" if first == name else f" tied to {first}"
            digest.update(f"parameter {line} {role}{tied}\n".encode())
    return f"sha256:{digest.hexdigest()[:24]}"


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, str, str]]:
    """Name, tensor, role and first name of each parameter, then of buffers and scales."""
    first_names = {parameter: name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        role = "trainable" if parameter.requires_grad else "frozen"
        yield name, parameter, role, first_names[parameter]
    for name, buffer in model.named_buffers():
        yield name, buffer, "buffer", name
    for name, scale in named_scales(model):
        yield name, scale, "scale", name


MOST_LINES, MOST_WORDS, MOST_NAMES = 12, 6, 3
"""Limits of a message, of its lines, and of equal changes in it: who changed more has another
model in mind."""


def model_tensors(model: nn.Module) -> tuple[str, ...]:
    """The model's parameters and buffers in lines, as in a profile and its plans."""
    entries = [(tuple(name.split(".")), content) for name, content in _contents(model).items()]
    # Names that differ in one counting integer become one: the last integer first.
    for place in reversed(range(max((len(parts) for parts, _ in entries), default=0))):
        groups: dict[object, list[tuple[tuple[str, ...], str]]] = {}
        for parts, content in entries:
            counted = place < len(parts) and parts[place].isdecimal()
            key = (parts[:place], parts[place + 1 :], content) if counted else (parts, content)
            groups.setdefault((counted, key), []).append((parts, content))
        entries = []
        for group in groups.values():
            numbers = [parts[place] if place < len(parts) else "" for parts, _ in group]
            each = len(unfolded([".".join(group[0][0])]))  # names by counts in later places
            for run in runs(numbers, most=MAX_RUN // each):
                parts, content = group[run[0]]
                if len(run) > 1:
                    count = f"{numbers[run[0]]}-{numbers[run[-1]]}"
                    parts = (*parts[:place], count, *parts[place + 1 :])
                entries.append((parts, content))
    return tuple(f"{'.'.join(parts)} {content}" for parts, content in entries)


def model_changes(planned: Iterable[str], model: nn.Module, units: Sequence[UnitPlan]) -> list[str]:
    """List differences of `model` from the `planned` lines, unit by unit; empty: none."""
    before, after = unfolded(planned), _contents(model)
    own = {name: unit.name for unit in units for name in unit.parameters}
    blocks = [unit.name for unit in units if unit.kind == "block"]
    held: dict[str, dict[str, list[str]]] = {}  # unit -> change -> names
    counts: dict[str, list[int]] = {}
    for name in dict.fromkeys([*before, *after]):
        around = [block for block in blocks if name.startswith(f"{block}.")]
        unit = own.get(name) or max(around, key=len, default="")  # the innermost
        count = counts.setdefault(unit, [0, 0])
        for side, tensors in enumerate((before, after)):
            count[side] += name in tensors and not tensors[name].endswith(_BESIDE)
        change = _change(before.get(name), after.get(name))
        if change:
            short = name.removeprefix(f"{unit}.")
            held.setdefault(unit, {}).setdefault(change, []).append(short)
    names = list(held)
    texts = [_in_words(held[name], counts[name]) for name in names]
    lines: list[str] = []
    for run in runs(names, texts):
        first, last = names[run[0]], names[run[-1]]
        head = f"{first}: " if len(run) == 1 else f"{fold(first, last)}, each: "
        lines.append((head if first else "in no planned unit: ") + texts[run[0]])
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"and {more} more"]


def _contents(model: nn.Module) -> dict[str, str]:
    contents: dict[str, str] = {}
    for name, tensor, role, first in _tensors(model):
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        alone = f"{shape} {str(tensor.dtype).removeprefix('torch.')} {role}"
        contents[name] = alone if first == name else f"tied to {first}"
    return contents


def _change(before: str | None, after: str | None) -> str:
    if before == after:
        return ""
    if before is None:
        return f"new ({after})"
    if after is None:
        return f"missing ({before})"
    pairs = list(zip(before.split(), after.split(), strict=False))
    if len(before.split()) != len(after.split()) or "tied" in (pairs[0]):
        return f"{before} -> {after}"
    return ", ".join(f"{one} -> {two}" for one, two in pairs if one != two)


def _in_words(changes: Mapping[str, Sequence[str]], counts: Sequence[int]) -> str:
    if counts[0] and not counts[1]:
        return f"missing, with its {counts[0]} parameters"
    words: list[str] = []
    if counts[0] != counts[1]:
        words.append(f"{counts[0]} -> {counts[1]} parameters")
    for change, names in changes.items():
        which = ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} tensors"
        words.append(f"{which}: {change}")
    more = len(words) - MOST_WORDS
    return "; ".join(words if more <= 0 else [*words[:MOST_WORDS], f"and {more} more"])


def refuse_larger_batches(model: nn.Module, workload: Workload) -> Callable[[], None]:
    """Refuse training calls with larger batches than planned; returns the undo.

    Larger is more sequences, or longer ones. Smaller batches are accepted, and any size without a
    graph. Of a factory's batches, every tensor is compared with the profiled batch's same argument;
    other arguments are ignored. If images come with tokens, only sequences count: they include the
    image tokens.
    """
    if not (workload.model_config or workload.inputs):
        return lambda: None
    signature = inspect.signature(model.forward)
    planned: dict[str, tuple[int, ...]] = {}
    for name, _, size in (line.rpartition(" ") for line in workload.inputs):
        planned[name] = tuple(int(length) for length in size.split("x"))

    def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if not torch.is_grad_enabled():
            return
        if workload.model_config:
            tokens = kwargs.get("input_ids", args[0] if args else None)
            if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
                return
            most = (workload.batch_size, workload.seq_len)
            longer = tokens.shape[1] > most[1] and "pixel_values" not in kwargs
            if tokens.shape[0] > most[0] or longer:
                raise _too_large(f"is {tokens.shape[0]} x {tokens.shape[1]} tokens", most)
            return
        for name, size in call_sizes(signature, args, kwargs):
            limits = planned.get(name, ())
            if len(size) == len(limits) and any(map(gt, size, limits)):
                raise _too_large(f"has {' x '.join(map(str, size))} in {name!r}", limits)

    return model.register_forward_pre_hook(hook, with_kwargs=True).remove


def _too_large(what: str, most: tuple[int, ...]) -> RuntimeError:
    return RuntimeError(
        f"the batch {what}, and the plan was made for at most {' x '.join(map(str, most))}: it"
        " would take more memory than planned. Profile and plan the largest batch"
    )


def call_sizes(
    signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors in a call by argument, except single numbers."""
    try:
        arguments = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call itself will raise
        return
    for name, argument in arguments.items():
        for path, leaf in tree_flatten_with_path(argument)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                yield f"{name}{keystr(path)}".replace(" ", ""), tuple(leaf.shape)
