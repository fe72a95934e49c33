"""Pipelines that others have measured: what we predict of them, and what we would plan instead.

    python -m benchmarks.stages [--only WORD...] [--jobs N]

`stages.yaml` has the cases, with links. Nothing runs on a card.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

import yaml

from benchmarks.pages import markdown_table, runs_list
from benchmarks.runner import Cell, Document, found, main
from benchmarks.uniform import AMPLE, decided
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import ConfigSource
from protrain_plan.planning.questions.allocator_slack import default_device_bytes
from protrain_plan.planning.search.improving import Effort
from protrain_plan.planning.stages.answer import StagesQuestion, searched
from protrain_plan.planning.stages.cycles import Pipeline
from protrain_plan.planning.stages.pipelines import stage_seconds
from protrain_plan.planning.stages.schedule import Simulated, StageSeconds, simulated
from protrain_plan.planning.stages.shapes import Shape
from protrain_plan.simulation.group import group_on, profile_of_rank
from protrain_runtime.contract.records.hardware import Collectives, Hardware, Interconnect
from protrain_runtime.contract.records.plan import (
    ALONE,
    KEEP,
    PERSISTENT,
    Activations,
    Budgets,
    Schedule,
    StepSettings,
)
from protrain_runtime.contract.records.profile import Profile
from tests.support.estimates import estimates

TOLD: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
HEADER = ("case", "figure", "theirs, measured", "ours, predicted", "off", "our best, predicted")
IDLE, SECONDS = "idle share", "seconds of a step"

Case = Mapping[str, Any]
Row = tuple[str, float, float | None, float | None]  # a figure: theirs, ours, our best plan's


def cells() -> list[Cell]:
    """A cell for each case."""
    return [
        Cell(key=f"{name}: {case}", task="stages", arguments={"source": name, "case": case})
        for name, source in TOLD["sources"].items()
        for case in source["cases"]
    ]


def predicted(source: str, case: str) -> dict[str, Any]:
    """The rows of a case."""
    told = TOLD["sources"][source]
    return {"rows": list(_KINDS[told["kind"]](told | told["cases"][case]))}


def profile_of(case: Case, machine: Hardware) -> Profile:
    """The estimated profile of the case's model."""
    config = {k: v for k, v in TOLD["models"][case["model"]].items() if k != "_source"}
    config |= {"vocab_size": case["vocabulary"]} if "vocabulary" in case else {}
    sizes: Case = {"batch_size": case["batch"], "seq_len": case["seq"]} | TOLD["workload"]
    return estimates(ConfigSource(case["model"], config), machines=[machine], **sizes)[0]


def arranged_s(profile: Profile, shape: Shape, layers: Sequence[int], recomputed: int) -> float:
    """Seconds of a step of stages with so many layers, of which the first ones are recomputed.

    The first stage has the embeddings, the last one all that comes after the layers. States stay.
    """
    whole, budgets = group_on(profile.hardware, shape.stages), Budgets(device=AMPLE, host=0, disk=0)
    pipeline = Pipeline(profile, budgets, StepSettings(group=whole), shape)
    ends = [*(1 + end for end in accumulate(layers[:-1])), pipeline.count]
    schedule = Schedule(forward_lead=1, backward_lead=1, update_drain=1)
    stages = []
    for s in range(shape.stages):
        ((first, end),) = runs = pipeline.runs(ends, s)
        problem, plans = pipeline.problem(runs, s), []
        for unit in range(first, end):
            forms = (Activations(form="full"), KEEP)[not 0 < unit <= recomputed :]
            plans.append(decided(problem, unit - first, forms, PERSISTENT, schedule))
        middle, last = (problem.program(plans, updating=one) for one in (False, True))
        stages.append(stage_seconds(middle, last, [end - first]))
    return simulated(shape, stages, pipeline.hops).step_seconds


def best_s(profile: Profile, shape: Shape) -> tuple[float, float]:
    """Seconds of our best plans with one stage, and with as many, for the same sequences."""
    group = group_on(profile.hardware, shape.stages)
    machine = profile_of_rank(profile, group).hardware
    below: Case = {tier.name: tier.capacity_bytes for tier in machine.tiers}
    question = StagesQuestion(
        profiles={shape.batch: profile},
        budgets=Budgets(device=default_device_bytes(profile), **below),
        settings=StepSettings(group=group),
        global_batch=shape.batch * shape.micro_batches,
        stages=(shape.stages,),
    )
    search = searched(question, Effort())
    one, several = (search.run([p], inf, lambda _: None) for p in (1, shape.stages))
    assert one and several, "all cases fit"
    return one.step_seconds, several.step_seconds


def line(case: Case, stages: int, chunks: int = 1) -> Shape:
    """So many stages of one device each, with the case's micro-batches."""
    batch, many = case["batch"], case["micro_batches"]
    return Shape(stages=stages, group=ALONE, batch=batch, micro_batches=many, chunks=chunks)


def run_of(shape: Shape, each: Iterable[tuple[float, float]]) -> Simulated:
    """A step of stages with these seconds forward and backward, in equal chunks; hops take none."""
    v, stages = shape.chunks, list[StageSeconds]()
    for f, b in each:
        ahead, back = (f / v,) * v, (b / v,) * v
        stages += [StageSeconds(forward=ahead, backward=back, last_backward=back, update_s=0.0)]
    return simulated(shape, stages, (0.0,) * shape.stages)


def _cuts(case: Case) -> Iterator[Row]:
    shape, ours, theirs = line(case, case["stages"]), dict[str, float](), dict[str, float]()
    profile = profile_of(case, load_hardware(case["machine"]))
    for name in ("equal", "redistributed"):
        told = case[name]
        each = zip(told["forward_us"], told["backward_us"], strict=True)
        idle = run_of(shape, [(f / 1e6, b / 1e6) for f, b in each]).idle
        yield f"{name}: {IDLE}", told["idle"], sum(idle) / shape.stages, None
        theirs[name] = told["flops"] / told["flops_per_s"]
        ours[name] = arranged_s(profile, shape, told["layers"], recomputed=0)
        yield f"{name}: {SECONDS}", theirs[name], ours[name], None
    one, several = best_s(profile, shape)
    gained, told_gain = (of["equal"] / of["redistributed"] for of in (ours, theirs))
    yield "times as fast as equal", told_gain, gained, ours["equal"] / several
    yield f"fastest, also in one stage: {SECONDS}", min(theirs.values()), None, min(one, several)


def _scaling(case: Case) -> Iterator[Row]:
    profile, theirs = profile_of(case, load_hardware(case["machine"])), case["speeds"]
    each = ((p, (24 // p,) * p) for p in (1, case["stages"]))
    one, several = (arranged_s(profile, line(case, p), layers, 24) for p, layers in each)
    yield "times as fast as one device", theirs["several"] / theirs["one"], one / several, None


def _chunks(case: Case) -> Iterator[Row]:
    p, theirs = case["stages"], case["speeds"]
    steps = [run_of(line(case, p, v), [(1, 2)] * p).step_seconds for v in (1, case["chunks"])]
    gained = theirs["interleaved"] / theirs["plain"]
    yield "times as fast as 1F1B", gained, steps[0] / steps[1], None


def _one(case: Case) -> Iterator[Row]:
    speed, theirs, shape = case["link_bytes_per_s"], case["seconds"], line(case, case["stages"])
    link = Collectives(gather_bytes_per_s=speed, reduce_bytes_per_s=speed, latency_s=1e-5)
    joined = Interconnect(devices_per_node=2, intra_node=link, below="of the node")
    profile = profile_of(case, replace(load_hardware(case["machine"]), interconnect=joined))
    same, (one, several) = arranged_s(profile, shape, *case["arranged"]), best_s(profile, shape)
    yield f"two stages: {SECONDS}", theirs["several"], same, several
    yield "times as fast as one stage", theirs["one"] / theirs["several"], None, one / several


_KINDS = {"cuts": _cuts, "scaling": _scaling, "chunks": _chunks, "one": _one}


def page(document: Document) -> str:
    """The results for people."""
    answers = found(document)
    lines = ["# Pipelines that others have measured", "", *runs_list(document["runs"]), ""]
    lines.append(TOLD["about"].strip())
    for name, source in TOLD["sources"].items():
        lines += ["", f"## [{source['what']}]({source['link']})", ""]
        lines += [f"From {source['path']}. {source['differs'].strip()}", ""]
        told = {case: answers.get(f"{name}: {case}", {"rows": ()}) for case in source["cases"]}
        rows = ((case, *_words(*row)) for case, one in told.items() for row in one["rows"])
        lines += markdown_table([HEADER, *rows], numbers_from=2)
    lines += ["", "## Not compared", ""]
    lines += [f"- [{one['of']}]({one['link']}): {one['why']}." for one in TOLD["unused"]]
    return "\n".join(lines) + "\n"


def _words(what: str, theirs: float, ours: float | None, best: float | None) -> tuple[str, ...]:
    """A row's cells: shares in percent, seconds, or how many times as fast."""
    form = "{:.1%}" if IDLE in what else "{:.2f} s" if SECONDS in what else "{:.2f}"
    told = ["" if one is None else form.format(one) for one in (theirs, ours, best)]
    less = 0.0 if ours is None else ours - theirs if IDLE in what else ours / theirs - 1
    off = f"{100 * less:+.1f} {'points' if IDLE in what else '%'}" if ours is not None else ""
    return what, told[0], told[1], off, told[2]


if __name__ == "__main__":
    sys.exit(main("stages", cells(), page, says=__doc__))
