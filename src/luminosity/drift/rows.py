"""What users hand over, as rows of numbers that can be compared, or an error that says why not."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

from luminosity.errors import DriftError
from luminosity.extras import require

__all__ = [
    "Precision",
    "Rows",
    "as_floats",
    "as_rows",
    "check_precision",
    "check_seed",
    "double_precision",
    "is_number",
    "is_whole",
    "same_width",
]


Rows: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[Any]]"
Precision: TypeAlias = Literal["float32", "float64"]


def as_rows(values: Any, name: str, least: int = 2) -> Rows:
    """A matrix with one row per example; a list of numbers is a matrix with one column.

    >>> as_rows([1, 2, 3], "x").shape
    (3, 1)
    """
    try:
        rows = np.ma.filled(values, np.nan) if _has_masked(values) else np.asarray(values)
        if rows.dtype == object and rows.ndim == 1 and len(rows) and np.ndim(rows[0]) == 1:
            rows = np.stack([np.asarray(row) for row in rows])  # a column of a table
    except ValueError as error:
        raise DriftError(
            f"{name} is no matrix ({error}). Expected rows of one width; perhaps some are shorter, or missing."
        ) from None
    if not is_number(rows.dtype):
        raise DriftError(f"{name} holds {rows.dtype}, expected numbers. For other things use a BlockKernel.")
    rows = rows[:, None] if rows.ndim == 1 else rows
    if rows.ndim != 2:
        raise DriftError(f"{name} has {rows.ndim} dimensions ({rows.shape}), expected 2: one row per example.")
    if len(rows) < least:
        raise DriftError(
            f"{name} has {_count(len(rows))}, expected at least {least}: the estimate takes pairs of rows."
        )
    if rows.shape[1] == 0:
        raise DriftError(f"{name} has rows without any numbers in them.")
    rows = as_floats(rows)
    check_finite(rows, name)
    return rows


def is_number(dtype: Any) -> bool:
    return dtype.kind in "fiub" or dtype.name == "bfloat16"


def as_floats(numbers: Any) -> Any:
    """In single or double precision, whichever holds all of their digits."""
    if numbers.dtype.name in ("float32", "float64"):
        return numbers
    return numbers.astype(np.float32 if numbers.dtype.name in ("float16", "bfloat16") else np.float64)


def _has_masked(values: Any) -> bool:
    """NumPy would take what lies under the mask: some number that is not there."""
    return isinstance(values, np.ma.MaskedArray) and bool(np.ma.getmaskarray(values).any())


def check_finite(rows: Rows, name: str) -> None:
    with np.errstate(all="ignore"):
        if np.isfinite(rows.sum()):
            return  # A single number that is not finite would show in the sum, which takes a tenth of the time.
    bad = ~np.isfinite(rows).all(axis=1)
    if bad.any():
        first = int(bad.argmax())
        raise DriftError(
            f"{name} has {_count(int(bad.sum()))} with NaN or infinity, the first at {first}. "
            "Leave such rows out, or fill them in, before they are compared."
        )


def same_width(reference: Rows, current: Rows) -> None:
    if reference.shape[1] != current.shape[1]:
        raise DriftError(
            f"The reference has rows of {reference.shape[1]} numbers, the current sample of {current.shape[1]}. "
            "Expected one width; perhaps they come from different models."
        )


def is_whole(number: Any) -> bool:
    return isinstance(number, (int, np.integer))


def check_seed(seed: int) -> None:
    if not is_whole(seed) or seed < 0:
        raise DriftError(f"Found seed={seed!r}, expected a whole number from 0 on.")


def check_precision(precision: str) -> None:
    if precision not in ("float32", "float64"):
        raise DriftError(f"Found precision={precision!r}, expected 'float32' or 'float64'.")


def _count(rows: int) -> str:
    return "no rows" if rows == 0 else "one row" if rows == 1 else f"{rows:,} rows"


def double_precision(dtype: Any) -> Any:
    """JAX computes in single precision unless told otherwise; here for this thread, in a ``with`` statement."""
    jax = require("jax", "jax")
    if not hasattr(jax, "enable_x64"):  # before JAX 0.8
        jax = require("jax.experimental", "jax")
    return jax.enable_x64(np.dtype(dtype) == np.float64)
