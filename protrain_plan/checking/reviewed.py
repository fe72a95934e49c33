"""Files that are reviewed: those of the repository, or of folders that are named."""

import os
from pathlib import Path

from protrain_runtime.contract.errors import RecordError


def repository() -> Path:
    """The folder of the repository around the working directory; that one where there is none."""
    here = Path(os.path.realpath("."))
    return next((above for above in (here, *here.parents) if (above / ".git").exists()), here)


def leads_out(path: str | Path, *folders: str | Path) -> str | None:
    """Why a file is not what is reviewed with the repository or the folders; None where it is."""
    try:
        real = Path(os.path.realpath(path))
        within = [repository(), *(Path(os.path.realpath(folder)) for folder in folders)]
        if any(map(real.is_relative_to, within)):
            return None
        is_link = os.path.abspath(path) != str(real)  # noqa: PTH100  (as it is called)
        return f"this {'link points' if is_link else 'file lies'} outside the folder: {real}"
    except ValueError:  # a name that no file can have
        return None


def refuse_outside(path: str | Path, *folders: str | Path) -> None:
    """RecordError where `leads_out` says why, whatever is there."""
    if (problem := leads_out(path, *folders)) is not None:
        fix = "put the file itself into the repository"
        raise RecordError(problem, source=str(path), fix=fix)
