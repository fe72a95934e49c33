"""Files that hold what our code should print. `PROTRAIN_WRITE_GOLDEN=1 pytest` writes them anew."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden_files"


def assert_golden(path: str | Path, text: str) -> None:
    """The text is what the file in golden_files holds, but for blanks at the ends of lines."""
    file = FOLDER / path
    found = "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())
    if os.environ.get("PROTRAIN_WRITE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8")
