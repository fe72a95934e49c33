"""What collectives of a problem's options take, without the latency of single ones."""

from typing import NamedTuple

from protrain_plan.planning.options import StateOption
from protrain_plan.planning.problem import Problem
from protrain_plan.simulation.ranks import collective_seconds_per_byte


class Network(NamedTuple):
    """Seconds per byte of the buffers that are gathered, scattered and summed; on one device, 0."""

    gathered: float = 0.0
    scattered: float = 0.0
    summed: float = 0.0

    @staticmethod
    def of(problem: Problem) -> "Network":
        """What joins the devices of a problem."""
        if problem.settings.num_devices == 1:
            return Network()
        hardware, settings = problem.profile.hardware, problem.settings
        return Network(
            gathered=collective_seconds_per_byte("all-gather", hardware, settings),
            scattered=collective_seconds_per_byte("reduce-scatter", hardware, settings),
            summed=collective_seconds_per_byte("all-reduce", hardware, settings),
        )

    def gathering_s(self, state: StateOption) -> float:
        """Seconds of a placement's gathers in a forward and a backward."""
        return self.gathered * sum(gather.bytes for gather in state.gathers)

    def reducing_s(self, state: StateOption) -> float:
        """Seconds of the sums of its gradients in a step."""
        scattered = state.scattered.bytes if state.scattered else 0
        return self.scattered * scattered + self.summed * state.summed_bytes
