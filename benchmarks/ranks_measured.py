"""A small model on several CPU ranks of this machine: the seconds of its steps, by placement.

What is measured stays in the folder of work, so that a second run goes on where one was ended.
`python -m benchmarks.ranks_measured PLAN OUT` is one rank of a run, started by torchrun.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import distributed

from protrain_plan.records import read_plan
from protrain_plan.running import train

Json = dict[str, Any]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
"""30 M parameters: gloo takes about as long for their gradients as a thread for their compute."""

SEQ_LEN = 256
STEPS = 5
PLACEMENTS = ("persistent", "shard", "offload to disk")
WHAT = (
    f"A Llama of 30 M parameters, one sequence of {SEQ_LEN} tokens on each rank, in float32, one"
    " thread a rank, gloo over the loopback interface, on a machine with {cores} cores. **Ranks"
    " share the cores, their memory and one disk**: four ranks on two cores take twice as long as"
    " two by that alone, and this says nothing about devices of their own. Ratios are within one"
    " run."
)


def measured(work: Path, *, ranks: Sequence[int]) -> Json:
    """The median seconds of a step, rank 0's, for every number of ranks and every placement."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "config.json").write_text(json.dumps(CONFIG))
    profile = work / "profile.yaml"
    if not profile.exists():
        options = ("--on", "cpu", "--seq-len", SEQ_LEN, "-o", profile)
        _run(_beside("protrain"), "profile", work / "config.json", *options, folder=work)
    cells = list(_cells(ranks))
    for count, placement in cells:
        _plan(work, count, placement)
    rows = [_row(work, count, placement) for count, placement in cells]
    return {"what": WHAT.format(cores=os.cpu_count()), "rows": rows}


def _cells(ranks: Sequence[int]) -> Iterator[tuple[int, str]]:
    for count in ranks:
        yield from ((count, words) for words in PLACEMENTS if count > 1 or words != "shard")


def _plan(work: Path, count: int, placement: str) -> Path:
    """The plan of a cell: every unit with its states there, seconds of the catalogue's CPU."""
    plan = work / f"{count}-{placement.replace(' ', '-')}.yaml"
    if not plan.exists():
        options = ("--num-devices", count, "--pin", f"*: {placement}", "-o", plan)
        _run(_beside("protrain"), "plan", work / "profile.yaml", *options, folder=work)
    return plan


def _row(work: Path, count: int, placement: str) -> Json:
    plan = _plan(work, count, placement)
    out = plan.with_suffix(".json")
    if not out.exists():
        module = ("-m", "benchmarks.ranks_measured", plan, out)
        _run(_beside("torchrun"), "--nproc-per-node", count, *module, folder=work)
    seconds: Json = json.loads(out.read_text())
    return {"ranks": count, "plan": placement} | seconds


def _beside(script: str) -> Path:
    """A script of this interpreter's environment."""
    return Path(sys.executable).with_name(script)


def _run(*command: object, folder: Path) -> None:
    here = str(Path(__file__).parent.parent)
    paths = os.pathsep.join(path for path in (here, os.environ.get("PYTHONPATH")) if path)
    alone = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    result = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=os.environ | alone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def main() -> None:
    """Train on this rank, and write rank 0's seconds."""
    plan, out = read_plan(sys.argv[1]), Path(sys.argv[2])
    if plan.num_devices > 1:
        distributed.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        run = train(plan, num_steps=STEPS, plain=False, text=None, spill_directory=Path(folder))
    if int(os.environ["RANK"]) == 0:
        out.write_text(json.dumps({"step_seconds": run.step_seconds}))
    if plan.num_devices > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
