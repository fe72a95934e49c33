"""Where a run was made, in words that say nothing of where files lie."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent


def commit(tree: Path = ROOT) -> str | None:
    """A working tree's commit, marked where files differ from it; None outside a repository."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return ended.stdout.strip() or None


def today() -> str:
    """The day, as `2026-11-21`."""
    return datetime.now(UTC).date().isoformat()
