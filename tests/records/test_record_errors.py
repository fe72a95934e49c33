"""A mistake in a record is one error, and these are its words."""

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from protrain_runtime.contract import records
from protrain_runtime.contract.errors import ProtrainError, RecordError
from protrain_runtime.contract.records.adapters import parse_lora
from protrain_runtime.contract.records.schema import Record
from protrain_runtime.contract.records.words import number_text
from tests.support.messages import Speaker
from tests.support.planning_cases import RATES
from tests.support.record_samples import HARDWARE, PLAN, PLAN_TEXT, PROFILE

RATED = replace(HARDWARE, rates=replace(RATES, memory_bytes_per_s=3e11), sources=("a data sheet",))
TEXT = {
    "plan": PLAN_TEXT,
    "hardware": records.dumps_hardware(RATED),
    "profile": records.dumps_profile(PROFILE),
}
LOADERS: dict[str, Callable[[str, str], Record]] = {
    "plan": records.loads_plan,
    "profile": records.loads_profile,
    "hardware": records.loads_hardware,
}


def staged(*firsts: str, schedule: str = "1F1B", nodes: int = 1) -> str:
    """A section of stages that begin at these units, before the plan's units."""
    cost = "held: 1, piece_bytes: 1MiB, cycle_seconds: 1.0"
    peak = "peak_bytes: {device: 1, context: 0, host: 0, disk: 0}"
    stages = "".join(f"    - {{first_units: [{first}], {cost}, {peak}}}\n" for first in firsts)
    return f"pipeline:\n  schedule: {schedule}\n  num_nodes: {nodes}\n  stages:\n{stages}units:\n"


# (what the good plan says, what the bad one says instead, the error's key); its words are in the
# catalogue of messages
PLAN_ERRORS = [
    # the header
    ("protrain: plan\n", "", None),
    ("protrain: plan", "protrain: profile", "protrain"),
    ("protrain: plan", "protrain: plam", "protrain"),
    ("version: 3\n", "", None),
    ("version: 3", "version: 4", "version"),
    ("version: 3", "version: 2", "version"),
    ("version: 3", "version: '3'", "version"),
    # keys
    ("hardware: laptop", "hardware: laptop\nhardware: desktop", None),
    ("seed: 0", "sead: 0", "workload"),
    ("host: 0, disk: 100", "host: 0, zzz: 1, disk: 100", "budgets"),
    ("  seed: 0\n", "", "workload"),
    ("hardware: laptop", "? [a]\n: b", None),
    # numbers and what YAML makes of them
    ("step_seconds: 1.25", "step_seconds: 1e9", "prediction.step_seconds"),
    ("step_seconds: 1.25", "step_seconds: fast", "prediction.step_seconds"),
    ("step_seconds: 1.25", "step_seconds: .nan", "prediction.step_seconds"),
    ("step_seconds: 1.25", "step_seconds: -.inf", "prediction.step_seconds"),
    ("step_seconds: 1.25", "step_seconds: 1.0e+999", "prediction.step_seconds"),
    ("step_seconds: 1.25", "step_seconds: 0", "prediction.step_seconds"),
    ("step_seconds: 1.25", "step_seconds:", "prediction.step_seconds"),
    ("batch_size: 1", "batch_size: no", "workload.batch_size"),
    ("batch_size: 1", "batch_size: true", "workload.batch_size"),
    ("batch_size: 1", "batch_size: 12:30", "workload.batch_size"),
    ("batch_size: 1", "batch_size: 010", "workload.batch_size"),
    ("batch_size: 1", "batch_size: 4.0", "workload.batch_size"),
    ("batch_size: 1", "batch_size: 0", "workload.batch_size"),
    ("seed: 0", "seed: 9223372036854775808", "workload.seed"),
    ("seed: 0", "seed: [0]", "workload.seed"),
    # sizes
    ("piece_bytes: 256MiB", "piece_bytes: -256", "settings.piece_bytes"),
    ("piece_bytes: 256MiB", "piece_bytes: -256MiB", "settings.piece_bytes"),
    ("piece_bytes: 256MiB", "piece_bytes: 256M", "settings.piece_bytes"),
    ("piece_bytes: 256MiB", "piece_bytes: 1e9", "settings.piece_bytes"),
    ("piece_bytes: 256MiB", "piece_bytes: 1.5", "settings.piece_bytes"),
    ("disk: 100000000000", "disk: off", "budgets.disk"),
    # texts, booleans, mappings, lists
    ("hardware: laptop", "hardware: no", "hardware"),
    ("hardware: laptop", "hardware: 4090", "hardware"),
    ("hardware: laptop", "hardware:", "hardware"),
    ("exact: true", "exact: yes", "exact"),
    ("exact: true", "exact: 1", "exact"),
    ("budgets: {device: 4GiB, host: 0, disk: 100000000000}", "budgets: 4GiB", "budgets"),
    # words
    ("dtype: bfloat16", "dtype: bf16", "workload.dtype"),
    ("dtype: bfloat16", "dtype: 16", "workload.dtype"),
    ("activations: recompute", "activations: swp", "units[2].activations"),
    ("activations: recompute", "activations: swap to tape", "units[2].activations"),
    ("states: persistent", "states: zzz", "units[3].states"),
    # units
    ("swap_drain: 2", "swap_drain: never", "units[1].swap_drain"),
    ("forward_lead: 1", "forward_lead: -1", "units[1].forward_lead"),
    ("names: model.layers.12-31", "names: model.layers.11-31", "units[2]"),
    ("name: head", "names: head.3-3", "units[3].names"),
    ("names: model.layers.12-31", "names: model.layers.12-999999999", "units[2].names"),
    ("{name: head, ", "{", "units[3]"),
    ("name: head", "name: head, names: head.0-1", "units[3]"),
    (PLAN_TEXT[PLAN_TEXT.index("units:\n") :], "units: []\n", "units"),
    ("{name: head,", "{name: head, also_used_by: [embd],", "units[3].also_used_by[0]"),
    ("{name: embed,", "{name: embed, also_used_by: [heed],", "units[0].also_used_by[0]"),
    ("{name: embed,", "{name: embed, kind: prt,", "units[0].kind"),
    # stages
    ("units:\n", staged("embed"), "pipeline.stages"),
    ("units:\n", staged("embed", "heed"), "pipeline.stages[1].first_units[0]"),
    ("units:\n", staged("head", "embed"), "pipeline.stages[0].first_units[0]"),
    ("units:\n", staged("embed", "embed"), "pipeline.stages[1].first_units[0]"),
    ("units:\n", staged("embed", "model.layers.3, head"), "pipeline.stages[1].first_units"),
    ("units:\n", staged("embed", "head", schedule="2F2B"), "pipeline.schedule"),
    (
        "units:\n",
        staged("embed", "head", schedule="interleaved 1F1B"),
        "pipeline.stages[0].first_units",
    ),
    ("units:\n", staged("embed", "head", nodes=3), "pipeline.num_nodes"),
    # YAML itself
    ("hardware: laptop", "hardware: [laptop", None),
    ("hardware: laptop", "hardware:\tlaptop\n\tx: 1", None),
    ("hardware: laptop", "hardware: lap\x07top", None),
    ("hardware: laptop", "hardware: &a laptop\nx: *a", None),
    ("hardware: laptop", "hardware: !!python/object:os.system laptop", None),
    (PLAN_TEXT, "a: 1\n---\nb: 2\n", None),
    (PLAN_TEXT, "", None),
    (PLAN_TEXT, "# only a comment\n", None),
    (PLAN_TEXT, "- 1\n", None),
    (PLAN_TEXT, "plan\n", None),
    (PLAN_TEXT, "[" * 5000, None),
]

HARDWARE_ERRORS = [
    ("duplex: 0.5", "duplex: 1.5", "tiers[0].link.duplex"),
    ("read_contention: {compute: 0.95", "read_contention: {compute: 0", "read_contention.compute"),
    ("  - name: disk", "  - name: tape", "tiers[0].name"),
    (
        "  - name: disk",
        "  - {name: disk, capacity_bytes: 1, link: {read_bytes_per_s: 1, write_bytes_per_s: 1, "
        "latency_s: 0, duplex: 1}}\n  - name: disk",
        "tiers[1]",
    ),
    ("latency_s: 0.0001", "latency_s: -0.5", "tiers[0].link.latency_s"),
    ("compute_efficiency: 0.5", "compute_efficiency: 1.5", "rates.compute_efficiency"),
    ("memory_bytes_per_s: 3.0e+11", "memory_bytes_per_s: 0", "rates.memory_bytes_per_s"),
    ("operator_s: 1.0e-6, ", "", "rates"),
    ("  - a data sheet", "  - 42", "sources[0]"),
]

_FORMS = TEXT["profile"][TEXT["profile"].index("      - {form: keep") :].splitlines()[0]
PROFILE_ERRORS = [
    ("used_by: [0, 33]", "used_by: [0, 34]", "units[0].used_by[1]"),
    ("used_by: [0, 33]", "used_by: [1, 33]", "units[0].used_by"),
    ("used_by: [0, 33]", "used_by: [0, 33, 2]", "units[0].used_by"),
    (f"forms:\n{_FORMS}\n  - names", "forms: []\n  - names", "units[0].forms"),
    (f"forms:\n{_FORMS}\n  - names", f"forms:\n{_FORMS}\n{_FORMS}\n  - names", "units[0].forms[1]"),
    ("method: measured", "method: guessed", "method"),
]


@pytest.mark.parametrize(
    ("kind", "old", "new", "key"),
    [
        *(("plan", *row) for row in PLAN_ERRORS),
        *(("hardware", *row) for row in HARDWARE_ERRORS),
        *(("profile", *row) for row in PROFILE_ERRORS),
    ],
)
def test_what_is_wrong_is_one_error(
    kind: str, old: str, new: str, key: str | None, assert_says: Speaker
) -> None:
    assert old in TEXT[kind]
    with pytest.raises(RecordError) as caught:
        LOADERS[kind](TEXT[kind].replace(old, new, 1), "a.yaml")
    assert (caught.value.source, caught.value.exit_code, caught.value.key) == ("a.yaml", 2, key)
    assert_says(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("swap_drain: 2", "swap_drain: 2, update_drain: end"),
        ("{device: 4GiB, host: 0, disk: 100000000000}", "{disk: 100GB, host: 0B, device: 4096MiB}"),
        ("lower_bound_seconds: 1.2\n", "lower_bound_seconds: 1_2.0e-1\n"),
        ("  - {name: head, activations: keep,", "  - name: 'head'\n    activations: keep\n    "),
        ("hardware: laptop\n", "hardware: laptop  # mine\r\n"),
    ],
)
def test_there_are_other_ways_to_write_the_same(old: str, new: str) -> None:
    text = PLAN_TEXT.replace(old, new, 1)
    if "name: 'head'" in new:
        text = text.replace("     states: persistent}", "    states: persistent")
    assert records.loads_plan(text) == PLAN


UNSEEN = (
    *("\x01", "\t", "\n", "\x1b", "\x7f", "\x9b", "\r", "\x85", "\xad", "\u200b"),
    *("\u200e", "\u2028", "\u2029", "\u202e", "\u2066", "\ufeff", "\ufffe", "\ufdd0"),
    *("\U0001ffff", "\U000e0041"),
)


@pytest.mark.parametrize("character", UNSEEN, ids=ascii)
def test_characters_that_are_not_seen_are_refused(character: str) -> None:
    """In values and in keys, where YAML would let them in: written as escapes."""
    escaped = f"\\U{ord(character):08X}"
    with pytest.raises(RecordError) as caught:
        records.loads_plan(PLAN_TEXT.replace("hardware: laptop", f'hardware: "lap{escaped}top"'))
    assert caught.value.key == "hardware"
    problem = f"the character U+{ord(character):04X} is not allowed, in "
    assert caught.value.message.startswith(problem)
    assert str(caught.value).isprintable()
    with pytest.raises(RecordError) as caught:
        records.loads_plan(PLAN_TEXT.replace("seed: 0", f'"se{escaped}ed": 0'))
    assert caught.value.message.startswith(problem)
    assert str(caught.value).isprintable()


EDGES = (math.inf, -math.inf, math.nan, 5e-324, 1e300, -1.0, 1e22)


@pytest.mark.nightly("profile")
@pytest.mark.parametrize("kind", TEXT)
def test_every_number_has_limits(kind: str) -> None:
    """Each number of each record in turn, with the key in the message."""
    found = list(re.finditer(r"(?<=[a-z]: )[0-9]+\.[0-9.e+-]*(?=[,}\n])", TEXT[kind]))
    assert found
    for match in found:
        for edge in EDGES:
            bad = TEXT[kind][: match.start()] + number_text(edge) + TEXT[kind][match.end() :]
            with pytest.raises(RecordError) as caught:
                LOADERS[kind](bad, kind)
            assert caught.value.key
            assert "expected a" in caught.value.message


@pytest.mark.nightly(by_day=2)
@pytest.mark.parametrize("kind", sorted(TEXT))
@pytest.mark.parametrize("value", ["'1'", "'-1'", "'1e9'", "1.0", "1.0e+30", "true", "yes"])
def test_a_fix_that_says_what_to_write_works(kind: str, value: str) -> None:
    """In the place of any value of a file: with the fix, the same value is no error any more."""

    def error_at(place: re.Match[str], written: str) -> RecordError | None:
        text = place.string[: place.start()] + written + place.string[place.end() :]
        with suppress(RecordError):
            LOADERS[kind](text, "a.yaml")
            return None
        with pytest.raises(RecordError) as caught:
            LOADERS[kind](text, "a.yaml")
        return caught.value

    for place in re.finditer(r"(?<=: )[^\s{}\[\],#][^{}\[\],#\n]*", TEXT[kind]):
        error = error_at(place, value)
        fix = re.fullmatch(r"(?:write|put it in quotes:) (\S+)", (error and error.fix) or "")
        if error and fix and error.key != "version":  # an old file is made again
            again = error_at(place, fix[1])
            assert again is None or again.key != error.key, again


@pytest.mark.parametrize("text", ["", "r", "8", "r=8,", "r=8,,", "r=8, ,alpha=4"])
def test_words_of_adapters_say_values(text: str) -> None:
    with pytest.raises(ProtrainError, match="expected words such as r=16"):
        parse_lora(text)


@pytest.mark.parametrize("text", ["r=0", "r=-1", "r=8,alpha=0", "r=8,dropout=1", "r=8,dropout=-1"])
def test_no_fix_says_a_number_that_is_refused(text: str) -> None:
    with pytest.raises(ProtrainError) as caught:
        parse_lora(text)
    assert caught.value.fix is None
