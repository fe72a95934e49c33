"""What splits by token inside a block would gain: a share of its tokens kept, the rest recomputed.

    python -m benchmarks.splits [--cases N] [--out FILE]

MEMO (arXiv 2407.12117) swaps what a share of a block's tokens saves, and recomputes the rest. Our
plans give whole blocks to either. Here blocks have such splits as further forms, at a quarter,
half and three quarters of the tokens: bytes and seconds of a split are those of both forms in
proportion, and nothing is charged for cutting. So the planner and the simulator say what they would
gain at best. A plan without splits is one of those with splits, too.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.grid import Setup, budgets, cases_of, profiled
from benchmarks.peers.tables import markdown_table
from benchmarks.processes import described
from benchmarks.provenance import ROOT, commit
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.planner import solve_problem
from protrain_runtime.contract.program.program import BLOCK_BYTES
from protrain_runtime.contract.records.decisions import register_form
from protrain_runtime.contract.records.forms import ActivationForm
from protrain_runtime.contract.records.profile import FormCost, Profile, Unit

MODULE = "benchmarks.splits"
SHARES = (0.25, 0.5, 0.75)
MACHINES = ("rtx-4090", "a100-80gb", "h200")
TOKENS = (8192, 32768, 131072)
WHERE = 0.25
"""Where the budget lies between the smallest and the largest, on a logarithmic scale."""

Document = Mapping[str, Any]


def main() -> None:
    arguments = _arguments()
    split_forms = {f"{share:.0%} kept": share for share in SHARES}
    for name in split_forms:
        register_form(ActivationForm(name=name, keeps="all of some tokens", executor=""))
    document: dict[str, Any] = {
        **described(MODULE),
        "command": f"python -m {MODULE} --cases {arguments.cases}",
        "commit": commit(),
        "cases": [],
    }
    for setup in _setups()[: arguments.cases]:
        case = next((one for one in cases_of(setup) if one.share == WHERE), None)
        if case is None:
            continue
        profile = profiled(setup)
        seconds, bounds, used = [], [], 0
        limits = budgets(setup, case.device)
        for one in (profile, with_splits(profile, split_forms)):
            found = solve_problem(Problem.of(one, limits), limits)
            assert isinstance(found, Solved), "cases are of budgets that some plan meets"
            seconds.append(found.plan.prediction.step_seconds)
            bounds.append(found.plan.prediction.lower_bound_seconds)
            used = sum(unit.activations.form in split_forms for unit in found.plan.units)
        document["cases"].append(
            {
                "setup": str(setup),
                "budget_bytes": case.device,
                "step_seconds": seconds[0],
                "with_splits_seconds": seconds[1],
                "lower_bound_seconds": bounds[0],
                "split_blocks": used,
                "blocks": sum(unit.kind == "block" for unit in profile.units),
            }
        )
        print(document["cases"][-1], flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(page(document))


def with_splits(profile: Profile, shares: Mapping[str, float]) -> Profile:
    """The profile with a form for each share of a block's tokens, besides those that it has."""

    def split(unit: Unit) -> Unit:
        costs = {cost.form: cost for cost in unit.forms}
        if unit.kind != "block" or "full" not in costs:
            return unit
        made = (between(costs["keep"], costs["full"], name, at) for name, at in shares.items())
        return replace(unit, forms=(*unit.forms, *made))

    return replace(profile, units=tuple(split(unit) for unit in profile.units))


def between(keep: FormCost, full: FormCost, name: str, share: float) -> FormCost:
    """The costs of a split: `share` of those of `keep`, and the rest of those of `full`."""

    def mixed(one: float, other: float) -> float:
        return share * one + (1 - share) * other

    def size(one: int, other: int) -> int:
        return round(mixed(one, other) / BLOCK_BYTES) * BLOCK_BYTES

    moved = size(keep.swappable_bytes, full.swappable_bytes)
    left = size(keep.kept_bytes - keep.swappable_bytes, full.kept_bytes - full.swappable_bytes)
    kept = moved + left
    return FormCost(
        form=name,
        forward_peak_bytes=max(kept, size(keep.forward_peak_bytes, full.forward_peak_bytes)),
        kept_bytes=kept,
        backward_peak_bytes=size(keep.backward_peak_bytes, full.backward_peak_bytes),
        swappable_bytes=moved,
        forward_s=mixed(keep.forward_s, full.forward_s),
        backward_s=mixed(keep.backward_s, full.backward_s),
    )


def _setups() -> list[Setup]:
    """All parameters of an 8B at these lengths on these machines, then adapters of a 13B."""
    plain: dict[str, Any] = {"updates": "in backward", "micro_batches": 1, "num_devices": 1}
    models = (("llama-3.1-8b", 0), ("llama-2-13b", 16))
    return [
        Setup(machine=machine, model=model, adapter_rank=rank, tokens=tokens, **plain)
        for (model, rank), tokens, machine in product(models, TOKENS, MACHINES)
    ]


# --- the page -------------------------------------------------------------------------------------


def gain(case: Mapping[str, Any]) -> float:
    """What splits save of a step. A plan that splits no block is one of whole blocks."""
    share: float = case["with_splits_seconds"] / case["step_seconds"]
    return 1 - min(1.0, share) if case["split_blocks"] else 0.0


def page(document: Document) -> str:
    """The results for people."""
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    rows = [["setup", "GiB", "whole blocks", "with splits", "gain", "blocks split", "bound"]]
    rows += [
        [
            case["setup"],
            f"{case['budget_bytes'] / 2**30:.1f}",
            f"{case['step_seconds']:.3f} s",
            f"{case['with_splits_seconds']:.3f} s",
            f"{gain(case):.2%}",
            f"{case['split_blocks']} of {case['blocks']}",
            f"{case['lower_bound_seconds']:.3f} s",
        ]
        for case in document["cases"]
    ]
    most = max((gain(case) for case in document["cases"]), default=0.0)
    lines = [
        "# Splits by token inside blocks",
        "",
        f"`{document['command']}`, {document['date']}, {document['commit']}; {versions}.",
        "",
        "Predicted: steps of the best plans found, with whole blocks, and with forms that keep a"
        " quarter, half or three quarters of a block's tokens and recompute the rest, at no cost of"
        f" their own. The most that splits gain is {most:.2%}. Where no block is split, both"
        " searches found plans of whole blocks, and differ by as much as searches do.",
        "",
        *markdown_table(rows),
    ]
    return "\n".join(lines) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--cases", type=int, default=18)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/splits.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
