"""What `fit --sweep`, `fit --what-helps` and `hardware search` print: machines compared."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from protrain_plan.planning.questions.spending import cost_of
from protrain_plan.presentation.plans import devices_json, fits_json, fits_text, solved_json
from protrain_plan.presentation.profiles import trust
from protrain_plan.presentation.terminal import Text, table_of
from protrain_runtime.contract.records.hardware import PCIE
from protrain_runtime.contract.units import exact_bytes

if TYPE_CHECKING:
    from protrain_plan.planning.outcome import Solved
    from protrain_plan.planning.questions.machines import Found, LookedAt
    from protrain_plan.planning.questions.objectives import Fit
    from protrain_plan.planning.questions.sensitivities import Helped, Reached

BAR = 20
"""Characters of the fastest line's bar."""


def reached_json(reached: "Reached") -> dict[str, Any]:
    """A plan with its speed, or that there is none."""
    solved = reached.solved
    return {
        "verdict": "fits" if solved else "does not fit",
        "tokens_per_second": reached.tokens_per_s or None,
        "binds": reached.binds(),
        **(solved_json(solved) if solved else {}),
    }


def _where(reached: "Reached") -> dict[str, Any]:
    profile = reached.question.profile
    return {
        "hardware": profile.hardware.name,
        "batch_size": profile.workload.batch_size,
        "seq_len": profile.workload.seq_len,
    }


def _cell(reached: "Reached") -> str:
    """`4 x rtx-4090 1 x 2048`: devices and machine, sequences and their tokens."""
    question = reached.question
    workload, count = question.profile.workload, question.group.num_devices
    many = f"{count} x " if count > 1 else ""
    machine = question.profile.hardware.name
    return f"{many}{machine} {workload.batch_size} x {workload.seq_len}"


def _taken(solved: "Solved | None") -> list[str]:
    """What is taken of the device, the host and the disk."""
    if solved is None:
        return ["-"] * 3
    peak = solved.plan.prediction.peak_bytes
    sizes = (peak.on_device, peak.host, peak.disk)
    return [f"{size / 2**30:.1f} GiB" if size else "-" for size in sizes]


# --- sweeps ---------------------------------------------------------------------------------------


def sweep_json(
    resource: str, values: Sequence[float], lines: Sequence[Sequence["Reached"]]
) -> dict[str, Any]:
    """What `protrain fit --sweep --json` prints: one line per machine and size of batch."""
    return {
        "sweep": resource,
        "lines": [
            {
                **_where(line[0]),
                **(devices_json(line[0].question.group) if resource != "num-devices" else {}),
                "points": [
                    {"value": value, **reached_json(one)}
                    for value, one in zip(values, line, strict=True)
                ],
            }
            for line in lines
        ],
    }


def _value(resource: str, value: float) -> str:
    if resource == "num-devices":
        return f"{value:.0f}"
    if resource != "link":
        return exact_bytes(int(value))
    named = [f" ({name})" for name, speed in PCIE.items() if speed == value]
    return f"{value / 1e9:.3g} GB/s{''.join(named)}"


def sweep_text(
    resource: str, values: Sequence[float], lines: Sequence[Sequence["Reached"]]
) -> RenderableType:
    """What `protrain fit --sweep` prints: bars in proportion to the fastest of a line."""
    parts: list[RenderableType] = []
    # What is swept has a name of its own where it is a column of what is taken, too.
    head = {"num-devices": "devices", "link": "link"}.get(resource, f"{resource} there is")
    for line in lines:
        parts.append(Text(_title(resource, line[0]), style="bold"))
        table = table_of(head, "tokens/s", "device", "host", "disk", "", words=())
        for column in table.columns:
            column.no_wrap = True
        fastest = max(one.tokens_per_s for one in line)
        for value, one in zip(values, line, strict=True):
            speed, bar = "no", Text("")
            if one.solved:
                speed = f"{one.tokens_per_s:,.0f}"
                bar = Text("█" * max(1, round(BAR * one.tokens_per_s / fastest)), justify="left")
            table.add_row(_value(resource, value), speed, *_taken(one.solved), bar)
        parts += [table, "", Text("what makes up the step, or what is missing:")]
        words = [(_value(resource, value), one) for value, one in zip(values, line, strict=True)]
        parts += [Text(f"  {value}: {one.binds()}") for value, one in words] + [""]
    machines = dict.fromkeys(line[0].question.profile.hardware for line in lines)
    parts += [Text(f"{machine.name}: {trust(machine)}") for machine in machines]
    return Group(*parts)


def _title(resource: str, first: "Reached") -> str:
    if resource != "num-devices":
        return _cell(first)
    workload = first.question.profile.workload
    name = first.question.profile.hardware.name
    return f"{name} {workload.batch_size} x {workload.seq_len}"


# --- what helps -----------------------------------------------------------------------------------


def helps_json(fits: Sequence["Fit"], helps: Sequence[Sequence["Helped"]]) -> dict[str, Any]:
    """What `protrain fit --what-helps --json` prints: the cells of `fit`, with changes in each."""
    data = fits_json(fits)
    for cell, found in zip(data["cells"], helps, strict=True):
        cell["what_helps"] = [
            {
                "what": one.change.what,
                "change": one.change.words,
                "fits": one.times != 0,
                "times_as_fast": one.times,
                "planned": one.reached is not None,
                "tokens_per_second": (one.reached and one.reached.tokens_per_s) or None,
            }
            for one in _sorted(found)
        ]
    return data


def _sorted(helps: Sequence["Helped"]) -> list["Helped"]:
    def speed(one: "Helped") -> float:
        return one.reached.tokens_per_s if one.reached else 0.0

    return sorted(helps, key=lambda one: -speed(one))


def helps_text(
    fits: Sequence["Fit"],
    bases: Sequence["Reached"],
    helps: Sequence[Sequence["Helped"]],
    *paths: Path,
    columns: Sequence[str] = (),
) -> RenderableType:
    """What `protrain fit --what-helps` prints: the table of `fit`, and what is worth most below."""
    parts: list[RenderableType] = [fits_text(fits, *paths, columns=columns)]
    for base, found in zip(bases, helps, strict=True):
        speed = f", {base.tokens_per_s:,.0f} tokens/s" if base.solved else ", which does not fit"
        parts += ["", Text(f"what helps {_cell(base)}{speed}, each by itself:")]
        named = [one for one in _sorted(found) if one.is_worth_it]
        parts += [Text(f"  {_worth(one)}") for one in named]
        if not named:
            parts.append(Text("  nothing of what was tried"))
        for words, others in (
            ("less than 2 %, and left out", [one for one in found if one.is_too_little]),
            ("does not fit", [one for one in found if one.times == 0]),
        ):
            if others:
                parts.append(Text(f"  {words}: {', '.join(one.change.what for one in others)}"))
    return Group(*parts)


def _worth(helped: "Helped") -> str:
    assert helped.reached is not None, "what is worth something was planned"
    words = helped.change.words
    if helped.times is None:
        return f"would fit with {words}: {helped.reached.tokens_per_s:,.0f} tokens/s"
    return f"{helped.times:.2f} times as fast with {words}"


# --- the search for a machine ---------------------------------------------------------------------


def search_json(found: "Found", asked: dict[str, Any]) -> dict[str, Any]:
    """What `protrain hardware search --json` prints."""
    return {
        **asked,
        "best": None if found.best is None else _offer_json(found.best),
        "looked_at": [_offer_json(one) for one in found.looked_at],
        "not_looked_at": [
            {"name": offer.name, "price_per_hour": offer.price_per_hour} for offer in found.unseen
        ],
    }


def _offer_json(one: "LookedAt") -> dict[str, Any]:
    workload = one.offer.question.profile.workload
    data = {
        "name": one.offer.name,
        "hardware": one.offer.question.profile.hardware.name,
        "batch_size": workload.batch_size,
        "seq_len": workload.seq_len,
        **asdict(one.offer.question.group),
        "price_per_hour": one.offer.price_per_hour,
        "most_tokens_per_second": one.most_tokens_per_s,
    }
    return {**data, "bound": one.bound, **(reached_json(one.reached) if one.reached else {})}


def search_text(found: "Found", *, speed: float | None, num_offers: int) -> RenderableType:
    """What `protrain hardware search` prints: what was looked at, and the answer below."""
    table = table_of("machine", "batch", "an hour", "tokens/s", "at most", "by", words=(0, 5))
    for one in found.looked_at:
        workload = one.offer.question.profile.workload
        table.add_row(
            one.offer.name,
            f"{workload.batch_size} x {workload.seq_len}",
            f"{one.offer.price_per_hour:.2f}",
            f"{one.tokens_per_s:,.0f}" if one.tokens_per_s else "-",
            f"{one.most_tokens_per_s:,.0f}",
            one.bound,
            style="green" if one is found.best else None,
        )
    parts: list[RenderableType] = [table, ""]
    if found.unseen:
        what = "dearer" if speed else "slower"
        parts.append(Text(f"{len(found.unseen)} {what} ones of {num_offers} were not looked at"))
    best = found.best
    if best is None or best.reached is None:
        parts.append(Text(f"none of {num_offers} reaches {_asked(speed)}"))
        return Group(*parts)
    price, tokens_per_s = best.offer.price_per_hour, best.tokens_per_s
    million = cost_of(1e6, tokens_per_s=tokens_per_s, price_per_hour=price)
    which = f"the cheapest that reaches {_asked(speed)}" if speed else "the fastest"
    parts.append(
        Text(
            f"{which}: {best.offer.name} at {price:.2f} an hour, {tokens_per_s:,.0f} tokens/s,"
            f" {million:.3g} for a million tokens",
            style="bold",
        )
    )
    parts.append(Text(f"what makes up its step: {best.reached.binds()}"))
    parts += [
        Text(
            f"{one.offer.name} is cheaper: its plan reaches {one.tokens_per_s:,.0f}, and whether"
            f" another reaches {_asked(speed)} is open"
        )
        for one in found.looked_at
        if speed and one.tokens_per_s < speed <= one.most_tokens_per_s
    ]
    parts.append(Text(f"{best.offer.name}: {trust(best.offer.question.profile.hardware)}"))
    return Group(*parts)


def _asked(speed: float | None) -> str:
    return f"{speed:,.0f} tokens/s" if speed else "a speed"
