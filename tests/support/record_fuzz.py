"""Hostile records through every command, by hand: python -m tests.support.record_fuzz --count 2000.

A case is a folder with a plan, its profile, a machine and budgets, of which something was changed:
as data (keys, numbers, texts, units), or as bytes. Commands run in this process as `main` runs
them. Prints what ended neither well nor as one error, and ends with 1 where something did.
"""

import argparse
import copy
import io
import os
import random
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from protrain_plan import cli
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.recording import Event, Recording, dumps_recording
from protrain_runtime.contract.records import (
    dumps_hardware,
    dumps_plan,
    dumps_profile,
    fingerprint,
    loads_profile,
    read_plan,
    read_profile,
)
from protrain_runtime.contract.records.plan import DeviceGroup, Plan
from protrain_runtime.contract.records.profile import Profile
from tests.support.checking_cases import PROFILE, offloading
from tests.support.commands import without_progress
from tests.support.planning_cases import decoder, gpu, joined
from tests.support.reporting_cases import random_step, small_step

Json = Any
Files = dict[str, str]
Change = Callable[[Json, random.Random], None]

SECONDS, WAITING = 20, 120
"""Limits on a command's processor time, and on anybody's on a busy machine."""
BYTES = 2 * 2**30

PLANS = Path(__file__).parents[2] / "plans"
BUDGETS = """\
protrain: budgets
version: 1
budgets:
  box: {device: 2GiB, headroom: 5%, slowdown: 12.5%, plans: ["*.yaml"]}
  rtx-4090: {step_seconds: 2.5, device: 20GiB, plans: ["*"]}
"""
PINS = "protrain: pins\nversion: 2\npins:\n  '*1': persistent\n"
TOML = """\
[tool.protrain.budgets.box]
device = "2GiB"
headroom = "5%"
step_seconds = 2.5
plans = ["*.yaml"]
"""

NUMBERS: tuple[Json, ...] = (
    *(0, 1, -1, 2, 3, 7, 2**10, 2**31, 2**31 - 1, 2**40, 2**53, 2**60, 2**60 + 1, 2**63 - 1, 2**64),
    *(0.0, -0.0, 0.5, 1.5, 1e-6, 1e-12, 1e-13, 5e-324, 1e-300, 1e9, 1e15, 1e21, 1e22, 1e300, 1e308),
    *(float("inf"), float("-inf"), float("nan"), 10**5000),
)
WORDS = """\
*|**|.|/|//|..|[|[!|[]-a]|?|\\|~/x|./x|x.toml|a.b.c|layers.0-3|m.0-99999||no|~|1e9|12:30|0x10|a: b
[/]|[bold]x|${{ x }}|::error::|1e400MiB|0.0000001B|-1|99999999999999PiB|1GiB|0.5KiB|5%|inf|../x|end
/dev/zero|/etc/passwd|not json|{}|[]|{"model_type": 5}|cpu|cuda|keep|recompute|recompute attn|host
swap to host|swap to disk|persistent|shard|offload to disk|offload to host|buffer from disk|full
lite|offload to disk and keep gathered|shard and keep gathered|part|block|estimated|measured
after backward|sparse gradients"""
TEXTS: tuple[Json, ...] = (
    *(word for line in WORDS.splitlines() for word in line.split("|")),
    *("*a" * 400, "a/" * 400, "é" * 300, "x" * 1001, "9" * 5000, " ", "\t", "a\nb"),
    *("p\u3164q", "\u2800", "a\ufe0f", "\u0440rotrain", "\U0001f600", "\u202e", "\u200b"),
    *("\x00", "\x1b[31m", "\x7f", "\x9b", "\u2028", "\ufeff", "\ud800", "\ufffe"),
)


# --- what there is to change ----------------------------------------------------------------------


@cache
def originals() -> tuple[Files, ...]:
    """Folders with records that fit each other: small models, committed ones, several devices."""
    small = small_step()
    pairs = [(offloading(), PROFILE), (small.plan, small.profile)]
    pairs += [(step.plan, step.profile) for step in map(random_step, map(random.Random, (1, 2, 3)))]
    for name in ("smollm2-135m-cpu-1100MiB", "mistral-7b-lora-l4"):
        folder = PLANS / name
        pairs.append((read_plan(folder / "plan.yaml"), read_profile(folder / "profile.yaml")))
    shared = decoder(joined(gpu(disk_gb=100)), blocks=2, pieces=2)
    group = DeviceGroup(num_devices=8, num_nodes=2, num_replicas=2)
    pairs.append((offloading(shared, group=group), shared))
    return tuple(_folder(plan, profile) for plan, profile in pairs)


def _folder(plan: Plan, profile: Profile) -> Files:
    recording = Recording(
        plan_fingerprint=fingerprint(plan),
        step_seconds=1.0,
        events=(Event(lane="compute", name="forward 0", start_s=0.0, end_s=0.5),),
    )
    return {
        "plan.yaml": dumps_plan(plan),
        "profile.yaml": dumps_profile(profile),
        "machine.yaml": dumps_hardware(profile.hardware),
        "budgets.yaml": BUDGETS,
        "pins.yaml": PINS,
        "budgets.toml": TOML,
        "recording.json": dumps_recording(recording),
    }


# --- changes --------------------------------------------------------------------------------------


def changed(rng: random.Random) -> Files:
    """A folder in which one file was changed, or two that still belong to each other."""
    files = dict(rng.choice(originals()))
    name = rng.choice(["plan.yaml"] * 4 + ["profile.yaml"] * 6 + list(files))
    if rng.random() < 0.05:
        other = rng.choice(originals())
        files[name] = other[name]
    elif rng.random() < 0.1:
        files[name] = _flooded(files[name], rng)
    elif rng.random() < 0.15 or not name.endswith(".yaml"):
        files[name] = _bytes_changed(files[name], rng)
    else:
        document = copy.deepcopy(_loaded(files[name]))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            change = rng.choice(CHANGES)
            change(document, rng)
        files[name] = _dumped(document)
    # The plan of a changed profile names it: what looks at both has to get as far as that.
    return _reunited(files) if name == "profile.yaml" and rng.random() < 0.9 else files


@cache
def _loaded(text: str) -> Json:
    return yaml.safe_load(text)


def _dumped(document: Json) -> str:
    try:
        before = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        return yaml.safe_dump(document, sort_keys=False, width=10**6)
    finally:
        sys.set_int_max_str_digits(before)


FLOODS: tuple[Callable[[int], str], ...] = (
    *(lambda n, piece=piece: piece * n for piece in ("[],", "a.", '"a".', "%a\n", "---\n", "\n")),
    *(lambda n, piece=piece: piece * n for piece in ("#\n", "'", '"""', "{a: ", "- ", "!b ")),
    *(lambda n, piece=piece: piece * n for piece in ("\u3164", "p\u0440", "\\x70", "&a ", "*a,")),
    *(lambda n, piece=piece: piece * n for piece in ("? ", ": ")),
    lambda n: "\n" + "".join(f"a{k}: &a{k} [{f'*a{k - 1}, ' * 9}]\n" for k in range(min(n, 9999))),
    lambda n: "\n" + "".join(f"[{'a.' * 15}a{k}]\nb = 1\n" for k in range(n // 100)),
    lambda n: "\n" + "".join(f"{' ' * k}a:\n" for k in range(min(n, 1500))),
    lambda n: "x" * n + ": 1\n",
)
"""Texts of any length that somebody has to read before they can be refused."""


def _flooded(text: str, rng: random.Random) -> str:
    """The text with one of these in it: at its start, its end or the end of a line."""
    flood = rng.choice(FLOODS)(rng.choice((3, 40, 3000, 200_000)))
    ends = [0, len(text), *(place.end() for place in re.finditer("\n", text))]
    at = rng.choice((0, len(text), rng.choice(ends)))
    return text[:at] + flood + text[at:]


def _reunited(files: Files) -> Files:
    try:
        profile = loads_profile(files["profile.yaml"])
    except ProtrainError:
        return files
    plan = re.sub(
        r"^profile_fingerprint: .*$",
        f"profile_fingerprint: {fingerprint(profile)}",
        files["plan.yaml"],
        flags=re.MULTILINE,
    )
    return {**files, "plan.yaml": plan}


PIECES = (b"[", b"{", b"- ", b": ", b"\0", b"\xff", b"9" * 50, b"&a ", b"*a", b"!!x ")


def _bytes_changed(text: str, rng: random.Random) -> str:
    """Some bytes are gone, up to all that follow, and others in their place."""
    content = bytearray(text.encode())
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, start = (rng.randrange(len(content) + 1) for _ in range(2))
        gone = rng.choice((0, 0, 0, 1, 1, 5, 200, len(content)))
        some = (
            b"",
            bytes((rng.randrange(256),)),
            rng.choice(PIECES) * rng.choice((1, 1, 1, 100)),
            bytes(content[start : start + rng.choice((3, 40, 500))]),
        )
        content[at : at + gone] = rng.choice(some)
    return content.decode("utf-8", "surrogateescape")


def _places(node: Json) -> Iterator[tuple[Json, Any]]:
    """The container of each value, and its key."""
    if isinstance(node, dict | list):
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            yield node, key
            yield from _places(value)


def _place(document: Json, rng: random.Random, kinds: tuple[type, ...] | None = None) -> Any:
    found = [(h, k) for h, k in _places(document) if kinds is None or type(h[k]) in kinds]
    return rng.choice(found) if found else None


def _number(document: Json, rng: random.Random) -> None:
    if place := _place(document, rng, (int, float)):
        holder, key = place
        number = holder[key]
        smaller = number // 1000 if isinstance(number, int) else number / 1000
        scaled = (number * 10, number * 1000, smaller, -number, number + 1, number - 1)
        holder[key] = rng.choice((*scaled, *NUMBERS))


def _size(document: Json, rng: random.Random) -> None:
    found = [
        (h, k)
        for h, k in _places(document)
        if isinstance(k, str) and (k.endswith("_bytes") or k in ("device", "host", "disk"))
    ]
    if found:
        holder, key = rng.choice(found)
        if not isinstance(holder[key], dict):
            holder[key] = rng.choice((0, 1, 3, 100, 2**20, 2**31, 2**40, 2**50, 2**60, -5))


def _setting(values: Sequence[Json], kinds: tuple[type, ...] | None = None) -> Change:
    def change(document: Json, rng: random.Random) -> None:
        if place := _place(document, rng, kinds):
            holder, key = place
            holder[key] = rng.choice(values)

    return change


def _key(document: Json, rng: random.Random) -> None:
    found = [(h, k) for h, k in _places(document) if isinstance(h, dict)]
    if found:
        holder, key = rng.choice(found)
        value = holder.pop(key)
        what = rng.randrange(3)
        if what:
            holder[rng.choice((*TEXTS, f"{key}x", str(key).upper()))] = value
        if what == 2:
            holder[key] = value


def _list(document: Json, rng: random.Random) -> None:
    if place := _place(document, rng, (list,)):
        holder, key = place
        items = holder[key]
        once_more = copy.deepcopy(rng.sample(items, min(1, len(items))))
        holder[key] = rng.choice(
            (
                *([], items[::-1], rng.sample(items, len(items)), items[1:], items[:-1]),
                *(items[:1], items + once_more, items * rng.choice((2, 10, 100))),
            )
        )


def _numbers(document: Json, rng: random.Random) -> None:
    """All numbers of one name alike: what sums of them come to."""
    if place := _place(document, rng, (int, float)):
        _, key = place
        value = rng.choice(NUMBERS)
        for holder, other in list(_places(document)):
            if other == key and type(holder[other]) in (int, float):
                holder[other] = value


OF_UNITS: dict[tuple[str, ...], Sequence[Json]] = {
    ("names",): ("m.0-1", "m.0-99", "m.0-1001", "m.0-99999", "m.5-2"),
    ("used_by",): ([], [0], [0, 1, 2, 3], [3]),
    ("activations",): [text for text in TEXTS if "to" in text or "rec" in text],
    ("states",): [text for text in TEXTS if "off" in text or "buf" in text],
    ("forward_lead", "backward_lead", "swap_lead", "swap_drain", "update_drain"): (
        *(0, 0.5, 1, 1.999999, 5, 1000.5, 19999, "end"),
    ),
    ("parameter_pieces", "gradient_pieces", "swap_pieces"): (
        *([], [0], [1, 2], [2**40] * 9, [0] * 1000),
    ),
}
OF_STEPS: dict[str, Sequence[Json]] = {
    "piece_bytes": (1, 2, 1000, 10**5, 10**6, 2**23, 2**60),
    "micro_batches": (1, 2, 1000, 10**6),
    "updates": ("in backward", "after backward"),
}
OF_GROUPS: dict[str, Sequence[Json]] = {
    "num_devices": (1, 2, 3, 8, 100, 99_999, 100_000),
    "num_nodes": (1, 2, 4, 8, 100_000),
    "num_replicas": (1, 2, 8, 100),
}


def _units(document: Json, rng: random.Random) -> None:
    """Long runs, other names, other decisions."""
    units = document.get("units") if isinstance(document, dict) else None
    if isinstance(units, list) and units and isinstance(entry := rng.choice(units), dict):
        keys = rng.choice(list(OF_UNITS))
        if keys == ("names",):
            entry.pop("name", None)
        entry.update({key: rng.choice(OF_UNITS[keys]) for key in keys})


def _settings(document: Json, rng: random.Random) -> None:
    """Settings of a whole step."""
    settings = document.get("settings") if isinstance(document, dict) else None
    if isinstance(settings, dict):
        settings.update({key: rng.choice(values) for key, values in OF_STEPS.items()})
        settings["group"] = {key: rng.choice(values) for key, values in OF_GROUPS.items()}
        tiers = ("device", "host", "disk")
        document["budgets"] = {tier: rng.choice((0, 1, 2**30, 2**60)) for tier in tiers}


_text = _setting(TEXTS, (str,))
_anything = _setting((None, True, [], {}, [[]], {"a": 1}, *NUMBERS, *TEXTS))
CHANGES: tuple[Change, ...] = (
    *(_number, _number, _number, _size, _size, _text, _anything, _key, _list, _list, _numbers),
    *(_units, _units, _settings),
)


# --- commands -------------------------------------------------------------------------------------

Commands = tuple[tuple[str, ...], ...]


def _commands(lines: str) -> Commands:
    return tuple(tuple(line.split()) for line in lines.strip().splitlines())


OFTEN = _commands("""
show plan.yaml
show plan.yaml --json
simulate plan.yaml --trace trace.json
check plan.yaml --records-only --budgets budgets.yaml
check . --records-only --format json --strict
check . --records-only --format github --strict
check . --records-only --format text --strict
check plan.yaml --records-only --budgets budgets.toml --on machine.yaml
check plan.yaml --records-only --on rtx-4090 --on h100-sxm
diff original.txt plan.yaml --format markdown
diff plan.yaml original.txt
diff plan.yaml plan.yaml --json
export plan.yaml --to fsdp2
export plan.yaml --to trl
hardware show machine.yaml
hardware show profile.yaml --json
""")
SELDOM = _commands("""
report plan.yaml
report plan.yaml --recording recording.json
plan profile.yaml --time-limit 1 --explain
plan profile.yaml --time-limit 1 --pins pins.yaml --clip --accumulate 3
plan profile.yaml --time-limit 1 --num-devices 4 --json
plan profile.yaml --time-limit 1 --pareto --points 2
plan profile.yaml --time-limit 1 --maximize batch-size
plan profile.yaml --time-limit 1 --max-slowdown 1.5 --device-memory 2GiB
plan profile.yaml --solver four-parameter
plan profile.yaml --solver recompute-all
plan profile.yaml --solver offload-all --lp x.lp
""")
WITH_TORCH = _commands("""
run plan.yaml --steps 1
profile tiny-llama --on machine.yaml --seq-len 16
fit tiny-llama --on machine.yaml --seq-len 16
""")
CODES = (0, 1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A command that ended otherwise than with a result or one error."""

    arguments: tuple[str, ...]
    what: str


def run(arguments: Sequence[str]) -> tuple[int | None, str]:
    """A command in this process, within its limits: its exit code and what it says.

    None with what it raised, and what it says of an error alone, where there is one.
    """
    before = sys.argv
    sys.argv = ["protrain", *arguments]
    said, told = io.StringIO(), io.StringIO()
    try:
        with _limited(), redirect_stdout(said), redirect_stderr(told):
            cli.main()
    except SystemExit as end:
        if end.code not in CODES and end.code is not None:
            return None, f"exit code {end.code!r}: {told.getvalue()[-2000:]}"
        return end.code or 0, without_progress(told.getvalue()) or said.getvalue()
    except BaseException:  # noqa: BLE001 (whatever it is, it is what is looked for)
        return None, traceback.format_exc()[-4000:]
    finally:
        sys.argv = before
    return 0, without_progress(told.getvalue())


class TakesLong(BaseException):
    """A command did not end in time. No `Exception`, which commands may catch."""


@contextmanager
def _limited() -> Iterator[None]:
    """So many bytes more and so many seconds, in the main thread."""

    def stop(*_: object) -> None:
        raise TakesLong(f"no end after {SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[5])
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + BYTES, hard))
    timers = (
        (signal.SIGALRM, signal.ITIMER_REAL, WAITING),
        (signal.SIGPROF, signal.ITIMER_PROF, SECONDS),
    )
    was = [signal.signal(number, stop) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, was, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def judged(seed: int, folder: Path, commands: Commands) -> Wrong | None:
    """The failures of a command on the case of this seed."""
    rng = random.Random(seed)
    files = changed(rng)
    arguments = rng.choice(commands)
    (folder / "original.txt").write_text(originals()[0]["plan.yaml"])
    for name, text in files.items():
        (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    before = Path.cwd()
    os.chdir(folder)
    try:
        code, told = run(arguments)
    finally:
        os.chdir(before)
    if code is None:
        return Wrong(arguments=arguments, what=told)
    in_summary = arguments[0] == "diff" and "markdown" in arguments  # there errors are the result
    if code == 2 and not in_summary and not told.startswith("error: "):
        return Wrong(arguments=arguments, what=f"no error is told: {told!r}")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--seldom", action="store_true", help="the planner and the page as well")
    parser.add_argument("--torch", action="store_true", help="commands that build models as well")
    asked = parser.parse_args()
    commands = OFTEN + SELDOM * asked.seldom + WITH_TORCH * asked.torch
    classes: dict[str, int] = {}
    for seed in range(asked.seed, asked.seed + asked.count):
        with tempfile.TemporaryDirectory() as folder:
            wrong = judged(seed, Path(folder), commands)
        if wrong is not None:
            lines = wrong.what.strip().splitlines()
            where = [line.strip() for line in lines if line.lstrip().startswith("File")]
            kind = f"{lines[-1][:150]} {where[-1] if where else ''}"
            if classes.setdefault(kind, seed) == seed:
                print(f"--- seed {seed}: protrain {' '.join(wrong.arguments)}\n{wrong.what}")
    for kind, seed in classes.items():
        print(f"seed {seed}: {kind}")
    return int(bool(classes))


if __name__ == "__main__":
    sys.exit(main())
