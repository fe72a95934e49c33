"""Layers that run several times in a forward: never passed over, and said with advice that works.

The oracle of training is plain PyTorch.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from protrain_plan.planning.explain.explaining import explain, in_words
from protrain_plan.planning.outcome import Solved
from protrain_plan.presentation.profiles import caveats, repeats
from protrain_plan.profiling.structure.discovery import discover
from protrain_runtime.contract.records.plan import Budgets
from tests.support import repeating_models
from tests.support.commands import printed, protrain
from tests.support.hostile_models import WIDTH, Block, batch_of
from tests.support.judging import PLANS, judged, profiled
from tests.support.messages import Speaker
from tests.support.planning_cases import plan
from tests.support.repeating_models import REPEATING, before_core, repeating


@pytest.mark.nightly("depth")
@pytest.mark.parametrize("name", REPEATING)
def test_it_is_said_which_layers_run_several_times(
    name: str, tmp_path: Path, assert_says: Speaker
) -> None:
    profile = profiled(repeating(name, False), tmp_path)
    assert [unit.name for unit in profile.units if unit.kind == "block"] == []
    said = repeats(profile)
    assert len(said) == 1
    assert said[0] in [*caveats(profile)]
    assert_says(said[0])
    solved = plan(profile, Budgets(device=2**33, host=2**33, disk=0))
    assert isinstance(solved, Solved)
    told = " ".join(in_words(explain(profile, solved.plan)))
    assert "there is room" not in told
    assert said[0].partition(": ")[0] in told


@pytest.mark.nightly
@pytest.mark.parametrize("command", ["profile", "fit"])
def test_commands_say_it_in_text_and_in_json(command: str, tmp_path: Path) -> None:
    call = (command, f"{repeating_models.__file__}:depth", "--on", "rtx-4090")
    explained = ["--explain"] if command == "fit" else []
    words = "blocks.0-1 run 3 times in a forward, so they are planned as one unit"
    assert words in " ".join(protrain(*call, *explained, folder=tmp_path).stdout.split())
    data = printed(protrain(*call, "--json", folder=tmp_path))
    told = data["caveats"] if command == "profile" else data["repeats"]
    assert any(line.startswith(words) for line in told)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("core", "said"),
    [
        (Block, ["core runs 3 times in a forward, so it is planned as one unit"]),
        (small, []),  # no layer beside blocks of more work
    ],
)
def test_blocks_that_run_once_stay_blocks_beside_them(
    core: Callable[[], nn.Module], said: list[str]
) -> None:
    units = discover(before_core(core), batch_of(0))
    assert [u.name for u in units if u.kind == "block"] == [f"blocks.{n}" for n in range(4)]
    assert [u.repeats for u in units if u.repeats] == said


@pytest.mark.nightly
@pytest.mark.parametrize("advised", [False, True])
@pytest.mark.parametrize("name", REPEATING)
def test_trains_like_plain(name: str, advised: bool) -> None:
    found = judged(repeating, name, advised, plans=PLANS, seed=3)
    assert [(one.kind, one.text) for one in found] == [("like plain", "")] * len(PLANS)


@pytest.mark.nightly(but=("captions",))
@pytest.mark.parametrize("name", REPEATING)
def test_the_advice_gives_each_call_a_block_with_options(name: str, tmp_path: Path) -> None:
    profile = profiled(repeating(name, True), tmp_path)
    blocks = [unit for unit in profile.units if unit.kind == "block"]
    assert len(blocks) >= 3
    for block in blocks:
        assert {"keep", "full"} <= {form.form for form in block.forms}
        assert block.cost("keep").swappable_bytes > 0
    assert repeats(profile) == []
