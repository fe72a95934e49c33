"""`protrain plan --stages` on a synthetic profile: the answer as text and as JSON, and refusals."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from protrain_plan.checking.diffing import in_words, plan_diff
from protrain_plan.checking.plan_on_machine import Predicted, predicted
from protrain_plan.presentation.report.page import page_text
from protrain_plan.presentation.report.step import read_step
from protrain_runtime.contract.records import read_plan, read_profile, write_hardware, write_profile
from protrain_runtime.contract.records.hardware import Collectives, Interconnect
from tests.support.forked import protrain
from tests.support.planning_cases import MB, RATES, decoder, gpu
from tests.support.reporting_cases import GOLDEN, stages_files


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


@pytest.mark.nightly
def test_slow_networks_ask_for_stages(tmp_path: Path) -> None:
    profile = written(tmp_path, near=100e9, far=0.3e9)
    out = str(tmp_path / "plan.yaml")
    options = ("--global-batch", "32", "--stages", "auto", "--explain", "-o", out)
    code, text = asked(profile, *options, "--json")
    answer = json.loads(text)
    assert code == 0
    assert answer["speedup"] > 1.2
    assert answer["stages"] == len(answer["several"]["stages"]) == 2
    assert answer["lower_bound_seconds"] <= answer["step_seconds"]
    assert sum(stage["units"] for stage in answer["several"]["stages"]) == 10
    network = next(one for one in answer["assumptions"] if "network" in one["words"])
    assert network["single_seconds"] < answer["assumptions"][0]["single_seconds"]
    plan, best = read_plan(Path(out)), answer["several"]
    assert plan.pipeline is not None
    recorded = json.loads(json.dumps(asdict(plan.pipeline)))
    for told, stage in zip(best["stages"], recorded.pop("stages"), strict=True):
        assert told.items() >= stage.items()
    assert best.items() >= recorded.items()
    assert [len(plan.of_stage(s).units) for s in (0, 1)] == [
        stage["units"] for stage in best["stages"]
    ]
    assert predicted(plan, read_profile(Path(profile))) == Predicted(
        plan.prediction.peak_bytes, best["step_seconds"], plan.pipeline.stages
    )
    checked = protrain("check", str(out), folder=tmp_path)
    assert checked.returncode == 0, checked.stdout
    trained = protrain("run", str(out), folder=tmp_path)
    assert trained.returncode == 2
    assert "the plan is of a pipeline with 2 stages" in " ".join(trained.stderr.split())


def said(*arguments: object, folder: Path) -> str:
    """Output of a command that goes well."""
    found = protrain(*arguments, folder=folder)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.nightly
def test_stages_are_shown_over_time_and_one_by_one(tmp_path: Path) -> None:
    plan = stages_files(tmp_path)
    whole = said("show", plan, folder=tmp_path)
    assert whole == (GOLDEN / "show-stages.txt").read_text(encoding="utf-8")
    assert said("simulate", plan, "--trace", "t.json", folder=tmp_path) == f"{whole}wrote t.json\n"
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) > 64
    one = said("simulate", plan, "--stage", 0, folder=tmp_path)
    golden = (GOLDEN / "simulate-stage.txt").read_text(encoding="utf-8")
    assert one.split() == golden.split()
    assert "synthetic, stage 2 of 4: " in said("show", plan, "--stage", 2, folder=tmp_path)
    shown = json.loads(said("show", plan, "--json", folder=tmp_path))
    summed = json.loads(said("simulate", plan, "--stage", 3, "--json", folder=tmp_path))
    assert (shown["stage"], summed["stage"]) == (0, 3)
    assert shown["pipeline"] == summed["pipeline"]
    spans = shown["pipeline"]["stages"][0]["spans"]
    assert spans["kind"] == ["forward"] * 4 + ["backward", "forward"] * 4 + ["backward"] * 4 + [
        "update"
    ]
    assert spans["end_seconds"][-1] == shown["pipeline"]["step_seconds"]
    assert said("report", plan, "--stage", 1, "-o", "r.html", folder=tmp_path) == "wrote r.html\n"
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert page == page_text(read_step(plan, stage=1))
    found = protrain("report", plan, "--pareto", folder=tmp_path)
    assert found.returncode == 2
    assert "--pareto: pipelines have no Pareto front" in " ".join(found.stderr.split())


def test_plans_of_stages_are_compared(tmp_path: Path) -> None:
    plan = stages_files(tmp_path)
    old = read_plan(plan)
    assert old.pipeline is not None
    first, *others = old.pipeline.stages
    peak = replace(first.peak_bytes, device=first.peak_bytes.device + 10**9)
    stages = (replace(first, held=3, peak_bytes=peak), *others)
    pipeline = replace(old.pipeline, stages=stages, layout="stages within nodes", num_nodes=4)
    diff = plan_diff(old, replace(old, pipeline=pipeline))
    assert [fact.name for fact in diff.facts] == [
        "layout of stages",
        "nodes of all stages",
        "micro-batches held by stages",
    ]
    assert (diff.facts[2].before, diff.facts[2].after) == ("4, 3, 2, 1", "3, 3, 2, 1")
    changes = [amount.change for amount in diff.amounts if "of stage" in amount.name]
    assert changes == ["+953.67 MiB (+19.9%)", "same", "same", "same"]
    assert in_words(diff) == "No decision differs. All predictions are the same."
    single = plan_diff(old, replace(old, pipeline=None))
    assert {fact.after for fact in single.facts} == {"none"}
    assert not [amount for amount in single.amounts if "of stage" in amount.name]


@pytest.mark.nightly
def test_checks_of_stages(tmp_path: Path) -> None:
    plan = stages_files(tmp_path)

    def checked(budget: str = "") -> list[str]:
        (tmp_path / "budgets.yaml").write_text(
            f"protrain: budgets\nversion: 1\nbudgets: {{gpu: {{{budget}}}}}\n", encoding="utf-8"
        )
        found = protrain("check", plan, "--json", folder=tmp_path)
        rules = json.loads(found.stdout)["findings"]
        return [f"{one['code']}: {one['problem']}; {one['fix']}" for one in rules if one.get("fix")]

    assert checked() == []
    fails = checked("device: 10GiB")
    assert len(fails) == 1
    assert fails[0].startswith("MEM001: the predicted peak of 10.30 GiB")
    command = "--num-devices 4 --nodes 2 --stages 4 --global-batch 8 -o"
    assert "another plan fits: protrain plan" in fails[0]
    assert command in fails[0]
    memory, host = checked("device: 4GiB, host: 1GiB")
    assert host.startswith("HOST001: the predicted host memory of 6.71 GiB exceeds 512.00 MiB")
    assert "no plan of stage 0 fits: the smallest needs 9.52 GiB on the device" in memory
    assert "look for other stages: protrain plan" in memory
    assert command.replace("--stages 4", "--stages auto") in memory
    text = plan.read_text(encoding="utf-8")
    plan.write_text(text.replace("held: 4", "held: 3"), encoding="utf-8")
    (edited,) = checked()
    assert edited.startswith("SIM001: the recorded values of stage 0 differ from the computed")


@pytest.mark.nightly
def test_fast_networks_ask_for_one(tmp_path: Path) -> None:
    profile = written(tmp_path, near=400e9, far=400e9)
    out = str(tmp_path / "plan.yaml")
    code, text = asked(profile, "--global-batch", "4", "--stages", "auto", "-o", out)
    assert code == 0
    assert "one stage is best" in text
    assert read_plan(Path(out)).group.num_devices == 4


@pytest.mark.nightly
def test_tied_embeddings_cannot_be_cut(tmp_path: Path) -> None:
    profile = written(tmp_path, near=100e9, far=0.3e9, tied=True)
    out = str(tmp_path / "plan.yaml")
    code, text = asked(profile, "--global-batch", "4", "--stages", "auto", "-o", out)
    assert code == 0
    assert "this model cannot be cut" in text


def test_what_fits_in_no_stages_has_a_reason(tmp_path: Path) -> None:
    profile = written(tmp_path, near=100e9, far=1e9)
    options = ("--stages", "auto", "--global-batch", "4", "--device-memory", "600MB")
    code, text = asked(profile, *options, "-o", str(tmp_path / "plan.yaml"))
    assert code == 3
    assert "none of the numbers of stages tried fits the budgets; with one stage:" in text
    assert "- raise the device budget to " in text


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


@pytest.mark.slow
def test_fit_finds_stages(tmp_path: Path) -> None:
    asked = ("--on", machine_file(tmp_path), "--num-devices", "2", *STAGED)
    [cell] = told("fit", "tiny-llama", *asked, folder=tmp_path)
    assert len(cell["pipeline"]["stages"]) == cell["num_devices"] == 2
    assert cell["tokens_per_second"] == 2 * 128 / cell["step_seconds"]
    assert "times as fast as one stage" in cell["bottleneck"]


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
    most = answer["tokens_per_step"] / answer["lower_bound_seconds"]
    assert best["best"]["most_tokens_per_second"] == most
