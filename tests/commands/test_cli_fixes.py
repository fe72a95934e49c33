"""Fixes of the commands' refusals, followed: the call that the message names succeeds."""

from pathlib import Path

import pytest

from tests.support.commands import protrain
from tests.support.messages import Speaker

ESTIMATE = ("profile", "tiny-llama", "--on", "rtx-4090", "-o", "p.yaml")
PLAN = ("plan", "p.yaml", "-o", "plan.yaml")
FIXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plan, a share without --clip": (
        (*PLAN, "--clip-share", "0.3"),
        (*PLAN, "--clip-share", "0.3", "--clip"),
    ),
    "plan, a model without a machine": (
        ("plan", "tiny-llama", "--seq-len", "64"),
        ("plan", "tiny-llama", "--seq-len", "64", "--on", "rtx-4090"),
    ),
    "plan, sizes that the profile says": (
        (*PLAN, "--seq-len", "64"),
        ("plan", "tiny-llama", "--on", "rtx-4090", "--seq-len", "64"),
    ),
    "plan, leave that the profile has not": (
        (*PLAN, "--allow", "int8-activations"),
        (*ESTIMATE, "--allow", "int8-activations"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixes")
    assert protrain(*ESTIMATE, folder=folder).returncode == 0
    return folder


@pytest.mark.parametrize("name", FIXES)
def test_a_command_succeeds_when_the_message_is_followed(
    name: str, folder: Path, assert_says: Speaker
) -> None:
    refused, followed = FIXES[name]
    found = protrain(*refused, folder=folder)
    assert found.returncode == 2
    assert_says(found.stderr)
    assert "fix:" in found.stderr
    assert protrain(*followed, folder=folder).returncode == 0
