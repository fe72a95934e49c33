"""`protrain export`: the nearest configurations, and what they cannot say."""

import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from transformers import TrainingArguments

from protrain_plan.commands.plans import export as export_command
from protrain_plan.presentation.exporting import EXPORTERS, export
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import write_plan
from protrain_runtime.contract.records.plan import (
    DeviceGroup,
    Keep,
    Offload,
    Persistent,
    PipelinePlan,
    Plan,
    Recompute,
    StagePlan,
    Swap,
    SwapInput,
)
from tests.support.checking_cases import AssertGolden, offloading
from tests.support.forked import protrain

TOOLS = tuple(EXPORTERS)
SCHEDULES = (
    "When transfers run (leads, drains, pieces) is the tool's choice: the predicted peak and \
the predicted seconds do not hold for it."
)


def plain() -> Plan:
    """Everything stays on the device."""
    made = offloading()
    units = (replace(unit, activations=Keep(), states=Persistent()) for unit in made.units)
    return replace(made, units=tuple(units))


def mixed() -> Plan:
    """One block of each kind, and clipping."""
    made = offloading()
    first, *blocks, last = made.units
    decided = (
        replace(blocks[0], activations=Keep(), states=Persistent()),
        replace(blocks[1], activations=Swap(tier="host"), states=Offload(tier="host")),
        replace(blocks[2], activations=SwapInput(tier="host"), states=Offload(tier="disk")),
        replace(blocks[3], activations=Recompute(form="mlp"), states=Offload(tier="host")),
    )
    return replace(
        made,
        units=(first, *decided, last),
        settings=replace(made.settings, updates="after backward", micro_batches=2),
    )


def cut() -> Plan:
    """The mixed plan in two stages of two devices."""
    made = mixed()
    stages = tuple(
        StagePlan(
            first_units=(made.units[first].name,),
            held=1,
            piece_bytes=1,
            cycle_seconds=1.0,
            peak_bytes=made.prediction.peak_bytes,
        )
        for first in (0, 2)
    )
    pipeline = PipelinePlan(
        schedule="1F1B", layout="stages across nodes", num_nodes=1, stages=stages
    )
    settings = replace(made.settings, group=DeviceGroup(num_devices=2), micro_batches=8)
    return replace(made, settings=settings, pipeline=pipeline)


def told(plan: Plan, tool: str) -> str:
    """The losses and the file."""
    found = export(plan, tool)
    return "".join(f"# {loss}\n" for loss in found.losses) + found.text


@pytest.mark.parametrize("tool", TOOLS)
def test_a_mixed_plan(tool: str, assert_golden: AssertGolden) -> None:
    assert_golden(f"export/{tool}.txt", told(mixed(), tool))


@pytest.mark.parametrize("tool", TOOLS)
def test_a_plan_with_stages_is_refused(tool: str) -> None:
    words = f"the plan has 2 pipeline stages, and {tool} has none"
    with pytest.raises(ProtrainError, match=words):
        export(cut(), tool)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_loss_in_place_is_told(tool: str) -> None:
    told = "The loss would be computed in place: here it takes more memory."
    made = plain()
    in_place = replace(made.units[-1], activations=Keep(form="in place"))
    assert told in export(replace(made, units=(*made.units[:-1], in_place)), tool).losses
    assert told not in export(made, tool).losses


@pytest.mark.parametrize("tool", TOOLS)
def test_a_plan_that_keeps_everything_loses_little(tool: str) -> None:
    losses = export(plain(), tool).losses
    assert SCHEDULES not in losses
    told = ("batch", "float32", "model", "Nothing is clipped")
    assert all(any(word in loss for word in told) for loss in losses)


ADAPTED = replace(plain().workload, precision="autocast", adapter="lora r=16 dtype=float32")


def test_a_norm_that_no_plan_has_is_told() -> None:
    assert any("taken to be 1.0" in loss for loss in export(mixed(), "trl").losses)
    assert any("Nothing is clipped" in loss for loss in export(plain(), "trl").losses)


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_the_script_s_is_told(tool: str) -> None:
    losses = export(replace(plain(), workload=ADAPTED, optimizer="sgd"), tool).losses
    assert losses[:2] == (
        "The adapter (--lora r=16) is the script's.",
        "The optimizer (sgd) is the script's.",
    )


def test_accelerate_reads_what_is_for_it(tmp_path: Path) -> None:
    path = tmp_path / "fsdp2.yaml"
    path.write_text(export(offloading(), "fsdp2").text)
    config = load_config_from_file(str(path))
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config["fsdp_offload_params"] is True


def test_transformers_know_the_arguments_of_trl() -> None:
    config = yaml.safe_load(export(mixed(), "trl").text)
    of_trl = {"max_length", "activation_offloading"}  # SFTConfig's own
    assert config.keys() - of_trl <= TrainingArguments.__dataclass_fields__.keys()


def test_the_command_writes_and_tells(tmp_path: Path) -> None:
    write_plan(offloading(), tmp_path / "plan.yaml")
    result = protrain("export", "plan.yaml", "--to", "fsdp2", folder=tmp_path, COLUMNS="200")
    assert (result.returncode, result.stderr) == (0, "")
    first, second, *losses = result.stdout.splitlines()
    assert (first, second) == ("wrote fsdp2.yaml", "what it cannot express:")
    assert f"- {SCHEDULES}" in losses
    config = yaml.safe_load((tmp_path / "fsdp2.yaml").read_text())
    assert config["fsdp_config"]["fsdp_offload_params"] is True
    told = protrain(
        "export", "plan.yaml", "--to", "trl", "-o", "sft.yaml", "--json", folder=tmp_path
    )
    assert json.loads(told.stdout)["file"] == "sft.yaml"
    assert yaml.safe_load((tmp_path / "sft.yaml").read_text())["gradient_checkpointing"] is True


def test_the_help_names_every_tool() -> None:
    """It is written out there, so that help does not import what exports."""
    parameter = inspect.signature(export_command).parameters["to"]
    assert all(tool in parameter.annotation.__metadata__[0].help for tool in EXPORTERS)
