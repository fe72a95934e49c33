"""Models larger than the device: the profile is that of the whole model, the memory is not."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import ModelSource, load_source
from protrain_plan.profiling.memory import passes
from protrain_plan.profiling.memory.block_classes import filled, stubs_in_place
from protrain_plan.profiling.memory.unit_bytes import analyze_units, measure_bytes
from protrain_plan.profiling.structure.discovery import undisturbed
from protrain_plan.profiling.unit_by_unit import build_sparsely, free_bytes, sketched
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import read_plan, read_profile
from protrain_runtime.contract.records.profile import Unit, Workload
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import MemoryMeter, device_of
from protrain_runtime.diagnostics.matching import model_fingerprint
from protrain_runtime.states.absent import without_parameters
from tests.support.commands import python
from tests.support.configs import CONFIGS, SMALL
from tests.support.estimates import batches_of, measure, model_of, weighed
from tests.support.faults import data_limit
from tests.support.hostile_models import WORKLOAD

CASES: dict[str, tuple[dict[str, object], dict[str, str]]] = {
    **{name: (CONFIGS[name], {}) for name in ("llama", "gpt2", "gemma2", "t5")},
    "tied": ({**CONFIGS["llama"], "tie_word_embeddings": True}, {}),
    "lora": (CONFIGS["llama"], {"adapter": "lora r=4"}),
    "packed": (CONFIGS["llama"], {"adapter": "lora r=4", "quantize": "nf4"}),
    "lora beside bfloat16": (
        CONFIGS["llama"],
        {
            "adapter": "lora r=4 dtype=float32 dropout=0.1 dora modules_to_save=lm_head freeze=A",
            "dtype": "bfloat16",
        },
    ),
    "autocast": (CONFIGS["llama"], {"dtype": "bfloat16", "precision": "autocast"}),
}
QUICK = ("tied", "packed")


def source_and_workload(name: str) -> tuple[ModelSource, Workload]:
    config, options = CASES[name]
    source = load_source(name, model_config=json.dumps({**SMALL, **config}))
    workload = replace(WORKLOAD, model=source.name, model_config=source.model_config)
    return source, replace(workload, batch_size=2, seq_len=32, **options)  # type: ignore[arg-type]


def whole(source: ModelSource, workload: Workload) -> tuple[list[Unit], int, str]:
    """Units, base bytes and fingerprint of the model as it is."""
    model, batch = source.build(workload), next(source.batches(workload))
    units, anatomy = weighed(model, batch, warm=True, precision=workload.precision)
    return units, anatomy.base_bytes, model_fingerprint(model)


@pytest.mark.nightly("tied", "packed")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_bytes_are_those_of_the_whole_model(name: str) -> None:
    if name == "packed":
        pytest.importorskip("bitsandbytes")
    source, workload = source_and_workload(name)
    sketch = sketched(source, workload, text=None)
    model, found, batches = build_sparsely(source, workload, sketch, text=None)
    batch = next(batches)
    with undisturbed(model), stubs_in_place(found, sketch.block_classes):
        passes.training_step(model, batch)
        model.zero_grad()
        anatomy = analyze_units(model, batch, found, precision=workload.precision)
        units = measure_bytes(model, batch, anatomy, MemoryMeter)[0]
    assert (
        filled(units, sketch.block_classes),
        anatomy.base_bytes,
        model_fingerprint(model),
    ) == whole(source, workload)


@pytest.mark.nightly
def test_only_what_runs_has_memory_and_the_seed_says_its_values() -> None:
    source, workload = source_and_workload("tied")
    sketch = sketched(source, workload, text=None)
    (one, found, _), (two, _, _) = (
        build_sparsely(source, workload, sketch, text=None) for _ in range(2)
    )
    absent = {name for unit in sketch.block_classes.outputs for name in found[unit].parameters}
    assert {name for name, p in one.named_parameters() if p.is_meta} == absent
    assert {name.split(".")[2] for name in absent} == {"2", "3", "4"}
    for (name, first), (_, second) in zip(
        one.named_parameters(), two.named_parameters(), strict=True
    ):
        assert name in absent or (torch.equal(first, second) and first.isfinite().all())
    assert one.get_parameter("lm_head.weight") is one.get_parameter("model.embed_tokens.weight")
    assert all(buffer.device.type == "cpu" for buffer in one.buffers())
    assert device_of(one) == torch.device("cpu")


def test_parameters_are_built_without_memory_and_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Parameter(torch.ones(3))
            self.first, self.second = shared, shared
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.register_buffer("table", torch.arange(3))
            self.register_parameter("nothing", None)

    with without_parameters():
        model = Tied()
    assert model.first is model.second and model.first.is_meta
    assert not model.frozen.requires_grad
    assert model.get_buffer("table").tolist() == [0, 1, 2]
    assert not Tied().first.is_meta


def test_a_sketch_counts_what_a_step_takes() -> None:
    source, workload = source_and_workload("llama")
    sketch = sketched(source, workload, text=None)
    model = model_of(source)
    batch = next(batches_of(source, batch_size=2, seq_len=32))
    with MemoryMeter() as meter:
        meter.mark("step")
        passes.training_step(model, batch)
    parameters = sum(p.nbytes for p in model.parameters())
    needed = parameters + meter.segments[0].peak_bytes
    # All gradients and all activations do not stand at once: an upper bound, below their sum twice.
    assert needed <= sketch.whole_bytes <= 2 * needed
    assert sketch.block_classes.outputs


@pytest.mark.nightly
def test_a_small_model_is_measured_unit_by_unit_where_that_is_asked_for(tmp_path: Path) -> None:
    """With a rehearsal of the units that run, beside those whose parameters are nowhere."""

    def sizes(*, unit_by_unit: bool) -> list[object]:
        profile = measure(
            source_and_workload("llama")[0],
            batch_size=1,
            seq_len=8,
            dtype="float32",
            device="cpu",
            num_steps=1,
            spill_directory=tmp_path,
            machine=load_hardware("cpu"),
            unit_by_unit=unit_by_unit,
        )
        return [
            (unit.parameter_bytes, [f.kept_bytes for f in unit.forms]) for unit in profile.units
        ]

    assert sizes(unit_by_unit=True) == sizes(unit_by_unit=False)


@pytest.mark.nightly
def test_a_unit_that_is_too_large_by_itself_is_refused() -> None:
    source, workload = source_and_workload("llama")
    huge = {**SMALL, **CONFIGS["llama"], "vocab_size": 2**31, "hidden_size": 2**11}
    source = load_source("huge", model_config=json.dumps(huge))
    sketch = sketched(source, workload, text=None)
    with pytest.raises(ProtrainError) as caught:
        build_sparsely(source, workload, sketch, text=None)
    # The head is in the part that begins with the last norm.
    message, _, fix = str(caught.value).partition("\n")
    assert message.startswith("huge: model.norm alone has 32.00 TiB of parameters")
    assert message.endswith("are free: it can be neither measured nor trained there")
    assert fix == "  fix: a device with more memory, a narrower --dtype, or adapters (--lora)"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA")
def test_free_memory_follows_a_limit_on_the_process() -> None:
    with data_limit(2**62):
        unlimited = free_bytes(devices.HOST)
    with data_limit(2**10):
        assert free_bytes(devices.HOST) == 0 < unlimited


# --- under a limit --------------------------------------------------------------------------------

EIGHTH = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512,
          "intermediate_size": 1792, "num_hidden_layers": 128, "num_attention_heads": 16,
          "num_key_value_heads": 4, "vocab_size": 16032, "rope_theta": 500000.0}  # fmt: skip
"""Llama 3.1 8B at an eighth of its widths, four times as deep: 1.7 GiB in float32."""
LIMITED = """
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
from protrain_plan.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA")
def test_a_model_whose_parameters_exceed_the_limit_is_profiled_within_it_and_planned(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EIGHTH))
    limit = 1300 * 2**20

    def limited(*arguments: str) -> None:
        python(LIMITED, limit, *arguments, folder=tmp_path, OMP_NUM_THREADS="1")

    limited("profile", "config.json", "--seq-len", "64", "--steps", "1", "-o", "profile.yaml")
    profile = read_profile(tmp_path / "profile.yaml")
    assert profile.method == "measured"
    assert sum(unit.parameter_bytes for unit in profile.units) > limit
    assert len(profile.units) == 130
    limited("plan", "profile.yaml", "--device-memory", "1100MiB", "--solver", "offload-all",
            "-o", "plan.yaml")  # fmt: skip
    assert len(read_plan(tmp_path / "plan.yaml").units) == 130
