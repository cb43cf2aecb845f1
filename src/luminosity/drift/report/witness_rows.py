"""The tables of the rows that differ most, with their other columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from luminosity._shared.text import shorten
from luminosity.drift.result import Details
from luminosity.drift.witness_function import Extremes
from luminosity.report_page.markup import MISSING, Markup, element, joined, plain

__all__ = ["WitnessRow", "shown_rows", "witness_tables"]

_SHOWN = 8  # rows of a table
_COLUMNS = 7  # of a table
_CHARACTERS = 240  # of a cell
_NUMBERS = 4  # of a vector
_WORDS = 3  # of a cell that says what its row is about; shorter ones are names, labels, dates
_BAR_PIXELS = 70.0  # of the longest bar


@dataclass(frozen=True)
class WitnessRow:
    """A row that is shown in the report. ``alike`` counts further rows that say the same."""

    number: int
    score: float
    cells: Mapping[str, str]
    alike: int = 0


def shown_rows(
    found: Sequence[tuple[int, float]], details: Details | None, values: Any, counts: Sequence[int]
) -> list[WitnessRow]:
    """Return the first few rows that say different things; without ``details``, contents are the rows' own numbers.

    ``counts`` are the numbers of rows that each row stands for.
    """
    numbers = [number for number, _ in found]
    contents = details(numbers) if details is not None else [_own(number, values[number]) for number in numbers]
    rows: list[WitnessRow] = []
    places: dict[tuple[str, ...], int] = {}
    for (number, score), count, each in zip(found, counts, contents, strict=True):
        cells = {str(name): _cell(value) for name, value in list(each.items())[:_COLUMNS]}
        meanings = _meanings(number, cells)
        place = next((places[meaning] for meaning in meanings if meaning in places), None)
        if place is not None:
            rows[place] = replace(rows[place], alike=rows[place].alike + count)
        elif len(rows) < _SHOWN:
            place = len(rows)
            rows.append(WitnessRow(number, score, cells, count - 1))
        if place is not None:
            places |= dict.fromkeys(meanings, place)
    return rows


def _meanings(number: int, cells: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return what a row says: all of its cells, and its longest text. Rows that share either say the same.

    A text that occurs twice usually has two ids, dates or file names.
    """
    whole = tuple(text for name, text in cells.items() if name not in ("file", "row")) or (str(number),)
    text = max((text for name, text in cells.items() if name != "file"), key=len, default="")
    is_text = len(text.split()) >= _WORDS and not text.startswith("[")
    return [whole, ("text", text.casefold())] if is_text else [whole]


def witness_tables(gone: Sequence[WitnessRow], new: Sequence[WitnessRow], extremes: Extremes) -> Markup:
    """Draw the tables of new and gone rows, and a note on how they were found."""
    most = max((abs(row.score) for row in (*gone, *new)), default=1.0) or 1.0
    scored, against = extremes.scored, extremes.against
    note = (
        f"The score of a row is its mean similarity to rows of the current sample minus its mean similarity to rows of "
        f"the reference, measured by {extremes.kernel}. Scored rows: {scored[0]:,} of the reference and {scored[1]:,} "
        f"of the current sample, each compared with {against[0]:,} and {against[1]:,} rows."
    )
    return joined(
        [
            element("h3", element("span", class_="key current"), "New: rows most typical of the current sample"),
            _table(new, most, "current"),
            element("h3", element("span", class_="key reference"), "Gone: rows most typical of the reference"),
            _table(gone, most, "reference"),
            element("p", note, class_="muted"),
        ]
    )


def _table(rows: Sequence[WitnessRow], most: float, kind: str) -> Markup:
    names = list(dict.fromkeys(name for row in rows for name in row.cells))
    head = element("tr", element("th", "score"), *(element("th", name) for name in names))
    body = [
        element("tr", element("td", _score(row.score, most, kind)), *(_td(row, name, names) for name in names))
        for row in rows
    ]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="wide")


def _td(row: WitnessRow, name: str, names: Sequence[str]) -> Markup:
    text = row.cells.get(name, "")
    if row.alike and name == names[-1]:
        more = f" and {row.alike:,} more {'row' if row.alike == 1 else 'rows'} like it"
        return element("td", text, element("span", more, class_="muted"))
    return element("td", text)


def _score(score: float, most: float, kind: str) -> Markup:
    bar = element("rect", x=0, y=3, width=max(1.0, abs(score) / most * _BAR_PIXELS), height=12, rx=2, class_=kind)
    drawn = element("svg", bar, width=_BAR_PIXELS, height=18, class_="small", aria_hidden="true")
    return joined([drawn, " ", plain(score, 2)])


def _own(number: int, values: Any) -> dict[str, Any]:
    return {"row": number, "numbers": [float(value) for value in values]}


def _cell(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, float):
        return plain(value, 4)
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, list) and value and all(isinstance(each, (int, float)) for each in value):
        shown = ", ".join(plain(float(each), 2) for each in value[:_NUMBERS])
        return f"[{shown}, … {len(value)} numbers]" if len(value) > _NUMBERS else f"[{shown}]"
    text = " ".join(str(value).split())
    return shorten(text, _CHARACTERS)
