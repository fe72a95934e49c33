"""The nearest configuration of another tool, and its losses.

These tools have one switch where a plan has a decision per block. A switch is on if any block needs
it: no block then takes more of the device than planned, but some move or compute more. The list of
losses says so.

torchtitan and Megatron have pipeline stages, with cuts between any two blocks. Formats are those of
torchtitan 0.3.0 (`ParallelismConfig`, `ActivationCheckpointing`) and of Megatron-LM at d98e8a64
(`arguments.py`; `PipelineParallelLayerLayout`, the same in Megatron-Core 0.16.1). Their own parsers
accepted the files: see docs/decisions/house.md.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Literal

import yaml

from protrain_plan.planning.stages.shapes import shape_of
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.adapters import option_of
from protrain_runtime.contract.records.folding import unfolded
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.plan import OPTIMIZER_IN_BACKWARD, Plan, UnitPlan
from protrain_runtime.contract.records.words import listed

Config = dict[str, Any]

Sayable = Literal["compiled blocks", "numbers of blocks", "replicas", "shares of states"]
"""Decisions that only some of the tools can express."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A configuration file, and a sentence for each thing that it loses of the plan."""

    file_name: str
    text: str
    losses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """A plan's decisions as the few switches that the tools have."""

    shard_states: bool  # on several devices: some unit's, on them or below
    offload_states: bool
    states_on_disk: bool
    fetch_twice: bool  # some unit's parameters, for forward and again for backward
    recompute: bool  # some block computes its forward again
    swap: bool  # some block moves its input or saved tensors off the device
    clip: bool  # updates wait for the norm of all gradients

    @staticmethod
    def of(plan: Plan) -> "Switches":
        moved = [unit.states for unit in plan.units if not unit.states.is_persistent]
        held = sum(states.keep_gathered for states in moved)
        return Switches(
            shard_states=plan.group.num_devices > 1 and bool(moved),
            offload_states=any(states.tier != "device" for states in moved),
            states_on_disk=any(states.uses_disk for states in moved),
            fetch_twice=plan.group.num_devices == 1 or held < len(plan.units),
            recompute=any(unit.activations.recomputes for unit in plan.units),
            swap=any(unit.activations.tier for unit in plan.units),
            clip=plan.settings.updates == "after backward",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """A tool: its file, the maker of its configuration with losses, and the writer of the text."""

    file_name: str
    make: Callable[[Plan, Switches], tuple[Config, list[str]]]
    write: Callable[[Config], str] = lambda config: yaml.safe_dump(config, sort_keys=False)
    has_stages: bool = False  # such a tool makes the model itself, without adapters
    norm: str = ""  # key of the norm that gradients are clipped to


def export(plan: Plan, tool: str) -> Exported:
    """The configuration of a tool of `EXPORTERS` that is nearest to the plan.

    Raises ProtrainError if the plan has stages or adapters, and the tool has none.
    """
    exporter = EXPORTERS[tool]
    others = [name for name, one in EXPORTERS.items() if one.has_stages != exporter.has_stages]
    fix = f"export it to {listed(others, 'or')}"
    if plan.workload.adapter and exporter.has_stages:
        packed = f" over {plan.workload.quantize} weights" if plan.workload.quantize else ""
        problem = f"the plan trains adapters{packed}, and {tool} would train all of the model"
        raise ProtrainError(problem, key="--to", fix=None if plan.pipeline else fix)
    if plan.pipeline is not None and not exporter.has_stages:
        problem = f"the plan has {plan.num_stages} pipeline stages, and {tool} has none"
        raise ProtrainError(problem, key="--to", fix=fix)
    config, losses = exporter.make(plan, switches := Switches.of(plan))
    if exporter.norm:
        losses.append(
            f"The norm that gradients are clipped to is taken to be 1.0 ({exporter.norm})."
            if switches.clip
            else f"Nothing is clipped, as in the plan ({exporter.norm}): one made with --clip does."
        )
    return Exported(file_name=exporter.file_name, text=exporter.write(config), losses=tuple(losses))


def _fsdp2(plan: Plan, switches: Switches) -> tuple[Config, list[str]]:
    """Accelerate's configuration for fully_shard."""
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": _mixed_precision(plan),
        "num_machines": plan.group.num_nodes,
        "num_processes": plan.group.num_devices,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": switches.fetch_twice,
            "fsdp_offload_params": switches.offload_states,
            "fsdp_activation_checkpointing": switches.recompute,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    }
    workload, losses = plan.workload, _common_losses(plan, switches)
    losses += [_NO_DISK] * switches.states_on_disk
    losses += ["Swapped activations cannot be expressed: they stay on the device."] * switches.swap
    sequences = "1 sequence" if workload.batch_size == 1 else f"{workload.batch_size} sequences"
    sizes = f"{sequences} of {workload.seq_len} tokens, {plan.settings.micro_batches} per update"
    losses.append(f"The batch ({sizes}) and the dtype are set by the script.")
    return config, losses


def _trl(plan: Plan, switches: Switches) -> tuple[Config, list[str]]:
    """Arguments of SFTConfig that are about memory."""
    config: Config = {
        "per_device_train_batch_size": plan.workload.batch_size,
        "gradient_accumulation_steps": plan.settings.micro_batches,
        "max_length": plan.workload.seq_len,
        **{dtype: _mixed_precision(plan) == dtype for dtype in ("bf16", "fp16")},
        "gradient_checkpointing": switches.recompute,
        "activation_offloading": switches.swap,
        "max_grad_norm": 1.0 if switches.clip else 0.0,
    }
    losses = _common_losses(plan, switches)
    losses += switches.offload_states * [
        "Offloaded states cannot be expressed here: launch with accelerate and the file of"
        " protrain export --to fsdp2."
    ]
    return config, losses


def _torchtitan(plan: Plan, switches: Switches) -> tuple[Config, list[str]]:
    """Fields of torchtitan's `Trainer.Config`, by section."""
    group, pipeline, workload = plan.group, plan.pipeline, plan.workload
    local = workload.batch_size * (plan.settings.micro_batches if pipeline else 1)
    shards = group.num_shards if switches.shard_states else 1
    mixed = workload.dtype if workload.dtype != "float16" else "bfloat16"
    parallelism: Config = {
        "data_parallel_shard_degree": shards,
        "data_parallel_replicate_degree": group.num_devices // shards,
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": plan.num_stages,
        "fsdp_reshard_after_forward": "always" if switches.fetch_twice else "never",
    }
    if pipeline:
        plain, blocks = pipeline.schedule == "1F1B", enumerate(_all_blocks(plan))
        modules = {unit.name: [f"layers.{number}"] for number, unit in blocks}
        modules[plan.units[0].name] = ["tok_embeddings"]
        modules[plan.units[-1].name] = ["norm", "lm_head"]
        parallelism |= {
            # With one part a rank, the interleaved schedule is eager 1F1B.
            "pipeline_parallel_schedule": "1F1B" if plain else "Interleaved1F1B",
            "pipeline_parallel_microbatch_size": workload.batch_size,
            "module_fqns_per_model_part": [
                [name for unit in part for name in modules[unit.name]] for part in _parts(plan)
            ],
        }
    config: Config = {
        "model": _TORCHTITAN_MODELS.get(workload.model, ("llama3", "llama3_debugmodel")),
        "training": {
            "local_batch_size": local,
            "global_batch_size": plan.global_batch,
            "seq_len": workload.seq_len,
            "dtype": mixed if workload.precision == "pure" else "float32",
            "mixed_precision_param": mixed,
            "enable_cpu_offload": switches.offload_states,
            "disable_cuda_graphs": True,  # they know no pipelines, and plans count none
            "max_norm": 1.0 if switches.clip else float("inf"),
        },
        "parallelism": parallelism,
        "compile": {"enable": bool(workload.compile)},
        "activation_checkpoint": "full" if switches.recompute or switches.swap else "none",
    }
    losses = _common_losses(plan, switches, said=("compiled blocks", "replicas"))
    losses += _stage_losses(plan, switches)
    if workload.model not in _TORCHTITAN_MODELS:
        losses.append(
            "The file builds on llama3_debugmodel: name the configuration of your model there."
        )
    if pipeline:
        within = pipeline.layout == "stages within nodes"
        losses += [
            *["Each stage would have devices in every node: here its ranks are neighbours."]
            * within,
            "PyTorch receives each micro-batch in a buffer of its own: peaks do not count them.",
        ]
    if workload.dtype == "float16":
        losses.append("float16 cannot be expressed: bfloat16 takes its place.")
    if workload.precision == "master":
        losses.append(
            f"Parameters would be {workload.dtype}, with float32 copies in the optimizer: here they"
            " are float32."
        )
    return config, losses


_TORCHTITAN_MODELS = {
    "llama-3.1-8b": ("llama3", "llama3_8b"),
    "llama-3.1-70b": ("llama3", "llama3_70b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
}
"""Our presets: the module of the model, and its configuration. That of 405b trains in float8."""


def _torchtitan_text(config: Config) -> str:
    """A Python module: `--module torchtitan_plan --config planned`."""
    module, model = config["model"]
    full = config["activation_checkpoint"] == "full"
    imported = "from torchtitan.distributed.activation_checkpoint import FullAC\n" * full
    assigned = [
        f"    config.{section}.{field} = {_literal(value)}\n"
        for section in ("training", "parallelism", "compile")
        for field, value in config[section].items()
    ]
    return f'''"""torchrun -m torchtitan.train --module torchtitan_plan --config planned"""

{imported}from torchtitan.models.{module}.config_registry import {model} as model
from torchtitan.trainer import Trainer


def planned() -> Trainer.Config:
    config = model()
{"".join(assigned)}    config.activation_checkpoint = {"FullAC.Config()" if full else None}
    return config
'''


def _literal(value: object) -> str:
    """A value as Python; a list in a line for each of its items."""
    if isinstance(value, list):
        return "\n".join(["[", *(f"        {json.dumps(item)}," for item in value), "    ]"])
    if isinstance(value, str):
        return json.dumps(value)
    return 'float("inf")' if value == float("inf") else repr(value)


def _megatron(plan: Plan, switches: Switches) -> tuple[Config, list[str]]:
    """Arguments of Megatron-LM's scripts."""
    group, pipeline, workload = plan.group, plan.pipeline, plan.workload
    tied = any(unit.also_used_by for unit in plan.units)
    forms = {unit.activations.form for unit in plan.units if _recomputes(unit)}
    # What these forms keep, a whole MLP and the norms computed again leave as well.
    selective = bool(forms) and forms <= {"lite", "mlp"}
    again = max(sum(map(_recomputes, part)) for part in _parts(plan))
    # torch's FSDP2 has neither stages nor replicas there, and offloads nothing.
    able = pipeline is None and not switches.offload_states and group.num_replicas == 1
    whole = switches.shard_states and able and not tied and workload.dtype != "float16"
    config: Config = {
        "num-layers": sum(unit.kind == "block" for unit in plan.units),
        "seq-length": workload.seq_len,
        "micro-batch-size": workload.batch_size,
        "global-batch-size": plan.global_batch,
        "clip-grad": 1.0 if switches.clip else 0.0,
        "untie-embeddings-and-output-weights": not tied,
        "bf16": workload.dtype == "bfloat16",
        "fp16": workload.dtype == "float16",
    }
    if pipeline:
        shape = shape_of(plan)
        # Layers of every stage, spelled out for shells. E: embedding, t: block, L: loss.
        letters = {plan.units[0].name: "E"} | {unit.name: "t" for unit in _all_blocks(plan)}
        layout = ["".join(letters.get(unit.name, "L") for unit in part) for part in _parts(plan)]
        config |= {
            "pipeline-model-parallel-size": shape.stages,
            "pipeline-model-parallel-layout": "|".join(layout),
            "use-tp-pp-dp-mapping": pipeline.layout == "stages within nodes",
        }
        if shape.chunks > 1:
            config["microbatch-group-size-per-virtual-pipeline-stage"] = shape.in_round
    if selective:
        config |= {"recompute-granularity": "selective", "recompute-modules": ["mlp", "layernorm"]}
    elif again:
        config |= {
            "recompute-granularity": "full",
            "recompute-method": "block",
            "recompute-num-layers": again,
        }
    if whole:
        config |= {
            "use-torch-fsdp2": True,
            "torch-fsdp2-no-reshard-after-forward": not switches.fetch_twice,
            "no-gradient-accumulation-fusion": True,
            "ckpt-format": "torch_dist",
        }
    elif switches.shard_states or switches.offload_states:
        config["use-distributed-optimizer"] = True
        if group.num_replicas > 1:
            config["num-distributed-optimizer-instances"] = group.num_replicas
    if switches.offload_states:
        config |= {
            "optimizer-cpu-offload": True,
            "optimizer-offload-fraction": _offloaded(plan),
            "use-precision-aware-optimizer": True,
        }
    said: list[Sayable] = ["numbers of blocks", "replicas", "shares of states"]
    losses = _common_losses(plan, switches, said=said) + _stage_losses(plan, switches)
    if pipeline and pipeline.schedule == "eager 1F1B":
        losses.append("Eager 1F1B cannot be expressed: here it is 1F1B, which waits for hops.")
    if selective:
        losses.append("Here every block recomputes its MLP and its norms, and nothing else.")
    elif again:
        where = "each stage" if pipeline else "the model"
        where = f"{again} of " + ("each chunk" if pipeline and pipeline.chunks > 1 else where)
        losses.append(
            f"Which blocks recompute cannot be expressed: here the first {where} do, whole."
        )
    alone = "here: optimizer states alone"
    if switches.shard_states and group.num_shards > 1 and not whole:
        losses.append(f"Parameters and gradients cannot be sharded {alone} are.")
    if switches.offload_states:
        losses.append(f"Parameters and gradients cannot leave the device {alone} do.")
    if workload.dtype != "float32" and workload.precision != "master":
        losses.append(
            f"Here parameters are {workload.dtype}, with float32 copies in the optimizer: other"
            " bits, and more memory."
        )
    losses.append("The model's sizes, besides its number of layers, are set by the script.")
    return config, losses


def _megatron_text(config: Config) -> str:
    """Arguments a line each: `pretrain_gpt.py $(cat megatron.args)`."""
    words = {
        name: value if isinstance(value, list) else [] if value is True else [str(value)]
        for name, value in config.items()
        if value is not False
    }
    return "".join(f"{' '.join([f'--{name}', *values])}\n" for name, values in words.items())


def _offloaded(plan: Plan) -> float:
    """The largest share of a stage's trained parameters whose states leave the device."""
    tensors = {
        name: prod(map(int, kind.split()[0].split("x")))
        for name, kind in unfolded(plan.tensors).items()
        if kind.endswith(" trainable") and kind[0].isdigit()
    }

    def size(unit: UnitPlan) -> int:
        inside = [name for name in tensors if name.startswith(f"{unit.name}.")]
        names = {*unit.parameters, *(inside if unit.kind == "block" else ())}
        return sum(tensors.get(name, 0) for name in names) if tensors else 1

    shares = [
        sum(map(size, filter(_offloads, units))) / (sum(map(size, units)) or 1)
        for units in _stages(plan)
    ]
    return ceil(100 * max(shares)) / 100


def _stages(plan: Plan) -> list[tuple[UnitPlan, ...]]:
    return [plan.of_stage(stage).units for stage in range(plan.num_stages)]


def _parts(plan: Plan) -> list[tuple[UnitPlan, ...]]:
    """Units of each chunk in the model's order: chunk k of stage s is part k p + s of p stages."""
    runs = sorted(run for stage in range(plan.num_stages) for run in plan.runs(stage))
    return [plan.units[first:end] for first, end in runs]


def _all_blocks(plan: Plan) -> list[UnitPlan]:
    """All blocks; ProtrainError if they are not between an embedding and a head."""
    blocks = [unit for unit in plan.units if unit.kind == "block"]
    if blocks != list(plan.units[1:-1]):
        problem = "the tool splits only models of an embedding, blocks and a head"
        raise ProtrainError(problem, key="--to")
    return blocks


def _recomputes(unit: UnitPlan) -> bool:
    """Return whether a block's forward runs again in a tool that swaps nothing."""
    return unit.kind == "block" and bool(unit.activations.tier or unit.activations.recomputes)


def _stage_losses(plan: Plan, switches: Switches) -> list[str]:
    """Sentences for tools that swap nothing, reach no disk, and have stages."""
    losses = [_NO_DISK] * switches.states_on_disk
    losses += ["Swapped activations cannot be expressed: they are recomputed."] * switches.swap
    for verb, does in (("recompute or swap", _recomputes), ("offload", _offloads)):
        counts = [sum(map(does, units)) for units in _stages(plan)]
        if len(set(counts)) > 1:
            numbers = listed(map(str, counts), "and")
            losses.append(f"Stages would {verb} {numbers} units: here one setting is for all.")
    return losses


def _offloads(unit: UnitPlan) -> bool:
    return unit.states.below is not None


_NO_DISK = "States on disk cannot be expressed: they go to host memory."

EXPORTERS: dict[str, Exporter] = {
    "fsdp2": Exporter(file_name="fsdp2.yaml", make=_fsdp2),
    "trl": Exporter(file_name="trl.yaml", make=_trl, norm="max_grad_norm"),
    "torchtitan": Exporter(
        file_name="torchtitan_plan.py",
        make=_torchtitan,
        write=_torchtitan_text,
        has_stages=True,
        norm="max_norm",
    ),
    "megatron": Exporter(
        file_name="megatron.args",
        make=_megatron,
        write=_megatron_text,
        has_stages=True,
        norm="clip-grad",
    ),
}
"""The tools by name."""


def _common_losses(plan: Plan, switches: Switches, *, said: Collection[Sayable] = ()) -> list[str]:
    """Sentences about losses of a tool that can express `said`, and about settings of scripts."""
    workload, losses = plan.workload, list[str]()
    if workload.adapter:
        losses.append(f"The adapter (--lora {option_of(workload.adapter)}) is set by the script.")
    if workload.quantize:
        losses.append(f"Quantised weights ({workload.quantize}) are set by the script.")
    if workload.compile and "compiled blocks" not in said:
        losses.append("Compile the blocks in the script, each by itself.")
    if plan.optimizer != "adamw":
        losses.append(f"The optimizer ({plan.optimizer}) is set by the script.")
    blocks = [unit for unit in plan.units if unit.kind == "block"]
    stay = sum(unit.states.is_persistent for unit in blocks)
    states = [unit.states for unit in blocks]
    has_shares, counted = "shares of states" in said, "numbers of blocks" in said
    if switches.offload_states and stay and not has_shares:
        losses.append(f"{_blocks(stay)} would keep their states on the device: all are offloaded.")
    elif switches.shard_states and stay and not has_shares:
        losses.append(f"{_blocks(stay)} would have their states on every device: all are sharded.")
    updated = {
        "in backward: here gradients stand until the step": states.count(OPTIMIZER_IN_BACKWARD),
        "on the device: here the host updates them": sum(one.update_on_device for one in states),
        "before the norm is known: here all updates wait": sum(one.speculate for one in states),
    }
    for words, count in updated.items():
        losses += [f"{_blocks(count)} would be updated {words}."] * (count > 0)
    if (whole := plan.whole).num_devices > 1:
        nodes = f" in {whole.num_nodes} nodes" if whole.num_nodes > 1 else ""
        started = f"{whole.num_devices}{nodes}"
        losses.append(f"The launcher sets the number of processes: start {started}.")
    if plan.group.num_replicas > 1 and switches.shard_states and "replicas" not in said:
        losses.append("Tell the launcher or the script that shards are replicated.")
    tiers = {unit.states.tier for unit in blocks if not unit.states.is_persistent}
    if len(tiers) > 1 and not has_shares:
        named = {"device": "devices", "host": "host", "disk": "disk"}
        where = listed([word for tier, word in named.items() if tier in tiers], "and")
        losses.append(f"States are split between {where} in the plan: here all go one way.")
    keep = sum(not _recomputes(unit) for unit in blocks)
    if keep and (switches.recompute or switches.swap) and not counted:
        losses.append(f"{_blocks(keep)} would keep their activations: none does here.")
    decided = [unit.activations for unit in blocks]
    in_part = sum(one.recomputes and one.form != "full" for one in decided)
    if in_part and not counted:
        losses.append(f"{_blocks(in_part)} would recompute in part: here the whole block is.")
    if any(FORMS[unit.activations.form].of == "last part" for unit in plan.units):
        losses.append("The loss would be computed in place: here it takes more memory.")
    if not plan.keeps_everything or plan.pipeline is not None:
        losses.append(
            "When transfers run (leads, drains, pieces) is the tool's choice: the predicted peak"
            " and the predicted seconds do not hold for it."
        )
    return losses


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _mixed_precision(plan: Plan) -> str:
    """`no` where everything is of one type: then the model itself is loaded in it."""
    if plan.workload.precision == "pure":
        return "no"
    return {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[plan.workload.dtype]
