"""Outcomes of a cell that are no mistakes."""


class Skipped(Exception):  # noqa: N818 (an outcome)
    """The cell cannot run here; the text says why."""


class Refused(Exception):  # noqa: N818 (an outcome)
    """The planner, or the runtime before it began, said what is missing; nothing ran."""


class DidNotFit(Exception):  # noqa: N818 (an outcome)
    """Memory ran out."""
