"""Units of real models, known by construction; and the model as it was afterwards."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812

from protrain_plan.models.batches import Batch
from protrain_plan.models.sources import load_source
from protrain_plan.profiling.structure.discovery import FoundUnit, discover
from protrain_runtime.diagnostics.matching import model_fingerprint
from tests.support.estimates import batches_of, model_of

CONFIGS = {
    "llama": None,
    "gpt2": None,
    "llama-tied": {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32,
                   "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 300,
                   "tie_word_embeddings": True},
    "t5": {"model_type": "t5", "num_layers": 2, "d_model": 32, "d_ff": 48, "num_heads": 2,
           "d_kv": 16, "vocab_size": 300, "decoder_start_token_id": 0},
    "mixtral": {"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 32,
                "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2,
                "vocab_size": 300, "num_local_experts": 4},
}  # fmt: skip


def built(name: str) -> tuple[nn.Module, Batch]:
    config = CONFIGS[name]
    source = load_source(f"tiny-{name}", model_config=json.dumps(config) if config else "")
    return model_of(source), next(batches_of(source, batch_size=2, seq_len=16))


def names(units: tuple[FoundUnit, ...]) -> list[str]:
    return [f"{unit.kind} {unit.name}" for unit in units]


def assert_sound(model: nn.Module, units: tuple[FoundUnit, ...]) -> None:
    """Laws of the units of every model."""
    owned = [name for unit in units for name in unit.parameters]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())
    assert len({unit.name for unit in units}) == len(units)
    assert units[0].kind == units[-1].kind == "part"
    seen: set[str] = set()
    for unit in units:
        assert set(unit.also_uses) <= seen
        seen.update(unit.parameters)
        assert (unit.module is not None) == (unit.kind == "block")
        if unit.module is not None:
            assert unit.module is model.get_submodule(unit.name)


class FunctionalBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(size, size) / 8)
        self.gain = nn.ParameterDict({"g": nn.Parameter(torch.ones(size))})

    def forward(self, x: Tensor) -> Tensor:
        return x + F.layer_norm(F.linear(x, self.up), x.shape[-1:], self.gain["g"])


class Functional(nn.Module):
    """Bare parameters at the root, used by functional operators; dropout; a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.randn(5, 8))
        self.unused = nn.Parameter(torch.ones(2))
        self.inlet = nn.Parameter(torch.randn(8, 3))
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList([FunctionalBlock(8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.inlet)
        x = self.norm(F.dropout(x, 0.5, self.training))
        for block in self.blocks:
            x = block(x.view(-1, 8))
        loss: Tensor = F.linear(x, self.head).square().mean()
        return loss


class TwoLists(nn.Module):
    """Two lists of different blocks, work without parameters between, and a module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([FunctionalBlock(4) for _ in range(2)])
        self.second = nn.ModuleList([FunctionalBlock(8) for _ in range(2)])
        self.scale = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale(x)
        for block in self.first:
            x = block(x)
        x = torch.cat([self.scale(x), x], dim=-1)
        x = self.second[0](x)
        x = torch.relu(x)
        loss: Tensor = self.second[1](x).mean()
        return loss


class Routed(nn.Module):
    """A block with experts of which only one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.experts[1](x)
        return y


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


class Keyword(nn.Module):
    """Frozen blocks that are called with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([FunctionalBlock(4) for _ in range(2)])
        self.layers.requires_grad_(False)

    def forward(self, *, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x=x)
        return x.sum()


LAYERS = [f"block model.layers.{number}" for number in range(4)]
MODELS: dict[str, tuple[Callable[[], nn.Module], Batch, list[str]]] = {
    "functional operators on bare parameters": (
        Functional,
        (torch.ones(4, 3),),
        ["part norm", "block blocks.0", "block blocks.1", "block blocks.2", "part (output)"],
    ),
    "two lists, and work between": (
        TwoLists,
        torch.ones(2, 4),
        [
            *("part scale.weight", "block first.0", "block first.1", "part scale.weight#2"),
            *("block second.0", "part (after second.0)", "block second.1", "part (output)"),
        ],
    ),
    "an expert without tokens": (
        lambda: nn.Sequential(Routed(), Routed(), nn.Linear(4, 1, bias=False), nn.Flatten(0)),
        torch.ones(1, 4),
        ["part (input)", "block 0", "block 1", "part 2"],
    ),
    "no repetition": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))),
        torch.ones(1, 3),
        ["part (input)", "block 0.0", "part 0.1", "block 0.2", "part (output)"],
    ),
    "no children": (Bare, torch.ones(3), ["part (model)"]),
    "frozen blocks, keywords": (
        Keyword,
        {"x": torch.ones(2, 4)},
        ["part (input)", "block layers.0", "block layers.1", "part (output)"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_units_are_those_of_the_model_s_code(name: str) -> None:
    make, batch, expected = MODELS[name]
    model = make()
    units = discover(model, batch)
    assert names(units) == expected
    assert_sound(model, units)
    owned = {unit.name: (unit.parameters, unit.also_uses) for unit in units}
    match name:
        case "functional operators on bare parameters":
            assert owned["norm"][0] == ("inlet", "norm.weight", "norm.bias")
            assert owned["blocks.1"][0] == ("blocks.1.up", "blocks.1.gain.g")
            assert owned["(output)"][0] == ("head", "unused")
        case "two lists, and work between":
            assert owned["scale.weight#2"][1] == ("scale.weight", "scale.bias")
            assert owned["(after second.0)"] == ((), ())
        case "an expert without tokens":
            experts = (f"0.experts.{number}.weight" for number in (1, 0, 2))
            assert owned["0"][0] == tuple(experts)
        case _:
            assert all(uses == () for _, uses in owned.values())


@pytest.mark.nightly(but=("gpt2", "mixtral"))
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_parameter_has_one_owner(name: str) -> None:
    """A tied head uses the first unit's; encoder and decoder have a part between."""
    model, batch = built(name)
    units = discover(model, batch)
    assert_sound(model, units)
    match name:
        case "llama":
            assert names(units) == ["part model.embed_tokens", *LAYERS, "part model.norm"]
            assert units[-1].parameters == ("model.norm.weight", "lm_head.weight")
        case "llama-tied" | "gpt2":
            tied = units[0].parameters[0]
            assert [unit.also_uses for unit in units] == [()] * (len(units) - 1) + [(tied,)]
        case "t5":
            assert units[0].parameters == ("shared.weight",)
            assert names(units)[3:] == [
                "part encoder.final_layer_norm",
                "block decoder.block.0",
                "block decoder.block.1",
                "part decoder.final_layer_norm",
            ]
            assert units[3].also_uses == units[6].also_uses == ("shared.weight",)
        case _:
            assert all(unit.also_uses == () for unit in units)


def test_fake_tensors_give_the_same_units() -> None:
    model, batch = built("llama-tied")
    expected = [(unit.kind, unit.name, sorted(unit.parameters)) for unit in discover(model, batch)]
    with FakeTensorMode():
        source = load_source("x", model_config=json.dumps(CONFIGS["llama-tied"]))
        fake = model_of(source)
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        found = discover(fake, {"input_ids": tokens, "labels": tokens})
    assert [(unit.kind, unit.name, sorted(unit.parameters)) for unit in found] == expected
    assert model_fingerprint(fake) == model_fingerprint(model)
