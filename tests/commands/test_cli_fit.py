"""`protrain fit`, `profile --on` and `hardware search`: answers for machines that are not here."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from protrain_plan.commands.fit import CellOptions
from protrain_plan.commands.option_records import StepOptions, WorkloadOptions
from protrain_plan.commands.output import print_json
from protrain_plan.commands.settings import read_settings
from protrain_runtime.contract.records import read_plan, read_profile
from protrain_runtime.contract.records.hardware import PCIE
from protrain_runtime.contract.records.writer import fingerprint
from tests.support.commands import PROTRAIN, printed
from tests.support.forked import protrain
from tests.support.messages import Speaker


@pytest.mark.nightly("machines0")
@pytest.mark.parametrize(
    "machines", [["rtx-4090"], pytest.param(["cpu", "rtx-4090"], marks=pytest.mark.slow)]
)
def test_fit_says_what_fits_with_a_plan_and_what_binds(machines: list[str], tmp_path: Path) -> None:
    asked = ("tiny-llama", "--on", ",".join(machines), "--batch-size", 120, "--seq-len", 256)
    cells: Any = printed_list(tmp_path, *asked, "--dtype", "float32", "--device-memory", "1200MiB")
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
        assert cell["bottleneck"]


def printed_list(folder: Path, *arguments: object) -> list[dict[str, Any]]:
    result = protrain("fit", *arguments, "--json", folder=folder)
    assert result.stderr == ""
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.nightly
def test_a_cell_is_printed_before_the_last_one_is_planned(tmp_path: Path) -> None:
    command = [str(PROTRAIN), "fit", "tiny-llama", "--on", "l4,rtx-3090,a10g,rtx-4090,h200"]
    sizes = ["--batch-size", "120", "--seq-len", "256", "--dtype", "float32"]
    budget = ["--device-memory", "1200MiB"]  # what needs a plan takes a while
    with subprocess.Popen(
        [*command, *sizes, *budget, "--json"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        process.kill()
        rest = process.stdout.read()
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


def test_a_row_is_one_line_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"name": "##[x]\u2028\nn", "of": [1, {}]}
    print_json(row, indent=None)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == row


@pytest.mark.slow
def test_fit_counts_the_tokens_of_all_devices(tmp_path: Path) -> None:
    arguments = ("tiny-llama", "--on", "h100-sxm", "--seq-len", 64, "--num-devices", "1,16")
    one, many = printed_list(tmp_path, *arguments)
    assert one["num_devices"] == 1
    assert (many["num_devices"], many["num_nodes"]) == (16, 2)
    seconds = float(str(many["step_seconds"]))
    assert many["tokens_per_second"] == pytest.approx(16 * 64 / seconds)
    text = protrain("fit", *arguments, folder=tmp_path).stdout
    assert text.splitlines()[0].split()[:2] == ["machine", "batch"]
    assert "16 x h100-sxm in 2 nodes 1 x 64: limited by " in text


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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
    names = ["plan"] + [
        name + more for name in ("plain PyTorch", "ZeRO-Offload") for more in ("", ", checkpointed")
    ]
    table = ElementTree.fromstring(page[page.index("<table") : page.index("</table>") + 8])
    cells = [[row.findtext("th") or "" for row in cell] for cell in table.findall("tbody")]
    machines = [name + ", 2 x 64 " for name in ("rtx-4090", "h100-sxm")]
    assert cells == [[machine, *names] for machine in machines]
    shown = [head.text for head in table.findall("thead/tr/th")]
    assert shown[2:6] == ["MFU", "kWh", "hours", "cost"]
    reasons = [row[-1].text for row in table.findall("tbody/tr[td]")]
    assert len(reasons) == 2 * len(names)
    assert all(reason and "%" in reason for reason in reasons)  # all fit: what makes up the step


@pytest.mark.nightly
def test_one_cell_and_a_plan_name_the_change_that_gains_most(tmp_path: Path) -> None:
    sizes = ("--batch-size", 120, "--seq-len", 256, "--device-memory", "1200MiB")
    asked = ("tiny-llama", "--on", "rtx-4090", *sizes, "--dtype", "float32")
    (cell,) = printed_list(tmp_path, *asked)
    best, speed = cell["best_change"], cell["tokens_per_second"]
    assert best["times_as_fast"] == best["tokens_per_second"] / speed > 1.1
    gained = f"{best['change']}: {speed:,.0f} -> {best['tokens_per_second']:,.0f} tokens/s"
    said = protrain("plan", *asked, "-o", "here", folder=tmp_path).stdout
    assert gained in " ".join(said.split())
    made = protrain("plan", *asked, "-o", "here", "--json", folder=tmp_path).stdout
    taken = {"solve_seconds": best["solve_seconds"]}
    assert json.loads(made)["best_change"] | taken == best


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_fit_and_profile_with_leave_know_compressed_copies(tmp_path: Path) -> None:
    allow = ("--allow", "int8-activations", "--allow", "low-rank-activations")
    asked = ("tiny-llama", "--on", "rtx-3090", "--dtype", "bfloat16", *allow)
    protrain("profile", *asked, "-o", "profile.yaml", folder=tmp_path)
    profile = read_profile(tmp_path / "profile.yaml")
    assert profile.allowed == ("int8-activations", "low-rank-activations")
    assert {"int8", "low-rank"} <= {cost.form for cost in profile.units[1].forms}
    (cell,) = printed_list(tmp_path, *asked, "--seq-len", 64)
    assert (cell["exactness"], cell["allowed"]) == ("bitwise", [])  # it fits, and nothing is gained


# --- `protrain fit --set`, `--what-helps` and `protrain hardware search`, as people type them ---

GIB = 2**30
SMALL = ("tiny-llama", "--seq-len", 256, "--batch-size", 120, "--dtype", "float32")


CONTEXT: Any = None
"""Asked by options of the command alone."""


def answered(*arguments: object, folder: Path, code: int = 0) -> list[dict[str, Any]]:
    result = protrain(*arguments, "--json", folder=folder)
    assert (result.returncode, result.stderr) == (code, "")
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("host=64GiB..512GiB", (64 * GIB, 128 * GIB, 256 * GIB, 512 * GIB)),
        ("device=24GiB..80GiB", (24 * GIB, 48 * GIB, 80 * GIB)),
        ("disk=2TB,0,1TB", (0, 10**12, 2 * 10**12)),
        ("disk=1GiB..1GiB", (GIB,)),
        ("link=12GB/s..64GB/s", (12e9, 24e9, 48e9, 64e9)),
        ("link=pcie-3,pcie-5", (PCIE["pcie-3"], PCIE["pcie-5"])),
        ("num-devices=1..6", (1, 2, 4, 6)),
    ],
)
def test_ranges_double_and_end_where_they_say(text: str, values: tuple[float, ...]) -> None:
    assert read_settings(CONTEXT, [text], None).given == {text.partition("=")[0]: values}


@pytest.mark.parametrize(
    "text",
    [
        *("host", "gpu=1", "host=2GiB..1GiB", "host=0..1GiB", "host=many", "link=64GiB"),
        *("link=0GB/s", "num-devices=0", "num-devices=1GiB", "host=1MiB..1024PiB"),
    ],
)
def test_a_wrong_setting_is_one_error(text: str, assert_says: Speaker) -> None:
    error = assert_says.refused(read_settings, CONTEXT, [text], None)
    assert error.key == "--set"


@pytest.mark.nightly
def test_a_sweep_is_a_line_of_answers(tmp_path: Path) -> None:
    small, large = answered(
        *("fit", *SMALL, "--on", "rtx-4090", "--sweep", "device=600MiB..1200MiB"), folder=tmp_path
    )
    for row in (small, large):
        assert (row["hardware"], row["seq_len"]) == ("rtx-4090", 256)
    assert [row["settings"] for row in (small, large)] == [
        {"device": 600 * 2**20},
        {"device": 1200 * 2**20},
    ]
    assert small["verdict"] == "does not fit"
    assert "more device memory, in " in small["bottleneck"]
    assert large["tokens_per_second"] == pytest.approx(120 * 256 / large["step_seconds"])


@pytest.mark.slow
def test_a_sweep_is_a_column_of_the_table(tmp_path: Path) -> None:
    text = protrain(
        *("fit", *SMALL, "--on", "rtx-4090", "--sweep", "link=1GB/s,pcie-4"),
        *("--device-memory", "1200MiB"),
        folder=tmp_path,
    ).stdout
    assert text.splitlines()[0].split()[:3] == ["machine", "batch", "link"]
    assert "24 GB/s (pcie-4)  " in text
    assert max(map(len, text.splitlines()[:5])) <= 80


@pytest.mark.slow
def test_numbers_of_devices_are_swept(tmp_path: Path) -> None:
    arguments = ("fit", "tiny-llama", "--on", "h100-sxm", "--seq-len", 64)
    data = answered(*arguments, "--sweep", "num-devices=1..4", folder=tmp_path)
    cells = answered(*arguments, "--num-devices", "1,2,4", folder=tmp_path)
    found = [one["tokens_per_second"] for one in data]
    assert found == pytest.approx([one["tokens_per_second"] for one in cells], rel=0.04)


@pytest.mark.slow
def test_what_helps_stands_below_the_answer(tmp_path: Path) -> None:
    arguments = (*SMALL, "--on", "rtx-4090", "--device-memory", "600MiB", "--what-helps")
    (cell,) = answered("fit", *arguments, folder=tmp_path, code=3)
    assert cell["verdict"] == "does not fit"
    by_what = {one["what"]: one for one in cell["what_helps"]}
    assert {"host memory", "link", "device memory", "disk", "micro-batches"} <= by_what.keys()
    assert by_what["device memory"]["fits"]
    assert not by_what["link"]["fits"]
    text = protrain("fit", *arguments, folder=tmp_path).stdout
    assert "would fit with 21.75 GiB of device memory in place of 600.00 MiB: " in text
    assert "  does not fit: host memory, link, " in text


def searched(folder: Path) -> tuple[object, ...]:
    """Among two machines."""
    prices = "rtx-4090: {price_per_hour: 0.5, num_devices: [1]}\nl4: 0.1\n"
    (folder / "prices.yaml").write_text(prices)
    return ("hardware", "search", "tiny-llama", "--seq-len", 64, "--among", "prices.yaml")


@pytest.mark.nightly
def test_a_search_names_the_cheapest(tmp_path: Path) -> None:
    arguments = searched(tmp_path)
    first, slow = answered(*arguments, "--speed", 1000, folder=tmp_path)
    assert [first] == slow["looked_at"]
    assert slow["best"]["name"] == "l4"
    assert slow["best"]["tokens_per_second"] >= 1000
    assert [one["name"] for one in slow["not_looked_at"]] == ["rtx-4090"]


@pytest.mark.slow
def test_a_search_says_where_nothing_is_as_fast(tmp_path: Path) -> None:
    arguments = searched(tmp_path)
    *rows, none = answered(*arguments, "--speed", 1e9, folder=tmp_path, code=3)
    assert rows == none["looked_at"]
    assert none["best"] is None
    assert [one["bound"] for one in none["looked_at"]] == ["compute", "compute"]
    assert all(one["most_tokens_per_second"] < 1e9 for one in none["looked_at"])
    text = protrain(*arguments, "--price-limit", 0.2, folder=tmp_path).stdout
    assert "the fastest: l4 1 x 64 at 0.10 an hour, " in text


@pytest.mark.nightly
def test_settings_are_a_product_in_an_order(tmp_path: Path) -> None:
    asked = ("fit", "tiny-llama", "--seq-len", 64, "--on", "rtx-4090", "--jobs", 1)
    grid = ("--set", "optimizer=adamw,sgd", "--set", "link=pcie-3,pcie-4")
    rows = answered(*asked, *grid, "--sort", "memory", folder=tmp_path)
    assert sorted(tuple(row["settings"].items()) for row in rows) == [
        (("optimizer", name), ("link", PCIE[link]))
        for name in ("adamw", "sgd")
        for link in ("pcie-3", "pcie-4")
    ]
    sizes = [row["peak_bytes"]["device"] for row in rows]
    assert sizes == sorted(sizes)
    (typed,) = answered(*asked, "--optimizer", "sgd", folder=tmp_path)
    same = [row for row in rows if dict(row["settings"]) == {"optimizer": "sgd", "link": 24e9}]
    assert [row["step_seconds"] for row in same] == [typed["step_seconds"]]


def test_each_combination_of_values_is_a_row_or_a_cell_of_a_line() -> None:
    class Read:
        """Options as the command line has them, here as their texts."""

        command = SimpleNamespace(
            params=[
                SimpleNamespace(opts=[f"--{name}"], process_value=lambda _, text: text)
                for name in ("optimizer", "lora")
            ]
        )

    told = ["host=2GiB,1GiB", "disk=1TB", "optimizer=adamw,sgd", "lora=r=8,alpha=16", "lora=r=4"]
    grid = read_settings(cast("Any", Read), [*told, "seq-len=64..256"], "host=4GiB")
    assert grid.values == [(("host", size * GIB), ("disk", 10**12)) for size in (1, 2, 4)]
    rows = list(grid.rows(WorkloadOptions(), StepOptions()))
    assert [(workload.optimizer, workload.lora) for _, workload, _ in rows] == [
        (name, lora) for lora in ("r=8,alpha=16", "r=4") for name in ("adamw", "sgd")
    ]
    assert grid.filled(CellOptions(on=["cpu"])).seq_len == "64,128,256"


@pytest.mark.nightly
def test_a_price_sorts_cells_by_the_cost_of_a_token(tmp_path: Path) -> None:
    asked = ("fit", "tiny-llama", "--on", "rtx-4090,l4", "--seq-len", "64,128", "--price", "2,0.1")
    rows = answered(*asked, "--sort", "cost", "--jobs", 1, folder=tmp_path)
    costs = [row["cost_per_billion_tokens"] for row in rows]
    assert costs == sorted(costs)
    assert [row["hardware"] for row in rows] == ["l4", "l4", "rtx-4090", "rtx-4090"]


@pytest.mark.nightly
def test_a_search_among_machines_of_fit_has_a_page(tmp_path: Path) -> None:
    asked = ("tiny-llama", "--on", "l4", "--seq-len", 64, "--price", 0.5, "--speed", 1e9)
    found = protrain("fit", *asked, "--report", "a.html", folder=tmp_path)
    assert found.returncode == 3
    assert found.stdout.startswith("none of 1 reaches 1,000,000,000 tokens/s\n")
    assert "tiny-llama: does it fit?" in (tmp_path / "a.html").read_text(encoding="utf-8")
