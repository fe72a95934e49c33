"""Files of trainers, read as options: each key in one list, and one error for what cannot be said.

Keys and values are those of the projects' own examples (axolotl `examples/llama-3/qlora-1b.yml` and
`fft-8b-liger-fsdp.yaml`, LLaMA-Factory `examples/train_lora`, `train_full` and `train_qlora`,
torchtune `recipes/configs/llama3_1`), and of `TrainingArguments.to_json_string()`.
"""

import copy
import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from protrain_plan.models.trainer_files import FORMATS, TrainerFile, is_trainer_file
from protrain_runtime.contract.errors import ProtrainError
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
    "plugins": [],
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
V1: dict[str, Any] = {
    "model": "Qwen/Qwen3-4B",
    "model_class": "llm",
    "kernel_config": {"name": "auto"},
    "dist_config": {"name": "fsdp2", "dcp_path": None},
    "train_dataset": "data/v1_sft_demo.yaml",
    "micro_batch_size": 1,
    "cutoff_len": 2048,
    "learning_rate": 1e-4,
}
V1_QLORA = V1 | {
    "peft_config": {"name": "lora", "r": 16, "lora_alpha": 32, "target_modules": "all"},
    "quant_config": {"name": "bnb", "quantization_bit": 4},
    "mp_shard_size": 2,
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
    return TrainerFile(written(folder, content | changed), given=given)


FULL = LORA | {"finetuning_type": "full"}
FROZEN = LORA | {"finetuning_type": "freeze", "freeze_trainable_layers": 2}
OF_TRAINERS: dict[str, dict[str, Any]] = {
    "Axolotl, packed": QLORA,
    "Axolotl, all weights": FULL_FSDP,
    "LLaMA-Factory, adapters": LORA,
    "LLaMA-Factory, all weights": FULL,
    "LLaMA-Factory with DeepSpeed": FULL | {"deepspeed": "ds_z3_config.json"},
    "LLaMA-Factory, packed": LORA
    | {"quantization_bit": 8, "pure_bf16": True, "lora_target": "q_proj,v_proj"},
    "torchtune, adapters": SINGLE_DEVICE,
    "torchtune, packed": SINGLE_DEVICE
    | {"model": SINGLE_DEVICE["model"] | {"quantize_base": True}},
    "LLaMA-Factory v1, all weights": V1,
    "LLaMA-Factory v1, not distributed": V1 | {"dist_config": None},
    "LLaMA-Factory v1, packed": V1_QLORA,
    "TRL, all weights": ARGUMENTS,
    "TRL, packed": QLORA_ARGUMENTS,
    "the Trainer": PLAIN | {"dtype": "bfloat16"},
    "the Trainer with DeepSpeed": PLAIN | {"dtype": "bfloat16", "deepspeed": "zero2.json"},
}


@pytest.mark.parametrize("kind", OF_TRAINERS)
def test_a_file_becomes_the_options_of_a_command(
    kind: str, assert_says: Speaker, tmp_path: Path
) -> None:
    for name in ("trainer.yaml", "trainer.json"):
        path = written(tmp_path, OF_TRAINERS[kind], name)
        assert is_trainer_file(path)
        file = TrainerFile(path)
        assert_says([file.format.name, file.command])


def test_every_key_is_in_one_list(tmp_path: Path) -> None:
    file = read(tmp_path, QLORA, deepspeed="zero3.json")
    assert list(file.decided) == ["deepspeed", "gradient_checkpointing"]
    told = [*file.understood, *file.decided, *file.ignored]
    assert sorted(told) == sorted([*QLORA, "deepspeed"])
    assert [(key, file.option_of(key)) for key in file.by_default] == [("max_grad_norm", "--clip")]


def test_inner_keys_are_told_one_by_one_unless_the_whole_is(tmp_path: Path) -> None:
    file = read(tmp_path, SINGLE_DEVICE)
    assert list(file.decided) == ["enable_activation_checkpointing", "loss._component_"]
    with pytest.raises(ProtrainError) as caught:
        read(tmp_path, SINGLE_DEVICE, loss={"_component_": "a.Loss", "beta": 0.1})
    assert caught.value.key == "loss._component_, loss.beta"
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
        (LORA, {"ray_num_workers": 4}, "num_devices", 4),
        (
            *(LORA, {"per_device_train_batch_size": None, "per_gpu_train_batch_size": 4}),
            *("batch_size", 4),
        ),
        (
            *(ARGUMENTS, {"optim": "adafactor"}, "optimizer"),
            "transformers.optimization:Adafactor(lr=0.001,relative_step=False,scale_parameter=False)",
        ),
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
    assert [key for key in file.by_default if key not in half.by_default] == ["bf16"]
    trl = read(tmp_path, {"model_name_or_path": "gpt2", "use_peft": False})
    assert trl.command == (
        "gpt2 --seq-len 1024 --batch-size 8 --accumulate 1 --dtype bfloat16 --precision autocast"
        " --optimizer adamw --clip"
    )
    assert trl.format.checkpointing["default"] is True
    assert {"bf16", "dtype", "max_length"} <= {*trl.by_default}
    plain = read(tmp_path, PLAIN)
    assert plain.options["precision"] == "autocast", "its script may load float32, which is most"
    assert "dtype" in plain.by_default


def test_what_takes_memory_is_not_ignored(tmp_path: Path) -> None:
    keys = {"label_smoothing_factor": 0.1, "torch_compile_mode": "default", "lora_r": 16}
    with pytest.raises(ProtrainError) as caught:
        read(tmp_path, PLAIN, **keys, dtype="float32")
    assert str(caught.value.key).split(", ") == sorted(keys)
    read(tmp_path, ARGUMENTS, label_smoothing_factor=0.0)


def test_values_are_those_of_json(tmp_path: Path) -> None:
    file = read(tmp_path, QLORA, log_most=float("nan"), datasets={"most": [float("inf"), 1]})
    assert file.ignored["log_most"] == ".nan"
    assert file.ignored["datasets"] == {"most": [".inf", 1]}


def on(keys: str) -> dict[str, Any]:
    return dict.fromkeys(keys.split(), True)


ON: dict[str, dict[str, Any]] = {
    "axolotl": {
        **on("liger_rms_norm liger_fused_linear_cross_entropy cut_cross_entropy unsloth_lora_mlp"),
        **on("lora_mlp_kernel torch_compile relora fp8 kd_trainer reward_model gptq"),
        **on("xformers_attention"),
        "plugins": ["a.b"],
        "neftune_noise_alpha": 5,
        "lisa_n_layers": 4,
        "attn_implementation": "eager",
        "unfrozen_parameters": ["lm_head"],
        "qat": {"weight_dtype": "int4"},
        "trl": {"num_generations": 8},
        "tensor_parallel_size": 2,
        "unheard_of": False,
        "model_config": {"output_router_logits": True},
    },
    "llama-factory": {
        **on("use_dft_loss enable_liger_kernel use_unsloth shift_attn pissa_init use_kt"),
        "mixture_of_depths": "convert",
        "flash_attn": "disabled",
        "reward_model": "a/b",
        "ppo_epochs": 2,
        "rope_scaling": "yarn",
        "new_special_tokens": ["a"],
        "unheard_of": 1,
    },
    "torchtune": {
        "quantizer": {"groupsize": 256},
        "grpo_samples": 4,
        "max_generated_tokens": 512,
        "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"},
        "tensor_parallel_dim": 2,
        "forward_batch_size": 1,
        "ac_mode": "selective",
        "unheard_of": "on",
    },
    "llama-factory-v1": {
        "model_class": "cls",
        "batching_strategy": "dynamic_batching",
        "pref_loss": "orpo",
        "cp_size": 2,
        "mp_replicate_size": 2,
        "peft_config": {"name": "lora", "adapter_name_or_path": "a"},
        "quant_config": {"name": "bnb", "unheard_of": 1},
    },
    "trl": {
        **on("use_liger_kernel padding_free use_vllm torch_compile assistant_only_loss use_cache"),
        **on("full_determinism"),
        "num_generations": 8,
        "max_completion_length": 512,
        "loss_type": "dft",
        "beta": 0.1,
        "reward_model_path": "a/b",
        "optim_args": "momentum=0.9",
        "torch_empty_cache_steps": 4,
        "accelerator_config": {"split_batches": True},
        "unheard_of": 0.5,
    },
}
"""Keys by trainer, of which memory or time of a step depends, or nothing is known."""
FILES = {
    "axolotl": QLORA,
    "llama-factory": LORA,
    "llama-factory-v1": V1,
    "torchtune": SINGLE_DEVICE,
    "trl": ARGUMENTS,
}


@pytest.mark.parametrize(
    ("trainer", "key"), [(trainer, key) for trainer, keys in ON.items() for key in keys]
)
def test_a_key_that_is_not_understood_ends_in_an_error_with_its_name(
    trainer: str, key: str, tmp_path: Path
) -> None:
    with pytest.raises(ProtrainError) as caught:
        read(tmp_path, FILES[trainer], **{key: ON[trainer][key]})
    error = caught.value
    assert str(error.key).split(".")[0] == key
    assert error.source == str(tmp_path / "trainer.yaml")
    said = str(error.fix)
    assert "remove it from a copy of the file" in said or "key" in said


@pytest.mark.parametrize("off", [False, None, "none", 0, "no", "", [], {}])
def test_a_feature_that_is_off_takes_nothing(off: object, tmp_path: Path) -> None:
    for trainer, keys in {
        "axolotl": ("plugins", "rl", "liger_rms_norm", "torch_compile", "unfrozen_parameters"),
        "llama-factory": ("use_muon", "use_galore", "enable_liger_kernel", "shift_attn"),
        "trl": ("use_liger_kernel", "padding_free", "assistant_only_loss"),
    }.items():
        content = FILES[trainer]
        expected = {k: v for k, v in content.items() if k not in keys}
        changed = read(tmp_path, content, **{key: copy.copy(off) for key in keys})
        assert changed.command == read(tmp_path, expected).command


def test_logs_data_and_schedules_are_left_out(tmp_path: Path) -> None:
    keys = {
        **on("use_tensorboard hf_use_auth_token trust_remote_code"),
        **dict.fromkeys(("warmup_ratio", "weight_decay", "cosine_min_lr_ratio"), 0.1),
        **dict.fromkeys(("seed", "logging_steps", "eta_min", "early_stopping_patience"), 3),
        **dict.fromkeys(("eval_steps", "evals_per_epoch", "dataset_num_proc"), 8),
        "dataloader_num_workers": 4,
        "wandb_project": "a",
        "hub_model_id": "a/b",
        "save_strategy": "steps",
        "datasets": [{"path": "a"}],
        "lr_scheduler": "cosine",
        "evaluation_strategy": "no",
        "output_dir": "out",
    }
    assert set(keys) <= set(read(tmp_path, QLORA, **keys).ignored)


@pytest.mark.parametrize(
    ("content", "changed"),
    [
        (QLORA | {"rl": "grpo"}, {"rl": None}),
        (LORA | {"stage": "kto"}, {"stage": "sft"}),
        (ARGUMENTS | {"beta": 0.1}, {"beta": None}),
        (ARGUMENTS | {"num_generations": 8}, {"num_generations": None}),
        (QLORA | {"qat": {"weight_dtype": "int4"}}, {"qat": None}),
        (FROZEN, {"finetuning_type": "full"}),
    ],
)
def test_a_method_that_is_not_planned_is_answered_as_its_fix_says(
    content: dict[str, Any], changed: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ProtrainError) as caught:
        TrainerFile(written(tmp_path, content))
    assert caught.value.fix is not None
    assert "remove from a copy" not in caught.value.fix
    found = ("is not planned", "the answer is", "it is", "finetuning_type: full")
    assert any(words in caught.value.fix for words in found)
    kept = {key: value for key, value in (content | changed).items() if value is not None}
    assert TrainerFile(written(tmp_path, kept)).options["model"]


@pytest.mark.parametrize("content", [QLORA, ARGUMENTS, PLAIN])
def test_switches_of_optimizers_are_known_in_all_files(
    content: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ProtrainError) as caught:
        read(tmp_path, content, use_galore=True)
    assert (caught.value.key, caught.value.fix) == ("use_galore", "say it with --optimizer")
    assert "optimizer" not in read(tmp_path, content, "optimizer", use_galore=True).options


@pytest.mark.parametrize("optimizer", ["muon", "galore", "apollo", "badam", "adam_mini"])
def test_an_optimizer_that_a_switch_turns_on_is_asked_for(optimizer: str, tmp_path: Path) -> None:
    switched = {f"use_{optimizer}": True, f"{optimizer}_rank": 8}
    if optimizer in ("muon", "adam_mini"):
        del switched[f"{optimizer}_rank"]
    with pytest.raises(ProtrainError) as caught:
        read(tmp_path, LORA, **switched)
    assert (caught.value.key, caught.value.fix) == (f"use_{optimizer}", "say it with --optimizer")
    answered = read(tmp_path, LORA, "optimizer", **switched)
    assert "optimizer" not in answered.options


def test_states_of_float32_are_those_of_float32_parameters(tmp_path: Path) -> None:
    paged = {"optimizer": "paged_adamw_32bit"}
    assert read(tmp_path, QLORA, **paged).options["optimizer"] == "adamw"
    full = {key: value for key, value in QLORA.items() if "lora" not in key and key != "adapter"}
    full["load_in_4bit"] = False
    assert read(tmp_path, full, **paged, bf16=False).options["optimizer"] == "adamw"
    with pytest.raises(ProtrainError) as caught:
        read(tmp_path, full, **paged)
    assert caught.value.key == "optimizer"
    assert read(tmp_path, full, "optimizer", **paged).options["precision"] == "pure"


TEACHER = {
    "teacher_model": {"_component_": "torchtune.models.qwen3.qwen3_14b_instruct"},
    "teacher_checkpointer": {"checkpoint_dir": "/tmp/a"},
    "kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"},
    "kd_ratio": 0.5,
}


@pytest.mark.parametrize(
    ("content", "beside", "batch"),
    [
        (SINGLE_DEVICE | TEACHER, "qwen3-14b", 2),
        (ARGUMENTS | {"teacher_model_name_or_path": "meta-llama/Llama-3.1-8B"}, "llama-3.1-8b", 4),
        (FULL | {"stage": "dpo"}, "qwen3-4b", 2),
        (FULL | {"stage": "dpo", "ref_model": "gpt2"}, "gpt2", 2),
        (LORA | {"stage": "dpo", "ref_model": "Qwen/Qwen3-4B"}, "qwen3-4b", 2),
        (LORA | {"stage": "dpo", "pref_loss": "simpo"}, None, 2),
        (QLORA | {"rl": "orpo"}, None, 4),
    ],
)
def test_a_second_model_is_beside_the_trained_one(
    content: dict[str, Any], beside: str | None, batch: int, tmp_path: Path
) -> None:
    file = read(tmp_path, content)
    assert (file.options.get("beside"), file.options["batch_size"]) == (beside, batch)


@pytest.mark.parametrize("content", [QLORA | {"rl": "dpo"}, LORA | {"stage": "dpo"}])
def test_a_reference_that_no_file_names_is_asked_for(
    content: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ProtrainError, match="--beside none") as caught:
        read(tmp_path, content)
    assert caught.value.key in ("rl", "stage")
    assert "beside" not in read(tmp_path, content, "beside").options


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"zero_optimization": {"stage": 3}, "fp16": {"enabled": "auto"}}, "of DeepSpeed"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "of DeepSpeed"),
        ({"compute_environment": "LOCAL_MACHINE", "num_processes": 8}, "of accelerate"),
        ({"distributed_type": "FSDP", "mixed_precision": "bf16"}, "of accelerate"),
    ],
)
def test_other_files_are_known_for_what_they_are(
    content: dict[str, Any], what: str, tmp_path: Path
) -> None:
    for name in ("trainer.yaml", "trainer.json"):
        path = written(tmp_path, content, name)
        assert is_trainer_file(path)
        with pytest.raises(ProtrainError, match=what) as caught:
            TrainerFile(path)
        assert caught.value.fix


def test_what_the_command_line_says_is_not_asked_of_a_file(tmp_path: Path) -> None:
    regex = r"model.layers.[\d]+.(mlp|self_attn)"
    content = QLORA | {"base_model": "a/b", "optimizer": "other", "lora_target_modules": regex}
    file = read(tmp_path, content, "model", "optimizer", "lora")
    assert set(file.options) == {
        *("seq_len", "batch_size", "accumulate", "dtype", "precision", "quantize", "clip")
    }
    assert file.option_of("optimizer") == ""
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
        (QLORA | {"rl": "grpo"}, "rl"),
        (LORA | {"stage": "kto"}, "stage"),
        (QLORA | {"rl": "dpo"}, "rl"),
        (QLORA | {"plugins": ["a"], "qat": {"weight_dtype": "int4"}}, "plugins, qat.weight_dtype"),
        (ARGUMENTS | {"num_generations": 8, "teacher": "a"}, "num_generations, teacher"),
        (
            QLORA | {"load_in_4bit": False, "adapter": None, "optimizer": "paged_adamw_32bit"},
            "optimizer",
        ),
        ({"zero_optimization": {"stage": 3}}, None),
        ({"distributed_type": "FSDP"}, None),
        ({"model": "a/b", "model_class": "llm"}, "model"),
        (V1 | {"template": "qwen"}, "template"),
        (V1 | {"global_batch_size": 16}, "global_batch_size"),
        (V1 | {"optim_config": {"name": "muon", "wd": 0.1}}, "optim_config.name"),
        (V1 | {"kernel_config": {"name": "auto, liger_kernel"}}, "kernel_config.name"),
        (V1 | {"dist_config": {"name": "fsdpturbo"}}, "dist_config.name"),
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
    error = assert_says.refused(TrainerFile, written(tmp_path, content))
    assert error.key == key
    assert error.source == str(tmp_path / "trainer.yaml")


@pytest.mark.parametrize("content", [QLORA, LORA, V1, SINGLE_DEVICE, PLAIN, ARGUMENTS])
def test_two_keys_that_say_one_thing_agree(content: dict[str, Any], tmp_path: Path) -> None:
    """In any order; a flag that is off, and a key that the command line answers, say nothing."""
    values = {"count": (2, 3), "dtypes": ("float32", "bfloat16"), "flag": (True, False)}

    def asked(*given: str, **keys: object) -> TrainerFile:
        own = {key: value for key, value in content.items() if key not in (first, second)}
        return TrainerFile(written(tmp_path, own | keys, "trainer.json"), given=given)

    table = read(tmp_path, content).format
    for first, second in permutations(table.keys, 2):
        how = table.keys[first][1]
        if table.keys[second] != table.keys[first] or str(how) not in values:
            continue
        one, other = values[how]
        command = asked(**{first: one}).command
        assert asked(**{first: one, second: one}).command == command
        if how == "flag":
            assert asked(**{first: one, second: other}).command == command
            continue
        with pytest.raises(ProtrainError, match=f": {first} says otherwise") as caught:
            asked(**{first: one, second: other})
        assert caught.value.key == second
        options = ("seq_len", "batch_size", "num_devices", "precision", "dtype")
        assert asked(*options, **{first: one, second: other}).options


SLIPS: dict[str, object] = {
    **dict.fromkeys(("sequence_len", "micro_batch_size", "gradient_accumulation_steps"), "two"),
    **{key: [16] for key in ("lora_r", "lora_alpha")},
    "micro_batch_size ": 1.5,
    "lora_dropout": "much",
    "max_grad_norm": {"norm": 1.0},
    "bf16": 1,
    "load_in_4bit": "yes",
    "optimizer": ["adamw_torch"],
    "base_model": 7,
    "lora_target_modules": [1],
    "lora_target_linear": "all",
    "adapter": 4,
}


@pytest.mark.parametrize("key", SLIPS)
def test_a_value_of_another_type_is_refused_where_an_option_answers_it_too(
    key: str, tmp_path: Path
) -> None:
    """Words that a trainer fills in are no slips."""
    answered = ["model", "batch_size", "seq_len", "accumulate", "optimizer", "lora", "clip"]
    answered += ["precision", "dtype", "quantize"]
    name = key.strip()
    for given in ([], answered):
        with pytest.raises(ProtrainError) as caught:
            read(tmp_path, QLORA | {name: SLIPS[key]}, *given)
        assert caught.value.key == name
    for word in ("auto", "${oc.env:SIZE}", "{{ size }}"):
        assert (
            "batch_size"
            not in read(tmp_path, QLORA | {"micro_batch_size": word}, *answered).options
        )


def test_json_is_read_as_json(tmp_path: Path, assert_says: Speaker) -> None:
    path = written(tmp_path, '{"base_model": "gpt2", "bf16": true,}', "trainer.json")
    assert_says.refused(TrainerFile, path)


def test_a_configuration_of_a_model_is_no_file_of_a_trainer(tmp_path: Path) -> None:
    assert not is_trainer_file(written(tmp_path, {"model_type": "llama"}, "config.json"))
    assert not is_trainer_file("llama-3.1-8b")
    assert not is_trainer_file("missing.json")


def test_switches_are_keys_of_their_format() -> None:
    for one in FORMATS:
        for switch in (one.checkpointing, one.offloading):
            assert all(one.list_of(key, switch["on"]) == "decided" for key in switch["keys"])
