"""Elements in error messages: the user's own data, shortened, whatever object holds it on its way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, cast

import pyarrow as pa

from luminosity._shared.text import shorten, shorten_repr
from luminosity.core import USER_DATA

__all__ = ["describe_element", "describe_input"]

_ELEMENT_CHARACTERS = 200  # of an element's repr: enough to recognize it, short enough for a message
_MOST_VALUES = 20  # of a collection: more don't fit into the characters
_MOST_ROWS = 3  # of a table
_DEEPEST = 6  # levels of collections within collections


def describe_element(value: Any, limit: int = _ELEMENT_CHARACTERS) -> str:
    """Return one line about an element.

    Like ``repr``, but iterables of Beam are lists of their values, tables are rows, and objects of the product that
    carry elements are what they carry.

    >>> describe_element(("key", [1, 2])), describe_element(pa.table({"text": ["a", "b", "c", "d"]}))
    ("('key', [1, 2])", "4 rows: {'text': 'a'}, {'text': 'b'}, {'text': 'c'}, …")
    """
    text = _described(value, limit, _DEEPEST)
    return shorten(" ".join(text.split()) if "\n" in text else text, limit)


def describe_input(value: Any) -> str:
    """Return one line about what a step gets from the runner.

    For a splittable DoFn, Beam packs the element with its restriction, and their size; only these two are shown. The
    element of an Impulse, with which a pipeline begins, is not the user's: an empty string.
    """
    match value:
        case b"":
            return ""
        case ((element, (restriction, _)), float()) if type(restriction).__module__ != "builtins":
            part = shorten_repr(restriction, _ELEMENT_CHARACTERS)
            return describe_element(element) + (f", {part}" if " object at 0x" not in part else "")
        case _:
            return describe_element(value)


def _described(value: Any, limit: int, depth: int) -> str:
    carried = getattr(type(value), USER_DATA, None)
    if carried is not None:
        return _described(carried(value), limit, depth)
    if isinstance(value, pa.RecordBatch | pa.Table):
        return _rows(value)
    kind = type(value)
    if depth and kind is dict:
        pairs = _some(value.items(), lambda pair: ": ".join(_described(each, limit, depth - 1) for each in pair))
        return f"{{{pairs}}}"
    if depth and kind in (list, tuple):
        inner = _some(value, lambda each: _described(each, limit, depth - 1))
        return f"[{inner}]" if kind is list else f"({inner}{',' if len(value) == 1 else ''})"
    if kind.__module__.startswith("apache_beam.") and " object at 0x" in shorten_repr(value, limit):
        return _of_beam(value, limit, depth)
    return shorten_repr(value, limit)


def _some(values: Iterable[Any], describe: Callable[[Any], str]) -> str:
    found = list(itertools.islice(values, _MOST_VALUES + 1))
    texts = [describe(each) for each in found[:_MOST_VALUES]]
    return ", ".join([*texts, *(["…"] if len(found) > _MOST_VALUES else [])])


def _of_beam(value: Any, limit: int, depth: int) -> str:
    """Describe an object of Beam's without a ``repr``: the values of an iterable, the files of a source."""
    pattern = getattr(value, "_pattern", None)
    if pattern is not None:
        return f"files {pattern.get() if hasattr(pattern, 'get') else pattern!r}"
    if depth and isinstance(value, Iterable):
        try:
            values = cast("Iterable[Any]", value)
            return f"[{_some(values, lambda each: _described(each, limit, depth - 1))}]"
        except Exception as error:  # the values may lie with the runner, and the bundle has failed
            return f"<values that can't be read: {type(error).__name__}>"
    return shorten_repr(value, limit)


def _rows(table: Any) -> str:
    shown = ", ".join(shorten_repr(row, _ELEMENT_CHARACTERS) for row in table.slice(0, _MOST_ROWS).to_pylist())
    if table.num_rows == 1:
        return f"1 row: {shown}"
    return f"{table.num_rows:,} rows: {shown}{', …' if table.num_rows > _MOST_ROWS else ''}" if shown else "0 rows"
