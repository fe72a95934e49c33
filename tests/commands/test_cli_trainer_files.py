"""`protrain fit` and `plan` of a trainer's file: the answer of its options, and what to change."""

import json
from pathlib import Path

import pytest

from protrain_runtime.contract.records import read_plan, read_profile
from tests.support.forked import protrain

AXOLOTL = """\
base_model: tiny-llama
sequence_len: 256
micro_batch_size: 2
gradient_accumulation_steps: 4
bf16: auto
optimizer: adamw_torch_fused
gradient_checkpointing: true
"""
OPTIONS = ("--seq-len", 256, "--batch-size", 2, "--accumulate", 4, "--precision", "pure", "--clip")


@pytest.mark.slow
def test_fit_answers_as_for_the_options_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    typed = protrain("fit", "tiny-llama", "--on", "h200", *OPTIONS, "--json", folder=tmp_path)
    found = protrain("fit", "axolotl.yaml", "--on", "h200", "--json", folder=tmp_path)
    answer, cell = json.loads(found.stdout), json.loads(typed.stdout)
    file = answer.pop("trainer_file")
    for one in (answer, cell):  # one of them is known from the other
        for key in ("solve_seconds", "kept"):
            one.pop(key, None)
    assert answer == cell
    [advice] = file["changes"]
    assert advice["changes"] == [{"key": "gradient_checkpointing", "now": True, "new": False}]

    text = protrain("fit", "axolotl.yaml", "--on", "h200", folder=tmp_path, COLUMNS="200").stdout
    assert text.endswith(
        """
axolotl.yaml, as Axolotl reads it: tiny-llama --seq-len 256 --batch-size 2 --accumulate 4 \
--dtype bfloat16 --precision pure --optimizer adamw --clip
  by default of Axolotl: max_grad_norm
  decided by the plan: gradient_checkpointing
in axolotl.yaml, for h200 4 of 2 x 256:
  gradient_checkpointing: true -> false
"""
    )


@pytest.mark.nightly
def test_a_sweep_has_the_lists_of_the_file_in_each_line(tmp_path: Path) -> None:
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    asked = ("fit", "axolotl.yaml", "--on", "h200", "--sweep", "link=pcie-3,pcie-4", "--json")
    rows = [json.loads(line) for line in protrain(*asked, folder=tmp_path).stdout.splitlines()]
    assert [row["settings"] for row in rows] == [{"link": 12e9}, {"link": 24e9}]
    for row in rows:
        file = row["trainer_file"]
        assert file["options"]["batch_size"] == 2
        [advice] = file["changes"]
        assert [one["key"] for one in advice["changes"]] == ["gradient_checkpointing"]


@pytest.mark.slow
def test_plan_takes_the_command_line_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL.replace("tiny-llama", "somebody/tiny"))
    answer = protrain(
        *("plan", "axolotl.yaml", "--model", "tiny-llama", "--on", "h200", "--seq-len", 128),
        *("--global-batch", 8, "-o", "plan.yaml", "--json"),
        folder=tmp_path,
    )
    assert answer.returncode == 0, answer.stderr
    made = read_plan(tmp_path / "plan.yaml")
    workload = made.workload
    assert (workload.model, workload.seq_len, workload.precision) == ("tiny-llama", 128, "pure")
    assert workload.batch_size * made.settings.micro_batches == 8
    assert made.settings.updates == "after backward"
    [advice] = json.loads(answer.stdout)["trainer_file"]["changes"]
    expected = {
        "micro_batch_size": workload.batch_size,
        "gradient_accumulation_steps": made.settings.micro_batches,
    }
    changes = {one["key"]: one["new"] for one in advice["changes"]}
    assert {
        key: changes.get(key, was) for key, was in zip(expected, (2, 4), strict=True)
    } == expected


@pytest.mark.nightly
def test_a_frozen_model_stands_beside_the_trained_one(tmp_path: Path) -> None:
    asked = ("tiny-llama", "--on", "h200", "--seq-len", 256)
    alone = json.loads(protrain("fit", *asked, "--json", folder=tmp_path).stdout)
    beside = (*asked, "--beside", "tiny-gpt2")
    found = json.loads(protrain("fit", *beside, "--json", folder=tmp_path).stdout)
    frozen = found["beside"]
    assert frozen["model"] == "tiny-gpt2"
    grown = found["plain_device_bytes"] - alone["plain_device_bytes"]
    assert grown == frozen["weight_bytes"] + frozen["forward_bytes"]
    seconds = found["plain_step_seconds"] - alone["plain_step_seconds"]
    assert seconds == pytest.approx(frozen["forward_s"], rel=0.01)
    text = protrain("fit", *beside, "--explain", folder=tmp_path, COLUMNS="200").stdout
    assert "beside it, frozen: tiny-gpt2: " in text
    none = protrain("fit", *asked, "--beside", "none", "--json", folder=tmp_path)
    assert json.loads(none.stdout)["beside"] is None

    made = protrain("plan", *beside, "-o", "plans", "--json", folder=tmp_path)
    assert json.loads(made.stdout)["beside"] == frozen
    profile = read_profile(tmp_path / "plans/profile.yaml")
    assert profile.beside is not None
    assert profile.beside.weight_bytes == frozen["weight_bytes"]
    checked = protrain("check", "plans/plan.yaml", folder=tmp_path)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.nightly
def test_a_file_with_a_teacher_has_it_beside(tmp_path: Path) -> None:
    (tmp_path / "distilled.yaml").write_text(
        "model_name_or_path: gpt2\nmax_length: 128\nbf16: true\n"
        "teacher_model_name_or_path: tiny-llama\n"
    )
    found = protrain("fit", "distilled.yaml", "--on", "h200", "--json", folder=tmp_path)
    assert json.loads(found.stdout)["beside"]["model"] == "tiny-llama"


@pytest.mark.nightly
def test_num_devices_is_not_asked_for_where_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL + "deepspeed: zero3.json\n")
    asked = ("fit", "axolotl.yaml", "--on", "h200")
    assert "give their number with --num-devices" in protrain(*asked, folder=tmp_path).stdout
    given = protrain(*asked, "--num-devices", 2, folder=tmp_path)
    assert given.returncode == 0
    assert "--num-devices" not in given.stdout
