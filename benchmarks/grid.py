"""The grid that users have: machines of the catalogue with what they have, and what is trained.

    python -m benchmarks.grid        draw it again, in an hour (benchmarks/grid.json)

Four setups on every machine, six budgets each. A setup is a published model with all parameters
trained or adapters alone, clipped or not, so many micro-batches, devices and tokens. The full
product would be ten thousands of setups; drawn are those in which every pair of values meets on
some machine, from a fixed seed, and only those that fit the machine. Profiles are estimates, which
the user's cache keeps.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

from protrain_plan.commands.measuring import ProfileRequest, estimated
from protrain_plan.hardware.catalogue import hardware_names, load_hardware
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER
from protrain_plan.planning.model.decision_model import least_lane_seconds
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.profiling.estimate_cache import EstimateCache
from protrain_plan.simulation.group import group_on, profile_of_rank
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.adapters import parse_lora
from protrain_runtime.contract.records.files import replace_text
from protrain_runtime.contract.records.plan import ALONE, Budgets, DeviceGroup, Updates
from protrain_runtime.contract.records.profile import Profile, Workload

DRAWN_GRID = Path(__file__).parent / "grid.json"

SHARES = (0.0, 0.1, 0.25, 0.45, 0.7, 1.0)
"""Where budgets lie between the smallest and the largest, on a logarithmic scale."""

SMALLEST = 1.01
"""The smallest budget, in times what the leanest plan needs."""

SETUPS = 4
"""Setups of every machine."""

MODELS = (
    *("gpt2-xl", "llama-3.1-8b", "llama-2-13b", "mistral-7b", "gemma-2-27b", "opt-30b", "t5-11b"),
    *("qwen2.5-32b", "mixtral-8x7b", "llama-3.1-70b", "llama-3.1-405b"),
)
ADAPTERS = ("", "r=16")
UPDATES: tuple[Updates, ...] = ("in backward", "after backward")
MICRO_BATCHES = (1, 4, 16)
DEVICES = (1, 8)
TOKENS = (1024, 4096, 16384, 32768, 131072)
DRAWN = 400
"""Setups that are looked at for one that fits a machine and has pairs that no other has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model, trained on a machine; `tokens` is one sequence, which is the micro-batch."""

    machine: str
    model: str
    adapter: str
    updates: Updates
    micro_batches: int
    num_devices: int
    tokens: int

    def __str__(self) -> str:
        words = [self.model, "LoRA" if self.adapter else "full"]
        words += ["clipped"] if self.updates == "after backward" else []
        words.append(f"{self.micro_batches} x {self.tokens}")
        words += [f"{self.num_devices} devices"] if self.num_devices > 1 else []
        return f"{self.machine}: {', '.join(words)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A setup with one budget of the device, context included."""

    setup: Setup
    share: float
    device: int

    def __str__(self) -> str:
        return f"{self.setup}, {self.device / 2**30:.1f} GiB ({self.share:g})"

    def problems(self) -> list[Problem]:
        """The planning problems, one for each number of replicas to choose from."""
        return problems(self.setup, self.device)

    @property
    def budgets(self) -> Budgets:
        """The device's, and all that the machine has below it."""
        return budgets(self.setup, self.device)


def estimate(
    model: str, machine: str, tokens: int, adapter: str = "", batch_size: int = 1
) -> Profile:
    """A model of the catalogue on a machine of the catalogue, in bfloat16.

    A batch has `batch_size` sequences of `tokens` tokens.
    """
    workload = Workload(
        model=model,
        model_config="",
        batch_size=batch_size,
        seq_len=tokens,
        dtype="bfloat16",
        device="cuda",
        seed=0,
        precision="pure" if adapter else "master",
        adapter=str(parse_lora(adapter)) if adapter else "",
    )
    request = ProfileRequest(workload=workload, optimizer=DEFAULT_OPTIMIZER)
    machines = [load_hardware(machine)]
    [[profile]] = estimated([request], machines, lambda *_: None, EstimateCache())
    return profile


@cache
def profiled(setup: Setup) -> Profile:
    """The estimate of a setup's model on its machine."""
    return estimate(setup.model, setup.machine, setup.tokens, setup.adapter)


def group_of(setup: Setup) -> DeviceGroup:
    """The setup's devices, on as few nodes as they fit."""
    if setup.num_devices == 1:
        return ALONE
    return group_on(load_hardware(setup.machine), setup.num_devices)


def budgets(setup: Setup, device: int) -> Budgets:
    """One device's: all that its part of the machine has below it."""
    hardware = profile_of_rank(profiled(setup), group_of(setup)).hardware
    there = {tier.name: tier.capacity_bytes for tier in hardware.tiers}
    return Budgets(device=device, host=there.get("host", 0), disk=there.get("disk", 0))


def problems(setup: Setup, device: int) -> list[Problem]:
    """The planning problems of a setup, one for each number of replicas to choose from."""
    group = group_of(setup)
    counts = group.replica_counts if setup.num_devices > 1 else (1,)
    return [
        Problem.of(
            profiled(setup),
            budgets(setup, device),
            settings=replace(
                OVERLAPPING,
                updates=setup.updates,
                micro_batches=setup.micro_batches,
                group=replace(group, num_replicas=number),
            ),
        )
        for number in counts
    ]


def cases_of(setup: Setup) -> list[Case]:
    """A case for each share; none where the machine, or the model, cannot train the setup.

    The largest budget is what everything kept and persistent needs, or the device's memory.
    """
    memory = load_hardware(setup.machine).device.memory_bytes
    try:
        problem = problems(setup, memory)[0]
    except ProtrainError:  # more tokens than the model has positions
        return []
    if least_lane_seconds(problem.speculating()) is None:
        return []
    lean = min_memory(problem.speculating())
    if lean is None:
        return []
    besides = problem.profile.hardware.device.besides_bytes
    smallest = round((lean.bytes + besides) * SMALLEST)
    plain = tuple((0, 0) for _ in problem.options)
    largest = min(memory, max(problem.static_bytes(plain)) + besides)
    if smallest > largest:
        return []
    sizes = [round(smallest * (largest / smallest) ** share) for share in SHARES]
    return [
        Case(setup=setup, share=share, device=size)
        for share, size in zip(SHARES, sizes, strict=True)
    ]


def _drawn(name: str, order: random.Random) -> Setup:
    hardware = load_hardware(name)
    most = hardware.interconnect.devices_per_node if hardware.interconnect else 1
    return Setup(
        machine=name,
        model=order.choice(MODELS),
        adapter=order.choice(ADAPTERS),
        updates=order.choice(UPDATES),
        micro_batches=order.choice(MICRO_BATCHES),
        num_devices=min(order.choice(DEVICES), most),
        tokens=order.choice(TOKENS),
    )


def grid() -> Iterator[list[Case]]:
    """The cases of every setup, machine by machine."""
    order, met = random.Random(0), Counter[object]()
    for _, name in product(range(SETUPS), hardware_names()):
        drawn = [_drawn(name, order) for _ in range(DRAWN)]

        def rare(setup: Setup) -> float:
            return sum(1 / (1 + met[pair]) for pair in combinations(asdict(setup).items(), 2))

        for setup in sorted(dict.fromkeys(drawn), key=rare, reverse=True):
            if cases := cases_of(setup):
                met.update(combinations(asdict(setup).items(), 2))
                yield cases
                break


def cases() -> list[Case]:
    """The grid's cases, as they were drawn."""
    return [
        Case(setup=Setup(**drawn["setup"]), share=share, device=size)
        for drawn in json.loads(DRAWN_GRID.read_text())
        for share, size in zip(SHARES, drawn["devices"], strict=True)
    ]


def sample(count: int) -> list[Case]:
    """So many of the grid's cases, from all its parts; more are the same and others."""
    found = cases()
    random.Random(1).shuffle(found)
    return found[:count]


def main() -> None:
    drawn = []
    for of_setup in grid():
        print(of_setup[0].setup, flush=True)
        devices = [case.device for case in of_setup]
        drawn.append({"setup": asdict(of_setup[0].setup), "devices": devices})
    lines = ",\n".join(json.dumps(one) for one in drawn)
    replace_text(DRAWN_GRID, f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
