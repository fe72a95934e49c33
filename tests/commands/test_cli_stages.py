"""`protrain plan --stages` on a synthetic profile: the answer as text and as JSON, and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protrain_plan.checking.plan_on_machine import Predicted, predicted
from protrain_runtime.contract.records import (
    read_plan,
    read_profile,
    write_hardware,
    write_profile,
)
from protrain_runtime.contract.records.hardware import Collectives, Interconnect
from tests.support.forked import protrain
from tests.support.planning_cases import MB, RATES, decoder, gpu


def written(folder: Path, *, near: float, far: float, tied: bool = False) -> str:
    """A decoder of eight blocks for two nodes of two cards, that such networks join."""

    def speeds(rate: float) -> Collectives:
        return Collectives(gather_bytes_per_s=rate, reduce_bytes_per_s=rate, latency_s=1e-6)

    joined = Interconnect(
        devices_per_node=2, intra_node=speeds(near), inter_node=speeds(far), below="of each device"
    )
    machine = replace(gpu(), interconnect=joined)
    made = decoder(machine, blocks=8, kept=160 * MB, block_parameters=100 * MB, tied=tied)
    path = folder / "profile.yaml"
    write_profile(made, path)
    return str(path)


def asked(profile: str, *options: str) -> tuple[int, str]:
    """How the command ends, and all that it says, on one line."""
    folder = Path(profile).parent
    found = protrain("plan", profile, "--num-devices", "4", *options, folder=folder)
    return found.returncode, " ".join((found.stdout + found.stderr).split())


def test_slow_networks_ask_for_stages(tmp_path: Path) -> None:
    profile = written(tmp_path, near=100e9, far=0.3e9)
    out = str(tmp_path / "plan.yaml")
    options = ("--global-batch", "32", "--stages", "auto", "--explain", "-o", out)
    code, text = asked(profile, *options, "--json")
    answer = json.loads(text)
    assert code == 0
    assert answer["speedup"] > 1.2
    assert answer["stages"] == answer["several"]["stages"] == 2
    assert answer["lower_bound_seconds"] <= answer["step_seconds"]
    assert sum(stage["units"] for stage in answer["several"]["of_stages"]) == 10
    network = next(one for one in answer["assumptions"] if "network" in one["words"])
    assert network["single_seconds"] < answer["assumptions"][0]["single_seconds"]
    plan, best = read_plan(Path(out)), answer["several"]
    assert plan.pipeline is not None
    held = [stage["held"] for stage in best["of_stages"]]
    assert [stage.held for stage in plan.pipeline.stages] == held
    assert [len(plan.of_stage(s).units) for s in (0, 1)] == [
        stage["units"] for stage in best["of_stages"]
    ]
    assert predicted(plan, read_profile(Path(profile))) == Predicted(
        plan.prediction.peak_bytes, best["step_seconds"]
    )
    checked = protrain("check", str(out), folder=tmp_path)
    assert checked.returncode == 0, checked.stdout
    trained = protrain("run", str(out), folder=tmp_path)
    assert trained.returncode == 2
    assert "the plan is of a pipeline with 2 stages" in " ".join(trained.stderr.split())


def test_fast_networks_ask_for_one(tmp_path: Path) -> None:
    profile = written(tmp_path, near=400e9, far=400e9)
    out = str(tmp_path / "plan.yaml")
    code, text = asked(profile, "--global-batch", "4", "--stages", "auto", "-o", out)
    assert code == 0
    assert "one stage is best" in text
    assert read_plan(Path(out)).group.num_devices == 4


def test_tied_embeddings_cannot_be_cut(tmp_path: Path) -> None:
    profile = written(tmp_path, near=100e9, far=0.3e9, tied=True)
    out = str(tmp_path / "plan.yaml")
    code, text = asked(profile, "--global-batch", "4", "--stages", "auto", "-o", out)
    assert code == 0
    assert "this model cannot be cut" in text


def test_refusals(tmp_path: Path) -> None:
    profile = written(tmp_path, near=100e9, far=1e9)
    out = ("-o", str(tmp_path / "plan.yaml"))
    code, text = asked(profile, "--stages", "auto", *out)
    assert code == 2
    assert "say how many there are: --global-batch 128" in text
    code, text = asked(profile, "--stages", "3", "--global-batch", "4", *out)
    assert code == 2
    assert "4 devices are no equal parts of 3 stages" in text
    code, text = asked(profile, "--stages", "auto", "--global-batch", "4", "--pareto", *out)
    assert code == 2
    assert "--pareto: stages are planned without it" in text


def machine_file(folder: Path) -> str:
    """A machine of nodes with one small card each, over a slow network."""
    speeds = Collectives(gather_bytes_per_s=1e8, reduce_bytes_per_s=1e8, latency_s=1e-5)
    joined = Interconnect(
        devices_per_node=1, intra_node=speeds, inter_node=speeds, below="of each device"
    )
    machine = replace(gpu(), interconnect=joined, rates=RATES, name="boxes", price_per_hour=0.5)
    path = folder / "boxes.yaml"
    write_hardware(machine, path)
    return str(path)


def told(*arguments: str, folder: Path) -> list[dict[str, Any]]:
    """The objects that a command prints."""
    found = protrain(*arguments, "--json", folder=folder)
    assert found.returncode == 0, found.stderr
    if arguments[0] == "plan":
        return [json.loads(found.stdout)]
    return [json.loads(line) for line in found.stdout.splitlines()]


STAGED = ("--seq-len", "128", "--stages", "auto", "--global-batch", "2")


def test_fit_finds_stages(tmp_path: Path) -> None:
    asked = ("--on", machine_file(tmp_path), "--num-devices", "2", *STAGED)
    [cell] = told("fit", "tiny-llama", *asked, folder=tmp_path)
    assert len(cell["pipeline"]["stages"]) == cell["num_devices"] == 2
    assert cell["tokens_per_second"] == pytest.approx(2 * 128 / cell["step_seconds"])
    assert "times as fast as one stage" in cell["binds"]


@pytest.mark.slow
def test_plan_and_search_give_the_answer_of_fit(tmp_path: Path) -> None:
    on = machine_file(tmp_path)
    asked = ("--on", on, "--num-devices", "2", *STAGED)
    [cell] = told("fit", "tiny-llama", *asked, folder=tmp_path)
    out = tmp_path / "plan"
    [answer] = told("plan", "tiny-llama", *asked, "-o", str(out), folder=tmp_path)
    assert cell["step_seconds"] == answer["step_seconds"]
    assert read_plan(out / "plan.yaml").whole.num_devices == 2
    among = tmp_path / "among.yaml"
    among.write_text(f"{on}: {{price_per_hour: 0.5, num_devices: [2]}}\n")
    search = ("hardware", "search", "tiny-llama", "--among", str(among), "--speed", "1", *STAGED)
    *_, best = told(*search, folder=tmp_path)
    assert best["best"]["tokens_per_second"] == cell["tokens_per_second"]
    assert best["best"]["most_tokens_per_second"] == pytest.approx(
        answer["tokens_per_step"] / answer["lower_bound_seconds"]
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("fit", "--stages", "auto"), "say how many there are: --global-batch 128"),
        (
            ("fit", "--stages", "auto", "--global-batch", "4", "--compare"),
            "--compare: stages are planned without it",
        ),
        (
            ("fit", "--stages", "auto", "--global-batch", "4", "--batch-size", "2"),
            "--batch-size: --global-batch finds it",
        ),
        (("hardware search", "--global-batch", "4", "--speed", "1"), "it is for stages"),
    ],
)
def test_refusals_of_fit_and_search(tmp_path: Path, command: tuple[str, ...], words: str) -> None:
    first, *options = command
    on = ("--on", machine_file(tmp_path)) if first == "fit" else ()
    found = protrain(*first.split(), "tiny-llama", *on, *options, folder=tmp_path)
    assert found.returncode == 2
    assert words in " ".join(found.stderr.split())
