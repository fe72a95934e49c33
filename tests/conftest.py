"""StepSettings that must hold before torch is imported, the same as on the command line."""

import gc
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

# A lane's waiting threads must not spin on the processors that compute; the profiler's allocator
# warnings are about blocks that we know of.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Nor is anything taken from the user's cache of estimates, or left there.
os.environ.setdefault("PROTRAIN_NO_CACHE", "1")

import pytest
import torch
from hypothesis import settings

# Before tests' folders are added to sys.path: the command line takes those of this repository out
# when it is imported, and processes that tests start would not find the tests' own modules.
import protrain_plan.cli  # noqa: F401
from tests.emulated import building
from tests.support import mutations
from tests.support.messages import Speaker

# The same examples in every run, and none that fails for being slow on a busy machine.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-golden", action="store_true", help="write the files in tests/golden anew"
    )
    parser.addoption("--shard", default="1/1", metavar="K/N", help="every N-th test, from the K-th")


@pytest.hookimpl(tryfirst=True)  # before some are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what runs at night as slow, but for what kills a fault; leave out other shards."""
    kills, places = {one.test for one in mutations.ALL}, Counter[str]()
    for item in items:
        test, _, case = item.nodeid.partition("[")
        marks = item.iter_markers("nightly") if item.nodeid not in kills else ()
        if any(_at_night(mark, case[:-1], places[test]) for mark in marks):
            item.add_marker(pytest.mark.slow)
        places[test] += 1
    number, count = map(int, config.getoption("--shard").split("/"))
    items[:] = items[number - 1 :: count]


def _at_night(mark: pytest.Mark, case: str, place: int) -> bool:
    """Whether the marker is for this case, the `place`-th of its test (see pyproject.toml)."""
    match mark.kwargs:
        case {"but": names}:
            return case not in names
        case {"by_day": step}:
            return bool(place % step)
        case {"every": step}:
            return bool(place % step == step - 1)
        case _:
            names = mark.args
            return not names or case in names or any(fnmatch(case, name) for name in names)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Autograd counts the devices at the first backward: the emulated ones have to be there."""
    chosen = any(item.get_closest_marker("emulated") for item in session.items)
    if chosen and not session.config.option.collectonly and building.compiler() is not None:
        from tests.emulated.device import extension

        extension()


def pytest_runtest_setup() -> None:
    """Let the garbage collector look at what a test makes, and at nothing from before.

    A measured step collects garbage: in a process that has run hundreds of tests that took half a
    second each time, and a small profile, which does so often, ten times as long as by itself.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def card(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Models and batches are there, in tests that are asked of `every_device`."""
    from tests.support.cards import card_called

    with card_called(request.param, request.node.nodeid) as found:
        yield found


@pytest.fixture
def ranks_cards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks that are started are on these devices, in tests of `ranks_on_every_device`."""
    with request.param(request.node.nodeid):
        yield


@pytest.fixture
def assert_golden(request: pytest.FixtureRequest) -> Callable[[str | Path, str], None]:
    """Compares a text with a file in tests/golden, but for blanks at the ends of lines."""

    def compare(path: str | Path, text: str) -> None:
        file = Path(__file__).parent / "golden" / path
        found = "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())
        if request.config.getoption("--write-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(found, encoding="utf-8")
        assert found == file.read_text(encoding="utf-8")

    return compare


@pytest.fixture
def assert_says(request: pytest.FixtureRequest) -> Iterator[Speaker]:
    """Compares what is said, an error or a text, with the catalogue of messages."""
    node = request.node
    # A test that is asked of several devices hears the same on all of them.
    name = node.name
    if {"card", "ranks_cards"} & set(request.fixturenames):
        name = re.sub(r"(?<=[\[-])(cpu|cuda|emulated)(-|(?=\]))", "", name).replace("[]", "")
    folder = request.getfixturevalue("tmp_path")
    speaker = Speaker(
        node.path.relative_to(Path(__file__).parent).as_posix(),
        name,
        {str(folder): "TMP"},
        writes=request.config.getoption("--write-golden"),
    )
    yield speaker
    speaker.end()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of a real model, as the command writes it, with its JSON beside it."""
    # Imported where it is asked for: they need PyTorch, which many tests do without.
    from tests.support import forked
    from tests.support.commands import printed
    from tests.support.runtime_cases import made_once

    def make(path: Path) -> None:
        result = forked.protrain(
            *("profile", "tiny-llama", "--batch-size", 2, "--seq-len", 64, "--steps", 1),
            *("-o", path.name, "--in-process", "--json"),
            folder=path.parent,
        )
        path.with_suffix(".json").write_text(json.dumps(printed(result)))

    return made_once(tmp_path_factory, "tiny-llama.yaml", make)
