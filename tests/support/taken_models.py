"""Factories of small models that profiles took badly: each has a habit of its own.

Complex parameters, sparse gradients and inputs, arguments that are no tensors, parameters that are
no tensors by themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTH, BATCH, LENGTH, VOCABULARY = 64, 4, 48, 48
Made = tuple[nn.Module, list[Any]]


class Mixer(nn.Module):
    """A residual of two products; its hidden layer is 24 KiB: above what a swap leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, length, width], twice
        mixed: Tensor = hidden + self.down(F.gelu(self.up(self.norm(hidden))))
        return mixed


class Filter(nn.Module):
    """FNet's mixing with learnt weights: complex parameters beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(0.1 * torch.randn(LENGTH // 2 + 1, WIDTH, dtype=torch.cfloat))

    def forward(self, hidden: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.norm(hidden), dim=1, norm="ortho") * self.weight
        mixed: Tensor = hidden + torch.fft.irfft(spectrum, n=LENGTH, dim=1, norm="ortho")
        return mixed


class Spectral(nn.Module):
    """Complex parameters alone, read as they are and as conjugates, and a complex buffer."""

    phase: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ParameterList([0.1 * torch.randn(WIDTH, WIDTH, dtype=torch.cfloat)])
        self.gain = nn.Parameter(torch.randn(WIDTH, dtype=torch.cfloat))
        self.register_buffer("phase", torch.randn(WIDTH, dtype=torch.cfloat))

    def forward(self, hidden: Tensor) -> Tensor:
        product = (hidden * self.phase) @ self.inner[0]
        found: Tensor = hidden + (product * (product * self.gain).conj()).imag
        return found


class Stack(nn.Module):
    """Blocks between an embedding and a head, called one after the other."""

    def __init__(
        self, block: Callable[[], nn.Module], *, count: int = 3, sparse: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def mixed(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.mixed(self.embedding(tokens), tokens))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _tokens() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [{"tokens": torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)}]


def filters() -> Made:
    return Stack(Filter), _tokens()


def spectral() -> Made:
    return Stack(Spectral), _tokens()


def sparse_embedding() -> Made:
    return Stack(Mixer, sparse=True), _tokens()


class Bagged(Mixer):
    """Adds the sum of its own table's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, sparse=True, mode="sum")

    def forward(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        found: Tensor = super().forward(hidden) + self.bag(tokens)[:, None]
        return found


class BagStack(Stack):
    def mixed(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, tokens)
        return hidden


def sparse_bags() -> Made:
    return BagStack(Bagged), _tokens()


class Neighbours(Mixer):
    def forward(self, hidden: Tensor, graph: Tensor | None = None) -> Tensor:
        assert graph is not None
        return super().forward(torch.sparse.mm(graph, hidden))


class Graph(nn.Module):
    """Its blocks are given a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Neighbours() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, nodes: Tensor, graph: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            nodes = block(nodes, graph)
        return F.cross_entropy(self.head(nodes), labels)


def sparse_graph() -> Made:
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(96, (2, 300), generator=generator)
    graph = torch.sparse_coo_tensor(pairs, torch.ones(300) / 3, (96, 96)).coalesce()
    nodes = torch.randn(96, WIDTH, generator=generator)
    return Graph(), [{"nodes": nodes, "graph": graph, "labels": torch.arange(96) % 5}]


class InDict(Mixer):
    """Writes its result into the dict that it was given, beside what cannot be hashed."""

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        state["hidden"] = super().forward(state["hidden"])
        state["depth"][0] += 1
        return {**state, "seen": {1, 2}, "none": None}


class DictStack(Stack):
    def mixed(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        state: dict[str, Any] = {"hidden": hidden, "depth": [0]}
        for block in self.blocks:
            state = block(state)
        found: Tensor = state["hidden"]
        return found


def dicts() -> Made:
    return DictStack(InDict, count=5), _tokens()


@dataclass
class State:
    """What pytrees do not know."""

    hidden: Tensor
    notes: list[str]


class InState(Mixer):
    def forward(self, state: State, *, options: dict[str, Any]) -> State:  # type: ignore[override]
        return State(super().forward(state.hidden), [*state.notes, *options["names"]])


class StateStack(Stack):
    def mixed(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        state = State(hidden, [])
        for block in self.blocks:
            state = block(state, options={"scale": [0.5], "names": {"a"}})
        return state.hidden


def objects() -> Made:
    return StateStack(InState, count=5), _tokens()


class Accumulating(Mixer):
    """Reads and writes a tensor of an object that it does not return."""

    def forward(self, hidden: Tensor, state: State | None = None) -> Tensor:
        assert state is not None
        state.hidden = state.hidden + hidden.mean(-1, keepdim=True)
        return super().forward(hidden) * state.hidden.tanh()


class AccumulatingStack(Stack):
    def mixed(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        state = State(hidden.mean(-1, keepdim=True), [])
        for block in self.blocks:
            hidden = block(hidden, state)
        return hidden


def contexts() -> Made:
    return AccumulatingStack(Accumulating), _tokens()


def one_storage() -> Made:
    """All parameters are views of one storage."""
    model = Stack(Mixer)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    places = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, place in zip(model.parameters(), places, strict=True):
        parameter.data = place.view(parameter.shape)
    return model, _tokens()


def shared_memory() -> Made:
    """The second block's norm is a part of the first block's bias."""
    model = Stack(Mixer)
    first, second = model.blocks[0], model.blocks[1]
    assert isinstance(first, Mixer) and isinstance(second, Mixer)
    second.norm.bias.data = first.down.bias.data
    return model, _tokens()


class Scaled(Mixer):
    """A parameter without dimensions, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(0, 3))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.scale + self.empty.sum()


def small_parameters() -> Made:
    return Stack(Scaled), _tokens()


def several_dtypes() -> Made:
    """Bfloat16 products with float32 norms; built by `measure_model` alone as they are."""
    model = Stack(Mixer)
    for block in model.blocks:
        assert isinstance(block, Mixer)
        block.up.bfloat16(), block.down.bfloat16()
        block.up.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
        block.down.register_forward_hook(lambda _, __, output: output.float())
    return model, _tokens()


LAYERS, LAYER_BYTES = 40, 2**24


class Large(nn.Module):
    """640 MiB of parameters, which no batch needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(LAYERS))
        self.to(torch.float32)

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.layers:
            features = layer(features)
        return features.square().mean()


def large() -> Made:
    return Large().to("cpu"), [torch.ones(2, 3, 2048)]
