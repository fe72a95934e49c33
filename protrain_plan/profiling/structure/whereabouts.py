"""Current slot of the measuring process, for crash reports.

The model's code may end the process at any moment. A listener is called before each slot runs, and
can send the place to another process. One model is measured at a time in a process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

REHEARSING = "rehearsing a planned step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A pass of measuring, the form that blocks have in it, and what runs.

    Reads ` in the backward of 'layers.3', while counting bytes in form full`, as far as known.
    """

    doing: str = ""
    form: str = ""
    running: str = ""

    @property
    def planned(self) -> bool:
        """Whether blocks run under a plan, and not as in the plain model."""
        return self.doing == REHEARSING or self.form not in ("", "keep")

    def __str__(self) -> str:
        parts = (
            f" in {self.running}" if self.running else "",
            f" while {self.doing}" if self.doing else "",
        )
        form = f" in form {self.form}" if self.form else ""
        return ",".join(part for part in parts if part) + form


Listener = Callable[[Place], None]


class _Current:
    """The last place and its listeners: the state of this module."""

    place = Place()
    units: tuple[str, ...] = ()
    listeners: tuple[Listener, ...] = ()


def place() -> Place:
    """The place last reported."""
    return _Current.place


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` with every place inside."""
    before, _Current.listeners = _Current.listeners, (*_Current.listeners, listener)
    try:
        yield
    finally:
        _Current.listeners = before


@contextmanager
def naming(units: Sequence[str]) -> Iterator[None]:
    """Slots inside are those of units with these names."""
    before, _Current.units = _Current.units, tuple(units)
    try:
        yield
    finally:
        _Current.units = before


_REST = ", about "


def with_rest(doing: str, seconds: float) -> str:
    """A pass with what is left of all: `counting bytes, about 40 s to go`."""
    rest = f"{5 * max(1, round(seconds / 5))} s" if seconds < 90 else f"{round(seconds / 60)} min"
    return f"{doing}{_REST}{rest} to go"


def pass_of(progress: str) -> str:
    """The pass alone."""
    return progress.partition(_REST)[0]


def begin(progress: str) -> None:
    """A pass begins."""
    _report(Place(doing=pass_of(progress)))


def in_form(form: str) -> None:
    """A step begins whose blocks have this form."""
    _report(Place(doing=_Current.place.doing, form=form))


def in_slot(slot: int) -> None:
    """This slot of the units named runs next."""
    if not _Current.units:
        return
    last = 2 * len(_Current.units) - 1
    unit, way = (slot, "forward") if slot < len(_Current.units) else (last - slot, "backward")
    _report(replace(_Current.place, running=f"the {way} of '{_Current.units[unit]}'"))


def in_module(path: str) -> None:
    """The forward of the module at this path of the model runs; of the model itself for none."""
    running = f"the forward of '{path}'" if path else "the model's forward"
    _report(replace(_Current.place, running=running))


def _report(found: Place) -> None:
    _Current.place = found
    for listener in _Current.listeners:
        listener(found)
