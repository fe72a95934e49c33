"""The command line in real processes: what it prints, and how it ends."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


PROTRAIN = Path(sys.executable).with_name("protrain")


Result = subprocess.CompletedProcess[str]


def ran(*command: object, folder: Any = ROOT, timeout: Any = 600, **environment: str) -> Result:
    """A process, and how it ended; `stdin` is given to it, and is not of its environment.

    Lines of progress, which depend on the time that it took, are left out.
    """
    result = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        input=environment.pop("stdin", None),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    result.stderr = without_progress(result.stderr)
    return result


def without_progress(text: str) -> str:
    """Leave the lines out that long work prints on standard error."""
    return re.sub(r"^\.\.\. .*\n", "", text, flags=re.MULTILINE)


def python(code: str, *arguments: object, folder: Path = ROOT, **environment: str) -> str:
    """The output of a script, which ends well."""
    result = ran(sys.executable, "-c", code, *arguments, folder=folder, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def protrain(*arguments: object, folder: Path, **environment: str) -> Result:
    return ran(PROTRAIN, *arguments, folder=folder, timeout=200, **environment)


def printed(result: Result) -> dict[str, Any]:
    """The JSON object of a command that went well, and said nothing else."""
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def bash(script: str, *, folder: Path, **environment: str) -> Result:
    """A step of a workflow: bash as GitHub Actions starts it, with our commands on the path."""
    path = f"{PROTRAIN.parent}{os.pathsep}{os.environ['PATH']}"
    given = {"PATH": path, "COLUMNS": "100"} | environment
    return shell(script, folder=folder, environment=given)


def copy_example(folder: Path) -> None:
    """The example as a repository of its own, with one commit on main."""
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    version(folder)


EXAMPLE = ROOT / "examples/ci"


def shell(script: str, *, folder: Path, environment: dict[str, str]) -> Result:
    command = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script)
    return ran(*command, folder=folder, timeout=1800, **environment)


def version(folder: Path) -> None:
    """Make the folder a repository, with all that lies there in one commit on main."""
    made = bash(
        "git init -q -b main && git config user.name t && git config user.email t@localhost"
        " && git add -A && git commit -q -m plans",
        folder=folder,
    )
    assert made.returncode == 0, made.stderr


MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
