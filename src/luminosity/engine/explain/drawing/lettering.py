"""Estimates of the width of text, without the font that will show it."""

from __future__ import annotations

import unicodedata

__all__ = ["text_width", "wrapped"]


# Widths as fractions of the font's size, a little more than common system fonts need.
_NARROW, _WIDE, _CAPITAL, _OTHER, _DOUBLE = 0.36, 0.92, 0.72, 0.6, 1.05
_NARROW_LETTERS = frozenset("ijlftr.,:;'|!()[]/\\ `-·")
_WIDE_LETTERS = frozenset("mwMW@%…")
_BREAKS_AFTER = frozenset(" /_-.:;,(=+")


def text_width(text: str, size: float) -> float:
    """Estimate the width of ``text`` in pixels, for a font of ``size`` pixels."""
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
    """Split ``text`` into lines no wider than ``limit`` pixels, after separators if possible.

    >>> wrapped("ReadFromText/Read", 10, 80)
    ['ReadFromText/', 'Read']
    """
    lines: list[str] = []
    line, width, cut = "", 0.0, 0  # cut: the line's length up to the last separator
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
