"""Makes the committed plans that are estimated, and the page about them: `python plans/make.py`.

Profiles are estimated for machines of the catalogue, so that any machine remakes them all, byte by
byte. Names of folders make fewer of them: `python plans/make.py gpt2-xl-rtx-3090`.
"""

import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from protrain_runtime.contract.records import read_plan, read_profile
from protrain_runtime.contract.units import format_bytes, format_seconds

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs/plans.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A model on a machine; `profile` and `plan` are the options of the commands."""

    name: str
    profile: str
    plan: str

    @property
    def commands(self) -> tuple[str, str]:
        files = f"plans/{self.name}/profile.yaml", f"plans/{self.name}/plan.yaml"
        return (
            f"protrain profile {self.profile} -o {files[0]}",
            f"protrain plan {files[0]} {self.plan} -o {files[1]}",
        )

    def make(self, root: Path) -> None:
        """Write profile and plan below `root`; CalledProcessError where a command fails."""
        (root / "plans" / self.name).mkdir(parents=True, exist_ok=True)
        for command in self.commands:
            _, *arguments = shlex.split(command)
            module = (sys.executable, "-m", "protrain_plan.cli")
            subprocess.run((*module, *arguments), cwd=root, check=True, stdout=subprocess.DEVNULL)


PAIRS = (
    Pair(
        name="llama-3.1-8b-lora-rtx-4090",
        profile="llama-3.1-8b --on rtx-4090 --dtype bfloat16 --lora r=16,dtype=base --seq-len 4096",
        plan="--clip --disk 0 --tight",
    ),
    Pair(
        name="mistral-7b-lora-l4",
        profile="mistral-7b --on l4 --dtype bfloat16 --lora r=16,dtype=base --seq-len 16384",
        plan="--clip --host-memory 56GiB --disk 0 --tight",
    ),
    Pair(
        name="qwen2.5-7b-a100-80gb",
        profile="qwen2.5-7b --on a100-80gb --dtype bfloat16 --precision master --seq-len 4096",
        plan="--clip --disk 0 --tight",
    ),
    Pair(
        name="llama-3.2-1b-rtx-3090",
        profile="llama-3.2-1b --on rtx-3090 --dtype bfloat16 --precision master"
        " --batch-size 4 --seq-len 2048",
        plan="--clip --accumulate 4 --disk 0 --tight",
    ),
    Pair(
        name="gpt2-xl-rtx-3090",
        profile="gpt2-xl --on rtx-3090 --dtype bfloat16 --precision autocast"
        " --batch-size 2 --seq-len 1024",
        plan="--disk 0 --tight",
    ),
    Pair(
        name="llama-3.1-70b-lora-h100-sxm",
        profile="llama-3.1-70b --on h100-sxm --dtype bfloat16 --lora r=16,dtype=base"
        " --seq-len 4096",
        plan="--clip --disk 0 --tight",
    ),
)

INTRODUCTION = """\
# Plans of well-known models

Every folder of `plans/` holds a profile and the plan made from it. Bytes are counted, seconds are
estimates from data sheets, and none of these plans has run on such a machine. `protrain show PLAN`
says what each unit does; tests check all plans.
"""
COMMANDS = """
The options of `protrain profile` and `protrain plan` that make them (`make plans` makes all):

| Plan | Profile | Plan |
| --- | --- | --- |
"""
MEASURED = """
`smollm2-135m-cpu-1100MiB` is the plan of `make demo`: its profile was measured on two cores and a
disk, and it has been run.
"""


def page() -> str:
    """docs/plans.md, from what lies in the folders."""
    lines = [INTRODUCTION, "| Plan | Model states | Device | Host | Step | Gap |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |", *map(_row, PAIRS), COMMANDS.rstrip()]
    lines += [f"| `{p.name}` | `{p.profile}` | `{p.plan}` |" for p in PAIRS]
    return "\n".join([*lines, MEASURED])


def _row(pair: Pair) -> str:
    plan = read_plan(FOLDER / pair.name / "plan.yaml")
    units = read_profile(FOLDER / pair.name / "profile.yaml").units
    peak, budgets = plan.prediction.peak_bytes, plan.budgets
    cells = (
        f"`{pair.name}`",
        format_bytes(sum(unit.model_state_bytes for unit in units)),
        f"{format_bytes(peak.device + peak.context)} of {format_bytes(budgets.device)}",
        f"{format_bytes(peak.host)} of {format_bytes(budgets.host)}",
        format_seconds(plan.prediction.step_seconds),
        f"{plan.gap:.2%}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    wanted = [pair for pair in PAIRS if pair.name in sys.argv[1:] or not sys.argv[1:]]
    with ThreadPoolExecutor(2) as workers:
        list(workers.map(lambda pair: pair.make(FOLDER.parent), wanted))
    PAGE.write_text(page(), encoding="utf-8")
