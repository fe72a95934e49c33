"""What a unit's decision takes of each lane, at least: no step is shorter than its busiest lane."""

from typing import NamedTuple

from protrain_plan.program.group import collective_seconds_per_byte
from protrain_plan.program.implications import ActivationOption, StateOption
from protrain_plan.program.program import Settings
from protrain_plan.records.hardware import Hardware


class Network(NamedTuple):
    """Seconds per byte of the buffers that are gathered, scattered and summed; on one device, 0."""

    gathered: float = 0.0
    scattered: float = 0.0
    summed: float = 0.0

    @staticmethod
    def of(hardware: Hardware, settings: Settings) -> "Network":
        """What joins the devices of a group, without the latency of single collectives."""
        if settings.num_devices == 1:
            return Network()
        return Network(
            gathered=collective_seconds_per_byte("all-gather", hardware, settings),
            scattered=collective_seconds_per_byte("reduce-scatter", hardware, settings),
            summed=collective_seconds_per_byte("all-reduce", hardware, settings),
        )


class LaneSeconds:
    """Seconds of a step that decisions take of each lane, over all its micro-batches.

    Lanes of states work on the update, which starts after the first backward slot: their seconds
    count from the step's beginning.
    """

    def __init__(self, hardware: Hardware, settings: Settings) -> None:
        self.times = float(settings.micro_batches)
        # Of several devices, only the last micro-batch reduces its gradients.
        self.spills = self.times if settings.num_devices == 1 else 1.0
        self.network = Network.of(hardware, settings)
        self.read = {tier.name: 1 / tier.link.read_bytes_per_s for tier in hardware.tiers}
        self.write = {tier.name: 1 / tier.link.write_bytes_per_s for tier in hardware.tiers}
        self.lanes = ["compute", "update", "network"]
        for name in self.read:
            self.lanes += [f"from_{name}", f"to_{name}"]
            self.lanes += ["read", "write"] if name == "disk" else []

    def moved_activations(self, option: ActivationOption) -> dict[str, float]:
        """What transfers of a unit's activations take of each lane."""
        if not option.swap_in or not option.swap_out:
            return {}
        tier = option.swap_in.tier
        return {
            f"from_{tier}": self.times * option.swap_in.bytes * self.read[tier],
            f"to_{tier}": self.times * option.swap_out.bytes * self.write[tier],
        }

    def of_activations(self, option: ActivationOption, *, last: bool) -> dict[str, float]:
        """What a decision takes of each lane; `last` where its backward is the first."""
        both = option.forward_s + option.backward_s
        first = (self.times - 1) * both + option.forward_s + option.backward_s * last
        seconds = {"compute": self.times * both, "update": first}
        if "disk" in self.read:
            seconds |= {"read": first, "write": first}
        return seconds | self.moved_activations(option)

    def moved_states(self, option: StateOption) -> dict[str, float]:
        """What transfers of a chunk's parameters, gradients and states take of each lane."""
        gathered = sum(gather.bytes for gather in option.gathers)
        scattered = option.scattered.bytes if option.scattered else 0
        reducing = self.network.scattered * scattered + self.network.summed * option.summed_bytes
        seconds = {"network": self.times * (self.network.gathered * gathered) + reducing}
        for name, read in self.read.items():
            fetched = sum(fetch.bytes for fetch in option.fetches if fetch.tier == name)
            seconds[f"from_{name}"] = self.times * fetched * read
            if option.gradients and option.gradients.tier == name:
                spilled = option.gradients.bytes * self.write[name]
                seconds[f"to_{name}"] = self.spills * spilled
            if name == "disk":
                seconds["read"] = option.read_bytes * read
                seconds["write"] = option.write_bytes * self.write[name]
        return seconds

    def of_states(self, option: StateOption) -> dict[str, float]:
        """What a placement takes of each lane. The device's update waits for all collectives."""
        seconds = self.moved_states(option)
        seconds["network"] += option.device_s
        return seconds | {"compute": option.device_s, "update": option.update_s}
