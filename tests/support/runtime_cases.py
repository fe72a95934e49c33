"""Small models, plans for them, and plain PyTorch's answer: shared by the tests of the runtime."""

import fcntl
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.models.building import seeded
from protrain_plan.models.sources import load_source
from protrain_plan.profiling.memory.saved import saved_bytes
from protrain_plan.profiling.structure.discovery import discover
from protrain_runtime.contract.records.decisions import WORDINGS
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    KEEP,
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Budgets,
    Placement,
    Plan,
    Prediction,
    Schedule,
    StateTier,
    StepSettings,
    TierBytes,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import (
    Form,
    Profile,
    Workload,
)
from protrain_runtime.devices import device as devices
from protrain_runtime.diagnostics.matching import model_fingerprint
from protrain_runtime.states.compositions import Composition, is_composed
from tests.support.estimates import measure
from tests.support.functional_model import FunctionalStack
from tests.support.plan_settings import with_settings

VOCABULARY = 256
BATCH, SEQUENCE = 4, 64
LARGE = 1000
"""A lead longer than any step here: everything is fetched at once."""


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A file that takes seconds to make: made by the first worker that asks, for all of them."""
    base = factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / name
        if not path.exists():
            make(path)
    return path


def profiled_here(source: str, spill: Path, **options: Any) -> Profile:
    """A measured profile of a small model, whose seconds do not matter."""
    usual = {"batch_size": BATCH, "seq_len": SEQUENCE, "dtype": "float32", "num_steps": 1}
    given = {**usual, **options, "spill_directory": spill, "machine": load_hardware("cpu")}
    return measure(load_source(source), device="cpu", **given)


# --- the device -----------------------------------------------------------------------------------


@dataclass
class _Where:
    device: torch.device
    exact_optimizer: bool


_WHERE = _Where(torch.device("cpu"), exact_optimizer=False)


def device() -> torch.device:
    """Where models are built and batches are made: a CPU, unless `on_device` says otherwise."""
    return _WHERE.device


@contextmanager
def on_device(name: str, *, exact_optimizer: bool = False) -> Iterator[None]:
    """Build models and batches there.

    `exact_optimizer`: plain steps are taken by an optimizer whose bits do not depend on where it
    runs. Host and card round AdamW's steps differently; products with powers of two are exact.
    """
    before = _WHERE.device, _WHERE.exact_optimizer
    _WHERE.device, _WHERE.exact_optimizer = torch.device(name), exact_optimizer
    try:
        yield
    finally:
        _WHERE.device, _WHERE.exact_optimizer = before


def where() -> tuple[str, bool]:
    """The conditions of plain training beside its script."""
    return str(device()), _WHERE.exact_optimizer


def moved_to_device(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device()), tree)


def random_states() -> list[Tensor]:
    """States of all generators that training here may draw from."""
    host = [torch.get_rng_state()]
    return host if devices.on_host(device()) else [*host, devices.random_state(device())]


def set_random_states(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        devices.set_random_state(device(), state)


# --- models ---------------------------------------------------------------------------------------


def llama(*, tied: bool) -> nn.Module:
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def gpt2() -> nn.Module:
    """Dropout is on, as published."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=96, n_layer=4, n_head=4, n_positions=SEQUENCE, use_cache=False
    )
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0.1
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def t5() -> nn.Module:
    """Encoder and decoder, with cross attention and dropout."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=96,
        d_kv=24,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    assert config.dropout_rate == 0.1
    model: nn.Module = T5ForConditionalGeneration(config)
    return model


@dataclass(frozen=True)
class Subject:
    """A model that tests train: how it is made, its batches, and what is done to it at first."""

    make: Callable[[], nn.Module]
    batches: Callable[[int], Batch]
    change: Callable[[nn.Module], object] | None = None

    def build(self, seed: int = 0) -> nn.Module:
        """The model in train mode; other weights for another seed."""
        with seeded(seed):
            model = self.make().train()
        if self.change is not None:
            self.change(model)
        model = model.to(device())
        if isinstance(model, PreTrainedModel):
            # Where a CPU's tensors may not become the device's in place, every name got its own.
            model.tie_weights()
        return model

    def batch(self, number: int) -> Batch:
        found: Batch = moved_to_device(self.batches(number))
        return found

    def units(self) -> tuple[UnitPlan, ...]:
        """Its units, with nothing decided: the same on every device."""
        return _units_of(self)


@cache
def _units_of(subject: Subject) -> tuple[UnitPlan, ...]:
    with on_device("cpu"):
        return units_of(subject.build(), subject.batch(0))


def tokens(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)


def labelled(number: int) -> Batch:
    return {"input_ids": tokens(number), "labels": tokens(number)}


CATALOGUE: dict[str, Subject] = {
    "llama": Subject(partial(llama, tied=False), labelled),
    "llama-tied": Subject(partial(llama, tied=True), labelled),
    "gpt2": Subject(gpt2, labelled),
    "t5": Subject(t5, labelled),
    "functional": Subject(FunctionalStack, tokens),
    "functional-relu": Subject(partial(FunctionalStack, ends_in_relu=True), tokens),
    "functional-no-attention": Subject(partial(FunctionalStack, attends=False), tokens),
}
"""Models by name; other files may add theirs."""
MODELS = tuple(CATALOGUE)


def build(name: str, *, seed: int = 0) -> nn.Module:
    return CATALOGUE[name].build(seed)


def batch(name: str, step: int) -> Batch:
    return CATALOGUE[name].batch(step)


def described(name: str) -> tuple[UnitPlan, ...]:
    """The units of one of the models, with nothing decided."""
    return CATALOGUE[name].units()


# --- plans ----------------------------------------------------------------------------------------


def units_of(model: nn.Module, first: Batch) -> tuple[UnitPlan, ...]:
    """A model's units as the profiler finds them, with nothing decided."""
    found = discover(model, first)
    own = saved_bytes(model, [unit.module for unit in found], first, "keep")
    return tuple(
        UnitPlan(
            name=unit.name,
            kind=unit.kind,
            activations=KEEP,
            states=PERSISTENT,
            parameters=tuple(
                name
                for name in unit.parameters
                if unit.kind == "part" or not name.startswith(f"{unit.name}.")
            ),
            also_used_by=tuple(
                other.name for other in found if set(other.also_uses) & set(unit.parameters)
            ),
            own_inputs=inputs.own_inputs if unit.kind == "block" else (0,),
        )
        for unit, inputs in zip(found, own, strict=True)
    )


def described_by(profile: Profile) -> tuple[UnitPlan, ...]:
    """A profile's units, with nothing decided."""
    return tuple(
        UnitPlan(
            name=unit.name,
            kind=unit.kind,
            activations=KEEP,
            states=PERSISTENT,
            parameters=unit.parameters,
            also_used_by=tuple(profile.units[user].name for user in unit.used_by if user != index),
            own_inputs=unit.own_inputs,
        )
        for index, unit in enumerate(profile.units)
    )


def open_to(profile: Profile, units: tuple[UnitPlan, ...]) -> tuple[UnitPlan, ...]:
    """The decisions in forms that the profile's units have: the full one else, or all kept.

    Blocks whose bytes vary from step to step have none to swap.
    """

    def opened(plan: UnitPlan, forms: dict[Form, int]) -> UnitPlan:
        decision = plan.activations
        if decision.recomputes and decision.form not in forms:
            decision = replace(decision, form="full")
        if decision.tier and not forms.get(decision.form):
            decision = RECOMPUTE if decision.recomputes else KEEP
        if len(forms) == 1:
            decision = KEEP
        return replace(plan, activations=decision)

    return tuple(
        opened(plan, {cost.form: cost.swappable_bytes for cost in unit.forms})
        for plan, unit in zip(units, profile.units, strict=True)
    )


RECOMPUTED: tuple[Form, ...] = ("lite", "mlp", "attn", "full")


def activation_decisions(tier: TierName) -> tuple[Activations, ...]:
    return (
        KEEP,
        Activations(tier=tier),
        *(Activations(form=form) for form in RECOMPUTED),
        *(Activations(tier=tier, form=form) for form in RECOMPUTED),
    )


def placements(tier: TierName, *, stepped: bool = True) -> tuple[Placement, ...]:
    """`stepped`: with what one micro-batch alone may do, whose updates are in backward."""
    found: tuple[Placement, ...] = (PERSISTENT, *offloads(tier))
    return (*found, OPTIMIZER_IN_BACKWARD) if stepped else found


def offloads(tier: StateTier) -> tuple[Placement, ...]:
    """Every way to have states on a tier, or shared over the devices."""
    found = (Placement(tier=tier), Placement(tier=tier, keep_gathered=True))
    if tier != "host":
        return found
    on_disk = tuple(replace(one, on_disk=3) for one in found)
    return (*found, *(replace(one, update_on_device=True) for one in found), *on_disk)


def ahead(units: Iterable[UnitPlan]) -> tuple[UnitPlan, ...]:
    """The units with every update below the device speculative; of host memory, on the device."""
    found: list[UnitPlan] = []
    for unit in units:
        if not (states := unit.states).is_persistent:
            on_device = states.tier == "host"
            early = replace(states, speculate=True, update_on_device=on_device, on_disk=0)
            unit = replace(unit, states=early)
        found.append(unit)
    return tuple(found)


def speculative(plan: Plan) -> Plan:
    return replace(plan, units=ahead(plan.units))


def decisions(tier: TierName) -> list[tuple[Activations, Placement]]:
    return list(itertools.product(activation_decisions(tier), placements(tier)))


def phrase(value: Any) -> str:
    """A readable id for pytest: the phrase of a decision."""
    return WORDINGS[value].phrase if value in WORDINGS else str(value)


def decision_name(value: object) -> str:
    """A readable id for pytest."""
    if isinstance(value, tuple):
        return "-".join(decision_name(part) for part in value)
    if isinstance(value, Activations):
        kept, again = ("Swap", "SwapInput") if value.tier else ("Keep", "Recompute")
        return f"{again}_{value.form}" if value.recomputes else kept
    if value == OPTIMIZER_IN_BACKWARD:
        return "Stepped"
    if isinstance(value, Placement) and value.update_on_device:
        return "UpdatedOnDevice"
    if isinstance(value, Placement):
        return "Persistent" if value.is_persistent else "Offload"
    return type(value).__name__


def decided(
    units: Sequence[UnitPlan],
    activations: Activations,
    states: Placement,
    schedule: Schedule = Schedule(forward_lead=1, backward_lead=1, swap_lead=1),  # noqa: B008
) -> tuple[UnitPlan, ...]:
    """The same decisions for all units; only blocks recompute or swap."""
    return tuple(
        replace(
            unit,
            activations=activations if unit.kind == "block" else KEEP,
            states=states,
            schedule=schedule,
        )
        for unit in units
    )


def random_schedule(rng: random.Random) -> Schedule:
    """Leads and drains of whole slots, and about as many between them."""

    def slots(*choices: int) -> float:
        return rng.choice(choices) + rng.choice([0, rng.random()])

    def drain() -> float | None:
        return rng.choice([None, slots(0, 1, 2), slots(0, 1, 2), slots(0, 1, 2)])

    return Schedule(
        forward_lead=slots(0, 1, 2, 3, LARGE),
        backward_lead=slots(0, 1, 2, 3, LARGE),
        swap_lead=slots(0, 1, 2, 3, LARGE),
        swap_drain=drain(),
        update_drain=drain(),
    )


FRACTIONAL = (
    Schedule(forward_lead=1.4, backward_lead=0.5, swap_lead=0.6, swap_drain=0.5, update_drain=0.3),
    Schedule(
        forward_lead=0.25, backward_lead=1.75, swap_lead=1.5, swap_drain=0.8, update_drain=0.75
    ),
)
"""Schedules under which every transfer is cut in two."""


def mixed(
    units: Sequence[UnitPlan], rng: random.Random, *tiers: TierName, stepped: bool = True
) -> tuple[UnitPlan, ...]:
    return tuple(
        replace(
            unit,
            activations=rng.choice(activation_decisions(rng.choice(tiers)))
            if unit.kind == "block"
            else KEEP,
            states=rng.choice(placements(rng.choice(tiers), stepped=stepped)),
            schedule=random_schedule(rng),
        )
        for unit in units
    )


WORKLOAD = Workload(
    model="",
    model_config="",
    batch_size=BATCH,
    seq_len=SEQUENCE,
    dtype="float32",
    device="cpu",
    seed=0,
)


def plan_of(
    units: Iterable[UnitPlan],
    *,
    fingerprint: str,
    workload: Workload = WORKLOAD,
    **settings: Any,
) -> Plan:
    """A plan that promises nothing, in small pieces: its decisions are what is tested."""
    nothing = TierBytes(device=0, context=0, host=0, disk=0)
    plan = Plan(
        workload=workload,
        hardware="",
        optimizer="adamw",
        profile_fingerprint="",
        model_fingerprint=fingerprint,
        exact=True,
        budgets=Budgets(device=0, host=0, disk=0),
        prediction=Prediction(step_seconds=1, lower_bound_seconds=1, peak_bytes=nothing),
        units=tuple(units),
        settings=StepSettings(piece_bytes=20_000),
    )
    return with_settings(plan, **settings)


def plan_for(model: nn.Module, units: Iterable[UnitPlan], /, **settings: Any) -> Plan:
    """A plan that `prepare` takes for this model, in pieces far smaller than its chunks."""
    return plan_of(units, fingerprint=model_fingerprint(model), **settings)


def plan_for_profile(profile: Profile, units: Iterable[UnitPlan], **settings: Any) -> Plan:
    """A plan for the model that was profiled."""
    fingerprint, workload = profile.model_fingerprint, profile.workload
    return plan_of(units, fingerprint=fingerprint, workload=workload, **settings)


def delays(seed: int) -> Callable[[], float]:
    """Up to two milliseconds before every transfer and update: more than a slot computes."""
    rng = random.Random(seed)
    return lambda: rng.random() * 0.002


def slow_updates() -> float:
    """Seconds before each item of a lane: updates are what a step would wait for."""
    return 0.01 if threading.current_thread().name.startswith("protrain update") else 0.0


# --- training -------------------------------------------------------------------------------------

Factory = Callable[..., torch.optim.Optimizer]
Groups = Callable[[nn.Module], list[dict[str, Any]]]
Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def weight_decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices and none for vectors, as training scripts do."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.125},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 2**-8},
    ]


def _adamw(groups: Any) -> torch.optim.Optimizer:
    if _WHERE.exact_optimizer:
        return torch.optim.SGD(groups, lr=2**-7, momentum=0.5, foreach=False)
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


ADAMW: Factory = _adamw
"""AdamW; see `on_device`."""


@dataclass
class Outcome:
    """The results of training: compared bit by bit."""

    losses: list[Tensor] = field(default_factory=list[Tensor])
    parameters: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    optimizer: dict[str, Any] = field(default_factory=dict[str, Any])
    random_states: list[Tensor] = field(default_factory=random_states)
    gradients: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    """By step and parameter, those that stand after backward."""


def step(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    """One step of a plain training loop; its loss."""
    loss = loss_of(call_model(model, batch(name, number)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def outcome(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: Iterable[Tensor]
) -> Outcome:
    """The state of training in the model's and the optimizer's own words, copied."""
    return Outcome(
        losses=list(losses),
        parameters=copied(model.state_dict()),
        optimizer=copied(optimizer.state_dict()),
    )


def copied(tree: Any) -> Any:
    if is_composed(tree):
        how = Composition.of(tree)
        parts = {part: copied(getattr(tree, part)) for part in how.parts}
        return {"": (str(how.kind), *map(str, how.shape)), **parts}
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(copied(value) for value in tree)
    return tree


def assert_bitwise(found: Outcome, expected: Outcome) -> None:
    assert list(differences(found.losses, expected.losses, "loss")) == []
    assert list(differences(found.parameters, expected.parameters, "parameters")) == []
    assert list(differences(found.optimizer, expected.optimizer, "optimizer")) == []
    assert list(differences(found.random_states, expected.random_states, "random state")) == []
    for seen, plain in zip(found.gradients, expected.gradients, strict=True):
        # Those that updates in backward have taken are not there to be compared.
        assert list(differences(seen, {name: plain[name] for name in seen}, "gradients")) == []


def differences(found: Any, expected: Any, where: str) -> Iterator[str]:
    """Where two trees of tensors and plain values differ, in a bit or in structure."""
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor) or found.dtype != expected.dtype:
            yield f"{where}: another type"
        elif found.shape != expected.shape:
            yield f"{where}: another shape"
        elif not torch.equal(found.cpu(), expected.cpu()):  # states may be on the host
            most = (found.cpu() - expected.cpu()).abs().max().item()
            yield f"{where}: by at most {most:.3g}"
    elif isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or set(found) != set(expected):
            yield f"{where}: other keys"
        else:
            for key, value in expected.items():
                yield from differences(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        if len(found) != len(expected):
            yield f"{where}: another length"
        else:
            for index, value in enumerate(expected):
                yield from differences(found[index], value, f"{where}[{index}]")
    elif found != expected:
        yield f"{where}: {found!r}, not {expected!r}"


def attached(model: nn.Module) -> dict[str, tuple[list[str], dict[str, int]]]:
    """The visible parts of the modules: their attributes, and how many hooks they have."""
    return {
        path: (
            sorted(module.__dict__),
            {
                key: len(value)
                for key, value in module.__dict__.items()
                if key.endswith("_hooks") and value is not None
            },
        )
        for path, module in model.named_modules()
    }
