"""What `protrain hardware` prints."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from protrain_plan.records.hardware import Collectives, Hardware, Interconnect
from protrain_plan.rendering.tables import table_of
from protrain_plan.units import format_bytes, format_seconds


def machines_json(machines: Sequence[Hardware]) -> dict[str, Any]:
    """What `protrain hardware list --json` prints."""
    return {"machines": [machine_json(machine) for machine in machines]}


def machine_json(machine: Hardware) -> dict[str, Any]:
    """What `protrain hardware show --json` prints: the record as it is."""
    return asdict(machine)


def machines_text(machines: Sequence[Hardware]) -> RenderableType:
    """What `protrain hardware list` prints."""
    table = table_of("machine", "memory", "bf16", "fp32", "bandwidth", "link", "host", "disk")
    for machine in machines:
        rates = machine.rates
        tiers = {tier.name: tier for tier in machine.tiers}
        table.add_row(
            machine.name,
            format_bytes(machine.device.memory_bytes),
            f"{rates.bfloat16_flops_per_s / 1e12:.4g}" if rates else "-",
            f"{rates.float32_flops_per_s / 1e12:.4g}" if rates else "-",
            _rate(rates.memory_bytes_per_s, "B/s") if rates else "-",
            _rate(tiers["host"].link.read_bytes_per_s, "B/s") if "host" in tiers else "-",
            f"{tiers['host'].capacity_bytes / 2**30:.0f} GiB" if "host" in tiers else "-",
            f"{tiers['disk'].capacity_bytes / 1e12:.2g} TB" if "disk" in tiers else "-",
        )
    notes = (
        "bf16, fp32: TFLOP/s of dense matrix products, at the peak",
        "host, disk: typical ones; --host-memory and --disk say what there is",
        "protrain hardware show NAME has a machine's every number, and its source",
    )
    return Group(table, "", *(Text(note) for note in notes))


def _rate(per_s: float, unit: str) -> str:
    """The rate for a reader, in powers of 1000: `24 GB/s`, `1.01 TB/s`, `989 TFLOP/s`."""
    scale, prefix = (1e9, "G") if per_s < 1e12 else (1e12, "T")
    return f"{per_s / scale:.4g} {prefix}{unit}"


def machine_text(machine: Hardware) -> RenderableType:
    """What `protrain hardware show` prints."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for what, value in _facts(machine):
        table.add_row(what, Text(value))
    head = Text(f"{machine.name}: {machine.device.name} ({machine.device.kind})", style="bold")
    if not machine.sources:
        return Group(head, table)
    # A table, so that the further lines of a long source are indented.
    sources = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    sources.add_column()
    sources.add_column(overflow="fold")
    for source in machine.sources:
        sources.add_row("-", Text(source))
    return Group(head, table, "", Text("sources", style="bold"), sources)


def _facts(machine: Hardware) -> Iterator[tuple[str, str]]:
    """What a machine offers: a word and a sentence for each."""
    device, rates = machine.device, machine.rates
    size, context = format_bytes(device.memory_bytes), format_bytes(device.context_bytes)
    more = format_bytes(device.allocator_bytes)
    held_back = f", and its allocator up to {more} beyond them" if device.allocator_bytes else ""
    yield "memory", f"{size}, of which a process holds {context} besides tensors{held_back}"
    yield "threads", str(device.num_threads)
    if rates is not None:
        yield (
            "compute",
            f"{_rate(rates.bfloat16_flops_per_s, 'FLOP/s')} in bf16,"
            f" {_rate(rates.float32_flops_per_s, 'FLOP/s')} in fp32;"
            f" large matrix products reach {rates.compute_efficiency:.0%}",
        )
        yield (
            "bandwidth",
            f"{_rate(rates.memory_bytes_per_s, 'B/s')}; large operators reach"
            f" {rates.memory_efficiency:.0%}",
        )
        yield "operator", f"at least {format_seconds(rates.operator_s)}"
        yield "AdamW", f"{rates.host_parameters_per_s / 1e9:.3g} G parameters/s in host memory"
    for tier in machine.tiers:
        link = tier.link
        yield (
            tier.name,
            f"{format_bytes(tier.capacity_bytes)}, {_rate(link.read_bytes_per_s, 'B/s')} to the"
            f" device, {_rate(link.write_bytes_per_s, 'B/s')} from it,"
            f" {link.duplex:.0%} of each both ways at once, latency"
            f" {format_seconds(link.latency_s)}",
        )
    yield (
        "contention",
        f"compute keeps {machine.read_contention.compute:.0%} of its speed beside reads,"
        f" {machine.write_contention.compute:.0%} beside writes,"
        f" {machine.update_contention.compute:.0%} beside updates",
    )
    if machine.interconnect is not None:
        yield "devices", _joined(machine.interconnect)
    if rates is not None:
        yield "estimates", trust(machine)


def error_band(machine: Hardware) -> list[float] | None:
    """Measured over estimated seconds, 10th and 90th percentile; None if never compared."""
    rates = machine.rates
    return [rates.error_low, rates.error_high] if rates and rates.error_high else None


def trust(machine: Hardware) -> str:
    """How far estimates of its seconds can be trusted."""
    band = error_band(machine)
    if band is None:
        return "seconds were never compared with measured ones"
    return f"measured steps took {band[0]:.2f} to {band[1]:.2f} times as long"


def _joined(joined: Interconnect) -> str:
    """What joins several devices, as a sentence."""
    speeds = [f"{joined.devices_per_node} in a node", _collected(joined.within)]
    if joined.across is not None:
        speeds.append(f"among nodes {_collected(joined.across)}")
    return (
        f"{', '.join(speeds)}; beside a collective compute keeps {joined.contention.compute:.0%}"
        f" of its speed, a link to a lower tier {joined.link_share:.0%};"
        f" {format_bytes(joined.library_bytes)} held by its library;"
        f" tiers are those {joined.below}"
    )


def _collected(speeds: Collectives) -> str:
    gathered, reduced = speeds.gather_bytes_per_s, speeds.reduce_bytes_per_s
    how = f"{_rate(gathered, 'B/s')} gathered, {_rate(reduced, 'B/s')} reduced"
    return how if gathered != reduced else f"{_rate(gathered, 'B/s')} gathered or reduced"


def probed_text(machine: Hardware, path: Path) -> RenderableType:
    """What `protrain hardware probe` prints."""
    return Group(machine_text(machine), "", Text(f"wrote {path}"))
