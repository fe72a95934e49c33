"""Two stages of a plan, trained by PyTorch's own schedules: bits, a hard limit, and peaks.

    python -m benchmarks.pipeline --busy

Two processes over gloo train a small Llama on text, cut and recomputed as the planner says, each
under the plan's budget as the operating system's limit. No seconds are measured.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import torch

from benchmarks.pages import markdown_table, runs_list
from benchmarks.pipeline_runs import Trained, Way, in_processes
from benchmarks.runner import Cell, Document, found, main
from benchmarks.zoo import Specimen
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.presets import JsonObject
from protrain_plan.planning.search.improving import Effort
from protrain_plan.planning.stages.answer import (
    Search,
    StagesQuestion,
    plan_stages,
    searched,
)
from protrain_plan.planning.stages.cuts import handed_bytes
from protrain_runtime.contract.records.plan import Budgets, DeviceGroup, Plan, StepSettings
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.units import format_bytes
from tests.support.estimates import estimate

MIB = 2**20
BUDGET = 700 * MIB
SCHEDULES = ("1F1B", "eager 1F1B")
MICRO_BATCHES = (4, 6)
"""Not powers of two alone: dividing by those rounds nothing, and would prove nothing."""


def llama(width: int, blocks: int, seq_len: int) -> Specimen:
    """A small Llama without tied embeddings or dropout."""
    config: JsonObject = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    return Specimen(name="llama", config=config, seq_len=seq_len)


SPECIMEN = llama(512, 8, 256)


# --- plans ----------------------------------------------------------------------------------------


def question_of(specimen: Specimen, budget: int, micro_batches: int) -> StagesQuestion:
    """Two devices of `budget` bytes each; blocks are kept or recomputed, and nothing moves."""
    machine = load_hardware("cpu")
    profile = estimate(
        specimen.source,
        hardware=replace(machine, device=replace(machine.device, num_threads=1)),
        batch_size=specimen.batch_size,
        seq_len=specimen.seq_len,
        dtype=specimen.dtype,
        precision=specimen.precision,
        adapter=specimen.adapter,
    )
    units = [
        replace(unit, forms=tuple(one for one in unit.forms if one.form in ("keep", "full")))
        for unit in profile.units
    ]
    return StagesQuestion(
        profiles={specimen.batch_size: replace(profile, units=tuple(units))},
        budgets=Budgets(device=budget, host=budget, disk=0),
        settings=StepSettings(group=DeviceGroup(num_devices=2)),
        global_batch=specimen.batch_size * micro_batches,
        stages=(2,),
        chunks=(1,),
    )


def planned(question: StagesQuestion, schedule: str) -> Plan:
    """The plan of the best two stages with this schedule."""
    shapes = [one for one in searched(question, Effort()).cuts if one.schedule == schedule]
    found = Search(question, shapes, Effort()).run([2], inf, lambda _: None)
    assert found, "the budget is enough for two stages"
    return found.plan(found.step_seconds)


def way_of(plan: Plan, specimen: Specimen) -> Way:
    """How PyTorch trains by a plan of several stages."""
    assert plan.pipeline
    return Way(
        specimen=specimen,
        micro_batches=plan.settings.micro_batches,
        cuts=tuple(stage.first_units[0] for stage in plan.pipeline.stages[1:]),
        eager=plan.pipeline.schedule == "eager 1F1B",
        recomputed=tuple(
            one.name for one in plan.units if one.activations.tier or one.activations.recomputes
        ),
    )


def besides_bytes(plan: Plan, profile: Profile, number: int) -> int:
    """Bytes that PyTorch's schedules take for stage `number` beside those of its plan, at most.

    Of M micro-batches `held` are under way. A plan counts held + 2 hidden states that are received
    and 2 at the end of the stage. PyTorch has M buffers for each direction. The interleaved
    schedule waits for what it sends when the step ends, so that M gradients and M outputs stand;
    in 1F1B there are 2 gradients, and outputs of those under way. The last stage has the logits of
    a micro-batch until its next forward. Token ids of all M are there.
    """
    assert plan.pipeline
    work, many, stages = plan.workload, plan.settings.micro_batches, plan.pipeline.stages
    held, eager = stages[number].held, plan.pipeline.schedule == "eager 1F1B"
    ids = work.batch_size * work.seq_len
    total = 8 * many * ids
    names = [unit.name for unit in plan.units]

    def hidden(stage: int) -> int:
        return handed_bytes(profile, names.index(stages[stage].first_units[0]))

    if number:
        total += hidden(number) * (many + (many if eager else 2) - held - 2)
    if number + 1 < len(stages):
        total += hidden(number + 1) * (many + (many - held if eager else 0) - 2)
    else:
        total += 4 * ids * json.loads(work.model_config)["vocab_size"]
    return total


# --- cells ----------------------------------------------------------------------------------------


def cells() -> list[Cell]:
    """Every schedule with every number of micro-batches."""
    asked = ((schedule, many) for schedule in SCHEDULES for many in MICRO_BATCHES)
    return [
        Cell(
            key=f"{schedule}, {many} micro-batches",
            task="pipeline",
            arguments={"schedule": schedule, "micro_batches": many},
        )
        for schedule, many in asked
    ]


def compared(schedule: str, micro_batches: int) -> Document:
    """Two stages beside one process: bits and bytes, and how each ends under the limit."""
    question = question_of(SPECIMEN, BUDGET, micro_batches)
    answer, plan = plan_stages(question, effort=Effort()), planned(question, schedule)
    (profile,) = question.profiles.values()
    way = way_of(plan, SPECIMEN)
    whole = Way(specimen=SPECIMEN, micro_batches=micro_batches)
    blocks = tuple(unit.name for unit in profile.units if unit.kind == "block")
    (plain,) = in_processes(whole)
    counted, limited = in_processes(way, counted=True), in_processes(way, limit=BUDGET)
    assert plan.pipeline
    return {
        "planned": str(answer.several.shape) if answer.several else "",
        "one_stage_fits": answer.single is not None,
        "cuts": way.cuts,
        "recomputed": way.recomputed,
        "equal": [same(plain, counted), same(plain, limited)],
        "plain": ending(in_processes(whole, limit=BUDGET)[0]),
        "plain_recomputed": ending(
            in_processes(replace(whole, recomputed=blocks), limit=BUDGET)[0]
        ),
        "stages": [
            {
                "held": stage.held,
                "predicted": stage.peak_bytes.device,
                "besides": besides_bytes(plan, profile, number),
                "measured": done.tensor_bytes if isinstance(done, Trained) else 0,
                "limited": ending(end),
                "resident": end.resident_bytes if isinstance(end, Trained) else 0,
            }
            for number, (stage, done, end) in enumerate(
                zip(plan.pipeline.stages, counted, limited, strict=True)
            )
        ],
    }


def same(plain: Trained | str, stages: Sequence[Trained | str]) -> bool:
    """Whether all parameters and losses of stages have the bits of one process's."""
    assert isinstance(plain, Trained)
    parameters: dict[str, torch.Tensor] = {}
    losses: list[float] = []
    for stage in stages:
        if isinstance(stage, str):
            return False
        parameters |= stage.parameters
        losses += stage.losses
    return (
        parameters.keys() == plain.parameters.keys()
        and losses == plain.losses
        and all(torch.equal(one, parameters[name]) for name, one in plain.parameters.items())
    )


def ending(end: Trained | str) -> str:
    """How a process ended."""
    if isinstance(end, Trained):
        return "trained"
    return "out of memory" if "can't allocate memory" in end else end


# --- the page -------------------------------------------------------------------------------------

NOTES = (
    "*Planned* is the plan's peak of tensors on the device. PyTorch takes more: a receive buffer"
    " for each of the M micro-batches, where a plan counts those under way and two more. *At most*"
    " adds that. *Measured* are the tensors of the third step, counted by PyTorch's profiler.",
    "The last stage keeps the logits of a micro-batch until its next forward. With"
    " `return_outputs=True`, the default, it keeps those of all M.",
    "What is left between *measured* and *at most* is 2 to 4 MiB, as much for 4 as for 6"
    " micro-batches. Where it comes from was not looked into.",
    "*Resident* is the process's most under the limit, with Python, PyTorch and the whole model,"
    " which each process builds before it lets go of the rest. glibc gives freed memory back at"
    " once (`return_freed_memory`): by default it does not, and the stages run out of memory.",
    "States stay on the device: PyTorch moves none. The profile is estimated for the catalogue's"
    " `cpu` with one thread, and its hops take no time: cuts are for peaks here, not for speed.",
)


def page(document: Document) -> str:
    """Endings and bytes of every case."""
    results = found(document)
    ends = [["schedule", "cut", "recomputed", "bits of one process", "two stages"]]
    ends[0] += ["one process", "all recomputed"]
    sizes = [["schedule", "stage", "held", "planned", "at most", "measured", "by plan", "resident"]]
    for key, one in results.items():
        stages = one["stages"]
        ends.append(
            [
                *(key, ", ".join(one["cuts"]), f"{len(one['recomputed'])} blocks"),
                "equal" if all(one["equal"]) else "**differ**",
                ", ".join(sorted({stage["limited"] for stage in stages})),
                *(one["plain"], one["plain_recomputed"]),
            ]
        )
        for number, stage in enumerate(stages):
            planned, measured = stage["predicted"], stage["measured"]
            row = (planned, planned + stage["besides"], measured)
            by_plan, resident = f"{measured / planned - 1:+.2%}", f"{stage['resident'] / MIB:.0f}"
            counts = (f"{size / MIB:.2f}" for size in row)
            sizes.append([key, str(number), str(stage["held"]), *counts, by_plan, resident])
    parts = [
        *("# Two stages in PyTorch", "", *runs_list(document["runs"]), ""),
        f"A Llama of 25 M parameters in {format_bytes(BUDGET)} a process, a limit of the operating"
        " system; three steps of AdamW on text.",
        *_in_short(results),
        *("", "## Bits and endings", "", *markdown_table(ends)),
        *("", "## Peaks, in MiB", "", *markdown_table(sizes, numbers_from=2), ""),
        *(f"- {note}" for note in NOTES),
        *(
            f"- {key}: {cell['status']}"
            for key, cell in document["cells"].items()
            if cell["status"] != "ran"
        ),
    ]
    return "\n".join(parts) + "\n"


def _in_short(results: dict[str, Document]) -> Iterator[str]:
    if results and not any(one["one_stage_fits"] for one in results.values()):
        yield (
            "No plan of one stage fits the budget, where blocks are kept or recomputed and there"
            " is no disk."
        )
    chosen = sorted({one["planned"] for one in results.values()})
    if chosen:
        yield f"The planner's own choice: {'; '.join(chosen)}."


if __name__ == "__main__":
    sys.exit(main("pipeline", cells(), page, says=__doc__))
