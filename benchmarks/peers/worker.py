"""The process of a cell: `python -m benchmarks.peers.worker RESULT`, the cell as JSON on stdin."""

import json
import sys
from pathlib import Path

from benchmarks.peers.tasks import outcome


def main() -> None:
    cell = json.load(sys.stdin)
    answer = outcome(cell["task"], cell["arguments"])
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
