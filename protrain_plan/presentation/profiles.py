"""The output of `protrain profile`, `protrain hardware` and `protrain models`."""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from protrain_plan.presentation.terminal import Table, Text, fields_of, table_of, wrote
from protrain_runtime.contract.program.program import unit_words
from protrain_runtime.contract.records.folding import unfold
from protrain_runtime.contract.records.hardware import KEPT_PROBE, Hardware, is_accelerator
from protrain_runtime.contract.records.profile import HANDS_ON, Compilation, Profile
from protrain_runtime.contract.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from protrain_plan.models.presets import Preset


def profile_json(profile: Profile) -> dict[str, Any]:
    """Return what `protrain profile --json` prints."""
    keep, estimated = [unit.cost("keep") for unit in profile.units], profile.method == "estimated"
    return {
        **fields_of(profile.workload, "model", "compile"),
        "hardware": profile.hardware.name,
        **fields_of(profile, "method", "compilation", "model_fingerprint", "repetitions"),
        **fields_of(profile.hardware.device, "context_bytes", "allocator_bytes"),
        "num_units": len(profile.units),
        "num_parameters": sum(unit.num_parameters for unit in profile.units),
        "model_states_bytes": sum(unit.model_state_bytes for unit in profile.units),
        "activation_bytes": sum(cost.kept_bytes for cost in keep),
        "forward_seconds": sum(cost.forward_s for cost in keep),
        "backward_seconds": sum(cost.backward_s for cost in keep),
        "unsteady": unsteady(profile),
        "caveats": [*caveats(profile)],
        "measured_over_estimated": error_band(profile.hardware) if estimated else None,
    }


def caveats(profile: Profile) -> Iterator[str]:
    """Remarks on estimates, steps that differ, repeated layers, and frozen or unpacked weights."""
    if profile.method == "estimated":
        if is_accelerator(profile.hardware.device.kind):
            yield (
                "estimated seconds are of PyTorch's own kernels: fused ones (Liger, Transformer"
                " Engine, torch.compile) are faster"
            )
        if ":" in profile.optimizer.name:  # a user's own
            yield (
                f"seconds of {profile.optimizer.name} are unknown: an update is assumed to move"
                " its bytes and to compute nothing; measure on the device"
            )
        if profile.workload.compile:
            yield (
                "compiled blocks: no fusion is assumed, bytes and seconds are those without a"
                " compiler; measure on the device before a plan has to hold"
            )
    if KEPT_PROBE in profile.hardware.sources:
        yield f"the machine's probe is {KEPT_PROBE}"
    if profile.varies:
        yield f"the model does other work from step to step: {profile.varies}"
    yield from repeats(profile)
    if (other := profile.beside) is not None:
        yield (
            f"beside it, frozen: {other.model}: {format_bytes(other.weight_bytes)} of weights, up"
            f" to {format_bytes(other.forward_bytes)} for its forward, which takes"
            f" {format_seconds(other.forward_s)} of each micro-batch"
        )
    if handing := [unit.name for unit in profile.units if unit.stays == HANDS_ON]:
        more = f" and {len(handing) - 1} more" if len(handing) > 1 else ""
        yield (
            f"a plan can neither move nor recompute {handing[0]}{more}, whose forward hands tensors"
            " on in its arguments. If these are a cache of keys and values (past_key_values,"
            " use_cache=True), call the model without it: training has no use for one"
        )
    workload = profile.workload
    config: Any = None
    with suppress(ValueError, RecursionError):  # a record may hold any text
        config = json.loads(workload.model_config)
    config = config if isinstance(config, dict) else {}
    towers = [words for key, words in _TOWERS.items() if key in config]
    if towers and config.get("model_type") not in _FED:
        yield (
            f"batches are text only: the model's parts for {' and '.join(towers)} are loaded but"
            " get no gradients; a factory can make other batches"
        )
    frozen = {
        match[1]: (match[2].split("x"), int(match[3]) // 8 * len(unfold(match[1]) or [match[1]]))
        for match in map(_FROZEN.fullmatch, profile.tensors)
        if match is not None
    }
    experts = {
        name: math.prod(map(int, sizes)) * width
        for name, (sizes, width) in frozen.items()
        if len(sizes) == 3
    }
    if workload.quantize and experts:
        names = dict.fromkeys(name.rpartition(".")[2] for name in experts)
        yield (
            f"{format_bytes(sum(experts.values()))} of weights stay unpacked:"
            " bitsandbytes packs linear layers, and these are parameters of several experts each"
            f" ({', '.join(names)})"
        )
    beside = dict.fromkeys(
        name.removesuffix(".weight").rpartition(".")[2]
        for name, (sizes, _) in frozen.items()
        if len(sizes) < 4 and _IN_BLOCKS.search(name) and ".base_layer." not in name
    )
    if workload.adapter and " targets=" not in workload.adapter and beside:
        yield f"PEFT's all-linear adds no adapters to {', '.join(beside)}"


def repeats(profile: Profile) -> list[str]:
    """Remarks on layers that run several times in a forward: how each call gets a unit."""
    return [
        f"{words}: make it one call on all inputs (torch.cat([query, document])), or give each call"
        " a module of its own that calls the layer (docs/how-to/profile.md)"
        for words in dict.fromkeys(u.runs_once for u in profile.units if u.kind == "part")
        if words
    ]


_TOWERS = {"vision_config": "images", "audio_config": "sound"}
_FED = ("llava", "vipllava", "clip")
"""Architectures whose batches have images."""
_FROZEN = re.compile(r"(\S+) ([0-9]{1,12}(?:x[0-9]{1,12}){1,8}) [a-z]*float([0-9]{1,2}) frozen.*")
_IN_BLOCKS = re.compile(r"\.[0-9]+(-[0-9]+)?\.")


def compiled_text(found: Compilation | None) -> str | None:
    """Say what the compiler did."""
    if found is None:
        return None
    graphs = f"{found.num_graphs} graph{'s' * (found.num_graphs > 1)}"
    cache = {"cold": " (cold)", "partly": " (partly warm)", "warm": " (warm)", "none": ""}
    return f"compiled {graphs} in {format_seconds(found.seconds)}{cache[found.cache]}"


STEADY = 1.2
"""Slowest over fastest whole step on an idle machine. Medians of three were up to 15 % off where
other processes change its speed from second to second (`passes`)."""


def unsteady(profile: Profile) -> str | None:
    """A warning if repetitions took very different times."""
    found = profile.repetitions
    if found is None or found.high <= STEADY * found.low:
        return None
    by = f"{found.high / found.low - 1:.0%}"
    return f"repetitions varied by {by}: the machine was busy; profile again on a quiet one"


def profile_text(profile: Profile, path: Path) -> RenderableType:
    """Return what `protrain profile` prints."""
    table = table_of("module", "params", "states", "kept", "input", "forward", "backward")
    alike = itertools.groupby(
        enumerate(profile.units),
        key=lambda u: (u[1].kind, u[1].num_parameters, u[1].parameter_bytes, u[1].forms),
    )
    for _, run in alike:
        (first, unit), *others = run
        keep, name = unit.cost("keep"), unit_words(profile.units, first)
        if others:  # layers.0-11
            name += f"-{unit_words(profile.units, others[-1][0]).rpartition('.')[2]}"
        forms = {cost.form: cost for cost in unit.forms}
        table.add_row(
            name,
            f"{unit.num_parameters / 1e6:.1f} M",
            _short(unit.model_state_bytes),
            _short(keep.kept_bytes),
            _short(forms["full"].kept_bytes) if "full" in forms else "",
            format_seconds(keep.forward_s),
            format_seconds(keep.backward_s),
        )
    data, machine = profile_json(profile), profile.hardware
    size = data["allocator_bytes"]
    held_back = f", {format_bytes(size)} for its allocator" if size else ""
    estimated = f"estimated for {machine.name}: {trust(machine)}"
    notes = (
        "kept: from forward to backward; input: kept where the module is recomputed",
        f"{data['num_parameters'] / 1e6:.1f} M parameters,"
        f" {format_bytes(data['model_states_bytes'])} of model states,"
        f" {format_bytes(data['activation_bytes'])} of activations,"
        f" {format_bytes(data['context_bytes'])} besides tensors{held_back};"
        f" forward and backward {format_seconds(data['forward_seconds'])}"
        f" + {format_seconds(data['backward_seconds'])}",
        estimated if profile.method == "estimated" else None,
        compiled_text(profile.compilation),
        *caveats(profile),
    )
    warning = [Text(data["unsteady"], style="yellow")] if data["unsteady"] else []
    return Group(table, "", *(Text(said) for said in notes if said), *warning, wrote(path))


def _short(size: int) -> str:
    """The size in three digits, `54.0 MiB`: six columns and a name fit in 80 characters."""
    if abs(size) < 1024:
        return format_bytes(size)
    number, unit = format_bytes(size).split()
    whole = number.partition(".")[0]
    return f"{float(number):.{max(0, 3 - len(whole))}f} {unit}"


def machines_text(machines: Sequence[Hardware]) -> RenderableType:
    """Return what `protrain hardware list` prints."""
    table = table_of("machine", "memory", "bf16", "fp32", "bandwidth", "link", "host", "disk")
    for machine in machines:
        rates = machine.rates
        tiers = {tier.name: tier for tier in machine.tiers}
        host, disk = tiers.get("host"), tiers.get("disk")
        table.add_row(
            machine.name,
            format_bytes(machine.device.memory_bytes),
            f"{rates.bfloat16_flops_per_s / 1e12:.4g}" if rates else "-",
            f"{rates.float32_flops_per_s / 1e12:.4g}" if rates else "-",
            _rate(rates.memory_bytes_per_s) if rates else "-",
            _rate(host.link.read_bytes_per_s) if host else "-",
            f"{host.capacity_bytes / 2**30:.0f} GiB" if host else "-",
            f"{disk.capacity_bytes / 1e12:.2g} TB" if disk else "-",
        )
    return Group(
        table,
        "",
        Text("bf16, fp32: TFLOP/s of dense matrix products, at the peak"),
        Text("host, disk: typical sizes; set yours with --host-memory and --disk"),
        Text("protrain hardware show NAME prints every number of a machine with its source"),
    )


def _rate(per_s: float, unit: str = "B/s") -> str:
    """The rate in powers of 1000: `24 GB/s`, `1.01 TB/s`, `989 TFLOP/s`."""
    scale, prefix = (1e9, "G") if per_s < 1e12 else (1e12, "T")
    return f"{per_s / scale:.4g} {prefix}{unit}"


def machine_text(machine: Hardware, *, written: Path | None = None) -> RenderableType:
    """The text of `protrain hardware show`: all numbers by their names in the file."""
    record = asdict(machine)
    tiers = {tier.pop("name"): tier for tier in record.pop("tiers")}
    record = {"device": record.pop("device"), "rates": record.pop("rates"), **tiers, **record}
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(record):
        table.add_row(name, value)
    if machine.rates is not None:
        table.add_row("estimates", trust(machine))
    head = Text(f"{machine.name}: {machine.device.name} ({machine.device.kind})", style="bold")
    parts: list[RenderableType] = [head, table]
    if machine.sources:
        # A table, so that the further lines of a long source are indented.
        sources = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
        sources.add_column()
        sources.add_column(overflow="fold")
        for source in machine.sources:
            sources.add_row("-", source)
        parts += ["", Text("sources", style="bold"), sources]
    if written is not None:
        parts += ["", wrote(written)]
    return Group(*parts)


_FORMATS: dict[str, Callable[[Any], str]] = {
    "_bytes_per_s": _rate,
    "_flops_per_s": lambda value: _rate(value, "FLOP/s"),
    "_parameters_per_s": lambda value: f"{value / 1e9:.3g} G/s",
    "_bytes": format_bytes,
    "_hour": "{:g}".format,
    "_w": "{:g} W".format,
    "_s": format_seconds,
    "seconds": format_seconds,
}
"""Formats of numbers by the ends of their names; other fractions are per cent."""
_TOLD = ("name", "kind", "sources", "published_error", "error_low", "error_high")
"""Fields that are in the head, or in sentences."""


def _facts(record: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and values of fields; names of inner records' fields are paths."""
    for name, value in record.items():
        if not value or name in _TOLD:
            continue
        if isinstance(value, dict):
            yield from _facts(value, f"{above}{name}.")
            continue
        plain = "{:.0%}".format if isinstance(value, float) else str
        form = next((form for end, form in _FORMATS.items() if name.endswith(end)), plain)
        yield f"{above}{name}", form(value)


def error_band(machine: Hardware) -> list[float] | None:
    """Measured over estimated seconds, 10th and 90th percentile; None without comparisons."""
    low, high = machine.error_band
    return [low, high] if high else None


def trust(machine: Hardware) -> str:
    """A sentence about the errors of estimated seconds on this machine."""
    band, published = error_band(machine), machine.published_error
    if band is None:
        return "estimates not validated on this device"
    took = f"took {band[0]:.2f} to {band[1]:.2f} times as long"
    if published is None or machine.is_compared:
        return f"measured steps {took}"
    return f"{published.runs} published runs of its architecture {took} ({published.source})"


def presets_text(presets: Sequence["Preset"]) -> RenderableType:
    """Return what `protrain models` prints."""
    table = table_of("name", "parameters", "layers", "hidden", "source", words=(0, 4))
    for preset in presets:
        # Of a Hugging Face URL the repository is enough; other sources are sentences.
        repository = preset.source.removeprefix("https://huggingface.co/").partition("/blob/")[0]
        table.add_row(
            preset.name,
            f"{preset.num_parameters / 1e6:,.1f} M",
            str(preset.num_layers),
            str(preset.hidden_size),
            Text(repository),
        )
    return table
