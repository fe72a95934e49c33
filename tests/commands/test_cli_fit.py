"""`protrain fit` and `protrain profile --on`: answers for machines that are not here."""

import json
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from protrain_plan.commands.output import JsonList, print_json
from protrain_runtime.contract.records import read_plan, read_profile
from protrain_runtime.contract.records.writer import fingerprint
from tests.support.commands import PROTRAIN, printed
from tests.support.forked import protrain


@pytest.mark.parametrize(
    "machines", [["h200"], pytest.param(["cpu", "h200"], marks=pytest.mark.slow)]
)
def test_fit_says_what_fits_with_a_plan_and_what_binds(machines: list[str], tmp_path: Path) -> None:
    cells = json.loads(
        protrain(
            *(
                "fit",
                "tiny-llama",
                "--on",
                ",".join(machines),
                "--batch-size",
                120,
                "--seq-len",
                256,
            ),
            *("--dtype", "float32", "--device-memory", "1200MiB", "--json"),
            folder=tmp_path,
        ).stdout
    )["cells"]
    assert [(cell["hardware"], cell["seq_len"]) for cell in cells] == [
        (name, 256) for name in machines
    ]
    for cell in cells:
        assert cell["verdict"] == "fits with a plan"
        assert cell["plain_device_bytes"] > 1200 * 2**20
        assert cell["plain_step_seconds"] is None
        assert cell["peak_bytes"]["device"] + cell["peak_bytes"]["context"] <= 1200 * 2**20
        tokens = cell["batch_size"] * cell["seq_len"]
        assert cell["tokens_per_second"] == pytest.approx(tokens / cell["step_seconds"])
        assert cell["binds"]


@pytest.mark.slow
def test_fit_needs_no_plan_where_plain_pytorch_fits(tmp_path: Path) -> None:
    (cell,) = printed_list(tmp_path, "tiny-llama", "--on", "rtx-4090", "--seq-len", 64)
    assert cell["verdict"] == "fits"
    assert float(str(cell["plain_step_seconds"])) >= float(str(cell["step_seconds"]))
    assert cell["measured_over_estimated"] is None  # no card was there to compare with


def printed_list(folder: Path, *arguments: object) -> list[dict[str, object]]:
    result = protrain("fit", *arguments, "--json", folder=folder)
    assert result.stderr == ""
    answer: list[dict[str, object]] = json.loads(result.stdout)["cells"]
    return answer


def test_a_cell_is_printed_before_the_last_one_is_planned(tmp_path: Path) -> None:
    command = [str(PROTRAIN), "fit", "tiny-llama", "--on", "l4,rtx-3090,a10g,rtx-4090,h200"]
    sizes = ["--batch-size", "120", "--seq-len", "256", "--dtype", "float32"]
    budget = ["--device-memory", "1200MiB"]  # what needs a plan takes a while
    with subprocess.Popen(
        [*command, *sizes, *budget, "--json"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        printed_first = ""
        while not printed_first.endswith("\n    },\n"):
            printed_first += process.stdout.readline()
        process.kill()
        rest = process.stdout.read()
    (first,) = json.loads(printed_first.removesuffix(",\n") + "]}")["cells"]
    assert (first["hardware"], first["verdict"]) == ("l4", "fits with a plan")
    assert "h200" not in rest


@pytest.mark.slow
def test_answers_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    asked = ("fit", "tiny-llama", "--on", "rtx-4090,h200", "--seq-len", "64,256", "--no-cache")
    budget = ("--dtype", "float32", "--batch-size", 120, "--device-memory", "1200MiB")
    found = [protrain(*asked, *budget, "--jobs", jobs, folder=tmp_path) for jobs in (1, 2)]
    one, two = ((each.returncode, each.stdout, each.stderr) for each in found)
    assert one == two
    assert one[0] == 0
    assert "with a plan" in one[1]


@pytest.mark.parametrize("count", [1, 3])
def test_a_list_that_is_printed_bit_by_bit_is_one_object(
    count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    members: list[object] = [{"name": f"##[x]\u2028 {n}", "of": [n, {}]} for n in range(count)]
    print_json({"cells": members})
    whole = capsys.readouterr().out
    members_out = JsonList("cells", count)
    assert capsys.readouterr().out == ""
    for member in members:
        members_out.add(member)
    assert capsys.readouterr().out == whole


@pytest.mark.slow
def test_fit_counts_the_tokens_of_all_devices(tmp_path: Path) -> None:
    arguments = ("tiny-llama", "--on", "h100-sxm", "--seq-len", 64, "--num-devices", "1,16")
    one, many = printed_list(tmp_path, *arguments)
    assert "num_devices" not in one
    assert (many["num_devices"], many["num_nodes"]) == (16, 2)
    seconds = float(str(many["step_seconds"]))
    assert many["tokens_per_second"] == pytest.approx(16 * 64 / seconds)
    text = protrain("fit", *arguments, folder=tmp_path).stdout
    assert text.splitlines()[0].split()[:3] == ["machine", "devices", "batch"]
    assert "  16 x h100-sxm 1 x 64: " in text


def test_fit_says_what_is_missing_where_nothing_fits(tmp_path: Path) -> None:
    result = protrain(
        *("fit", "tiny-llama", "--on", "cpu", "--seq-len", 64, "--device-memory", "412MiB"),
        *("--disk", "1MiB"),
        folder=tmp_path,
    )
    assert result.returncode == 3
    assert "cpu      1 x 64  no" in result.stdout
    assert "memory, in " in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines()[:2])


@pytest.mark.slow
def test_adapters_need_less_than_the_whole_model(tmp_path: Path) -> None:
    arguments = ("tiny-llama", "--on", "rtx-3090", "--seq-len", 64)
    (whole,) = printed_list(tmp_path, *arguments)
    (adapters,) = printed_list(tmp_path, *arguments, "--lora", "r=2")
    assert int(str(adapters["plain_device_bytes"])) < int(str(whole["plain_device_bytes"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--on", "rtx-4091"),
            "no such machine: 'rtx-4091' is neither in the catalogue nor a file",
        ),
        (("--on", "cpu", "--seq-len", "many"), "--seq-len: expected numbers such as 1,4,16"),
        (("--on", "cpu", "--batch-size", "0"), "--batch-size: expected numbers such as 1,4,16"),
        (("--on", "cpu", "--optimizer", "adan"), "adan"),
        (
            ("--on", "cpu", "--host-memory", "64GiB"),
            "--host-memory: a CPU machine computes in its host memory, and has none below that",
        ),
        (("--on", "cpu", "--precision", "mixed"), "--precision: expected pure, master or autocast"),
        (
            ("--on", "cpu", "--precision", "autocast", "--dtype", "float32"),
            "precision: autocast needs the dtype bfloat16 or float16, got float32",
        ),
        (
            ("--on", "cpu", "--price", "cheap"),
            "--price: expected a price for an hour from 1e-06 to 1e+06, or 0, such as 2.49, got"
            " 'cheap'",
        ),
        (("--on", "cpu", "--price", "1,2"), "--price: 2 prices were given for 1 machines"),
        (("--on", "cpu", "--columns", "speed"), "--columns: expected mfu, hours, cost or energy"),
        (("--on", "cpu", "--columns", "cost"), "--columns: no machine has a price"),
        (("--on", "cpu", "--columns", "energy"), "--columns: no machine says what its device"),
        (
            ("--on", "rtx-4090", "--price", "1", "--sweep", "host=64GiB"),
            "--price: --sweep prints a table of its own",
        ),
    ],
)
def test_mistakes_are_one_message(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = protrain("fit", "tiny-llama", *arguments, folder=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_an_estimated_profile_is_planned_like_a_measured_one(tmp_path: Path) -> None:
    profiled = protrain(
        *("profile", "tiny-llama", "--on", "l4", "--dtype", "bfloat16", "--seq-len", 64),
        *("--precision", "master", "-o", "profile.yaml", "--json"),
        folder=tmp_path,
    )
    assert printed(profiled)["num_units"] == 6
    record = read_profile(tmp_path / "profile.yaml")
    assert (record.method, record.hardware.name) == ("estimated", "l4")
    planned = protrain("plan", "profile.yaml", "-o", "plan.yaml", "--json", folder=tmp_path)
    assert printed(planned)["status"] == "optimal"


@pytest.mark.parametrize(
    "option", [("--steps", 3), ("--disk-seconds", 60), ("--disk-bytes", "9GiB")]
)
def test_estimating_and_measuring_do_not_mix(option: tuple[object, ...], tmp_path: Path) -> None:
    result = protrain("profile", "tiny-llama", "--on", "l4", *option, folder=tmp_path)
    assert result.returncode == 2
    assert result.stderr == f"error: {option[0]}: is for measuring; --on estimates\n"


def test_a_model_is_planned_by_its_name_with_the_best_batch(tmp_path: Path) -> None:
    asked = ("tiny-llama", "--on", "rtx-4090", "--seq-len", 64, "--global-batch", 4)
    answer = printed(protrain("plan", *asked, "-o", "plans/mine", "--json", folder=tmp_path))
    record, made = (
        read_profile(tmp_path / "plans/mine/profile.yaml"),
        read_plan(tmp_path / "plans/mine/plan.yaml"),
    )
    assert made.profile_fingerprint == fingerprint(record)
    assert made.workload == record.workload
    # All fits, and one micro-batch of four sequences launches the fewest kernels.
    assert (record.workload.batch_size, made.settings.micro_batches) == (4, 1)
    assert (record.workload.precision, record.workload.dtype) == ("master", "bfloat16")
    assert answer["step_seconds"] == made.prediction.step_seconds


@pytest.mark.slow
def test_the_best_batch_is_no_slower_than_any_other(tmp_path: Path) -> None:
    asked = ("tiny-llama", "--on", "rtx-4090", "--seq-len", 256, "--device-memory", "640MiB")
    (best,) = printed_list(tmp_path, *asked, "--global-batch", 16, "--compare")
    assert int(str(best["batch_size"])) * int(str(best["micro_batches"])) == 16
    others = [
        cell
        for size in (1, 2, 4, 8, 16)
        for cell in printed_list(tmp_path, *asked, "--batch-size", size, "--accumulate", 16 // size)
        if cell["verdict"] != "does not fit"
    ]
    assert len(others) > 1
    fastest = max(float(str(cell["tokens_per_second"])) for cell in others)
    assert float(str(best["tokens_per_second"])) >= fastest / 1.04  # two gaps of 2 %
    alternatives = best["alternatives"]
    assert isinstance(alternatives, list)
    assert {one["name"] for one in alternatives} >= {"plain PyTorch", "ZeRO-Offload"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fit", "--global-batch", "8", "--batch-size", "2"), "--batch-size: --global-batch finds"),
        (("fit", "--global-batch", "8", "--accumulate", "2"), "--accumulate: --global-batch finds"),
        (("plan", "--global-batch", "8", "--accumulate", "2"), "--accumulate: --global-batch"),
        (("plan", "-o", "-"), "-o: a plan and its profile are two files"),
        (("plan", "-o", "there/plan"), "cannot be made: "),
    ],
)
def test_mistakes_with_batches_and_places(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "there").touch()
    command, *rest = arguments
    result = protrain(command, "tiny-llama", "--on", "rtx-4090", *rest, folder=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_profile_says_already_what_a_model_is_asked_about_with(tmp_path: Path) -> None:
    result = protrain("plan", "profile.yaml", "--seq-len", 64, folder=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --seq-len: a profile says it already")


def test_a_page_of_answers_has_every_way_to_train_and_no_script(tmp_path: Path) -> None:
    asked = ("tiny-llama", "--on", "rtx-4090,h100-sxm", "--seq-len", 64, "--batch-size", 2)
    more = ("--compare", "--price", "0.4,2.5", "--columns", "mfu,energy")
    result = protrain("fit", *asked, *more, "--report", "fit.html", folder=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    heads = [line.split() for line in result.stdout.splitlines() if line.startswith("machine")]
    assert heads == [
        ["machine", "batch", "tokens/s", "device", "host"],
        ["machine", "batch", "MFU", "kWh", "hours", "cost"],
    ]
    assert result.stdout.splitlines()[-1] == "wrote fit.html"
    page = (tmp_path / "fit.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "http" not in page.replace('http-equiv="Content-Security-Policy"', "")
    drawing = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    titles = [one.text for one in drawing.iter("title")]
    names = ["plan"] + [
        name + more for name in ("plain PyTorch", "ZeRO-Offload") for more in ("", ", checkpointed")
    ]
    assert titles == names * 2
    circles = drawing.findall("g/circle")
    assert len(circles) == len(titles)  # all fit
    labels = [(float(one.attrib["x"]), float(one.attrib["y"])) for one in drawing.findall("g/text")]
    assert len(set(labels)) == len(labels)
    assert page.count("<tr><td>rtx-4090, 2 x 64</td>") == len(names)
    assert "<th>MFU</th><th>kWh</th><th>hours</th><th>cost</th>" in page


def test_a_bill_is_that_of_the_plan_and_of_each_alternative(tmp_path: Path) -> None:
    asked = ("tiny-llama", "--on", "rtx-4090", "--seq-len", 64, "--compare", "--price", 2.5)
    (cell,) = printed_list(tmp_path, *asked)
    alternatives = cell["alternatives"]
    assert isinstance(alternatives, list)
    for one in (cell, *alternatives):
        hours = 1e9 / one["tokens_per_second"] / 3600
        assert one["hours_per_billion_tokens"] == pytest.approx(hours)
        assert one["cost_per_billion_tokens"] == pytest.approx(2.5 * hours)
        assert one["kwh_per_billion_tokens"] == pytest.approx(0.45 * hours)
        assert 0 < one["model_flops_utilisation"] < 1


def test_fit_and_profile_with_leave_know_compressed_copies(tmp_path: Path) -> None:
    allow = ("--allow", "int8-activations", "--allow", "low-rank-activations")
    asked = ("tiny-llama", "--on", "rtx-3090", "--dtype", "bfloat16", *allow)
    protrain("profile", *asked, "-o", "profile.yaml", folder=tmp_path)
    profile = read_profile(tmp_path / "profile.yaml")
    assert profile.allowed == ("int8-activations", "low-rank-activations")
    assert {"int8", "low-rank"} <= {cost.form for cost in profile.units[1].forms}
    (cell,) = printed_list(tmp_path, *asked, "--seq-len", 64)
    assert (cell["exactness"], cell["allowed"]) == ("bitwise", [])  # it fits, and nothing is gained
