"""How all tables look, and how a run of units is called."""

from rich.table import Table


def table_of(*columns: str) -> Table:
    """A table without lines; the first column holds words, the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def run_name(first: str, last: str) -> str:
    """`model.layers.0` to `model.layers.11` as `model.layers.0-11`."""
    return first if first == last else f"{first}-{last.rpartition('.')[2]}"
