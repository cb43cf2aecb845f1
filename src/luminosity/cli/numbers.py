"""Numbers on the command line: what argparse calls to read and check them."""

from __future__ import annotations

import argparse

__all__ = ["at_least", "count", "fraction", "number", "whole_number"]


def at_least(least: int, text: str) -> int:
    """Return a whole number that is at least ``least``."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {least}")
    return int(text)


def whole_number(text: str) -> int:
    """Return a whole number from 0.

    >>> whole_number("12")
    12
    """
    return at_least(0, text)


def count(text: str) -> int:
    """Return a whole number from 1."""
    return at_least(1, text)


def fraction(text: str, example: str) -> float:
    """Return a number between 0 and 1, both excluded. ``example`` is named if it is none."""
    found = number(text)
    if not 0 < found < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number between 0 and 1, such as {example}")
    return found


def number(text: str) -> float:
    """Return any number, or NaN if the text is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
