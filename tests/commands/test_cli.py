"""The command line as people use it: their output and their exit codes.

Most commands run in forks (`tests.support.forked`), training in a process of its own.
"""

import json
from collections.abc import Callable
from contextlib import chdir
from functools import partial
from pathlib import Path

import pytest

from protrain_plan.models.sources import load_source
from protrain_runtime.contract.records import read_plan, read_profile, write_hardware, write_profile
from tests.support import forked
from tests.support.checking_cases import commit
from tests.support.commands import ROOT, printed, protrain
from tests.support.estimates import model_of
from tests.support.messages import Speaker
from tests.support.planning_cases import cpu, decoder
from tests.support.record_fuzz import run


@pytest.fixture
def synthetic(tmp_path: Path) -> Path:
    """A profile that needs no model: planning reads nothing else."""
    path = tmp_path / "profile.yaml"
    write_profile(decoder(cpu(), blocks=3), path)
    return path


TIERS = {"device", "context", "host", "disk", "allocator"}


@pytest.mark.nightly
def test_profile_plan_run_verify(tiny_llama: Path, tmp_path: Path, assert_says: Speaker) -> None:
    profiled = json.loads(tiny_llama.with_suffix(".json").read_text())
    assert_says(sorted(profiled))
    assert (profiled["model"], profiled["num_units"]) == ("tiny-llama", 6)
    assert profiled["num_parameters"] == 375_648
    assert profiled["model_states_bytes"] == 16 * 375_648
    profile = read_profile(tiny_llama)
    assert profile.model_fingerprint == profiled["model_fingerprint"]

    # Halfway between what the fastest step takes and the least that any takes. Which is fastest is
    # measured, so that no share of it alone has to be enough.
    ample = printed(forked.protrain("plan", tiny_llama, "--json", folder=tmp_path))
    peak = ample["peak_bytes"]
    assert peak["disk"] == 0
    refused = forked.protrain(
        "plan", tiny_llama, "--device-memory", "100MiB", "--json", folder=tmp_path
    )
    least = json.loads(refused.stdout)["smallest_budget_bytes"]
    budget = (peak["context"] + peak["device"] + least) // 2
    within = ("--device-memory", budget, "-o", "plan.yaml", "--json")
    solved = printed(protrain("plan", tiny_llama, *within, folder=tmp_path))
    assert_says(sorted(ample))
    assert solved.keys() == ample.keys()
    assert solved["peak_bytes"].keys() == TIERS
    assert solved["peak_bytes"]["device"] + solved["peak_bytes"]["context"] <= budget
    assert solved["lower_bound_seconds"] <= solved["step_seconds"]
    plan = read_plan(tmp_path / "plan.yaml")
    assert plan.budgets.device == budget
    assert plan.prediction.step_seconds == solved["step_seconds"]

    ran = printed(protrain("run", "plan.yaml", "--steps", 3, "--verify", "--json", folder=tmp_path))
    assert_says(sorted(ran))
    assert ran["verified"] is True
    assert ran["plain"] is False
    assert len(ran["losses"]) == 3
    assert ran["predicted_peak_bytes"] == solved["peak_bytes"]
    measured = ran["measured_peak_bytes"]
    assert measured.keys() == TIERS
    assert measured["device"] <= ran["predicted_peak_bytes"]["device"]
    assert measured["disk"] <= ran["predicted_peak_bytes"]["disk"]
    assert bool(measured["disk"]) == bool(ran["predicted_peak_bytes"]["disk"])
    # What a process holds besides tensors is the C library's business too: 0.1 % more was seen.
    assert measured["context"] <= 1.005 * ran["predicted_peak_bytes"]["context"]


@pytest.mark.nightly
def test_infeasible_names_what_is_missing_and_the_smallest_budget_works(
    synthetic: Path, tmp_path: Path, assert_says: Speaker
) -> None:
    arguments = ("plan", synthetic, "--device-memory", "400MiB")
    text = forked.protrain(*arguments, folder=tmp_path)
    assert text.returncode == 3
    assert text.stderr == ""
    result = forked.protrain(*arguments, "--json", folder=tmp_path)
    assert result.returncode == 3
    assert result.stderr == ""
    answer = json.loads(result.stdout)
    assert_says(sorted(answer))
    assert (answer["status"], answer["tier"]) == ("infeasible", "device")
    assert answer["slot"] in {
        f"{way} of {unit.name}"
        for unit in read_profile(synthetic).units
        for way in ("forward", "backward")
    }
    assert answer["budget_bytes"] == 400 * 2**20
    smallest = answer["smallest_budget_bytes"]
    assert answer["shortfall_bytes"] == smallest - answer["budget_bytes"] > 0
    assert sum(answer["occupants"].values()) == smallest
    assert not (tmp_path / "plan.yaml").exists()
    assert text.stdout.startswith("no plan fits: ")
    assert answer["slot"] in text.stdout
    for line in answer["advice"]:
        assert line in " ".join(text.stdout.split())

    just = printed(
        forked.protrain("plan", synthetic, "--device-memory", smallest, "--json", folder=tmp_path)
    )
    assert just["peak_bytes"]["device"] + just["peak_bytes"]["context"] <= smallest
    less = forked.protrain(
        "plan", synthetic, "--device-memory", smallest - 1, "--json", folder=tmp_path
    )
    assert less.returncode == 3


@pytest.mark.nightly
def test_a_run_begins_with_a_folders_weights(tiny_llama: Path, tmp_path: Path) -> None:
    command = partial(forked.protrain, folder=tmp_path)
    printed(command("plan", tiny_llama, "--device-memory", "1GiB", "--json"))
    drawn = printed(command("run", "plan.yaml", "--steps", 2, "--json"))
    model_of(load_source("tiny-llama"), seed=7).save_pretrained(tmp_path / "weights")  # type: ignore[operator]
    read = ("run", "plan.yaml", "--steps", 2, "--weights", "weights", "--verify", "--json")
    ran = printed(command(*read))
    assert ran["verified"] is True
    assert ran["losses"] != drawn["losses"]


@pytest.mark.nightly
def test_a_plan_for_another_model_is_one_message(tmp_path: Path, assert_says: Speaker) -> None:
    size = ("--seq-len", 16, "-o", "mine", "--json")
    printed(forked.protrain("plan", "tiny-llama", "--on", "cpu", *size, folder=tmp_path))
    path = tmp_path / "mine/plan.yaml"
    told = read_plan(path).model_fingerprint
    path.write_text(path.read_text().replace(told, "sha256:0"))
    result = forked.protrain("run", path, folder=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert_says(result.stderr)


def test_no_arguments_show_the_help(tmp_path: Path) -> None:
    result = protrain(folder=tmp_path)
    assert result.returncode == 2
    assert "Usage: protrain" in result.stdout + result.stderr
    assert "error:" not in result.stderr


FAMILIES = {
    "gpt2 in bfloat16": "tiny-gpt2 --batch-size 2 --seq-len 64 --dtype bfloat16",
    "a plain nn.Module": "tests.support.functional_model:factory",
    "a config.json": ". --batch-size 2 --seq-len 32",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_take_the_same_path(family: str, tmp_path: Path) -> None:
    """At the smallest budget that the planner names, equal to plain PyTorch bitwise."""
    config = ROOT / "protrain_plan/models/catalogue/tiny-llama.json"
    (tmp_path / "config.json").write_text(config.read_text())
    command = partial(forked.protrain, folder=tmp_path)
    printed(command("profile", *FAMILIES[family].split(), "--steps", 1, "--in-process", "--json"))
    tight = ("plan", "profile.yaml", "--json", "--device-memory")
    refused = command(*tight, "100MiB")
    assert refused.returncode == 3
    printed(command(*tight, json.loads(refused.stdout)["smallest_budget_bytes"]))
    ran = printed(command("run", "plan.yaml", "--steps", 3, "--verify", "--json"))
    assert ran["verified"] is True
    for tier in ("device", "host", "disk"):
        assert ran["measured_peak_bytes"][tier] <= ran["predicted_peak_bytes"][tier]


WAYS: dict[str, Callable[[Path], str]] = {
    "by its name": lambda file: file.name,
    "by another path": lambda file: f"../{file.parent.name}/./{file.name}",
    "by a link": lambda file: made(file, "link.yaml", Path.symlink_to),
    "by a second name": lambda file: made(file, "second.yaml", Path.hardlink_to),
    "by a folder's link": lambda file: (
        f"{made(file.parent, 'folder', Path.symlink_to)}/{file.name}"
    ),
}
WRITING = {
    "plan": ("plan", "profile.yaml", "--pins", "pins.yaml", "-o"),
    "plan --lp": ("plan", "profile.yaml", "-o", "new.yaml", "--lp"),
    "plan --on": ("plan", "config.json", "--on", "machine.yaml", "-o"),
    "simulate": ("simulate", "plan.yaml", "--trace"),
    "report": ("report", "plan.yaml", "-o"),
    "export": ("export", "plan.yaml", "--to", "fsdp2", "-o"),
    "profile": ("profile", "model.py:factory", "--on", "machine.yaml", "-o"),
    "profile of a folder": ("profile", ".", "--on", "machine.yaml", "-o"),
    "fit": ("fit", "config.json", "--on", "machine.yaml", "--report"),
    "run": ("run", "plan.yaml", "--record"),
}
READ = {
    "plan": ("profile.yaml", "pins.yaml"),
    "plan --lp": ("profile.yaml",),
    "plan --on": ("machine.yaml",),
    "profile": ("model.py", "machine.yaml"),
    "profile of a folder": ("config.json",),
    "fit": ("config.json", "machine.yaml"),
}


def made(file: Path, name: str, link: Callable[[Path, Path], None]) -> str:
    link(Path(name), file)
    return name


@pytest.mark.nightly("plan --on-by its name")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", WRITING)
def test_no_command_writes_over_what_it_reads(command: str, way: str, tmp_path: Path) -> None:
    plan = commit(tmp_path)
    loaded = read_profile(tmp_path / "profile.yaml")
    write_hardware(loaded.hardware, tmp_path / "machine.yaml")
    (tmp_path / "pins.yaml").write_text("protrain: pins\nversion: 2\npins: {'*': keep}\n")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.py").write_text("def factory(): raise SystemExit\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in READ.get(command, ("plan.yaml", "profile.yaml")):
        for made_before in ("link.yaml", "second.yaml", "folder"):
            (tmp_path / made_before).unlink(missing_ok=True)
        with chdir(tmp_path):
            code, told = run([*WRITING[command], WAYS[way](tmp_path / name)])
        assert (code, told.startswith("error: ")) == (2, True), told
        assert "this is an input file, and would be overwritten" in told
        assert {at: (tmp_path / at).read_bytes() for at in before} == before
    assert plan.is_file()


@pytest.mark.nightly(by_day=3)
@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("fit llama-3.2", "llama-3.2-1b llama-3.2-3b"),
        ("profile smollm3", "smollm3-3b"),
        ("plan gpt-oss", "gpt-oss-120b gpt-oss-20b"),
        ("fit gpt2 --on rtx-3", "rtx-3090"),
        ("fit gpt2 --on l4,rtx-3", "l4,rtx-3090"),
        ("plan gpt2 --on gh", "gh200"),
        ("hardware show b2", "b200"),
        ("hardware copy mi", "mi300x"),
        ("fit ./axolotl", ""),
    ],
)
def test_a_shell_completes_names_of_models_and_machines(
    typed: str, names: str, tmp_path: Path
) -> None:
    words = f"protrain {typed}"
    found = forked.protrain(
        folder=tmp_path,
        _PROTRAIN_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - 1),
    )
    assert found.stdout.split() == names.split()
