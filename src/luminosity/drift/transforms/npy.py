"""Rows of an array in a `.npy` file, some at a time: `np.load` would hold all of them, and the file's bytes beside."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from luminosity.drift.rows import is_number
from luminosity.errors import DriftError

__all__ = ["npy_rows"]

_HEADERS: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,  # There is a third, for arrays of records alone.
}


def npy_rows(path: str, file: Any, at_once: int) -> Iterator[Any]:
    """Nothing is unpickled: an array of objects is refused."""
    shape, in_columns, dtype = _header(path, file)
    if not is_number(dtype):
        what = "Python objects, which are not unpickled" if dtype.hasobject else str(dtype)
        raise DriftError(f"The array in {path} holds {what}, expected numbers.")
    if len(shape) not in (1, 2):
        raise DriftError(f"The array in {path} has {len(shape)} dimensions, expected 2: one row per example.")
    count, width = shape[0], math.prod(shape[1:])
    step = max(1, count) if in_columns else at_once  # All columns are needed for a row.
    for start in range(0, count, step):
        here = min(step, count - start)
        data = file.read(here * width * dtype.itemsize)
        if len(data) < here * width * dtype.itemsize:
            raise DriftError(f"Can't read {path} as an array: it is cut off, its header tells of {count:,} rows.")
        flat = np.frombuffer(data, dtype) if data else np.empty(0, dtype)
        rows = flat.reshape((here, width), order="F" if in_columns else "C")
        yield from (rows[first : first + at_once] for first in range(0, here, at_once))


def _header(path: str, file: Any) -> tuple[tuple[int, ...], bool, Any]:
    try:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"it is of version {version[0]}.{version[1]}")
        return _HEADERS[version](file)
    except ValueError as error:
        raise DriftError(f"Can't read {path} as an array: {' '.join(str(error).split())}") from error
