"""`protrain fit`: whether and how a model trains on machines, before there is any profile."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protrain_plan.commands.option_records import (
    BudgetOptions,
    StepOptions,
    WorkloadOptions,
    given,
    option_record,
    with_records,
)
from protrain_plan.commands.options import (
    SEQ_LEN,
    AllowOption,
    JobsOption,
    JsonLinesOption,
    ModelArgument,
    NoCacheOption,
    choice,
    integers,
    machine_names,
    prices_of,
    refuse_batches,
    refuse_of_factory,
)
from protrain_plan.commands.staging import (
    StageOptions,
    fits_in_stages,
    refuse_without_global_batch,
)
from protrain_plan.commands.trainer_files import FileOptions, advice_of, filled
from protrain_runtime.contract.errors import ProtrainError

if TYPE_CHECKING:
    from protrain_plan.commands.cells import Cells
    from protrain_plan.commands.measuring import Progress
    from protrain_plan.commands.sweeping import Sweep
    from protrain_plan.planning.questions.answers import Fit, Question
    from protrain_plan.planning.questions.shopping import Tried
    from protrain_plan.presentation.trainer_files import Advice
    from protrain_runtime.contract.records.hardware import Hardware


@option_record
class CellOptions:
    """The cells of the table: sizes and numbers of devices, each with each machine."""

    on: Annotated[
        str,
        typer.Option(
            "--on",
            help="Machines: names of the catalogue or YAML files, by comma.",
            autocompletion=machine_names,
        ),
    ]
    seq_len: Annotated[str, typer.Option(help="Tokens per sequence, one or more.")] = str(SEQ_LEN)
    batch_size: Annotated[
        str | None,
        typer.Option(help="Sequences per batch, one or more. Default: 1.", show_default=False),
    ] = None
    global_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequences per update over all devices: the best batch and number of"
            " micro-batches are found.",
        ),
    ] = None
    num_devices: Annotated[
        str, typer.Option(help="Devices that train one model, each with such a batch; or several.")
    ] = "1"
    jobs: JobsOption = None
    no_cache: NoCacheOption = False

    def cells(
        self,
        model: str,
        machines: "Sequence[Hardware]",
        workload: WorkloadOptions,
        budgets: BudgetOptions,
        step: StepOptions,
        *,
        allow: list[str] | None,
        beside: str,
        counts: Sequence[int],
    ) -> "Cells":
        """The cells, on so many devices where `counts` says it."""
        from protrain_plan.commands.cells import Cells
        from protrain_plan.profiling.estimate_cache import EstimateCache
        from protrain_runtime.contract.program.group import group_on

        lengths = integers("--seq-len", self.seq_len)
        batches = integers("--batch-size", self.batch_size or "1")
        return Cells(
            requests=workload.requests(model, lengths, batches, allow=allow, beside=beside),
            machines=machines,
            groups=[
                (place, group_on(machine, count))
                for place, machine in enumerate(machines)
                for count in counts or integers("--num-devices", self.num_devices)
            ],
            budgets=budgets,
            settings=step.settings(),
            global_batch=self.global_batch,
            cache=EstimateCache(off=self.no_cache),
            jobs=self.jobs,
        )


@option_record
class AnswerOptions:
    """Options of what is told besides the answers."""

    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Below each answer, what it is without a planner (plain PyTorch, checkpointing,"
            " ZeRO-Offload, FSDP2), and with 8-bit states where a plan is needed.",
        ),
    ] = False
    sweep: Annotated[
        str | None,
        typer.Option(
            help="One of host, device, disk, link, num-devices, and its values: doubles in a range"
            " such as host=64GiB..1TiB, or link=pcie-4,64GB/s."
        ),
    ] = None
    what_helps: Annotated[
        bool,
        typer.Option(
            "--what-helps",
            help="Say what more memory, a faster link, larger batches and states of 8 bits are"
            " worth. Each takes as long as an answer.",
        ),
    ] = False
    price: Annotated[
        str | None,
        typer.Option(
            help="Of a device for an hour, or one of each machine by comma; default: that of the"
            " machine's file. Adds the columns hours and cost."
        ),
    ] = None
    columns: Annotated[
        str | None,
        typer.Option(
            help="More columns, by comma: mfu (model FLOPs utilisation), and hours, cost and energy"
            " of a billion tokens."
        ),
    ] = None
    report: Annotated[
        Path | None,
        typer.Option(help="Write a page: tokens per second, memory and reasons of all, as bars."),
    ] = None

    def swept(self, machines: "Sequence[Hardware]") -> "Sweep | None":
        """The sweep; ProtrainError where its resource is missing, or beside what a table has."""
        from protrain_plan.commands.sweeping import read_sweep

        if self.sweep is None:
            return None
        sweep = read_sweep(self.sweep)
        sweep.refuse_missing(machines)
        for option in given(self):
            if option != "--sweep":
                raise ProtrainError("--sweep prints a table of its own", key=option)
        return sweep

    def shown(self, machines: "Sequence[Hardware]", prices: Sequence[float]) -> tuple[str, ...]:
        """The columns; ProtrainError for an unknown one, and for one without values."""
        from protrain_plan.presentation.spending import COLUMNS

        names = () if self.columns is None else tuple(map(str.strip, self.columns.split(",")))
        names = tuple(dict.fromkeys((*names, *(("hours", "cost") if self.price else ()))))
        for name in names:
            choice("--columns", name, tuple(COLUMNS))
        if "cost" in names and not any(prices):
            raise ProtrainError(
                "no machine has a price", key="--columns", fix="say that of a device: --price 2.49"
            )
        if "energy" in names and not any(machine.power_w for machine in machines):
            raise ProtrainError(
                "no machine says what its device takes",
                key="--columns",
                fix="write power_w, in watts, into the machine's file",
            )
        return names


@with_records
def fit(
    context: typer.Context,
    model: ModelArgument,
    of_file: FileOptions,
    asked: CellOptions,
    workload: WorkloadOptions,
    budgets: BudgetOptions,
    step: StepOptions,
    answers: AnswerOptions,
    staged: StageOptions,
    allow: AllowOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Say whether a model trains on machines, how fast and what binds. No GPU, no file needed.

    Bytes are exact for the operators that run, seconds are estimates from data-sheet rates. MODEL
    may also be a trainer's file (Axolotl, LLaMA-Factory, torchtune, TRL, arguments of the Trainer):
    its settings stand where no option does, and what to change in it is told.

    Examples: protrain fit llama-3.1-8b --on rtx-4090,a100-80gb --seq-len 2048,8192
    | protrain fit llama-3.1-8b --on h200 --compare --price 2.49
    | protrain fit llama-3.1-8b --on h100-sxm --num-devices 8 --global-batch 64
    | protrain fit llama-3.1-8b --on rtx-4090 --num-devices 4 --global-batch 32 --stages auto
    | protrain fit llama-3.1-8b --on rtx-3090 --precision pure --lora r=16 --quantize nf4
    | protrain fit llama-3.1-8b --on rtx-4090 --sweep host=64GiB..512GiB
    | protrain fit axolotl.yaml --on rtx-4090
    """
    from rich.console import Group

    from protrain_plan.commands.output import (
        destination,
        print_json,
        print_rendered,
        progress,
    )
    from protrain_plan.presentation.plans import cell_text, fit_json, fits_text
    from protrain_plan.presentation.trainer_files import file_json, file_text
    from protrain_runtime.contract.records.files import replace_text

    names, page = asked.on.split(","), answers.report
    page = None if page is None else destination(page, option="--report", inputs=(model, *names))
    if (file := of_file.read(context, model)) is not None:
        model, asked = file.options["model"], filled(asked, file, as_text=True)
        workload, step = filled(workload, file), filled(step, file)
    refuse_of_factory(context, model)
    beside = of_file.frozen(model, file)
    machines = [budgets.machine(name.strip()) for name in names]
    budgets.refuse_host_memory(machines)
    if staged.stages is None:
        refuse_batches(asked.global_batch, asked.batch_size, step.accumulate)
    else:
        refuse_without_global_batch(asked.global_batch, asked.batch_size, step.accumulate)
        for option in (*given(answers), *["--beside"] * bool(beside)):
            if option in ("--beside", "--compare", "--sweep", "--what-helps"):
                raise ProtrainError("stages are planned without it", key=option)
    prices = prices_of(answers.price, machines)
    columns = answers.shown(machines, prices)
    # A price is no part of what is estimated.
    machines = [replace(machine, price_per_hour=0.0) for machine in machines]
    swept = answers.swept(machines)
    counts = swept.counts if swept else ()
    cells = asked.cells(
        model, machines, workload, budgets, step, allow=allow, beside=beside, counts=counts
    )
    fits: list[Fit] = []
    helps: list[Sequence[Tried]] = []
    lines: list[list[dict[str, Any]]] = []  # of a sweep
    advised: list[Advice] = []

    def known(row: "dict[str, Any]", advice: "Sequence[Advice]" = ()) -> None:
        if as_json:
            print_json(row | (file_json(file, advice) if file else {}), indent=None)
        advised.extend(advice)

    # Answers that are known wait for no import but those of what is printed.
    if swept or answers.what_helps:
        from protrain_plan.commands.sweeping import sweep_lines
        from protrain_plan.presentation.choosing import helps_json, helps_text, sweep_text

    with progress(quiet=as_json) as tell:
        tell("estimating", 0.0)
        for line in sweep_lines(swept, cells, tell) if swept else ():
            lines.append(line)
            for row in line:
                known(row)
        for one, changes in () if swept else _answers(cells, prices, answers, staged, tell):
            fits.append(one)
            helps.append(changes)
            helped = helps_json(one, changes) if answers.what_helps else {}
            advice = []
            if file is not None:
                plain_fits = one.verdict == "fits"
                cell = cell_text(one)
                advice = [advice_of(file, one, cell, one.micro_batches, plain_fits=plain_fits)]
            known(fit_json(one) | helped, advice)
    if page is not None:
        from protrain_plan.presentation.report.fit_page import fit_page

        replace_text(page, fit_page(fits, columns=columns))
    if not as_json:
        written = () if answers.report is None else (answers.report,)
        if swept:
            text = sweep_text(lines, cells.machines)
        elif answers.what_helps:
            text = helps_text(fits, helps, *written, columns=columns)
        else:
            text = fits_text(fits, *written, columns=columns)
        print_rendered(Group(text, *file_text(file, advised)) if file else text)
    verdicts = [one.verdict for one in fits] + [row["verdict"] for line in lines for row in line]
    if all(verdict == "does not fit" for verdict in verdicts):
        raise typer.Exit(3)


def _answers(
    cells: "Cells",
    prices: Sequence[float],
    answers: AnswerOptions,
    staged: StageOptions,
    tell: "Progress",
) -> "Iterator[tuple[Fit, Sequence[Tried]]]":
    """Yield the answers, each as soon as it is known, with what helps where that was asked for."""
    from protrain_plan.commands.answering import Fitting

    fitted = Fitting(kept=cells.kept, compare=answers.compare)
    if staged.stages is None:
        found = cells.answers(fitted, tell, fitted.known)
    else:
        found = fits_in_stages(cells, staged.numbers(), tell)
    more = answers.compare or answers.what_helps
    in_order = [prices[place] for _ in cells.requests for place, _ in cells.groups]
    questions: list[Question] = []
    known: list[Fit] = []
    with closing(found):
        for (question, one), price in zip(found, in_order, strict=True):
            hardware = replace(one.profile.hardware, price_per_hour=price)
            priced = replace(one.question, profile=replace(one.profile, hardware=hardware))
            questions.append(question)
            known.append(replace(one, question=priced))
            if not more:
                yield known[-1], ()
    if not more:
        return
    lighter = cells.with_states_of_8_bits(questions, tell)
    fits: Iterable[Fit] = known
    if answers.compare and lighter:
        fits = _with_8_bits(known, lighter, tell, cells)
    if answers.what_helps:
        from protrain_plan.commands.sweeping import helping

        fits = list(fits)
        yield from zip(fits, helping(fits, lighter, tell, jobs=cells.jobs), strict=True)
    else:
        yield from ((one, ()) for one in fits)


def _with_8_bits(
    fits: "Sequence[Fit]", lighter: "Sequence[Question]", tell: "Progress", cells: "Cells"
) -> "Iterator[Fit]":
    """Yield the answers beside those with 8-bit states, where plain PyTorch does not fit."""
    from protrain_plan.commands.answering import Fitting
    from protrain_plan.commands.cells import answered, planning
    from protrain_plan.planning.questions.alternatives import planned as beside

    answer = Fitting(kept=cells.kept)
    asked = [other for fit, other in zip(fits, lighter, strict=True) if fit.verdict != "fits"]
    others = answered(asked, answer, tell, planning, answer.known, jobs=cells.jobs)
    for fit in fits:
        found = None if fit.verdict == "fits" else next(others)
        if found is None or found.solved is None:
            yield fit
        else:
            name, plan = found.profile.optimizer.name, found.solved.plan
            one = beside(name, plan, found.profile, found.binds)
            yield replace(fit, alternatives=(*fit.alternatives, one))
