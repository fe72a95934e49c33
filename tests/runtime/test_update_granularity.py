"""Optimizers that look at more than one element: cut at their blocks, or whole, on the device."""

import itertools
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.optimizers import KNOWN, OF_8_BITS, OF_MATRICES, optimizer_factory
from protrain_plan.models.sources import load_source
from protrain_plan.profiling.estimated import estimate
from protrain_plan.profiling.measured import cuts_of
from protrain_plan.profiling.structure.faking import faking
from protrain_runtime import prepare, save
from protrain_runtime.checkpoint.loading import load
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import (
    STEPPED,
    Keep,
    Offload,
    Persistent,
    Recompute,
    Swap,
)
from protrain_runtime.contract.records.profile import OptimizerCost
from protrain_runtime.states import update_rules
from protrain_runtime.states.chunks import Cut
from protrain_runtime.states.compositions import Composition, is_composed, taken_apart
from protrain_runtime.states.update_rules import StateRule, UpdateRules
from protrain_runtime.states.updates import ranges
from tests.support import judging
from tests.support.hostile_models import Hostile
from tests.support.low_rank import LowRank
from tests.support.messages import Speaker
from tests.support.runtime_cases import (
    Trainer,
    assert_bitwise,
    batch,
    build,
    decided,
    delays,
    described,
    mixed,
    outcome,
    plain,
    plan_for,
    step,
    train,
    weight_decay_groups,
)

EIGHT_BITS = partial(OF_8_BITS["adamw8bit"], lr=1e-3, min_8bit_size=512)
"""Blocks of 256 in small models, too: with parameters of less than 512 elements beside them."""

TRAINERS = {
    "adamw8bit": Trainer(EIGHT_BITS, weight_decay_groups),
    "lion8bit": Trainer(partial(OF_8_BITS["lion8bit"], min_8bit_size=512)),
}


def of_torchao(kind: str, **options: Any) -> Any:
    """A class of torchao's, with options."""
    return partial(getattr(pytest.importorskip("torchao.optim"), kind), **options)


TORCHAO: dict[str, dict[str, StateRule]] = {
    "AdamW8bit": {"codes": StateRule(torch.uint8), "scale": StateRule(torch.float32, 256)},
    "AdamW4bit": {"codes": StateRule(torch.uint8, 2), "scale": StateRule(torch.float32, 128)},
    "AdamWFp8": {"codes": StateRule(torch.float8_e4m3fn), "scale": StateRule(torch.float32, 256)},
}
"""What each state of a large parameter is made of, as a value for so many elements."""


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


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_five_steps_in_pieces_match_plain_training_bitwise(
    trainer: str, tier: Any, tmp_path: Path
) -> None:
    for name, activations in (("llama-tied", Recompute()), ("gpt2", Swap(tier=tier))):
        units = decided(described(name), activations, Offload(tier=tier))
        expected = plain(name, TRAINERS[trainer])
        model = build(name)
        planned, optimizer = prepare(
            model,
            plan_for(model, units, piece_bytes=5_000),
            optimizer=TRAINERS[trainer].factory,
            param_groups=TRAINERS[trainer].groups(model),
            spill_directory=tmp_path,
            lane_delay=delays(1),
        )
        assert_bitwise(train(name, planned, optimizer), expected)


def test_states_of_eight_bits_go_through_checkpoints_bitwise(tmp_path: Path) -> None:
    name, trainer = "llama", TRAINERS["adamw8bit"]
    units = [mixed(described(name), random.Random(seed), "disk") for seed in (0, 1)]
    expected = plain(name, trainer)
    losses = []
    for run, own in enumerate(units):
        model = build(name, seed=run)
        planned, optimizer = prepare(
            model,
            plan_for(model, own, piece_bytes=5_000),
            optimizer=trainer.factory,
            param_groups=trainer.groups(model),
        )
        if run:
            load(planned, optimizer, tmp_path / "saved")
        else:
            torch.manual_seed(1)
        numbers = range(3 * run, 3 + 2 * run)
        losses += [step(name, planned, optimizer, number) for number in numbers]
        save(planned, optimizer, tmp_path / "saved")
    assert_bitwise(outcome(planned, optimizer, losses), expected)


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
    name, trainer = "llama-tied", Trainer(of_torchao(kind, lr=1e-3), weight_decay_groups)
    units = described(name)
    runs = [
        decided(units, Recompute(), STEPPED),
        decided(units, Recompute(), Offload(tier=tier)),
        decided(units, Recompute(), Offload(tier="host", update_on_device=True)),
        None,
    ]
    losses = []
    with uncompiled(4096, monkeypatch):
        expected = plain(name, trainer)
        for run, own in enumerate(runs):
            model = build(name, seed=run)
            if own is None:
                planned, optimizer = model, trainer.factory(trainer.groups(model))
            else:
                planned, optimizer = prepare(
                    model,
                    plan_for(model, own, piece_bytes=20_000),
                    optimizer=trainer.factory,
                    param_groups=trainer.groups(model),
                    spill_directory=tmp_path,
                )
            if run:
                load(planned, optimizer, tmp_path / "saved")
            else:
                torch.manual_seed(1)
            numbers = range(run, run + 1 if own else 5)
            losses += [step(name, planned, optimizer, number) for number in numbers]
            save(planned, optimizer, tmp_path / "saved")
        assert_bitwise(outcome(planned, optimizer, losses), expected)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", TORCHAO)
def test_compiled_steps_in_pieces_match_plain_training_bitwise(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each length is compiled, as each shape is in plain training: minutes."""
    monkeypatch.setattr(update_rules, "COMPILED_SPAN", 4096)
    name, trainer = "functional", Trainer(of_torchao(kind, lr=1e-3))
    expected = plain(name, trainer)
    model = build(name)
    planned, optimizer = prepare(
        model,
        plan_for(model, decided(described(name), Keep(), Offload(tier="host")), piece_bytes=20_000),
        optimizer=trainer.factory,
    )
    assert_bitwise(train(name, planned, optimizer), expected)


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


def test_steps_that_draw_random_numbers_persist(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "llama"
    trainer = Trainer(of_torchao("AdamWFp8", bf16_stochastic_round=True))
    with uncompiled(4096, monkeypatch):
        for placement in (Offload(tier="host"), STEPPED):
            model = build(name).to(torch.bfloat16)
            units = decided(described(name), Keep(), placement)
            with pytest.raises(ProtrainError, match="its step draws random numbers"):
                prepare(model, plan_for(model, units), optimizer=trainer.factory)
        found = []
        for planned in (False, True):
            trained: Any = build(name).to(torch.bfloat16)
            optimizer: Any = None
            if planned:
                units = decided(described(name), Recompute(), Persistent())
                plan = plan_for(trained, units)
                trained, optimizer = prepare(trained, plan, optimizer=trainer.factory)
            else:
                optimizer = trainer.factory(trained.parameters())
            found.append(train(name, trained, optimizer, num_steps=2))
        assert_bitwise(*found)


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
    with pytest.raises(ProtrainError) as raised:
        estimate(
            load_source("tiny-llama"),
            hardware=load_hardware("rtx-4090"),
            batch_size=1,
            seq_len=32,
            dtype="float32",
            optimizer="torchao.optim:AdamW8bit",
        )
    assert_says(raised.value)


@pytest.mark.parametrize("kind", OF_MATRICES)
def test_what_looks_at_matrices_is_refused_by_name_below_the_device(kind: str) -> None:
    trainer = partial(OF_MATRICES[kind], lr=1e-2)
    model = build("llama")
    if kind == "muon":
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    units = decided(described("llama"), Keep(), Offload(tier="host"))
    with pytest.raises(ProtrainError, match=r"cannot update '.*weight' in pieces"):
        prepare(model, plan_for(model, units), optimizer=trainer)
    after: Mapping[str, torch.Tensor] = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("placement", [Persistent(), STEPPED])
def test_adafactor_trains_where_its_states_stay(placement: Any, tmp_path: Path) -> None:
    """Updated in backward, its gradients never stand together: LOMO's memory."""
    trainer = Trainer(OF_MATRICES["adafactor"], weight_decay_groups)
    units = decided(described("gpt2"), Recompute(), placement)
    model = build("gpt2")
    planned, optimizer = prepare(
        model,
        plan_for(model, tuple(replace(unit) for unit in units)),
        optimizer=trainer.factory,
        param_groups=trainer.groups(model),
        spill_directory=tmp_path,
    )
    assert_bitwise(train("gpt2", planned, optimizer), plain("gpt2", trainer))


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


@pytest.mark.parametrize("shape", [(688, 256), (256, 688), (14_336, 4096), (4096, 14_336)])
def test_states_are_those_of_the_matrix_s_own_shape(shape: tuple[int, int]) -> None:
    """A smaller matrix may have its longer side elsewhere."""
    rule = UpdateRules(LongSide).of(torch.float32, torch.Size(shape))
    assert rule.whole == (4 * max(shape),)


def test_groups_with_options_for_matrices_alone_are_asked_for_them_alone(tmp_path: Path) -> None:
    """As GaLore's groups, of which one has a rank: vectors are in another one."""

    class OfGroups(LowRank):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                wrong = [p for p in group["params"] if "matrices" in group and p.dim() != 2]
                assert not wrong, "a vector has no rank"
            super().step(closure)

    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        every = list(model.parameters())
        matrices = {"params": [p for p in every if p.dim() == 2], "matrices": True}
        return [matrices, {"params": [p for p in every if p.dim() != 2]}]

    trainer = Trainer(OfGroups, groups)
    model = build("gpt2")
    planned, optimizer = prepare(
        model,
        plan_for(model, decided(described("gpt2"), Recompute(), Persistent())),
        optimizer=trainer.factory,
        param_groups=groups(model),
        spill_directory=tmp_path,
    )
    assert_bitwise(train("gpt2", planned, optimizer), plain("gpt2", trainer))


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
    model = build("gpt2")
    units = decided(described("gpt2"), Recompute(), Offload(tier="host"))
    with pytest.raises(ProtrainError, match="cannot update"):
        prepare(model, plan_for(model, units), optimizer=LowRank)
    trainer = Trainer(LowRank)
    planned, optimizer = prepare(
        model,
        plan_for(model, decided(described("gpt2"), Recompute(), STEPPED)),
        optimizer=trainer.factory,
        spill_directory=tmp_path,
    )
    assert_bitwise(train("gpt2", planned, optimizer), plain("gpt2", trainer))


def test_where_tensors_are_fake_a_step_is_seen_to_draw_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = itertools.count()
    with faking("cuda"), monkeypatch.context() as patched:
        # What an estimate has in place of the generator's state tells nothing.
        patched.setattr(torch, "get_rng_state", lambda: torch.full((16,), next(states)))
        rule = UpdateRules(optimizer_factory("adamw")).of(torch.float32, torch.Size([64, 48]))
    assert rule.reason == ""
