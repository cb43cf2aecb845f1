"""Tables and rows in YAML: ours and Beam's transforms each get the form that they work with.

Transforms of Luminosity work with tables (``pyarrow.RecordBatch`` elements), Beam's own with rows that have a schema. A
YAML file does not say which is which, so inputs are converted where the two meet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.pvalue import PBegin
from apache_beam.typehints.row_type import RowTypeConstraint

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import InvalidArgument
from luminosity.tables.rows import RowsFromTable, TableFromRows
from luminosity.tables.types import fields_of, row_hint

__all__ = [
    "Fields",
    "OnTable",
    "as_rows",
    "as_table",
    "current_and_reference",
    "fields_of_table",
    "needs_columns",
    "remember_fields",
]

Fields = Mapping[str, pa.DataType | None]
"""The columns of a table. None stands for a type that is known only when the pipeline runs."""

# A pipeline that is no longer used takes its collections with it.
_FIELDS: weakref.WeakKeyDictionary[Any, Fields] = weakref.WeakKeyDictionary()
_ROWS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class OnTable(beam.PTransform[Any, Any]):
    """Applies a transform of Luminosity to tables, or to rows, which it gathers into a table first.

    Args:
        inner: the transform.
        check: gets the columns of the input, if they are known; raises if some are missing.
        finish: gets the result and the columns of the input, None if they are not known. It notes the columns of the
            result, and returns it in a form that other transforms of a YAML file can take.
    """

    def __init__(
        self,
        inner: beam.PTransform[Any, Any],
        finish: Callable[[Any, Fields | None], Any] | None = None,
        check: Callable[[Fields], None] | None = None,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._check = check
        self._finish = finish

    def with_resource_hints(self, **kwargs: Any) -> OnTable:
        """Give the hints to the transform itself, which knows which of its steps they are for."""
        self._inner = self._inner.with_resource_hints(**kwargs)
        return self

    def default_label(self) -> str:
        """Return the label of the transform itself."""
        return self._inner.label

    def expand(self, input_or_inputs: Any) -> Any:
        """Convert the input, apply the transform, and finish its result."""
        is_root = isinstance(input_or_inputs, PBegin)
        table = input_or_inputs if is_root else as_table(input_or_inputs)
        fields = None if is_root else fields_of_table(table)
        if self._check is not None and fields is not None:
            self._check(fields)
        result = table | self._inner
        return result if self._finish is None else self._finish(result, fields)


def as_table(pcoll: Any, label: str = "Table") -> Any:
    """Return a collection as a table: unchanged, or its rows gathered into record batches."""
    if _is_table(pcoll):
        return pcoll
    return remember_fields(pcoll | label >> TableFromRows(), fields_of(pcoll.element_type))


def as_rows(pcoll: Any, label: Callable[[], str]) -> Any:
    """Return a collection unchanged, or the rows of a table, with a schema as far as its columns are known.

    A table becomes rows once, however many transforms take them. ``label`` names the step that does it.
    """
    if not _is_table(pcoll):
        return pcoll
    if pcoll not in _ROWS:
        _ROWS[pcoll] = _rows(pcoll, label())
    return _ROWS[pcoll]


def _rows(pcoll: Any, label: str) -> Any:
    fields = fields_of_table(pcoll)
    if fields is None:
        return pcoll | label >> RowsFromTable(beam.Row)
    known = {name: kind for name, kind in fields.items() if kind is not None}
    if len(known) == len(fields):
        return pcoll | label >> RowsFromTable(beam.Row, schema=pa.schema(list(known.items())))
    rows = pcoll | label >> RowsFromTable(beam.Row)
    hints = dict(row_hint(pa.schema(list(known.items())))._fields)
    rows.element_type = RowTypeConstraint.from_fields([(name, hints.get(name, Any)) for name in fields])
    return rows


def _is_table(pcoll: Any) -> bool:
    return pcoll.element_type is pa.RecordBatch or pcoll in _FIELDS  # Beam forgets the types of several outputs


def fields_of_table(table: Any) -> Fields | None:
    """Return the columns of a table, or None if they are not known before the pipeline runs."""
    return _FIELDS.get(table)


def remember_fields(table: Any, fields: Fields | None) -> Any:
    """Note the columns of a table, if they are known, for the transforms that take it; return the table."""
    if fields is not None:
        _FIELDS[table] = dict(fields)
    return table


def current_and_reference(inputs: Any, reference: str | None) -> tuple[Any, Any]:
    """Return the table to compare, and what it is compared with: a table, or the path in ``reference``.

    The reference is an option of a step, or its input named ``reference``. Raises if it is neither or both.
    """
    current, found = inputs, reference
    if isinstance(inputs, Mapping):
        named = dict(inputs)
        if set(named) != {"current", "reference"}:
            raise InvalidArgument(f"found the inputs {', '.join(named)}, expected current and reference")
        found, current = as_table(named["reference"], "Reference"), named["current"]
    if found is None or (reference is not None and found is not reference):
        raise InvalidArgument("expected either reference: a path, or an input named reference")
    return as_table(current), found


def needs_columns(*names: str) -> Callable[[Fields], None]:
    """Return a function that raises if a table lacks one of these columns."""

    def check(fields: Fields) -> None:
        for name in names:
            if name not in fields:
                raise InvalidArgument(
                    f"there is no column {name!r}, expected one of {list_some(fields, 20)}",
                    fix=did_you_mean(name, fields) or None,
                )

    return check
