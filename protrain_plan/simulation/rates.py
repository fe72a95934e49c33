"""Rates of compute and lanes that run beside each other: the one model of all readers of time.

Lanes in one direction of a link share its speed; its two directions keep `duplex` of theirs while
both run, a link and a collective their `link_share`. Compute and a link's direction, the update
lanes or a collective keep their `Contention` fractions while both run (factors multiply). Updates
on the device take turns with compute: each has half of what compute would have alone.

The simulator asks for the lanes that run, the walk for pairs of lanes, and the linear programs
for the directions that may run beside compute.
"""

from collections.abc import Sequence

from protrain_runtime.contract.program.program import NETWORK, UPDATES, Channel
from protrain_runtime.contract.records.hardware import Contention, Hardware


def contention(hardware: Hardware, channel: Channel) -> Contention:
    """The fractions that compute and this channel's lane keep while both run."""
    if channel == NETWORK:
        assert hardware.interconnect, "its moves take time, which this says"
        return hardware.interconnect.contention
    if channel == UPDATES:
        return hardware.update_contention
    return hardware.read_contention if channel.inwards else hardware.write_contention


def rates(
    hardware: Hardware, running: Sequence[Channel], *, computing: bool
) -> tuple[float, list[float]]:
    """The rates of compute and of these channels' lanes while all run."""
    compute = 1.0
    if computing:
        for channel in dict.fromkeys(running):
            if channel.link != "device":
                compute *= contention(hardware, channel).compute
    links = {channel.link for channel in running if channel.tier or channel == NETWORK}
    crossed = hardware.interconnect if "network" in links and len(links) > 1 else None
    lanes: list[float] = []
    for channel in running:
        if channel.link == "device":
            lanes.append(compute * 0.5 if computing else compute)
            continue
        rate = 1.0 / running.count(channel)
        if channel.tier and channel._replace(inwards=not channel.inwards) in running:
            rate *= hardware.tier(channel.tier).link.duplex
        if crossed and channel.link in links:
            rate *= crossed.link_share
        lanes.append(rate * contention(hardware, channel).lane if computing else rate)
    if computing and any(channel.link == "device" for channel in running):
        compute *= 0.5
    return compute, lanes


def slowed(hardware: Hardware, one: Channel, other: Channel) -> float:
    """Seconds that one second of both at once adds to each."""
    return 1 / rates(hardware, (one, other), computing=False)[1][0] - 1


def crossing(hardware: Hardware, one: Channel, other: Channel) -> float:
    """Seconds that one lane's second takes of another's: exact at half speed or more."""
    return min(1.0, slowed(hardware, one, other))
