"""Stand-ins for equal blocks: the units' bytes are those of the whole model."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.hardware.operators import allocator_of
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.profiling.memory.block_classes import equal_blocks, filled, stubs_in_place
from protrain_plan.profiling.memory.fake_meter import FakeMeter
from protrain_plan.profiling.memory.passes import MeterFactory
from protrain_plan.profiling.structure.discovery import discover
from protrain_plan.profiling.structure.faking import fake_batch, faking
from protrain_runtime.contract.records.profile import Form, Unit
from protrain_runtime.devices.memory_meter import MemoryMeter
from tests.support.estimates import batches_of, device, model_of, small_source, weighed
from tests.support.hostile_models import Chain
from tests.support.thinning import thinned

# Per unit, the one that runs for it. A part has its own; so has the first layer of a T5 stack,
# which makes the position bias of all.
REPRESENTATIVES = {
    "llama": (0, 1, 2, 2, 2, 2, 6, 7),
    "gpt2": (0, 1, 2, 2, 2, 5, 6),
    "gemma2": (0, 1, 2, 3, 4, 3, 4, 7, 8, 9),  # sliding and full attention in turn
    "t5": (0, 1, 2, 3, 3, 5, 6, 7, 8, 9, 9, 11, 12),
}
FORMS: tuple[Form, ...] = ("keep", "full")


def measured(
    model: nn.Module, batch: Batch, meter: MeterFactory = MemoryMeter
) -> tuple[list[Unit], list[Unit], tuple[int, ...]]:
    """Units of the whole model, those of stand-ins, and which of them ran."""
    found = discover(model, batch)
    classes = equal_blocks(model, found, batch)
    whole, _ = weighed(model, batch, meter, forms=FORMS)
    with stubs_in_place(found, classes):
        some, _ = weighed(model, batch, meter, forms=FORMS)
    return whole, filled(some, classes), classes.representatives


@pytest.mark.nightly("llama")
@pytest.mark.parametrize("name", thinned(tuple(REPRESENTATIVES), every=4))
def test_units_are_equal_to_the_byte_with_fake_tensors(name: str) -> None:
    source = small_source(name)
    real = next(iter(batches_of(source, batch_size=2, seq_len=32)))
    with faking() as mode:
        model, batch = model_of(source), fake_batch(mode, real)
        whole, some, ran = measured(model, batch, lambda: FakeMeter(allocator_of(device())))
    assert ran == REPRESENTATIVES[name]
    assert some == whole


@pytest.mark.nightly
def test_units_are_equal_to_the_byte_with_real_tensors() -> None:
    source = small_source("llama")
    batch = next(iter(batches_of(source, batch_size=2, seq_len=32)))
    whole, some, _ = measured(model_of(source), batch)
    assert some == whole


OUTSIDE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "residual": lambda x, y, first: x + y,
    "gate": lambda x, y, first: x * torch.sigmoid(y),
    "skip": lambda x, y, first: x + y * first,
    "norm": lambda x, y, first: nn.functional.layer_norm(x + y, (8,)),
    "concatenation": lambda x, y, first: torch.cat([x, y], -1).unflatten(-1, (2, 8)).mean(-2),
}
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "saves its input": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()),
    "saves a norm": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)),
    "saves its output": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
    "saves no input": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8, bias=False)),
}


class Loop(nn.Module):
    """Equal blocks in a loop that combines what each gets and gives itself."""

    def __init__(self, block: str, outside: str, count: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(BLOCKS[block]() for _ in range(count))
        self.outside = OUTSIDE[outside]

    def forward(self, x: Tensor) -> Tensor:  # [rows, 8] -> []
        x = first = self.first(x)
        for block in self.blocks:
            x = self.outside(x, block(x), first)
        return x.square().sum()


@pytest.mark.nightly(by_day=16)
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("block", BLOCKS)
def test_units_in_a_loop_with_residuals_are_equal_to_the_byte(block: str, outside: str) -> None:
    torch.manual_seed(0)
    model, batch = Loop(block, outside), (torch.ones(512, 8),)
    whole, some, ran = measured(model, batch)
    assert some == whole
    assert len(set(ran)) < len(ran) or block == "saves its output"  # that one is no class


class LossBeside(Loop):
    """A loss of what the fourth block gives, larger than all that the blocks hold."""

    def forward(self, x: Tensor) -> Tensor:  # [rows, 8] -> []
        x = self.first(x)
        beside = torch.zeros(())
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if number == 3:
                beside = x.repeat(1, 64).exp().mean()
        return x.square().sum() + beside


def test_a_block_after_other_code_than_its_equals_runs() -> None:
    """The loss has its backward in the slot of the block after it, the fifth."""
    model, batch = LossBeside("saves a norm", "residual", 8), (torch.ones(512, 8),)
    whole, some, ran = measured(model, batch)
    assert some == whole
    assert ran[1:-1:2] == (1, 3, 3, 3, 9, 3, 3, 15)  # others are parts


def test_stand_ins_need_no_parameters_and_values_stay_finite() -> None:
    source = small_source("llama")
    batch = next(iter(batches_of(source, batch_size=2, seq_len=32)))
    model = model_of(source)
    found = discover(model, batch)
    block_classes = equal_blocks(model, found, batch)
    for unit in block_classes.outputs:
        module = found[unit].module
        assert module is not None
        module.to("meta")
    with stubs_in_place(found, block_classes):
        loss = loss_of(call_model(model, batch))
        loss.backward()
    assert loss.isfinite()
    with_gradients = {name for name, p in model.named_parameters() if p.grad is not None}
    elided_names = {name for unit in block_classes.outputs for name in found[unit].parameters}
    assert with_gradients == {name for name, _ in model.named_parameters()} - elided_names
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


@pytest.mark.parametrize(
    ("widths", "ran"),
    [
        ((8, 8, 8, 8, 8), (0, 1, 2, 2, 2, 5, 6)),
        ((8, 8, 8), (0, 1, 2, 3, 4)),  # the first two and the last one run
        ((8, 8, 9, 8, 8), (0, 1, 2, 3, 2, 5, 6)),
    ],
)
def test_blocks_of_one_class_have_the_same_shapes(
    widths: tuple[int, ...], ran: tuple[int, ...]
) -> None:
    """The mean of squares saves what it is given, as the next layers do."""
    model = Chain(*(Layer(width) for width in widths))
    batch = (torch.ones(3, 4, requires_grad=True),)
    assert equal_blocks(model, discover(model, batch), batch).representatives == ran


def test_a_block_whose_parameter_another_unit_reads_runs() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(8) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            weight = self.get_parameter("layers.3.inner.0.weight")
            return (x @ weight.t()).sum()

    model, batch = Tied(), (torch.ones(3, 4, requires_grad=True),)
    ran = equal_blocks(model, discover(model, batch), batch).representatives
    assert ran == (0, 1, 2, 2, 4, 2, 6, 7)
