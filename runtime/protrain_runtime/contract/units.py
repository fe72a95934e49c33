"""Sizes and seconds as people write and read them. Elsewhere there are only bytes and seconds."""

import re

from protrain_runtime.contract.errors import ProtrainError, cut

_PREFIXES = "KMGTP"
_SCALES: dict[str, int] = (
    {"b": 1}
    | {f"{prefix}b".lower(): 1000 ** (i + 1) for i, prefix in enumerate(_PREFIXES)}
    | {f"{prefix}ib".lower(): 1024 ** (i + 1) for i, prefix in enumerate(_PREFIXES)}
)
_BINARY = [(f"{prefix}iB", 1024 ** (i + 1)) for i, prefix in enumerate(_PREFIXES)]

_SIZE = re.compile(r"(?P<number>[0-9]{1,30}(?:\.[0-9]{1,30})?) ?(?P<unit>[A-Za-z]{0,3})")
_QUARTERS = ("", ".25", ".5", ".75")

MAX_BYTES = 2**60
"""The largest size, 1024 PiB: sums of some are still integers of 64 bits."""


def parse_bytes(text: str) -> int:
    """The bytes that a text such as `24GiB`, `1.5 GB`, `512B` or `1024` names.

    KB, MB, GB, TB and PB are powers of 1000, KiB to PiB powers of 1024; case does not matter. A
    part of a byte is cut off (`0.3KiB` is 307). ProtrainError where the text names no size.
    """
    if text.strip().startswith("-"):
        raise ProtrainError(f"expected a size that is not negative, got {cut(text)!r}")
    match = _SIZE.fullmatch(text.strip())
    number, unit = match.group("number", "unit") if match else ("", "no unit")
    scale = _SCALES.get(unit.lower() or "b")
    if len(unit) == 1 and unit.upper() in _PREFIXES:
        prefix = unit.upper()
        binary, decimal = f"{number}{prefix}iB", f"{number}{prefix}B"
        fix = f"write {binary} (powers of 1024) or {decimal} (powers of 1000)"
        raise ProtrainError(f"expected a size with its unit, got {cut(text)!r}", fix=fix)
    if scale is None:
        raise ProtrainError(
            f"expected a size such as 1536MiB, 1.5GB or 4096 (bytes), got {cut(text)!r}"
        )
    if scale == 1 and "." in number:
        raise ProtrainError(
            f"expected whole bytes, got {cut(text)!r}", fix="take a larger unit, such as GiB"
        )
    whole, _, part = number.partition(".")
    size: int = int(whole + part) * scale // 10 ** len(part)
    if size > MAX_BYTES:
        raise ProtrainError(f"expected a size of at most 1024PiB, got {cut(text)!r}")
    return size


LEAST_BARE = 2**20
"""The smallest size that people mean where they type a number of bytes without a unit."""


def typed_bytes(text: str) -> int:
    """Parse a typed size. ProtrainError as `parse_bytes`, and for small unitless numbers."""
    found, number = parse_bytes(text), text.strip()
    if number.isdigit() and 0 < found < LEAST_BARE:
        raise ProtrainError(
            f"expected a size with its unit, got {cut(text)!r}, which is that many bytes",
            fix=f"did you mean {number}GiB? ({number}B are bytes)",
        )
    return found


def exact_bytes(size: int) -> str:
    """The shortest text that `parse_bytes` reads back exactly: `1.5GiB`, `108MiB`, `1000`."""
    for unit, scale in reversed(_BINARY):
        if scale <= size < 10_000 * scale and 4 * size % scale == 0:
            whole, rest = divmod(size, scale)
            return f"{whole}{_QUARTERS[4 * rest // scale]}{unit}"
    return str(size)


def format_bytes(size: int) -> str:
    """The size for a reader, rounded: `1.50 GiB`, `512 B`."""
    if abs(size) < 1024:
        return f"{size} B"
    for unit, scale in _BINARY:
        # 1023.996 would print as 1024.00: such a size belongs to the next unit.
        if round(abs(size) / scale, 2) < 1024 or unit == _BINARY[-1][0]:
            return f"{size / scale:.2f} {unit}"
    raise AssertionError("the last unit takes every size")


def format_seconds(seconds: float) -> str:
    """The time for a reader, three digits below a minute: `1.23 s`, `45.6 ms`, `2 min 05 s`."""
    if abs(seconds) >= 59.95:
        minutes, rest = divmod(round(abs(seconds)), 60)
        hours, minutes = divmod(minutes, 60)
        sign = "-" if seconds < 0 else ""
        if hours:
            return f"{sign}{hours} h {minutes:02d} min"
        return f"{sign}{minutes} min {rest:02d} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        value = seconds / scale
        if abs(value) >= 0.9995:
            decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{decimals}f} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0 s"


def format_range(seconds: tuple[float, float] | None) -> str:
    """A range of times behind a time: ` (1.92 s to 2.40 s)`; nothing for none."""
    return f" ({' to '.join(map(format_seconds, seconds))})" if seconds else ""


def four_digits(value: float) -> float:
    """Four significant digits, as measured numbers have: more would only be noise in a diff."""
    return float(f"{value:.4g}")
