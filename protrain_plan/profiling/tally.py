"""`Tally`: an estimate for every machine with devices of one type.

What a model's code says is bytes and the work of operators, and takes seconds to find out. What a
machine says is rates. PyTorch is not imported here: a tally that is known needs none.
"""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from protrain_plan.cache import dumped, loaded
from protrain_plan.hardware.kernels import Work
from protrain_runtime.contract.errors import ProtrainError, RecordError
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.hardware import Device, Hardware, Rates, is_accelerator
from protrain_runtime.contract.records.profile import Form, Profile, Unit
from protrain_runtime.contract.records.reader import loads
from protrain_runtime.contract.records.writer import dumps
from protrain_runtime.contract.units import four_digits

Slots = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWork:
    """Bytes that the optimizer's step on a parameter moves.

    device_bytes  on the device
    host_bytes    in host memory, where the device copies parameter and gradient meanwhile
    host_share    parameters per second on a host, over those of fused AdamW (`optimizers`)
    """

    device_bytes: float
    host_bytes: float
    host_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """An estimate on some machine, and the work of operators that its seconds come from.

    work   equal work once
    steps  of each form's step, places in `work`, in order  # [form][slot][operator]
    ran    for each unit the one that ran: itself, or another of its class
    """

    profile: Profile
    work: tuple[Work, ...]
    steps: tuple[tuple[Form, Slots], ...]
    ran: tuple[int, ...]
    update: UpdateWork

    @staticmethod
    def of(
        profile: Profile,
        logs: Mapping[Form, Sequence[Sequence[Work]]],
        ran: tuple[int, ...],
        update: UpdateWork,
    ) -> "Tally":
        """The tally of a profile whose seconds are not known yet.  # of logs: [form][slot]"""
        places: dict[Work, int] = {}
        steps = tuple(
            (form, tuple(tuple(places.setdefault(w, len(places)) for w in s) for s in slots))
            for form, slots in logs.items()
        )
        tally = Tally(profile=profile, work=tuple(places), steps=steps, ran=ran, update=update)
        return replace(tally, profile=tally.on(profile.hardware))

    def on(self, machine: Hardware) -> Profile:
        """The estimate for a machine with such a device; ProtrainError where it has no rates."""
        rates, before = rates_of(machine), self.profile
        taken = [work.seconds(rates) for work in self.work]
        seconds = {
            form: [[sum(taken[place] for place in slot) for slot in slots]]
            for form, slots in self.steps
        }
        launching = {}
        if is_accelerator(machine.device.kind):
            counts = [work.is_launched(rates) for work in self.work]
            launching = {
                form: [[rates.operator_s * sum(counts[place] for place in slot) for slot in slots]]
                for form, slots in self.steps
            }
        units = timed(before.units, seconds, launching, [(unit,) for unit in self.ran])
        # A step moves bytes and computes next to nothing; in host memory threads bind it too.
        host, of_node = rates.host_parameters_per_s * self.update.host_share, 0.0
        if rates.host_bandwidth_bytes_per_s:
            of_node = rates.host_bandwidth_bytes_per_s / self.update.host_bytes
            host = min(host, of_node)
        on_device = rates.memory_bytes_per_s * rates.memory_efficiency / self.update.device_bytes
        libraries = library_bytes(machine.device) - library_bytes(before.hardware.device)
        return replace(
            before,
            hardware=machine,
            units=tuple(units),
            optimizer=replace(
                before.optimizer,
                host_parameters_per_s=four_digits(host),
                node_parameters_per_s=four_digits(of_node),
                device_parameters_per_s=four_digits(on_device),
                host_piece_s=rates.host_piece_s,
            ),
            fixed_bytes=before.fixed_bytes + libraries,
        )


def rates_of(machine: Hardware) -> Rates:
    """The machine's rates; ProtrainError where they are not known."""
    if machine.rates is None:
        raise ProtrainError(
            "the machine's compute rates are unknown, so that no seconds can be estimated",
            source=machine.name,
            key="rates",
            fix="name a machine of the catalogue, or write rates into the hardware file",
        )
    return machine.rates


_HANDLES = 2
"""Handles of the matrix library: each thread has one, the one of forward and that of autograd."""

_LIBRARY_BYTES = 32 * 2**20
"""Bytes of a handle on a stream: 32 MiB from Hopper on, 8 MiB before; cuBLASLt shares it
(aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize and
unified_cublas_and_lt_workspaces; CUBLAS_WORKSPACE_CONFIG changes it)."""

_AMD_LIBRARY_BYTES = (128 + 76) * 2**20
"""hipBLAS's and hipBLASLt's on MI300 (the same file)."""


def library_bytes(device: Device) -> int:
    """Bytes that matrix libraries keep in the device's allocator, at most."""
    if not is_accelerator(device.kind):
        return 0
    return _HANDLES * (_AMD_LIBRARY_BYTES if device.name.startswith("AMD") else _LIBRARY_BYTES)


def timed(
    units: Sequence[Unit],
    seconds: Mapping[Form, Sequence[Sequence[float]]],
    launching: Mapping[Form, Sequence[Sequence[float]]],
    members: Sequence[Sequence[int]],
) -> list[Unit]:
    """The units with medians of their slots' seconds, over steps and the `members` of their class.

    Of seconds of `launching` the least: the thread is held up where the device's queue is full.
    A form of the last part takes a hundredth more than `keep` at least: it does all of that, and
    more. With memory to spare a plan stays plain PyTorch, whatever noise says.
    Of seconds: [form][step][slot]
    """

    def median(form: Form, slots: Sequence[int]) -> float:
        found = statistics.median(step[slot] for step in seconds[form] for slot in slots)
        if FORMS[form].of == "last part":
            found = max(found, 1.01 * median("keep", slots))
        return four_digits(found)

    def least(form: Form, slots: Sequence[int]) -> float:
        found = (step[slot] for step in launching.get(form, ()) for slot in slots)
        return four_digits(min(filter(None, found), default=0.0))

    last = 2 * len(units) - 1
    return [
        replace(
            unit,
            forms=tuple(
                replace(
                    cost,
                    forward_s=median(cost.form, alike),
                    backward_s=median(cost.form, [last - other for other in alike]),
                    forward_launch_s=least(cost.form, alike),
                    backward_launch_s=least(cost.form, [last - other for other in alike]),
                )
                for cost in unit.forms
            ),
        )
        for unit, alike in zip(units, members, strict=True)
    ]


def dumps_tally(tally: Tally) -> str:
    """The tally as JSON, its profile as the text of a record."""
    return dumped(tally, profile=dumps(tally.profile))


def read_tally(text: str) -> Tally:
    """Read a tally whose seconds may be those of other formulas; RecordError where it is none."""
    return loaded(Tally, text, profile=partial(loads, Profile))


def loads_tally(text: str) -> Tally:
    """Read a tally whose seconds are its own; RecordError where it is none."""
    tally = read_tally(text)
    with suppress(ArithmeticError, LookupError, ProtrainError, ValueError):
        if tally.on(tally.profile.hardware) == tally.profile:
            return tally
    raise RecordError("not readable as Tally: its seconds are not those of its operators")
