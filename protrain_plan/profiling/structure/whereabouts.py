"""Where measuring is: told slot by slot, so that one can say where the model's code ended it.

What runs may end the process at any moment. A listener is told before each slot's code runs, and
can send it to where it survives. One model is measured at a time in a process.
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
        """Whether blocks run as a plan lets them, and not as the model has run before."""
        return self.doing == REHEARSING or self.form not in ("", "keep")

    def __str__(self) -> str:
        parts = (
            f" in {self.running}" if self.running else "",
            f" while {self.doing}" if self.doing else "",
        )
        form = f" in form {self.form}" if self.form else ""
        return ",".join(part for part in parts if part) + form


Listener = Callable[[Place], None]


class _Told:
    """The last place, and who is told: the state of this module."""

    place = Place()
    units: tuple[str, ...] = ()
    listeners: tuple[Listener, ...] = ()


def place() -> Place:
    """Where measuring was last told to be."""
    return _Told.place


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` of every place inside."""
    before, _Told.listeners = _Told.listeners, (*_Told.listeners, listener)
    try:
        yield
    finally:
        _Told.listeners = before


@contextmanager
def naming(units: Sequence[str]) -> Iterator[None]:
    """Slots inside are those of units with these names."""
    before, _Told.units = _Told.units, tuple(units)
    try:
        yield
    finally:
        _Told.units = before


_REST = ", about "


def with_rest(doing: str, seconds: float) -> str:
    """A pass with what is left of all: `counting bytes, about 40 s to go`."""
    rest = f"{5 * max(1, round(seconds / 5))} s" if seconds < 90 else f"{round(seconds / 60)} min"
    return f"{doing}{_REST}{rest} to go"


def pass_of(told: str) -> str:
    """The pass alone."""
    return told.partition(_REST)[0]


def begin(told: str) -> None:
    """A pass begins."""
    _tell(Place(doing=pass_of(told)))


def in_form(form: str) -> None:
    """A step begins whose blocks have this form."""
    _tell(Place(doing=_Told.place.doing, form=form))


def in_slot(slot: int) -> None:
    """This slot of the units named runs next."""
    if not _Told.units:
        return
    last = 2 * len(_Told.units) - 1
    unit, way = (slot, "forward") if slot < len(_Told.units) else (last - slot, "backward")
    _tell(replace(_Told.place, running=f"the {way} of '{_Told.units[unit]}'"))


def in_module(path: str) -> None:
    """The forward of the module at this path of the model runs; of the model itself for none."""
    running = f"the forward of '{path}'" if path else "the model's forward"
    _tell(replace(_Told.place, running=running))


def _tell(found: Place) -> None:
    _Told.place = found
    for listener in _Told.listeners:
        listener(found)
