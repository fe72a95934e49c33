"""The command line: parse, call, render, exit code. Nothing is computed here.

Exit codes: 0 done, 1 a verification failed, 2 a mistake in the input, 3 no plan fits, 4 out of
memory, 130 interrupted.
"""

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar, get_args

# Before anything imports torch: a lane's waiting threads must not spin on the processors that
# compute; the profiler warns of blocks that we know of, and transformers of published settings.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from protrain_plan import __version__, rendering
from protrain_plan.errors import ProtrainError
from protrain_plan.records import read_plan, read_profile, write_plan, write_profile
from protrain_plan.records.hardware import DeviceKind
from protrain_plan.records.plan import Budgets
from protrain_plan.records.profile import DType
from protrain_plan.units import parse_bytes

if TYPE_CHECKING:
    from protrain_plan.planning.growth import Quantity

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Plan training under a memory limit: profile a model, plan it, run the plan.",
)
Name = TypeVar("Name", bound=str)
QUANTITIES: "tuple[Quantity, ...]" = ("batch-size", "seq-len")

# No emoji: `package.module:factory: ...` is a message, not a picture of a factory.
out, err = Console(emoji=False), Console(stderr=True, emoji=False)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
SpillOption = Annotated[
    Path | None,
    typer.Option(
        "--spill-directory",
        help="Where a disk tier keeps its unnamed file; default: the system's temporary files.",
    ),
]


def main() -> None:
    """Run the command line, and turn what a user can mend into one message and an exit code."""
    try:
        code = app(standalone_mode=False)  # a typer.Exit comes back as its code
    except ProtrainError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except Exception as error:
        # What typer's parser found wrong with the arguments.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        if not message:  # no arguments at all: the help was shown
            sys.exit(2)
        _fail(message, 2, hint="try protrain --help")
    sys.exit(code)


def _fail(message: str, code: int, *, hint: str | None = None) -> NoReturn:
    err.print(f"[bold red]error:[/] {rendering.escaped(message)}", soft_wrap=True, highlight=False)
    if hint:
        err.print(f"  {hint}", highlight=False)
    sys.exit(code)


def _show_version(value: bool) -> None:
    if value:
        out.print(f"protrain {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Example: protrain profile smollm2-135m --batch-size 1 --seq-len 256 -o profile.yaml"
)
def profile(
    model: Annotated[
        str,
        typer.Argument(
            help="A preset's name, a Hugging Face config.json (file or folder),"
            " or package.module:factory.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The profile to write.")] = Path(
        "profile.yaml"
    ),
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = 1,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 512,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per form of activations.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of weights and text.")] = 0,
    text: Annotated[Path | None, typer.Option(help="A text file to take batches from.")] = None,
    spill_directory: SpillOption = None,
    as_json: JsonOption = False,
) -> None:
    """Record what a model costs on this machine, unit by unit, in bytes and seconds."""
    dtype_name: DType = _choice("--dtype", dtype, get_args(DType))
    device_name: DeviceKind = _choice("--device", device, get_args(DeviceKind))
    _writable(output)
    # Torch loads here, so that --help and planning need not wait for it.
    from protrain_plan.models.sources import load_source
    from protrain_plan.profiling.measured import measure
    from protrain_runtime.measure import return_freed_memory

    source = load_source(model)
    if device_name == "cpu":
        return_freed_memory()
    with _progress(quiet=as_json) as report:
        record = measure(
            source,
            batch_size=batch_size,
            seq_len=seq_len,
            dtype=dtype_name,
            device=device_name,
            seed=seed,
            num_steps=steps,
            spill_directory=spill_directory or Path(tempfile.gettempdir()),
            text=text,
            progress=report,
        )
    write_profile(record, output)
    _show(as_json, rendering.profile_json(record), lambda: rendering.profile_text(record, output))


@app.command(
    epilog="Examples: protrain plan profile.yaml --device-memory 1.5GiB --disk 20GiB -o plan.yaml"
    " | protrain plan profile.yaml --pareto"
    " | protrain plan profile.yaml --device-memory 24GiB --maximize batch-size"
    " | protrain plan profile.yaml --pin 'layers.0-3: recompute' --explain"
)
def plan(
    profile: Annotated[Path, typer.Argument(help="A profile.", show_default=False)],
    device_memory: Annotated[
        str | None,
        typer.Option(help="The most that the process may take of the device, such as 1.5GiB."),
    ] = None,
    host_memory: Annotated[str | None, typer.Option(help="The most pinned host memory.")] = None,
    disk: Annotated[str | None, typer.Option(help="The most disk space.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The plan to write.")] = Path(
        "plan.yaml"
    ),
    pin: Annotated[
        list[str] | None,
        typer.Option(help="Fix decisions: 'layers.0-3: recompute'. May be given several times."),
    ] = None,
    pins: Annotated[Path | None, typer.Option(help="A YAML file of such decisions.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why, in words.")] = False,
    max_slowdown: Annotated[
        float | None,
        typer.Option(min=1.0, help="Least device memory for a step this many times the fastest."),
    ] = None,
    maximize: Annotated[
        str | None, typer.Option(help="batch-size or seq-len: the largest that fits.")
    ] = None,
    also: Annotated[
        Path | None,
        typer.Option(help="A second profile, of another size, from which to tell growth."),
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="The front of memory against time; writes no plan.")
    ] = False,
    points: Annotated[int, typer.Option(min=2, help="Budgets that --pareto plans for.")] = 8,
    accumulate: Annotated[
        int, typer.Option(min=1, help="Micro-batches per update. (Planned, not yet run.)")
    ] = 1,
    clip: Annotated[
        bool,
        typer.Option(
            "--clip",
            help="Update after backward, as clipping by the global norm needs; costs the overlap"
            " of updates with backward. (Planned, not yet run.)",
        ),
    ] = False,
    solver: Annotated[
        str, typer.Option(help="milp, or to compare: four-parameter, recompute-all, offload-all.")
    ] = "milp",
    gap: Annotated[
        float, typer.Option(min=0.0, help="A plan this close to the bound is good enough.")
    ] = 0.005,
    time_limit: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds to search at most; default: none.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order in which local search tries.")] = 0,
    lp: Annotated[
        Path | None, typer.Option(help="Write the integer programme in the readable .lp format.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest step within the budgets, and write it as a plan.

    Without an option, a tier's budget is all of it that the profile saw. Ctrl-C ends the search
    with the best plan so far.
    """
    _writable(output)
    from protrain_plan.planning.fluid import Fluid
    from protrain_plan.planning.objectives import Objective, Question, ask
    from protrain_plan.planning.pins import parse_pin, read_pins
    from protrain_plan.planning.planner import SOLVERS, Solver
    from protrain_plan.planning.search import Effort

    solver_name: Solver = _choice("--solver", solver, SOLVERS)
    objectives = [
        word
        for word, asked in (
            ("--max-slowdown", max_slowdown is not None),
            ("--maximize", maximize is not None),
            ("--pareto", pareto),
        )
        if asked
    ]
    if len(objectives) > 1:
        raise ProtrainError(f"{objectives[0]} and {objectives[1]} ask for different things")
    if also is not None and maximize is None:
        raise ProtrainError("is for --maximize", key="--also")
    record = read_profile(profile)
    tiers = {tier.name: tier.capacity_bytes for tier in record.hardware.tiers}
    question = Question(
        profile=record,
        budgets=Budgets(
            device=_size("--device-memory", device_memory, record.hardware.device.memory_bytes),
            host=_size("--host-memory", host_memory, tiers.get("host", 0)),
            disk=_size("--disk", disk, tiers.get("disk", 0)),
        ),
        updates="after backward" if clip else "in backward",
        micro_batches=accumulate,
        pins=(*(read_pins(pins) if pins else ()), *(parse_pin(text) for text in pin or ())),
    )
    objective = Objective(
        max_slowdown=max_slowdown,
        maximize=None if maximize is None else _choice("--maximize", maximize, QUANTITIES),
        also=None if also is None else read_profile(also),
        pareto_points=points if pareto else None,
    )
    if lp is not None:
        _writable(lp)
    with _progress(quiet=as_json) as report, _interruptible() as interrupted:
        if lp is not None:
            Fluid(question.problem()).write_lp(lp)

        def tell(stage: str, step_seconds: float | None, bound_seconds: float | None) -> None:
            report(rendering.search_text(stage, step_seconds, bound_seconds), 0.5)

        effort = Effort(
            gap_target=gap, time_limit_s=time_limit, seed=seed, stopped=interrupted.is_set
        )
        answer = ask(question, objective, effort=effort, solver=solver_name, progress=tell)
    if answer.solved is not None and not pareto:
        write_plan(answer.solved.plan, output)
    explanation = None
    if explain and answer.solved is not None:
        from protrain_plan.planning.explaining import explain as explained

        explanation = explained(answer.profile, answer.solved.plan)
    _show(
        as_json,
        rendering.answer_json(answer, explanation),
        lambda: rendering.answer_text(answer, explanation, output),
    )
    if answer.infeasible is not None:
        raise typer.Exit(3)


@app.command(epilog="Example: protrain run plan.yaml --steps 10 --verify")
def run(
    plan: Annotated[Path, typer.Argument(help="A plan.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 5,
    text: Annotated[Path | None, typer.Option(help="A text file to train on.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Ordinary PyTorch, no plan.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run both, compare losses and parameters bitwise.")
    ] = False,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Let the operating system refuse this process more memory (Linux, RLIMIT_DATA)."
        ),
    ] = None,
    spill_directory: SpillOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the planned model on real text, and show measured beside predicted memory."""
    record = read_plan(plan)
    if plain and verify:
        raise ProtrainError("--verify runs plain PyTorch too", fix="leave --plain out")
    if memory_limit is not None:
        _limit(_size("--memory-limit", memory_limit, 0))
    from protrain_plan.running import Run, train
    from protrain_runtime.measure import return_freed_memory

    if record.workload.device == "cpu":
        return_freed_memory()

    def trained(label: str, report: Callable[[str, float], None], *, plain: bool) -> Run:
        def on_step(step: int, loss: float) -> None:
            report(f"{label}: step {step + 1} of {steps}, loss {loss:.4f}", (step + 1) / steps)

        report(f"{label}: preparing", 0.0)
        return train(
            record,
            num_steps=steps,
            plain=plain,
            text=text,
            spill_directory=spill_directory,
            on_step=on_step,
        )

    with _progress(quiet=as_json) as report:
        result = trained("plain" if plain else "planned", report, plain=plain)
        reference = trained("plain", report, plain=True) if verify else None
    verified = None
    if reference is not None:
        same = reference.losses == result.losses
        verified = same and reference.parameters_sha256 == result.parameters_sha256
    _show(
        as_json,
        rendering.run_json(record, result, plain=plain, verified=verified),
        lambda: rendering.run_text(record, result, plain=plain, verified=verified),
    )
    if verified is False:
        raise typer.Exit(1)


def _show(as_json: bool, data: object, text: Callable[[], rendering.Renderable]) -> None:
    if as_json:
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        out.print(text())


def _size(option: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    try:
        return parse_bytes(text)
    except ProtrainError as error:
        raise ProtrainError(error.message, key=option, fix=error.fix) from None


def _choice(option: str, text: str, known: tuple[Name, ...]) -> Name:
    for value in known:
        if text == value:
            return value
    raise ProtrainError(
        f"expected {', '.join(known[:-1])} or {known[-1]}, got {text!r}", key=option
    )


def _writable(path: Path) -> None:
    """Refuse at once what could not be written after minutes of work."""
    directory = path.parent
    if path.is_dir():
        raise ProtrainError("is a directory", source=str(path), fix="name a file with -o")
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise ProtrainError(
            "the directory is missing or cannot be written",
            source=str(directory),
            fix="name a file in another directory with -o",
        )


def _limit(num_bytes: int) -> None:
    try:
        import resource
    except ImportError as error:
        raise ProtrainError("needs Linux", key="--memory-limit") from error
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event instead of ending the program; the second one ends it."""
    event = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def interrupt(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error, shown on a terminal only and gone when the work is done."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=quiet or not err.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, fraction: bar.update(task, description=what, completed=fraction)


if __name__ == "__main__":
    main()
