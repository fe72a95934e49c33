"""The shipped machines, and `protrain hardware list|show`, in real processes."""

import dataclasses
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from protrain_plan.hardware.catalogue import hardware_names, load_hardware
from protrain_plan.simulation.group import group_on
from protrain_runtime.contract import records
from protrain_runtime.contract.records.hardware import Hardware, Rates
from tests.support import forked
from tests.support.record_samples import HARDWARE, PROFILE

ROOT = Path(__file__).parents[2]
NAMES = (
    *("a100-40gb", "a100-80gb", "a10g", "b200", "cpu", "gh200", "h100-pcie", "h100-sxm", "h200"),
    *("l4", "l40s", "mi300x", "rtx-3090", "rtx-4090", "rtx-5090", "rtx-6000-ada", "rtx-pro-6000"),
)
CARDS = tuple(name for name in NAMES if name != "cpu")


def rates_of(machine: Hardware) -> Rates:
    assert machine.rates is not None
    return machine.rates


def protrain(*arguments: object, **environment: str) -> forked.Result:
    return forked.protrain("hardware", *arguments, folder=ROOT, **{"COLUMNS": ""} | environment)


def printed(*arguments: object) -> dict[str, Any]:
    result = protrain(*arguments, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


# The catalogue


def test_these_machines_are_shipped() -> None:
    assert hardware_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_is_read_back_as_it_is_written(name: str) -> None:
    machine = load_hardware(name)
    assert machine.name == name
    assert records.loads_hardware(records.dumps_hardware(machine)) == machine


def test_every_part_is_of_several_machines_and_says_nothing_that_all_of_them_replace() -> None:
    tables = yaml.safe_load((files("protrain_plan.hardware") / "machines.yaml").read_text())
    for part in tables["parts"]:
        like = [one for one in tables["machines"].values() if part in one["like"]]
        assert len(like) > 1, part
        for what in tables["parts"][part].get("sources", ()):
            assert not all(what in one["sources"] for one in like), (part, what)


@pytest.mark.parametrize("name", [n for n in CARDS if load_hardware(n).interconnect])
def test_eight_cards_are_in_one_node_unless_a_node_has_one(name: str) -> None:
    machine = load_hardware(name)
    assert machine.interconnect is not None
    alone = machine.interconnect.devices_per_node == 1
    assert group_on(machine, 8).num_nodes == (8 if alone else 1)


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_read_back_as_the_machine(name: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    assert protrain("copy", name, "-o", str(path)).returncode == 0
    assert load_hardware(path) == load_hardware(name)


@pytest.mark.parametrize("name", CARDS)
def test_numbers_of_a_card_are_in_a_sane_order(name: str) -> None:
    machine = load_hardware(name)
    device, rates = machine.device, rates_of(machine)
    host, disk = machine.tier("host"), machine.tier("disk")
    assert device.kind == "cuda"
    assert 0.3e9 <= device.context_bytes <= 1e9 < device.memory_bytes < host.capacity_bytes * 2
    assert host.capacity_bytes < disk.capacity_bytes or name == "b200"
    assert rates.float32_flops_per_s < rates.bfloat16_flops_per_s
    assert disk.link.write_bytes_per_s < disk.link.read_bytes_per_s < host.link.read_bytes_per_s
    assert host.link.read_bytes_per_s < rates.memory_bytes_per_s < rates.float32_flops_per_s
    assert 0.4 <= rates.compute_efficiency <= 1
    attention = rates.attention_efficiency, rates.attention_backward_efficiency
    assert 0.1 <= attention[1] <= attention[0] <= rates.compute_efficiency
    assert 58 <= rates.multiprocessors <= 304
    assert 0.7 <= rates.memory_efficiency <= 0.92
    # A parameter takes 28 bytes and more: what threads update of it, memory gives to one device.
    dram = rates.host_bandwidth_bytes_per_s
    assert 1e9 < dram / 28 < 3e10
    assert 0.2 < rates.host_parameters_per_s / (device.num_threads * 1e9) < 0.4
    assert 1e-6 <= rates.operator_s <= 1e-5
    assert 70 <= machine.power_w <= 1000 or name == "a10g", "no data sheet of an A10G was read"
    assert (rates.error_low, rates.error_high) == (0, 0), "nothing was measured on a GPU"
    if published := machine.published_error:
        assert 0.8 < published.low < published.high < 1.6
        assert published.runs >= 3
        assert machine.error_band == (published.low, published.high)


JOINED = tuple(name for name in CARDS if load_hardware(name).interconnect)


def test_all_cards_are_joined_but_those_of_which_nothing_was_published() -> None:
    assert set(CARDS) - set(JOINED) == {"a10g", "l4"}


@pytest.mark.parametrize("name", JOINED)
def test_what_joins_devices_is_in_a_sane_order(name: str) -> None:
    machine = load_hardware(name)
    joined = machine.interconnect
    assert joined is not None
    link, rates = machine.tier("host").link, rates_of(machine)
    within, far = joined.intra_node, joined.inter_node or joined.intra_node
    assert 1e9 < far.gather_bytes_per_s <= within.gather_bytes_per_s < rates.memory_bytes_per_s
    assert 1e9 < far.reduce_bytes_per_s <= within.reduce_bytes_per_s < rates.memory_bytes_per_s
    # Collectives on PCIe are no faster than a copy on it, and share it; NVLink is a way of its own,
    # and a GH200's link to its host is wide enough for both.
    on_pcie = within.gather_bytes_per_s <= link.read_bytes_per_s and name != "gh200"
    assert joined.link_share == (0.5 if on_pcie else 1.0)
    assert 0 < joined.library_bytes < machine.device.memory_bytes / 20
    assert joined.devices_per_node in ((1,) if name == "gh200" else (4, 8))
    assert (joined.inter_node is None) == (joined.below == "of the node")


def test_the_generic_cpu_is_a_measurement() -> None:
    machine = load_hardware("cpu")
    rates = rates_of(machine)
    assert machine.device.kind == "cpu"
    assert [tier.name for tier in machine.tiers] == ["disk"]
    assert (rates.compute_efficiency, rates.memory_efficiency) == (1, 1)
    assert rates.float32_flops_per_s < rates.bfloat16_flops_per_s


def numbers(machine: Hardware) -> Iterator[str]:
    """Keys that a card's sources have to speak of."""
    yield from ("memory_bytes", "context_bytes", "num_threads", "link", "contention", "move_s")
    yield from (tier.name for tier in machine.tiers)
    unknown = ("error_low", "error_high", "host_piece_s")
    yield from (field.name for field in dataclasses.fields(Rates) if field.name not in unknown)
    if joined := machine.interconnect:
        yield from ("intra_node", "interconnect", *(["inter_node"] if joined.inter_node else []))
    if machine.power_w:
        yield "power_w"


@pytest.mark.parametrize("name", CARDS)
def test_every_number_of_a_card_has_one_source(name: str) -> None:
    machine = load_hardware(name)
    spoken_of = [key for text in machine.sources for key in text.partition(": ")[0].split(", ")]
    assert sorted(set(spoken_of) - {"kind"}) == sorted(numbers(machine))
    assert len(spoken_of) == len(set(spoken_of))
    assert all(text.partition(": ")[2] for text in machine.sources)


# Loading


def test_files_of_hardware_and_of_profiles_are_machines(tmp_path: Path) -> None:
    records.write_hardware(HARDWARE, tmp_path / "machine.yaml")
    records.write_profile(PROFILE, tmp_path / "profile.yml")
    assert load_hardware(tmp_path / "machine.yaml") == HARDWARE
    assert load_hardware(str(tmp_path / "profile.yml")) == PROFILE.hardware


# The command line


def test_the_list_fits_a_terminal_and_is_plain_in_a_pipe() -> None:
    result = protrain("list")
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[1 : 1 + len(NAMES)]] == list(NAMES)
    wanted = "rtx-4090 23.50 GiB 165 82.6 1.008 TB/s 24 GB/s 64 GiB 1 TB"
    assert wanted.split() in [line.split() for line in lines]
    assert [machine["name"] for machine in printed("list")["machines"]] == list(NAMES)


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize("name", NAMES)
def test_a_machine_is_shown_whole(name: str) -> None:
    result = protrain("show", name)
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    machine = load_hardware(name)
    words = "".join(result.stdout.split())  # wherever lines are broken
    assert machine.device.name.replace(" ", "") in words
    assert all(source.replace(" ", "") in words for source in machine.sources)


def test_json_is_the_record() -> None:
    machine = load_hardware("gh200")
    assert printed("show", "gh200") == json.loads(json.dumps(dataclasses.asdict(machine)))


def test_a_machine_without_rates_is_shown_too(tmp_path: Path) -> None:
    records.write_hardware(HARDWARE, tmp_path / "machine.yaml")
    result = protrain("show", tmp_path / "machine.yaml")
    assert result.returncode == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == [
        "laptop: Some CPU @ 2.5 GHz (cpu)",
        "device.memory_bytes          16.00 GiB",
        "device.context_bytes         300.00 MiB",
        "device.num_threads           2",
        "disk.capacity_bytes          93.13 GiB",
        "disk.link.read_bytes_per_s   1.2 GB/s",
        "disk.link.write_bytes_per_s  0.85 GB/s",
        "disk.link.latency_s          100 us",
        "disk.link.duplex             50%",
        "read_contention.compute      95%",
        "read_contention.lane         90%",
        "write_contention.compute     95%",
        "write_contention.lane        90%",
        "update_contention.compute    50%",
        "update_contention.lane       50%",
    ]


def test_what_joins_devices_is_shown() -> None:
    lines = " ".join(protrain("show", "h100-sxm").stdout.split())
    assert "interconnect.devices_per_node 8 " in lines
    assert "interconnect.inter_node.gather_bytes_per_s 300 GB/s " in lines
    assert "interconnect.contention.compute 82% " in lines
