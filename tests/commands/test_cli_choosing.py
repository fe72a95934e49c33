"""`protrain fit --sweep`, `--what-helps` and `protrain hardware search`, as people type them."""

import json
from pathlib import Path
from typing import Any

import pytest

from protrain_plan.commands.sweeping import Sweep, read_sweep
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import PCIE
from tests.support.forked import protrain

GIB = 2**30
SMALL = ("tiny-llama", "--seq-len", 256, "--batch-size", 120, "--dtype", "float32")


def printed(*arguments: object, folder: Path, code: int = 0) -> dict[str, Any]:
    result = protrain(*arguments, "--json", folder=folder)
    assert (result.returncode, result.stderr) == (code, "")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


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
    assert read_sweep(text) == Sweep(resource=text.partition("=")[0], values=values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host", "expected what to sweep and its values, such as host=64GiB..1TiB, got 'host'"),
        ("gpu=1", "expected host, device, disk, link or num-devices, got 'gpu'"),
        ("host=2GiB..1GiB", "expected a range that goes up, got '2GiB..1GiB'"),
        ("host=0..1GiB", "expected a range that begins above nothing, got '0..1GiB'"),
        ("host=many", "expected a size such as 1536MiB"),
        ("link=64GiB", "expected pcie-3, pcie-4, pcie-5 or a speed such as 12GB/s, got '64GiB'"),
        ("link=0GB/s", "expected pcie-3, pcie-4, pcie-5 or a speed such as 12GB/s, got '0GB/s'"),
        ("num-devices=0", "expected a number of devices from 1 to 100000, got '0'"),
        ("num-devices=1GiB", "expected a number of devices from 1 to 100000, got '1GiB'"),
        ("host=1..1024PiB", "expected at most 32 values"),
    ],
)
def test_a_wrong_sweep_is_one_error(text: str, message: str) -> None:
    with pytest.raises(ProtrainError) as caught:
        read_sweep(text)
    assert caught.value.key == "--sweep"
    assert caught.value.message.startswith(message)


def test_a_sweep_is_a_line_of_answers(tmp_path: Path) -> None:
    data = printed(
        *("fit", *SMALL, "--on", "rtx-4090", "--sweep", "device=600MiB..1200MiB"), folder=tmp_path
    )
    (line,) = data["lines"]
    assert (data["sweep"], line["hardware"], line["seq_len"]) == ("device", "rtx-4090", 256)
    small, large = line["points"]
    assert (small["value"], large["value"]) == (600 * 2**20, 1200 * 2**20)
    assert small["verdict"] == "does not fit"
    assert "of device memory, in " in small["binds"]
    assert large["tokens_per_second"] == pytest.approx(120 * 256 / large["step_seconds"])


@pytest.mark.slow
def test_a_sweep_is_a_table_with_bars(tmp_path: Path) -> None:
    text = protrain(
        *("fit", *SMALL, "--on", "rtx-4090", "--sweep", "link=1GB/s,pcie-4"),
        *("--device-memory", "1200MiB"),
        folder=tmp_path,
    ).stdout
    assert "rtx-4090 120 x 256" in text.splitlines()[0]
    assert "24 GB/s (pcie-4)  " in text
    assert max(map(len, text.splitlines()[:5])) <= 80


@pytest.mark.slow
def test_numbers_of_devices_are_swept(tmp_path: Path) -> None:
    arguments = ("fit", "tiny-llama", "--on", "h100-sxm", "--seq-len", 64)
    data = printed(*arguments, "--sweep", "num-devices=1..4", folder=tmp_path)
    cells = printed(*arguments, "--num-devices", "1,2,4", folder=tmp_path)["cells"]
    found = [one["tokens_per_second"] for one in data["lines"][0]["points"]]
    assert found == pytest.approx([one["tokens_per_second"] for one in cells], rel=0.04)


@pytest.mark.slow
def test_what_helps_stands_below_the_answer(tmp_path: Path) -> None:
    arguments = (*SMALL, "--on", "rtx-4090", "--device-memory", "600MiB", "--what-helps")
    data = printed("fit", *arguments, folder=tmp_path, code=3)
    (cell,) = data["cells"]
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


def test_a_search_names_the_cheapest(tmp_path: Path) -> None:
    arguments = searched(tmp_path)
    slow = printed(*arguments, "--speed", 1000, folder=tmp_path)
    assert slow["best"]["name"] == "l4"
    assert slow["best"]["tokens_per_second"] >= 1000
    assert [one["name"] for one in slow["not_looked_at"]] == ["rtx-4090"]


@pytest.mark.slow
def test_a_search_says_where_nothing_is_as_fast(tmp_path: Path) -> None:
    arguments = searched(tmp_path)
    none = printed(*arguments, "--speed", 1e9, folder=tmp_path, code=3)
    assert none["best"] is None
    assert [one["bound"] for one in none["looked_at"]] == ["compute", "compute"]
    assert all(one["most_tokens_per_second"] < 1e9 for one in none["looked_at"])
    text = protrain(*arguments, "--price-limit", 0.2, folder=tmp_path).stdout
    assert "the fastest: l4 at 0.10 an hour, " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--speed: what is to be found?"),
        (("--speed", 1), "--among: no machine of the catalogue has a price"),
        (("--speed", 1, "--among", "none.yaml"), "none.yaml: there is no such file"),
        (
            ("--speed", 1, "--among", "p.yaml", "--price-limit", 0.2),
            "--price-limit: the cheapest of 1 costs 0.5 an hour",
        ),
        (("--speed", 1, "--among", "p.yaml", "--dtype", "int8"), "--dtype: expected float32"),
    ],
)
def test_mistakes_of_a_search_are_one_message(
    arguments: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "p.yaml").write_text("rtx-4090: {price_per_hour: 0.5, num_devices: [1]}\n")
    result = protrain("hardware", "search", "tiny-llama", *arguments, folder=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {message}")


def test_a_sweep_of_what_a_machine_has_not_is_one_message(tmp_path: Path) -> None:
    result = protrain(
        "fit", "tiny-llama", "--on", "cpu", "--seq-len", 64, "--sweep", "host=1GiB", folder=tmp_path
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: --sweep: cpu has no host memory below its device\n"
