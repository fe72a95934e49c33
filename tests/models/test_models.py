"""Models as they are asked for: sources, what they build and feed, precision, optimizers."""

import itertools
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.zoo import ZOO
from protrain_plan.commands.measuring import ProfileRequest
from protrain_plan.commands.option_records import WorkloadOptions
from protrain_plan.models.batches import call_model, loss_of, with_batch_sizes
from protrain_plan.models.building import parameter_dtype, stepped_dtype
from protrain_plan.models.optimizers import OPTIMIZERS, optimizer_factory
from protrain_plan.models.presets import Preset, preset_config, preset_names, preset_of, presets
from protrain_plan.models.sources import ModelSource, load_source
from protrain_plan.profiling.memory.unit_bytes import analyze_units, measure_bytes
from protrain_plan.profiling.structure.discovery import discover
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.profile import DType, Precision
from protrain_runtime.devices.memory_meter import MemoryMeter
from protrain_runtime.diagnostics.matching import model_fingerprint
from protrain_runtime.states.update_rules import UpdateRules
from tests.support.estimates import batches_of, estimate, machine, model_of, small_source
from tests.support.hostile_models import WORKLOAD, mixed_factory
from tests.support.messages import Speaker
from tests.support.runtime_cases import profiled_here

PUBLISHED: dict[str, float] = json.loads(
    Path(__file__).with_name("published_sizes.json").read_text()
)
"""Millions of parameters, as model cards and papers say, which round."""

OURS = {"tiny-gpt2", "tiny-llama"}


def asked(name: str) -> ProfileRequest:
    (request,) = WorkloadOptions().requests(name, [64], [1])
    return request


@pytest.mark.nightly(by_day=8)
@pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
def test_presets_have_the_published_number_of_parameters(preset: Preset) -> None:
    model = model_of(load_source(preset.name), dtype="bfloat16", device="meta")
    assert sum(p.numel() for p in model.parameters()) == preset.num_parameters
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    if preset.name not in OURS:
        assert preset.num_parameters / 1e6 == pytest.approx(PUBLISHED[preset.name], rel=0.02)


def test_every_preset_says_where_it_comes_from() -> None:
    assert {*PUBLISHED, *OURS} == set(preset_names())
    assert all(preset.source for preset in presets())
    sizes = {preset.name: (preset.num_layers, preset.hidden_size) for preset in presets()}
    assert (sizes["llama-3.1-8b"], sizes["clip-vit-base"]) == ((32, 4096), (12, 512))


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("LLAMA-3.1-8B", "llama-3.1-8b"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("NousResearch/Meta-Llama-3-8B", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("qwen/qwen2.5-math-1.5b", "qwen2.5-1.5b"),
        ("Qwen3-4B-Base", "qwen3-4b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("google/gemma-3-12b-it", "gemma-3-12b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("THUDM/GLM-4-9B-0414", "glm-4-9b"),
        ("openai-community/gpt2", "gpt2"),
        ("somebody/Llama-3.1-8B", None),
        ("meta-llama/Llama-3.1", None),
        ("meta-llama/Llama-3.1-8B-Rewritten", None),
        ("unsloth/phi-4", None),
    ],
)
def test_a_preset_has_the_names_that_were_published_of_its_sizes(
    name: str, preset: str | None, assert_says: Speaker
) -> None:
    assert preset_of(name) == preset
    if preset is not None:
        assert load_source(name).name == preset
        assert asked(name).workload.model == preset
    else:
        assert_says.refused(load_source, name)


def test_a_folder_is_taken_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "openai-community/gpt2"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(preset_config("tiny-llama")))
    monkeypatch.chdir(tmp_path)
    source = load_source("openai-community/gpt2")
    assert '"model_type": "llama"' in source.model_config.replace('":"', '": "')
    assert asked("openai-community/gpt2").workload.model == "openai-community/gpt2"


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_building_is_deterministic_and_leaves_the_random_states(name: str) -> None:
    torch.manual_seed(3)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    first, again, other = (model_of(load_source(name), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state

    weights = first.state_dict()
    assert all(torch.equal(w, weights[k]) for k, w in again.state_dict().items())
    assert any(not torch.equal(w, weights[k]) for k, w in other.state_dict().items())
    assert first.training
    assert isinstance(first, PreTrainedModel)
    assert first.config.use_cache is False
    assert first.config._attn_implementation == "sdpa"


def test_a_record_builds_the_same_model_without_the_file(tmp_path: Path) -> None:
    config = preset_config("tiny-llama") | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    from_folder = load_source(str(tmp_path))
    from_file = load_source(str(tmp_path / "config.json"))
    from_record = load_source("gone/config.json", model_config=from_file.model_config)
    assert from_folder.model_config == from_file.model_config == from_record.model_config
    assert "_source" not in from_file.model_config
    weights = model_of(from_file).state_dict()
    assert all(torch.equal(w, weights[k]) for k, w in model_of(from_record).state_dict().items())


def test_batches_are_consecutive_bytes_of_the_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(24)))
    batches = batches_of(load_source("tiny-llama"), batch_size=2, seq_len=4, text=text, seed=0)
    seen = []
    for batch in itertools.islice(batches, 4):
        assert isinstance(batch, dict)
        assert torch.equal(batch["input_ids"], batch["labels"])
        assert batch["input_ids"].shape == (2, 4)
        assert batch["input_ids"].dtype == torch.int64
        seen.append(batch["input_ids"].flatten().tolist())
    assert sorted(seen[:3]) == [list(range(at, at + 8)) for at in (0, 8, 16)]
    assert seen[3] == seen[0]


def test_the_default_text_is_long_and_the_seed_chooses_where_to_start() -> None:
    source = load_source("tiny-llama")
    zero, again, one = (
        next(iter(batches_of(source, batch_size=4, seq_len=64, seed=seed))) for seed in (0, 0, 1)
    )
    assert isinstance(zero, dict)
    assert isinstance(again, dict)
    assert isinstance(one, dict)
    assert torch.equal(zero["input_ids"], again["input_ids"])
    assert not torch.equal(zero["input_ids"], one["input_ids"])
    assert len(zero["input_ids"].unique()) > 10


@pytest.mark.parametrize(
    "source", [load_source("tiny-gpt2"), small_source("t5")], ids=["tiny-gpt2", "t5"]
)
def test_a_forward_gives_a_loss_that_can_be_differentiated(source: ModelSource) -> None:
    model = model_of(source)
    loss = loss_of(call_model(model, next(batches_of(source, batch_size=2, seq_len=16))))
    loss.backward()
    assert loss.shape == ()
    assert all(p.grad is not None for p in model.parameters())


def test_loss_of_takes_what_forwards_return(assert_says: Speaker) -> None:
    scalar = torch.tensor(2.0)
    for output in (scalar, (scalar, torch.ones(3)), [scalar], {"loss": scalar}):
        assert loss_of(output) is not None
        assert loss_of(output).item() == 2.0
    assert loss_of(torch.ones(1)).shape == ()
    assert_says.refused(loss_of, torch.ones(2, 3))


FACTORY = """
import torch
from torch import nn
from transformers import PreTrainedModel

def make():
    return nn.Linear(3, 1), [(torch.ones(2, 3),), (torch.zeros(2, 3),)]

def wrong():
    return nn.Linear(3, 1)
"""


@pytest.fixture
def factory_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_factory.py").write_text(FACTORY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_factory", raising=False)
    return tmp_path


@pytest.mark.usefixtures("factory_folder")
def test_a_factory_in_the_working_directory_brings_model_and_batches() -> None:
    source = load_source("my_factory:make")
    model = model_of(source, dtype="bfloat16", seed=4)
    assert isinstance(model, nn.Linear)
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight, model_of(source, dtype="bfloat16", seed=4).weight)  # type: ignore[arg-type]
    sums = []
    for batch in itertools.islice(batches_of(source, batch_size=2, seq_len=1), 3):
        assert isinstance(batch, tuple)
        sums.append(batch[0].sum().item())
    assert sums == [6, 0, 6]


def test_a_factory_in_a_file_finds_its_neighbours(factory_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "scripts/json.py"  # a name that a module has already
    script.parent.mkdir()
    (script.parent / "near_the_script.py").write_text("WIDTH = 3\n")
    script.write_text(
        "import torch\nfrom near_the_script import WIDTH\n"
        "def make():\n    return torch.nn.Linear(WIDTH, 1), [torch.ones(2, WIDTH)]\n"
    )
    source = load_source(f"{script}:make")
    model = model_of(source)
    assert isinstance(model, nn.Linear)
    assert model.in_features == 3
    assert next(batches_of(source)).shape == (2, 3)  # type: ignore[union-attr]


@pytest.mark.usefixtures("factory_folder")
@pytest.mark.parametrize(
    "model",
    [
        "my_factory:mak",
        "my_factory:wrong",
        "no_such_one:make",
        "no/such.py:make",
        "smollm-135m",
        "!",
    ],
)
def test_a_wrong_model_argument_is_one_clear_error(model: str, assert_says: Speaker) -> None:
    assert_says.refused(lambda: model_of(load_source(model)))


def test_a_bad_config_is_one_clear_error(tmp_path: Path, assert_says: Speaker) -> None:
    path = tmp_path / "config.json"
    for text in ("{", "[]", "{}", '{"model_type": "lama"}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ProtrainError) as caught:
            model_of(load_source(str(path)))
        assert_says(str(caught.value).replace(transformers.__version__, "VERSION"))
    path.write_text('{"model_type": "llama", "hidden_size": "x"}', encoding="utf-8")
    with pytest.raises(ProtrainError, match=r"transformers refuses the configuration: .*hidden_si"):
        model_of(load_source(str(path)))


def test_batches_that_cannot_be_are_refused(assert_says: Speaker) -> None:
    small = preset_config("tiny-llama") | {"vocab_size": 100}
    speech = {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}
    for source, seq_len in (
        (load_source("small", model_config=json.dumps(small)), 8),
        (load_source("tiny-gpt2"), 257),
        (load_source("sound", model_config=json.dumps(speech)), 8),
        (ZOO["clip"].source, 8),
        (ZOO["whisper"].source, 65),
    ):
        assert_says.refused(batches_of, source, seq_len=seq_len)


def first_batch(name: str, *, dtype: DType = "float32", seed: int = 0) -> dict[str, Any]:
    batch = next(batches_of(ZOO[name].source, batch_size=2, seq_len=24, dtype=dtype, seed=seed))
    assert isinstance(batch, dict)
    return batch


@pytest.mark.parametrize(("name", "length"), [("vit", 1), ("clip", 24), ("llama", 24)])
def test_batches_of_images_alone_have_no_sequence(name: str, length: int) -> None:
    workload = replace(WORKLOAD, model=name, model_config="{}", batch_size=2, seq_len=24)
    sized = with_batch_sizes(workload, nn.Identity(), first_batch(name))
    assert sized == replace(workload, seq_len=length)


@pytest.mark.nightly(but=("bert-shapes0", "clip-shapes3"))
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("bert", {"input_ids": [2, 24], "labels": [2, 24]}),
        ("vit", {"pixel_values": [2, 3, 32, 32], "labels": [2]}),
        ("whisper", {"input_features": [2, 20, 80], "labels": [2, 24]}),
        ("clip", {"input_ids": [2, 24], "pixel_values": [2, 3, 32, 32], "return_loss": True}),
        (
            "llava",  # 16 patches of an image before the text
            {"input_ids": [2, 40], "pixel_values": [2, 3, 32, 32], "labels": [2, 40]},
        ),
    ],
)
def test_architectures_get_what_they_take(name: str, shapes: dict[str, Any]) -> None:
    batch = first_batch(name, dtype="bfloat16")
    found = {k: list(v.shape) if isinstance(v, Tensor) else v for k, v in batch.items()}
    assert found == shapes
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor)}
    features = {k for k in tensors if k.startswith(("pixel", "input_features"))}
    assert all(
        v.dtype == (torch.bfloat16 if k in features else torch.int64) for k, v in tensors.items()
    )
    again, other = first_batch(name, dtype="bfloat16"), first_batch(name, dtype="bfloat16", seed=1)
    assert all(torch.equal(value, again[key]) for key, value in tensors.items())
    assert any(not torch.equal(value, other[key]) for key, value in tensors.items())


def test_masked_tokens_are_the_ones_to_find() -> None:
    batch, text = first_batch("bert"), first_batch("llama")["input_ids"]
    masked = batch["input_ids"] == 319
    assert masked[:, 0].all()
    assert not masked.all()
    assert torch.equal(batch["input_ids"][~masked], text[~masked])
    assert torch.equal(batch["labels"][masked], text[masked])
    assert (batch["labels"][~masked] == -100).all()


def test_image_tokens_stand_before_the_text_and_are_no_targets() -> None:
    batch, text = first_batch("llava"), first_batch("llama")["input_ids"]
    assert (batch["input_ids"][:, :16] == 300).all()
    assert (batch["labels"][:, :16] == -100).all()
    assert torch.equal(batch["input_ids"][:, 16:], text)
    assert torch.equal(batch["labels"][:, 16:], text)


def test_building_leaves_the_configuration_as_it_was() -> None:
    source = load_source("llama-3.2-1b")  # transformers adds keys to its rope_scaling
    before = source.model_config
    model_of(source, device="meta")
    assert source.model_config == before


# --- precision ------------------------------------------------------------------------------------


def test_autocast_belongs_to_the_model_and_computes_what_plain_autocast_does() -> None:
    specimen = ZOO["llama-autocast"]
    model, batches = specimen.make()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    plain = model_of(specimen.source)
    batch = next(batches)
    loss = loss_of(call_model(model, batch))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # with its cache, as loops usually have it
        expected = loss_of(call_model(plain, batch))
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    for (name, found), (_, wanted) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert found.grad is not None, name
        assert wanted.grad is not None, name
        assert torch.equal(found.grad, wanted.grad), name
    assert not torch.equal(loss, loss_of(call_model(model_of(specimen.source), batch)))


def test_dtypes_of_every_precision(assert_says: Speaker) -> None:
    cases: list[tuple[DType, Precision, torch.dtype, DType]] = [
        ("float32", "pure", torch.float32, "float32"),
        ("bfloat16", "pure", torch.bfloat16, "bfloat16"),
        ("bfloat16", "autocast", torch.float32, "float32"),
        ("float16", "master", torch.float16, "float32"),
    ]
    for dtype, precision, stored, stepped in cases:
        assert parameter_dtype(dtype, precision) == stored
        assert stepped_dtype(dtype, precision) == stepped
    assert_says.refused(parameter_dtype, "float32", "autocast")


@pytest.mark.nightly
@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_a_model_of_several_dtypes_keeps_them(asked: DType, tmp_path: Path) -> None:
    """Measured and estimated, the profile is of the model that a script builds by itself."""
    source, (own, _) = load_source("tests.support.hostile_models:mixed_factory"), mixed_factory()
    expected = model_fingerprint(own), "bfloat16"
    for profile in (
        profiled_here(source.name, tmp_path, dtype=asked),
        estimate(source, hardware=machine(), batch_size=4, seq_len=40, dtype=asked),
    ):
        assert (profile.model_fingerprint, profile.workload.dtype) == expected


@pytest.mark.nightly
def test_master_weights_are_counted() -> None:
    model = model_of(load_source("tiny-llama"), dtype="bfloat16", precision="master")
    batch = next(batches_of(load_source("tiny-llama"), batch_size=1, seq_len=16))
    anatomy = analyze_units(model, batch, discover(model, batch), precision="master")
    units = measure_bytes(model, batch, anatomy, lambda: MemoryMeter("cpu"))[0]
    assert sum(unit.state_bytes for unit in units) == 12 * 375_648
    assert sum(unit.parameter_bytes for unit in units) == 2 * 375_648


# --- optimizers -----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_states_of_the_optimizers() -> None:
    found = {
        name: (rule.element_bytes, rule.scalar_bytes())
        for name, factory in OPTIMIZERS.items()
        if (rule := UpdateRules(factory).of(torch.float32)).block == 1
    }
    assert found == {  # bytes per element, and per parameter besides
        "adamw": (8, 4),
        "adam": (8, 4),
        "adamw-amsgrad": (12, 4),
        "adamax": (8, 4),
        "nadam": (8, 8),
        "radam": (8, 4),
        "adadelta": (8, 4),
        "rmsprop": (4, 4),
        "sgd": (0, 0),
        "sgd-momentum": (4, 0),
    }


def test_an_unknown_optimizer_is_one_clear_error(assert_says: Speaker) -> None:
    assert_says.refused(optimizer_factory, "sdg")


@pytest.mark.parametrize("shape", [(8,), (2, 3, 4), ()])
def test_muon_says_that_it_takes_matrices_alone(
    shape: tuple[int, ...], assert_says: Speaker
) -> None:
    matrix = nn.Parameter(torch.ones(4, 4))
    other = nn.Parameter(torch.ones(shape))
    assert_says.refused(optimizer_factory("muon"), [matrix, other])
    assert_says.refused(optimizer_factory("muon"), [{"params": [other]}])
    optimizer_factory("muon")([matrix])
