"""The command that profiles a workload anew: what messages say to do."""

import shlex
from collections.abc import Sequence

from protrain_plan.records.profile import Workload


def profile_command(
    workload: Workload, *, optimizer: str, output: str, on: str | None = None
) -> str:
    """`protrain profile` as a profile of `workload` was asked for; estimated for the machine `on`.

    How it was measured (steps, unit by unit) and on which text is not in a record.
    """
    words: list[str] = []
    if on is not None:
        words += ["--on", on]
    else:
        words += _unless("cpu", "--device", workload.device)
        words += ["--deterministic"] if workload.deterministic else []
    if workload.model_config:  # a factory's batches are its own
        words += ["--batch-size", str(workload.batch_size), "--seq-len", str(workload.seq_len)]
    words += _unless("float32", "--dtype", workload.dtype)
    words += _unless("pure", "--precision", workload.precision)
    words += _unless("", "--lora", ",".join(workload.adapter.split()[1:]))
    words += _unless("adamw", "--optimizer", optimizer)
    words += _unless("0", "--seed", str(workload.seed))
    return command("profile", workload.model, [*words, "-o", output])


def command(name: str, argument: str, options: Sequence[str]) -> str:
    """A command of ours for a shell, in which no name is read as anything else."""
    if argument.startswith("-"):
        return shlex.join(["protrain", name, *options, "--", argument])
    return shlex.join(["protrain", name, argument, *options])


def _unless(default: str, option: str, value: str) -> list[str]:
    """An option with its value, where that is not the default."""
    return [] if value == default else [option, value]
