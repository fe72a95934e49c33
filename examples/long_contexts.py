"""131,072 tokens at once on a CPU, under a limit that no exact way of training stays in.

The operating system limits every process (RLIMIT_DATA). Plain PyTorch, PyTorch's checkpointing and
the exact plan are tried in it, and fail; the plan with leave for rounding trains. Every number is
measured, but for those that are said to be predicted.
"""

import argparse
import importlib
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def main() -> int:
    """Try all ways; 0 if the one with leave trains within its promise, and no other does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="factory", help="factory, or short_factory for a try")
    parser.add_argument("--limit-mib", type=int, default=1280)
    parser.add_argument("--steps", default="2")
    parser.add_argument("--out", type=Path, default=Path("long-contexts"))
    parser.add_argument("--by-hand", choices=("plainly", "checkpointing"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.by_hand is not None:
        limit = options.limit_mib << 20
        return by_hand(options.model, limit, checkpointing=options.by_hand == "checkpointing")
    options.out.mkdir(exist_ok=True)
    profile, exact, plan = (
        str(options.out / f"{name}.yaml") for name in ("profile", "exact", "plan")
    )
    model = f"{FOLDER / 'long_context_model.py'}:{options.model}"
    limit = f"{options.limit_mib}MiB"
    shape = ("--model", options.model, "--limit-mib", str(options.limit_mib))

    protrain("profile", model, "--on", "cpu", "--allow", "rounding", "-o", profile)
    tried = [
        said(f"one step {way}, within {limit}", __file__, "--by-hand", way, *shape)
        for way in ("plainly", "checkpointing")
    ]
    refused = protrain("plan", profile, "--device-memory", limit, "-o", exact)
    if refused.returncode == 3:
        smallest = str(answer(refused)["smallest_budget_bytes"])
        protrain("plan", profile, "--device-memory", smallest, "-o", exact)
        tried.append(protrain("run", exact, "--memory-limit", limit))
    allowed = ("--allow", "rounding", "-o", plan)
    if protrain("plan", profile, "--device-memory", limit, *allowed).returncode != 0:
        return 1
    run = protrain("run", plan, "--steps", options.steps, "--memory-limit", limit)
    if run.returncode != 0:
        return 1
    found = answer(run)
    promised, measured = found["predicted_peak_bytes"], found["measured_peak_bytes"]
    print(f"losses {', '.join(f'{loss:.4f}' for loss in found['losses'])}")
    print(f"a step took {found['step_seconds']:.0f} s")
    for what in ("device", "context"):
        print(f"{what}: {measured[what] >> 20} MiB measured, {promised[what] >> 20} predicted")
    within = all(measured[tier] <= promised[tier] for tier in ("device", "host", "disk"))
    failed = [one.returncode == 4 for one in tried]
    held = within and failed == [True] * 3
    print("everything held" if held else "not everything held")
    return 0 if held else 1


Done = subprocess.CompletedProcess[str]


def protrain(*arguments: str) -> Done:
    """Run `protrain ARGUMENTS --json`, and say so."""
    return said(f"protrain {' '.join(arguments)}", "-m", "protrain_plan.cli", *arguments, "--json")


def said(what: str, *arguments: str) -> Done:
    """Run Python with arguments, and print what is run and how it fails."""
    print(f"$ {what}", flush=True)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = done.stderr.strip() or f"{answer(done)['shortfall_bytes'] >> 20} MiB are missing"
        print(f"  exit code {done.returncode}: {why.splitlines()[0]}", flush=True)
    return done


def answer(done: Done) -> dict[str, Any]:
    """The JSON object that a command printed."""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_hand(name: str, limit: int, *, checkpointing: bool) -> int:
    """A step of ordinary PyTorch under a limit; 4 where memory runs out."""
    import torch

    module = importlib.import_module("long_context_model")
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    model, texts = getattr(module, name)()
    model.checkpointing = checkpointing
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    try:
        model(next(iter(texts))).backward()
        optimizer.step()
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        sys.stderr.write(f"{str(error).partition('DefaultCPUAllocator: ')[2]}\n")
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
