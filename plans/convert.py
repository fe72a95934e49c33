"""Rewrites records of version 2 as version 3: `python plans/convert.py plans/mine ...`.

Takes folders and files. A plan's settings of the step become one key, and its profile's new
fingerprint is that of the `profile.yaml` beside it.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

from protrain_runtime.contract.records import fingerprint, read_profile, write_plan, write_profile
from protrain_runtime.contract.records.files import replace_text
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.records.reader import kind_of, loads

GROUP = ("num_devices", "num_replicas", "num_nodes")
SETTINGS = (
    *("piece_bytes", "updates", "micro_batches", "overlap_steps", "page_cache_bytes"),
    "clip_share",
)


def convert(path: Path) -> None:
    """Rewrite one file; RecordError where it is no record of version 2."""
    text = path.read_text(encoding="utf-8")
    kind = kind_of(text, str(path))
    text = re.sub(r"(?m)^version: 2$", "version: 3", text)
    if kind == "profile":
        write_profile(loads(Profile, text, str(path)), path)
    elif kind == "plan":
        group, settings = _taken(GROUP, text), _taken(SETTINGS, text)
        if group:
            settings.append(f"group: {{{', '.join(group)}}}")
        text = re.sub(rf"(?m)^({'|'.join((*GROUP, *SETTINGS))}): .*\n", "", text)
        plan = loads(Plan, f"{text}settings: {{{', '.join(settings)}}}\n", str(path))
        if (beside := path.with_name("profile.yaml")).is_file():
            plan = replace(plan, profile_fingerprint=fingerprint(read_profile(beside)))
        write_plan(plan, path)
    else:
        replace_text(path, text)


def _taken(keys: tuple[str, ...], text: str) -> list[str]:
    """The lines of a file that have these keys, where there are any."""
    return [line for line in text.splitlines() if line.partition(":")[0] in keys]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        here = Path(name)
        # Profiles first: plans have their fingerprints.
        found = sorted(here.rglob("*.yaml"), reverse=True) if here.is_dir() else [here]
        for file in found:
            convert(file)
