"""A number near the mean of each kernel, to be subtracted from its values before they are summed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from luminosity.drift.kernels import Kernel
from luminosity.drift.precision import double_precision

__all__ = ["kernel_offsets"]

_ROWS = 256


def kernel_offsets(kernels: Sequence[Kernel], sample: Any) -> list[float]:
    """From the first rows of the sample. Rounded, so that the last digits of a machine's arithmetic change nothing."""
    with np.errstate(over="ignore", invalid="ignore"):
        rows = np.asarray(sample, dtype=np.float32)[:_ROWS]
        different = ~np.eye(len(rows), dtype=bool)
        filled = np.pad(rows, ((0, _ROWS - len(rows)), (0, 0)), mode="edge")  # Any other size would be compiled anew.
        here = np.ix_(*[range(len(rows))] * 2)
        return [_rounded(_values(kernel, filled)[here][different].mean(dtype=np.float64)) for kernel in kernels]


def _rounded(mean: Any) -> float:
    """Where single precision is not enough for the kernel, nothing is subtracted: any number would do."""
    return float(f"{mean:.2g}") if np.isfinite(mean) else 0.0


def _values(kernel: Kernel, rows: Any) -> Any:
    with double_precision(rows.dtype):
        return np.asarray(_compiled(kernel.form())(kernel.parameters(), rows, rows))


@lru_cache(maxsize=64)
def _compiled(form: Kernel) -> Any:
    import jax

    return jax.jit(form.values)
