"""The nearest configuration of another tool, and what it cannot say.

Those tools have one switch where a plan has a decision per block. A switch is on as soon as one
block needs it: no block then holds more of the device than was planned, and some move or compute
more. Each list of losses says what that is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

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
from protrain_runtime.contract.records.tree import listed

Config = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A configuration file and what of the plan is lost in it, a sentence each."""

    file_name: str
    text: str
    losses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """A plan's decisions as the few switches that the tools have."""

    shard_states: bool  # of several devices: some unit's, on them or below
    offload_states: bool
    states_on_disk: bool
    fetch_twice: bool  # some unit's parameters, for forward and again for backward
    recompute: bool  # some block computes its forward again
    offload_inputs: bool  # ... and has its input moved off the device until then
    offload_saved: bool  # some block moves what autograd saved

    @staticmethod
    def of(plan: Plan) -> "Switches":
        moved = [unit.states for unit in plan.units if isinstance(unit.states, Offload)]
        held = [states for states in moved if states.keep_gathered]
        decided = [unit.activations for unit in plan.units]
        return Switches(
            shard_states=plan.group.num_devices > 1 and bool(moved),
            offload_states=any(states.tier != "device" for states in moved),
            states_on_disk=any(states.tier == "disk" for states in moved),
            fetch_twice=plan.group.num_devices == 1 or len(held) < len(plan.units),
            recompute=any(isinstance(one, Recompute | SwapInput) for one in decided),
            offload_inputs=any(isinstance(one, SwapInput) for one in decided),
            offload_saved=any(isinstance(one, Swap) for one in decided),
        )


def export(plan: Plan, tool: str) -> Exported:
    """The configuration of a tool of `EXPORTERS` that comes nearest to the plan."""
    file_name, make = EXPORTERS[tool]
    config, losses = make(plan, Switches.of(plan))
    text = yaml.safe_dump(config, sort_keys=False)
    return Exported(file_name=file_name, text=text, losses=tuple(losses))


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
    losses = _common_losses(plan, switches)
    if switches.states_on_disk:
        losses.append("States on disk cannot be said: they go to host memory.")
    if switches.offload_saved or switches.offload_inputs:
        losses.append("Swapped activations cannot be said: they stay on the device.")
    workload = plan.workload
    sequences = "1 sequence" if workload.batch_size == 1 else f"{workload.batch_size} sequences"
    sizes = f"{sequences} of {workload.seq_len} tokens, {plan.settings.micro_batches} per update"
    losses.append(f"The batch ({sizes}) and the dtype are the script's.")
    return config, losses


def _trl(plan: Plan, switches: Switches) -> tuple[Config, list[str]]:
    """Arguments of SFTConfig that are about memory."""
    config: Config = {
        "per_device_train_batch_size": plan.workload.batch_size,
        "gradient_accumulation_steps": plan.settings.micro_batches,
        "max_length": plan.workload.seq_len,
        **{dtype: _mixed_precision(plan) == dtype for dtype in ("bf16", "fp16")},
        "gradient_checkpointing": switches.recompute,
        "activation_offloading": switches.offload_inputs or switches.offload_saved,
        "max_grad_norm": 1.0 if plan.settings.updates == "after backward" else 0.0,
    }
    losses = _common_losses(plan, switches)
    if switches.offload_states:
        losses.append(
            "Offloaded states cannot be said here: launch with accelerate and the file of protrain"
            " export --to fsdp2."
        )
    return config, losses


EXPORTERS: dict[str, tuple[str, Callable[[Plan, Switches], tuple[Config, list[str]]]]] = {
    "fsdp2": ("fsdp2.yaml", _fsdp2),
    "trl": ("trl.yaml", _trl),
}
"""Tools: the file, as the tool calls it, and what makes the configuration and its losses."""


def _common_losses(plan: Plan, switches: Switches) -> list[str]:
    """Sentences on what none of the tools can say, and what is the script's with all of them."""
    losses: list[str] = []
    if plan.workload.adapter:
        losses.append(f"The adapter (--lora {option_of(plan.workload.adapter)}) is the script's.")
    if plan.workload.quantize:
        losses.append(f"Quantised weights ({plan.workload.quantize}) are the script's.")
    if plan.workload.compile:
        losses.append("Compiling the blocks, each by itself, is the script's.")
    if plan.optimizer != "adamw":
        losses.append(f"The optimizer ({plan.optimizer}) is the script's.")
    blocks = [unit for unit in plan.units if unit.kind == "block"]
    stay = sum(isinstance(unit.states, Persistent) for unit in blocks)
    if switches.offload_states and stay:
        losses.append(f"{_blocks(stay)} would keep their states on the device: all are offloaded.")
    elif switches.shard_states and stay:
        losses.append(f"{_blocks(stay)} would have their states on every device: all are sharded.")
    stepped = sum(unit.states == STEPPED for unit in blocks)
    if stepped:
        losses.append(
            f"{_blocks(stepped)} would be updated in backward: here gradients stand until the step."
        )
    streamed = sum(unit.states.update_on_device for unit in blocks)
    if streamed:
        losses.append(
            f"{_blocks(streamed)} would be updated on the device: here the host updates them."
        )
    ahead = sum(unit.states.speculate for unit in blocks)
    if ahead:
        losses.append(
            f"{_blocks(ahead)} would be updated before the norm is known: here all updates wait."
        )
    if plan.group.num_devices > 1:
        nodes = f" in {plan.group.num_nodes} nodes" if plan.group.num_nodes > 1 else ""
        started = f"{plan.group.num_devices}{nodes}"
        losses.append(f"How many processes run is the launcher's: it has to start {started}.")
    if plan.group.num_replicas > 1 and switches.shard_states:
        losses.append("That shards are replicated has to be said to the launcher or the script.")
    tiers = {unit.states.tier for unit in blocks if not isinstance(unit.states, Persistent)}
    if len(tiers) > 1:
        named = {"device": "devices", "host": "host", "disk": "disk"}
        where = listed([word for tier, word in named.items() if tier in tiers], "and")
        losses.append(f"States are split between {where} in the plan: here all go one way.")
    keep = sum(isinstance(unit.activations, Keep) for unit in blocks)
    if keep and (switches.recompute or switches.offload_saved):
        losses.append(f"{_blocks(keep)} would keep their activations: none does here.")
    in_part = sum(
        isinstance(unit.activations, Recompute | SwapInput) and unit.activations.form != "full"
        for unit in blocks
    )
    if in_part:
        losses.append(f"{_blocks(in_part)} would recompute in part: here the whole block is.")
    if any(FORMS[unit.activations.form].of == "last part" for unit in plan.units):
        losses.append("The loss would be computed in place: here it takes more memory.")
    if any(unit.states != Persistent() or unit.activations != Keep() for unit in plan.units):
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
