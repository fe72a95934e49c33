"""Machines that can be had, with their prices: `protrain hardware search` looks among them.

    rtx-4090: 0.35
    h100-sxm: {price_per_hour: 2.5, num_devices: [1, 8, 16]}
    my-machine.yaml:
      price_per_hour: 0.2
      num_devices: [1, 2]
      host_memory: {64GiB: 0, 256GiB: 0.05}
      disk: {1TB: 0, 4TB: 0.01}
      link: {pcie-4: 0, pcie-5: 0.1}

Keys are machines, as `load_hardware` takes them. A price is that of one device with its part of a
node for an hour; whatever the currency, it is the same for all. Sizes and links are to choose from,
with what each adds to the price: a size what the machine's file says it is (of the node, or of each
device: see `Interconnect.below`), a link for each device. `num_devices` are counts to choose from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import yaml

from protrain_plan.hardware.catalogue import hardware_names, load_hardware
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.program.group import group_on
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.hardware import PCIE, Hardware
from protrain_runtime.contract.records.plan import DeviceGroup
from protrain_runtime.contract.records.schema import MAX_COUNT, MAX_LIST, PRICES
from protrain_runtime.contract.records.tree import Node, did_you_mean, listed, root
from protrain_runtime.contract.units import format_bytes, typed_bytes

KEYS = ("price_per_hour", "num_devices", "host_memory", "disk", "link")
MOST_NODES = 4
"""Most nodes to look at where nobody says how many devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOffer:
    """A machine and a group of its devices, for so much an hour in all.

    `listed` is the machine as it stands in the list: `machine` differs from it in sizes and links,
    which `chosen` says in words. Neither has a price, which is no part of what is estimated.
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


@dataclass(frozen=True, slots=True)
class _Option:
    """Something to choose, with what it adds to the price."""

    words: str
    value: float
    price: float


_NOTHING: Mapping[str, _Option] = {}


def read_offers(path: Path) -> tuple[MachineOffer, ...]:
    """The offers of a file; RecordError where it holds something else.

    Also for a machine that is not there, and where a machine's devices are not joined.
    """
    top = root(read_text(path), str(path))
    found: list[MachineOffer] = []
    for name, entry in top.any_mapping().items():
        try:
            machine = load_hardware(name)
        except ProtrainError as error:
            raise entry.error(error.message, error.fix) from None
        found += _offers(machine, entry)
    if not found:
        raise top.error("expected at least one machine with its price, got none")
    return tuple(found)


def catalogue_offers() -> tuple[MachineOffer, ...]:
    """The catalogue's machines that have a price; ProtrainError where none has."""
    machines = [load_hardware(name) for name in hardware_names()]
    priced = [machine for machine in machines if machine.price_per_hour]
    if not priced:
        raise ProtrainError(
            "no machine of the catalogue has a price: prices depend on where and when one rents",
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
    """Counts of devices to look at where nobody says which: 1, 2, 4, ... of a node, then nodes."""
    joined = machine.interconnect
    if joined is None:
        return (1,)
    in_node = [2**n for n in range(joined.devices_per_node.bit_length())]
    whole = joined.devices_per_node
    nodes = [2**n * whole for n in range(1, MOST_NODES.bit_length())] if joined.inter_node else []
    return tuple(dict.fromkeys([*in_node, whole, *nodes]))


def _offers(machine: Hardware, entry: Node) -> Iterator[MachineOffer]:
    """All that an entry of the file offers; ProtrainError for devices that are not joined."""
    values: Mapping[str, Node] = {"price_per_hour": entry}
    if isinstance(entry.node, yaml.MappingNode):
        values = entry.mapping(KEYS, optional=KEYS)
    price = machine.price_per_hour
    if "price_per_hour" in values:
        price = _price(values["price_per_hour"])
    elif not price:
        raise entry.error("missing key 'price_per_hour'", "the machine's own file has no price")
    counts = device_counts(machine)
    if "num_devices" in values:
        nodes = values["num_devices"].sequence(MAX_LIST)
        counts = tuple(node.integer("a number of devices") for node in nodes)
        for node, count in zip(nodes, counts, strict=True):
            if not 1 <= count <= MAX_COUNT:
                raise node.expected(f"a number of devices from 1 to {MAX_COUNT}")
        if not counts:
            raise values["num_devices"].error("expected at least one number of devices, got none")
    options: dict[str, list[_Option]] = {}
    for key, tier in (("host_memory", "host"), ("disk", "disk"), ("link", "host")):
        if key not in values:
            continue
        if all(one.name != tier for one in machine.tiers):
            words = {"host": "host memory", "disk": "disk"}[tier]
            raise values[key].error(f"{machine.name} has no {words} below its device")
        choices = values[key].any_mapping()
        if not choices:
            raise values[key].error("expected at least one choice with its price, got none")
        options[key] = [_option(key, text, node) for text, node in choices.items()]
    for count in counts:
        for chosen in product(*options.values()):
            try:
                yield offer(machine, count, price, dict(zip(options, chosen, strict=True)))
            except ProtrainError as error:  # of a group that cannot be
                where = values.get("num_devices", entry)
                raise where.error(error.message, error.fix) from None


def offer(
    machine: Hardware, count: int, price: float, chosen: Mapping[str, _Option] = _NOTHING
) -> MachineOffer:
    """So many devices of a machine with what was chosen for it, and what that costs."""
    machine = replace(machine, price_per_hour=0.0)
    group = group_on(machine, count)
    joined = machine.interconnect
    # What there is once for each device, and once for each node.
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


def _price(node: Node) -> float:
    price = node.number()
    if price not in PRICES:
        raise node.expected(f"a price for an hour {PRICES}")
    return price


def _option(key: str, text: str, node: Node) -> _Option:
    price = _price(node)
    if key == "link":
        if text not in PCIE:
            raise node.error(
                f"expected {listed(PCIE, 'or')}, got {cut(text)!r}", did_you_mean(text, PCIE)
            )
        return _Option(text, PCIE[text], price)
    try:
        size = typed_bytes(text)
    except ProtrainError as error:
        raise node.error(error.message, error.fix) from None
    words = "of host memory" if key == "host_memory" else "of disk"
    return _Option(f"{format_bytes(size)} {words}", size, price)
