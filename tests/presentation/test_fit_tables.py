"""Tables of `fit` in terminals of any width: nothing of them is cut."""

import pytest
from rich.console import Console

from protrain_plan.presentation.grids import CellTable
from protrain_plan.presentation.terminal import Text

NUMBERS = ("129,184", "194.6 GiB", "1063.0 GiB", "13200.5 GiB")


def printed(width: int) -> str:
    table = CellTable(("machine", "batch"), ("tokens/s", "device", "host", "disk"))
    heads = ("16 x rtx-pro-6000 (2 replicas)", "16 of 1 x 131072")
    heading = "16 x rtx-pro-6000 16 of 1 x 131072 (2 replicas)"
    table.add(heads, heading, Text("with a plan, tight"), NUMBERS)
    table.add(("", ""), "", Text("  checkpointed, tight"), ("no", "425.3 GiB", "-", "-"))
    console = Console(width=width, force_terminal=False)
    with console.capture() as shown:
        console.print(table)
    return shown.get()


@pytest.mark.parametrize("width", [70, 80, 100, 115, 117, 118, 160])
def test_all_numbers_and_words_are_there(width: int) -> None:
    lines = printed(width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert any(line.split()[-7:] == " ".join(NUMBERS).split() for line in lines)
    assert "".join("".join(lines).split()).count("rtx-pro-6000") == 1


@pytest.mark.parametrize("width", [24, 40, 55])
def test_where_there_is_no_room_digits_are_on_further_lines(width: int) -> None:
    text = printed(width)
    digits = sorted(letter for letter in text if letter.isdigit())
    assert digits == sorted(letter for letter in printed(1000) if letter.isdigit())


def test_cells_are_columns_where_there_is_room() -> None:
    first = printed(160).splitlines()[1]
    assert first.startswith("16 x rtx-pro-6000 (2 replicas)  16 of 1 x 131072  with a plan, tight")
    assert printed(80).splitlines()[1].startswith("16 x rtx-pro-6000 16 of 1 x 131072")
