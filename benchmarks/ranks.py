"""What several devices are worth: simulated for large machines, measured on ranks of this one.

    python -m benchmarks.ranks [--quick] [--stages simulated measured] [--out FILE] [--work DIR]

Simulated: Llama 3.1 70B and 405B on up to eight servers with eight H100; every cell is planned, and
its seconds are the simulator's. Profiles are analytic (`benchmarks.shapes`); what joins the devices
is the catalogue's. Measured: see `benchmarks/ranks_measured.py`. Tables are made from the JSON
alone, and a stage that is not run keeps its results.
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machines import Machine, updated_per_s
from benchmarks.ranks_measured import measured
from benchmarks.shapes import SHAPES, profile
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.planning.model.problem import OVERLAPPING
from protrain_plan.planning.outcome import Infeasible
from protrain_plan.planning.questions.planner import plan
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.contract.program.group import group_on, profile_of_rank
from protrain_runtime.contract.records import states_text
from protrain_runtime.contract.records.plan import Budgets, DeviceGroup, Plan
from protrain_runtime.contract.records.profile import Profile

MODELS = ("llama-3.1-70b", "llama-3.1-405b")
DEVICES = (1, 8, 16, 64)
MACHINE = "h100-sxm"
BATCH_SIZE, SEQ_LEN = 1, 8192
GAP = 0.02
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model on one group of devices."""

    model: str
    group: DeviceGroup


def cells(models: Sequence[str], *, quick: bool) -> Iterator[Cell]:
    """Every group, sharded over all; from two nodes on, also with replicas of nodes."""
    hardware = load_hardware(MACHINE)
    for model in models:
        for count in (1, 8) if quick else DEVICES:
            group = group_on(hardware, count)
            yield Cell(model=model, group=group)
            if group.num_nodes > 1:
                yield Cell(model=model, group=replace(group, num_replicas=group.num_nodes))


def simulated(cell: Cell) -> Json:
    """The plan of a cell, in numbers."""
    profiled = _profile(cell.model)
    own = profile_of_rank(profiled, cell.group).hardware
    capacity = {tier.name: tier.capacity_bytes for tier in own.tiers}
    budgets = Budgets(device=own.device.memory_bytes, host=capacity["host"], disk=capacity["disk"])
    answer = plan(
        profiled,
        budgets,
        effort=Effort(gap_target=GAP),
        settings=replace(OVERLAPPING, group=cell.group),
    )
    found: Json = {
        "model": cell.model,
        "devices": cell.group.num_devices,
        "nodes": cell.group.num_nodes,
        "replicas": cell.group.num_replicas,
    }
    if isinstance(answer, Infeasible):
        return found | {"short_of": answer.tier, "shortfall_bytes": answer.shortfall_bytes}
    made = answer.plan
    peak = made.prediction.peak_bytes
    tokens = BATCH_SIZE * SEQ_LEN * cell.group.num_devices
    return found | {
        "step_seconds": made.prediction.step_seconds,
        "gap": answer.gap,
        "tokens_per_second": tokens / made.prediction.step_seconds,
        "device_bytes": peak.device + peak.context,
        "host_bytes": peak.host,
        "disk_bytes": peak.disk,
        "states": _states(made),
    }


def _profile(model: str) -> Profile:
    [shape] = [shape for shape in SHAPES if shape.name == model]
    hardware = load_hardware(MACHINE)
    rates = hardware.rates
    assert rates is not None
    machine = Machine(
        hardware=hardware,
        flops_per_s=rates.bfloat16_flops_per_s,
        memory_bytes_per_s=rates.memory_bytes_per_s,
        host_parameters_per_s=updated_per_s(rates),
    )
    return profile(shape, machine, batch_size=BATCH_SIZE, seq_len=SEQ_LEN)


def _states(made: Plan) -> dict[str, int]:
    """How many blocks have their states where."""
    found: dict[str, int] = {}
    for unit in made.units:
        if unit.kind == "block":
            words = states_text(unit.states)
            found[words] = found.get(words, 0) + 1
    return found


# --- tables ---------------------------------------------------------------------------------------


def markdown(document: Json) -> str:
    """The tables of a run."""
    lines = ["# Several devices", "", f"`{document['command']}`", ""]
    if document["simulated"]:
        lines += _simulated_lines(document)
    if document["measured"]:
        lines += _measured_lines(document["measured"])
    return "\n".join(lines) + "\n"


def _simulated_lines(document: Json) -> Iterator[str]:
    yield from ("## Simulated", "", "**Simulated, not measured.** Assumed are:", "")
    yield from (f"- {line}" for line in document["assumptions"])
    for model in dict.fromkeys(cell["model"] for cell in document["simulated"]):
        found = [cell for cell in document["simulated"] if cell["model"] == model]
        yield from ("", f"### {model}", "")
        yield "| devices | nodes | replicas | step | gap | tokens/s | a device | states of blocks |"
        yield "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
        yield from (_row(cell) for cell in found)
    yield from (
        "",
        "`gap`: no plan with as many replicas is faster by more. `a device`: tokens per second of"
        " each, over those in the first row with a plan.",
        "",
    )


def _row(cell: Json) -> str:
    start = f"| {cell['devices']} | {cell['nodes']} | {cell['replicas']} |"
    if "step_seconds" not in cell:
        gib = cell["shortfall_bytes"] / 2**30
        return f"{start} no plan | - | - | - | {gib:,.0f} GiB of {cell['short_of']} are missing |"
    most_first = sorted(cell["states"].items(), key=lambda item: (-item[1], item[0]))
    states = ", ".join(f"{count} {words}" for words, count in most_first)
    return (
        f"{start} {cell['step_seconds']:.2f} s | {cell['gap']:.1%}"
        f" | {cell['tokens_per_second']:,.0f}"
        f" | {cell['efficiency']:.2f} | {states} |"
    )


def _measured_lines(found: Json) -> Iterator[str]:
    yield from ("## Measured on this machine", "", found["what"], "")
    yield "| ranks | states | step | over one rank | bytes, predicted | measured |"
    yield "| ---: | --- | ---: | ---: | ---: | ---: |"
    alone = found["rows"][0]["step_seconds"]
    for row in found["rows"]:
        yield (
            f"| {row['ranks']} | {row['plan']} | {row['step_seconds']:.2f} s"
            f" | {row['step_seconds'] / alone:.2f} | {row['predicted_bytes'] / 2**20:.1f} MiB"
            f" | {row['device_bytes'] / 2**20:.1f} MiB |"
        )
    yield ""


def _with_efficiency(found: list[Json]) -> list[Json]:
    """Tokens per second of one device, over those of the model's first cell that fits."""
    first: dict[str, float] = {}
    told = []
    for cell in found:
        if "tokens_per_second" in cell:
            each = cell["tokens_per_second"] / cell["devices"]
            first.setdefault(cell["model"], each)
            cell = cell | {"efficiency": each / first[cell["model"]]}
        told.append(cell)
    return told


def _assumptions() -> list[str]:
    hardware = load_hardware(MACHINE)
    wanted = ("within", "across", "interconnect", "host", "disk", "compute_efficiency", "link")
    return [
        f"{BATCH_SIZE} sequence of {SEQ_LEN} tokens on each device, bfloat16 with float32 master"
        " states, AdamW; profiles by the formulas of `benchmarks/costs.py`",
        *(text for text in hardware.sources if text.partition(":")[0] in wanted),
    ]


def _kept(cell: Cell, work: Path) -> Json:
    """What was simulated of a cell, now or in a run before."""
    group = cell.group
    path = work / f"{cell.model}-{group.num_devices}-{group.num_replicas}.json"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(simulated(cell)))
    found: Json = json.loads(path.read_text())
    print(found, file=sys.stderr)
    return found


def main() -> None:
    """Run, write the JSON, and the tables beside it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    stages = ("simulated", "measured")
    parser.add_argument("--quick", action="store_true", help="two cells, one and two ranks")
    parser.add_argument("--stages", nargs="+", choices=stages, default=stages)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--work", type=Path, help="where what is done is kept for a second run")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ranks.json"))
    asked = parser.parse_args()
    document: Json = {"simulated": [], "measured": None}
    if asked.out.exists():
        document |= json.loads(asked.out.read_text())
    document |= {
        "command": f"python -m benchmarks.ranks{' --quick' if asked.quick else ''}",
        "machine": f"{platform.machine()}, {platform.system()}",
        "assumptions": _assumptions(),
    }
    with tempfile.TemporaryDirectory() as folder:
        work: Path = asked.work or Path(folder)
        if "simulated" in asked.stages:
            models = MODELS[:1] if asked.quick else asked.models
            found = [_kept(cell, work) for cell in cells(models, quick=asked.quick)]
            document["simulated"] = _with_efficiency(found)
        if "measured" in asked.stages:
            ranks = (1, 2) if asked.quick else (1, 2, 4)
            document["measured"] = measured(work, ranks=ranks, quick=asked.quick)
    if document["measured"] is None:
        document["command"] += " --stages simulated"
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    asked.out.with_suffix(".md").write_text(markdown(document))


if __name__ == "__main__":
    main()
