"""The package: a source distribution from which everything can be built and tested."""

import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.commands import ROOT, ran
from tests.support.markdown import PAGES

FOLDERS = (
    *("protrain_plan", "runtime", "tests", "benchmarks", "plans", "examples", "docs", "schemas"),
)
FILES = (
    *("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"),
    *("constraints.txt", "mkdocs.yml", "action.yml", ".pre-commit-hooks.yaml"),
)


@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling builds the package")
def test_the_source_distribution_holds_the_documentation_and_the_tests(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path)
    built = ran(*command)
    assert built.returncode == 0, built.stderr
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        found = {name.partition("/")[2] for name in packed.getnames()}
    assert {name for name in FILES if name not in found} == set()
    sources = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
    needed = {path.relative_to(ROOT).as_posix() for path in (*sources, *PAGES)}
    assert needed - found == set()
