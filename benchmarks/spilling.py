"""A step that spills twice the free memory: its predicted and its measured seconds.

    python -m benchmarks.spilling [--model NAME] [--device-memory SIZE] [--steps N]

The model is profiled here, and planned twice: past the page cache, which is what plans do, and
through it, as if it held all. Either plan trains in a control group that has, beside what the plan
takes of the device, half as much memory as it keeps on disk. Both runs take turns, in processes of
their own. It needs a user who may make control groups, and a disk that nobody else uses.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.control_group import memory_group, run_inside
from benchmarks.peers.tables import markdown_table
from benchmarks.processes import Found, described
from protrain_plan.hardware.probe import processor_name
from protrain_runtime.contract.records import read_plan, read_profile
from protrain_runtime.contract.units import format_bytes, parse_bytes

MODULE = "benchmarks.spilling"
WAYS = ("past the cache", "through the cache")
PROTRAIN = (sys.executable, "-m", "protrain_plan.cli")
FREE_PART = 0.5
"""Of what is on disk, the memory that is free beside the plan's."""


def main() -> None:
    arguments = _arguments()
    arguments.work.mkdir(parents=True, exist_ok=True)
    document = measured(arguments)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(page(document))
    print(page(document), end="")


def measured(arguments: argparse.Namespace) -> Found:
    """The document: the machine, the disk as it was observed, and both plans with their runs."""
    work: Path = arguments.work
    profile, spill = work / "profile.yaml", work / "spill"
    spill.mkdir(exist_ok=True)
    load = [round(os.getloadavg()[0], 1)]
    size = ("--batch-size", str(arguments.batch_size), "--seq-len", str(arguments.seq_len))
    where = ("--spill-directory", str(spill))
    if not arguments.resume:
        _protrain("profile", arguments.model, *size, *where, "--steps", "3", "-o", str(profile))
    cases: Found = {}
    for way in WAYS:
        path = work / f"{way.split()[0]}.yaml"
        cache = ("--page-cache", "1TiB") if way == WAYS[1] else ()
        device = ("--device-memory", arguments.device_memory)
        _protrain("plan", str(profile), *device, *cache, "-o", str(path))
        plan = read_plan(path)
        cases[way] = {
            "predicted_seconds": plan.prediction.step_seconds,
            "device_bytes": plan.prediction.peak_bytes.on_device,
            "disk_bytes": plan.prediction.peak_bytes.disk,
            "runs": [],
        }
    for _ in range(arguments.rounds):
        for way, case in cases.items():
            limit = int(case["device_bytes"] + FREE_PART * case["disk_bytes"])
            path = work / f"{way.split()[0]}.yaml"
            command = [*PROTRAIN, "run", str(path), "--steps", str(arguments.steps), "--json"]
            with memory_group("protrain-spilling", limit) as group:
                done = run_inside(group, [*command, *where], dict(os.environ))
            case["limit_bytes"] = limit
            found = {"error": done.stderr.strip()[-500:]}
            if done.stdout:
                found = {"seconds": json.loads(done.stdout)["seconds"]}
            case["runs"].append(found)
            print(way, found, file=sys.stderr)
    disk = read_profile(profile).hardware.tier("disk")
    load.append(round(os.getloadavg()[0], 1))
    return {
        **described(MODULE),
        "processor": processor_name(),
        "load": load,
        "model": arguments.model,
        "disk": {
            "read_bytes_per_s": disk.link.read_bytes_per_s,
            "write_bytes_per_s": disk.link.write_bytes_per_s,
            "observed_seconds": disk.observed.seconds if disk.observed else None,
        },
        "cases": cases,
    }


def page(document: Found) -> str:
    """The results as Markdown."""
    head = ["spilled", "on disk", "memory", "predicted", "measured", "ratio"]
    rows: list[list[str]] = []
    for way, case in document["cases"].items():
        seconds = [second for run in case["runs"] for second in run.get("seconds", [])[1:]]
        predicted = case["predicted_seconds"]
        row = [way, format_bytes(case["disk_bytes"]), format_bytes(case["limit_bytes"])]
        if seconds:
            took = statistics.median(seconds)
            row += [f"{predicted:.2f} s", f"{took:.2f} s", f"{took / predicted:.2f}"]
        else:
            row += [f"{predicted:.2f} s", "no run", "-"]
        rows.append(row)
    disk, load = document["disk"], document["load"]
    return "\n".join(
        [
            "# A step that spills twice the free memory",
            "",
            f"{document['model']} in a control group, whose memory is what the plan takes of the"
            " device and half of what it keeps on disk. Seconds are the median of steps after the"
            " first.",
            "",
            *markdown_table([head, *rows], numbers_from=1),
            "",
            f"{document['processor']}, {document['system']}; load {load[0]} before and {load[1]}"
            f" after; the disk reads {disk['read_bytes_per_s'] / 1e9:.2f} GB/s and writes"
            f" {disk['write_bytes_per_s'] / 1e9:.2f}, seen for {disk['observed_seconds']} s."
            f" `{document['command']}` at {document['commit']}, {document['date']}.",
            "",
        ]
    )


def _protrain(*words: str) -> None:
    subprocess.run([*PROTRAIN, *words], check=True, stdout=subprocess.DEVNULL)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--device-memory", default="900MiB")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="with the profile that is there")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/spilling.json"))
    parser.add_argument("--work", type=Path, default=Path("out/spilling"), help="for profiles")
    arguments = parser.parse_args()
    parse_bytes(arguments.device_memory)
    return arguments


if __name__ == "__main__":
    main()
