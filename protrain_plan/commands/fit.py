"""`protrain fit`: whether and how a model trains on machines, without a profile."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

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
    ModelArgument,
    NoCacheOption,
    choice,
    integers,
    machine_names,
    prices_of,
    refuse,
    refuse_batches,
    refuse_of_factory,
    separated,
)
from protrain_plan.commands.output import destination, print_json, print_rendered, progress
from protrain_plan.commands.staging import StageOptions, refuse_without_global_batch
from protrain_runtime.contract.errors import ProtrainError

if TYPE_CHECKING:
    from protrain_plan.commands.cells import Cells
    from protrain_plan.hardware.offers import MachineOffer
    from protrain_plan.models.trainer_files import TrainerFile
    from protrain_plan.planning.questions.cells import Order, Tried
    from protrain_plan.presentation.trainer_files import Advice


ORDERS: "tuple[Order, ...]" = ("time", "cost", "memory")


@option_record
class CellOptions:
    """Options for the cells of the grid: each size and number of devices with each machine."""

    on: list[str] | None = option(
        "Machines, separated by commas: catalogue names or YAML files.",
        autocompletion=machine_names,
    )
    seq_len: str = option("Tokens per sequence: one or several (1024,2048).", default=str(SEQ_LEN))
    batch_size: str | None = option("Sequences per batch: one number or several. Default: 1.")
    global_batch: int | None = option(
        "Sequences per update over all devices: finds the best micro-batches.", min=1
    )
    num_devices: str = option(
        "Devices that train one model, each with its own batch: one number or several.", default="1"
    )
    settings: list[str] | None = option(
        "A setting and its values, one cell each: host=64GiB..1TiB (doubling), device, disk,"
        " link=pcie-4,64GB/s, num-devices, or an option such as optimizer=adamw,sgd. Several are"
        " combined.",
        "--set",
    )
    sweep: str | None = option("Like --set, for one setting.")
    sort: str | None = option(
        "Sort by time, cost (per token) or memory (of the device), least first. Default: the"
        " order of the options."
    )
    jobs: int | None = option("Parallel processes. Default: one per core.", min=1)
    no_cache: NoCacheOption = False


@option_record
class WantedOptions:
    """Options for machines with prices, and for the wanted speed or price."""

    price: str | None = option(
        "Price per device and hour: one, or one per machine, separated by commas. Adds the"
        " columns hours and cost. Default: the price in the machine's file."
    )
    among: Path | None = option(
        "A YAML file of machines with prices (rtx-4090: 0.35), instead of --on. Default of a"
        " search: the catalogue's machines with a price."
    )
    speed: float | None = option(
        "Find the cheapest cell with at least this many tokens per second in total.", min=1e-3
    )
    price_limit: float | None = option(
        "Maximum price per hour of all devices. Without --speed, finds the fastest cell.", min=0.0
    )

    @property
    def is_search(self) -> bool:
        """Whether cells are planned only until one is the answer."""
        return self.speed is not None or self.price_limit is not None

    def searched(
        self, cells: "Cells", answered: "_Answered", tell: "Callable[[str, float], None]"
    ) -> dict[str, Any]:
        """The result of the search, as JSON; cells that are planned for it are `answered`."""
        from protrain_plan.planning.questions.grid import search
        from protrain_plan.presentation.grids import search_json

        best = search(
            [cell for line in cells.lines(tell) for cell in line],
            speed=self.speed,
            report=lambda cell, part: tell(f"planning {cell.name}", part),
            done=answered.add,
        )
        asked_for = {"tokens_per_second": self.speed, "price_limit": self.price_limit}
        return search_json(best, answered.rows, asked_for)

    def offers(self, cells: CellOptions, budgets: BudgetOptions) -> "Sequence[MachineOffer]":
        """Return all numbers of devices of all machines; ProtrainError if there are none."""
        from protrain_plan.hardware.offers import catalogue_offers, offer, read_offers

        of_on = ["--num-devices"] * (cells.num_devices != "1")
        of_on += ["--price"] * (self.price is not None)
        refuse(() if cells.on else of_on, "it applies to machines of --on")
        if cells.on and self.among is not None:
            raise ProtrainError("--on and --among both name machines", key="--among")
        if cells.on:
            machines = [budgets.machine(name) for name in separated(cells.on)]
            budgets.refuse_host_memory(machines)
            offered = tuple(
                offer(machine, count, price)
                for machine, price in zip(machines, prices_of(self.price, machines), strict=True)
                for count in integers("--num-devices", cells.num_devices)
            )
        elif self.among is not None:
            offered = read_offers(self.among)
        elif self.is_search:
            offered = catalogue_offers()
        else:
            fix = "--on rtx-4090 (protrain hardware list has the names), or --among prices.yaml"
            raise ProtrainError("no machine given", key="--on", fix=fix)
        limit = self.price_limit
        within = [one for one in offered if limit is None or one.price_per_hour <= limit]
        if not within:
            cheapest = min(one.price_per_hour for one in offered)
            problem = f"the cheapest of {len(offered)} costs {cheapest:g} an hour"
            raise ProtrainError(problem, key="--price-limit")
        return within


@option_record
class AnswerOptions:
    """Options for additional output."""

    compare: bool = flag(
        "Compare with plain PyTorch, checkpointing, ZeRO-Offload and FSDP2, and with 8-bit states"
        " if the model needs a plan."
    )
    what_helps: bool = flag(
        "Show what more memory, a faster link, larger batches and 8-bit states gain. Each takes"
        " as long as an answer."
    )
    columns: str | None = option(
        "Extra columns, separated by commas: mfu (model FLOPs utilisation), and hours, cost and"
        " energy per billion tokens."
    )
    report: Path | None = option("Write an HTML page with tokens per second, memory and reasons.")
    explain: bool = flag("Say how far to trust the figures, and what they leave out.")

    def shown(self, offers: "Sequence[MachineOffer]", *, priced: bool) -> tuple[str, ...]:
        """The columns; ProtrainError for an unknown one, and for one without values."""
        from protrain_plan.presentation.grids import COLUMNS

        asked = [] if self.columns is None else separated([self.columns])
        names = tuple(dict.fromkeys([*asked, *["hours", "cost"] * priced]))
        for name in names:
            choice("--columns", name, tuple(COLUMNS))
        if "cost" in names and not any(one.price_per_hour for one in offers):
            problem, fix = "no machine has a price", "add a price: --price 2.49"
            raise ProtrainError(problem, key="--columns", fix=fix)
        if "energy" in names and not any(one.machine.power_w for one in offers):
            fix = "add power_w, in watts, to the machine's file"
            raise ProtrainError("no machine has a power figure", key="--columns", fix=fix)
        return names


def fit(
    context: typer.Context,
    model: ModelArgument,
    of_file: FileOptions,
    asked: CellOptions,
    wanted: WantedOptions,
    workload: WorkloadOptions,
    budgets: BudgetOptions,
    step: StepOptions,
    answers: AnswerOptions,
    staged: StageOptions,
    allow: AllowOption = None,
    as_json: bool = flag(
        "Print JSON lines instead of text, each as soon as it is known.", "--json"
    ),
) -> None:
    """Say whether a model trains on a machine, how fast, and what limits it. Needs no GPU.

    Several machines, lengths, batches or values of --set make a grid, with an answer per cell.
    Bytes are exact for the operators that run, seconds are estimates from data-sheet rates. MODEL
    may also be a trainer's file (Axolotl, LLaMA-Factory, torchtune, TRL, arguments of the Trainer):
    its settings apply unless an option overrides them, and needed changes are listed.

    Examples: protrain fit llama-3.1-8b --on rtx-4090,a100-80gb --seq-len 2048,8192
    | protrain fit llama-3.1-8b --on h200 --compare --price 2.49
    | protrain fit llama-3.1-8b --on h100-sxm --num-devices 8 --global-batch 64
    | protrain fit llama-3.1-8b --on rtx-3090 --lora r=16 --quantize nf4
    | protrain fit llama-3.1-8b --on rtx-4090 --set host=64GiB..512GiB --set optimizer=adamw,sgd
    | protrain fit axolotl.yaml --on rtx-4090
    """
    from protrain_plan.commands.cells import Cells, Row
    from protrain_plan.commands.settings import read_settings
    from protrain_plan.planning.questions.cells import refuse_missing
    from protrain_plan.profiling.estimate_cache import EstimateCache

    page = answers.report
    if page is not None:
        page = destination(page, option="--report", inputs=(model, *separated(asked.on)))
    if (file := of_file.read(context, model)) is not None:
        model, options = file.options["model"], file.options
        asked = filled(asked, {name: str(value) for name, value in options.items()})
        workload, step = filled(workload, options), filled(step, options)
    grid = read_settings(context, asked.settings, asked.sweep)
    grid.refuse_typed(context)
    refuse_of_factory(context, model, grid.given)
    asked, beside = grid.filled(asked), of_file.frozen(model, file)
    chosen = list(grid.rows(workload, step))
    others = [option for option in given(answers) if option in ("--compare", "--what-helps")]
    if staged.stages is not None:
        refuse_without_global_batch(asked.global_batch, asked.batch_size, step.accumulate)
        others += ["--beside"] * bool(beside) + ["--set"] * bool(grid.given)
        refuse(others, "stages are planned without it")
    if wanted.is_search:
        others += ["--sort"] * bool(asked.sort)
        refuse(others, "a search sorts its own answer")
    for _, _, of_row in chosen:
        refuse_batches(asked.global_batch, asked.batch_size, of_row.accumulate)
    order = choice("--sort", asked.sort, ORDERS) if asked.sort else None
    offers = wanted.offers(asked, budgets)
    columns = answers.shown(offers, priced=wanted.price is not None or order == "cost")
    for offer, (resource, _) in product(offers, grid.values[0]):
        refuse_missing(offer.machine, resource)
    lengths = integers("--seq-len", asked.seq_len)
    batches = integers("--batch-size", asked.batch_size or "1")
    cells = Cells(
        rows=[
            Row(request=request, step=with_step.settings(), settings=settings)
            for settings, with_workload, with_step in chosen
            for request in with_workload.requests(
                model, lengths, batches, allow=allow, beside=beside
            )
        ],
        offers=offers,
        values=grid.values,
        budgets=budgets,
        global_batch=asked.global_batch,
        stages=staged.numbers(),
        cache=EstimateCache(off=asked.no_cache),
        jobs=asked.jobs,
    )
    answered = _Answered(file=file, as_json=as_json)
    found: dict[str, Any] | None = None
    with progress(quiet=as_json) as tell:
        tell("estimating", 0.0)
        if wanted.is_search:
            found = wanted.searched(cells, answered, tell)
        else:
            every = cells.answers(tell, compare=answers.compare, helps=answers.what_helps)
            for one in sorted(every, key=lambda one: one.rank(order)) if order else every:
                answered.add(one)
    answered.show(answers, page, columns, found)
    rows = answered.rows
    fits = [found["best"]] if found else [row["verdict"] != "does not fit" for row in rows]
    if not any(fits):
        raise typer.Exit(3)


@dataclass(slots=True)
class _Answered:
    """The rows of the answers so far, with the changes of a trainer's file."""

    file: "TrainerFile | None"
    as_json: bool
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    advised: "list[Advice]" = field(default_factory=list)

    def add(self, one: "Tried") -> None:
        """Add an answer; with --json it is printed at once."""
        from protrain_plan.presentation.grids import cell_text, row_of
        from protrain_plan.presentation.trainer_files import advice, file_json

        row, fit = row_of(one), one.reached
        if self.file is not None:
            changes = []
            if fit is not None:
                plain_fits = fit.verdict == "fits"
                changes = [advice(self.file, cell_text(row), fit, plain_fits=plain_fits)]
            row |= file_json(self.file, changes)
            self.advised += changes
        self.rows.append(row)
        if self.as_json:
            print_json(row, indent=None)

    def show(
        self,
        options: AnswerOptions,
        page: Path | None,
        columns: tuple[str, ...],
        found: dict[str, Any] | None,
    ) -> None:
        """Write the page, and print all answers as a table, or what a search `found`."""
        from protrain_plan.presentation.grids import grid_text
        from protrain_plan.presentation.trainer_files import file_text
        from protrain_runtime.contract.records.files import replace_text

        if page is not None:
            from protrain_plan.presentation.report.fit_page import fit_page

            replace_text(page, fit_page(self.rows, columns=columns))
        if self.as_json and found:
            print_json(found, indent=None)
        elif not self.as_json:
            written = () if options.report is None else (options.report,)
            more = file_text(self.file, self.advised) if self.file else ()
            shown = partial(grid_text, self.rows, *written, columns=columns, search=found)
            print_rendered(shown(more=more, explained=options.explain))


def search(wanted: WantedOptions, **options: Any) -> None:
    """Find the cheapest machine that trains a model at a speed, or the fastest within a price.

    Machines are those of --among, the catalogue's by default. A bound rules out what cannot reach
    the speed; the rest is planned in the order of prices, so the first that reaches it is the
    cheapest. With --json, each planned machine is a line, and the last line is the answer.

    Examples: protrain hardware search llama-3.1-8b --speed 5000 --among prices.yaml
    | protrain hardware search llama-3.1-8b --price-limit 3 --among prices.yaml --batch-size 1,4
    | protrain hardware search llama-3.1-8b --speed 20000 --stages auto --global-batch 128
    """
    if not wanted.is_search:
        fix = "--speed 5000 for the cheapest that is as fast, --price-limit 3 for the fastest"
        raise ProtrainError("nothing to search for", key="--speed", fix=fix)
    fit(wanted=wanted, **options)


search.__dict__["__signature__"] = inspect.signature(fit)
