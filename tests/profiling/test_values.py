"""Values that stay known while tensors are fake. The oracle is the same code on real tensors."""

import pytest
import torch
from torch import Tensor

from benchmarks.zoo import ZOO
from protrain_plan.hardware.operators import allocator_of
from protrain_plan.hardware.probe import processor_name
from protrain_plan.profiling.memory.fake_meter import NUMBER_BYTES, FakeMeter
from protrain_plan.profiling.structure.discovery import undisturbed
from protrain_plan.profiling.structure.faking import fake_batch, fake_model, faking, without_values
from protrain_runtime.contract.errors import ProtrainError
from tests.support.estimates import device, weighed
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
        model = fake_model(specimen.source, dtype="float32", precision="pure", adapter="", seed=0)
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
