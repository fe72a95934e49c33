"""Estimates that were made before: what is believed of them, and what is not."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protrain_plan import cache as kept_files
from protrain_plan.cache import SWITCH
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.presets import JsonObject, read_config
from protrain_plan.profiling import estimate_cache
from protrain_plan.profiling.estimate_cache import EstimateCache, EstimateRequest
from protrain_plan.profiling.tally import Tally, dumps_tally
from protrain_runtime.contract.records.hardware import Hardware
from tests.support.planning_cases import decoder, tally_of

CONFIG = read_config("tiny-llama")
PRINT = "sha256:0123456789abcdef01234567"


def known(hardware: Hardware | None = None) -> tuple[EstimateRequest, Tally]:
    """A question and what answers it, on a machine."""
    profile = decoder(blocks=2, hardware=hardware or load_hardware("rtx-4090"))
    config = json.dumps(CONFIG, sort_keys=True, separators=(",", ":"))
    workload = replace(profile.workload, model="tiny-llama", model_config=config)
    profile = replace(profile, workload=workload, method="estimated")
    question = EstimateRequest.of(workload, profile.optimizer.name, CONFIG)
    assert question is not None
    return question, tally_of(profile)


def kept() -> tuple[EstimateRequest, Tally, EstimateCache]:
    question, tally = known()
    cache = EstimateCache()
    cache.keep_tally(question, tally)
    return question, tally, cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder, beside the working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/protrain-plan/estimates"


def asking(question: EstimateRequest, **changed: Any) -> EstimateRequest:
    """A question about another workload."""
    return replace(question, workload=replace(question.workload, **changed))


def test_what_was_kept_is_found_in_another_process(folder: Path) -> None:
    question, tally = known()
    EstimateCache().keep_tally(question, tally)
    EstimateCache().keep_fingerprint(question, PRINT)
    assert len(list(folder.iterdir())) == 2
    assert EstimateCache().tally(question) == tally
    assert EstimateCache().fingerprint(question) == PRINT


def test_another_question_has_no_answer(folder: Path) -> None:
    question, _, cache = kept()
    changes: list[dict[str, Any]] = [
        *({"batch_size": 7}, {"seq_len": 7}, {"dtype": "float16"}, {"precision": "master"}),
        *({"adapter": "lora r=16"}, {"adapter": "lora r=16", "quantize": "nf4"}, {"seed": 7}),
        *({"model": "mine.json"}, {"model_config": "{}"}),
    ]
    others = [asking(question, **change) for change in changes]
    for other in (*others, replace(question, optimizer="sgd")):
        assert cache.tally(other) is None


@pytest.mark.parametrize("what", ["ours", "libraries", "settings"])
def test_another_installation_has_no_answer(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, tally = known()
    EstimateCache().keep_tally(question, tally)
    kept_files._installation.cache_clear()
    try:
        if what == "ours":
            monkeypatch.setattr(kept_files, "_digest_of_files", lambda _: "another one")
        elif what == "libraries":
            monkeypatch.setattr(EstimateCache, "optional", ("yaml",))
        else:
            monkeypatch.setenv("TORCH_SOMETHING", "1")
        assert EstimateCache().tally(question) is None
    finally:
        kept_files._installation.cache_clear()


def test_damage_is_made_anew(folder: Path) -> None:
    question, tally, cache = kept()
    [path] = folder.iterdir()
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole.replace(b"kept", b"kepd"), b"\xff", bytes(5 * 2**20)):
        path.write_bytes(content)
        assert cache.tally(question) is None
    path.unlink()
    path.mkdir()
    assert cache.tally(question) is None
    cache.keep_tally(question, tally)  # cannot be written, which is no reason to fail
    path.rmdir()
    cache.keep_tally(question, tally)
    assert path.read_bytes() == whole


def test_an_answer_under_another_name_is_none(folder: Path) -> None:
    """Neither one that was renamed, nor one whose checksum was made for it."""
    question, tally, cache = kept()
    [path] = folder.iterdir()
    other = asking(question, batch_size=7)
    name = estimate_cache._named(other, "tally")
    entry = cache._entry(name)
    assert entry is not None
    path.rename(entry[0])
    assert cache.tally(other) is None
    cache._write(name, dumps_tally(tally))
    assert cache.tally(other) is None


def test_models_with_code_of_their_own_and_cpus_are_not_kept(folder: Path) -> None:
    question, tally = known()
    workload, optimizer = tally.profile.workload, tally.profile.optimizer.name
    configs: list[JsonObject | None] = [
        None,
        {"auto_map": {"AutoModel": "own.Model"}},
        {"text_config": {"auto_map": {}}},
        {"layers": [{"attn_implementation": "someone/kernels"}]},
    ]
    for config in configs:
        assert EstimateRequest.of(workload, optimizer, config) is None
    question, on_cpu = known(load_hardware("cpu"))
    EstimateCache().keep_tally(question, on_cpu)
    assert not list(folder.iterdir())


def test_what_is_switched_off_neither_reads_nor_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, tally = known()
    off = [EstimateCache(off=True)]
    monkeypatch.setenv(SWITCH, "1")
    off.append(EstimateCache())
    for cache in off:
        cache.keep_tally(question, tally)
        assert not folder.exists()
    monkeypatch.delenv(SWITCH)
    EstimateCache().keep_tally(question, tally)
    for cache in off:
        assert cache.tally(question) is None


@pytest.mark.nightly("above", "relative")
@pytest.mark.parametrize("place", ["here", "above", "relative", "writable by others"])
def test_a_folder_that_a_repository_brings_is_not_used(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one in which others may write."""
    question, tally = known()
    here = Path.cwd()
    if place == "above":
        (here / ".git").mkdir()
        (here / "src").mkdir()
        monkeypatch.chdir(here / "src")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache" if place == "relative" else str(here / "cache"))
    monkeypatch.setenv("HOME", str(here))
    if place == "writable by others":
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parents[1]))
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    EstimateCache().keep_tally(question, tally)
    assert not list(here.rglob("*.txt"))
    assert not list(folder.parents[1].rglob("*.txt"))


def test_the_oldest_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question, _ = known()
    cache = EstimateCache()
    for number in range(3):
        cache.keep_fingerprint(asking(question, seed=number), PRINT)
    for number, path in enumerate(sorted(folder.iterdir())):
        os.utime(path, (number, number))
    assert cache.fingerprint(asking(question, seed=1)) == PRINT  # now the youngest
    size = next(folder.iterdir()).stat().st_size
    monkeypatch.setattr(kept_files, "_MOST_BYTES", 2 * size)
    cache.keep_fingerprint(asking(question, seed=3), PRINT)
    assert len(list(folder.iterdir())) == 2
    for number, found in ((1, PRINT), (3, PRINT)):
        assert cache.fingerprint(asking(question, seed=number)) == found
