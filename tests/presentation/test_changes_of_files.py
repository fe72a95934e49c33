"""Changes of a trainer's file: what its words say, and the rest by the plan.

The oracle is what a trainer does with its switches: all blocks are recomputed, or none.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from protrain_plan.models.trainer_files import TrainerFile
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.answers import Answer
from protrain_plan.presentation.trainer_files import Advice, advice, file_text
from protrain_runtime.contract.records.plan import KEEP, PERSISTENT, RECOMPUTE, Placement, Plan
from tests.support.checking_cases import offloading
from tests.support.planning_cases import MB, gpu, question, small, within

AXOLOTL = "base_model: gpt2\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nbf16: true\n"
LLAMA_FACTORY = "model_name_or_path: gpt2\nfinetuning_type: full\nbf16: true\n"
V1 = "model: gpt2\nmodel_class: llm\nmicro_batch_size: 8\nbf16: true\n"
OPTIMIZER = {V1: "", AXOLOTL: "optimizer: adamw_torch\n", LLAMA_FACTORY: ""}


def plan_of(recomputed: int, *, offloaded: bool = False) -> Plan:
    """A plan that recomputes some blocks."""
    made = offloading()
    states = Placement(tier="host") if offloaded else PERSISTENT
    units = [
        replace(unit, states=states, activations=RECOMPUTE if 0 < number <= recomputed else KEEP)
        for number, unit in enumerate(made.units)
    ]
    return replace(made, units=tuple(units))


def answered(plan: Plan | None, batch: int) -> Answer:
    """A plan for eight sequences in batches of this size; or none, where three fit at once."""
    profile = small(gpu(), blocks=1)
    sized = replace(profile, workload=replace(profile.workload, batch_size=batch))
    asked = question(sized, within(sized, 2500 * MB))
    asked = replace(asked, settings=replace(asked.settings, micro_batches=8 // batch))
    if plan is None:
        lacking = Infeasible(
            tier="device",
            slot="forward",
            occupants=(),
            budget_bytes=0,
            shortfall_bytes=1,
            smallest_budget_bytes=1,
            proven_budget_bytes=1,
            advice=(),
            largest_batch_size=3,
        )
        return Answer(question=asked, infeasible=lacking)
    solved = Solved(
        plan=plan, status="optimal", gap=0.0, stall_seconds=0.0, solve_seconds=0.0, solver="HiGHS"
    )
    return Answer(question=asked, solved=solved)


def asked(
    folder: Path, text: str, plan: Plan | None, *, batch: int = 2, plain_fits: bool = False
) -> tuple[Advice, list[str]]:
    path = folder / "mine.yaml"
    path.write_text(text + OPTIMIZER[text[: text.index("bf16")] + "bf16: true\n"])
    file = TrainerFile(str(path))
    found = advice(file, "a cell", answered(plan, batch), plain_fits=plain_fits)
    lines = [str(line) for line in file_text(file, [found])]
    return found, [line for line in lines if "->" in line or "(" in line or "for a cell" in line]


def changed(found: Advice) -> list[tuple[str, object, object]]:
    return [(one.key, one.now, one.new) for one in found.changes]


def test_what_plain_pytorch_fits_needs_no_checkpointing(tmp_path: Path) -> None:
    text = AXOLOTL + "gradient_checkpointing: offload\nactivation_offloading: true\n"
    found, lines = asked(tmp_path, text, plan_of(2), plain_fits=True)
    assert changed(found) == [
        ("gradient_checkpointing", "offload", False),
        ("activation_offloading", True, False),
    ]
    assert not found.under_plan
    assert lines == [
        "in mine.yaml, for a cell:",
        '  gradient_checkpointing: "offload" -> false',
        "  activation_offloading: true -> false",
    ]


def test_a_file_that_says_the_plan_stays_as_it_is(tmp_path: Path) -> None:
    assert asked(tmp_path, AXOLOTL, plan_of(0), plain_fits=True) == (
        Advice(cell="a cell", changes=()),
        [],
    )
    blocks = sum(unit.kind == "block" for unit in plan_of(0).units)
    found, _ = asked(tmp_path, AXOLOTL + "gradient_checkpointing: true\n", plan_of(blocks))
    assert found == Advice(cell="a cell", changes=())


@pytest.mark.parametrize(
    ("text", "key", "on"),
    [
        (AXOLOTL, "gradient_checkpointing", True),
        (LLAMA_FACTORY, "disable_gradient_checkpointing", False),
    ],
)
def test_recomputed_blocks_are_the_switch_of_the_file(
    text: str, key: str, on: bool, tmp_path: Path
) -> None:
    batch = {AXOLOTL: 2, LLAMA_FACTORY: 8}[text]
    found, lines = asked(tmp_path, f"{text}{key}: {str(not on).lower()}\n", plan_of(1), batch=batch)
    assert changed(found)[-1] == (key, not on, on)
    assert not found.under_plan
    assert lines[-1] == "  (the plan recomputes 1 of 4 blocks, and the file all)"


def test_what_no_file_says_is_for_the_plan(tmp_path: Path) -> None:
    found, lines = asked(tmp_path, LLAMA_FACTORY, plan_of(2, offloaded=True), batch=4)
    assert changed(found) == [
        ("per_device_train_batch_size", 8, 4),
        ("gradient_accumulation_steps", 1, 2),
        ("disable_gradient_checkpointing", None, True),
    ]
    assert found.under_plan
    assert lines == [
        "in mine.yaml, for a cell, under the plan:",
        "  (the file cannot express all of it: protrain plan writes it, and"
        ' use_plan(trainer, "plan.yaml") follows it)',
        "  per_device_train_batch_size: 8 -> 4",
        "  gradient_accumulation_steps: 1 -> 2",
        "  disable_gradient_checkpointing: (not set) -> true",
    ]


def test_a_file_without_accumulation_says_it_by_its_global_batch(tmp_path: Path) -> None:
    found, _ = asked(tmp_path, V1, plan_of(0), batch=4)
    assert changed(found)[:2] == [("micro_batch_size", 8, 4), ("global_batch_size", None, 8)]
    found, _ = asked(tmp_path, V1, plan_of(0), batch=8)
    assert "global_batch_size" not in [key for key, _, _ in changed(found)]


def test_where_no_plan_fits_the_largest_batch_is_named(tmp_path: Path) -> None:
    found, _ = asked(tmp_path, AXOLOTL, None, batch=4)
    assert changed(found) == []  # of 8 sequences, 2 are the largest part below 3: as the file has
    found, _ = asked(tmp_path, LLAMA_FACTORY, None, batch=8)
    assert changed(found) == [
        ("per_device_train_batch_size", 8, 2),
        ("gradient_accumulation_steps", 1, 4),
    ]
