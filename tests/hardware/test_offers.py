"""Machines with prices, as files list them."""

from dataclasses import replace
from pathlib import Path

import pytest

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.hardware.offers import catalogue_offers, device_counts, read_offers
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import loads_hardware, write_hardware
from protrain_runtime.contract.records.hardware import PCIE
from tests.support.messages import Speaker
from tests.support.record_samples import HARDWARE

GIB = 2**30


def written(folder: Path, text: str) -> Path:
    path = folder / "prices.yaml"
    path.write_text(text)
    return path


def test_a_line_is_a_machine_and_its_price(tmp_path: Path) -> None:
    offers = read_offers(written(tmp_path, "rtx-4090: 0.35\nl4: 0.7\n"))
    assert [(one.name, round(one.price_per_hour, 9)) for one in offers] == [
        ("rtx-4090", 0.35),
        ("2 x rtx-4090", 0.7),
        ("4 x rtx-4090", 1.4),
        ("8 x rtx-4090", 2.8),
        ("l4", 0.7),  # nothing is known of what joins several
    ]
    assert [one.machine for one in offers[:4]] == [load_hardware("rtx-4090")] * 4


def test_sizes_and_links_are_chosen_and_paid_for(tmp_path: Path) -> None:
    """Host memory of a desktop is the node's, that of an H100 each device's."""
    choices = "host_memory: {64GiB: 0, 256GiB: 0.1}, link: {pcie-4: 0, pcie-5: 0.25}"
    offers = read_offers(
        written(
            tmp_path,
            f"rtx-4090: {{price_per_hour: 0.5, num_devices: [2], {choices}}}\n"
            "h100-sxm: {price_per_hour: 2, num_devices: [16], host_memory: {512GiB: 0.1}}\n",
        )
    )
    assert [(one.name, one.price_per_hour) for one in offers] == [
        ("2 x rtx-4090, 64.00 GiB of host memory, pcie-4", 1.0),
        ("2 x rtx-4090, 64.00 GiB of host memory, pcie-5", 1.5),
        ("2 x rtx-4090, 256.00 GiB of host memory, pcie-4", 1.1),
        ("2 x rtx-4090, 256.00 GiB of host memory, pcie-5", 1.6),
        ("16 x h100-sxm in 2 nodes, 512.00 GiB of host memory", 33.6),
    ]
    last = offers[3].machine.tier("host")
    assert (last.capacity_bytes, last.link.read_bytes_per_s) == (256 * GIB, PCIE["pcie-5"])
    assert {one.listed for one in offers[:4]} == {load_hardware("rtx-4090")}


def test_a_machine_s_own_file_can_have_the_price(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    write_hardware(replace(HARDWARE, price_per_hour=0.05), path)
    assert path.read_text().endswith("price_per_hour: 0.05\n")
    assert loads_hardware(path.read_text()).price_per_hour == 0.05
    (offer,) = read_offers(written(tmp_path, f"{path}: {{disk: {{1TB: 0.01}}}}\n"))
    assert (offer.price_per_hour, offer.machine.tiers[0].capacity_bytes) == (
        0.060000000000000005,
        10**12,
    )


def test_counts_are_powers_of_two_of_a_node_then_nodes() -> None:
    assert device_counts(load_hardware("l4")) == (1,)
    assert device_counts(load_hardware("rtx-4090")) == (1, 2, 4, 8)
    assert device_counts(load_hardware("h100-sxm")) == (1, 2, 4, 8, 16, 32)


def test_links_are_those_of_the_catalogue() -> None:
    """Whose machines name their generation of PCIe, and what it is in GB/s."""
    for name, words in (("rtx-3090", "PCIe 4.0 x16, 31.5"), ("rtx-5090", "PCIe 5.0 x16, 63")):
        machine = load_hardware(name)
        assert any(source.startswith(f"link: {words} GB/s nominal") for source in machine.sources)
        assert machine.tier("host").link.read_bytes_per_s == PCIE[f"pcie-{words[5]}"]


def test_the_catalogue_has_no_price_without_a_source() -> None:
    with pytest.raises(ProtrainError, match="no machine of the catalogue has a price"):
        catalogue_offers()


WRONG = """
rtx-4090: cheap
rtx-4090: -1
rtx-4091: 1
rtx-4090: {}
rtx-4090: {price: 1}
l4: {price_per_hour: 1, num_devices: [2]}
l4: {price_per_hour: 1, num_devices: [0]}
l4: {price_per_hour: 1, num_devices: []}
l4: {price_per_hour: 1, host_memory: {64: many}}
l4: {price_per_hour: 1, host_memory: {lots: 0}}
l4: {price_per_hour: 1, link: {pcie-9: 0}}
l4: {price_per_hour: 1, link: {}}
cpu: {price_per_hour: 1, link: {pcie-3: 0}}
{}
- rtx-4090
"""


@pytest.mark.parametrize("text", WRONG.strip().splitlines())
def test_a_wrong_list_is_one_error(text: str, tmp_path: Path, assert_says: Speaker) -> None:
    assert_says.refused(read_offers, written(tmp_path, f"{text}\n"))
