"""`protrain plan` with its options, as people call it, on profiles that need no model."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from protrain_plan.commands.option_records import StepOptions
from protrain_plan.planning.questions.planner import MOVING_GAIN
from protrain_runtime.contract.records import read_plan, read_profile, write_hardware, write_profile
from protrain_runtime.contract.records.plan import RECOMPUTE, Activations
from protrain_runtime.contract.units import format_bytes
from tests.support.commands import PROTRAIN, printed
from tests.support.forked import protrain
from tests.support.messages import Speaker
from tests.support.planning_cases import (
    cpu,
    decoder,
    gpu,
    joined,
    least_bytes,
    question,
    with_form,
    within,
)
from tests.support.planning_cases import small as six_blocks


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


@pytest.mark.nightly
def test_pins_are_kept_and_their_cost_is_told(profile: Path, tmp_path: Path) -> None:
    pins = tmp_path / "pins.yaml"
    pins.write_text("protrain: pins\nversion: 2\npins:\n  layers.0-1: recompute\n")
    arguments = ("plan", profile, "--device-memory", "12GiB", "--pins", pins)
    pinned = (*arguments, "--pin", "layers.5: swap to host, offload to host")
    answer = printed(protrain(*pinned, "--json", folder=tmp_path))
    units = {unit.name: unit for unit in read_plan(tmp_path / "plan.yaml").units}
    assert units["layers.0"].activations == units["layers.1"].activations == RECOMPUTE
    assert units["layers.5"].activations == Activations(tier="host")
    assert answer["seconds_without_pins"] <= answer["step_seconds"] * 1.005
    text = protrain(*pinned, folder=tmp_path)
    assert re.search(r"the pins cost \d+\.\d\d% of the step", text.stdout)


@pytest.mark.nightly
def test_where_everything_may_stay_the_plan_says_what_it_saves(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    write_profile(decoder(gpu(), blocks=6, pieces=4, device_speed=2e9), profile)
    arguments = ("plan", profile, "--device-memory", "60GB")
    answer = printed(protrain(*arguments, "--json", folder=tmp_path))
    longer = answer["kept_seconds"] / answer["step_seconds"] - 1
    assert longer > MOVING_GAIN  # updates on the host while backward goes on
    text = " ".join(protrain(*arguments, folder=tmp_path).stdout.split())
    found = re.search(r"fits as well, and its step takes (\S+)% longer: (--pin) '(.+?)'", text)
    assert found
    assert float(found[1]) == pytest.approx(100 * longer, abs=0.051)
    kept = printed(
        protrain(*arguments, found[2], found[3], "--json", "-o", "kept.yaml", folder=tmp_path)
    )
    assert kept["step_seconds"] == kept["kept_seconds"] == answer["kept_seconds"]
    less = ("plan", profile, "--device-memory", "12GB", "-o", "less.yaml")
    assert printed(protrain(*less, "--json", folder=tmp_path))["kept_seconds"] is None


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "allocator_bytes", "options", "free"),
    [
        ("estimated", 0, (), 6924 * 2**20),  # a tenth of the tensors that then fit 80 GB
        ("estimated", 0, ("--tight",), 0),
        ("estimated", 0, ("--device-memory", "70GB"), 0),
        ("estimated", 10**9, (), 0),  # the machine knows what its allocator holds
        ("measured", 0, (), 0),
    ],
)
def test_an_estimate_leaves_headroom(
    method: Literal["measured", "estimated"],
    allocator_bytes: int,
    options: tuple[str, ...],
    free: int,
    tmp_path: Path,
) -> None:
    machine = gpu()
    machine = replace(machine, device=replace(machine.device, allocator_bytes=allocator_bytes))
    write_profile(
        replace(decoder(machine, blocks=2), method=method), path := tmp_path / "profile.yaml"
    )
    answer = printed(protrain("plan", path, *options, "--json", folder=tmp_path))
    assert answer["headroom_bytes"] == free
    budget = 70 * 10**9 if "--device-memory" in options else 80 * 10**9 - free
    assert read_plan(tmp_path / "plan.yaml").budgets.device == budget
    shown = protrain("plan", path, *options, "--explain", folder=tmp_path)
    text = " ".join(shown.stdout.split())
    assert ("of the device stay free" in text) == bool(free)


@pytest.mark.nightly
def test_where_nothing_fits_the_headroom_is_said(tmp_path: Path) -> None:
    """The leanest plan leaves 10 MB of the card free, which is less than a plan leaves."""
    model = decoder(gpu(), blocks=4)
    least = least_bytes(question(model, within(model, 80 * 10**9)).problem())
    device = model.hardware.device
    device = replace(device, memory_bytes=least + device.context_bytes + 10**7)
    model = replace(model, hardware=replace(model.hardware, device=device))
    write_profile(model, path := tmp_path / "profile.yaml")
    result = protrain("plan", path, folder=tmp_path)
    assert result.returncode == 3
    assert "--tight uses them" in " ".join(result.stdout.split())
    assert protrain("plan", path, "--tight", folder=tmp_path).returncode == 0


@pytest.mark.nightly
def test_a_disk_that_gains_little_is_spared_and_that_is_said(tmp_path: Path) -> None:
    machine = gpu(disk_gb=1000)
    endurance = replace(machine.tier("disk"), endurance_bytes=600 * 10**12)
    write_profile(six_blocks(machine.with_tier(endurance)), path := tmp_path / "profile.yaml")
    asked = ("plan", path, "--device-memory", "1500MB", "--host-memory", "4GB")

    def said(*options: str) -> tuple[dict[str, Any], str]:
        name = f"plan{len(options)}.yaml"  # none is replaced
        answer = printed(protrain(*asked, *options, "-o", name, "--json", folder=tmp_path))
        return answer, " ".join(
            protrain(*asked, *options, "--explain", folder=tmp_path).stdout.split()
        )

    answer, text = said()
    assert (answer["disk_gain"], answer["seconds_without_disk"]) == (0.1, None)
    assert answer["disk_writes"] is None
    assert "above the fastest without the disk" in text
    assert (
        "disk not used: no plan found is 10% faster with it; --disk-gain 0 uses it for less" in text
    )
    answer, text = said("--disk-gain", "0")
    assert answer["seconds_without_disk"] > answer["step_seconds"]
    assert "the fastest without the disk" not in text
    longer = answer["seconds_without_disk"] / answer["step_seconds"] - 1
    assert f"without the disk the fastest step found takes {longer:.1%} longer" in text
    writes = answer["disk_writes"]
    assert writes["life_days"] == 600 * 10**12 / writes["day_bytes"]
    assert f"the drives last for {writes['life_days']:,.3g} days" in text
    shown = " ".join(protrain("show", "plan.yaml", folder=tmp_path).stdout.split())
    assert f"it writes to disk {format_bytes(writes['step_bytes'])} a step, " in shown
    said("--disk-gain", "25%")
    assert read_plan(tmp_path / "plan.yaml").settings.disk_gain == 0.25


@pytest.mark.parametrize("text", ["-1%", "a tenth", "nan", "20000%"])
def test_a_gain_is_a_part(text: str, assert_says: Speaker) -> None:
    error = assert_says.refused(StepOptions(disk_gain=text).settings)
    assert error.key == "--disk-gain"


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_least_memory_for_a_speed(small: Path, tmp_path: Path) -> None:
    answer = printed(protrain("plan", small, "--max-slowdown", 1.3, "--json", folder=tmp_path))
    assert answer["step_seconds"] <= answer["limit_seconds"]
    assert answer["limit_seconds"] == pytest.approx(1.3 * answer["fastest_seconds"])
    peak = answer["peak_bytes"]
    assert answer["lower_bound_bytes"] <= peak["device"] + peak["context"]


@pytest.mark.nightly
def test_the_largest_that_fits_is_estimated_at_its_size(tmp_path: Path) -> None:
    asked = (
        *("plan", "tiny-llama", "--on", "rtx-4090", "--seq-len", 128, "-o", "plan.yaml"),
        *("--device-memory", "700MiB", "--host-memory", "64MiB", "--disk", "0B"),
    )
    largest = (*asked, "--maximize", "batch-size")
    answer = printed(protrain(*largest, "--json", folder=tmp_path))
    size = answer["batch_size"]
    assert read_plan(tmp_path / "plan.yaml").workload.batch_size == size > 1
    assert read_profile(tmp_path / "profile.yaml").workload.batch_size == size
    text = protrain(*largest, folder=tmp_path).stdout
    assert text.startswith(f"the largest that fits: {size} sequences of 128 tokens")
    more = protrain(*asked, "--batch-size", size + 1, folder=tmp_path)
    assert more.returncode == 3


@pytest.mark.nightly
def test_a_profile_has_one_size_and_says_how_to_get_another(tmp_path: Path) -> None:
    """The fix, followed until a profile is of the largest size, is a plan."""
    asked = ("profile", "tiny-llama", "--on", "rtx-4090", "--seq-len", 128, "-o", "profile.yaml")
    printed(protrain(*asked, "--json", folder=tmp_path))
    arguments = ("plan", "profile.yaml", "--device-memory", "700MiB", "--maximize", "batch-size")
    for _ in range(6):
        found = protrain(*arguments, folder=tmp_path)
        if found.returncode == 0:
            break
        assert found.returncode == 2
        assert "if bytes grow in proportion" in found.stderr
        fix = found.stderr.replace("\n", " ").split("plan that: protrain ")[1]
        assert protrain(*fix.split(), folder=tmp_path).returncode == 0
    size = read_profile(tmp_path / "profile.yaml").workload.batch_size
    assert size > 1
    assert found.stdout.startswith(f"the largest that fits: {size} sequences of 128 tokens")


@pytest.mark.nightly
def test_an_explanation_is_in_words(profile: Path, tmp_path: Path) -> None:
    arguments = ("plan", profile, "--device-memory", "8GiB", "--explain")
    text = " ".join(protrain(*arguments, folder=tmp_path).stdout.split())
    assert "What makes up the step, about:" in text
    assert re.search(r"layers\.\S+ (keep|swap|recompute)", text)
    answer = printed(protrain(*arguments, "-o", "again.yaml", "--json", folder=tmp_path))
    assert answer["explanation"]["groups"]


@pytest.mark.nightly
def test_clipping_and_micro_batches_stand_in_the_plan(profile: Path, tmp_path: Path) -> None:
    later = ("--updates", "after-backward")
    arguments = ("--device-memory", "8GiB", *later, "--accumulate", 4, "--json")
    printed(protrain("plan", profile, *arguments, folder=tmp_path))
    plan = read_plan(tmp_path / "plan.yaml")
    assert (plan.settings.updates, plan.settings.micro_batches) == ("after backward", 4)
    assert "updates: after backward, micro_batches: 4" in (tmp_path / "plan.yaml").read_text()


@pytest.mark.nightly
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
    text = " ".join(protrain("plan", "profile.yaml", *options, folder=tmp_path).stdout.split())
    assert "a clipped step takes" in text
    assert "as 25 % of all are assumed to be" in text


@pytest.mark.nightly
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
    assert "bare does not describe the links between its devices" in " ".join(
        refused.stdout.split()
    )


@pytest.mark.slow
def test_ctrl_c_writes_the_best_plan_so_far(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    write_profile(decoder(cpu(), blocks=24, pieces=7), path)
    process = subprocess.Popen(
        [
            *(PROTRAIN, "plan", path, "--device-memory", "24GiB", "--gap", "0"),
            *("--lp", "model.lp", "--json"),
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


@pytest.mark.nightly
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
    path = tmp_path / "profile.yaml"
    write_profile(with_form(decoder(gpu(), blocks=2), "int8", "int8-activations"), path)
    return path


@pytest.mark.nightly
def test_a_plan_with_leave_says_what_it_is_for(with_int8: Path, tmp_path: Path) -> None:
    allow = ("--allow", "int8-activations")
    asked = ("plan", with_int8, "--device-memory", "60GB", "--pin", "layers.*: keep int8")
    answer = printed(protrain(*asked, *allow, "--json", folder=tmp_path))
    assert (answer["exactness"], answer["allowed"]) == ("approximate", ["int8-activations"])
    told = (
        "not exact: activations in int8 give the results of plain PyTorch approximately, as"
        " --allow int8-activations permits"
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
