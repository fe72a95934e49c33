"""Predictions for the models and machines of the ProTrain paper, beside what it published.

    python -m benchmarks.paper [--models NAME...] [--machines NAME...] [--out FILE.json]

Nothing here was run on those machines: seconds come from the catalogue's data-sheet rates and the
simulator, bytes from the models' own code. The paper's are of four cards, but for the largest
model, ours of one; so ratios stand beside each other, and throughputs do not.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.cells import environment
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.presets import JsonObject
from protrain_plan.models.sources import ConfigSource, ModelSource, load_source
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.outcome import Infeasible
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.planning.search.baselines import BASELINES, baseline
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.improving import Effort
from protrain_plan.profiling.estimated import estimates
from protrain_runtime.contract.records.files import replace_text
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import Budgets
from protrain_runtime.contract.units import format_bytes, format_seconds

HOST_BYTES = 2 * 2**40
"""Assumed beside either card, and more than any model here needs: the card is to be what binds."""
GAP = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Figures of the paper (arXiv 2406.08334), taken from its abstract and descriptions of it."""

    speedups: str  # throughput relative to others, four cards
    largest: str  # model that trains on one card


PUBLISHED = {
    "rtx-3090": Published(
        speedups="1.77-2.71 times DeepSpeed, Colossal-AI, FSDP", largest="34 B (DeepSpeed 15 B)"
    ),
    "a100-80gb": Published(
        speedups="1.85 times DeepSpeed, 1.43 Colossal-AI, 2.22 FSDP", largest="75 B (FSDP 10 B)"
    ),
}


def _gpt2(name: str, *, layers: int, width: int) -> ConfigSource:
    """GPT-2 grown to a size that the paper names; the shape is ours."""
    config: JsonObject = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": width,
        "n_layer": layers,
        "n_head": width // 64,
    }
    return ConfigSource(name, config)


def _llama_34b() -> ConfigSource:
    """The widths that the Llama 2 paper's 34 B model was released with (Code Llama 34B)."""
    config: JsonObject = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 8192,
        "intermediate_size": 22016,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }
    return ConfigSource("llama-34b", config)


SOURCES: dict[str, Callable[[], ModelSource]] = {
    "gpt2-1.5b": partial(load_source, "gpt2-xl"),
    "gpt2-10b": partial(_gpt2, "gpt2-10b", layers=48, width=4096),
    "gpt2-20b": partial(_gpt2, "gpt2-20b", layers=44, width=6144),
    "mistral-7b": partial(load_source, "mistral-7b"),
    "opt-13b": partial(load_source, "opt-13b"),
    "opt-30b": partial(load_source, "opt-30b"),
    "llama-13b": partial(load_source, "llama-2-13b"),
    "llama-34b": _llama_34b,
    "llama-70b": partial(load_source, "llama-2-70b"),
}
"""70 B is the largest of the catalogue below the 75 B that the paper names."""


def machine(name: str) -> Hardware:
    """A catalogue machine with the assumed host, and no disk: the paper uses none."""
    hardware = load_hardware(name)
    tiers = tuple(
        replace(tier, capacity_bytes=HOST_BYTES) for tier in hardware.tiers if tier.name == "host"
    )
    return replace(hardware, tiers=tiers)


def predictions(
    name: str, machines: Sequence[Hardware], *, batch_size: int, seq_len: int
) -> Iterator[dict[str, Any]]:
    """One model on every machine: the plan, and what baselines would take in the simulator."""
    source: ModelSource = SOURCES[name]()
    profiles = estimates(
        source,
        machines=machines,
        batch_size=batch_size,
        seq_len=seq_len,
        dtype="bfloat16",
        precision="master",
    )
    for profile in profiles:
        budgets = Budgets(device=profile.hardware.device.memory_bytes, host=HOST_BYTES, disk=0)
        problem = Problem.of(profile, budgets)
        outcome = solve_problem(problem, budgets, effort=Effort(gap_target=GAP))
        row: dict[str, Any] = {
            "model": name,
            "machine": profile.hardware.name,
            "num_parameters": sum(unit.num_parameters for unit in profile.units),
        }
        if isinstance(outcome, Infeasible):
            yield row | {"smallest_budget_bytes": outcome.smallest_budget_bytes}
            continue
        predicted = outcome.plan.prediction
        evaluation = {other: baseline(other, problem, Evaluator(problem)) for other in BASELINES}
        yield row | {
            "step_seconds": predicted.step_seconds,
            "gap": outcome.gap,
            "tokens_per_s": batch_size * seq_len / predicted.step_seconds,
            "device_bytes": predicted.peak_bytes.device + predicted.peak_bytes.context,
            "host_bytes": predicted.peak_bytes.host,
            "baseline_over_ours": {
                other: found.seconds / predicted.step_seconds if found else None
                for other, found in evaluation.items()
            },
        }


def markdown(document: dict[str, Any]) -> str:
    """The document's table, and the paper's figures beside it."""
    run = document["run"]
    lines = [
        "# The ProTrain paper's models: predictions",
        "",
        f"`{document['command']}`, commit {run['commit']}, torch {run['versions']['torch']}",
        "",
        f"**Predicted, not measured**: one card, batch {document['batch_size']} of"
        f" {document['seq_len']} tokens, bf16 with float32 masters and AdamW, catalogue rates,"
        f" {format_bytes(HOST_BYTES)} of host memory (assumed, so that the card is what binds)."
        " A baseline's ratio is its simulated step over ours. Published figures are of four cards"
        " against other systems, but for the largest model.",
        "",
        "| model | machine | parameters | step | tokens/s | device | host |"
        + "".join(f" {name} / ours |" for name in BASELINES),
        "|" + " --- |" * (7 + len(BASELINES)),
    ]
    lines += ["| " + " | ".join(_row(row)) + " |" for row in document["predictions"]]
    lines += ["", "| machine | published throughput | published largest on one card |"]
    lines += ["| --- | --- | --- |"]
    for name, published in PUBLISHED.items():
        lines.append(f"| {name} | {published.speedups} | {published.largest} |")
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any]) -> list[str]:
    head = [row["model"], row["machine"], f"{row['num_parameters'] / 1e9:.1f} B"]
    if "step_seconds" not in row:
        needed = format_bytes(row["smallest_budget_bytes"])
        return [*head, f"does not fit: needs {needed}", *[""] * (3 + len(BASELINES))]
    ratios = row["baseline_over_ours"].values()
    return [
        *head,
        format_seconds(row["step_seconds"]),
        f"{row['tokens_per_s']:.0f}",
        format_bytes(row["device_bytes"]),
        format_bytes(row["host_bytes"]),
        *("does not fit" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.paper", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--machines", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/paper.json"))
    options = parser.parse_args()
    words = [word for word in sys.argv[1:] if word != str(options.out) and word != "--out"]
    document: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.paper", *words]),
        "run": environment(),
        "batch_size": options.batch_size,
        "seq_len": options.seq_len,
        "predictions": [],
    }
    machines = [machine(name) for name in options.machines]
    size = {"batch_size": options.batch_size, "seq_len": options.seq_len}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        for row in predictions(name, machines, **size):
            document["predictions"].append(row)
            print(" | ".join(_row(row)), flush=True)
        replace_text(options.out, json.dumps(document, indent=1) + "\n")
        replace_text(options.out.with_suffix(".md"), markdown(document))


if __name__ == "__main__":
    main()
