"""`protrain export`: the nearest configurations, and what they cannot say."""

import ast
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from transformers import TrainingArguments

from protrain_plan.commands.plans import export as export_command
from protrain_plan.presentation.exporting import EXPORTERS, export
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import write_plan
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    Activations,
    DeviceGroup,
    PipelinePlan,
    PipelineSchedule,
    Placement,
    Plan,
    StagePlan,
)
from tests.support.checking_cases import AssertGolden, offloading
from tests.support.forked import protrain

TOOLS = tuple(EXPORTERS)
STAGED = tuple(tool for tool, one in EXPORTERS.items() if one.has_stages)
SCHEDULES = (
    "When transfers run (leads, drains, pieces) is the tool's choice: the predicted peak and \
the predicted seconds do not hold for it."
)


def plain() -> Plan:
    """Everything stays on the device."""
    made = offloading()
    units = (replace(unit, activations=KEEP, states=PERSISTENT) for unit in made.units)
    return replace(made, units=tuple(units))


def mixed() -> Plan:
    """One block of each kind, and clipping."""
    made = offloading()
    first, *blocks, last = made.units
    decided = (
        replace(blocks[0], activations=KEEP, states=PERSISTENT),
        replace(blocks[1], activations=Activations(tier="host"), states=Placement(tier="host")),
        replace(
            blocks[2],
            activations=Activations(form="full", tier="host"),
            states=Placement(tier="disk"),
        ),
        replace(blocks[3], activations=Activations(form="mlp"), states=Placement(tier="host")),
    )
    return replace(
        made,
        units=(first, *decided, last),
        settings=replace(made.settings, updates="after backward", micro_batches=2),
    )


def staged(
    *firsts: tuple[int, ...], schedule: PipelineSchedule = "1F1B", within: bool = False
) -> Plan:
    """The mixed plan in stages of two devices, whose chunks begin with these units."""
    made = mixed()
    peak = made.prediction.peak_bytes
    stages = tuple(
        StagePlan(
            first_units=tuple(made.units[first].name for first in own),
            held=1,
            piece_bytes=1,
            cycle_seconds=1.0,
            peak_bytes=peak,
        )
        for own in firsts
    )
    pipeline = PipelinePlan(
        schedule=schedule,
        layout="stages within nodes" if within else "stages across nodes",
        num_nodes=2 if within else 1,
        stages=stages,
    )
    group = DeviceGroup(num_devices=2, num_nodes=pipeline.num_nodes)
    settings = replace(made.settings, group=group, micro_batches=8)
    return replace(made, settings=settings, pipeline=pipeline)


def cut(schedule: PipelineSchedule = "1F1B", *, within: bool = False) -> Plan:
    """In two stages: of one chunk each, or of two."""
    if schedule == "interleaved 1F1B":
        return staged((0, 4), (2, 5), schedule=schedule, within=within)
    return staged((0,), (2,), schedule=schedule, within=within)


def told(plan: Plan, tool: str) -> str:
    """The losses and the file."""
    found = export(plan, tool)
    return "".join(f"# {loss}\n" for loss in found.losses) + found.text


@pytest.mark.parametrize("tool", TOOLS)
def test_a_mixed_plan(tool: str, assert_golden: AssertGolden) -> None:
    assert_golden(f"export/{tool}.txt", told(mixed(), tool))


@pytest.mark.parametrize("tool", STAGED)
def test_a_mixed_plan_in_stages(tool: str, assert_golden: AssertGolden) -> None:
    interleaved = cut("interleaved 1F1B", within=True)
    texts = (told(plan, tool) for plan in (cut(), cut("eager 1F1B"), interleaved))
    assert_golden(f"export/{tool}-stages.txt", "\n".join(texts))


@pytest.mark.parametrize("tool", sorted({*TOOLS} - {*STAGED}))
def test_a_tool_without_stages_refuses_them(tool: str) -> None:
    words = f"the plan has 2 pipeline stages, and {tool} has none"
    with pytest.raises(ProtrainError, match=words) as refused:
        export(cut(), tool)
    assert refused.value.fix == "export it to torchtitan or megatron"


@pytest.mark.parametrize("tool", STAGED)
def test_a_model_with_other_parts_is_refused(tool: str) -> None:
    made = cut()
    units = (*made.units[:3], replace(made.units[3], kind="part"), *made.units[4:])
    with pytest.raises(ProtrainError, match="splits only models of an embedding"):
        export(replace(made, units=units), tool)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_loss_in_place_is_told(tool: str) -> None:
    told = "The loss would be computed in place: here it takes more memory."
    made = plain()
    in_place = replace(made.units[-1], activations=Activations(form="in place"))
    assert told in export(replace(made, units=(*made.units[:-1], in_place)), tool).losses
    assert told not in export(made, tool).losses


@pytest.mark.parametrize("tool", TOOLS)
def test_a_plan_that_keeps_everything_loses_little(tool: str) -> None:
    losses = export(plain(), tool).losses
    assert SCHEDULES not in losses
    told = ("batch", "float32", "model", "Nothing is clipped")
    assert all(any(word in loss for word in told) for loss in losses)


ADAPTED = replace(plain().workload, precision="autocast", adapter="lora r=16 dtype=float32")


@pytest.mark.parametrize("tool", STAGED)
def test_a_tool_without_adapters_refuses_them(tool: str) -> None:
    for made in (plain(), cut()):
        packed = replace(made, workload=replace(ADAPTED, quantize="nf4"))
        words = f"adapters over nf4 weights, and {tool} would train all of the model"
        with pytest.raises(ProtrainError, match=words) as refused:
            export(packed, tool)
        assert refused.value.fix == (None if made.pipeline else "export it to fsdp2 or trl")


@pytest.mark.parametrize("tool", sorted({*TOOLS} - {"fsdp2"}))
def test_a_norm_that_no_plan_has_is_told(tool: str) -> None:
    assert any("taken to be 1.0" in loss for loss in export(mixed(), tool).losses)
    assert any("Nothing is clipped" in loss for loss in export(plain(), tool).losses)


@pytest.mark.parametrize("tool", sorted({*TOOLS} - {*STAGED}))
def test_what_is_the_script_s_is_told(tool: str) -> None:
    losses = export(replace(plain(), workload=ADAPTED, optimizer="sgd"), tool).losses
    assert losses[:2] == (
        "The adapter (--lora r=16) is set by the script.",
        "The optimizer (sgd) is set by the script.",
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


def arguments(plan: Plan) -> dict[str, str]:
    """Megatron's arguments: what follows each name."""
    lines = export(plan, "megatron").text.splitlines()
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


def fields(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(export(plan, "torchtitan").text)):
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
            found[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    return found


@pytest.mark.parametrize(
    ("plan", "layout"),
    [
        (cut(), "Et|tttL"),
        (cut("interleaved 1F1B"), "Et|tt|t|L"),
        (staged((0,), (1,), (4,), (5,)), "E|ttt|t|L"),
    ],
)
def test_parts_are_in_the_model_s_order(plan: Plan, layout: str) -> None:
    """Chunk k of stage s is part k p + s of p stages, as both tools have it."""
    assert plan.pipeline is not None
    assert arguments(plan)["--pipeline-model-parallel-layout"] == layout
    parts = fields(plan)["config.parallelism.module_fqns_per_model_part"]
    letters = {"tok_embeddings": "E", "norm": "", "lm_head": "L"}
    assert "|".join("".join(letters.get(n, "t") for n in part) for part in parts) == layout
    count = len(plan.pipeline.stages)
    for stage in range(count):
        blocks = sum(unit.kind == "block" for unit in plan.of_stage(stage).units)
        assert "".join(layout.split("|")[stage::count]).count("t") == blocks


def test_states_leave_by_their_share_of_trained_parameters() -> None:
    """The largest share of any stage: 1000 of 3000 in the first one, 4000 of 6000 in the other."""
    made = staged((0,), (3,))
    sizes = ("1000", "1000x1", "20x50", "1000", "3000", "2000")
    stay, shard = PERSISTENT, Placement(tier="device")
    host, disk = Placement(tier="host"), Placement(tier="disk")
    placed: tuple[Placement, ...] = (stay, host, stay, host, disk, shard)
    units = tuple(
        replace(unit, parameters=(f"{unit.name}.weight",), states=states)
        for unit, states in zip(made.units, placed, strict=True)
    )
    tensors = tuple(
        f"{unit.name}.weight {size} float32 trainable"
        for unit, size in zip(units, sizes, strict=True)
    )
    frozen = f"{units[1].name}.base 5000 float32 frozen"
    plan = replace(made, units=units, tensors=(*tensors, frozen))
    assert arguments(plan)["--optimizer-offload-fraction"] == "0.67"


def test_forms_of_the_mlp_are_selective_for_megatron() -> None:
    made = plain()
    of_mlp = tuple(
        replace(unit, activations=Activations(form="mlp")) if unit.kind == "block" else unit
        for unit in made.units
    )
    found = arguments(replace(made, units=of_mlp))
    assert found["--recompute-granularity"] == "selective"
    assert found["--recompute-modules"] == "mlp layernorm"


def test_shards_without_stages_are_fsdp2_for_megatron() -> None:
    made = plain()
    units = tuple(replace(unit, states=Placement(tier="device")) for unit in made.units)
    settings = replace(made.settings, group=DeviceGroup(num_devices=4))
    found = arguments(replace(made, units=units, settings=settings))
    assert "--use-torch-fsdp2" in found
    assert "--use-distributed-optimizer" not in found


EVERY = [mixed(), cut(), cut("eager 1F1B"), cut("interleaved 1F1B", within=True)]


@pytest.mark.parametrize("plan", EVERY)
def test_torchtitan_reads_what_is_for_it(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = pytest.importorskip("torchtitan.config.manager")
    name = f"torchtitan_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(export(plan, "torchtitan").text)
    monkeypatch.syspath_prepend(tmp_path)
    read = manager.ConfigManager().parse_args(["--module", name, "--config", "planned"])
    assert read.training.seq_len == plan.workload.seq_len
    assert read.parallelism.pipeline_parallel_degree == (2 if plan.pipeline else 1)


@pytest.mark.parametrize("plan", EVERY[1:])
def test_megatron_reads_the_layout(plan: Plan) -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    enums = pytest.importorskip("megatron.core.transformer.enums")
    found = arguments(plan)
    text, size = found["--pipeline-model-parallel-layout"], 2
    layout = layouts.PipelineParallelLayerLayout.from_str(text, size)
    layout.validate_layer_layout(int(found["--num-layers"]), 0)
    for stage, chunks in enumerate(layout.layout):
        assert [chunk.count(enums.LayerType.decoder) for chunk in chunks] == [
            sum(unit.kind == "block" for unit in plan.units[first:end])
            for first, end in plan.runs(stage)
        ]


@pytest.mark.parametrize("plan", EVERY)
def test_megatron_reads_its_arguments(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    parsing = pytest.importorskip("megatron.training.arguments")
    monkeypatch.setattr("sys.argv", ["pretrain", *export(plan, "megatron").text.split()])
    read = parsing.parse_args()
    assert read.num_layers == 4
    assert read.global_batch_size == plan.workload.batch_size * plan.settings.micro_batches * (
        plan.group.num_devices
    )


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
