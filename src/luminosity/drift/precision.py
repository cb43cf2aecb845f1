"""Single or double precision, for as long as it is needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from luminosity.extras import require

__all__ = ["double_precision"]


def double_precision(dtype: Any) -> Any:
    """JAX computes in single precision unless told otherwise; here for this thread, in a ``with`` statement."""
    jax = require("jax", "jax")
    if not hasattr(jax, "enable_x64"):  # before JAX 0.8
        jax = require("jax.experimental", "jax")
    return jax.enable_x64(np.dtype(dtype) == np.float64)
