"""A kept probe answers for the machine, the disk and the options that it was made for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protrain_plan.cache import SWITCH
from protrain_plan.hardware.kept_probes import ProbeCache
from protrain_plan.hardware.probe import BRIEF, Watch
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER
from protrain_plan.presentation.profiles import caveats
from protrain_plan.profiling.measured import _optimizer
from protrain_runtime.contract.records.hardware import KEPT_PROBE
from protrain_runtime.contract.records.profile import DType
from tests.support.estimates import machine
from tests.support.planning_cases import decoder

CPU = torch.device("cpu")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of the test's own, which is switched on."""
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def cache(
    folder: Path, dtype: DType = "float32", watch: Watch = BRIEF, *, off: bool = False
) -> ProbeCache:
    return ProbeCache(CPU, folder, dtype, watch, off=off)


def test_a_probe_is_kept_for_what_it_was_made_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = machine()
    assert cache(folder).machine() is None
    cache(folder).keep(probed)
    found = cache(folder).machine()
    assert found is not None
    assert replace(found, tiers=probed.tiers, sources=probed.sources) == probed
    assert found.sources == (*probed.sources, KEPT_PROBE)
    assert cache(folder, off=True).machine() is None
    assert cache(folder, "bfloat16").machine() is None
    assert cache(folder, watch=Watch(seconds=60.0)).machine() is None
    assert cache(folder / "missing").machine() is None
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert cache(folder).machine() is None
    finally:
        torch.set_num_threads(before)
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert cache(folder).machine() is None


def test_a_profile_says_that_its_probe_was_kept(folder: Path) -> None:
    cache(folder).keep(machine())
    kept = cache(folder).machine()
    assert kept is not None
    profile = decoder(machine(), blocks=2)
    assert f"the machine's probe is {KEPT_PROBE}" in list(caveats(replace(profile, hardware=kept)))
    assert not any(KEPT_PROBE in said for said in caveats(profile))


@pytest.mark.nightly
def test_seconds_of_a_piece_are_the_probe_s_where_it_measured_that_optimizer(folder: Path) -> None:
    """The probe's optimizer is not timed a second time, and no other takes its seconds."""
    workload, model = decoder(machine(), blocks=2).workload, torch.nn.Linear(8, 8)

    def found(name: str, known_s: float) -> float:
        cost = _optimizer(workload, name, model, folder, known_s, sparse=False)
        return cost.host_piece_s

    assert found(DEFAULT_OPTIMIZER, 0.125) == 0.125
    assert 0 < found(DEFAULT_OPTIMIZER, 0.0) != 0.125
    assert 0 < found("sgd", 0.125) != 0.125
