"""Rows as half-precision numbers whose matrix product, kept in single precision, is the exponent of the kernel.

With rows scaled to ``z``, the RBF kernel is ``2 ** (z·z' - |z|²/2 - |z'|²/2)``. Each norm is put into three more
columns, its leading digits and what they leave, against ones on the other side: the product is then the whole
exponent, and nothing is left to do for each pair but the power. The norms are those of the rounded rows: rounding moves
each row by less than a thousandth of its length, whichever sample it is from, and from there on all is exact.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FARTHEST", "NORM_COLUMNS", "as_halves"]

NORM_COLUMNS = 6
FARTHEST = 60_000.0  # half of |z|², and within half precision: nothing is similar to such a row
_PIECES = 3  # of 11 bits each: more than single precision has


def as_halves(z: Any, real: Any, width: int) -> tuple[Any, Any, Any]:
    """Two matrices of ``width`` columns, for the left and the right of a product, and which rows are like themselves.

    Rows that are not real, or are too far away to be like any other, have a kernel of zero with all.
    """
    import jax.numpy as jnp

    near = real & (jnp.sum(z * z, axis=1) < FARTHEST)
    rounded = jnp.where(near[:, None], z, 0).astype(jnp.float16)
    norms = -0.5 * jnp.sum(rounded.astype(jnp.float32) ** 2, axis=1)
    pieces = _pieces(jnp.where(near, norms, -FARTHEST))
    ones = jnp.ones((len(z), _PIECES), jnp.float16)

    def filled(*parts: Any) -> Any:
        columns = jnp.concatenate(parts, axis=1)
        return jnp.pad(columns, ((0, 0), (0, width - columns.shape[1])))

    return filled(rounded, pieces, ones), filled(rounded, ones, pieces), near


def _pieces(numbers: Any) -> Any:
    import jax.numpy as jnp

    found: list[Any] = []
    for _ in range(_PIECES):
        found.append(numbers.astype(jnp.float16))
        numbers = numbers - found[-1].astype(jnp.float32)
    return jnp.stack(found, axis=1)
