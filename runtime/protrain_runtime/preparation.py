"""`prepare`: attach a plan to a model in place. `restore` undoes it."""

import hashlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import gettempdir
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed import ProcessGroup

from protrain_runtime.activations.compiled import (
    are_compiled,
    backends_for_copy,
    compile_each,
    refuse_compiled_around,
    refuse_wrapped,
    refuse_wrapping,
)
from protrain_runtime.activations.forms import wrap_forward
from protrain_runtime.activations.own_caches import switch_off_caches
from protrain_runtime.activations.own_checkpoints import switch_off_checkpointing
from protrain_runtime.activations.recompute import let_parametrize_rerun
from protrain_runtime.checkpoint.weights import Weights
from protrain_runtime.contract import __version__
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.compiling import compile_plan
from protrain_runtime.contract.program.program import gradient_home, pinned_bytes
from protrain_runtime.contract.records import fingerprint, read_plan
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Plan, UnitPlan
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.lanes import (
    SWITCH_INTERVAL_S,
    WAIT_LIMIT_S,
    Backend,
    off_workers,
    only_here,
    overridden,
)
from protrain_runtime.devices.preflight import (
    check_room,
    for_each,
    free_host_bytes,
    ranks_here,
    room_here,
    warn_of_slow_disk,
    warn_of_threads,
)
from protrain_runtime.devices.stores import Store, Stores, in_rows
from protrain_runtime.devices.thread_guard import watch_zero_grad
from protrain_runtime.diagnostics.checking import Check as PlainCopy
from protrain_runtime.diagnostics.matching import (
    check_devices,
    check_kernels,
    check_model,
    check_offloaded,
    check_states,
    check_stepped,
    model_fingerprint,
    refuse_larger_batches,
    rules_of,
)
from protrain_runtime.diagnostics.recording import Watch
from protrain_runtime.engine.boundaries import Boundaries
from protrain_runtime.engine.engine import Engine
from protrain_runtime.engine.moves import Moves
from protrain_runtime.model.optimizer import ParameterGroups, PlannedOptimizer
from protrain_runtime.model.prepared import (
    ATTRIBUTE,
    DrawnValues,
    Prepared,
    Undo,
    add_state_dict_hooks,
    bring_back,
    let_copy,
    look_at,
    undo_all,
)
from protrain_runtime.ranks.common_memory import common_memory
from protrain_runtime.ranks.group import Ranks, ranks_of
from protrain_runtime.states.absent import (
    absent_parameters,
    give_places,
    parameters_in_files,
    take_values,
    without_parameters,
)
from protrain_runtime.states.chunk_layouts import make_chunks, unit_parameters
from protrain_runtime.states.chunks import Chunk, read_values
from protrain_runtime.states.known_optimizers import in_turn
from protrain_runtime.states.master_weights import with_master_weights
from protrain_runtime.states.offloading import offload
from protrain_runtime.states.quantized import (
    named_scales,
    pack_absent,
    refuse_quantized,
    settle_quantized,
)
from protrain_runtime.states.stand_ins import AwayParameter, come_back
from protrain_runtime.states.stepping import OptimizerFactory, like, refuse_closures
from protrain_runtime.states.unchanged_model import UnchangedModel, refuse_conversion
from protrain_runtime.states.update_rules import UpdateRules
from protrain_runtime.states.updates import UpdateTeam, spare_threads, updates_by_lines

Check = Literal["bitwise"]
"""The comparison that `check` runs during training."""


def prepare(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan | Path | str,
    *,
    optimizer: OptimizerFactory | torch.optim.Optimizer,
    param_groups: ParameterGroups | None = None,
    weights: Path | str | None = None,
    spill_directory: Path | str | None = None,
    check: Check | None = None,
    wait_limit_s: float = WAIT_LIMIT_S,
    lane_delay: Callable[[], float] | None = None,
    process_group: ProcessGroup | None = None,
    watch: bool | None = None,
) -> tuple[nn.Module, PlannedOptimizer]:
    """Make `model` follow `plan` in place, and build its optimizer.

    `optimizer` is a factory over parameter groups, such as `partial(torch.optim.AdamW, lr=3e-4)`,
    or an optimizer of the model that has not stepped: its class, groups and options are taken.
    `param_groups` defaults to one group of all trainable parameters. With `weights`, a folder of
    safetensors files or a checkpoint of `save`, the model is on `meta`, or `model` is a function
    that makes it. Values are read to their planned tiers and cast to the model's dtype, one unit in
    memory at a time. A disk tier keeps its unnamed file in `spill_directory` (default: the folder
    for temporary files). `check="bitwise"` trains a plain copy beside the first three steps, with
    the memory of plain training, and stops at the first bit that differs. A transfer or an update
    that takes longer than `wait_limit_s` raises an error that names it; `lane_delay` returns
    seconds by which tests delay every transfer. `watch` warns if the second step takes more bytes
    than predicted; it defaults to on for accelerators, where it costs nothing.

    The training loop does not change: the plan's micro-batches, then one `step()`. Under a plan for
    several devices, every rank of `process_group` (default: all ranks) calls `prepare` with the
    same plan and model, and gets rank 0's parameters and buffers. Raises ProtrainError, with the
    model unchanged, if the plan is for another model or cannot run here or in this version.
    """
    ranks = ranks_of(process_group, limit_s=wait_limit_s)
    with _taken_back_on_failure(ranks) as (undo, own, last), ExitStack() as stack:
        directory = Path(spill_directory if spill_directory is not None else gettempdir())
        model, drawn = _made(model, None if weights else directory)
        if ATTRIBUTE in model.__dict__:
            raise ProtrainError("the model follows a plan already", fix="call restore(model) first")
        if check not in (None, *get_args(Check)):
            problem = f"there is no check {check!r}"
            raise ProtrainError(problem, key="check", fix='"bitwise" or None')
        plan = plan if isinstance(plan, Plan) else read_plan(Path(plan))
        absent = absent_parameters(model)
        device = _device(model, plan, absent)
        stack.enter_context(devices.current(device))
        refuse_wrapped(model)
        own.append(pack_absent(model))
        refuse_quantized(model, source=plan.workload.model)
        undo.append(settle_quantized(model))
        modules = check_model(model, plan)
        check_kernels(plan)
        check_devices(model, plan, process_group, copies=check == "bitwise")
        keeps = plan.is_plain  # nothing to attach or check
        undo.append(_compile_as_planned(model, plan, None if keeps else modules))
        copies = check == "bitwise" and not keeps
        backends = backends_for_copy(model) if copies else {}
        devices.require(device)
        sharing = ranks_here() if plan.group.num_devices > 1 else 1
        check_room(plan, for_each(room_here(device, directory), sharing), directory)
        values = _values(weights, absent) if drawn is None else DrawnValues(drawn)
        if values is not None:
            undo.append(give_places(model, device, _below(model, plan)))
            last.append(partial(undo.remove, undo[-1]))
        facade = _facade(model, plan, optimizer, param_groups)
        before = look_at(model)
        undo.append(switch_off_checkpointing(model, stacklevel=3))
        let_parametrize_rerun()
        undo.append(switch_off_caches(model, evaluates=True, stacklevel=3))
        prepared = Prepared(None, (), facade, undo, plan, ranks=ranks, has_values=values is None)
        if not keeps:
            if ranks is not None:
                facts = _facts(model, plan, facade, device, wait_limit_s, values)
                ranks.connect(facts, group=plan.group, device=device)
            backend = Backend(device, delay=lane_delay, limit_s=wait_limit_s)
            stores = Stores(backend, directory, cached=plan.settings.page_cache_bytes > 0)
            undo.append(stores.close)
            leaving = _attach(model, modules, prepared, stores, backend, own, absent)
            last.append(partial(_leave, leaving))
            warn_of_slow_disk(plan, directory)
            warn_of_threads(plan, spare_threads(device))
        if values is not None:
            values.fill(model, prepared)
            last.append(partial(setattr, prepared, "has_values", True))
        model.__dict__[ATTRIBUTE] = prepared
        own.append(lambda: model.__dict__.pop(ATTRIBUTE, None))
        undo.append(let_copy(before))
        watches = not devices.on_host(device) if watch is None else watch
        if copies:
            plain_copy = PlainCopy(model, facade, plan, backends)
            plain_copy.start()
            undo.append(plain_copy.stop)
            prepared.plain = plain_copy.pair
        elif prepared.engine is not None and plan.prediction.peak_bytes.device and watches:
            undo.append(Watch(model, plan, prepared.engine, facade).stop)
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.param_groups = facade.param_groups
    return model, facade


def _facade(
    model: nn.Module,
    plan: Plan,
    optimizer: OptimizerFactory | torch.optim.Optimizer,
    param_groups: ParameterGroups | None,
) -> PlannedOptimizer:
    """The optimizer of the training loop: from a factory, or like an existing one."""
    if isinstance(optimizer, torch.optim.Optimizer):
        make, param_groups = like(optimizer, model), param_groups or optimizer.param_groups
    else:
        make = optimizer
    master = plan.workload.precision == "master"
    factory = with_master_weights(in_turn(make)) if master else in_turn(make)
    facade = PlannedOptimizer(factory, model, param_groups)
    if master:
        # All plans step on masters batch by batch: an optimizer that cannot is refused.
        trained = (p for g in facade.param_groups for p in g["params"] if p.requires_grad)
        if (first := next(trained, None)) is not None:
            rules_of(facade).of(first.dtype, first.shape, parameter=first)
    check_states(plan, facade)
    return facade


def _made(
    make: nn.Module | Callable[[], nn.Module], directory: Path | None
) -> tuple[nn.Module, dict[str, torch.Tensor] | None]:
    """The model, and the drawn values of a factory's parameters, which take no memory.

    The values are in files in the directory; without one parameters stay on `meta`, without values.
    """
    if isinstance(make, nn.Module):
        return make, None
    with without_parameters() if directory is None else parameters_in_files(directory):
        model = make()
    if not isinstance(model, nn.Module):
        raise ProtrainError(
            f"the function that makes the model returned a {type(model).__name__}",
            key="model",
            fix="return the torch.nn.Module",
        )
    return model, None if directory is None else take_values(model)


def _device(model: nn.Module, plan: Plan, absent: Set[str]) -> torch.device:
    """The model's device: its present one, or the planned one of `absent` parameters."""
    if not absent:
        return next(p.device for p in model.parameters())
    kind = plan.workload.device
    there = (t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == kind)
    return next(there, None) or devices.found(kind)


def _values(weights: Path | str | None, absent: Set[str]) -> Weights | None:
    """The values for parameters on `meta`. ProtrainError if only one of the two is given."""
    if weights is not None and not absent:
        raise ProtrainError(
            "the model's parameters have values already, and weights= is for those without",
            key="weights",
            fix="give prepare() a function that makes the model, or load(model, None, directory)"
            " after it",
        )
    if weights is None and absent:
        raise ProtrainError(
            f"parameters of the model are on meta and have no values, such as '{min(absent)}'",
            key="weights",
            fix="name the folder that has them: prepare(..., weights=DIRECTORY)",
        )
    return None if weights is None else Weights(weights, absent)


def _below(model: nn.Module, plan: Plan) -> set[nn.Parameter]:
    """Parameters that the plan offloads, or shards over devices."""
    chunks = zip(plan.units, unit_parameters(model, plan.units), strict=True)
    return {
        parameter
        for unit, parameters in chunks
        if not unit.states.is_persistent
        for _, parameter in parameters
    }


def compile_blocks(
    model: nn.Module, plan: Plan | Path | str, *, backend: str = "inductor"
) -> nn.Module:
    """Compile the blocks that `plan` names, one by one and in place, as `prepare` does.

    For a plain baseline; `prepare` compiles by itself if the plan says so. `backend` is one of
    `torch.compile`'s. ProtrainError if the plan is for another model, or blocks are compiled
    already.
    """
    plan = plan if isinstance(plan, Plan) else read_plan(Path(plan))
    check_model(model, plan)
    blocks = _blocks(model, plan)
    if are_compiled(blocks):
        raise ProtrainError("the model's blocks are compiled already", fix="compile them once")
    compile_each(blocks, backend=backend)
    return model


def _blocks(model: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    return {u.name: model.get_submodule(u.name) for u in plan.units if u.kind == "block"}


def _compile_as_planned(
    model: nn.Module, plan: Plan, attached: Sequence[nn.Module | None] | None
) -> Callable[[], None]:
    """Compile the blocks if the plan says so; returns the undo.

    No `attached` module may be inside a compiled one.
    """
    if attached is not None:
        refuse_compiled_around(model, attached)
    blocks = _blocks(model, plan)
    if are_compiled(blocks):
        if not plan.workload.compile:
            raise ProtrainError(
                "the model's blocks are compiled, and the plan is for blocks that are not: they"
                " would save other bytes than were profiled",
                key="workload.compile",
                fix="profile with --compile and plan again, or leave block.compile() out",
            )
    elif plan.workload.compile:
        return compile_each(blocks)
    return lambda: None


@contextmanager
def _taken_back_on_failure(ranks: Ranks | None) -> Iterator[tuple[Undo, Undo, Undo]]:
    """Undo steps: of this rank, further ones on failure, and last ones of all ranks."""
    undo: Undo = []
    own: Undo = []
    last: Undo = []
    try:
        with ranks.meeting.reporting("prepare()") if ranks is not None else nullcontext():
            yield undo, own, last
        for each in last:
            each()
    except BaseException:
        undo_all([*own, *undo])
        raise


def _facts(
    model: nn.Module,
    plan: Plan,
    optimizer: PlannedOptimizer,
    device: torch.device,
    limit_s: float,
    values: Weights | DrawnValues | None,
) -> dict[str, str]:
    """Return facts that must match across ranks."""
    facts = {} if values is None else {"weights": values.facts()}
    facts |= {
        "version of PyTorch": str(torch.__version__),
        "version of protrain": __version__,
        "plan": fingerprint(plan),
        "model": model_fingerprint(model),
        "type of device": device.type,
        "optimizer": optimizer.kind.__name__,
        "number of parameter groups": str(len(optimizer.param_groups)),
        "limit of waits": f"{limit_s:g} s",
    }
    for number, group in enumerate(optimizer.param_groups, start=1):
        held = repr([optimizer.names.get(id(parameter)) for parameter in group["params"]])
        facts[f"parameter group {number}"] = (
            f"{len(group['params'])} parameters ({hashlib.sha256(held.encode()).hexdigest()[:12]})"
        )
        for key in sorted(group.keys() - {"params"}):
            facts[f"{key} in parameter group {number}"] = _in_words(group[key])
    return facts


def _in_words(option: object) -> str:
    """An option's value as text, equal on every process for equal values."""
    if isinstance(option, torch.Tensor):
        return str(option.tolist())
    if isinstance(option, tuple | list):
        return f"({', '.join(map(_in_words, option))})"
    plain = option is None or isinstance(option, bool | int | float | str)
    return repr(option) if plain else type(option).__name__


_SHARED_BYTES = 2**26
"""Bytes of rank 0's values per broadcast."""


def _share(ranks: Ranks, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Copy rank 0's values to every rank; the undo restores each rank's own, saved on the host."""
    room = free_host_bytes() // 2 // ranks_here()
    kept: list[tuple[torch.Tensor, int, torch.Tensor]] = []
    for tensor in tensors:
        with in_rows(tensor) as flat:
            for start in range(0, flat.numel(), _SHARED_BYTES):
                here = flat[start : start + _SHARED_BYTES]
                sent = here if ranks.rank == 0 else torch.empty_like(here)
                ranks.broadcast([sent])
                if ranks.rank == 0 or torch.equal(here, sent):
                    continue
                room -= here.numel()
                if room >= 0:
                    kept.append((tensor, start, here.to("cpu", copy=True)))
                here.copy_(sent)

    def bring_back_own() -> None:
        for tensor, start, before in kept:
            with in_rows(tensor) as flat:
                flat[start : start + before.numel()].copy_(before)

    return bring_back_own


def _attach(
    model: nn.Module,
    modules: Sequence[nn.Module | None],
    prepared: Prepared,
    stores: Stores,
    backend: Backend,
    own: Undo,
    absent: Set[str],
) -> list[Chunk]:
    """Attach the plan, with rank 0's values except of `absent` ones; return chunks on disk."""
    plan, undo, ranks, optimizer = prepared.plan, prepared.undo, prepared.ranks, prepared.optimizer
    if not backend.on_host:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(min(usual, SWITCH_INTERVAL_S))
        undo.append(partial(sys.setswitchinterval, usual))
    settings, kind = plan.settings, backend.device.type
    chunks = make_chunks(model, plan.units, ranks, alignment=devices.alignment(backend.device))
    rules = rules_of(optimizer)
    refuse_closures(optimizer.inner)
    check_offloaded(plan, chunks, rules, optimizer)
    check_stepped(plan, chunks, rules, optimizer)
    swap_stores: dict[TierName, Store] = {}
    for unit in plan.units:  # a store that cannot be opened fails before anything changes
        if unit.states.tier:
            _store_of(unit, stores)
        if unit.activations.tier:
            swap_stores[unit.activations.tier] = stores.get(unit.activations.tier)
    if ranks is not None:
        ranks.meeting.meet("prepare()")
        own_values = [p for name, p in model.named_parameters() if name not in absent]
        beside = [scale for _, scale in named_scales(model)]
        own.append(_share(ranks, [*own_values, *model.buffers(), *beside]))
        undo.append(lambda: _bring_back_together(ranks, chunks if prepared.has_values else ()))
    _make_copies(chunks, stores, ranks)
    leaving = _offload(prepared, chunks, rules, stores, kind)
    sizes = [chunk.size(rules) for chunk in chunks]
    program = compile_plan(plan.units, sizes, settings, device=kind, clipped=True)
    accumulating = compile_plan(plan.units, sizes, settings, device=kind, updating=False)
    every_move = (*program.moves, *accumulating.moves)
    in_shares = {move.unit for move in every_move if move.share != (0.0, 1.0)}
    for chunk in chunks:
        if chunk.groups and chunk.sharding is None and chunk.unit not in in_shares:
            chunk.join_groups()
    by_lines = updates_by_lines(optimizer.inner)
    team = UpdateTeam(spare_threads(backend.device), by_lines=by_lines)
    undo.append(team.close)
    moves = Moves(
        program,
        plan.units,
        chunks,
        backend=backend,
        swap_stores=swap_stores,
        factory=optimizer.factory,
        options=optimizer.options,
        ranks=ranks,
        team=team,
    )
    engine = Engine(
        moves,
        accumulating,
        step_on=optimizer.step_on,
        shared_buffers=tuple(model.buffers()) if ranks is not None else (),
    )
    undo.append(engine.close)

    # A model that is dropped without `restore` still frees its threads and files, by a finalizer
    # that refers neither to the model nor to its engine.
    shut = ExitStack()
    shut.callback(stores.close)  # last
    for lane in reversed(engine.lanes.values()):
        shut.callback(lane.close)
    last_resort = weakref.finalize(model, only_here(partial(off_workers, shut.close)))
    undo.append(last_resort.detach)
    for unit, module in zip(plan.units, modules, strict=True):
        if unit.activations.form != "keep" and module is not None:
            undo.append(wrap_forward(module, unit.activations.form))
    names = [unit.name for unit in plan.units]
    boundaries = Boundaries(model, modules, engine, names=names, thread_guard=engine.thread_guard)
    undo.append(boundaries.remove)
    engine.boundaries = weakref.ref(boundaries)
    prepared.unchanged = UnchangedModel(model, chunks)
    engine.unchanged = weakref.ref(prepared.unchanged)
    for module in model.modules():
        undo.append(overridden(module, "_apply", partial(refuse_conversion, module)))
    undo.append(refuse_wrapping(model))
    undo.append(watch_zero_grad(model, engine.thread_guard))
    undo.append(refuse_larger_batches(model, plan.workload))
    add_state_dict_hooks(model, chunks, engine, undo)
    prepared.engine, prepared.chunks = engine, chunks
    prepared.below = lambda: (stores.host_bytes + moves.host_bytes, stores.disk_bytes)
    optimizer.attach(chunks, engine)
    return leaving


def _make_copies(chunks: Sequence[Chunk], stores: Stores, ranks: Ranks | None) -> None:
    """Place common copies in memory that the ranks of a node share."""
    shared = (chunk.sharding for chunk in chunks if chunk.sharding is not None)
    copies = [each.common for each in shared if each.common is not None]
    if ranks is None or not copies:
        return
    *offsets, num_bytes = accumulate((pinned_bytes(c.num_bytes) for c in copies), initial=0)
    store = stores.share(common_memory(ranks, num_bytes), num_bytes, ranks.in_node[1])
    for copy, offset in zip(copies, offsets, strict=True):
        copy.store, copy.offset = store, offset


def _offload(
    prepared: Prepared, chunks: Sequence[Chunk], rules: UpdateRules, stores: Stores, kind: str
) -> list[Chunk]:
    """Move states to their planned tiers; returns the chunks on disk."""
    leaving: list[Chunk] = []
    for chunk, unit in zip(chunks, prepared.plan.units, strict=True):
        if not unit.states.tier or not chunk.slices:
            continue
        home = gradient_home(unit.states, prepared.plan.settings, kind)
        offload(
            chunk,
            _store_of(unit, stores),
            rules,
            gradient_store=stores.get(home) if home in ("host", "disk") else None,
            speculate=unit.states.speculate,
            on_disk=unit.states.on_disk,
        )
        if prepared.ranks is None:
            prepared.undo.append(partial(_bring_back, prepared, chunk))
        else:  # all ranks have written their part: what leaves can be gathered
            prepared.ranks.meeting.meet("prepare()")
        absent = any(isinstance(part.parameter, AwayParameter) for part in chunk.slices)
        if unit.states.uses_disk and not absent:
            leaving.append(chunk)
        else:
            chunk.unbind(chunk.every_group)
    return leaving


def _store_of(unit: UnitPlan, stores: Stores) -> Store:
    assert unit.states.tier
    return stores.split if unit.states.on_disk else stores.get(unit.states.tier)


def _bring_back(prepared: Prepared, chunk: Chunk) -> None:
    if prepared.has_values:
        bring_back(chunk)


def _leave(chunks: Sequence[Chunk]) -> None:
    """Move all chunks out of the model, or none."""
    values = {part.parameter: part.parameter.data for chunk in chunks for part in chunk.slices}
    try:
        for chunk in chunks:
            chunk.unbind(chunk.every_group)
    except BaseException:
        for parameter, own in values.items():
            come_back(parameter)
            parameter.data = own
        for chunk in chunks:
            chunk.hollow.clear()
        raise


def _bring_back_together(ranks: Ranks, chunks: Sequence[Chunk]) -> None:
    """`bring_back` of all chunks that are away on any rank: gathers are collective."""
    away = [chunk.unit for chunk in chunks if chunk.hollow]
    everywhere = {unit for units in ranks.all_objects(away, "restore()") for unit in units}
    for chunk in (chunk for chunk in reversed(chunks) if chunk.unit in everywhere):
        if chunk.hollow:
            bring_back(chunk)
        else:
            for part in chunk.slices:
                read_values(chunk, part)
