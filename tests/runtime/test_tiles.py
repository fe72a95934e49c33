"""A last part's loss in place and in tiles, and MLPs in tiles of tokens.

In place: plain PyTorch's bits. In tiles: equal up to rounding, as near to float64 as plain PyTorch.
All of them in the bytes that were predicted.
"""

import copy
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.models.sources import load_source
from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.activations.forms import around, wrap_forward
from protrain_runtime.activations.late_values import LateValues, UsedTwiceError
from protrain_runtime.activations.tiled_loss import TILE_ROWS, loss_in_place, tile_rows
from protrain_runtime.activations.tiled_mlp import takes_tokens_apart
from protrain_runtime.contract.records import dumps_plan, dumps_profile, loads_plan, loads_profile
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Budgets,
    Placement,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.devices.memory_meter import MemoryMeter
from tests.support.cards import every_device
from tests.support.estimates import estimate
from tests.support.messages import Speaker
from tests.support.peaks import (
    PIECE_BYTES,
    SLACK_BYTES,
    bytes_of_others,
    peaks,
    preset_with,
    profile_made,
    without_freedom,
)
from tests.support.runtime_cases import (
    BATCH,
    CATALOGUE,
    SEQUENCE,
    VOCABULARY,
    Subject,
    assert_bitwise,
    decided,
    decision_name,
    described,
    described_by,
    differences,
    labelled,
    profiled_here,
)
from tests.support.scenario import Run, Scenario, Units
from tests.support.thinning import thinned
from tests.support.trained import train
from tests.support.training_rows import workload

IN_PLACE = Activations(form="in place")
ROUNDING = ("rounding",)

# --- one loss -------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor], Tensor]
"""Cross entropy of logits [batch, sequence, classes] and labels [batch, sequence]."""


def causal(logits: Tensor, labels: Tensor) -> Tensor:
    """As `transformers` has it for language models that predict the next token, and BERT."""
    wide = logits.float().view(-1, logits.shape[-1])
    return cross_entropy(wide, labels.reshape(-1))


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """As scripts have it, and `transformers` had."""
    wide = logits.float()[..., :-1, :].contiguous()
    return cross_entropy(wide.view(-1, wide.size(-1)), labels[..., 1:].reshape(-1))


def narrow(logits: Tensor, labels: Tensor) -> Tensor:
    """As T5 and BART have it: in the dtype of the logits."""
    loss: Tensor = nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), labels.view(-1))
    return loss


def of_all_items(logits: Tensor, labels: Tensor) -> Tensor:
    """As `Trainer` has it where micro-batches add up."""
    wide = logits.to(torch.float32).view(-1, logits.shape[-1])
    return cross_entropy(wide, labels.view(-1), reduction="sum") / torch.tensor(777)


def ignoring_zero(logits: Tensor, labels: Tensor) -> Tensor:
    """Class 0 is no target: the number that the sums have for `ignored` is none of the model's."""
    wide = logits.to(dtype=torch.float32).flatten(0, 1)
    return cross_entropy(wide, labels.flatten().clamp(min=0), ignore_index=0)


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    """Soft-capped, as Gemma 2 has it: `tanh` saves what it returns."""
    return causal(torch.tanh(logits / 30) * 30, labels)


def capped_last(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss reads what `tanh` has saved for its own backward."""
    return narrow(torch.tanh(logits), labels)


def looked_at(logits: Tensor, labels: Tensor) -> Tensor:
    """The share of right answers is counted before and after."""
    wide = logits.float()
    with torch.no_grad():
        right = wide.argmax(-1) == labels
    loss = cross_entropy(wide.view(-1, wide.shape[-1]), labels.view(-1))
    assert torch.equal(right, wide.argmax(-1) == labels)
    return loss


def masked_before(logits: Tensor, labels: Tensor) -> Tensor:
    """Some classes are ruled out, in place, in the float32 values."""
    wide = logits.float()
    wide[..., ::7] = -1e9
    return cross_entropy(wide.view(-1, wide.shape[-1]), (labels.view(-1) // 7 * 7 + 1).clamp(min=0))


def with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A second term from the logits themselves, which it saves."""
    return causal(logits, labels) + 0.01 * torch.logsumexp(logits, -1).square().mean()


IN_TILES: tuple[Loss, ...] = (
    causal,
    shifted,
    narrow,
    of_all_items,
    ignoring_zero,
    capped,
    capped_last,
    looked_at,
    masked_before,
    with_z_loss,
)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, logits.shape[-1])
    return cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1), weight=weight)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.float().view(-1, logits.shape[-1])
    return cross_entropy(wide, labels.view(-1), label_smoothing=0.1)


def of_every_row(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.float().view(-1, logits.shape[-1])
    return cross_entropy(wide, labels.view(-1), reduction="none").square().mean()


def of_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    targets = torch.softmax(torch.outer(labels.view(-1).clamp(min=0), torch.arange(5.0)), -1)
    wide = logits.float().view(-1, logits.shape[-1])
    return cross_entropy(wide[:, :5], targets)


def of_an_image(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.float().transpose(1, 2), labels)


def written_out(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = torch.log_softmax(logits.float(), -1).gather(-1, labels.clamp(min=0)[..., None])
    return -chosen.mean()


PLAIN: tuple[Loss, ...] = (
    weighted,
    smoothed,
    of_every_row,
    of_probabilities,
    of_an_image,
    written_out,
)


def differentiated(
    loss: Loss, dtype: torch.dtype, *, in_place: bool, upstream: float = 1.0, bias: bool = False
) -> list[Tensor]:
    """A loss on a linear head, and the gradients of the head and of what goes into it."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden, weight = random(3, 50, 24).requires_grad_(), random(1001, 24).requires_grad_()
    start = random(1001).requires_grad_() if bias else None
    labels = torch.randint(1001, (3, 50), generator=generator)
    labels[:, ::7] = -100
    stands: AbstractContextManager[object] = loss_in_place() if in_place else nullcontext()
    with stands:
        found = loss(linear(hidden, weight, start), labels)
    (found if upstream == 1 else found * upstream).backward()
    leaves = [hidden, weight, *([] if start is None else [start])]
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(gradients) == len(leaves)
    return [found.detach(), *gradients]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_loss_and_its_gradients_are_plain_pytorchs_bitwise(
    dtype: torch.dtype, autocast: bool
) -> None:
    """With a bias and another upstream gradient, too."""
    for loss, bias in itertools.product((*IN_TILES, *PLAIN), (False, True)):
        upstream = 0.3 if bias else 1.0
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found, expected = (
                differentiated(loss, dtype, in_place=in_place, upstream=upstream, bias=bias)
                for in_place in (True, False)
            )
        assert list(differences(found, expected, loss.__name__)) == []


def test_what_takes_tiles_takes_less_memory() -> None:
    def peak(loss: Loss, *, in_place: bool) -> int:
        with MemoryMeter() as meter:
            meter.mark("both ways")
            differentiated(loss, torch.bfloat16, in_place=in_place)
        return meter.segments[0].peak_bytes

    for loss in IN_TILES:
        saved = peak(loss, in_place=False) - peak(loss, in_place=True)
        # Bytes of the logits; where they are cast, more than theirs.
        assert saved >= 2 * 150 * 1001, loss.__name__


def test_tiles_are_few_and_of_whole_groups_of_rows() -> None:
    assert tile_rows(8192, 128_256) == 128
    assert tile_rows(8192, 32_000) == 512
    assert tile_rows(128, 320) == 16
    assert tile_rows(7, 1000) == TILE_ROWS
    assert tile_rows(8192, 10**9) == TILE_ROWS


# --- logits that others have ----------------------------------------------------------------------


def head(num_rows: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """The input of a head, its weight, and the targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(300, 16, generator=generator).bfloat16().requires_grad_()
    return hidden, weight, torch.randint(300, (num_rows,), generator=generator)


def test_who_has_the_logits_reads_them_before_and_after_backward() -> None:
    hidden, weight, targets = head()
    with loss_in_place():
        logits = linear(hidden, weight)
        loss = cross_entropy(logits.float(), targets)
    expected = linear(hidden, weight)
    assert type(logits) is Tensor
    assert torch.equal(logits, expected)
    loss.backward()
    assert torch.equal(logits, expected)
    found = weight.grad
    weight.grad = None
    cross_entropy(expected.float(), targets).backward()
    assert list(differences(found, weight.grad, "gradient")) == []


def test_gradients_are_written_over_logits_that_nobody_has() -> None:
    hidden, weight, targets = head()
    seen: list[int] = []
    with loss_in_place():
        logits = linear(hidden, weight)
        address = logits.data_ptr()
        assert logits.grad_fn is not None
        logits.grad_fn.register_prehook(lambda given: seen.append(given[0].data_ptr()))
        loss = cross_entropy(logits.float(), targets)
    del logits
    loss.backward()
    assert seen == [address]


def test_the_float32_logits_that_a_model_returns_are_there_for_whoever_asks() -> None:
    hidden, weight, targets = head()
    with loss_in_place():
        wide = linear(hidden, weight).float()
        loss = cross_entropy(wide, targets)
    assert isinstance(wide, LateValues)
    expected = linear(hidden, weight).float()
    assert (wide.shape, wide.dtype, wide.requires_grad) == (expected.shape, torch.float32, True)
    assert torch.equal(wide, expected)
    loss.backward()
    assert torch.equal(wide, expected)
    assert wide.argmax(-1).tolist() == expected.argmax(-1).tolist()
    assert wide[0, 0].item() == expected[0, 0].item()


def test_a_loss_in_compiled_code_is_the_compilers() -> None:
    hidden, weight, targets = head()

    def of_rows(hidden: Tensor) -> Tensor:
        return cross_entropy(linear(hidden, weight).float(), targets)

    compiled = torch.compile(of_rows, backend="aot_eager")
    expected = compiled(hidden)
    with loss_in_place():
        found = compiled(hidden)
    assert type(found.grad_fn).__name__ == type(expected.grad_fn).__name__
    assert torch.equal(found, expected)


# --- what is refused ------------------------------------------------------------------------------


def test_a_second_use_of_the_float32_logits_is_refused() -> None:
    hidden, weight, targets = head()
    with loss_in_place():
        wide = linear(hidden, weight).float()
        cross_entropy(wide, targets)
        with pytest.raises(UsedTwiceError, match="uses the logits once more besides the loss"):
            wide.square().mean()
        with pytest.raises(UsedTwiceError):
            cross_entropy(wide[:32], targets[:32])
        with pytest.raises(UsedTwiceError):
            wide.register_hook(lambda gradient: gradient)


def test_logits_that_were_written_since_are_refused() -> None:
    hidden, weight, targets = head()
    with loss_in_place():
        logits = linear(hidden, weight)
        wide = logits.float()
        logits.mul_(2)
        with pytest.raises(RuntimeError, match="written in place after it was cast"):
            cross_entropy(wide, targets)
        loss = cross_entropy(logits.float(), targets)
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="written in place between the loss and its backward"):
        loss.backward()


def test_a_second_backward_is_refused() -> None:
    hidden, weight, targets = head()
    with loss_in_place():
        loss = cross_entropy(linear(hidden, weight).float(), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran once more through a loss"):
        loss.backward()


# --- whole steps ----------------------------------------------------------------------------------


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def gemma2(layers: int = 2, capped_at: float = 30.0, **sizes: int) -> Any:
    own = {"num_hidden_layers": layers, "head_dim": 24, "final_logit_softcapping": capped_at}
    return Gemma2ForCausalLM(Gemma2Config(**{**SIZES, **sizes}, **own, use_cache=False))


def bert() -> Any:
    """A masked language model: the head is tied, and has a bias."""
    sizes = {key: size for key, size in SIZES.items() if key != "num_key_value_heads"}
    longest = {"max_position_embeddings": SEQUENCE}
    return BertForMaskedLM(BertConfig(**sizes, **longest, num_hidden_layers=2))


class Float32Logits(nn.Module):
    """Returns the float32 logits, as Accelerate makes models do under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3)
        )
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden).float()
        loss = cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))
        return CausalLMOutput(loss=loss, logits=logits)


OWN = {"bert": bert, "gemma2": gemma2, "float32-logits": Float32Logits}
LOOPS = ("llama", "llama-tied", "gpt2", "t5", "functional", *OWN)


def ignoring(name: str, number: int) -> Batch:
    made = labelled(number) if name in OWN else CATALOGUE[name].batches(number)
    if isinstance(made, dict):
        made["labels"][:, :: 3 if name == "bert" else 9] = -100
    return made


def with_logits(run: Run, *, micro_batches: int = 1) -> None:
    """Losses and the logits of every step."""
    for number in range(5 * micro_batches):
        output = call_model(run.model, run.subject.batch(number))
        loss = loss_of(output)
        (loss / micro_batches).backward()
        logits = getattr(output, "logits", None)
        run.seen += [loss.detach(), None if logits is None else logits.detach().clone()]
        del output, logits, loss
        if (number + 1) % micro_batches == 0:
            run.update()


def in_place(units: Units, *, offloads: bool) -> Units:
    """All states on the disk and the blocks recomputed, or nothing decided but the last part."""
    states: Placement = Placement(tier="disk") if offloads else PERSISTENT
    *others, last = decided(units, RECOMPUTE if offloads else KEEP, states)
    return (*others, replace(last, activations=IN_PLACE))


def tried(name: str, precision: str, *, offloads: bool, micro_batches: int = 1) -> Scenario:
    make = CATALOGUE[name].make if name in CATALOGUE else OWN[name]
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    return Scenario(
        model=Subject(make, partial(ignoring, name), lambda model: model.to(dtype)),
        units=partial(in_place, offloads=offloads),
        settings={"workload": workload({"precision": precision}), "micro_batches": micro_batches},
        script=partial(with_logits, micro_batches=micro_batches),
    )


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize(
    ("name", "precision", "offloads"),
    thinned(LOOPS, ["float32", "bfloat16"], [False, True], every=2),
)
def test_five_steps_match_plain_torch_bitwise(
    name: str, precision: str, offloads: bool, tmp_path: Path
) -> None:
    tried(name, precision, offloads=offloads).assert_like_plain(tmp_path)


@pytest.mark.nightly(but=("False-cuda", "True-cuda"))
@every_device
@pytest.mark.parametrize("offloads", [False, True])
def test_accumulated_steps_match_plain_torch_bitwise(offloads: bool, tmp_path: Path) -> None:
    asked = tried("llama-tied", "bfloat16", offloads=offloads, micro_batches=2)
    asked.assert_like_plain(tmp_path)


# --- up to rounding -------------------------------------------------------------------------------

CLASSES = 1000
TOKENS = (2, 77)  # no multiple of a tile
TWO = {**SIZES, "vocab_size": CLASSES, "num_hidden_layers": 2}
in_every_precision = pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)],
    ids=["float32", "bfloat16", "autocast"],
)


def assert_as_near(
    found: Mapping[str, Tensor], plain: Mapping[str, Tensor], true: Mapping[str, Tensor]
) -> None:
    """Sums in another order than plain PyTorch's have other errors, of the same size.

    `true` are the gradients of the same model in float64.
    """
    assert found.keys() == plain.keys() == true.keys()
    for key, exact in true.items():
        error = (found[key].double() - exact).norm()
        least = (plain[key].double() - exact).norm()
        assert error <= 1.5 * least + 1e-6 * exact.norm(), key


def small_llama(**sizes: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**{**TWO, "num_hidden_layers": 1, **sizes}))


def small_gpt2(dropout: float = 0.0, layers: int = 1) -> Any:
    """The head is tied."""
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    sizes = {"vocab_size": CLASSES, "n_embd": 96, "n_layer": layers, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))


class Head(nn.Module):
    """An embedding and a head; `ends` makes what the forward returns of logits and labels."""

    def __init__(
        self, ends: Callable[[Tensor, Tensor], Mapping[str, Tensor]], *, bias: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 64)
        self.head, self.ends = nn.Linear(64, CLASSES, bias=bias), ends

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        return self.ends(self.head(self.embedding(input_ids)), labels)


def summed(logits: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
    """A sum over shifted logits, as older code has it."""
    ahead = logits[..., :-1, :].contiguous().float().view(-1, CLASSES)
    loss = cross_entropy(ahead, labels[..., 1:].reshape(-1), reduction="sum")
    return {"loss": loss, "logits": logits}


def capped_twice(logits: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
    """Logits that are scaled and capped before a mean, in all ways of writing it."""
    logits = torch.tanh(3 * logits / 2.5).mul(4.0).float().div(2).tanh() * 6
    return {"loss": cross_entropy(logits.view(-1, CLASSES), labels.view(-1)), "logits": logits}


HEADS: dict[str, Callable[[], Any]] = {
    "llama": small_llama,
    "tied": small_gpt2,
    "bias": partial(Head, summed),
    "capped": partial(Head, capped_twice, bias=False),
    "softcapped": partial(gemma2, 1, 5.0, vocab_size=CLASSES),
}


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, CLASSES, TOKENS, generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :10] = -100
    return {"input_ids": ids, "labels": labels}


def made(factory: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return factory().to(dtype)


def gradients(
    model: nn.Module, context: AbstractContextManager[object], *, autocast: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), context:
        loss = model(**batch())["loss"]
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


@pytest.mark.parametrize("name", HEADS)
@in_every_precision
def test_gradients_of_heads_in_tiles_are_as_near_to_those_of_float64_as_plain_pytorchs(
    name: str, dtype: torch.dtype, autocast: bool
) -> None:
    """Every gradient, of a head that is trained and of a frozen one: none is doubled or missing."""
    model = made(HEADS[name], dtype)
    for frozen in (False, True):
        if frozen and name not in ("tied", "softcapped"):
            model.get_output_embeddings().requires_grad_(False)
        true_loss, true = gradients(copy.deepcopy(model).double(), nullcontext())
        plain_loss, plain_found = gradients(model, nullcontext(), autocast=autocast)
        for form in ("8 tiles", "64 tiles"):
            loss, found = gradients(model, around(form), autocast=autocast)
            assert loss.dtype == plain_loss.dtype
            assert_as_near(found, plain_found, true)
            torch.testing.assert_close(loss.double(), true_loss.double(), rtol=2e-2, atol=0.0)


@pytest.mark.parametrize("name", ["llama", "capped", "softcapped"])
def test_nothing_is_as_large_as_the_logits(name: str) -> None:
    """Bytes that autograd keeps; those of all slots are compared below."""
    model = made(HEADS[name])

    def largest(context: AbstractContextManager[object]) -> int:
        sizes: list[int] = []

        def noted(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(noted, lambda kept: kept), context:
            model(**batch())
        return max(sizes)

    logits = TOKENS[0] * TOKENS[1] * CLASSES
    assert largest(around("8 tiles")) < logits <= largest(nullcontext())


def counted(logits: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
    """Right answers are counted before and after the loss."""
    before = (logits.detach().argmax(-1) == labels).sum()
    loss = cross_entropy(logits.view(-1, CLASSES), labels.reshape(-1))
    with torch.no_grad():
        after = (logits.argmax(-1) == labels).sum()
    return {"loss": loss, "right": torch.stack([before, after]), "logits": logits}


def used_twice(logits: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
    """The loss has a second term of the logits."""
    loss = cross_entropy(logits.view(-1, CLASSES), labels.reshape(-1))
    return {"loss": loss + 1e-4 * logits.logsumexp(-1).square().mean()}


def test_who_asks_for_logits_in_the_forward_gets_them() -> None:
    model = made(partial(Head, counted))
    with torch.no_grad():
        expected = model(**batch())
    with around("8 tiles"):
        found = model(**batch())
    assert torch.equal(found["right"], expected["right"])
    for frozen in (False, True):
        twice = Head(used_twice)
        twice.head.requires_grad_(not frozen)
        _, plain_found = gradients(twice, nullcontext())
        _, tiled = gradients(twice, around("8 tiles"))
        for key, value in plain_found.items():
            torch.testing.assert_close(tiled[key], value, rtol=1e-4, atol=1e-6)


def test_logits_are_refused_after_the_forward() -> None:
    """The head may have left the device, or been updated; in an evaluation they are there."""
    model = Head(counted)
    whole = model(**batch())["logits"]
    with around("8 tiles"), torch.no_grad():
        assert torch.equal(model(**batch())["logits"], whole)
    with around("8 tiles"):
        output = model(**batch())
    assert output["logits"].shape == (*TOKENS, CLASSES)
    with pytest.raises(RuntimeError, match="asked for after the forward"):
        output["logits"].sum()
    output["loss"].backward()
    with pytest.raises(RuntimeError, match="asked for after the forward"):
        output["logits"].argmax(-1)


@pytest.mark.nightly
def test_where_states_wait_changes_no_bit(tmp_path: Path) -> None:
    """Plans with one form of the last part train alike, and near to plain PyTorch."""

    def tiled(units: Units, *, states: Placement) -> Units:
        *before, last = decided(units, RECOMPUTE, states)
        return (*before, replace(last, activations=Activations(form="8 tiles")))

    loose = {"exact": False, "exactness": "rounding", "allowed": ROUNDING}
    both: tuple[Placement, ...] = (PERSISTENT, Placement(tier="disk"))
    asked = [Scenario(units=partial(tiled, states=states), settings=loose) for states in both]
    first, second = (each.played(each.start(tmp_path)) for each in asked)
    assert_bitwise(first, second)
    torch.testing.assert_close(first.losses, asked[0].plain().losses, rtol=1e-4, atol=0.0)


# --- MLPs -----------------------------------------------------------------------------------------

MLPS: dict[str, Callable[[], Any]] = {
    "llama": partial(small_llama, num_hidden_layers=2),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**TWO, pad_token_id=0)),
    "gpt2": partial(small_gpt2, layers=2),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**TWO, num_local_experts=4)),
    "dropout": partial(small_gpt2, 0.1, layers=2),
}
"""Experts move tokens about, and dropout draws numbers in another order."""


def blocks(model: Any) -> list[Any]:
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)


def gradients_of_blocks(model: Any, form: str, *, autocast: bool = False) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    for block in blocks(model):
        wrap_forward(block, form)
    return gradients(model, nullcontext(), autocast=autocast)[1]


@pytest.mark.parametrize("name", MLPS)
@in_every_precision
def test_gradients_of_tiled_mlps_are_as_near_to_those_of_float64_as_plain_pytorchs(
    name: str, dtype: torch.dtype, autocast: bool
) -> None:
    model = made(MLPS[name], dtype)
    true = gradients_of_blocks(copy.deepcopy(model).double(), "keep")
    plain = gradients_of_blocks(model, "keep", autocast=autocast)
    found = gradients_of_blocks(model, "tiled", autocast=autocast)
    assert_as_near(found, plain, true)
    different = [key for key in found if not torch.equal(found[key], plain[key])]
    # It ran in tiles. Kernels for few rows may round otherwise, and so may what is behind the MLP.
    assert any(".mlp." in key for key in different)


@pytest.mark.parametrize("frozen", ["weights", "inputs", "all but one"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    model = made(MLPS["llama"])
    if frozen == "weights":
        for block in blocks(model):
            block.mlp.requires_grad_(False)
    else:
        model.requires_grad_(False)
        first, second = (block.mlp for block in blocks(model))
        (first if frozen == "inputs" else second.down_proj.weight).requires_grad_(True)
    plain, found = gradients_of_blocks(model, "keep"), gradients_of_blocks(model, "tiled")
    assert plain.keys() == found.keys() != set()
    for key, value in plain.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", OTHERS)
def test_blocks_without_such_an_mlp_are_recomputed_as_they_are(name: str) -> None:
    model = made(OTHERS[name])
    found = []
    for form in ("full", "tiled"):
        torch.manual_seed(1)
        found.append(gradients_of_blocks(model, form))
    assert list(differences(found[1], found[0], "gradients")) == []


class Mixes(nn.Module):
    """Products as an MLP has them, with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.between = between

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.down(self.between(self.up(tokens)))
        return found


@pytest.mark.parametrize(
    ("between", "apart"),
    [
        (torch.relu, True),
        (lambda x: x * x.sigmoid(), True),
        (lambda x: x / x.float().square().mean(-1, keepdim=True).sqrt().to(x.dtype), True),
        (lambda x: x[..., :16] * torch.softmax(x, -1), True),
        (lambda x: x.flip(1), False),
        (lambda x: x.roll(1, 1), False),
        (lambda x: x + x[:, :1], False),
        (lambda x: x.cumsum(1), False),
        (lambda x: x - x.mean(1, keepdim=True), False),
        (lambda x: torch.softmax(x, 1), False),
        (lambda x: x @ x.transpose(1, 2) @ x, False),
        (lambda x: x.transpose(0, 1).reshape(x.shape), False),
        (lambda x: torch.dropout(x, 0.5, True), False),
        (lambda x: x.sort(1).values, False),
        (lambda x: x.view(x.shape[0], -1, 4, 8).view(x.shape), False),  # raises on few tokens
        (lambda x: x * torch.arange(x.shape[1])[None, :, None], False),
    ],
)
def test_an_mlp_is_told_by_its_operators(between: Callable[[Tensor], Tensor], apart: bool) -> None:
    state = torch.get_rng_state()
    assert takes_tokens_apart(Mixes(between), torch.randn(3, 5, 8)) is apart
    assert takes_tokens_apart(Mixes(between), torch.randn(1, 2, 8)) is apart
    assert state.shape == torch.get_rng_state().shape


# --- profiles and plans ---------------------------------------------------------------------------

AMPLE = 10**12
MANY = 4096  # so many classes that logits are the most of a step, as they are in large models


@pytest.fixture(
    scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)]
)
def profile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    def make(folder: Path) -> Profile:
        path = folder / f"tiles-{request.param}.json"
        model = preset_with(path, "tiny-llama", vocab_size=MANY, num_hidden_layers=2)
        return profiled_here(model, folder, dtype=request.param, allow=ROUNDING)

    return profile_made(tmp_path_factory, f"tiles-{request.param}", make)


@pytest.mark.nightly  # by day `test_limits` trains tiles where plain PyTorch has no room
def test_forms_need_less(profile: Profile) -> None:
    *others, last = profile.units
    forms = [cost.form for cost in last.forms]
    assert all("in place" not in {cost.form for cost in unit.forms} for unit in others)
    assert forms[:2] == ["keep", "in place"]
    narrow, (keep, in_place) = profile.workload.dtype == "bfloat16", last.forms[:2]
    logits = BATCH * SEQUENCE * MANY * (2 if narrow else 4)
    assert logits < in_place.kept_bytes < 1.1 * logits
    assert in_place.forward_peak_bytes < 2 * logits
    assert in_place.backward_peak_bytes < last.gradient_bytes + 1.2 * logits
    assert keep.kept_bytes + keep.backward_peak_bytes > 2.9 * logits
    assert in_place.forward_s > 0 < in_place.backward_s
    assert set(forms[2:]) & {"8 tiles", "64 tiles"}
    for cost in last.forms[2:]:
        assert cost.kept_bytes < in_place.kept_bytes - 0.8 * logits
        assert cost.backward_peak_bytes < in_place.backward_peak_bytes or not narrow
    for unit in others[1:]:
        tiled, full = unit.cost("tiled"), unit.cost("full")
        assert tiled.kept_bytes == full.kept_bytes
        assert tiled.backward_peak_bytes < full.backward_peak_bytes
    assert profile.allowed == ROUNDING
    assert loads_profile(dumps_profile(profile)) == profile


def with_last(
    profile: Profile, blocks: Activations, states: Placement, last: Activations
) -> tuple[UnitPlan, ...]:
    *before, part = decided(described_by(profile), blocks, states)
    return without_freedom((*before, replace(part, activations=last)))


@pytest.mark.nightly("bfloat16-Swap-Offload")
@pytest.mark.parametrize(
    ("blocks", "states"),
    thinned([KEEP, RECOMPUTE, Activations(tier="disk")], [PERSISTENT, Placement(tier="disk")]),
    ids=decision_name,
)
def test_measured_bytes_in_place_match_predicted_in_every_slot(
    profile: Profile, blocks: Activations, states: Placement, tmp_path: Path
) -> None:
    """As near as where the last part keeps all, which `test_peaks` compares to the byte."""

    def excess(last: Activations) -> list[int]:
        found = peaks(profile, with_last(profile, blocks, states, last), tmp_path)
        return [a - b for a, b in zip(found.predicted, found.measured, strict=True)]

    found = excess(IN_PLACE)
    assert min(found) >= 0
    if (blocks, states) != (KEEP, PERSISTENT):  # which would be no plan's run
        kept = excess(KEEP)
        assert all(own - other <= SLACK_BYTES for own, other in zip(found, kept, strict=True))


@pytest.mark.nightly("bfloat16-exact")
@pytest.mark.parametrize("allow", [(), ROUNDING], ids=["exact", "rounding"])
def test_a_tight_budget_takes_it_and_stays_within_the_peak(
    allow: tuple[str, ...], profile: Profile, tmp_path: Path
) -> None:
    """With the blocks pinned, whose seconds a busy machine says anyhow."""

    def answer(device: int, allow: tuple[str, ...]) -> Solved:
        budgets = Budgets(device=device, host=0, disk=0)
        settings = replace(OVERLAPPING, piece_bytes=PIECE_BYTES)
        pins = (parse_pin("layers.*: keep"),)
        problem = Problem.of(profile, budgets, pins=pins, allow=allow, settings=settings)
        found = solve_problem(problem, effort=Effort())
        assert isinstance(found, Solved)
        return found

    less = BATCH * SEQUENCE * MANY
    found = answer(AMPLE, allow)
    assert {unit.activations for unit in found.plan.units} == {KEEP}
    assert (found.plan.exactness, found.plan.allowed) == ("bitwise", ())
    # Without leave it is in place; with leave less than that is needed.
    for own in ((), allow)[: 1 + bool(allow)]:
        needed = found.plan.prediction.peak_bytes
        found = answer(needed.device + needed.context - less, own)
    plan = found.plan
    assert plan.exact == (not allow)
    assert (plan.exactness, plan.allowed) == ("rounding" if allow else "bitwise", allow)
    last = plan.units[-1].activations
    assert "tiles" in last.form if allow else last == IN_PLACE
    assert loads_plan(dumps_plan(plan)) == plan

    strange = bytes_of_others()
    run = partial(train, plan, num_steps=3, spill_directory=tmp_path)
    ran = run(plain=False)
    assert ran.measured_peak_bytes is not None
    measured = ran.measured_peak_bytes.device - strange
    promised = plan.prediction.peak_bytes.device
    assert 0.98 * promised <= measured <= promised
    expected = run(plain=True)
    if allow:
        assert list(ran.losses) == pytest.approx(list(expected.losses), rel=1e-3)
    else:
        assert ran.losses == expected.losses
        assert ran.parameters_sha256 == expected.parameters_sha256


@pytest.mark.nightly
def test_estimates_have_the_forms_that_round() -> None:
    """Tensors without values tell as much: an MLP is told by operators, not by numbers."""
    sizes: Any = {"batch_size": 1, "seq_len": 128, "dtype": "float32"}
    machine, source = load_hardware("cpu"), load_source("tiny-llama")
    found = estimate(source, **sizes, hardware=machine, allow=("rounding",))
    for unit in found.units:
        if unit.kind == "block":
            assert unit.cost("tiled").backward_peak_bytes < unit.cost("full").backward_peak_bytes
    last = found.units[-1]
    assert last.cost("8 tiles").kept_bytes < last.cost("in place").kept_bytes
    exact = estimate(source, **sizes, hardware=machine)
    assert not any("tile" in cost.form for unit in exact.units for cost in unit.forms)


def test_others_are_refused_with_the_reason(profile: Profile, assert_says: Speaker) -> None:
    def refused(given: Profile, pin: str) -> None:
        problem = Problem.of(given, budgets, pins=(parse_pin(pin),))
        assert_says.refused(lambda: problem.options)

    budgets, last = Budgets(device=AMPLE, host=0, disk=AMPLE), profile.units[-1]
    before = replace(profile, units=(*profile.units[:-1], replace(last, forms=last.forms[:1])))
    refused(profile, "layers.0: keep in place")
    refused(before, "model.norm: keep in place")
    forms = tuple(replace(cost, swappable_bytes=2**20) for cost in last.forms)
    claims = replace(profile, units=(*profile.units[:-1], replace(last, forms=forms)))
    found = [one.decision for one in Problem.of(claims, budgets).options[-1].activations]
    assert found == [KEEP, Activations(tier="disk"), IN_PLACE]  # parts swap nothing in it


def test_a_plan_that_gives_it_to_others_is_refused(assert_says: Speaker, tmp_path: Path) -> None:
    for place, decision in ((1, IN_PLACE), (0, IN_PLACE), (-1, RECOMPUTE)):
        units = list(described("llama"))
        units[place] = replace(units[place], activations=decision)
        assert_says.refused(Scenario(model="llama", units=units).start, tmp_path)
