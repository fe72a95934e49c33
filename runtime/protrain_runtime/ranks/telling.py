"""Whoever fails tells the others why, at the ranks' store, so that nobody waits for what ended.

[Note: what is told when] Ranks go from meeting to meeting; collectives lie in between. A failure is
told under the number of the next meeting. Whoever waits there, or in a collective, ends with it,
and goes on behind that meeting as the one that failed does: `prepare`, `load` and `save` fail on
all ranks, and may be called again. A failure in the middle of a step is final: collectives that one
rank is still to call would meet others of the ones that went on. What no rank has begun yet is not
told: a loop may catch such an error, mend what it complains of and go on in step with the others.
An exception that nobody catches is told before the process ends, wherever it came from.
"""

import json
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from types import TracebackType
from typing import Any
from weakref import WeakSet

from torch._C._distributed_c10d import Store

from protrain_runtime.contract.errors import ProtrainError

ANSWER_S = 3.0
"""How long a rank that is there may take to say so, or to see what it is told; it looks four times
a second."""

SILENT_S = 60.0
"""Who does not say for so long that it is there, while others wait in a meeting, is not."""

AFTER_BACKWARD_S = 1.0
"""A backward that raised is told after so long: if nobody catches its error, the error is told."""

START_AGAIN = "see what that rank said last; start all ranks again, from a checkpoint"

_LOOK_S = 0.25
_LONGEST_NAP_S = 0.05  # between two looks of a rank that waits in a meeting
_LONGEST_REASON = 500  # characters
_LOST, _GONE = "lost", "gone"


class RanksError(ProtrainError, RuntimeError):
    """Another rank failed, did not come, or disagrees. `told`: the others know of it."""

    told = False


@dataclass(frozen=True, slots=True)
class Told:
    """A rank's report of its failure; or, of ranks that are `missing`, what others found."""

    rank: int
    what: str  # the call that failed, or nothing
    why: str
    fix: str | None
    missing: bool = False

    def error(self, rank: int, count: int) -> RanksError:
        """Make the error that rank `rank` of `count` raises."""
        if self.missing:
            message = f"rank {rank} of {count} waited for the others, and {self.why}"
        else:
            message = (
                f"rank {self.rank} failed{f' in {self.what}' if self.what else ''}: {self.why}"
            )
        return known(RanksError(message, fix=self.fix))


def known(error: RanksError) -> RanksError:
    """The error, of which the others know: it is not told again."""
    error.told = True
    return error


def known_error(error: BaseException | None) -> RanksError | None:
    """Return the error that came from the others, also where it ended work on a lane."""
    while error is not None and not (isinstance(error, RanksError) and error.told):
        error = error.__cause__
    return error


def abandoned(rank: int, count: int) -> RanksError:
    """Make the error for a store that is gone."""
    message = (
        f"rank {rank} of {count} waited for the others, and their meeting place is gone: the rank"
        " that keeps it (rank 0, or the launcher) has ended"
    )
    return known(RanksError(message, fix=START_AGAIN))


class Meeting:
    """A place at the store where `count` ranks tell each other how they fare.

    A thread looks there four times a second, and calls `look`. One that `holds_others` is that of
    whole processes: what is lost there is lost wherever they meet until it is closed.
    """

    def __init__(
        self, store: Store, rank: int, count: int, *, limit_s: float, holds_others: bool = False
    ) -> None:
        self.rank, self.count, self.limit_s = rank, count, limit_s
        self.look: Callable[[], None] = lambda: None
        self._store = store
        self.holds_others: bool = holds_others
        self._around = next((each for each in _open if each.holds_others), None)
        self._number = 0  # of the next meeting
        self._lost: tuple[Told, float] | None = None  # for good; since when it is known
        self._news: tuple[int, Told, float] | None = None  # told under this number
        self._asks = 0  # that this rank has answered
        self._seen: set[str] = set()  # what this rank has said that it saw
        self._last = 0  # the error that was told last, by identity
        self._doubt: tuple[str, float] | None = None  # what is to be told, and from when on
        self._lock = threading.Lock()
        self.phases: dict[int, str] = {}  # by thread: what it is in
        self._closed = threading.Event()
        own: Store = store.clone()  # type: ignore[attr-defined] # a connection of its own
        self._thread = threading.Thread(
            target=self._run, args=(own,), name="protrain answers", daemon=True
        )
        self._thread.start()
        _open.add(self)
        _tell_what_nobody_catches()

    def close(self) -> None:
        """Come to no more meetings."""
        if self._closed.is_set():
            return
        self._closed.set()
        _open.discard(self)
        with suppress(RuntimeError):  # the store may be gone
            self._store.set(f"{_GONE}/{self.rank}", "1")
        if self._thread is not threading.current_thread():
            self._thread.join(ANSWER_S)

    @property
    def lost(self) -> tuple[Told, float] | None:
        """The failure that nobody goes on from, and since when it is known here."""
        around = self._around._lost if self._around is not None else None
        return self._lost or around

    @property
    def failure(self) -> tuple[Told, float] | None:
        """That, or another that was told since the last meeting."""
        if (lost := self.lost) is not None:
            return lost
        news = self._news
        return news[1:] if news is not None and news[0] == self._number else None

    def refuse_lost(self) -> None:
        """RanksError where a rank cannot go on."""
        if (lost := self.lost) is not None:
            raise lost[0].error(self.rank, self.count)

    @contextmanager
    def telling(
        self, what: str, *, final: bool = False, limit_s: float | None = None
    ) -> Iterator[None]:
        """Tell an exception that leaves this part; but for a `final` one, ranks meet at its end."""
        me = threading.get_ident()
        outer = self.phases.get(me)
        self.phases[me] = outer or what
        if outer is None:
            self._last = 0
        try:
            yield
            if not final and outer is None:
                self.meet(what, limit_s=limit_s)
        except BaseException as error:
            self.explain(error)
            self.tell(error, outer or what, final=final)
            raise
        finally:
            if outer is None:
                self.phases.pop(me, None)

    def explain(self, error: BaseException) -> None:
        """RanksError where another rank failed for good before, and the error does not say so."""
        lost = self.lost
        if lost is not None and lost[0].rank != self.rank and known_error(error) is None:
            raise lost[0].error(self.rank, self.count) from error

    def tell(self, error: BaseException, what: str, *, final: bool) -> None:
        """Tell the others of an error, unless they know it; returns when they have seen it."""
        if known_error(error) is not None or self._last == id(error):
            return
        self._last = id(error)
        kind, text = type(error).__name__, (str(error).splitlines() or [""])[0][:_LONGEST_REASON]
        why, fix = f"{kind}: {text}" if text else kind, None
        if isinstance(error, ProtrainError):
            why, fix = text, error.fix
        self._doubt = None
        self._say(Told(self.rank, what, why, fix), final=final)

    def tell_missing(self, absent: Sequence[int]) -> RanksError:
        """Tell which ranks do not answer; returns what this one raises."""
        which = f"rank {absent[0]}"
        if len(absent) > 1:
            which = f"ranks {', '.join(map(str, absent[:-1]))} and {absent[-1]}"
        told = Told(absent[0], "", f"{which} ended or hangs", START_AGAIN, missing=True)
        self._say(told, final=True, missing=len(absent))
        return told.error(self.rank, self.count)

    def doubt(self, what: str) -> None:
        """`what` failed for good, and nobody knows why yet; told soon, if nothing better is."""
        self._doubt = what, time.monotonic() + AFTER_BACKWARD_S

    def _say(self, told: Told, *, final: bool, missing: int = 0) -> None:
        key = _LOST if final else f"failed/{self._number}"
        text = json.dumps(asdict(told))
        with suppress(RuntimeError):  # the store is gone, and they with it
            first = self._store.compare_set(key, "", text)
            self._note(key, json.loads(first), self._number)
            self._saw(self._store, key)
            if not final:
                self._number += 1
            # They read it before this process may end, and the store with it.
            end = time.monotonic() + ANSWER_S
            while self._store.add(f"seen/{key}", 0) < self.count - missing:
                if time.monotonic() > end:
                    break
                time.sleep(_LONGEST_NAP_S)

    def _note(self, key: str, found: dict[str, Any], number: int) -> None:
        told, now = Told(**found), time.monotonic()
        if key == _LOST:
            self._lost = self._lost or (told, now)
        elif self._news is None or self._news[0] != number:
            self._news = number, told, now

    def _saw(self, store: Store, key: str) -> None:
        with self._lock:
            if key in self._seen:
                return
            self._seen.add(key)
        store.add(f"seen/{key}", 1)

    def _hear(self, store: Store, number: int) -> Told | None:
        """Return what was told under this number, or for good."""
        for key in (_LOST, f"failed/{number}"):
            if store.check([key]):
                found = json.loads(store.get(key))
                self._note(key, found, number)
                self._saw(store, key)
                return Told(**found)
        return self.lost[0] if self.lost is not None else None

    def meet(self, what: str, mine: object = None, *, limit_s: float | None = None) -> list[Any]:
        """Return what every rank has brought; RanksError if one fails, is late or elsewhere."""
        self.refuse_lost()
        limit_s = self.limit_s if limit_s is None else limit_s
        number = self._number
        keys = [f"{number}/{rank}" for rank in range(self.count)]
        try:
            self._store.set(keys[self.rank], pickle.dumps((what, mine)))  # type: ignore[arg-type]
            self._number += 1
            self._wait(keys, number, what, limit_s)
            found = [pickle.loads(self._store.get(key)) for key in keys]  # noqa: S301 (our ranks')
            if number:  # who has come to this one has read the one before
                self._store.delete_key(f"{number - 1}/{self.rank}")
        except RanksError:
            raise
        except RuntimeError as error:
            raise abandoned(self.rank, self.count) from error
        for rank, (theirs, _) in enumerate(found):
            if theirs != found[0][0]:
                raise known(
                    RanksError(
                        f"rank {rank} is in {theirs}, and rank 0 in {found[0][0]}",
                        fix="let every rank go through the same calls in the same order",
                    )
                )
        return [brought for _, brought in found]

    def agree(self, what: str, facts: Mapping[str, str], fix: Callable[[str], str]) -> None:
        """RanksError, on all ranks, where one has another fact than rank 0; `fix` mends a fact."""
        first, *others = self.meet(what, dict(facts))
        for rank, other in enumerate(others, start=1):
            for name, value in first.items():
                if other.get(name) != value:
                    found = other.get(name)
                    message = f"rank {rank} has another {name} than rank 0: {found} instead of"
                    with suppress(RanksError):  # all have read it before the store may end
                        self.meet(what, limit_s=ANSWER_S)
                    raise known(RanksError(f"{message} {value}", fix=fix(name)))

    def _wait(self, keys: Sequence[str], number: int, what: str, limit_s: float) -> None:
        start, nap = time.monotonic(), 0.001
        asked = heard = start
        while not self._store.check(list(keys)):
            # One that had come here, and failed while it waited, told it under the next number.
            for under in (number, number + 1):
                told = self._hear(self._store, under)
                if told is not None:
                    self._number = under + 1
                    raise told.error(self.rank, self.count)
            waiting = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            gone = [rank for rank in waiting if self._store.check([f"{_GONE}/{rank}"])]
            now = time.monotonic()
            if gone:
                raise self.tell_missing(gone)
            if now - start > limit_s:
                raise RanksError(
                    f"rank {waiting[0]} of {self.count} did not come to {what} within"
                    f" {limit_s:g} s",
                    fix="see what that rank says; every rank calls prepare() once per model, in the"
                    " same order"
                    if what == "prepare()"
                    else f"see what that rank says; every rank calls {what}, in the same order",
                )
            if number and now - asked > ANSWER_S:  # all have come once, so that they can answer
                # Who has not answered what was asked last; asks anew.
                asked, asks = now, self._asks
                before = f"here/{asks - 1}"
                silent = [r for r in waiting if asks and not self._store.check([f"{before}/{r}"])]
                self._store.set(f"asked/{asks}", "1")
                heard = heard if silent else now
                if silent and now - heard > SILENT_S:
                    raise self.tell_missing(silent)
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)

    def missing(self, *, patient: bool) -> list[int]:
        """Ask who is there; returns the ranks that do not answer. RuntimeError: no store."""
        asks = self._asks
        self._store.set(f"asked/{asks}", "1")
        end = time.monotonic() + ANSWER_S
        while True:
            gone = [r for r in range(self.count) if self._store.check([f"{_GONE}/{r}"])]
            silent = [r for r in range(self.count) if not self._store.check([f"here/{asks}/{r}"])]
            over = time.monotonic() > end or (not silent and not patient)
            if gone or over or self.failure is not None:
                return sorted({*gone, *(silent if over else ())})
            time.sleep(_LONGEST_NAP_S)

    def _run(self, store: Store) -> None:
        with suppress(RuntimeError):  # the store is gone: there is nobody to answer
            while not self._closed.wait(_LOOK_S):
                self._hear(store, self._number)
                doubt = self._doubt
                if doubt is not None and time.monotonic() > doubt[1] and self._lost is None:
                    self._doubt = None
                    told = Told(self.rank, doubt[0], "see what that rank says", START_AGAIN)
                    found = json.loads(store.compare_set(_LOST, "", json.dumps(asdict(told))))
                    self._note(_LOST, found, 0)
                self.look()
                if store.check([f"asked/{self._asks}"]):
                    store.set(f"here/{self._asks}/{self.rank}", "1")
                    self._asks += 1


_open: WeakSet[Meeting] = WeakSet()


@cache  # once in a process
def _tell_what_nobody_catches() -> None:
    """Let an exception that ends this process be told wherever it meets others."""
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)  # first, as where no others wait
        for meeting in list(_open):
            with suppress(Exception):
                meeting.tell(error, "", final=True)

    sys.excepthook = hook
