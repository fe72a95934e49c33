"""Profiles for commands: measured in a separate process, or estimated.

The process is fresh, not forked: memory that a parent's threads leave behind would be counted as
memory besides tensors. It has the libraries of the command line, as a run has. Before each slot
runs, it sends its place, which is known if it dies.
"""

import importlib
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from protrain_plan.commands.output import prepare_streams
from protrain_plan.garbage import SELDOM, collected
from protrain_plan.isolated.ending import INTERRUPTED, quiet_libraries
from protrain_plan.isolated.pool import answers_of, processes_at_once
from protrain_plan.isolated.process import EndedError, Tell, run
from protrain_plan.isolated.user_frame import explained
from protrain_plan.models.presets import read_config
from protrain_plan.profiling.beside import with_beside
from protrain_plan.profiling.estimate_cache import EstimateCache, EstimateRequest
from protrain_plan.profiling.shipped import shipped
from protrain_plan.profiling.structure import whereabouts
from protrain_plan.profiling.structure.whereabouts import Place
from protrain_runtime.contract.errors import OutOfMemoryError
from protrain_runtime.contract.records import dumps_profile, loads_profile
from protrain_runtime.contract.records.hardware import Hardware, is_accelerator
from protrain_runtime.contract.records.profile import Precision, Profile, Workload

if TYPE_CHECKING:
    from protrain_plan.profiling.tally import Tally
    from protrain_plan.profiling.unit_by_unit import Options

Progress = Callable[[str, float], None]

SMALLER = "a smaller --batch-size or --seq-len; the model alone: --unit-by-unit"
"""Advice where memory runs out."""

_OF_A_RUN = (
    "protrain_plan.cli",
    "protrain_plan.checking.plan_files",
    "protrain_plan.commands.training",
    "protrain_plan.presentation.plans",
    "protrain_runtime.contract.program.memory",
)
"""Imports of `protrain run`, whose memory besides tensors the process then has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Options of a profile, as they were given to a command."""

    workload: Workload  # without a configuration, on any device
    optimizer: str
    optimizer_args: str | None = None
    allow: tuple[str, ...] = ()
    beside: str = ""  # a frozen model that runs a forward in each step
    text: Path | None = None
    device: str | None = None
    steps: int | None = None
    unit_by_unit: bool = False
    spill_directory: Path | None = None
    disk_watch: tuple[float, int] | None = None  # seconds and bytes; see `probe.Watch`
    probe: bool = False  # anew, if one is kept
    no_cache: bool = False

    def sized(self, batch_size: int) -> "ProfileRequest":
        """Return the request for batches of so many sequences."""
        return replace(self, workload=replace(self.workload, batch_size=batch_size))

    def of_beside(self) -> "ProfileRequest | None":
        """Return the request for the frozen second model: same batches and dtype, no states."""
        if not self.beside:
            return None
        precision: Precision = "autocast" if self.workload.precision == "autocast" else "pure"
        frozen = replace(self.workload, model=self.beside, precision=precision)
        frozen = replace(frozen, adapter="", quantize="", compile="")
        return replace(self, workload=frozen, optimizer="sgd", optimizer_args=None, beside="")

    def question(self) -> EstimateRequest | None:
        """Return the cache's question; None if it has none, or if the code is the user's own.

        Raises ProtrainError for a file without a configuration.
        """
        if self.text is not None or self.optimizer_args:
            return None
        config = read_config(self.workload.model)
        return EstimateRequest.of(self.workload, self.optimizer, config, self.allow)

    def options(self, progress: Progress) -> "Options":
        """Return the arguments of measuring and estimating; ProtrainError for an unknown one."""
        from protrain_plan.models.optimizers import optimizer_factory, optimizer_named

        named = optimizer_named(self.optimizer, self.optimizer_args)
        optimizer_factory(named)  # refuse a wrong name at once
        return {"optimizer": named, "allow": self.allow, "text": self.text, "progress": progress}


# Torch loads in functions, so that --help and planning do not wait for it.


def estimated(
    requests: Sequence[ProfileRequest],
    machines: Sequence[Hardware],
    progress: Progress,
    cache: EstimateCache,
    *,
    jobs: int | None = None,
) -> list[list[Profile]]:
    """The requested profiles, estimated for each machine.

    Profiles that are not in the cache are estimated in this process, which saves the seconds of a
    start, or by several processes (at most `jobs`) if there are several and the code is not the
    user's own. Raises ProtrainError if a part of a request is unavailable, or if the model's code
    reads values of tensors.
    """
    frozen = {request: other for request in requests if (other := request.of_beside())}
    questions = {request: request.question() for request in (*requests, *frozen.values())}
    found: dict[tuple[ProfileRequest, Hardware], Profile] = {}
    for request, question in questions.items():
        known = None if question is None else cache.tally(question) or shipped(question)
        for machine in machines:
            if known and machine.device.kind == known.profile.workload.device:
                found[request, machine] = known.on(machine)
    missing = {r: [m for m in machines if (r, m) not in found] for r in questions}
    missing = {request: lacking for request, lacking in missing.items() if lacking}
    jobs = processes_at_once(len(missing), jobs) if all(questions.values()) else 1
    estimate = partial(_estimated, progress=progress if jobs == 1 else None)
    with answers_of(estimate, list(missing.items()), jobs=jobs) as made:
        for number, (request, tallies) in enumerate(zip(missing, made, strict=True), 1):
            question = questions[request]
            for tally in {id(tally): tally for tally in tallies}.values():
                if question is not None:
                    cache.keep_tally(question, tally)
            for machine, tally in zip(missing[request], tallies, strict=True):
                found[request, machine] = tally.on(machine)
            progress("estimating", number / len(missing))

    made_of = {request: [found[request, machine] for machine in machines] for request in questions}
    for request, other in frozen.items():
        made_of[request] = list(map(with_beside, made_of[request], made_of[other]))
    return [made_of[request] for request in requests]


def _estimated(
    asked: tuple[ProfileRequest, Sequence[Hardware]], progress: Progress | None
) -> "list[Tally]":
    request, machines = asked
    with collected(SELDOM):
        from protrain_plan.models.sources import load_source
        from protrain_plan.profiling.estimated import tallies

        options = request.options(progress or (lambda *_: None))
        source = load_source(request.workload.model)
        with explained(lambda: ""):
            return tallies(source, request.workload, machines=machines, **options)


def measured(request: ProfileRequest, progress: Progress) -> Profile:
    """The requested profile, measured in this process.

    Raises ProtrainError if a part of the request is unavailable, memory runs out, or the model's
    code raises.
    """
    from protrain_plan.commands.options import found_device
    from protrain_plan.hardware.kept_probes import ProbeCache
    from protrain_plan.hardware.probe import BRIEF, Watch
    from protrain_plan.models.building import kernels
    from protrain_plan.models.sources import load_source
    from protrain_plan.profiling.measured import measure
    from protrain_runtime.devices import device as devices
    from protrain_runtime.devices.memory_meter import return_freed_memory

    def report(what: str, fraction: float) -> None:
        whereabouts.begin(what)
        progress(what, fraction)

    for name in _OF_A_RUN:
        importlib.import_module(name)
    where = found_device(request.device or "cpu")
    options = request.options(report)
    directory = request.spill_directory or Path(tempfile.gettempdir())
    watch = BRIEF if request.disk_watch is None else Watch(*request.disk_watch)
    probes = ProbeCache(where, directory, request.workload.dtype, watch, off=request.no_cache)
    machine = None if request.probe else probes.machine()
    with explained(whereabouts.place, planned=lambda: whereabouts.place().planned):
        source = load_source(request.workload.model)
        if not is_accelerator(where.type):
            return_freed_memory()
        with (
            devices.current(where),
            kernels(deterministic=request.workload.deterministic),
            devices.explained_exhaustion(fix=SMALLER),
        ):
            found = measure(
                source,
                request.workload,
                device=where,
                num_steps=request.steps,
                spill_directory=directory,
                unit_by_unit=request.unit_by_unit,
                machine=machine,
                disk_watch=watch,
                **options,
            )
    if machine is None:
        probes.keep(found.hardware)
    return found


def measured_apart(request: ProfileRequest, progress: Progress) -> Profile:
    """The requested profile, measured in a separate process.

    Raises the errors of `measured`, and ProtrainError if that process dies.
    """
    place = Place()

    def hear(report: list[str | float] | dict[str, str]) -> None:
        nonlocal place
        if isinstance(report, dict):
            place = Place(**report)
        else:
            what, fraction = str(report[0]), float(report[1])
            place = Place(doing=whereabouts.pass_of(what))
            progress(what, fraction)

    try:
        work = partial(_reporting, request)
        return loads_profile(run(work, name="the measuring process", hear=hear))
    except EndedError as error:
        if error.code in (INTERRUPTED, -signal.SIGINT):
            raise KeyboardInterrupt from None
        error.message += str(place)
        if error.code == -signal.SIGKILL:
            fix = f"it probably ran out of memory: {SMALLER}"
            raise OutOfMemoryError(error.message, fix=fix) from None
        fix = "see its traceback, if it printed one"
        if error.code is not None and error.code < 0:
            fix = "look for native code there: an extension, or memory used after it was freed"
        error.fix = f"{fix}; --in-process measures where a debugger can stop"
        raise


def _reporting(request: ProfileRequest, tell: Tell) -> str:
    """Measure, and report each slot before it runs, since the model's code may end the process."""
    prepare_streams()
    quiet_libraries()
    with whereabouts.listening(lambda place: tell(asdict(place))):
        return dumps_profile(measured(request, lambda *report: tell(report)))
