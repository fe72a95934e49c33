"""The main job on this machine: train a real model under a memory limit that PyTorch cannot meet.

SmolLM2-135M (random weights, from its published configuration) on text that ships with Python. The
limit is the operating system's (RLIMIT_DATA): an allocation above it fails. Every number in the
table at the end was measured in this run, but for the column that says predicted.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(highlight=False)


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    data: dict[str, Any]
    error: str


def protrain(*arguments: str) -> Ended:
    """Run `protrain ARGUMENTS --json` in a process of its own, and say so."""
    console.print(f"[bold]$ protrain {' '.join(arguments)}[/]", soft_wrap=True)
    command = [sys.executable, "-m", "protrain_plan.cli", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    data = json.loads(done.stdout) if done.stdout.strip() else {}
    return Ended(done.returncode, data, done.stderr.strip())


def say(text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, soft_wrap=True)


def size(num_bytes: float) -> str:
    """Bytes for people."""
    mebibytes = num_bytes / 2**20
    return f"{mebibytes:.2f} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:.2f} GiB"


def must(ended: Ended) -> dict[str, Any]:
    """The command's answer; the demo ends where it failed."""
    if ended.code != 0:
        say(ended.error)
        sys.exit(ended.code)
    return ended.data


def main() -> int:
    """Run the demo; 0 if everything that it promises held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch-size", default="1")
    parser.add_argument("--seq-len", default="256")
    parser.add_argument("--limit", default="1100MiB")
    parser.add_argument("--steps", default="4")
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    profile, plan = options.out / "profile.yaml", options.out / "plan.yaml"

    shape = ("--batch-size", options.batch_size, "--seq-len", options.seq_len)
    profiled = must(protrain("profile", options.model, *shape, "--steps", "1", "-o", str(profile)))
    say(
        f"{profiled['num_parameters'] / 1e6:.1f} M parameters in {profiled['num_units']} units,"
        f" {size(profiled['model_states_bytes'])} of model states,"
        f" {size(profiled['activation_bytes'])} of activations"
    )
    planned = must(
        protrain("plan", str(profile), "--device-memory", options.limit, "-o", str(plan))
    )
    say(
        f"{planned['status']}: at most {planned['gap']:.2%} above the fastest possible step,"
        f" found in {planned['solve_seconds']:.2f} s by {planned['solver']}"
    )
    for line in decisions(plan):
        console.print(line, markup=False, soft_wrap=True)

    steps, limit = ("--steps", options.steps), ("--memory-limit", options.limit)
    refused = protrain("run", str(plan), *steps, "--plain", *limit)
    say(refused.error or "it ran")
    run = must(protrain("run", str(plan), *steps, *limit))
    reference = must(protrain("run", str(plan), *steps, "--plain"))

    equal = (
        run["losses"] == reference["losses"]
        and run["parameters_sha256"] == reference["parameters_sha256"]
    )
    show(options.limit, planned, refused, run, reference, equal=equal)
    within = all(
        run["measured_peak_bytes"][tier] <= run["predicted_peak_bytes"][tier]
        for tier in ("device", "host", "disk")
    )
    held = refused.code == 4 and equal and within
    console.print("[green]everything held[/]" if held else "[red]not everything held[/]")
    return 0 if held else 1


def decisions(plan: Path) -> list[str]:
    """The plan's units as its file has them."""
    lines = plan.read_text(encoding="utf-8").splitlines()
    return lines[lines.index("units:") + 1 :]


def show(
    limit: str,
    planned: dict[str, Any],
    refused: Ended,
    run: dict[str, Any],
    reference: dict[str, Any],
    *,
    equal: bool,
) -> None:
    """The table of what was promised and what was found."""

    def process(peak: dict[str, int]) -> str:
        return size(peak["device"] + peak["context"])

    table = Table(title=f"under a limit of {limit}", title_justify="left", box=None)
    for column in ("", "predicted", "planned", "plain, no limit", "plain, limited"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    promise, found, free = (
        run["predicted_peak_bytes"],
        run["measured_peak_bytes"],
        reference["measured_peak_bytes"],
    )
    out = "out of memory" if refused.code == 4 else f"exit code {refused.code}"
    table.add_row("process memory", process(promise), process(found), process(free), out)
    for label, tier in (("  tensors", "device"), ("  besides", "context")):
        table.add_row(label, *(size(peak[tier]) for peak in (promise, found, free)), "")
    table.add_row("disk", size(promise["disk"]), size(found["disk"]), "-", "")
    seconds = (planned["step_seconds"], run["step_seconds"], reference["step_seconds"])
    table.add_row("step", *(f"{value:.2f} s" for value in seconds), "")
    for label, which in (("first loss", 0), ("last loss", -1)):
        losses = (run["losses"][which], reference["losses"][which])
        table.add_row(label, "", *(f"{loss:.6f}" for loss in losses), "")
    verdict = "equal bits" if equal else "DIFFERENT"
    table.add_row("losses, weights", "", verdict, "", "")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
