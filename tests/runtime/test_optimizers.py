"""Optimizers with every feature, wherever a plan may update: bitwise, or refused before a step.

The oracle is the same optimizer in plain PyTorch. Those that look at more than one element are cut
at their blocks, or stay whole on the device; those that look at several parameters stay together.
"""

import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.optimizers import KNOWN, OF_8_BITS, OF_MATRICES, optimizer_factory
from protrain_plan.models.sources import load_source
from protrain_plan.planning.model.problem import Problem
from protrain_plan.profiling.optimizer_cost import cuts_of
from protrain_plan.profiling.structure.faking import faking
from protrain_runtime import load, save, with_master_weights
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import (
    KEEP,
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Budgets,
    Placement,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import OptimizerCost
from protrain_runtime.states import update_rules
from protrain_runtime.states.chunks import Cut
from protrain_runtime.states.compositions import Composition, is_composed, taken_apart
from protrain_runtime.states.update_rules import StateRule, UpdateRules
from protrain_runtime.states.updates import ranges
from tests.support import judging, odd_optimizers
from tests.support.estimates import estimate
from tests.support.hostile_models import Hostile
from tests.support.low_rank import LowRank
from tests.support.messages import Speaker
from tests.support.odd_optimizers import APART, TOGETHER, UNCOUNTED, WHOLE, odd
from tests.support.runtime_cases import (
    CATALOGUE,
    Factory,
    Outcome,
    ahead,
    assert_bitwise,
    batch,
    build,
    decided,
    delays,
    weight_decay_groups,
)
from tests.support.scenario import Loop, Run, Scenario, Units
from tests.support.thinning import thinned

HOST, DISK = Placement(tier="host"), Placement(tier="disk")
ON_DEVICE = Placement(tier="host", update_on_device=True)


# --- odd features ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """Where updates run, and the loop that goes with it."""

    states: tuple[Placement, ...]
    clips: bool = False
    speculates: bool = False
    micro_batches: int = 1

    def units(self, given: Units) -> Units:
        own = decided(given, RECOMPUTE, PERSISTENT)
        units = [
            replace(unit, states=states)
            for unit, states in zip(own, itertools.cycle(self.states), strict=False)
        ]
        return ahead(units) if self.speculates else units

    def script(self, run: Run) -> None:
        """Steps whose gradients differ in size, with the optimizer's modes where it has them."""
        modes: Any = run.optimizer if hasattr(run.optimizer, "eval") else None
        for number in range(5):
            if modes is not None:
                modes.train()
            weigh = partial(torch.mul, 10.0 ** (3 * number % 5))
            for part in range(self.micro_batches):
                run.backward(10 * number + part, weigh=weigh)
            if self.clips:
                run.clip(1.0)
            run.update()
            if modes is not None:
                modes.eval()
                run.look(100 + number)

    def scenario(self, factory: Factory, **options: Any) -> Scenario:
        after = self.clips or self.micro_batches > 1
        updates = "after backward" if after else "in backward"
        given: dict[str, Any] = {
            "groups": weight_decay_groups,
            "settings": {"updates": updates, "micro_batches": self.micro_batches},
        }
        return Scenario(
            model=ODD, units=self.units, script=self.script, factory=factory, **{**given, **options}
        )


WAYS = {
    "host": Way((HOST,)),
    "disk": Way((DISK,)),
    "in backward": Way((OPTIMIZER_IN_BACKWARD,)),
    "on the device": Way((ON_DEVICE,)),
    "ahead of the norm": Way((HOST, DISK), clips=True, speculates=True),
    "micro-batches": Way((HOST,), micro_batches=2),
    "everywhere": Way((HOST, PERSISTENT, OPTIMIZER_IN_BACKWARD, DISK)),
    "clipped": Way((DISK, PERSISTENT), clips=True),
}
STAYING = Way((PERSISTENT,))


def forgetting(model: nn.Module) -> None:
    """Counts of trials in a module are forgotten; some optimizers read parameters' own."""
    odd_optimizers.COUNTS["calls"] = 0
    for parameter in model.parameters():
        parameter.slower_by = 1.0 / parameter.dim()  # type: ignore[attr-defined]


ODD = replace(CATALOGUE["gpt2"], change=forgetting)


def plainly(asked: Scenario) -> Outcome:
    found = asked.plain()
    odd_optimizers.COUNTS["calls"] = 0
    return found


@pytest.mark.nightly(by_day=9)
@pytest.mark.parametrize(("feature", "way"), thinned(APART, [*WAYS]))
def test_what_looks_at_one_parameter_at_a_time_trains_everywhere_bitwise(
    feature: str, way: str, tmp_path: Path
) -> None:
    asked = WAYS[way].scenario(odd(feature))
    expected = plainly(asked)
    assert_bitwise(asked.played(asked.start(tmp_path)), expected)


@pytest.mark.nightly(by_day=12)
@pytest.mark.parametrize(("feature", "way"), thinned(TOGETHER, [*WAYS], every=6))
def test_what_looks_at_all_parameters_is_refused_and_trains_where_all_stay(
    feature: str, way: str, tmp_path: Path
) -> None:
    """Counts of trials in a class or a module are forgotten."""
    own, other = odd(feature), odd(feature)
    expected = plainly(STAYING.scenario(other))
    with pytest.raises(ProtrainError, match=r"cannot update"):
        WAYS[way].scenario(own).start(tmp_path)
    staying = STAYING.scenario(own)
    assert_bitwise(staying.played(staying.start(tmp_path)), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_what_looks_at_whole_parameters_trains_or_is_refused(way: str, tmp_path: Path) -> None:
    """Parameters of this model that are cut are refused, by name."""
    (feature,) = WHOLE
    asked = WAYS[way].scenario(odd(feature))
    expected = plainly(asked)
    try:
        run = asked.start(tmp_path)
    except ProtrainError:
        assert way != "in backward"
        return
    assert_bitwise(asked.played(run), expected)


def of_feature(feature: str) -> Hostile:
    """A small model that an odd optimizer trains, for the profile's open decisions."""

    def make() -> nn.Module:
        odd_optimizers.COUNTS["calls"] = 0
        odd_optimizers.forget()
        return build("gpt2")

    optimizer = f"tests.support.odd_optimizers:made(features={feature!r})"
    return Hostile(make, optimizer=optimizer, batch=partial(batch, "gpt2"))


class JudgeOfOpen(judging.Judge):
    def _decided(self, name: judging.PlanName, units: tuple[UnitPlan, ...]) -> tuple[UnitPlan, ...]:
        problem = Problem.of(self.profile, Budgets(device=2**40, host=2**40, disk=2**40))
        kinds = [
            {(bool(one.decision.tier), one.decision.update_in_backward) for one in options.states}
            for options in problem.options
        ]
        return tuple(
            unit
            if (bool(unit.states.tier), unit.states.update_in_backward) in kind
            else replace(unit, states=PERSISTENT)
            for unit, kind in zip(super()._decided(name, units), kinds, strict=True)
        )


@pytest.mark.nightly("adamw", "scales by all", "draws")
@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(feature, marks=() if number % 12 == 0 else pytest.mark.slow)
        for number, feature in enumerate([*APART, *WHOLE, *TOGETHER])
    ],
)
def test_what_a_profile_leaves_open_is_not_refused_and_trains_bitwise(
    feature: str, tmp_path: Path
) -> None:
    for verdict in JudgeOfOpen(of_feature(feature), 0, tmp_path).verdicts(judging.PLANS):
        assert (verdict.kind, verdict.text) == ("like plain", "")


@pytest.mark.nightly
@pytest.mark.parametrize("feature", UNCOUNTED)
def test_a_profile_refuses_what_keeps_more_than_its_first_step_shows(
    feature: str, tmp_path: Path
) -> None:
    (verdict,) = JudgeOfOpen(of_feature(feature), 0, tmp_path).verdicts(judging.PLANS)
    assert (verdict.under, verdict.kind) == ("profile", "refused")


RULES = [
    *((one, other, True) for one in TOGETHER for other in APART),
    *((one, other, False) for one in (*APART, *WHOLE) for other in APART),
]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [[{}], [{}, {"lr": 2e-3}]], ids=["one group", "two groups"])
def test_features_are_found_whatever_comes_with_them(
    dtype: torch.dtype, groups: list[dict[str, Any]]
) -> None:
    wrong = [
        (one, other, shape)
        for number, (one, other, together) in enumerate(RULES)
        for shape in ([300], [64, 48])
        if number % 5 == len(groups) + len(shape)
        if UpdateRules(odd(one, other), groups).of(dtype, torch.Size(shape)).together != together
    ]
    assert wrong == []


IN_STATES = ("adamw", "counts in its states", "reads attributes of parameters")
"""A feature keeps nothing outside the states of parameters."""


@pytest.mark.nightly(by_day=12)
@pytest.mark.parametrize("feature", [*APART, *WHOLE, *TOGETHER])
def test_master_weights_are_for_what_keeps_all_in_states(feature: str) -> None:
    """They are stepped on in batches, each by an optimizer that is made for it."""
    rules = UpdateRules(with_master_weights(odd(feature)))
    if feature in IN_STATES + WHOLE:
        assert not rules.of(torch.bfloat16, torch.Size([300])).together
        return
    with pytest.raises(ProtrainError, match="cannot step on master weights"):
        rules.of(torch.bfloat16, torch.Size([300]))


@pytest.mark.nightly
@pytest.mark.parametrize("feature", APART)
def test_a_plain_copy_is_stepped_as_the_plan_is(feature: str, tmp_path: Path) -> None:
    """With what a step writes into groups, and in the modes that the loop chooses."""
    asked = WAYS["everywhere"].scenario(odd(feature), options={"check": "bitwise"})
    asked = replace(asked, model="gpt2")
    asked.played(asked.start(tmp_path))


@pytest.mark.nightly
def test_groups_may_name_parameters_as_the_model_does(tmp_path: Path) -> None:
    """An optimizer that goes by name has a name for each piece."""
    asked = WAYS["host"].scenario(odd("goes by name"), groups=nn.Module.named_parameters)
    asked.assert_like_plain(tmp_path)


# --- blocks, and states of eight bits -------------------------------------------------------------

EIGHT_BITS = partial(OF_8_BITS["adamw8bit"], lr=1e-3, min_8bit_size=512)
"""Blocks of 256 in small models, too: with parameters of less than 512 elements beside them."""


EIGHT: dict[str, tuple[Factory, Any]] = {
    "adamw8bit": (EIGHT_BITS, weight_decay_groups),
    "lion8bit": (partial(OF_8_BITS["lion8bit"], min_8bit_size=512), None),
}


def of_torchao(kind: str, **options: Any) -> Any:
    return partial(getattr(pytest.importorskip("torchao.optim"), kind), **options)


TORCHAO: dict[str, dict[str, StateRule]] = {
    "AdamW8bit": {"codes": StateRule(torch.uint8), "scale": StateRule(torch.float32, 256)},
    "AdamW4bit": {"codes": StateRule(torch.uint8, 2), "scale": StateRule(torch.float32, 128)},
    "AdamWFp8": {"codes": StateRule(torch.float8_e4m3fn), "scale": StateRule(torch.float32, 256)},
}
"""The rule of each state of a large parameter: a value for so many elements."""


@contextmanager
def uncompiled(span: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps run operator by operator, plain ones too; a range has at least `span` elements.

    Compiling one takes 3 to 50 s on a processor.
    """
    patch.setattr(update_rules, "COMPILED_SPAN", span)
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("masters", [False, True])
def test_eight_bits_are_a_byte_an_element_and_a_scale_a_block(masters: bool) -> None:
    name, precision = "adamw8bit", "master" if masters else "pure"
    rules = UpdateRules(optimizer_factory(name, "master" if masters else "pure"))
    dtype = torch.bfloat16 if precision == "master" else torch.float32
    rule = rules.of(dtype, torch.Size([128_256, 4096]))
    kept = dict(rule.states)
    if masters:
        assert kept.pop("master") == StateRule(torch.float32)
    assert kept == {
        "state1": StateRule(torch.uint8),
        "state2": StateRule(torch.uint8),
        "absmax1": StateRule(torch.float32, 256),
        "absmax2": StateRule(torch.float32, 256),
    }
    assert (rule.block, rule.least, rule.reason) == (256, 4096, "")
    small = rules.of(dtype, torch.Size([4095]))
    assert (small.block, small.least) == (1, 1)
    assert small.states["state1"] == StateRule(torch.float32)


def test_a_matrix_rule_grows_with_rows_and_columns() -> None:
    rule = UpdateRules(KNOWN["adafactor"]).of(torch.float32, torch.Size([128_256, 4096]))
    assert rule.reason
    assert sorted(rule.whole) == [4 * 4096, 4 * 128_256]
    exact = UpdateRules(KNOWN["adafactor"]).of(torch.float32, torch.Size([40, 33]))
    assert sorted(exact.whole) == [4 * 33, 4 * 40]


def test_ranges_of_blocks_are_whole_blocks_and_never_too_small() -> None:
    rng = random.Random(0)
    kinds = [Cut(), Cut(256, 256), Cut(512, 512), Cut(4096, 4096), Cut(64, sys.maxsize)]
    for _ in range(500):
        lengths = [rng.randrange(1, 20_000) for _ in range(rng.randrange(1, 5))]
        cuts = [rng.choice(kinds) for _ in lengths]
        found = ranges(lengths, rng.randrange(1, 5), longest=4096, cuts=cuts)
        spans = [span for share in found for span in share]
        for tensor, (length, cut) in enumerate(zip(lengths, cuts, strict=True)):
            own = [span for span in spans if span.tensor == tensor]
            assert own[0].start == 0
            assert own[-1].stop == length
            for one, other in pairwise(own):
                assert one.stop == other.start
                assert one.stop % cut.unit == 0
            if len(own) > 1:
                assert min(span.stop - span.start for span in own) >= cut.least


def test_pieces_between_two_cuts_are_never_too_small() -> None:
    """However small the pieces that a plan asks for."""
    rng = random.Random(1)
    for _ in range(500):
        cut = rng.choice([Cut(256, 256), Cut(512, 512), Cut(4096, 4096)])
        length = rng.randrange(1, 50_000)
        places = sorted({0, length, *(cut.before(n, length) for n in range(0, length, 100))})
        assert len(places) == 2 or min(b - a for a, b in pairwise(places)) >= cut.least


@pytest.mark.nightly
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("kind", EIGHT)
def test_five_steps_in_pieces_match_plain_training_bitwise(
    kind: str, tier: Any, tmp_path: Path
) -> None:
    factory, groups = EIGHT[kind]
    for name, activations in (("llama-tied", RECOMPUTE), ("gpt2", Activations(tier=tier))):
        Scenario(
            model=name,
            units=partial(decided, activations=activations, states=Placement(tier=tier)),
            factory=factory,
            groups=groups,
            piece_bytes=5_000,
            options={"lane_delay": delays(1)},
        ).assert_like_plain(tmp_path)


def through_checkpoints(folder: Path, *scenarios: Scenario, plainly_last: bool = False) -> Run:
    """Five steps in as many runs, each from the checkpoint of the one before."""
    seen: list[Any] = []
    for number, asked in enumerate(scenarios):
        last = number + 1 == len(scenarios)
        run = asked.start(None if last and plainly_last else folder, seed=number)
        if number:
            load(run.model, run.optimizer, folder / "saved")
        else:
            torch.manual_seed(1)
        run.step(*range(number, 5 if last else number + 1))
        seen += run.seen
        save(run.model, run.optimizer, folder / "saved")
    run.seen = seen
    return run


@pytest.mark.parametrize("kind", TORCHAO)
def test_states_made_of_tensors_are_cut_at_their_blocks(kind: str) -> None:
    with torch.compiler.set_stance("force_eager"):
        rules = UpdateRules(of_torchao(kind))
        found = [
            rules.of(torch.float32, torch.Size(shape))
            for shape in ([32_000, 100], [4096, 14_336], [128_256, 4096], [4096])
        ]
        small = rules.of(torch.float32, torch.Size([4095]))
        unblocked = rules.of(torch.float32, torch.Size([50_257, 33]))
    keys = ("exp_avg", "exp_avg_sq")
    parts = TORCHAO[kind]
    for rule in found:
        assert dict(rule.states) == {
            f"{key}:{part}": state for key in keys for part, state in parts.items()
        }
        assert (rule.block, rule.unit, rule.reason) == (parts["scale"].per, 2**20, "")
    for rule in (small, unblocked):
        assert dict(rule.states) == dict.fromkeys(keys, StateRule(torch.float32))
        assert not rule.reason


def test_a_compiled_step_has_few_lengths() -> None:
    """One for all parameters, and what is left of each; however they are cut in pieces."""
    rng = random.Random(2)
    for _ in range(200):
        cut = Cut(1024, 1024, 1024)
        length = rng.randrange(1, 20_000)
        ends = {cut.before(rng.randrange(length), length) for _ in range(rng.randrange(4))}
        places = sorted({0, length, *ends})
        found = set[int]()
        for start, stop in pairwise(places):
            shares = ranges([stop - start], rng.randrange(1, 4), longest=2**20, cuts=[cut])
            found |= {span.stop - span.start for share in shares for span in share}
        assert found <= {1024, length if length < 2048 else 1024 + length % 1024}


TORCHAO_RUNS = [
    ("AdamW4bit", "disk"),
    pytest.param("AdamW8bit", "host", marks=pytest.mark.slow),
    pytest.param("AdamWFp8", "host", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "tier"), TORCHAO_RUNS)
def test_states_made_of_tensors_train_in_pieces_bitwise(
    kind: str, tier: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And through checkpoints: states that stay, such that leave, and plain ones at last."""
    asked = Scenario(factory=of_torchao(kind, lr=1e-3), groups=weight_decay_groups)
    ways = [
        replace(asked, units=partial(decided, activations=RECOMPUTE, states=states))
        for states in (OPTIMIZER_IN_BACKWARD, Placement(tier=tier), ON_DEVICE)
    ]
    with uncompiled(4096, monkeypatch):
        run = through_checkpoints(tmp_path, *ways, asked, plainly_last=True)
        assert_bitwise(run.outcome(), asked.plain())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", TORCHAO)
def test_compiled_steps_in_pieces_match_plain_training_bitwise(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each length is compiled, as each shape is in plain training: minutes."""
    monkeypatch.setattr(update_rules, "COMPILED_SPAN", 4096)
    units = partial(decided, activations=KEEP, states=HOST)
    factory = of_torchao(kind, lr=1e-3)
    Scenario(model="functional", units=units, factory=factory).assert_like_plain(tmp_path)


def test_a_state_is_put_together_by_listed_classes_alone() -> None:
    torchao = of_torchao("AdamW4bit")
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.ones(64, 64)
    optimizer = torchao([parameter])
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    state = optimizer.state[parameter]["exp_avg"]
    assert is_composed(state)
    described_ = taken_apart({"exp_avg": state})["exp_avg:"].described()
    again = Composition.read(described_)
    assert again == Composition.of(state)
    assert again.reshaped(torch.Size([4096])).context[1] == torch.Size([4096])
    for change in ({"class": "os.system"}, {"class": 3}, {"shape": ["a"]}, {"parts": None}):
        with pytest.raises(ValueError, match=r"^(it|no package) "):
            Composition.read({**described_, **change})


def test_steps_that_draw_random_numbers_persist(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = Scenario(
        model=replace(CATALOGUE["llama"], change=lambda model: model.to(torch.bfloat16)),
        factory=of_torchao("AdamWFp8", bf16_stochastic_round=True),
        script=Loop(num_steps=2),
    )
    with uncompiled(4096, monkeypatch):
        for states in (HOST, OPTIMIZER_IN_BACKWARD):
            units = partial(decided, activations=KEEP, states=states)
            with pytest.raises(ProtrainError, match="its step draws random numbers"):
                replace(asked, units=units).start(tmp_path)
        units = partial(decided, activations=RECOMPUTE, states=PERSISTENT)
        replace(asked, units=units).assert_like_plain(tmp_path)


@pytest.mark.slow
def test_bytes_of_states_made_of_tensors_stay_below_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao.optim")
    cost = judging._cost
    subject = Hostile(
        partial(build, "llama-tied"),
        optimizer="torchao.optim:AdamW4bit",
        batch=partial(batch, "llama-tied"),
    )

    def with_cuts(optimizer: str, dtypes: frozenset[torch.dtype]) -> OptimizerCost:
        rules = UpdateRules(optimizer_factory(optimizer, "pure"))
        cuts: dict[str, Any] = dict(cuts_of(subject.build(), rules))
        return replace(cost(optimizer, dtypes), **cuts)

    monkeypatch.setattr(judging, "_cost", with_cuts)
    with uncompiled(4096, monkeypatch):
        verdicts = list(judging.Judge(subject, 0, tmp_path).verdicts(judging.PLANS))
    assert [(one.kind, one.text) for one in verdicts] == [("like plain", "")] * 4


def test_a_compiled_step_is_profiled_where_it_runs(assert_says: Speaker) -> None:
    pytest.importorskip("torchao.optim")
    assert_says.refused(
        estimate,
        load_source("tiny-llama"),
        hardware=load_hardware("rtx-4090"),
        batch_size=1,
        seq_len=32,
        dtype="float32",
        optimizer="torchao.optim:AdamW8bit",
    )


# --- matrices -------------------------------------------------------------------------------------


def matrices_alone(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)


@pytest.mark.parametrize("kind", OF_MATRICES)
def test_what_looks_at_matrices_is_refused_by_name_below_the_device(
    kind: str, tmp_path: Path
) -> None:
    own = CATALOGUE["llama"]
    asked = Scenario(
        model=replace(own, change=matrices_alone) if kind == "muon" else own,
        units=partial(decided, activations=KEEP, states=HOST),
        factory=partial(OF_MATRICES[kind], lr=1e-2),
    )
    model = asked.subject.build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ProtrainError, match=r"cannot update '.*weight' in pieces"):
        asked.prepared(model, tmp_path)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def staying(states: Placement, factory: Factory, groups: Any = None) -> Scenario:
    units = partial(decided, activations=RECOMPUTE, states=states)
    return Scenario(model="gpt2", units=units, factory=factory, groups=groups)


@pytest.mark.nightly("placement0")
@pytest.mark.parametrize("placement", [PERSISTENT, OPTIMIZER_IN_BACKWARD])
def test_adafactor_trains_where_its_states_stay(placement: Any, tmp_path: Path) -> None:
    """Updated in backward, its gradients never stand together: LOMO's memory."""
    asked = staying(placement, OF_MATRICES["adafactor"], weight_decay_groups)
    asked.assert_like_plain(tmp_path)


class OfBlocks(torch.optim.Optimizer):
    """A rate for each 512 elements in a row, of which nobody is told."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            blocks = parameter.grad.flatten().split(512)
            self.state[parameter]["rates"] = torch.stack([one.abs().amax() for one in blocks])
            rates = self.state[parameter]["rates"].repeat_interleave(512)[: parameter.numel()]
            parameter.sub_(parameter.grad / (1 + rates.view_as(parameter)), alpha=1e-2)


@pytest.mark.nightly("shape2")
@pytest.mark.parametrize("shape", [[5000], [64, 1024], [4096, 4096]])
def test_blocks_that_are_not_declared_persist(shape: list[int]) -> None:
    rule = UpdateRules(OfBlocks).of(torch.float32, torch.Size(shape))
    assert rule.reason
    assert not rule.together
    assert (rule.block, dict(rule.states)) == (0, {})
    assert rule.state_bytes(0) + rule.scalar_bytes() == 4 * -(-torch.Size(shape).numel() // 512)


class LongSide(torch.optim.Optimizer):
    """Keeps an average along a matrix's longer side, if a value says so: as projections choose."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state, rows_are_more = self.state[parameter], parameter.shape[0] >= parameter.shape[1]
            mean = parameter.grad.mean(dim=int(rows_are_more))
            if mean.norm() > 0:
                state["mean"] = mean
            parameter.sub_(mean.mean(), alpha=1e-2)


@pytest.mark.nightly("shape1", "shape2")
@pytest.mark.parametrize("shape", [(688, 256), (256, 688), (14_336, 4096), (4096, 14_336)])
def test_states_are_those_of_the_matrix_s_own_shape(shape: tuple[int, int]) -> None:
    """A smaller matrix may have its longer side elsewhere."""
    rule = UpdateRules(LongSide).of(torch.float32, torch.Size(shape))
    assert rule.whole == (4 * max(shape),)


@pytest.mark.nightly
def test_groups_with_options_for_matrices_alone_are_asked_for_them_alone(tmp_path: Path) -> None:
    """As GaLore's groups, of which one has a rank: vectors are in another one."""

    class OfGroups(LowRank):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                wrong = [p for p in group["params"] if "matrices" in group and p.dim() != 2]
                assert not wrong, "a vector has no rank"
            super().step(closure)

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        every = list(model.parameters())
        matrices = {"params": [p for p in every if p.dim() == 2], "matrices": True}
        return [matrices, {"params": [p for p in every if p.dim() != 2]}]

    staying(PERSISTENT, OfGroups, groups).assert_like_plain(tmp_path)


@pytest.mark.nightly
def test_an_optimizer_of_the_users_own_is_seen_as_it_is(tmp_path: Path) -> None:
    rules = UpdateRules(LowRank)
    matrix = rules.of(torch.float32, torch.Size([14_336, 4096]))
    assert matrix.reason
    # Its basis is a view of all right singular vectors, in float32 alone.
    assert sorted(matrix.whole) == [4 * 14_336 * 4, 4 * 4096 * 4096]
    narrow = rules.of(torch.bfloat16, torch.Size([4096, 14_336]))
    assert sorted(narrow.whole) == [2 * 4096 * 4, 2 * 4 * 14_336]
    assert rules.of(torch.float32, torch.Size([4096])).states == {
        "momentum": StateRule(torch.float32)
    }
    with pytest.raises(ProtrainError, match="cannot update"):
        staying(HOST, LowRank).start(tmp_path)
    staying(OPTIMIZER_IN_BACKWARD, LowRank).assert_like_plain(tmp_path)


def test_where_tensors_are_fake_a_step_is_seen_to_draw_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = itertools.count()
    with faking("cuda"), monkeypatch.context() as patched:
        # What an estimate has in place of the generator's state tells nothing.
        patched.setattr(torch, "get_rng_state", lambda: torch.full((16,), next(states)))
        rule = UpdateRules(optimizer_factory("adamw")).of(torch.float32, torch.Size([64, 48]))
    assert rule.reason == ""
