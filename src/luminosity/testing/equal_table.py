"""Compare tables, however they are cut into batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
from apache_beam.testing.util import BeamAssertException

__all__ = ["equal_table"]

_SHOWN_ROWS = 5  # enough to see the kind of difference


def equal_table(expected: Any, *, ordered: bool = False) -> Callable[[Iterable[pa.RecordBatch]], None]:
    """Return a matcher for Beam's ``assert_that``: same columns and rows, however they are cut into batches.

    >>> equal_table(pa.table({"n": [1, 2]}))([pa.record_batch({"n": [2]}), pa.record_batch({"n": [1]})])
    >>> equal_table(pa.table({"n": [1, 2]}))([pa.record_batch({"n": [2, 3]})])
    Traceback (most recent call last):
    apache_beam.testing.util.BeamAssertException: tables differ:
      rows missing (1): {'n': 1}
      rows not expected (1): {'n': 3}

    Args:
        expected: a ``pyarrow.Table``, a record batch, or a list of record batches.
        ordered: also compare the order of rows. A pipeline keeps no order between batches.
    """
    wanted = _as_table(expected)

    def matches(actual: Iterable[pa.RecordBatch]) -> None:
        batches = list(actual)
        differences = _differing_batches(batches, wanted.schema)
        if not differences:
            found = pa.Table.from_batches(batches, wanted.schema).to_pylist()
            differences = _differing_rows(found, wanted.to_pylist(), ordered)
        if differences:
            raise BeamAssertException("\n  ".join(["tables differ:", *differences]))

    return matches


def _as_table(expected: Any) -> pa.Table:
    if isinstance(expected, pa.Table):
        return expected
    return pa.Table.from_batches([expected] if isinstance(expected, pa.RecordBatch) else expected)


def _differing_batches(batches: list[pa.RecordBatch], wanted: pa.Schema) -> list[str]:
    """Return the differences of the first batch that has other columns."""
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            return [f"found an element of type {type(batch).__name__}, expected pyarrow.RecordBatch"]
        if batch.schema.equals(wanted):
            continue
        found, expected = _columns(batch.schema), _columns(wanted)
        if dict(found) == dict(expected):
            return [f"columns in another order: found {list(dict(found))}, expected {list(dict(expected))}"]
        return [
            *(f"column missing: {name}: {kind}" for name, kind in expected if name not in dict(found)),
            *(f"column not expected: {name}: {kind}" for name, kind in found if name not in dict(expected)),
            *(
                f"column {name}: found {kind}, expected {dict(expected)[name]}"
                for name, kind in found
                if dict(expected).get(name, kind) != kind
            ),
        ]
    return []


def _columns(schema: pa.Schema) -> list[tuple[str, str]]:
    return [(field.name, f"{field.type}{'' if field.nullable else ' not null'}") for field in schema]


def _differing_rows(found: list[Any], expected: list[Any], ordered: bool) -> list[str]:
    if ordered:
        for at, (row, wanted) in enumerate(zip(found, expected, strict=False)):
            if repr(row) != repr(wanted):
                return [f"row {at}: found {row}, expected {wanted}"]
        return [] if len(found) == len(expected) else [f"found {len(found)} rows, expected {len(expected)}"]
    have, want = Counter(map(repr, found)), Counter(map(repr, expected))
    return [*_listed("rows missing", want - have), *_listed("rows not expected", have - want)]


def _listed(what: str, rows: Counter[str]) -> list[str]:
    if not rows:
        return []
    some = list(rows.elements())
    more = "; …" if len(some) > _SHOWN_ROWS else ""
    return [f"{what} ({len(some)}): {'; '.join(some[:_SHOWN_ROWS])}{more}"]
