"""The output of `fit --sweep`, `fit --what-helps` and `hardware search`: machines compared."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from protrain_plan.planning.questions.spending import cost_of
from protrain_plan.presentation.plans import (
    cell_json,
    cell_text,
    fits_text,
    gibibytes,
    headroom_text,
    solved_json,
    writes_of,
)
from protrain_plan.presentation.profiles import trust
from protrain_plan.presentation.terminal import Text, bar, fields_of, table_of
from protrain_runtime.contract.records.hardware import PCIE, Hardware
from protrain_runtime.contract.units import exact_bytes

if TYPE_CHECKING:
    from protrain_plan.planning.questions.answers import Fit
    from protrain_plan.planning.questions.shopping import Found, Tried


def _reached_json(fit: "Fit | None") -> dict[str, Any]:
    if fit is None:
        return {}
    return {
        "verdict": "fits" if fit.solved else "does not fit",
        "tokens_per_second": fit.tokens_per_s,
        "binds": fit.binds,
        "headroom_bytes": fit.headroom_bytes,
        **(solved_json(fit.solved) if fit.solved else {}),
        "disk_writes": writes_of(fit.solved, fit.profile),
    }


# --- sweeps ---------------------------------------------------------------------------------------


def sweep_json(resource: str, value: float, fit: "Fit") -> dict[str, Any]:
    """Return what `protrain fit --sweep --json` prints in a line: one value of one cell."""
    return {
        "sweep": resource,
        "value": value,
        **cell_json(fit),
        **fields_of(fit.question.group),
        **_reached_json(fit),
    }


def _value(resource: str, value: float) -> str:
    if resource == "num-devices":
        return f"{value:.0f}"
    if resource != "link":
        return exact_bytes(int(value))
    named = [f" ({name})" for name, speed in PCIE.items() if speed == value]
    return f"{value / 1e9:.3g} GB/s{''.join(named)}"


def sweep_text(
    lines: Iterable[Sequence[dict[str, Any]]], machines: Iterable[Hardware]
) -> RenderableType:
    """Return what `protrain fit --sweep` prints: bars in proportion to the fastest of a line."""
    parts: list[RenderableType] = []
    left: dict[str, int] = {}
    for line in lines:
        first, resource = line[0], line[0]["sweep"]
        # What is swept has a name of its own where it is a column of what is taken, too.
        head = {"num-devices": "devices", "link": "link"}.get(resource, f"{resource} there is")
        swept = resource == "num-devices"
        many = f"{first['num_devices']} x " if first["num_devices"] > 1 and not swept else ""
        title = f"{many}{first['hardware']} {first['batch_size']} x {first['seq_len']}"
        table = table_of(head, "tokens/s", "device", "host", "disk", "", words=())
        for column in table.columns:
            column.no_wrap = True
        fastest = max(point["tokens_per_second"] or 0.0 for point in line)
        binds: list[Text] = []
        for point in line:
            value, tokens = _value(resource, point["value"]), point["tokens_per_second"]
            if tokens:
                drawn, sizes = bar(20 * tokens / fastest), gibibytes(point["peak_bytes"])
                table.add_row(value, f"{tokens:,.0f}", *sizes, drawn)
            else:
                table.add_row(value, "no", "-", "-", "-", "")
            binds.append(Text(f"  {value}: {point['binds']}"))
            left[point["hardware"]] = point["headroom_bytes"]
        told = Text("what makes up the step, or what is missing:")
        parts += [Text(title, style="bold"), table, "", told, *binds, ""]
    notes = [
        *headroom_text(left),
        *(f"{one.name}: {trust(one)}" for one in dict.fromkeys(machines)),
    ]
    return Group(*parts, *map(Text, notes))


# --- what helps -----------------------------------------------------------------------------------


def helps_json(fit: "Fit", helps: Sequence["Tried"]) -> dict[str, Any]:
    """Return what `protrain fit --what-helps --json` adds to a cell: the changes."""
    return {
        "what_helps": [
            {
                "what": one.variation.name,
                "change": one.variation.words,
                "fits": one.times_as_fast(fit) != 0,
                "times_as_fast": one.times_as_fast(fit),
                "planned": one.reached is not None,
                "tokens_per_second": one.tokens_per_s or None,
            }
            for one in _ranked(helps)
        ]
    }


def _ranked(helps: Sequence["Tried"]) -> list["Tried"]:
    return sorted(helps, key=lambda one: -one.tokens_per_s)


def helps_text(
    fits: Sequence["Fit"],
    helps: Sequence[Sequence["Tried"]],
    *paths: Path,
    columns: Sequence[str] = (),
) -> RenderableType:
    """Return what `protrain fit --what-helps` prints: `fit`'s table, and what is worth most."""
    from protrain_plan.planning.questions.shopping import WORTH

    parts: list[RenderableType] = [fits_text(fits, *paths, columns=columns)]
    for fit, found in zip(fits, helps, strict=True):
        speed = f", {fit.tokens_per_s:,.0f} tokens/s" if fit.solved else ", which does not fit"
        parts += ["", Text(f"what helps {cell_text(fit)}{speed}, each by itself:")]
        named: list[Text] = []
        for one in _ranked(found):
            times, words = one.times_as_fast(fit), one.variation.words
            if times is None:
                said = f"  would fit with {words}: {one.tokens_per_s:,.0f} tokens/s"
                named.append(Text(said))
            elif times >= 1 + WORTH:
                named.append(Text(f"  {times:.2f} times as fast with {words}"))
        parts += named or [Text("  nothing of what was tried")]
        known = [(one.variation.name, one.times_as_fast(fit)) for one in found]
        little = [name for name, times in known if times and times < 1 + WORTH]
        unfit = [name for name, times in known if times == 0]
        for words, others in (("less than 2 %, and left out", little), ("does not fit", unfit)):
            if others:
                parts.append(Text(f"  {words}: {', '.join(others)}"))
    return Group(*parts)


# --- the search for a machine ---------------------------------------------------------------------


def search_json(found: "Found", asked: dict[str, Any]) -> dict[str, Any]:
    """Return what `protrain hardware search --json` prints last: the answer."""
    return {
        **asked,
        "best": None if found.best is None else offer_json(found.best),
        "looked_at": [offer_json(one) for one in found.looked_at],
        "not_looked_at": [
            {"name": offer.name, "price_per_hour": offer.price_per_hour} for offer in found.unseen
        ],
    }


def offer_json(one: "Tried") -> dict[str, Any]:
    """Return what `protrain hardware search --json` prints of a machine when it was looked at."""
    question = one.variation.question
    return {
        "name": one.variation.name,
        **cell_json(one.reached or question),
        **fields_of(question.group),
        "price_per_hour": one.variation.price_per_hour,
        "most_tokens_per_second": one.most_tokens_per_s,
        "bound": one.bound,
        **_reached_json(one.reached),
    }


def search_text(data: dict[str, Any], best: Hardware | None) -> RenderableType:
    """Return what `protrain hardware search` prints: what was looked at, and the answer below.

    `best` is the machine of the answer.
    """
    speed, found, unseen = data["tokens_per_second"], data["looked_at"], data["not_looked_at"]
    asked = f"{speed:,.0f} tokens/s" if speed else "a speed"
    count, answer = len(found) + len(unseen), data["best"]
    table = table_of("machine", "batch", "an hour", "tokens/s", "at most", "by", words=(0, 5))
    for one in found:
        tokens = one.get("tokens_per_second")
        table.add_row(
            one["name"],
            f"{one['batch_size']} x {one['seq_len']}",
            f"{one['price_per_hour']:.2f}",
            f"{tokens:,.0f}" if tokens else "-",
            f"{one['most_tokens_per_second']:,.0f}",
            one["bound"],
            style="green" if one == answer else None,
        )
    told = [""]
    if unseen:
        what = "dearer" if speed else "slower"
        told.append(f"{len(unseen)} {what} ones of {count} were not looked at")
    if answer is None or best is None:
        return Group(table, *map(Text, (*told, f"none of {count} reaches {asked}")))
    name, price, reached = answer["name"], answer["price_per_hour"], answer["tokens_per_second"]
    million = cost_of(1e6, tokens_per_s=reached, price_per_hour=price)
    which = f"the cheapest that reaches {asked}" if speed else "the fastest"
    head = (
        f"{which}: {name} at {price:.2f} an hour, {reached:,.0f} tokens/s,"
        f" {million:.3g} for a million tokens"
    )
    below = [f"what makes up its step: {answer['binds']}"]
    below += [
        f"{one['name']} is cheaper: its plan reaches {one.get('tokens_per_second') or 0:,.0f}, and"
        f" whether another reaches {asked} is open"
        for one in found
        if speed and (one.get("tokens_per_second") or 0) < speed <= one["most_tokens_per_second"]
    ]
    below += headroom_text({name: answer["headroom_bytes"]})
    below.append(f"{name}: {trust(best)}")
    return Group(table, *map(Text, told), Text(head, style="bold"), *map(Text, below))
