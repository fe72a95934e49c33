"""`protrain plan` with its options, as people call it, on profiles that need no model."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from protrain_runtime.contract.records import read_plan, write_hardware, write_profile
from protrain_runtime.contract.records.plan import Recompute, Swap, SwapInput
from tests.support.commands import PROTRAIN, printed
from tests.support.forked import protrain
from tests.support.planning_cases import cpu, decoder, gpu, joined


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.yaml"
    write_profile(decoder(gpu(), blocks=6, pieces=4), path)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "profile.yaml"
    write_profile(decoder(gpu(), blocks=2), path)
    return path


def test_pins_are_kept_and_their_cost_is_told(profile: Path, tmp_path: Path) -> None:
    pins = tmp_path / "pins.yaml"
    pins.write_text("protrain: pins\nversion: 2\npins:\n  layers.0-1: recompute\n")
    arguments = ("plan", profile, "--device-memory", "12GiB", "--pins", pins)
    pinned = (*arguments, "--pin", "layers.5: swap to host, offload to host")
    answer = printed(protrain(*pinned, "--json", folder=tmp_path))
    units = {unit.name: unit for unit in read_plan(tmp_path / "plan.yaml").units}
    assert units["layers.0"].activations == units["layers.1"].activations == Recompute()
    assert units["layers.5"].activations == Swap(tier="host")
    assert answer["seconds_without_pins"] <= answer["step_seconds"] * 1.005
    text = protrain(*pinned, folder=tmp_path)
    assert re.search(r"the pins cost \d+\.\d\d% of the step", text.stdout)


def test_where_everything_may_stay_the_plan_says_what_it_saves(
    profile: Path, tmp_path: Path
) -> None:
    arguments = ("plan", profile, "--device-memory", "60GB")
    answer = printed(protrain(*arguments, "--json", folder=tmp_path))
    longer = answer["kept_seconds"] / answer["step_seconds"] - 1
    assert longer > 0.005  # updates on the host while backward goes on
    text = " ".join(protrain(*arguments, folder=tmp_path).stdout.split())
    found = re.search(r"fits as well, and its step takes (\S+)% longer: (--pin) '(.+?)'", text)
    assert found
    assert float(found[1]) == pytest.approx(100 * longer, abs=0.051)
    kept = printed(protrain(*arguments, found[2], found[3], "--json", folder=tmp_path))
    assert kept["step_seconds"] == kept["kept_seconds"] == answer["kept_seconds"]


def test_where_not_everything_may_stay_nothing_is_compared(profile: Path, tmp_path: Path) -> None:
    arguments = ("plan", profile, "--device-memory", "12GB")
    assert printed(protrain(*arguments, "--json", folder=tmp_path))["kept_seconds"] is None
    assert "fits as well" not in protrain(*arguments, folder=tmp_path).stdout


def test_a_cpu_machine_has_no_host_memory_below_its_own(tmp_path: Path) -> None:
    write_profile(decoder(cpu(), blocks=2), tmp_path / "profile.yaml")
    result = protrain("plan", "profile.yaml", "--host-memory", "8GiB", folder=tmp_path)
    assert result.returncode == 2
    assert result.stderr == (
        "error: --host-memory: a CPU machine computes in its host memory, and has none below that\n"
        "  fix: --device-memory says how much of it there is\n"
    )


def test_a_pin_for_no_unit_is_one_message(profile: Path, tmp_path: Path) -> None:
    result = protrain("plan", profile, "--pin", "layer.0: recompute", folder=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: --pin: layer.0: ")
    assert not (tmp_path / "plan.yaml").exists()


def test_the_front_is_a_table_and_no_plan(small: Path, tmp_path: Path) -> None:
    answer = printed(protrain("plan", small, "--pareto", "--points", 4, "--json", folder=tmp_path))
    sizes = [point["device_bytes"] for point in answer["front"]]
    seconds = [point["step_seconds"] for point in answer["front"]]
    assert sizes == sorted(sizes)
    assert seconds == sorted(seconds, reverse=True)
    assert not (tmp_path / "plan.yaml").exists()
    result = protrain("plan", small, "--pareto", "--points", 3, folder=tmp_path)
    assert result.stdout.splitlines()[0].split() == ["device", "memory", "step", "gap"]
    assert "█" in result.stdout
    told = [line.split(": a step of ")[0] for line in result.stderr.splitlines()]
    assert len(told) >= 2  # as they come
    assert all(size in result.stdout for size in told)


def test_host_memory_above_what_was_measured_is_refused_with_both_numbers(tmp_path: Path) -> None:
    measured = replace(decoder(gpu(host_gb=64), blocks=2), method="measured")
    write_profile(measured, tmp_path / "profile.yaml")
    result = protrain("plan", "profile.yaml", "--host-memory", "2TiB", folder=tmp_path)
    assert result.returncode == 2
    assert result.stderr == (
        "error: --host-memory: 2.00 TiB of host memory were asked for, and 59.60 GiB were found"
        " when gpu was measured\n"
        "  fix: ask for as much as there is, or profile the model on a machine with more\n"
    )


def test_least_memory_for_a_speed(small: Path, tmp_path: Path) -> None:
    answer = printed(protrain("plan", small, "--max-slowdown", 1.3, "--json", folder=tmp_path))
    assert answer["step_seconds"] <= answer["limit_seconds"]
    assert answer["limit_seconds"] == pytest.approx(1.3 * answer["fastest_seconds"])
    peak = answer["peak_bytes"]
    assert answer["lower_bound_bytes"] <= peak["device"] + peak["context"]


def test_the_largest_batch_says_how_it_is_known(profile: Path, tmp_path: Path) -> None:
    arguments = ("plan", profile, "--device-memory", "12GiB", "--maximize", "batch-size")
    answer = printed(protrain(*arguments, "--json", folder=tmp_path))
    assert answer["growth"] == "in proportion"
    assert answer["batch_size"] == read_plan(tmp_path / "plan.yaml").workload.batch_size > 1
    text = protrain(*arguments, folder=tmp_path).stdout
    assert text.startswith(f"the largest that fits: {answer['batch_size']} sequences of 1024")


def test_an_explanation_is_in_words(profile: Path, tmp_path: Path) -> None:
    arguments = ("plan", profile, "--device-memory", "8GiB", "--explain")
    text = " ".join(protrain(*arguments, folder=tmp_path).stdout.split())
    assert "What makes up the step, about:" in text
    assert re.search(r"layers\.\S+ (keep|swap|recompute)", text)
    answer = printed(protrain(*arguments, "--json", folder=tmp_path))
    assert answer["explanation"]["groups"]


@pytest.mark.parametrize(
    "solver",
    ["four-parameter", pytest.param("recompute-all", marks=pytest.mark.slow), "offload-all"],
)
def test_baselines_can_be_asked_for(solver: str, profile: Path, tmp_path: Path) -> None:
    arguments = ("plan", profile, "--device-memory", "8GiB", "--solver", solver, "--json")
    answer = printed(protrain(*arguments, folder=tmp_path))
    assert answer["solver"] == solver
    decided = {unit.activations for unit in read_plan(tmp_path / "plan.yaml").units[1:-1]}
    match solver:
        case "recompute-all":
            assert decided == {Recompute()}
        case "offload-all":
            assert decided <= {Swap(tier="host"), SwapInput(tier="host")}
        case _:
            assert all(not isinstance(one, SwapInput) for one in decided)


def test_clipping_and_micro_batches_stand_in_the_plan(profile: Path, tmp_path: Path) -> None:
    later = ("--updates", "after-backward")
    arguments = ("--device-memory", "8GiB", *later, "--accumulate", 4, "--json")
    printed(protrain("plan", profile, *arguments, folder=tmp_path))
    plan = read_plan(tmp_path / "plan.yaml")
    assert (plan.settings.updates, plan.settings.micro_batches) == ("after backward", 4)
    assert "updates: after backward, micro_batches: 4" in (tmp_path / "plan.yaml").read_text()


def test_the_share_of_clipped_steps_stands_in_the_plan_and_in_what_is_said_of_it(
    tmp_path: Path,
) -> None:
    write_profile(decoder(gpu(), blocks=2, pieces=4), tmp_path / "profile.yaml")
    pin = "layers.1: offload to host and update on device speculatively"
    options = ("--clip", "--clip-share", "0.25", "--pin", pin)
    answer = printed(protrain("plan", "profile.yaml", *options, "--json", folder=tmp_path))
    plan = read_plan(tmp_path / "plan.yaml")
    assert plan.settings.clip_share == 0.25
    assert answer["clipped_step_seconds"] == plan.prediction.clipped_step_seconds
    assert answer["step_seconds"] < answer["clipped_step_seconds"]
    text = protrain("plan", "profile.yaml", *options, folder=tmp_path).stdout
    assert "a step that is clipped takes" in text
    assert "as 25 % of all are taken to" in text


def test_several_devices_stand_in_the_plan_and_in_what_is_said_of_it(tmp_path: Path) -> None:
    hardware = joined(gpu(), devices_per_node=4, below="of the node")
    write_profile(decoder(hardware, blocks=6, pieces=4), tmp_path / "profile.yaml")
    arguments = ("plan", "profile.yaml", "--device-memory", "6GiB", "--num-devices", 8)
    options = ("--replicas", 2, "--host-memory", "64GiB")
    answer = printed(protrain(*arguments, *options, "--json", folder=tmp_path))
    made = read_plan(tmp_path / "plan.yaml")
    assert (made.group.num_devices, made.group.num_nodes, made.group.num_replicas) == (8, 2, 2)
    assert made.budgets.host == 16 * 2**30  # of 64 GiB that four devices of a node share
    assert (answer["num_devices"], answer["num_nodes"], answer["num_replicas"]) == (8, 2, 2)
    text = protrain(*arguments, *options, folder=tmp_path).stdout
    assert "on 8 devices in 2 nodes, 2 replicas, each with batches of its own" in text
    assert "predicted peak of each device" in text
    shown = protrain("show", "plan.yaml", folder=tmp_path)
    head = " ".join(shown.stdout.split())
    assert "1 sequence of 1024 tokens on each of 8 devices in 2 nodes, 2 replicas, bf" in head
    simulated = protrain("simulate", "plan.yaml", folder=tmp_path).stdout
    assert simulated.splitlines()[0].endswith(", on each of 8 devices in 2 nodes, 2 replicas")
    assert printed(protrain("simulate", "plan.yaml", "--json", folder=tmp_path))["num_devices"] == 8
    page = protrain("report", "plan.yaml", "-o", "page.html", folder=tmp_path)
    assert (page.returncode, page.stderr) == (0, "")
    assert "on each of 8 devices" in (tmp_path / "page.html").read_text()
    (tmp_path / "plan.yaml").rename(tmp_path / "old.yaml")
    protrain("plan", "profile.yaml", "--device-memory", "6GiB", folder=tmp_path)
    changed = protrain("diff", "old.yaml", "plan.yaml", folder=tmp_path).stdout
    assert "8 devices in 2 nodes, 2 replicas" in changed
    exported = protrain("export", "old.yaml", "--to", "fsdp2", "-o", "fsdp2.yaml", folder=tmp_path)
    assert exported.returncode == 0
    text = (tmp_path / "fsdp2.yaml").read_text()
    assert "num_machines: 2\nnum_processes: 8\n" in text
    checked = protrain("check", "old.yaml", "--records-only", folder=tmp_path)
    assert checked.returncode == 0, checked.stdout
    write_hardware(replace(gpu(), name="bare"), tmp_path / "bare.yaml")
    bare = ("check", "old.yaml", "--records-only", "--on", "bare.yaml")
    refused = protrain(*bare, folder=tmp_path)
    assert (refused.returncode, refused.stderr) == (1, "")
    assert "bare does not say what joins its devices" in " ".join(refused.stdout.split())


def test_several_devices_that_nothing_joins_are_one_message(profile: Path, tmp_path: Path) -> None:
    result = protrain("plan", profile, "--num-devices", 2, folder=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: --num-devices: gpu does not say what joins its devices\n"
        "  fix: add interconnect: to its hardware (devices_per_node, and intra_node: of"
        " gather_bytes_per_s, reduce_bytes_per_s and latency_s), take another machine's"
        " (protrain profile --interconnect MACHINE), or measure it:"
        " torchrun --nproc-per-node N --no-python protrain hardware probe\n"
    )


def test_the_programme_can_be_read(profile: Path, tmp_path: Path) -> None:
    protrain("plan", profile, "--device-memory", "8GiB", "--lp", "model.lp", folder=tmp_path)
    text = (tmp_path / "model.lp").read_text()
    for row in ("one_states_1", "arrive_host_f1", "memory_b2", "budget_host", "tail_states_2"):
        assert re.search(rf"^{row}", text, re.MULTILINE)
    assert "act_1_swap_to_host" in text
    assert "count_1_act_recompute" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--pareto", "--maximize", "batch-size"),
            "error: --maximize and --pareto ask for different things\n",
        ),
        (
            ("--maximize", "layers"),
            "error: --maximize: expected batch-size or seq-len, got 'layers'\n",
        ),
        (
            ("--updates", "later"),
            "error: --updates: expected in-backward or after-backward, got 'later'\n",
        ),
        (
            ("--updates", "in-backward", "--clip"),
            "error: --updates: --clip is --updates after-backward\n",
        ),
        (
            ("--clip-share", "0.2"),
            "error: --clip-share: it is for updates after backward\n  fix: add --clip\n",
        ),
        (
            ("--clip", "--clip-share", "1.2"),
            "error: --clip-share: expected a part of all steps from 1e-06 to 1, or 0, got 1.2\n",
        ),
        (
            ("--solver", "cplex"),
            "error: --solver: expected milp, four-parameter, recompute-all or offload-all,"
            " got 'cplex'\n",
        ),
    ],
)
def test_mistakes_are_one_message(
    arguments: tuple[str, ...], message: str, profile: Path, tmp_path: Path
) -> None:
    result = protrain("plan", profile, *arguments, folder=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)


@pytest.mark.slow
def test_ctrl_c_writes_the_best_plan_so_far(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    write_profile(decoder(cpu(), blocks=24, pieces=7), path)
    process = subprocess.Popen(
        [
            PROTRAIN,
            "plan",
            path,
            "--device-memory",
            "24GiB",
            "--gap",
            "0",
            "--lp",
            "model.lp",
            "--json",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        # A background job of a shell ignores Ctrl-C; a person's does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        text=True,
    )
    # The search begins by writing the programme; before it, Ctrl-C ends the command.
    deadline = time.monotonic() + 60
    while process.poll() is None and not (tmp_path / "model.lp").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0
    answer = json.loads(output)
    assert answer["gap"] >= 0
    assert read_plan(tmp_path / "plan.yaml").prediction.step_seconds == answer["step_seconds"]


def test_no_colours_and_no_bar_where_nobody_looks(profile: Path, tmp_path: Path) -> None:
    environment = {"TERM": "xterm-256color", "COLUMNS": "80"}
    assert os.environ.get("FORCE_COLOR") is None
    result = protrain(
        "plan", profile, "--device-memory", "8GiB", "--explain", folder=tmp_path, **environment
    )
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


@pytest.fixture
def with_int8(tmp_path: Path) -> Path:
    """A profile that was recorded with leave: an int8 copy is half of what a block keeps."""
    held, path = decoder(gpu(), blocks=2), tmp_path / "profile.yaml"
    units = []
    for unit in held.units:
        keep = unit.forms[0]
        int8 = replace(keep, form="int8", kept_bytes=keep.kept_bytes // 2)
        forms = (keep, int8, *unit.forms[1:]) if unit.kind == "block" else unit.forms
        units.append(replace(unit, forms=forms))
    write_profile(replace(held, units=tuple(units), allowed=("int8-activations",)), path)
    return path


def test_a_plan_with_leave_says_what_it_is_for(with_int8: Path, tmp_path: Path) -> None:
    allow = ("--allow", "int8-activations")
    asked = ("plan", with_int8, "--device-memory", "60GB", "--pin", "layers.*: keep int8")
    answer = printed(protrain(*asked, *allow, "--json", folder=tmp_path))
    assert (answer["exactness"], answer["allowed"]) == ("approximate", ["int8-activations"])
    told = (
        "not exact: activations in int8 give the results of plain PyTorch approximately, by leave"
        " for int8-activations"
    )
    assert told in " ".join(protrain(*asked, *allow, folder=tmp_path).stdout.split())
    assert told in " ".join(
        protrain("show", tmp_path / "plan.yaml", folder=tmp_path).stdout.split()
    )
    shown = printed(protrain("show", tmp_path / "plan.yaml", "--json", folder=tmp_path))
    assert (shown["exactness"], shown["allowed"]) == ("approximate", ["int8-activations"])


def test_with_leave_that_saves_no_time_a_plan_is_exact(with_int8: Path, tmp_path: Path) -> None:
    asked = ("plan", with_int8, "--device-memory", "60GB", "--allow", "int8-activations")
    answer = printed(protrain(*asked, "--json", folder=tmp_path))
    assert (answer["exactness"], answer["allowed"]) == ("bitwise", [])


def test_leave_for_what_the_profile_does_not_have_is_refused(small: Path, tmp_path: Path) -> None:
    asked = ("plan", small, "--device-memory", "60GB", "--allow", "int8-activations")
    refused = protrain(*asked, folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == (
        f"error: {small}: --allow: the profile was recorded without --allow int8-activations, and"
        " has no such forms\n  fix: protrain profile ... --allow int8-activations\n"
    )
