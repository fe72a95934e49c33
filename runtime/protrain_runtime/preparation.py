"""`prepare`: make a model follow a plan, in place, and give it back."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup

from protrain_plan.compiling import compile_plan
from protrain_plan.errors import ProtrainError
from protrain_plan.program import Settings, gradient_home
from protrain_plan.records import fingerprint, read_plan
from protrain_plan.records.plan import (
    Persistent,
    Plan,
    Recompute,
    Swap,
    SwapInput,
)
from protrain_plan.records.profile import RecomputedForm
from protrain_runtime import devices
from protrain_runtime.activations import recomputed
from protrain_runtime.boundaries import Boundaries
from protrain_runtime.checking import Check
from protrain_runtime.checkpointing import switch_off_checkpointing
from protrain_runtime.chunks import (
    OptimizerFactory,
    offload,
)
from protrain_runtime.compiled import (
    code_of,
    refuse_compiled_around,
    refuse_wrapped,
    refuse_wrapping,
    replace_code,
)
from protrain_runtime.copying import let_copy, look_at
from protrain_runtime.engine import Engine
from protrain_runtime.fingerprint import model_fingerprint
from protrain_runtime.inputs import refuse_larger_batches
from protrain_runtime.lanes import WAIT_LIMIT_S, Backend, WorkLane, quick_turns
from protrain_runtime.layout import make_chunks
from protrain_runtime.masters import with_master_weights
from protrain_runtime.matching import (
    check_devices,
    check_groups,
    check_kernels,
    check_model,
    check_pieces,
    keeps_everything,
    states_of,
)
from protrain_runtime.measure import addresses, device_of
from protrain_runtime.moves import Moves
from protrain_runtime.optimizer import ParameterGroups, PlannedOptimizer, make_inner
from protrain_runtime.preflight import check_room, for_each, room_here, warn_of_slow_disk
from protrain_runtime.prepared import ATTRIBUTE, Prepared, parameter_values, undo_all
from protrain_runtime.ranks import Ranks
from protrain_runtime.sharding import offload_shard
from protrain_runtime.state_dicts import (
    Undo,
    add_state_dict_hooks,
    bring_back,
)
from protrain_runtime.stores import Stores
from protrain_runtime.unchanged_model import UnchangedModel, refuse_conversions
from protrain_runtime.update_team import UpdateTeam, spare_threads
from protrain_runtime.watching import Watch


def prepare(
    model: nn.Module,
    plan: Plan | Path | str,
    *,
    optimizer: OptimizerFactory,
    param_groups: ParameterGroups | None = None,
    spill_directory: Path | str | None = None,
    check: Literal["bitwise"] | None = None,
    wait_limit_s: float = WAIT_LIMIT_S,
    lane_delay: Callable[[], float] | None = None,
    process_group: ProcessGroup | None = None,
    watch: bool | None = None,
) -> tuple[nn.Module, PlannedOptimizer]:
    """Make `model` follow `plan` in place, and build its optimizer.

    `optimizer` makes any elementwise `torch.optim` optimizer from parameter groups, for example
    `partial(torch.optim.AdamW, lr=3e-4)`; `param_groups` are the groups (as `torch.optim` takes
    them), by default one of all trainable parameters. `spill_directory` is where a disk tier keeps
    its unnamed file, by default the system's directory for temporary files. `check="bitwise"`
    trains a plain copy beside the first three steps and stops on a bit that differs (`checking`);
    it needs the memory of plain training. `wait_limit_s` is how long one wait
    for a transfer or an update may take before it is an error that names it.
    `lane_delay` returns seconds by which tests hold every transfer back. `watch` compares the bytes
    of the second step with those predicted, and warns of more; by default on accelerators, where it
    costs nothing (see `watching`).

    The training loop stays as it is: the plan's number of micro-batches, each with a forward and
    a backward, then one `step()`. Where the plan's updates come after backward, gradients may be
    clipped (`torch.nn.utils.clip_grad_norm_`) and unscaled (`torch.amp.GradScaler`) before it.
    Under a plan for several devices, every rank of `process_group` (by default of all there are)
    calls `prepare` with the same plan and model; all of them get rank 0's parameters and buffers,
    and go through forward, backward, `step()` and state dicts together (see `ranks`).
    Before anything is allocated, the plan's predicted peaks are compared with the memory and the
    disk that there are (see `preflight`). Under a plan of master precision, the optimizer steps on
    float32 copies (see `masters`).
    Raises ProtrainError, and leaves the model as it was, if the plan was made for another model or
    cannot be carried out here or by this version.
    """
    if ATTRIBUTE in model.__dict__:
        raise ProtrainError("the model follows a plan already", fix="call restore(model) first")
    if not isinstance(plan, Plan):
        plan = read_plan(Path(plan))
    refuse_wrapped(model)
    modules = check_model(model, plan)
    check_kernels(plan)
    check_devices(model, plan, process_group, check)
    if not keeps_everything(plan):
        refuse_compiled_around(model, modules)
    directory = Path(spill_directory if spill_directory is not None else gettempdir())
    device = device_of(model)
    devices.require(device)
    room = room_here(device, directory)
    if plan.num_devices > 1:
        room = for_each(room, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    check_room(plan, room, directory)
    if plan.workload.precision == "master":
        optimizer = with_master_weights(optimizer)
    inner = make_inner(optimizer, model, param_groups)
    names = {parameter: name for name, parameter in model.named_parameters()}
    facade = PlannedOptimizer(inner, names)
    before = look_at(model)
    undo: Undo = [switch_off_checkpointing(model)]
    prepared = Prepared(None, (), facade, undo, plan)
    if keeps_everything(plan):  # plain PyTorch itself: nothing to check either
        model.__dict__[ATTRIBUTE] = prepared
        undo.append(let_copy(before))
        return model, facade
    checking = None
    try:
        if check == "bitwise":
            checking = Check(
                model,
                partial(_plain_optimizer, optimizer, facade, names),
                partial(parameter_values, model),
            )
        backend = Backend(device, delay=lane_delay, limit_s=wait_limit_s)
        ranks = None
        if plan.num_devices > 1:
            ranks = _meet(model, plan, process_group, device, wait_limit_s)
            prepared.ranks = ranks
            undo.append(ranks.close)
        _attach(model, modules, prepared, optimizer, directory, backend, ranks)
    except BaseException:
        undo_all(undo)
        raise
    warn_of_slow_disk(plan, directory)
    model.__dict__[ATTRIBUTE] = prepared
    undo.append(let_copy(before))
    if checking is not None:
        checking.start(facade)
        undo.append(checking.stop)
    elif plan.prediction.peak_bytes.device and (not backend.on_host if watch is None else watch):
        assert prepared.engine is not None
        undo.append(Watch(model, plan, prepared.engine, facade).stop)
    return model, facade


def _meet(
    model: nn.Module, plan: Plan, group: ProcessGroup | None, device: torch.device, limit_s: float
) -> Ranks:
    """Find the other ranks, and start from the parameters and buffers of rank 0."""
    facts = {
        "plan": fingerprint(plan),
        "model": model_fingerprint(model),
        "limit of waits": f"{limit_s:g} s",
    }
    ranks = Ranks(
        group, num_replicas=plan.num_replicas, device=device, facts=facts, limit_s=limit_s
    )
    try:
        ranks.broadcast([*model.parameters(), *model.buffers()])
    except BaseException:
        ranks.close()
        raise
    return ranks


def _plain_optimizer(
    factory: OptimizerFactory,
    planned: PlannedOptimizer,
    names: Mapping[nn.Parameter, str],
    plain: nn.Module,
) -> torch.optim.Optimizer:
    """The optimizer of a plain copy of the model, in the same groups."""
    own = dict(plain.named_parameters())
    return factory(
        [
            {**group, "params": [own[names[parameter]] for parameter in group["params"]]}
            for group in planned.param_groups
        ]
    )


def _attach(
    model: nn.Module,
    modules: Sequence[nn.Module | None],
    prepared: Prepared,
    factory: OptimizerFactory,
    directory: Path,
    backend: Backend,
    ranks: Ranks | None,
) -> None:
    plan, undo = prepared.plan, prepared.undo
    if not backend.on_host:
        undo.append(quick_turns())
    settings = Settings(
        device=backend.device.type,
        piece_bytes=plan.piece_bytes,
        updates=plan.updates,
        micro_batches=plan.micro_batches,
        num_devices=plan.num_devices,
        num_replicas=plan.num_replicas,
    )
    alignment = devices.alignment(backend.device)
    chunks = make_chunks(model, plan.units, ranks, alignment=alignment)
    check_pieces(plan, chunks, factory)
    check_groups(plan, chunks, prepared.optimizer)
    stores = Stores(backend, directory)
    undo.append(stores.close)
    dtypes = {part.dtype for chunk in chunks for part in chunk.slices if part.trainable}
    states = {dtype: states_of(factory, dtype, prepared.optimizer) for dtype in dtypes}
    for chunk, unit in zip(chunks, plan.units, strict=True):
        if isinstance(unit.states, Persistent) or not chunk.slices:
            continue
        undo.append(lambda chunk=chunk: bring_back(chunk))  # type: ignore[misc]
        store = stores.get(unit.states.tier)
        if chunk.sharding is None:
            offload(chunk, store, states)
        else:
            offload_shard(chunk, store, states)
        home = gradient_home(unit.states, settings)
        if home in ("host", "disk"):
            own = chunk.own
            own.gradient_store = stores.get(home)
            own.gradient_offset = own.gradient_store.reserve(own.gradient_bytes)
        chunk.unbind(chunk.every_group)
    swap_stores = {
        unit.activations.tier: stores.get(unit.activations.tier)
        for unit in plan.units
        if isinstance(unit.activations, Swap | SwapInput)
    }
    per_parameter = {
        dtype: sum(state.itemsize for state in layout.values()) for dtype, layout in states.items()
    }
    sizes = [chunk.size(per_parameter) for chunk in chunks]
    program = compile_plan(plan.units, sizes, settings)
    accumulating = compile_plan(plan.units, sizes, settings, updating=False)
    team = UpdateTeam(spare_threads(backend.device))
    undo.append(team.close)
    moves = Moves(
        program,
        plan.units,
        chunks,
        backend=backend,
        swap_stores=swap_stores,
        factory=factory,
        options=prepared.optimizer.options,
        ranks=ranks,
        team=team,
    )
    # Addresses that stay what they are. Those of offloaded parameters do not: what stands in for
    # them is freed by the first gather, and an activation may come to lie there; nor those of
    # buffers, which a forward may replace: that modules hold them keeps them where they are.
    staying = [part.parameter for chunk in chunks if chunk.store is None for part in chunk.slices]
    shared = addresses(staying)
    engine = Engine(
        program,
        accumulating,
        plan.units,
        chunks,
        moves,
        backend=backend,
        shared=shared,
        ranks=ranks,
        shared_buffers=tuple(model.buffers()) if ranks is not None else (),
    )
    # A model that is dropped without `restore` frees its threads and files all the same.
    last_resort = weakref.finalize(model, _shut, tuple(engine.lanes.values()), stores, ranks)
    undo.append(last_resort.detach)
    undo.append(engine.close)
    for unit, module in zip(plan.units, modules, strict=True):
        if isinstance(unit.activations, Recompute | SwapInput):
            assert module is not None, "only blocks are recomputed"
            undo.append(wrap_forward(module, unit.activations.form))
    boundaries = Boundaries(model, modules, engine, names=[unit.name for unit in plan.units])
    engine.boundaries = weakref.ref(boundaries)
    prepared.unchanged = UnchangedModel(model, chunks)
    engine.unchanged = weakref.ref(prepared.unchanged)
    undo.append(refuse_conversions(model))
    undo.append(refuse_wrapping(model))
    undo.append(boundaries.remove)
    undo.append(refuse_larger_batches(model, plan.workload))
    add_state_dict_hooks(model, chunks, engine, undo)
    prepared.engine, prepared.chunks = engine, chunks
    prepared.below = lambda: (stores.host_bytes + moves.host_bytes, stores.disk_bytes)
    prepared.optimizer.attach(chunks, engine)


def _shut(lanes: Sequence[WorkLane], stores: Stores, ranks: Ranks | None) -> None:
    for lane in lanes:
        lane.close()
    stores.close()
    if ranks is not None:
        ranks.close()


def wrap_forward(module: nn.Module, form: RecomputedForm) -> Callable[[], None]:
    """Recompute the module's forward in backward, but for what `form` keeps; returns the undo."""
    return replace_code(module, recomputed(code_of(module), form, module=module))
