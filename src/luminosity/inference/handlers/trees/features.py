"""The features of a model of trees: their names, order and categories, and the matrix of numbers that it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import InvalidArgument, InvalidType

__all__ = ["Features"]

_SHOWN = 10  # names or categories in a message
_SUGGESTIONS = 3


@dataclass(frozen=True)
class Features:
    """What a model's file says about its inputs.

    ``names`` is None if it was trained on a matrix. ``categories`` has the features that are categories: their values
    in the order of their codes, or None if the file has only codes.
    """

    count: int
    names: tuple[str, ...] | None
    categories: Mapping[str, tuple[Any, ...] | None]

    def check(self, kind: pa.DataType, model: str) -> None:
        """Raise ``InvalidType`` unless rows of this type have all features, with values that the model takes."""
        if not pa.types.is_struct(kind):
            raise InvalidType(f"found {kind}, expected columns by name, which are the features of {model}")
        there = {field.name: field.type for field in kind}
        if self.names is None and len(there) != self.count:
            raise InvalidType(f"found {len(there)} columns, expected {self.count}, the features of {model}")
        for name in self.names or ():
            if name not in there:
                raise InvalidType(
                    f"the feature {name!r} of {model} is missing; found {list_some(there, _SHOWN)}",
                    fix=did_you_mean(name, there, most=_SUGGESTIONS) or f"name the column {name!r}, too",
                )
        for name in self.names or there:
            self._check_kind(name, there[name], model)

    def _check_kind(self, name: str, kind: pa.DataType, model: str) -> None:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if name in self.categories:
            values = self.categories[name]
            if values is None and not pa.types.is_integer(kind):
                raise InvalidType(
                    f"the feature {name!r} of {model} is a category, of which its file has only the codes; found "
                    f"{kind}",
                    fix=f"pass categories={{{name!r}: [...]}}, the values in the order of their codes",
                )
            if values and isinstance(values[0], str) != _is_text(kind):
                raise InvalidType(
                    f"the feature {name!r} of {model} is a category such as {values[0]!r}, found a column of {kind}"
                )
        elif not _is_number(kind):
            raise InvalidType(f"the feature {name!r} of {model} is a number, found a column of {kind}")

    def matrix(self, rows: Any, dtype: Any, *, new_are_missing: bool) -> npt.NDArray[Any]:
        """Return columns by name, or a matrix, as the matrix that the model takes; missing values are NaN.

        A category that the model does not know is missing, too, or an error.
        """
        if not isinstance(rows, pa.RecordBatch):
            found = np.asarray(rows, dtype)
            if found.ndim != 2 or found.shape[1] != self.count:
                raise InvalidArgument(f"found examples of the shape {found.shape[1:]}, expected {self.count} numbers")
            return found
        names = rows.schema.names if self.names is None else self.names
        matrix = np.empty((rows.num_rows, len(names)), dtype)
        for place, name in enumerate(names):
            column = rows.column(name)
            column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
            values = self.categories.get(name)
            if values is not None:
                column = _codes(name, column, values, new_are_missing)
            matrix[:, place] = _numbers(column)
        return matrix


def _codes(name: str, column: Any, values: Sequence[Any], new_are_missing: bool) -> Any:
    known = pa.array(values)
    column = column.cast(known.type)
    codes = pyarrow.compute.call_function("index_in", [column], pyarrow.compute.SetLookupOptions(known))
    if not new_are_missing and codes.null_count > column.null_count:
        new = pyarrow.compute.call_function("and", [codes.is_null(), column.is_valid()])
        raise InvalidArgument(
            f"found {column.filter(new)[0].as_py()!r} in {name!r}, expected one of "
            f"{list_some(map(repr, values), _SHOWN)}, the categories that the model was trained on"
        )
    return codes


def _numbers(column: Any) -> npt.NDArray[Any]:
    numbers = column.cast(pa.float64(), safe=False)
    return (numbers.fill_null(float("nan")) if numbers.null_count else numbers).to_numpy(zero_copy_only=False)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)
