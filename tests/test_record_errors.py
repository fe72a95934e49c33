"""What is wrong in a record is one error, and these are its words."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protrain_plan import records
from protrain_plan.errors import RecordError
from protrain_plan.records.hardware import Hardware, Rates
from protrain_plan.records.plan import (
    Plan,
)
from protrain_plan.records.profile import (
    Profile,
)
from protrain_plan.records.schema import Record
from tests.record_samples import HARDWARE, PLAN, PLAN_TEXT, PROFILE

RATED = replace(
    HARDWARE,
    rates=Rates(
        float32_flops_per_s=1e12,
        bfloat16_flops_per_s=2e12,
        compute_efficiency=0.75,
        memory_bytes_per_s=3e11,
        memory_efficiency=0.9,
        operator_s=5e-6,
        host_parameters_per_s=1e9,
    ),
    sources=("a data sheet",),
)
TEXT = {"hardware": records.dumps_hardware(RATED), "profile": records.dumps_profile(PROFILE)}
ACTIVATIONS_EXPECTED = (
    "expected keep, recompute, swap to host, swap to disk, swap-input to host or swap-input to disk"
)
SIZE_EXPECTED = "expected a size such as 1536MiB, 1.5GB or 4096 (bytes)"
ONE_SIZE = "expected a size such as 1536MiB or an integer"

# (what the good plan says, what the bad one says instead, the whole error)
PLAN_ERRORS = [
    # the header
    (
        "protrain: plan\n",
        "",
        "a.yaml:9: missing key 'protrain'\n  fix: start the file with protrain: plan",
    ),
    ("protrain: plan", "protrain: profile", "a.yaml:9: protrain: expected a plan, got 'profile'"),
    (
        "protrain: plan",
        "protrain: plam",
        "a.yaml:9: protrain: expected a plan, got 'plam'\n  fix: did you mean 'plan'?",
    ),
    ("version: 1\n", "", "a.yaml:9: missing key 'version'\n  fix: write version: 1"),
    (
        "version: 1",
        "version: 2",
        "a.yaml:10: version: version 2 is newer than this program, which reads version 1\n"
        "  fix: update protrain-plan",
    ),
    ("version: 1", "version: 0", "a.yaml:10: version: expected version 1, got 0"),
    (
        "version: 1",
        "version: '1'",
        "a.yaml:10: version: expected an integer, got the text '1'\n  fix: write 1",
    ),
    # keys
    (
        "hardware: laptop",
        "hardware: laptop\nhardware: desktop",
        "a.yaml:20: the key 'hardware' stands here twice\n  fix: remove one of them",
    ),
    (
        "seed: 0",
        "sead: 0",
        "a.yaml:18: workload: unknown key 'sead'\n  fix: did you mean 'seed'?",
    ),
    (
        "host: 0, disk: 100",
        "host: 0, zzz: 1, disk: 100",
        "a.yaml:24: budgets: unknown key 'zzz'\n  fix: the keys are device, host and disk",
    ),
    ("  seed: 0\n", "", "a.yaml:12: workload: missing key 'seed'"),
    (
        "hardware: laptop",
        "? [a]\n: b",
        "a.yaml:19: expected a text as the key, got a list",
    ),
    # numbers and what YAML makes of them
    (
        "step_seconds: 1.25",
        "step_seconds: 1e9",
        "a.yaml:26: prediction.step_seconds: expected a number, got the text '1e9'\n"
        "  fix: write 1.0e+9",
    ),
    (
        "step_seconds: 1.25",
        "step_seconds: fast",
        "a.yaml:26: prediction.step_seconds: expected a number, got the text 'fast'",
    ),
    (
        "step_seconds: 1.25",
        "step_seconds: .nan",
        "a.yaml:26: prediction.step_seconds: expected a finite number, got .nan",
    ),
    (
        "step_seconds: 1.25",
        "step_seconds: -.inf",
        "a.yaml:26: prediction.step_seconds: expected a finite number, got -.inf",
    ),
    (
        "step_seconds: 1.25",
        "step_seconds: 1.0e+999",
        "a.yaml:26: prediction.step_seconds: expected a finite number, got 1.0e+999",
    ),
    (
        "step_seconds: 1.25",
        "step_seconds: 0",
        "a.yaml:26: prediction.step_seconds: expected a number above 0, got 0",
    ),
    (
        "step_seconds: 1.25",
        "step_seconds:",
        "a.yaml:26: prediction.step_seconds: expected a number, got nothing",
    ),
    (
        "batch_size: 1",
        "batch_size: no",
        "a.yaml:14: workload.batch_size: expected an integer, got the boolean no",
    ),
    (
        "batch_size: 1",
        "batch_size: true",
        "a.yaml:14: workload.batch_size: expected an integer, got the boolean true",
    ),
    (
        "batch_size: 1",
        "batch_size: 12:30",
        "a.yaml:14: workload.batch_size: expected an integer, got the text '12:30'",
    ),
    (
        "batch_size: 1",
        "batch_size: 010",
        "a.yaml:14: workload.batch_size: expected an integer, got 010",
    ),
    (
        "batch_size: 1",
        "batch_size: 4.0",
        "a.yaml:14: workload.batch_size: expected an integer, got 4.0\n  fix: write 4",
    ),
    (
        "batch_size: 1",
        "batch_size: 0",
        "a.yaml:14: workload.batch_size: expected an integer of at least 1, got 0",
    ),
    (
        "seed: 0",
        "seed: 9223372036854775808",
        "a.yaml:18: workload.seed: expected an integer below 2**63, got 9223372036854775808",
    ),
    (
        "seed: 0",
        "seed: [0]",
        "a.yaml:18: workload.seed: expected an integer, got a list",
    ),
    # sizes
    (
        "piece_bytes: 256MiB",
        "piece_bytes: -256",
        "a.yaml:29: piece_bytes: expected a size of at least 1, got -256",
    ),
    (
        "piece_bytes: 256MiB",
        "piece_bytes: -256MiB",
        "a.yaml:29: piece_bytes: expected a size that is not negative, got '-256MiB'",
    ),
    (
        "piece_bytes: 256MiB",
        "piece_bytes: 256M",
        "a.yaml:29: piece_bytes: expected a size with its unit, got '256M'\n"
        "  fix: write 256MiB (powers of 1024) or 256MB (powers of 1000)",
    ),
    (
        "piece_bytes: 256MiB",
        "piece_bytes: 1e9",
        f"a.yaml:29: piece_bytes: {SIZE_EXPECTED}, got '1e9'\n  fix: write 1000000000",
    ),
    (
        "piece_bytes: 256MiB",
        "piece_bytes: 1.5",
        f"a.yaml:29: piece_bytes: {ONE_SIZE}, got 1.5",
    ),
    (
        "disk: 100000000000",
        "disk: off",
        f"a.yaml:24: budgets.disk: {ONE_SIZE}, got the boolean off",
    ),
    # texts, booleans, mappings, lists
    (
        "hardware: laptop",
        "hardware: no",
        "a.yaml:19: hardware: expected a text, got the boolean no\n  fix: put it in quotes: 'no'",
    ),
    (
        "hardware: laptop",
        "hardware: 4090",
        "a.yaml:19: hardware: expected a text, got 4090\n  fix: put it in quotes: '4090'",
    ),
    ("hardware: laptop", "hardware:", "a.yaml:19: hardware: expected a text, got nothing"),
    ("exact: true", "exact: yes", "a.yaml:23: exact: expected true or false, got the boolean yes"),
    ("exact: true", "exact: 1", "a.yaml:23: exact: expected true or false, got 1"),
    (
        "budgets: {device: 4GiB, host: 0, disk: 100000000000}",
        "budgets: 4GiB",
        "a.yaml:24: budgets: expected a mapping, got the text '4GiB'",
    ),
    # words
    (
        "dtype: bfloat16",
        "dtype: bf16",
        "a.yaml:16: workload.dtype: expected float32, bfloat16 or float16, got 'bf16'\n"
        "  fix: did you mean 'bfloat16'?",
    ),
    (
        "dtype: bfloat16",
        "dtype: 16",
        "a.yaml:16: workload.dtype: expected float32, bfloat16 or float16, got 16",
    ),
    (
        "activations: recompute",
        "activations: swp",
        f"a.yaml:33: units[2].activations: {ACTIVATIONS_EXPECTED}, got 'swp'\n"
        "  fix: did you mean 'swap to host'?",
    ),
    (
        "activations: recompute",
        "activations: swap to tape",
        f"a.yaml:33: units[2].activations: {ACTIVATIONS_EXPECTED}, got 'swap to tape'\n"
        "  fix: did you mean 'swap to host'?",
    ),
    (
        "states: persistent",
        "states: zzz",
        "a.yaml:34: units[3].states: expected persistent, offload to host, offload to disk, "
        "shard, buffer from host, buffer from disk or buffer from shards, got 'zzz'",
    ),
    # units
    (
        "swap_drain: 2",
        "swap_drain: never",
        "a.yaml:32: units[1].swap_drain: expected a number or end, got 'never'",
    ),
    (
        "forward_lead: 1",
        "forward_lead: -1",
        "a.yaml:32: units[1].forward_lead: expected a number of at least 0, got -1",
    ),
    (
        "names: model.layers.12-31",
        "names: model.layers.11-31",
        "a.yaml:33: units[2]: the unit 'model.layers.11' stands here twice",
    ),
    (
        "name: head",
        "names: head.3-3",
        "a.yaml:34: units[3].names: expected a run of units such as layers.0-11, got 'head.3-3'\n"
        "  fix: write a single unit as name: ...",
    ),
    (
        "names: model.layers.12-31",
        "names: model.layers.12-999999999",
        "a.yaml:33: units[2].names: expected a run of units such as layers.0-11, "
        "got 'model.layers.12-999999999'\n  fix: write a single unit as name: ...",
    ),
    ("{name: head, ", "{", "a.yaml:34: units[3]: missing key 'name'"),
    (
        "name: head",
        "name: head, names: head.0-1",
        "a.yaml:34: units[3]: expected 'name' or 'names', got both",
    ),
    (
        PLAN_TEXT[PLAN_TEXT.index("units:\n") :],
        "units: []\n",
        "a.yaml:30: units: expected at least one unit, got none",
    ),
    (
        "{name: head,",
        "{name: head, also_used_by: [embd],",
        "a.yaml:34: units[3].also_used_by[0]: expected the name of a later unit, got 'embd'",
    ),
    (
        "{name: embed,",
        "{name: embed, also_used_by: [heed],",
        "a.yaml:31: units[0].also_used_by[0]: expected the name of a later unit, got 'heed'\n"
        "  fix: did you mean 'head'?",
    ),
    (
        "{name: embed,",
        "{name: embed, kind: prt,",
        "a.yaml:31: units[0].kind: expected block or part, got 'prt'\n  fix: did you mean 'part'?",
    ),
    # YAML itself
    (
        "hardware: laptop",
        "hardware: [laptop",
        "a.yaml:20: not readable as YAML: expected ',' or ']', but got ':'",
    ),
    (
        "hardware: laptop",
        "hardware:\tlaptop\n\tx: 1",
        "a.yaml:19: not readable as YAML: found character '\\t' that cannot start any token",
    ),
    (
        "hardware: laptop",
        "hardware: lap\x07top",
        "a.yaml:19: not readable as YAML: the character #x0007 is not allowed",
    ),
    (
        "hardware: laptop",
        "hardware: &a laptop\nx: *a",
        "a.yaml:20: not readable as YAML: aliases are not allowed",
    ),
    (
        "hardware: laptop",
        "hardware: !!python/object:os.system laptop",
        "a.yaml:19: not readable as YAML: tags are not allowed",
    ),
    (
        PLAN_TEXT,
        "a: 1\n---\nb: 2\n",
        "a.yaml:2: not readable as YAML: but found another document",
    ),
    (PLAN_TEXT, "", "a.yaml: the file is empty"),
    (PLAN_TEXT, "# only a comment\n", "a.yaml: the file is empty"),
    (PLAN_TEXT, "- 1\n", "a.yaml:1: expected a mapping, got a list"),
    (PLAN_TEXT, "plan\n", "a.yaml:1: expected a mapping, got the text 'plan'"),
    (PLAN_TEXT, "[" * 5000, "a.yaml: not readable as YAML: nested too deeply"),
]

HARDWARE_ERRORS = [
    (
        "duplex: 0.5",
        "duplex: 1.5",
        "a.yaml:17: tiers[0].link.duplex: expected a number from 0.5 to 1, got 1.5",
    ),
    (
        "read_contention: {compute: 0.95",
        "read_contention: {compute: 0",
        "a.yaml:18: read_contention.compute: expected a number above 0 and up to 1, got 0",
    ),
    (
        "  - name: disk",
        "  - name: tape",
        "a.yaml:15: tiers[0].name: expected host or disk, got 'tape'",
    ),
    (
        "  - name: disk",
        "  - {name: disk, capacity_bytes: 1, link: {read_bytes_per_s: 1, write_bytes_per_s: 1, "
        "latency_s: 0, duplex: 1}}\n  - name: disk",
        "a.yaml:16: tiers[1]: the tier 'disk' stands here twice",
    ),
    (
        "latency_s: 0.0001",
        "latency_s: -0.5",
        "a.yaml:17: tiers[0].link.latency_s: expected a number of at least 0, got -0.5",
    ),
    (
        "compute_efficiency: 0.75",
        "compute_efficiency: 1.5",
        "a.yaml:21: rates.compute_efficiency: expected a number above 0 and up to 1, got 1.5",
    ),
    (
        "memory_bytes_per_s: 3.0e+11",
        "memory_bytes_per_s: 0",
        "a.yaml:21: rates.memory_bytes_per_s: expected a number above 0, got 0",
    ),
    (
        "operator_s: 5.0e-6, ",
        "",
        "a.yaml:21: rates: missing key 'operator_s'",
    ),
    (
        "  - a data sheet",
        "  - 42",
        "a.yaml:23: sources[0]: expected a text, got 42\n  fix: put it in quotes: '42'",
    ),
]

_FORMS = TEXT["profile"][TEXT["profile"].index("      - {form: keep") :].splitlines()[0]
PROFILE_ERRORS = [
    (
        "used_by: [0, 33]",
        "used_by: [0, 34]",
        "a.yaml:44: units[0].used_by[1]: expected the index of a unit, 0 to 33, got 34",
    ),
    (
        "used_by: [0, 33]",
        "used_by: [1, 33]",
        "a.yaml:44: units[0].used_by: expected the unit's own index 0 first, got 1",
    ),
    (
        "used_by: [0, 33]",
        "used_by: [0, 33, 2]",
        "a.yaml:44: units[0].used_by: expected ascending indices, got [0, 33, 2]",
    ),
    (
        f"forms:\n{_FORMS}\n  - names",
        "forms: []\n  - names",
        "a.yaml:45: units[0].forms: expected at least one form, got none",
    ),
    (
        f"forms:\n{_FORMS}\n  - names",
        f"forms:\n{_FORMS}\n{_FORMS}\n  - names",
        "a.yaml:47: units[0].forms[1]: the form 'keep' stands here twice",
    ),
    (
        "method: measured",
        "method: guessed",
        "a.yaml:29: method: expected measured or estimated, got 'guessed'",
    ),
]


def check_error(kind: type[Record], good: str, old: str, new: str, message: str) -> None:
    assert good.count(old) >= 1
    bad = good.replace(old, new, 1)
    load = {
        Hardware: records.loads_hardware,
        Profile: records.loads_profile,
        Plan: records.loads_plan,
    }[kind]
    with pytest.raises(RecordError) as caught:
        load(bad, "a.yaml")
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("old", "new", "message"), PLAN_ERRORS)
def test_what_is_wrong_in_a_plan_is_one_error(old: str, new: str, message: str) -> None:
    check_error(Plan, PLAN_TEXT, old, new, message)


@pytest.mark.parametrize(("old", "new", "message"), HARDWARE_ERRORS)
def test_what_is_wrong_in_hardware_is_one_error(old: str, new: str, message: str) -> None:
    check_error(Hardware, TEXT["hardware"], old, new, message)


@pytest.mark.parametrize(("old", "new", "message"), PROFILE_ERRORS)
def test_what_is_wrong_in_a_profile_is_one_error(old: str, new: str, message: str) -> None:
    check_error(Profile, TEXT["profile"], old, new, message)


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


@settings(deadline=None, max_examples=200)
@given(st.integers(0, len(PLAN_TEXT)), st.integers(0, 20), st.text(max_size=5))
def test_a_damaged_plan_is_read_or_is_one_error(start: int, length: int, insert: str) -> None:
    damaged = PLAN_TEXT[:start] + insert + PLAN_TEXT[start + length :]
    try:
        plan = records.loads_plan(damaged, "a.yaml")
    except RecordError as error:
        assert error.source == "a.yaml"  # noqa: PT017  (being readable is fine too)
    else:
        assert records.loads_plan(records.dumps_plan(plan)) == plan
