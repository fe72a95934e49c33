"""Cases of the accuracy benchmark: specimens of the zoo, wider, and plans of five kinds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import nn

from benchmarks.uniform import AMPLE, decided, plan_of_units
from benchmarks.zoo import ZOO, Specimen
from protrain_plan.models.presets import JsonObject
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.search.choices import min_memory
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Budgets,
    Placement,
    Plan,
    Schedule,
    StepSettings,
)
from protrain_runtime.contract.records.profile import Profile
from tests.support.planning_cases import plan as solve

PIECE_BYTES = 1 << 20
"""Chunks here are of a few MiB: several pieces in each."""

PlanKind = Literal["keep", "recompute", "partial", "offload", "planned"]
PLAN_KINDS: tuple[PlanKind, ...] = get_args(PlanKind)
"""
keep       everything kept, all states persistent
recompute  all blocks recomputed, all states persistent
partial    blocks recomputed in part (lite, else mlp, else attn), all states persistent; of blocks
           that have no such form, the input swapped
offload    all activations swapped to disk, all states offloaded there
planned    what the planner chooses half way between the least memory and that of `keep`
"""

# --- specimens ------------------------------------------------------------------------------------

_WIDTHS = (
    *("vocab_size", "image_token_index", "hidden_size", "intermediate_size", "head_dim"),
    *("query_pre_attn_scalar", "moe_intermediate_size", "n_embd", "d_model", "d_kv", "d_ff"),
    *("word_embed_proj_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "projection_dim"),
)


def _widened(config: JsonObject, factor: int) -> JsonObject:
    """The configuration with its widths times `factor`: the number of heads stays."""
    wide: JsonObject = {}
    for key, value in config.items():
        if isinstance(value, dict):
            wide[key] = _widened(value, factor)
        else:
            wide[key] = value * factor if key in _WIDTHS and isinstance(value, int) else value
    return wide


def _wide(name: str, factor: int = 4, *, batch_size: int = 8, seq_len: int = 64) -> Specimen:
    specimen = ZOO[name]
    if specimen.config is None:
        return specimen
    wide = _widened(specimen.config, factor)
    return replace(specimen, config=wide, batch_size=batch_size, seq_len=seq_len)


def checkpointed_llama() -> tuple[nn.Module, Iterator[object]]:
    """A model whose blocks transformers itself recomputes."""
    return _checkpointed("llama")


def checkpointed_gpt2() -> tuple[nn.Module, Iterator[object]]:
    """The same with dropout, so that the random state has to come back."""
    return _checkpointed("gpt2")


def _checkpointed(name: str) -> tuple[nn.Module, Iterator[object]]:
    model, batches = _wide(name).make()
    enable: Callable[..., None] = getattr(model, "gradient_checkpointing_enable")  # noqa: B009
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, batches


def _specimens() -> Iterator[Specimen]:
    for name in ZOO:
        yield _wide(name)
    for name, base, changes in (
        ("llama-bfloat16", "llama", {"dtype": "bfloat16"}),
        ("llama-master", "llama", {"dtype": "bfloat16", "precision": "master"}),
        ("gpt2-bfloat16", "gpt2", {"dtype": "bfloat16"}),
        ("vit-bfloat16", "vit", {"dtype": "bfloat16"}),
        ("gpt2-autocast", "gpt2", {"dtype": "bfloat16", "precision": "autocast"}),
        ("lora-bfloat16", "llama-lora", {"dtype": "bfloat16"}),
        ("llama-long", "llama", {"batch_size": 1, "seq_len": 128}),
        ("qwen2-batch", "qwen2", {"batch_size": 24, "seq_len": 24}),
    ):
        yield replace(_wide(base), name=name, **changes)
    yield replace(_wide("llama", 8), name="llama-wide")
    for name in ("llama", "gpt2"):
        factory = f"benchmarks.accuracy_cases:checkpointed_{name}"
        yield Specimen(name=f"{name}-checkpointed", factory=factory, batch_size=8, seq_len=64)


SPECIMENS: dict[str, Specimen] = {specimen.name: specimen for specimen in _specimens()}

# --- plans ----------------------------------------------------------------------------------------

_NO_FREEDOM = Schedule(forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=0, update_drain=0)
"""All that leaves is gone before the next slot: what stands in a slot depends on no clock."""


@dataclass(frozen=True, slots=True)
class _Policy:
    """The first of `activations` that a block can take, and the placement."""

    activations: tuple[Activations, ...]
    states: Placement


_POLICIES: dict[PlanKind, _Policy] = {
    "keep": _Policy((KEEP,), PERSISTENT),
    "recompute": _Policy((RECOMPUTE,), PERSISTENT),
    "partial": _Policy(
        (
            Activations(form="lite"),
            Activations(form="mlp"),
            Activations(form="attn"),
            Activations(form="full", tier="disk"),
        ),
        PERSISTENT,
    ),
    "offload": _Policy((Activations(tier="disk"),), Placement(tier="disk")),
}


def plan_of(kind: PlanKind, profile: Profile) -> Plan:
    """The plan of this kind for what was profiled."""
    disk = profile.hardware.tier("disk").capacity_bytes
    budgets = Budgets(device=AMPLE, host=0, disk=disk)
    problem = Problem.of(
        profile, budgets, settings=StepSettings(piece_bytes=PIECE_BYTES, overlap_steps=False)
    )
    if kind != "planned":
        return _uniform(problem, _POLICIES[kind])
    most = _uniform(problem, _POLICIES["keep"]).prediction.peak_bytes.device
    lean = min_memory(problem)
    assert lean is not None, "the disk holds everything"
    context = profile.hardware.device.context_bytes
    half = Budgets(device=context + (lean.bytes + most) // 2, host=0, disk=disk)
    outcome = solve(profile, half, settings=replace(OVERLAPPING, piece_bytes=PIECE_BYTES))
    assert isinstance(outcome, Solved), "half way up, the leanest plan fits"
    return outcome.plan


def _uniform(problem: Problem, policy: _Policy) -> Plan:
    """The policy for every unit; one that cannot follow keeps its activations, or persists."""
    return plan_of_units(
        problem,
        [
            decided(problem, index, policy.activations, policy.states, _NO_FREEDOM)
            for index in range(len(problem.options))
        ],
    )
