"""The grid of `protrain fit` and `hardware search`: a row for each cell, as JSON and as a table.

Rows are plain data, from which the table and the page (`report/fit_page.py`) are made.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement

from protrain_plan.planning.questions.allocator_slack import EXPANDABLE_MOST
from protrain_plan.planning.questions.cells import MEMORY, WORTH
from protrain_plan.presentation.plans import (
    ALLOCATED,
    change_text,
    facts_of,
    headroom_text,
    other_results,
    spared_disk,
)
from protrain_plan.presentation.profiles import caveats, error_band, trust
from protrain_plan.presentation.terminal import Text, fields_of, table_of, wrote
from protrain_plan.simulation.wear import wear_lines
from protrain_runtime.contract.records.hardware import PCIE
from protrain_runtime.contract.records.plan import TierBytes
from protrain_runtime.contract.units import exact_bytes

if TYPE_CHECKING:
    from protrain_plan.planning.questions.answers import Answer
    from protrain_plan.planning.questions.cells import Tried
    from protrain_plan.planning.questions.grid import Found

Row = dict[str, Any]


def row_of(one: "Tried") -> Row:
    """Return the line that `--json` prints for a cell."""
    cell, fit = one.cell, one.reached
    question = fit.question if fit else cell.question
    workload, machine = question.profile.workload, question.profile.hardware
    row: Row = {
        "name": cell.name or machine.name,
        **fields_of(workload, "model", "batch_size", "seq_len"),
        "workload": {
            "dtype": workload.dtype,
            "precision": f"{workload.precision} precision",
            "optimizer": question.profile.optimizer.name,
            **fields_of(workload, "adapter", "quantize"),
            "compile": "compiled blocks" * bool(workload.compile),
        },
        "hardware": machine.name,
        **fields_of(question.settings, "micro_batches"),
        **fields_of(fit.group if fit else question.group),
        "settings": dict(cell.settings),
        **fields_of(cell, "price_per_hour"),
        "most_tokens_per_second": one.most_tokens_per_s,
        **fields_of(one, "bound"),
        "notes": [f"{machine.name}: {trust(machine)}", *caveats(question.profile)],
    }
    if fit is None:
        return row
    row |= _answer(one, fit)
    row["notes"] += spared_disk(fit.solved) if fit.solved and not fit.solved.uses_disk else []
    if one.helps:
        changes = sorted(one.helps, key=lambda one: -one.tokens_per_s)
        row["what_helps"] = [change_json(change, fit) for change in changes]
    if one.best:
        row["best_change"] = change_json(one.best, fit)
    return row


def change_json(change: "Tried", base: "Answer") -> Row:
    """The changed cell, and its speed relative to the answer."""
    times = change.times_as_fast(base)
    return {
        **row_of(change),
        "what": change.cell.name,
        "change": change.cell.words,
        "fits": times != 0,
        "times_as_fast": times,
        "planned": change.reached is not None,
        "tokens_per_second": change.tokens_per_s or None,
    }


def _answer(one: "Tried", fit: "Answer") -> Row:
    solved, profile = fit.solved, fit.profile
    about: list[str] = []
    if solved is not None:
        step_s = solved.plan.prediction.step_seconds
        saved = 1 - step_s / fit.kept_seconds if fit.kept_seconds else 0.0
        about += [f"{saved:.1%} less time per step than plain PyTorch"] * (saved >= 0.0005)
        about += [*wear_lines(solved.plan, profile), *other_results(solved.plan)]
        about += spared_disk(solved) * solved.uses_disk
    return {
        **facts_of(fit, profile),
        **fields_of(fit, "verdict", "bottleneck"),
        "tight": fit.is_tight,
        "reserved_bytes_about": fit.reserved_bytes,
        "budget_bytes": fit.question.budgets.device,
        "plain_device_bytes": fit.plain_bytes,
        "plain_step_seconds": fit.kept_seconds,
        "about": about,
        "tokens_per_second": fit.tokens_per_s,
        **fields_of(one.spending(fit.step_seconds)),
        "measured_over_estimated": error_band(profile.hardware),
        "alternatives": [
            {
                **fields_of(other, but=("units", "is_tight", "adds_shards")),
                "fits": other.step_seconds is not None,
                "tight": other.is_tight,
                "tokens_per_second": (s := other.step_seconds) and fit.question.tokens / s,
                **fields_of(one.spending(other.step_seconds)),
                "reductions": f"in {'every' if other.adds_shards else 'the last'} micro-batch",
            }
            for other in fit.alternatives
        ],
    }


def search_json(found: "Found", rows: Sequence[Row], asked: Row) -> Row:
    """Return the last line that `--json` prints for a search: the answer, and all rows."""
    best = None if found.best is None else rows[found.looked_at.index(found.best)]
    unseen = [fields_of(one, "name", "price_per_hour") for one in found.unseen]
    return {**asked, "best": best, "looked_at": rows, "not_looked_at": unseen}


class Column(NamedTuple):
    """A column of `--columns`: its key in rows, its head, its description and its format."""

    key: str
    head: str
    words: str
    form: Callable[[float], str]

    def text(self, way: Row) -> str:
        """Return the cell's text; `-` for an unknown value."""
        value = way.get(self.key)
        return "-" if value is None else self.form(value)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


COLUMNS = {
    "mfu": Column(
        "model_flops_utilisation",
        "MFU",
        "FLOPs of forward and backward, without recomputation, over the device's peak rate",
        "{:.1%}".format,
    ),
    "hours": Column("hours_per_billion_tokens", "hours", "of a billion tokens", _amount),
    "cost": Column(
        "cost_per_billion_tokens", "cost", "of a billion tokens, all devices together", _amount
    ),
    "energy": Column(
        "kwh_per_billion_tokens",
        "kWh",
        "of a billion tokens, the boards of all devices at their maximum power",
        _amount,
    ),
}
"""Columns by the names that `--columns` takes."""

_SETTINGS = {"host": "host memory", "device": "device memory", "disk": "disk space"}
"""Heads of settings that are also tiers of the table; other settings are their own heads."""

TIGHT = (
    "barely: less room than PyTorch's allocator was seen to reserve beyond tensors, up to"
    f" {EXPANDABLE_MOST:.0%} of them with PYTORCH_ALLOC_CONF=expandable_segments:True, which"
    " protrain run sets; a smaller --device-memory plans with room"
)
WHOLE_SUMS = (
    "several micro-batches on several devices: gradients add up whole on each device, as with"
    " FSDP2's set_requires_gradient_sync(False); --allow rounding may reduce every micro-batch to"
    " shards instead, as FSDP2 does by default: less memory and more network"
)
NO_TOKENS = (
    "batches without tokens, such as images: tokens/s counts samples, whatever --seq-len says"
)
_VERDICTS = {
    "fits": ("fits", "green"),
    "fits with a plan": ("with a plan", "yellow"),
    "does not fit": ("no", "red"),
}


def ways(row: Row) -> list[Row]:
    """The ways to train in a cell; the first is the plan."""
    return [row | {"name": "plan", "checkpointing": False}, *row.get("alternatives", ())]


def way_name(way: Row, name: str, checkpointed: str) -> str:
    """Return the name of a way to train, with remarks."""
    name = checkpointed if way["checkpointing"] else name
    name += ", sums in shards" * (way.get("reductions") == "in every micro-batch")
    return name + ", barely" * bool(way.get("tight"))


def gibibytes(peak: TierBytes | None) -> list[str]:
    """Return the peaks on the device, the host and the disk."""
    sizes = (peak.on_device, peak.host, peak.disk) if peak else (0, 0, 0)
    return [f"{size / 2**30:.1f} GiB" if size else "-" for size in sizes]


def batch_text(row: Row) -> str:
    """Return the number of micro-batches, with sequences and tokens of one: `2 of 4 x 2048`."""
    times = f"{row['micro_batches']} of " if row["micro_batches"] > 1 else ""
    return f"{times}{row['batch_size']} x {row['seq_len']}"


def setting_text(name: str, value: Any) -> str:
    """Return a setting's value as an option has it."""
    if name == "link":
        named = [f" ({pcie})" for pcie, speed in PCIE.items() if speed == value]
        return f"{value / 1e9:.3g} GB/s{''.join(named)}"
    return exact_bytes(int(value)) if name in _SETTINGS else str(value)


def cell_text(row: Row, *, after: str = " ") -> str:
    """Return a cell as text: `8 x h100-sxm 2 of 4 x 2048, host 64GiB`."""
    settings = (f", {name} {setting_text(name, v)}" for name, v in row["settings"].items())
    return f"{row['name']}{after}{batch_text(row)}{''.join(settings)}"


class CellTable:
    """A table of ways to train by cell; on narrow terminals it wraps words, and cuts no numbers."""

    def __init__(self, heads: Sequence[str], numbers: Sequence[str]) -> None:
        self._wide = table_of(*heads, "", *numbers, words=(0, len(heads)))
        self._narrow = table_of("", *numbers)
        for column in self._wide.columns:
            column.no_wrap = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ample = options.update(max_width=10_000)
        for between in (2, 1):
            self._wide.padding = (0, between, 0, 0)
            if Measurement.get(console, ample, self._wide).maximum <= options.max_width:
                yield self._wide
                return
        yield self._narrow

    def add(self, heads: Sequence[str], heading: str, way: Text, numbers: Sequence[str]) -> None:
        """Add a way to train; the first of a cell has heads (wide) or a heading (narrow)."""
        self._wide.add_row(*heads, way, *numbers)
        if heading:
            self._narrow.add_row(heading)
        self._narrow.add_row(Text("  ").append_text(way), *numbers)


def _table(
    rows: Sequence[Row], numbers: Sequence[str], cells: Callable[[Row], Sequence[str]]
) -> CellTable:
    """A table of all ways to train in all cells: `cells` gives a way's texts below `numbers`."""
    names = list(dict.fromkeys(name for row in rows for name in row["settings"]))
    table = CellTable(("machine", "batch", *(_SETTINGS.get(name, name) for name in names)), numbers)
    for row in rows:
        plan, *others = ways(row)
        slow = "no" if row["bound"] == MEMORY else f"too slow: {row['bound']}"
        words, style = _VERDICTS.get(row.get("verdict", ""), (slow, ""))
        if row.get("tight"):
            words, style = f"{words}, barely", "yellow"
        stages = len(row["pipeline"].stages) if row.get("pipeline") else 1
        arranged = f" in {stages} stages" * (stages > 1)
        arranged += f" ({row['num_replicas']} replicas)" * (row["num_replicas"] > 1)
        settings = (
            setting_text(name, row["settings"][name]) if name in row["settings"] else ""
            for name in names
        )
        heads = (row["name"] + arranged, batch_text(row), *settings)
        table.add(heads, cell_text(row) + arranged, Text(words, style=style), cells(plan))
        for way in others:
            name = way_name(way, way["name"], "  checkpointed")
            table.add([""] * len(heads), "", Text(name), cells(way))
    return table


def grid_text(
    rows: Sequence[Row],
    *paths: Path,
    columns: Sequence[str] = (),
    search: Row | None = None,
    more: Sequence[RenderableType] = (),
    explained: bool = False,
) -> RenderableType:
    """Return what `protrain fit` prints, with `more` below; `paths` are the files that it wrote.

    The answer of a `search` comes first. The `columns` of `--columns` are a table of their own.
    Sentences follow on limits and helpful changes, and, if `explained`, on the figures.
    """
    every = [way for row in rows for way in ways(row)]
    disk = any(way["peak_bytes"].disk for way in every if way.get("peak_bytes"))
    tiers = ("device", "host", *["disk"] * disk)

    def numbers(way: Row) -> Sequence[str]:
        tokens = way.get("tokens_per_second")
        first = [f"{tokens:,.0f}" if tokens else "-" if way["name"] == "plan" else "no"]
        if search:
            most = way.get("most_tokens_per_second")
            first = [f"{way['price_per_hour']:.2f}", *first, f"{most:,.0f}"]
        return *first, *gibibytes(way.get("peak_bytes"))[: len(tiers)]

    heads = ("an hour", "tokens/s", "at most", *tiers) if search else ("tokens/s", *tiers)
    parts: list[RenderableType] = [*_found_text(search, rows), ""] if search is not None else []
    parts += [_table(rows, heads, numbers), ""]
    if shown := [COLUMNS[name] for name in columns]:
        bill = _table(rows, [one.head for one in shown], lambda w: [one.text(w) for one in shown])
        parts += [bill, ""]
    answered = [row for row in rows if "bottleneck" in row]
    lines: list[str] = []
    about: dict[str, list[str]] = {}
    for row in answered:
        where = f"{cell_text(row)}: " * (len(answered) > 1)
        lines += [f"{where}{line}" for line in _limits(row)]
        for words in row["about"]:
            about.setdefault(words, []).append(cell_text(row))
    count = sum(row["verdict"] != "does not fit" for row in answered)
    for words, cells in about.items():
        is_common = len(cells) == count > (len(answered) > 1)
        lines.append(words if is_common else f"{'; '.join(cells)}: {words}")
    lines += notes(answered, columns) if explained else columns_text(columns)
    lines += ["--explain says more, --what-helps what other changes gain"] * (not explained)
    helps = (line for row in rows for line in _helps_text(row))
    return Group(*parts, *map(Text, lines), *map(wrote, paths), *helps, *more)


def _limits(row: Row) -> list[str]:
    """Sentences on the limit of a cell and the change that helps most."""
    if not row.get("peak_bytes"):
        return [row["bottleneck"], f"to make it fit, {row['advice'][0]}"]
    if row["pipeline"]:
        return [row["bottleneck"]]
    best = row.get("best_change")
    gained = best and (best["change"], row["tokens_per_second"], best["tokens_per_second"])
    sizes = row["peak_bytes"], row["plain_device_bytes"], row["budget_bytes"]
    return [f"limited by {row['bottleneck']}", change_text(*sizes, gained=gained)]


def columns_text(columns: Sequence[str]) -> list[str]:
    """Descriptions of the columns of `--columns`."""
    return [f"{COLUMNS[name].head}: {COLUMNS[name].words}" for name in columns]


def notes(rows: Sequence[Row], columns: Sequence[str] = ()) -> list[str]:
    """Sentences on the words and figures of some cells, and their accuracy."""
    every = [way for row in rows for way in ways(row)]
    fitting = [row for row in rows if row.get("peak_bytes")]
    said = [WHOLE_SUMS] * any(
        (row["alternatives"] or not row.get("peak_bytes"))
        and row["micro_batches"] > 1 < row["num_devices"]
        for row in rows
    )
    said += [NO_TOKENS] * any(row["seq_len"] == 1 for row in rows)
    said += headroom_text({row["hardware"]: row["headroom_bytes"] for row in rows})
    said += [ALLOCATED] * any(
        row["reserved_bytes_about"] > row["peak_bytes"].on_device for row in fitting
    )
    said += [TIGHT] * any(way.get("tight") for way in every)
    said += columns_text(columns)
    return said + list(dict.fromkeys(note for row in rows for note in row["notes"]))


def _helps_text(row: Row) -> Iterator[RenderableType]:
    """Lines on changes that help, each by itself."""
    if "what_helps" not in row:
        return
    tokens = row["tokens_per_second"]
    speed = f", {tokens:,.0f} tokens/s" if tokens else ", which does not fit"
    yield ""
    yield Text(f"what helps {cell_text(row)}{speed}, each by itself:")
    others: dict[str, list[str]] = {"left out: less than 2 %": [], "does not fit": []}
    named: list[str] = []
    for one in row["what_helps"]:
        times, words = one["times_as_fast"], one["change"]
        if times is None:
            named.append(f"would fit with {words}: {one['tokens_per_second']:,.0f} tokens/s")
        elif times >= 1 + WORTH:
            named.append(f"{times:.2f} times as fast with {words}")
        else:
            others["left out: less than 2 %" if times else "does not fit"].append(one["what"])
    named = named or ["nothing that was tried"]
    named += [f"{words}: {', '.join(unnamed)}" for words, unnamed in others.items() if unnamed]
    yield from (Text(f"  {line}") for line in named)


def _found_text(search: Row, rows: Sequence[Row]) -> Iterator[Text]:
    """Lines on the cheapest or the fastest cell of a search."""
    speed, unseen, best = search["tokens_per_second"], search["not_looked_at"], search["best"]
    asked = f"{speed:,.0f} tokens/s" if speed else "a speed"
    count = len(rows) + len(unseen)
    head = f"none of {count} reaches {asked}"
    if best is not None:
        price, reached = best["price_per_hour"], best["tokens_per_second"]
        which = f"the cheapest that reaches {asked}" if speed else "the fastest"
        head = (
            f"{which}: {cell_text(best)} at {price:.2f} an hour, {reached:,.0f} tokens/s,"
            f" {price / reached / 3600 * 1e6:.3g} for a million tokens"
        )
    yield Text(head, style="bold")
    for one in rows:
        reached = one.get("tokens_per_second") or 0
        if speed and reached < speed <= one["most_tokens_per_second"]:
            yield Text(
                f"{cell_text(one)} is cheaper: its plan reaches {reached:,.0f}, and whether another"
                f" reaches {asked} is open"
            )
    if unseen:
        what = "dearer" if speed else "slower"
        yield Text(f"{len(unseen)} {what} ones of {count} were not looked at")
