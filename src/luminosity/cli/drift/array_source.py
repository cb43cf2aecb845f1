"""A sample in files of NumPy."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from luminosity.errors import DriftError

__all__ = ["Arrays", "only_arrays_in"]

_ROWS_AT_ONCE = 1 << 16
_AS_THEY_ARE = ("float32", "float64")


class Arrays:
    """Files of NumPy, mapped into memory."""

    columns: tuple[str, ...] = ()

    def __init__(self, pattern: str) -> None:
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise DriftError(f"no file matches {pattern}; the current folder is {os.getcwd()}")
        self._files = [(path, _mapped(path)) for path in paths]
        widths = {array.shape[1] for _, array in self._files}
        if len(widths) > 1:
            told = ", ".join(f"{path} has {array.shape[1]}" for path, array in self._files[:5])
            raise DriftError(f"{pattern}: the files have rows of different widths ({told})")

    def pieces(self) -> Iterator[tuple[Any, Any, str, int]]:
        for path, array in self._files:
            for first in range(0, len(array), _ROWS_AT_ONCE):
                rows = np.asarray(array[first : first + _ROWS_AT_ONCE])
                rows = rows if rows.dtype.name in _AS_THEY_ARE else rows.astype(_wide(rows.dtype))
                yield rows, np.zeros(len(rows), bool), path, first

    def whole(self) -> Any | None:
        """The file itself, as long as nobody writes it anew: that would end this process."""
        array = self._files[0][1]
        return np.asarray(array) if len(self._files) == 1 and array.dtype.name in _AS_THEY_ARE else None

    def details(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        starts = np.cumsum([0, *(len(array) for _, array in self._files)])
        at = np.searchsorted(starts, numbers, side="right") - 1
        names = [{"file": os.path.basename(path)} if len(self._files) > 1 else {} for path, _ in self._files]
        return [
            {**names[index], "row": int(number - starts[index]), **_own(self._files[index][1][number - starts[index]])}
            for index, number in zip(at, numbers, strict=True)
        ]


def only_arrays_in(folder: str) -> bool:
    """Whether somebody names a folder, as they may for tables, and arrays are all that there is."""
    if not os.path.isdir(folder):
        return False
    names = [name for name in os.listdir(folder) if not name.startswith((".", "_"))]
    return bool(names) and all(name.lower().endswith(".npy") for name in names)


def _mapped(path: str) -> Any:
    if os.path.isdir(path):
        raise DriftError(f"{path} is a folder, expected a file of NumPy; a pattern in quotes names several of them")
    try:
        # np.load() would take a file of another kind for a pickle. This knows arrays alone, and unpickles nothing.
        array: Any = np.lib.format.open_memmap(path, mode="r")
    except (OSError, EOFError, ValueError) as error:
        raise DriftError(f"{path}: can't be read as an array of NumPy; {_likely(error)}") from None
    if array.dtype.kind not in "fiub":
        raise DriftError(f"{path}: holds {array.dtype}, expected real numbers")
    if array.ndim not in (1, 2):
        perhaps = "; perhaps these are the vectors of each token: take their mean" if array.ndim == 3 else ""
        raise DriftError(f"{path}: has {array.ndim} dimensions {array.shape}, expected 2: one row per example{perhaps}")
    return array[:, None] if array.ndim == 1 else array


def _likely(error: Exception) -> str:
    said = " ".join(str(error).split())
    if isinstance(error, PermissionError):
        return f"this user may not read it ({said})"
    if "Python objects" in said:
        return "it holds Python objects, which are not unpickled, since that could run anything; expected numbers"
    if "mmap length" in said:
        return "it is cut off: its header tells of more rows than there are"
    return f"it is damaged, cut off, or something else under that name ({said})"


def _own(row: Any) -> dict[str, Any]:
    """An array says nothing else about a row than its numbers."""
    values = [float(value) for value in row]
    return {"value": values[0]} if len(values) == 1 else {"numbers": values}


def _wide(dtype: Any) -> Any:
    return np.float32 if dtype == np.float16 else np.float64
