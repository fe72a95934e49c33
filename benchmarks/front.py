"""The front of memory against time, by this planner and by an earlier one, and what binds.

    python -m benchmarks.front --label now
    PYTHONPATH=OTHER_TREE python benchmarks/front.py --label before
    python -m benchmarks.front --page

`waiting` in the results is the planner at 2fe6aba, in which no update ran ahead of the norm.

Llama-3.1 8B and 70B, whole and with adapters, with updates in backward and with clipping, on
machines of the catalogue. Profiles are estimated once, in `--work`, so that all planners read the
same; one that does not know a form of activations reads them without it. Seconds are simulated.
Results are written as they come, and what is there is not done again.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from benchmarks.provenance import commit, today
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Infeasible
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.planning.search.baselines import BASELINES, baseline
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.simulation.report import report
from protrain_runtime.contract.records import read_profile
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.plan import Budgets, Updates
from protrain_runtime.contract.records.profile import Profile

MODELS = ("llama-3.1-8b", "llama-3.1-70b")
MACHINES = ("rtx-4090", "a100-80gb", "h100-sxm", "gh200")
TOKENS = {"rtx-4090": 2048, "a100-80gb": 4096, "h100-sxm": 8192, "gh200": 8192}
ADAPTERS = ("", "r=16")
UPDATES: tuple[Updates, ...] = get_args(Updates)
SHARES = (0.3, 1.0)
"""Where budgets lie between the least that works and the card's memory, on a logarithmic scale."""

RESULTS = Path(__file__).parent / "results/front.json"
SLOWER = 1.001
"""A step of so many times an earlier planner's is slower."""


@dataclass(frozen=True, slots=True)
class Question:
    """A model on a machine; `adapter` is empty where all parameters are trained."""

    model: str
    machine: str
    adapter: str

    @property
    def name(self) -> str:
        return f"{self.model}{'-lora' if self.adapter else ''}-{self.machine}"

    def profiled(self, work: Path) -> Path:
        """The profile's file, made unless it is there."""
        path = work / f"{self.name}.yaml"
        if not path.exists():
            work.mkdir(parents=True, exist_ok=True)
            shape = ["--seq-len", str(TOKENS[self.machine]), "--dtype", "bfloat16"]
            shape += ["--lora", self.adapter] if self.adapter else ["--precision", "master"]
            command = [sys.executable, "-m", "protrain_plan.cli", "profile", self.model]
            command += ["--on", self.machine, *shape, "-o", str(path)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return path


def budgets_of(profile: Profile, device: int) -> Budgets:
    """All of the machine's lower tiers."""
    capacity = {tier.name: tier.capacity_bytes for tier in profile.hardware.tiers}
    return Budgets(device=device, host=capacity.get("host", 0), disk=capacity.get("disk", 0))


def sizes(profile: Profile, updates: Updates) -> list[int]:
    """Bytes of the device that are asked for; none where no plan fits the card."""
    card = profile.hardware.device.memory_bytes
    lean = min_memory(
        Problem.of(
            profile, budgets_of(profile, card), settings=replace(OVERLAPPING, updates=updates)
        )
    )
    least = card + 1 if lean is None else lean.bytes + profile.hardware.device.besides_bytes
    return [round(least * (card / least) ** share) for share in SHARES if least <= card]


def solved(
    profile: Profile, updates: Updates, devices: Sequence[int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each size of the device what the planner and the baselines make of it."""
    for device in devices:
        within = budgets_of(profile, device)
        problem = Problem.of(profile, within, settings=replace(OVERLAPPING, updates=updates))
        started = time.process_time()
        answer = solve_problem(problem, within)
        taken = time.process_time() - started
        if isinstance(answer, Infeasible):
            continue
        plan, prediction = answer.plan, answer.plan.prediction
        overlaps = bool(getattr(plan, "overlap_steps", False))
        if hasattr(problem, "overlapping"):
            problem = problem.overlapping(overlaps)
        told = report(problem.program(plan.units))
        alone = problem.overlapping(False) if hasattr(problem, "overlapping") else problem
        found = {name: baseline(name, alone, Evaluator(alone)) for name in BASELINES}
        yield (
            str(within.device),
            {
                "seconds": prediction.step_seconds,
                "bound": prediction.lower_bound_seconds,
                "solve_seconds": taken,
                "overlaps": overlaps,
                "stall_seconds": told.stall_seconds,
                "waits": told.stall_by_cause,
                "lanes": {lane.name: lane.utilisation for lane in told.lanes},
                "baselines": {name: one.seconds if one else None for name, one in found.items()},
            },
        )


def run(label: str, work: Path, out: Path) -> None:
    """Ask every question that has no answer under this label."""
    document: dict[str, Any] = {"runs": [], "cases": {}}
    if out.exists():
        document = json.loads(out.read_text())
    others = [made for made in document["runs"] if made["label"] != label]
    document["runs"] = [*others, {"label": label, "commit": commit(), "date": today()}]
    for adapter, model, machine in product(ADAPTERS, MODELS, MACHINES):
        question = Question(model, machine, adapter)
        profile = known_forms(question.profiled(work))
        for updates in UPDATES:
            answers = document["cases"].setdefault(f"{question.name}, {updates}", {})
            if label in answers:
                continue
            devices = answers.setdefault("budgets", sizes(profile, updates))
            answers[label] = dict(solved(profile, updates, devices))
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(document, indent=1) + "\n")
            print(question.name, updates, [f"{a['seconds']:.3f}" for a in answers[label].values()])


def known_forms(path: Path) -> Profile:
    """The profile without forms of activations that this planner does not know."""
    lines = path.read_text().splitlines(keepends=True)
    named = [line for line in lines if "{form: " in line]
    strange = {line for line in named if line.split("{form: ")[1].split(",")[0] not in FORMS}
    kept = path.with_suffix(".known")
    kept.write_text("".join(line for line in lines if line not in strange))
    profile = read_profile(kept)
    kept.unlink()
    return profile


def ratios(document: Mapping[str, Any], label: str) -> dict[str, list[float]]:
    """How many times our seconds the others take: earlier planners and baselines."""
    found: dict[str, list[float]] = defaultdict(list)
    for answers in document["cases"].values():
        for device, ours in answers.get(label, {}).items():
            others = {**ours["baselines"]}
            others |= {
                other: answers[other].get(device, {}).get("seconds")
                for other in answers
                if other not in ("budgets", label)
            }
            for name, seconds in others.items():
                if seconds is not None:
                    found[name].append(seconds / ours["seconds"])
    return found


def page(document: Mapping[str, Any]) -> str:
    """The page: ratios, the front, and what binds, of the label that was run last."""
    labels = [made["label"] for made in document["runs"]]
    label = labels[-1]
    made_at = ", ".join(f"{one['label']}: {one['commit']}" for one in document["runs"])
    lines = [
        "# The front of memory against time",
        "",
        "`python -m benchmarks.front` made it. All seconds are simulated, on estimated",
        "profiles; a ratio above 1 says that the other takes longer than this planner. By commit:",
        f"{made_at}.",
        "",
        "| | cases | least | median | most | below 1 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, found in ratios(document, label).items():
        numbers = min(found), statistics.median(found), max(found)
        slower = sum(one * SLOWER < 1 for one in found)
        told = " | ".join(f"{one:.3f}" for one in numbers)
        lines.append(f"| {name} / {label} | {len(found)} | {told} | {slower} |")
    others = [other for other in labels if other != label]
    lines += ["", "## Seconds of a step", ""]
    lines.append(f"| case | device | {' | '.join(labels)} | gap | steps overlap | waits for |")
    lines.append("|---|---:|" + "---:|" * len(labels) + "---:|---|---|")
    for case, answers in document["cases"].items():
        for device, ours in answers.get(label, {}).items():
            before = [answers.get(other, {}).get(device, {}).get("seconds") for other in others]
            cells = [case, f"{int(device) / 2**30:.1f} GiB"]
            cells += [f"{one:.3f}" if one else "-" for one in (*before, ours["seconds"])]
            cells.append(f"{ours['seconds'] / ours['bound'] - 1:.1%}")
            cells.append("yes" if ours["overlaps"] else "no")
            waits = (f"{cause} {seconds:.2f} s" for cause, seconds in ours["waits"].items())
            cells.append(", ".join(waits) or "-")
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Where the next second is", ""]
    lines += ["How busy each lane is, in the median of a machine's cases.", ""]
    lanes: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case, answers in document["cases"].items():
        machine = next(name for name in MACHINES if f"-{name}," in case)
        for ours in answers.get(label, {}).values():
            for lane, share in ours["lanes"].items():
                lanes[machine][lane].append(share)
    for machine, shares in lanes.items():
        ordered = sorted(shares.items(), key=lambda item: -statistics.median(item[1]))
        told = ", ".join(f"{lane} {statistics.median(found):.0%}" for lane, found in ordered)
        lines.append(f"- {machine}: {told}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.front", description=__doc__)
    parser.add_argument("--label", help="solve all cases and write them under this name")
    parser.add_argument("--profiles", action="store_true", help="estimate the profiles alone")
    parser.add_argument("--page", action="store_true", help="write the page of what is there")
    parser.add_argument("--work", type=Path, default=Path("out/front"), help="for profiles")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.profiles:
        for adapter, model, machine in product(ADAPTERS, MODELS, MACHINES):
            Question(model, machine, adapter).profiled(options.work)
    if options.label:
        run(options.label, options.work, options.out)
    if options.page or options.label:
        document = json.loads(options.out.read_text())
        options.out.with_suffix(".md").write_text(page(document))


if __name__ == "__main__":
    main()
