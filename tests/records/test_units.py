"""Sizes and seconds, against exact fractions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.units import (
    MAX_BYTES,
    exact_bytes,
    format_bytes,
    format_seconds,
    parse_bytes,
    typed_bytes,
)
from tests.support.messages import Speaker


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("512B", 512),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1.5GiB", 3 * 2**29),
        (" 1.5 gib ", 3 * 2**29),
        ("24GB", 24 * 10**9),
        ("2TiB", 2**41),
        ("0.3KiB", 307),
        ("1152921504606846976", MAX_BYTES),
    ],
)
def test_parsed_bytes_are_those_of_the_definition(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *("-1GiB", "1e9", "", "GiB", "inf", "1 GiB 2", "1XB", "1.5", "24g", "1025PiB"),
        pytest.param("9" * 100, id="a hundred nines"),
    ],
)
def test_what_is_no_size_is_an_error(text: str, assert_says: Speaker) -> None:
    assert_says.refused(parse_bytes, text)


@given(st.integers(0, MAX_BYTES) | st.integers(0, 2**40).map(lambda n: 256 * n))
def test_exact_bytes_read_back_equal(size: int) -> None:
    assert parse_bytes(exact_bytes(size)) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (10**11, "100000000000"),
        (9999 * 2**20, "9999MiB"),
        (0, "0"),
        (1000, "1000"),
        (1024, "1KiB"),
        (1280, "1.25KiB"),
        (3 * 2**29, "1.5GiB"),
    ],
)
def test_exact_bytes_are_short_where_that_is_exact(size: int, text: str) -> None:
    assert exact_bytes(size) == text


@given(st.integers(-MAX_BYTES, MAX_BYTES))
def test_formatted_bytes_are_within_half_a_last_digit(size: int) -> None:
    number, unit = format_bytes(size).split()
    scale = parse_bytes(f"1{unit}")
    assert abs(Fraction(number) * scale - size) <= Fraction(scale, 200) * Fraction(1000001, 10**6)
    assert abs(Fraction(number)) < 1024 or unit == "PiB"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**30 - 1, "1.00 GiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_formatted_bytes_look_like_this(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.234, "1.23 s"),
        (12.34, "12.3 s"),
        (0.0456, "45.6 ms"),
        (0.456, "456 ms"),
        (0.9999, "1.00 s"),
        (78.9e-6, "78.9 us"),
        (5e-9, "5 ns"),
        (59.99, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7260, "2 h 01 min"),
        (-0.25, "-250 ms"),
    ],
)
def test_formatted_seconds_look_like_this(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("text", ["24", "1", "128", " 500 ", "1048575"])
def test_a_small_number_without_a_unit_is_asked_about(text: str) -> None:
    with pytest.raises(ProtrainError, match="with its unit") as caught:
        typed_bytes(text)
    assert str(caught.value.fix).startswith(f"did you mean {text.strip()}GiB?")


@pytest.mark.parametrize("text", ["0", "24B", "24GiB", "0.5KiB", "1048576", "2000000000"])
def test_other_typed_sizes_are_as_they_are_read(text: str) -> None:
    assert typed_bytes(text) == parse_bytes(text)
