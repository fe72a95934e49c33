"""Estimates for several machines from one run of a model's code."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.profiling.estimated import tallies
from protrain_plan.profiling.tally import Tally, dumps_tally, loads_tally
from protrain_runtime.contract.errors import ProtrainError, RecordError
from protrain_runtime.contract.records.profile import Profile
from tests.support.estimates import asked, estimate
from tests.support.planning_cases import decoder, tally_of

OPTIONS: dict[str, Any] = {"batch_size": 2, "seq_len": 64, "dtype": "bfloat16"}


@cache
def tally() -> Tally:
    source = load_source("tiny-llama")
    workload, _ = asked(source, precision="master", **OPTIONS)
    (made,) = tallies(source, workload, machines=[load_hardware("rtx-4090")])
    return made


@pytest.mark.nightly
def test_a_tally_is_the_estimate_of_every_card() -> None:
    """MI300X's libraries keep other bytes, and the catalogue's machines have other rates."""
    found: list[Profile] = []
    for name in ("rtx-4090", "mi300x"):
        machine = load_hardware(name)
        alone = estimate(load_source("tiny-llama"), hardware=machine, precision="master", **OPTIONS)
        found.append(alone)
        assert loads_tally(dumps_tally(tally())).on(machine) == alone
    one, other = found
    assert one.fixed_bytes != other.fixed_bytes
    assert one.optimizer != other.optimizer
    assert one.units != other.units


BY_HAND = tally_of(decoder(load_hardware("rtx-4090"), blocks=2))


def test_a_machine_without_rates_has_no_seconds() -> None:
    machine = replace(load_hardware("rtx-4090"), rates=None)
    with pytest.raises(ProtrainError, match="compute rates are unknown"):
        BY_HAND.on(machine)


def test_what_reads_back_is_the_tally() -> None:
    assert loads_tally(dumps_tally(BY_HAND)) == BY_HAND


CHANGES = {
    "another profile": ("profile", "protrain: profile"),
    "no list": ("work", 7),
    "work that is no number": ("work", [["much", 1, True, None, 0.0]]),
    "no operator of that place": ("steps", [["keep", [[10**6]]]]),
    "a form without its steps": ("steps", []),
    "a unit that nobody ran": ("ran", [10**6]),
    "another optimizer": ("update", {"device_bytes": 1.0, "host_bytes": 1.0, "host_share": 1.0}),
    "no bytes at all": ("update", {"device_bytes": 0.0, "host_bytes": 0.0, "host_share": 1.0}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_tally_is_not_read(change: str) -> None:
    data = json.loads(dumps_tally(BY_HAND))
    name, value = CHANGES[change]
    assert data[name] != value
    with pytest.raises(RecordError):
        loads_tally(json.dumps({**data, name: value}))
