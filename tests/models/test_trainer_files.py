"""Files of trainers, read as options: each key in one list, and one error for what cannot be said.

Keys and values are those of the projects' own examples (axolotl `examples/llama-3/qlora-1b.yml` and
`fft-8b-liger-fsdp.yaml`, LLaMA-Factory `examples/train_lora`, `train_full` and `train_qlora`,
torchtune `recipes/configs/llama3_1`), and of `TrainingArguments.to_json_string()`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from protrain_plan.models.presets import preset_of
from protrain_plan.models.trainer_files import (
    FORMATS,
    TrainerFile,
    is_trainer_file,
    read_trainer_file,
)
from tests.support.messages import Speaker

QLORA = {
    "base_model": "meta-llama/Llama-3.2-1B",
    "load_in_8bit": False,
    "load_in_4bit": True,
    "datasets": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}],
    "adapter": "qlora",
    "lora_model_dir": None,
    "sequence_len": 2048,
    "sample_packing": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_modules": ["gate_proj", "down_proj"],
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "optimizer": "adamw_bnb_8bit",
    "learning_rate": 0.0002,
    "bf16": "auto",
    "gradient_checkpointing": True,
    "attn_implementation": "flash_attention_2",
    "wandb_project": None,
    "special_tokens": {"pad_token": "<|end_of_text|>"},
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
}
FULL_FSDP = {
    "base_model": "NousResearch/Meta-Llama-3-8B",
    "sequence_len": 4096,
    "micro_batch_size": 2,
    "bf16": "auto",
    "optimizer": "adamw_torch_fused",
    "fsdp_config": {"offload_params": True, "reshard_after_forward": True},
    "dp_shard_size": 4,
    "dp_replicate_size": 2,
}
LORA = {
    "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507",
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "template": "qwen3_nothink",
    "cutoff_len": 2048,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "bf16": True,
    "preprocessing_num_workers": 16,
}
SINGLE_DEVICE: dict[str, Any] = {
    "model": {
        "_component_": "torchtune.models.llama3_1.lora_llama3_1_8b",
        "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "apply_lora_to_output": False,
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
    },
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 8192},
    "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "packed": False},
    "batch_size": 2,
    "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 3e-4},
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    "gradient_accumulation_steps": 8,
    "clip_grad_norm": None,
    "compile": False,
    "device": "cuda",
    "dtype": "bf16",
    "enable_activation_checkpointing": True,
    "profiler": {"enabled": False, "wait_steps": 5},
}
ARGUMENTS = {
    "model_name_or_path": "meta-llama/Llama-3.2-1B",
    "max_length": 1024,
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "num_train_epochs": 3.0,
    "optim": "adamw_torch_fused",
    "max_grad_norm": 1.0,
    "bf16": True,
    "fp16": False,
    "gradient_checkpointing": True,
    "fsdp": None,
    "deepspeed": None,
    "torch_compile": False,
}
QLORA_ARGUMENTS = ARGUMENTS | {
    "dtype": "bfloat16",
    "use_peft": True,
    "lora_target_modules": "all-linear",
    "load_in_4bit": True,
    "use_bnb_nested_quant": True,
    "optim": "paged_adamw_8bit",
    "max_grad_norm": 0.0,
}
PLAIN = {key: value for key, value in ARGUMENTS.items() if key != "max_length"} | {
    "max_seq_length": 1024
}


def written(folder: Path, content: object, name: str = "trainer.yaml") -> str:
    path = folder / name
    text = json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content)
    path.write_text(content if isinstance(content, str) else text, encoding="utf-8")
    return str(path)


def read(folder: Path, content: dict[str, Any], *given: str, **changed: Any) -> TrainerFile:
    return read_trainer_file(written(folder, content | changed), given=given)


@pytest.mark.parametrize(
    ("trainer", "content", "command"),
    [
        (
            "Axolotl",
            QLORA,
            "llama-3.2-1b --seq-len 2048 --batch-size 2 --accumulate 4 --dtype bfloat16"
            " --precision pure --lora r=32,alpha=16,targets=gate_proj+down_proj,dropout=0.05"
            " --quantize nf4 --optimizer adamw8bit --clip",
        ),
        (
            "Axolotl",
            FULL_FSDP,
            "llama-3.1-8b --seq-len 4096 --batch-size 2 --accumulate 1 --num-devices 8"
            " --dtype bfloat16 --precision master --optimizer adamw --clip",
        ),
        (
            "LLaMA-Factory",
            LORA,
            "qwen3-4b --seq-len 2048 --batch-size 1 --accumulate 8 --dtype bfloat16"
            " --precision pure --lora r=8 --optimizer adamw --clip",
        ),
        (
            "LLaMA-Factory",
            LORA | {"finetuning_type": "full"},
            "qwen3-4b --seq-len 2048 --batch-size 1 --accumulate 8 --dtype bfloat16"
            " --precision autocast --optimizer adamw --clip",
        ),
        (
            "LLaMA-Factory",
            LORA | {"finetuning_type": "full", "deepspeed": "ds_z3_config.json"},
            "qwen3-4b --seq-len 2048 --batch-size 1 --accumulate 8 --dtype bfloat16"
            " --precision master --optimizer adamw --clip",
        ),
        (
            "LLaMA-Factory",
            LORA | {"quantization_bit": 8, "pure_bf16": True, "lora_target": "q_proj,v_proj"},
            "qwen3-4b --seq-len 2048 --batch-size 1 --accumulate 8 --dtype bfloat16"
            " --precision pure --lora r=8,targets=q_proj+v_proj,dtype=base --quantize int8"
            " --optimizer adamw --clip",
        ),
        (
            "torchtune",
            SINGLE_DEVICE,
            "llama-3.1-8b --seq-len 8192 --batch-size 2 --accumulate 8 --dtype bfloat16"
            " --precision pure --lora"
            " r=8,targets=q_proj+v_proj+o_proj+gate_proj+up_proj+down_proj,dtype=base"
            " --optimizer adamw",
        ),
        (
            "TRL",
            ARGUMENTS,
            "llama-3.2-1b --seq-len 1024 --batch-size 4 --accumulate 8 --dtype bfloat16"
            " --precision autocast --optimizer adamw --clip",
        ),
        (
            "TRL",
            QLORA_ARGUMENTS,
            "llama-3.2-1b --seq-len 1024 --batch-size 4 --accumulate 8 --dtype bfloat16"
            " --precision pure --lora r=16,dtype=base,dropout=0.05 --quantize nf4"
            " --optimizer adamw8bit",
        ),
        (
            "the Trainer",
            PLAIN | {"dtype": "bfloat16"},
            "llama-3.2-1b --seq-len 1024 --batch-size 4 --accumulate 8 --dtype bfloat16"
            " --precision pure --optimizer adamw --clip",
        ),
        (
            "the Trainer",
            PLAIN | {"dtype": "bfloat16", "deepspeed": "zero2.json"},
            "llama-3.2-1b --seq-len 1024 --batch-size 4 --accumulate 8 --dtype bfloat16"
            " --precision master --optimizer adamw --clip",
        ),
        (
            "torchtune",
            SINGLE_DEVICE | {"model": SINGLE_DEVICE["model"] | {"quantize_base": True}},
            "llama-3.1-8b --seq-len 8192 --batch-size 2 --accumulate 8 --dtype bfloat16"
            " --precision pure --lora"
            " r=8,targets=q_proj+v_proj+o_proj+gate_proj+up_proj+down_proj,dtype=base"
            " --quantize nf4 --optimizer adamw",
        ),
    ],
)
def test_a_file_becomes_the_options_of_a_command(
    trainer: str, content: dict[str, Any], command: str, tmp_path: Path
) -> None:
    for name in ("trainer.yaml", "trainer.json"):
        path = written(tmp_path, content, name)
        assert is_trainer_file(path)
        file = read_trainer_file(path)
        assert (file.format.name, file.command) == (trainer, command)


def test_every_key_is_in_one_list(tmp_path: Path) -> None:
    file = read(tmp_path, QLORA, deepspeed="zero3.json", rl="dpo")
    assert list(file.not_understood) == ["plugins", "rl"]
    assert list(file.decided) == ["deepspeed", "gradient_checkpointing"]
    understood = [one.key for one in file.understood]
    told = [*understood, *file.decided, *file.ignored, *file.not_understood]
    assert sorted(told) == sorted([*QLORA, "deepspeed", "rl"])
    assert [(one.key, one.option) for one in file.by_default] == [("max_grad_norm", "--clip")]


def test_inner_keys_are_told_one_by_one_unless_the_whole_is(tmp_path: Path) -> None:
    file = read(tmp_path, SINGLE_DEVICE)
    assert list(file.decided) == ["enable_activation_checkpointing", "loss._component_"]
    assert not file.not_understood
    other = read(tmp_path, SINGLE_DEVICE, loss={"_component_": "a.Loss", "beta": 0.1})
    assert list(other.not_understood) == ["loss._component_", "loss.beta"]
    assert list(read(tmp_path, FULL_FSDP).decided) == ["fsdp_config"]


@pytest.mark.parametrize(
    ("content", "changed", "option", "value"),
    [
        (QLORA, {"fp16": True}, "dtype", "float16"),  # bf16: auto yields to it
        (QLORA, {"bf16": None}, "dtype", "float32"),
        (QLORA, {"bfloat16": False}, "dtype", "bfloat16"),
        (QLORA, {"bf16": False, "float16": True, "fp16": False}, "dtype", "float16"),
        (QLORA, {"micro_batch_size": "2"}, "batch_size", 2),
        (ARGUMENTS, {"fsdp": [], "fsdp_config": {"xla": False}}, "precision", "autocast"),
        (QLORA, {"max_grad_norm": "1e-1"}, "clip", True),
        (LORA, {"quantization_bit": 8, "quantization_method": "bitsandbytes"}, "quantize", "int8"),
    ],
)
def test_values_are_read_as_the_trainer_reads_them(
    content: dict[str, Any], changed: dict[str, Any], option: str, value: object, tmp_path: Path
) -> None:
    assert read(tmp_path, content, **changed).options[option] == value


def test_what_a_file_leaves_out_is_what_its_trainer_takes(tmp_path: Path) -> None:
    silent = {"base_model": "gpt2", "micro_batch_size": 1}
    file = read(tmp_path, silent)
    assert file.command == (
        "gpt2 --seq-len 512 --batch-size 1 --accumulate 1 --dtype bfloat16 --precision pure"
        " --optimizer adamw --clip"
    )
    half = read(tmp_path, silent, fp16=True)
    assert half.options["dtype"] == "float16"
    assert [one.key for one in file.by_default if one not in half.by_default] == ["bf16"]
    trl = read(tmp_path, {"model_name_or_path": "gpt2", "use_peft": False})
    assert trl.command == (
        "gpt2 --seq-len 1024 --batch-size 8 --accumulate 1 --dtype bfloat16 --precision autocast"
        " --optimizer adamw --clip"
    )
    assert trl.format.checkpointing.default is True
    assert {"bf16", "dtype", "max_length"} <= {one.key for one in trl.by_default}
    plain = read(tmp_path, PLAIN)
    assert plain.options["precision"] == "autocast", "its script may load float32, which is most"
    assert "dtype" in {one.key for one in plain.by_default}


def test_what_takes_memory_is_not_ignored(tmp_path: Path) -> None:
    keys = {"label_smoothing_factor": 0.1, "torch_compile_mode": "default", "lora_r": 16}
    file = read(tmp_path, PLAIN, **keys, dtype="float32")
    assert file.not_understood == keys
    assert not read(tmp_path, ARGUMENTS, label_smoothing_factor=0.0).not_understood


def test_values_are_those_of_json(tmp_path: Path) -> None:
    file = read(tmp_path, QLORA, threshold=float("nan"), inner={"most": [float("inf"), 1]})
    left = {key: file.not_understood[key] for key in ("threshold", "inner.most")}
    assert left == {"threshold": ".nan", "inner.most": [".inf", 1]}


def test_what_the_command_line_says_is_not_asked_of_a_file(tmp_path: Path) -> None:
    regex = r"model.layers.[\d]+.(mlp|self_attn)"
    content = QLORA | {"base_model": "a/b", "optimizer": "other", "lora_target_modules": regex}
    file = read(tmp_path, content, "model", "optimizer", "lora")
    assert set(file.options) == {
        *("seq_len", "batch_size", "accumulate", "dtype", "precision", "quantize", "clip")
    }
    assert {one.option for one in file.understood if one.key == "optimizer"} == {""}
    unpacked = QLORA_ARGUMENTS | {"use_bnb_nested_quant": False}
    assert "dtype=base" in read(tmp_path, unpacked, "quantize").options["lora"]


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (QLORA | {"load_in_8bit": True}, "load_in_8bit"),
        (QLORA | {"load_in_4bit": False}, "adapter"),
        (QLORA | {"base_model": "somebody/else"}, "base_model"),
        (QLORA | {"sequence_len": "long"}, "sequence_len"),
        (QLORA | {"micro_batch_size": 0}, "micro_batch_size"),
        (QLORA | {"bf16": 1}, "bf16"),
        (QLORA | {"optimizer": "adamw_torch_8bit"}, "optimizer"),
        (QLORA | {"lora_target_modules": "layers.[0-9]+.mlp"}, "lora_target_modules"),
        (QLORA | {"lora_target_modules": None}, "lora_target_modules"),
        (QLORA | {"lora_r": None}, "lora_r"),
        (LORA | {"fp16": True}, "fp16"),
        (LORA | {"bf16": False}, None),
        (LORA | {"finetuning_type": "freeze"}, "finetuning_type"),
        (LORA | {"quantization_bit": 4, "double_quantization": False}, "double_quantization"),
        (SINGLE_DEVICE | {"tokenizer": {"max_seq_len": None}}, "tokenizer.max_seq_len"),
        (QLORA_ARGUMENTS | {"use_bnb_nested_quant": None}, "use_bnb_nested_quant"),
        ({**ARGUMENTS, "max_length": None}, "max_length"),
        (LORA | {"base_model": "gpt2"}, None),
        ({"something": "else"}, None),
        ("a: [", None),
        ("- a", None),
        (
            QLORA | {"lora_target_linear": True, "lora_target_modules": ["lm_head"]},
            "lora_target_modules",
        ),
    ],
)
def test_what_cannot_be_said_is_one_error(
    content: Any, key: str | None, tmp_path: Path, assert_says: Speaker
) -> None:
    error = assert_says.refused(read_trainer_file, written(tmp_path, content))
    assert error.key == key
    assert error.source == str(tmp_path / "trainer.yaml")


def test_models_are_known_by_what_was_published_alone() -> None:
    assert preset_of("meta-llama/Llama-3.1-8B") == "llama-3.1-8b"
    assert preset_of("meta-llama/Llama-3.2-1B-Instruct") == "llama-3.2-1b"
    assert preset_of("somebody/Llama-3.1-8B") is preset_of("meta-llama/Llama-3.1") is None


def test_json_is_read_as_json(tmp_path: Path, assert_says: Speaker) -> None:
    path = written(tmp_path, '{"base_model": "gpt2", "bf16": true,}', "trainer.json")
    assert_says.refused(read_trainer_file, path)


def test_a_configuration_of_a_model_is_no_file_of_a_trainer(tmp_path: Path) -> None:
    assert not is_trainer_file(written(tmp_path, {"model_type": "llama"}, "config.json"))
    assert not is_trainer_file("llama-3.1-8b")
    assert not is_trainer_file("missing.json")


def test_switches_are_keys_of_their_format() -> None:
    for one in FORMATS:
        for switch in (one.checkpointing, one.offloading):
            assert all(one.decided.fullmatch(key) for key in switch.keys)
