"""The command that profiles a workload anew: what messages say to do."""

import shlex
from collections.abc import Sequence

from protrain_runtime.contract.records.adapters import option_of
from protrain_runtime.contract.records.profile import Workload


def profile_command(
    workload: Workload,
    *,
    optimizer: str,
    output: str,
    on: str | None = None,
    allow: Sequence[str] = (),
) -> str:
    """`protrain profile` for a profile of `workload`, estimated for the machine `on`."""
    words = [] if on is None else ["--on", on]
    if on is None and workload.device != "cpu":
        words += ["--device", workload.device]
    if on is None and workload.deterministic:
        words.append("--deterministic")
    if workload.compile:
        words.append("--compile")
    if workload.model_config:  # a factory's batches are its own
        words += ["--batch-size", str(workload.batch_size), "--seq-len", str(workload.seq_len)]
    for option, value, default in (
        ("--dtype", workload.dtype, "float32"),
        ("--precision", workload.precision, "pure"),
        ("--lora", option_of(workload.adapter), ""),
        ("--quantize", workload.quantize, ""),
        ("--optimizer", optimizer, "adamw"),
        ("--seed", str(workload.seed), "0"),
    ):
        if value != default:
            words += [option, value]
    words += allow_options(allow)
    return command("profile", workload.model, [*words, "-o", output])


def allow_options(allowed: Sequence[str]) -> list[str]:
    """`--allow` for each of them."""
    return [word for opt_in in allowed for word in ("--allow", opt_in)]


def command(name: str, argument: str, options: Sequence[str]) -> str:
    """A command of ours for a shell, in which no name is read as anything else."""
    if argument.startswith("-"):
        return shlex.join(["protrain", name, *options, "--", argument])
    return shlex.join(["protrain", name, argument, *options])
