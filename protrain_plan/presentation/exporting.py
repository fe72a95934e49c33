"""The nearest configuration of another tool, and what it cannot say.

Those tools have one switch where a plan has a decision per block. A switch is on as soon as one
block needs it: no block then holds more of the device than was planned, and some move or compute
more. Each list of losses says what that is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.adapters import option_of
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.plan import (
    STEPPED,
    Keep,
    Offload,
    Persistent,
    Plan,
    Recompute,
    Swap,
    SwapInput,
)

Config = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A configuration file and what of the plan is lost in it, a sentence each."""

    file_name: str
    text: str
    losses: tuple[str, ...]


class Switches:
    """A plan's decisions as the few switches that the tools have."""

    def __init__(self, plan: Plan) -> None:
        moved = [unit.states for unit in plan.units if isinstance(unit.states, Offload)]
        gathered = [states for states in moved if states.keep_gathered]
        decided = [unit.activations for unit in plan.units]
        self.shard_states = plan.group.num_devices > 1 and bool(moved)
        self.offload_states = any(states.tier != "device" for states in moved)
        self.states_on_disk = any(states.tier == "disk" for states in moved)
        # Parameters come for forward and again for backward.
        self.fetch_twice = plan.group.num_devices == 1 or len(gathered) < len(plan.units)
        self.recompute = any(isinstance(one, Recompute | SwapInput) for one in decided)
        self.swap = any(isinstance(one, Swap | SwapInput) for one in decided)


def export(plan: Plan, tool: str) -> Exported:
    """The configuration of a tool of `EXPORTERS` that comes nearest to the plan.

    ProtrainError where the plan has stages.
    """
    if plan.pipeline is not None:
        raise ProtrainError(
            f"the plan has {plan.num_stages} pipeline stages, and {tool} has none",
            key="--to",
            fix="plan --stages 1, or train its cuts with PyTorch: docs/how-to/stages.md",
        )
    switches = Switches(plan)
    config, losses = EXPORTERS[tool](plan, switches)
    return Exported(
        file_name=f"{tool}.yaml",
        text=yaml.safe_dump(config, sort_keys=False),
        losses=(*_common_losses(plan, switches), *losses),
    )


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
    losses: list[str] = []
    if switches.states_on_disk:
        losses.append("States on disk cannot be said: they go to host memory.")
    if switches.swap:
        losses.append("Swapped activations cannot be said: they stay on the device.")
    workload = plan.workload
    sequences = "1 sequence" if workload.batch_size == 1 else f"{workload.batch_size} sequences"
    sizes = f"{sequences} of {workload.seq_len} tokens, {plan.settings.micro_batches} per update"
    losses.append(f"The batch ({sizes}) and the dtype are the script's.")
    return config, losses


def _trl(plan: Plan, switches: Switches) -> tuple[Config, list[str]]:
    """Arguments of SFTConfig that are about memory."""
    clips = plan.settings.updates == "after backward"
    config: Config = {
        "per_device_train_batch_size": plan.workload.batch_size,
        "gradient_accumulation_steps": plan.settings.micro_batches,
        "max_length": plan.workload.seq_len,
        **{dtype: _mixed_precision(plan) == dtype for dtype in ("bf16", "fp16")},
        "gradient_checkpointing": switches.recompute,
        "activation_offloading": switches.swap,
        "max_grad_norm": 1.0 if clips else 0.0,
    }
    losses: list[str] = []
    if switches.offload_states:
        losses.append(
            "Offloaded states cannot be said here: launch with accelerate and the file of protrain"
            " export --to fsdp2."
        )
    losses.append(
        "The norm that gradients are clipped to is taken to be 1.0 (max_grad_norm)."
        if clips
        else "Nothing is clipped, as in the plan (max_grad_norm): one made with --clip does."
    )
    return config, losses


EXPORTERS: dict[str, Callable[[Plan, Switches], tuple[Config, list[str]]]] = {
    "fsdp2": _fsdp2,
    "trl": _trl,
}
"""The tools by name: what makes the configuration, with losses of its own."""


def _common_losses(plan: Plan, switches: Switches) -> list[str]:
    """Sentences on what no tool can say, and what is the script's."""
    workload, group = plan.workload, plan.group
    blocks = [unit for unit in plan.units if unit.kind == "block"]
    decided = any(unit.states != Persistent() or unit.activations != Keep() for unit in plan.units)
    stay = sum(isinstance(unit.states, Persistent) for unit in blocks)
    keep = sum(isinstance(unit.activations, Keep) for unit in blocks)
    in_part = sum(
        isinstance(unit.activations, Recompute | SwapInput) and unit.activations.form != "full"
        for unit in blocks
    )
    stepped = sum(unit.states == STEPPED for unit in blocks)
    streamed = sum(unit.states.update_on_device for unit in blocks)
    ahead = sum(unit.states.speculate for unit in blocks)
    tiers = {unit.states.tier for unit in blocks if not isinstance(unit.states, Persistent)}
    places = {"device": "devices", "host": "host", "disk": "disk"}
    where = " and ".join(place for tier, place in places.items() if tier in tiers)
    started = f"{group.num_devices}{f' in {group.num_nodes} nodes' * (group.num_nodes > 1)}"
    in_place = any(FORMS[unit.activations.form].of == "last part" for unit in plan.units)
    stay_words = ""
    if switches.offload_states:
        stay_words = "keep their states on the device: all are offloaded"
    elif switches.shard_states:
        stay_words = "have their states on every device: all are sharded"
    losses = [
        (workload.adapter, f"The adapter (--lora {option_of(workload.adapter)}) is the script's."),
        (workload.quantize, f"Quantised weights ({workload.quantize}) are the script's."),
        (workload.compile, "Compiling the blocks, each by itself, is the script's."),
        (plan.optimizer != "adamw", f"The optimizer ({plan.optimizer}) is the script's."),
        (stay and stay_words, f"{_blocks(stay)} would {stay_words}."),
        (
            stepped,
            f"{_blocks(stepped)} would be updated in backward: here gradients stand until the"
            " step.",
        ),
        (
            streamed,
            f"{_blocks(streamed)} would be updated on the device: here the host updates them.",
        ),
        (
            ahead,
            f"{_blocks(ahead)} would be updated before the norm is known: here all updates wait.",
        ),
        (
            group.num_devices > 1,
            f"How many processes run is the launcher's: it has to start {started}.",
        ),
        (
            group.num_replicas > 1 and switches.shard_states,
            "That shards are replicated has to be said to the launcher or the script.",
        ),
        (len(tiers) > 1, f"States are split between {where} in the plan: here all go one way."),
        (
            keep and (switches.recompute or switches.swap),
            f"{_blocks(keep)} would keep their activations: none does here.",
        ),
        (in_part, f"{_blocks(in_part)} would recompute in part: here the whole block is."),
        (in_place, "The loss would be computed in place: here it takes more memory."),
        (
            decided,
            "When transfers run (leads, drains, pieces) is the tool's choice: the predicted peak"
            " and the predicted seconds do not hold for it.",
        ),
    ]
    return [words for is_lost, words in losses if is_lost]


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _mixed_precision(plan: Plan) -> str:
    """`no` where everything is of one type: then the model itself is loaded in it."""
    if plan.workload.precision == "pure":
        return "no"
    return {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[plan.workload.dtype]
