"""`tallies`: profiles of a model on absent machines, from fake tensors.

Bytes come from the model's own code, run through a measured profile's functions; seconds from the
machine's rates. Differences of CUDA devices from the CPU kernels of fake tensors were read, not
tested:

- Dropout keeps a mask of one byte per element there, and one in the values' dtype here.
- Attention with a mask, or in float32, saves sums padded to 32 rows, which is not counted.
- The matrix library keeps workspaces in the allocator: counted in `fixed_bytes` (`library_bytes`).
- The allocator's segments exceed its allocations: nothing is held back for that.

Other accelerators were not read: their models must be profiled there, as on processors other than
x86, unless present.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from protrain_plan.hardware.operator_log import OperatorLog
from protrain_plan.hardware.operators import DEVICE_TYPES, allocator_of, is_this_machine
from protrain_plan.hardware.probe import Progress
from protrain_plan.models.batches import first_of, with_batch_sizes
from protrain_plan.models.building import TORCH_DTYPES, parameter_dtype, stepped_dtype
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER, host_share, optimizer_factory
from protrain_plan.models.sources import ModelSource
from protrain_plan.profiling.memory.block_classes import filled
from protrain_plan.profiling.memory.fake_meter import NUMBER_BYTES, FakeMeter
from protrain_plan.profiling.memory.lasting import added_bytes
from protrain_plan.profiling.memory.unit_bytes import without_falls
from protrain_plan.profiling.optimizer_cost import optimizer_cost, refuse_sparse, told_of_steps
from protrain_plan.profiling.tally import Tally, UpdateWork, library_bytes, rates_of
from protrain_plan.profiling.unit_by_unit import (
    Options,
    in_its_dtype,
    sketch_and_model,
    workload_of,
)
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.forms import FORMS, allowed_forms, names_of
from protrain_runtime.contract.records.hardware import DeviceKind, Hardware
from protrain_runtime.contract.records.profile import SPARSE, Profile, Workload
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import reachable
from protrain_runtime.diagnostics.matching import model_fingerprint, model_tensors
from protrain_runtime.states.update_rules import UpdateRules

_OTHER_PROCESSORS = ("aarch64", "arm64", "ppc64le", "s390x", "riscv64", "loongarch64")
"""`processor_name`s of processors other than x86."""


def tallies(
    source: ModelSource,
    workload: Workload,
    *,
    machines: Sequence[Hardware],
    **options: Unpack[Options],
) -> list[Tally]:
    """A tally per machine; machines that allocate alike share one, and one run of the model's code.

    A tally on its machine is the expected result of `measured.measure` there. ProtrainError if a
    machine has no rates, the model cannot be built, or its code reads tensors' values.
    """
    for machine in machines:
        refuse_unknown(machine)
        rates_of(machine)
    found: dict[tuple[DeviceKind, int, bool], Tally] = {}
    made: list[Tally] = []
    for machine in machines:
        allocator = allocator_of(machine.device)
        alike = (machine.device.kind, allocator.num_threads, allocator.is_here)
        if alike not in found:
            found[alike] = _tally(source, workload, machine, options)
        made.append(found[alike])
    return made


def refuse_unknown(machine: Hardware) -> None:
    """ProtrainError if no model's bytes can be estimated for a machine from here."""
    if machine.device.kind not in DEVICE_TYPES:
        raise ProtrainError(
            f"what operators take on devices of type '{machine.device.kind}' is unknown, so that"
            " no bytes can be estimated",
            source=machine.name,
            key="device.kind",
            fix=f"profile on the device itself: --device {machine.device.kind}",
        )
    device = machine.device
    if device.name in _OTHER_PROCESSORS and not is_this_machine(device):
        raise ProtrainError(
            f"what operators take on a processor of type '{device.name}' is known where it is at"
            " hand, and bounded for x86 processors alone",
            source=machine.name,
            key="device.name",
            fix="profile on the machine itself",
        )


def _tally(source: ModelSource, workload: Workload, machine: Hardware, options: Options) -> Tally:
    kind, allocator = machine.device.kind, allocator_of(machine.device)
    workload = workload_of(source, workload, kind)
    optimizer = options.get("optimizer", DEFAULT_OPTIMIZER)
    progress: Progress = options.get("progress", lambda *_: None)
    by_itself = UpdateRules(optimizer_factory(optimizer))
    stepped = TORCH_DTYPES[stepped_dtype(workload.dtype, workload.precision)]
    if by_itself.compiled(stepped):
        raise ProtrainError(
            f"the step of {optimizer} goes through torch.compile, and what it takes is known where"
            " it is compiled: on the device itself",
            source=workload.model,
            key="optimizer",
            fix="profile on the device, or --optimizer adamw8bit, whose kernels are known",
        )
    progress("reading a batch", 0.0)
    before = reachable(devices.HOST) if kind == "cpu" else None
    # Held while bytes are counted: references to a batch take memory in a run, too.
    batches = source.batches(workload, text=options.get("text"))
    given = first_of(batches, source=source.name)
    data_bytes = 0 if before is None else added_bytes(before, given)
    steps: list[OperatorLog] = []

    def meter() -> FakeMeter:
        steps.append(OperatorLog())
        return FakeMeter(allocator, steps[-1])

    # Estimates compile nothing: parts of a graph are unknown.
    allowed = tuple(
        form
        for form in allowed_forms(options.get("allow", ()), compiled=bool(workload.compile))
        if not FORMS[form].in_graph
    )
    sketch, model = sketch_and_model(
        source, workload, given, meter, forms=allowed, optimizer=optimizer, progress=progress
    )
    workload = with_batch_sizes(in_its_dtype(workload, source), model, given)
    units = sketch.units
    sparse = frozenset(unit.name for unit in units if unit.stays == SPARSE)
    in_order = ("keep", *names_of("blocks"), *names_of("last part"))
    tried = (form for form in in_order if form in allowed)
    logs = dict(zip(tried, steps, strict=False))  # mixtures follow
    if allocator.python_scalars:
        # A partial form runs under a dispatch mode, where a Python number becomes a tensor twice.
        # Adding one to the forward peak is an upper bound: not every peak is at such an operator.
        units = [
            replace(
                unit,
                forms=tuple(
                    cost
                    if cost.form in ("keep", "full")
                    else replace(cost, forward_peak_bytes=cost.forward_peak_bytes + NUMBER_BYTES)
                    for cost in unit.forms
                ),
            )
            for unit in units
        ]
    fingerprint, tensors = model_fingerprint(model), model_tensors(model)
    refuse_sparse(sparse, optimizer, workload)
    cost = optimizer_cost(model, workload, optimizer, device=None, sparse=bool(sparse))
    ran = sketch.block_classes.representatives
    # The last mark follows the slots. Earlier steps, of a stateful model, have no last mark.
    work = {form: log.slots[-2 * len(units) - 1 :] for form, log in logs.items()}
    profile = Profile(
        workload=workload,
        hardware=machine,
        method="estimated",
        model_fingerprint=fingerprint,
        optimizer=cost,
        base_bytes=sketch.base_bytes + data_bytes,
        units=told_of_steps(without_falls(filled(units, sketch.block_classes)), workload, cost),
        tensors=tensors,
        fixed_bytes=sketch.fixed_bytes + library_bytes(machine.device),
        # A unit that ran counts for all of its class.
        model_flops=sum(
            sum(one.model_flops for one in work["keep"][slot])
            for unit in ran
            for slot in (unit, 2 * len(units) - 1 - unit)
        ),
        varies=sketch.varies,
        allowed=options.get("allow", ()),
    )
    stored = parameter_dtype(workload.dtype, workload.precision)
    stepped = TORCH_DTYPES[stepped_dtype(workload.dtype, workload.precision)]
    moved = 2.0 * stepped.itemsize + stored.itemsize  # read, written; the gradient
    moved += 2 * by_itself.of(stepped).element_bytes
    if stored != stepped:
        moved += stored.itemsize  # the parameters in the compute dtype
    # In host memory the device's copies of each parameter use the same bandwidth: its gradient, and
    # itself for forward and for backward.
    in_host = moved + 3 * stored.itemsize
    update = UpdateWork(device_bytes=moved, host_bytes=in_host, host_share=host_share(optimizer))
    progress("done", 1.0)
    return Tally.of(profile, work, ran, update)
