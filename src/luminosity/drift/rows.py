"""Checks what users pass as samples, seeds and precisions, and turns samples into matrices of numbers."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

from luminosity.errors import DriftError, Fix
from luminosity.extras import require

__all__ = [
    "Precision",
    "Rows",
    "as_floats",
    "as_rows",
    "check_precision",
    "check_seed",
    "double_precision",
    "has_same_rows",
    "is_number",
    "is_whole",
    "same_width",
]

Rows: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[Any]]"
Precision: TypeAlias = Literal["float32", "float64"]


def as_rows(values: Any, name: str, least: int = 2, *, finite: bool = True) -> Rows:
    """Return a matrix with one row per example. A list of numbers becomes a matrix with one column.

    Errors call the matrix ``name``. Fewer than ``least`` rows are an error, and so are NaN and infinity unless
    ``finite`` is false.

    >>> as_rows([1, 2, 3], "x").shape
    (3, 1)
    """
    try:
        rows = np.ma.filled(values, np.nan) if _has_masked(values) else np.asarray(values)
        if rows.dtype == object and rows.ndim == 1 and len(rows) and np.ndim(rows[0]) == 1:
            rows = np.stack([np.asarray(row) for row in rows])  # a table's column of vectors
    except ValueError as error:
        raise DriftError(
            f"{name} is not a matrix ({error}), expected rows of one width; perhaps some are shorter, or missing"
        ) from None
    if not is_number(rows.dtype):
        raise DriftError(
            f"{name} holds {rows.dtype}, expected numbers",
            fix=Fix("pass a BlockKernel to compare things that are not numbers"),
        )
    rows = rows[:, None] if rows.ndim == 1 else rows
    if rows.ndim != 2:
        raise DriftError(f"{name} has {rows.ndim} dimensions ({rows.shape}), expected 2: one row per example")
    if len(rows) < least:
        raise DriftError(f"{name} has {_count(len(rows))}, expected at least {least}: the estimate takes pairs of rows")
    if rows.shape[1] == 0:
        raise DriftError(f"{name} has rows without numbers, expected at least one number per row")
    rows = as_floats(rows)
    if finite:
        _check_finite(rows, name)
    return rows


def is_number(dtype: Any) -> bool:
    """Return whether arrays of this type hold real numbers."""
    return dtype.kind in "fiub" or dtype.name == "bfloat16"


def as_floats(numbers: Any) -> Any:
    """Return the numbers in single or double precision, whichever keeps all of their digits."""
    if numbers.dtype.name in ("float32", "float64"):
        return numbers
    return numbers.astype(np.float32 if numbers.dtype.name in ("float16", "bfloat16") else np.float64)


def _has_masked(values: Any) -> bool:
    """Return whether numbers are masked: ``np.asarray`` would return whatever lies under the mask."""
    return isinstance(values, np.ma.MaskedArray) and bool(np.ma.getmaskarray(values).any())


def _check_finite(rows: Rows, name: str) -> None:
    with np.errstate(all="ignore"):
        if np.isfinite(rows.sum()):
            return  # A number that is not finite shows in the sum, which takes a tenth of the time.
    bad = ~np.isfinite(rows).all(axis=1)
    if bad.any():
        raise DriftError(
            f"{name} has {_count(int(bad.sum()))} with NaN or infinity, the first at {int(bad.argmax())}, "
            "expected finite numbers",
            fix=Fix("leave these rows out, or fill them in", command="add --skip-missing to leave these rows out"),
        )


def same_width(reference: Rows, current: Rows) -> None:
    """Raise an error unless the rows of both samples have equally many numbers."""
    if reference.shape[1] != current.shape[1]:
        raise DriftError(
            f"the reference has rows of {reference.shape[1]} numbers, the current sample of {current.shape[1]}, "
            "expected one width; perhaps they come from different models"
        )


def has_same_rows(reference: Any, current: Any) -> bool:
    """Return whether both samples hold the same rows, in whatever order. It is false for things that are not rows.

    >>> has_same_rows(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[3.0, 4.0], [1.0, 2.0]]))
    True
    """
    if not (isinstance(reference, np.ndarray) and isinstance(current, np.ndarray)):
        return False
    if reference.shape != current.shape or reference.dtype != current.dtype or reference.ndim != 2:
        return False
    if np.array_equal(reference, current):
        return True
    # Compare one column first, which sorts quickly and nearly always differs.
    if not np.array_equal(np.sort(reference[:, 0]), np.sort(current[:, 0])):
        return False
    return all(
        np.array_equal(*pair)
        for pair in zip(*(np.unique(each, axis=0, return_counts=True) for each in (reference, current)), strict=True)
    )


def is_whole(number: Any) -> bool:
    """Return whether the value is an integer of Python or NumPy."""
    return isinstance(number, (int, np.integer))


def check_seed(seed: int) -> None:
    """Raise an error unless the seed is a whole number from 0 on."""
    if not is_whole(seed) or seed < 0:
        raise DriftError(f"found seed={seed!r}, expected a whole number from 0 on")


def check_precision(precision: str) -> None:
    """Raise an error unless the precision is ``'float32'`` or ``'float64'``."""
    if precision not in ("float32", "float64"):
        raise DriftError(f"found precision={precision!r}, expected 'float32' or 'float64'")


def double_precision(dtype: Any) -> Any:
    """Return a context in which JAX computes in double precision if ``dtype`` is float64, in single otherwise.

    The context applies to the current thread.
    """
    jax = require("jax", "jax")
    if not hasattr(jax, "enable_x64"):  # before JAX 0.8
        jax = require("jax.experimental", "jax")
    return jax.enable_x64(np.dtype(dtype) == np.float64)


def _count(rows: int) -> str:
    return "no rows" if rows == 0 else "one row" if rows == 1 else f"{rows:,} rows"
