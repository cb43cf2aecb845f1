"""Where rows of CSV begin and end: a quoted value may contain line breaks."""

from __future__ import annotations

import bisect
import functools
import re
from typing import Any

import numpy as np

__all__ = ["CsvRows", "find_rows"]

_MOST_ROW_BYTES = 128 << 20  # of a row with quotes: one that is not closed must not take a large file into memory
_QUOTE = 34
_LINE_ENDS = (10, 13)


class CsvRows:
    """The rows in ``data``, which begins with a row.

    ``end`` is where the last complete row ends. ``faults`` are the lines, as pairs of start and stop, in which a quoted
    value begins that does not end as it should; they count as rows of one line. Such a value goes on to the end of the
    file, for 128 MB, or to a quote in a later line with more text behind it, as if the first quote were a stray one.
    """

    def __init__(self, data: bytes, end: int, faults: list[tuple[int, int]], quotes: Any, rows: Any) -> None:
        self.data = data
        self.end = end
        self.faults = faults
        self._quotes = quotes  # their positions, if every second one closes a value; otherwise None
        self._rows: list[tuple[int, int]] = rows  # those with line breaks in them, if that is not so

    def cut_at(self, position: int) -> int:
        """Return where the first row ends that ends at ``position`` or behind it."""
        at = position - 1
        while True:
            at = self.data.find(b"\n", at, self.end)
            if at < 0:
                return self.end
            inside_until = self._inside_until(at)
            if inside_until is None:
                return at + 1
            at = inside_until

    def has_line_breaks(self) -> bool:
        """Return whether a value contains a line break, or seems to."""
        if self.faults or self._rows:
            return True
        if self._quotes is None or not len(self._quotes):
            return False
        breaks = np.flatnonzero(np.frombuffer(self.data, np.uint8) == _LINE_ENDS[0])
        return bool((np.searchsorted(self._quotes, breaks) % 2).any())

    def _inside_until(self, newline: int) -> int | None:
        """Return None for a line break between rows, and a position to go on from for one inside a value."""
        if self._quotes is not None:
            before = int(np.searchsorted(self._quotes, newline))
            return int(self._quotes[before]) if before % 2 and before < len(self._quotes) else None
        at = bisect.bisect_right(self._rows, (newline, len(self.data))) - 1
        if at < 0 or newline >= self._rows[at][1] - 1:
            return None
        return self._rows[at][1] - 1


def find_rows(data: bytes, delimiter: str, is_last: bool) -> CsvRows:
    """Find the rows of ``data``, which begins with a row; ``is_last`` says that the file ends with it.

    >>> rows = find_rows(b'1,"a\\nb"\\n2,c\\n3,"d', ",", is_last=False)
    >>> rows.end, rows.cut_at(1), rows.cut_at(9)
    (12, 8, 12)
    >>> find_rows(b'1,"a\\n2,b\\n', ",", is_last=True).faults
    [(0, 5)]
    """
    whole = len(data) if is_last else data.rfind(b"\n") + 1
    if b'"' not in data:
        return CsvRows(data, whole, [], np.empty(0, np.int64), [])
    quotes = _plain_quotes(data, delimiter) if len(data) < _MOST_ROW_BYTES else None
    if quotes is None or (is_last and len(quotes) % 2):
        return _find_one_by_one(data, delimiter, is_last)
    while whole and not is_last:
        before = int(np.searchsorted(quotes, whole - 1))
        if before % 2 == 0:
            break
        whole = data.rfind(b"\n", 0, int(quotes[before - 1])) + 1
    return CsvRows(data, whole, [], quotes, [])


def _plain_quotes(data: bytes, delimiter: str) -> Any:
    """Return the positions of quotes if they all stand at the beginning or end of a value or are doubled inside it.

    Then every second quote closes a value: a doubled one closes and opens it again. Otherwise return None.
    """
    values = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(values == _QUOTE)
    fits = np.zeros(256, np.bool_)
    fits[[ord(delimiter), _QUOTE, *_LINE_ENDS]] = True
    opening, closing = quotes[::2], quotes[1::2]
    opens = fits[values[opening - 1]] | (opening == 0)
    closes = fits[values[np.minimum(closing + 1, len(data) - 1)]]
    return quotes if opens.all() and closes.all() else None


def _find_one_by_one(data: bytes, delimiter: str, is_last: bool) -> CsvRows:
    """Find rows as the parser does: a quote counts only at the beginning of a value, and until that value is closed."""
    loose, strict = _patterns(delimiter)
    faults: list[tuple[int, int]] = []
    long_rows: list[tuple[int, int]] = []
    text = data + b"\n" if is_last and not data.endswith(b"\n") else data
    at = 0
    while (quote := text.find(b'"', at)) >= 0:
        start = text.rfind(b"\n", at, quote) + 1 or at
        line_end = text.find(b"\n", quote) + 1
        row = loose.match(text, start, start + _MOST_ROW_BYTES)
        if row is None and not is_last and len(data) - start < _MOST_ROW_BYTES:
            return CsvRows(data, start, faults, None, long_rows)  # More data will show where the row ends.
        is_long = row is not None and row.end() > line_end
        if row is None or (is_long and not strict.match(text, start, row.end())):
            at = line_end or len(text)
            faults.append((start, min(at, len(data))))
        else:
            at = row.end()
            if is_long:
                long_rows.append((start, min(at, len(data))))
    return CsvRows(data, len(data) if is_last else data.rfind(b"\n", at) + 1 or at, faults, None, long_rows)


@functools.lru_cache(maxsize=16)
def _patterns(delimiter: str) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Return patterns of a row: as the parser takes it, and with nothing between a closing quote and the delimiter."""
    between = re.escape(delimiter).encode() + rb"\r"
    quoted = rb'"[^"]*(?:""[^"]*)*"(?!")'
    unquoted = rb'(?!")[^%s\n]*' % between
    found: list[re.Pattern[bytes]] = []
    for after_quote in (rb"[^%s\n]*" % between, rb""):
        value = rb"(?:%s%s|%s)" % (quoted, after_quote, unquoted)
        found.append(re.compile(rb"(?:%s[%s])*%s\n" % (value, between, value)))
    return found[0], found[1]
