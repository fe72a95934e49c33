"""What the runtime benchmark's processes do: profile a model, compare two ways to train it.

Each is a process of its own, so that what one leaves behind does not count in another.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, assert_never, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.peers.checkpointed import checkpoint_every_block
from benchmarks.rounds import Round
from benchmarks.runtime_loop import LoadComputeSave
from benchmarks.uniform import AMPLE, plan_of_units
from benchmarks.zoo import Specimen
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.profiling.measured import measure_model
from protrain_plan.simulation.timeline import (
    device_update_seconds,
    move_seconds,
    slot_seconds,
)
from protrain_runtime import compile_blocks, prepare, record
from protrain_runtime.contract.records import read_profile, write_profile
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    Activations,
    Budgets,
    Keep,
    Offload,
    Persistent,
    Placement,
    Plan,
    Recompute,
    Schedule,
    StepSettings,
    Swap,
    Updates,
)
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.devices.memory_meter import return_freed_memory
from protrain_runtime.preparation import Check

PROFILE = Path("profile.yaml")
NUM_WARM_STEPS = 2

SPECIMENS: dict[str, Specimen] = {
    specimen.name: specimen
    for specimen in (
        Specimen(
            name="llama-512",  # 6 layers, 512 wide, 24 M parameters
            config={
                "model_type": "llama",
                "vocab_size": 4096,
                "hidden_size": 512,
                "intermediate_size": 1408,
                "num_hidden_layers": 6,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "max_position_embeddings": 512,
                "pad_token_id": 0,
                "tie_word_embeddings": False,
            },
            batch_size=1,
            seq_len=512,
        ),
        Specimen(
            name="gpt2-4",  # GPT-2 small with 4 of its 12 layers, dropout included
            config={
                "model_type": "gpt2",
                "vocab_size": 50257,
                "n_embd": 768,
                "n_layer": 4,
                "n_head": 12,
                "n_positions": 1024,
            },
            batch_size=1,
            seq_len=256,
        ),
        Specimen(
            name="llama-256",  # 12 layers of so little work that what the engine adds shows
            config={
                "model_type": "llama",
                "vocab_size": 1024,
                "hidden_size": 256,
                "intermediate_size": 704,
                "num_hidden_layers": 12,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 256,
                "pad_token_id": 0,
                "tie_word_embeddings": False,
            },
            batch_size=1,
            seq_len=128,
        ),
    )
}
QUICK = Specimen(
    name="tiny",
    config={
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    },
)

Comparison = Literal[
    "noise",
    "keep",
    "recompute",
    "swap",
    "swap to disk",
    "offload",
    "recording",
    "checked",
    "overlap",
    "ahead",
    "compiled",
    "compiled keep",
    "compiled recompute",
    "compiled fused",
    "compiled bits",
]
COMPARISONS: tuple[Comparison, ...] = get_args(Comparison)
"""
noise         plain PyTorch against itself: what a ratio of 1 looks like on this machine
keep          a plan that keeps everything, against plain PyTorch
recompute     a plan that recomputes every block, against torch.utils.checkpoint around each
swap          a plan that swaps what every block saves to host memory, against save_on_cpu, which is
              made to copy (pin_memory: on a CPU it copies nothing otherwise)
swap to disk  the same to disk, through the page cache
offload       a plan with the blocks' states on disk and recomputation, against a plain loop that
              loads, computes and saves (`runtime_loop`)
recording     that plan recorded, against itself without
checked       a plan with the blocks' states and activations on disk and `check="spills"`, against
              itself without
overlap       a plan with the blocks' states on disk and updates after backward, which run on into
              the next forward, against the same where a step waits for them
ahead         a plan with the blocks' states on disk, whose updates run ahead of the norm, against
              one in which they wait for it; no step is clipped
compiled      plain PyTorch with each block compiled by itself, against plain PyTorch
compiled keep, compiled recompute
              as keep and recompute, with compiled blocks on both sides: torch.utils.checkpoint
              stands around compiled code
compiled fused
              a plan that recomputes every block in the form `fused`, against checkpointing by
              transformers, which is compiled with the block
compiled bits
              the plan of `compiled recompute` against the same: what bits cost
"""


# --- plans ----------------------------------------------------------------------------------------

_ONE_AHEAD = Schedule(forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=1, update_drain=1)


def plan_of(
    profile: Profile,
    activations: Activations,
    states: Placement,
    *,
    updates: Updates = "in backward",
    overlap: bool = False,
) -> Plan:
    """The same decisions for every block; parts keep their activations and persist."""
    budgets = Budgets(device=AMPLE, host=0, disk=AMPLE)
    problem = Problem.of(
        profile,
        budgets,
        settings=StepSettings(updates=updates, overlap_steps=overlap, clip_share=0.0),
    )
    units = tuple(
        problem.unit_plan(
            index,
            activations if unit.kind == "block" else Keep(),
            states if unit.kind == "block" else Persistent(),
            _ONE_AHEAD,
        )
        for index, unit in enumerate(profile.units)
    )
    on_host = isinstance(activations, Swap) and activations.tier == "host"  # no tier of a CPU's
    return plan_of_units(problem, units, timed=not on_host)


def one_after_the_other(plan: Plan, profile: Profile) -> float:
    """Seconds of all that a plan computes and moves, with nothing beside anything."""
    problem = Problem.of(
        profile, plan.budgets, settings=replace(OVERLAPPING, piece_bytes=plan.settings.piece_bytes)
    )
    program = problem.program(plan.units)
    return (
        sum(slot_seconds(program))
        + device_update_seconds(program)
        + sum(move_seconds(move, profile, program.settings) for move in program.moves)
    )


# --- ways to train --------------------------------------------------------------------------------


class Training:
    """A loop over a specimen's batches; `around` stands around every forward."""

    def __init__(
        self,
        specimen: Specimen,
        attach: Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]],
        around: Callable[[], AbstractContextManager[object, bool | None]] = nullcontext,
    ) -> None:
        model, self._batches = specimen.make()
        self.model, self._optimizer = attach(model)
        self._around = around
        self._random = torch.get_rng_state()
        self.losses: list[float] = []

    def seconds(self) -> float:
        """A step; its batch is loaded before the clock starts, with random numbers of its own."""
        batch: Batch = next(self._batches)
        torch.set_rng_state(self._random)
        start = time.perf_counter()
        with self._around():
            loss = loss_of(call_model(self.model, batch))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())
        taken = time.perf_counter() - start
        self._random = torch.get_rng_state()
        return taken


def _plain(profile: Profile, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, optimizer_factory(profile.optimizer.name)(model.parameters())


def _compiled(
    profile: Profile, checkpointed: Literal["", "around", "inside"], model: nn.Module
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Compiled blocks, with torch.utils.checkpoint around their code, or as a part of it."""
    compile_blocks(model, plan_of(profile, Keep(), Persistent()))
    if checkpointed == "inside":
        return _checkpointed(profile, model)
    if checkpointed:
        for unit in profile.units:
            if unit.kind == "block":
                block: Any = model.get_submodule(unit.name)
                code = block._compiled_call_impl
                block._compiled_call_impl = partial(checkpoint, code, use_reentrant=False)
    return _plain(profile, model)


def _checkpointed(profile: Profile, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    checkpoint_every_block(model)
    return _plain(profile, model)


def _looped(
    profile: Profile, folder: Path, model: nn.Module
) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, LoadComputeSave(model, profile, folder)


def _planned(
    plan: Plan, folder: Path, check: Check | None, model: nn.Module
) -> tuple[nn.Module, torch.optim.Optimizer]:
    factory = optimizer_factory(plan.optimizer)
    return prepare(model, plan, optimizer=factory, spill_directory=folder, check=check)


# --- processes ------------------------------------------------------------------------------------


def profile(specimen: Specimen, folder: Path, quick: bool) -> dict[str, Any]:
    """A measured profile as a file in `folder`; the machine that was probed for it.

    `quick`: on the catalogue's machine, which is not this one.
    """
    return_freed_memory()
    model, batches = specimen.make()
    found = measure_model(
        model,
        batches,
        workload=specimen.workload,
        num_steps=1 if quick else None,
        spill_directory=folder,
        progress=lambda *_: None,
        machine=load_hardware("cpu") if quick else None,
    )
    write_profile(found, folder / PROFILE)
    return {
        "num_parameters": sum(unit.num_parameters for unit in found.units),
        "hardware": asdict(found.hardware),
    }


def compare(
    specimen: Specimen, comparison: Comparison, folder: Path, num_pairs: int, number: int
) -> dict[str, Any]:
    """One round: steps of two ways to train, which take turns. Who is built first, too.

    For what is compared with the simulator, freed memory goes back to the system: so it is
    profiled, and so `protrain run` has it on a CPU.
    """
    if comparison in ("offload", "overlap", "ahead"):
        return_freed_memory()
    profiled = read_profile(folder / PROFILE)
    with TemporaryDirectory(dir=folder) as spill, ExitStack() as stack:
        if specimen == QUICK:  # a C++ compiler takes minutes
            backend = torch.compiler.set_stance("default", force_backend="aot_eager")
            stack.enter_context(backend)
        ways = ways_of(specimen, comparison, profiled, Path(spill))
        if number % 2:
            other = ways.other()
            ours = ways.ours()
        else:
            ours = ways.ours()
            other = ways.other()
        if comparison == "recording":
            stack.enter_context(record(ours.model))
        for _ in range(NUM_WARM_STEPS):
            ours.seconds()
            other.seconds()
        gc.collect()
        taken = list(_in_turns(ours, other, num_pairs))
    found = Round(
        ours=tuple(seconds for seconds, _ in taken),
        other=tuple(seconds for _, seconds in taken),
        same_losses=ours.losses == other.losses,
        simulated_ours=ways.simulated[0] if ways.simulated else None,
        simulated_other=ways.simulated[1] if ways.simulated else None,
        load=os.getloadavg()[0],
    )
    return asdict(found)


class Ways(NamedTuple):
    """Two ways to train, each built when it is called, and what the simulator says of them."""

    ours: Callable[[], Training]
    other: Callable[[], Training]
    simulated: tuple[float, float] | None = None


def ways_of(specimen: Specimen, comparison: Comparison, profiled: Profile, spill: Path) -> Ways:
    """What a comparison compares."""
    plain = partial(Training, specimen, partial(_plain, profiled))

    def planned(plan: Plan, check: Check | None = None) -> Callable[[], Training]:
        return partial(Training, specimen, partial(_planned, plan, spill, check))

    def compiled(checkpointed: Literal["", "around", "inside"] = "") -> Callable[[], Training]:
        return partial(Training, specimen, partial(_compiled, profiled, checkpointed))

    def compiled_plan(activations: Activations) -> Callable[[], Training]:
        fused = activations == Recompute(form="fused")  # of which a profile of plain blocks is mute
        plan = plan_of(profiled, Recompute() if fused else activations, Persistent())
        units = tuple(
            replace(unit, activations=activations) if unit.kind == "block" else unit
            for unit in plan.units
        )
        workload = replace(plan.workload, compile="blocks")
        return planned(replace(plan, workload=workload, units=units, exact=not fused))

    match comparison:
        case "noise":
            return Ways(plain, plain)
        case "keep":
            return Ways(planned(plan_of(profiled, Keep(), Persistent())), plain)
        case "recompute":
            checkpointed = partial(Training, specimen, partial(_checkpointed, profiled))
            return Ways(planned(plan_of(profiled, Recompute(), Persistent())), checkpointed)
        case "swap" | "swap to disk":
            tier: TierName = "host" if comparison == "swap" else "disk"
            around = partial(torch.autograd.graph.save_on_cpu, pin_memory=True)
            saved = partial(Training, specimen, partial(_plain, profiled), around)
            return Ways(planned(plan_of(profiled, Swap(tier=tier), Persistent())), saved)
        case "offload":
            plan = plan_of(profiled, Recompute(), Offload(tier="disk"))
            looped = partial(Training, specimen, partial(_looped, profiled, spill))
            simulated = plan.prediction.step_seconds, one_after_the_other(plan, profiled)
            return Ways(planned(plan), looped, simulated)
        case "overlap":
            after = partial(
                plan_of, profiled, Keep(), Offload(tier="disk"), updates="after backward"
            )
            ours, apart = after(overlap=True), after(overlap=False)
            simulated = ours.prediction.step_seconds, apart.prediction.step_seconds
            return Ways(planned(ours), planned(apart), simulated)
        case "ahead":
            states = Offload(tier="disk")
            waiting, ahead = (
                plan_of(profiled, Keep(), one, updates="after backward")
                for one in (states, replace(states, speculate=True))
            )
            simulated = ahead.prediction.step_seconds, waiting.prediction.step_seconds
            return Ways(planned(ahead), planned(waiting), simulated)
        case "compiled":
            return Ways(compiled(), plain)
        case "compiled keep":
            return Ways(compiled_plan(Keep()), compiled())
        case "compiled recompute":
            return Ways(compiled_plan(Recompute()), compiled("around"))
        case "compiled fused":
            return Ways(compiled_plan(Recompute(form="fused")), compiled("inside"))
        case "compiled bits":
            return Ways(compiled_plan(Recompute()), compiled("inside"))
        case "recording":
            offloaded = planned(plan_of(profiled, Recompute(), Offload(tier="disk")))
            return Ways(offloaded, offloaded)
        case "checked":
            plan = plan_of(profiled, Swap(tier="disk"), Offload(tier="disk"))
            return Ways(planned(plan, "spills"), planned(plan))
        case _:
            assert_never(comparison)


def _in_turns(ours: Training, other: Training, num_pairs: int) -> Iterator[tuple[float, float]]:
    """Pairs of steps; who goes first changes from pair to pair."""
    for number in range(num_pairs):
        if number % 2:
            second = other.seconds()
            yield ours.seconds(), second
        else:
            first = ours.seconds()
            yield first, other.seconds()
