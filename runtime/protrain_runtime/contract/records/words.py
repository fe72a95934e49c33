"""Words of messages: enumerations, numbers, the nearest choice, and invisible characters."""

import difflib
import math
import re
import unicodedata
from collections.abc import Iterable
from decimal import Decimal

from protrain_runtime.contract.errors import MAX_SHOWN, cut

_MAX_CHOICES = 1_000


def unseen(text: str, *, but: str = "") -> str | None:
    """The first character that people would not see, or that moves what they see, if there is one.

    Control characters, surrogates, marks of direction, joiners and others of no width, separators
    of lines and paragraphs, and what Unicode says is no character. `but` are exceptions.
    """
    if text.isascii() and text.isprintable():  # nearly always, and quick
        return None
    for character in text:
        number = ord(character)
        if character not in but and (
            unicodedata.category(character) in _UNSEEN
            or _IGNORABLE.fullmatch(character)
            or number & 0xFFFE == 0xFFFE
            or 0xFDD0 <= number <= 0xFDEF
        ):
            return character
    return None


_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
_IGNORABLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)
"""Characters that may be shown as nothing (Unicode's Default_Ignorable_Code_Point), some letters;
and the Braille pattern without dots."""


def as_seen(text: str) -> str:
    """The text as people see it, without capitals."""
    return text.lower() if text.isascii() else _IGNORABLE.sub("", text).casefold()


def refused_character(text: str, *, but: str = "") -> str:
    """Say what is wrong with a text that has a character which would not be seen."""
    character = unseen(text, but=but)
    assert character is not None
    at = text.index(character)
    shown = cut(text[max(0, at - MAX_SHOWN // 2) :])
    return f"the character U+{ord(character):04X} is not allowed, in {shown!r}"


def number_text(number: float) -> str:
    """The shorter of 13400000000.0 and 1.34e+10 that YAML 1.1 reads back exactly."""
    plain = repr(float(number))  # an int is at home in a float field
    if not math.isfinite(number):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[plain]
    mantissa, exponent = f"{Decimal(plain).normalize():e}".split("e")
    scientific = f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}"
    return plain if "e" not in plain and len(plain) <= len(scientific) else scientific


def listed(words: Iterable[str], last: str) -> str:
    """The words as an enumeration: `keep, recompute or swap`."""
    *most, final = words
    return f"{', '.join(most)} {last} {final}" if most else final


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """A fix that names the choice closest to `word`, by the whole or by its first word."""
    whole = {choice: choice for choice in choices}
    if len(word) > MAX_SHOWN or len(whole) > _MAX_CHOICES:  # takes long, and says little
        return None
    first = {choice.split()[0]: choice for choice in reversed(list(whole)) if choice.split()}
    for candidates in (whole, first):
        if close := difflib.get_close_matches(word, candidates, n=1):
            return f"did you mean {cut(candidates[close[0]])!r}?"
    return None
