"""A trainer's file beside an answer: its keys, and the changes to make."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from protrain_plan.presentation.terminal import Text, fields_of
from protrain_runtime.contract.records.plan import KEEP, PERSISTENT

if TYPE_CHECKING:
    from protrain_plan.models.trainer_files import TrainerFile
    from protrain_plan.planning.questions.answers import Answer


class Change(NamedTuple):
    """A key of the file, with its value there (None: not set) and the one to write."""

    key: str
    now: object
    new: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Changes of a file for one answer.

    `under_plan`: only the plan trains so, with these changes. `note` is a further difference.
    """

    cell: str
    changes: tuple[Change, ...]
    under_plan: bool = False
    note: str = ""


def advice(file: "TrainerFile", cell: str, found: "Answer", *, plain_fits: bool) -> Advice:
    """Return the changes for a plan, or for the largest batch that fits if there is none.

    A file has one switch where a plan has a decision per block. Without switches it trains as plain
    PyTorch does; with checkpointing, no block holds more than in a plan that only recomputes.
    """
    plan = found.solved.plan if found.solved else None
    batch, micro_batches = found.profile.workload.batch_size, found.question.settings.micro_batches
    if plan is None:
        largest = (found.infeasible and found.infeasible.largest_batch_size) or 0
        # The largest batch that fits and divides the sequences of an update.
        sequences = batch * micro_batches
        batch = max((n for n in range(1, largest + 1) if sequences % n == 0), default=0)
        micro_batches = sequences // batch if batch else 0
    rows, odd = divmod(batch, file.sequences_per_row)
    wanted = {"batch_size": rows, "accumulate": micro_batches} if rows and not odd else {}
    if wanted and plan is not None and micro_batches > 1:
        wanted["global_batch"] = rows * micro_batches * plan.settings.group.num_devices
    said = file.by_default | file.understood
    changes = [
        Change(key, said.get(key), value)
        for fact, value in wanted.items()
        if (key := file.format.key_of(fact)) and said.get(key) != value
    ]
    if plan is None:
        return Advice(cell=cell, changes=tuple(changes))
    # The plan does no more than recompute blocks, as checkpointing does with all of them.
    recomputes = not plain_fits and all(
        unit.states == PERSISTENT
        and not unit.activations.tier
        and (unit.activations == KEEP or (unit.kind == "block" and unit.activations.recomputes))
        for unit in plan.units
    )
    blocks = [unit for unit in plan.units if unit.kind == "block"]
    many = sum(unit.activations.recomputes and not unit.activations.tier for unit in blocks)
    note = f"the plan recomputes {many} of {len(blocks)} blocks, and the file all"
    changes += _switched(file, file.format.checkpointing, on=recomputes)
    changes += _switched(file, file.format.offloading, on=False)
    return Advice(
        cell=cell,
        changes=tuple(changes),
        under_plan=not (plain_fits or recomputes),
        note=note if recomputes and many < len(blocks) else "",
    )


def _switched(file: "TrainerFile", switch: Mapping[str, Any], *, on: bool) -> list[Change]:
    keys = (key for key in switch["keys"] if file.decided.get(key) is not None)
    now = file.decided.get(key := next(keys, switch["keys"][0]))
    new = switch["on" if on else "off"]
    is_so = new == (switch["default"] if now is None else now)
    return [] if is_so else [Change(key, now, new)]


def file_json(file: "TrainerFile", advised: Sequence[Advice]) -> dict[str, Any]:
    """Return what `--json` prints about a file: its keys in lists, and changes for each answer."""
    said = fields_of(file, "path", "options")
    for name, keys in fields_of(file, "understood", "by_default").items():
        said[name] = [{"key": k, "value": v, "option": file.option_of(k)} for k, v in keys.items()]
    said |= fields_of(file, "decided", "ignored")
    return {"trainer_file": said | {"format": file.format.name, "changes": advised}}


def file_text(file: "TrainerFile", advised: Sequence[Advice]) -> list[Text]:
    """The same in short: options and changes."""
    name = Path(file.path).name
    lines = ["", f"{name}, as {file.format.name} reads it: {file.command}"]
    decided = [key for key, value in file.decided.items() if value]
    if file.by_default:
        lines.append(f"  by default of {file.format.name}: {', '.join(file.by_default)}")
    if decided:
        lines.append(f"  decided by the plan: {', '.join(decided)}")
    if file.shards and "num_devices" not in (*file.options, *file.given):
        key = file.shards[0]
        lines.append(f"  {key} is for several devices: give their number with --num-devices")
    for one in advised:
        if one.changes or one.under_plan:
            lines.append(f"in {name}, for {one.cell}{', under the plan' * one.under_plan}:")
        if one.under_plan:
            lines.append(
                "  (the file cannot express all of it: protrain plan writes it, and"
                f" {file.format.follows} follows it)"
            )
        for key, now, new in one.changes:
            before = "(not set)" if now is None else json.dumps(now)
            lines.append(f"  {key}: {before} -> {json.dumps(new)}")
        lines += [f"  ({one.note})"] if one.note else []
    return [Text(line) for line in lines]
