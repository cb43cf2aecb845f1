"""How much room text takes where no font can be asked."""

from __future__ import annotations

import unicodedata

# Parts of the font's size, a little more than common system fonts need.
_NARROW, _WIDE, _CAPITAL, _OTHER, _DOUBLE = 0.36, 0.92, 0.72, 0.6, 1.05
_NARROW_LETTERS = frozenset("ijlftr.,:;'|!()[]/\\ `-·")
_WIDE_LETTERS = frozenset("mwMW@%…")
_BREAKS_AFTER = frozenset(" /_-.:;,(=+")


def text_width(text: str, size: float) -> float:
    """An estimate, in pixels, for a font of ``size`` pixels."""
    return size * sum(map(_letter_width, text))


def _letter_width(letter: str) -> float:
    if letter in _NARROW_LETTERS:
        return _NARROW
    if letter in _WIDE_LETTERS:
        return _WIDE
    if unicodedata.east_asian_width(letter) in "WF":
        return _DOUBLE
    return _CAPITAL if letter.isupper() else _OTHER


def wrapped(text: str, size: float, limit: float) -> list[str]:
    """Lines no wider than ``limit``, cut where a reader would cut if that is possible.

    >>> wrapped("ReadFromText/Read", 10, 80)
    ['ReadFromText/', 'Read']
    """
    lines: list[str] = []
    line, width, cut = "", 0.0, 0  # cut: how much of the line may end it
    for letter in text:
        while line and width + text_width(letter, size) > limit:
            cut = cut or len(line)
            lines.append(line[:cut].rstrip())
            line = line[cut:].lstrip()
            width, cut = text_width(line, size), 0
        line += letter
        width += text_width(letter, size)
        if letter in _BREAKS_AFTER:
            cut = len(line)
    return [*lines, line] if line or not lines else lines
