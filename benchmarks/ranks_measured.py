"""A small model on several CPU ranks of this machine: seconds and bytes of a step, by placement.

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

from protrain_plan.commands.training import train
from protrain_runtime.contract.records import read_plan, read_profile
from protrain_runtime.ranks.group import launched

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

SMALL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "vocab_size": 512}
SEQ_LEN = 256
STEPS = 6  # the first is not timed, bytes are those of the last
PLACEMENTS = ("persistent", "shard", "offload to disk")
WHAT = (
    "A Llama of {millions} M parameters, one sequence of {tokens} tokens on each rank, in float32,"
    " one thread a rank, gloo over the loopback interface, on a machine with {cores} cores."
    " **Ranks share the cores, their memory and one disk**: four ranks on two cores take twice as"
    " long as two by that alone, and this says nothing about devices of their own. Ratios are"
    " within one run. Bytes are rank 0's, tensors alone: predicted from an estimated profile for"
    " the slowest lanes that the plan allows, and counted in a step."
)


def measured(work: Path, *, ranks: Sequence[int], quick: bool = False) -> Json:
    """A step's median seconds and its bytes, rank 0's, by number of ranks and placement."""
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    config = CONFIG | (SMALL if quick else {})
    (work / "config.json").write_text(json.dumps(config))
    profile = work / "profile.yaml"
    if not profile.exists():
        options = ("--on", "cpu", "--seq-len", SEQ_LEN, "-o", profile)
        _run(_beside("protrain"), "profile", work / "config.json", *options, folder=work)
    cells = list(_cells(ranks))
    for count, placement in cells:
        _plan(work, count, placement)
    rows = [_row(work, count, placement) for count, placement in cells]
    units = read_profile(profile).units
    millions = round(sum(unit.num_parameters for unit in units) / 1e6, 1)
    what = WHAT.format(millions=millions, tokens=SEQ_LEN, cores=os.cpu_count())
    return {"what": what, "rows": rows}


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
        _run(_beside("torchrun"), "--standalone", "--nproc-per-node", count, *module, folder=work)
    found: Json = json.loads(out.read_text())
    predicted = read_plan(plan).prediction.peak_bytes.device
    return {"ranks": count, "plan": placement, "predicted_bytes": predicted} | found


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
    """Train on this rank, and write rank 0's seconds and bytes."""
    plan, out = read_plan(sys.argv[1]), Path(sys.argv[2])
    who = launched()
    rank = who.rank
    with who.joined("cpu"), tempfile.TemporaryDirectory() as folder:
        run = train(
            plan,
            num_steps=STEPS,
            plain=False,
            text=None,
            spill_directory=Path(folder),
            rank=rank,
        )
    if rank == 0:
        assert run.measured_peak_bytes is not None
        found = {
            "step_seconds": run.step_seconds,
            "device_bytes": run.measured_peak_bytes.device,
        }
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
