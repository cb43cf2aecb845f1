"""A number near the mean of each kernel, to be subtracted from its values before they are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from luminosity.drift.kernels import Kernel

__all__ = ["kernel_offsets"]

_ROWS = 256


def kernel_offsets(kernels: Sequence[Kernel], sample: Any) -> list[float]:
    """From the first rows of the sample. Rounded, so that the last digits of a machine's arithmetic change nothing."""
    rows = np.asarray(sample, dtype=np.float32)[:_ROWS]
    different = ~np.eye(len(rows), dtype=bool)
    filled = np.pad(rows, ((0, _ROWS - len(rows)), (0, 0)), mode="edge")  # Of any other size it were compiled anew.
    here = slice(len(rows))
    return [float(f"{np.asarray(_values(kernel, filled))[here, here][different].mean():.2g}") for kernel in kernels]


def _values(kernel: Kernel, rows: Any) -> Any:
    import jax.numpy as jnp

    held = jnp.asarray(rows)
    return kernel.form().values(kernel.parameters(), held, held)
