"""Memory of fine-tuning with adapters: what is predicted beside runs that PEFT makes by itself.

    python -m benchmarks.adapters [--only NAME...] [--quick] [--page]

A run of plain PyTorch has nothing of ours but the meter: a model of transformers in bfloat16,
packed by bitsandbytes in some cases, wrapped by `peft.get_peft_model` with PEFT's defaults, and
steps with AdamW, once as they are and once under transformers' gradient checkpointing. A planned
run recomputes every block. A prediction is of fake tensors, which run nothing. Each has a process
of its own.
"""

import argparse
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import adapters_runs as runs
from benchmarks.accuracy_page import Bar
from benchmarks.adapters_runs import CASES, WAYS
from benchmarks.processes import Found, Processes, described
from protrain_runtime.contract.units import format_bytes

MODULE = "benchmarks.adapters"
RESULTS = Path("benchmarks/results/adapters.json")
MOST_ABOVE = 0.05
TIMEOUT_S = 3600
"""Of a prediction or a run: bytes do not depend on what else the machine does, and seconds do."""
QUICK = ("llama, r=16", "llama, r=16,modules_to_save=lm_head+embed_tokens")


def main() -> None:
    arguments = _arguments()
    document: Found = {**described(MODULE), "cases": {}}
    if arguments.out.exists() and (arguments.resume or arguments.page):
        before = json.loads(arguments.out.read_text())
        document = before if arguments.page else {**document, "cases": before["cases"]}
    names = arguments.only or (QUICK if arguments.quick else tuple(CASES))
    waiting = [name for name in names if not arguments.page and name not in document["cases"]]
    processes, lock = Processes("benchmarks.adapters_runs", timeout_s=TIMEOUT_S), threading.Lock()

    def run(name: str) -> None:
        found = _case(processes, name)
        with lock:
            document["cases"] |= {name: found}
            document["cases"] = {
                key: document["cases"][key] for key in CASES if key in document["cases"]
            }
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
            arguments.out.with_suffix(".md").write_text(page(document))

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, waiting))
    arguments.out.with_suffix(".md").write_text(page(document))
    print(page(document), end="")


def _case(processes: Processes, name: str) -> Found:
    predicted = processes.run(runs.predicted, name)
    measured = {
        "as it is": processes.run(runs.measured, name, False),
        "planned": processes.run(runs.under_plan, predicted["plan"]),
        "checkpointed": processes.run(runs.measured, name, True),
    }
    return {
        "measured": {way: found["bytes"] for way, found in measured.items()},
        "predicted": predicted["bytes"],
    }


# --- the page -------------------------------------------------------------------------------------


def page(document: Mapping[str, Any]) -> str:
    """The results for people."""
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    by_transformers = [
        case["measured"]["checkpointed"] - case["measured"]["planned"]
        for case in document["cases"].values()
    ]
    lines = [
        "# Memory of fine-tuning with adapters",
        "",
        f"`{document['command']}`, {document['date']}, commit {document['commit']}",
        "",
        f"{document['system']}; {versions}.",
        "",
        "Models are in bfloat16, batches have 8 sequences of 64 tokens. Figures are the most bytes"
        " of tensors in a step. *Predicted* ones come from fake tensors, for the processor that the"
        " runs were made on. *Measured*, by kinds of steps:",
        "",
        "- *as it is*: PEFT's own run, `get_peft_model` with PEFT's defaults and steps of plain"
        " PyTorch with AdamW. With `nf4`, transformers and bitsandbytes have packed the model"
        " (`BitsAndBytesConfig`, double quantization); with `autocast` it went through"
        " `prepare_model_for_kbit_training`, and steps run under autocast.",
        "- *planned*: the same training under a plan that recomputes every block.",
        "- *checkpointed*: PEFT's own run under transformers' gradient checkpointing. The"
        " prediction is of the plan above, for a model whose embeddings' outputs ask for gradients:"
        " that is what transformers' checkpointing adds to recomputation. It counts such an output"
        " and its gradient once more, as what the last loss holds (docs/decisions/memory.md).",
        "",
        _summary(document),
        "",
        f"Transformers' checkpointing took from {format_bytes(abs(min(by_transformers)))}"
        f" {'less' if min(by_transformers) < 0 else 'more'} to"
        f" {format_bytes(max(by_transformers))} more than the plan.",
        "",
        "| model | `--lora` | packed | precision | steps | measured | predicted | off by |",
        "|---|---|---|---|---|---:|---:|---:|",
    ]
    for name in document["cases"]:
        case = CASES[name]
        for way, found, most, off in _ratios(document, name):
            lines.append(
                f"| {case.model} | `{case.lora}` | {case.quantize or '-'} | {case.precision} |"
                f" {way} | {format_bytes(found)} | {format_bytes(most)} | {off:+.2%} |"
            )
    return "\n".join(lines) + "\n"


def bars(document: Mapping[str, Any]) -> list[Bar]:
    """What predictions are to keep to, for the page of the accuracy benchmark."""
    rows, source = _rows(document), f"[adapters.md](adapters.md), {document['date']}"
    source += f", commit {document['commit']}"
    short = [row for row, off in rows.items() if off < 0]
    long = [row for row, off in rows.items() if off > MOST_ABOVE]
    return [
        Bar(
            f"adapters: peak, {limit}",
            asked,
            not missed,
            f"{len(rows) - len(missed)} of {len(rows)}{_excepted(missed)}; {source}",
        )
        for limit, asked, missed in (
            ("never under", "not below PEFT's own and planned steps", short),
            ("over", f"by at most {MOST_ABOVE:.0%}", long),
        )
    ]


def _summary(document: Mapping[str, Any]) -> str:
    rows = _rows(document)
    missed = [row for row, off in rows.items() if not 0 <= off <= MOST_ABOVE]
    return (
        f"Predictions are off by {min(rows.values()):+.2%} to {max(rows.values()):+.2%}. They are"
        f" not below, and at most {MOST_ABOVE:.0%} above, what was measured in"
        f" {len(rows) - len(missed)} of {len(rows)} rows{_excepted(missed)}."
    )


def _excepted(rows: Sequence[str]) -> str:
    return f" (not: {'; '.join(rows)})" if rows else ""


def _rows(document: Mapping[str, Any]) -> dict[str, float]:
    """By row of the table how far its prediction is above, as a fraction."""
    return {
        f"{name}, {way}": off
        for name in document["cases"]
        for way, _, _, off in _ratios(document, name)
    }


def _ratios(document: Mapping[str, Any], name: str) -> Iterator[tuple[str, int, int, float]]:
    """By way: measured and predicted bytes, and how far predictions are above, as a fraction."""
    case = document["cases"][name]
    for way in WAYS:
        found, most = case["measured"][way], case["predicted"][way]
        yield way, found, most, most / found - 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=tuple(CASES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true", help="leave what --out has already")
    parser.add_argument("--jobs", type=int, default=2, help="cases at once")
    parser.add_argument("--page", action="store_true", help="write the page of --out anew alone")
    parser.add_argument("--quick", action="store_true", help="two cases")
    return parser.parse_args()


if __name__ == "__main__":
    main()
