"""Real processes that train together on this machine, over gloo: shared by the tests of ranks."""

import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from protrain_runtime.devices import device as devices
from tests.support.forked import CONTEXT, Result, protrain

JOIN_S = 240.0
"""Far more than any of these tests takes; what hangs is ended and reported."""


@dataclass(frozen=True)
class Cards:
    """The devices that ranks train on, in turn (none: a CPU), and whose delays they have.

    `current` says which device is the current one of each, meanwhile: another one than its own.
    """

    names: tuple[str, ...] = ()
    current: tuple[int, ...] = ()
    test: str = ""


Test = TypeVar("Test", bound=Callable[..., Any])

_CARDS = [Cards()]


@contextmanager
def ranks_on_emulated(test: str) -> Iterator[None]:
    """Ranks that are started inside have emulated devices, with the delays of the test."""
    _CARDS.append(Cards(("emulated:1", "emulated:0"), current=(0, 1), test=test))
    try:
        yield
    finally:
        _CARDS.pop()


def ranks_on_every_device(test: Test) -> Test:
    """A test that is asked of ranks on CPUs, and again of ranks on emulated devices."""
    return _everywhere(test)


def ranks_on_every_device_at_night(test: Test) -> Test:
    """The same; of emulated devices every night."""
    return _everywhere(test, pytest.mark.slow)


def _everywhere(test: Test, *marks: pytest.MarkDecorator) -> Test:
    cpu = pytest.param(lambda _: nullcontext(), id="cpu")
    emulated = pytest.param(ranks_on_emulated, marks=(pytest.mark.emulated, *marks), id="emulated")
    test = pytest.mark.parametrize("ranks_cards", [cpu, emulated], indirect=True)(test)
    asked: Test = pytest.mark.usefixtures("ranks_cards")(test)
    return asked


Work = Callable[..., Any]
"""Called on every rank with its number, how many there are, and the arguments given."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: with a result, or with an error's type and message."""

    result: Any = None
    error: str = ""
    exit_code: int = 0


def run_ranks(work: Work, count: int, folder: Path, *arguments: Any) -> list[Any]:
    """Results of `work` on each of `count` ranks; fails where one of them does."""
    ended = end_ranks(work, count, folder, *arguments)
    wrong = [
        f"rank {rank} ({end.exit_code}): {end.error}"
        for rank, end in enumerate(ended)
        if end.error or end.exit_code
    ]
    assert not wrong, "\n".join(wrong)
    return [end.result for end in ended]


def end_ranks(work: Work, count: int, folder: Path, *arguments: Any) -> list[Ended]:
    """How each of `count` ranks ends. Their store is in this process: it outlives them all."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [
        CONTEXT.Process(
            target=_run,
            args=(work, rank, count, store.port, folder, _CARDS[-1], arguments),
            daemon=True,
        )
        for rank in range(count)
    ]
    for process in ranks:
        process.start()
    ended: list[Ended] = []
    for rank, process in enumerate(ranks):
        process.join(JOIN_S)
        if process.is_alive():
            process.kill()
            process.join()
            ended.append(Ended(error="did not end", exit_code=-1))
            continue
        path = folder / f"rank-{rank}.pt"
        left = torch.load(path, weights_only=False) if path.exists() else Ended()
        path.unlink(missing_ok=True)
        ended.append(Ended(left.result, left.error, process.exitcode or 0))
    return ended


def _run(
    work: Work,
    rank: int,
    count: int,
    port: int,
    folder: Path,
    cards: Cards,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # As torchrun says it; the address is for frameworks that ask, and nobody listens there.
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    with _card(cards, rank) as library:
        dist.init_process_group(
            library, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=60)
        )
        try:
            end = Ended(work(rank, count, *arguments))
        except Exception as error:  # noqa: BLE001 - reported to the test
            expected = type(error).__name__ in ("RanksError", "LaneError", "ProtrainError")
            end = Ended(error=f"{error}" if expected else traceback.format_exc())
        torch.save(end, folder / f"rank-{rank}.pt")
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group()


@contextmanager
def _card(cards: Cards, rank: int) -> Iterator[str]:
    """Models and batches of this rank are on its device; yields what its collectives run in."""
    if not cards.names:
        yield "gloo"
        return
    from tests.support.cards import card_called

    with card_called(cards.names[rank % len(cards.names)], f"{cards.test} {rank}") as card:
        torch.accelerator.set_device_index(cards.current[rank % len(cards.current)])
        yield devices.collectives(card)


def started(folder: Path, *by_rank: Sequence[object]) -> list[Result]:
    """`protrain run` on every rank, with these arguments, as a launcher starts it."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    def run(rank: int) -> Result:
        told = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": len(by_rank),
            "LOCAL_WORLD_SIZE": len(by_rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        words = {name: str(value) for name, value in told.items()}
        return protrain("run", *by_rank[rank], folder=folder, **words)

    with ThreadPoolExecutor(len(by_rank)) as pool:
        return list(pool.map(run, range(len(by_rank))))
