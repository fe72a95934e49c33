"""Propagate a rank's failure to the others: meetings at the ranks' store.

[Note: failures] Ranks go from meeting to meeting; collectives lie in between. `prepare`, `load` and
`save` end with a meeting: a rank that fails before it reports under the meeting's number, and all
others fail there, too, with their models unchanged; the call may be repeated. A failure inside a
step is final: the others read it before their next forward or step, or when a collective fails.
Until then they wait, at most for the time limit: `torchrun` ends them as soon as the failed process
has ended. An error before any rank has begun is not reported: a loop may catch it, fix its cause
and stay in step with the others.
"""

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store

from protrain_runtime.contract.errors import ProtrainError

READ_S = 3.0
"""Seconds for the others to read a report before the failed rank's process may end."""

START_AGAIN = "see what that rank said last; start all ranks again, from a checkpoint"

_LONGEST_NAP_S = 0.05  # between polls of a rank that waits in a meeting
_LONGEST_REASON = 500  # characters
_LOST = "lost"


class RanksError(ProtrainError, RuntimeError):
    """Another rank failed, is missing, or disagrees. `known`: no other rank needs a report."""

    def __init__(self, message: str, *, fix: str | None, known: bool = True) -> None:
        super().__init__(message, fix=fix)
        self.known = known


@dataclass(frozen=True, slots=True)
class Report:
    """A rank's report of its failure."""

    rank: int
    what: str  # the call that failed
    why: str
    fix: str | None

    def error(self) -> RanksError:
        """Make the error that another rank raises."""
        message = f"rank {self.rank} failed in {self.what}: {self.why}"
        return RanksError(message, fix=self.fix)


def abandoned(rank: int, count: int) -> RanksError:
    """Make the error for a store that is gone."""
    message = (
        f"rank {rank} of {count} waited for the others, and their meeting place is gone: the rank"
        " that keeps it (rank 0, or the launcher) has ended"
    )
    return RanksError(message, fix=START_AGAIN)


@dataclass(eq=False)
class Meeting:
    """A place at the store where `count` ranks exchange values and report failures."""

    store: Store
    rank: int
    count: int
    _: KW_ONLY
    limit_s: float
    _number: int = field(default=0, init=False)  # of the next meeting
    _lost: Report | None = field(default=None, init=False)  # for good
    _last: int = field(default=0, init=False)  # identity of the last reported error
    # By thread: its current phase.
    phases: dict[int, str] = field(default_factory=dict[int, str], init=False)

    def refuse_lost(self) -> None:
        """RanksError if a rank has failed for good, or the store is gone."""
        try:
            if self._lost is None and self.store.check([_LOST]):
                self._lost = Report(**json.loads(self.store.get(_LOST)))
        except RuntimeError as error:
            raise abandoned(self.rank, self.count) from error
        if self._lost is not None:
            raise self._lost.error()

    @contextmanager
    def reporting(
        self, what: str, *, final: bool = False, limit_s: float | None = None
    ) -> Iterator[None]:
        """Report an exception that leaves this section; unless `final`, ranks then meet."""
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
            self.report(error, outer or what, final=final)
            raise
        finally:
            if outer is None:
                self.phases.pop(me, None)

    def report(self, error: BaseException, what: str, *, final: bool) -> None:
        """Report an error to the others, unless known."""
        cause: BaseException | None = error  # the others' error may have ended work on a lane
        while cause is not None and not (isinstance(cause, RanksError) and cause.known):
            cause = cause.__cause__
        if cause is not None or self._last == id(error):
            return
        self._last = id(error)
        kind, text = type(error).__name__, (str(error).splitlines() or [""])[0][:_LONGEST_REASON]
        why, fix = f"{kind}: {text}" if text else kind, None
        if isinstance(error, ProtrainError):
            why, fix = text, error.fix
        key = _LOST if final else f"failed/{self._number}"
        with suppress(RuntimeError):  # the store is gone, and the others with it
            report = asdict(Report(self.rank, what, why, fix))
            first = Report(**json.loads(self.store.compare_set(key, "", json.dumps(report))))
            if final:
                self._lost = first
                return
            self._number += 1
            # They read it before this process, and perhaps the store, ends.
            end = time.monotonic() + READ_S
            others = self.count - 1 - (first.rank != self.rank)
            while self.store.add(f"read/{key}", 0) < others and time.monotonic() < end:
                time.sleep(_LONGEST_NAP_S)

    def _hear(self, number: int) -> None:
        """RanksError if a failure was reported under this number, or for good."""
        self.refuse_lost()
        key = f"failed/{number}"
        if self.store.check([key]):
            report = Report(**json.loads(self.store.get(key)))
            self.store.add(f"read/{key}", 1)
            self._number = number + 1
            raise report.error()

    def meet(self, what: str, mine: object = None, *, limit_s: float | None = None) -> list[Any]:
        """Return every rank's value; RanksError if one fails, is late or elsewhere."""
        limit_s = self.limit_s if limit_s is None else limit_s
        number = self._number
        keys = [f"{number}/{rank}" for rank in range(self.count)]
        self.refuse_lost()
        try:
            self.store.set(keys[self.rank], pickle.dumps((what, mine)))  # type: ignore[arg-type]
            self._number += 1
            end, nap = time.monotonic() + limit_s, 0.001
            while not self.store.check(keys):
                self._hear(number)
                self._hear(number + 1)
                if time.monotonic() > end:
                    raise self._late(keys, what, limit_s)
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP_S)
            # A rank that failed while it waited here reports under the next number.
            self._hear(number + 1)
            found = [pickle.loads(self.store.get(key)) for key in keys]  # noqa: S301 (our ranks')
            if number:  # all ranks here have read the previous one
                self.store.delete_key(f"{number - 1}/{self.rank}")
        except RanksError:
            raise
        except RuntimeError as error:
            raise abandoned(self.rank, self.count) from error
        for rank, (theirs, _) in enumerate(found):
            if theirs != found[0][0]:
                raise RanksError(
                    f"rank {rank} is in {theirs}, and rank 0 in {found[0][0]}",
                    fix="make the same calls in the same order on every rank",
                )
        return [brought for _, brought in found]

    def _late(self, keys: list[str], what: str, limit_s: float) -> RanksError:
        missing = next((n for n, key in enumerate(keys) if not self.store.check([key])), 0)
        calls = "calls prepare() once per model" if what == "prepare()" else f"calls {what}"
        return RanksError(
            f"rank {missing} of {self.count} did not reach {what} within {limit_s:g} s",
            fix=f"see what that rank says; every rank {calls}, in the same order",
            known=False,
        )

    def agree(self, what: str, facts: Mapping[str, str], fix: Callable[[str], str]) -> None:
        """RanksError, on all ranks, if a fact differs from rank 0's; `fix` advises on a fact."""
        first, *others = self.meet(what, dict(facts))
        for rank, other in enumerate(others, start=1):
            for name, value in first.items():
                if other.get(name) != value:
                    found = other.get(name)
                    message = f"rank {rank} has another {name} than rank 0: {found} instead of"
                    with suppress(RanksError):  # all have read it before the store may end
                        self.meet(what, limit_s=READ_S)
                    raise RanksError(f"{message} {value}", fix=fix(name))
