"""FPR001 and what follows from it: today's model, built and estimated from its source."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protrain_plan.checking.budgets import MachineBudget
from protrain_plan.checking.diffing import UnitGrowth
from protrain_plan.checking.reestimate import Broken, Today
from protrain_plan.checking.rules import Failed, Finding, Passed, Report, Skipped, check
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_runtime.contract.records import read_plan, read_profile, write_plan, write_profile
from protrain_runtime.contract.records.plan import Budgets
from protrain_runtime.contract.records.profile import Profile
from tests.support.checking_cases import find_plans, look
from tests.support.estimates import estimate
from tests.support.planning_cases import plan as planned
from tests.support.planning_cases import solved

ROOT = Path(__file__).parents[2]
MIB = 2**20

MODULE = """
import json
from pathlib import Path

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, hidden):
        for _ in range(SETTINGS()["repeats"]):
            hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return hidden


class Model(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for width in widths)
        self.head = nn.Linear(64, 1)

    def forward(self, given):
        hidden = given
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).mean()


def SETTINGS():
    return json.loads(Path(__file__).with_name("settings.json").read_text())


def factory():
    return Model(SETTINGS()["widths"]), [torch.full((32, 64), 0.5)]
"""


class Repository:
    """A folder with a model of one's own, its profile and its plan."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan, self.profile_path = folder / "plans/plan.yaml", folder / "plans/profile.yaml"

    def settings(self, *, widths: tuple[int, ...] = (512,) * 4, repeats: int = 1) -> None:
        text = json.dumps({"widths": widths, "repeats": repeats})
        (self.folder / "settings.json").write_text(text)

    def profile(self) -> Profile:
        return estimate(
            load_source("own_model:factory"),
            batch_size=1,
            seq_len=1,
            dtype="float32",
            hardware=load_hardware("cpu"),
        )

    def commit(self, profile: Profile) -> int:
        """Write the profile and a plan for it; the predicted device peak in bytes."""
        answer = solved(planned(profile, Budgets(device=2**30, host=0, disk=2**30)))
        self.profile_path.parent.mkdir(exist_ok=True)
        write_profile(profile, self.profile_path)
        write_plan(answer.plan, self.plan)
        return answer.plan.prediction.peak_bytes.on_device

    def check(self, *, device: int | None = None) -> Report:
        budget = MachineBudget(machine="cpu", source="budgets.yaml", device=device)
        return check([self.plan], look=look, budgets={"cpu": budget})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Repository, Profile]]:
    """The repository, with its model as it was at first, and that one's profile."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "own_model.py").write_text(MODULE)
    repository = Repository(folder)
    repository.settings()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        yield repository, repository.profile()


@pytest.fixture
def repository(made: tuple[Repository, Profile]) -> Repository:
    repository, profile = made
    repository.settings()
    repository.commit(profile)
    return repository


@pytest.fixture
def peak(made: tuple[Repository, Profile], repository: Repository) -> int:
    return read_plan(repository.plan).prediction.peak_bytes.on_device


def finding(report: Report, code: str) -> Finding:
    [found] = [one for one in report.findings if one.rule.code == code]
    return found


def failed(report: Report, code: str) -> Failed:
    verdict = finding(report, code).verdict
    assert isinstance(verdict, Failed)
    return verdict


@pytest.mark.nightly
def test_a_model_as_it_was_passes(repository: Repository) -> None:
    report = repository.check()
    assert isinstance(finding(report, "FPR001").verdict, Passed)
    assert report.exit_code == 0


@pytest.mark.nightly
def test_one_wider_layer_is_named_with_its_bytes(repository: Repository, peak: int) -> None:
    repository.settings(widths=(512, 512, 1024, 512))
    report = repository.check(device=peak)
    growth = failed(report, "FPR001").growth
    # 512 more rows and columns of 64, and 512 more biases, with gradient and two states each.
    states = 4 * 4 * (512 * 64 + 512 + 64 * 512)
    assert growth == (
        UnitGrowth(
            units="layers.2", num_units=1, states_bytes=states, activation_bytes=32 * 512 * 4
        ),
    )
    assert failed(report, "FPR001").problem == (
        "the model changed: layers.2: 1.01 MiB more states, 64.00 KiB more activations"
    )
    over = failed(report, "MEM001")
    assert over.growth == growth
    assert over.excess_bytes is not None
    assert over.excess_bytes >= states
    assert over.problem.endswith("; since it was profiled: " + str(growth[0]))


@pytest.mark.nightly
def test_code_that_keeps_more_is_found_without_a_new_parameter(repository: Repository) -> None:
    repository.settings(repeats=2)
    verdict = failed(repository.check(), "FPR001")
    assert verdict.problem.startswith("the same model now takes different bytes: ")
    assert {unit.states_bytes for unit in verdict.growth} == {0}
    assert any(unit.activation_bytes > 0 for unit in verdict.growth)


def test_peaks_of_an_estimate_that_was_made_with_other_kernels_hold(
    repository: Repository, made: tuple[Repository, Profile]
) -> None:
    """Measured where they are at hand, bounded elsewhere: no change of the model."""
    units = []
    for unit in made[1].units:
        forms = (replace(f, backward_peak_bytes=f.backward_peak_bytes - 64) for f in unit.forms)
        units.append(replace(unit, forms=tuple(forms)))
    lower = replace(made[1], units=tuple(units))
    peak = repository.commit(lower)
    assert repository.check(device=peak).exit_code == 0


@pytest.mark.nightly
def test_new_layers_are_not_decided_about(repository: Repository) -> None:
    repository.settings(widths=(512,) * 5)
    report = repository.check()
    assert failed(report, "FPR001").problem.startswith("the model changed: layers.4: ")
    assert finding(report, "MEM001").verdict == Skipped(
        reason="the plan is for a different model: the plan decides nothing for layers.4; another"
        " plan fits 1.00 GiB"
    )
    report = repository.check(device=load_hardware("cpu").device.context_bytes + MIB // 2)
    assert failed(report, "MEM001").no_plan_fits
    assert report.exit_code == 3


@pytest.mark.nightly
def test_a_measured_model_that_changed_is_estimated(repository: Repository) -> None:
    profile = read_profile(repository.profile_path)
    machine = replace(profile.hardware, rates=None)
    peak = repository.commit(replace(profile, method="measured", hardware=machine))
    assert repository.check(device=peak).exit_code == 0
    repository.settings(widths=(512, 512, 1024, 512))
    report = repository.check(device=peak)
    assert {f.rule.code for f in report.with_verdict(Failed)} == {"FPR001", "MEM001"}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("gone:factory", "gone:factory: no module 'gone' here"),
        ("./gone.py:factory", "./gone.py:factory: no such file here"),
    ],
)
def test_a_model_that_cannot_be_imported_is_skipped(
    model: str, reason: str, repository: Repository
) -> None:
    profile = read_profile(repository.profile_path)
    repository.commit(replace(profile, workload=replace(profile.workload, model=model)))
    report = repository.check()
    assert finding(report, "FPR001").verdict == Skipped(reason=reason)
    assert report.exit_code == 0


@pytest.mark.nightly("./own_model.py")
@pytest.mark.parametrize(
    "path", ["./own_model.py", pytest.param("{folder}/own_model.py", marks=pytest.mark.slow)]
)
def test_a_model_of_a_script_is_found_by_its_path(path: str, repository: Repository) -> None:
    profile = read_profile(repository.profile_path)
    model = path.format(folder=repository.folder) + ":factory"
    repository.commit(replace(profile, workload=replace(profile.workload, model=model)))
    assert isinstance(finding(repository.check(), "FPR001").verdict, Passed)
    repository.settings(widths=(512, 512, 1024, 512))
    assert failed(repository.check(), "FPR001").fix == (
        "profile and plan it again, and commit both:"
        f" protrain profile {model} --on cpu -o {repository.profile_path}"
        f" && protrain plan {repository.profile_path} --device-memory 1GiB --disk 1GiB"
        f" -o {repository.plan}"
    )


def test_a_model_that_can_no_longer_be_built_fails(repository: Repository) -> None:
    (repository.folder / "settings.json").write_text('{"widths": ["wide"]}')
    report = repository.check()
    problem = failed(report, "FPR001").problem
    assert problem.startswith("the model cannot be built: TypeError: ")
    assert report.exit_code == 1


@pytest.mark.nightly
def test_a_configuration_that_is_gone_is_the_recorded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [plan] = find_plans([ROOT / "examples/ci/plans"])
    today = look(read_profile(plan.parent / "profile.yaml"))
    assert isinstance(today, Today)
    assert today.changed_keys == ()
    assert today.model_fingerprint == read_plan(plan).model_fingerprint


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "model/config.json: not readable as JSON: Expecting property name"),
        ('{"model_type": "lama"}', "model"),
    ],
)
def test_a_configuration_that_is_wrong_is_not_replaced_by_the_recorded_one(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    [plan] = find_plans([ROOT / "examples/ci/plans"])
    today = look(read_profile(plan.parent / "profile.yaml"))
    assert isinstance(today, Broken)
    assert today.reason.startswith(reason)
