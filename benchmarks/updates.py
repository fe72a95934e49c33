"""The host's update lane: parameters per second by threads and optimizer, and many small masters.

    python -m benchmarks.updates [--device NAME] [--threads N...] [--rounds N] [--quick] [--shares]

What a lane runs, through the runtime's own pieces: a chunk of large matrices in host memory,
updated by one thread in whole tensors as it was, and by a team of threads in ranges. Ways take
turns, round by round; what counts are ratios within a round. With an accelerator for `--device`,
copies between it and pinned memory go both ways meanwhile. Optimizers of 8 bits take turns with
fused AdamW, on one thread each; with `--shares` they alone are measured. Run it on a quiet machine.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.processes import Found, described
from protrain_plan.hardware.speeds import in_worker, lane_update, while_copying
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER, OF_8_BITS, optimizer_factory
from protrain_runtime.contract.records.profile import DType, Precision
from protrain_runtime.devices.device import found, on_host
from protrain_runtime.states.master_weights import MasterOptimizer
from protrain_runtime.states.updates import UpdateTeam

MODULE = "benchmarks.updates"
NUM_TENSORS = 2  # of a chunk: matrices of an 8B model have 16 to 58 Mi elements
UNCUT = 2**62
BEFORE = "one thread, whole tensors"

KINDS: tuple[tuple[str, DType, Precision], ...] = (
    ("adamw", "float32", "pure"),
    ("adamw", "bfloat16", "pure"),
    ("adamw", "bfloat16", "master"),
    ("nadam", "float32", "pure"),
    ("nadam", "bfloat16", "master"),
)
"""Fused kernels and a loop of operators; what the optimizer steps on."""

SHARES: tuple[DType, ...] = ("float32", "bfloat16")
"""What parameters are, where optimizers of 8 bits take turns with AdamW."""

SMALL = (1000, 64)
"""Parameters, and elements of each: what an optimizer costs per parameter."""


Seconds = dict[str, list[tuple[float, float]]]
"""By way, of each round: by the clock, and of all processors together."""


class Way(NamedTuple):
    """One way to update the chunk."""

    label: str
    update: Callable[[], None]


def main() -> None:
    arguments = _arguments()
    here = found(arguments.device)
    torch.set_num_threads(max(torch.get_num_threads(), max(arguments.threads) + 1))
    document: Found = {
        **described(MODULE),
        "device": str(here),
        "processors": os.cpu_count(),
        "num_parameters": arguments.parameters,
        "num_tensors": NUM_TENSORS,
        "load": [round(os.getloadavg()[0], 1)],
    }
    if not arguments.shares:
        document["lane"] = [
            {
                "optimizer": optimizer,
                "dtype": dtype,
                "precision": precision,
                "seconds": _lane_seconds(arguments, here, optimizer, dtype, precision),
            }
            for optimizer, dtype, precision in KINDS
        ]
        document["masters"] = {
            "num_parameters": SMALL[0],
            "elements": SMALL[1],
            "seconds": _small_masters(arguments.rounds),
        }
    else:
        document["shares"] = [
            {"dtype": dtype, "seconds": _seconds_by_optimizer(arguments, here, dtype)}
            for dtype in SHARES
        ]
    document["load"].append(round(os.getloadavg()[0], 1))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(page(document))
    print(page(document), end="")


def _lane_seconds(
    arguments: argparse.Namespace,
    device: torch.device,
    optimizer: str,
    dtype: DType,
    precision: Precision,
) -> Seconds:
    """Seconds of an update of the chunk, by way, one of each round."""
    make = partial(lane_update, dtype, optimizer=optimizer, precision=precision)
    teams = [UpdateTeam(number) for number in arguments.threads]
    size = arguments.parameters
    # Each tensor by itself: with master weights, an optimizer was made for each.
    parts = [
        make(UpdateTeam(1, longest=UNCUT), num_parameters=size // NUM_TENSORS)
        for _ in range(NUM_TENSORS)
    ]

    def one_by_one() -> None:
        for part in parts:
            part()

    ways = [Way(BEFORE, one_by_one)]
    for number, team in zip(arguments.threads, teams, strict=True):
        update = make(team, num_parameters=size, num_tensors=NUM_TENSORS)
        ways.append(Way(f"ranges, {number} thread{'s' * (number > 1)}", update))
    try:
        return _in_turns(ways, arguments.rounds, device)
    finally:
        for team in teams:
            team.close()


def _seconds_by_optimizer(
    arguments: argparse.Namespace, device: torch.device, dtype: DType
) -> Seconds:
    """Seconds of an update of the chunk on one thread, by optimizer: AdamW first."""
    ways = [
        Way(
            optimizer,
            lane_update(
                dtype,
                UpdateTeam(),
                num_parameters=arguments.parameters,
                num_tensors=NUM_TENSORS,
                optimizer=optimizer,
            ),
        )
        for optimizer in (DEFAULT_OPTIMIZER, *OF_8_BITS)
    ]
    return _in_turns(ways, arguments.rounds, device)


def _small_masters(num_rounds: int) -> Seconds:
    """Seconds of a step on many small bfloat16 parameters with masters, by way."""
    count, elements = SMALL
    factory = optimizer_factory("adamw")

    def parameters() -> list[nn.Parameter]:
        made = [nn.Parameter(torch.zeros(elements, dtype=torch.bfloat16)) for _ in range(count)]
        for each in made:
            each.grad = torch.full_like(each, 1e-3)
        return made

    each = [MasterOptimizer([parameter], factory) for parameter in parameters()]
    together = MasterOptimizer(parameters(), factory)
    together.room_elements = count * elements

    def one_by_one() -> None:
        for optimizer in each:
            optimizer.step()

    ways = [Way("an optimizer for each", one_by_one), Way("in batches", together.step)]
    return _in_turns(ways, num_rounds, torch.device("cpu"))


def _in_turns(ways: Sequence[Way], num_rounds: int, device: torch.device) -> Seconds:
    def rounds() -> Seconds:
        seconds: Seconds = {way.label: [] for way in ways}
        for number in range(num_rounds + 2):
            for way in ways:
                start, busy = time.perf_counter(), time.process_time()
                way.update()
                if number >= 2:  # the first two make states and warm up
                    by_clock, by_processors = (
                        time.perf_counter() - start,
                        time.process_time() - busy,
                    )
                    seconds[way.label].append((by_clock, by_processors))
        return seconds

    def in_lane() -> Seconds:
        return in_worker(rounds)

    return in_lane() if on_host(device) else while_copying(device, in_lane)


def host_shares(document: Mapping[str, Any]) -> dict[str, float]:
    """Parameters of float32 per second, over AdamW's in the same round, by optimizer: medians."""
    (seconds,) = (one["seconds"] for one in document["shares"] if one["dtype"] == "float32")
    before = seconds[DEFAULT_OPTIMIZER]
    return {
        optimizer: statistics.median(_ratios(before, seconds[optimizer], 0))
        for optimizer in OF_8_BITS
    }


# --- the page -------------------------------------------------------------------------------------


def page(document: Mapping[str, Any]) -> str:
    """The results for people."""
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    low, high = sorted(document["load"])
    beside = (
        "Nothing is copied meanwhile."
        if document["device"] == "cpu"
        else f"Copies between pinned memory and {document['device']} go both ways meanwhile."
    )
    lines = [
        "# Speed of the host's update lane",
        "",
        f"`{document['command']}`, {document['date']}, commit {document['commit']}",
        "",
        f"{document['system']}; {versions}. Load of the machine: {low} to {high}.",
        "",
        f"A chunk of {document['num_parameters'] / 2**20:.0f} Mi parameters in"
        f" {document['num_tensors']} tensors in host memory. {beside} Ways take turns; a ratio is"
        " of two that ran in one round, in the median of the rounds and from their first to their"
        " third quartile: by the clock, and of processor time, which others' work disturbs less."
        " Each way has memory of its own; where it lies makes equal ways differ by up to a tenth."
        " G/s are 10^9 parameters per second in the median.",
        *_warning(document),
        "",
        *(_lane_rows(document) if "lane" in document else _share_rows(document)),
    ]
    return "\n".join(lines) + "\n"


def _lane_rows(document: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "| optimizer | dtype | precision | way | G/s | times as fast | times less processor time |"
    )
    yield "|---|---|---|---|---:|---:|---:|"
    for kind in document["lane"]:
        before = kind["seconds"][BEFORE]
        for label, seconds in kind["seconds"].items():
            rate = document["num_parameters"] / statistics.median(one for one, _ in seconds)
            yield (
                f"| {kind['optimizer']} | {kind['dtype']} | {kind['precision']} | {label} |"
                f" {rate / 1e9:.2f} | {_ratio(before, seconds, 0)} | {_ratio(before, seconds, 1)} |"
            )
    masters = document["masters"]
    yield ""
    yield (
        f"Master weights of {masters['num_parameters']} parameters of {masters['elements']}"
        " elements each, AdamW, in the computing thread:"
    )
    yield from ("", "| way | us per parameter | times as fast | times less processor time |")
    yield "|---|---:|---:|---:|"
    yield from _master_rows(masters)


def _share_rows(document: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Optimizers of 8 bits (bitsandbytes), which take turns with fused AdamW on one thread in"
        " ranges. Estimates for a machine take float32 shares by the clock (`host_share` in"
        " `protrain_plan/models/optimizers.py`)."
    )
    yield from ("", "| optimizer | dtype | M/s | share of AdamW's speed | by processor time |")
    yield "|---|---|---:|---:|---:|"
    for kind in document["shares"]:
        before = kind["seconds"][DEFAULT_OPTIMIZER]
        for optimizer, seconds in kind["seconds"].items():
            rate = document["num_parameters"] / statistics.median(one for one, _ in seconds)
            yield (
                f"| {optimizer} | {kind['dtype']} | {rate / 1e6:.0f} |"
                f" {_ratio(before, seconds, 0, digits=4)} |"
                f" {_ratio(before, seconds, 1, digits=4)} |"
            )


def _master_rows(masters: Mapping[str, Any]) -> Iterator[str]:
    before = next(iter(masters["seconds"].values()))
    for label, seconds in masters["seconds"].items():
        each = statistics.median(one for one, _ in seconds) / masters["num_parameters"]
        yield (
            f"| {label} | {each * 1e6:.1f} |"
            f" {_ratio(before, seconds, 0)} | {_ratio(before, seconds, 1)} |"
        )


def _ratio(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    clock: int,
    *,
    digits: int = 2,
) -> str:
    """Of runs of one round each, by one of the clocks: the median, and the quartiles around it."""
    if before is after:
        return "1"
    found = statistics.quantiles(_ratios(before, after, clock), n=4, method="inclusive")
    low, middle, high = (f"{one:.{digits}f}" for one in found)
    return f"{middle} ({low} to {high})"


def _ratios(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], clock: int
) -> list[float]:
    return [one[clock] / other[clock] for one, other in zip(before, after, strict=True)]


def _warning(document: Mapping[str, Any]) -> Iterator[str]:
    """Where others computed on the same processors."""
    if max(document["load"]) > document["processors"]:
        yield ""
        yield (
            f"**Others computed on these {document['processors']} processors at the same time:**"
            " rates are lower than the machine's, and more threads than one gain little or nothing."
            " Ratios of processor time say what a way costs, not how fast several threads are."
        )


def _powers(most: int) -> list[int]:
    """1, 2, 4 ... and the most."""
    return sorted({2**n for n in range(most.bit_length()) if 2**n < most} | {most})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("--device", default="cpu", help="whose copies run beside the lane")
    parser.add_argument("--threads", nargs="+", type=int, default=_powers(os.cpu_count() or 1))
    parser.add_argument("--parameters", type=int, default=2**26, help="of the chunk")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/updates.json"))
    parser.add_argument("--quick", action="store_true", help="a tiny chunk, on any machine")
    parser.add_argument("--shares", action="store_true", help="optimizers of 8 bits alone")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.parameters, arguments.rounds, arguments.threads = 2**20, 2, (1, 2)
    return arguments


if __name__ == "__main__":
    main()
