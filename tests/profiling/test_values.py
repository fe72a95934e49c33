"""Fake tensors: values that stay known, and calls that are remembered. PyTorch is the oracle."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.zoo import ZOO
from protrain_plan.hardware.operators import allocator_of
from protrain_plan.hardware.probe import processor_name
from protrain_plan.profiling.memory.fake_meter import NUMBER_BYTES, FakeMeter
from protrain_plan.profiling.structure.discovery import undisturbed
from protrain_plan.profiling.structure.faking import fake_batch, fake_model, faking, without_values
from protrain_plan.profiling.structure.repeated_calls import RepeatedCalls
from protrain_runtime.activations.trees import tensors_in
from protrain_runtime.contract.errors import ProtrainError
from tests.support.estimates import device, weighed
from tests.support.hostile_models import WORKLOAD
from tests.support.messages import Speaker

TOKENS = torch.tensor([[5, 7, 5, 9], [7, 7, 1, 5]])


def hidden(tokens: Tensor) -> Tensor:
    return torch.zeros(16, 3).normal_()[tokens]  # [batch, sequence, width]


def test_values_of_a_batch_and_what_is_made_of_it_are_known() -> None:
    with faking() as mode:
        tokens = fake_batch(mode, TOKENS)
        assert isinstance(tokens, Tensor)
        mask = (tokens == 5) | (tokens > torch.arange(4) + 6)
        assert int(mask.sum()) == 4
        assert [x.item() for x in torch.linspace(0, 1, 3)] == [0, 0.5, 1]
        assert [int(token) for token in tokens[mask]] == [5, 5, 7, 5]


def test_a_selection_of_unknown_values_has_the_shape_that_the_mask_gives_it() -> None:
    with faking() as mode:
        tokens = fake_batch(mode, TOKENS)
        assert isinstance(tokens, Tensor)
        mask, values = tokens == 5, hidden(tokens)
        whole = mask[..., None].expand_as(values)
        shapes = [values[mask].shape, values[whole].shape, values.masked_select(whole).shape]
    assert shapes == [(3, 3), (9,), (9,)]


def test_what_was_written_over_is_known_no_longer() -> None:
    with faking() as mode:
        tokens = fake_batch(mode, TOKENS)
        assert isinstance(tokens, Tensor)
        kept = tokens.clone()
        last = kept[:, -1]  # of the same memory
        kept += 1
        assert last.sum().item() == 9 + 5 + 2
        kept += hidden(tokens)[..., 0].long()
        with pytest.raises(ProtrainError), without_values("model"):
            last.sum().item()


def test_activations_have_no_values(assert_says: Speaker) -> None:
    with faking() as mode:
        tokens = fake_batch(mode, TOKENS)
        assert isinstance(tokens, Tensor)
        with pytest.raises(ProtrainError) as refused, without_values("my.model"):
            hidden(tokens).sum().item()
    assert_says(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "llava"])
def test_models_that_ask_for_values_are_estimated(name: str) -> None:
    """Bytes are those of real tensors; a partial form's peak may be one Python number above."""
    specimen = ZOO[name]
    model, batches = specimen.make()
    batch = next(batches)
    with undisturbed(model):
        real, _ = weighed(model, batch)
    allocator = allocator_of(device(name=processor_name()))
    with faking() as mode:
        model = fake_model(specimen.source, WORKLOAD)
        faked = fake_batch(mode, batch)
        with undisturbed(model):
            fake, _ = weighed(model, faked, lambda: FakeMeter(allocator))
    for one, other in zip(fake, real, strict=True):
        assert one.reached == other.reached
        assert [form.form for form in one.forms] == [form.form for form in other.forms]
        for guess, truth in zip(one.forms, other.forms, strict=True):
            assert guess.kept_bytes == truth.kept_bytes
            assert truth.forward_peak_bytes - guess.forward_peak_bytes in (0, NUMBER_BYTES)
            assert guess.backward_peak_bytes == truth.backward_peak_bytes
    assert [unit.name for unit in real if not unit.reached] == [
        unit.name for unit in real if name == "llava" and unit.name.endswith("encoder.layers.2")
    ]


# --- repeated calls on fake tensors: what is remembered is what PyTorch's own mode gives ----------

Called = Callable[[Tensor], Any]

CALLS: dict[str, Called] = {
    "a new tensor": lambda x: x * 2.0,
    "another number": lambda x: x + 1,
    "a view": lambda x: x.view(8, 2)[2:, ::2],
    "a transpose": lambda x: x.t(),
    "an unsafe view": lambda x: torch.ops.aten._unsafe_view(x, [2, 8]),
    "in place": lambda x: x.add_(1),
    "in an output": lambda x: torch.add(x.detach(), 1, out=torch.empty(4, 4)),
    "several": lambda x: torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5),
    "views in a list": lambda x: x.split(2),
    "a chosen dimension": lambda x: x.max(dim=0),
    "another dtype": lambda x: x.to(torch.bfloat16),
    "made of a number": lambda x: torch.full((3,), 1) + torch.full((3,), 1.0) + torch.ones(()),
    "conjugated": lambda x: torch.view_as_complex(x.view(4, 2, 2)).conj() * 1j,
    "by indices": lambda x: x[torch.zeros(2, dtype=torch.long)],
    "reshaped in place": lambda x: x.clone().t_().unsqueeze_(0),
    "resized": lambda x: x.detach().clone().resize_(2, 2),
    "a loss": lambda x: torch.nn.functional.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    "detached": lambda x: x.detach(),
    "a part of its memory": lambda x: x[1:].clone() + x[1:],
}


def _geometry(given: Tensor, result: Any) -> list[object]:
    """Everything that bytes depend on: shapes, places, and whose memory is whose."""
    tensors = tensors_in(result)
    memories = [tensor.untyped_storage()._cdata for tensor in (given, *tensors)]
    return [
        (
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device,
            tensor.untyped_storage().nbytes(),
            tensor.requires_grad,
            tensor.is_conj(),
            memories.index(tensor.untyped_storage()._cdata),
            tensor is given,
        )
        for tensor in tensors
    ]


@pytest.mark.nightly(by_day=12)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("differentiable", [False, True])
def test_a_repeated_call_gives_what_pytorch_gives(name: str, differentiable: bool) -> None:
    found: list[list[object]] = []
    for mode, times in ((FakeTensorMode(), 1), (RepeatedCalls(), 3)):
        with mode:
            for _ in range(times):
                leaf = torch.empty(4, 4, requires_grad=differentiable)
                given = leaf.clone()
                result = CALLS[name](given)
                found.append(_geometry(given, result))
                summed = [t for t in tensors_in(result) if t.requires_grad]
                if summed and not summed[0].is_complex():
                    summed[0].float().sum().backward()
                    assert leaf.grad is not None
                    found[-1] += _geometry(leaf, leaf.grad)
    plain, *repeated = found
    assert plain and repeated == 3 * [plain]


def test_memory_of_a_repeated_result_is_its_own() -> None:
    with RepeatedCalls():
        given = torch.empty(4)
        results = [given + 1.0 for _ in range(3)]
        memories = {t.untyped_storage()._cdata for t in (given, *results)}
    assert len(memories) == 4


def test_calls_that_differ_in_one_property_are_told_apart() -> None:
    with RepeatedCalls():
        whole = torch.empty(4, 4)
        shapes = [
            (whole + 1).dtype,
            (whole + 1.0).dtype,
            (torch.empty(4, 4, dtype=torch.int64) + 1).dtype,
            (torch.empty(4, 4, dtype=torch.int64) + 1.0).dtype,
            (whole.t() + 1).stride(),
            (whole.sum(0, True)).shape,
            (whole.sum(0, False)).shape,
        ]
    assert shapes == [
        *(torch.float32, torch.float32, torch.int64, torch.float32),
        *((1, 4), (1, 4), (4,)),
    ]
