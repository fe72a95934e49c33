"""Memory of fine-tuning with adapters: what is predicted beside runs that PEFT makes by itself.

    python -m benchmarks.adapters [--only NAME...] [--quick]

A measured run has nothing of ours but the meter: a model of transformers in bfloat16, wrapped by
`peft.get_peft_model` with PEFT's defaults, and steps of plain PyTorch with AdamW, once as they are
and once under transformers' gradient checkpointing. A prediction is of fake tensors, which run
nothing. Each has a process of its own.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import adapters_runs as runs
from benchmarks.adapters_runs import CASES, WAYS
from benchmarks.processes import Found, Processes, described
from protrain_plan.units import format_bytes

MODULE = "benchmarks.adapters"
MOST_ABOVE = 0.05
QUICK = ("llama, r=16", "llama, r=16,modules_to_save=lm_head+embed_tokens")


def main() -> None:
    arguments = _arguments()
    before: Found = {}
    if arguments.resume and arguments.out.exists():
        before = json.loads(arguments.out.read_text())["cases"]
    document: Found = {**described(MODULE), "cases": before}
    processes = Processes("benchmarks.adapters_runs")
    for name in arguments.only or (QUICK if arguments.quick else tuple(CASES)):
        if name in before:
            continue
        lora = CASES[name].lora
        document["cases"][name] = {
            "model": CASES[name].model,
            "lora": lora,
            "measured": processes.run(runs.measured, name),
            "predicted": processes.run(runs.predicted, name, lora),
            "in the base's dtype": processes.run(runs.predicted, name, f"{lora},dtype=base"),
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(page(document))
    print(page(document), end="")


# --- the page -------------------------------------------------------------------------------------


def page(document: Mapping[str, Any]) -> str:
    """The results for people."""
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    rows = {
        (name, way): (off, base)
        for name in document["cases"]
        for way, _, _, off, base in _ratios(document, name)
    }
    held = [place for place, (off, _) in rows.items() if 0 <= off <= MOST_ABOVE]
    missed = "; ".join(f"{name}, {way}" for name, way in rows if (name, way) not in held)
    above, old = [off for off, _ in rows.values()], [base for _, base in rows.values()]
    lines = [
        "# Memory of fine-tuning with adapters",
        "",
        f"`{document['command']}`, {document['date']}, commit {document['commit']}",
        "",
        f"{document['system']}; {versions}.",
        "",
        "*Measured* runs are PEFT's own: `get_peft_model` with PEFT's defaults on a bfloat16 model,"
        " steps of plain PyTorch with AdamW, as they are and under transformers' gradient"
        " checkpointing. The figures are the most bytes of tensors in a step. *Predicted* ones come"
        " from fake tensors. The last column says what a prediction with adapters in the base"
        " model's dtype (`dtype=base`) would be off by, as all were before adapters had PEFT's.",
        "",
        f"Predictions are off by {min(above):+.2%} to {max(above):+.2%}. They are not below, and at"
        f" most {MOST_ABOVE:.0%} above, what was measured in {len(held)} of {len(rows)} cases"
        f"{f' (not: {missed})' if missed else ''}. In the base's dtype it would be"
        f" {min(old):+.1%} to {max(old):+.1%}. Checkpointed steps are predicted as a plan runs them"
        " that recomputes every block; transformers' own checkpointing frees at other moments, and"
        " takes a little more or less.",
        "",
        "| model | `--lora` | steps | measured | predicted | off by | in the base's dtype |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for name, case in document["cases"].items():
        for way, found, most, off, base in _ratios(document, name):
            lines.append(
                f"| {case['model']} | `{case['lora']}` | {way} | {format_bytes(found)} |"
                f" {format_bytes(most)} | {off:+.2%} | {base:+.1%} |"
            )
    return "\n".join(lines) + "\n"


def _ratios(document: Mapping[str, Any], name: str) -> Iterator[tuple[str, int, int, float, float]]:
    """By way: measured and predicted bytes, and how far predictions are above, as a fraction."""
    case = document["cases"][name]
    for way in WAYS:
        found = case["measured"][way]
        most, base = case["predicted"][way], case["in the base's dtype"][way]
        yield way, found, most, most / found - 1, base / found - 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=tuple(CASES))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/adapters.json"))
    parser.add_argument("--resume", action="store_true", help="leave what --out has already")
    parser.add_argument("--quick", action="store_true", help="two cases")
    return parser.parse_args()


if __name__ == "__main__":
    main()
