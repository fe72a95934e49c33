"""Machine offers with prices, for `protrain hardware search`.

    rtx-4090: 0.35
    h100-sxm: {price_per_hour: 2.5, num_devices: [1, 8, 16]}
    my-machine.yaml:
      price_per_hour: 0.2
      num_devices: [1, 2]
      host_memory: {64GiB: 0, 256GiB: 0.05}
      disk: {1TB: 0, 4TB: 0.01}
      link: {pcie-4: 0, pcie-5: 0.1}

Keys are machines of `load_hardware`. A price is per hour for one device with its part of a node, in
any common currency. Sizes and links are choices, each with its surcharge: a size as in the
machine's file (of the node, or of each device: see `Interconnect.below`), a link for each device.
`num_devices` are candidate counts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from protrain_plan.hardware.catalogue import hardware_names, load_hardware
from protrain_plan.simulation.group import group_on
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.hardware import PCIE, Hardware
from protrain_runtime.contract.records.limits import MAX_LIST, Count, Price
from protrain_runtime.contract.records.plan import DeviceGroup
from protrain_runtime.contract.records.tree import Document, parsed
from protrain_runtime.contract.records.words import did_you_mean, listed
from protrain_runtime.contract.units import format_bytes, typed_bytes

MOST_NODES = 4
"""Most nodes to consider if the number of devices is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOffer:
    """A machine and a group of its devices, with a total price per hour.

    `listed` is the machine as in the list: `machine` may have other sizes and links, described by
    `chosen`. Neither has a price: estimates do not depend on it.
    """

    listed: Hardware
    machine: Hardware
    group: DeviceGroup
    price_per_hour: float
    chosen: str = ""

    @property
    def name(self) -> str:
        """`2 x rtx-4090, 128.00 GiB of host memory`."""
        many = f"{self.group.num_devices} x " if self.group.num_devices > 1 else ""
        nodes = f" in {self.group.num_nodes} nodes" if self.group.num_nodes > 1 else ""
        return f"{many}{self.machine.name}{nodes}" + f", {self.chosen}" * bool(self.chosen)


class _Said(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An entry with keys in the file."""

    price_per_hour: Price | UnsetType = UNSET
    num_devices: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_LIST)] = ()
    host_memory: dict[str, Any] | UnsetType = UNSET
    disk: dict[str, Any] | UnsetType = UNSET
    link: dict[str, Any] | UnsetType = UNSET


class _Option(NamedTuple):
    """A choice and its surcharge."""

    words: str
    value: float
    price: float


_NOTHING: Mapping[str, _Option] = {}


def read_offers(path: Path) -> tuple[MachineOffer, ...]:
    """The offers of a file; RecordError if invalid, or a machine is missing or not joined."""
    top = parsed(read_text(path), str(path))
    found: list[MachineOffer] = []
    for name, entry in top.mapping().items():
        with entry.located():
            machine = load_hardware(name)
        found += _offers(machine, entry)
    if not found:
        raise top.error("expected at least one machine with its price, got none")
    return tuple(found)


def catalogue_offers() -> tuple[MachineOffer, ...]:
    """The catalogue's priced machines; ProtrainError if there are none."""
    machines = [load_hardware(name) for name in hardware_names()]
    priced = [machine for machine in machines if machine.price_per_hour]
    if not priced:
        raise ProtrainError(
            "no machine of the catalogue has a price: prices vary by place and time",
            key="--among",
            fix="write yours into a file, such as 'rtx-4090: 0.35' and 'h100-sxm: 2.5' in two"
            " lines, and name it with --among",
        )
    return tuple(
        offer(machine, count, machine.price_per_hour)
        for machine in priced
        for count in device_counts(machine)
    )


def device_counts(machine: Hardware) -> tuple[int, ...]:
    """Default device counts to consider: 1, 2, 4, ... of a node, then whole nodes."""
    joined = machine.interconnect
    if joined is None:
        return (1,)
    in_node = [2**n for n in range(joined.devices_per_node.bit_length())]
    whole = joined.devices_per_node
    nodes = [2**n * whole for n in range(1, MOST_NODES.bit_length())] if joined.inter_node else []
    return tuple(dict.fromkeys([*in_node, whole, *nodes]))


def _offers(machine: Hardware, entry: Document) -> Iterator[MachineOffer]:
    """All offers of an entry; ProtrainError for devices without a network."""
    has_keys = isinstance(entry.data, dict)
    said = entry.read(_Said) if has_keys else _Said(price_per_hour=entry.read(Price))
    price = machine.price_per_hour if said.price_per_hour is UNSET else said.price_per_hour
    if said.price_per_hour is UNSET and not price:
        raise entry.error("missing key 'price_per_hour'", "the machine's own file has no price")
    counts = said.num_devices or device_counts(machine)
    options: dict[str, list[_Option]] = {}
    for key, tier in (("host_memory", "host"), ("disk", "disk"), ("link", "host")):
        if not has_keys or key not in entry.data:
            continue
        choices = entry.at(key)
        if all(one.name != tier for one in machine.tiers):
            words = {"host": "host memory", "disk": "disk"}[tier]
            raise choices.error(f"{machine.name} has no {words} below its device")
        if not choices.data:
            raise choices.error("expected at least one choice with its price, got none")
        options[key] = [_option(key, text, one) for text, one in choices.mapping().items()]
    where = entry.at("num_devices") if said.num_devices else entry
    for count in counts:
        for chosen in product(*options.values()):
            with where.located():  # an impossible group
                found = offer(machine, count, price, dict(zip(options, chosen, strict=True)))
            yield found


def offer(
    machine: Hardware, count: int, price: float, chosen: Mapping[str, _Option] = _NOTHING
) -> MachineOffer:
    """A number of devices of a machine with its choices, and the total price."""
    machine = replace(machine, price_per_hour=0.0)
    group = group_on(machine, count)
    joined = machine.interconnect
    # Per device, and per node.
    by_key = {"link": count, "host_memory": group.num_nodes, "disk": group.num_nodes}
    if joined and joined.below == "of each device":
        by_key = dict.fromkeys(by_key, count)
    cost = count * price + sum(by_key[key] * option.price for key, option in chosen.items())
    changed = machine
    for key, option in chosen.items():
        if key == "link":
            changed = changed.with_link("host", option.value, option.value)
        else:
            tier = changed.tier("disk" if key == "disk" else "host")
            changed = changed.with_tier(replace(tier, capacity_bytes=int(option.value)))
    return MachineOffer(
        listed=machine,
        machine=changed,
        group=group,
        price_per_hour=cost,
        chosen=", ".join(option.words for option in chosen.values()),
    )


def _option(key: str, text: str, where: Document) -> _Option:
    price = where.read(Price)
    if key == "link":
        if text not in PCIE:
            fix = did_you_mean(text, PCIE)
            raise where.error(f"expected {listed(PCIE, 'or')}, got {cut(text)!r}", fix)
        return _Option(text, PCIE[text], price)
    with where.located():
        size = typed_bytes(text)
    words = "of host memory" if key == "host_memory" else "of disk"
    return _Option(f"{format_bytes(size)} {words}", size, price)
