"""Packed base weights: which layers, their bits, what is refused, and how a record says it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.building import TORCH_DTYPES
from protrain_plan.models.quantizing import KINDS, read_quantize
from protrain_plan.models.sources import load_source
from protrain_runtime.checkpoint.saving import model_values
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.profile import DType, Precision, Quantize
from protrain_runtime.devices.memory_meter import MemoryMeter
from protrain_runtime.diagnostics.matching import model_fingerprint
from protrain_runtime.states.quantized import packed_layers, scales_of
from tests.support.estimates import batches_of, model_of
from tests.support.messages import Speaker
from tests.support.quantized_models import OPTIONS

bitsandbytes: Any = pytest.importorskip("bitsandbytes")


def of_the_base(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of a model of packed layers, by the names that they have without adapters."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "lora_" not in name:
            found[name.removeprefix("base_model.model.").replace(".base_layer", "")] = tensor
    for name, layer in packed_layers(model):
        short = name.removeprefix("base_model.model.").replace(".base_layer", "")
        found |= {f"{short}.{key}": tensor for key, tensor in scales_of(layer).items()}
    return found


@pytest.mark.parametrize(
    ("name", "kind"), [("tiny-llama", "nf4"), ("tiny-gpt2", "nf4"), ("tiny-gpt2", "int8")]
)
def test_layers_and_bits_are_those_that_transformers_packs(
    name: str, kind: Quantize, tmp_path: Path
) -> None:
    """The oracle is from_pretrained with a BitsAndBytesConfig, given the same weights."""
    transformers: Any = pytest.importorskip("transformers")
    source = load_source(name)
    plain: Any = model_of(source, dtype="bfloat16")
    plain.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        quantization_config=transformers.BitsAndBytesConfig(**OPTIONS[kind]),
    )
    ours = model_of(source, dtype="bfloat16", adapter="lora r=4", quantize=kind)
    without = dict(model_of(source, dtype="bfloat16", adapter="lora r=4").named_parameters())
    for key, parameter in ours.named_parameters():
        assert "lora_" not in key or torch.equal(parameter, without[key])
    own, expected = of_the_base(ours), of_the_base(theirs)
    assert own.keys() == expected.keys()
    packed = torch.uint8 if kind == "nf4" else torch.int8
    assert sum(tensor.dtype == packed for tensor in own.values()) >= 16
    for key, tensor in own.items():
        assert tensor.dtype == expected[key].dtype, key
        assert torch.equal(tensor, expected[key]), key
    own_class = "Params4bit" if kind == "nf4" else "Int8Params"
    assert {type(p).__name__ for p in ours.parameters()} == {"Parameter", own_class}


@pytest.mark.parametrize(
    ("dtype", "precision", "rest"),
    [("bfloat16", "pure", "bfloat16"), ("bfloat16", "autocast", "float32")],
)
def test_what_is_not_packed_has_the_dtype_of_the_precision(
    dtype: DType, precision: Precision, rest: DType
) -> None:
    model = model_of(
        load_source("tiny-llama"),
        dtype=dtype,
        precision=precision,
        adapter="lora r=4",
        quantize="nf4",
    )
    unpacked = {p.dtype for p in model.parameters() if p.dtype != torch.uint8}
    assert unpacked == {TORCH_DTYPES[rest]}
    layers = dict(packed_layers(model))
    assert len(layers) == 7 * 4
    assert {layer.compute_dtype for layer in layers.values()} == {torch.bfloat16}
    assert {layer.weight.quant_state.dtype for layer in layers.values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_same_seed_packs_the_same_and_on_meta_the_same_shapes(kind: Quantize) -> None:
    source = load_source("tiny-llama")
    made = [
        of_the_base(model_of(source, adapter="lora r=4", quantize=kind, seed=3)) for _ in range(2)
    ]
    assert all(torch.equal(tensor, made[1][key]) for key, tensor in made[0].items())
    absent = of_the_base(model_of(source, adapter="lora r=4", quantize=kind, device="meta"))
    for key, tensor in made[0].items():
        assert (tensor.shape, tensor.dtype) == (absent[key].shape, absent[key].dtype)


def test_wrong_kinds_and_missing_adapters_are_one_clear_error(assert_says: Speaker) -> None:
    for text, adapter in (("nf4", ""), ("int8", ""), ("fp8", "lora r=4")):
        error = assert_says.refused(read_quantize, text, adapter=adapter)
        assert error.key == "--quantize"
    with pytest.raises(ProtrainError) as raised:
        model_of(load_source("tiny-llama"), quantize="nf4")
    assert_says(raised.value)
    assert read_quantize(None, adapter="") == ""
    for kind in KINDS:
        assert read_quantize(kind, adapter="lora r=4") == kind


def test_a_missing_bitsandbytes_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, assert_says: Speaker
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ProtrainError) as raised:
        model_of(load_source("tiny-llama"), adapter="lora r=4", quantize="nf4")
    assert_says(raised.value)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_checkpoint_has_the_names_of_the_librarys_own_state_dict(kind: Quantize) -> None:
    model = model_of(load_source("tiny-llama"), adapter="lora r=4", quantize=kind)
    values = dict(model_values(model, None))
    state = model.state_dict()
    assert values.keys() == state.keys()
    for name, tensor in state.items():
        parts: list[torch.Tensor] = []
        values[name].copy_to(lambda piece: parts.append(piece.clone()))  # noqa: B023
        saved = torch.cat([part.flatten() for part in parts])
        if "quant_state" in name:
            assert bytes(saved.tolist()).rstrip() == bytes(tensor.tolist())
        else:
            assert torch.equal(saved, tensor.contiguous().view(-1).view(torch.uint8)), name


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_model_is_packed_as_it_is_drawn(kind: Quantize) -> None:
    """So that all weights never stand together: what a build takes beside the packed model."""
    config = {"model_type": "llama", "num_hidden_layers": 12, "hidden_size": 256,
              "intermediate_size": 1024, "num_attention_heads": 4, "vocab_size": 300}  # fmt: skip
    source = load_source("packed", model_config=json.dumps(config))

    def building(quantize: Quantize) -> tuple[nn.Module, int]:
        with MemoryMeter() as meter:
            meter.mark("build")
            model = model_of(source, dtype="bfloat16", adapter="lora r=4", quantize=quantize)
        (segment,) = meter.segments
        return model, segment.peak_bytes - segment.start_bytes

    building(kind)  # what the libraries make once
    model, peak = building(kind)
    _, plainly = building("")
    own = sum(t.numel() * t.itemsize for t in of_the_base(model).values())
    largest = 256 * 1024
    assert peak - own < 32 * largest  # of the one layer that is quantised
    assert peak < plainly / 1.5


@pytest.mark.parametrize(("kind", "precision"), [("nf4", "autocast"), ("int8", "pure")])
def test_a_factorys_plain_model_is_packed_and_gets_adapters(
    kind: Quantize, precision: Precision
) -> None:
    """Biases of packed layers are in the dtype that is computed in, as the first forward does."""
    source = load_source("tests.support.quantized_models:plain_factory")
    model = model_of(
        source, dtype="bfloat16", precision=precision, adapter="lora r=4", quantize=kind
    )
    layers = dict(packed_layers(model))
    assert len(layers) == 7 * 3
    assert all(
        layer.bias.dtype == torch.bfloat16 for layer in layers.values() if layer.bias is not None
    )
    batch = next(
        batches_of(source, batch_size=4, seq_len=64, dtype="bfloat16", precision=precision)
    )
    before = model_fingerprint(model)
    loss_of(call_model(model, batch)).backward()
    assert model_fingerprint(model) == before
    on_meta = model_of(
        source,
        dtype="bfloat16",
        precision=precision,
        adapter="lora r=4",
        quantize=kind,
        device="meta",
    )
    assert model_fingerprint(on_meta) == before
