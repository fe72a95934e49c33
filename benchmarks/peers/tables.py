"""A benchmark's results as Markdown: `python -m benchmarks.peers.tables FILE.json` writes FILE.md.

Every number comes from the JSON file; a test makes the committed tables again.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import markdown_table, runs_list
from benchmarks.peers.accelerators import EMULATED
from benchmarks.peers.comparing import limit_text
from benchmarks.peers.registry import ADAPTERS
from protrain_runtime.contract.records.files import replace_text
from protrain_runtime.contract.units import format_bytes, format_seconds

Outcome = dict[str, Any]
PLANNED = "protrain-plan"
_TOO_LARGE = ("did not fit", "refused")
_MEMORIES = {"device_bytes": "device memory", "process_bytes": "host memory"}


def write_tables(path: Path) -> None:
    """FILE.md beside FILE.json."""
    document = json.loads(path.read_text(encoding="utf-8"))
    replace_text(path.with_suffix(".md"), markdown(document, title=path.stem))


def markdown(document: dict[str, Any], *, title: str) -> str:
    """All tables of a run's document."""
    cells: dict[str, Outcome] = document["cells"]
    lines = [f"# Benchmark: {title}", ""]
    if is_dry(document["runs"]):
        lines = [f"# Dry run of a benchmark: {title}", "", *_DRY, ""]
    lines += runs_list(document["runs"])
    timed = {(work["num_steps"], work["num_warmup"]) for _, _, work in _trained(cells)}
    lines += [
        f"- Seconds of a step: the median of {steps}, after {warmup} of warm-up"
        for steps, warmup in sorted(timed)
    ]
    sections = (
        ("Tests", _tests(cells)),
        ("AdamW's bits beside its host's", _updates(cells)),
        ("Predicted and measured", _truth(cells)),
        ("Peers under the same limit", compared(cells)),
        ("How each of them was run", _settings(cells)),
        ("The largest model", _sizes(cells)),
        ("Parity with plain PyTorch", _parity(cells)),
        ("Recorded and simulated", _timelines(cells)),
        ("Operators", _operators(cells)),
        ("What CUDA's sanitizer said", _sanitized(cells)),
        ("Cells without a number", _others(cells)),
    )
    for heading, rows in sections:
        if len(rows) > 1:
            note = [_NOTES[heading], ""] if heading in _NOTES else []
            lines += ["", f"## {heading}", "", *note, *markdown_table(rows)]
    return "\n".join(lines) + "\n"


_DRY = (
    "**DRY RUN, on an emulated device: nothing here is a measurement of speed.** The device is a"
    " few threads of a CPU. That a cell ran says that its code runs; its seconds, predicted and"
    " measured, its tokens/s and its orders of peers say nothing about any card.",
)


def is_dry(runs: Sequence[dict[str, Any]]) -> bool:
    """Whether any of a document's runs was on the emulated device."""
    return any(run.get("accelerator", {}).get("kind") == EMULATED for run in runs)


def _trained(cells: dict[str, Outcome]) -> Iterable[tuple[str, Outcome, dict[str, Any]]]:
    for key, cell in cells.items():
        if cell["task"] == "train":
            yield key, cell, cell["arguments"]["work"]


def _work(work: dict[str, Any]) -> str:
    threads = f", {work['threads']} threads" if work.get("threads") else ""
    return f"{work['model']}, {work['seq_len']} tokens, {work['dtype']}{threads}"


def _limit(cap_bytes: int) -> str:
    return limit_text(cap_bytes) if cap_bytes else "none"


def _truth(cells: dict[str, Outcome]) -> list[list[str]]:
    steps, bytes_ = ["step predicted", "measured", "ratio"], ["predicted", "measured"]
    tensors = [f"tensors {word}" for word in bytes_]
    rows = [["work", "limit", *steps, *tensors, *(f"process {word}" for word in bytes_)]]
    plans = {
        cell["arguments"]["out"]: cell["result"]
        for cell in cells.values()
        if cell["task"] == "plan" and cell["status"] == "ran"
    }
    for _, cell, work in _trained(cells):
        predicted = plans.get(work["plan"])
        if predicted is None or cell["status"] != "ran" or work["deterministic"]:
            continue
        found = cell["result"]
        estimated = ", from an estimate" if cell["part"] == "size" else ""
        rows.append(
            [
                f"{_work(work)}, batch {found['batch_size']}{estimated}",
                _limit(work["cap_bytes"]),
                format_seconds(predicted["step_seconds"]),
                format_seconds(found["median_step_seconds"]),
                f"{found['median_step_seconds'] / predicted['step_seconds']:.2f}",
                format_bytes(predicted["tensor_bytes"]),
                _bytes(found["tensor_bytes"]),
                format_bytes(predicted["device_bytes"]),
                format_bytes(found["device_bytes"]),
            ]
        )
    return rows


def _bytes(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def compared(cells: dict[str, Outcome]) -> list[list[str]]:
    """A row per work, limit, batch and way to train; what did not run says why in one word."""
    on_a_cpu = all(work["device"] == "cpu" for _, _, work in _trained(cells))
    # On a CPU machine the device's memory is the process's, and the host's is the same.
    memories = {"process_bytes": "process memory"} if on_a_cpu else _MEMORIES
    rows: list[tuple[tuple[str, int, int], list[str]]] = []
    limits = {
        (_work(work), work["cap_bytes"])
        for _, cell, work in _trained(cells)
        if cell["part"] == "peers"
    }
    for _, cell, work in _trained(cells):
        # Another part may have run the planned training first.
        if (_work(work), work["cap_bytes"]) not in limits or work["deterministic"]:
            continue
        by = cell["arguments"]["adapter"]
        found = cell.get("result")
        batch = found["batch_size"] if found else work["batch_size"] or "largest"
        row = [_work(work), _limit(work["cap_bytes"]), str(batch), by]
        if found:
            step = format_seconds(found["median_step_seconds"])
            memory = [format_bytes(found[key]) for key in memories]
            # The same batches from the same parameters: who trains the same has the same loss.
            row += [f"{found['tokens_per_s']:.1f}", step, *memory, f"{found['losses'][-1]:.4f}"]
        elif cell["status"] in _TOO_LARGE:
            row += [_too_large(cell), "", *[""] * len(memories), ""]
        else:
            continue  # among those without a number
        at = found["batch_size"] if found else work["batch_size"]
        rows.append(((row[0], work["cap_bytes"], at), row))
    rows.sort(key=lambda place_and_row: place_and_row[0])
    header = ["work", "limit", "batch", "trained by", "tokens/s", "step", *memories.values()]
    header.append("last loss")
    return [header, *(row for _, row in rows)]


def _too_large(cell: Outcome) -> str:
    """Ours says what is missing before anything runs; others find out."""
    return f"refused: {cell['reason']}" if cell["status"] == "refused" else "did not fit"


def _settings(cells: dict[str, Outcome]) -> list[list[str]]:
    """The settings of each that took part, also where it did not run."""
    used = {cell["arguments"]["adapter"]: work["device"] for _, cell, work in _trained(cells)}
    rows = [["trained by", "settings"]]
    for name, device in used.items():
        adapter = ADAPTERS[name]
        note = f". On a CPU: {adapter.on_a_cpu}" if device == "cpu" and adapter.on_a_cpu else ""
        rows.append([name, adapter.settings + note])
    return rows


def _sizes(cells: dict[str, Outcome]) -> list[list[str]]:
    rows = [["model", "by", "outcome", "tokens/s", "device memory", "host memory"]]
    for key, cell, work in _trained(cells):
        if cell["part"] != "size" or cell["status"] not in ("ran", *_TOO_LARGE):
            continue
        name = key.split("/")[1]
        disk = " and disk" if name.endswith(" with disk") else ""
        by = cell["arguments"]["adapter"] + disk
        if found := cell.get("result"):
            memory = [format_bytes(found[k]) for k in ("device_bytes", "process_bytes")]
            rows.append([work["model"], by, "trains", f"{found['tokens_per_s']:.1f}", *memory])
        else:
            rows.append([work["model"], by, _too_large(cell), "", "", ""])
    return rows


_NOTES = {
    "Parity with plain PyTorch": "With deterministic kernels, and SGD whose products are exact: of"
    " AdamW's steps, those of a card and those of its host may round differently.",
}


def _sanitized(cells: dict[str, Outcome]) -> list[list[str]]:
    rows = [["tests", "outcome", "what it found"]]
    for cell in cells.values():
        if cell["task"] != "sanitized" or cell["status"] != "ran":
            continue
        found = cell["result"]
        rows.append([found["summary"], _passed(found), f"{len(found['reports'])} possible races"])
        rows += [["", "", _one_line(report)] for report in found["reports"]]
    return rows


def _passed(found: dict[str, Any]) -> str:
    """The outcome of pytest."""
    return {0: "passed", None: "cut off"}.get(found["exit_code"], "FAILED")


def _one_line(text: str) -> str:
    return " / ".join(text.splitlines()).replace("|", "\\|")


def _parity(cells: dict[str, Outcome]) -> list[list[str]]:
    rows = [["work", "limit of the plan", "losses", "parameters"]]
    plain: dict[str, dict[str, Any]] = {}
    exact = [(c, w) for _, c, w in _trained(cells) if w["deterministic"] and c["status"] == "ran"]
    for cell, work in exact:
        if cell["arguments"]["adapter"] != PLANNED:
            plain[_work(work)] = cell["result"]
    for cell, work in exact:
        if cell["arguments"]["adapter"] == PLANNED and _work(work) in plain:
            ours, other = cell["result"], plain[_work(work)]
            same = [
                "equal bits" if ours[key] == other[key] else "DIFFER"
                for key in ("losses", "parameters_sha256")
            ]
            rows.append([_work(work), _limit(work["cap_bytes"]), *same])
    return rows


def _tests(cells: dict[str, Outcome]) -> list[list[str]]:
    rows = [["command", "outcome", "summary"]]
    for cell in cells.values():
        if cell["task"] == "tests" and cell["status"] == "ran":
            found = cell["result"]
            command = " ".join(("pytest", *cell["arguments"]["arguments"]))
            rows.append([f"`{command}`", _passed(found), found["summary"].strip("= ")])
            failed = [line for line in found["output"] if line.startswith(("FAILED", "ERROR"))]
            rows += [["", "", line.replace("|", "\\|")] for line in failed]
    return rows


def _updates(cells: dict[str, Outcome]) -> list[list[str]]:
    rows = [["kernel", "dtype", "steps", "parameters differ", "exp_avg", "exp_avg_sq"]]
    for cell in cells.values():
        if cell["task"] == "updates" and cell["status"] == "ran":
            for row in cell["result"]["rows"]:
                shares = [f"{share:.2%}" for share in row["differing"].values()]
                rows.append([row["kernel"], row["dtype"], str(row["step"]), *shares])
    return rows


def _operators(cells: dict[str, Outcome]) -> list[list[str]]:
    rows = [["operator", "estimated", "measured", "ratio"]]
    for cell in cells.values():
        if cell["task"] != "kernels" or cell["status"] != "ran":
            continue
        for row in cell["result"]["rows"]:
            ran, expected = row["seconds"], row["estimated_seconds"]
            ratio = f"{ran / expected:.2f}" if expected else ""
            told = format_seconds(expected) if expected else ""
            rows.append([row["operator"], told, format_seconds(ran), ratio])
        launched = [key for key in cell["result"] if key.endswith("launch_s")]
        rows += [[key, "", format_seconds(cell["result"][key]), ""] for key in launched]
    return rows


def _timelines(cells: dict[str, Outcome]) -> list[list[str]]:
    rows = [["work", "lane or event", "recorded", "simulated", "difference"]]
    for key, cell in cells.items():
        if cell["task"] != "timeline" or cell["status"] != "ran":
            continue
        found, name = cell["result"], key.partition("/")[2]
        lanes = {
            "step": {
                "recorded": found["step_seconds"],
                "simulated": found["simulated_step_seconds"],
            },
            **found["lanes"],
        }
        for lane, seconds in lanes.items():
            ran, expected = seconds["recorded"], seconds["simulated"]
            rows.append([name, lane, *(_signed(s) for s in (ran, expected, ran - expected))])
        for event in found["differ_most"]:
            difference = _signed(event["recorded_minus_simulated"])
            rows.append([name, f"{event['lane']}: {event['name']}", "", "", difference])
    return rows


def _signed(seconds: float) -> str:
    return f"-{format_seconds(-seconds)}" if seconds < 0 else format_seconds(seconds)


def _others(cells: dict[str, Outcome]) -> list[list[str]]:
    rows = [["cell", "status", "reason"]]
    skipped: Counter[tuple[str, str, str]] = Counter()
    for key, cell in cells.items():
        shown = cell["task"] == "train" and cell["part"] in ("peers", "size")
        if cell["status"] == "ran" or (cell["status"] in _TOO_LARGE and shown):
            continue
        lines = (cell.get("reason") or "").strip().splitlines() or [""]
        reason = lines[-1].replace("|", "/")
        if cell["task"] == "train" and cell["status"] == "skipped":
            skipped[cell["arguments"]["adapter"], cell["status"], reason] += 1
        else:
            rows.append([key, cell["status"], reason])
    for (adapter, status, reason), number in skipped.items():
        rows.append([f"{adapter}, {number} cells" if number > 1 else adapter, status, reason])
    return rows


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        write_tables(Path(argument))
