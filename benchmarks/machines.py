"""Five machines, from their vendors' data sheets."""

from dataclasses import dataclass

from protrain_runtime.contract.records.hardware import (
    Contention,
    Device,
    Hardware,
    Link,
    Rates,
    Tier,
)

CONTEXT_BYTES = 600_000_000
LATENCY_S = 20e-6
DUPLEX = 0.85

ADAMW_BYTES_PER_PARAMETER = 28
"""Device traffic of AdamW: reads p, g (2 B each), master, m, v (4 B each), writes p and those."""


HOST_BYTES_PER_PARAMETER = ADAMW_BYTES_PER_PARAMETER + 6
"""Host traffic: AdamW's, the gradient that arrives, and the parameter that is sent twice."""


def updated_per_s(rates: Rates) -> float:
    """Parameters that the host of one device updates per second, as estimates have them."""
    bandwidth = rates.host_bandwidth_bytes_per_s
    threads = rates.host_parameters_per_s
    return min(threads, bandwidth / HOST_BYTES_PER_PARAMETER) if bandwidth else threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine with the speeds that an analytic profile needs.

    `flops_per_s` is the data sheet's peak: dense, bf16 inputs.
    """

    hardware: Hardware
    flops_per_s: float
    memory_bytes_per_s: float
    host_parameters_per_s: float

    @property
    def name(self) -> str:
        return self.hardware.name

    @property
    def device_parameters_per_s(self) -> float:
        """The speed of AdamW on the device, bound by its memory."""
        return self.memory_bytes_per_s / ADAMW_BYTES_PER_PARAMETER


def _machine(
    name: str,
    *,
    memory_bytes: int,
    flops_per_s: float,
    memory_bytes_per_s: float,
    link_bytes_per_s: float,
    host_bytes: int = 8 * 10**12,  # as much as the largest model's states: see [Note: host memory]
    disk_bytes: int = 0,
    host_parameters_per_s: float = 1.5e9,  # order of DeepSpeed's CPU-Adam (ZeRO-Offload, table 4)
) -> Machine:
    # [Note: host memory] Nobody puts 8 TB beside an RTX 3090. The grid's variable is the device's
    # budget; a host that is never short keeps it the only one. GH200 covers a short host.
    link = Link(
        read_bytes_per_s=link_bytes_per_s,
        write_bytes_per_s=link_bytes_per_s,
        latency_s=LATENCY_S,
        duplex=DUPLEX,
    )
    tiers = [Tier(name="host", capacity_bytes=host_bytes, link=link)]
    if disk_bytes:
        # Two data-centre NVMe drives or one of PCIe 5: 6 GB/s read, 4 GB/s written, sustained.
        nvme = Link(read_bytes_per_s=6e9, write_bytes_per_s=4e9, latency_s=1e-4, duplex=DUPLEX)
        tiers.append(Tier(name="disk", capacity_bytes=disk_bytes, link=nvme))
    return Machine(
        hardware=Hardware(
            name=name,
            device=Device(
                kind="cuda",
                name=name,
                memory_bytes=memory_bytes,
                context_bytes=CONTEXT_BYTES,
                num_threads=32,
            ),
            tiers=tuple(tiers),
            read_contention=Contention(compute=1.0, lane=1.0),
            write_contention=Contention(compute=0.97, lane=1.0),
            update_contention=Contention(compute=1.0, lane=1.0),
        ),
        flops_per_s=flops_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        host_parameters_per_s=host_parameters_per_s,
    )


MACHINES: tuple[Machine, ...] = (
    _machine(  # NVIDIA Ampere GA102 whitepaper, table of GeForce cards; PCIe 3 x16
        "rtx3090",
        memory_bytes=24 * 10**9,
        flops_per_s=71e12,
        memory_bytes_per_s=936e9,
        link_bytes_per_s=12e9,
    ),
    _machine(  # NVIDIA Ada GPU architecture whitepaper, appendix A; PCIe 4 x16
        "rtx4090",
        memory_bytes=24 * 10**9,
        flops_per_s=165e12,
        memory_bytes_per_s=1008e9,
        link_bytes_per_s=24e9,
    ),
    _machine(  # NVIDIA A100 Tensor Core GPU data sheet, 80GB SXM; PCIe 4 x16
        "a100",
        memory_bytes=80 * 10**9,
        flops_per_s=312e12,
        memory_bytes_per_s=2039e9,
        link_bytes_per_s=24e9,
    ),
    _machine(  # NVIDIA H200 Tensor Core GPU data sheet, SXM; PCIe 5 x16
        "h200",
        memory_bytes=141 * 10**9,
        flops_per_s=989e12,
        memory_bytes_per_s=4.8e12,
        link_bytes_per_s=50e9,
    ),
    _machine(  # NVIDIA GH200 Grace Hopper Superchip data sheet, 96 GB HBM3; NVLink-C2C
        "gh200",
        memory_bytes=96 * 10**9,
        flops_per_s=989e12,
        memory_bytes_per_s=4.0e12,
        link_bytes_per_s=300e9,
        host_bytes=480 * 10**9,
        disk_bytes=16 * 10**12,
        host_parameters_per_s=3e9,
    ),
)
