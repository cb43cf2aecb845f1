"""The same sums from whole matrix products, for devices that the fused kernel does not run on."""

from __future__ import annotations

from typing import Any

__all__ = ["plain_pairs"]

_MOST_VALUES = 1 << 29  # of a strip: they go through the device's memory


def plain_pairs(left: Any, right: Any, real: Any, offset: Any, first: Any, second: Any, bin_rows: int) -> Any:
    """As ``fused_pairs``, in wider strips."""
    import jax
    import jax.numpy as jnp

    most = min(bin_rows, max(1, _MOST_VALUES // bin_rows))
    strip = max(rows for rows in range(1, most + 1) if bin_rows % rows == 0)

    def sums(start: Any, other: Any) -> Any:
        x = jax.lax.dynamic_slice_in_dim(left, start, strip)
        y = jax.lax.dynamic_slice_in_dim(right, other * bin_rows, bin_rows)
        values = jnp.exp2(jnp.matmul(x, y.T, preferred_element_type=jnp.float32)) - offset
        return jnp.sum(values.sum(axis=1) * jax.lax.dynamic_slice_in_dim(real, start, strip))

    def of_pair(pair: Any) -> Any:
        starts = pair[0] * bin_rows + jnp.arange(bin_rows // strip) * strip
        return jax.lax.map(lambda start: sums(start, pair[1]), starts)

    return jax.lax.map(of_pair, (first, second))
