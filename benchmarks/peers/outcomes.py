"""Outcomes of a cell that are no mistakes."""


class Skipped(Exception):  # noqa: N818 (an outcome)
    """The cell cannot run here; the text says why."""


class DidNotFit(Exception):  # noqa: N818 (an outcome)
    """Memory ran out, or no plan meets the limit."""
