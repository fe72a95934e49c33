"""`protrain plan`: the fastest plan for a profile."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from protrain_plan.commands.option_records import (
    BudgetOptions,
    FileOptions,
    StepOptions,
    WorkloadOptions,
    filled,
    flag,
    given,
    option,
    option_record,
)
from protrain_plan.commands.options import (
    SEQ_LEN,
    AllowOption,
    JsonOption,
    NoCacheOption,
    PointsOption,
    choice,
    machine_names,
    model_names,
    on_command_line,
    opt_ins_named,
    refuse,
    refuse_batches,
    refuse_of_factory,
    size,
)
from protrain_plan.commands.output import (
    destination,
    interruptible,
    print_beside,
    print_result,
    progress,
)
from protrain_plan.commands.staging import (
    SIZES,
    StageOptions,
    about_stages,
    plan_in_stages,
    refuse_without_global_batch,
)
from protrain_plan.presentation.terminal import fields_of
from protrain_runtime.contract.errors import ProtrainError

if TYPE_CHECKING:
    from protrain_plan.commands.cells import Cells, Row
    from protrain_plan.commands.staging import Staged
    from protrain_plan.models.trainer_files import TrainerFile
    from protrain_plan.planning.model.options import Pin
    from protrain_plan.planning.questions.answer_cache import AnswerCache
    from protrain_plan.planning.questions.answers import Answer, Objective, Quantity, Question
    from protrain_plan.planning.questions.cells import Tried
    from protrain_runtime.contract.records.hardware import Hardware
    from protrain_runtime.contract.records.plan import DeviceGroup, StepSettings
    from protrain_runtime.contract.records.profile import Profile

QUANTITIES: "tuple[Quantity, ...]" = ("batch-size", "seq-len")


@option_record
class PinOptions:
    """Options for fixed decisions and explanations."""

    pin: list[str] | None = option("Fix decisions: 'layers.0-3: recompute'. Repeat for several.")
    pins: Path | None = option("A YAML file of such decisions.")
    exact_updates: bool = flag(
        "With an accelerator, update nothing on the host, whose kernels round last bits"
        " differently: states stay on the device, or stream to it for the update."
    )

    explain: bool = flag("Explain the decisions.")

    def read(self) -> "tuple[Pin, ...]":
        """The pins of the file, then the others; ProtrainError if one cannot be read."""
        from protrain_plan.planning.model.options import EXACT_UPDATES, parse_pin, read_pins

        of_file = read_pins(self.pins) if self.pins else ()
        return (*of_file, *map(parse_pin, self.pin or ()), *[EXACT_UPDATES] * self.exact_updates)


@option_record
class ObjectiveOptions:
    """Objectives; by default, the fastest step."""

    max_slowdown: float | None = option(
        "Minimize device memory, with a step at most this many times the fastest.", min=1.0
    )
    maximize: str | None = option("Find the largest batch-size or seq-len that fits.")
    pareto: bool = flag("Find the Pareto front of memory and time; writes no plan.")
    points: PointsOption = 8

    def objective(self, global_batch: int | None) -> "Objective":
        """ProtrainError for two objectives."""
        from protrain_plan.planning.questions.answers import Objective

        asked = {
            "--max-slowdown": self.max_slowdown is not None,
            "--maximize": self.maximize is not None,
            "--pareto": self.pareto,
            "--global-batch": global_batch is not None and self.maximize is not None,
        }
        options = [option for option, is_asked in asked.items() if is_asked]
        if len(options) > 1:
            raise ProtrainError(f"{options[0]} and {options[1]} are different objectives")
        if self.maximize is not None:
            choice("--maximize", self.maximize, QUANTITIES)
        points = self.points if self.pareto else None
        return Objective(max_slowdown=self.max_slowdown, pareto_points=points)

    def largest(
        self,
        question: "Question",
        path: str,
        estimated: "Callable[[Quantity, int], Question] | None",
    ) -> "Question":
        """The question about the largest size that fits, `estimated` at that size.

        Each estimated size predicts the largest one in proportion; the next estimate is of that
        size, until the prediction was estimated already. A profile in a file, or a factory, has one
        size: raises ProtrainError for another one, with the command that profiles it.
        """
        from protrain_plan.checking.rules import profile_command
        from protrain_plan.planning.questions.growth import largest_of, size_of, sized

        if self.maximize is None:
            return question
        quantity = choice("--maximize", self.maximize, QUANTITIES)
        record = question.profile
        known = {size_of(record.workload, quantity): question}
        while (size := largest_of(question, quantity)) is not None and size not in known:
            if estimated is None:
                asked = replace(record, workload=sized(record.workload, quantity, size))
                own = "" if record.workload.model_config else "set its batches to that size, then: "
                fix = f"profile it, and plan that: {own}{profile_command(asked, path)}"
                problem = f"the largest {quantity} that fits is about {size}, if bytes grow in"
                problem += " proportion; a plan for it takes a profile of that size"
                raise ProtrainError(problem, key="--maximize", fix=fix)
            question = known[size] = estimated(quantity, size)
        here = size_of(question.profile.workload, quantity)
        return known[here if size is None else min(size, here)]


@option_record
class PlannedStepOptions(StepOptions):
    """Options of a step, with those that only a plan decides."""

    page_cache: str | None = option(
        "Memory for the page cache, on top of the budgets: states on disk then use the cache, and"
        " take at most this much. Default: 0, direct I/O."
    )

    def on(self, settings: "StepSettings", group: "DeviceGroup") -> "StepSettings":
        """The step on these devices."""
        return replace(
            settings,
            group=group,
            page_cache_bytes=size("--page-cache", self.page_cache, 0) // group.in_node,
        )


@option_record
class GroupOptions:
    """The devices that train one model."""

    num_devices: int = option(
        "Devices that train one model, each with its own batches.", default=1, min=1
    )
    nodes: int | None = option("Nodes of these devices. Default: as few as possible.", min=1)
    replicas: int | None = option(
        "Groups of devices that each hold all of the states, sharded within the group. Default:"
        " the fastest number.",
        min=1,
    )

    def on(self, machine: "Hardware") -> "DeviceGroup":
        """The group on a machine; ProtrainError if the machine does not have it."""
        from protrain_plan.simulation.group import group_on

        replicas = self.replicas or 1
        return group_on(machine, self.num_devices, num_nodes=self.nodes, num_replicas=replicas)


@option_record
class SearchOptions:
    """Options of the search for a plan."""

    solver: str = option(
        "milp, or a baseline: four-parameter, recompute-all, offload-all.", default="milp"
    )
    gap: float = option("Stop at a plan this close to the bound.", default=0.005, min=0.0)
    time_limit: float | None = option("Maximum seconds of search. Default: none.", min=0.1)
    seed: int = option("Seed of the local search.", default=0)
    lp: Path | None = option("Write the integer program in the readable .lp format.")

    def ask(
        self,
        question: "Question",
        objective: "Objective",
        lp: Path | None,
        cache: "AnswerCache",
        *,
        as_json: bool,
        lists_front: bool,
    ) -> "Answer":
        """The answer, found with a progress bar; Ctrl-C ends the search with the best so far.

        With `lists_front`, points of a front are printed as soon as they are found.
        """
        if lp is not None:
            from protrain_plan.planning.model.fluid import Fluid

            Fluid(question.problem()).write_lp(lp)

        with interruptible() as interrupted, progress(quiet=as_json) as report:
            # From here on Ctrl-C ends the search, and not these imports.
            from protrain_plan.commands.answering import ask
            from protrain_plan.planning.search.improving import SOLVERS, Effort
            from protrain_plan.presentation.plans import point_text, search_text

            effort = Effort(
                gap_target=self.gap,
                time_limit_s=self.time_limit,
                seed=self.seed,
                stopped=interrupted.is_set,
                solver=choice("--solver", self.solver, SOLVERS),
                progress=lambda *found: report(search_text(*found), 0.5),
            )
            listed = (lambda point: print_beside(point_text(point))) if lists_front else None
            return ask(question, objective, cache, effort=effort, report=listed)


@option_record
class ModelOptions:
    """Options for a model that is planned by name: its profile is estimated for a machine."""

    on: str | None = option(
        "Estimate the profile for this machine: a catalogue name or a YAML file.",
        autocompletion=machine_names,
    )
    seq_len: int | None = option("Tokens per sequence. Default: 2048.", min=1)
    batch_size: int | None = option("Sequences per batch. Default: 1.", min=1)
    global_batch: int | None = option(
        "Sequences per update over all devices: finds the best micro-batches.", min=1
    )
    no_cache: NoCacheOption = False

    def cells(
        self,
        row: "Row",
        machine: "Hardware",
        group: "DeviceGroup",
        budgets: BudgetOptions,
        staged: StageOptions,
    ) -> "Cells":
        """The cell of the model on a group of the machine's devices."""
        from protrain_plan.commands.cells import Cells
        from protrain_plan.hardware.offers import MachineOffer
        from protrain_plan.profiling.estimate_cache import EstimateCache

        one = MachineOffer(listed=machine, machine=machine, group=group, price_per_hour=0.0)
        return Cells(
            rows=[row],
            offers=[one],
            budgets=budgets,
            global_batch=self.global_batch,
            stages=staged.numbers(),
            sizes=(self.batch_size,) if self.batch_size else SIZES,
            cache=EstimateCache(off=self.no_cache),
        )

    def refuse(self, workload: WorkloadOptions, of_file: FileOptions, *, staged: bool) -> None:
        """ProtrainError for options that a profile sets; a pipeline's batch is not in it."""
        ours = ("--on", "--no-cache", *["--global-batch"] * staged)
        kept = [option for option in given(self) if option not in ours]
        kept += ["--model"] * bool(of_file.named) + ["--beside"] * bool(of_file.beside)
        fix = "plan a model by its name with --on"
        refuse((*kept, *given(workload)), "the profile already sets it", fix)


ProfileArgument = Annotated[
    str,
    typer.Argument(
        help="A profile; with --on, a model or a trainer's file, as in fit.",
        show_default=False,
        autocompletion=model_names,
    ),
]


def plan(
    context: typer.Context,
    profile: ProfileArgument,
    *,
    budgets: BudgetOptions,
    output: Path = option(
        "The plan to write; - is standard output. With --on also a folder, for profile.yaml and"
        " plan.yaml.",
        "-o",
        "--output",
        default=Path("plan.yaml"),
    ),
    fixed: PinOptions,
    wanted: ObjectiveOptions,
    devices: GroupOptions,
    step: PlannedStepOptions,
    allow: AllowOption = None,
    search: SearchOptions,
    staged: StageOptions,
    model: ModelOptions,
    of_file: FileOptions,
    workload: WorkloadOptions,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest training step within the budgets, and write it as a plan.

    A budget that is not given is all of the memory or disk that the profile saw; of an estimated
    device some stays free (--tight). Ctrl-C ends the search with the best plan so far.

    Examples: protrain plan profile.yaml --device-memory 1.5GiB --disk 20GiB -o plan.yaml
    | protrain plan llama-3.2-1b --on rtx-4090 --global-batch 32 -o plans/mine
    | protrain plan llama-3.2-1b --on rtx-4090 --maximize batch-size
    | protrain plan profile.yaml --pin 'layers.0-3: recompute' --explain
    """
    from protrain_plan.commands.cells import Row
    from protrain_plan.models.presets import is_factory
    from protrain_plan.planning.questions.answer_cache import AnswerCache
    from protrain_runtime.contract.records import write_plan, write_profile

    beside, file, named, frozen = None, None, profile, ""
    if model.on is None:
        model.refuse(workload, of_file, staged=staged.stages is not None)
    else:
        output, beside = _places(output)
        if (file := of_file.read(context, profile)) is not None:
            options = file.options
            named, model = options["model"], filled(model, options)
            devices, workload = filled(devices, options), filled(workload, options)
            step = filled(step, options)
        refuse_of_factory(context, named)
        frozen = of_file.frozen(named, file)
    read = (profile, model.on, fixed.pins, beside)
    target = output if wanted.pareto else destination(output, inputs=read)  # a front is printed
    lp = search.lp and destination(search.lp, option="--lp", inputs=(*read, output))
    if beside is not None:
        destination(beside, inputs=read[:-1])
    objective, settings = wanted.objective(model.global_batch), step.settings()
    allowed = opt_ins_named(allow)
    if staged.stages is not None:
        others = (*given(fixed), *given(wanted), *given(search), *["--beside"] * bool(frozen))
        _refuse_in_stages(others, devices, model.global_batch, settings)
    elif model.on is not None:
        refuse_batches(model.global_batch, model.batch_size, settings.micro_batches)
    record = None if model.on else _read(profile, () if staged.stages else allowed)
    machine = record.hardware if record else budgets.machine(str(model.on))
    budgets.refuse_host_memory([machine])
    group = devices.on(machine)
    settings, cells = step.on(settings, group), None
    if model.on is not None:
        sizes = [model.seq_len or SEQ_LEN], [model.batch_size or 1]
        [request] = workload.requests(named, *sizes, allow=allow, beside=frozen)
        cells = model.cells(Row(request=request, step=settings), machine, group, budgets, staged)
    subject = _Subject(
        record=record,
        cells=cells,
        budgets=budgets,
        settings=settings,
        allowed=allowed,
        replicas=group.replica_counts if devices.replicas is None else (),
        pins=fixed.read(),
        quiet=as_json,
    )
    if (numbers := staged.numbers()) is not None:
        of_stages = subject.in_stages(model.global_batch or 1, numbers)
        plan_in_stages(of_stages, fixed.explain, target, beside, as_json=as_json)
        return
    estimated = None if cells is None or is_factory(named) else subject.question
    question = wanted.largest(subject.question(), str(beside or profile), estimated)
    cache, listed = AnswerCache(off=model.no_cache), not as_json
    answer = search.ask(question, objective, lp, cache, as_json=as_json, lists_front=listed)
    if answer.solved is not None and not wanted.pareto:
        if "output" not in on_command_line(context) and target.is_file():
            print_beside(f"replaced the previous {target}; -o names another file")
        if beside is not None:
            write_profile(question.profile, beside)
        write_plan(answer.solved.plan, target)
    written = tuple(filter(None, (beside, output)))
    is_default = not given(wanted) and search.time_limit is None
    best = _best_change(answer, cache, quiet=as_json) if is_default else None
    _show(answer, best, written, file, wanted, fixed, as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """A profile in a file, or cells that estimate one, with the settings of every size."""

    record: "Profile | None"
    cells: "Cells | None"
    budgets: BudgetOptions
    settings: "StepSettings"
    allowed: tuple[str, ...]
    replicas: tuple[int, ...]
    pins: "tuple[Pin, ...]"
    quiet: bool

    def question(self, *size: Any) -> "Question":
        """The question about it, estimated for another `size` if given."""
        from protrain_plan.planning.questions.answers import Question

        if self.cells is not None:
            with progress(quiet=self.quiet) as report:
                [[cell]] = (self.cells.sized(*size) if size else self.cells).lines(report)
            return replace(cell.question, replicas=self.replicas, pins=self.pins)
        assert self.record is not None
        return Question(
            profile=self.record,
            settings=self.settings,
            budgets=self.budgets.of(self.record, self.settings.group),
            allow=self.allowed,
            replicas=self.replicas,
            pins=self.pins,
        )

    def in_stages(self, global_batch: int, numbers: tuple[int, ...]) -> "Staged":
        """The question about stages."""
        if self.cells is None:
            assert self.record is not None
            of_batch = {self.record.workload.batch_size: self.record}
            asked = (self.budgets, self.settings, global_batch, numbers, self.allowed)
            return about_stages(of_batch, *asked, None)
        with progress(quiet=self.quiet) as report:
            [found] = self.cells.staged(report)
        return found


def _refuse_in_stages(
    others: Iterable[str],
    devices: GroupOptions,
    global_batch: int | None,
    settings: "StepSettings",
) -> None:
    """ProtrainError for options that do not apply to stages."""
    unused = (option for option in others if option != "--explain")
    refuse(unused, "stages are planned without it", "leave it out, or --stages")
    refuse_without_global_batch(global_batch, None, settings.micro_batches)
    replicas = ["--replicas"] * (devices.replicas is not None)
    refuse(replicas, "replicas are chosen for each stage", "leave it out")


def _best_change(answer: "Answer", cache: "AnswerCache", *, quiet: bool) -> "Tried | None":
    """The change that gains most; None after Ctrl-C, since the plan is written by now."""
    from protrain_plan.commands.cells import best_change

    with suppress(KeyboardInterrupt), progress(quiet=quiet) as report:
        return best_change(answer, cache, report)
    return None


def _show(
    answer: "Answer",
    best: "Tried | None",
    written: tuple[Path, ...],
    file: "TrainerFile | None",
    wanted: ObjectiveOptions,
    fixed: PinOptions,
    *,
    as_json: bool,
) -> None:
    """Print the answer and the changes of a trainer's file; exits with 3 if no plan fits."""
    from protrain_plan.planning.explain.explaining import explain
    from protrain_plan.presentation.grids import change_json
    from protrain_plan.presentation.plans import answer_json, answer_text
    from protrain_plan.presentation.trainer_files import advice, file_json, file_text

    explanation, solved = None, answer.solved
    if fixed.explain and solved is not None:
        explanation = explain(answer.of_rank, solved.plan, solved.search)
    data = answer_json(answer, explanation)
    data |= {"best_change": change_json(best, answer)} if best else {}
    text = answer_text(answer, explanation, *written, best=best)
    profile = answer.question.profile
    if wanted.maximize is not None and solved is not None:
        size = profile.workload
        data |= fields_of(size, "batch_size", "seq_len")
        found = f"{size.batch_size} sequences of {size.seq_len} tokens"
        text = Group(f"the largest that fits: {found}", "", text)
    if file is not None:
        name, plain_fits = profile.hardware.name, answer.kept_seconds is not None
        advised = [advice(file, name, answer, plain_fits=plain_fits)]
        data |= file_json(file, advised)
        text = Group(text, *file_text(file, advised))
    print_result(as_json, data, lambda: text)
    if answer.infeasible is not None:
        raise typer.Exit(3)


def _read(path: str, allowed: tuple[str, ...]) -> "Profile":
    """The profile in a file; ProtrainError for a model, and for --allow without these forms."""
    from protrain_plan.models.presets import names_model
    from protrain_runtime.contract.records import read_profile

    if names_model(path):
        fix = f"name one (protrain hardware list): protrain plan {path} --on rtx-4090"
        raise ProtrainError("a model is planned for a machine", source=path, key="--on", fix=fix)
    record = read_profile(Path(path))
    if missing := [word for word in allowed if word not in record.allowed]:
        from protrain_plan.checking.rules import profile_command

        problem = f"the profile was recorded without --allow {missing[0]}, and lacks these forms"
        fix = profile_command(replace(record, allowed=(*record.allowed, *missing)), path)
        raise ProtrainError(problem, source=path, key="--allow", fix=fix)
    return record


def _places(output: Path) -> tuple[Path, Path]:
    """Return the files of a plan and its profile, in the folder that -o names or has."""
    if str(output) == "-":
        raise ProtrainError("a plan and its profile need two files", key="-o", fix="name a folder")
    if output.suffix in (".yaml", ".yml"):
        return output, output.with_name("profile.yaml")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProtrainError(f"cannot be made: {error.strerror}", source=str(output)) from None
    return output / "plan.yaml", output / "profile.yaml"
