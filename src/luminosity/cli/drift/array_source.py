"""Rows of numbers in NumPy files, for ``lum drift``."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from luminosity.drift.rows import as_floats
from luminosity.errors import DriftError

__all__ = ["ArraySource", "has_only_arrays"]

_ROWS_AT_ONCE = 1 << 16
_FLOATS = ("float32", "float64")  # types that rows are compared in; others are converted
_SHOWN_FILES = 5  # files in a message


class ArraySource:
    """The rows of one or many NumPy files, mapped into memory."""

    columns: tuple[str, ...] = ()

    def __init__(self, pattern: str) -> None:
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise DriftError(f"no file matches {pattern}; the current folder is {os.getcwd()}")
        self._files = [(path, _mapped(path)) for path in paths]
        widths = {array.shape[1] for _, array in self._files}
        if len(widths) > 1:
            found = ", ".join(f"{path} has {array.shape[1]}" for path, array in self._files[:_SHOWN_FILES])
            raise DriftError(f"{pattern}: found files with rows of different widths ({found}), expected one width")

    def pieces(self) -> Iterator[tuple[Any, Any, str, int]]:
        """Yield rows, a mask of null rows (there are none), their file, and the number of the first row in it."""
        for path, array in self._files:
            for first in range(0, len(array), _ROWS_AT_ONCE):
                rows = as_floats(np.asarray(array[first : first + _ROWS_AT_ONCE]))
                yield rows, np.zeros(len(rows), bool), path, first

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as record batches, whose columns are named by their positions."""
        for rows, _, _, _ in self.pieces():
            columns = {str(at): np.ascontiguousarray(column) for at, column in enumerate(rows.T)}
            yield pa.RecordBatch.from_pydict(columns)

    def whole(self) -> Any | None:
        """Return the mapped array of a single file. If the file is overwritten meanwhile, the process is killed."""
        array = self._files[0][1]
        return np.asarray(array) if len(self._files) == 1 and array.dtype.name in _FLOATS else None

    def details(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return the file, the position and the numbers of each row."""
        starts = np.cumsum([0, *(len(array) for _, array in self._files)])
        at = np.searchsorted(starts, numbers, side="right") - 1
        names = [{"file": os.path.basename(path)} if len(self._files) > 1 else {} for path, _ in self._files]
        return [
            {**names[index], "row": int(number - starts[index]), **_own(self._files[index][1][number - starts[index]])}
            for index, number in zip(at, numbers, strict=True)
        ]


def has_only_arrays(folder: str) -> bool:
    """Return whether the path is a folder in which all files are NumPy arrays."""
    if not os.path.isdir(folder):
        return False
    names = [name for name in os.listdir(folder) if not name.startswith((".", "_"))]
    return bool(names) and all(name.lower().endswith(".npy") for name in names)


def _mapped(path: str) -> Any:
    if os.path.isdir(path):
        raise DriftError(f"{path} is a folder, expected a NumPy file", fix="use a quoted pattern for several files")
    try:
        # np.load() takes a file of another kind for a pickle. This function knows only arrays, and unpickles nothing.
        array: Any = np.lib.format.open_memmap(path, mode="r")
    except (OSError, EOFError, ValueError) as error:
        raise DriftError(f"{path}: can't be read as a NumPy array; {_likely_cause(error)}") from None
    if array.dtype.kind not in "fiub":
        raise DriftError(f"{path}: holds {array.dtype}, expected real numbers")
    if array.ndim not in (1, 2):
        raise DriftError(
            f"{path}: has {array.ndim} dimensions {array.shape}, expected 2: one row per example",
            fix="if these are the vectors of each token, take their mean" if array.ndim == 3 else None,
        )
    return array[:, None] if array.ndim == 1 else array


def _likely_cause(error: Exception) -> str:
    said = " ".join(str(error).split())
    if isinstance(error, PermissionError):
        return f"this user may not read it ({said})"
    if "Python objects" in said:
        return "it holds Python objects, which are not unpickled because that could run any code; expected numbers"
    if "mmap length" in said:
        return "it is cut off: its header announces more rows than there are"
    return f"it is damaged, cut off, or not a NumPy file ({said})"


def _own(row: Any) -> dict[str, Any]:
    """Return a row's numbers: an array knows nothing else about a row."""
    values = [float(value) for value in row]
    return {"value": values[0]} if len(values) == 1 else {"numbers": values}
